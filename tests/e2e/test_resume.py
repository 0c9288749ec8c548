"""Streams whose entry node dies, continued at another one: the events before and after, joined, are the undisturbed stream.

Every stream is cut after a random event: what its client had not read by then counts as lost. Its entry node is killed with -9 while the decode
nodes still compute, in some rounds together with a decode node, so that the answers of that one are computed again. The client sends the request
again to another node, with the id of the last event that it has. What tells of the way of an answer may differ: which node computed it (in ids),
when it began (`created`, the same within a stream), and how much of a prompt was cached."""
import collections, http.server, re, sys

from harness import *

SIZE = ['--max-model-len', '2048', '--max-num-seqs', '16', '--num-gpu-blocks-override', '700', '--placement-timeout', '10',
        '--chat-template', os.path.join(DATA, 'text', 'chat_tools.jinja')]
TOOLS = [dict(type='function', function=dict(name='get_weather', parameters=dict(type='object', properties=dict(city=dict(type='string'))))),
         dict(type='function', function=dict(name='add', parameters=dict(type='object', properties=dict(a=dict(type='integer')))))]
RESUME = {'x-baton-resume': '1'}


def bodies(n, seed):
    """[(path, body)] of streams that take a while: greedy, seeded, and sampled with the seed of their names; 1 to 3 choices; logprobs; reasoning
    and tools; stop strings that may come; usage."""
    r = random.Random(seed)
    out = []
    for i in range(n):
        body = dict(model='m', max_tokens=r.randint(400, 800), ignore_eos=True, stream=True)
        body.update(r.choice([dict(temperature=0), dict(temperature=0.8, seed=r.randrange(1 << 31)), dict(temperature=1), dict(temperature=0.9, top_k=40, presence_penalty=0.4)]))
        body.update(r.choice([{}, {}, dict(n=2), dict(n=3)]))
        body.update(r.choice([{}, dict(stream_options=dict(include_usage=True)), dict(stream_options=dict(include_usage=True, continuous_usage_stats=True))]))
        if body.get('n') and 'stream_options' in body:
            body['stream_options'] = dict(include_usage=True)   # of several choices each event would have the others' tokens so far
        if i % 3 == 0:
            body.update(messages=[dict(role='user', content=f'Question {i}: {r.random()}')], logprobs=r.random() < 0.3)
            if body['logprobs']:
                body['top_logprobs'] = 2
            body.update(r.choice([dict(chat_template_kwargs=dict(enable_thinking=True)), dict(tools=TOOLS), dict(tools=TOOLS, tool_choice='required')]))
            out.append(('/v1/chat/completions', body))
        else:
            body['prompt'] = [r.randrange(4, 512) for _ in range(r.randint(1, 300))]
            body.update(r.choice([{}, dict(logprobs=2), dict(echo=True, logprobs=1), dict(stop=['\x01zq', 'never there']), dict(return_token_ids=True)]))
            out.append(('/v1/completions', body))
    return out


class Stream:
    """A client's side of one stream: (id, data) of the events that it has, over any number of connections."""

    def __init__(self, name, path, body):
        self.name, self.path, self.body = name, path, body
        self.events, self.connection, self.done = [], None, False

    def last_id(self):
        return next((i for i, _ in reversed(self.events) if i), None)

    def read(self, port, until=None, headers=None):
        """Reads the stream to its end, or until it has `until` events; then the connection stays open. Returns when the first event came."""
        h = {'Content-Type': 'application/json', 'x-request-id': self.name, **(RESUME if headers is None else headers)}
        if self.last_id():
            h['Last-Event-ID'] = self.last_id()
            h['x-request-id'] = 'of:the/proxy'  # which makes one for each connection; it does not count
        self.connection = http.client.HTTPConnection('127.0.0.1', port, timeout=60)
        self.connection.request('POST', self.path, json.dumps(self.body), h)
        r = self.connection.getresponse()
        if r.status != 200:
            raise AssertionError(f'{r.status} {r.read()[:500]!r}')
        first = None
        for event_id, data in sse_events(r):
            first = first or time.monotonic()
            if '"error"' in data[:10]:
                raise AssertionError(data)
            self.events.append((event_id, data))
            self.done = data == '[DONE]'
            if self.done or len(self.events) == until:
                break
        assert self.done or len(self.events) == until, f'{self.name}: the stream ended after {len(self.events)} events'
        if self.done:
            self.close()
        return first

    def close(self):
        if self.connection:
            self.connection.close()
            self.connection = None


