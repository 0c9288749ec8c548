"""Paced nodes (--pace) and engines that hang or are slow (BATON_ENGINE_FAULT): real nodes, tokens and KV, and the time of a curve."""
import datetime, re
from harness import *

SIZE = ['--max-model-len', '1024', '--max-num-seqs', '8', '--num-gpu-blocks-override', '120']
QUICK = os.path.join(DATA, 'pace', 'quick.json')
LOST_S, POLL_S = 3.0, 0.5  # shared/cluster/cluster.h: silence of the counter, and how often peers tell and look


def body_of(i, n=24):
    return dict(model='m', prompt=[5 + (11 * i + k) % 300 for k in range(8 + i)], max_tokens=n, temperature=0, ignore_eos=True, return_token_ids=True)


def tokens_of(port, body):
    status, _, answer = request(port, 'POST', '/v1/completions', body)
    assert status == 200, (status, answer)
    return answer['choices'][0]['token_ids']


def answers_alone(bodies):
    """What a node answers that is not paced and has no faults."""
    with closing(Node(TINY, 'mixed', SIZE)) as node:
        wait_ready(node)
        assert 'pace' not in request(node.port, 'GET', '/cluster')[2] and metrics(node.port)['baton_engine_paced'] == 0
        return [tokens_of(node.port, b) for b in bodies]


def curve(**members):
    """A file with a curve of its own."""
    with tempfile.NamedTemporaryFile('w', suffix='.json', delete=False) as f:
        json.dump({'prompt': {}, 'decode': {}, **members}, f)
    return f.name


def test_paced_nodes_answer_the_same_and_say_so_everywhere():
    bodies = [body_of(i) for i in range(4)]
    want = answers_alone(bodies)
    ports = free_ports(2)
    l = Process([BIN, 'launch', '--model', TINY, '--served-model-name', 'm', '--prefill', '1', '--decode', '1', '--ports', f'{ports[0]},{ports[1]}', '--pace', QUICK, *SIZE], name='launch')
    with closing(l):
        wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output() or not l.alive(), 60)
        begin = time.monotonic()
        assert parallel([lambda b=b, i=i: tokens_of(ports[i % 2], b) for i, b in enumerate(bodies)], 4) == want
        seconds = time.monotonic() - begin
        assert seconds >= 23 * 0.004, seconds  # a step of one row takes 4 ms at least
        assert f'paced by     {QUICK}' in l.output() and l.output().count(f'steps are paced file={QUICK}') == 2, l.output()
        for port in ports:
            assert request(port, 'GET', '/cluster')[2]['pace']['file'] == QUICK
            m = metrics(port)
            assert m['baton_engine_paced'] == 1 and m['baton_engine_paced_late_steps_total'] >= 0
        decode = metrics(ports[1])
        assert decode['baton_engine_step_seconds_sum'] >= 0.004 * (decode['baton_engine_steps_total'] - decode['baton_engine_paced_late_steps_total'])
        p = subprocess.run([BIN, 'status', '--url', f'http://127.0.0.1:{ports[0]}'], capture_output=True, text=True, timeout=30)
        assert p.returncode == 0 and all(re.search(rf'^PACED: \S+:{port} by {re.escape(QUICK)} ', p.stdout, re.M) for port in ports), p.stdout + p.stderr


def curve_us(curve, prompt=(), decode=()):
    """What a step lasts by a curve without points, with rows that attend to so many positions each."""
    kinds = (curve['prompt'], prompt), (curve['decode'], decode)
    return curve['fixed_us'] + sum(len(rows) * k['row_us'] + sum(rows) / 1000 * k['context_us'] for k, rows in kinds)


