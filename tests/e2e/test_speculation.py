"""Speculative decoding changes how fast an answer comes, and nothing that a client sees of it: every drafter, on one node, split over every
transport, moved in the middle, preempted, with several choices, penalties, stop strings and logprobs."""
import test_same_answers as same
from harness import *

DRAFTED, ACCEPTED = 'baton_spec_decode_num_draft_tokens_total', 'baton_spec_decode_num_accepted_tokens_total'
CONFIG = '--speculative-config'


def config(method, n=8, **more):
    return [CONFIG, json.dumps(dict(method=method, num_speculative_tokens=n, **more))]


def drafted(ports):
    """Drafts verified, and accepted, on all nodes that were not restarted meanwhile."""
    counts = [metrics(p) for p in ports]
    return sum(c[DRAFTED] for c in counts), sum(c[ACCEPTED] for c in counts)


def check_drafted(name, ports, accepted=True):
    n, right = drafted(ports)
    print(f'  {name}: {int(n)} drafts, {int(right)} accepted', flush=True)
    assert n > 0 and (right > 0 or not accepted), name


# ---- tiny models: split, moved, preempted ----

def test_drafts_from_the_request():
    """ngram and suffix. Tiny models repeat themselves in long answers."""
    cases = [('llama', 'ngram', 8), ('qwen3_moe', 'suffix', 3), ('deepseek_v3', 'ngram', 5), ('ernie', 'suffix', 8)]

    def one(case, i):
        name, method, n = case
        same.story(name, 400 + i, 'tcp' if i % 2 else 'ipc', theirs=config(method, n), lengths=same.LENGTHS[2:],
                   then=lambda nodes: check_drafted(f'{name} {method}', nodes.ports()))
    same.of_all(cases, one)


def layer_story(case, i):
    """Right drafts of random weights are rare."""
    name, protocol, n = case
    same.story(name, 450 + i, protocol, theirs=config('mtp', n), then=lambda nodes: check_drafted(f'{name} mtp over {protocol}', nodes.ports(), False))


def test_the_draft_layer_over_every_transport():
    """Its KV travels with that of the model's layers. (tests/vm has the transports that need an RDMA device.)"""
    same.of_all([(name, p, 1 + i) for i, p in enumerate(('ipc', 'tcp')) for name in ('deepseek_v3', 'ernie_moe')], layer_story)


def test_one_side_without_the_draft_layer():
    """Then nothing of it travels; the other side drafts what it computes itself, and the decode side says that it lacks it."""
    def one(case, i):
        name, theirs = case
        with same.nodes_of(name, ('prefill', 'decode'), 'tcp', theirs=theirs) as nodes:
            bodies = same.bodies_of(480 + i, same.LENGTHS, (20, 90))
            want = same.ask([nodes.alone.port], bodies, 4, cold=True)
            for least in (0.5, 0):  # the second time the decode node has nearly all of each prompt
                got = same.ask(nodes.ports(), bodies, 4)
                same.check(want, got, f'{name}: {theirs}')
                same.check_split(got, least)
            lacks = 'no drafts for sequences of a peer' in nodes.rest[0].output()
            assert lacks == bool(theirs[1]), nodes.rest[0].output()[-2000:]
    layer = config('mtp', 2)
    same.of_all([(n, t) for n in ('deepseek_v3', 'ernie_moe') for t in ([layer, []], [[], layer])], one)


def test_preempted_with_drafts():
    cases = [('llama', config('ngram')), ('deepseek_v3', config('mtp', 3)), ('ernie_moe', config('suffix'))]
    same.of_all(cases, lambda c, i: same.crowded(c[0], 500 + i, theirs=c[1]))


# ---- a real model ----

TEXT = """def area(width, height):
    if width < 0 or height < 0:
        raise ValueError('negative')
    return width * height


def volume(width, height, depth):
    return area(width, height) * depth
"""


def bodies():
    """What an answer can have: several choices, penalties, stop strings and ids, logprobs, limits, sampled and greedy."""
    edit = dict(model='m', messages=[dict(role='user', content=f'Repeat this code, with the name "area" replaced by "surface":\n{TEXT}')], max_tokens=64)
    plain = dict(model='m', prompt='The cat sat on the mat. The cat sat on the mat. The cat sat on', max_tokens=48, logprobs=3)
    more = [dict(temperature=0), dict(temperature=0, frequency_penalty=0.5, presence_penalty=0.2), dict(temperature=0.7, seed=3, n=3),
            dict(temperature=0.9, top_p=0.9, seed=4, repetition_penalty=1.1), dict(temperature=0, stop=['return', 'The cat']),
            dict(temperature=0.3, seed=5, min_tokens=40, stop_token_ids=[30]), dict(temperature=0, logit_bias={'260': -5, '28': 3})]
    chats = [('/v1/chat/completions', {**edit, **m, 'logprobs': True, 'top_logprobs': 3}) for m in more]
    return chats + [('/v1/completions', {**plain, **m, 'return_token_ids': True}) for m in more]


