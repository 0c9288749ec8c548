"""A node of a cluster that is told to stop: it computes nothing new, serves its clients through other nodes, and waits for transfers that others read."""
from harness import *
from test_kv_faults import SIZE, ask, check_idle, nodes_with, total
from test_recovery import cells
from test_router import Router, listed as listed_at
from test_shutdown import Client

PACED = paced()   # so that what must run at the signal does, however busy the machine is
LONG = dict(model='m', prompt=[5, 6, 7, 8], max_tokens=220, temperature=0, ignore_eos=True)


def at(node):
    return f'127.0.0.1:{node.port}'


@contextlib.contextmanager
def mixed_nodes(n, args=()):
    control, nodes = free_ports(1)[0], []
    for i in range(n):
        nodes.append(Node(TINY, 'mixed', [*SIZE, *args, *(['--engine-worker-queue-port', str(control)] if i == 0 else ['--innode-prefill-ports', str(control)])]))
    with closing(*nodes):
        wait_ready(*nodes)
        wait_sees(nodes, n)
        yield control, nodes


def listed(control):
    """The names in the directory that listens at this control port."""
    view = request(control, 'POST', '/cluster/v1/snapshot', {'owner': '00000000000000ab', 'topic': 'default'})[2]
    return {json.loads(n['identity'])['name'] for n in view['nodes']}


def traced(events):
    """(text, trace) of the rest of a stream"""
    events = list(events)
    assert 'error' not in events[-1], events[-1]
    return ''.join(e['choices'][0]['text'] for e in events if e.get('choices')), events[-1]['baton']


def test_requests_that_come_to_a_leaving_node_are_computed_elsewhere():
    with mixed_nodes(3, PACED) as (control, (a, b, c)):
        want = ask(a.port, LONG)['choices'][0]['text']
        own, texts = [], []
        while not own or not metrics(b.port)['baton_engine_running']:  # any node may compute a request
            own.append(stream(b.port, '/v1/completions', {**LONG, 'return_trace': True}))
            texts.append(next(own[-1])['choices'][0]['text'])
        t0 = time.monotonic()
        b.kill(signal.SIGTERM)
        wait_until('not ready', lambda: request(b.port, 'GET', '/ready')[0] == 503, 2, 0.01)
        wait_until('out of the directory', lambda: at(b) not in listed(control), 2, 0.01)
        took = time.monotonic() - t0
        drains = request(b.port, 'GET', '/cluster')[2]['draining']
        said = subprocess.run([BIN, 'status', '--port', str(b.port)], capture_output=True, text=True, timeout=30).stdout
        assert drains['requests'] and drains['computing'] and 'DRAINING for ' in said and 'are computed here' in said, (drains, said)
        came = [ask(b.port, {**LONG, 'max_tokens': 20}) for _ in range(5)]
        assert all(x['baton']['decode_node'] != at(b) and x['baton']['prefill_node'] != at(b) for x in came), [x['baton'] for x in came]
        assert len({x['choices'][0]['text'] for x in came}) == 1 and want.startswith(came[0]['choices'][0]['text'])
        rest = [traced(e) for e in own]
        assert [x + y for x, (y, _) in zip(texts, rest)] == [want] * len(own)
        finished = [t for _, t in rest if t['decode_node'] == at(b)]
        assert all(t.get('moves', 0) == 0 for _, t in rest) and finished, 'what ran here was finished here'
        assert b.p.wait(20) == 0, b.output()[-2000:]
        print(f'  out of the directory after {took:.2f} s; {len(finished)} of {len(own)} finished there', flush=True)
        check_idle([a, c])


@alone
def test_clients_of_a_leaving_node_notice_nothing():
    """Kept connections and new ones at full speed while it stops: each request is answered, or its connection is refused."""
    with mixed_nodes(2) as (control, (a, b)):
        clients = [Client(b.port) for _ in range(8)]
        time.sleep(0.5)
        t0 = time.monotonic()
        assert b.stop() == 0, b.output()[-2000:]
        took = time.monotonic() - t0
        for c in clients:
            c.thread.join(30)
            assert not c.thread.is_alive() and not c.lost and not c.wrong, (c.lost, c.wrong)
            assert set(c.statuses) == {200}, c.statuses
        print(f'  {sum(c.statuses[200] for c in clients)} requests, all answered; the node ended after {took:.2f} s', flush=True)
        assert took < 5, took
        b.restart()
        wait_ready(b)
        wait_sees([a, b], 2)
        assert ask(a.port, {**LONG, 'max_tokens': 2})


def test_a_router_that_leaves_serves_to_its_end():
    with closing(Router()) as router:
        nodes = [Node(TINY, role, [*SIZE, *PACED, *router.at()]) for role in ('prefill', 'decode')]
        with closing(*nodes) as (p, d):
            wait_ready(*nodes, router)
            wait_until('both are seen', lambda: len(request(router.port, 'GET', '/cluster')[2]['nodes']) == 2)
            events = stream(router.port, '/v1/completions', {**LONG, 'return_trace': True})
            first = next(events)['choices'][0]['text']
            router.kill(signal.SIGTERM)
            wait_until('not ready', lambda: request(router.port, 'GET', '/ready')[0] == 503, 2, 0.01)
            assert all(ask(router.port, {**LONG, 'max_tokens': 4})['baton']['decode_node'] == at(d) for _ in range(3))
            text, trace = traced(events)
            assert trace.get('moves', 0) == 0 and first + text == ask(d.port, LONG)['choices'][0]['text']
            assert router.p.wait(20) == 0, router.output()[-2000:]


