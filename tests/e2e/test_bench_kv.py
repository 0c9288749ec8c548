"""`baton bench kv` and `baton doctor --peers`: two processes on one host, probe servers with and without the right secret, peers that are
dead, silent or another program. Nothing here asserts a speed."""
from harness import *

SECRET = {'BATON_CLUSTER_SECRET': 'of the test'}


def clean_env(env=None):
    return {**{k: v for k, v in os.environ.items() if not k.startswith(('BATON_CLUSTER', 'BATON_API'))}, **(env or {})}


def baton(*args, env=None, timeout=120):
    r = subprocess.run([BIN, *args], env=clean_env(env), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    return r.returncode, r.stdout, r.stderr


def probe_server(env=SECRET, command=('doctor',)):
    port = free_ports(1)[0]
    p = Process([BIN, *command, '--listen', f'127.0.0.1:{port}'], env, f'probe_server-{port}')
    wait_until('the probe server listens', lambda: 'probe server on' in p.output(), 10)
    p.where = f'127.0.0.1:{port}'
    return p


def doctor(peers, *args, env=SECRET, timeout=120):
    """(exit status, report)"""
    status, out, err = baton('doctor', '--port', '0', '--peers', ','.join(peers), '--json', *args, env=env, timeout=timeout)
    assert out, err
    return status, json.loads(out)


def lines(report, what):
    return [c for c in report['checks'] if c['what'] == what]


def states(report, transport):
    return {(c['from'], c['to']): c['state'] for c in report['mesh'] if c['transport'] == transport}


def test_bench_kv_on_one_host():
    for blocks in ([], ['--contiguous'], ['--checksum', 'off', '--copiers', '2', '--connections', '2']):
        status, out, err = baton('bench', 'kv', '--transport', 'mem,ipc,tcp', '--piece', '4k,16k', '--blocks', '16', '--rounds', '2', '--samples', '50', '--json',
                                 *blocks)
        assert status == 0, (status, out, err)
        doc = json.loads(out)
        assert [(c['transport'], c['piece_bytes']) for c in doc['cells']] == [(t, p) for t in ('mem', 'ipc', 'tcp') for p in (4096, 16384)], doc
        for c in doc['cells']:
            assert c['error'] is None and c['bytes_per_round'] == c['piece_bytes'] * 16 * c['layers'], c
            assert c['bytes_per_second'] > 0 and len(c['rounds']) == 2 and max(c['rounds']) == c['bytes_per_second'], c
            assert c['limit_bytes_per_second'] > 0 and len(c['limit_rounds']) == 2 and c['ratio'] > 0, c
            assert c['limit_name'] == ('iperf3' if shutil.which('iperf3') else 'socket stream') if c['transport'] == 'tcp' else 'memcpy', c
            q = c['latency_us']
            assert q['n'] == 50 and 0 < q['p50'] <= q['p90'] <= q['p99'] <= q['p99.9'], c
            assert c['cpu_seconds_per_gb'] >= 0, c


def test_bench_kv_prints_one_table():
    status, out, err = baton('bench', 'kv', '--transport', 'ipc,tcp', '--piece', '4k..16k', '--blocks', '8', '--rounds', '1', '--samples', '0')
    assert status == 0, (out, err)
    rows = [line.split() for line in out.splitlines() if line.startswith(('ipc', 'tcp'))]
    assert [r[:2] for r in rows] == [['ipc', '4k'], ['ipc', '16k'], ['tcp', '4k'], ['tcp', '16k']], out


def test_bench_kv_without_the_tools():
    """The report names what is not installed; a plain TCP stream replaces iperf3."""
    status, out, err = baton('bench', 'kv', '--transport', 'tcp', '--piece', '4k', '--blocks', '8', '--rounds', '1', '--samples', '0', '--json', env={'PATH': '/nowhere'})
    assert status == 0, (out, err)
    cell = json.loads(out)['cells'][0]
    assert cell['limit_name'] == 'socket stream' and cell['ratio'] > 0, cell


def test_bench_kv_says_what_is_wrong():
    for args, says in ((['bench'], 'say what to measure'), (['bench', 'kv', '--piece', '4q'], "'4q' is not a size"), (['bench', 'kv', '--piece', '4m..4k'], 'goes down'),
                       (['bench', 'kv', '--transport', 'pigeon'], "'pigeon' is not one of"), (['bench', 'kv', '--rounds', '0'], 'from 1 to 100'),
                       (['bench', 'kv', '--listen', 'nowhere'], 'is not host:port'), (['bench', 'kv', '--piece', '64m', '--blocks', '1000'], '1 GiB')):
        status, out, err = baton(*args)
        assert status == 2 and says in err and len(err.strip().splitlines()) == 1, (args, status, out, err)
    status, out, err = baton('bench', 'kv', '--peers', '127.0.0.1:1', '--rounds', '1')
    assert status == 1 and 'connection refused' in err, (status, out, err)


def test_a_transport_that_is_not_there_is_a_row_with_its_reason():
    version = json.loads(baton('version', '--json')[1])
    missing = [t for t in ('rdma', 'ucx') if not version[t]]
    if not missing:
        raise Skip('this binary was built with rdma and ucx')
    status, out, err = baton('bench', 'kv', '--transport', ','.join(missing + ['mem']), '--piece', '4k', '--blocks', '4', '--rounds', '1', '--samples', '0', '--json')
    cells = {c['transport']: c for c in json.loads(out)['cells']}
    assert status == 1 and cells['mem']['error'] is None, (status, cells)
    for t in missing:
        assert 'not in this build' in cells[t]['error'], cells[t]


def test_version_says_what_was_built():
    doc = json.loads(baton('version', '--json')[1])
    assert {'ipc', 'tcp'} <= set(doc['transports']) and 'mem' not in doc['transports'], doc
    assert doc['rdma'] == ('rdma' in doc['transports']) and doc['ucx'] == ('ucx' in doc['transports']), doc
    text = baton('version')[1]
    assert ', '.join(doc['transports']) in text, text


def test_bench_kv_between_agents():
    with closing(probe_server(command=('bench', 'kv'))) as a:
        status, out, err = baton('bench', 'kv', '--peers', a.where, '--transport', 'ipc,tcp', '--piece', '4k', '--blocks', '8', '--rounds', '1', '--samples', '20', '--json',
                                 env=SECRET)
        assert status == 0, (out, err)
        for c in json.loads(out)['cells']:
            assert c['error'] is None and c['to'] == a.where and c['limit_bytes_per_second'] > 0, c
        status, out, err = baton('bench', 'kv', '--peers', a.where, '--rounds', '1', env={'BATON_CLUSTER_SECRET': 'another'})
        assert status == 1 and 'another cluster secret' in err, (status, out, err)


def test_doctor_measures_every_pair():
    with closing(probe_server(), probe_server(), probe_server()) as servers:
        status, report = doctor([a.where for a in servers], '--cache-transfer-protocol', 'ipc,tcp')
        assert status == 0 and report['ok'], report
        pairs = {(i, j) for i in range(4) for j in range(4) if i != j}
        for transport in ('ipc', 'tcp'):
            got = states(report, transport)
            assert set(got) == pairs and set(got.values()) == {'measured'}, got
        assert all(c['bytes_per_second'] > 0 and c['p50_us'] > 0 for c in report['mesh']), report['mesh']
        # Nothing is tried that was not allowed.
        status, report = doctor([servers[0].where], '--cache-transfer-protocol', 'tcp')
        assert status == 0 and {c['transport'] for c in report['mesh']} == {'tcp'}, report['mesh']


def test_doctor_prints_a_matrix():
    with closing(probe_server()) as a:
        status, out, err = baton('doctor', '--port', '0', '--peers', a.where, '--cache-transfer-protocol', 'tcp', env=SECRET)
        assert status == 0, (out, err)
        assert 'tcp: GB/s / p50 us' in out and f'1    {a.where}' in out and 'tcp: 2 of 2 pairs' in out, out


def test_doctor_with_dead_deaf_and_foreign_peers():
    """Each gets a line that says what to do, none hangs the measurement, and peers that answer are still measured."""
    dead = f'127.0.0.1:{free_ports(1)[0]}'
    with closing(probe_server(), probe_server(), probe_server({'BATON_CLUSTER_SECRET': 'another'})) as (good, stopped, foreign), socket.create_server(('127.0.0.1', 0)) as deaf:
        stopped.kill(signal.SIGSTOP)
        deaf_at = '127.0.0.1:%d' % deaf.getsockname()[1]
        t0 = time.monotonic()
        status, report = doctor([good.where, dead, stopped.where, foreign.where, deaf_at, 'nonsense'], '--cache-transfer-protocol', 'tcp')
        took = time.monotonic() - t0
        stopped.kill(signal.SIGCONT)
        assert status == 1 and not report['ok'], report
        peers = lines(report, 'peer')
        assert [p['result'] for p in peers] == ['ok', 'fail', 'fail', 'fail', 'fail', 'fail'], peers
        for p, says in zip(peers, ('answers', 'refused', 'does not answer', 'another cluster secret', 'does not answer', 'is not host:port')):
            assert says in p['text'] and (p['result'] == 'ok' or p['fix']), p
        got = states(report, 'tcp')
        assert got[(0, 1)] == got[(1, 0)] == 'measured' and got[(0, 2)] == got[(3, 1)] == 'not_tried', got
        assert took < 60, took                                     # this would be a hang; no speed is asserted


def test_doctor_meets_a_running_node():
    """At its cluster port a node says who it is; its API port is not a probe server. Neither disturbs the node."""
    cluster = free_ports(1)[0]
    with closing(Node(TINY, args=['--pd-comm-port', str(cluster)], env=SECRET)) as node:
        wait_ready(node)
        status, report = doctor([f'127.0.0.1:{cluster}', f'127.0.0.1:{node.port}'])
        first, second = lines(report, 'peer')
        assert status == 1 and 'running mixed node' in first['text'] and '--listen' in first['fix'], report
        assert 'is no probe server' in second['text'], second
        assert request(node.port, 'POST', '/v1/completions', dict(model='m', prompt=[5, 6, 7], max_tokens=2))[0] == 200


def test_without_a_secret_agents_stay_on_loopback():
    status, out, err = baton('doctor', '--listen', '192.0.2.1:0')
    assert status == 2 and 'loopback only' in err, (status, out, err)
    with closing(probe_server({})) as a:
        assert 'no cluster secret' in a.output(), a.output()
        status, report = doctor([a.where], '--cache-transfer-protocol', 'ipc', env={})
        assert status == 0 and states(report, 'ipc') == {(0, 1): 'measured', (1, 0): 'measured'}, report
        assert a.stop() == 0, a.output()


def test_an_agent_survives_its_visitors():
    """A client that disconnects in the middle, one that sends noise, one that sends nothing."""
    with closing(probe_server()) as a:
        host, port = a.where.split(':')
        for data in (b'', b'GET / HTTP/1.1\r\n\r\n', os.urandom(500), b'BTN1' + bytes(28)):
            with socket.create_connection((host, int(port))) as s:
                s.sendall(data)
        bench = Process([BIN, 'bench', 'kv', '--peers', a.where, '--transport', 'tcp', '--piece', '64k', '--rounds', '100'], SECRET, 'visitor')
        wait_until('it measures', lambda: 'to ' in bench.output(), 10)
        time.sleep(0.3)
        bench.kill()
        bench.close()
        status, report = doctor([a.where], '--cache-transfer-protocol', 'tcp')
        assert status == 0 and a.alive(), (report, a.output())


def test_a_peer_that_stops_in_the_middle_is_a_line():
    """A peer that freezes while it is measured: the waiting side gives up with a sentence and does not ask it again."""
    with closing(probe_server(), probe_server()) as (good, frozen):
        report = Process([BIN, 'doctor', '--port', '0', '--json', '--peers', f'{frozen.where},{good.where}', '--cache-transfer-protocol', 'tcp'], SECRET, 'doctor')
        with closing(report):
            time.sleep(0.15)                                       # somewhere in the mesh, or before it
            frozen.kill(signal.SIGSTOP)
            try:
                assert report.p.wait(100) in (0, 1), report.output()
            finally:
                frozen.kill(signal.SIGCONT)
            doc = json.loads(report.output())
            if report.p.returncode == 1:
                assert any(c['result'] == 'fail' and c['fix'] for c in doc['checks']), doc
            assert states(doc, 'tcp').get((0, 2)) == 'measured', doc


def test_a_busy_agent_ends_soon():
    with closing(probe_server()) as a:
        with closing(Process([BIN, 'bench', 'kv', '--peers', a.where, '--transport', 'tcp', '--piece', '4k', '--rounds', '100'], SECRET, 'visitor')) as bench:
            wait_until('it measures', lambda: 'to ' in bench.output(), 10)
            time.sleep(0.3)
            assert a.stop(10) is not None, 'the probe_server had to be killed'
            assert bench.p.wait(60) == 1 and 'not measured' in bench.output(), bench.output()
