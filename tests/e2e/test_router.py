"""`baton router`: one address before nodes that register with it, or that it lists."""
import concurrent.futures, contextlib, http.client, json, os, socket, subprocess, tempfile, threading, types
from harness import BIN, DATA, Node, Process, Redis, Skip, TINY, answer_of, closing, free_ports, metrics, mixed_requests, paced, request, stream, wait_ready, wait_until

OTHER = os.path.join(DATA, 'goldens', 'qwen2', 'model')
SECRET = {'BATON_CLUSTER_SECRET': 'a secret of these tests'}
PROMPT = dict(prompt=[5, 6, 7, 8, 9], max_tokens=6, temperature=0, ignore_eos=True, logprobs=2, return_token_ids=True)


class Router(Process):
    def __init__(self, *args, env=None, port=None, host='127.0.0.1'):
        self.port = port or free_ports(1)[0]
        super().__init__([BIN, 'router', '--host', host, '--port', str(self.port), *args], env, f'router-{self.port}')

    def at(self):
        return ['--router', f'127.0.0.1:{self.port}']

    def restart(self):
        if self.alive():
            self.kill()
        self.p.wait()
        self.start()


def why_not_ready(router, headers=None):
    status, _, body = request(router.port, 'GET', '/ready', headers=headers)
    assert status == 503, (status, body)
    return body['error']['message']


def up(router):
    """It answers, whether it is ready or not."""
    wait_until(f'{router.name} answers', lambda: request(router.port, 'GET', '/live', timeout=2)[0] == 200, 20)


def ask(port, headers=None, **more):
    status, _, answer = request(port, 'POST', '/v1/completions', {**PROMPT, **more}, headers)
    assert status == 200, (status, answer)
    return answer


def is_split(port, headers=None):
    trace = ask(port, headers, return_trace=True)['baton']
    assert trace['prefill_node'] != trace['decode_node'] and trace['kv_bytes'] > 0 and trace['recomputed_tokens'] == 0, trace
    return trace


def both_roles(port, n, headers=None):
    """The router sees n nodes, and a request is split."""
    wait_until(f'{port} sees {n} nodes', lambda: len(request(port, 'GET', '/cluster', headers=headers)[2]['nodes']) == n, 20)
    return is_split(port, headers)


def test_nodes_register_and_the_router_takes_its_text_from_them():
    folder = tempfile.mkdtemp()
    router = Router(env={'TMPDIR': folder})
    with closing(router):
        up(router)
        assert f'no node has registered in topic default yet; start nodes with --router 127.0.0.1:{router.port} --model MODEL --port 0' in why_not_ready(router)
        assert request(router.port, 'POST', '/v1/completions', PROMPT)[0] == 503
        assert request(router.port, 'GET', '/registered_number')[2] == {'mixed': 0, 'prefill': 0, 'decode': 0}
        assert metrics(router.port)['baton_ready'] == 0
        prefill, decode = (Node(TINY, role, router.at()) for role in ('prefill', 'decode'))
        with closing(prefill, decode):
            wait_ready(prefill, decode, router)
            both_roles(router.port, 2)
            assert request(router.port, 'GET', '/v1/models')[2]['data'][0]['id'] == 'm'
            assert request(router.port, 'GET', '/registered_number')[2] == {'mixed': 0, 'prefill': 1, 'decode': 1}
            assert request(router.port, 'GET', '/healthcheck')[2] == {'status': 'ok', 'prefill_instances': 1, 'decode_instances': 1}
            cluster = request(router.port, 'GET', '/cluster')[2]
            assert cluster['role'] == 'router' and cluster['model'] == 'm' and not cluster['trouble'], cluster
            told = subprocess.run([BIN, 'status', '--port', str(router.port)], capture_output=True, text=True, timeout=30).stdout.splitlines()
            assert '(router), model m, up ' in told[0] and 'KV by' not in told[0] and told[1].startswith('requests that came here: 1, 100 % of them split'), told
            assert 'This is the API' in request(router.port, 'GET', '/')[2]
            assert metrics(router.port)['baton_ready'] == 1
            for body in mixed_requests(6, 3, 300, 40):  # the same bits and the same text as at a node
                there, here = (request(port, 'POST', '/v1/completions', body) for port in (decode.port, router.port))
                assert there[0] == here[0] == 200 and answer_of(there[2]) == answer_of(here[2]), (there, here)
            there, here = (request(port, 'POST', '/tokenize', {'prompt': 'a text of words'})[2] for port in (decode.port, router.port))
            assert there['tokens'] == here['tokens'] and there['max_model_len'] == here['max_model_len'], (there, here)
            assert os.listdir(folder) == []
        wait_until('nothing decodes', lambda: 'no node that can decode' in why_not_ready(router), 10)
        assert router.stop() == 0
    os.rmdir(folder)


