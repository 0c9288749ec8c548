"""Two nodes give the answer of one, bit for bit, over every transport; the trace proves that the work was split."""
from harness import *

VOCAB = 512
BYTES_PER_TOKEN = 3 * 1 * 2 * 16 * 2          # tests/data/goldens/llama: layers x KV heads x (k, v) x head_dim x bf16
SMOL_BYTES_PER_TOKEN = 30 * 3 * 2 * 64 * 2


def run(ports, bodies, concurrency, seed=0):
    r = random.Random(seed)
    jobs = [lambda b=b, p=r.choice(ports): request(p, 'POST', '/v1/completions', {**b, 'return_trace': True}, timeout=600) for b in bodies]
    out = []
    for b, a in zip(bodies, parallel(jobs, concurrency)):
        if isinstance(a, Exception):
            raise a
        status, _, body = a
        assert status == 200, (status, body)
        out.append(body)
    return out


def check_equal(reference, answers, what):
    for i, (a, b) in enumerate(zip(reference, answers)):
        assert answer_of(a) == answer_of(b), f'{what}: answer {i} differs:\n{answer_of(a)[0]}\n{answer_of(b)[0]}'


def check_traces(bodies, answers, per_token, block=64):
    n_split = 0
    for b, a in zip(bodies, answers):
        t = a['baton']
        assert t['recomputed_tokens'] == 0, t
        if not was_split(t):
            continue
        n_split += 1
        cached = t['decode_cached_tokens']
        assert cached % block == 0 and cached < len(b['prompt']), t
        assert t['kv_bytes'] == (len(b['prompt']) - cached) * per_token, (t, len(b['prompt']))
        assert 0 <= t['kv_busy_ms'] <= t['kv_ms'] and t['kv_bytes_per_second'] > 0 and t['kv_link_bytes_per_second'] >= 0, t
    assert n_split >= len(answers) / 2, (n_split, len(answers))


def split_equals_mixed(model, n, longest, vocab, per_token, max_tokens, variants):
    bodies = mixed_requests(n, 1, vocab, longest, max_tokens)
    size = ['--max-model-len', '2048', '--max-num-seqs', '16', '--num-gpu-blocks-override', '256', '--max-queue-time', '600']
    with closing(Node(model, 'mixed', [*size, '--max-num-batched-tokens', '256'])) as mixed:
        wait_ready(mixed)
        reference = run([mixed.port], bodies, 1)
        check_equal(reference, run([mixed.port], bodies, 16), 'mixed, 16 at once')
    for protocol, step, cache, concurrency in variants:
        what = f'{protocol}, {step} tokens per step, prefix cache {cache}, {concurrency} at once'
        with pair(model, protocol, [*size, '--max-num-batched-tokens', str(step), f'--enable-prefix-caching={cache}']) as nodes:
            answers = run([x.port for x in nodes], bodies, concurrency)
            check_equal(reference, answers, what)
            check_traces(bodies, answers, per_token)
            for a in answers:
                assert a['baton']['transport'] == (protocol if was_split(a['baton']) else ''), a['baton']
            print(f'  equal: {what}', flush=True)


VARIANTS = [('ipc', 64, 'true', 16), ('ipc', 2048, 'false', 4), ('tcp', 64, 'false', 1), ('tcp', 2048, 'true', 16)]


def test_tiny():
    split_equals_mixed(TINY, 40, 1500, VOCAB, BYTES_PER_TOKEN, (1, 24), VARIANTS)


def test_smollm2():
    split_equals_mixed(smollm2(), 8, 300, 49152, SMOL_BYTES_PER_TOKEN, (1, 6), [('ipc', 64, 'true', 8), ('tcp', 2048, 'false', 3)])


def test_smollm2_long():
    split_equals_mixed(smollm2(), 200, 1500, 49152, SMOL_BYTES_PER_TOKEN, (1, 24),
                       [(p, s, c, n) for (p, s, c), n in zip([(p, s, c) for p in ('ipc', 'tcp') for s in (64, 2048) for c in ('true', 'false')], [1, 2, 4, 8, 16, 16, 8, 4])])
