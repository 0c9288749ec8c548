#!/usr/bin/env python3
"""bench_large_bodies.py - what bodies of up to 45 MB cost a node: its memory, and the time of other clients.
usage: bench_large_bodies.py [--bodies 1000] [--concurrency 16] [--mib 43] [--seconds 20]   (BATON_BIN, BATON_TEST_GGUF)

Two clients ask for four tokens again and again, first alone and then while another process (of low priority, so that the
machine's cores are left to the node) sends bodies of random kind and size: token ids, numbers in an unknown member, nested
arrays, one long text, many messages, escapes, an object with many members, and the same for /tokenize and /detokenize.
Printed: the most resident memory above idle (limit 1024 MiB), what is left 10 s after the last body (limit 64 MiB), and
the p99 of the two clients beside that without bodies (limit 2)."""
import argparse, collections, json, os, random, socket, sys, threading, time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
from harness import *


def fill(n, unit, join=b','):
    return join.join([unit] * (n // (len(unit) + len(join)) + 1))


def bodies():
    """kind → (path, fn of the size)"""
    chat, text = '/v1/chat/completions', '/v1/completions'
    message = b'{"role":"user","content":"Hi"}'
    return {
        'ids': (text, lambda n: b'{"prompt":[' + fill(n, b'7') + b']}'),
        'ids, the last 8': (text, lambda n: b'{"truncate_prompt_tokens":8,"max_tokens":1,"prompt":[' + fill(n, b'7') + b']}'),
        'prompts of ids': (text, lambda n: b'{"prompt":[' + fill(n, b'[7,8,9]') + b']}'),
        'numbers': (chat, lambda n: b'{"messages":[' + message + b'],"max_tokens":1,"x":[' + fill(n, b'1') + b']}'),
        'arrays': (chat, lambda n: b'{"messages":[' + fill(n, b'[]') + b']}'),
        'members': (chat, lambda n: b'{' + fill(n, b'"k":""') + b'}'),
        'text': (text, lambda n: b'{"prompt":"' + fill(n, b'word', b' ') + b'"}'),
        'one word': (text, lambda n: b'{"prompt":"' + b'a' * n + b'"}'),
        'escapes': (text, lambda n: b'{"prompt":"' + b'\\u00e9' * (n // 6) + b'"}'),
        'message': (chat, lambda n: b'{"messages":[{"role":"user","content":"' + b'a b ' * (n // 4) + b'"}]}'),
        'messages': (chat, lambda n: b'{"messages":[' + fill(n, message) + b']}'),
        'tokenize': ('/tokenize', lambda n: b'{"prompt":"' + b'a b ' * (n // 4) + b'"}'),
        'detokenize': ('/detokenize', lambda n: b'{"tokens":[' + fill(n, b'7') + b']}'),
        'chunked': (text, lambda n: b'{"prompt":[' + fill(n, b'7') + b']}'),
    }


def post(port, path, body, chunked):
    """The status of the answer, which may come before the body was sent; 0: the connection broke."""
    with socket.create_connection(('127.0.0.1', port), timeout=120) as s:
        length = b'Transfer-Encoding: chunked' if chunked else b'Content-Length: %d' % len(body)
        head = b'POST %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n%s\r\n\r\n' % (path.encode(), length)
        try:
            s.sendall(head + (b'%x\r\n' % len(body) if chunked else b''))
            s.sendall(body)
            if chunked:
                s.sendall(b'\r\n0\r\n\r\n')
        except OSError:
            pass
        try:
            answer = s.recv(65536)
            rest = answer
            while rest:
                rest = s.recv(1 << 20)
        except OSError:
            return 0
        return int(answer.split()[1]) if answer else 0


def attack(port, a, out):
    """Sends the bodies; prints {kind: {status: n}} to `out`."""
    kinds, seen, lock = bodies(), {}, threading.Lock()
    names = list(kinds)
    todo = list(range(a.bodies))

    def work():
        while True:
            with lock:
                if not todo:
                    return
                i = todo.pop()
            rng = random.Random(i)
            name = names[i % len(names)]
            path, make = kinds[name]
            size = rng.randint(1 << 16, a.mib << 20) if i % 3 else a.mib << 20
            status = post(port, path, make(size), name == 'chunked')
            with lock:
                seen.setdefault(name, collections.Counter())[status] += 1

    threads = [threading.Thread(target=work) for _ in range(a.concurrency)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    with open(out, 'w') as f:
        json.dump({k: dict(v) for k, v in seen.items()}, f)


def memory(pid, key):
    with open(f'/proc/{pid}/status') as f:
        return next(int(line.split()[1]) / 1024 for line in f if line.startswith(key + ':'))


class Clients:
    """Two clients, each with one request in flight at any time."""

    def __init__(self, port):
        self.port, self.times, self.stop = port, [], False
        self.threads = [threading.Thread(target=self.work, args=(i,)) for i in range(2)]
        [t.start() for t in self.threads]

    def work(self, i):
        n = 0
        while not self.stop:
            n += 1
            t = time.perf_counter()
            s, _, b = request(self.port, 'POST', '/v1/completions',
                              dict(prompt=[100 + (n * 31 + k * 7 + i) % 4000 for k in range(16)], max_tokens=4, temperature=0, ignore_eos=True))
            assert s == 200, (s, b)
            self.times.append(time.perf_counter() - t)

    def end(self):
        self.stop = True
        [t.join() for t in self.threads]
        self.times.sort()
        return self.times


def at(times, share):
    return times[min(len(times) - 1, int(len(times) * share))] * 1e3


def main():
    a = argparse.ArgumentParser()
    a.add_argument('--bodies', type=int, default=1000)
    a.add_argument('--concurrency', type=int, default=16)
    a.add_argument('--mib', type=int, default=43)
    a.add_argument('--seconds', type=float, default=20)
    a = a.parse_args()
    node = Node(smollm2(), 'mixed', ['--max-model-len', '2048', '--num-gpu-blocks-override', '200'])
    with closing(node):
        wait_ready(node)
        pid = node.p.pid
        warm = Clients(node.port)
        time.sleep(2)
        warm.end()
        alone = Clients(node.port)
        time.sleep(a.seconds)
        alone = alone.end()
        time.sleep(1)
        idle = memory(pid, 'VmRSS')
        with open(f'/proc/{pid}/clear_refs', 'w') as f:
            f.write('5')
        beside = Clients(node.port)
        out = os.path.join(os.environ.get('TMPDIR', '/tmp'), f'large_bodies.{os.getpid()}')
        t = time.perf_counter()
        child = os.fork()
        if child == 0:
            os.nice(19)
            attack(node.port, a, out)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        seconds = time.perf_counter() - t
        beside = beside.end()
        peak = memory(pid, 'VmHWM')
        time.sleep(10)
        left = memory(pid, 'VmRSS')
        with open(out) as f:
            seen = json.load(f)
        os.remove(out)
    for kind, counts in seen.items():
        print(f'{kind:16} ' + ', '.join(f'{n} x {s}' for s, n in sorted(counts.items())))
    print(f'{a.bodies} bodies of up to {a.mib} MiB, {a.concurrency} at once: {seconds:.1f} s')
    print(f'memory: idle {idle:.0f} MiB, at most {peak - idle:.0f} MiB more   limit 1024   ratio {(peak - idle) / 1024:.3f}')
    print(f'memory 10 s after the last body: {left - idle:+.0f} MiB   limit 64   ratio {(left - idle) / 64:.3f}')
    print(f'other clients: {len(beside)} answers, p50 {at(beside, .5):.1f} ms, p99 {at(beside, .99):.1f} ms   alone p50 {at(alone, .5):.1f} ms, '
          f'p99 {at(alone, .99):.1f} ms   limit 2   ratio {at(beside, .99) / at(alone, .99):.3f}')


if __name__ == '__main__':
    main()
