"""A configuration that cannot work is refused: one clear sentence and a status other than 0 at start, or a refused connection with a sentence. No
request is then answered over a protocol that was not allowed."""
import re

from rails import *

WAIT_S = 60


def refused(args, env, *words, wrap=()):
    """Checks that the program exits with a status other than 0 and one sentence on stderr that has all the words."""
    p = subprocess.run([*wrap, BIN, 'serve', '--model', TINY, '--served-model-name', 'm', '--host', '127.0.0.1', '--port', str(free_ports(1)[0]), *SIZE, *args],
                       stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WAIT_S, env={**os.environ, **env})
    said = [line for line in p.stdout.splitlines() if re.match(r'baton( serve)?: ', line)]
    assert p.returncode not in (0, -signal.SIGSEGV, -signal.SIGABRT), (p.returncode, p.stdout)
    assert len(said) == 1, p.stdout[-3000:]
    missing = [w for w in words if w.lower() not in said[0].lower()]
    assert not missing, f'{missing} not in: {said[0]}'
    print(f'  {said[0]}', flush=True)


RDMA = ['--cache-transfer-protocol', 'rdma']
UCX = ['--cache-transfer-protocol', 'ucx']


def test_device_that_is_not_there():
    refused(RDMA, {'KVCACHE_RDMA_NICS': 'mlx5_9'}, 'mlx5_9', 'rxe0')


def test_device_that_is_no_name():
    refused(RDMA, {'KVCACHE_RDMA_NICS': 'rxe0:9'}, 'rxe0', '9')


def test_port_in_use():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        s.listen()
        port = s.getsockname()[1]
        refused([*RDMA, '--rdma-comm-ports', str(port)], {}, f':{port}', 'in use by process')


def test_locked_memory():
    """Runs as a user whose memory lock limit is lower than the KV pool."""
    limited = ['prlimit', '--memlock=65536:65536', 'setpriv', '--reuid=65534', '--regid=65534', '--clear-groups', '--bounding-set=-all', '--inh-caps=-all']
    os.chmod(os.path.expanduser('~'), 0o755)
    refused(RDMA, {'HOME': '/tmp'}, 'ulimit -l', wrap=limited)


@contextlib.contextmanager
def without_devices():
    there = devices()
    for name in there:
        command('rdma', 'link', 'delete', name)
    try:
        yield
    finally:
        for name in there:
            command('rdma', 'link', 'add', name, 'type', 'rxe', 'netdev', f'near{name[3:]}' if name.startswith('rxe') else f'{name}n')


def test_paging_that_the_device_cannot():
    refused(RDMA, {'BATON_RDMA_ODP': 'on'}, 'BATON_RDMA_ODP=on', 'cannot page on demand')


def test_no_device():
    with without_devices():
        refused(RDMA, {}, 'no RDMA device', 'rdma')


def test_no_device_but_another_protocol():
    """"rdma,tcp" without a device: the node runs, says which protocol it lost, and uses the other."""
    with without_devices():
        with split(TINY, 'rdma,tcp', env={'KVCACHE_RDMA_NICS': ''}) as nodes:
            status, _, body = ask([nodes[0].port], [dict(model='m', prompt=[5, 6, 7], max_tokens=2, temperature=0)])[0]
            assert status == 200 and body['baton']['transport'] == 'tcp', (status, body)
            assert 'rdma' in nodes[0].output(), nodes[0].output()