def test_a_router_that_loads_lets_requests_wait_and_passes_none():
    """It passes nothing to the port of a node, which here has another key; strangers, and those who want an answer by a time, are told at once."""
    key, other = {'Authorization': 'Bearer k1'}, {'Authorization': 'Bearer k2'}
    router = Router('--api-key', 'k1', '--placement-timeout', '60', '--pass-requests')
    stuck = Router('--api-key', 'k1', '--placement-timeout', '1', env={'TMPDIR': '/nonexistent'})
    with closing(router, stuck), concurrent.futures.ThreadPoolExecutor(4) as pool:
        up(router)
        up(stuck)
        assert '--pass-requests: a router places on every node itself' in router.output(), router.output()
        waiting = [pool.submit(request, router.port, 'POST', '/v1/completions', PROMPT, key) for _ in range(3)]
        for headers in ({}, {**key, 'x-baton-deadline-ms': '1000'}, {**key, 'x-baton-ttft-ms': '1000'}):
            status, _, said = request(router.port, 'POST', '/v1/completions', PROMPT, headers, timeout=30)
            assert status == 503 and 'no node has registered' in said['error']['message'], (status, said)
        assert not any(w.done() for w in waiting)
        node = Node(TINY, 'mixed', [*router.at(), '--api-key', 'k2'])
        with closing(node):
            wait_ready(node, router)
            assert [w.result(30)[0] for w in waiting] == [200] * 3, [w.result() for w in waiting]
            change(stuck, 'add', 'decode', node, headers=key)
            wait_until('it has seen the node', lambda: 'no folder can be made' in why_not_ready(stuck), 20)
            status, headers, said = request(stuck.port, 'POST', '/v1/completions', PROMPT, key)
            assert status == 503 and headers['retry-after'] == '1' and 'no folder can be made' in said['error']['message'], (status, said)
            assert metrics(node.port, other)['baton_requests_total'] == 0
        late = pool.submit(request, stuck.port, 'POST', '/v1/completions', PROMPT, key)
        assert stuck.stop() == 0  # nor does a request that waits hold up the end
        assert isinstance(late.exception(), OSError) or late.result()[0] == 503


def test_a_full_router_refuses_and_passes_none():
    key, other = {'Authorization': 'Bearer k1'}, {'Authorization': 'Bearer k2'}
    router = Router('--api-key', 'k1', '--max-concurrency', '2')
    with closing(router):
        up(router)
        node = Node(TINY, 'mixed', [*router.at(), *paced(), '--api-key', 'k2'])
        with closing(node), contextlib.ExitStack() as stack:
            wait_ready(node, router)
            for _ in range(2):
                events = stack.enter_context(contextlib.closing(stream(router.port, '/v1/completions', {**PROMPT, 'max_tokens': 500, 'logprobs': None}, key)))
                assert next(events)['choices']
            status, headers, said = request(router.port, 'POST', '/v1/completions', PROMPT, key)
            assert status == 429 and int(headers['retry-after']) >= 1 and 'holds as many requests as it may, 2 (--max-concurrency)' in said['error']['message'], (status, said)
            assert metrics(router.port, key)['baton_requests_rejected_total{reason="full"}'] == 1
            assert metrics(node.port, other)['baton_requests_total'] == 0


