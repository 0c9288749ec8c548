"""Clusters as users start them: with Redis (as in seed 001), without (seed 003), in any order, with restarts, loss, clean ends."""
import re

from harness import *

SIZE = ['--max-model-len', '2048', '--max-num-seqs', '16', '--num-gpu-blocks-override', '256']
ASK = dict(model='m', prompt=[7, 8, 9, 10, 11], max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)


def complete(port, **more):
    status, _, body = request(port, 'POST', '/v1/completions', {**ASK, 'return_trace': True, **more})
    assert status == 200, (status, body)
    return body


def seed_001(model, redis, role, *args, port=None):
    return Node(model, role, ['--scheduler-name', 'splitwise', '--scheduler-host', '127.0.0.1', '--scheduler-port', str(redis.port), '--scheduler-topic', 'test',
                              '--scheduler-ttl', '9000', '--cache-transfer-protocol', 'rdma,ipc', '--tensor-parallel-size', '1', '--data-parallel-size', '1',
                              '--rdma-comm-ports', '7671,7672', '--enable-expert-parallel', *SIZE, *args], port=port)


def test_redis_flushed():
    """Seed 001: a request to each node's port is answered by the pair; Redis flushed between and during requests loses nothing."""
    with closing(Redis()) as redis:
        with closing(seed_001(TINY, redis, 'prefill'), seed_001(TINY, redis, 'decode')) as nodes:
            wait_ready(*nodes)
            wait_sees(nodes, 2)
            first = [complete(n.port) for n in nodes]
            assert first[0]['choices'][0]['token_ids'] == first[1]['choices'][0]['token_ids']
            for a in first:
                assert a['baton']['prefill_node'] != a['baton']['decode_node'] and a['baton']['transport'] == 'ipc', a['baton']
            redis.command('FLUSHALL')
            after = [complete(n.port) for n in nodes]
            jobs = [lambda n=n: complete(n.port, max_tokens=200)['choices'][0]['token_ids'] for n in nodes * 8]
            flusher = threading.Timer(0.05, lambda: [redis.command('FLUSHALL') or time.sleep(0.05) for _ in range(10)])
            flusher.start()
            during = parallel(jobs, 16)
            flusher.join()
            assert all(isinstance(d, list) and d == during[0] for d in during), during[:3]
            assert after[0]['choices'][0]['token_ids'] == first[0]['choices'][0]['token_ids']


def test_redis_killed():
    """Redis dies and comes back empty: requests go on, the view is rebuilt."""
    with closing(Redis()) as redis:
        with closing(seed_001(TINY, redis, 'prefill'), seed_001(TINY, redis, 'decode')) as nodes:
            wait_ready(*nodes)
            wait_sees(nodes, 2)
            redis.kill()
            redis.p.wait()
            for n in nodes:
                complete(n.port)
            redis.start()
            wait_until('redis up again', lambda: redis.command('PING') == b'+PONG', 10)
            wait_sees(nodes, 2)
            for n in nodes:
                complete(n.port)


def test_seed_003():
    """Two commands on one host, no Redis: the decode node names the prefill node's control port. SmolLM2 has 9 heads, so one process each: tests/seeds has the document's four."""
    control, pk, dk = free_ports(3)
    env = dict(INFERENCE_MSG_QUEUE_ID='1315', FLAGS_max_partition_size='2048', FD_ATTENTION_BACKEND='FLASH_ATTN', FD_USE_DEEP_GEMM='0', CUDA_VISIBLE_DEVICES='0,1,2,3')
    common = ['--max-num-seqs', '20', '--gpu-memory-utilization', '0.9', '--kv-cache-ratio', '0.9', '--tensor-parallel-size', '1', '--max-model-len', '1024']
    model = smollm2()
    p = Node(model, 'prefill', [*common, '--num-gpu-blocks-override', '400', '--quantization', 'block_wise_fp8', '--engine-worker-queue-port', str(control), '--cache-queue-port', str(pk)], env)
    d = Node(model, 'decode', [*common, '--num-gpu-blocks-override', '400', '--quantization', 'block_wise_fp8', '--cache-queue-port', str(dk), '--innode-prefill-ports', str(control)], env)
    with closing(p, d) as nodes:
        wait_ready(*nodes)
        wait_sees(nodes, 2)
        for n in nodes:
            status, _, body = request(n.port, 'POST', '/v1/chat/completions', {'messages': [{'role': 'user', 'content': 'What is the capital of France?'}], 'max_tokens': 32,
                                                                               'temperature': 0, 'return_trace': True})
            assert status == 200, body
            assert 'Paris' in body['choices'][0]['message']['content'], body
            assert body['baton']['prefill_node'] != body['baton']['decode_node'], body['baton']


