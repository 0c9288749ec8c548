"""Requests that a loading or full node passes to another one. The slow load is that of test_signals: weights that take a minute to make."""
import re
from harness import *

SLOW = ['--load-format', 'dummy', '--quantization', 'wint4', '--num-gpu-blocks-override', '64', '--max-model-len', '512']


class LoadingNode(Node):
    may_end_by_force = True # its worker may be inside a long conversion


@contextlib.contextmanager
def slow_model():
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(os.path.join(DATA, 'configs', 'llama-3-8b', 'config.json'), folder)
        yield folder


def at(redis):
    return ['--scheduler-name', 'splitwise', '--scheduler-host', '127.0.0.1', '--scheduler-port', str(redis.port)]


def wait_live(node):
    wait_until('live', lambda: request(node.port, 'GET', '/live', timeout=2)[0] == 200)


def passed(node, reason, outcome, headers=None):
    return metrics(node.port, headers)[f'baton_requests_passed_total{{reason="{reason}",outcome="{outcome}"}}']


BODY = dict(model='m', prompt=[5, 6, 7], max_tokens=12, temperature=0, ignore_eos=True, return_token_ids=True)


def test_a_loading_node_passes_requests_on():
    """The answers are the other node's, bit for bit, streamed or not; probes and strangers get what they got before."""
    key = {'Authorization': 'Bearer k'}
    env = {'BATON_API_KEY': 'k'}
    with slow_model() as folder, closing(Redis()) as redis, closing(Node(TINY, args=at(redis), env=env)) as ready:
        wait_ready(ready)
        with closing(LoadingNode(folder, args=[*at(redis), *SLOW], env=env)) as loading:
            wait_live(loading)
            want = request(ready.port, 'POST', '/v1/completions', BODY, key)
            got = request(loading.port, 'POST', '/v1/completions', BODY, {**key, 'x-request-id': 'mine'})
            assert want[0] == 200 and got[0] == 200, (want, got)
            assert got[2]['choices'][0]['token_ids'] == want[2]['choices'][0]['token_ids']
            assert got[1]['x-request-id'] == 'mine', got[1]
            events = list(stream(loading.port, '/v1/completions', BODY, key))
            assert [t for e in events for c in e['choices'] for t in c.get('token_ids') or []] == want[2]['choices'][0]['token_ids'], events
            wrong = request(loading.port, 'POST', '/v1/completions', {**BODY, 'temperature': 'hot'}, key)
            assert wrong[0] == 400 and wrong[2]['error']['param'] == 'temperature', wrong
            for method, path, headers in (('POST', '/v1/completions', {}), ('POST', '/v1/completions', {'Authorization': 'Bearer x'}), ('GET', '/ready', key),
                                          ('GET', '/v1/models', key), ('POST', '/v1/completions', {**key, 'x-baton-passed': 'other'})):
                status, got_headers, body = request(loading.port, method, path, BODY if method == 'POST' else None, headers)
                assert status == 503 and got_headers['retry-after'] == '1' and 'being loaded' in body['error']['message'], (method, path, headers, status, body)
            assert request(loading.port, 'GET', '/live')[0] == 200
            ready.kill()
            ready.p.wait()
            status, headers, body = request(loading.port, 'POST', '/v1/completions', BODY, key)
            assert status == 503 and headers['retry-after'] == '1' and 'being loaded' in body['error']['message'], (status, body)
            assert loading.alive(), loading.output()