def test_the_parsers_are_those_of_the_nodes():
    """A node is told what its template does not show; the router takes that with the text, unless it was told something else."""
    asked = dict(messages=[dict(role='user', content='a')], max_tokens=8, temperature=0, tools=[dict(type='function', function=dict(name='f'))])
    with tempfile.NamedTemporaryFile('w', suffix='.jinja') as template:
        template.write('{% for m in messages %}{{ m.content }}{% endfor %}')
        template.flush()
        routers = [Router(), Router('--tool-call-parser', 'none')]
        with closing(*routers):
            for router in routers:
                up(router)
            node = Node(TINY, 'mixed', [*routers[0].at(), '--chat-template', template.name, '--tool-call-parser', 'hermes', '--reasoning-parser', 'think'])
            with closing(node):
                wait_ready(node, routers[0])
                change(routers[1], 'add', 'decode', node)
                wait_ready(routers[1])
                there, here = (request(port, 'POST', '/v1/chat/completions', asked) for port in (node.port, routers[0].port))
                assert there[0] == here[0] == 200 and there[2]['choices'] == here[2]['choices'], (there, here)
                status, _, said = request(routers[1].port, 'POST', '/v1/chat/completions', asked)
                assert status == 400 and '--tool-call-parser' in said['error']['message'], (status, said)
                for p, tools in ((node, 'hermes'), (routers[0], 'hermes'), (routers[1], 'none')):
                    assert f'reasoning=think tool_calls={tools}' in p.output(), p.output()


def test_a_router_with_keys_and_a_secret():
    """What a key opens and what the secret opens are different things."""
    key = {'Authorization': 'Bearer k1'}
    router = Router('--api-key', 'k1', env=SECRET)
    with closing(router):
        up(router)
        node = Node(TINY, 'mixed', router.at(), SECRET)
        stranger = Node(TINY, 'mixed', router.at(), {'BATON_CLUSTER_SECRET': 'another secret'})
        with closing(node, stranger):
            wait_ready(node, router)
            ask(router.port, key)
            for path, body in (('/v1/completions', PROMPT), ('/instances/add', {'type': 'decode', 'instances': '127.0.0.1:9'}),
                               ('/instances/remove', {'type': 'decode', 'instances': '127.0.0.1:9'}), ('/register', {'role': 'mixed', 'host_ip': '127.0.0.1', 'port': 9})):
                assert request(router.port, 'POST', path, body)[0] == 401, path
                assert request(router.port, 'POST', path, body, {'Authorization': 'Bearer k2'})[0] == 401, path
            assert request(router.port, 'GET', '/registered_number')[0] == 401
            for call in ('snapshot', 'publish', 'leave', 'reserve', 'release', 'meter'):  # a key is no secret
                assert request(router.port, 'POST', '/cluster/v1/' + call, {'topic': 'default'}, key)[0] == 401, call
            for path in ('/cluster/v1/text', '/cluster/v1/records'):
                assert request(node.port, 'GET', path, headers=key)[0] == 401, path
            assert len(request(router.port, 'GET', '/cluster', headers=key)[2]['nodes']) == 1
            wait_until('the stranger is told of', lambda: 'another cluster secret' in router.output(), 10)
            # a body for the view is bounded as at its own port, and one of the API is not
            assert request(router.port, 'POST', '/cluster/v1/snapshot', b'x' * (33 << 10), key)[0] == 413
            assert request(router.port, 'POST', '/tokenize', {'prompt': 'a ' * (17 << 10)}, key)[0] == 200


def test_without_a_secret_only_this_host_calls():
    """The view, a record and a text are given to processes of this host alone, whatever address the API listens on."""
    own = socket.gethostbyname(socket.gethostname())
    router = Router(host='0.0.0.0')
    node = Node(TINY, 'mixed', [*router.at(), '--host', '0.0.0.0'])
    with closing(router, node):
        wait_ready(node, router)
        for port, path, method in ((router.port, '/cluster/v1/snapshot', 'POST'), (node.port, '/cluster/v1/text', 'GET'), (node.port, '/cluster/v1/records', 'GET')):
            body = {'topic': 'default'} if method == 'POST' else None
            assert request(port, method, path, body)[0] == 200, path
            status, _, said = request(port, method, path, body, {'X-Forwarded-For': '10.0.0.1'})
            assert status == 401 and 'BATON_CLUSTER_SECRET' in said['error'], (status, said)
            if not own.startswith('127.'):
                c = http.client.HTTPConnection(own, port, timeout=10)
                c.request(method, path, json.dumps(body) if body else None)
                assert c.getresponse().status == 401, path
                c.close()


