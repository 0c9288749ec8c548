#!/usr/bin/env python3
"""bench_idle_group.py - what an idle group of ranks costs beside as many nodes that share nothing.

usage: bench_idle_group.py [--size 8] [--rounds 3] [--seconds 20] [--requests 24] [MODEL]     (default: the golden ernie_moe)

Both are launched and idle side by side. CPU time: that of all their threads over the same seconds, launchers included. First
token: one request at a time to a rank in turn, alternating between both, each after a pause in which all sleep; the time from the request
to its first token. Limits: CPU time within 10 %, the first token at most 2 ms later. Environment: BATON_BIN, BATON_TEST_DATA."""
import argparse, os, random, statistics, sys, time

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
from harness import BIN, DATA, Process, closing, free_ports, pid_of_port, stream, wait_until

PAUSE_S, PROMPT = 0.25, 16
CPU_LIMIT, TOKEN_LIMIT_MS = 1.10, 2.0


class Launch(Process):
    def __init__(self, model, size, args, name):
        self.ports = free_ports(size)
        super().__init__([BIN, 'launch', '--model', model, '--served-model-name', 'm', '--num-servers', str(size), '--ports', ','.join(map(str, self.ports)),
                          '--max-model-len', '512', '--max-num-seqs', '8', '--num-gpu-blocks-override', '96', *args], name=name)

    def wait(self):
        wait_until(f'{self.name} ready', lambda: f'ready: all {len(self.ports)} nodes' in self.output(), 120)
        self.pids = [self.p.pid, *map(pid_of_port, self.ports)]

    def cpu_ms(self):
        """Of all threads (/proc/PID/task/TID/schedstat counts nanoseconds; those that end are few)."""
        total = 0
        for pid in self.pids:
            for tid in os.listdir(f'/proc/{pid}/task'):
                with open(f'/proc/{pid}/task/{tid}/schedstat') as f:
                    total += int(f.read().split()[0])
        return total * 1e-6


def first_token_ms(port, seed):
    prompt = [random.Random(seed).randrange(4, 500) for _ in range(PROMPT)]
    begin = time.perf_counter()
    events = stream(port, '/v1/completions', dict(model='m', prompt=prompt, max_tokens=1, temperature=0, ignore_eos=True))
    next(events)
    took = time.perf_counter() - begin
    for _ in events:
        pass
    return took * 1000


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split('usage: ')[1])
    parser.add_argument('--size', type=int, default=8)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--seconds', type=float, default=20)
    parser.add_argument('--requests', type=int, default=24)
    parser.add_argument('model', nargs='?', default=f'{DATA}/goldens/ernie_moe/model')
    a = parser.parse_args()
    meet = free_ports(1)[0]
    group = Launch(a.model, a.size, ['--data-parallel-size', str(a.size), '--enable-expert-parallel', '--data-parallel-address', '127.0.0.1', '--data-parallel-rpc-port', str(meet)], 'group')
    with closing(group), closing(Launch(a.model, a.size, [], 'nodes')) as nodes:
        both = group, nodes
        for l in both:
            l.wait()
        cpu, tokens, n = {l.name: [] for l in both}, {l.name: [] for l in both}, 0
        for _ in range(a.rounds):
            time.sleep(3)
            begin = [l.cpu_ms() for l in both]
            time.sleep(a.seconds)
            for l, b in zip(both, begin):
                cpu[l.name].append((l.cpu_ms() - b) / a.seconds)
            for i in range(a.requests):
                n += 1
                for l in both if i % 2 else both[::-1]:
                    time.sleep(PAUSE_S)
                    tokens[l.name].append(first_token_ms(l.ports[n % a.size], n))
    ratios = [g / o for g, o in zip(cpu['group'], cpu['nodes'])]
    print(f'idle, {a.size} ranks, CPU time of all in ms per second, windows of {a.seconds:.0f} s: group {" ".join(f"{v:.1f}" for v in cpu["group"])}, nodes '
          f'{" ".join(f"{v:.1f}" for v in cpu["nodes"])}; ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); limit {CPU_LIMIT:.2f}')
    g, o = (statistics.median(tokens[l]) for l in ('group', 'nodes'))
    print(f'first token of an idle one, {len(tokens["group"])} requests each: group {g:.2f} ms (best {min(tokens["group"]):.2f}), nodes {o:.2f} ms (best '
          f'{min(tokens["nodes"]):.2f}); later by {g - o:.2f} ms in the median, {min(tokens["group"]) - min(tokens["nodes"]):.2f} ms in the best; limit {TOKEN_LIMIT_MS:.1f} ms')


main()