def test_a_loading_node_passes_by_the_name_of_the_model():
    """Two models are in the topic: a request that names one goes to its node. One without a name, with an unknown one or with one that
    both have waits for this node."""
    qwen = os.path.join(DATA, 'goldens', 'qwen2', 'model')
    with slow_model() as folder, closing(Redis()) as redis, \
            closing(Node(TINY, args=[*at(redis), '--served-model-name', 'tiny']), Node(qwen, args=[*at(redis), '--served-model-name', 'q', 'qwen:tiny'])) as nodes:
        wait_ready(*nodes)
        wait_sees(nodes, 2)
        want = {name: request(n.port, 'POST', '/v1/completions', {**BODY, 'model': name}) for n, name in zip(nodes, ('tiny', 'qwen:tiny'))}
        assert all(w[0] == 200 for w in want.values()), want
        with closing(LoadingNode(folder, args=[*at(redis), *SLOW])) as loading:
            wait_live(loading)
            for name in ('tiny', 'qwen:tiny', 'tiny'):
                got = request(loading.port, 'POST', '/v1/completions', {**BODY, 'model': name})
                assert got[0] == 200 and got[2]['choices'][0]['token_ids'] == want[name][2]['choices'][0]['token_ids'], (name, got)
            for body in (BODY, {**BODY, 'model': 'other'}, {k: v for k, v in BODY.items() if k != 'model'}):
                status, headers, answer = request(loading.port, 'POST', '/v1/completions', body)
                assert status == 503 and headers['retry-after'] == '1' and 'being loaded' in answer['error']['message'], (body, status, answer)


def test_a_node_that_ends_needs_to_pass_nothing():
    """While it finishes its own it is an entry node, and another one computes what comes."""
    with closing(Redis()) as redis, closing(*[Node(smollm2(), args=at(redis)) for _ in range(2)]) as nodes:
        ending, other = nodes
        wait_ready(*nodes)
        wait_sees(nodes, 2)
        short = {**BODY, 'max_tokens': 4}
        want = request(other.port, 'POST', '/v1/completions', short)[2]['choices'][0]['token_ids']
        results = []
        job = threading.Thread(target=lambda: results.append(request(ending.port, 'POST', '/v1/completions', {**BODY, 'max_tokens': 300})), daemon=True)
        job.start()
        wait_until('it works', lambda: metrics(ending.port)['baton_requests_live'] == 1, 10, 0.005)
        ending.kill(signal.SIGTERM)
        wait_until('it ends', lambda: request(ending.port, 'GET', '/ready')[0] == 503, 5, 0.005)
        status, _, body = request(ending.port, 'POST', '/v1/completions', {**short, 'return_trace': True})
        assert status == 200 and body['choices'][0]['token_ids'] == want, (status, body)
        assert body['baton']['decode_node'] == f'127.0.0.1:{other.port}' and passed(ending, 'draining', 'answered') == 0, body['baton']
        job.join(60)
        assert results[0][0] == 200, results
        assert ending.p.wait(10) == 0


def test_two_loading_nodes_answer_for_themselves():
    with slow_model() as folder, closing(Redis()) as redis, closing(*[LoadingNode(folder, args=[*at(redis), *SLOW]) for _ in range(2)]) as nodes:
        for node in nodes:
            wait_live(node)
        for node in nodes:
            status, headers, body = request(node.port, 'POST', '/v1/completions', BODY)
            assert status == 503 and headers['retry-after'] == '1' and 'being loaded' in body['error']['message'], (status, body)


def test_a_stream_ends_with_an_error_when_its_node_dies():
    """... and with the client's leaving the other node stops its work."""
    body = {**BODY, 'max_tokens': 400}
    with slow_model() as folder, closing(Redis()) as redis, closing(Node(smollm2(), args=at(redis))) as ready:
        wait_ready(ready)
        with closing(LoadingNode(folder, args=[*at(redis), *SLOW])) as loading:
            wait_live(loading)
            events = stream(loading.port, '/v1/completions', body)
            assert next(events)['choices']
            wait_until('it works', lambda: metrics(ready.port)['baton_requests_live'] == 1, 5)
            events.close()
            wait_until('it stops', lambda: metrics(ready.port)['baton_requests_live'] == 0, 2)
            events = stream(loading.port, '/v1/completions', body)
            assert next(events)['choices']
            ready.kill()
            *_, last = events
            assert last['error']['type'] == 'server_error' and 'passed' in last['error']['message'], last
            assert loading.alive(), loading.output()


