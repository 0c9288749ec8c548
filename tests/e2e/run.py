#!/usr/bin/env python3
"""Runs the end-to-end tests, one after the other. usage: run.py [--long] [--list] [name part ...]

Tests named *_long run only with --long. Last line: N passed, N failed, N skipped."""
import argparse, importlib, os, sys, time, traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from harness import Skip


def run_folder(here, names, long=False, only_list=False):
    """Every test in the test_*.py files of a folder whose name contains one of `names` (empty: all); the exit status."""
    passed = failed = skipped = 0
    for module in sorted(f[:-3] for f in os.listdir(here) if f.startswith('test_') and f.endswith('.py')):
        m = importlib.import_module(module)
        for name in [n for n in dir(m) if n.startswith('test_')]:
            full = f'{module}.{name}'
            if (names and not any(p in full for p in names)) or (name.endswith('_long') and not long):
                continue
            if only_list:
                print(full)
                continue
            t0 = time.monotonic()
            try:
                getattr(m, name)()
                passed += 1
                print(f'ok    {full} ({time.monotonic() - t0:.1f} s)', flush=True)
            except Skip as e:
                skipped += 1
                print(f'SKIP  {full}: {e}', flush=True)
            except Exception:
                failed += 1
                print(f'FAIL  {full} ({time.monotonic() - t0:.1f} s)\n{traceback.format_exc()}', flush=True)
    print(f'{passed} passed, {failed} failed, {skipped} skipped')
    return failed > 0 or passed + skipped == 0 and not only_list


def main():
    a = argparse.ArgumentParser()
    a.add_argument('--long', action='store_true')
    a.add_argument('--list', action='store_true')
    a.add_argument('names', nargs='*')
    a = a.parse_args()
    return run_folder(os.path.dirname(os.path.abspath(__file__)), a.names, a.long, a.list)


if __name__ == '__main__':
    sys.exit(main())
