"""check_model_time.py - tests/gpu/model_time.py: its shapes give the known sizes of the models, its sums are those of its parts, what a GPU measured replaces
its constants, and the numbers that it mirrors are those of the kernels.

usage: check_model_time.py ROOT     exit status 0: all of it holds
"""
import json
import os
import re
import subprocess
import sys
import tempfile

ROOT = sys.argv[1]
sys.path.insert(0, os.path.join(ROOT, "tests", "gpu"))
import model_launches
import model_shapes
import model_time

PARAMETERS = {"ERNIE-4.5-21B-A3B": 21.83e9, "Qwen3-30B-A3B": 30.53e9, "DeepSeek-V2-Lite": 15.71e9, "Llama-3-8B": 8.03e9}  # as in test_dummy_weights
# where a number of model_launches.py stands in the kernels: (file, name there)
MIRRORED = {
    "SKINNY_ROWS": ("kernels/cuda/gemm/gemm_call.cuh", "GEMM_SKINNY_ROWS"),
    "SKINNY_SPAN": ("kernels/cuda/gemm/gemm_call.cuh", "GEMM_SKINNY_K_STEP"),
    "SKINNY_W_ROWS": ("kernels/cuda/gemm/gemm_skinny.cuh", "SKINNY_W_ROWS"),
    "SKINNY_BLOCKS_WANTED": ("kernels/cuda/gemm/gemm_skinny.cuh", "SKINNY_BLOCKS_WANTED"),
    "SPLIT_MAX": ("kernels/cuda/gemm/gemm_split_k.cuh", "SPLIT_K_MAX"),
    "CUBLASLT_ROWS": ("kernels/cuda/gemm/gemm_cublaslt.h", "GEMM_CUBLASLT_ROWS"),
    "SM90_ROWS": ("kernels/cuda/gemm/gemm_sm90.cu", "ROWS_AT_LEAST"),
    "SMS_USUAL": ("kernels/cuda/gemm/gemm_tiles.cu", "SMS_USUAL"),
    "SEGMENT": ("kernels/cuda/attention/attention.h", "CUDA_ATTN_SEGMENT"),
    "SEGMENT_LEAST": ("kernels/cuda/attention/attention.h", "CUDA_ATTN_SEGMENT_LEAST"),
    "SEGMENTS_MANY": ("kernels/cuda/attention/attention.h", "CUDA_ATTN_SEGMENTS_MANY"),
    "DECODE_X_MAX": ("kernels/cuda/gemm/gemm_decode.cu", "DECODE_X_MAX"),
    "RING_ROWS": ("kernels/cuda/gemm/gemm_ring.cuh", "RING_ROWS"),
    "RING_TILES_MAX": ("kernels/cuda/gemm/gemm_ring.cuh", "RING_TILES_MAX"),
    "STAGED_BLOCKS": ("kernels/cuda/gemm/gemm_f32_staged.cuh", "STAGED_BLOCKS_ENOUGH"),
    "STAGED_WIDE": ("kernels/cuda/gemm/gemm_f32_staged.cuh", "STAGED_BLOCKS_WIDE"),
    "LOGITS_LEAST_ROWS": ("kernels/cuda/moe/moe_logits.cu", "LOGITS_LEAST_ROWS"),
    "RMS_ROWS_MANY": ("kernels/cuda/rms_norm.cuh", "RMS_ROWS_MANY"),
    "LOGITS_ROWS": ("kernels/cuda/moe/moe_logits.cu", "LOGITS_ROWS"),
    "LOGITS_WIDE": ("kernels/cuda/moe/moe_logits.cu", "LOGITS_WIDE"),
    "EXPERT_ROWS": ("kernels/cuda/gemm/gemm_tiles.cu", "EXPERT_ROWS"),
    "EXPERT_COLUMNS": ("kernels/cuda/gemm/gemm_tiles.cu", "EXPERT_COLUMNS"),
    "EXPERT_ROWS_USUAL": ("kernels/cuda/gemm/gemm_tiles.cu", "EXPERT_ROWS_USUAL"),
    "EXPERT_TILES_MAX": ("kernels/cuda/gemm/gemm_tiles.cu", "EXPERT_TILES_MAX"),
    "SORT_ROWS": ("kernels/cuda/moe/moe_sort.cuh", "SORT_ROWS"),
    "ROUTER_ROWS": ("kernels/cuda/moe/moe_route_block.cuh", "ROUTE_BLOCK_ROWS"),
    "ROUTER_ROWS_MAX": ("kernels/cuda/moe/moe_router.cu", "ROUTER_ROWS_MAX"),
    "MOE_ROWS": ("shared/model/ffn_moe.c", "GPU_ROWS_MAX"),
    "RANGE_ROWS": ("shared/model/attention_mla.c", "ABSORBED_ROWS"),
}
n_bad = 0


def expect(holds, what):
    global n_bad
    if not holds:
        n_bad += 1
        print(what)


def near(a, b, part=1e-9):
    return abs(a - b) <= part * max(abs(a), abs(b), 1)


