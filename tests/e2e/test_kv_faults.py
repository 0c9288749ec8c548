"""Two nodes with faults injected into their KV transfers (BATON_KV_FAULT): no answer is wrong, every request completes, nothing is left over.

The fault plan is in the environment of the node that misbehaves; /metrics tells what was injected and what was detected."""
from harness import *

SIZE = ['--max-model-len', '2048', '--max-num-seqs', '8', '--num-gpu-blocks-override', '300', '--placement-timeout', '10']
IDLE = ('baton_kv_blocks{state="held"}', 'baton_kv_blocks{state="quarantine"}', 'baton_kv_transfers_quarantined', 'baton_engine_reserved',
        'baton_prefill_credited_tokens', 'baton_prefill_waiting_credit', 'baton_requests_live')
PACED = paced()    # clients that ask all the time leave the machine CPU time


@contextlib.contextmanager
def nodes_with(protocol, roles, args=SIZE, model=TINY):
    """roles: [(role, fault plan or None)]; the first is a prefill node and serves the directory."""
    control, nodes = free_ports(1)[0], []
    for i, (role, plan) in enumerate(roles):
        where = ['--engine-worker-queue-port', str(control)] if i == 0 else ['--innode-prefill-ports', str(control)]
        nodes.append(Node(model, role, ['--cache-transfer-protocol', protocol, *args, *where], {'BATON_KV_FAULT': plan} if plan else None))
    with closing(*nodes) as _:
        wait_ready(*nodes)
        wait_sees(nodes, len(nodes))
        yield nodes


def total(node, name, *labels):
    return sum(v for k, v in metrics(node.port).items() if k.split('{')[0] == name and all(x in k for x in labels))


def bodies_of(n, seed, longest=400, vocab=512, tokens=(1, 24)):
    out = mixed_requests(n, seed, vocab, longest, tokens)
    for b in out:
        del b['logprobs']
    return out


def ask(port, body):
    status, _, answer = request(port, 'POST', '/v1/completions', {**body, 'return_trace': True}, timeout=120)
    assert status == 200, (status, answer)
    return answer


def tokens_of(answer):
    return answer['choices'][0]['token_ids']


def reference(bodies, model=TINY, size=SIZE):
    with closing(Node(model, 'mixed', size)) as mixed:
        wait_ready(mixed)
        return [tokens_of(ask(mixed.port, b)) for b in bodies]


def check_answers(bodies, want, answers):
    bad = [a for a in answers if isinstance(a, Exception)]
    assert not bad, bad[:3]
    wrong = [i for i, (w, a) in enumerate(zip(want, answers)) if tokens_of(a) != w]
    assert not wrong, f'{len(wrong)} of {len(answers)} answers are wrong; the first: request {wrong[0]}'


def check_idle(nodes, timeout=15):
    for n in nodes:
        wait_until(f'{n.name} idle', lambda: not any(metrics(n.port).get(k, 0) for k in IDLE), timeout)


def ends_well(nodes):
    assert [n.stop() for n in nodes] == [0] * len(nodes)


# ---- 1 % of everything ----

ROUNDS = 8


def damaged(protocol, model, bodies, plan, concurrency, size=SIZE):
    want = reference(bodies, model, size)
    with nodes_with(protocol, [('prefill', plan), ('decode', None)], size, model) as (p, d):
        assert 'FAULTS ARE BEING INJECTED' in p.output(), 'a node that injects faults says so'
        answers = []
        for _ in range(ROUNDS):     # while the pair's breaker is open nothing is sent, and nothing damaged
            got = parallel([lambda b=b: ask(d.port, b) for b in bodies], concurrency)
            check_answers(bodies, want, got)
            answers += got
            injected = {k: int(v) for k, v in metrics(p.port).items() if k.startswith('baton_kv_fault_injected_total') and v}
            failed = {k: int(v) for k, v in metrics(d.port).items() if k.startswith('baton_kv_transfer_failures_total') and 'receive' in k and v}
            if sum(injected.values()) >= 10 and sum(failed.values()) >= 5:
                break
        split = sum(a['baton'].get('transport') == protocol for a in answers)
        print(f'  {protocol}: {len(answers)} requests, all right; {split} split; injected {sum(injected.values())} {sorted(injected.items())}, failed transfers {sorted(failed.items())}', flush=True)
        assert sum(injected.values()) >= 10 and sum(failed.values()) >= 5, 'too few faults to prove anything'
        assert split > 0, 'no request was split in the end'
        check_idle([p, d])
        ends_well([p, d])