def comparable(events):
    """{choice or 'rest': its events}; several choices come in any order."""
    out = collections.defaultdict(list)
    created = {m for _, d in events for m in re.findall(r'"created":(\d+)', d)}
    assert len(created) == 1, created
    for event_id, data in events:
        if event_id:
            v, name, when, digest, rest = event_id.split(';', 4)
            assert v == '1' and when in created, event_id
        data = re.sub(r'"created":\d+', '"created":0', re.sub(r'"cached_tokens":\d+', '"cached_tokens":0', data))
        choices = json.loads(data)['choices'] if data != '[DONE]' else []
        key = choices[0]['index'] if choices else 'rest'
        of = rest.split(';')[0].split(',')[key] if event_id and choices else ''
        out[key].append((re.sub(r'@[0-9a-f]{16}', '@-', re.sub(r'\.\d+$', '', of)), data))
    return out


def same(got, want):
    got, want = comparable(got.events), comparable(want.events)
    assert set(got) == set(want), (set(got), set(want))
    for key in want:
        if got[key] == want[key]:
            continue
        i = next((i for i, (a, b) in enumerate(zip(got[key], want[key])) if a != b), min(len(got[key]), len(want[key])))
        raise AssertionError(f'choice {key}: {len(got[key])} events for {len(want[key])}; event {i} is\n{got[key][i:i + 1]}\nnot\n{want[key][i:i + 1]}')


class Site:
    """Prefill and decode nodes around one Redis, each restartable at its port, and the answers of a node that nothing happens to."""

    def __init__(self, redis, args=(), prefills=2, decodes=2, model=TINY):
        common = ['--scheduler-name', 'splitwise', '--scheduler-port', str(redis.port), *SIZE, *args]
        self.prefill = [Node(model, 'prefill', common) for _ in range(prefills)]
        self.decode = [Node(model, 'decode', common) for _ in range(decodes)]
        self.nodes = self.prefill + self.decode

    def wait(self):
        wait_ready(*self.nodes)
        wait_sees(self.nodes, len(self.nodes))

    def of_id(self, node):
        return next(n for n in self.decode if request(n.port, 'GET', '/version')[2]['node'] == node)


def total(nodes, name):
    return sum(v for n in nodes if n.alive() for m, v in metrics(n.port).items() if m.startswith(name))


def check_idle(nodes, timeout=15):
    """Nothing of any request is left."""
    for n in nodes:
        wait_until(f'{n.name} holds no blocks', lambda: total([n], 'baton_kv_blocks{state="held') + total([n], 'baton_kv_blocks{state="quar') == 0, timeout)
        wait_until(f'{n.name} keeps nothing', lambda: total([n], 'baton_decode_parked{') + total([n], 'baton_decode_parked ') + request(n.port, 'GET', '/version')[2]['live_decode'] == 0, timeout)


def undisturbed(streams, port):
    want = [Stream(s.name, s.path, s.body) for s in streams]
    for r in parallel([lambda w=w: w.read(port) for w in want], 8):
        if isinstance(r, Exception):
            raise r
    return want


