#!/usr/bin/env python3
"""group_rounds.py - kills or stops one rank of a group at random points under load, and starts it again or lets it go on.

usage: group_rounds.py [--ranks N] [--rounds N] [--seed N] [--stop SECONDS]      (BATON_BIN and BATON_TEST_DATA as for tests/e2e)

What must hold in every round
  - streams of the ranks that live go on within 5 s of a kill and 6 s of a stop
  - the group is whole within 3 s of the return of the rank
  - no wrong, missing or repeated token; a request fails only if the rank that it was sent to was hit
and at the end: no block is held, and no rank has more descriptors than before, or 32 MiB more memory
The worst figure of each kind is printed."""
import argparse, os, random, sys, threading, time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
from harness import *

SIZE = ['--max-model-len', '512', '--max-num-seqs', '8', '--num-gpu-blocks-override', '96']
MODEL = os.path.join(DATA, 'goldens', 'ernie_moe', 'model')
GO_ON_S = {'kill': 5.0, 'stop': 6.0}
WHOLE_S, MEMORY_MIB = 3.0, 32


class Group:
    def __init__(self, size):
        self.size, self.meet = size, free_ports(1)[0]
        self.nodes = [self.rank(r) for r in range(size)]
        self.lock, self.hits = threading.Lock(), {}     # port -> [(begin, end)]

    def rank(self, r):
        args = ['--data-parallel-size', str(self.size), '--enable-expert-parallel', '--data-parallel-address', '127.0.0.1',
                '--data-parallel-rpc-port', str(self.meet), '--data-parallel-rank', str(r), *SIZE]
        return Node(MODEL, args=args)

    def is_whole(self):
        want = list(range(self.size))
        try:
            return all(request(n.port, 'GET', '/cluster', timeout=2)[2]['group']['members'] == want for n in self.nodes)
        except (OSError, KeyError, TypeError, http.client.HTTPException):
            return False

    def was_hit(self, port, t0, t1):
        with self.lock:
            return any(a <= t1 + 0.5 and t0 - 0.5 <= b for a, b in self.hits.get(port, []))

    def footprint(self, i):
        pid = self.nodes[i].p.pid
        with open(f'/proc/{pid}/statm') as f:
            pages = int(f.read().split()[1])
        return len(os.listdir(f'/proc/{pid}/fd')), pages * os.sysconf('SC_PAGE_SIZE') >> 20


class Load:
    """Streams one request after the other through each rank, and notes when tokens come."""

    def __init__(self, group, bodies, want):
        self.group, self.bodies, self.want = group, bodies, want
        self.stop, self.lock = threading.Event(), threading.Lock()
        self.last = [0.0] * group.size                  # when a rank's client last got a token
        self.n_ok, self.n_excused, self.wrong = 0, 0, []
        self.threads = [threading.Thread(target=self.ask, args=(i,)) for i in range(group.size)]

    def ask(self, i):
        rng = random.Random(i)
        port = self.group.nodes[i].port
        while not self.stop.is_set():
            k = rng.randrange(len(self.bodies))
            t0, ids, error = time.monotonic(), [], None
            try:
                for e in stream(port, '/v1/completions', self.bodies[k], timeout=60):
                    if 'error' in e:
                        error = e['error']['message']
                        break
                    ids += [t for c in e['choices'] for t in c.get('token_ids') or []]
                    self.last[i] = time.monotonic()
            except (OSError, http.client.HTTPException, AssertionError) as e:
                error = f'{type(e).__name__} {e}'
            self.judge(port, t0, k, ids, error)

    def judge(self, port, t0, k, ids, error):
        with self.lock:
            if error is None and ids == self.want[k]:
                self.n_ok += 1
            elif error is not None and ids == self.want[k][:len(ids)] and self.group.was_hit(port, t0, time.monotonic()):
                self.n_excused += 1
            else:
                self.wrong.append((port, k, error, len(ids), len(self.want[k])))
        if error is not None:
            time.sleep(0.1)