def listed(prefills, decodes):
    return ['--prefiller-hosts', *['127.0.0.1'] * len(prefills), '--prefiller-ports', *[str(n.port) for n in prefills],
            '--decoder-hosts', *['127.0.0.1'] * len(decodes), '--decoder-ports', *[str(n.port) for n in decodes]]


def change(router, what, role, *nodes, headers=None):
    status, _, said = request(router.port, 'POST', '/instances/' + what, {'type': role, 'instances': [f'127.0.0.1:{n.port}' for n in nodes]}, headers)
    assert status == 200, said
    return said


def test_listed_nodes_need_not_know_each_other():
    """Nodes without any directory; one is added and one removed while answers stream, and a lost one comes back at its address."""
    nodes = [Node(TINY, role) for role in ('prefill', 'decode', 'decode')]
    prefill, first, second = nodes
    router = Router('--model', TINY, '--served-model-name', 'm', *listed([prefill], [first]))
    with closing(router, *nodes):
        wait_ready(first, second, router)
        wait_until('the prefill node answers', lambda: request(prefill.port, 'GET', '/live')[0] == 200, 10)
        both_roles(router.port, 2)
        assert len(request(first.port, 'GET', '/cluster')[2]['nodes']) == 1  # it knows nobody, ...
        assert request(first.port, 'GET', '/cluster')[2]['trouble'] is None  # ... and is used all the same
        wait_until('it is told of its router', lambda: 'the router that lists it sees one and uses both: send requests there' in why_not_ready(prefill), 10)
        long = dict(prompt=[7, 8, 9], max_tokens=400, temperature=0, ignore_eos=True)
        want = [e['choices'][0]['text'] for e in stream(first.port, '/v1/completions', long)]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            begun = threading.Barrier(7)

            def one():
                got = []
                for e in stream(router.port, '/v1/completions', long):
                    got += [e['choices'][0]['text']]
                    if len(got) == 5:
                        begun.wait(30)
                return got
            answers = [pool.submit(one) for _ in range(6)]
            begun.wait(30)
            said = change(router, 'add', 'decode', second)
            assert said['current_prefill_instances'] == [f'127.0.0.1:{prefill.port}'], said
            assert said['current_decode_instances'] == [f'127.0.0.1:{n.port}' for n in (first, second)], said
            wait_until('both decode', lambda: len(request(router.port, 'GET', '/cluster')[2]['nodes']) == 3, 10)
            status, _, said = request(router.port, 'POST', '/instances/remove', {'type': 'prefill', 'instances': f'127.0.0.1:{first.port}'})
            assert status == 400 and f'127.0.0.1:{first.port} is listed with type decode, not prefill' in said['error'], said
            assert change(router, 'remove', 'decode', first)['current_decode_instances'] == [f'127.0.0.1:{second.port}']
            wait_until('the first is gone', lambda: len(request(router.port, 'GET', '/cluster')[2]['nodes']) == 2, 10)
            assert is_split(router.port)['decode_node'].endswith(str(second.port))
            for a in answers:
                assert ''.join(a.result(60)) == ''.join(want)
        second.restart()
        wait_ready(second)
        wait_until('it decodes again', lambda: request(router.port, 'GET', '/ready')[0] == 200 and is_split(router.port), 20)
        change(router, 'remove', 'prefill', prefill)
        wait_until('nothing is split', lambda: ask(router.port, return_trace=True)['baton']['transport'] == '', 10)