def test_the_last_node_finishes_its_own():
    """Nobody else can: what waits for room on it runs there, and what comes is refused."""
    with closing(Node(TINY, args=[*SIZE, *PACED, '--max-num-seqs', '1'])) as n:
        wait_ready(n)
        got = []
        threads = [threading.Thread(target=lambda: got.append(request(n.port, 'POST', '/v1/completions', {**LONG, 'max_tokens': 100}))) for _ in range(3)]
        for t in threads:
            t.start()

        def seen():
            m = metrics(n.port)
            return m['baton_requests_live'], m['baton_requests_placing']
        wait_until('all have come, and two wait', lambda: seen() == (3, 2), 5, 0.01)
        n.kill(signal.SIGTERM)
        wait_until('not ready', lambda: request(n.port, 'GET', '/ready')[0] == 503, 2, 0.01)
        status, headers, body = request(n.port, 'POST', '/v1/completions', LONG)
        assert status == 503 and 'retry-after' in headers and 'shutting down' in body['error']['message'], (status, body)
        for t in threads:
            t.join(20)
        assert [status for status, _, _ in got] == [200] * 3, got
        assert n.p.wait(20) == 0


def test_a_prefill_node_stays_until_its_transfers_are_fenced():
    """The end of a transfer is held up beyond the node's time: it waits, and the decode node loses nothing."""
    def body(i):
        return dict(model='m', prompt=[5 + i % 400] * 100, max_tokens=3, temperature=0, ignore_eos=True)
    with nodes_with('tcp', [('prefill', None), ('prefill', 'at=finish:1:delay:1800'), ('decode', None)], [*SIZE, '--drain-timeout', '1']) as (first, p, d):
        got = []
        while not any(metrics(p.port).get(k, 0) for k in ('baton_kv_blocks{state="held"}', 'baton_prefill_credited_tokens')):
            got.append(threading.Thread(target=lambda i=len(got): got.append(ask(d.port, body(i)))))
            got[-1].start()
            time.sleep(0.05)
        t0 = time.monotonic()
        p.kill(signal.SIGTERM)
        assert p.p.wait(20) == 0, p.output()[-2000:]
        took = time.monotonic() - t0
        for t in [t for t in got if isinstance(t, threading.Thread)]:
            t.join(30)
        answers = [a for a in got if not isinstance(a, threading.Thread)]
        assert 'stopping with work left' in p.output() and 'transfers=1' in p.output(), p.output()[-2000:]
        assert 1.2 < took < 3.9, took
        mine = [a['baton'] for a in answers if a['baton']['prefill_node'] == at(p)]
        assert len(mine) == 1 and mine[0].get('moves', 0) == 0, [a['baton'] for a in answers]
        assert cells(d, action='move') == 0 and cells(d, loss='prefill_node') == 0
        print(f'  it ended after {took:.2f} s, its time being 1 s', flush=True)


# ---- listed nodes, which know no other ----

@contextlib.contextmanager
def listed_nodes(n_decode):
    """A router, a prefill node and decode nodes with steps of 20 ms, so that an answer outlasts half of the time that a node has to leave."""
    with tempfile.NamedTemporaryFile('w', suffix='.json') as pace:
        json.dump({'about': 'slow', 'fixed_us': 20000, 'prompt': {'row_us': 1, 'context_us': 1}, 'decode': {'row_us': 1, 'context_us': 1, 'points': [[1, 10, 20000], [4, 10, 20000]]}}, pace)
        pace.flush()
        args = ['--cache-transfer-protocol', 'tcp', *SIZE, '--drain-timeout', '3', '--pace', pace.name]
        p, *d = (Node(TINY, role, args) for role in ('prefill', *['decode'] * n_decode))
        with closing(p, *d):
            wait_ready(*d)
            with closing(Router(*listed_at([p], d))) as router:
                wait_ready(router)
                wait_until('all are seen', lambda: len(request(router.port, 'GET', '/cluster')[2]['nodes']) == 1 + n_decode, 20)
                yield router, p, d


def stream_on(router):
    events = stream(router.port, '/v1/completions', {**LONG, 'return_trace': True})
    return next(events)['choices'][0]['text'], events


def test_a_listed_node_that_leaves_hands_its_work_to_another():
    with listed_nodes(2) as (router, p, nodes):
        want = ask(router.port, LONG)['choices'][0]['text']
        first, events = stream_on(router)
        d, other = nodes if metrics(nodes[0].port)['baton_engine_running'] else nodes[::-1]
        time.sleep(1)  # it is asked for its record, and told of the other
        t0 = time.monotonic()
        d.kill(signal.SIGTERM)
        wait_until('not ready', lambda: request(d.port, 'GET', '/ready')[0] == 503, 2, 0.01)
        new = [ask(router.port, {**LONG, 'max_tokens': 3})['baton'] for _ in range(3)]
        assert all(x['decode_node'] == at(other) for x in new), new
        assert d.p.wait(20) == 0 and 'work handed back' in d.output(), d.output()[-2000:]
        took = time.monotonic() - t0
        text, trace = traced(events)
        assert first + text == want and trace['decode_node'] == at(other) and trace.get('moves', 0) == 0, trace
        print(f'  it ended after {took:.2f} s of 3 s', flush=True)
        assert took < 3, took
        check_idle([p, other])


def test_the_last_listed_node_that_decodes_finishes_its_own():
    with listed_nodes(1) as (router, p, (d,)):
        body = {**LONG, 'max_tokens': 100}
        want = ask(router.port, body)['choices'][0]['text']
        events = stream(router.port, '/v1/completions', {**body, 'return_trace': True})
        first = next(events)['choices'][0]['text']
        d.kill(signal.SIGTERM)
        text, trace = traced(events)
        assert first + text == want and trace['decode_node'] == at(d), trace
        assert d.p.wait(20) == 0 and 'work handed back' not in d.output(), d.output()[-2000:]