def test_any_start_order_and_restart_on_the_same_ports():
    control = free_ports(1)[0]
    d = Node(TINY, 'decode', [*SIZE, '--innode-prefill-ports', str(control)])
    time.sleep(1)
    p = Node(TINY, 'prefill', [*SIZE, '--engine-worker-queue-port', str(control)])
    with closing(p, d) as nodes:
        wait_ready(p)
        wait_sees(nodes, 2)
        want = complete(d.port)['choices'][0]['token_ids']
        for victim in (d, p):
            assert victim.stop() == 0, victim.output()[-2000:]
            victim.start()
            wait_ready(victim)
            wait_sees(nodes, 2)
            for n in nodes:
                assert complete(n.port)['choices'][0]['token_ids'] == want


def test_alone():
    """No decode node in the topic: the answer says which topics and roles exist."""
    with closing(Redis()) as redis:
        with closing(seed_001(TINY, redis, 'prefill', '--placement-timeout', '1'), Node(TINY, 'mixed', ['--scheduler-name', 'splitwise', '--scheduler-port', str(redis.port), *SIZE])) as (p, other):
            wait_until('both live', lambda: all(request(n.port, 'GET', '/live')[0] == 200 for n in (p, other)), 30)
            wait_ready(other)
            wait_until('the other topic is seen', lambda: 'default' in request(p.port, 'GET', '/ready')[2]['error']['message'])
            status, headers, body = request(p.port, 'POST', '/v1/completions', ASK)
            assert status == 503 and 'retry-after' in headers, (status, headers, body)
            text = body['error']['message']
            assert 'test' in text and 'default' in text and 'prefill' in text and 'mixed' in text, text


def test_four_nodes_share_the_load():
    """2 prefill + 2 decode nodes, 64 concurrent requests to random nodes: all are answered, every node serves at least 16."""
    with pair(TINY, 'ipc', SIZE, prefills=2, decodes=2) as nodes:
        r = random.Random(3)
        jobs = [lambda p=r.choice(nodes).port, i=i: complete(p, prompt=[5 + (i * 7 + k) % 400 for k in range(40 + i)], max_tokens=16) for i in range(64)]
        answers = parallel(jobs, 64)
        served = {}
        for a in answers:
            assert isinstance(a, dict), a
            for k in ('prefill_node', 'decode_node'):
                served[a['baton'][k]] = served.get(a['baton'][k], 0) + 1
        print(f'  served: {served}')
        assert len(served) == 4 and min(served.values()) >= 16, served


def blocks_used(node):
    m = metrics(node.port)
    held = [v for k, v in m.items() if k.startswith('baton_kv_blocks') and 'state="held"' in k]
    assert held, [k for k in m if 'kv' in k]
    return sum(held)


def kill_while_working(victim_role):
    """kill -9 of a node in the middle of answers, which paced steps make long: the entry node runs them again elsewhere, the client sees every token once."""
    n_prompt, n_out, curve = (5, 600, 'quick') if victim_role == 'decode' else (250, 4, 'slow')
    with pair(TINY, 'ipc', [*SIZE, *paced(curve)], prefills=2, decodes=2) as nodes:
        bodies = [dict(prompt=[100 + (i * 37 + k * 11) % 400 for k in range(n_prompt)], max_tokens=n_out) for i in range(4)]
        entry = nodes[0] if victim_role == 'decode' else nodes[2]
        victim = nodes[2] if victim_role == 'decode' else nodes[0]
        answers = [None] * len(bodies)
        threads = [threading.Thread(target=lambda i=i: answers.__setitem__(i, complete(entry.port, **bodies[i]))) for i in range(len(bodies))]
        for t in threads:
            t.start()
        time.sleep(0.7)
        victim.kill()
        t0 = time.monotonic()
        for t in threads:
            t.join(90)
        print(f'  all answers {time.monotonic() - t0:.1f} s after the kill, moves: {[a and a["baton"]["moves"] for a in answers]}')
        assert any(a and a['baton']['moves'] for a in answers), 'nothing was at work on the killed node: the test proves nothing'
        for n in nodes:
            if n.alive():
                wait_until(f'{n.name} holds no blocks', lambda: blocks_used(n) == 0, 10)
        again = parallel([lambda b=b: complete(entry.port, **b) for b in bodies], len(bodies))
        for a, w in zip(answers, again):
            want = w['choices'][0]['token_ids']
            assert a and a['choices'][0]['token_ids'] == want, (a and a['choices'][0]['token_ids'][:10], want[:10])


