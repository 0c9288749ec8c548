#!/usr/bin/env python3
"""Runs the end-to-end tests. usage: run.py [--long] [--list] [--jobs N] [name part ...]

Tests named *_long run only with --long. With --jobs N up to N tests run at a time, each in its own process with its own ports; tests
marked `alone` (harness.py) run afterwards, one by one. Last line: N passed, N failed, N skipped."""
import argparse, difflib, importlib, os, shutil, signal, sys, tempfile, time, traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import harness
from harness import Skip

PASSED, FAILED, SKIPPED = 0, 1, 2


def tests_of(here, names, long):
    """[(full name, function)] of the test_*.py files of a folder, in order."""
    out = []
    for module in sorted(f[:-3] for f in os.listdir(here) if f.startswith('test_') and f.endswith('.py')):
        m = importlib.import_module(module)
        if os.path.dirname(os.path.abspath(m.__file__)) != os.path.abspath(here):
            raise ImportError(f'{m.__file__} was imported in place of the tests of that name in {here}')
        for name in [n for n in dir(m) if n.startswith('test_')]:
            full = f'{module}.{name}'
            if (not names or any(p in full for p in names)) and (long or not name.endswith('_long')):
                out.append((full, getattr(m, name)))
    return out


def not_there(here, names, tests, long):
    """A sentence about the first of `names` that no test has; None: each has one. A part of a name that was mistyped must not pass for nothing to do."""
    for name in names:
        if any(name in full for full, _ in tests):
            continue
        groups = sorted(f[5:-3] for f in os.listdir(here) if f.startswith('test_') and f.endswith('.py'))
        meant = difflib.get_close_matches(name.removeprefix('test_'), groups, 1)
        if not long and tests_of(here, [name], True):
            return f'run.py: all tests with "{name}" in their name are long ones, which run with --long'
        return f'run.py: no test has "{name}" in its name' + (f'; did you mean {meant[0]}?' if meant else '') + ' (--list shows all)'
    return None


def run_one(full, test):
    t0 = time.monotonic()
    try:
        test()
        print(f'ok    {full} ({time.monotonic() - t0:.1f} s)', flush=True)
        return PASSED
    except Skip as e:
        print(f'SKIP  {full}: {e}', flush=True)
        return SKIPPED
    except Exception:
        print(f'FAIL  {full} ({time.monotonic() - t0:.1f} s)\n{traceback.format_exc()}', flush=True)
        return FAILED
    except KeyboardInterrupt:
        harness.end_all()
        raise


def run_alone(full, test, output, ports, signals):
    """A test in its own process, which ends here."""
    status = FAILED
    try:
        signals.__exit__()
        for fd in (1, 2):
            os.dup2(output.fileno(), fd)
        harness.take_ports(*ports)
        status = run_one(full, test)
    finally:
        sys.stdout.flush()
        os._exit(status)


def start(running, share, n_shares, full, test):
    """Starts a test in its own process, with its output in a file: (process, file, name) in running."""
    output = tempfile.TemporaryFile('w+')
    sys.stdout.flush()
    with harness.Undisturbed() as signals:
        pid = os.fork()
        if pid == 0:
            run_alone(full, test, output, (share, n_shares), signals)
        running[share] = pid, output, full


def run_in_parallel(tests, jobs):
    """Runs at most `jobs` of them at a time; returns their results."""
    todo, running, results = list(tests), {}, []
    try:
        run_all(todo, running, results, jobs)
    finally:
        for pid, _, _ in running.values():  # a signal ended this: they end what they have started
            os.kill(pid, signal.SIGTERM)
        for pid, _, _ in running.values():
            os.waitpid(pid, 0)
    return results


def run_all(todo, running, results, jobs):
    while todo or running:
        for share in set(range(jobs)) - set(running):
            if todo:
                start(running, share, jobs, *todo.pop(0))
        ended, status = os.wait()
        for share, (pid, output, full) in list(running.items()):
            if pid != ended:
                continue
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout)
            code = os.waitstatus_to_exitcode(status)
            if code not in (PASSED, FAILED, SKIPPED):
                print(f'FAIL  {full} (its process ended with {code})')
                code = FAILED
            sys.stdout.flush()
            results.append(code)
            del running[share]


def listen_to_signals():
    """A shell in the background, or nohup, leaves signals ignored, and the programs that the tests start would inherit that."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    harness.end_in_order()


def run_folder(here, names, long=False, only_list=False, jobs=1):
    """Runs every test in a folder's test_*.py files whose name contains one of `names` (empty: all). Returns the exit status."""
    listen_to_signals()
    tests = tests_of(here, names, long)
    unknown = not_there(here, names, tests, long)
    if unknown:
        print(unknown, file=sys.stderr)
        return 2
    if only_list:
        print(*[full for full, _ in tests], sep='\n')
        return 0
    alone = [t for t in tests if jobs == 1 or getattr(t[1], 'alone', False)]
    results = run_in_parallel([t for t in tests if t not in alone], jobs) + [run_one(*t) for t in alone]
    print(*[f'{results.count(status)} {what}' for status, what in ((PASSED, 'passed'), (FAILED, 'failed'), (SKIPPED, 'skipped'))], sep=', ')
    return FAILED in results or not results


def main():
    a = argparse.ArgumentParser()
    a.add_argument('--long', action='store_true')
    a.add_argument('--list', action='store_true')
    a.add_argument('--jobs', type=int, default=1)
    a.add_argument('names', nargs='*')
    a = a.parse_args()
    if a.jobs < 1:
        sys.exit(f'run.py: --jobs is {a.jobs}, but at least one test runs at a time')
    return run_folder(os.path.dirname(os.path.abspath(__file__)), a.names, a.long, a.list, a.jobs)


if __name__ == '__main__':
    sys.exit(main())