def refused_pair(decode_model, prefill_env, *words, protocol='rdma'):
    """Both nodes run; the connection between them is refused with a sentence in a log, and no request is answered over it."""
    control = free_ports(1)[0]
    common = ['--cache-transfer-protocol', protocol, *SIZE, '--placement-timeout', '2']
    p = Node(TINY, 'prefill', [*common, '--engine-worker-queue-port', str(control)], {**role_env('prefill', protocol), **prefill_env})
    d = Node(decode_model, 'decode', [*common, '--innode-prefill-ports', str(control)], role_env('decode', protocol))
    with closing(p, d) as nodes:
        def live(n):
            if not n.alive():
                raise RuntimeError(f'{n.name} ended with {n.p.returncode}')
            return request(n.port, 'GET', '/live', timeout=5)[0] == 200
        for n in nodes:
            wait_until(f'{n.name} answers', lambda: live(n), WAIT_S)
        wait_until('both are registered', lambda: len(request(p.port, 'GET', '/cluster', timeout=5)[2].get('nodes', [])) == 2, WAIT_S)
        t0 = time.monotonic()
        status, _, body = ask([p.port], [dict(model='m', prompt=list(range(5, 40)), max_tokens=2, temperature=0)])[0]
        took = time.monotonic() - t0

        def told():
            lines = [line for n in nodes for line in n.output().splitlines() if all(w.lower() in line.lower() for w in words)]
            return lines
        line = wait_until(f'a sentence with {words}', told, WAIT_S)[0]
        print(f'  {line}\n  the request: {status} in {took:.1f} s: {body["error"]["message"] if status != 200 else body["baton"]}', flush=True)
        if status == 200:  # one node did both parts: nothing was transferred
            assert body['baton']['kv_bytes'] == 0, body['baton']
        else:
            assert status in (502, 503), (status, body)


def test_mtu_that_the_peer_cannot_carry():
    for i in (0, 1):
        command('ip', 'link', 'set', f'far{i}n', 'mtu', '1500')
    try:
        refused_pair(TINY, {'BATON_RDMA_MTU': '4096'}, 'MTU', '4096', '1024')
    finally:
        for i in (0, 1):
            command('ip', 'link', 'set', f'far{i}n', 'mtu', '4400')


def test_mtu_of_no_device():
    refused(RDMA, {'BATON_RDMA_MTU': '1500'}, 'BATON_RDMA_MTU', '1500', '1024')


CM = {'BATON_RDMA_CM': '1'}


def test_rdma_cm_on_one_side_only():
    refused_pair(TINY, CM, 'BATON_RDMA_CM is 1 here and 0 at the peer')


def test_rdma_cm_without_its_module():
    os.rename('/dev/infiniband/rdma_cm', '/dev/rdma_cm_away')
    try:
        refused(RDMA, CM, 'BATON_RDMA_CM', '/dev/infiniband/rdma_cm', 'modprobe rdma_ucm')
    finally:
        os.rename('/dev/rdma_cm_away', '/dev/infiniband/rdma_cm')


def test_peer_of_another_model():
    """Nodes with two models under one name do not make a pair: the request is refused with a sentence that says so."""
    control = free_ports(1)[0]
    common = [*RDMA, *SIZE, '--placement-timeout', '2']
    p = Node(TINY, 'prefill', [*common, '--engine-worker-queue-port', str(control)], role_env('prefill', 'rdma'))
    d = Node(os.path.join(DATA, 'goldens', 'llama_bias', 'model'), 'decode', [*common, '--innode-prefill-ports', str(control)], role_env('decode', 'rdma'))
    with closing(p, d) as nodes:
        wait_until('both are registered', lambda: len(request(p.port, 'GET', '/cluster', timeout=5)[2].get('nodes', [])) == 2, WAIT_S)
        question = [dict(model='m', prompt=list(range(5, 40)), max_tokens=2, temperature=0)]
        status, _, body = ask([p.port], question)[0]
        assert status == 503, (status, body)
        text = body['error']['message']
        print(f'  {status}: {text}', flush=True)
        assert 'no living node decodes for this model: decode node ' in text and 'has another model under the same name: both are called m (' in text, text
        assert 'give all the same --model' in text, text
        status, _, body = ask([d.port], question)[0]  # a decode node may answer alone, with its own model
        assert status == 200 and body['baton']['prefill_node'] == body['baton']['decode_node'] and body['baton']['kv_bytes'] == 0, (status, body)
