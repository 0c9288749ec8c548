#!/usr/bin/env python3
"""bench_multi_turn.py - TTFT of conversations that go on, over two prefill and two decode nodes: with KV kept behind the pool and at peers, and without.
usage: bench_multi_turn.py [--requests 150] [--seconds 45] [--blocks 400] [--rounds 3] [--speed 1000] [--with "--swap-space 1"] [--real]   (BATON_BIN)

Replays tests/data/traces/sessions.jsonl with lengths divided by 16, so many requests in so many seconds, each to the next node as its entry. In each round
it starts the nodes anew without the options of --with, then with them. The pool of a node holds a part of what the conversations have in common.
Nodes are paced: --speed prompt tokens per second of a prefill node, whatever the machine does; --real computes with SmolLM2 instead (BATON_TEST_GGUF).
Prints mean TTFT of both, their ratio, and which part of the prompts came from where. The limit is the nodes without, in the same round. Tokens must be
equal, or it ends with status 1; with 2 when the program has no tiers (its traces have no cached_tokens_by_tier)."""
import argparse, os, shlex, statistics, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
from harness import *
from test_prefix import BLOCK, curve, replay, requests_of


def ms(v):
    return f'{v:.0f} ms'


def run(a, requests, options):
    """[answer] of each request in order, by nodes that are started for it."""
    ports, file = free_ports(4), None if a.real else curve(a.speed)
    l = Process([BIN, 'launch', '--model', smollm2() if a.real else TINY, '--served-model-name', 'm', '--prefill', '2', '--decode', '2', '--ports', ','.join(map(str, ports)),
                 '--max-model-len', '2048', '--max-num-seqs', '64', '--block-size', str(BLOCK), '--num-gpu-blocks-override', str(a.blocks), '--compute-threads', '1',
                 *(['--pace', file] if file else []), *options], name='launch')
    with closing(l):
        wait_until('launch ready', lambda: 'ready: all 4 nodes' in l.output() or not l.alive(), 120)
        for p in ports:  # so that all know how fast a prefill node is
            request(p, 'POST', '/v1/completions', dict(model='m', prompt=[1] * 1100, max_tokens=1, cache_salt=str(p)), timeout=600)
        answers = replay(ports, requests, requests[-1][0] / a.seconds)
    if file:
        os.unlink(file)
    return answers


def report(name, requests, answers):
    """Mean TTFT in ms."""
    traces = [x['baton'] for x in answers]
    n, by = sum(len(prompt) for _, prompt, _ in requests), {}
    for t in traces:
        for tier, tokens in t.get('cached_tokens_by_tier', {'pool': t['cached_tokens']}).items():
            by[tier] = by.get(tier, 0) + tokens
    ttft = sorted(t['first_token_ms'] for t in traces)
    elsewhere = sum(t.get('kept_tokens', 0) for t in traces)
    print(f'  {name:8} mean TTFT {ms(statistics.mean(ttft))}, p50 {ms(ttft[len(ttft) // 2])}, p99 {ms(ttft[len(ttft) * 99 // 100])}   cached {sum(by.values()) / n:.3f} ('
          + ', '.join(f'{k} {v / n:.3f}' for k, v in by.items()) + f'), expected {sum(t.get("expected_cached_tokens", 0) for t in traces) / n:.3f}, '
          f'said to be at another node {elsewhere / n:.3f}', flush=True)
    return statistics.mean(ttft)


def main():
    p = argparse.ArgumentParser()
    p.add_argument('--requests', type=int, default=150)
    p.add_argument('--seconds', type=float, default=45)
    p.add_argument('--blocks', type=int, default=400)
    p.add_argument('--rounds', type=int, default=3)
    p.add_argument('--speed', type=float, default=1000)
    p.add_argument('--with', dest='options', default='--swap-space 1')
    p.add_argument('--real', action='store_true')
    a = p.parse_args()
    requests, ratios, differ = requests_of(a.requests), [], 0
    print(f'{len(requests)} requests of {sum(len(prompt) for _, prompt, _ in requests)} prompt tokens in {a.seconds:.0f} s over 2P2D, pools of {a.blocks * BLOCK} tokens')
    for i in range(a.rounds):
        without = run(a, requests, [])
        limit = report('without', requests, without)
        with_ = run(a, requests, shlex.split(a.options))
        figure = report('with', requests, with_)
        differ += sum(x['choices'][0]['token_ids'] != y['choices'][0]['token_ids'] for x, y in zip(without, with_))
        ratios.append(figure / limit)
        if not all('cached_tokens_by_tier' in x['baton'] for x in with_):
            print('NOT MEASURED: this program has no tiers, so both were without')
            return 2
    print(f'mean TTFT with {a.options}: {ms(figure)}   limit {ms(limit)} (without)   ratio {statistics.median(ratios):.3f}, each {" ".join(f"{r:.3f}" for r in ratios)}; '
          f'{differ} of {a.rounds * len(requests)} answers differ')
    return differ > 0


sys.exit(main())
