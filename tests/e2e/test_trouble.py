"""A node in trouble says why, everywhere alike: one sentence in the 503, in /ready, in `baton status` and, once, in the log."""
import re
import subprocess

from harness import *

SIZE = ['--max-model-len', '512', '--max-num-seqs', '4', '--num-gpu-blocks-override', '64', '--placement-timeout', '0.5']
ASK = dict(model='m', prompt=[7, 8, 9, 10, 11], max_tokens=4, temperature=0, ignore_eos=True, return_trace=True)
QWEN = os.path.join(DATA, 'goldens', 'qwen2', 'model')


def complete(node):
    return request(node.port, 'POST', '/v1/completions', ASK)


def status_of(node):
    return subprocess.run([BIN, 'status', '--url', f'127.0.0.1:{node.port}'], capture_output=True, text=True, timeout=30).stdout


def trouble_of(node):
    status, _, body = request(node.port, 'GET', '/cluster')
    return (status == 200 and body['trouble']) or None


def live(*nodes):
    wait_until('loaded', lambda: all(request(n.port, 'GET', '/version')[0] == 200 for n in nodes), 60)


def wait_trouble(node, cause, seconds=15):
    live(node)
    wait_until(f'{node.name} in trouble: {cause}', lambda: (trouble_of(node) or {}).get('cause') == cause, seconds)
    return trouble_of(node)


def check_blocked(node, cause, *words):
    """No request is served, and all places say the same."""
    t = wait_trouble(node, cause)
    assert t['blocks'], t
    status, headers, ready = request(node.port, 'GET', '/ready')
    assert status == 503 and 'retry-after' in headers and ready['error']['message'] == t['text'], (status, ready, t)
    status, headers, body = complete(node)
    assert status == 503 and 'retry-after' in headers and body['error']['message'] == t['text'], (status, body, t)
    check_words(node, t, 'NOT READY', 'not ready', words)


def check_degraded(node, cause, *words):
    """Requests are served; what is missing is said all the same."""
    t = wait_trouble(node, cause)
    assert not t['blocks'], t
    assert request(node.port, 'GET', '/ready')[0] == 200
    status, _, body = complete(node)
    assert status == 200, (status, body)
    check_words(node, t, 'DEGRADED', 'degraded', words)
    return body


def check_words(node, t, shown, event, words):
    for w in words:
        assert w in t['text'], (w, t)
    out = status_of(node)
    assert t['text'] in out and shown in out, (t, out)
    for _ in range(30):  # asking often logs nothing more
        request(node.port, 'GET', '/ready')
    lines = [l for l in node.output().split('node ready', 1)[1].split('\n') if t['text'] in l]
    assert len(lines) == 1 and f' {event} cause={t["cause"]} ' in lines[0], lines
    print(f'  {t["cause"]}: {t["text"]}')


def with_redis(redis, *args):
    return ['--scheduler-name', 'splitwise', '--scheduler-host', '127.0.0.1', '--scheduler-port', str(redis), *SIZE, *args]


def test_redis_away():
    """A mixed node that has its model serves alone; a prefill node cannot, and both get well when Redis comes."""
    port = free_ports(1)[0]
    with closing(Node(TINY, 'mixed', with_redis(port)), Node(TINY, 'prefill', with_redis(port))) as (m, p):
        check_degraded(m, 'directory', f'Redis at 127.0.0.1:{port} cannot be used', 'refused', 'this node serves alone', 'baton doctor --scheduler-name splitwise')
        check_blocked(p, 'directory', f'Redis at 127.0.0.1:{port} cannot be used', 'refused', f'--scheduler-port {port}')
        with closing(Redis(port)):
            wait_until('well', lambda: not trouble_of(m) and not trouble_of(p), 15)
            wait_sees([m, p], 2)
            assert complete(p)[0] == 200 and complete(m)[0] == 200


def test_wrong_password():
    with closing(Redis(password='right')) as redis:
        with closing(Node(TINY, 'mixed', with_redis(redis.port, '--scheduler-password', 'wrong')), Node(TINY, 'prefill', with_redis(redis.port))) as (m, p):
            check_degraded(m, 'directory', 'refuses the password: WRONGPASS', '--scheduler-password', 'BATON_REDIS_PASSWORD')
            check_blocked(p, 'directory', 'refuses the password: NOAUTH')


def test_another_reason_is_logged():
    """Redis refuses the connection, then the password: a change of cause is a new line."""
    port = free_ports(1)[0]
    with closing(Node(TINY, 'mixed', with_redis(port))) as m:
        check_degraded(m, 'directory', 'refused')
        with closing(Redis(port, password='right')):
            wait_until('the new reason', lambda: 'NOAUTH' in (trouble_of(m) or {}).get('text', ''), 15)
            assert complete(m)[0] == 200
        wait_until('both logged', lambda: 'refused; check' in m.output() and 'NOAUTH' in m.output(), 10)


