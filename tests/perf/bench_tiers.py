#!/usr/bin/env python3
"""bench_tiers.py - KV kept behind the pool: what of it is found again, how soon, and what steps pay for it.
usage: bench_tiers.py hits|ttft|steps [options]   (BATON_BIN, BATON_TEST_GGUF)

  hits    [--prompts 200] [--tokens 330] [--pool 250] [--tier host|disk]: so many prompts, together about four times what the pool holds, asked twice. The
          hit rate of the second round, by tier, next to that of one cache that forgets nothing: all full blocks of a prompt but the last token's
  ttft    [--tokens 1984] [--rounds 7]: in each round TTFT of a prompt that is in the pool, in host memory, on the disk, and nowhere, on three nodes in turn
  steps   [--rounds 7] [--streams 4] [--new 96]: tokens per second of prompts and answers that meet no promotion, by nodes with and without tiers

Prompts are random token ids. The limit that each figure is held against is measured in the same run."""
import argparse, os, statistics, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
from harness import *

BLOCK = 64


def prompt(seed, n):
    r = random.Random(seed)
    return [r.randrange(100, 40000) for _ in range(n)]


def ask(node, tokens, n_new=1):
    t0 = time.perf_counter()
    s, _, b = request(node.port, 'POST', '/v1/completions', dict(prompt=tokens, max_tokens=n_new, temperature=0, ignore_eos=True, return_trace=True, return_token_ids=True), timeout=600)
    assert s == 200, b
    return b['baton'], time.perf_counter() - t0, b['choices'][0]['token_ids']


def size(blocks, n_tokens, *more):
    return ['--num-gpu-blocks-override', str(blocks), '--max-model-len', str(max(n_tokens + 128, BLOCK)), '--compute-threads', str(os.cpu_count()), *more]


def await_copied(node, tier):
    wait_until('all blocks are copied', lambda: metrics(node.port)[f'baton_kv_tier_waiting_blocks{{tier="{tier}"}}'] == 0, 60)


def tier_options(tier, folder, gib):
    return ['--swap-space', str(gib)] if tier == 'host' else ['--kv-cache-dir', folder, '--kv-cache-disk', str(gib)]


def hits(a):
    full = (a.tokens - 1) // BLOCK
    assert a.prompts * full >= 3.9 * a.pool, 'the prompts are not four times the pool'
    with tempfile.TemporaryDirectory(prefix='baton-kv-') as folder, closing(Node(smollm2(), args=size(a.pool, a.tokens, *tier_options(a.tier, folder, 4)))) as node:
        wait_ready(node)
        for round in range(2):
            t0, cached, by = time.monotonic(), 0, {}
            for i in range(a.prompts):
                trace, _, _ = ask(node, prompt(i, a.tokens))
                cached += trace['cached_tokens']
                for k, v in trace['cached_tokens_by_tier'].items():
                    by[k] = by.get(k, 0) + v
            total = a.prompts * a.tokens
            print(f'round {round + 1}: hit rate {cached / total:.4f}   ' + '   '.join(f'{k} {v / total:.4f}' for k, v in by.items()) + f'   {time.monotonic() - t0:.1f} s')
        limit = full * BLOCK / a.tokens
        m = metrics(node.port)
        lost = m[f'baton_kv_tier_lost_blocks_total{{tier="{a.tier}"}}']
        print(f'{a.prompts} prompts of {a.tokens} tokens, {a.prompts * full} full blocks, a pool of {a.pool} ({a.prompts * full / a.pool:.1f} times), tier {a.tier}')
        print(f'hit rate of the second round {cached / total:.4f}   limit {limit:.4f} (one cache that forgets nothing)   ratio {cached / total / limit:.4f}   lost {lost:.0f} blocks')


def ttft(a):
    """A pool of one prompt and a half: each prompt evicts the one before."""
    pool = (a.tokens + 64) // BLOCK * 3 // 2
    got = {k: [] for k in ('pool', 'host', 'disk', 'computed')}
    expected = {k: [] for k in ('host', 'disk')}
    with tempfile.TemporaryDirectory(prefix='baton-kv-') as folder:
        nodes = {t: Node(smollm2(), args=size(pool, a.tokens, *(tier_options(t, folder, 1) if t != 'computed' else ['--no-enable-prefix-caching']))) for t in ('host', 'disk', 'computed')}
        with closing(*nodes.values()):
            wait_ready(*nodes.values())
            for i in range(a.rounds + 1):
                mine, other = prompt(i, a.tokens), prompt(10000 + i, a.tokens)
                for tier in ('host', 'disk'):
                    for p in (mine, other):
                        _, _, first = ask(nodes[tier], p)
                        await_copied(nodes[tier], tier)
                        if p is mine:
                            want = first
                for kind in ('computed', 'host', 'pool', 'disk'):
                    node = nodes['host' if kind == 'pool' else kind]
                    trace, _, ids = ask(node, mine)
                    by = trace['cached_tokens_by_tier']
                    assert ids == want, kind
                    assert kind == 'computed' or by[kind] > a.tokens * 0.6, (kind, by)
                    if i:
                        got[kind].append(trace['first_token_ms'])
                        if kind in expected:
                            expected[kind].append((trace['cache_load_ms'], trace['cache_load_expected_ms'], trace['cache_compute_expected_ms']))
    print(f'{a.rounds} rounds, a prompt of {a.tokens} tokens, its last block and token computed always; TTFT in ms, least and median')
    for kind, t in got.items():
        print(f'  {kind:9} {min(t):8.1f} {statistics.median(t):8.1f}')
    for kind, limit, most in (('host', 'pool', 1.2), ('disk', 'computed', 0.25)):
        ratio = statistics.median(x / y for x, y in zip(got[kind], got[limit]))
        print(f'TTFT of a hit, {kind}: {statistics.median(got[kind]):.1f}   limit {statistics.median(got[limit]):.1f} ({limit})   ratio {ratio:.3f}, of the least {min(got[kind]) / min(got[limit]):.3f} '
              f'(at most {most} is wanted)')
        load, load_expected, compute_expected = (statistics.median(c) for c in zip(*expected[kind]))
        print(f'  of it {load:.1f} ms loading, {load_expected:.1f} expected; computing instead was expected to take {compute_expected:.0f} ms')