def test_nodes_tell_the_speed_of_their_curve():
    """A node says what it has measured, in its record, which all nodes see, and for people; before that it says 0."""
    file, chunk, n_prompt, n_out = os.path.join(DATA, 'pace', 'slow.json'), 64, 300, 8
    with open(file) as f:
        slow = json.load(f)
    ports = free_ports(2)
    l = Process([BIN, 'launch', '--model', TINY, '--served-model-name', 'm', '--prefill', '1', '--decode', '1', '--ports', f'{ports[0]},{ports[1]}', '--pace', file,
                 '--max-num-batched-tokens', str(chunk), *SIZE], name='launch')
    with closing(l):
        wait_until('launch ready', lambda: 'ready: all 2 nodes' in l.output() or not l.alive(), 60)
        nodes = lambda: {n['role']: n for n in request(ports[1], 'GET', '/cluster')[2]['nodes']}
        assert all(n['prefill_tokens_per_s'] == n['step_us'] == 0 for n in nodes().values()), nodes()
        n_chunks = n_prompt // chunk
        chunks_us = sum(curve_us(slow, prompt=range(c * chunk + 1, (c + 1) * chunk + 1)) for c in range(n_chunks))
        per_s = n_chunks * chunk / chunks_us * 1e6
        step_us = sum(curve_us(slow, decode=[n_prompt + 1 + i]) for i in range(n_out - 1)) / (n_out - 1)
        is_right = lambda n: abs(n['prefill']['prefill_tokens_per_s'] - per_s) < 0.1 * per_s and abs(n['decode']['step_us'] - step_us) < 0.1 * step_us
        for i in range(5):  # a busy host makes steps longer for a while
            tokens_of(ports[0], dict(body_of(i, n_out), prompt=[5 + (7 * i + k) % 300 for k in range(n_prompt)]))
            time.sleep(1.5)  # two renewals
            seen = nodes()
            if is_right(seen):
                break
        assert is_right(seen), (seen, per_s, step_us)
        assert seen['prefill']['step_us'] == 0 and seen['decode']['prefill_tokens_per_s'] == 0, seen
        assert metrics(ports[0])['baton_engine_prefill_tokens_per_second'] == seen['prefill']['prefill_tokens_per_s']
        assert abs(metrics(ports[1])['baton_engine_decode_step_seconds'] * 1e6 - seen['decode']['step_us']) < 1
        table = subprocess.run([BIN, 'status', '--url', f'http://127.0.0.1:{ports[0]}'], capture_output=True, text=True, timeout=30).stdout
        assert re.search(rf"^\S+ +prefill .* {seen['prefill']['prefill_tokens_per_s']} +-$", table, re.M), table
        assert re.search(rf"^\S+ +decode .* - +{seen['decode']['step_us'] / 1e3:.1f}$", table, re.M), table


def test_a_wrong_curve_or_fault_stops_the_start():
    file = curve(fixed=5)
    try:
        for args, env, says in ((['--pace', file], {}, f"--pace: {file}: a curve has no member 'fixed'; its members are about, fixed_us, prompt, decode"),
                                (['--pace', file + '-'], {}, f'--pace: {file}- cannot be read: No such file or directory'),
                                ([], {'BATON_ENGINE_FAULT': 'hang@x'}, "BATON_ENGINE_FAULT: 'x' in 'hang@x' is not a step, counted from 1")):
            p = subprocess.run([BIN, 'serve', '--model', TINY, '--port', '0', *args], capture_output=True, text=True, timeout=30, env={**os.environ, **env})
            assert p.returncode == 2 and says in p.stderr, (p.returncode, p.stderr)
    finally:
        os.unlink(file)