def parameters(m):
    """Of a model in bf16, whose routers are f32."""
    attention = sum(w.bytes for w in [*m.qkv, m.o]) + (m.n_heads * (m.k_up.bytes + m.v_up.bytes) if m.latent else 0)
    dense = m.gate_up.bytes + m.down.bytes
    sparse = m.n_experts * (m.expert_gate_up.bytes + m.expert_down.bytes) + m.router.bytes // 2 + sum(w.bytes for w in m.shared) if m.n_experts else 0
    tied = m.name.startswith("ERNIE")
    return (m.n_layers * attention + m.n_dense * dense + m.n_sparse * sparse + m.head.bytes * (1 if tied else 2)) / 2


def check_shapes():
    for name, want in PARAMETERS.items():
        got = parameters(model_shapes.Model(name))
        expect(near(got, want, 3e-4), f"{name} has {got / 1e9:.2f}e9 parameters, not {want / 1e9:.2f}e9")
    w4, bf16 = model_shapes.Model("Qwen3-30B-A3B", "wint4"), model_shapes.Model("Qwen3-30B-A3B")
    expect(near(w4.expert_down.bytes * 4, bf16.expert_down.bytes, 0.02), "wint4 experts do not take a quarter")
    expect(model_shapes.Model("ERNIE-4.5-21B-A3B", "wint4").layout == "w8", "ERNIE's wint4 is not of its experts alone")
    for rows in (1, 7, 300, 8192):
        groups = model_launches.Groups(rows, 64, 6)
        expect(near(sum(groups.p), 1, 1e-6) and near(groups.rows(), rows * 6, 1e-6), f"{rows} rows are not {rows * 6} choices of experts")


def check_steps():
    g = model_time.Gpu("h200")
    steps = list(model_time.predict(g))
    expect(len(steps) == 4 * 3 * (len(model_time.DECODE) + len(model_time.PREFILL)), f"there are {len(steps)} steps")
    for p in steps:
        most = 2 if "fp8, prefill" in p.name() else 1  # beside products in bf16
        expect(0 < p.share < most, f"{p.name()}: {p.share:.2f} of its limit")
        expect(near(p.us, sum(us for _, us in p.by_op().values())), f"{p.name()}: its ops do not add up to it")
        expect(all(x.us > 0 and 0 <= x.working <= x.blocks * 1.0001 for _, x in p.parts), f"{p.name()}: a kernel has no time, or more work than blocks")
    longer = {p.name(): p for p in steps}
    bf16, w4 = longer["Qwen3-30B-A3B bf16, decode of 1 at 1024"], longer["Qwen3-30B-A3B wint4, decode of 1 at 1024"]
    expect(near(bf16.must, 6.2e9, 0.01), f"a token of Qwen3-30B-A3B reads {bf16.must / 1e9:.2f} GB")
    expect(w4.us < bf16.us, "wint4 is slower than bf16")


def check_blocks():
    for p in model_time.steps_with_blocks(model_time.Gpu("h200")):
        for (kernel, what), (launched, working) in model_time.shapes_with_blocks(p).items():
            expect(working >= 0.9 * launched, f"{p.name()}: {kernel} of {what} has work for {working:.0f} of {launched:.0f} blocks")


def check_mirror():
    for mine, (path, name) in MIRRORED.items():
        with open(os.path.join(ROOT, path), encoding="utf-8") as f:
            found = re.search(rf"\b{name} = (\d+)", f.read())
        value = getattr(model_launches, mine)
        expect(found and int(found.group(1)) == value, f"{path}: {name} is {found and found.group(1)}, and model_launches.py has {value} as {mine}")


def check_measured():
    step, op = "Qwen3-30B-A3B bf16, decode of 1 at 1024", {"kind": "op", "calls": 48, "bytes": 1, "flops": 1, "of_limit": 1}
    figure = {"kind": "figure", "unit": ""}
    results = [{**figure, "name": "memory read by a kernel", "value": 4000.0}, {**figure, "name": f"{step}: the GPU's part of a step", "value": 3210.0},
               {**op, "of": step, "op": "matmul", "what": "4096 x 2048 + 512 x 2048 + 512 x 2048, bf16, 1 rows", "us": 500.0}]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as f:
        json.dump({"gpu": "name\nA GPU", "stages": [{"results": results}]}, f)
        f.flush()
        done = subprocess.run([sys.executable, "-B", os.path.join(ROOT, "tests", "gpu", "model_time.py"), "--measured", f.name, "--only", step, "--kernels",
                               "--blocks"], capture_output=True, text=True, timeout=60)
    expect(done.returncode == 0, f"model_time.py: {done.stderr[-500:]}")
    for wanted in (r"read +4e\+12 +measured on A GPU", r"bf16 +7\.85e\+14 +measured on an H200", r"3210 +0\.48", r"measured +500\.0 predicted +\d+"):
        expect(re.search(wanted, done.stdout), f"model_time.py does not print {wanted}")


for check in (check_shapes, check_steps, check_blocks, check_mirror, check_measured):
    check()
sys.exit(1 if n_bad else 0)
