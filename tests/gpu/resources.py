"""resources.py - compiles every kernel for every architecture and prints what it takes: registers, spills, shared memory and, of Hopper's code, counts of SASS.

usage: tests/gpu/resources.py [--arch 80,86,89,90a,100] [--only TEXT] [--sass DIR] [--jobs N] [--all] [--out FILE] [PATH.cu ..]
  PATH.cu      these files only (default: all of kernels/)
  --only       kernels whose name contains this; --all: every kernel, not only those with a main loop
  --sass       where nvdisasm is, if it is not in PATH (Python's package nvidia-cuda-nvdisasm has it); without it there are no counts of SASS
  --out        a JSON file with everything
Needs nvcc 12 or later; for 100, 12.8. Exit status: 0; 1 if a warning was printed, something does not compile or a kernel of the table spills registers; 2 if
nvcc is missing."""
import argparse, concurrent.futures, glob, json, os, re, shutil, subprocess, sys, tempfile

import sass

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
ARCHITECTURES, SASS_ARCH = ('80', '86', '89', '90a', '100'), '90a'
# kernels whose loops take a step's time: part of the name -> what they are
MAIN_LOOPS = ('sm90', 'decode', 'skinny', 'tiles_kernel', 'f32_', 'attn_', 'attend', 'merge', 'prefill', 'route', 'prepare_inputs', 'norm', 'combine', 'copy', 'checksum')
COMPILED = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
SPILLS = re.compile(r'(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads')
USED = re.compile(r'Used (\d+) registers(?:.*?(\d+) bytes smem)?')
BAD = re.compile(r'\b(warning|error)\b', re.I)


class Compiled:
    """One file for one architecture. kernels: {mangled name: resources}; said: lines of warnings and errors."""

    def __init__(self, path, arch):
        self.path, self.arch, self.kernels, self.said, self.ok = path, arch, {}, [], False


def command(path, arch, cubin):
    return [shutil.which('nvcc'), '-std=c++17', '-O3', f'-gencode=arch=compute_{arch},code=sm_{arch}', '-Xptxas=-v', '-Xcompiler=-Wall,-Wextra', '-I' + ROOT,
            '-I' + os.path.join(ROOT, 'kernels', 'cuda', 'nvcc'), '-cubin', '-o', cubin, os.path.join(ROOT, path)]


def read_ptxas(text, out):
    now = None
    for line in text.splitlines():
        name, spills, used = COMPILED.search(line), SPILLS.search(line), USED.search(line)
        if name:
            now = out.kernels.setdefault(name.group(1), dict(registers=0, stack=0, spills=0, smem=0))
        elif spills and now is not None:
            now['stack'], now['spills'] = int(spills.group(1)), int(spills.group(2)) + int(spills.group(3))
        elif used and now is not None:
            now['registers'], now['smem'] = int(used.group(1)), int(used.group(2) or 0)
        elif BAD.search(line):
            out.said.append(line.strip())


