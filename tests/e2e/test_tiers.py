"""KV kept behind the pool: in host memory and on a disk. The answers are those of a node that keeps none, after evictions, restarts, kill -9, a full and a changed disk; also of nodes of
several ranks."""
from harness import *
from test_ranks import children_of
from test_tensor_parallel import side

BLOCK, BLOCKS = 16, 24      # tokens of a block, blocks of the pool
SIZE = ['--block-size', str(BLOCK), '--num-gpu-blocks-override', str(BLOCKS), '--max-model-len', str(BLOCK * BLOCKS), '--max-num-seqs', '4']
N = 8                       # prompts: three times what the pool holds


def body_of(i, n_tokens=144, **more):
    r = random.Random(i)
    return dict(model='m', prompt=[r.randrange(4, 512) for _ in range(n_tokens + i)], max_tokens=8, temperature=0.7 * (i % 2), seed=i, logprobs=2, ignore_eos=True,
                return_token_ids=True, return_trace=True, **more)


def ask(node, i, **more):
    status, _, a = request(node.port, 'POST', '/v1/completions', body_of(i, **more))
    assert status == 200, (status, a)
    return a


def of(a):
    return a['choices'][0]['token_ids'], a['choices'][0]['logprobs']['token_logprobs']


def by_tier(a):
    return a['baton']['cached_tokens_by_tier']


def tier_metric(node, what, tier):
    return metrics(getattr(node, 'own_port', node.port))[f'baton_kv_tier_{what}{{tier="{tier}"}}']


def await_kept(node, tier, n):
    """Waits until a tier has n blocks and none waits to be copied."""
    wait_until(f'{n} blocks in {tier}', lambda: tier_metric(node, 'waiting_blocks', tier) == 0 and tier_metric(node, 'blocks', tier) >= n)


