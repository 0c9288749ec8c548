"""Requests while random nodes are stopped (SIGSTOP) and continued: no token is wrong, nothing hangs, and every block (quarantined ones
too), credit and reservation is returned."""
from harness import *

SIZE = ['--max-model-len', '2048', '--max-num-seqs', '8', '--num-gpu-blocks-override', '300', '--placement-timeout', '10']
IDLE = ('baton_kv_blocks{state="held"}', 'baton_kv_blocks{state="quarantine"}', 'baton_kv_transfers_quarantined', 'baton_engine_reserved',
        'baton_prefill_credited_tokens', 'baton_prefill_waiting_credit', 'baton_requests_live')


def client(nodes, bodies, want, rng, stop, seen):
    while not stop.is_set():
        i, node, leaves = rng.randrange(len(bodies)), rng.choice(nodes), rng.random() < 0.15
        try:
            ids = []
            for e in stream(node.port, '/v1/completions', bodies[i], timeout=40):
                assert 'error' not in e, e
                ids += [t for c in e['choices'] for t in c.get('token_ids') or []]
                if leaves:
                    break
            seen.append('left' if leaves else 'ok' if ids == want[i] else f'wrong: {len(ids)} of {len(want[i])} tokens')
        except Exception as e:  # the test checks it
            seen.append(f'{type(e).__name__} {str(e)[:300]}')


def idle(node):
    m = metrics(node.port)
    return not any(m.get(k, 0) for k in IDLE)


def placements(node):
    return [n['placed_seqs'] or n['placed_tokens'] or n['placed_blocks'] for n in request(node.port, 'GET', '/cluster')[2]['nodes']]


def rounds(protocol, seconds, seed, args=()):
    rng, seen, stop = random.Random(seed), [], threading.Event()
    with open(os.path.join(TINY, 'config.json')) as f:
        vocab = json.load(f)['vocab_size']
    bodies = mixed_requests(40, seed, vocab, 400)
    for b in bodies:
        del b['logprobs']
    with pair(TINY, protocol, [*SIZE, *args], prefills=2, decodes=2) as nodes:
        want = [request(nodes[2].port, 'POST', '/v1/completions', b)[2]['choices'][0]['token_ids'] for b in bodies]
        threads = [threading.Thread(target=client, args=(nodes, bodies, want, random.Random(seed * 100 + k), stop, seen), daemon=True) for k in range(12)]
        for t in threads:
            t.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            node = rng.choice(nodes)
            node.kill(signal.SIGSTOP)
            time.sleep(rng.choice([0.5, 2.0, 3.5, 5.0]))
            node.kill(signal.SIGCONT)
            time.sleep(rng.choice([0.3, 1.0, 2.0]))
        stop.set()
        for t in threads:
            t.join(60)
            assert not t.is_alive(), 'a request hangs'
        bad = [s for s in seen if s not in ('ok', 'left')]
        print(f'  {len(seen)} requests, {len(bad)} of them not well', flush=True)
        assert seen.count('ok') > 50 and not bad, bad[:5]
        for n in nodes:
            wait_until(f'{n.name} idle', lambda: idle(n), 15)
        # Reservations released while the directory server stood still end with their timeout.
        wait_until('placements come back', lambda: not any(placements(nodes[0])), 15)
        assert [n.stop() for n in nodes] == [0] * 4


def test_stopped_nodes_ipc():
    """Paced, so that twelve clients leave the machine CPU time."""
    rounds('ipc', 15, 3, paced())


def test_stopped_nodes_ipc_long():
    rounds('ipc', 60, 3)


def test_stopped_nodes_tcp_long():
    rounds('tcp', 60, 4)