def one_round(site, entry, streams, rng, kill_decode):
    """Cuts each stream after a random event, kills its entry node, and reads the rest elsewhere. Returns the seconds to the first new event of each,
    and how many were attached to."""
    wait_ready(*site.nodes)
    for r in parallel([lambda s=s: s.read(entry.port, until=rng.randint(1, 250)) for s in streams], len(streams)):
        if isinstance(r, Exception):
            raise r
    victims = [entry]
    if kill_decode:
        victims.append(site.of_id(next(m for s in streams for m in re.findall(r'@([0-9a-f]{16})', s.last_id()))))
    for v in victims:
        v.kill()
    for v in victims:
        v.p.wait()
    for s in streams:
        s.close()
    back = [n for n in site.nodes if n not in victims]
    attached = total(back, 'baton_decode_attached_total')

    def go_on(s):
        t0 = time.monotonic()
        return s.read(rng.choice(back).port) - t0
    times = parallel([lambda s=s: go_on(s) for s in streams], len(streams))
    attached = total(back, 'baton_decode_attached_total') - attached
    for v in victims:
        v.start()
    for r in times:
        if isinstance(r, Exception):
            raise r
    return times, attached


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def resumed(n, n_decode_killed, per_round, seed):
    rng = random.Random(seed)
    streams = [Stream(f'resume-{seed}-{i}', path, body) for i, (path, body) in enumerate(bodies(n, seed))]
    with closing(Redis()) as redis:
        with closing(Node(TINY, 'mixed', SIZE)) as mixed:
            wait_ready(mixed)
            want = undisturbed(streams, mixed.port)
        site = Site(redis, prefills=3, decodes=3)
        with closing(*site.nodes):
            site.wait()
            times, attached = {False: [], True: []}, 0
            for i in range(0, n, per_round):    # the nodes killed in the round before may still be in the directory
                kill_decode = i < n_decode_killed
                t, a = one_round(site, site.prefill[i // per_round % 3], streams[i:i + per_round], rng, kill_decode)
                times[kill_decode] += t
                attached += a
            for s, w in zip(streams, want):
                try:
                    same(s, w)
                except AssertionError as e:
                    raise AssertionError(f'{s.name} {json.dumps(s.body)[:300]}\n{e}')
            for kill_decode, t in times.items():
                if t:
                    print(f'  {len(t)} streams, entry {"and decode node " if kill_decode else ""}killed: first new event after p50 {quantile(t, 0.5):.3f}, '
                          f'p99 {quantile(t, 0.99):.3f}, max {max(t):.3f} s', flush=True)
            print(f'  {sum(s.body.get("n", 1) for s in streams)} sequences, {attached:.0f} attached to', flush=True)
            assert attached > 0 and quantile(times[False], 0.5) <= 1, times
            check_idle(site.nodes)
            leaving = [Stream(f'leaving-{i}', path, {**body, 'max_tokens': 1600}) for i, (path, body) in enumerate(bodies(6, seed))]
            for s in leaving:   # a client that leaves ends its work at once, whatever it asked for
                s.read(site.prefill[0].port, until=3)
            for s in leaving:
                s.close()
            t0 = time.monotonic()
            check_idle(site.nodes, 5)
            print(f'  idle {time.monotonic() - t0:.2f} s after clients left', flush=True)


def test_streams_are_resumed():
    resumed(18, 6, 6, 1)


def test_streams_are_resumed_long():
    resumed(300, 100, 10, 2)


def test_streams_without_the_header_are_as_before():
    """Not a byte is other, and when their entry node dies nothing of them stays."""
    with closing(Redis()) as redis:
        site = Site(redis)
        with closing(*site.nodes):
            site.wait()
            entry, other = site.prefill
            for path, body in bodies(6, 3):
                body.pop('n', None)
                with_ids, without = Stream('same', path, body), Stream('same', path, body)
                with_ids.read(other.port)
                without.read(other.port, headers={})
                assert all(i is None for i, _ in without.events) and all(i for i, _ in with_ids.events[:-1])
                created = [{m for _, d in s.events for m in re.findall(r'"created":\d+', d)}.pop() for s in (with_ids, without)]
                plain = [re.sub(r'"cached_tokens":\d+', '', d.replace(created[0], created[1])) for _, d in with_ids.events]
                assert plain == [re.sub(r'"cached_tokens":\d+', '', d) for _, d in without.events], path
            streams = [Stream(f'plain-{i}', path, {**body, 'max_tokens': 1900 - len(body.get('prompt', [0] * 300))}) for i, (path, body) in enumerate(bodies(8, 4))]
            for r in parallel([lambda s=s: s.read(entry.port, until=5, headers={}) for s in streams], len(streams)):
                if isinstance(r, Exception):
                    raise r
            entry.kill()
            entry.p.wait()
            t0 = time.monotonic()
            rest = [n for n in site.nodes if n is not entry]
            check_idle(rest, 5)
            print(f'  idle after {time.monotonic() - t0:.2f} s', flush=True)
            assert total(rest, 'baton_decode_parking_refused') + total(rest, 'baton_decode_parked_expired') + total(rest, 'baton_decode_attached') == 0
            for s in streams:
                s.close()


def test_whole_answers_are_asked_for_again():
    """Requests that are not streamed, repeated with their names: they are attached to, or computed again, with the same answers."""
    path, ask = '/v1/completions', [dict(model='m', prompt=list(range(5, 60 + i)), max_tokens=1700, ignore_eos=True, temperature=1, n=2, logprobs=1) for i in range(6)]
    with closing(Redis()) as redis:
        site = Site(redis)
        with closing(*site.nodes):
            site.wait()
            entry, other = site.prefill

            def send(node, i):
                return request(node.port, 'POST', path, ask[i], {**RESUME, 'x-request-id': f'whole-{i}'})
            want = parallel([lambda i=i: send(other, i) for i in range(len(ask))], len(ask))
            sending = threading.Thread(target=lambda: parallel([lambda i=i: send(entry, i) for i in range(len(ask))], len(ask)), daemon=True)
            sending.start()
            wait_until('they run', lambda: total(site.decode, 'baton_decode_parking_bytes') > 40000, 10, 0.002)
            entry.kill()
            entry.p.wait()
            sending.join(20)
            got = parallel([lambda i=i: send(other, i) for i in range(len(ask))], len(ask))
            for i, (w, g) in enumerate(zip(want, got)):
                assert w[0] == g[0] == 200 and g[1]['x-request-id'] == f'whole-{i}', (w[0], g)
                assert w[2]['choices'] == g[2]['choices'], i
            attached = total([other], 'baton_resumes_total{kind="attached"}')
            print(f'  {attached:.0f} of {2 * len(ask)} sequences attached to', flush=True)
            assert attached > 0
            check_idle([other, *site.decode])


def test_entry_that_is_stopped_leaves_its_streams():
    """SIGTERM, and the time for running requests over: streams end with an error that says how to go on, and go on elsewhere."""
    streams = [Stream(f'stopped-{i}', '/v1/completions', dict(model='m', prompt=list(range(5, 60)), max_tokens=500, ignore_eos=True, temperature=1, stream=True)) for i in range(5)]
    with closing(Redis()) as redis:
        # Paced: a busy machine sees late that streams have begun, and they must not have ended.
        site = Site(redis, ['--shutdown-timeout', '0', *paced()])
        with closing(*site.nodes):
            site.wait()
            entry, other = site.prefill
            want = undisturbed(streams, other.port)
            reading = threading.Thread(target=lambda: ends.extend(parallel([lambda s=s: s.read(entry.port) for s in streams], len(streams))), daemon=True)
            ends = []
            reading.start()
            wait_until('all have begun', lambda: all(len(s.events) > 10 for s in streams), 10, 0.001)
            entry.kill(signal.SIGTERM)
            reading.join(20)
            for s, e in zip(streams, ends, strict=True):
                assert isinstance(e, AssertionError) and 'Last-Event-ID' in str(e), e
                s.close()
            for r in parallel([lambda s=s: s.read(other.port) for s in streams], len(streams)):
                if isinstance(r, Exception):
                    raise r
            entry.p.wait(20)
            for s, w in zip(streams, want):
                same(s, w)
            assert total([other], 'baton_resumes_total{kind="attached"}') > 0
            check_idle([other, *site.decode])


def test_ask_resumes():
    """deploy/ask.py shows how a client does it. SmolLM2 is slow enough to be killed in mid-answer."""
    question, n = 'Count from one to thirty.', 48
    with closing(Redis()) as redis:
        site = Site(redis, prefills=2, decodes=1, model=smollm2())
        with closing(*site.nodes):
            site.wait()
            entry, other = site.prefill
            body = dict(messages=[dict(role='user', content=question)], max_tokens=n, temperature=0)
            text = request(other.port, 'POST', '/v1/chat/completions', body)[2]['choices'][0]['message']['content']
            p = subprocess.Popen([sys.executable, os.path.join(HERE, '..', '..', 'deploy', 'ask.py'), '--resume', '--max-tokens', str(n), f'127.0.0.1:{entry.port},127.0.0.1:{other.port}', question],
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env={**os.environ, 'PYTHONIOENCODING': 'utf-8'})
            head = p.stdout.read(4)
            entry.kill()
            out, err = p.communicate(timeout=60)
            assert p.returncode == 0, err.decode()
            assert (head + out).decode().startswith(text + '\n  queue'), (head + out, text)
            assert f'going on at 127.0.0.1:{other.port}' in err.decode(), err
            assert total([other], 'baton_resumes_total{kind="attached"}') == 1


def test_ask_comes_back_when_it_is_told():
    """A server stands for a node whose tenant is over its limit; it counts how often it is asked before the time that it names."""
    asked, after_s = [], 1

    class Node(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers['Content-Length']))
            asked.append((time.monotonic(), self.headers['Last-Event-ID']))
            if len(asked) == 2:
                self.send_response(429)
                self.send_header('Retry-After', str(after_s))
                self.send_header('Content-Length', '0')
                self.end_headers()
                return
            self.send_response(200)
            self.end_headers()
            events = [f'id: {i}\ndata: {{"choices": [{{"delta": {{"content": "{w} "}}}}]}}\n\n' for i, w in enumerate(('one', 'two', 'three'))] + ['data: [DONE]\n\n']
            self.wfile.write(''.join(events[:1] if len(asked) == 1 else events[1:]).encode())

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Node) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        p = subprocess.run([sys.executable, os.path.join(HERE, '..', '..', 'deploy', 'ask.py'), '--resume', f'127.0.0.1:{server.server_port}', 'Count.'], capture_output=True, text=True, timeout=60)
        server.shutdown()
    assert p.returncode == 0 and p.stdout.startswith('one two three'), (p.stdout, p.stderr)
    assert [last for _, last in asked] == [None, '0', '0'], asked
    assert asked[2][0] - asked[1][0] >= after_s, asked


