"""check_launches.py - the launches of a layer, as the emulated GPU writes them down without running them (BATON_SIMT_LAUNCHES), beside those that
tests/gpu/model_time.py expects: the same kernels, as often, and for products the same blocks. Holds how many a decode layer has.

usage: check_launches.py ROOT BENCH_GPU     exit status 0: they agree

Layers have their real widths; there is one of each kind, and a small vocabulary.
"""
import collections
import json
import os
import re
import subprocess
import sys
import tempfile

ROOT, BENCH = sys.argv[1:]
sys.path.insert(0, os.path.join(ROOT, "tests", "gpu"))
import model_launches
import model_shapes
import model_time

SMS, ROWS = 132, 2048
FEW = {"vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {"ERNIE-4.5-21B-A3B": {"num_hidden_layers": 2, "moe_layer_end_index": 1}, "Qwen3-30B-A3B": {"num_hidden_layers": 1},
          "DeepSeek-V2-Lite": {"num_hidden_layers": 2}, "Llama-3-8B": {"num_hidden_layers": 1}}
RUNS = [*((m, "bf16") for m in MODELS), ("Qwen3-30B-A3B", "wint4"), ("Qwen3-30B-A3B", "fp8"), ("ERNIE-4.5-21B-A3B", "wint4")]
STEPS = [(1, 1024), (8, 1024), (64, 1024)]
# launches of the last layer in a step of one sequence; a change that saves some lowers them here
MOST = {"ERNIE-4.5-21B-A3B": 8, "Qwen3-30B-A3B": 6, "DeepSeek-V2-Lite": 17, "Llama-3-8B": 5}
# a kernel of model_launches.py: what the emulator calls it
NAMES = [(r"^combine_(kernel<|one_)", "combine_gemm"), (r"^combine_(quads|octs|kernel)", "combine"), (r"^experts_kernel", "experts"), (r"^decode_(one_)?kernel", "decode"), (r"^skinny_fused", "skinny_fused"),
         (r"^skinny_kernel", "skinny"), (r"^tiles_kernel", "tiles"), (r"^sm90_f8", "sm90_f8"), (r"^sm90_", "sm90"), (r"^f32_", "f32"), (r"^logits_", "logits"),
         (r"^prepare_inputs", "prepare_inputs"), (r"^append_rows", "append"), (r"^attn_mla", "attend_mla"), (r"^attn_prefill", "attend_sm90"),
         (r"^attn_(mma|decode)", "attend_mma"), (r"^merge_segments", "merge"), (r"^norm_kernel", "norm"), (r"^rope_kernel", "rope"),
         (r"^copy_kernel", "copy_rows"), (r"^router_", "router"), (r"^route_one_block", "route_one_block"), (r"^route_kernel", "route"), (r"^sort_kernel", "sort"),
         (r"^scan_counts", "scan"), (r"^place_kernel", "place"), (r"^embed_kernel", "embed")]
COUNTED = {"combine_gemm", "decode", "skinny_fused", "skinny", "tiles", "sm90", "sm90_f8", "f32", "logits", "experts"}


def noted(folder, name, quantization, steps):
    """The launches of the first step of each number of rows: {rows: [(kernel, blocks)]}"""
    directory, path, log = model_shapes.MODELS[name], os.path.join(folder, "model"), os.path.join(folder, "launches")
    with open(os.path.join(ROOT, "tests", "data", "configs", directory, "config.json"), encoding="utf-8") as f:
        config = {**json.load(f), **FEW, **MODELS[name]}
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    command = [BENCH, "--tiny", "model", path, "--load-format", "dummy", "--quantization", {"bf16": "none", "fp8": "block_wise_fp8"}.get(quantization, quantization),
               "--rows", str(ROWS), "--decode", ",".join(f"{b}x{c}" for b, c in steps), "--prefill", str(ROWS)]
    env = {**os.environ, "BATON_SIMT_LAUNCHES": log, "BATON_SIMT_SMS": str(SMS), "BATON_SIMT_MEMORY": str(8 << 30), "BATON_CUBLASLT": "off"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} {quantization}: {done.stderr[-500:]}")
    out, now = {}, None
    with open(log, encoding="utf-8") as f:
        for x, y, z, _, _, kernel in (line.rstrip("\n").split(" ", 5) for line in f):
            known = next((mine for pattern, mine in NAMES if re.search(pattern, kernel)), kernel)
            if known == "embed":
                now = out.setdefault(int(x), []) if int(x) not in out else None
            if now is not None:
                now.append((known, int(x) * int(y) * int(z)))
    return out


def expected(g, m, step):
    """[(kernel, blocks)] without what follows the head."""
    out = []
    for n, part in [*model_launches.layers(g, step), (1, model_launches.ends(g, step))]:
        out += [(x.kernel, x.blocks) for x in part if x.kernel != "argmax" for _ in range(round(n * x.n))]
    return out


def compare(name, got, want):
    """Sentences about what differs."""
    got = [x for x in got if x[0] in {mine for _, mine in NAMES}]
    out = []
    kernels, wanted = collections.Counter(k for k, _ in got), collections.Counter(k for k, _ in want)
    for k in sorted(kernels.keys() | wanted.keys()):
        if kernels[k] != wanted[k]:
            out.append(f"{name}: {kernels[k]} launches of {k}, model_time.py expects {wanted[k]}")
        elif k in COUNTED:
            blocks, mine = sorted(b for x, b in got if x == k), sorted(b for x, b in want if x == k)
            if any(abs(a - b) > 0.02 * a for a, b in zip(blocks, mine)):
                out.append(f"{name}: {k} has {blocks} blocks, model_time.py expects {[round(b) for b in mine]}")
    return out


def main():
    bad, g = [], model_time.Gpu("h200")
    g.n_sms, g.has_library = SMS, False
    for name, quantization in RUNS:
        m = model_shapes.Model(name, quantization, {**FEW, **MODELS[name]})
        with tempfile.TemporaryDirectory() as folder:
            got = noted(folder, name, quantization, STEPS)
        for step in [model_launches.Step(m, b, c) for b, c in STEPS] + [model_launches.Step(m, 1, ROWS, True)]:
            bad += compare(f"{name} {quantization}, {step.name()}", got.get(step.rows, []), expected(g, m, step))
        one = model_launches.layers(g, model_launches.Step(m, 1, 1024))[-1][1]
        print(f"{name} {quantization}: {len(one)} launches of a layer in a step of one sequence")
        if len(one) > MOST[name]:
            bad.append(f"{name} {quantization}: {len(one)} launches of a layer, at most {MOST[name]} are allowed")
    print(*bad, sep="\n")
    return 1 if bad else 0


sys.exit(main())
