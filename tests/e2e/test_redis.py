"""Redis as it is run for good: over TLS as an ACL user, with sentinels that fail over while requests run, and what the doctor says of it."""
from harness import *
from redis_servers import *

SIZE = ['--max-model-len', '2048', '--max-num-seqs', '16', '--num-gpu-blocks-override', '256']
ASK = dict(model='m', prompt=[7, 8, 9, 10, 11], max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True, return_trace=True)


def complete(port, **more):
    status, _, body = request(port, 'POST', '/v1/completions', {**ASK, **more})
    assert status == 200, (status, body)
    return body


def doctor(*args, env=None):
    """{what: [(result, text, fix)]} of the lines about Redis."""
    p = subprocess.run([BIN, 'doctor', '--json', '--port', str(free_ports(1)[0]), *args], capture_output=True, text=True, timeout=120, env={**os.environ, **(env or {})})
    lines = {}
    for l in json.loads(p.stdout)['checks']:
        if l['what'].startswith('Redis') or l['what'] == 'cluster view':
            lines.setdefault(l['what'], []).append((l['result'], l['text'], l.get('fix') or ''))
    return lines


def trouble_of(node):
    status, _, body = request(node.port, 'GET', '/cluster')
    return (body['trouble'] or {}).get('text', '') if status == 200 else ''


def test_a_cluster_over_tls_as_an_acl_user():
    """The user has the rights of docs/security.md and no more; the default user is switched off. A node with another CA says why it stays out."""
    with tempfile.TemporaryDirectory() as folder:
        certificates(folder)
        user = dict(BATON_REDIS_USERNAME='baton', BATON_REDIS_PASSWORD='s3cret')
        with closing(Server([rights_of_the_documents('s3cret'), 'user default off', 'user admin on >admin ~* &* +@all'], tls=folder,
                            inside=['--user', 'admin', '--pass', 'admin', '--no-auth-warning'])) as redis:
            where = ['--scheduler-name', 'splitwise', '--scheduler-host', 'localhost', '--scheduler-port', str(redis.port), '--scheduler-tls']
            args, trust = [*where, '--scheduler-tls-ca', f'{folder}/ca.pem', *SIZE], dict(zip(('p', 'd'), ('prefill', 'decode')))
            with closing(*[Node(TINY, role, args, user) for role in trust.values()]) as nodes:
                wait_ready(*nodes)
                wait_sees(nodes, 2)
                answers = [complete(n.port) for n in nodes] + parallel([lambda n=n: complete(n.port, max_tokens=100) for n in nodes * 8], 16)
                assert all(a['baton']['prefill_node'] != a['baton']['decode_node'] for a in answers), answers
                wait_until('all placements are taken back', lambda: redis.ask('HLEN', 'baton:{default}:res') == '0', 10)
                refused = redis.ask('ACL', 'LOG')
                assert 'baton' not in refused, refused  # no right was missing
                lines = doctor(*args, env=user)
                assert all(r == 'ok' for l in lines.values() for r, _, _ in l), lines
                assert 'TLSv1.3' in lines['Redis TLS'][0][1] and 'user baton' in lines['Redis'][0][1] and '2 nodes now' in lines['cluster view'][0][1], lines
                with closing(Node(TINY, 'decode', [*where, '--scheduler-tls-ca', f'{folder}/other_ca.pem', *SIZE], user)) as stranger:
                    for words in ('certificate of the server localhost is refused', '--scheduler-tls-ca'):
                        wait_until('it says why', lambda: words in trouble_of(stranger), 30)
                assert 'is refused' in doctor(*where, '--scheduler-tls-ca', f'{folder}/other_ca.pem', env=user)['Redis'][0][1]
                wait_sees(nodes, 2)
                complete(nodes[0].port)


