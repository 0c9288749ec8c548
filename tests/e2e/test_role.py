"""The role of a running node, changed by `baton role` and POST /cluster/v1/role: under load nothing fails, what runs goes on, and what cannot be is refused with a sentence."""
import hashlib, hmac

from harness import *
from test_kv_faults import SIZE, ask, bodies_of, check_answers, check_idle, ends_well, nodes_with, reference, tokens_of, total
from test_recovery import cells
from test_router import Router

RENEWAL = 0.7
PACED = paced()   # what must run when a role changes does, however busy the machine is


def baton_role(*words, env=None):
    """(exit status, what it says)"""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(('BATON_CLUSTER', 'BATON_API'))}
    p = subprocess.run([BIN, 'role', *words], capture_output=True, text=True, timeout=30, env={**clean, **(env or {})})
    return p.returncode, p.stdout + p.stderr


def at(node):
    return f'127.0.0.1:{node.port}'


def roles_at(port):
    """{name: role} as the directory that listens at this control port has it now."""
    status, _, view = request(port, 'POST', '/cluster/v1/snapshot', {'owner': '00000000000000aa', 'topic': 'default'})
    assert status == 200, view
    out = {}
    for n in view['nodes']:
        me = json.loads(n['identity'])
        out[me['name']] = me['role']
    return out


@contextlib.contextmanager
def trio(model=TINY, size=SIZE, roles=('prefill', 'decode', 'mixed'), protocol='tcp'):
    control, nodes = free_ports(1)[0], []
    for i, role in enumerate(roles):
        where = ['--engine-worker-queue-port', str(control)] if i == 0 else ['--innode-prefill-ports', str(control)]
        nodes.append(Node(model, role, ['--cache-transfer-protocol', protocol, *size, *where]))
    with closing(*nodes):
        wait_ready(*nodes)
        wait_sees(nodes, len(nodes))
        yield control, nodes


# ---- under load ----

def test_twenty_changes_under_load_fail_no_request():
    """Any node to any role at random, but the last one that decodes; clients ask all three without a pause."""
    bodies, r, changes, slowest = bodies_of(60, 71), random.Random(5), [], 0.0
    want = reference(bodies)
    with trio() as (control, nodes):
        seen, stop, numbers = [], threading.Event(), iter(range(1 << 30))

        def client(i):
            while not stop.is_set():
                k = next(numbers) % len(bodies)
                try:
                    seen.append((k, ask(nodes[i % 3].port, bodies[k])))
                except Exception as e:  # checked below
                    seen.append((k, e))
        threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(6)]
        for t in threads:
            t.start()
        while len(changes) < 20:
            node, role = r.choice(nodes), r.choice(['prefill', 'decode', 'mixed'])
            was = roles_at(control)[at(node)]
            status, said = baton_role(at(node), role)
            if status:
                assert role == 'prefill' and 'the last node' in said, said
                continue
            t0 = time.monotonic()
            wait_until('the directory has it', lambda: roles_at(control)[at(node)] == role, 10, 0.01)
            slowest = max(slowest, time.monotonic() - t0)
            if was != role:
                changes.append((was, role))
            time.sleep(0.1)
        time.sleep(1)
        stop.set()
        for t in threads:
            t.join(60)
            assert not t.is_alive(), 'a request hangs'
        check_answers([bodies[i] for i, _ in seen], [want[i] for i, _ in seen], [a for _, a in seen])
        handed = sum(cells(n, loss='handed_back') for n in nodes)
        moved = sum(a['baton'].get('moves', 0) for _, a in seen)
        split = sum(a['baton']['prefill_node'] != a['baton']['decode_node'] for _, a in seen)
        print(f'  {len(changes)} changes, {len(seen)} requests, 0 failed; {split} split, {handed:.0f} handed back, {moved} moved; in the directory within {slowest:.2f} s', flush=True)
        assert slowest < RENEWAL, slowest
        assert len(seen) > 60 and split > 0 and moved == 0, 'a change costs no move'
        assert sum(total(n, 'baton_role_changes_total') for n in nodes) == 20
        check_idle(nodes)
        ends_well(nodes)


# ---- work that runs is not touched ----

