"""`baton doctor` beside real nodes: what is a directory server, what a node makes of being asked, and one figure for the KV cache."""
import http.server, re
from harness import *
from test_bench_kv import baton, doctor, lines, states

SECRET = {'BATON_CLUSTER_SECRET': 'of the test'}


def cluster_view(*args, env=None):
    _, out, err = baton('doctor', '--port', '0', '--json', *args, env=env)
    assert out, err
    line, = lines(json.loads(out), 'cluster view')
    return line


class Web(http.server.BaseHTTPRequestHandler):
    """Another service: it answers everything with a page."""

    def do_POST(self):
        self.send_response(200)
        self.send_header('Content-Length', '2')
        self.end_headers()
        self.wfile.write(b'{}')

    def log_message(self, *args):
        pass


def test_only_a_directory_server_passes_as_one():
    control = free_ports(1)[0]
    web = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Web)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    with closing(Node(TINY, 'prefill', ['--engine-worker-queue-port', str(control)], {**SECRET, 'BATON_ADVERTISE_HOST': '127.0.0.1'})) as node, socket.create_server(('127.0.0.1', 0)) as other:
        wait_until('live', lambda: request(node.port, 'GET', '/live')[0] == 200)
        wait_until('it is in the view', lambda: 'has 1 nodes' in cluster_view('--router', f'127.0.0.1:{control}', env=SECRET)['text'])
        line = cluster_view('--innode-prefill-ports', str(control), env=SECRET)
        assert line['result'] == 'ok' and 'is a directory server' in line['text'], line
        for env in ({}, {'BATON_CLUSTER_SECRET': 'another'}):
            line = cluster_view('--router', f'127.0.0.1:{control}', env=env)
            assert line['result'] == 'fail' and 'another cluster secret' in line['text'] and 'BATON_CLUSTER_SECRET' in line['fix'], line
        for port, says in ((node.port, 'HTTP status 404'), (web.server_address[1], 'HTTP status 200')):
            line = cluster_view('--router', f'127.0.0.1:{port}', env=SECRET)
            assert line['result'] == 'fail' and 'is no directory server' in line['text'] and says in line['text'] and 'held by this launcher' in line['fix'], line
        def greet():
            while True:
                with contextlib.suppress(OSError):
                    c, _ = other.accept()
                    c.sendall(b'SSH-2.0-x\r\n')
        threading.Thread(target=greet, daemon=True).start()
        line = cluster_view('--router', f'127.0.0.1:{other.getsockname()[1]}', env=SECRET)
        assert line['result'] == 'fail' and 'does not answer in HTTP' in line['text'], line
        line = cluster_view('--router', f'127.0.0.1:{free_ports(1)[0]}', env=SECRET)
        assert line['result'] == 'warn' and 'refused' in line['text'], line
    web.shutdown()


def follow(fix):
    """Does what the hint says: a probe server at the address that it names, which is then asked."""
    where = re.search(r'--listen (\S+?)`', fix)[1]
    p = Process([BIN, 'doctor', '--listen', where], name='probe_server')
    with closing(p):
        wait_until('the probe server listens', lambda: 'probe server on' in p.output(), 10)
        assert f'--peers {where}' in fix
        status, report = doctor([where], '--cache-transfer-protocol', 'tcp', env={})
        assert status == 0 and states(report, 'tcp') == {(0, 1): 'measured', (1, 0): 'measured'}, report


def test_a_node_is_not_alarmed_by_a_probe_and_the_hint_works_beside_launch():
    """A node of `baton launch` has a secret that nobody knows: the doctor says how to measure all the same, and the node does not warn."""
    ports = free_ports(2)
    l = Process([BIN, 'launch', '--model', TINY, '--prefill', '1', '--decode', '1', '--ports', f'{ports[0]},{ports[1]}'], name='launch')
    with closing(l):
        wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output(), 30)
        before = len(l.output())
        at = '127.0.0.1:%d' % request(ports[0], 'GET', '/cluster')[2]['cluster_port']
        status, report = doctor([at], env={})
        line, = lines(report, 'peer')
        assert status == 1 and 'another cluster secret' in line['text'], line
        follow(line['fix'])
        time.sleep(0.5)
        said = l.output()[before:]
        assert 'peer=doctor' in said and ' warn ' not in said and ' error ' not in said, said


