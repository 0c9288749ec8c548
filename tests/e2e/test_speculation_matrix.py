"""Every drafter on every kind of model that it can draft for: 1 to 8 drafts, 1 to 16 answers at once, greedy, sampled, penalised, stopped, biased and
with three choices, on one node, split over each transport of one host, moved and preempted. All that a client sees is what a node without drafts says.
(tests/vm has the transports that need an RDMA device.)"""
import test_same_answers as same
import test_speculation as spec
from harness import *

MODELS = ('deepseek_v3', 'ernie_moe', 'smollm2')
KINDS = (dict(temperature=0), dict(temperature=0, frequency_penalty=0.5, presence_penalty=0.2), dict(temperature=0.8, seed=3, n=3),
         dict(temperature=0.9, top_p=0.9, seed=4, repetition_penalty=1.1), dict(temperature=0, stop=['e', 'th'], min_tokens=5),
         dict(temperature=1.2, top_k=40, seed=5, min_tokens=20, stop_token_ids=[30, 31]), dict(temperature=0, logit_bias={'26': -5, '28': 3}, n=3),
         dict(temperature=0.3, seed=6, frequency_penalty=-0.4, ignore_eos=True))
AT_ONCE = (1, 2, 4, 8, 16)


def methods_of(name):
    return ('ngram', 'suffix', 'draft') if name == 'smollm2' else ('ngram', 'suffix', 'mtp', 'draft')


def options(name, method, n):
    """All drafts are verified, whether it pays or not. The model drafts for itself where a model is needed: then most drafts are right."""
    return spec.config(method, n, adaptive=False, **(dict(model=same.model_of(name)) if method == 'draft' else {}))


def bodies_of(seed, n_tokens):
    """16 requests, two of each kind, whose prompts repeat themselves from a short one to several blocks."""
    r, out = random.Random(seed), []
    for i in range(2 * len(KINDS)):
        phrase = [r.randrange(4, same.VOCAB) for _ in range(r.randrange(3, 20))]
        prompt = (phrase * 40)[:r.randrange(2, 200)]
        out.append(dict(model='m', prompt=prompt, max_tokens=n_tokens, logprobs=2, return_token_ids=True, cache_salt=f'{seed} {i}', **KINDS[i % len(KINDS)]))
    return out


def answers(ports, bodies, at_once):
    asked = [lambda i=i, b=b: spec.seen(request(ports[i % len(ports)], 'POST', '/v1/completions', b, timeout=300)) for i, b in enumerate(bodies)]
    out = parallel(asked, at_once)
    for a in out:
        if isinstance(a, Exception):
            raise a
    return out


def compare(want, got, bodies, what):
    for w, g, b in zip(want, got, bodies):
        assert w == g, f'{what}: {b}:\n{g}\n{w}'


def on_one_node(name, method, drafts, at_once, n_tokens=40):
    """A node for each number of drafts; `at_once`, of a number of drafts, says how many answers run together."""
    bodies = bodies_of(700, n_tokens)
    with closing(Node(same.model_of(name), 'mixed', same.SIZE)) as alone:
        wait_ready(alone)
        want = answers([alone.port], bodies, 1)
    for n in drafts:
        with closing(Node(same.model_of(name), 'mixed', [*same.SIZE, *options(name, method, n)])) as node:
            wait_ready(node)
            for k in at_once(n):
                compare(want, answers([node.port], bodies, k), bodies, f'{name} {method}, {n} drafts, {k} at once')
            spec.check_drafted(f'{name} {method}, {n} drafts', [node.port], method != 'mtp')


def on_two_nodes(name, method, n, protocol, n_tokens=40):
    bodies = bodies_of(800, n_tokens)
    with same.nodes_of(name, ('prefill', 'decode'), protocol, theirs=options(name, method, n)) as nodes:
        want = answers([nodes.alone.port], bodies, 1)
        for k in (1, 16):
            compare(want, answers(nodes.ports(), bodies, k), bodies, f'{name} {method}, {n} drafts over {protocol}, {k} at once')
        spec.check_drafted(f'{name} {method}, {n} drafts over {protocol}', [nodes.rest[0].port], method != 'mtp')


def moved_and_preempted(name, method, n, protocol, seed):
    theirs = options(name, method, n)
    same.story(name, seed, protocol, theirs=theirs, lengths=same.LENGTHS[2:6],
               then=lambda nodes: spec.check_drafted(f'{name} {method} over {protocol}, moved', nodes.ports(), method != 'mtp'))
    same.crowded(name, seed + 50, theirs=theirs)


def whole(name, concurrency):
    methods = methods_of(name)
    some = (lambda n: AT_ONCE) if concurrency > 1 else (lambda n: (AT_ONCE[n % 4], 16))
    same.of_all(methods, lambda m, i: on_one_node(name, m, range(1, 9), some), concurrency)
    cases = [(m, 1 + (3 * i + 4 * k) % 8, p) for i, m in enumerate(methods) for k, p in enumerate(('ipc', 'tcp'))]
    same.of_all(cases, lambda c, i: on_two_nodes(name, *c), concurrency)
    same.of_all(cases, lambda c, i: moved_and_preempted(name, *c, 6000 + 1000 * i), concurrency)


def test_a_slice():
    """Of each method one number of drafts."""
    cases = [(name, m) for name in MODELS[:2] for m in methods_of(name)]
    same.of_all(cases, lambda c, i: on_one_node(*c, [1 + i], lambda n: (1, 16), 24), 4)


def test_deepseek_v3_whole_long():
    whole('deepseek_v3', 4)


def test_ernie_moe_whole_long():
    whole('ernie_moe', 4)


def test_smollm2_whole_long():
    whole('smollm2', 1)