def test_a_signal_ends_a_loading_node_that_passes():
    """The client's stream ends with an error, and the other node stops its work."""
    with slow_model() as folder, closing(Redis()) as redis, closing(Node(smollm2(), args=at(redis))) as ready:
        wait_ready(ready)
        with closing(LoadingNode(folder, args=[*at(redis), *SLOW])) as loading:
            wait_live(loading)
            events = stream(loading.port, '/v1/completions', {**BODY, 'max_tokens': 2000})
            assert next(events)['choices']
            t = time.time()
            loading.kill(signal.SIGTERM)
            status = loading.p.wait(20)
            assert status == 130 and time.time() - t < 3, (status, time.time() - t)
            *_, last = events
            assert last['error']['type'] == 'server_error' and 'send it again' in last['error']['message'], last
            wait_until('it stops', lambda: metrics(ready.port)['baton_requests_live'] == 0, 2)


def test_a_frozen_node_is_left():
    """The node that got the request stops answering: within seconds another one has it."""
    with slow_model() as folder, closing(Redis()) as redis, closing(*[Node(TINY, args=at(redis)) for _ in range(2)]) as nodes:
        wait_ready(*nodes)
        wait_sees(nodes, 2)
        with closing(LoadingNode(folder, args=[*at(redis), *SLOW])) as loading:
            wait_live(loading)
            assert request(loading.port, 'POST', '/v1/completions', BODY)[0] == 200  # it has a view now
            for i, node in enumerate(nodes):
                node.kill(signal.SIGSTOP)
                t = time.time()
                got = parallel([lambda: request(loading.port, 'POST', '/v1/completions', BODY, timeout=30)] * 4, 4)
                took = time.time() - t
                print(f'  {i}: {[g[0] for g in got]} after {took:.2f} s')
                node.kill(signal.SIGCONT)
                assert [g[0] for g in got] == [200] * 4 and took < 8, (got, took)
                wait_ready(node)
                wait_sees(nodes, 2)
                if i == 0:
                    time.sleep(5.5)  # nobody is suspected any more


def test_a_node_that_ends_waits_for_what_it_passed():
    with closing(Redis()) as redis, closing(Node(smollm2(), args=[*at(redis), '--max-concurrency', '1']), Node(smollm2(), args=at(redis))) as nodes:
        full, other = nodes
        wait_ready(*nodes)
        wait_sees(nodes, 2)
        results = []
        jobs = [threading.Thread(target=lambda n: results.append(request(full.port, 'POST', '/v1/completions', {**BODY, 'max_tokens': n})), args=(n,), daemon=True)
                for n in (40, 300)]
        jobs[0].start()
        wait_until('it is full', lambda: metrics(full.port)['baton_requests_live'] == 1, 10, 0.005)
        jobs[1].start()  # the longer one is passed
        wait_until('one is passed', lambda: metrics(other.port)['baton_requests_total'] >= 1, 10, 0.005)
        status = full.stop(30)
        for j in jobs:
            j.join(30)
        assert status == 0 and [r[0] for r in results] == [200, 200], (status, results)


def test_without_passing_a_loading_node_refuses():
    with slow_model() as folder, closing(Redis()) as redis, closing(Node(TINY, args=at(redis))) as ready:
        wait_ready(ready)
        with closing(LoadingNode(folder, args=[*at(redis), *SLOW, '--no-pass-requests'])) as loading:
            wait_live(loading)
            assert request(loading.port, 'POST', '/v1/completions', BODY)[0] == 503