def test_a_failover_under_requests_loses_none():
    """The master is killed while requests run; the nodes find the new one, and every request is answered as before."""
    with failover_pair() as (master, replica, sentinel):
        dead = free_ports(1)[0]
        args = ['--scheduler-name', 'splitwise', '--scheduler-sentinels', f'127.0.0.1:{dead},127.0.0.1:{sentinel.port}', *SIZE]
        with closing(Node(TINY, 'prefill', args), Node(TINY, 'decode', args)) as nodes:
            wait_ready(*nodes)
            wait_sees(nodes, 2)
            assert f'the master mymaster of the sentinels 127.0.0.1:{dead},127.0.0.1:{sentinel.port}' in nodes[0].output()
            want = complete(nodes[0].port, max_tokens=60)['choices'][0]['token_ids']
            stop, answers = threading.Event(), []

            def ask(port):
                while not stop.is_set():
                    try:
                        answers.append((time.monotonic(), complete(port, max_tokens=60)['choices'][0]['token_ids'] == want))
                    except Exception as e:
                        answers.append((time.monotonic(), repr(e)))
            threads = [threading.Thread(target=ask, args=(n.port,)) for n in nodes for _ in range(3)]
            for t in threads:
                t.start()
            time.sleep(0.5)
            killed = time.monotonic()
            master.kill()
            wait_until('both nodes are in the new master', lambda: replica.ask('ZCARD', 'baton:{default}:alive') == '2' and 'role:master' in replica.ask('INFO', 'replication'), 90)
            found = time.monotonic()
            wait_until('they say that all is well', lambda: not any(trouble_of(n) for n in nodes), 10)
            before = replica.ask('GET', 'baton:{default}:fence')
            time.sleep(0.7)
            stop.set()
            for t in threads:
                t.join(60)
            bad = [a for _, a in answers if a is not True]
            during = [t for t, _ in answers if killed < t < found]
            print(f'  {len(answers)} requests, {len(during)} of them in the {found - killed:.1f} s until the nodes were in the new master, {len(bad)} bad')
            assert not bad and len(during) >= 20, (bad[:3], len(during))
            assert int(replica.ask('GET', 'baton:{default}:fence')) > int(before), 'nothing was placed through the new master'


def test_a_failover_that_loses_releases_leaves_nothing_placed():
    """The replica knows what was placed, and not that it has ended, when it becomes the master: it would count it until --scheduler-ttl."""
    with failover_pair() as (master, replica, sentinel):
        args = ['--scheduler-name', 'splitwise', '--scheduler-sentinels', f'127.0.0.1:{sentinel.port}', *SIZE, *paced()]
        with closing(Node(TINY, 'prefill', args), Node(TINY, 'decode', args)) as nodes:
            wait_ready(*nodes)
            wait_sees(nodes, 2)
            threads = [threading.Thread(target=complete, args=(n.port,), kwargs=dict(max_tokens=150), daemon=True) for n in nodes * 4]
            for t in threads:
                t.start()
            placed = 'HLEN', 'baton:{default}:res'
            wait_until('the replica knows that they are placed', lambda: int(replica.ask(*placed)) >= 4, 20, 0.01)
            replica.ask('REPLICAOF', '127.0.0.1', str(free_ports(1)[0]))
            for t in threads:
                t.join(60)
            wait_until('they are taken back', lambda: master.ask(*placed) == '0', 10)
            assert int(replica.ask(*placed)) >= 4, 'the replica was told all the same'
            master.kill()
            wait_until('both nodes are in the new master', lambda: replica.ask('ZCARD', 'baton:{default}:alive') == '2' and 'role:master' in replica.ask('INFO', 'replication'), 90)
            wait_until('nothing is placed', lambda: replica.ask(*placed) == '0', 10)
            complete(nodes[0].port)