def test_a_decode_node_that_becomes_prefill_finishes_its_answers():
    body = dict(model='m', prompt=list(range(100, 140)), max_tokens=200, temperature=0, ignore_eos=True)
    with trio(size=[*SIZE, *PACED], roles=('prefill', 'decode', 'decode')) as (control, (p, d, other)):
        events = stream(p.port, '/v1/completions', {**body, 'return_trace': True})
        first = next(events)
        runs, idle = (d, other) if metrics(d.port)['baton_engine_running'] else (other, d)
        status, said = baton_role(at(runs), 'prefill')
        assert status == 0 and 'is prefill now, and was decode' in said, said
        wait_until('it takes prompts', lambda: roles_at(control)[at(runs)] == 'prefill', 2)
        now = ask(p.port, body)
        assert now['baton']['decode_node'] == at(idle), now['baton']
        rest = list(events)
        trace = rest[-1]['baton']
        assert trace['decode_node'] == at(runs) and trace.get('moves', 0) == 0, trace
        text = ''.join(e['choices'][0]['text'] for e in [first, *rest] if e['choices'])
        assert text == now['choices'][0]['text']
        used = {ask(idle.port, {**body, 'prompt': [9 + i] * 40, 'max_tokens': 2})['baton']['prefill_node'] for i in range(12)}
        assert at(runs) in used, used


def test_a_prefill_node_that_becomes_decode_finishes_its_transfers():
    """Long prompts: those with a credit are computed and sent; those that wait for one go to the other prefill node."""
    bodies = [dict(model='m', prompt=[(7 * i + k) % 500 + 5 for k in range(400)], max_tokens=2, temperature=0, ignore_eos=True) for i in range(48)]
    with trio(size=[*SIZE, *PACED, '--max-num-batched-tokens', '32', '--max-num-seqs', '32'], roles=('prefill', 'prefill', 'decode')) as (control, (first, p, d)):
        answers = []
        t = threading.Thread(target=lambda: answers.extend(parallel([lambda b=b: ask(d.port, b) for b in bodies], len(bodies))))
        t.start()
        wait_until('prompts wait and run', lambda: metrics(p.port)['baton_prefill_waiting_credit'] >= 1 and metrics(p.port)['baton_prefill_credited_tokens'] > 0, 20, 0.01)
        sent = total(p, 'baton_prefill_sent_total')
        status, said = baton_role(at(p), 'decode')
        assert status == 0, said
        t.join(120)
        bad = [a for a in answers if isinstance(a, Exception)]
        assert len(answers) == len(bodies) and not bad, bad
        assert total(p, 'baton_prefill_sent_total') > sent, 'what had a credit was sent'
        assert cells(d, loss='handed_back', action='requeue') >= 1 and cells(d, action='move') == 0
        print(f'  {total(p, "baton_prefill_sent_total") - sent:.0f} sent after the change, {cells(d, loss="handed_back"):.0f} handed back', flush=True)
        check_idle([first, p, d])


def test_a_decode_node_that_becomes_mixed_takes_kv_at_once():
    """It holds blocks for a prompt of seconds; others are split over it meanwhile."""
    with tempfile.NamedTemporaryFile('w', suffix='.json') as pace:
        json.dump({'about': 'slow prompts', 'fixed_us': 2000, 'prompt': {'row_us': 10000, 'context_us': 1}, 'decode': {'row_us': 500, 'context_us': 1, 'points': [[1, 10, 4000], [4, 10, 5000]]}}, pace)
        pace.flush()
        with trio(size=[*SIZE, '--pace', pace.name, '--max-num-batched-tokens', '32'], roles=('prefill', 'prefill', 'decode')) as (control, (p, other, d)):
            got = []
            t = threading.Thread(target=lambda: got.append(ask(p.port, dict(model='m', prompt=list(range(5, 505)), max_tokens=2, temperature=0, ignore_eos=True))))
            t.start()
            wait_until('it is computed', lambda: any(metrics(n.port)['baton_engine_running'] for n in (p, other)), 5, 0.01)
            time.sleep(0.3)  # its blocks are granted
            assert baton_role(at(d), 'mixed')[0] == 0
            wait_until('the entry sees it', lambda: {n['name']: n['role'] for n in request(p.port, 'GET', '/cluster')[2]['nodes']}[at(d)] == 'mixed', 5, 0.01)
            meanwhile = parallel([lambda i=i: ask(p.port, dict(model='m', prompt=[9 + i] * 8, max_tokens=2, temperature=0)) for i in range(8)], 8)
            assert not got, 'the long one is still computed'
            bad = [a for a in meanwhile if isinstance(a, Exception)]
            assert not bad, bad
            split = [a['baton'] for a in meanwhile if a['baton']['prefill_node'] != at(d)]
            assert split and all(x['decode_node'] == at(d) for x in split), [a['baton'] for a in meanwhile]
            t.join(30)
            assert got[0]['baton']['decode_node'] == at(d) and got[0]['baton'].get('moves', 0) == 0, got
            check_idle([p, other, d])


# ---- nodes of several ranks, and listed nodes ----

