"""Reads SASS as nvdisasm prints it, and counts what decides about a kernel's speed."""
import re, subprocess

INSTRUCTION = re.compile(r'/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);')
FUNCTION = re.compile(r'^\.text\.(\S+):$')
REGISTER = re.compile(r'\bR(\d+)\b')
WORDS = {'64': 2, '128': 4, '256': 8}


class Instruction:
    def __init__(self, name, operands):
        self.name, self.parts = name, name.split('.')
        self.op = self.parts[0]
        self.operands = [o.strip() for o in operands.split(',')] if operands.strip() else []

    def words(self):
        return next((WORDS[p] for p in self.parts if p in WORDS), 1)

    def registers(self, operands):
        """Registers named in operands; an address of 64 bits has two."""
        out = set()
        for o in operands:
            for r in REGISTER.findall(o):
                out.add(int(r))
                if '.64' in o:
                    out.add(int(r) + 1)
        return out

    def loads_to(self):
        """Registers that a load from global memory writes."""
        first = REGISTER.search(self.operands[0]) if self.op == 'LDG' and self.operands else None
        return set(range(int(first.group(1)), int(first.group(1)) + self.words())) if first else set()


def functions(text):
    """{mangled name: [instructions]}"""
    out, now = {}, None
    for line in text.splitlines():
        begin = FUNCTION.match(line)
        if begin:
            now = out.setdefault(begin.group(1), [])
        found = INSTRUCTION.search(line)
        if found and now is not None:
            now.append(Instruction(found.group(1), found.group(2)))
    return out


def loads_in_flight(code):
    """(most loads of global memory that are in flight when the first of them is used, their bytes), in the order of the text."""
    waiting, best = [], (0, 0)  # (registers, bytes)
    for i in code:
        used = i.registers(i.operands[1:] if i.op == 'LDG' else i.operands)
        if any(used & registers for registers, _ in waiting):
            best = max(best, (len(waiting), sum(n for _, n in waiting)))
            last = max(k for k, (registers, _) in enumerate(waiting) if used & registers)
            waiting = waiting[last + 1:]  # loads come back in order
        if i.loads_to():
            waiting.append((i.loads_to(), 4 * i.words()))
    return best


def accumulators(i):
    """Registers of a wgmma's D: 64 x N over 128 threads."""
    shape = next(p for p in i.parts if p.startswith('64x'))
    first = REGISTER.search(i.operands[0])
    return set(range(int(first.group(1)), int(first.group(1)) + int(shape.split('x')[1]) // 2)) if first else set()


def is_wgmma(i):
    return i.op in ('HGMMA', 'QGMMA', 'IGMMA')


def wgmma_runs(code):
    """(how many wgmma, longest run of them without an instruction between that touches their accumulators, how often something does)"""
    n = run = longest = moves = 0
    sums, pending = set(), False
    for i in code:
        if is_wgmma(i):
            n += 1
            mine = accumulators(i)
            run = run + 1 if mine == sums or not sums else 1
            longest, sums, pending = max(longest, run), mine, True
        elif i.op == 'WARPGROUP' and 'DEPBAR' in i.parts:
            run, pending = 0, False
        elif pending and sums & i.registers(i.operands):
            moves, run, sums = moves + 1, 0, set()
    return n, longest, moves


def counts(code):
    def of(*names):
        return sum(i.op in names for i in code)

    n, longest, moves = wgmma_runs(code)
    flight, bytes_ = loads_in_flight(code)
    return dict(instructions=len(code), wgmma=n, wgmma_run=longest, wgmma_moves=moves, mma=of('HMMA', 'QMMA', 'IMMA'), ldg=of('LDG'), ldg_flight=flight,
                ldg_bytes=bytes_, cp_async=of('LDGSTS'), tma=of('UTMALDG', 'UBLKCP'), bar=of('BAR'), membar=of('MEMBAR'), atomics=of('ATOMG', 'ATOM', 'RED', 'REDG'),
                local=of('STL', 'LDL'))


def of_cubin(nvdisasm, path):
    r = subprocess.run([nvdisasm, '-c', path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if r.returncode:
        raise RuntimeError(f'nvdisasm: {r.stderr.strip()[-300:]}')
    return {name: counts(code) for name, code in functions(r.stdout).items()}
