#!/usr/bin/env python3
"""quant_variants.py - other ways than --quantization block_wise_fp8 to quantise a dense bf16 llama folder to e4m3. Needs numpy.

usage: quant_variants.py VARIANT FROM TO [--batch ANSWERS.jsonl] [--only RE]

Copies FROM to TO, still in bf16, with the linear layers (those that RE matches) replaced by the values of their quantised weights; perplexity.py compares
the folders. Every variant stores e4m3 with one f32 scale per block of 128×128. VARIANT:
  scale=T     scales of 2^T times the definition's: a grid as good, another rounding of every weight (0 is the definition)
  power       scales that are powers of two (ue8m0), the smallest that do not saturate
  least       of 20 scales per block the one with the least sum of squared errors
  bias        the definition, and biases that restore the mean that rounding takes from each output
  feed        the definition's scales; each column's rounding error is carried over to the columns not rounded yet, weighted by the inputs' correlation (GPTQ)
  off-grid    no quantisation: noise of up to half a step of a 16-level grid per 32 weights, for folders that came from such a grid
bias and feed need inputs: --batch has answers of `baton generate` with return_token_ids, whose prompts are run through the model in float32.
"""
import argparse
import json
import os
import re
import sys

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures"))
import safetensors_file
from float_bits import to_bf16
from quant_reference import BLOCK, LINEAR, copy_other_files, values

F = np.float32
INPUT = {"q_proj": "attention", "k_proj": "attention", "v_proj": "attention", "o_proj": "o", "gate_proj": "ffn", "up_proj": "ffn", "down_proj": "down"}


def e4m3(x):
    """x rounded to e4m3, as float32: three bits of mantissa from 2^-6 on, steps of 2^-9 below."""
    bits = np.ascontiguousarray(x, F).view(np.uint32)
    kept = ((bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1))) & np.uint32(0xFFF00000)).view(F)
    return np.clip(np.where(np.abs(x) < 2.0 ** -6, np.rint(x * F(512)) / F(512), kept), -448, 448)


# Scales of a block.


def plain_scale(w):
    return max(np.abs(w).max(), F(1e-4)) / F(448)


def power_scale(w):
    return F(2.0 ** np.ceil(np.log2(plain_scale(w))))


def least_scale(w):
    scales = [F(plain_scale(w) * t) for t in [2 ** (i / 16) for i in range(16)] + [0.98, 0.95, 0.9, 0.85]]
    return min(scales, key=lambda s: float(((e4m3(w / s) * s - w) ** 2).sum()))


def scales_of(w, scale):
    """One per weight."""
    out = np.empty_like(w)
    for r in range(0, w.shape[0], BLOCK):
        for c in range(0, w.shape[1], BLOCK):
            out[r:r + BLOCK, c:c + BLOCK] = scale(w[r:r + BLOCK, c:c + BLOCK])
    return out


def nearest(w, scale):
    s = scales_of(w, scale)
    return e4m3(w / s) * s


def fed_forward(w, moments):
    """Rounds the columns in order, each to nearest; U is the upper Cholesky factor of the inverse of the inputs' second moments."""
    n, s, step = w.shape[1], scales_of(w, plain_scale), 64
    h = moments.astype(np.float64)
    h[np.diag_indices(n)] += 0.01 * np.trace(h) / n
    u = np.linalg.cholesky(np.linalg.inv(h)).T.astype(F)
    w, out = w.copy(), np.empty_like(w)
    for begin in range(0, n, step):
        end = min(n, begin + step)
        error = np.empty((len(w), end - begin), F)
        for j in range(begin, end):
            out[:, j] = e4m3(w[:, j] / s[:, j]) * s[:, j]
            error[:, j - begin] = (w[:, j] - out[:, j]) / u[j, j]
            w[:, j + 1:end] -= error[:, j - begin, None] * u[j, j + 1:end]
        w[:, end:] -= error @ u[begin:end, end:]
    return out


def off_grid(w, rng):
    g = w.reshape(len(w), -1, 32)
    return (g + (rng.random(g.shape, F) - F(0.5)) * (np.ptp(g, 2, keepdims=True) / F(15))).reshape(w.shape)


# The inputs of linear layers.


def rms_norm(x, w, eps):
    return x / np.sqrt((x * x).mean(1, keepdims=True) + F(eps)) * w


