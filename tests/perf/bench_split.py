#!/usr/bin/env python3
"""bench_split.py - TTFT of a prompt split over two nodes next to one mixed node, by prompt length and transport.
usage: bench_split.py [--tokens 256,512,1000,1500] [--rounds 5] [--protocol ipc,tcp] [--cores 1]   (BATON_BIN, BATON_TEST_GGUF)

Each role gets as many cores as the mixed node: the mixed and the prefill nodes are pinned to the same first cores, where only one of them works at a
time, and the decode nodes to the next cores. Every round sends the same prompt to the mixed node and to each pair, one after the other. The ratio is
taken within a round, so that disturbances of the machine affect both; the median over the rounds is printed with the best TTFT of each. The limit is
the mixed node in the same run. The first round warms up."""
import argparse, os, statistics, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
from harness import *


class Pinned(Node):
    def __init__(self, cpus, *a):
        self.cpus = cpus
        super().__init__(*a)

    def start(self):
        if self.argv[0] != 'taskset':
            self.argv = ['taskset', '-c', ','.join(map(str, self.cpus)), *self.argv]
        super().start()


def start_pair(model, protocol, args, cpus, next_cpus):
    control = free_ports(1)[0]
    common = ['--cache-transfer-protocol', protocol, *args]
    return (Pinned(cpus, model, 'prefill', [*common, '--engine-worker-queue-port', str(control)]),
            Pinned(next_cpus, model, 'decode', [*common, '--innode-prefill-ports', str(control)]))


def ask(port, prompt):
    s, _, b = request(port, 'POST', '/v1/completions', dict(prompt=prompt, max_tokens=2, temperature=0, ignore_eos=True, return_trace=True))
    assert s == 200, b
    return b['choices'][0]['text'], b['baton']


def main():
    a = argparse.ArgumentParser()
    a.add_argument('--tokens', default='256,512,1000,1500')
    a.add_argument('--rounds', type=int, default=5)
    a.add_argument('--cores', type=int, default=1)
    a.add_argument('--protocol', default='ipc,tcp')
    a = a.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2 * a.cores:
        sys.exit(f'bench_split: {2 * a.cores} cores are needed, this machine has {len(cpus)}')
    mine, decodes = cpus[:a.cores], cpus[a.cores:2 * a.cores]
    size = ['--max-model-len', '2048', '--num-gpu-blocks-override', '100', '--enable-prefix-caching=false', '--max-num-batched-tokens', '512',
            '--compute-threads', str(a.cores)]
    model, lengths, protocols = smollm2(), [int(n) for n in a.tokens.split(',')], a.protocol.split(',')
    mixed = Pinned(mine, model, 'mixed', size)
    pairs = {p: start_pair(model, p, size, mine, decodes) for p in protocols}
    got = {(n, name): [] for n in lengths for name in ['mixed', *protocols]}
    with closing(mixed, *[n for p in pairs.values() for n in p]):
        wait_ready(mixed, *[n for p in pairs.values() for n in p])
        for p in pairs.values():
            wait_sees(p, 2)
        for i in range(a.rounds + 1):
            for n in lengths:
                prompt = [(i * 131 + k * 7919 + n) % 40000 + 100 for k in range(n)]
                text, trace = ask(mixed.port, prompt)
                answers = {'mixed': trace}
                for name in protocols:
                    split_text, answers[name] = ask(pairs[name][0].port, prompt)
                    assert split_text == text, (name, n, split_text, text)
                if i:
                    for name, trace in answers.items():
                        got[n, name].append(trace)
    print(f'{a.rounds} rounds, {a.cores} core(s) per role; TTFT in ms')
    for n in lengths:
        base = [t['first_token_ms'] for t in got[n, 'mixed']]
        for name in protocols:
            rows = got[n, name]
            ttft = [t['first_token_ms'] for t in rows]
            med = lambda key: statistics.median(t[key] for t in rows)
            print(f'{n:5} tokens, split over {name}: {min(ttft):8.1f}   limit {min(base):8.1f} (mixed)   ratio {min(ttft) / min(base):.3f}   '
                  f'median of rounds {statistics.median(s / m for s, m in zip(ttft, base)):.3f}   '
                  f'KV {med("kv_bytes") / (1 << 20):.1f} MiB, left after the last layer {med("kv_tail_ms"):.2f} ms')


main()
