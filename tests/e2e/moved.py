"""moved.py - what an answer of a prefill and a decode node must be: one node's tokens, and KV that moved as the layouts say."""
import json

from harness import answer_of

BF16 = 2


def kv_bytes_per_token(model, tp):
    """What all ranks of a node hold of one token: a KV head is on several where there are fewer of them, a latent on each."""
    c = json.load(open(f'{model}/config.json'))
    if 'kv_lora_rank' in c:
        return tp * c['num_hidden_layers'] * (c['kv_lora_rank'] + c['qk_rope_head_dim']) * BF16
    return max(tp, c['num_key_value_heads']) * c['num_hidden_layers'] * 2 * c['head_dim'] * BF16


def check(want, prompts, answers, per_token, protocol, block=1):
    """Every answer equals the mixed node's, came from two nodes over `protocol`, moved what the layout says, and computed no prompt position
    again on the decode side. Returns the KV bytes moved."""
    moved = 0
    for i, (w, b, a) in enumerate(zip(want, prompts, answers, strict=True)):
        if isinstance(a, Exception):
            raise a
        status, _, body = a
        assert status == 200, (i, status, body)
        got = answer_of(body)
        assert json.loads(json.dumps(got)) == json.loads(json.dumps(w)), f'{protocol}: answer {i} is not the mixed node\'s:\n{got[0]}\n{w[0]}'
        t = body['baton']
        assert t['prefill_node'] != t['decode_node'] and t['recomputed_tokens'] == 0, t
        assert t['transport'] == protocol, t
        cached = t['decode_cached_tokens']
        assert cached % block == 0 and cached < len(b['prompt']), t
        assert t['kv_bytes'] == (len(b['prompt']) - cached) * per_token, (t, len(b['prompt']))
        moved += t['kv_bytes']
    return moved