def test_tool_calls_are_resumed_long():
    """SmolLM2 can repeat a call that it is shown: the call's id and arguments stay the same over a change of nodes."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    other_call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    reasoning = '<think>\nI know.\n</think>\n\n'

    def repeat(text, *examples):
        m = [dict(role='system', content='You repeat what the user says, word by word.')]
        for e in ('apple pie', 'The sky is blue.', *examples):
            m += [dict(role='user', content=e), dict(role='assistant', content=e)]
        return m + [dict(role='user', content=text)]
    asks = [dict(messages=repeat(call, other_call), tools=TOOLS), dict(messages=repeat(call + '\n' + other_call, other_call + '\n' + call), tools=TOOLS),
            dict(messages=repeat(reasoning + 'This is it.', reasoning + 'Yes.', reasoning + 'It is red.', reasoning + 'No.'))]
    streams = [Stream(f'tools-{i}', '/v1/chat/completions', dict(model='m', temperature=0, max_tokens=64, stream=True, stream_options=dict(include_usage=True), **a)) for i, a in enumerate(asks)]
    with closing(Redis()) as redis:
        site = Site(redis, model=smollm2())
        with closing(*site.nodes):
            site.wait()
            want = undisturbed(streams, site.prefill[0].port)
            assert any('"tool_calls"' in d for _, d in want[0].events) and any('"reasoning"' in d for _, d in want[2].events), want[0].events
            rng = random.Random(7)
            for entry in site.prefill:
                again = [Stream(s.name, s.path, s.body) for s in streams]
                for r in parallel([lambda s=s: s.read(entry.port, until=rng.randint(1, 12)) for s in again], len(again)):
                    if isinstance(r, Exception):
                        raise r
                entry.restart()
                rest = [n for n in site.nodes if n is not entry]
                for r in parallel([lambda s=s: (s.close(), s.read(rng.choice(rest).port)) for s in again], len(again)):
                    if isinstance(r, Exception):
                        raise r
                for s, w in zip(again, want):
                    same(s, w)
                site.wait()
