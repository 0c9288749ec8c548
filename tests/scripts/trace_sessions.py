#!/usr/bin/env python3
"""trace_sessions.py - makes a short trace of a long one, with as many prompts that go on with earlier ones.

usage: trace_sessions.py TRACE.jsonl[.gz] [--requests 300] [--turns 3] [--longest 30000] > tests/data/traces/sessions.jsonl

Of Mooncake's conversation (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces, Apache License 2.0) it takes the sessions of
at least so many turns and no prompt longer than that, in order of their beginning, up to so many requests; a session is what has the
second block in common, since all prompts begin with the same one. Blocks get numbers in order of their first use. Times are as they
were."""
import argparse, collections, gzip, json, sys


def main():
    p = argparse.ArgumentParser(usage=__doc__.split('\n')[2][7:])
    p.add_argument('trace')
    p.add_argument('--requests', type=int, default=300)
    p.add_argument('--turns', type=int, default=3)
    p.add_argument('--longest', type=int, default=30000)
    a = p.parse_args()
    with (gzip.open if a.trace.endswith('.gz') else open)(a.trace, 'rt') as f:
        rows = [json.loads(line) for line in f]
    sessions = collections.defaultdict(list)
    for i, r in enumerate(rows):
        if len(r['hash_ids']) > 1:
            sessions[r['hash_ids'][1]].append(i)
    chosen, n = set(), 0
    for turns in sessions.values():
        longest = max(rows[i]['input_length'] for i in turns)
        if len(turns) >= a.turns and n + len(turns) <= a.requests and longest <= a.longest:
            chosen.update(turns)
            n += len(turns)
    numbers = {}
    for i in sorted(chosen):
        r = rows[i]
        r['hash_ids'] = [numbers.setdefault(h, len(numbers)) for h in r['hash_ids']]
        sys.stdout.write(json.dumps({k: r[k] for k in ('timestamp', 'input_length', 'output_length', 'hash_ids')}, separators=(',', ':')) + '\n')


if __name__ == '__main__':
    main()
