"""Runs the stages of gpu_stages.py, each with its time limit, and writes what they found. run.sh says how it is used. Stages that measure run one after the
other; those that do not, the tests, several at a time."""
import argparse, itertools, json, os, re, shutil, signal, subprocess, sys, tempfile, threading, time
from concurrent.futures import ThreadPoolExecutor

from gpu_programs import CannotBegin, Programs, environment, libraries
from gpu_stages import JOBS, stages

MEMBERS = ('figure', 'fact', 'note', 'op')
LIMIT_S, EMULATED_LIMIT_S = 465, 1500  # of everything: under 8 minutes; an emulated GPU may run with a sanitizer and on a busy machine
EMULATED_SLOWER, ENDING_S = 5, 8
PASSED, FAILED, SKIPPED, SHORT, NOT_REACHED = 'passed', 'failed', 'skipped', 'fell short', 'not reached'
AT_ONCE = min(6, len(os.sched_getaffinity(0)) // JOBS + 2)  # test programs; some run one case at a time
KEPT_OUTPUT = 20000  # characters at the end of what a failed stage printed


def run_limited(argv, env, limit_s):
    """(exit status or None past the limit, output). Past the limit it gets SIGTERM, and then its process group is killed."""
    with tempfile.TemporaryFile('w+', errors='replace') as log:
        p = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            status = p.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
            p.send_signal(signal.SIGTERM)  # gpu_split.py ends the nodes that it started, which are in process groups of their own
            try:
                p.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        p.wait()
        log.seek(0)
        return status, log.read()


def results_of(output):
    out = []
    for line in output.splitlines():
        if line.startswith('{"kind"'):
            r = json.loads(line)
            if r['kind'] not in MEMBERS:
                raise ValueError(f'not a kind of result: {line}')
            out.append(r)
    return out


def fell_short(figure):
    if 'wanted' not in figure:
        return False
    return figure['ratio'] > figure['wanted'] if figure['wanted_is'] == 'at most' else figure['ratio'] < figure['wanted']


def judge(stage, status, output, limit_s):
    """(outcome, one line about it, results)"""
    results = results_of(output)
    if status is None:
        return FAILED, f'not over after {limit_s:.0f} s', results
    counts = re.findall(r'^(\d+) passed, (\d+) failed, (\d+) skipped$', output, re.M)
    if stage.kind == 'results':
        return (PASSED, '', results) if status == 0 and results else (FAILED, f'exit status {status}: {output.strip()[-300:]}', results)
    if not counts:
        return FAILED, f'exit status {status}, no counts: {output.strip()[-300:]}', results
    passed, failed, skipped = map(int, counts[-1])
    text = f'{passed} passed, {failed} failed, {skipped} skipped'
    if stage.found:
        found = [int(n) for n in re.findall(stage.found, output)]
        text += f'; {"" if stage.judges else "analysed: "}{sum(found)} found in {len(found)} processes'
        if stage.judges:
            failed += sum(found) or not found
    if status or failed or not passed + skipped:
        return FAILED, text, results
    return (PASSED if passed else SKIPPED), text, results


def print_figure(f, emulated):
    line = f"  {f['name']:<80} {f['value']:>10.5g} {f['unit']}"
    if 'limit' in f:
        line += f"   limit {f['limit']:.5g} ({f['limit_is']})   ratio {f['ratio']:.3f}"
    if 'wanted' in f and not emulated:
        line += f"   wanted {f['wanted_is']} {f['wanted']:g}{'   SHORT' if fell_short(f) else ''}"
    print(line)


# Steps whose tables are printed; the JSON has them all.
TABLES = re.compile(r' bf16, (decode of 1 at 1024|decode of 64 at 1024|prefill of 8192 tokens)$|^qwen3_moe, decode of 1 at')


def print_table(ops, rows=10):
    """Prints the ops of each step that take longest."""
    for of in (o for o in dict.fromkeys(s['of'] for s in ops) if TABLES.search(o)):
        mine = [s for s in ops if s['of'] == of]
        total = sum(s['us'] for s in mine)
        print(f"  {of}: {total:.0f} us in ops\n    {'op':<10} {'what':<66} {'calls':>5} {'us':>10} {'share':>6} {'MB':>9} {'GFLOP':>9} {'of limit':>8}")
        for s in sorted(mine, key=lambda s: -s['us'])[:rows]:
            print(f"    {s['op']:<10} {s['what'][:66]:<66} {s['calls']:>5} {s['us']:>10.1f} {s['us'] / total if total else 0:>6.1%} {s['bytes'] / 1e6:>9.2f} "
                  f"{s['flops'] / 1e9:>9.2f} {s['of_limit']:>8.1%}")


def print_figures(results, emulated):
    for r in results:
        if r['kind'] == 'figure':
            print_figure(r, emulated)
        elif r['kind'] == 'fact':
            print(f"  {r['name']}: {r['value']}")
        elif r['kind'] == 'note':
            print(f"  note: {r['text']}")
    print_table([r for r in results if r['kind'] == 'op'])


def speedups(figures):
    """Figures between stages: what quantisation brings, for models that were measured with and without."""
    value = {f['name']: f['value'] for f in figures}
    out = []
    for name, v in value.items():
        model, _, what = name.partition(', ')
        base = value.get(f"{model.rsplit(' ', 1)[0]} bf16, {what}")
        for short, begin, wanted in ((' fp8', 'prefill of', 1.5), (' wint4', 'decode of 1 at 1024', 2.2)):
            if model.endswith(short) and what.startswith(begin) and what.endswith('tokens per second') and base:
                out.append(dict(kind='figure', name=f'{name}, beside bf16', value=v, unit='tokens/s', limit=base, limit_is='the same in bf16', ratio=v / base,
                                wanted=wanted, wanted_is='at least'))
    return out


def machine():
    """What nvidia-smi says of the GPU. An emulated one is not known to it."""
    tool = shutil.which('nvidia-smi')
    if not tool:
        return 'there is no nvidia-smi'
    asked = 'name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,ecc.mode.current,mig.mode.current'
    r = subprocess.run([tool, f'--query-gpu={asked}', '--format=csv'], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30)
    return r.stdout.strip()


class Held:
    """A process with a context on the GPU: without one the driver starts the GPU anew for each program, which takes seconds."""

    def __init__(self, bench, env):
        self.p = subprocess.Popen([bench, 'hold'], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        line = self.p.stdout.readline().strip()
        if line != 'held':
            print(f'note: no context is kept alive: {line}', flush=True)

    def close(self):
        self.p.stdin.close()
        try:
            self.p.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self.p.kill()
            self.p.wait()
        self.p.stdout.close()


class Report:
    """The results of this call and, with --continue, those of earlier ones: `order` names all stages there are."""

    def __init__(self, emulated, programs, path, order, earlier):
        found = libraries()
        self.env = {**environment(found), 'BATON_BIN': programs.start('baton')}
        self.facts = {'emulated': emulated, 'commit': programs.commit(), 'programs': f'{programs.home}, {programs.how}', 'gpu': machine(),
                      'python': sys.version.split()[0], 'cpus': os.cpu_count(), 'libraries': found or 'none of cuBLAS, cuBLASLt and NCCL'}
        self.emulated, self.path, self.order = emulated, path, order
        self.begin, self.lock = time.monotonic(), threading.Lock()
        self.earlier_s = earlier.get('seconds', 0)
        self.stages = {s['name']: s for s in earlier.get('stages', [])}

    def is_done(self, stage):
        return self.stages.get(stage.name, {}).get('outcome') in (PASSED, SHORT)

    def run_all(self, chosen, limit_s):
        """Stages that are together and follow each other run at the same time, at most AT_ONCE."""
        left = [s for s in chosen if not self.is_done(s)]
        for s in chosen:
            if s not in left:
                print(f'{self.stages[s.name]["outcome"]:<10} {s.name}: in an earlier call', flush=True)
        for together, group in itertools.groupby(left, key=lambda s: s.together):
            with ThreadPoolExecutor(AT_ONCE if together else 1) as pool:
                list(pool.map(lambda s: self.run(s, limit_s - (time.monotonic() - self.begin)), group))

    def run(self, stage, left_s):
        if not stage.argv:
            return self.add(stage, FAILED if stage.limit_s else SKIPPED, f'not run: {stage.why}', [], 0)
        limit_s = min(stage.limit_s * (EMULATED_SLOWER if self.emulated else 1), left_s)
        if limit_s < 3:
            return self.add(stage, NOT_REACHED, 'no time is left', [], 0)
        begin = time.monotonic()
        status, output = run_limited(stage.argv, {**self.env, **stage.env}, limit_s)
        try:
            outcome, text, results = judge(stage, status, output, limit_s)
        except ValueError as e:
            outcome, text, results = FAILED, f'its output is not understood: {e}', []
        if status is None and limit_s == left_s < stage.limit_s:
            outcome, text = NOT_REACHED, f'begun, {text}'
        if outcome == PASSED and not self.emulated and any(fell_short(r) for r in results if r['kind'] == 'figure'):
            outcome = SHORT
        if not stage.judges:
            results = [*results, dict(kind='note', text=f'{stage.name}: {text}')]
        kept = output[-10 * KEPT_OUTPUT:] if not stage.judges else output[-KEPT_OUTPUT:] if outcome in (FAILED, NOT_REACHED) else ''
        self.add(stage, outcome, text, results, time.monotonic() - begin, kept)

    def add(self, stage, outcome, text, results, seconds, output=''):
        with self.lock:
            print(f'{outcome:<10} {stage.name} ({seconds:.1f} s) {text}', flush=True)
            print_figures(results, self.emulated)
            self.stages[stage.name] = dict(name=stage.name, outcome=outcome, text=text, seconds=round(seconds, 2), command=stage.argv, results=results,
                                           gpu=self.facts['gpu'], **({'output': output} if output else {}))
            self.write()

    def in_order(self):
        return [self.stages[n] for n in self.order if n in self.stages]

    def counts(self):
        return {o: sum(s['outcome'] == o for s in self.stages.values()) for o in (PASSED, FAILED, SKIPPED, SHORT, NOT_REACHED)}

    def write(self, counts=None, beside=()):
        """After every stage, so that a call that is ended leaves what it found."""
        seconds = round(self.earlier_s + time.monotonic() - self.begin, 1)
        with open(self.path + '.new', 'w') as f:
            json.dump(dict(**self.facts, seconds=seconds, counts=counts or self.counts(), beside=beside, stages=self.in_order()), f, indent=1)
        os.replace(self.path + '.new', self.path)

    def sum_up(self, figures):
        """Prints the goals and failures once more, at the end of the output."""
        if not self.emulated and any('wanted' in f for f in figures):
            print('\n== goals')
            for f in figures:
                if 'wanted' in f:
                    print_figure(f, False)
        print('\n== stages')
        for outcome in (SHORT, SKIPPED, FAILED, NOT_REACHED):
            for s in self.in_order():
                if s['outcome'] == outcome:
                    print(f"{outcome:<11} {s['name']}: {s['text'][:200]}")

    def finish(self):
        figures = [r for s in self.in_order() for r in s['results'] if r['kind'] == 'figure']
        beside = speedups(figures)
        print_figures(beside, self.emulated)
        counts = self.counts()
        if beside and not self.emulated and any(map(fell_short, beside)):
            counts[SHORT] += 1
        self.sum_up(figures + beside)
        self.write(counts, beside)
        print(f'{"emulated: the figures mean nothing. " if self.emulated else ""}{self.path}, after {time.monotonic() - self.begin:.0f} s')
        if counts[SHORT]:
            print(f'{counts[SHORT]} fell short of what is wanted')
        if counts[NOT_REACHED]:
            print(f'{counts[NOT_REACHED]} not reached: --continue {self.path} runs them')
        print(f'{counts[PASSED] + counts[SHORT]} passed, {counts[FAILED]} failed, {counts[SKIPPED]} skipped')
        return 1 if counts[FAILED] or counts[SHORT] or counts[NOT_REACHED] or not counts[PASSED] else 0


def read_earlier(path, commit, emulated):
    """The JSON of an earlier call with the same programs."""
    with open(path) as f:
        earlier = json.load(f)
    for name, want in (('commit', commit), ('emulated', emulated)):
        if earlier.get(name) != want:
            raise CannotBegin(f'{path} has {name} {earlier.get(name)}, these programs {want}')
    return earlier


def main():
    a = argparse.ArgumentParser(prog='run.sh', description=__doc__)
    a.add_argument('--emulated', action='store_true')
    a.add_argument('--programs')
    a.add_argument('--out')
    a.add_argument('--only', default='')
    a.add_argument('--limit', type=int)
    a.add_argument('--continue', dest='earlier')
    a.add_argument('--list', action='store_true')
    a = a.parse_args()
    try:
        programs = Programs(a.programs)
    except CannotBegin as e:
        print(f'run.sh: {e}', file=sys.stderr)
        return 2
    try:
        return run(a, programs)
    except (CannotBegin, OSError) as e:
        print(f'run.sh: {e}', file=sys.stderr)
        return 2
    finally:
        programs.close()


def run(a, programs):
    only, every = [o for o in a.only.split(',') if o], stages(programs, a.emulated)
    chosen = [s for s in every if not only or any(s.name.startswith(o) for o in only)]
    if a.list or not chosen:
        print(*[s.name for s in chosen] or ['no stage begins with that'], sep='\n')
        return 0 if chosen else 2
    if programs.is_emulated() != a.emulated:
        raise CannotBegin('this build has an emulated GPU, whose figures mean nothing: give --emulated' if not a.emulated else
                          '--emulated is for a build with -DBATON_CUDA=emulate, and this is none')
    earlier = read_earlier(a.earlier, programs.commit(), a.emulated) if a.earlier else {}
    report = Report(a.emulated, programs, a.out or os.path.join(programs.home, 'gpu.json'), [s.name for s in every], earlier)
    print(*[f'{k}: {v}' for k, v in report.facts.items()], sep='\n', flush=True)
    held = Held(programs.start('bench_gpu'), report.env) if programs.start('bench_gpu') else None
    try:
        report.run_all(chosen, a.limit or (EMULATED_LIMIT_S if a.emulated else LIMIT_S))
    finally:
        if held:
            held.close()
    return report.finish()


if __name__ == '__main__':
    sys.exit(main())