def kept(n):
    """Blocks of the first n prompts and their answers."""
    return sum((144 + i + 8 - 1) // BLOCK for i in range(n))


KEPT = kept(N)


def ask_all(node, want, tier):
    """One after the other, each copied before the next one evicts it."""
    for i in range(N):
        assert of(ask(node, i)) == want[i]
        await_kept(node, tier, kept(i + 1))


def keep_all(node, tier):
    """Asks again where something was evicted before it was copied."""
    for _ in range(10):
        wait_until('nothing waits to be copied', lambda: tier_metric(node, 'waiting_blocks', tier) == 0)
        time.sleep(0.2)
        if tier_metric(node, 'blocks', tier) >= KEPT:
            return
        for i in range(N):
            ask(node, i)
            await_kept(node, tier, 1)
    raise AssertionError('blocks are not kept')


def answers_without(model=TINY):
    with closing(Node(model, args=[*SIZE, '--no-enable-prefix-caching'])) as node:
        wait_ready(node)
        return [of(ask(node, i)) for i in range(N)]


def full_blocks(i):
    return (144 + i - 1) // BLOCK * BLOCK


def test_evicted_prompts_come_back_from_host_memory():
    want = answers_without()
    with closing(Node(TINY, args=[*SIZE, '--swap-space', '0.05'])) as node:
        wait_ready(node)
        for round in range(2):
            for i in range(N):
                a = ask(node, i)
                assert of(a) == want[i], (round, i)
                await_kept(node, 'host', 1)
                if round:
                    t = a['baton']
                    assert t['cached_tokens'] == full_blocks(i) and sum(by_tier(a).values()) == t['cached_tokens'], t
                    assert by_tier(a)['host'] > 0 and t['cache_load_ms'] > 0 and t['cache_load_expected_ms'] > 0, t
        assert tier_metric(node, 'promoted_blocks_total', 'host') > 0 and tier_metric(node, 'checksum_failures_total', 'host') == 0
        other = ask(node, 0, cache_salt='another tenant')
        assert other['baton']['cached_tokens'] == 0 and of(other) == want[0], other['baton']


def test_a_restarted_node_finds_its_disk_again():
    want = answers_without()
    with tempfile.TemporaryDirectory(prefix='baton-kv-') as folder:
        args = [*SIZE, '--kv-cache-dir', folder, '--kv-cache-disk', '0.05']
        with closing(Node(TINY, args=args)) as node:
            wait_ready(node)
            ask_all(node, want, 'disk')
            await_kept(node, 'disk', N * 8)
        with closing(Node(TINY, args=args)) as node:
            wait_ready(node)
            await_kept(node, 'disk', N * 8)
            for i in range(N):
                a = ask(node, i)
                assert of(a) == want[i] and by_tier(a)['disk'] == full_blocks(i), a['baton']


def test_two_nodes_share_a_folder():
    want = answers_without()
    with tempfile.TemporaryDirectory(prefix='baton-kv-') as folder:
        args = [*SIZE, '--kv-cache-dir', folder, '--kv-cache-disk', '0.05']
        with closing(Node(TINY, args=args), Node(TINY, args=args)) as (one, other):
            wait_ready(one, other)
            ask_all(one, want, 'disk')
            await_kept(other, 'disk', N * 8)
            for i in range(N):
                a = ask(other, i)
                assert of(a) == want[i] and by_tier(a)['disk'] == full_blocks(i), a['baton']


def flip_bytes(folder, r, n):
    for name in os.listdir(folder):
        if name.startswith('segment-'):
            with open(os.path.join(folder, name), 'r+b') as f:
                size = f.seek(0, 2)
                for _ in range(n):
                    at = r.randrange(size)
                    f.seek(at)
                    was = f.read(1)
                    f.seek(at)
                    f.write(bytes([was[0] ^ r.randrange(1, 256)]))


def kill_rounds(rounds, flips):
    """A node that is killed at any moment, and starts again over what it left, with some bytes changed."""
    want = answers_without()
    r = random.Random(rounds)
    n_disk = 0
    with tempfile.TemporaryDirectory(prefix='baton-kv-') as folder:
        node = Node(TINY, args=[*SIZE, '--swap-space', '0.001', '--kv-cache-dir', folder, '--kv-cache-disk', '0.02'])
        with closing(node):
            for k in range(rounds):
                wait_ready(node)
                stop = threading.Event()

                def work():
                    while not stop.is_set():
                        i = r.randrange(N)
                        try:
                            a = ask(node, i)
                        except (OSError, http.client.HTTPException):
                            return
                        assert of(a) == want[i], (k, i, a['baton'])
                        nonlocal n_disk
                        n_disk += by_tier(a)['disk']
                threads = [threading.Thread(target=work) for _ in range(2)]
                failed = []
                threading.excepthook = lambda args: failed.append(args)
                for t in threads:
                    t.start()
                time.sleep(r.uniform(0.1, 1.0))
                node.kill()
                stop.set()
                for t in threads:
                    t.join(60)
                    assert not t.is_alive(), 'a request hangs'
                assert not failed, failed[0]
                if flips and k % 2:
                    flip_bytes(folder, r, flips)
                node.restart()
            wait_ready(node)
            for i in range(N):
                assert of(ask(node, i)) == want[i]
    assert n_disk > 0
    print(f'{rounds} kills, {n_disk} tokens from the disk, every answer right')


def test_kill_at_any_moment():
    kill_rounds(4, 3)


def test_kill_at_any_moment_long():
    kill_rounds(60, 3)


def test_a_full_disk_changes_nothing_but_the_speed():
    """A file system of 200 KiB, in a mount namespace of the node's own."""
    want = answers_without()
    with tempfile.TemporaryDirectory(prefix='baton-kv-') as folder:
        inside = ['unshare', '--map-root-user', '--mount', 'sh', '-c', 'mount -t tmpfs -o size=200k none "$0" && exec "$@"', folder]
        if subprocess.run([*inside, 'true'], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
            raise Skip('NOT TESTED: this host lets nobody mount a tmpfs in a namespace')
        node = Node(TINY, args=[*SIZE, '--kv-cache-dir', folder, '--kv-cache-disk', '0.02'], before=inside)
        with closing(node):
            wait_ready(node)
            for round in range(3):
                for i in range(N):
                    assert of(ask(node, i)) == want[i]
            wait_until('it says so', lambda: tier_metric(node, 'errors_total', 'disk') > 0)
            assert 'kv tier does not grow' in node.output() or 'kv tier switched off' in node.output(), node.output()[-2000:]


def test_values_are_rounded_only_where_asked():
    with closing(Node(TINY, args=[*SIZE, '--swap-space', '0.05', '--kv-cache-tier-dtype', 'int8'])) as node:
        wait_ready(node)
        assert 'GiB of host memory, as int8' in node.output(), node.output()
        first = []
        for i in range(N):
            first.append(ask(node, i))
            await_kept(node, 'host', 1)    # before the next one evicts it
        again = [ask(node, i) for i in range(N)]
        assert all(by_tier(a)['host'] > 0 for a in again[:2]), again[0]['baton']
        assert len(first) == len(again)    # they may differ: docs/kv-cache.md says so


def test_more_than_the_host_has_is_not_taken():
    with closing(Node(TINY, args=[*SIZE, '--swap-space', '100000'])) as node:
        wait_ready(node)
        assert 'less swap space than asked for' in node.output(), node.output()
        ask(node, 0)


# ---- nodes of several ranks ----

GROUPED, LATENT = (os.path.join(DATA, 'goldens', name, 'model') for name in ('qwen3', 'deepseek_v3'))    # heads are divided; every rank has the whole latent


class RankedNode(Node):
    """A node of two processes, behind one that starts them."""

    def __init__(self, model, args):
        super().__init__(model, args=[*SIZE, '--tensor-parallel-size', '2', *args])

    def ready(self):
        wait_ready(self)
        self.own_port = request(self.port, 'GET', '/cluster')[2]['nodes'][0]['http_port']    # of rank 0: its metrics

    def ranks(self):
        return sorted(p for p in children_of(self.p.pid))


def test_host_memory_behind_a_node_of_several_ranks():
    drafts = ['--speculative-config', '{"method": "mtp", "num_speculative_tokens": 2}']    # the draft layer's KV is in the blocks, too
    for model, more in ((GROUPED, []), (LATENT, []), (LATENT, drafts)):
        want = answers_without(model)
        with closing(RankedNode(model, ['--swap-space', '0.05', *more])) as node:
            node.ready()
            for round in range(2):
                for i in range(N):
                    a = ask(node, i)
                    assert of(a) == want[i], (model, round, i)
                    await_kept(node, 'host', kept(i + 1))
                    if round:
                        t = a['baton']
                        assert t['cached_tokens'] == full_blocks(i) and sum(by_tier(a).values()) == t['cached_tokens'] and by_tier(a)['host'] > 0, t
            assert tier_metric(node, 'blocks', 'host') == KEPT, 'each block counts once'
            assert tier_metric(node, 'promoted_blocks_total', 'host') > 0 and tier_metric(node, 'checksum_failures_total', 'host') == 0 and tier_metric(node, 'errors_total', 'host') == 0
            assert node.stop() == 0, node.output()[-3000:]
            assert ' error ' not in node.output(), node.output()[-3000:]


def test_a_disk_behind_a_node_of_several_ranks():
    """It is found again after a restart. Where one rank's part was changed or is gone, the blocks are computed and kept again."""
    for model in (GROUPED, LATENT):
        want = answers_without(model)
        with tempfile.TemporaryDirectory(prefix='baton-kv-') as folder:
            parts = [os.path.join(folder, f'rank-{r}-of-2') for r in range(2)]

            def restarted(expect):
                with closing(RankedNode(model, ['--kv-cache-dir', folder, '--kv-cache-disk', '0.1'])) as node:
                    node.ready()
                    from_disk = []
                    for i in range(N):
                        if expect:
                            wait_until('the disk is found', lambda: tier_metric(node, 'blocks', 'disk') >= KEPT)
                        a = ask(node, i)
                        assert of(a) == want[i], (model, i, a['baton'])
                        from_disk.append(by_tier(a)['disk'])
                        await_kept(node, 'disk', 1)
                    keep_all(node, 'disk')
                    bad = tier_metric(node, 'checksum_failures_total', 'disk')
                    assert node.stop() == 0, node.output()[-3000:]
                    return from_disk, bad
            restarted(False)
            assert all(any(f.startswith('segment-') for f in os.listdir(p)) for p in parts) and not [f for f in os.listdir(folder) if f.startswith('segment-')]
            assert restarted(True) == ([full_blocks(i) for i in range(N)], 0)
            if model == LATENT:
                continue
            flip_bytes(parts[1], random.Random(1), 2000)
            from_disk, _ = restarted(False)
            assert sum(from_disk) < sum(full_blocks(i) for i in range(N)), 'nothing was changed'
            shutil.rmtree(parts[1])
            assert sum(restarted(False)[0]) == 0
            assert restarted(True) == ([full_blocks(i) for i in range(N)], 0)


def test_nodes_of_several_ranks_share_a_folder():
    want = answers_without(GROUPED)
    with tempfile.TemporaryDirectory(prefix='baton-kv-') as folder:
        args = ['--kv-cache-dir', folder, '--kv-cache-disk', '0.1']
        with closing(RankedNode(GROUPED, args), RankedNode(GROUPED, args)) as (one, other):
            one.ready()
            other.ready()
            ask_all(one, want, 'disk')
            await_kept(other, 'disk', KEPT)
            time.sleep(2.5)    # each rank looks every two seconds
            for i in range(N):
                a = ask(other, i)
                assert of(a) == want[i] and by_tier(a)['disk'] == full_blocks(i), a['baton']


def crowded(model, args, rounds):
    """More sequences than the pool has blocks for: some lose theirs. The answers, and how many went on from host memory in `rounds` rounds at most."""
    bodies = [dict(body_of(i, 40), max_tokens=150) for i in range(6)]
    with closing(Node(model, args=[*SIZE, *args])) as node:
        wait_ready(node)
        own_port = request(node.port, 'GET', '/cluster')[2]['nodes'][0]['http_port']
        answers = None
        for _ in range(rounds):
            got = parallel([lambda b=b: request(node.port, 'POST', '/v1/completions', b) for b in bodies], 6)
            for g in got:
                assert not isinstance(g, Exception) and g[0] == 200, g
            now = [of(g[2]) for g in got]
            assert answers in (None, now)
            answers, m = now, metrics(own_port)
            assert m['baton_engine_preemptions_total'] > 0
            if m['baton_engine_swaps_total']:
                break
        return answers, m['baton_engine_swaps_total']


def test_preempted_sequences_of_a_node_of_several_ranks():
    for model, more in ((GROUPED, []), (LATENT, ['--no-enable-prefix-caching'])):
        want, _ = crowded(model, ['--no-enable-prefix-caching'], 1)
        got, n_swaps = crowded(model, ['--swap-space', '0.05', '--tensor-parallel-size', '2', *more], 20)
        assert got == want and n_swaps > 0


def test_clients_that_leave_while_several_ranks_load():
    """Loads are cancelled on all ranks; their blocks are somebody else's at once."""
    want = answers_without(GROUPED)
    with tempfile.TemporaryDirectory(prefix='baton-kv-') as folder, closing(RankedNode(GROUPED, ['--kv-cache-dir', folder, '--kv-cache-disk', '0.1'])) as node:
        node.ready()
        ask_all(node, want, 'disk')
        await_kept(node, 'disk', KEPT)
        r = random.Random(5)
        stop = threading.Event()

        def leave():
            while not stop.is_set():
                c = http.client.HTTPConnection('127.0.0.1', node.port, timeout=30)
                with contextlib.suppress(OSError):
                    c.request('POST', '/v1/completions', json.dumps(body_of(r.randrange(N))), {'Content-Type': 'application/json'})
                    time.sleep(r.uniform(0, 0.008))
                c.close()
        threads = [threading.Thread(target=leave) for _ in range(3)]
        for t in threads:
            t.start()
        n_disk = 0
        for i in [r.randrange(N) for _ in range(60)]:
            a = ask(node, i)
            assert of(a) == want[i], (i, a['baton'])
            n_disk += by_tier(a)['disk']
        stop.set()
        for t in threads:
            t.join(60)
        assert n_disk > 0
        wait_until('nothing is left', lambda: metrics(node.own_port)['baton_engine_loading'] == 0)
        assert node.stop() == 0 and 'do not answer' not in node.output(), node.output()[-3000:]


def test_tiers_of_nodes_that_share_experts():
    """Two nodes of two ranks, in one group of four: each with loads of its own."""
    want = answers_without(LATENT)
    args = [*SIZE, '--swap-space', '0.05', '--tensor-parallel-size', '2', '--data-parallel-size', '2', '--enable-expert-parallel']
    with closing(Node(LATENT, args=args)) as node:
        wait_ready(node)
        nodes = request(node.port, 'GET', '/cluster')[2]['nodes']
        assert len(nodes) == 2, nodes
        n_host = 0
        for round in range(20):    # what is evicted before it was copied is lost
            got = parallel([lambda i=i: request(node.port, 'POST', '/v1/completions', body_of(i)) for i in range(N)], 4)
            for i, g in enumerate(got):
                assert not isinstance(g, Exception) and g[0] == 200 and of(g[2]) == want[i], (round, i, g)
            n_host = sum(metrics(n['http_port'])['baton_kv_tier_promoted_blocks_total{tier="host"}'] for n in nodes)
            if n_host and round > 1:
                break
        assert n_host > 0
        assert node.stop() == 0, node.output()[-3000:]


def test_a_split_prompt_with_tiers_of_several_ranks():
    """What the prefill node's ranks bring from their tiers goes to the decode node's ranks."""
    want = answers_without(GROUPED)
    control = free_ports(1)[0]
    with closing(side(GROUPED, 'prefill', (2, 1), control, 'ipc', [*SIZE, '--swap-space', '0.05']), side(GROUPED, 'decode', (2, 1), control, 'ipc', SIZE)) as both:
        wait_ready(*both)
        wait_sees(both, 2)
        both[0].own_port = next(n['http_port'] for n in request(both[1].port, 'GET', '/cluster')[2]['nodes'] if n['role'] == 'prefill')
        n_host = 0
        for round in range(10):    # some are computed where they are decoded
            for i in range(N):
                a = ask(both[1], i)
                assert of(a) == want[i], (round, i, a['baton'])
                n_host += by_tier(a)['host'] if a['baton']['prefill_node'] != a['baton']['decode_node'] else 0
                await_kept(both[0], 'host', 1)    # before the next one evicts it
            if n_host:
                break
        assert n_host > 0
        for node in both:
            assert node.stop() == 0, node.output()[-2000:]


def rank_kill_rounds(rounds):
    """Rank 0 or 1 of a node is killed at any moment; the node starts again with what is on the disk."""
    want = answers_without(GROUPED)
    r = random.Random(rounds)
    n_disk = n_host = 0
    with tempfile.TemporaryDirectory(prefix='baton-kv-') as folder:
        node = RankedNode(GROUPED, ['--swap-space', '0.001', '--kv-cache-dir', folder, '--kv-cache-disk', '0.04'])
        with closing(node):
            for k in range(rounds):
                node.ready()
                failed, stop = [], threading.Event()

                def work():
                    nonlocal n_disk, n_host
                    while not stop.is_set():
                        i = r.randrange(N)
                        try:
                            status, _, a = request(node.port, 'POST', '/v1/completions', body_of(i))
                        except (OSError, http.client.HTTPException):
                            continue
                        if status == 200 and of(a) != want[i]:
                            failed.append((k, i, a['baton']))
                        if status == 200:
                            n_disk += by_tier(a)['disk']
                            n_host += by_tier(a)['host']
                threads = [threading.Thread(target=work) for _ in range(2)]
                before = node.ranks()
                for t in threads:
                    t.start()
                time.sleep(r.uniform(0.2, 1.2))
                os.kill(before[k % 2], signal.SIGKILL)
                wait_until('both ranks are new', lambda: len(node.ranks()) == 2 and not set(node.ranks()) & set(before), 20)
                stop.set()
                for t in threads:
                    t.join(60)
                    assert not t.is_alive(), 'a request hangs'
                assert not failed, failed[0]
            node.ready()
            for i in range(N):
                assert of(ask(node, i)) == want[i]
    assert n_disk + n_host > 0
    print(f'{rounds} kills, {n_host} tokens from host memory and {n_disk} from the disk, every answer right')


def test_kill_a_rank_at_any_moment():
    rank_kill_rounds(3)


def test_kill_a_rank_at_any_moment_long():
    rank_kill_rounds(40)


def refused(args, part, model=TINY):
    p = subprocess.run([BIN, 'serve', '--model', model, '--port', str(free_ports(1)[0]), *args], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert p.returncode != 0 and part in p.stdout, (p.returncode, p.stdout)


def test_what_cannot_be_is_refused():
    refused(['--kv-cache-disk', '5'], '--kv-cache-dir')
    refused(['--kv-cache-dir', '/proc/kv'], '--kv-cache-dir /proc/kv')
    refused(['--kv-cache-tier-dtype', 'int3', '--swap-space', '1'], '--kv-cache-tier-dtype')
    refused(['--kv-cache-tier-dtype', 'int8', '--swap-space', '0.01'], '--kv-cache-tier-dtype int8: KV of latent attention', os.path.join(DATA, 'goldens', 'deepseek_v3', 'model'))