def seen(answer):
    """All of an answer but what differs between two of the same: its name and time, and what the prefix cache had of its prompt."""
    status, _, body = answer
    assert status == 200, answer
    usage = {k: v for k, v in body['usage'].items() if k != 'prompt_tokens_details'}
    return {**{k: v for k, v in body.items() if k not in ('id', 'created', 'baton')}, 'usage': usage}


def answers(port, concurrency):
    asked = [lambda p=p, b=b: seen(request(port, 'POST', p, b, timeout=300)) for p, b in bodies()]
    out = parallel(asked, concurrency)
    for a in out:
        if isinstance(a, Exception):
            raise a
    return out


def test_a_real_model_with_every_drafter():
    """18 sequences at once, and one answer at a time; the draft model is the model itself, which drafts what it will choose."""
    gguf = smollm2()
    size = ['--max-model-len', '1024', '--max-num-seqs', '16']
    drafters = [config('ngram'), config('suffix', 5, adaptive=False), config('draft', 2, model=gguf, adaptive=False)]
    with closing(*[Node(gguf, 'mixed', [*size, *d]) for d in [[], *drafters]]) as (alone, *rest):
        wait_ready(alone, *rest)
        want = answers(alone.port, 4)
        for i, (node, d) in enumerate(zip(rest, drafters)):
            for concurrency in (1, len(want))[i > 0:]:
                for (path, body), w, got in zip(bodies(), want, answers(node.port, concurrency)):
                    assert got == w, f'{d} {concurrency} {path} {body}:\n{got}\n{w}'
            check_drafted(d[1], [node.port])
        draft = metrics(rest[-1].port)
        assert draft[ACCEPTED] > 0.3 * draft[DRAFTED], draft     # what is sampled or penalised is often another token


def test_what_is_told():
    """The trace of a request, and /metrics under vLLM's names."""
    gguf = smollm2()
    with closing(Node(gguf, 'mixed', ['--max-model-len', '1024', *config('ngram')])) as node:
        wait_ready(node)
        _, body = bodies()[0]
        t = request(node.port, 'POST', '/v1/chat/completions', {**body, 'max_tokens': 200, 'return_trace': True})[2]['baton']
        assert 0 < t['accepted_tokens'] <= t['drafted_tokens'] and t['accepted_length'] > 1, t
        m = metrics(node.port)
        assert m[DRAFTED] == t['drafted_tokens'] and m[ACCEPTED] == t['accepted_tokens'], (m, t)
        assert abs(m['baton_spec_decode_mean_accepted_length'] - t['accepted_length']) < 1e-3, (m, t)
        assert m['baton_spec_decode_num_accepted_tokens_per_pos_total{position="0"}'] <= m['baton_spec_decode_num_drafts_total'], m


def test_configurations_that_cannot_be():
    gguf, tiny = smollm2(), os.path.join(same.GOLDENS, 'llama', 'model')
    cases = [(['{'], 'speculative-config'), (['[]'], 'not a JSON object'), (['{"method": "eagle"}'], 'trained'), (['{"method": "x"}'], 'ngram'),
             (['{"num_speculative_tokens": 2}'], 'method is missing'), (['{"method": "ngram", "num_speculative_tokens": 9}'], 'num_speculative_tokens'),
             (['{"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}'], 'prompt_lookup_min'),
             (['{"method": "ngram", "prompt_lookup": 4}'], 'prompt_lookup_max'), (['{"method": "mtp"}'], 'has no draft layer'),
             (['{"method": "draft"}'], 'model'), ([json.dumps(dict(method='draft', model=tiny))], 'vocabulary'),
             (['{"method": "draft", "model": "/nowhere"}'], '/nowhere'), (['{"method": "ngram"}', '--speculative-algorithm', 'NGRAM'], 'give one')]
    for args, want in cases:
        r = subprocess.run([BIN, 'serve', '--model', gguf, '--port', '0', CONFIG, *args], capture_output=True, text=True, timeout=60)
        assert r.returncode != 0 and want in r.stderr, (args, r.stderr)