def test_decode_node_killed():
    kill_while_working('decode')


def test_prefill_node_killed():
    kill_while_working('prefill')


@alone
def test_only_decode_node_killed():
    """No other node can take the request: it gets a clear error within seconds, and the prefill node holds nothing."""
    with pair(smollm2(), 'tcp', [*SIZE, '--placement-timeout', '1']) as (p, d):
        out = []
        t = threading.Thread(target=lambda: out.append(request(p.port, 'POST', '/v1/completions', {**ASK, 'max_tokens': 1500})))
        t.start()
        time.sleep(1)
        d.kill()
        t0 = time.monotonic()
        t.join(30)
        assert out and out[0][0] in (502, 503), out
        assert time.monotonic() - t0 < 5, time.monotonic() - t0
        wait_until('no blocks held', lambda: blocks_used(p) == 0, 10)


@alone
def test_frozen_node():
    """A stopped process is noticed within seconds and its requests continue elsewhere; nothing breaks when it continues."""
    # Paced, or the answers would end before the node is stopped.
    with pair(TINY, 'ipc', [*SIZE, *paced('quick')], prefills=1, decodes=2) as nodes:
        want = complete(nodes[0].port, max_tokens=300)['choices'][0]['token_ids']
        answers = [None] * 4
        threads = [threading.Thread(target=lambda i=i: answers.__setitem__(i, complete(nodes[0].port, max_tokens=300))) for i in range(4)]
        for t in threads:
            t.start()
        time.sleep(0.1)
        nodes[1].kill(signal.SIGSTOP)
        for t in threads:
            t.join(60)
        nodes[1].kill(signal.SIGCONT)
        assert all(a and a['choices'][0]['token_ids'] == want for a in answers)
        assert any(a['baton']['moves'] for a in answers), 'nothing was at work on the stopped node: the test proves nothing'
        wait_sees(nodes, 3)
        for n in nodes:
            assert complete(n.port, max_tokens=200)['choices'][0]['token_ids'] == want[:200]
            wait_until(f'{n.name} holds no blocks', lambda: blocks_used(n) == 0, 10)


def shm_names():
    return {f for f in os.listdir('/dev/shm')} if os.path.isdir('/dev/shm') else set()


@alone
def test_launch():
    """baton launch becomes ready, answers, restarts a killed node at its port, and ends cleanly."""
    before = shm_names()
    ports = free_ports(2)
    l = Process([BIN, 'launch', '--model', TINY, '--served-model-name', 'm', '--prefill', '1', '--decode', '1', '--ports', f'{ports[0]},{ports[1]}', *SIZE], name='launch')
    with closing(l):
        wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output() or (not l.alive() and not print(l.output())), 30)
        for p in ports:
            a = complete(p)
            assert a['baton']['prefill_node'] != a['baton']['decode_node'], a['baton']
        pids = subprocess.run(['pgrep', '-P', str(l.p.pid)], capture_output=True, text=True).stdout.split()
        assert len(pids) == 2, pids
        os.kill(int(pids[1]), signal.SIGKILL)
        wait_until('restarted', lambda: len(set(subprocess.run(['pgrep', '-P', str(l.p.pid)], capture_output=True, text=True).stdout.split()) - set(pids)) == 1, 15)
        for p in ports:
            wait_until('answers again', lambda: request(p, 'POST', '/v1/completions', ASK)[0] == 200, 20)
        pids = subprocess.run(['pgrep', '-P', str(l.p.pid)], capture_output=True, text=True).stdout.split()
        assert l.stop() == 0, l.output()[-2000:]
        for pid in pids:
            assert not os.path.exists(f'/proc/{pid}'), f'{pid} is left'
    assert shm_names() <= before, shm_names() - before