def test_a_restart_costs_no_request():
    """A client that keeps asking the node that is restarted gets 200 for whatever reaches its port."""
    with closing(Redis()) as redis, closing(*[Node(smollm2(), args=at(redis)) for _ in range(2)]) as nodes:
        wait_ready(*nodes)
        wait_sees(nodes, 2)
        node = nodes[0]
        want = request(node.port, 'POST', '/v1/completions', BODY)[2]['choices'][0]['token_ids']
        node.kill()
        node.p.wait()
        time.sleep(3)  # its lease ends: nobody sends work to what was there
        node.start()
        wait_live(node)
        n = 0
        while n < 2 or request(node.port, 'GET', '/ready')[0] != 200:
            status, _, body = request(node.port, 'POST', '/v1/completions', BODY)
            assert status == 200 and body['choices'][0]['token_ids'] == want, (n, status, body)
            n += 1
        print(f'  {n} requests from its start until it was ready; {passed(node, "loading", "answered"):.0f} were passed')
        assert passed(node, 'loading', 'answered') >= 1


def test_a_full_node_passes_requests_on():
    with closing(Redis()) as redis, closing(Node(TINY, args=[*at(redis), '--max-concurrency', '2']), Node(TINY, args=at(redis))) as nodes:
        full, other = nodes
        wait_ready(*nodes)
        wait_sees(nodes, 2)
        body = {**BODY, 'max_tokens': 400}
        want = request(other.port, 'POST', '/v1/completions', body)[2]['choices'][0]['token_ids']
        got = parallel([lambda: request(full.port, 'POST', '/v1/completions', body)] * 60, 30)
        assert [g[0] for g in got] == [200] * 60, [g for g in got if g[0] != 200][:3]
        assert all(g[2]['choices'][0]['token_ids'] == want for g in got)
        n = passed(full, 'full', 'answered')
        print(f'  {n:.0f} of 60 were passed')
        assert n >= 1 and metrics(full.port)['baton_requests_rejected_total{reason="full"}'] == 0
        assert passed(other, 'full', 'answered') == 0
        told = subprocess.run([BIN, 'status', '--port', str(full.port)], capture_output=True, text=True, timeout=30).stdout
        assert re.search(rf'requests that came here: 60, {n:.0f} of them passed to other nodes, \d+ % of the others split', told), told
        status, _, cluster = request(other.port, 'GET', '/cluster')
        assert {c['max_requests'] for c in cluster['nodes']} == {2, 2048}, cluster


def forge(cli, names, record, **changes):
    """Adds a node that a stranger derived from a real one's record."""
    identity = {**json.loads(record['identity']), 'node': '00000000deadbeef', 'name': 'evil', 'max_requests': 0, **changes}
    cli('zadd', names.replace('node', 'alive'), '9e15', identity['node'])
    cli('hset', f'{names}:{identity["node"]}', 'record', json.dumps({**record, 'identity': json.dumps(identity)}), 'role', 'mixed')
    cli('pexpire', f'{names}:{identity["node"]}', '60000')


def test_a_forged_record_gets_nothing():
    """Who can write to Redis, but has no cluster secret, brings in no node: neither keys nor prompts go to its address."""
    key, env = {'Authorization': 'Bearer k'}, {'BATON_API_KEY': 'k', 'BATON_CLUSTER_SECRET': 'the secret of this cluster', 'BATON_ADVERTISE_HOST': '127.0.0.1'}
    heard, port, names = [], free_ports(1)[0], 'baton:{default}:node'

    def listen():
        while True:
            try:
                c = stranger.accept()[0]
            except OSError:
                return
            heard.append(c.recv(4096))
            c.close()
    with closing(Redis()) as redis, closing(Node(TINY, args=[*at(redis), '--max-concurrency', '2'], env=env), Node(TINY, args=at(redis), env=env)) as nodes, \
            socket.create_server(('127.0.0.1', port)) as stranger:
        threading.Thread(target=listen, daemon=True).start()
        wait_ready(*nodes)
        wait_until('they see each other', lambda: all(len(request(n.port, 'GET', '/cluster', headers=key)[2]['nodes']) == 2 for n in nodes))

        def cli(*words):
            return subprocess.run(['redis-cli', '-p', str(redis.port), *words], capture_output=True, text=True, check=True).stdout.strip()
        record = json.loads(cli('hget', f'{names}:{cli("zrange", names.replace("node", "alive"), "0", "0").split()[0]}', 'record'))
        assert len(record['proof']) == 32, record
        forge(cli, names, record, http_port=port)
        wait_until('it is noticed', lambda: 'its record was forged' in (request(nodes[0].port, 'GET', '/cluster', headers=key)[2]['trouble'] or {}).get('text', ''))
        got = parallel([lambda: request(nodes[0].port, 'POST', '/v1/completions', {**BODY, 'max_tokens': 400}, key)] * 40, 30)
        assert [g[0] for g in got] == [200] * 40, [g for g in got if g[0] != 200][:3]
        assert passed(nodes[0], 'full', 'answered', key) >= 1 and not heard, heard
        assert all('proof' not in n and n['name'] != 'evil' for n in request(nodes[0].port, 'GET', '/cluster', headers=key)[2]['nodes'])