def references(bodies):
    node = Node(MODEL, args=SIZE)
    with closing(node):
        wait_ready(node)
        return [[t for e in stream(node.port, '/v1/completions', b) for c in e['choices'] for t in c.get('token_ids') or []] for b in bodies]


def hit(group, load, victim, kind, stop_s, worst):
    """One round. Returns when the group is whole again."""
    node, others = group.nodes[victim], [i for i in range(group.size) if i != victim]
    t0 = time.monotonic()
    with group.lock:
        group.hits.setdefault(node.port, []).append((t0, t0 + 3600))
    node.kill(signal.SIGKILL if kind == 'kill' else signal.SIGSTOP)
    wait_until(f'the others go on without rank {victim}', lambda: all(load.last[i] > t0 + 0.05 for i in others), 3 * GO_ON_S[kind], 0.01)
    first = max(min(load.last[i] for i in others) - t0, 0)
    worst[f'{kind}: answers go on after'] = max(worst.get(f'{kind}: answers go on after', 0), first)
    assert first <= GO_ON_S[kind], f'answers went on after {first:.2f} s'
    if kind == 'kill':
        node.p.wait()
        node.start()
        wait_until('it is loaded', lambda: 'model loaded' in node.output() or group.is_whole(), 30)
    else:
        time.sleep(max(0, stop_s - (time.monotonic() - t0)))
        node.kill(signal.SIGCONT)
    back = time.monotonic()
    wait_until('the group is whole', group.is_whole, 3 * WHOLE_S, 0.02)
    whole = time.monotonic() - back
    worst[f'{kind}: whole after'] = max(worst.get(f'{kind}: whole after', 0), whole)
    assert whole <= WHOLE_S, f'the group was whole after {whole:.2f} s'
    with group.lock:
        a, _ = group.hits[node.port][-1]
        group.hits[node.port][-1] = (a, time.monotonic() + 1)


def rounds(size, n, seed, stop_s=5.0, stops_every=3):
    rng = random.Random(seed)
    vocab = json.load(open(f'{MODEL}/config.json'))['vocab_size']
    bodies = [{k: v for k, v in {**b, 'max_tokens': 60, 'stream': True}.items() if k != 'logprobs'} for b in mixed_requests(12, seed, vocab, 100)]
    want, worst, group = references(bodies), {}, Group(size)
    with closing(*group.nodes):
        wait_ready(*group.nodes)
        load = Load(group, bodies, want)
        for t in load.threads:
            t.start()
        try:
            wait_until('all clients get tokens', lambda: all(load.last), 20)
            before = [group.footprint(i) for i in range(size)]
            for i in range(n):
                time.sleep(rng.uniform(0, 0.5))
                hit(group, load, rng.randrange(size), 'stop' if i % stops_every == stops_every - 1 else 'kill', stop_s, worst)
                assert not load.wrong, load.wrong[:3]
        finally:
            load.stop.set()
            for t in load.threads:
                t.join()
        assert not load.wrong, load.wrong[:3]
        wait_until('no block is held', lambda: all(metrics(x.port)['baton_kv_blocks{state="held"}'] == 0 for x in group.nodes), 10)
        after = [group.footprint(i) for i in range(size)]
        for i, ((fds0, mib0), (fds1, mib1)) in enumerate(zip(before, after)):
            assert fds1 <= fds0 + 2 * size, f'rank {i}: {fds0} descriptors before, {fds1} after'
            assert mib1 <= mib0 + MEMORY_MIB, f'rank {i}: {mib0} MiB before, {mib1} after'
    print(f'{n} rounds of {size} ranks: {load.n_ok} right answers, {load.n_excused} ended with their entry; '
          + ', '.join(f'{k} {v:.2f} s' for k, v in sorted(worst.items())), flush=True)


if __name__ == '__main__':
    p = argparse.ArgumentParser()
    p.add_argument('--ranks', type=int, default=8)
    p.add_argument('--rounds', type=int, default=20)
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--stop', type=float, default=5.0)
    a = p.parse_args()
    rounds(a.ranks, a.rounds, a.seed, a.stop)
