"""Nodes of several ranks (--tensor-parallel-size) answer like one process: alone, in groups that share experts, in pairs of different sizes, and after a loss."""
from harness import *
from moved import check, kv_bytes_per_token
from test_parallel import SIZE, answers_alone, ask_all, golden, launched, under_load, vocab_of
from test_ranks import Parent, bodies_for, children_of, is_gone, words_of


def number_of(pid, name):
    return next((int(w.split('=')[1]) for w in words_of(pid) if w.startswith(f'--{name}=')), -1)


def processes(parent):
    """{(data-parallel rank or -1, tensor-parallel rank): pid}"""
    return {(number_of(p, 'data-parallel-rank'), number_of(p, 'tensor-parallel-rank')): p for p in children_of(parent.p.pid)}


def tensor(size):
    return ['--tensor-parallel-size', str(size)]


def test_a_node_of_several_ranks_answers_as_one():
    for name, size in (('qwen3_moe', 2), ('qwen3_moe', 4), ('llama', 2), ('deepseek_v3', 4)):
        model = golden(name)
        bodies = bodies_for(model)
        want = answers_alone(model, bodies)
        with closing(Parent(model, 1, tensor(size))) as parent:
            wait_ready(parent)
            assert ask_all([parent.port], bodies) == want, (name, size)
            assert len(children_of(parent.p.pid)) == size
            view = request(parent.port, 'GET', '/cluster')[2]
            assert len(view['nodes']) == 1, view
            pids = children_of(parent.p.pid)
            began = time.monotonic()
            assert parent.stop() == 0, parent.output()[-3000:]
            assert time.monotonic() - began < 5 and all(is_gone(p) for p in pids)
            assert 'node ends' not in parent.output() and ' error ' not in parent.output(), parent.output()[-3000:]


def test_nodes_of_several_ranks_share_experts():
    model = golden('deepseek_v3')
    bodies = bodies_for(model)
    want = answers_alone(model, bodies)
    with closing(Parent(model, 2, tensor(2))) as parent:
        wait_ready(parent)
        assert ask_all([parent.port], bodies) == want
        assert sorted(processes(parent)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        nodes = request(parent.port, 'GET', '/cluster')[2]['nodes']
        groups = sorted((g['rank'], g['size'], tuple(g['members'])) for g in (request(n['http_port'], 'GET', '/cluster')[2]['group'] for n in nodes))
        assert groups == [(0, 4, (0, 1, 2, 3)), (2, 4, (0, 1, 2, 3))], groups
        assert parent.stop() == 0, parent.output()[-3000:]
        assert 'node ends' not in parent.output() and ' error ' not in parent.output(), parent.output()[-3000:]


def test_ranks_that_are_started_by_hand():
    """They say whom they wait for; one that is told to end does not wait for the other."""
    model, meet = golden('llama'), free_ports(1)[0]
    args = [*SIZE, *tensor(2), '--tensor-parallel-port', str(meet)]
    bodies = bodies_for(model, 6)
    want = answers_alone(model, bodies)
    with closing(Node(model, args=[*args, '--tensor-parallel-rank', '0'])) as first:
        wait_until('it waits', lambda: 'rank 1 of 2 is not there' in request(first.port, 'GET', '/ready')[2]['error']['message'])
        with closing(Node(model, args=[*args, '--tensor-parallel-rank', '1', '--max-num-batched-tokens', '64'])):
            wait_until('it is refused', lambda: '64 rows per step, mixed, and rank 0 has model' in request(first.port, 'GET', '/ready')[2]['error']['message'] and 'rank refused' in first.output())
        with closing(Node(model, args=[*args, '--tensor-parallel-rank', '1'])) as second:
            wait_ready(first)
            assert ask_all([first.port], bodies) == want
            began = time.monotonic()
            assert first.stop() == 0 and time.monotonic() - began < 4
            assert second.p.wait(10) == 75


def test_a_launch_of_nodes_of_several_ranks():
    model = golden('llama')
    bodies = bodies_for(model, 8)
    want = answers_alone(model, bodies)
    ports = free_ports(2)
    l = Process([BIN, 'launch', '--model', model, '--served-model-name', 'm', '--prefill', '1', '--decode', '1', '--ports', ','.join(map(str, ports)), '--compute-threads', '1', *tensor(2), *SIZE], name='launch')
    with closing(l):
        wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output(), 60)
        assert len(children_of(l.p.pid)) == 4
        assert ask_all(ports, bodies) == want
        trace = request(ports[0], 'POST', '/v1/completions', {**bodies[0], 'max_tokens': 5, 'return_trace': True})[2]['baton']
        assert trace['prefill_node'] != trace['decode_node'], trace
        assert l.stop() == 0, l.output()[-2000:]


def test_a_node_that_loses_a_rank_starts_again():
    """The rank that leads its node, and one that follows; the other node of the group goes on with all experts."""
    model = golden('qwen3_moe')
    bodies = bodies_for(model, 10, 40)
    want = answers_alone(model, bodies)
    with closing(Parent(model, 2, tensor(2))) as parent:
        wait_ready(parent)
        for victim in ((1, 1), (0, 0), (0, 1)):
            before = processes(parent)
            with under_load([parent.port], bodies, want):
                time.sleep(0.3)
                os.kill(before[victim], signal.SIGKILL)
                wait_until('all processes of the node are new', lambda: {k for k, p in processes(parent).items() if before.get(k) != p} == {(victim[0], 0), (victim[0], 1)} and len(processes(parent)) == 4, 20)
                wait_until('the group is whole', lambda: whole_groups(parent.port) == 2, 20)
        assert parent.stop() == 0, parent.output()[-3000:]
        lines = parent.output().splitlines()
        assert [rank for rank in (3, 0, 1) if not any(f' rank={rank} role=mixed ' in l and 'signal=9' in l for l in lines)] == [], 'node ended has the number in the group'
        assert not [l for l in lines if ' node ends ' in l and 'was aborted here' in l], 'it does not say which rank was lost'


