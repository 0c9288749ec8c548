"""traffic.py - the requests of a run: a pure function of its seed, with lengths as in published traces divided by 16.

tests/data/traces/lengths.json has the quantiles of the traces. A Plan is one request: what it asks, where first, and how its client behaves. Several plans may
have one body, whose answer is then the same: every body is greedy or has a seed. Names are unique."""
import dataclasses, json, os, random
from harness import DATA, TINY

SCALE, PROMPT_MAX, ANSWER_MAX = 16, 1200, 500
LONG_SHARE, LONG = 0.15, (150, ANSWER_MAX)      # answers that are long enough to be hit by several faults
TOOLS = [dict(type='function', function=dict(name='get_weather', parameters=dict(type='object', properties=dict(city=dict(type='string'))))),
         dict(type='function', function=dict(name='add', parameters=dict(type='object', properties=dict(a=dict(type='integer')))))]


@dataclasses.dataclass(frozen=True)
class Plan:
    i: int
    name: str
    body: int               # its number among the bodies
    streams: bool
    resumes: bool           # asks to resume, and comes back
    first: float            # 0..1: where among the members it asks first
    leaves: int | None      # after so many events its client leaves
    slow_s: float           # its client reads one event in so many seconds
    proxied: bool           # its client's connection goes through the proxy

    @property
    def hedge_ms(self):
        """After so long without a token it asks for a second attempt; 0: it does not."""
        return 1500 if self.i % 8 == 5 else 0


def vocabulary():
    with open(os.path.join(TINY, 'config.json')) as f:
        return json.load(f)['vocab_size']


def quantile(table, u):
    at = u * (len(table) - 1)
    i = min(int(at), len(table) - 2)
    return table[i] + (at - i) * (table[i + 1] - table[i])


class Lengths:
    def __init__(self):
        with open(os.path.join(DATA, 'traces', 'lengths.json')) as f:
            self.traces = [t for t in json.load(f).values() if isinstance(t, dict)]

    def draw(self, rng, longest=ANSWER_MAX):
        t = rng.choice(self.traces)
        prompt = quantile(t['prompt'], rng.random()) / SCALE
        answer = rng.uniform(*LONG) if rng.random() < LONG_SHARE else quantile(t['answer'], rng.random()) / SCALE
        return max(1, min(PROMPT_MAX, round(prompt))), max(1, min(longest, round(answer)))


