"""Runs the checks of a program that tests a server as a client, and exits with their result.

Each check prints a line; the last one is "N passed, N failed"."""
import sys, traceback


def run(checks):
    failed = 0
    for check in checks:
        try:
            check()
            print(f'ok    {check.__name__}', flush=True)
        except Exception:
            failed += 1
            print(f'FAIL  {check.__name__}\n{traceback.format_exc()}', flush=True)
    print(f'{len(checks) - failed} passed, {failed} failed')
    sys.exit(failed > 0)