EVERYTHING = 'seed=7,flip=0.01,truncate=0.01,duplicate=0.01,stale=0.005,drop=0.003,delay=0.01:20,reorder=0.01,disconnect=0.002'


def test_one_per_cent_of_everything_ipc():
    damaged('ipc', TINY, bodies_of(400, 11), EVERYTHING, 8)


def test_one_per_cent_of_everything_tcp():
    damaged('tcp', TINY, bodies_of(400, 12), EVERYTHING + ',late=0.01:30', 8)


def test_flipped_bits_of_a_real_model():
    # 30 layers, so 1 % of the puts and notes is every other transfer
    damaged('tcp', smollm2(), bodies_of(20, 13, 100, 49152, (1, 4)), 'seed=3,flip=0.01', 4)


# ---- a writer stopped with a write pending, while the decode node reuses the pages ----

def stopped_writer(protocol):
    bodies = bodies_of(60, 21, tokens=(8, 24))
    want = reference(bodies)
    with nodes_with(protocol, [('prefill', None), ('prefill', 'at=put:40:sigstop,at=put:70:sigstop'), ('decode', None)], [*SIZE, *PACED, '--num-gpu-blocks-override', '80']) as nodes:
        stop, seen, d = threading.Event(), [], nodes[2]
        cursor = iter(range(1 << 30))

        def client():
            while not stop.is_set():
                i = next(cursor) % len(bodies)
                try:
                    seen.append((i, tokens_of(ask(d.port, bodies[i]))))
                except Exception as e:  # the test checks it
                    seen.append((i, e))
        threads = [threading.Thread(target=client, daemon=True) for _ in range(6)]
        for t in threads:
            t.start()

        def is_stopped():
            with open(f'/proc/{nodes[1].p.pid}/stat') as f:
                return f.read().rsplit(')', 1)[1].split()[0] == 'T'
        for k in range(2):
            wait_until('the node stops itself with a put pending', is_stopped, 30)
            n = len(seen)
            time.sleep(5)               # meanwhile the decode node reuses its few pages many times
            assert len(seen) > n + 20, 'requests go on'
            nodes[1].kill(signal.SIGCONT)
            wait_until('it goes on', lambda: not is_stopped(), 5)
        time.sleep(1)
        stop.set()
        for t in threads:
            t.join(60)
            assert not t.is_alive(), 'a request hangs'
        bad = [(i, s) for i, s in seen if s != want[i]]
        print(f'  {protocol}: {len(seen)} requests while the writer was stopped twice', flush=True)
        assert not bad, bad[:2]
        check_idle(nodes)
        ends_well(nodes)


def test_pages_of_a_stopped_writer_ipc():
    stopped_writer('ipc')


def test_pages_of_a_stopped_writer_tcp():
    stopped_writer('tcp')


# ---- both sides restarted at their addresses, under load ----