def test_a_node_of_several_ranks_changes_its_role():
    """Its first rank is asked; the other only does what it says."""
    bodies = bodies_of(4, 73, longest=60, tokens=(2, 6))
    want = reference(bodies)
    control, meet = free_ports(2)
    common = ['--cache-transfer-protocol', 'tcp', *SIZE]
    p = Node(TINY, 'prefill', [*common, '--engine-worker-queue-port', str(control)])
    d = Node(TINY, 'decode', [*common, '--innode-prefill-ports', str(control)])
    tensor = [*common, '--innode-prefill-ports', str(control), '--tensor-parallel-size', '2', '--tensor-parallel-port', str(meet)]
    ranks = [Node(TINY, 'decode', [*tensor, '--tensor-parallel-rank', str(i)]) for i in range(2)]
    with closing(p, d, ranks[1], ranks[0]):  # the first ends first: the other leaves with it
        wait_ready(p, d, ranks[0])
        wait_sees([p, d, ranks[0]], 3)
        for role, as_prefill in (('prefill', True), ('decode', False)):
            assert baton_role(at(ranks[0]), role)[0] == 0
            for n in (p, d):
                wait_until('the others see it', lambda: {at(ranks[0]): role}.items() <= {x['name']: x['role'] for x in request(n.port, 'GET', '/cluster')[2]['nodes']}.items(), 5)
            mine = set()
            for _ in range(10):     # among equals chance decides
                answers = parallel([lambda b=b: ask(d.port, b) for b in bodies], 4)
                check_answers(bodies, want, answers)
                mine |= {(a['baton']['prefill_node'] == at(ranks[0]), a['baton']['decode_node'] == at(ranks[0])) for a in answers}
                if (as_prefill, not as_prefill) in mine:
                    break
            assert (as_prefill, not as_prefill) in mine and mine <= {(as_prefill, not as_prefill), (False, False)}, mine
        check_idle([p, d, ranks[0]])


def test_listed_nodes_change_their_role():
    """They know no other node; their router does."""
    p, d = (Node(TINY, role, ['--cache-transfer-protocol', 'tcp', *SIZE]) for role in ('prefill', 'decode'))
    with closing(p, d):
        wait_ready(d)
        with closing(Router('--prefiller-hosts', '127.0.0.1', '--prefiller-ports', str(p.port), '--decoder-hosts', '127.0.0.1', '--decoder-ports', str(d.port))) as router:
            wait_ready(router)  # while it loads it passes requests whole, to nodes that know no other
            wait_until('they are split over', lambda: ask(router.port, bodies_of(1, 3)[0])['baton']['decode_node'] == at(d), 20)
            for n, role in ((p, 'mixed'), (d, 'prefill'), (p, 'decode')):
                status, said = baton_role(at(n), role)
                assert status == 0 and f'is {role} now' in said, said
            wait_until('the other way around', lambda: ask(router.port, bodies_of(1, 3)[0])['baton'].items() >= {'prefill_node': at(d), 'decode_node': at(p)}.items(), 5)
            status, said = baton_role(f'127.0.0.1:{router.port}', 'decode')
            assert status == 1 and 'this is a router, no node' in said, said


# ---- who may, and what is refused ----

def test_what_cannot_be_is_refused_with_a_sentence():
    with trio(roles=('prefill', 'decode')) as (control, (p, d)):
        for words, says in (((at(d), 'prefill'), 'the last node of topic default that decodes'), ((at(p), 'router'), 'it is prefill, decode or mixed'),
                            (('nobody', 'decode', '--port', str(p.port)), 'nobody'), ((f'127.0.0.1:{free_ports(1)[0]}', 'decode'), 'nothing answers'),
                            (('127.0.0.1', 'decode', '--url', f'http://{at(p)}'), '2 nodes are at 127.0.0.1'), ((at(p),), 'usage')):
            status, said = baton_role(*words)
            assert status in (1, 2) and says in said, (words, said)
        assert roles_at(control) == {at(p): 'prefill', at(d): 'decode'}
        for body, code, says in (('{', 400, ''), ({}, 400, 'role is'), ({'role': 'x'}, 400, "role is 'x'"), ({'role': 'mixed', 'node': '10.9.9.9:1'}, 404, at(p))):
            status, _, answer = request(p.port, 'POST', '/cluster/v1/role', body)
            assert status == code and says in answer['error'], (body, status, answer)
        assert request(p.port, 'GET', '/cluster/v1/role')[0] == 404
        # by its id, as another node knows it; then the other way around
        ident = request(d.port, 'GET', '/version')[2]['node']
        assert baton_role(ident, 'mixed', '--port', str(p.port)) == (0, f'{at(d)} is mixed now, and was decode\n')
        assert baton_role(ident, 'mixed', '--port', str(p.port)) == (0, f'{at(d)} is mixed already\n')
        table = subprocess.run([BIN, 'status', '--port', str(d.port)], capture_output=True, text=True).stdout
        assert f'{at(d)} (mixed)' in table, table
        # the second of two changes sees the first at once
        assert baton_role(at(p), 'mixed')[0] == 0 and baton_role(at(d), 'prefill')[0] == 0
        status, said = baton_role(at(p), 'prefill')
        assert status == 1 and 'the last node' in said, said


