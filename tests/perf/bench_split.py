#!/usr/bin/env python3
"""What splitting costs: TTFT of a long prompt split over two nodes beside one mixed node, and how much of the KV transfer is left after
the last layer was computed. usage: bench_split.py [--tokens 1400] [--rounds 5] [--protocol ipc,tcp]   (BATON_BIN, BATON_TEST_GGUF)

Each role gets the same threads as the mixed node, and only one node works at a time, so the two-node figure is not helped by more cores.
Runs are interleaved. Prints medians and the ratios; the limit is the mixed node in the same run."""
import argparse, os, statistics, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
from harness import *


def main():
    a = argparse.ArgumentParser()
    a.add_argument('--tokens', type=int, default=1400)
    a.add_argument('--rounds', type=int, default=5)
    a.add_argument('--threads', default='2')
    a.add_argument('--protocol', default='ipc,tcp')
    a = a.parse_args()
    size = ['--max-model-len', '2048', '--num-gpu-blocks-override', '100', '--enable-prefix-caching=false', '--max-num-batched-tokens', '512', '--compute-threads', a.threads]
    model = smollm2()
    rows = {'mixed': []}
    with closing(Node(model, 'mixed', size)) as mixed:
        wait_ready(mixed)
        for protocol in a.protocol.split(','):
            rows[protocol] = []
            with pair(model, protocol, size) as (p, d):
                for i in range(a.rounds + 1):
                    prompt = [(i * 131 + k * 7919) % 40000 + 100 for k in range(a.tokens)]
                    for name, port in (('mixed', mixed.port), (protocol, p.port)):
                        s, _, b = request(port, 'POST', '/v1/completions', dict(prompt=prompt, max_tokens=2, temperature=0, ignore_eos=True, return_trace=True))
                        assert s == 200, b
                        if i:               # the first round warms up
                            rows[name].append(b['baton'])
    med = lambda name, key: statistics.median(t[key] for t in rows[name])
    base = med('mixed', 'first_token_ms')
    print(f'{a.tokens} prompt tokens, {a.rounds} rounds, {a.threads} threads per node; medians')
    print(f'mixed: TTFT {base:.1f} ms, prefill {med("mixed", "prefill_ms"):.1f} ms')
    for name in rows:
        if name == 'mixed':
            continue
        ttft, prefill, tail, kv = (med(name, k) for k in ('first_token_ms', 'prefill_ms', 'kv_tail_ms', 'kv_ms'))
        mib = med(name, 'kv_bytes') / (1 << 20)
        print(f'{name}: TTFT {ttft:.1f} ms, split/mixed {ttft / base:.3f}; prefill {prefill:.1f} ms; KV {mib:.1f} MiB; left after the last layer {tail:.2f} ms = '
              f'{100 * tail / prefill:.2f} % of prefill; first byte to acknowledged {kv:.1f} ms')


main()