def test_launch_outlives_a_node_that_cannot_start_for_a_while():
    """A node that was ready is tried again whatever it ended with; SIGHUP reaches every log; one control port is the launcher's."""
    ports, control = free_ports(2), free_ports(1)[0]
    with tempfile.TemporaryDirectory() as folder:
        model, away, logs = f'{folder}/model', f'{folder}/away', f'{folder}/logs'
        shutil.copytree(TINY, model)
        l = Process([BIN, 'launch', '--model', model, '--served-model-name', 'm', '--prefill', '1', '--decode', '1', '--ports', f'{ports[0]},{ports[1]}',
                     '--engine-worker-queue-port', str(control), '--log-dir', logs, *SIZE], name='launch')
        with closing(l):
            wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output(), 30)
            assert f'held by this launcher, 127.0.0.1:{control}' in l.output()
            names = ['baton-launch.log', *(f'baton-{p}.log' for p in ports)]
            for name in names:
                os.rename(f'{logs}/{name}', f'{logs}/{name}.old')
            os.rename(model, away)
            l.kill(signal.SIGHUP)
            decode = int(subprocess.run(['pgrep', '-P', str(l.p.pid)], capture_output=True, text=True).stdout.split()[1])
            os.kill(decode, signal.SIGKILL)
            wait_until('it cannot start', lambda: l.output().count('status=2') >= 2, 15)
            assert l.alive() and request(ports[0], 'GET', '/live')[0] == 200
            os.rename(away, model)
            wait_until('it answers again', lambda: all(request(p, 'POST', '/v1/completions', ASK)[0] == 200 for p in ports), 20)
            wait_until('the logs are new', lambda: all(os.path.exists(f'{logs}/{n}') for n in names), 10)


def launch_of_two(model, *args, prefix=(), env=None):
    """A launch of a prefill and a decode node, and their ports."""
    ports = free_ports(2)
    return Process([*prefix, BIN, 'launch', '--model', model, '--served-model-name', 'm', '--prefill', '1', '--decode', '1',
                    '--ports', f'{ports[0]},{ports[1]}', *args, *SIZE], env, name='launch'), ports


def is_ready(launch):
    assert launch.alive(), launch.output()
    return 'ready: all 2 nodes' in launch.output()


def test_a_hangup_ends_a_launch_in_order_and_no_node_by_itself():
    """The terminal closes: as SIGTERM. Under nohup: nothing. With a log file: it is opened again."""
    l, _ = launch_of_two(TINY)
    with closing(l):
        wait_until('launch ready', lambda: is_ready(l), 30)
        l.kill(signal.SIGHUP)
        assert l.p.wait(20) == 0 and 'node ended' not in l.output(), l.output()
    l, ports = launch_of_two(TINY, prefix=['nohup'])
    with closing(l):
        wait_until('launch ready', lambda: is_ready(l), 30)
        l.kill(signal.SIGHUP)
        time.sleep(1)
        assert l.alive() and 'node ended' not in l.output(), l.output()
        assert all(complete(p) for p in ports)
    with tempfile.TemporaryDirectory() as logs:
        l, ports = launch_of_two(TINY, '--log-dir', logs)
        with closing(l):
            wait_until('launch ready', lambda: is_ready(l), 30)
            names = os.listdir(logs)
            for name in names:
                os.rename(f'{logs}/{name}', f'{logs}/{name}.old')
            l.kill(signal.SIGHUP)
            assert all(complete(p) for p in ports) and 'node ended' not in l.output(), l.output()


def test_a_node_that_has_served_is_tried_again_while_another_still_starts():
    """What ends a node that served stops no launch, although the launch was never ready as a whole."""
    with tempfile.TemporaryDirectory() as folder:
        model = f'{folder}/model'
        shutil.copytree(TINY, model)
        l, ports = launch_of_two(model)
        with closing(l):
            slow = wait_until('the decode node is there', lambda: pid_of_port(ports[1]), 10, 0.002)
            os.kill(slow, signal.SIGSTOP)
            try:
                wait_until('the prefill node serves', lambda: request(ports[0], 'GET', '/cluster/self', timeout=2)[0] == 200, 30)
                time.sleep(0.5) # the launcher asks five times a second
                assert 'ready: all' not in l.output(), 'the decode node was stopped too late'
                os.rename(model, f'{folder}/away')
                os.kill(pid_of_port(ports[0]), signal.SIGKILL)
                wait_until('it cannot start', lambda: l.output().count(' node ended port=') >= 2 or not l.alive(), 20)
                assert l.alive(), l.output()
                os.rename(f'{folder}/away', model)
            finally:
                os.kill(slow, signal.SIGCONT)
            wait_until('launch ready', lambda: is_ready(l), 30)
            complete(ports[0])


