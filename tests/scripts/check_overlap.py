"""check_overlap.py - steps of small models on the emulated GPU, where launches overlap the one before (BATON_SIMT_OVERLAP): no kernel depends on what the one
before writes until it has waited for it, and none writes.

usage: check_overlap.py ROOT BENCH_GPU     exit status 0: every step of every model ran, with the kernels that real shapes take

The configurations are those of tests/data/configs, made small: widths stay multiples of 128, as decode kernels and wgmma want them.
"""
import json
import os
import re
import subprocess
import sys
import tempfile

ROOT, BENCH = sys.argv[1:]
SMALL = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 640, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "qwen3-30b-a3b": {"num_attention_heads": 8, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "ernie-4.5-21b-a3b": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 128, "moe_num_shared_experts": 1, "moe_layer_end_index": 1},
    "deepseek-v2-lite": {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1},
    "llama-3-8b": {},
}
RUNS = [*((m, "none") for m in MODELS), ("qwen3-30b-a3b", "wint4"), ("qwen3-30b-a3b", "block_wise_fp8")]
# which must have overlapped: of decode steps and of prompts
KERNELS = r"decode_kernel", r"combine_kernel<", r"attn_mma_kernel", r"attn_prefill_sm90_kernel", r"attn_mla_kernel", r"append_rows", r"router_", r"norm_kernel"


def run(folder, model, quantization):
    """What the emulator said."""
    with open(os.path.join(ROOT, "tests", "data", "configs", model, "config.json"), encoding="utf-8") as f:
        config = {**json.load(f), **SMALL, **MODELS[model]}
    path = os.path.join(folder, model)
    os.makedirs(path, exist_ok=True)
    with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    command = [BENCH, "--tiny", "model", path, "--load-format", "dummy", "--label", model, "--quantization", quantization, "--decode", "1x300,3x40",
               "--prefill", "150"]
    done = subprocess.run(command, env={**os.environ, "BATON_SIMT_OVERLAP": "count"}, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("simt: ")]
    wrong = [line for line in said if "griddepcontrol" in line]
    if done.returncode or wrong or not said:
        print(f"{model} {quantization}: exit status {done.returncode}, {len(wrong)} accesses too early", *wrong[:5], done.stderr[-300:], sep="\n")
        return None
    return "\n".join(said)


def main():
    with tempfile.TemporaryDirectory() as folder:
        said = [run(folder, *which) for which in RUNS]
    missing = [k for k in KERNELS if not re.search(k, "\n".join(s or "" for s in said))]
    if missing:
        print("did not overlap another kernel:", *missing)
    return 1 if None in said or missing else 0


sys.exit(main())