def attention(q, k, v, d):
    out, share = np.empty_like(q), q.shape[1] // k.shape[1]
    later = np.triu(np.full((len(q), len(q)), -np.inf, F), 1)
    for i in range(q.shape[1]):
        z = q[:, i] @ k[:, i // share].T * F(d ** -0.5) + later
        p = np.exp(z - z.max(1, keepdims=True))
        out[:, i] = p / p.sum(1, keepdims=True) @ v[:, i // share]
    return out.reshape(len(q), -1)


def layer(x, lengths, c, tensor, see):
    """One layer over prompts laid end to end; see(kind, inputs)."""
    d, cut = c["head_dim"], np.cumsum(lengths)[:-1]
    angle = np.concatenate([np.arange(n) for n in lengths])[:, None] * float(c["rope_theta"]) ** (-np.arange(d // 2) * 2.0 / d)
    cos, sin = np.cos(angle).astype(F)[:, None], np.sin(angle).astype(F)[:, None]

    def turned(y):
        a, b = y[..., :d // 2], y[..., d // 2:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
    h = rms_norm(x, tensor("input_layernorm"), c["rms_norm_eps"])
    see("attention", h)
    q, k, v = ((h @ tensor(f"self_attn.{name}_proj").T).reshape(len(h), -1, d) for name in "qkv")
    o = np.concatenate([attention(*parts, d) for parts in zip(*(np.split(y, cut) for y in (turned(q), turned(k), v)))])
    see("o", o)
    x = x + o @ tensor("self_attn.o_proj").T
    h = rms_norm(x, tensor("post_attention_layernorm"), c["rms_norm_eps"])
    see("ffn", h)
    gate = h @ tensor("mlp.gate_proj").T
    act = gate / (1 + np.exp(-gate)) * (h @ tensor("mlp.up_proj").T)
    see("down", act)
    return x + act @ tensor("mlp.down_proj").T


def inputs_of(folder, tensors, batch):
    """{(layer, kind): (mean, second moments)}"""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        c = json.load(f)
    with open(batch, encoding="utf-8") as f:
        bodies = [json.loads(line)["response"]["body"] for line in f]
    prompts = [b["choices"][0].get("prompt_token_ids") or b["prompt_token_ids"] for b in bodies]
    x, found = values(tensors["model.embed_tokens.weight"])[np.concatenate(prompts)], {}
    for i in range(c["num_hidden_layers"]):
        def see(kind, y):
            found[i, kind] = y.mean(0), y.T @ y / F(len(y))
        x = layer(x, [len(p) for p in prompts], c, lambda name: values(tensors[f"model.layers.{i}.{name}.weight"]), see)
    return found


def main():
    a = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1])
    a.add_argument("variant")
    a.add_argument("source")
    a.add_argument("target")
    a.add_argument("--batch")
    a.add_argument("--only", default="")
    a = a.parse_args()
    tensors, _ = safetensors_file.read_folder(a.source)
    seen = inputs_of(a.source, tensors, a.batch) if a.variant in ("bias", "feed") else None
    rng, out, noise = np.random.default_rng(7), dict(tensors), [0.0, 0.0]
    scale = {"power": power_scale, "least": least_scale}.get(a.variant, plain_scale)
    if a.variant.startswith("scale="):
        scale = lambda w: F(plain_scale(w) * 2 ** float(a.variant[6:]))
    elif a.variant not in ("power", "least", "bias", "feed", "off-grid"):
        raise SystemExit(f"quant_variants: there is no variant {a.variant}")
    for name, t in tensors.items():
        if not LINEAR.search(name) or not re.search(a.only, name):
            continue
        w, parts = values(t), name.split(".")
        mean, moments = seen[int(parts[2]), INPUT[parts[-2]]] if seen else (None, None)
        q = off_grid(w, rng) if a.variant == "off-grid" else fed_forward(w, moments) if a.variant == "feed" else nearest(w, scale)
        noise = [noise[0] + float(((q - w) ** 2).sum()), noise[1] + float((w ** 2).sum())]
        out[name] = safetensors_file.Tensor("BF16", t.shape, to_bf16(q).tobytes)
        if a.variant == "bias":
            out[name.replace("weight", "bias")] = safetensors_file.Tensor("F32", (len(w),), ((w - q) @ mean).astype(F).tobytes)
    copy_other_files(a.source, a.target)
    safetensors_file.write_file(os.path.join(a.target, "model.safetensors"), out)
    if a.variant == "bias":
        path = os.path.join(a.target, "config.json")
        with open(path, encoding="utf-8") as f:
            config = json.load(f)
        with open(path, "w", encoding="utf-8") as f:
            json.dump(config | {"attention_bias": True, "mlp_bias": True}, f, indent=1)
    print(f"{a.variant}: the weights' error is {100 * (noise[0] / noise[1]) ** 0.5:.2f} % of their size")


if __name__ == "__main__":
    main()
