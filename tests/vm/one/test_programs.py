"""Programs that need an RDMA device, in the virtual machine: the conformance cases of transports rdma and ucx, rounds of killed and stopped peers,
and `baton bench kv` next to ib_write_bw and ucx_perftest. Their own output decides; a case that they skip here is a failure."""
import re

from rails import *

COUNTS = re.compile(r'^(\d+) passed, (\d+) failed, (\d+) skipped', re.M)


def program(*path):
    full = os.path.join(os.environ['BATON_TEST_PROGRAMS'], *path)
    if not os.path.exists(full):
        raise Skip(f'{full} is not built')
    return full


def run_for(limit_s, argv, **env):
    """(status, output); the output is printed as it arrives."""
    p = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace', env={**os.environ, **env})
    timer = threading.Timer(limit_s, p.kill)
    timer.start()
    lines = []
    for line in p.stdout:
        lines.append(line)
        if re.match(r'(FAIL|\d+ passed|.*SKIPPED)', line):
            print('  ' + line.rstrip(), flush=True)
    p.wait()
    timer.cancel()
    return p.returncode, ''.join(lines)


def conformance(transport, **env):
    test = program('test_transports')
    cases = [c for c in subprocess.run([test, '--list'], capture_output=True, text=True).stdout.split() if c.endswith('_' + transport)]
    assert cases, f'no case of test_transports ends in _{transport}'
    status, output = run_for(400, [test, *cases], **env)
    found, lines = COUNTS.findall(output), output.splitlines()
    for i in [i for i, line in enumerate(lines) if line.startswith('FAIL')]:
        print('    ' + '\n    '.join(line for line in lines[max(0, i - 30):i + 1] if 'info' not in line), flush=True)
    assert status == 0 and found and found[-1][1:] == ('0', '0') and int(found[-1][0]) == len(cases), f'status {status}\n{output[-6000:]}'


def test_conformance_rdma():
    conformance('rdma')


def test_conformance_rdma_cm():
    conformance('rdma', BATON_RDMA_CM='1')


def test_conformance_ucx():
    conformance('ucx')


def kill_rounds(transport):
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'chaos', 'kill_rounds.py')
    status, output = run_for(800, ['python3', script, '--peer', program('chaos', 'kvt_peer'), '--transports', transport, '--jobs', '4', '--stop', '2'])
    print('  ' + '\n  '.join(output.splitlines()[-12:]), flush=True)
    assert status == 0, output[-6000:]


def test_kill_rounds_rdma_long():
    kill_rounds('rdma')


def test_kill_rounds_ucx_long():
    kill_rounds('ucx')


def bench(transport):
    """Rates next to the limit of the same rounds. The figures of an emulated CPU are printed, not asserted."""
    p = subprocess.run([BIN, 'bench', 'kv', '--transport', transport, '--piece', '4k,64k,1m', '--rounds', '5', '--samples', '100'], capture_output=True, text=True, timeout=800)
    print(p.stdout, flush=True)
    assert p.returncode == 0, p.stdout + p.stderr


def test_bench_rdma_long():
    bench('rdma')


def test_bench_ucx_long():
    bench('ucx')


def test_bench_tcp_long():
    bench('tcp')
