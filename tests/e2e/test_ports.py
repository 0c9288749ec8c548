"""Ports: bound before the model is read, and a conflict names the process that has one; a host that has only IPv6."""
import sys

from harness import *

CHECK = 'BATON_IPV6_CHECK'


@contextlib.contextmanager
def taken_port():
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(('127.0.0.1', 0))
        s.listen(1)
        yield s.getsockname()[1]


def test_a_conflict_names_the_process_before_the_model_is_read():
    devices = '/sys/class/infiniband'
    with_rdma = ['--rdma-comm-ports'] if os.path.isdir(devices) and os.listdir(devices) else [] # else nobody listens there
    for option in '--port', '--metrics-port', '--engine-worker-queue-port', '--pd-comm-port', '--cache-queue-port', *with_rdma:
        with taken_port() as port:
            args = ['--host', '127.0.0.1', '--port', str(free_ports(1)[0]), option, str(port)]
            if option == '--rdma-comm-ports':
                args += ['--cache-transfer-protocol', 'rdma,ipc,tcp']
            p = subprocess.run([BIN, 'serve', '--model', TINY, *args], capture_output=True, text=True, timeout=60)
            assert p.returncode == 1 and f':{port}' in p.stderr and f'({option}): the port is in use by process {os.getpid()} (' in p.stderr, (option, p.returncode, p.stderr)
            assert 'loading' not in p.stderr and 'model memory' not in p.stderr, (option, p.stderr)


def test_two_options_with_one_port_name_each_other():
    port = str(free_ports(1)[0])
    for option in '--pd-comm-port', '--engine-worker-queue-port':
        p = subprocess.run([BIN, 'serve', '--model', TINY, '--host', '127.0.0.1', '--port', port, option, port], capture_output=True, text=True, timeout=60)
        assert p.returncode == 1 and 'another port option of this node has the same port' in p.stderr and 'stop it' not in p.stderr, (option, p.returncode, p.stderr)


def test_a_kv_port_is_held_only_where_a_transport_listens():
    """Not by a node without tcp; with an interface not on other addresses of the host."""
    with taken_port() as port:
        with closing(Node(TINY, args=['--cache-transfer-protocol', 'ipc', '--cache-queue-port', str(port)])) as node:
            wait_ready(node)
    with socket.socket() as s:
        s.bind(('127.0.0.2', 0))
        s.listen(1)
        port = s.getsockname()[1]
        with closing(Node(TINY, args=['--cache-transfer-protocol', 'tcp', '--cache-queue-port', str(port)],
                          env=dict(BATON_CLUSTER_SECRET='of-this-test-alone', KVCACHE_SOCKET_IFNAME='lo'))) as node:
            wait_ready(node)
            assert f'kv_port={port} ' in node.output(), node.output()


def ask6(port, path, body=None):
    c = http.client.HTTPConnection('::1', port, timeout=60)
    try:
        c.request('POST' if body else 'GET', path, json.dumps(body) if body else None, {'Content-Type': 'application/json'})
        r = c.getresponse()
        return r.status, json.loads(r.read() or b'null')
    finally:
        c.close()


def check_ipv6():
    """Runs in a network namespace whose only address is ::1."""
    body = dict(model='m', prompt=list(range(5, 45)), max_tokens=6, temperature=0, ignore_eos=True, return_trace=True)
    redis = subprocess.Popen(['redis-server', '--port', '6390', '--bind', '::1', '--save', '', '--appendonly', 'no'], stdout=subprocess.DEVNULL)
    texts = set()
    try:
        for n, (host, where) in enumerate((('::1', None), ('[::1]', '[::1]:8990'), ('::1', 'redis'))):
            ports = 8900 + 10 * n, 8901 + 10 * n
            common = ['--advertise-host', '::1'] if n == 1 else []
            if where == 'redis':
                common += ['--scheduler-name', 'splitwise', '--scheduler-host', '::1', '--scheduler-port', '6390']
            first = ['--engine-worker-queue-port', '8990'] if where != 'redis' else []
            second = [] if where == 'redis' else ['--router', where] if where else ['--innode-prefill-ports', '8990']
            env = dict(os.environ, BATON_CLUSTER_SECRET='s') if n else dict(os.environ)
            nodes = [subprocess.Popen([BIN, 'serve', '--model', TINY, '--served-model-name', 'm', '--host', host, '--port', str(port), '--compute-threads', '1',
                                       '--splitwise-role', role, '--cache-transfer-protocol', ('ipc', 'tcp', 'ipc,tcp')[n], *common, *more], env=env)
                     for port, role, more in ((ports[0], 'prefill', first), (ports[1], 'decode', second))]
            try:
                for port in ports:
                    wait_until('two nodes', lambda: len(ask6(port, '/cluster')[1].get('nodes', [])) == 2, 60)
                for port in ports:
                    s, b = ask6(port, '/v1/completions', body)
                    assert s == 200 and b['baton']['prefill_node'] == f'[::1]:{ports[0]}' and b['baton']['decode_node'] == f'[::1]:{ports[1]}', (s, b)
                    texts.add(b['choices'][0]['text'])
                p = subprocess.run([BIN, 'status', '--url', f'http://[::1]:{ports[1]}'], capture_output=True, text=True, timeout=60)
                assert p.returncode == 0 and p.stdout.count('[::1]:') == 3, (p.stdout, p.stderr)
            finally:
                for x in nodes:
                    x.terminate()
                assert [x.wait(20) for x in nodes] == [0, 0]
    finally:
        redis.terminate()
        redis.wait(20)
    launcher = subprocess.Popen([BIN, 'launch', '--model', TINY, '--served-model-name', 'm', '--host', '::1', '--prefill', '1', '--decode', '1', '--ports', '8950,8951'],
                                stderr=subprocess.PIPE, text=True)
    try:
        for line in launcher.stderr:
            if line.startswith('ready: all 2 nodes'):
                break
        else:
            raise AssertionError('launch was never ready')
        s, b = ask6(8951, '/v1/completions', body)
        assert s == 200, b
        texts.add(b['choices'][0]['text'])
    finally:
        launcher.terminate()
        launcher.communicate(timeout=60)
    assert len(texts) == 1, texts


def test_a_host_that_has_only_ipv6():
    """By --innode-prefill-ports, by --router, by Redis and by launch; over ipc and tcp."""
    if not shutil.which('redis-server'):
        raise Skip('redis-server is not installed')
    setup = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo && ip -6 addr show dev lo | grep -q ::1'
    if not shutil.which('ip') or subprocess.run(['unshare', '-n', 'sh', '-c', setup], capture_output=True).returncode != 0:
        raise Skip('no network namespace of its own with IPv6 can be made here (unshare -n, ip)')
    p = subprocess.run(['unshare', '-n', 'sh', '-c', f'{setup} && exec "$@"', 'sh', sys.executable, os.path.abspath(__file__)],
                       env=dict(os.environ, **{CHECK: '1'}), capture_output=True, text=True, timeout=300)
    assert p.returncode == 0, p.stdout + p.stderr


if __name__ == '__main__' and os.environ.get(CHECK):
    check_ipv6()
