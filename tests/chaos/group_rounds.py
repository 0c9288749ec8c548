#!/usr/bin/env python3
"""group_rounds.py - kills or stops one rank of a group at random points under load, and starts it again or lets it go on; or ends every node in turn.

usage: group_rounds.py [--ranks N] [--tensor-parallel T] [--redundant N] [--rounds N] [--seed N] [--stop SECONDS] [--pace CURVE] [--drain | --serve]
       (BATON_BIN and BATON_TEST_DATA as for tests/e2e)

With --tensor-parallel T the group is of N / T nodes of T ranks: one that is hit may lead its node or follow, and the others of its node have to end by
themselves. --redundant: copies of experts. --pace: the ranks are paced, and do not use all CPU time. What must hold in every round
  - streams of the nodes that live go on within 5 s of a kill and 6 s of a stop
  - the group is whole within 3 s of the return of the rank (of several ranks: of the start of all of its node)
  - no wrong, missing or repeated token; a request fails only if the node that it was sent to was hit
With --serve the ranks are those of one `baton serve`, which has the clients and starts again what ended: then no request fails at all.
With --drain every node is told to end and started again in turn, and no request fails. At the end no block is held, and no rank has more descriptors than
before, or 32 MiB more memory. Of each kind of figure the median and the worst are printed."""
import argparse, os, random, statistics, sys, threading, time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
from harness import *
from test_tensor_parallel import processes

SIZE = ['--max-model-len', '512', '--max-num-seqs', '8', '--num-gpu-blocks-override', '96']
MODEL = os.path.join(DATA, 'goldens', 'ernie_moe', 'model')
GO_ON_S = {'kill': 5.0, 'stop': 6.0}
WHOLE_S, MEMORY_MIB, NODE_LOST = 3.0, 32, 75


