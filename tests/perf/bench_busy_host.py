#!/usr/bin/env python3
"""bench_busy_host.py - how long a step takes on a host where others compute as well.

usage: bench_busy_host.py [--rounds N] PROGRAM [PROGRAM ...]   (e.g. build/baton, and an older one beside it)

Each program serves SmolLM2 with as many compute threads as the host has CPUs and answers one stream: alone, beside as many processes that
count, the same at nice 10, and beside a second node that answers as well. The limit is the share of the CPUs that the scheduler's
weights give the node (sched(7): nice 0 weighs 1024, nice 10 110). Programs take turns; medians are printed. Environment: BATON_TEST_GGUF."""
import argparse, contextlib, os, statistics, subprocess, sys, threading, time

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
from harness import Process, closing, free_ports, request, smollm2, wait_ready

TOKENS = 64
ROWS = {'alone': 1, 'beside processes that count': 2, 'beside processes that count, at nice 10': (1024 + 110) / 110, 'beside a second node': 2}


def start(program, nice=0):
    port = free_ports(1)[0]
    node = Process(['nice', '-n', str(nice), program, 'serve', '--model', smollm2(), '--host', '127.0.0.1', '--port', str(port), '--compute-threads', str(os.cpu_count()),
                    '--max-model-len', '512', '--kv-cache-memory', '0.1'])
    node.port = port
    with contextlib.suppress(OSError):  # where sessions share the CPUs equally (sched(7), autogroups), priorities are those of sessions
        with open(f'/proc/{node.p.pid}/autogroup', 'w') as f:
            f.write(str(nice))
    return node


def ask(node, tokens=TOKENS):
    assert request(node.port, 'POST', '/v1/completions', dict(prompt='The capital of France is', max_tokens=tokens, temperature=0, ignore_eos=True))[0] == 200


@contextlib.contextmanager
def counting():
    others = [subprocess.Popen([sys.executable, '-c', 'while True: pass'], start_new_session=False) for _ in range(os.cpu_count())]
    try:
        yield
    finally:
        for p in others:
            p.kill()
            p.wait()


@contextlib.contextmanager
def answering(node):
    going = [True]

    def run():
        while going[0]:
            ask(node, 8)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        going[0] = False
        thread.join()


def ms_per_token(program, row):
    nodes = [start(program, 10 if 'nice' in row else 0)] + ([start(program)] if 'second' in row else [])
    with closing(*nodes):
        wait_ready(*nodes)
        for node in nodes:
            ask(node)
        with answering(nodes[1]) if 'second' in row else counting() if 'count' in row else contextlib.nullcontext():
            time.sleep(0.3)
            begin = time.monotonic()
            ask(nodes[0])
            return (time.monotonic() - begin) * 1000 / TOKENS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('programs', nargs='+')
    a = parser.parse_args()
    found = {}
    for _ in range(a.rounds):
        for row in ROWS:
            for program in a.programs:
                found.setdefault((program, row), []).append(ms_per_token(program, row))
    for program in a.programs:
        print(program)
        alone = statistics.median(found[program, 'alone'])
        for row, limit in ROWS.items():
            times = found[program, row]
            longer = statistics.median(times) / alone
            print(f'  {row:<40} {statistics.median(times):6.2f} ms per token (from {min(times):.2f} to {max(times):.2f}), {longer:5.2f} times as long; '
                  f'limit {limit:5.2f}; ratio {limit / longer:.2f}')


main()
