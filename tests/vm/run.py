#!/usr/bin/env python3
"""run.py - real RDMA verbs without an RDMA NIC: runs tests/vm/one in one virtual machine and tests/vm/two in two on one wire.

usage: tests/vm/run.py one|two [--long] [--limit SECONDS] [name part ...]
Environment: BATON_BIN, BATON_TEST_GGUF, BATON_TEST_DATA as for tests/e2e; BATON_TEST_PROGRAMS (folder of the conformance test programs,
default: tests/ beside BATON_BIN); BATON_VM_ACCEL, BATON_VM_CPU (QEMU's -accel and -cpu).
Last line: N passed, N failed, N skipped. On a host that cannot run virtual machines every test is skipped, with the reason."""
import argparse, os, re, signal, sys, tempfile, threading

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import cases
from kernel import Unavailable, busybox, kernel
from machine import Machine, free_port, qemu


def tests_of(form, names, long):
    """Counts the tests without running any."""
    n = 0
    for f in sorted(os.listdir(os.path.join(HERE, form))):
        if f.startswith('test_') and f.endswith('.py'):
            with open(os.path.join(HERE, form, f)) as text:
                found = re.findall(r'^def (test_\w+)', text.read(), re.M)
            n += sum((not names or any(p in f'{f[:-3]}.{t}' for p in names)) and (long or not t.endswith('_long')) for t in found)
    return n


def environment(work):
    programs = os.environ.get('BATON_TEST_PROGRAMS') or os.path.join(os.path.dirname(os.path.abspath(cases.BIN)), 'tests')
    env = dict(BATON_BIN=os.path.abspath(cases.BIN), BATON_TEST_DATA=os.path.abspath(cases.DATA), BATON_TEST_PROGRAMS=os.path.abspath(programs),
               BATON_VM_ANSWERS=work + '/answers.json', PYTHONUNBUFFERED='1', PYTHONDONTWRITEBYTECODE='1')
    if os.environ.get('BATON_TEST_GGUF'):
        env['BATON_TEST_GGUF'] = os.path.abspath(os.environ['BATON_TEST_GGUF'])
    return env


def end_together(far, m):
    """Host 2 ends last, unless something is wrong with it: then the tests need not wait for it."""
    far.p.wait()
    if m.p.poll() is None:
        print(f'vm: the machine of host 2 ended early (QEMU ended with {far.p.returncode}); its console said last:\n{far.read("console")[-2000:]}', file=sys.stderr, flush=True)
        m.p.kill()


def run(form, arguments, work, limit_s):
    """Runs the machine or machines from start to end. Returns the exit status of the tests."""
    command = ['python3', os.path.join(HERE, 'inside.py'), form, *arguments]
    env, wire = environment(work), free_port()
    if form == 'one':
        with Machine(command, work, env, rails=2, far=True, limit_s=limit_s) as m:
            return m.wait()
    cpus = max(1, os.cpu_count() // 2)
    with Machine(command, work, env, rails=0, wire=wire, host=1, cpus=cpus, mib=3072, limit_s=limit_s) as m:
        other = ['python3', os.path.join(HERE, 'agent.py')]
        with Machine(other, None, env, rails=0, wire=wire, host=2, cpus=cpus, mib=3072, limit_s=limit_s) as far:
            threading.Thread(target=end_together, args=(far, m), daemon=True).start()
            return m.wait()


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument('form', choices=('one', 'two'))
    a.add_argument('--long', action='store_true', help='also tests named *_long')
    a.add_argument('--limit', type=float, help='seconds for everything in the machine (1500; with --long 5400)')
    a.add_argument('names', nargs='*')
    a = a.parse_intermixed_args()
    limit = a.limit or (5400 if a.long else 1500)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    n = tests_of(a.form, a.names, a.long)
    with tempfile.TemporaryDirectory(prefix='baton-vm-work-') as work:
        try:
            qemu(), busybox(), kernel()  # before the answers, which take a while
            cases.make(work + '/answers.json')
            return run(a.form, [*(['--long'] if a.long else []), *a.names], work, limit)
        except Unavailable as e:
            print(f'SKIP  {n} tests, NOT TESTED: no virtual machine here: {e}\n0 passed, 0 failed, {n} skipped')
            return 0


if __name__ == '__main__':
    sys.exit(main())