def test_launches_of_two_hosts_meet():
    """One launch has the prefill nodes, another the decode nodes: they meet in Redis, or at the directory server that --router names."""
    control = free_ports(1)[0]
    with closing(Redis()) as redis:
        in_redis = ['--scheduler-name', 'splitwise', '--scheduler-port', str(redis.port)]
        env = dict(BATON_CLUSTER_SECRET='both', BATON_ADVERTISE_HOST='127.0.0.1')
        for first, second in ((in_redis, in_redis), (['--router', f'127.0.0.1:{control}'],) * 2):
            ports = free_ports(3)
            launches = [Process([BIN, 'launch', '--model', TINY, '--served-model-name', 'm', f'--{role}', '1', '--ports', str(port), *where, *SIZE], env, name=role)
                        for role, port, where in (('prefill', ports[0], first), ('decode', ports[1], second))]
            if first is not in_redis:
                launches.append(Node(TINY, 'decode', ['--engine-worker-queue-port', str(control), *SIZE], env))
            with closing(*launches):
                for l in launches[:2]:
                    wait_until('launch ready', lambda: 'ready: all 1 nodes' in l.output(), 30)
                wait_until('all nodes', lambda: len(request(ports[0], 'GET', '/cluster')[2]['nodes']) == len(launches))
                s, _, b = request(ports[0], 'POST', '/v1/completions', dict(prompt=[7] * 40, max_tokens=4, temperature=0, return_trace=True))
                assert s == 200 and b['baton']['prefill_node'] == f'127.0.0.1:{ports[0]}' != b['baton']['decode_node'], b


def test_a_launch_without_a_secret_says_once_that_no_other_host_can_join():
    """In Redis the launcher makes none."""
    with closing(Redis()) as redis:
        l, _ = launch_of_two(TINY, '--scheduler-name', 'splitwise', '--scheduler-port', str(redis.port))
        with closing(l):
            wait_until('launch ready', lambda: is_ready(l), 30)
            assert l.output().count('no cluster secret (BATON_CLUSTER_SECRET)') == 1, l.output()


def test_launch_prints_one_page_and_its_nodes_are_called_baton():
    ports = free_ports(2)
    with tempfile.TemporaryDirectory() as logs:
        l = Process([BIN, 'launch', '--model', TINY, '--prefill', '1', '--decode', '1', '--ports', f'{ports[0]},{ports[1]}', '--pipeline-parallel-size', '2', '--log-dir', logs, *SIZE],
                    name='launch')
        with closing(l):
            wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output(), 30)
            lines = l.output().splitlines()
            assert len([x for x in lines if x.startswith('note: ')]) == 1 and len([x for x in lines if ' launch' in x and x.startswith('baton ')]) == 1, l.output()
            loose = [x for x in lines if not x.startswith(('baton ', '  ', 'note: ', 'ready: ')) and not re.match(r'\S+Z (info|warn) (launch|127\.0\.0\.1:\d+) ', x)]
            assert not loose, loose
            with open(f'/proc/{l.p.pid}/task/{l.p.pid}/children') as f:
                names = [open(f'/proc/{pid}/comm').read().strip() for pid in f.read().split()]
            assert names == ['baton', 'baton'], names
            assert sorted(os.listdir(logs)) == sorted(['baton-launch.log', *(f'baton-{p}.log' for p in ports)]), os.listdir(logs)
            for p in ports:
                s, _, b = request(p, 'POST', '/v1/completions', dict(prompt=[7] * 40, max_tokens=4))
                assert s == 200, b
            assert 'request end' not in l.output() and 'no cluster secret' not in l.output() # it has made one
    l = Process([BIN, 'launch', '--model', TINY, '--num-servers', '1', '--ports', str(ports[0]), '--log-level', 'warn', '--pipeline-parallel-size', '2'], name='launch')
    with closing(l):
        wait_until('ready', lambda: 'ready: all 1 nodes' in l.output(), 30)
        assert all(x.startswith('ready: ') for x in l.output().splitlines()), l.output()