def test_router_away_and_wrong_secret():
    control = free_ports(1)[0]
    secret = lambda s: dict(BATON_CLUSTER_SECRET=s)
    routed = ['--router', f'127.0.0.1:{control}', *SIZE]
    with closing(Node(TINY, 'prefill', routed, secret('one'))) as lost:
        check_blocked(lost, 'directory', f'the directory server at 127.0.0.1:{control} cannot be reached', 'refused', '--router')
        with closing(Node(TINY, 'prefill', ['--engine-worker-queue-port', str(control), *SIZE], secret('two'))) as p:
            live(p)
            wait_until('the secret is named', lambda: 'secret' in (trouble_of(lost) or {}).get('text', ''), 15)
            check_blocked(lost, 'directory', 'another cluster secret', 'BATON_CLUSTER_SECRET')
            refused = [l for l in p.output().split('\n') if 'directory call refused' in l]
            assert len(refused) == 1, refused


def test_wrong_secret_between_nodes():
    """Redis brings the nodes together, and they refuse each other: found before a request pays for it."""
    with closing(Redis()) as redis:
        nodes = [Node(TINY, role, with_redis(redis.port), dict(BATON_CLUSTER_SECRET=s)) for role, s in (('prefill', 'one'), ('decode', 'two'))]
        with closing(*nodes) as (p, d):
            check_blocked(p, 'peer', f'decode node 127.0.0.1:{d.port} cannot be connected', 'another cluster secret', 'baton doctor --peers')
            check_degraded(d, 'peer', f'prefill node 127.0.0.1:{p.port} cannot be connected')
            noise = [l for l in p.output().split('\n') if 'link refused' in l or 'peer lost' in l]
            assert len(noise) <= 4, noise


def test_another_model():
    with closing(Redis()) as redis:
        with closing(Node(TINY, 'prefill', with_redis(redis.port)), Node(QWEN, 'decode', with_redis(redis.port))) as (p, d):
            check_blocked(p, 'other-model', f'decode node 127.0.0.1:{d.port} of topic default has another model', 'm (', '--scheduler-topic')
            check_degraded(d, 'other-model', f'prefill node 127.0.0.1:{p.port}')


def test_kv_that_cannot_be_exchanged():
    """The decode node does both, at the first attempt: no request pays for a pair that can never work."""
    pairs = [(['--kv-cache-dtype', 'bf16'], ['--kv-cache-dtype', 'int8'], ('bf16', 'int8', '--kv-cache-dtype')),
             (['--cache-transfer-protocol', 'tcp'], ['--cache-transfer-protocol', 'ipc'], ('no transport in common', '--cache-transfer-protocol'))]
    for prefill_args, decode_args, words in pairs:
        with closing(Redis()) as redis:
            with closing(Node(TINY, 'prefill', with_redis(redis.port, *prefill_args)), Node(TINY, 'decode', with_redis(redis.port, *decode_args))) as (p, d):
                for n in (p, d):
                    body = check_degraded(n, 'kv-exchange', f'prefill node 127.0.0.1:{p.port}', f'decode node 127.0.0.1:{d.port}', *words)
                    assert body['baton']['moves'] == 0 and body['baton']['prefill_node'] == body['baton']['decode_node'], body['baton']
                assert 'request loss' not in p.output() + d.output()


def test_private_view():
    """A role without a way to other nodes: a decode node serves, and says that none will come; a prefill node says how to start one."""
    with closing(Node(TINY, 'decode', SIZE), Node(TINY, 'prefill', SIZE)) as (d, p):
        check_degraded(d, 'private-view', 'role decode', '--router', '--splitwise-role mixed')
        check_blocked(p, 'no-decode-node', 'no node that can decode is in topic default', 'baton serve --splitwise-role decode --router 127.0.0.1:')
        command = re.search(r'start one with: baton (serve .*)', trouble_of(p)['text'])[1]
        with closing(Process(['bash', '-c', f'exec "$0" {command}', BIN], name='pasted')):
            wait_ready(p)
            body = complete(p)[2]
            assert body['baton']['prefill_node'] != body['baton']['decode_node'], body


