"""Nodes of several ranks (--tensor-parallel-size) fetch KV of a prompt from a peer's memory and lend it, whatever the numbers of ranks, and whoever is killed meanwhile."""
from harness import *
from test_parallel import golden
from test_prefix import ask_at, curve, while_it_is_busy
from test_ranks import children_of
from test_tensor_parallel import number_of, tensor

SLOW_MS = 1200   # of each write: no fetch is over sooner


def a_node(model, n_ranks, file, control, first, env=None, more=()):
    """A mixed node; the first holds the directory."""
    where = ['--engine-worker-queue-port', str(control)] if first else ['--innode-prefill-ports', str(control)]
    return Node(model, 'mixed', [*tensor(n_ranks), '--pace', file, '--max-model-len', '2048', '--max-num-seqs', '16', '--block-size', '32', '--num-gpu-blocks-override', '400',
                                 '--cache-transfer-protocol', 'ipc', *where, *more], env)


@contextlib.contextmanager
def two_nodes(model, sizes, env=None, more=()):
    control, file = free_ports(1)[0], curve(4000)
    nodes = [a_node(model, n, file, control, i == 0, env, more) for i, n in enumerate(sizes)]
    with closing(*nodes):
        wait_ready(*nodes)
        wait_sees(nodes, 2)
        for i in range(8):  # so that it is known how fast they compute
            ask_at(nodes[0].port, 200 + i, 1100)
        yield nodes
        os.unlink(file)


def seen(nodes):
    """{name: (process, HTTP port of its first rank)}"""
    view = request(nodes[0].port, 'GET', '/cluster')[2]['nodes']
    return {v['name']: (next(n for n in nodes if f' node ready name={v["name"]} ' in n.output()), v['http_port']) for v in view}


def total(nodes, name):
    return sum(metrics(port).get(name, 0) for _, port in seen(nodes).values())


def fetches(name, sizes):
    """Until each node has fetched from the other one."""
    with two_nodes(golden(name), sizes) as nodes:
        port, lenders = nodes[0].port, set()
        for seed in range(1, 60):  # chance says who has a prompt first, and whether the other one is asked then
            first, (tokens, trace) = while_it_is_busy(port, seed, lambda first: (first, ask_at(port, seed, 640, 16)))
            if trace['decode_node'] == first:
                continue
            assert trace['kept_node'] == first, trace
            assert trace['cached_tokens_by_tier']['peer'] >= 512, trace
            assert ask_at(port, seed, 640, 16, cache_salt='afresh')[0] == tokens
            lenders.add(first)
            if len(lenders) == 2:
                break
        assert len(lenders) == 2, lenders
        assert total(nodes, 'baton_kv_fetch_failed_total') == 0
        assert total(nodes, 'baton_kv_fetched_blocks_total') == total(nodes, 'baton_kv_lent_blocks_total') > 0
        assert [n.stop() for n in nodes] == [0, 0]


def test_nodes_of_two_ranks_fetch_from_each_other():
    fetches('qwen3_moe', (2, 2))


def test_nodes_of_two_ranks_and_of_one_fetch_from_each_other():
    fetches('llama', (2, 1))


def test_nodes_of_four_ranks_and_of_two_with_latent_attention():
    fetches('deepseek_v3', (4, 2))


def leaves_with_work(name, sizes):
    """What a leaving node hands back is fetched from it: it is in no directory any more, and stays as long as it may be asked."""
    with two_nodes(golden(name), sizes, more=['--shutdown-timeout', '6']) as (a, b):
        ports = [port for _, port in seen([a, b]).values()]
        ask = lambda seed, **extra: ask_at(a.port, seed, 640, max_tokens=1300, **extra)
        got, want = [None] * 4, ask(1)[0]
        threads = [threading.Thread(target=lambda i=i: got.__setitem__(i, ask(1, cache_salt=f'of {i}'))) for i in range(len(got))]
        for t in threads:
            t.start()
        wait_until('both compute', lambda: all(metrics(port)['baton_engine_running'] for port in ports), 30, 0.01)
        t0 = time.monotonic()
        b.kill(signal.SIGTERM)
        assert b.p.wait(20) == 0 and 'work handed back' in b.output(), b.output()[-2000:]
        took = time.monotonic() - t0
        for t in threads:
            t.join(60)
        assert [tokens for tokens, _ in got] == [want] * len(got)
        peers = [trace['cached_tokens_by_tier']['peer'] for _, trace in got]
        print(f'  {name}, {sizes}: {peers} tokens came from the node, which ended after {took:.1f} s', flush=True)
        assert max(peers) > 640, 'the prompt and what was computed behind it'
        assert total([a], 'baton_kv_fetch_failed_total') == 0 and a.stop() == 0


def test_what_a_leaving_node_hands_back_is_fetched_from_it():
    leaves_with_work('qwen3_moe', (1, 2))


def rank_of_node(node, rank):
    return next(p for p in children_of(node.p.pid) if number_of(p, 'tensor-parallel-rank') == rank)


def killed(of_lender, rank, sig=signal.SIGKILL):
    """A rank is killed or stopped while a prompt is fetched; the node that had it starts again."""
    with two_nodes(golden('qwen3_moe'), (2, 2), {'BATON_KV_FAULT': f'seed=3,delay=1:{SLOW_MS}'}) as nodes:
        by_name, hit, failed = seen(nodes), [], []

        def ask_again(first):
            lender = by_name[first][0]
            fetcher, port = next(v for k, v in by_name.items() if k != first)
            answer = []
            t = threading.Thread(target=lambda: answer.append(ask_at(nodes[0].port, seed, 640, 16)))
            t.start()
            wait_until('it fetches', lambda: metrics(port).get('baton_engine_loading', 0) > 0 or not t.is_alive(), 20, 0.01)
            hit.append(t.is_alive() and rank_of_node(lender if of_lender else fetcher, rank))
            if hit[-1]:
                os.kill(hit[-1], sig)
            t.join()
            failed.append(of_lender and metrics(port)['baton_kv_fetch_failed_total'])
            return answer[0]

        for seed in range(1, 8):
            tokens, trace = while_it_is_busy(nodes[0].port, seed, ask_again)
            if hit[-1]:
                break
        assert hit[-1], 'no prompt was fetched'
        assert trace['cached_tokens_by_tier']['peer'] == 0, trace
        assert failed[-1] >= 1 or not of_lender, failed  # else the node that counted it has begun anew
        with contextlib.suppress(ProcessLookupError):
            os.kill(hit[-1], signal.SIGCONT)
        wait_until('the node is back', lambda: hit[-1] not in [p for n in nodes for p in children_of(n.p.pid)], 20)
        wait_ready(*nodes)
        assert ask_at(nodes[0].port, seed, 640, 16, cache_salt='afresh')[0] == tokens
        assert [n.stop() for n in nodes] == [0, 0]


def test_a_rank_of_the_lender_is_killed():
    killed(True, 1)


def test_a_rank_of_the_fetching_node_is_killed():
    killed(False, 1)


def test_the_first_rank_of_the_lender_is_killed():
    killed(True, 0)


def test_a_rank_of_the_lender_is_stopped():
    """Over shared memory it may still write when it goes on: the prompt is computed into other blocks, and those come back when it has."""
    killed(True, 1, signal.SIGSTOP)