def test_registering_as_with_fastdeploys_router():
    node = Node(TINY, 'mixed')
    router = Router()
    with closing(router, node):
        up(router)
        wait_ready(node)
        gone = free_ports(1)[0]
        status, _, said = request(router.port, 'POST', '/register', {'role': 'mixed', 'host_ip': '127.0.0.1', 'port': gone})
        assert status == 400 and f'127.0.0.1:{gone} cannot be used: it does not answer: nobody listens there' in said['detail'], (status, said)
        assert not request(router.port, 'POST', '/instances/remove', {'type': 'prefill', 'instances': f'127.0.0.1:{gone}'})[2]['current_prefill_instances']
        change(router, 'add', 'decode', dead := types.SimpleNamespace(port=gone))
        wait_until('/ready says it', lambda: f'the listed decode node 127.0.0.1:{gone} cannot be used: it does not answer' in why_not_ready(router), 10)
        change(router, 'remove', 'decode', dead)
        for body in ({}, {'role': 'mixed', 'host_ip': '', 'port': 1}, {'role': 'none', 'host_ip': '127.0.0.1', 'port': 1}, {'role': 'mixed', 'host_ip': '127.0.0.1', 'port': 0}):
            status, _, said = request(router.port, 'POST', '/register', body)
            assert status == 400 and said['detail'], (status, said)
        body = {'role': 'mixed', 'host_ip': '127.0.0.1', 'port': str(node.port), 'metrics_port': 0, 'transfer_protocol': ['ipc', 'rdma'], 'tp_size': 1}
        assert request(router.port, 'POST', '/register', body)[::2] == (200, {'status': 'success'})
        wait_ready(router)
        ask(router.port)
        assert request(router.port, 'GET', '/registered_number')[2] == {'mixed': 1, 'prefill': 0, 'decode': 0}


def test_a_node_that_dies_and_a_router_that_dies():
    """A request goes on without the node; nodes and their own clients go on without the router, and a new one at its address has them again."""
    router = Router()
    with closing(router):
        up(router)
        nodes = [Node(TINY, role, [*router.at(), *paced()]) for role in ('prefill', 'decode', 'decode')]  # an answer is not over before its node is found
        with closing(*nodes):
            wait_ready(*nodes, router)
            both_roles(router.port, 3)
            long = dict(prompt=[3, 4, 5], max_tokens=500, temperature=0, ignore_eos=True)
            want = ''.join(e['choices'][0]['text'] for e in stream(router.port, '/v1/completions', long))
            victim = is_split(router.port)['decode_node']
            got, killed = '', False
            for e in stream(router.port, '/v1/completions', {**long, 'return_trace': True}):
                got += e['choices'][0]['text'] if e['choices'] else ''
                if not killed and len(got) > 20:
                    killed = True
                    for n in nodes[1:]:
                        live = request(n.port, 'GET', '/version')[2]['live_decode']
                        if live:
                            n.kill()
                            victim = n
                            break  # the request may be on the other one next
            assert got == want and not victim.alive(), victim
            victim.restart()
            wait_ready(victim)
            both_roles(router.port, 3)
            router.kill()
            for n in nodes:
                ask(n.port)  # as an entry of its own, with the view seen last
            router.restart()
            wait_ready(router)
            both_roles(router.port, 3)


def test_two_routers_on_one_redis():
    redis = Redis()
    where = ['--scheduler-name', 'splitwise', '--scheduler-host', '127.0.0.1', '--scheduler-port', str(redis.port)]
    routers = [Router(*where), Router('--model', TINY, '--served-model-name', 'm', *where)]
    nodes = [Node(TINY, role, where) for role in ('prefill', 'decode')]
    with closing(redis, *routers, *nodes):
        wait_ready(*nodes, *routers)
        answers = []
        for router in routers:
            both_roles(router.port, 2)
            answers += [answer_of(ask(router.port))]
            status, _, said = request(router.port, 'POST', '/instances/add', {'type': 'decode', 'instances': '127.0.0.1:9'})
            assert status == 400 and 'view of the nodes is not its own' in said['error'], (status, said)
        assert answers[0] == answers[1]
        routers[0].kill()
        is_split(routers[1].port)


