"""Recovery seen from outside: a pair of nodes whose data path is cut while all links are up, a node that hands its work back, a full cluster, and requests that are never split."""
from harness import *
from test_kv_faults import SIZE, ask, bodies_of, check_answers, check_idle, ends_well, nodes_with, reference, tokens_of, total


def cells(node, **labels):
    return total(node, 'baton_request_losses_total', *(f'{k}="{v}"' for k, v in labels.items()))


def breakers(node, to, scope='pair'):
    return total(node, 'baton_breaker_transitions_total', f'scope="{scope}"', f'to="{to}"')


def name_of(node):
    """As traces name it."""
    return f'127.0.0.1:{node.port}'


def under_load(port, bodies, n_clients, until):
    """Clients that ask without a pause until until() is true; returns [(body index, answer or exception)] in the order of the answers."""
    seen, stop, numbers = [], threading.Event(), iter(range(1 << 30))

    def client():
        while not stop.is_set():
            i = next(numbers) % len(bodies)
            try:
                seen.append((i, ask(port, bodies[i])))
            except Exception as e:  # the test looks at it
                seen.append((i, e))
    threads = [threading.Thread(target=client, daemon=True) for _ in range(n_clients)]
    for t in threads:
        t.start()
    try:
        until(seen)
    finally:
        stop.set()
        for t in threads:
            t.join(60)
    assert not any(t.is_alive() for t in threads), 'a request hangs'
    return seen


# ---- a pair whose data path is cut ----

def test_a_cut_pair_costs_three_requests_and_one_probe_brings_it_back():
    """The first answer of one decode node on a data connection is lost, and the next two cut it: three requests can notice. Nobody's link is lost."""
    bodies = bodies_of(40, 91)
    want = reference(bodies)
    cut = 'at=opened:1:drop,at=opened:2:disconnect,at=opened:3:disconnect'
    with nodes_with('tcp', [('prefill', None), ('decode', cut), ('decode', None)]) as (p, bad, good):
        def over_the_pair(seen):
            return [a for _, a in seen if not isinstance(a, Exception) and a['baton']['transport'] == 'tcp' and a['baton']['decode_node'] == name_of(bad)]

        def healed(seen):
            wait_until('the pair is open', lambda: breakers(p, 'open') >= 1, 20)
            t0, n = time.monotonic(), len(seen)
            wait_until('requests go on elsewhere', lambda: len(seen) > n + 5, 10)
            print(f'  six more answers {time.monotonic() - t0:.2f} s after it was noticed', flush=True)
            wait_until('one request probes the pair, and it serves again', lambda: breakers(p, 'closed') == 1, 30)
            wait_until('the pair is used again', lambda: len(over_the_pair(seen)) >= 3, 20)
        seen = under_load(p.port, bodies, 2, healed)
        check_answers([bodies[i] for i, _ in seen], [want[i] for i, _ in seen], [a for _, a in seen])
        moved = [a['baton']['moves'] for _, a in seen if a['baton'].get('moves', 0)]
        paid, opened, probes = cells(p, loss='pair'), breakers(p, 'open'), breakers(p, 'half_open')
        print(f'  {len(seen)} requests, {len(moved)} moved; the breaker opened {opened:.0f} times and let {probes:.0f} probes through', flush=True)
        assert 1 <= len(moved) <= 3 and max(moved) == 1 and paid == len(moved), (moved, paid)
        assert probes == opened, 'one probe after each pause'
        assert cells(p, loss='prefill_node') + cells(p, loss='decode_node') == 0 and breakers(p, 'open', 'node') == 0, 'no node was lost or blamed'
        assert total(bad, 'baton_kv_fault_injected_total') == 3, 'the whole plan was carried out'
        check_idle([p, bad, good])
        ends_well([p, bad, good])


# ---- a node that shuts down ----