def test_the_doctor_looks_at_sentinels_roles_and_users():
    with failover_pair() as (master, replica, sentinel):
        dead = free_ports(1)[0]
        name = ['--scheduler-name', 'splitwise']
        lines = doctor(*name, '--scheduler-sentinels', f'127.0.0.1:{sentinel.port},127.0.0.1:{dead}')
        says = lines['Redis sentinel']
        assert says[0][0] == 'ok' and f'the master mymaster is 127.0.0.1:{master.port}' in says[0][1], says
        assert says[1][0] == 'warn' and f'127.0.0.1:{dead}: connection refused' in says[1][1], says
        assert lines['Redis'][0][0] == 'ok' and f'127.0.0.1:{master.port}' in lines['Redis'][0][1] and lines['cluster view'][0][0] == 'ok', lines
        lines = doctor(*name, '--scheduler-sentinels', f'127.0.0.1:{sentinel.port}', '--scheduler-master', 'other')
        assert lines['Redis'][0][0] == 'fail' and 'knows no master of that name' in lines['Redis'][0][1] and '--scheduler-master' in lines['Redis'][0][2], lines
        lines = doctor(*name, '--scheduler-port', str(replica.port))
        assert lines['Redis'][0][0] == 'fail' and f'it is a replica, which takes no writes; its master is 127.0.0.1:{master.port}' in lines['Redis'][0][1], lines
        lines = doctor(*name, '--scheduler-port', str(master.port), '--scheduler-password', 'x', '--scheduler-username', 'nobody')
        assert lines['Redis'][0][0] == 'fail' and 'WRONGPASS' in lines['Redis'][0][1] and '--scheduler-username' in lines['Redis'][0][2], lines
        lines = doctor(*name, '--scheduler-port', str(master.port), '--scheduler-tls', '--scheduler-tls-ca', '/nowhere/ca.pem')
        assert lines['Redis TLS'][0][0] == 'fail' and '/nowhere/ca.pem' in lines['Redis TLS'][0][1], lines


def test_options_of_redis_that_contradict_are_named():
    def says(*args):
        p = subprocess.run([BIN, 'serve', '--model', TINY, '--port', str(free_ports(1)[0]), '--scheduler-name', 'splitwise', *args], capture_output=True, text=True, timeout=60)
        return p.returncode, p.stderr
    for args, words in ((['--scheduler-sentinels', 'nowhere'], ['--scheduler-sentinels: nowhere is not host:port', '26379']),
                        (['--scheduler-sentinels', ','.join(f'h:{i}' for i in range(1, 18))], ['17 addresses, at most 16']),
                        (['--scheduler-username', 'baton'], ['--scheduler-username baton needs --scheduler-password']),
                        (['--scheduler-tls', '--scheduler-tls-cert', 'c.pem'], ['--scheduler-tls-cert c.pem needs --scheduler-tls-key']),
                        (['--scheduler-tls', '--scheduler-tls-ca', '/nowhere/ca.pem'], ['--scheduler-tls-ca: /nowhere/ca.pem', 'No such file'])):
        status, text = says(*args)
        assert status != 0 and all(w in text for w in words), (args, status, text)
    port, ca = free_ports(1)[0], '/nowhere/ca.pem'
    with closing(Node(TINY, 'mixed', ['--scheduler-name', 'splitwise', '--scheduler-sentinels', f'127.0.0.1:{port}', '--scheduler-host', '10.0.0.1', '--scheduler-tls-ca', ca, *SIZE])) as n:
        wait_until('it says why it is alone', lambda: 'no sentinel names the master mymaster' in trouble_of(n), 30)
        for words in ('--scheduler-host has no effect with --scheduler-sentinels', '--scheduler-tls-ca: it is about TLS, which --scheduler-tls switches on'):
            assert words in n.output(), n.output()
        text = trouble_of(n)
        for words in (f'Redis at the master mymaster of the sentinels 127.0.0.1:{port} cannot be used', 'connection refused', 'check --scheduler-sentinels and --scheduler-master',
                      f'baton doctor --scheduler-name splitwise --scheduler-sentinels 127.0.0.1:{port}'):
            assert words in text, (words, text)
