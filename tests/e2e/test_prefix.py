"""Prompts that begin alike, over four prefill and four decode nodes: a trace of conversations, its lengths divided by 16, against the simulation
of the same trace (tests/perf/bench_prefix.c, over the program's own placement)."""
from harness import *

DIVIDE, BLOCK, BLOCKS, PREFILL_PER_S, STEP_MS, TRACE_BLOCK = 16, 32, 400, 2500, 4, 512
TRACE = os.environ.get('TRACE_FILE') or os.path.join(DATA, 'traces', 'sessions.jsonl')
BENCH = os.path.join(os.path.dirname(os.path.abspath(BIN)), 'tests', 'bench_prefix')


def requests_of(most):
    """[(second, prompt, output tokens)]: equal tokens where the trace says so. Of two output tokens or more: one may be there before the prefill node's report."""
    with open(TRACE) as f:
        rows = [json.loads(line) for line in f][:most]
    out = []
    for i, r in enumerate(rows):
        n = max(r['input_length'] // DIVIDE, 1)
        ids = r['hash_ids']
        size = TRACE_BLOCK // DIVIDE
        prompt = [5 + (ids[min(k // size, len(ids) - 1)] * 7919 + k % size * (ids[min(k // size, len(ids) - 1)] % 97 + 1)) % 500 for k in range(n)]
        out.append((r['timestamp'] / 1e3, prompt, max(r['output_length'] // DIVIDE, 2)))
    return out


def curve(prefill_per_s=PREFILL_PER_S):
    """Prompts as fast as the simulation has them, and a fixed time for each step of a decode node."""
    with tempfile.NamedTemporaryFile('w', suffix='.json', delete=False) as f:
        json.dump({'fixed_us': STEP_MS * 1e3, 'prompt': {'row_us': 1e6 / prefill_per_s}, 'decode': {}}, f)
    return f.name


def simulated(most, times):
    if not os.path.exists(BENCH):
        raise Skip(f'{BENCH} is not built: nothing to compare with')
    p = subprocess.run([BENCH, '--one', f'4,{BLOCKS},4,{BLOCKS}', '--divide', str(DIVIDE), '--block', str(BLOCK), '--speed', str(PREFILL_PER_S), '--times', str(times),
                        '--token-ms', str(STEP_MS), '--most', str(most), TRACE], capture_output=True, text=True, timeout=60)
    assert p.returncode == 0, p.stderr
    return json.loads(p.stdout)


def replay(ports, requests, times):
    """Sends each request at its time, to one port after the other. Returns the answers."""
    begin, out = time.monotonic(), [None] * len(requests)

    def one(i):
        at, prompt, n = requests[i]
        time.sleep(max(begin + at / times - time.monotonic(), 0))
        status, _, answer = request(ports[i % len(ports)], 'POST', '/v1/completions', dict(model='m', prompt=prompt, max_tokens=n, temperature=0, ignore_eos=True,
                                                                                            return_trace=True, return_token_ids=True), timeout=600)
        assert status == 200, (status, answer)
        out[i] = answer
    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(requests))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(out)
    return out


def compare(most, seconds):
    requests = requests_of(most)
    times = requests[-1][0] / seconds
    sim = simulated(most, times)
    ports, file = free_ports(8), curve()
    l = Process([BIN, 'launch', '--model', TINY, '--served-model-name', 'm', '--prefill', '4', '--decode', '4', '--ports', ','.join(map(str, ports)), '--pace', file,
                 '--max-model-len', '2048', '--max-num-seqs', '64', '--block-size', str(BLOCK), '--num-gpu-blocks-override', str(BLOCKS), '--compute-threads', '1'],
                name='launch')
    with closing(l):
        wait_until('launch ready', lambda: 'ready: all 8 nodes' in l.output() or not l.alive(), 60)
        for p in ports:  # so that all know how fast a prefill node is
            request(p, 'POST', '/v1/completions', dict(model='m', prompt=[1] * 1100, max_tokens=1, cache_salt=str(p)))
        traces = [a['baton'] for a in replay(ports[:1], requests, times)]
        m = metrics(ports[0])
    os.unlink(file)
    n = sum(len(prompt) for _, prompt, _ in requests)
    cached, expected = (sum(t[k] for t in traces) / n for k in ('cached_tokens', 'expected_cached_tokens'))
    alone = sum(t['prefill_node'] == t['decode_node'] for t in traces)
    print(f'{len(requests)} requests in {seconds:.0f} s over 4P4D: {cached:.3f} of the prompts cached, {expected:.3f} expected, {alone} by a decode node alone; '
          f'simulated {sim["hit"]:.3f}, {sim["expected"]:.3f}, {sim["alone"]}')
    assert m['baton_prefix_asked_tokens_total'] >= n and m['baton_prefix_placements_total{by="prefix"}'] > 0
    return cached, sim['hit']


def test_conversations_go_on_where_their_beginning_is_cached():
    cached, simulated_hit = compare(100, 8)
    assert cached > simulated_hit / 2, (cached, simulated_hit)


def ask_at(port, seed, n, more=0, **extra):
    """The tokens and the trace of an answer to n random tokens and `more` that are always the same."""
    r = random.Random(seed)
    prompt = [r.randrange(4, 512) for _ in range(n)] + list(range(4, 4 + more))
    status, _, a = request(port, 'POST', '/v1/completions', dict(dict(model='m', prompt=prompt, max_tokens=4, temperature=0, ignore_eos=True, return_trace=True,
                                                                      return_token_ids=True), **extra), timeout=60)
    assert status == 200, (status, a)
    return a['choices'][0]['token_ids'], a['baton']


def while_it_is_busy(port, seed, ask_again):
    """One of two mixed nodes has computed a prompt and is kept busy: what ask_again(first) returns, which asks for more of it."""
    def ahead(first):
        """Tokens that wait at the first node, beyond those of the other one."""
        load = {n['name']: n['placed_tokens'] for n in request(port, 'GET', '/cluster')[2]['nodes']}
        return load.pop(first) - sum(load.values())

    first = ask_at(port, seed, 640)[1]['decode_node']
    others = []
    for i in range(20):  # until one of them keeps the first's node busy
        others.append(threading.Thread(target=ask_at, args=(port, 1000 * seed + i, 2000)))
        others[-1].start()
        wait_until('it is placed', lambda: ahead(first), 10, 0.01)
        if ahead(first) > 0:
            break
        others[-1].join()
    got = ask_again(first)
    for t in others:
        t.join()
    return got


def test_what_a_busy_node_has_is_fetched_from_it():
    ports, file = free_ports(2), curve(4000)
    l = Process([BIN, 'launch', '--model', TINY, '--served-model-name', 'm', '--mixed', '2', '--ports', ','.join(map(str, ports)), '--pace', file,
                 '--max-model-len', '2048', '--max-num-seqs', '16', '--block-size', str(BLOCK), '--num-gpu-blocks-override', str(BLOCKS), '--compute-threads', '1'],
                name='launch')
    with closing(l):
        wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output() or not l.alive(), 60)
        for i in range(8):  # so that it is known how fast a prefill node is
            ask_at(ports[0], 200 + i, 1100)
        first, (tokens, trace) = while_it_is_busy(ports[0], 1, lambda first: (first, ask_at(ports[0], 1, 640, 16)))
        assert trace['decode_node'] != first and trace['kept_node'] == first, trace
        assert trace['cached_tokens_by_tier']['peer'] >= 512, trace
        assert ask_at(ports[0], 1, 640, 16, cache_salt='afresh')[0] == tokens
    os.unlink(file)


def test_a_decode_node_computes_no_prompt_that_it_has_evicted():
    """It should have the beginning of a prompt, and be free to compute the rest while the prefill node is busy; but others have taken its blocks."""
    ports, file = free_ports(2), curve(2000)
    l = Process([BIN, 'launch', '--model', TINY, '--served-model-name', 'm', '--prefill', '1', '--decode', '1', '--ports', ','.join(map(str, ports)), '--pace', file,
                 '--max-model-len', '2048', '--max-num-seqs', '16', '--block-size', str(BLOCK), '--num-gpu-blocks-override', '100', '--compute-threads', '1'],
                name='launch')

    def waiting():
        return sum(n['placed_tokens'] for n in request(ports[1], 'GET', '/cluster')[2]['nodes'])

    with closing(l):
        wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output() or not l.alive(), 60)
        for i in range(3):  # so that it is known how fast a prefill node is
            ask_at(ports[0], 200 + i, 1100)
        for i in range(5):  # until the prefill node is busy for long enough
            tokens, _ = ask_at(ports[0], i, 1500)
            for k in range(2):
                ask_at(ports[0], 300 + 2 * i + k, 2000)
            wait_until('nothing is placed', lambda: waiting() == 0, 10, 0.01)
            other = threading.Thread(target=ask_at, args=(ports[1], 400 + i, 1500))  # so that the next one does not wait in line behind it
            other.start()
            wait_until('it is placed', lambda: waiting() > 0, 10, 0.01)
            again, trace = ask_at(ports[0], i, 1500)
            other.join()
            assert again == tokens
            if metrics(ports[0])['baton_prefix_handed_back_total']:
                break
        assert metrics(ports[0])['baton_prefix_handed_back_total'] == 1
        assert trace['prefill_node'] != trace['decode_node'] and trace['moves'] == 0, trace
    os.unlink(file)


@alone
def test_the_hit_rate_is_that_of_the_simulation_long():
    cached, simulated_hit = compare(1000, 90)
    assert abs(cached - simulated_hit) < 0.03, (cached, simulated_hit)