def test_a_router_whose_nodes_have_another_model_says_so():
    router = Router('--model', OTHER, '--served-model-name', 'other', '--placement-timeout', '1')
    with closing(router):
        up(router)
        node = Node(TINY, 'mixed', router.at())
        with closing(node):
            wait_ready(node)
            wait_until('it says so', lambda: 'whose vocabulary is not that of other, which this router has' in why_not_ready(router), 20)
            status, _, said = request(router.port, 'POST', '/v1/completions', PROMPT)
            assert status == 503 and 'start the router with the --model of its nodes, or without one' in said['error']['message'], said
            right = Node(OTHER, 'mixed', router.at())
            with closing(right):
                wait_ready(right, router)
                ask(router.port)


def test_options_that_do_not_fit_stop_the_start():
    for args, said in ((['--prefiller-hosts', 'a', 'b', '--prefiller-ports', '1'], 'are 2 hosts, and --prefiller-ports with --prefiller-ports-inc are 1 ports'),
                       (['--decoder-hosts', '127.0.0.1', '--decoder-ports', '9', '--scheduler-name', 'splitwise'], 'list nodes of this router\'s own view'),
                       (['--model', '/nonexistent/model'], '/nonexistent/model')):
        router = Router(*args)
        with closing(router):
            assert router.p.wait(20) == 2 and said in router.output(), router.output()


def test_ports_that_its_processes_cannot_have():
    """A port of the metrics that another program has ends the start with a sentence; the API's own is as good for several processes as for one."""
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = taken.getsockname()[1]
        router = Router('--workers', '2', '--metrics-port', str(port))
        with closing(router):
            assert router.p.wait(20) == 2 and f'cannot listen on 127.0.0.1:{port} (--metrics-port): the port is in use' in router.output(), router.output()
    for args in ((), ('--workers', '2')):
        router = Router('--metrics-port', str(port := free_ports(1)[0]), *args, port=port)
        with closing(router):
            up(router)
            wait_until('the metrics are there', lambda: '# TYPE baton_directory_nodes' in request(port, 'GET', '/metrics')[2], 20)
            assert router.alive(), router.output()
            assert router.stop() == 0


def series_of(text, name):
    return [line for line in text.splitlines() if line.startswith(name + '{')]


def test_processes_that_share_the_port():
    """Nodes register at the shared port and one is listed, whichever process gets the call; the metrics are those of all, and a killed process comes back."""
    key = {'Authorization': 'Bearer k1'}
    env = {**SECRET, 'BATON_API_KEY': 'k1'}
    router = Router('--workers', '2', '--metrics-port', str(admin := free_ports(1)[0]), env=env)
    with closing(router):
        wait_until('the first process answers', lambda: request(router.port, 'GET', '/live', timeout=2)[0] == 200, 20)
        assert 'no node has registered' in why_not_ready(router)
        prefill, decode = Node(TINY, 'prefill', router.at(), env), Node(TINY, 'decode', (), env)
        with closing(prefill, decode):
            wait_until('the decode node answers', lambda: request(decode.port, 'GET', '/ready', timeout=2)[0] == 200, 20)
            assert request(router.port, 'POST', '/instances/add', {'type': 'decode', 'instances': f'127.0.0.1:{decode.port}'}, key)[0] == 200
            assert request(router.port, 'POST', '/instances/add', {'type': 'decode', 'instances': '127.0.0.1:9'})[0] == 401
            wait_until('both processes are ready', lambda: f'ready: http://127.0.0.1:{router.port}/v1, 2 processes' in router.output(), 30)
            for call in ('snapshot', 'publish'):
                assert request(router.port, 'POST', '/cluster/v1/' + call, {'topic': 'default'}, key)[0] == 401
            answers = [ask(router.port, key, return_trace=True) for _ in range(24)]
            assert len({str(answer_of(a)) for a in answers}) == 1
            assert all(a['baton']['prefill_node'].endswith(str(prefill.port)) and a['baton']['decode_node'].endswith(str(decode.port)) for a in answers)
            assert request(router.port, 'GET', '/metrics')[0] == 401
            for text in (request(router.port, 'GET', '/metrics', headers=key)[2], request(admin, 'GET', '/metrics')[2]):
                found = {s.split('"')[1]: float(s.split()[-1]) for s in series_of(text, 'baton_requests_total')}
                assert set(found) == {'0', '1'} and min(found.values()) > 0 and sum(found.values()) == 24, found
                assert series_of(text, 'baton_directory_nodes') == ['baton_directory_nodes{worker="view"} 2'], series_of(text, 'baton_directory_nodes')
                heads = [line for line in text.splitlines() if line.startswith('# TYPE')]
                assert len(heads) == len(set(heads)) > 20
            pids = [int(p) for p in os.listdir('/proc') if p.isdigit() and worker_of(p) == router.p.pid]
            assert len(pids) == 2, pids
            os.kill(pids[0], 9)
            for _ in range(8):
                wait_until('answers', lambda: ask(router.port, key), 10)
            wait_until('a process again', lambda: len([p for p in os.listdir('/proc') if p.isdigit() and worker_of(p) == router.p.pid]) == 2, 20)
            wait_until('it is told of', lambda: 'node started again' in router.output(), 5)
            wait_until('it counts again', lambda: len(series_of(request(admin, 'GET', '/metrics')[2], 'baton_ready')) == 2, 20)
        assert router.stop() == 0
        assert not [p for p in os.listdir('/proc') if p.isdigit() and worker_of(p) == router.p.pid]


