"""Ranks that share the experts of one model answer like one node that has them all, through every rank, when one is killed and when one is started late."""
from harness import *

SIZE = ['--max-model-len', '512', '--max-num-seqs', '8', '--num-gpu-blocks-override', '96', '--kv-checksum', 'true']
MODELS = 'ernie_moe', 'qwen3_moe', 'deepseek_v3'


def golden(name):
    return f'{DATA}/goldens/{name}/model'


def group_args(size, port):
    return ['--data-parallel-size', str(size), '--enable-expert-parallel', '--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(port), *SIZE]


def vocab_of(model):
    return json.load(open(f'{model}/config.json'))['vocab_size']


def experts_of(model):
    config = json.load(open(f'{model}/config.json'))
    return next(config[k] for k in ('num_experts', 'moe_num_experts', 'n_routed_experts', 'num_local_experts') if k in config)


def ask_all(ports, bodies):
    """Every request through another rank."""
    got = parallel([lambda i=i, b=b: request(ports[i % len(ports)], 'POST', '/v1/completions', b) for i, b in enumerate(bodies)], 8)
    for g in got:
        assert not isinstance(g, Exception) and g[0] == 200, g
    return [answer_of(g[2]) for g in got]


def answers_alone(model, bodies):
    node = Node(model, args=SIZE)
    with closing(node):
        wait_ready(node)
        return ask_all([node.port], bodies)


@contextlib.contextmanager
def launched(model, size, args=()):
    ports, meet = free_ports(size), free_ports(1)[0]
    l = Process([BIN, 'launch', '--model', model, '--served-model-name', 'm', '--num-servers', str(size), '--ports', ','.join(map(str, ports)), *group_args(size, meet), *args], name='launch')
    with closing(l):
        wait_until('launch ready', lambda: f'ready: all {size} nodes' in l.output() or (not l.alive() and not print(l.output())), 60)
        yield l, ports


def test_ranks_of_a_launch_answer_as_one():
    for name, size, way in zip((*MODELS, MODELS[0]), (2, 3, 4, 3), ('auto', 'ucx', 'auto', 'ucx')):
        model = golden(name)
        bodies = mixed_requests(24, 7, vocab_of(model), 200)
        want = answers_alone(model, bodies)
        with launched(model, size, ['--all2all-backend', way]) as (l, ports):
            assert ask_all(ports, bodies) == want, (name, size, way)
            assert l.output().count(f'backend={way if way == "ucx" else "shm"} ranks={size} near={size - 1}') == size, l.output()
            group = request(ports[-1], 'GET', '/cluster')[2]['group']
            assert group.pop('at').startswith('127.0.0.1:') and group.pop('experts') == len(range(experts_of(model) * (size - 1) // size, experts_of(model))), group
            assert [r['rank'] for r in group.pop('ranks')] == list(range(size))
            for rate in 'rows_per_s', 'waits', 'waits_for', 'imbalance':
                group.pop(rate)
            assert group == dict(rank=size - 1, size=size, epoch=1, together=True, whole=True, reason='start', backend='ucx' if way == 'ucx' else 'shm', why='', members=list(range(size)), leads=False), group
            assert ask_all(ports[-1:], bodies) == want, (name, size)    # the other ranks have no rows
            assert l.stop() == 0, l.output()[-2000:]


def test_a_killed_rank_comes_back_and_no_request_of_the_others_fails():
    kill_in_turn('shm', (0, 2, 1))
    kill_in_turn('ucx', (1, 0))


def kill_in_turn(way, victims):
    model = golden('ernie_moe')
    bodies = [{**b, 'max_tokens': 60} for b in mixed_requests(12, 11, vocab_of(model), 100)]
    want = answers_alone(model, bodies)
    with launched(model, 3, ['--all2all-backend', way]) as (l, ports):
        for round, victim in enumerate(victims):
            others = [p for i, p in enumerate(ports) if i != victim]
            jobs = [threading.Thread(target=lambda: results.append(ask_all(others, bodies))) for _ in range(2)]
            results = []
            for j in jobs:
                j.start()
            time.sleep(0.05 + 0.1 * round)
            pid = pid_of_port(ports[victim])
            assert pid, l.output()
            os.kill(pid, signal.SIGKILL)
            for j in jobs:
                j.join()
            assert results == [want, want], round
            wait_until('all ranks serve', lambda: all(request(p, 'GET', '/ready', timeout=2)[0] == 200 for p in ports), 20)
            assert ask_all(ports, bodies) == want, round
        assert l.output().count('group joined') >= 3 + 3 * len(victims), l.output()
        assert l.stop() == 0, l.output()[-2000:]


def rank_nodes(model, size, meet, args=()):
    """Ranks that nobody starts again."""
    return [Node(model, args=[*group_args(size, meet), '--data-parallel-rank', str(r), *args]) for r in range(size)]


def group_of(node):
    return request(node.port, 'GET', '/cluster')[2]['group']


def test_ranks_that_do_not_see_each_other_send_messages():
    """The last has fewer capabilities than the others, so the kernel lets it look at nothing of theirs: they are on one host and share no memory."""
    if os.geteuid() or not shutil.which('setpriv'):
        raise Skip('only root has capabilities to give up, with setpriv')
    model, meet = golden('ernie_moe'), free_ports(1)[0]
    bodies = mixed_requests(6, 23, vocab_of(model), 60)
    want = answers_alone(model, bodies)
    nodes = rank_nodes(model, 3, meet)
    nodes[2].argv = ['setpriv', '--bounding-set', '-all', *nodes[2].argv]
    with closing(*nodes):
        nodes[2].restart()
        wait_until('all ranks serve', lambda: all(request(n.port, 'GET', '/ready', timeout=2)[0] == 200 for n in nodes), 30)
        assert [group_of(n)['backend'] for n in nodes] == ['ucx'] * 3
        assert ask_all([n.port for n in nodes], bodies) == want


def under_load(ports, bodies, want):
    """Asks all of `bodies` again and again until the block ends; every answer must be right."""
    stop, wrong, n = threading.Event(), [], [0]

    def ask():
        while not stop.is_set():
            try:
                got = ask_all(ports, bodies)
                n[0] += 1
                if got != want:
                    wrong.append([g for g, w in zip(got, want) if g != w])
            except BaseException as e:
                wrong.append(e)
                return

    @contextlib.contextmanager
    def block():
        t = threading.Thread(target=ask)
        t.start()
        try:
            yield
        finally:
            stop.set()
            t.join()
        assert not wrong, wrong[:2]
        assert n[0] > 0
    return block()


def test_ranks_that_do_not_come_back_are_done_without():
    """Rank 0, then rank 2, then rank 1 are killed under load: each time those that are left take over their experts. Then all come back."""
    model, meet = golden('ernie_moe'), free_ports(1)[0]
    bodies = [{**b, 'max_tokens': 40} for b in mixed_requests(10, 17, vocab_of(model), 100)]
    want = answers_alone(model, bodies)
    nodes = rank_nodes(model, 4, meet)
    with closing(*nodes):
        wait_ready(*nodes)
        left = [0, 1, 2, 3]
        for victim in (0, 2, 1):
            left.remove(victim)
            with under_load([nodes[r].port for r in left], bodies, want):
                time.sleep(0.3)
                nodes[victim].kill()
                t = time.monotonic()
                wait_until('the others go on', lambda: all(group_of(nodes[r])['members'] == left for r in left), 5)
                assert time.monotonic() - t < 5
                time.sleep(0.3)
            nodes[victim].p.wait()
            why = group_of(nodes[3])['why']
            assert 'is not there, others have its experts' in why, why
        for r in (1, 2, 0):
            nodes[r].start()
        wait_ready(*nodes)
        wait_until('all are together', lambda: all(group_of(n)['members'] == [0, 1, 2, 3] for n in nodes), 10)
        assert ask_all([n.port for n in nodes], bodies) == want


def test_a_stopped_rank_is_done_without_and_comes_back():
    model, meet = golden('qwen3_moe'), free_ports(1)[0]
    bodies = [{**b, 'max_tokens': 40} for b in mixed_requests(8, 19, vocab_of(model), 100)]
    want = answers_alone(model, bodies)
    nodes = rank_nodes(model, 3, meet)
    with closing(*nodes):
        wait_ready(*nodes)
        for victim in (1, 0):
            left = [r for r in range(3) if r != victim]
            with under_load([nodes[r].port for r in left], bodies, want):
                time.sleep(0.2)
                nodes[victim].kill(signal.SIGSTOP)
                wait_until('the others go on', lambda: all(group_of(nodes[r])['members'] == left for r in left), 6)
                time.sleep(2)
                nodes[victim].kill(signal.SIGCONT)
                wait_until('it is back', lambda: all(group_of(n)['members'] == [0, 1, 2] for n in nodes), 6)
            assert ask_all([n.port for n in nodes], bodies) == want


def test_ranks_that_end_in_turn_fail_nothing():
    """Each is told to end under load and started again: no group is lost, no request fails."""
    model, meet = golden('ernie_moe'), free_ports(1)[0]
    bodies = [{**b, 'max_tokens': 40} for b in mixed_requests(8, 23, vocab_of(model), 100)]
    want = answers_alone(model, bodies)
    nodes = rank_nodes(model, 3, meet)
    with closing(*nodes):
        wait_ready(*nodes)
        for victim in (0, 1, 2):
            others = [n for r, n in enumerate(nodes) if r != victim]
            with under_load([n.port for n in others], bodies, want):
                time.sleep(0.2)
                assert nodes[victim].stop() == 0, nodes[victim].output()[-2000:]
                wait_until('the others go on', lambda: all(len(group_of(n)['members']) == 2 for n in others), 5)
                nodes[victim].start()
                wait_ready(nodes[victim])
            wait_until('all are together', lambda: all(len(group_of(n)['members']) == 3 for n in nodes), 5)
        lost = [metrics(n.port)['baton_group_lost_total{of="experts"}'] for n in nodes]
        assert lost == [0, 0, 0], lost


def test_ctrl_c_with_requests_in_flight_finishes_them():
    model = golden('ernie_moe')
    with launched(model, 4, ['--shutdown-timeout', '20']) as (l, ports):
        body = dict(model='m', prompt=[5, 6, 7], max_tokens=480, temperature=0, ignore_eos=True)
        want = request(ports[2], 'POST', '/v1/completions', body)[2]['choices'][0]['text']
        results = []
        t = threading.Thread(target=lambda: results.append(request(ports[2], 'POST', '/v1/completions', body)))
        t.start()
        wait_until('it runs', lambda: any(metrics(p)['baton_engine_running'] for p in ports))
        began = time.monotonic()
        assert l.stop() == 0, l.output()[-3000:]
        t.join()
        assert results[0][0] == 200 and results[0][2]['choices'][0]['text'] == want, results
        assert time.monotonic() - began < 15, 'the ranks waited for each other'


def test_ranks_that_are_started_one_by_one_say_whom_they_wait_for():
    model, meet = golden('qwen3_moe'), free_ports(1)[0]
    bodies = mixed_requests(8, 3, vocab_of(model), 100)
    want = answers_alone(model, bodies)

    def rank(i, *args):
        return Node(model, args=[*group_args(2, meet), '--data-parallel-rank', str(i), *args])
    with closing(rank(1)) as second:
        wait_until('it waits', lambda: f'rank 0 of the group is not reached at 127.0.0.1:{meet}' in request(second.port, 'GET', '/ready')[2]['error']['message'])
        with closing(rank(0, '--max-num-batched-tokens', '64')) as first:
            wait_until('it is refused', lambda: 'at most 64 rows per step' in request(second.port, 'GET', '/ready')[2]['error']['message'])
            wait_until('it waits', lambda: 'rank 1 of 2 is not there' in request(first.port, 'GET', '/ready')[2]['error']['message'])
        wait_until('it logs what is missing', lambda: f'rank 0 of the group is not reached at 127.0.0.1:{meet} (--data-parallel-rank 0 starts it there)' in second.output())
        with closing(rank(0)) as first:
            wait_ready(first, second)
            assert ask_all([first.port, second.port], bodies) == want
            assert first.stop() == 0 and second.alive()
            assert second.stop(timeout=5) in (0, 130)


def test_ranks_of_two_memory_domains():
    """Two ranks read each other's rows, and send them to the other two, as on two hosts. With names of their own all send all."""
    model = golden('ernie_moe')
    bodies = [{**b, 'max_tokens': 30} for b in mixed_requests(16, 31, vocab_of(model), 100)]
    want = answers_alone(model, bodies)
    for domains, near in (('aabb', 1), ('abcd', 0)):
        nodes, meet = [], free_ports(1)[0]
        try:
            nodes += [Node(model, args=[*group_args(4, meet), '--data-parallel-rank', str(r), '--memory-domain', d]) for r, d in enumerate(domains)]
            for n in nodes:
                wait_ready(n)
            assert ask_all([n.port for n in nodes], bodies) == want, domains
            assert all(f'backend=ucx ranks=4 near={near}' in n.output() for n in nodes), nodes[0].output()
            nodes.pop(1).kill()
            with under_load([nodes[0].port, nodes[2].port], bodies, want):
                wait_until('the others go on', lambda: all(group_of(n)['members'] == [0, 2, 3] and group_of(n)['together'] for n in nodes), 10)
                time.sleep(0.5)
        finally:
            for n in nodes:
                n.close()


def test_rows_that_travel_as_bf16_and_fp8():
    """The same answers for every number of ranks and every way; a rank with another type is refused by name."""
    model = golden('deepseek_v3')
    bodies = mixed_requests(12, 37, vocab_of(model), 100)
    alone = answers_alone(model, bodies)
    for kind in ('bf16', 'fp8'):
        with launched(model, 2, ['--ep-row-type', kind]) as (l, ports):
            want = ask_all(ports, bodies)
            assert want != alone, f'{kind}: nothing was rounded'
            assert f'rows {"bf16" if kind == "bf16" else "f8_e4m3"}' in json.dumps(request(ports[0], 'GET', '/cluster')[2]), kind
        for size, domains in ((3, 'a,b,c'), (4, 'a,b')):
            with launched(model, size, ['--ep-row-type', kind, '--memory-domain', domains]) as (l, ports):
                assert ask_all(ports, bodies) == want, (kind, size)
    for option, values, said in (('--ep-row-type', ('f32', 'bf16'), 'rows bf16'), ('--all2all-backend', ('shm', 'ucx'), 'rows by ucx')):
        meet = free_ports(1)[0]
        with closing(*[Node(model, args=[*group_args(2, meet), '--data-parallel-rank', str(r), option, v]) for r, v in enumerate(values)]) as nodes:
            wait_until('it says why', lambda: 'rank 1 has model' in nodes[1].output() and said in nodes[1].output(), 20)


def test_what_contradicts_is_refused():
    for args, said in ((['--data-parallel-size', '2', '--data-parallel-rank', '2'], '--data-parallel-rank 2 is not a rank of --data-parallel-size 2: they count from 0 to 1'),
                       (['--data-parallel-size', '2', '--data-parallel-rank', '0', '--pd-comm-port', '7000', '--data-parallel-rpc-port', '7001'], '--pd-comm-port 7000 and --data-parallel-rpc-port 7001 must be the same'),
                       (['--data-parallel-size', '300'], '--data-parallel-size 300 is more than the 256 ranks that a group can have')):
        p = subprocess.run([BIN, 'serve', golden('qwen3_moe'), '--enable-expert-parallel', '--data-parallel-address', '127.0.0.1', *args], capture_output=True, text=True, timeout=30)
        assert p.returncode == 2 and said in p.stderr, (args, p.stderr)
    p = subprocess.run([BIN, 'launch', '--model', golden('qwen3_moe'), '--num-servers', '3', '--data-parallel-size', '2', '--enable-expert-parallel', '--data-parallel-address', '127.0.0.1'],
                       capture_output=True, text=True, timeout=30)
    assert p.returncode == 2 and 'the nodes of this launch are the ranks, so give --data-parallel-size 3' in p.stderr, p.stderr


def test_a_model_without_experts_computes_alone():
    node = Node(TINY, args=[*group_args(2, free_ports(1)[0]), '--data-parallel-rank', '1'])
    with closing(node):
        wait_ready(node)
        assert 'each rank computes alone' in node.output()


def held_blocks(node):
    return metrics(node.port)['baton_kv_blocks{state="held"}']


def test_prefill_ranks_that_lose_one_keep_no_blocks():
    """A step that is given up ends the prompts whose layers were on their way; they are placed anew, and nothing of them stays."""
    model, control, meet = golden('ernie_moe'), free_ports(1)[0], free_ports(1)[0]
    size = ['--max-model-len', '2048', '--max-num-seqs', '8', '--num-gpu-blocks-override', '96', '--max-num-batched-tokens', '128', '--cache-transfer-protocol', 'ipc']
    group = ['--data-parallel-size', '2', '--enable-expert-parallel', '--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(meet)]
    bodies = [dict(model='m', prompt=[5 + (i * 7919 + k * 31) % 300 for k in range(900)], max_tokens=4, temperature=0, logprobs=2, ignore_eos=True, return_token_ids=True) for i in range(6)]
    alone = Node(model, args=size)
    with closing(alone):
        wait_ready(alone)
        want = ask_all([alone.port], bodies)
    first = Node(model, 'prefill', [*size, *group, '--data-parallel-rank', '0', '--engine-worker-queue-port', str(control)])
    second = Node(model, 'prefill', [*size, *group, '--data-parallel-rank', '1', '--innode-prefill-ports', str(control)])
    decode = Node(model, 'decode', [*size, '--innode-prefill-ports', str(control)])
    with closing(first, second, decode):
        wait_ready(first, second, decode)
        wait_sees([decode], 3)
        for round in range(4):
            results = []
            t = threading.Thread(target=lambda: results.append(ask_all([decode.port], bodies)))
            t.start()
            time.sleep(0.05 + 0.05 * round)
            second.restart()
            t.join()
            assert results == [want], round
            wait_ready(second)
        wait_until('nothing is held', lambda: held_blocks(first) == 0 == held_blocks(decode), 10)
