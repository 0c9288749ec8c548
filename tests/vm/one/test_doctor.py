"""baton doctor and get_rdma_nics.sh on a host that has RDMA devices: what they find and refuse. The unit test of the device list, which skips on a
host without devices, must not skip here."""
from rails import *

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', '..', 'deploy', 'get_rdma_nics.sh')
RDMA = ['--cache-transfer-protocol', 'rdma']


def doctor(args, **env):
    """(exit status, {what: [line, ...]}) of baton doctor --json."""
    done = subprocess.run([BIN, 'doctor', '--json', '--port', '0', *args], capture_output=True, text=True, timeout=60, env={**os.environ, **env})
    lines = {}
    for line in json.loads(done.stdout)['checks']:
        lines.setdefault(line['what'], []).append(line)
    return done.returncode, lines


def fails(lines):
    return [line['text'] for found in lines.values() for line in found if line['result'] == 'fail']


def test_every_device_is_described():
    status, lines = doctor([*RDMA, '--kv-cache-memory', '0.01'])
    assert status == 0, fails(lines)
    for name in devices():
        of = [next((line for line in lines[what] if line['text'].startswith(name + ':1: ')), None) for what in ('RDMA port', 'RDMA MTU', 'RDMA GID', 'flow control')]
        assert all(of), (name, lines)
        port, mtu, gid, flow = of
        assert port['result'] == 'warn' and 'ACTIVE' in port['text'] and 'emulated in software' in port['text'], port
        assert 'active MTU' in mtu['text'], mtu
        assert gid['result'] == 'ok' and 'RoCE v2 10.' in gid['text'], gid
        assert 'not visible' in flow['text'], flow
    assert 'ib_uverbs' in lines['kernel modules'][0]['text'], lines['kernel modules']


def test_ucx_names_its_transports_on_the_devices():
    status, lines = doctor(['--cache-transfer-protocol', 'ucx'])
    if 'not built' in lines['UCX'][0]['text']:
        raise Skip('built without UCX')
    assert status == 0 and 'rc_verbs/rxe0:1' in lines['UCX'][0]['text'], lines['UCX']


def test_wrong_words_are_failures_with_what_is_right():
    for env, words in (({'KVCACHE_RDMA_NICS': 'mlx5_0'}, ("'mlx5_0' is not an RDMA device", 'rxe0:1 (ACTIVE)')),
                       ({'KVCACHE_RDMA_GID_INDEX': '200'}, ('has no such GID; it has 0', 'RoCE v2')),
                       ({'KVCACHE_IB_TIMEOUT': '99'}, ("'99' is not a number from 1 to 31",)),
                       ({'KVCACHE_SOCKET_IFNAME': 'nothing0'}, ('no network interface nothing0',))):
        status, lines = doctor(RDMA, **env)
        assert status == 1 and any(all(w in text for w in words) for text in fails(lines)), (env, fails(lines))


def test_a_link_that_is_down():
    with open('/sys/class/infiniband/rxe0/parent') as f:
        interface = f.read().strip()
    command('ip', 'link', 'set', interface, 'down')
    try:
        status, lines = doctor(RDMA, KVCACHE_RDMA_NICS='rxe0')
        assert status == 1 and any("'rxe0' has no active port" in text and 'rxe0:1 (DOWN)' in text for text in fails(lines)), fails(lines)
        status, lines = doctor(RDMA)
        assert status == 0 and any('not used: ' in line['text'] and 'rxe0:1 (DOWN' in line['text'] for line in lines['RDMA']), (fails(lines), lines['RDMA'])
    finally:
        command('ip', 'link', 'set', interface, 'up')
        for name in devices():  # the other end of the rail lost its carrier too
            wait_until_active(name)


def wait_until_active(name):
    deadline = time.monotonic() + 20
    while True:
        with open(f'/sys/class/infiniband/{name}/ports/1/state') as f:
            if 'ACTIVE' in f.read():
                return
        assert time.monotonic() < deadline, f'{name} is not active again'
        time.sleep(0.1)


def test_the_script_names_emulations_only_when_told():
    done = subprocess.run(['bash', SCRIPT, 'gpu'], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == 'KVCACHE_RDMA_NICS=\n' and 'no GPU' in done.stderr, done
    done = subprocess.run(['bash', SCRIPT, 'gpu'], capture_output=True, text=True, env={**os.environ, 'BATON_RDMA_SOFTWARE': '1'})
    assert done.returncode == 0 and done.stdout.startswith('KVCACHE_RDMA_NICS=') and len(done.stdout.splitlines()) == 1, done
    named = done.stdout.strip().split('=')[1].split(',')
    assert sorted(named) == devices(), (named, devices())


def test_the_device_list_is_read():
    program = os.path.join(os.environ['BATON_TEST_PROGRAMS'], 'test_rdma_device')
    done = subprocess.run([program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith('0 failed, 0 skipped'), done.stdout[-2000:]
