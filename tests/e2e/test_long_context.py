"""Contexts of 131072 tokens: a prompt that nearly fills one is computed in chunks, transferred and answered as on one node.

The checkpoints are the goldens with a configuration for long contexts: Llama 3's RoPE scaling by 8, YaRN by 32."""
from harness import *

CONTEXT = 131072
BYTES_PER_TOKEN = {'llama': 3 * 1 * 2 * 16 * 2, 'deepseek_v2_lite': 3 * (32 + 8) * 2} # layers x KV bytes of a token in one layer, in bf16
ROPE = {'llama': dict(factor=8.0, original_max_position_embeddings=CONTEXT // 8), 'deepseek_v2_lite': dict(factor=32.0, original_max_position_embeddings=CONTEXT // 32)}
VOCAB = 512


def stretched(name, folder):
    source, out = os.path.join(DATA, 'goldens', name, 'model'), os.path.join(folder, name)
    shutil.copytree(source, out)
    for file, edit in (('config.json', lambda c: (c.update(max_position_embeddings=CONTEXT), c['rope_scaling'].update(ROPE[name]))),
                       ('tokenizer_config.json', lambda c: c.update(model_max_length=CONTEXT))):
        with open(os.path.join(out, file), encoding='utf-8') as f:
            value = json.load(f)
        edit(value)
        with open(os.path.join(out, file), 'w', encoding='utf-8') as f:
            json.dump(value, f)
    return out


def peak_mib(node):
    with open(f'/proc/{node.p.pid}/status') as f:
        return next(int(l.split()[1]) for l in f if l.startswith('VmHWM')) >> 10


def timed(port, body, timeout):
    t0 = time.monotonic()
    status, _, answer = request(port, 'POST', '/v1/completions', {**body, 'return_trace': True}, timeout=timeout)
    assert status == 200, (status, answer)
    return answer, time.monotonic() - t0


def long_prompt(name, protocol, n, timeout):
    r = random.Random(n)
    body = dict(model='m', prompt=[r.randrange(4, VOCAB) for _ in range(n)], max_tokens=48, temperature=0.8, seed=5, logprobs=3, ignore_eos=True,
                return_token_ids=True, return_tokens_as_token_ids=True)
    again = {**body, 'prompt': body['prompt'] + [5, 6, 7]}
    size = ['--max-model-len', str(CONTEXT), '--num-gpu-blocks-override', str(2 * CONTEXT // 64), '--compute-threads', '2']
    with tempfile.TemporaryDirectory(prefix='baton-long-') as folder:
        model = stretched(name, folder)
        with closing(Node(model, 'mixed', size)) as mixed:
            wait_ready(mixed)
            want, alone_s = timed(mixed.port, body, timeout)
            want_again, cached_s = timed(mixed.port, again, timeout)
            alone_mib = peak_mib(mixed)
            status, _, refusal = request(mixed.port, 'POST', '/v1/completions', {**body, 'prompt': [5] * CONTEXT})
            assert status == 400 and str(CONTEXT) in refusal['error']['message'], refusal
        with pair(model, protocol, size) as (prefill, decode):
            got, split_s = timed(decode.port, body, timeout)
            t = got['baton']
            assert t['prefill_node'] != t['decode_node'] and t['transport'] == protocol and t['moves'] == 0 and t['recomputed_tokens'] == 0, t
            assert t['kv_bytes'] == n * BYTES_PER_TOKEN[name], t
            got_again, _ = timed(prefill.port, again, timeout)
            t_again = got_again['baton']  # the decode node has nearly all of it, and may compute the rest itself
            kept = t_again['cached_tokens' if t_again['prefill_node'] == t_again['decode_node'] else 'decode_cached_tokens']
            assert kept == n // 64 * 64, t_again
            mib = peak_mib(prefill), peak_mib(decode)
    assert answer_of(want) == answer_of(got), (want['choices'], got['choices'])
    assert answer_of(want_again) == answer_of(got_again), (want_again['choices'], got_again['choices'])
    print(f'  {name}, {n} tokens over {protocol}: alone {alone_s:.1f} s, once more {cached_s:.2f} s; split {split_s:.1f} s, KV busy {t["kv_busy_ms"]:.1f} ms, '
          f'{t["kv_tail_ms"]:.1f} ms after the last chunk; peak MiB: alone {alone_mib}, prefill {mib[0]}, decode {mib[1]}', flush=True)


def test_six_thousand_tokens():
    long_prompt('llama', 'ipc', 6_000, 120)
    long_prompt('deepseek_v2_lite', 'tcp', 6_000, 120)


def test_ten_thousand_tokens_long():
    long_prompt('llama', 'ipc', 10_000, 120)
    long_prompt('deepseek_v2_lite', 'tcp', 10_000, 120)


def test_the_whole_context_long():
    long_prompt('llama', 'ipc', 130_000, 3000)
    long_prompt('deepseek_v2_lite', 'tcp', 130_000, 3000)
