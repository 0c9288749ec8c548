"""The four models of tests/data/configs as model_launches.py needs them: shapes, layouts and bytes of their matrices."""
import json, math, os

CONFIGS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'data', 'configs')
MODELS = {'ERNIE-4.5-21B-A3B': 'ernie-4.5-21b-a3b', 'Qwen3-30B-A3B': 'qwen3-30b-a3b', 'DeepSeek-V2-Lite': 'deepseek-v2-lite', 'Llama-3-8B': 'llama-3-8b'}
QUANTIZATIONS = ('bf16', 'wint4', 'fp8')
BITS = {'f32': 32, 'bf16': 16, 'w8': 8, 'w4': 4, 'f8': 8}
STEP, MATRIX_STEP, F8_BLOCK = 64, 256, 128  # gemm.h, gemm.cu


def up(n, step):
    return -(-n // step) * step


def blocks_for(n, per_block):
    return -(-int(n) // int(per_block))


class Matrix:
    """A weight of n_out x n_in, as kernels/cuda/gemm/gemm.cu lays it out."""

    def __init__(self, n_out, n_in, layout, paired=False):
        self.n_out, self.n_in, self.layout, self.paired = n_out, n_in, layout, paired
        self.n_in_padded = up(n_in, STEP)
        self.row_bytes = self.n_in_padded * BITS[layout] // 8
        scales = n_out if layout in ('w8', 'w4') else 0
        if layout == 'f8':
            rows = 2 * blocks_for(n_out // 2, F8_BLOCK) if paired else blocks_for(n_out, F8_BLOCK)
            scales = rows * blocks_for(n_in, F8_BLOCK)
        self.bytes = up(n_out * self.row_bytes, MATRIX_STEP) + up(4 * scales, MATRIX_STEP)

    def what(self):
        return f'{self.n_out} x {self.n_in}'

    def flops(self, rows):
        return 2.0 * self.n_out * self.n_in * rows


class Model:
    """config.json, with --quantization as the loader applies it: embedding and head stay bf16, routers become f32, MLA's kv_b stays bf16."""

    def __init__(self, name, quantization='bf16', changes=None):
        with open(os.path.join(CONFIGS, MODELS[name], 'config.json'), encoding='utf-8') as f:
            c = {**json.load(f), **(changes or {})}
        self.name, self.quantization = name, quantization
        experts_as = {'bf16': 'bf16', 'wint4': 'w4', 'fp8': 'f8'}[quantization]
        # ERNIE's wint4 is of the experts alone (wint4_experts_only)
        self.layout = 'w8' if quantization == 'wint4' and c['model_type'] == 'ernie4_5_moe' else experts_as
        self.hidden, self.n_layers, self.vocab = c['hidden_size'], c['num_hidden_layers'], c['vocab_size']
        self.n_heads, self.n_kv_heads = c['num_attention_heads'], c['num_key_value_heads']
        self.head_dim = c.get('head_dim') or self.hidden // self.n_heads
        self.latent = c.get('kv_lora_rank') or 0
        self.rope, self.nope, self.v_dim = c.get('qk_rope_head_dim', 0), c.get('qk_nope_head_dim', 0), c.get('v_head_dim', self.head_dim)
        self.n_experts = c.get('moe_num_experts') or c.get('num_experts') or c.get('n_routed_experts') or 0
        self.n_used = c.get('moe_k') or c.get('num_experts_per_tok') or 0
        n_dense = c.get('moe_layer_start_index', c.get('first_k_dense_replace', 0)) if self.n_experts else self.n_layers
        self.n_dense, self.n_sparse = n_dense, self.n_layers - n_dense
        self.set_matrices(c, experts_as)

    def set_matrices(self, c, experts_as):
        h, q, kv = self.hidden, self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        if self.latent:
            q = self.n_heads * (self.nope + self.rope)
            self.qkv = [Matrix(q, h, self.layout), Matrix(self.latent + self.rope, h, self.layout)]
            self.k_up, self.v_up = Matrix(self.latent, self.nope, 'bf16'), Matrix(self.v_dim, self.latent, 'bf16')
            self.o = Matrix(h, self.n_heads * self.v_dim, self.layout)
            self.kv_token_bytes = 2 * (self.latent + self.rope)
        else:
            self.qkv = [Matrix(q, h, self.layout), Matrix(kv, h, self.layout), Matrix(kv, h, self.layout)]
            self.o = Matrix(h, q, self.layout)
            self.kv_token_bytes = 2 * 2 * kv
        wide, each = c['intermediate_size'], c.get('moe_intermediate_size', 0)
        self.gate_up, self.down = Matrix(2 * wide, h, self.layout, True), Matrix(h, wide, self.layout)
        self.head = Matrix(self.vocab, h, 'bf16')
        if not self.n_experts:
            return
        self.router = Matrix(self.n_experts, h, 'f32')
        self.expert_gate_up, self.expert_down = Matrix(2 * each, h, experts_as, True), Matrix(h, each, experts_as)
        shared = each * (c.get('moe_num_shared_experts') or c.get('n_shared_experts') or 0)
        self.shared = [Matrix(2 * shared, h, self.layout, True), Matrix(h, shared, self.layout)] if shared else []


def experts_of_rows(n_experts, n_used, rows):
    """[probability that an expert has i rows] for rows that choose evenly and independently of each other."""
    p = n_used / n_experts
    if p >= 1:
        return [0.0] * rows + [1.0]
    return [math.exp(math.lgamma(rows + 1) - math.lgamma(i + 1) - math.lgamma(rows - i + 1) + i * math.log(p) + (rows - i) * math.log1p(-p))
            for i in range(rows + 1)]