def bodies(n, seed, longest=ANSWER_MAX, shared=True):
    """[(path, body)]: completions of token ids and chats with tools, greedy and seeded, one or two choices, with and without logprobs. Prompts share prefixes."""
    r, lengths, vocab, out = random.Random(f'bodies {seed}'), Lengths(), vocabulary(), []
    prefix = [r.randrange(4, vocab) for _ in range(PROMPT_MAX)]
    for i in range(n):
        n_prompt, n_answer = lengths.draw(r, longest)
        body = dict(model='m', max_tokens=n_answer, ignore_eos=True, return_token_ids=True)
        body.update(r.choice([dict(temperature=0), dict(temperature=0.8, seed=r.randrange(1 << 31)), dict(temperature=1, top_k=40, seed=r.randrange(1 << 31)),
                              dict(temperature=0.9, presence_penalty=0.4, seed=r.randrange(1 << 31))]))
        if r.random() < 0.25:
            body['n'] = 2
        if i % 3 == 0:
            words = ' '.join(f'{r.randrange(1000)}' for _ in range(n_prompt // 8))
            body.update(messages=[dict(role='user', content=f'Question {i}: {words}')])
            body.update(r.choice([{}, dict(tools=TOOLS), dict(tools=TOOLS, tool_choice='required'), dict(logprobs=True, top_logprobs=2)]))
            out.append(('/v1/chat/completions', body))
        else:
            n_shared = r.choice([0, 0, n_prompt // 2, n_prompt - 1]) if shared else 0
            body.update(prompt=prefix[:n_shared] + [r.randrange(4, vocab) for _ in range(n_prompt - n_shared)], **r.choice([{}, dict(logprobs=2), dict(logprobs=0)]))
            out.append(('/v1/completions', body))
    return out


def plans(n, n_bodies, seed, leaving=0.05, slow=0.03, resuming=0.5):
    r = random.Random(f'plans {seed}')
    out = []
    for i in range(n):
        streams, resumes = r.random() < 0.8, r.random() < resuming
        leaves = r.randint(1, 20) if streams and r.random() < leaving else None
        slow_s = r.choice([0.05, 0.2]) if streams and r.random() < slow else 0
        out.append(Plan(i, f'chaos-{seed}-{i}', r.randrange(n_bodies), streams, resumes, r.random(), leaves, slow_s, resumes and r.random() < 0.1))
    return out


class Answers:
    """What events or a whole answer say, per choice, in one form: two of the same body must be equal."""

    def __init__(self):
        self.choices, self.n_events = {}, 0

    def choice(self, index):
        return self.choices.setdefault(index, dict(ids=[], text='', reasoning='', tools=[], logprobs=[], finish=None))

    def add(self, body):
        """A whole answer, or one event of a stream."""
        self.n_events += 1
        for c in body['choices']:
            mine, part = self.choice(c['index']), c.get('message') or c.get('delta') or {}
            mine['ids'] += c.get('token_ids') or []
            mine['text'] += c.get('text') or part.get('content') or ''
            mine['reasoning'] += part.get('reasoning') or ''
            for t in part.get('tool_calls') or []:
                self.add_tool(mine['tools'], t)
            mine['logprobs'] += self.logprobs(c.get('logprobs'))
            mine['finish'] = c.get('finish_reason') or mine['finish']

    @staticmethod
    def add_tool(tools, t):
        i = t.get('index', len(tools))
        while len(tools) <= i:
            tools.append(['', ''])
        tools[i][0] += t['function'].get('name') or ''
        tools[i][1] += t['function'].get('arguments') or ''

    @staticmethod
    def logprobs(l):
        if not l:
            return []
        if 'content' in l:
            return [(x['token'], x['logprob'], tuple((y['token'], y['logprob']) for y in x['top_logprobs'])) for x in l['content'] or []]
        return [(t, p, tuple(sorted((top or {}).items()))) for t, p, top in zip(l['tokens'], l['token_logprobs'], l.get('top_logprobs') or [None] * len(l['tokens']))]

    def n_tokens(self):
        return sum(len(c['ids']) for c in self.choices.values())


def judge(got, want):
    """None: they are equal. Else 'lost', 'repeated' or 'wrong', and a sentence."""
    for i in sorted({*got.choices, *want.choices}):
        a, b = got.choices.get(i), want.choices.get(i)
        if a is None or b is None:
            return 'wrong', f'choice {i} is {"missing" if a is None else "too much"}'
        if a == b:
            continue
        at = next((k for k, (x, y) in enumerate(zip(a['ids'], b['ids'])) if x != y), min(len(a['ids']), len(b['ids'])))
        where = f'choice {i}: {len(a["ids"])} tokens for {len(b["ids"])}, the first that differs is {at}'
        if a['ids'] == b['ids']:
            what = next(k for k in b if a[k] != b[k])
            return 'wrong', f'choice {i}: the tokens are right, its {what} is not: {str(a[what])[:80]} for {str(b[what])[:80]}'
        if len(a['ids']) < len(b['ids']):
            return 'lost', where
        return ('repeated' if len(a['ids']) > len(b['ids']) else 'wrong'), where
    return None


def is_beginning(got, want):
    """Whether an answer that broke off is what its reference begins with."""
    return all(i in want.choices and c['ids'] == want.choices[i]['ids'][:len(c['ids'])] for i, c in got.choices.items())