def compile_one(path, arch, nvdisasm):
    out = Compiled(path, arch)
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, 'x.cubin')
        r = subprocess.run(command(path, arch, cubin), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        read_ptxas(r.stdout, out)
        out.ok = r.returncode == 0
        if not out.ok and not out.said:
            out.said = r.stdout.strip().splitlines()[-3:]
        if out.ok and nvdisasm and arch == SASS_ARCH:
            for name, counts in sass.of_cubin(nvdisasm, cubin).items():
                out.kernels.setdefault(name, {}).update(sass=counts)
    return out


def readable(names):
    """{mangled: short} names, by c++filt if there is one."""
    tool = shutil.which('c++filt')
    if not tool or not names:
        return {n: n for n in names}
    r = subprocess.run([tool], input='\n'.join(names), stdout=subprocess.PIPE, text=True)
    enums = {'gemm_weight_layout': enumerators('kernels/cuda/gemm/gemm.h', 'gemm_weight_layout'), 'dtype': enumerators('kernels/dtype.h', 'dtype')}
    return dict(zip(names, (shorten(n, enums) for n in r.stdout.splitlines())))


def enumerators(path, enum):
    """{value: name} of an enum of the tree, without what names have in common: GEMM_BF16 is bf16."""
    with open(os.path.join(ROOT, path), encoding='utf-8') as f:
        body = re.search(rf'enum {enum} \{{(.*?)\}}', f.read(), re.S).group(1)
    out, value = {}, -1
    for name, given in re.findall(r'^\s*([A-Z]\w+)(?: = (\d+))?', re.sub(r'/\*.*?\*/', '', body, flags=re.S), re.M):
        value = int(given) if given else value + 1
        out[value] = name.split('_', 1)[1].lower()
    return out


def shorten(name, enums):
    """Without the arguments, with the names of enumerators."""
    depth = 0
    for at, c in enumerate(name):
        depth += (c == '<') - (c == '>')
        if c == '(' and depth == 0 and at > 0 and not name[:at].endswith('operator'):
            name = name[:at]
            break
    def enumerator(m):
        return enums.get(m.group(1), {}).get(int(m.group(2)), m.group(2))

    return re.sub(r'\((\w+)\)(\d+)', enumerator, re.sub(r'^(void|static) ', '', name))


COLUMNS = [('registers', 'regs', 5), ('spills', 'spill', 6), ('smem', 'smem', 7)]
SASS_COLUMNS = [('instructions', 'SASS', 6), ('wgmma', 'wgmma', 6), ('wgmma_run', 'run', 4), ('wgmma_moves', 'moves', 6), ('mma', 'mma', 5), ('ldg', 'LDG', 5),
                ('ldg_flight', 'ahead', 6), ('ldg_bytes', 'bytes', 6), ('cp_async', 'cp', 4), ('tma', 'TMA', 4), ('bar', 'BAR', 4), ('membar', 'MEMBAR', 7),
                ('atomics', 'atom', 5)]


def print_table(results, names, chosen, with_sass):
    columns = COLUMNS + (SASS_COLUMNS if with_sass else [])
    print(f'{"kernel":<84}' + ''.join(f'{title:>{width}}' for _, title, width in columns))
    for path in dict.fromkeys(r.path for r in results):
        kernels = {n: k for r in results if r.path == path and r.arch == SASS_ARCH for n, k in r.kernels.items() if chosen(n)}
        if kernels:
            print(path)
        for n, k in sorted(kernels.items(), key=lambda item: names[item[0]]):
            row = {**k, **k.get('sass', {})}
            print(f'  {names[n][:82]:<82}' + ''.join(f'{row.get(key, 0):>{width}}' for key, _, width in columns))


def print_architectures(results, names, chosen):
    print(f'\n{"architecture":<14}{"files":>6}{"kernels":>9}{"most registers":>16}{"spilled":>9}{"warnings":>10}{"failed":>8}')
    for arch in dict.fromkeys(r.arch for r in results):
        mine = [r for r in results if r.arch == arch]
        kernels = [k for r in mine for k in r.kernels.values()]
        print(f'sm_{arch:<11}{len(mine):>6}{len(kernels):>9}{max((k.get("registers", 0) for k in kernels), default=0):>16}'
              f'{sum(k.get("spills", 0) > 0 for k in kernels):>9}{sum(len(r.said) for r in mine if r.ok):>10}{sum(not r.ok for r in mine):>8}')
    for r in results:
        for line in r.said:
            print(f'sm_{r.arch} {r.path}: {line[:200]}')
    spilled = [(r, n, k) for r in results for n, k in r.kernels.items() if k.get('spills')]
    for r, n, k in spilled:
        print(f'sm_{r.arch} {r.path}: {names[n]} spills {k["spills"]} bytes')
    return any(r.said or not r.ok for r in results) or any(r.arch == SASS_ARCH and chosen(n) for r, n, _ in spilled)


def find_nvdisasm(folder):
    found = shutil.which('nvdisasm', path=folder) if folder else shutil.which('nvdisasm')
    if not found:
        print('resources.py: THERE IS NO nvdisasm: NOTHING IS SAID ABOUT SASS (wgmma in a row, loads in flight, barriers). `pip install nvidia-cuda-nvdisasm` '
              'in a virtual environment has it; give --sass its folder.', file=sys.stderr)
    return found


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('--arch', default=','.join(ARCHITECTURES))
    a.add_argument('--only', default='')
    a.add_argument('--sass')
    a.add_argument('--jobs', type=int, default=os.cpu_count())
    a.add_argument('--all', action='store_true')
    a.add_argument('--out')
    a.add_argument('paths', nargs='*')
    a = a.parse_args()
    if not shutil.which('nvcc'):
        print('resources.py: there is no nvcc in PATH: nothing can be compiled', file=sys.stderr)
        return 2
    nvdisasm = find_nvdisasm(a.sass)
    paths = a.paths or sorted(os.path.relpath(p, ROOT) for p in glob.glob(os.path.join(ROOT, 'kernels', '**', '*.cu'), recursive=True))
    with concurrent.futures.ThreadPoolExecutor(a.jobs) as pool:
        results = list(pool.map(lambda job: compile_one(*job, nvdisasm), [(p, arch) for p in paths for arch in a.arch.split(',')]))
    names = readable(sorted({n for r in results for n in r.kernels}))

    def chosen(mangled):
        return a.only in names[mangled] and (a.all or any(m in names[mangled] for m in MAIN_LOOPS))

    print_table(results, names, chosen, nvdisasm)
    bad = print_architectures(results, names, chosen)
    if a.out:
        with open(a.out, 'w', encoding='utf-8') as f:
            json.dump([dict(path=r.path, arch=r.arch, ok=r.ok, said=r.said, kernels={names[n]: k for n, k in r.kernels.items()}) for r in results], f, indent=1)
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())