def test_a_node_that_shuts_down_hands_back_what_it_computes():
    """After half of its time, so that nothing is lost with it: the streams go on at the other node."""
    bodies = [dict(model='m', prompt=list(range(100 + 20 * i, 110 + 20 * i)), max_tokens=150, temperature=0, ignore_eos=True) for i in range(8)]
    size = ['--max-model-len', '512', '--max-num-seqs', '8']    # chance spreads them over the two
    control = free_ports(1)[0]
    a = Node(smollm2(), 'mixed', [*size, '--engine-worker-queue-port', str(control)])
    b = Node(smollm2(), 'mixed', [*size, '--innode-prefill-ports', str(control), '--shutdown-timeout', '1'])
    with closing(a, b):
        wait_ready(a, b)
        wait_sees([a, b], 2)
        begun = [threading.Event() for _ in bodies]

        def text_of(i):
            out = []
            for event in stream(a.port, '/v1/completions', {**bodies[i], 'return_token_ids': True}):
                if event.get('choices'):
                    out.append(event['choices'][0]['text'])
                    begun[i].set()
            return ''.join(out)
        got = [None] * len(bodies)
        threads = [threading.Thread(target=lambda i=i: got.__setitem__(i, text_of(i)), daemon=True) for i in range(len(bodies))]
        for t in threads:
            t.start()
        assert all(e.wait(60) for e in begun), 'all have tokens'
        t0 = time.monotonic()
        b.kill(signal.SIGTERM)
        assert b.p.wait(20) == 0, b.output()[-2000:]
        took = time.monotonic() - t0
        for t in threads:
            t.join(120)
        handed = cells(a, loss='handed_back', action='requeue')
        assert 'work handed back' in b.output() and handed >= 1, (handed, b.output()[-2000:])
        assert cells(a, action='fail') + cells(a, action='move') == 0, 'nobody lost anything'
        alone = [w['choices'][0]['text'] for w in parallel([lambda b=b: ask(a.port, b) for b in bodies], 4)]
        assert got == alone, [(g or '')[:40] for g in got]
        print(f'  {handed:.0f} of {len(bodies)} handed back; the node ended after {took:.1f} s', flush=True)


# ---- a cluster that is full ----

def test_a_full_node_queues_for_a_bounded_time():
    with closing(Node(smollm2(), 'mixed', ['--max-model-len', '4096', '--max-num-seqs', '1', '--max-queue-time', '1'])) as n:
        wait_ready(n)
        long = dict(model='m', prompt=[5, 6, 7], max_tokens=4000, temperature=0, ignore_eos=True)
        first = stream(n.port, '/v1/completions', long)
        next(first)
        t0 = time.monotonic()
        status, headers, body = request(n.port, 'POST', '/v1/completions', {**long, 'max_tokens': 1})
        took = time.monotonic() - t0
        assert status == 429 and int(headers['retry-after']) >= 1 and 'full' in body['error']['message'], (status, headers, body)
        assert 0.9 < took < 5, took
        first.close()
        status, _, body = request(n.port, 'POST', '/v1/completions', {**long, 'max_tokens': 1})
        assert status == 200, body


def test_load_of_an_entry_that_died_with_the_directory_is_forgotten():
    """The entry has the only decode node full, by all that the directory counted when both were killed: nobody says that this is over."""
    args = [*SIZE, '--resume-window', '0', *paced()]
    with pair(TINY, args=args, decode_args=['--max-num-seqs', '2']) as (entry, decode):
        streams = [stream(entry.port, '/v1/completions', dict(model='m', prompt=[5, 6, 7 + i], max_tokens=400, temperature=0, ignore_eos=True)) for i in range(2)]
        for s in streams:
            next(s)
        wait_until('it sees itself full', lambda: any(n['placed_seqs'] == 2 for n in request(decode.port, 'GET', '/cluster')[2]['nodes']))
        entry.kill()
        t0 = time.monotonic()
        status, _, body = request(decode.port, 'POST', '/v1/completions', dict(model='m', prompt=[5, 6, 7], max_tokens=2, temperature=0, ignore_eos=True))
        took = time.monotonic() - t0
        assert status == 200 and took < 15, (status, took, body)
        print(f'  an answer {took:.1f} s after the directory was killed', flush=True)
        for s in streams:
            s.close()


# ---- requests that are never split ----

def test_global_places_whole_requests_on_nodes_of_any_role():
    bodies = bodies_of(60, 92)
    want = reference(bodies)
    with closing(Redis()) as redis:
        args = ['--scheduler-name', 'global', '--scheduler-port', str(redis.port), *SIZE]
        with closing(*[Node(TINY, role, args) for role in ('prefill', 'decode', 'mixed')]) as nodes:
            wait_ready(*nodes)
            wait_sees(nodes, 3)
            answers = parallel([lambda i=i: ask(nodes[i % 3].port, bodies[i]) for i in range(len(bodies))], 12)
            check_answers(bodies, want, answers)
            assert all(a['baton']['prefill_node'] == a['baton']['decode_node'] and not a['baton'].get('kv_bytes') for a in answers), 'none was split'
            used = {n.name: sum(a['baton']['decode_node'] == name_of(n) for a in answers) for n in nodes}
            print(f'  {used}', flush=True)
            assert all(used.values()), used
            assert sum(total(n, 'baton_placements_total', 'kind="split"') for n in nodes) == 0
            ends_well(nodes[1:])
            wait_sees(nodes[:1], 1)
            assert tokens_of(ask(nodes[0].port, bodies[0])) == want[0], 'a prefill node alone serves'
            ends_well(nodes[:1])