def test_both_restarted_at_their_addresses_under_load():
    bodies = bodies_of(40, 31, tokens=(8, 24))
    want = reference(bodies)
    control, kv = free_ports(2)
    common = ['--cache-transfer-protocol', 'tcp', *SIZE, *PACED]
    p = Node(TINY, 'prefill', [*common, '--engine-worker-queue-port', str(control)])
    d = Node(TINY, 'decode', [*common, '--innode-prefill-ports', str(control), '--cache-queue-port', str(kv)])
    with closing(p, d):
        wait_ready(p, d)
        wait_sees([p, d], 2)
        stop, seen = threading.Event(), []

        def client(seed):
            r = random.Random(seed)
            while not stop.is_set():
                i = r.randrange(len(bodies))
                try:
                    seen.append(('ok', tokens_of(ask(d.port, bodies[i])) == want[i], time.monotonic()))
                except (OSError, http.client.HTTPException, AssertionError) as e:
                    seen.append((f'{type(e).__name__} {str(e)[:100]}', True, time.monotonic()))   # its entry node is down or starting
                    time.sleep(0.1)
        threads = [threading.Thread(target=client, args=(k,), daemon=True) for k in range(6)]
        for t in threads:
            t.start()
        for node in (p, d, p, d):
            time.sleep(1.5)
            node.restart()
            wait_ready(p, d)
        wait_sees([p, d], 2)
        t0 = time.monotonic()
        time.sleep(3)
        stop.set()
        for t in threads:
            t.join(60)
            assert not t.is_alive(), 'a request hangs'
        last = [s for s in seen if s[2] > t0 + 1]
        print(f'  {len(seen)} requests, {sum(s[0] != "ok" for s in seen)} of them refused while their node was down', flush=True)
        assert all(s[1] for s in seen), 'a wrong answer'
        assert len([s for s in seen if s[0] == 'ok']) > 50 and len(last) > 10 and all(s[0] == 'ok' for s in last), last[:3]
        assert wait_until('split again', lambda: ask(d.port, bodies[0])['baton'].get('transport') == 'tcp', 10)
        check_idle([p, d])
        ends_well([p, d])


# ---- clients that disconnect ----

def test_abort_storm():
    bodies = bodies_of(200, 41, tokens=(8, 24))
    want = reference(bodies)
    with nodes_with('ipc', [('prefill', None), ('decode', None)]) as (p, d):
        idle_blocks = {n.port: {k: v for k, v in metrics(n.port).items() if k.startswith('baton_kv_blocks{')} for n in (p, d)}
        r = random.Random(41)

        def leave(body):
            """Disconnects at some moment between the request and its last token."""
            c = http.client.HTTPConnection('127.0.0.1', d.port, timeout=60)
            c.request('POST', '/v1/completions', json.dumps({**body, 'stream': True, 'max_tokens': 400}), {'Content-Type': 'application/json'})
            c.sock.settimeout(r.random() * 0.15)
            try:
                while c.sock.recv(4096):
                    pass
            except OSError:
                pass
            c.close()
        jobs, stays = [], []
        for i, b in enumerate(bodies):
            if r.random() < 0.9:
                jobs.append(lambda b=b: leave(b))
            else:
                stays.append((i, len(jobs)))
                jobs.append(lambda b=b: ask(d.port, b))
        results = parallel(jobs, 24)
        left = [x for x in results if isinstance(x, Exception)]
        assert not left, left[:3]
        for i, k in stays:
            assert tokens_of(results[k]) == want[i], 'a wrong answer beside the storm'
        check_idle([p, d], 5)
        answers = parallel([lambda b=b: ask(d.port, b) for b in bodies[:40]], 8)
        check_answers(bodies[:40], want[:40], answers)
        check_idle([p, d], 5)
        for n in (p, d):
            m = metrics(n.port)
            lost = sum(v for k, v in idle_blocks[n.port].items()) - sum(m.get(k, 0) for k in idle_blocks[n.port])
            assert lost == 0, f'{n.name} has {lost} blocks less in all its states'
        print(f'  {len(jobs) - len(stays)} of {len(jobs)} clients left, no block with them', flush=True)
        ends_well([p, d])


# ---- one pair of nodes that cannot reach each other ----

def test_one_bad_pair_poisons_nobody():
    bodies = bodies_of(120, 51)
    want = reference(bodies)
    with nodes_with('tcp', [('prefill', None), ('prefill', None), ('decode', 'seed=1,drop=1'), ('decode', None)]) as (p0, p1, bad, good):
        answers = parallel([lambda b=b: ask(good.port, b) for b in bodies], 8)
        check_answers(bodies, want, answers)
        over = [a['baton'] for a in answers]
        ok = [t for t in over if t.get('transport') == 'tcp']
        moved = [t for t in over if t.get('moves', 0)]
        print(f'  {len(ok)} of {len(answers)} split, {len(moved)} moved away from the bad node, which failed {total(bad, "baton_kv_transfer_failures_total"):.0f} transfers', flush=True)
        assert len(ok) > len(answers) / 4, 'pairs with the good decode node go on splitting'
        assert total(good, 'baton_kv_transfer_failures_total', 'receive') == 0, 'the good decode node has failed transfers'
        check_idle([p0, p1, bad, good])
        ends_well([p0, p1, bad, good])


