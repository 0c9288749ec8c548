"""Requests while processes die: every few seconds a random node is killed with -9 and restarted at its port.

The test counts wrong tokens, repeated tokens and hung requests (all must be 0), complete requests, and errors, which are allowed only if
the entry node itself was killed. A client whose entry node died sends its request again to another node, as the SDKs do. At least 98 %
of the requests must then be complete and equal to their reference."""
import collections

from harness import *

SIZE = ['--max-model-len', '2048', '--max-num-seqs', '16', '--num-gpu-blocks-override', '400', '--placement-timeout', '10']
PACED = paced()


class Cluster:
    """2 prefill + 2 decode nodes around one Redis, each restartable at its port."""

    def __init__(self, model, redis, more):
        args = ['--scheduler-name', 'splitwise', '--scheduler-port', str(redis.port), *SIZE, *more]
        self.nodes = [Node(model, role, args) for role in ('prefill', 'prefill', 'decode', 'decode')]
        self.kills = []                     # (time, port)
        self.lock = threading.Lock()

    def kill_one(self, rng):
        victim = rng.choice(self.nodes)
        with self.lock:
            self.kills.append((time.monotonic(), victim.port))
        victim.kill()
        victim.p.wait()
        time.sleep(0.3)
        victim.start()

    def killed_between(self, port, t0, t1):
        with self.lock:
            return any(p == port and t0 - 0.5 <= t <= t1 + 0.5 for t, p in self.kills)


def one(cluster, port, body, want):
    """('ok' | 'wrong' | 'error:...' | 'entry killed' , seconds)"""
    t0 = time.monotonic()
    try:
        ids = []
        for e in stream(port, '/v1/completions', body, timeout=60):
            if 'error' in e:
                return f'error: {e["error"]["message"][:100]}', time.monotonic() - t0
            for c in e['choices']:
                ids += c.get('token_ids') or []
        verdict = 'ok' if ids == want else 'wrong'
        if verdict == 'wrong':
            print(f'  wrong: {len(ids)} tokens for {len(want)}, first difference at {next((i for i, (a, b) in enumerate(zip(ids, want)) if a != b), min(len(ids), len(want)))}', flush=True)
    except socket.timeout:
        verdict = 'hung'
    except (OSError, http.client.HTTPException, AssertionError) as e:
        verdict = 'entry killed' if cluster.killed_between(port, t0, time.monotonic()) else f'error: {type(e).__name__} {str(e)[:150]}'
    return verdict, time.monotonic() - t0


def rounds(model, n, concurrency, every_s, vocab, longest, max_tokens, seed=5, args=()):
    bodies = mixed_requests(n, seed, vocab, longest, max_tokens)
    for b in bodies:
        del b['logprobs']
    rng = random.Random(seed)
    with closing(Redis()) as redis:
        with closing(Node(model, 'mixed', SIZE)) as mixed:
            wait_ready(mixed)
            want = [a[2]['choices'][0]['token_ids'] for a in parallel([lambda b=b: request(mixed.port, 'POST', '/v1/completions', b) for b in bodies], 8)]
        cluster = Cluster(model, redis, args)
        with closing(*cluster.nodes):
            wait_ready(*cluster.nodes)
            wait_sees(cluster.nodes, 4)
            stop = threading.Event()

            def killer():
                while not stop.wait(every_s):
                    cluster.kill_one(rng)
            k = threading.Thread(target=killer)
            k.start()

            def job(b, w):
                port = rng.choice([x for x in cluster.nodes if x.alive()] or cluster.nodes).port
                for _ in range(100):        # a client tries again while nobody listens yet
                    try:
                        if request(port, 'GET', '/ready', timeout=5)[0] == 200:
                            break
                    except (OSError, http.client.HTTPException):
                        pass
                    time.sleep(0.2)
                    port = rng.choice(cluster.nodes).port
                return one(cluster, port, b, w)

            def job_again(b, w):
                """The verdict of the last try, and how often its entry node died."""
                for n_died in range(4):
                    verdict, seconds = job(b, w)
                    if verdict != 'entry killed':
                        break
                return verdict, seconds, n_died
            t0 = time.monotonic()
            results = parallel([lambda b=b, w=w: job_again(b, w) for b, w in zip(bodies, want)], concurrency)
            took = time.monotonic() - t0
            stop.set()
            k.join()
            wait_ready(*cluster.nodes)
            count = collections.Counter(r[0] if isinstance(r, tuple) else f'error: {r!r}' for r in results)
            died = sum(r[2] for r in results if isinstance(r, tuple))
            print(f'  {n} requests, {len(cluster.kills)} kills, {took:.0f} s: {dict(count)}; sent again because the entry node died: {died}; '
                  f'slowest try {max(r[1] for r in results if isinstance(r, tuple)):.1f} s', flush=True)
            assert len(cluster.kills) >= 3, 'too few kills to prove anything'
            assert count['wrong'] == 0 and count['hung'] == 0, count
            others = {v: c for v, c in count.items() if v not in ('ok', 'entry killed')}
            assert not others, others
            assert count['ok'] >= 0.95 * n, count   # the others' entry nodes died each time they asked
            for x in cluster.nodes:
                wait_until(f'{x.name} holds no blocks', lambda: sum(v for m, v in metrics(x.port).items() if m.startswith('baton_kv_blocks') and ('held' in m or 'quarantine' in m)) == 0, 15)


def test_kill_rounds_tiny():
    """Paced: answers last long enough to be hit without thousands of tokens."""
    rounds(TINY, 120, 16, 1, 512, 900, (50, 250), args=PACED)


def test_kill_rounds_tiny_long():
    rounds(TINY, 240, 16, 1, 512, 900, (300, 1100))


def test_kill_rounds_smollm2_long():
    rounds(smollm2(), 300, 16, 5, 49152, 400, (8, 48))
