"""Admission: tenants by key, the line's order, limits over several entry nodes, deadlines, and refusals that say when to come again."""
import contextlib, hashlib, json, os, tempfile, threading, time
from harness import BIN, Node, Process, TINY, closing, free_ports, metrics, parallel, request, subprocess, wait_ready, wait_until

SIZE = ['--max-model-len', '512', '--num-gpu-blocks-override', '120']


def key(name):
    return {'Authorization': f'Bearer key-{name}'}


@contextlib.contextmanager
def files(keys, **curve):
    """A key file, and a curve by which steps are slow: (--api-keys-file FILE, --pace FILE)."""
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, 'keys'), 'w') as f:
            f.write(keys)
        with open(os.path.join(folder, 'curve.json'), 'w') as f:
            json.dump({'prompt': {}, 'decode': {}, **curve}, f)
        yield ['--api-keys-file', f.name.replace('curve.json', 'keys')], ['--pace', f.name]


def ask(port, name, tokens=4, headers=None, **more):
    """(status, headers, answer)"""
    body = dict(prompt=[5 + k for k in range(20)], max_tokens=tokens, temperature=0, ignore_eos=True, **more)
    return request(port, 'POST', '/v1/completions', body, {**key(name), **(headers or {})})


def tenant(port, name, admin):
    return next(t for t in request(port, 'GET', '/cluster/self', headers=key(admin))[2]['tenants'] if t['name'] == name)


def idle(port, admin):
    return all(t['waiting'] == t['running'] == 0 for t in request(port, 'GET', '/cluster/self', headers=key(admin))[2]['tenants'])


def test_the_line_before_a_busy_node_is_fair_and_loses_nobody():
    """A router before one node that computes one request at a time. They come in any order, and are served by class, then by weight, one tenant's by
    priority."""
    tenants = 'gold key-gold weight=2\nbronze key-bronze\nurgent key-urgent class=high\nbatch key-batch class=low\n'
    port = free_ports(1)[0]
    with files(tenants, fixed_us=20000) as (keys, pace):
        router = Process([BIN, 'router', '--host', '127.0.0.1', '--port', str(port), *keys], name='router')
        with closing(router, Node(TINY, 'mixed', [*SIZE, *keys, *pace, '--max-num-seqs', '1', '--router', f'127.0.0.1:{port}'])) as (_, node):
            wait_ready(router_of(port), node)
            served, lock = [], threading.Lock()

            def client(name, priority=0):
                status, _, answer = ask(port, name, priority=priority)
                assert status == 200, (status, answer)
                with lock:
                    served.append((name, priority))
            first = threading.Thread(target=ask, args=(port, 'gold', 40))
            first.start()
            wait_until('it runs', lambda: tenant(port, 'gold', 'gold')['running'] == 1)
            jobs = [('batch', 0)] * 2 + [('bronze', 0)] * 4 + [('gold', 3)] * 2 + [('gold', 0)] * 4 + [('gold', -5)] * 2 + [('urgent', 0)] * 2
            threads = [threading.Thread(target=client, args=j) for j in jobs]
            for t in threads:
                t.start()
            wait_until('all wait', lambda: sum(t['waiting'] for t in request(port, 'GET', '/cluster/self', headers=key('gold'))[2]['tenants']) == len(jobs))
            assert first.is_alive()
            for t in threads + [first]:
                t.join()
            names = [n for n, _ in served]
            assert len(served) == len(jobs) and names[:2] == ['urgent'] * 2 and names[-2:] == ['batch'] * 2, served
            assert [p for n, p in served if n == 'gold'] == [-5] * 2 + [0] * 4 + [3] * 2, served
            # The tenant that has run is behind by one long answer; from then on it is served twice as often.
            middle = names[2:-2]
            assert all(middle[:i].count('gold') <= 2 * (middle[:i].count('bronze') + 1) for i in range(len(middle))), served
            assert all(middle[i:].count('bronze') <= middle[i:].count('gold') // 2 + 2 for i in range(len(middle))), served
            m = metrics(port, key('gold'))
            assert m['baton_tenant_requests_total{tenant="gold",taken="yes"}'] == 9 and m['baton_admission_wait_seconds_count'] == len(jobs) + 1, m
            assert idle(port, 'gold')


class router_of:
    """What wait_ready needs of a router."""
    def __init__(self, port):
        self.port, self.name = port, 'router'

    def alive(self):
        return True

    def output(self):
        return ''


def test_refusals_say_when_to_come_again():
    """The line may take a second: of many that come at once some are refused, at once and with a time; who comes then is taken."""
    with files('a key-a\nb key-b\n', fixed_us=20000) as (keys, pace):
        with closing(Node(TINY, 'mixed', [*SIZE, *keys, *pace, '--max-num-seqs', '1', '--max-queue-time', '1'])) as node:
            wait_ready(node)
            for _ in range(3):
                assert ask(node.port, 'a', 8)[0] == 200  # how long an answer is
            wait_until('the node tells its speed', lambda: request(node.port, 'GET', '/cluster', headers=key('a'))[2]['nodes'][0]['step_us'] > 0)
            time.sleep(1.1)  # the view is as old at most
            answers = parallel([lambda: ask(node.port, 'a', 8) for _ in range(30)], 30)
            refused = [a for a in answers if a[0] != 200]
            assert refused and len(refused) < 30 and not any(isinstance(a, Exception) for a in answers), answers
            for status, headers, body in refused:
                assert status == 429 and body['error']['type'] == 'rate_limit_error', (status, body)
                assert '--max-queue-time is 1.0 s' in body['error']['message'] or 'has been full for 1.' in body['error']['message'], body
                assert int(headers['retry-after']) >= 1 and headers['x-baton-retry'] and int(headers['retry-after-ms']) == 1000 * min(int(headers['retry-after']), 60), headers
            status, headers, _ = min(refused, key=lambda r: int(r[1]['retry-after']))
            time.sleep(int(headers['retry-after']))
            assert ask(node.port, 'a', 8, {'x-baton-retry': headers['x-baton-retry']})[0] == 200
            m = metrics(node.port, key('a'))
            assert m['baton_admission_returns_total{taken="yes"}'] == 1 and m['baton_admission_returns_total{taken="no"}'] == 0, m
            assert m['baton_requests_rejected_total{reason="wait"}'] == len(refused)
            assert idle(node.port, 'a')


def test_limits_hold_over_two_entry_nodes():
    """With a launcher: its processes know one key more than the file, which has hashes alone."""
    tenants = f'few sha256:{hashlib.sha256(b"key-few").hexdigest()} requests_per_minute=6\nmany key-many\none key-one concurrent=1\n'
    ports = free_ports(2)
    with files(tenants, fixed_us=5000) as (keys, pace):
        l = Process([BIN, 'launch', '--model', TINY, '--served-model-name', 'm', '--prefill', '1', '--decode', '1', '--ports', f'{ports[0]},{ports[1]}', *keys, *pace, *SIZE], name='launch')
        with closing(l):
            wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output() or not l.alive(), 60)
            statuses = []
            for i in range(10):
                status, headers, body = ask(ports[i % 2], 'few', 1)
                statuses.append(status)
                assert headers['x-ratelimit-limit-requests'] == '6', headers
                if status == 429:
                    assert 40 <= int(headers['retry-after']) <= 61 + 4 * 10 and headers['x-ratelimit-remaining-requests'] == '0', headers
                    assert 'requests_per_minute is 6' in body['error']['message'], body
                time.sleep(0.25)  # what one has admitted is told within 20 ms, and asked for by the other each 100 ms
            assert statuses == [200] * 6 + [429] * 4, statuses
            assert all(ask(p, 'many', 1)[0] == 200 for p in ports)
            assert all(ask(p, 'one', 1)[0] == 200 for p in ports)  # both have it on their minds

            def ask_until_taken():
                while ask(ports[0], 'one', 200)[0] == 429:  # the other entry's request has just ended: that is told within 100 ms
                    time.sleep(0.05)

            t = threading.Thread(target=ask_until_taken)
            t.start()
            wait_until('it runs', lambda: tenant(ports[0], 'one', 'many')['running'] == 1)
            time.sleep(0.25)
            assert [ask(p, 'one', 1)[0] for p in ports] == [429, 429]
            t.join()
            assert request(ports[0], 'POST', '/v1/completions', dict(prompt='x'), {'Authorization': 'Bearer nobody'})[0] == 401


