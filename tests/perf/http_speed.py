#!/usr/bin/env python3
"""http_speed.py - compares servers of the OpenAI completions API: TTFT and decode rate. Standard library only.

usage: http_speed.py [--rounds 5] [--tokens 512] [--new 64] [--streams 8] NAME=PORT[:PID] NAME=PORT[:PID]
The first server is the one whose ratios are printed. With a PID, waiting for a server ends when that process has ended.

In every round each server gets the same three jobs, one server after the other, in changing order, with prompts of random token ids that no round repeats:
  TTFT       a prompt of --tokens tokens and max_tokens 1: from sending the request to the first token
  decode 1   the same, --new tokens: their number after the first over the time after the first
  decode N   --streams such requests at once: tokens that arrive while all of them are decoding, over that time
Medians over the rounds; the ratio is the median of the rounds' ratios. One round before the first warms up."""
import argparse
import http.client
import json
import os
import random
import statistics
import threading
import time


def events(port, prompt, n_new):
    """[(time, tokens)] of a streamed answer; times since the request was sent."""
    body = {"model": "m", "prompt": prompt, "max_tokens": n_new, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    c = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    t0 = time.perf_counter()
    c.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    r = c.getresponse()
    if r.status != 200:
        raise SystemExit(f"port {port}: {r.status} {r.read()[:300]}")
    out = []
    for line in r:
        if line.startswith(b"data: {"):
            now = time.perf_counter()
            choices = json.loads(line[6:]).get("choices") or [{}]
            n = len(choices[0].get("token_ids") or [])
            if n:
                out.append((now - t0, n))
    c.close()
    if sum(n for _, n in out) != n_new:
        raise SystemExit(f"port {port}: {sum(n for _, n in out)} tokens came, {n_new} were asked for")
    return out


def ttft(port, prompts, a):
    return events(port, prompts[0], 1)[0][0]


def decode_one(port, prompts, a):
    e = events(port, prompts[1], a.new)
    return sum(n for _, n in e[1:]) / (e[-1][0] - e[0][0])


def decode_many(port, prompts, a):
    got = [None] * a.streams
    t0 = time.perf_counter()

    def one(i):
        start = time.perf_counter() - t0
        got[i] = [(start + t, n) for t, n in events(port, prompts[2 + i], a.new)]
    threads = [threading.Thread(target=one, args=(i,)) for i in range(a.streams)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if None in got:
        raise SystemExit(f"port {port}: a stream failed")
    begin, end = max(e[0][0] for e in got), min(e[-1][0] for e in got)
    if end <= begin:
        raise SystemExit(f"port {port}: the streams never decoded all at once; a larger --new is needed")
    return sum(n for e in got for t, n in e if begin < t <= end) / (end - begin)


def wait_ready(name, port, pid):
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if pid and not os.path.exists(f"/proc/{pid}"):
            raise SystemExit(f"{name} has ended")
        try:
            c = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            c.request("GET", "/v1/models")
            if c.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"{name} is not ready within 10 minutes")


MEASURES = {"TTFT": ttft, "decode 1": decode_one, "decode N": decode_many}
WANTED = {"TTFT": 3.0, "decode 1": 3.0, "decode N": 5.0}


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--rounds", type=int, default=5)
    a.add_argument("--tokens", type=int, default=512)
    a.add_argument("--new", type=int, default=64)
    a.add_argument("--streams", type=int, default=8)
    a.add_argument("servers", nargs="+")
    a = a.parse_args()
    servers = []
    for name, place in (s.split("=") for s in a.servers):
        port, _, pid = place.partition(":")
        servers.append((name, int(port)))
        wait_ready(name, int(port), pid)
    rng = random.Random(7)
    got = {what: [] for what in MEASURES}
    for i in range(a.rounds + 1):
        prompts = [[rng.randrange(100, 49000) for _ in range(a.tokens)] for _ in range(2 + a.streams)]
        for what, measure in MEASURES.items():
            values = {}
            for name, port in servers if i % 2 else servers[::-1]:
                time.sleep(0.5)  # worker threads of the other server may spin for a moment
                values[name] = measure(port, prompts, a)
            if i:
                got[what].append(values)
    first = servers[0][0]
    print(f"prompts of {a.tokens} tokens, {a.new} new ones, N = {a.streams}, medians of {a.rounds} rounds")
    for what, rounds in got.items():
        unit, scale = ("ms", 1e3) if what == "TTFT" else ("tok/s", 1)
        line = "".join(f"{name} {statistics.median(v[name] for v in rounds) * scale:9.1f} {unit}   " for name, _ in servers)
        for name, _ in servers[1:]:
            ratio = statistics.median((v[name] / v[first]) if what == "TTFT" else (v[first] / v[name]) for v in rounds)
            line += f"{first} is {ratio:.2f} times as fast as {name}; wanted {WANTED[what]}: {'met' if ratio >= WANTED[what] else 'NOT MET'}   "
        print(f"  {what:10} {line}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