def test_a_running_node_with_the_secret_is_no_failure():
    cluster = free_ports(1)[0]
    with closing(Node(TINY, args=['--pd-comm-port', str(cluster)])) as node:
        wait_ready(node)
        status, report = doctor([f'127.0.0.1:{cluster}'], env={})
        line, = lines(report, 'peer')
        assert line['result'] == 'warn' and 'running mixed node' in line['text'] and status == 0, report
        follow(line['fix'])
        time.sleep(0.5)
        assert 'peer=doctor' in node.output() and ' warn ' not in node.output(), node.output()


def test_memories_behind_the_kv_cache():
    """A folder that a node would refuse is a failure, more than there is a warning, and looking makes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        at = os.path.join(folder, 'not', 'made')

        def said(what, *args):
            _, out, err = baton('doctor', '--port', '0', '--json', '--model', TINY, *args)
            line, = lines(json.loads(out), what)
            return line['result'], line['text']
        assert said('KV on disk', '--kv-cache-dir', at, '--kv-cache-disk', '0.01')[0] == 'ok' and os.listdir(folder) == []
        assert said('KV on disk', '--kv-cache-dir', at, '--kv-cache-disk', '1000000')[0] == 'warn'
        ranks = '--kv-cache-dir', at, '--kv-cache-disk', '0.01', '--tensor-parallel-size', '2'
        result, text = said('KV on disk', *ranks)
        assert result == 'ok' and '0.01 for each of 2 ranks' in text and os.listdir(folder) == [], (result, text)
        part = os.path.join(at, 'rank-1-of-2')
        os.makedirs(at)
        with open(part, 'w'):
            pass
        result, text = said('KV on disk', *ranks)
        assert result == 'fail' and part in text, (result, text)
        shutil.rmtree(os.path.dirname(at))
        latent = '--model', os.path.join(os.path.dirname(os.path.dirname(TINY)), 'deepseek_v3', 'model'), '--kv-cache-tier-dtype', 'int8', '--swap-space', '0.01'
        p = subprocess.run([BIN, 'doctor', *latent], capture_output=True, text=True, timeout=60)
        assert p.returncode and 'KV of latent attention (MLA) is kept as' in p.stdout, p.stdout
        p = subprocess.run([BIN, 'serve', *latent, '--port', '0'], capture_output=True, text=True, timeout=60)
        assert p.returncode and 'KV of latent attention (MLA) is kept as' in p.stderr and 'weights packed' not in p.stderr, p.stderr
        result, text = said('KV on disk', '--kv-cache-dir', os.path.join(TINY, 'config.json', 'kv'))
        assert result == 'fail' and 'Not a directory' in text, text
        assert said('swap space', '--swap-space', '0.01')[0] == 'ok'
        assert said('swap space', '--swap-space', '1000000')[0] == 'warn'


def test_one_figure_for_the_kv_cache():
    """What the lines of the doctor say is what the node takes."""
    for args in ([], ['--kv-cache-memory', '0.25'], ['--num-gpu-blocks-override', '300']):
        args = ['--model', smollm2(), '--max-model-len', '1024', '--max-num-seqs', '8', *args]
        _, out, err = baton('doctor', '--port', '0', '--json', '--cache-transfer-protocol', 'rdma,tcp', *args)
        report = json.loads(out)
        kv, = lines(report, 'KV cache')
        locked, = lines(report, 'locked memory')
        figure = float(re.search(r'takes about (\d+) MiB', kv['text'])[1])
        if 'unlimited' not in locked['text']:
            assert abs(float(re.search(r'the KV cache takes ([\d.]+) MiB', locked['text'])[1]) - figure) <= 1, (kv, locked)
        others = [c['text'] for c in report['checks'] if 'KV cache' in c['text'] and c is not kv and c is not locked]
        assert not others, others
        with closing(Node(smollm2(), args=args[2:])) as node:
            wait_ready(node)
            took = float(re.search(r'kv_gib=([\d.]+)', node.output())[1]) * 1024
            assert abs(took - figure) <= max(6, figure * 0.1), (took, kv) # two decimals of a GiB; what else runs here takes memory
