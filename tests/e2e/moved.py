"""moved.py - what an answer of a prefill and a decode node must be: one node's tokens, and KV that moved as the layouts say."""
import json

from harness import answer_of, was_split

BF16, F32 = 2, 4


def kv_bytes_per_token(model, tp, element=BF16):
    """What all ranks of a node hold of one token: a KV head is on several where there are fewer of them, a latent on each."""
    c = json.load(open(f'{model}/config.json'))
    if 'kv_lora_rank' in c:
        return tp * c['num_hidden_layers'] * (c['kv_lora_rank'] + c['qk_rope_head_dim']) * element
    return max(tp, c['num_key_value_heads']) * c['num_hidden_layers'] * 2 * c['head_dim'] * element


def equal(want, got, what):
    assert json.loads(json.dumps(got)) == json.loads(json.dumps(want)), f'{what} is not the mixed node\'s:\n{got[0]}\n{want[0]}'


def check(want, prompts, answers, per_token, protocol, block=1, same=equal):
    """Every answer is the same as the mixed node's, came from two nodes over `protocol` unless the decode node has nearly all of the prompt, moved what
    the layout says, and computed no prompt position again on the decode side. Returns the KV bytes moved."""
    moved = n_split = 0
    for i, (w, b, a) in enumerate(zip(want, prompts, answers, strict=True)):
        if isinstance(a, Exception):
            raise a
        status, _, body = a
        assert status == 200, (i, status, body)
        same(w, answer_of(body), f'{protocol}: answer {i}')
        t = body['baton']
        assert t['recomputed_tokens'] == 0, t
        if not was_split(t):
            continue
        n_split += 1
        assert t['transport'] == protocol, t
        cached = t['decode_cached_tokens']
        assert cached % block == 0 and cached < len(b['prompt']), t
        assert t['kv_bytes'] == (len(b['prompt']) - cached) * per_token, (t, len(b['prompt']))
        moved += t['kv_bytes']
    assert n_split >= len(want) / 2, (n_split, len(want))
    return moved