def worker_of(pid):
    """The parent of a process with --worker-port; 0: it is none, or has ended."""
    try:
        with open(f'/proc/{pid}/cmdline') as f, open(f'/proc/{pid}/stat') as s:
            return int(s.read().rsplit(')', 1)[1].split()[1]) if '--worker-port' in f.read() else 0
    except OSError:
        return 0

def resident_kib(pid):
    with open(f'/proc/{pid}/status') as f:
        return next(int(line.split()[1]) for line in f if line.startswith('VmRSS:'))


def test_memory_of_waiting_requests():
    """Body and the second copy of the tokens are given up once a request is prepared: what waits takes at most 28 KiB and 4 bytes per token of its prompt."""
    n, length = 600, 1800
    router = Router('--max-queue-time', '86400')
    with tempfile.NamedTemporaryFile('w', suffix='.json') as slow, closing(router):
        json.dump({'fixed_us': 200000, 'prompt': {}, 'decode': {}}, slow)
        slow.flush()
        up(router)
        with open(f'/proc/{router.p.pid}/maps') as maps:
            if 'libasan' in maps.read():
                raise Skip('AddressSanitizer keeps freed memory, so that of a request is not measured')
        node = Node(TINY, 'mixed', [*router.at(), '--max-num-seqs', '1', '--pace', slow.name])
        with closing(node), contextlib.ExitStack() as stack:
            wait_ready(node, router)

            def send(n_tokens, i):
                """A request that will wait, since the node has one place and its steps take long."""
                s = stack.enter_context(socket.create_connection(('127.0.0.1', router.port), 10))
                body = json.dumps(dict(prompt=[5 + (i + k) % 300 for k in range(n_tokens)], max_tokens=200, ignore_eos=True)).encode()
                s.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % len(body) + body)

            def waiting():
                return metrics(router.port)['baton_requests_placing']
            for i in range(50):  # what the first requests need once
                send(length, i)
            wait_until('they wait', lambda: waiting() >= 49, 30)
            took = {}
            for n_tokens in (16, length):
                before, have = resident_kib(router.p.pid), waiting()
                for i in range(n):
                    send(n_tokens, i)
                wait_until('all wait', lambda: waiting() >= have + n - 2, 60)
                took[n_tokens] = (resident_kib(router.p.pid) - before) * 1024 / n
            print('  memory of a waiting request: ' + ', '.join(f'{b / 1024:.1f} KiB with {t} tokens' for t, b in took.items()), flush=True)
            for n_tokens, b in took.items():
                assert b <= (28 << 10) + 4 * n_tokens, (n_tokens, b)
            assert metrics(router.port)['baton_requests_placing'] > 0