def test_two_that_become_prefill_at_once_leave_one_that_decodes():
    """Each sees the other decode when it is asked; at least one looks again and goes back."""
    with trio(roles=('prefill', 'decode', 'decode')) as (control, (p, a, b)):
        n_stayed = 0
        for _ in range(8):
            both = parallel([lambda n=n: baton_role(at(n), 'prefill') for n in (a, b)], 2)
            refused = [said for status, said in both if status]
            assert all('the last node of topic default that decodes' in said for said in refused), both
            roles = roles_at(control)
            assert 'decode' in (roles[at(a)], roles[at(b)]) and len(refused) == list(roles.values()).count('decode'), (both, roles)
            assert tokens_of(ask(p.port, bodies_of(1, 3)[0]))
            n_stayed += 2 - len(refused)
            for n in (a, b):
                assert baton_role(at(n), 'decode')[0] == 0
        changes = sum(total(n, 'baton_role_changes_total', 'to="decode"') for n in (a, b))
        print(f'  8 rounds: {n_stayed} became prefill, {changes - n_stayed:.0f} went back', flush=True)


def test_a_node_alone_keeps_its_role():
    with closing(Node(TINY, args=SIZE)) as a:
        wait_ready(a)
        status, said = baton_role(at(a), 'decode')
        assert status == 1 and 'keeps a view of its own' in said, said
        assert tokens_of(ask(a.port, bodies_of(1, 3)[0]))


def test_only_who_has_the_secret_changes_a_role():
    secret = 'a secret of the cluster, long enough'
    control = free_ports(1)[0]
    env = {'BATON_CLUSTER_SECRET': secret, 'BATON_API_KEY': 'key'}
    args = ['--cache-transfer-protocol', 'tcp', '--advertise-host', '127.0.0.1', *SIZE]
    nodes = [Node(TINY, 'prefill', [*args, '--engine-worker-queue-port', str(control)], env), Node(TINY, 'decode', [*args, '--innode-prefill-ports', str(control)], env)]
    with closing(*nodes) as (p, d):
        wait_ready(p, d)
        key = {'Authorization': 'Bearer key'}
        wait_until('they see each other', lambda: len(request(p.port, 'GET', '/cluster', headers=key)[2]['nodes']) == 2)
        for headers in (None, key, {'Authorization': 'Baton ' + '0' * 64}):
            status, _, answer = request(p.port, 'POST', '/cluster/v1/role', {'role': 'mixed'}, headers)
            assert status == 401 and 'secret' in answer['error'], (status, answer)
        status, said = baton_role(at(p), 'mixed')
        assert status == 1 and 'the call proves none' in said and 'BATON_CLUSTER_SECRET or --cluster-secret-file' in said, said
        ident = request(d.port, 'GET', '/version', headers=key)[2]['node']
        status, said = baton_role(ident, 'mixed', '--port', str(p.port), env={'BATON_CLUSTER_SECRET': secret})
        assert status == 1 and 'wants a key: give one of its own with --api-key or BATON_API_KEY' in said, said
        status, said = baton_role(str(p.port), 'mixed')
        assert status == 1 and f'{p.port} is not host:port; of this host it is 127.0.0.1:{p.port}' in said, said
        status, said = baton_role(at(p), 'mixed', env={'BATON_CLUSTER_SECRET': secret})
        assert status == 0 and 'is mixed now' in said, said
        # a proof is of the body
        proof = hmac.new(secret.encode(), b'POST /cluster/v1/role {"role":"decode"}', hashlib.sha256).hexdigest()
        assert request(p.port, 'POST', '/cluster/v1/role', '{"role":"prefill"}', {'Authorization': f'Baton {proof}'})[0] == 401
        assert request(p.port, 'POST', '/cluster/v1/role', '{"role":"decode"}', {'Authorization': f'Baton {proof}'})[0] == 200
        # others take the new record only as it is proven: its role is part of what it proves
        def seen():
            return {n['name']: n['role'] for n in request(d.port, 'GET', '/cluster', headers=key)[2]['nodes']}
        wait_until('the other node takes the new record', lambda: seen() == {at(p): 'decode', at(d): 'decode'}, 5)
