"""dummy_checkpoint.py - checkpoints with the heads and experts of the models that the documents name, of small widths and with dummy weights.

make(golden, to, **changed) writes one like a golden checkpoint (tests/data/goldens) whose config.json has other members: matrices follow the
numbers of heads and experts. Weights are random bf16 numbers of a fixed seed, norms are 1. Standard library only."""
import glob, json, os, random, re, struct

ERNIE_300B = dict(num_attention_heads=64, num_key_value_heads=8, moe_num_experts=64, moe_k=8)
ERNIE_21B = dict(num_attention_heads=20, num_key_value_heads=4, head_dim=128, moe_num_experts=64, moe_k=6)
DEEPSEEK_R1 = dict(num_attention_heads=128, num_key_value_heads=128, n_routed_experts=256, num_experts_per_tok=8, n_group=8, topk_group=4)

EXPERTS = 'moe_num_experts', 'n_routed_experts'
HEADS = {'q_proj': ('num_attention_heads', 0), 'k_proj': ('num_key_value_heads', 0), 'v_proj': ('num_key_value_heads', 0), 'q_b_proj': ('num_attention_heads', 0),
         'kv_b_proj': ('num_attention_heads', 0), 'o_proj': ('num_attention_heads', 1)}  # which dimension each of them cuts into heads
HIGH_BYTES = bytes((0xbc, 0x3c, 0xbd, 0x3d)[i & 3] for i in range(256))  # of bf16 numbers between 1/128 and 1/8 of either sign


def read_tensors(folder):
    """{name: (dtype, shape)} of all its files."""
    out = {}
    for path in sorted(glob.glob(os.path.join(folder, '*.safetensors'))):
        with open(path, 'rb') as f:
            head = json.loads(f.read(struct.unpack('<Q', f.read(8))[0]))
        out.update({k: (v['dtype'], v['shape']) for k, v in head.items() if k != '__metadata__'})
    return out


def resized(name, shape, was, now):
    """The shape of a tensor with the new numbers of heads and experts."""
    shape = list(shape)
    n_was, n_now = next((was[k], now[k]) for k in EXPERTS if k in was)
    part = name.split('.')[-2]
    if part in HEADS:
        key, dim = HEADS[part]
        width = shape[dim] // was[key]
        shape[dim] = now[key] * (now['head_dim'] if width == was.get('head_dim') else width)
    elif '.mlp.gate.' in name or 'e_score_correction_bias' in name:
        shape = [n_now if n == n_was else n for n in shape]
    return shape


def tensors_like(golden, was, now):
    n_was, n_now = next((was[k], now[k]) for k in EXPERTS if k in was)
    for name, (dtype, shape) in read_tensors(golden).items():
        expert = re.match(r'(.*\.experts\.)(\d+)(\..*)', name)
        names = [name] if not expert else [f'{expert[1]}{e}{expert[3]}' for e in range(n_now)] if expert[2] == '0' else []
        for each in names:
            yield each, dtype, resized(each, shape, was, now)


def bytes_of(name, dtype, n, seed):
    if name.endswith('norm.weight') or '_norm.' in name:
        return struct.pack('<H', 0x3f80) * n
    if dtype != 'BF16':
        return bytes(4 * n)
    noise = seed.randbytes(2 * n)
    out = bytearray(noise)
    out[1::2] = noise[1::2].translate(HIGH_BYTES)
    return bytes(out)


def make(golden, to, **changed):
    with open(os.path.join(golden, 'config.json'), encoding='utf-8') as f:
        was = json.load(f)
    now, seed, head, at = {**was, **changed}, random.Random(7), {}, 0
    tensors = list(tensors_like(golden, was, now))
    for name, dtype, shape in tensors:
        n = 1
        for d in shape:
            n *= d
        end = at + n * (2 if dtype == 'BF16' else 4)
        head[name] = dict(dtype=dtype, shape=shape, data_offsets=[at, end])
        at = end
    text = json.dumps(head).encode()
    text += b' ' * (-len(text) % 8)
    with open(os.path.join(to, 'model.safetensors'), 'wb') as f:
        f.write(struct.pack('<Q', len(text)) + text)
        for name, dtype, _ in tensors:
            begin, end = head[name]['data_offsets']
            f.write(bytes_of(name, dtype, (end - begin) // (2 if dtype == 'BF16' else 4), seed))
    with open(os.path.join(to, 'config.json'), 'w', encoding='utf-8') as f:
        json.dump(now, f)
    for name in 'tokenizer.json', 'tokenizer_config.json', 'generation_config.json':
        os.symlink(os.path.join(golden, name), os.path.join(to, name))