def whole_groups(port):
    """How many of the nodes say that their group is whole."""
    n = 0
    for node in request(port, 'GET', '/cluster')[2]['nodes']:
        with contextlib.suppress(OSError):
            group = request(node['http_port'], 'GET', '/cluster', timeout=2)[2].get('group')
            n += bool(group and group['together'] and len(group['members']) == group['size'])
    return n


def test_a_stopped_rank_of_a_node():
    """It is found frozen, its node ends and starts again when it is gone."""
    model = golden('qwen3_moe')
    bodies = bodies_for(model, 6, 40)
    want = answers_alone(model, bodies)
    with closing(Parent(model, 2, tensor(2))) as parent:
        wait_ready(parent)
        before = processes(parent)
        with under_load([parent.port], bodies, want):
            time.sleep(0.3)
            os.kill(before[1, 1], signal.SIGSTOP)
            wait_until('its leader is new', lambda: processes(parent).get((1, 0), before[1, 0]) != before[1, 0], 20)
            os.kill(before[1, 1], signal.SIGCONT)
            wait_until('it is new', lambda: processes(parent).get((1, 1), before[1, 1]) != before[1, 1], 20)
            wait_until('the group is whole', lambda: whole_groups(parent.port) == 2, 20)


def test_sizes_that_cannot_be():
    for args, said in ((['-tp', '3'], '--tensor-parallel-size 3 does not divide the 4 query heads'),
                       (['-tp', '32'], '-tp is "32", but must be a whole number from 1 to 16'),
                       (['-tp', '2', '--tensor-parallel-rank', '2', '--tensor-parallel-port', '7000'], '--tensor-parallel-rank 2 is not a rank of --tensor-parallel-size 2: they count from 0 to 1'),
                       (['-tp', '2', '--tensor-parallel-rank', '1'], 'give --tensor-parallel-port'),
                       (['-tp', '2', '--tensor-parallel-rank', '1', '--tensor-parallel-port', '7000', '--tensor-parallel-address', 'here'], '--tensor-parallel-address here is not an IP address'),
                       (['-tp', '2', '--tensor-parallel-rank', '0', '--tensor-parallel-port', '7000', '--pd-comm-port', '7001'], '--pd-comm-port 7001 and --tensor-parallel-port 7000 must be the same')):
        p = subprocess.run([BIN, 'serve', golden('qwen3_moe'), '--host', '127.0.0.1', '--port', str(free_ports(1)[0]), *args], capture_output=True, text=True, timeout=60)
        assert p.returncode in (1, 2) and said in p.stderr, (args, p.returncode, p.stderr)


# ---- pairs ----

SHAPES = [(tp, dp) for tp in (1, 2, 4) for dp in (1, 2, 4)]


def side(model, role, shape, control, protocol, args=()):
    tp, dp = shape
    view = ['--engine-worker-queue-port', str(control)] if role == 'prefill' else ['--router', f'127.0.0.1:{control}']
    return Parent(model, dp, [*tensor(tp), '--splitwise-role', role, '--cache-transfer-protocol', protocol, '--scheduler-ttl', '30', *view, *args], {'BATON_CLUSTER_SECRET': 'pairs of different sizes'})


def pairs_equal_one(name, pairs, protocol, n=6):
    model = golden(name)
    bodies = bodies_for(model, n, 8)
    want = answers_alone(model, bodies)
    for prefill, decode in pairs:
        what = f'{name} by {protocol}: prefill TP{prefill[0]} DP{prefill[1]}, decode TP{decode[0]} DP{decode[1]}'
        control = free_ports(1)[0]
        with closing(side(model, 'prefill', prefill, control, protocol), side(model, 'decode', decode, control, protocol)) as both:
            wait_ready(*both)
            wait_sees(both, prefill[1] + decode[1])
            got = parallel([lambda i=i, b=b: request(both[i % 2].port, 'POST', '/v1/completions', {**b, 'return_trace': True}) for i, b in enumerate(bodies)], 4)
            try:
                check(want, bodies, got, kv_bytes_per_token(model, decode[0]), protocol)
            except AssertionError as e:
                raise AssertionError(what) from e
        print(f'  equal: {what}', flush=True)


def test_pairs_of_different_sizes():
    pairs_equal_one('qwen3_moe', [((1, 2), (4, 1)), ((4, 1), (2, 2))], 'ipc')
    pairs_equal_one('llama', [((2, 1), (4, 1))], 'tcp')
    pairs_equal_one('deepseek_v3', [((4, 1), (1, 2)), ((2, 1), (4, 1))], 'tcp')


def test_all_pairs_long():
    for name in ('qwen3_moe', 'llama', 'deepseek_v3'):
        for protocol in ('ipc', 'tcp'):
            pairs_equal_one(name, [(p, d) for p in SHAPES for d in SHAPES], protocol)