def test_a_deadline_ends_a_request_and_its_work():
    with files('a key-a\n', fixed_us=20000) as (keys, pace):
        with closing(Node(TINY, 'mixed', [*SIZE, *keys, *pace, '--max-num-seqs', '1'])) as node:
            wait_ready(node)
            status, headers, body = ask(node.port, 'a', 200, {'x-baton-deadline-ms': '400'})
            assert status == 504 and headers['x-should-retry'] == 'false' and 'x-baton-deadline-ms is 400' in body['error']['message'], (status, headers, body)
            wait_until('nothing runs', lambda: metrics(node.port, key('a'))['baton_engine_running'] == 0 and idle(node.port, 'a'), 5)
            status, _, body = ask(node.port, 'a', 4, {'x-baton-ttft-ms': 'now'})
            assert status == 400 and body['error']['param'] == 'x-baton-ttft-ms', body
            assert ask(node.port, 'a', 4, {'x-baton-deadline-ms': '20000', 'x-baton-ttft-ms': '20000'})[0] == 200


def test_a_wrong_key_file_stops_the_start():
    with tempfile.NamedTemporaryFile('w', suffix='.keys') as f:
        f.write('alice key-a\nbob key-b weight=heavy\n')
        f.flush()
        for argv in (['serve', '--model', TINY, '--port', '0'], ['router', '--port', '0']):
            p = subprocess.run([BIN, *argv, '--api-keys-file', f.name], capture_output=True, text=True, timeout=30)
            assert p.returncode == 2 and f"{f.name}, line 2: weight is 'heavy', but must be a whole number from 1 to 1000" in p.stderr, (p.returncode, p.stderr)