def test_without_a_secret_a_record_of_another_host_gets_nothing():
    """Redis and an API key, but no cluster secret: what Redis names outside this host gets neither keys nor prompts."""
    key, names = {'Authorization': 'Bearer k'}, 'baton:{default}:node'
    with closing(Redis()) as redis, closing(Node(TINY, args=[*at(redis), '--max-concurrency', '2'], env={'BATON_API_KEY': 'k'}),
                                            Node(TINY, args=at(redis), env={'BATON_API_KEY': 'k'})) as nodes:
        def cli(*words):
            return subprocess.run(['redis-cli', '-p', str(redis.port), *words], capture_output=True, text=True, check=True).stdout.strip()
        wait_ready(*nodes)
        wait_until('they see each other', lambda: all(len(request(n.port, 'GET', '/cluster', headers=key)[2]['nodes']) == 2 for n in nodes))
        record = json.loads(cli('hget', f'{names}:{cli("zrange", names.replace("node", "alive"), "0", "0").split()[0]}', 'record'))
        forge(cli, names, record, host='192.0.2.1')
        wait_until('it is noticed', lambda: 'only nodes of this host are used' in (request(nodes[0].port, 'GET', '/cluster', headers=key)[2]['trouble'] or {}).get('text', ''))
        got = parallel([lambda: request(nodes[0].port, 'POST', '/v1/completions', {**BODY, 'max_tokens': 400}, key)] * 40, 30)
        assert [g[0] for g in got] == [200] * 40, [g for g in got if g[0] != 200][:3]
        assert passed(nodes[0], 'full', 'answered', key) >= 1
        assert all(n['name'] != 'evil' for n in request(nodes[0].port, 'GET', '/cluster', headers=key)[2]['nodes'])
        assert 'to=evil' not in nodes[0].output() and 'link up peer=evil' not in nodes[0].output()


def test_when_all_are_full_it_is_429():
    with closing(Redis()) as redis, closing(*[Node(TINY, args=[*at(redis), '--max-concurrency', '1', '--max-num-seqs', '1']) for _ in range(2)]) as nodes:
        wait_ready(*nodes)
        wait_sees(nodes, 2)
        got = parallel([lambda: request(nodes[0].port, 'POST', '/v1/completions', {**BODY, 'max_tokens': 60})] * 60, 60)
        refused = [(h, b) for s, h, b in got if s == 429]
        assert {s for s, _, _ in got} == {200, 429} and refused, {s for s, _, _ in got}
        for headers, body in refused:
            assert int(headers['retry-after']) >= 1 and 'this entry node holds as many requests as it may, 1' in body['error']['message'], body
        assert passed(nodes[0], 'full', 'answered') >= 1
        assert passed(nodes[1], 'full', 'answered') + passed(nodes[1], 'full', 'refused') == 0  # what was passed is not passed again
