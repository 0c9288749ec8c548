#!/usr/bin/env python3
"""bench_speculation.py - tokens per second of one stream with speculative decoding next to the same program without, on a real model.
usage: bench_speculation.py [--method ngram] [--drafts 8] [--rounds 7] [--streams 1] [--tokens 240]   (BATON_BIN, BATON_TEST_GGUF)

Three texts: `code`, a program with one name to be replaced, without an example (a small model repeats parts of it, or writes about it); `edit`, texts
that the answer repeats with changes (a program behind an example, a list, prose); and `free`, which cannot be predicted from what came before (sampled
hot, so that even loops of the model end). Each round asks both servers for each of the prompts, in an order that alternates; the answers must
be equal, token for token. Of a stream counts the time from its first to its last token. The ratio is taken within a round, so that disturbances of the
machine affect both; printed are the median of the rounds' rates and ratios, of all prompts together and of each, the drafts accepted, and the bars:
code and edit at least 1.8, free at least 0.97. Exit status 1 when a median misses its bar. The first round warms up."""
import argparse, os, statistics, sys, time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'e2e'))
from harness import *

BARS = {'code': 1.8, 'edit': 1.8, 'free': 0.97}
CODE = '''class Account:
    """An account with a balance and a list of movements."""

    def __init__(self, owner, currency):
        self.owner = owner
        self.currency = currency
        self.balance = 0
        self.movements = []

    def deposit(self, amount, note=''):
        if amount <= 0:
            raise ValueError('a deposit must be positive')
        self.balance += amount
        self.movements.append(('deposit', amount, note))
        return self.balance

    def withdraw(self, amount, note=''):
        if amount <= 0:
            raise ValueError('a withdrawal must be positive')
        if amount > self.balance:
            raise ValueError('the balance is too low')
        self.balance -= amount
        self.movements.append(('withdrawal', amount, note))
        return self.balance
'''
EDITS = [('withdraw', 'take_out'), ('Account', 'Wallet'), ('movements', 'history')]
PEOPLE = [('Anna Berg', 'Oslo', 120), ('Bruno Costa', 'Lisbon', 75), ('Clara Dietz', 'Bremen', 310), ('David Evans', 'Cardiff', 48),
          ('Elena Fabbri', 'Turin', 266), ('Felix Gruber', 'Graz', 91), ('Greta Holm', 'Aarhus', 154), ('Hugo Ibarra', 'Bilbao', 203)]
PROSE = ('The old harbour lies where the river meets the sea. In the morning the fishermen mend their nets on the stone wall, and the smell of tar and salt '
         'hangs over the boats. A narrow street climbs from the quay to the market, where the baker opens his door at six and the first loaves are gone by '
         'seven. At noon the bell of the chapel rings twelve times, and the children run down the steps to watch the ferry come in. It brings letters, '
         'newspapers and, on Fridays, a box of oranges for the grocer. In the evening the lamps along the quay are lit one by one, and the fishermen go out '
         'again with the tide.')
TOPICS = ['a lighthouse keeper who collects clocks', 'why bread rises', 'the first day of a new school']


def record(i, status):
    name, city, amount = PEOPLE[i]
    return json.dumps(dict(id=i + 1, name=name, city=city, amount=amount, status=status)) + '\n'


def edits():
    """Each begins with a piece of the answer, which shows what is wanted."""
    example = CODE.replace('deposit', 'put_in')
    return [f'# The program:\n{CODE}\n# The same program, with "deposit" renamed to "put_in":\n{example}\n'
            f'# The same program, with "withdraw" renamed to "take_out":\nclass Account:\n',
            f'The list:\n{"".join(record(i, "open") for i in range(len(PEOPLE)))}\nThe same list, with every "open" changed to "closed":\n'
            f'{record(0, "closed")}',
            f'The text:\n{PROSE}\n\nThe same text, with "fishermen" replaced by "sailors":\nThe old harbour lies where']