# ---- a decode node with almost no free pages ----

def test_decode_node_nearly_full():
    size = ['--max-model-len', '1024', '--max-num-seqs', '16', '--placement-timeout', '60']
    bodies = bodies_of(120, 61, 300, tokens=(100, 400))
    want = reference(bodies, size=[*size, '--num-gpu-blocks-override', '300'])
    with nodes_with('ipc', [('prefill', None), ('decode', None)], [*size, '--num-gpu-blocks-override', '24']) as (p, d):
        fullest, stop = [0], threading.Event()

        def watch():
            while not stop.wait(0.05):
                m = metrics(d.port)
                fullest[0] = max(fullest[0], 1 - m.get('baton_kv_blocks{state="free"}', 24) / 24)
        t = threading.Thread(target=watch, daemon=True)
        t.start()
        answers = parallel([lambda b=b: ask(d.port, b) for b in bodies], 16)
        stop.set()
        t.join(10)
        check_answers(bodies, want, answers)
        print(f'  the decode node was {fullest[0]:.0%} full', flush=True)
        assert fullest[0] >= 0.95, 'never nearly full: nothing is proven'
        check_idle([p, d])
        ends_well([p, d])


# ---- nodes started in every order ----

def test_every_order_of_starting():
    body = bodies_of(1, 71)[0]
    want = reference([body])[0]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]):
        control = free_ports(1)[0]
        makers = [lambda: Node(TINY, 'prefill', ['--cache-transfer-protocol', 'tcp', *SIZE, '--engine-worker-queue-port', str(control)]),
                  lambda: Node(TINY, 'prefill', ['--cache-transfer-protocol', 'tcp', *SIZE, '--innode-prefill-ports', str(control)]),
                  lambda: Node(TINY, 'decode', ['--cache-transfer-protocol', 'tcp', *SIZE, '--innode-prefill-ports', str(control)])]
        nodes = {}
        for i in order:
            nodes[i] = makers[i]()
            time.sleep(0.5)
        with closing(*nodes.values()):
            wait_ready(*nodes.values())
            wait_sees(nodes.values(), 3)
            answer = ask(nodes[2].port, body)
            assert tokens_of(answer) == want and answer['baton']['transport'] == 'tcp', answer['baton']
            ends_well(list(nodes.values()))


# ---- which transport carried the bytes ----

def test_metric_and_trace_tell_the_transport():
    bodies = bodies_of(20, 81)
    for protocol, other in (('ipc', 'tcp'), ('tcp', 'ipc')):
        with nodes_with(protocol, [('prefill', None), ('decode', None)]) as (p, d):
            answers = [ask(d.port, b) for b in bodies]
            moved = sum(a['baton']['kv_bytes'] for a in answers)
            assert moved > 0 and all(a['baton']['transport'] == protocol for a in answers)
            for node, direction in ((p, 'send'), (d, 'receive')):
                carried = total(node, 'baton_kv_transfer_bytes_total', f'transport="{protocol}"', f'direction="{direction}"')
                assert carried == moved, f'{node.name}: the metric says {carried}, the traces {moved}'
                assert total(node, 'baton_kv_transfer_bytes_total', f'transport="{other}"') == 0
    with nodes_with('ipc,tcp', [('prefill', None), ('decode', None)]) as (p, d):    # of two transports the better one is used; both nodes say which
        assert {ask(d.port, b)['baton']['transport'] for b in bodies} == {'ipc'}
        assert total(d, 'baton_kv_transfer_bytes_total', 'transport="tcp"') == 0