class Group:
    def __init__(self, size, tp, redundant, args=()):
        self.size, self.tp, self.redundant, self.args = size, tp, redundant, args
        self.meet = free_ports(size // tp)              # of the node; that of the first is the group's
        self.nodes = [[self.rank(d, t) for t in range(tp)] for d in range(size // tp)]
        self.entries = [node[0] for node in self.nodes]
        self.lock, self.hits = threading.Lock(), {}     # port -> [(begin, end)]

    def __str__(self):
        return f'{self.size} ranks, {self.tp} per node, {self.redundant} copies of experts'

    def rank(self, d, t):
        args = ['--data-parallel-size', str(len(self.meet)), '--enable-expert-parallel', '--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(self.meet[0]),
                '--data-parallel-rank', str(d), '--num-redundant-experts', str(self.redundant), *SIZE, *self.args]
        if self.tp > 1:
            args += ['--tensor-parallel-size', str(self.tp), '--tensor-parallel-rank', str(t), '--tensor-parallel-port', str(self.meet[d])]
        return Node(MODEL, args=args)

    def all(self):
        return [rank for node in self.nodes for rank in node]

    def at(self, entry):
        """This thread talks to that entry meanwhile."""
        return contextlib.nullcontext()

    def wait_ready(self):
        for n in self.entries:
            with self.at(n):
                wait_ready(n)

    def members(self, entry):
        """The ranks that this one steps with."""
        with self.at(entry):
            return request(entry.port, 'GET', '/cluster', timeout=2)[2]['group']['members']

    def is_whole(self):
        want = list(range(self.size))
        try:
            return all(self.members(n) == want for n in self.entries)
        except (OSError, KeyError, TypeError, http.client.HTTPException):
            return False

    def n_held_blocks(self):
        n = 0
        for e in self.entries:
            with self.at(e):
                n += metrics(e.port)['baton_kv_blocks{state="held"}']
        return n

    def was_hit(self, port, t0, t1):
        with self.lock:
            return any(a <= t1 + 0.5 and t0 - 0.5 <= b for a, b in self.hits.get(port, []))

    def footprints(self):
        return [footprint(rank.p.pid) for rank in self.all()]


class Served(Group):
    """The ranks of one parent, which has the port of all clients."""

    def __init__(self, size, tp, redundant, args=()):
        self.size, self.tp, self.redundant = size, tp, redundant
        self.lock, self.hits = threading.Lock(), {}
        port = free_ports(1)[0]
        self.parent = Process([BIN, 'serve', '--model', MODEL, '--served-model-name', 'm', '--host', '127.0.0.1', '--port', str(port), '--data-parallel-size', str(size // tp), '--compute-threads', '1',
                               '--enable-expert-parallel', '--tensor-parallel-size', str(tp), '--num-redundant-experts', str(redundant), *SIZE, *args], name='parent')
        self.parent.port = port
        self.entries = [self.parent] * (size // tp)

    def all(self):
        return [self.parent]

    def ranks(self):
        """Their processes, in the order of their numbers."""
        return [pid for _, pid in sorted(processes(self.parent).items())]

    def views(self):
        """What each rank of the directory says of the group; one that was started again may be there twice for a while."""
        ports = {n['http_port'] for n in request(self.parent.port, 'GET', '/cluster', timeout=2)[2]['nodes']}
        return [request(p, 'GET', '/cluster', timeout=2)[2]['group']['members'] for p in ports]

    def is_whole(self):
        try:
            return self.views() == [list(range(self.size))] * (self.size // self.tp)
        except (OSError, KeyError, TypeError, http.client.HTTPException):
            return False

    def n_held_blocks(self):
        ports = {n['http_port'] for n in request(self.parent.port, 'GET', '/cluster')[2]['nodes']}
        return sum(metrics(p)['baton_kv_blocks{state="held"}'] for p in ports)

    def footprints(self):
        return [footprint(pid) for pid in (self.parent.p.pid, *self.ranks())]


def footprint(pid):
    with open(f'/proc/{pid}/statm') as f:
        pages = int(f.read().split()[1])
    return len(os.listdir(f'/proc/{pid}/fd')), pages * os.sysconf('SC_PAGE_SIZE') >> 20


class Load:
    """Streams one request after the other through each node, and notes when tokens come."""

    def __init__(self, group, bodies, want):
        self.group, self.bodies, self.want = group, bodies, want
        self.stop, self.lock = threading.Event(), threading.Lock()
        self.last = [0.0] * len(group.entries)          # when a node's client last got a token
        self.asks = [True] * len(group.entries)         # False: after the request that runs, none
        self.busy = [False] * len(group.entries)
        self.flows = [False] * len(group.entries)       # the request that runs has got a token
        self.n_ok, self.n_excused, self.wrong = 0, 0, []
        self.threads = [threading.Thread(target=self.ask, args=(i,)) for i in range(len(group.entries))]

    def ask(self, i):
        with self.group.at(self.group.entries[i]):
            self.ask_one_after_the_other(i)

    def ask_one_after_the_other(self, i):
        rng = random.Random(i)
        port = self.group.entries[i].port
        while not self.stop.is_set():
            self.flows[i] = False
            self.busy[i] = self.asks[i]
            if not self.busy[i]:
                time.sleep(0.01)
                continue
            k = rng.randrange(len(self.bodies))
            t0, ids, error = time.monotonic(), [], None
            try:
                for e in stream(port, '/v1/completions', self.bodies[k], timeout=60):
                    if 'error' in e:
                        error = e['error']['message']
                        break
                    ids += [t for c in e['choices'] for t in c.get('token_ids') or []]
                    self.last[i] = time.monotonic()
                    self.flows[i] = True
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


def hit(group, load, victim, kind, stop_s, times):
    """One round. Returns when the group is whole again."""
    node = group.nodes[victim // group.tp]
    others, hit_rank, entry = [i for i, n in enumerate(group.nodes) if n is not node], node[victim % group.tp], node[0]
    t0 = time.monotonic()
    with group.lock:
        group.hits.setdefault(entry.port, []).append((t0, t0 + 3600))
    hit_rank.kill(signal.SIGKILL if kind == 'kill' else signal.SIGSTOP)
    wait_until(f'the others go on without rank {victim}', lambda: all(load.last[i] > t0 + 0.05 for i in others), 3 * GO_ON_S[kind], 0.01)
    note(times, f'{kind}: answers go on after', max(min(load.last[i] for i in others) - t0, 0), GO_ON_S[kind])
    if kind == 'stop':
        time.sleep(max(0, stop_s - (time.monotonic() - t0)))
        hit_rank.kill(signal.SIGCONT)
    if kind == 'kill' or group.tp > 1:
        t_end = time.monotonic()
        for rank in node:
            status = rank.p.wait(3 * WHOLE_S)
            assert status == (-signal.SIGKILL if kind == 'kill' and rank is hit_rank else NODE_LOST), f'{rank.name} ended with {status}'
        if group.tp > 1:
            note(times, f'{kind}: the rest of the node ended after', time.monotonic() - t_end, WHOLE_S)
        for rank in node:
            rank.start()
    back = time.monotonic()
    wait_until('the group is whole', group.is_whole, 3 * WHOLE_S, 0.02)
    note(times, f'{kind}: whole after', time.monotonic() - back, WHOLE_S)
    with group.lock:
        a, _ = group.hits[entry.port][-1]
        group.hits[entry.port][-1] = (a, time.monotonic() + 1)


def hit_served(group, load, victim, kind, stop_s, times):
    """One round of ranks that their parent starts again."""
    before, first = group.ranks(), victim // group.tp * group.tp
    assert len(before) == group.size, before
    t0 = time.monotonic()
    os.kill(before[victim], signal.SIGKILL if kind == 'kill' else signal.SIGSTOP)
    wait_until(f'all clients go on without rank {victim}', lambda: all(t > t0 + 0.05 for t in load.last), 3 * GO_ON_S[kind], 0.01)
    note(times, f'{kind}: answers go on after', max(min(load.last) - t0, 0), GO_ON_S[kind])
    if kind == 'stop':
        time.sleep(max(0, stop_s - (time.monotonic() - t0)))
        os.kill(before[victim], signal.SIGCONT)
    if kind == 'kill' or group.tp > 1:

        def is_back():
            now = group.ranks()
            return len(now) == group.size and not set(before[first:first + group.tp]) & set(now)
        wait_until('its node is started again', is_back, 20, 0.02)
    back = time.monotonic()
    wait_until('the group is whole', group.is_whole, 3 * WHOLE_S, 0.02)
    note(times, f'{kind}: whole after', time.monotonic() - back, WHOLE_S)


def note(times, what, seconds, most):
    times.setdefault(what, []).append(seconds)
    assert seconds <= most, f'{what} {seconds:.2f} s'


def drain(group, load, d, times):
    """A node ends in order while its client has a request that runs; the client sends no more until it is back."""
    load.asks[d] = False
    wait_until('the last request runs', lambda: load.flows[d] or not load.busy[d], 10, 0.001)
    was_busy = load.busy[d]
    t0 = time.monotonic()
    for rank in group.nodes[d]:
        rank.kill(signal.SIGTERM)
    for rank in group.nodes[d]:
        status = rank.p.wait(30)
        assert status == 0, f'{rank.name} ended with {status}:\n{rank.output()[-2000:]}'
    times.setdefault('drained after', []).append(time.monotonic() - t0)
    for rank in group.nodes[d]:
        rank.start()
    back = time.monotonic()
    wait_until('the group is whole', group.is_whole, 3 * WHOLE_S, 0.02)
    note(times, 'whole after', time.monotonic() - back, WHOLE_S)
    load.asks[d] = True
    return was_busy


@contextlib.contextmanager
def under_load(size, tp, redundant, seed, what, kind=Group, args=()):
    """A group and its load. At the end every answer was right, and nothing is left of it."""
    vocab = json.load(open(f'{MODEL}/config.json'))['vocab_size']
    bodies = [{k: v for k, v in {**b, 'max_tokens': 60, 'stream': True}.items() if k != 'logprobs'} for b in mixed_requests(12, seed, vocab, 100)]
    want, times, group = references(bodies), {}, kind(size, tp, redundant, args)
    with closing(*group.all()):
        group.wait_ready()
        load = Load(group, bodies, want)
        for t in load.threads:
            t.start()
        try:
            wait_until('all clients get tokens', lambda: all(load.last), 20)
            before = group.footprints()
            yield group, load, times
        finally:
            load.stop.set()
            for t in load.threads:
                t.join()
        assert not load.wrong, load.wrong[:3]
        wait_until('no block is held', lambda: group.n_held_blocks() == 0, 10)
        for i, ((fds0, mib0), (fds1, mib1)) in enumerate(zip(before, group.footprints())):
            assert fds1 <= fds0 + 2 * size, f'rank {i}: {fds0} descriptors before, {fds1} after'
            assert mib1 <= mib0 + MEMORY_MIB, f'rank {i}: {mib0} MiB before, {mib1} after'
        for rank in group.all():        # together, as a parent would
            rank.kill(signal.SIGTERM)
        for rank in group.all():
            assert rank.p.wait(20) == 0, f'{rank.name} ended with {rank.p.returncode}'
    print(f'{what} of {group}: {load.n_ok} right answers, {load.n_excused} ended with their entry; '
          + '; '.join(f'{k} {statistics.median(v):.2f} s, at worst {max(v):.2f} s' for k, v in sorted(times.items())), flush=True)


def rounds(size, n, seed, stop_s=5.0, stops_every=3, tp=1, redundant=0, served=False, args=()):
    rng = random.Random(seed)
    with under_load(size, tp, redundant, seed, f'{n} rounds' + served * ' of a parent', Served if served else Group, args) as (group, load, times):
        for i in range(n):
            time.sleep(rng.uniform(0, 0.5))
            (hit_served if served else hit)(group, load, rng.randrange(size), 'stop' if i % stops_every == stops_every - 1 else 'kill', stop_s, times)
            assert not load.wrong, load.wrong[:3]


def drains(size, turns, seed, tp=1, redundant=0, args=()):
    rng, n_busy = random.Random(seed), 0
    with under_load(size, tp, redundant, seed, f'{turns} turns in which each node ended', args=args) as (group, load, times):
        for i in range(turns * len(group.nodes)):
            time.sleep(rng.uniform(0.1, 0.5))
            n_busy += drain(group, load, i % len(group.nodes), times)
            assert not load.wrong, load.wrong[:3]
        assert n_busy > 0 and load.n_excused == 0, (n_busy, load.n_excused)


if __name__ == '__main__':
    p = argparse.ArgumentParser()
    p.add_argument('--ranks', type=int, default=8)
    p.add_argument('--tensor-parallel', type=int, default=1)
    p.add_argument('--redundant', type=int, default=0)
    p.add_argument('--rounds', type=int, default=20)
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--stop', type=float, default=5.0)
    p.add_argument('--pace', metavar='CURVE')
    p.add_argument('--drain', action='store_true')
    p.add_argument('--serve', action='store_true')
    a = p.parse_args()
    args = ['--pace', a.pace] if a.pace else []
    if a.drain:
        drains(a.ranks, max(a.rounds // a.ranks, 1), a.seed, a.tensor_parallel, a.redundant, args)
    else:
        rounds(a.ranks, a.rounds, a.seed, a.stop, tp=a.tensor_parallel, redundant=a.redundant, served=a.serve, args=args)