def prompts(kind, n_tokens):
    if kind == 'edit':
        return [dict(prompt=p, temperature=0, max_tokens=n_tokens) for p in edits()]
    if kind == 'code':
        return [dict(prompt=f'# The program:\n{CODE}\n# The same program, with "{a}" renamed to "{b}":\n{CODE.splitlines()[0].replace(a, b)}\n',
                     temperature=0, max_tokens=n_tokens) for a, b in EDITS]
    return [dict(prompt=f'Write a long and surprising text about {t}.\n\n', temperature=1.3, seed=i, max_tokens=n_tokens, ignore_eos=True)
            for i, t in enumerate(TOPICS)]


def one(port, body):
    """(tokens per second of the stream, its token ids)"""
    ids, first, last = [], None, None
    for e in stream(port, '/v1/completions', dict(model='m', return_token_ids=True, cache_salt='warm', **body), timeout=300):
        for c in e['choices']:
            if c.get('token_ids'):
                last = time.monotonic()
                if first is None:
                    first, n_first = last, len(c['token_ids'])
                ids += c['token_ids']
    return (len(ids) - n_first) / (last - first), ids


def rates(port, bodies, streams):
    out = []
    for b in bodies:
        for r in parallel([lambda i=i: one(port, {**b, 'seed': b.get('seed', 0) + 10 * i}) for i in range(streams)], streams):
            if isinstance(r, Exception):
                raise r
            out.append(r)
    return [statistics.mean(r for r, _ in out[i:i + streams]) * streams for i in range(0, len(out), streams)], [ids for _, ids in out]


def main():
    a = argparse.ArgumentParser()
    a.add_argument('--method', default='ngram')
    a.add_argument('--drafts', type=int, default=8)
    a.add_argument('--rounds', type=int, default=7)
    a.add_argument('--streams', type=int, default=1)
    a.add_argument('--tokens', type=int, default=240)
    a = a.parse_args()
    size = ['--max-model-len', '2048', '--num-gpu-blocks-override', '200', '--max-num-seqs', str(max(8, a.streams)), '--compute-threads', '0']
    config = ['--speculative-config', json.dumps(dict(method=a.method, num_speculative_tokens=a.drafts))]
    ok = True
    with closing(Node(smollm2(), 'mixed', size), Node(smollm2(), 'mixed', [*size, *config])) as (plain, drafting):
        wait_ready(plain, drafting)
        for kind, bar in BARS.items():
            bodies, got, before = prompts(kind, a.tokens), [], metrics(drafting.port)
            for i in range(a.rounds + 1):
                order = [plain, drafting] if i % 2 else [drafting, plain]
                r = {n: rates(n.port, bodies, a.streams) for n in order}
                assert r[plain][1] == r[drafting][1], f'{kind}: the answers differ'
                if i:
                    got.append((r[plain][0], r[drafting][0]))
            now = metrics(drafting.port)
            n, right = (now[f'baton_spec_decode_num_{k}_tokens_total'] - before[f'baton_spec_decode_num_{k}_tokens_total'] for k in ('draft', 'accepted'))
            each = [statistics.median(d[i] / p[i] for p, d in got) for i in range(len(bodies))]
            got = [(statistics.mean(p), statistics.mean(d)) for p, d in got]
            ratio = statistics.median(d / p for p, d in got)
            ok &= ratio >= bar or a.streams > 1
            print(f'{kind}: {statistics.median(d for _, d in got):.1f} tokens/s with {a.method}, {statistics.median(p for p, _ in got):.1f} without, '
                  f'{a.streams} stream{"s" * (a.streams > 1)}: {ratio:.3f} x (bar {bar}; each {", ".join(f"{e:.2f}" for e in each)}); {int(right)} of {int(n)} drafts accepted', flush=True)
    sys.exit(not ok)


if __name__ == '__main__':
    main()
