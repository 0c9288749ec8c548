"""Runs the stages of gpu_stages.py one after the other, each with its time limit, and writes what they found. run.sh says how it is used."""
import argparse, json, os, re, shutil, signal, subprocess, sys, tempfile, time

from gpu_programs import CannotBegin, Programs, environment, libraries
from gpu_stages import stages

MEMBERS = ('figure', 'fact', 'note', 'op')
LIMIT_S, EMULATED_LIMIT_S = 465, 1500  # of everything: under 8 minutes; an emulated GPU may run with a sanitizer and on a busy machine
EMULATED_SLOWER, ENDING_S = 5, 8
PASSED, FAILED, SKIPPED, SHORT = 'passed', 'failed', 'skipped', 'fell short'


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
        text += f'; {sum(found)} found in {len(found)} processes'
        failed += sum(found) or not found
    if status or failed:
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


class Report:
    def __init__(self, emulated, programs):
        found = libraries()
        self.env = {**environment(found), 'BATON_BIN': programs.start('baton')}
        self.facts = {'emulated': emulated, 'programs': f'{programs.home}, {programs.how}', 'gpu': machine(), 'python': sys.version.split()[0],
                      'cpus': os.cpu_count(), 'libraries': found or 'none of cuBLAS, cuBLASLt and NCCL'}
        self.emulated, self.stages = emulated, []

    def run(self, stage, left_s):
        if not stage.argv:
            return self.add(stage, SKIPPED if stage.kind == 'sanitizer' else FAILED, f'not run: {stage.why}', [], 0)
        limit_s = min(stage.limit_s * (EMULATED_SLOWER if self.emulated else 1), left_s)
        if limit_s < 3:
            return self.add(stage, FAILED, 'not run: no time is left', [], 0)
        begin = time.monotonic()
        status, output = run_limited(stage.argv, {**self.env, **stage.env}, limit_s)
        try:
            outcome, text, results = judge(stage, status, output, limit_s)
        except ValueError as e:
            outcome, text, results = FAILED, f'its output is not understood: {e}', []
        if outcome == PASSED and not self.emulated and any(fell_short(r) for r in results if r['kind'] == 'figure'):
            outcome = SHORT
        self.add(stage, outcome, text, results, time.monotonic() - begin, output if outcome == FAILED else '')

    def add(self, stage, outcome, text, results, seconds, output=''):
        print(f'{outcome:<10} {stage.name} ({seconds:.1f} s) {text}', flush=True)
        print_figures(results, self.emulated)
        self.stages.append(dict(name=stage.name, outcome=outcome, text=text, seconds=round(seconds, 2), command=stage.argv, results=results,
                                **({'output': output[-20000:]} if output else {})))

    def sum_up(self, figures):
        """Prints the goals and failures once more, at the end of the output."""
        if not self.emulated and any('wanted' in f for f in figures):
            print('\n== goals')
            for f in figures:
                if 'wanted' in f:
                    print_figure(f, False)
        print('\n== stages')
        for s in self.stages:
            if s['outcome'] != PASSED:
                print(f"{s['outcome']:<10} {s['name']}: {s['text'][:200]}")

    def finish(self, path, seconds):
        figures = [r for s in self.stages for r in s['results'] if r['kind'] == 'figure']
        beside = speedups(figures)
        print_figures(beside, self.emulated)
        counts = {o: sum(s['outcome'] == o for s in self.stages) for o in (PASSED, FAILED, SKIPPED, SHORT)}
        if beside and not self.emulated and any(map(fell_short, beside)):
            counts[SHORT] += 1
        self.sum_up(figures + beside)
        with open(path, 'w') as f:
            json.dump(dict(**self.facts, seconds=round(seconds, 1), counts=counts, beside=beside, stages=self.stages), f, indent=1)
        print(f'{"emulated: the figures mean nothing. " if self.emulated else ""}{path}, after {seconds:.0f} s')
        if counts[SHORT]:
            print(f'{counts[SHORT]} fell short of what is wanted')
        print(f'{counts[PASSED] + counts[SHORT]} passed, {counts[FAILED]} failed, {counts[SKIPPED]} skipped')
        return 1 if counts[FAILED] or counts[SHORT] or not counts[PASSED] else 0


def main():
    a = argparse.ArgumentParser(prog='run.sh', description=__doc__)
    a.add_argument('--emulated', action='store_true')
    a.add_argument('--programs')
    a.add_argument('--out')
    a.add_argument('--only', default='')
    a.add_argument('--limit', type=int)
    a.add_argument('--list', action='store_true')
    a = a.parse_args()
    begin = time.monotonic()
    try:
        programs = Programs(a.programs)
    except CannotBegin as e:
        print(f'run.sh: {e}', file=sys.stderr)
        return 2
    try:
        only = [o for o in a.only.split(',') if o]
        chosen = [s for s in stages(programs, a.emulated) if not only or any(s.name.startswith(o) for o in only)]
        if a.list or not chosen:
            print(*[s.name for s in chosen] or ['no stage begins with that'], sep='\n')
            return 0 if chosen else 2
        if programs.is_emulated() != a.emulated:
            print('run.sh: this build has an emulated GPU, whose figures mean nothing: give --emulated' if not a.emulated else
                  'run.sh: --emulated is for a build with -DBATON_CUDA=emulate, and this is none', file=sys.stderr)
            return 2
        report = Report(a.emulated, programs)
        limit = a.limit or (EMULATED_LIMIT_S if a.emulated else LIMIT_S)
        print(*[f'{k}: {v}' for k, v in report.facts.items()], sep='\n', flush=True)
        for stage in chosen:
            report.run(stage, limit - (time.monotonic() - begin))
        return report.finish(a.out or os.path.join(programs.home, 'gpu.json'), time.monotonic() - begin)
    finally:
        programs.close()


if __name__ == '__main__':
    sys.exit(main())
