"""Two attempts at once (x-baton-hedge-ms): real nodes, one of which takes seconds for a step."""
from harness import *
from test_router import Router, up

SIZE = ['--max-model-len', '512', '--max-num-seqs', '8', '--num-gpu-blocks-override', '120']
SLOW_S, SOON_MS = 3, 150
HEDGE = {'x-baton-hedge-ms': str(SOON_MS), 'x-baton-trace': '1'}
IDLE = ('baton_kv_blocks{state="held"}', 'baton_kv_blocks{state="quarantine"}', 'baton_engine_reserved')


def body_of(i, **more):
    return dict(model='m', prompt=[5 + (11 * i + k) % 300 for k in range(8 + i % 20)], max_tokens=6, seed=i, temperature=1, ignore_eos=True, return_token_ids=True, **more)


def ask(port, body, headers=HEDGE):
    """(token ids of each choice, trace)"""
    status, _, answer = request(port, 'POST', '/v1/completions', body, headers)
    assert status == 200, (status, answer)
    return [c['token_ids'] for c in answer['choices']], answer['baton']


def slow_curve():
    with tempfile.NamedTemporaryFile('w', suffix='.json', delete=False) as f:
        json.dump({'prompt': {}, 'decode': {}, 'fixed_us': SLOW_S * 1e6}, f)
    return f.name


def wait_idle(nodes):
    for n in nodes:
        wait_until(f'{n.name} holds nothing', lambda: not any(metrics(n.port)[name] for name in IDLE), 20)


@contextlib.contextmanager
def cluster(*roles):
    """A router, and nodes of these roles; the first one is slow."""
    curve, router = slow_curve(), Router()
    try:
        with closing(router):
            up(router)
            nodes = [Node(TINY, role, [*SIZE, *router.at(), *([] if i else ['--pace', curve])]) for i, role in enumerate(roles)]
            with closing(*nodes):
                wait_ready(*nodes, router)
                wait_sees([router, *nodes], len(nodes))
                yield router, nodes
                wait_idle(nodes)
    finally:
        os.unlink(curve)


def outcomes(router):
    m = metrics(router.port)
    return [int(m[f'baton_hedges_total{{outcome="{name}"}}']) for name in ('first', 'second', 'none')]


def hedged_until(port, n, want=None):
    """Asks until n answers came from a second attempt. Returns how many were asked."""
    n_second = n_asked = 0
    while n_second < n:
        assert n_asked < 60, (n_second, n_asked)
        begin, (tokens, trace) = time.monotonic(), ask(port, body_of(n_asked % 20))
        assert time.monotonic() - begin < SLOW_S and trace['first_token_ms'] < SLOW_S * 1000, trace
        assert want is None or tokens == want[n_asked % 20], (n_asked, trace)
        assert trace['moves'] == 0 and trace.get('hedged') in (None, 'second'), trace
        n_second += trace.get('hedged') == 'second'
        n_asked += 1
    return n_asked


def test_a_slow_node_does_not_hold_up_who_asks_for_two_attempts():
    with closing(Node(TINY, 'mixed', SIZE)) as alone:
        wait_ready(alone)
        want = [ask(alone.port, body_of(i), {'x-baton-trace': '1'})[0] for i in range(20)]
        want_two = ask(alone.port, body_of(3, n=2), {'x-baton-trace': '1'})[0]
        assert ask(alone.port, body_of(0))[0] == want[0] and metrics(alone.port)['baton_hedges_total{outcome="none"}'] == 0
        status, _, answer = request(alone.port, 'POST', '/v1/completions', body_of(0), {'x-baton-hedge-ms': '60001'})
        assert status == 400 and answer['error']['param'] == 'x-baton-hedge-ms' and "'60001', but must be a whole number of milliseconds from 1 to 60000" in answer['error']['message'], answer
    with cluster('mixed', 'mixed') as (router, nodes):
        n_asked = hedged_until(router.port, 3, want)
        assert outcomes(router) == [0, 3, 0] and metrics(router.port)['baton_requests_total'] == n_asked
        # Each choice by itself, and streams.
        for i in range(4):
            assert ask(router.port, body_of(3, n=2))[0] == want_two
            got = []
            for e in stream(router.port, '/v1/completions', body_of(i), {'x-baton-hedge-ms': str(SOON_MS)}):
                got += e['choices'][0]['token_ids'] if e['choices'] else []
            assert got == want[i][0], (got, want[i])
        # A client that leaves leaves nothing behind, whichever attempts there are by then.
        for wait_s in (0.02, 0.1, 0.3, 0.5) * 2:
            with contextlib.suppress(TimeoutError, OSError):
                request(router.port, 'POST', '/v1/completions', {**body_of(1), 'max_tokens': 400}, HEDGE, timeout=wait_s)
        wait_until('the router has no request', lambda: metrics(router.port)['baton_requests_live'] == 0, 10)
        wait_idle(nodes)
        wait_until('no node is busy', lambda: not any(n['n_running'] or n['waiting_tokens'] for n in request(router.port, 'GET', '/cluster')[2]['nodes']), 10)
        # Who does not ask has one attempt.
        before, seen = outcomes(router), set()
        for i in range(30):
            if len(seen) == 2:
                break
            tokens, trace = ask(router.port, {**body_of(i % 20), 'max_tokens': 1}, {'x-baton-trace': '1'})
            assert 'hedged' not in trace and tokens == [want[i % 20][0][:1]]
            seen.add(trace['first_token_ms'] > SLOW_S * 900)
        assert len(seen) == 2 and outcomes(router) == before, (seen, outcomes(router), before)


def test_a_slow_prefill_node_is_passed_by_on_another_pair():
    with cluster('prefill', 'prefill', 'decode', 'decode') as (router, nodes):
        hedged_until(router.port, 2)
        assert outcomes(router)[1] == 2
        trace = ask(router.port, body_of(7))[1]
        assert trace['prefill_node'] == f'127.0.0.1:{nodes[1].port}', trace