def test_a_launch_that_nobody_can_join_names_no_command():
    """Its own secret: only its launcher can start the missing node. With the operator's secret another host can, too."""
    for env in {}, dict(BATON_CLUSTER_SECRET='of-the-operator'):
        with tempfile.TemporaryDirectory() as folder:
            model, ports = f'{folder}/model', free_ports(2)
            shutil.copytree(TINY, model)
            l = Process([BIN, 'launch', '--model', model, '--served-model-name', 'm', '--prefill', '1', '--decode', '1', '--ports', f'{ports[0]},{ports[1]}', *SIZE], env, name='launch')
            with closing(l):
                wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output(), 30)
                os.rename(model, f'{folder}/away')
                os.kill(pid_of_port(ports[1]), signal.SIGKILL)
                def text():
                    status, _, body = request(ports[0], 'GET', '/ready')
                    return status == 503 and 'no node that can decode' in body['error']['message'] and body['error']['message']
                said = wait_until('it misses the decode node', text, 30)
                print(f'  {said}')
                assert ('the launcher restarts' in said) == (not env) and ('--router' in said) == bool(env), said


def lines(node, event):
    return [l for l in node.output().split('\n') if f' {event} ' in l]


def test_a_dead_node_is_removed_not_repaired():
    """A node that was killed is in trouble, then forgotten; started again, it is no trouble that is over."""
    with closing(Redis()) as redis:
        with closing(Node(TINY, 'mixed', with_redis(redis.port)), Node(TINY, 'decode', with_redis(redis.port))) as (m, d):
            wait_ready(m, d)
            wait_sees([m, d], 2)
            d.kill()
            wait_until('it is said', lambda: lines(m, 'node removed from the list'), 20)
            removed, = lines(m, 'node removed from the list')
            assert f'node=127.0.0.1:{d.port} cause=peer ' in removed and 'its record has ended' in removed, removed
            assert lines(m, 'degraded') and not lines(m, 'trouble is over'), m.output()


def test_the_lines_of_a_request_share_its_number():
    """The client's x-request-id leads to one number, which the lines of every node have."""
    debug = dict(BATON_LOG_LEVEL='debug')
    with closing(Redis()) as redis:
        with closing(Node(TINY, 'prefill', with_redis(redis.port, '--log-requests'), debug), Node(TINY, 'decode', with_redis(redis.port), debug)) as (p, d):
            wait_ready(p, d)
            wait_sees([p, d], 2)
            status, _, body = request(p.port, 'POST', '/v1/completions', ASK, {'x-request-id': 'mine-42'})
            assert status == 200 and body['baton']['prefill_node'] != body['baton']['decode_node'], body
            begin, = [l for l in lines(p, 'request begin') if 'api_request=mine-42 ' in l]
            assert ' info ' in begin, begin
            number = re.search(r' (request=[0-9a-f]{16}) ', begin)[1]
            for node, events in ((p, ('prompt begin', 'prompt end', 'request end')), (d, ('sequence begin', 'sequence end'))):
                for event in events:
                    wait_until(f'{event} on {node.name}', lambda: any(number in l for l in lines(node, event)), 5)
            for node in (p, d):
                assert not re.search(r' (req|id)=', node.output()), node.output()


def test_a_decode_node_with_little_kv_is_quiet():
    """Requests wait for its blocks: that is a line, counted, not one for each request and try. Without Redis the nodes place by what they saw last."""
    def ask(i, n):
        return request(n.port, 'POST', '/v1/completions', {**ASK, 'prompt': list(range(3, 70)), 'max_tokens': 20 + 13 * (i % 20)})
    with closing(Redis()) as redis:
        with closing(Node(TINY, 'prefill', with_redis(redis.port, '--placement-timeout', '60', '--max-num-seqs', '32')),
                     Node(TINY, 'decode', with_redis(redis.port, '--placement-timeout', '60', '--max-num-seqs', '32', '--num-gpu-blocks-override', '10'))) as nodes:
            wait_ready(*nodes)
            wait_sees(nodes, 2)
            redis.kill()
            wait_until('it is gone', lambda: all(trouble_of(n) for n in nodes), 15)
            before = [len(n.output().split('\n')) for n in nodes]
            got = parallel([lambda i=i, n=n: ask(i, n) for i in range(60) for n in nodes], 120)
            assert [g[0] for g in got] == [200] * 120, [g for g in got if g[0] != 200][:3]
            said = [n.output().split('\n')[k - 1:] for n, k in zip(nodes, before)]
            waits = sum(metrics(n.port)['baton_request_waits_total'] for n in nodes)
            print(f'  {waits:.0f} tries were refused; {[len(t) for t in said]} lines')
            assert waits > 20 and all(len(t) < 12 for t in said), (waits, said)
            assert lines(nodes[1], 'sequence refused') and not lines(nodes[1], 'sequence failed'), nodes[1].output()


def test_status_of_a_node_that_is_not_there_yet():
    port = free_ports(1)[0]
    out = subprocess.run([BIN, 'status', '--url', f'127.0.0.1:{port}'], capture_output=True, text=True, timeout=30)
    assert out.returncode == 1 and 'nothing answers at' in out.stderr, out