def test_steps_of_many_seconds_are_no_hang_and_hold_up_no_stop():
    """4 s are more than the 2.5 s after which peers take an engine for lost that has work and makes no progress: the prompt's step lasts
    so long by its curve, the last one of the decode node as it is slow."""
    body = body_of(3, 12)
    want = answers_alone([body])[0]
    files, control = [curve(fixed_us=4e6), curve(fixed_us=20000)], free_ports(1)[0]
    try:
        nodes = [Node(TINY, 'prefill', [*SIZE, '--pace', files[0], '--engine-worker-queue-port', str(control)]),
                 Node(TINY, 'decode', [*SIZE, '--pace', files[1], '--innode-prefill-ports', str(control)], {'BATON_ENGINE_FAULT': 'slow@11:200'})]
        with closing(*nodes):
            wait_ready(*nodes)
            wait_sees(nodes, 2)
            begin = time.monotonic()
            assert tokens_of(nodes[0].port, body) == want
            assert time.monotonic() - begin >= 4 + 10 * 0.02 + 4
            assert metrics(nodes[0].port)['baton_request_moves_total'] == 0
            assert not any('made no progress' in n.output() for n in nodes)
            computed = metrics(nodes[0].port)['baton_prompt_tokens_total']
            threading.Thread(target=lambda: parallel([lambda: tokens_of(nodes[1].port, body_of(2))], 1), daemon=True).start()
            wait_until('the step of the prompt has begun', lambda: metrics(nodes[0].port)['baton_prompt_tokens_total'] > computed)
            begin = time.monotonic()
            nodes[0].kill(signal.SIGTERM)
            time.sleep(0.2)
            assert nodes[0].stop() == 0 and time.monotonic() - begin < 3, 'a wait held up the end of the node'
            nodes[1].kill()  # it computes that request alone now, 4 s per token
    finally:
        for file in files:
            os.unlink(file)


def logged_at(node, part):
    """When the first line with this part was written, in seconds; None: it was not."""
    for line in node.output().splitlines():
        if part in line and re.match(r'\d{4}-\d\d-\d\dT', line):
            return datetime.datetime.strptime(line.split()[0], '%Y-%m-%dT%H:%M:%S.%fZ').timestamp()


def follow(port, body, out):
    """Streams an answer; out becomes its tokens and the longest pause between two of its events."""
    last, pause, ids = time.monotonic(), 0, []
    for e in stream(port, '/v1/completions', body, timeout=60):
        assert 'error' not in e, e
        now = time.monotonic()
        pause, last = max(pause, now - last), now
        ids += [t for c in e['choices'] for t in c.get('token_ids') or []]
    out[:] = [ids, pause]


@alone
def test_an_engine_that_hangs_under_a_living_loop_is_found_and_its_requests_go_on_elsewhere():
    bodies = [body_of(i, 120) for i in range(8)]
    want = answers_alone(bodies)
    control = free_ports(1)[0]
    args = [*SIZE, '--pace', QUICK]
    nodes = [Node(TINY, 'prefill', [*args, '--engine-worker-queue-port', str(control)])]
    nodes += [Node(TINY, 'decode', [*args, '--innode-prefill-ports', str(control)], env) for env in ({'BATON_ENGINE_FAULT': 'hang@40'}, {})]
    entry, hung, well = nodes
    with closing(*nodes):
        wait_ready(*nodes)
        wait_sees(nodes, 3)
        got = [[] for _ in bodies]
        # three of four come to the prefill node, the others to the node that will not be lost
        threads = [threading.Thread(target=follow, args=((entry, well)[i % 4 == 3].port, b, got[i]), daemon=True) for i, b in enumerate(bodies)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
            assert not t.is_alive(), 'a request hangs'
        assert [g[0] for g in got] == want
        hangs = logged_at(hung, 'engine hangs step=40')
        assert hangs, hung.output()
        found = [logged_at(n, 'its engine has work and made no progress') for n in (entry, well)]
        assert all(found), 'not found:\n' + entry.output()
        print(f'  found after {", ".join("%.2f" % (f - hangs) for f in found)} s; pauses of streams up to {max(g[1] for g in got):.2f} s', flush=True)
        assert max(found) - hangs <= LOST_S + POLL_S + 0.5, 'found late'  # 0.5: a busy host
        assert max(g[1] for g in got) <= LOST_S + POLL_S + 2
        assert request(hung.port, 'GET', '/live')[0] == 200 and request(hung.port, 'GET', '/cluster')[0] == 200, 'its loop does not live'
        # The others are served as before; the node that hangs may be tried again, and costs no token.
        assert [tokens_of(entry.port, b) for b in bodies[:3]] == want[:3]
        hung.kill()