def pin(node, cpu):
    for thread in os.listdir(f'/proc/{node.p.pid}/task'):
        os.sched_setaffinity(int(thread), {cpu})


def cpu_seconds(node):
    """Of the threads that compute steps, and of those that copy KV to and from tiers."""
    of = {False: 0, True: 0}
    for thread in os.listdir(f'/proc/{node.p.pid}/task'):
        with contextlib.suppress(OSError), open(f'/proc/{node.p.pid}/task/{thread}/comm') as name, open(f'/proc/{node.p.pid}/task/{thread}/schedstat') as stat:
            of[name.read().startswith('kv-')] += int(stat.read().split()[0]) * 1e-9
    return of[False], of[True]


def load(node, seed, streams, n_new, out):
    threads = [threading.Thread(target=ask, args=(node, prompt(100 * seed + s, 320), n_new)) for s in range(streams)]
    t0 = time.perf_counter()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    out['rate'].append(streams * (320 + n_new) / (time.perf_counter() - t0))
    out['cpu'].append(cpu_seconds(node))


def steps(a):
    """Both nodes at the same time, each on a CPU of its own with all its threads, which they swap after each round: what else the host does meets both."""
    got = {'without': {'rate': [], 'cpu': []}, 'with': {'rate': [], 'cpu': []}}
    with tempfile.TemporaryDirectory(prefix='baton-kv-') as folder:
        more = dict(zip(got, ([], ['--swap-space', '2', '--kv-cache-dir', folder, '--kv-cache-disk', '2'])))
        nodes = {k: Node(smollm2(), args=size(400, 1024, '--max-num-seqs', str(a.streams), *more[k], '--compute-threads', '1')) for k in got}
        with closing(*nodes.values()):
            wait_ready(*nodes.values())
            for i in range(2 * a.rounds + 2):
                for k, cpu in zip(got, (0, 1) if i % 2 else (1, 0)):
                    pin(nodes[k], cpu)
                both = [threading.Thread(target=load, args=(nodes[k], i, a.streams, a.new, got[k])) for k in got]
                for t in both:
                    t.start()
                for t in both:
                    t.join()
                wait_until('quiet', lambda: all(v == 0 for m in [metrics(nodes['with'].port)] for n, v in m.items() if n.startswith('baton_kv_tier_waiting')), 60)
            m = metrics(nodes['with'].port)
            copied = {t: m[f'baton_kv_tier_demoted_blocks_total{{tier="{t}"}}'] for t in ('host', 'disk')}
    # the first two rounds do not count; a pair of rounds is one on each CPU
    rates = {k: [(x * y) ** 0.5 for x, y in zip(g['rate'][2::2], g['rate'][3::2])] for k, g in got.items()}
    cpu = {k: [y[0] - x[0] for x, y in zip(g['cpu'][1::2], g['cpu'][3::2])] for k, g in got.items()}
    copying = got['with']['cpu'][-1][1] - got['with']['cpu'][1][1]
    ratios = [w / o for w, o in zip(rates['with'], rates['without'])]
    cpu_ratios = [w / o for w, o in zip(cpu['with'], cpu['without'])]
    print(f'{a.rounds} times two rounds, {a.streams} prompts of 320 tokens at a time, {a.new} new tokens each; {copied["host"]:.0f} blocks to host memory, {copied["disk"]:.0f} to the disk meanwhile')
    print(f'CPU time of steps with tiers {statistics.median(cpu["with"]):.2f} s   limit {statistics.median(cpu["without"]):.2f} (without)   ratio {statistics.median(cpu_ratios):.4f} '
          f'(at most 1.01 is wanted)   each {" ".join(f"{r:.3f}" for r in cpu_ratios)}   copying took {copying / sum(cpu["with"]):.4f} of it, at low priority')
    print(f'tokens per second with tiers {statistics.median(rates["with"]):.1f}   limit {statistics.median(rates["without"]):.1f} (without)   ratio {statistics.median(ratios):.4f}   '
          f'each {" ".join(f"{r:.3f}" for r in ratios)}')


def main():
    p = argparse.ArgumentParser()
    p.add_argument('what', choices=['hits', 'ttft', 'steps'])
    p.add_argument('--prompts', type=int, default=200)
    p.add_argument('--tokens', type=int)
    p.add_argument('--pool', type=int, default=250)
    p.add_argument('--tier', default='host', choices=['host', 'disk'])
    p.add_argument('--rounds', type=int, default=7)
    p.add_argument('--streams', type=int, default=4)
    p.add_argument('--new', type=int, default=96)
    a = p.parse_args()
    a.tokens = a.tokens or (330 if a.what == 'hits' else 1984)
    {'hits': hits, 'ttft': ttft, 'steps': steps}[a.what](a)


main()