def is_running(pid):
    try:
        with open(f'/proc/{pid}/stat') as f:
            return f.read().rsplit(')', 1)[1].split()[0] != 'Z'
    except FileNotFoundError:
        return False


def test_nodes_outlive_a_killed_launcher_and_say_so():
    """They keep the view and serve split requests; each logs one line that says what it means and what to do, which works."""
    ports = free_ports(2)
    args = [BIN, 'launch', '--model', TINY, '--served-model-name', 'm', '--prefill', '1', '--decode', '1', '--ports', f'{ports[0]},{ports[1]}', *SIZE]
    l = Process(args, name='launch')
    pids = []
    try:
        with closing(l):
            wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output(), 30)
            pids = [int(x) for x in subprocess.run(['pgrep', '-P', str(l.p.pid)], capture_output=True, text=True).stdout.split()]
            before = len(l.output())
            l.kill()
            for port, pid in zip(ports, pids):
                trouble = wait_until('it is in the trouble', lambda: (lambda t: t and t['cause'] == 'launcher' and t)(request(port, 'GET', '/cluster')[2]['trouble']), 5)
                for words in (f'process {l.p.pid}', 'is gone', 'nobody restarts', 'no other can join', f'kill {pid}', 'baton launch'):
                    assert words in trouble['text'] and not trouble['blocks'], (words, trouble)
                assert request(port, 'GET', '/ready')[0] == 200
            time.sleep(3) # the directory server is away for long by now
            for port in ports:
                a = complete(port)
                assert a['baton']['prefill_node'] != a['baton']['decode_node'], a['baton']
            warnings = [x for x in l.output()[before:].splitlines() if ' warn ' in x]
            for port in ports:
                mine = [x for x in warnings if f' 127.0.0.1:{port} ' in x]
                assert len(mine) == 1 and 'degraded cause=launcher' in mine[0], warnings
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            wait_until('nodes ended', lambda: not any(is_running(p) for p in pids), 15)
        again = Process(args, name='launch')
        with closing(again):
            wait_until('launch ready', lambda: 'ready: all 2 nodes' in again.output(), 30)
            assert request(ports[0], 'GET', '/cluster')[2]['trouble'] is None
    finally:
        for pid in pids:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def test_secret():
    """A node with another secret gets nowhere; with the same one it joins."""
    control = free_ports(1)[0]
    env, other = dict(BATON_CLUSTER_SECRET='one', BATON_ADVERTISE_HOST='127.0.0.1'), dict(BATON_CLUSTER_SECRET='two', BATON_ADVERTISE_HOST='127.0.0.1')
    with closing(Node(TINY, 'prefill', [*SIZE, '--engine-worker-queue-port', str(control)], env), Node(TINY, 'decode', [*SIZE, '--innode-prefill-ports', str(control)], other),
                 Node(TINY, 'decode', [*SIZE, '--innode-prefill-ports', str(control)], env)) as (p, wrong, right):
        wait_ready(p, right)
        wait_sees([p, right], 2)
        time.sleep(1)
        assert len(request(p.port, 'GET', '/cluster')[2]['nodes']) == 2
        complete(p.port)


def test_launcher_takes_the_secret_from_the_file():
    """The secret's file takes precedence over the environment, for the directory server as for nodes; others get 401."""
    ports = free_ports(2)
    with tempfile.NamedTemporaryFile('w') as f:
        f.write('the secret of this file\n')
        f.flush()
        l = Process([BIN, 'launch', '--model', TINY, '--prefill', '1', '--decode', '1', '--ports', f'{ports[0]},{ports[1]}', '--cluster-secret-file', f.name],
                    dict(BATON_CLUSTER_SECRET='another', BATON_ADVERTISE_HOST='127.0.0.1'), name='launch')
        with closing(l):
            wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output(), 30)
            listening = subprocess.run(['ss', '-ltnpH'], capture_output=True, text=True).stdout.splitlines()
            directory_servers = [int(s.split()[3].rsplit(':', 1)[1]) for s in listening if f'pid={l.p.pid},' in s]
            assert len(directory_servers) == 1, listening
            status, _, body = request(directory_servers[0], 'POST', '/cluster/v1/snapshot', '{"topic":"default"}')
            assert status == 401, (status, body)
            assert l.stop() == 0, l.output()[-2000:]
