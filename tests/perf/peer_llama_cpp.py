#!/usr/bin/env python3
"""peer_llama_cpp.py - Baton and llama.cpp in turns on the same files. usage: see peer_llama_cpp.sh, which prepares the inputs. Standard library only.

Both programs start once per file and then run the same steps (bench_engine.c, llama_cpp_steps.py): forward passes without sampling and without a server.
In every round the programs take turns, in changing order, so that disturbances of the machine affect both. Medians over the rounds are printed; the ratio
is the median of the rounds' ratios. One round before the first warms up.

Limits: memory bandwidth, which bench_engine measures between the steps of every round, and the peak rate of the instruction that multiplies the file's
matrices, from bench_kernels; integer inputs have two int8 terms, so half of it. A decode step reads every matrix once as stored in the file (the tied
embedding as the head; of n experts those that a step of random choices would touch) and, where it says so, each stream's KV in bf16."""
import argparse
import math
import os
import re
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "fixtures"))
from gguf_file import read_gguf  # noqa: E402

CONTEXT, STREAMS = 512, 8
DIGITS = 2  # of an input, kernels/cpu/matmul/act_quant.h


class Peer:
    def __init__(self, name, argv):
        self.name = name
        self.p = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ready = self.p.stdout.readline().split()
        self.failed = not ready or ready[0] != "ready"
        self.backend, self.load_ms = (None, None) if self.failed else (ready[2], int(ready[3]) / 1e6)

    def rate(self, question):
        """Tokens per second."""
        self.p.stdin.write(question + "\n")
        self.p.stdin.flush()
        line = self.p.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended at: {question}")
        tokens, ns = line.split()
        return int(tokens) / int(ns) * 1e9

    def close(self):
        self.p.stdin.close()
        self.p.wait()


def peaks(a):
    """{instruction: Gop/s} from the line that bench_kernels prints first."""
    p = subprocess.Popen(["stdbuf", "-oL", os.path.join(a.baton, "bench_kernels"), a.isa, str(a.threads)], stdout=subprocess.PIPE, text=True)
    line = p.stdout.readline()
    p.terminate()
    p.wait()
    print(line.strip())
    fma, i8, bf16 = re.search(r"limits: (\d+) Gop/s fused multiply-add, (\d+) \S+, (\d+) ", line).groups()
    return {"f32": int(fma), "integer": int(i8) / DIGITS, "bf16": int(bf16) or int(fma)}


class File:
    """Bytes that one step of `batch` rows reads, and its operations."""

    def __init__(self, path):
        meta, tensors = read_gguf(path)
        arch = meta["general.architecture"][1]
        self.experts = meta.get(f"{arch}.expert_count", (0, 0))[1]
        self.used = meta.get(f"{arch}.expert_used_count", (0, 0))[1]
        self.fixed = self.expert = self.fixed_flops = self.expert_flops = 0
        types = [t.type for name, t in tensors.items() if len(t.shape) > 1 and "token_embd" not in name]
        self.kind = {"f32": "f32", "f16": "f32", "bf16": "bf16"}.get(max(set(types), key=types.count), "integer")
        heads = meta.get(f"{arch}.attention.head_count_kv", meta[f"{arch}.attention.head_count"])[1]
        dim = meta[f"{arch}.embedding_length"][1] // meta[f"{arch}.attention.head_count"][1]
        self.kv = CONTEXT * 2 * 2 * heads * dim * meta[f"{arch}.block_count"][1]
        self.head_flops = 2 * math.prod(tensors["token_embd.weight"].shape)
        for name, t in tensors.items():
            if len(t.shape) == 1 or (name == "token_embd.weight" and "output.weight" in tensors):
                continue
            n = 2 * math.prod(t.shape)
            if "_exps" in name:
                self.expert += t.n_bytes()
                self.expert_flops += n
            else:
                self.fixed += t.n_bytes()
                self.fixed_flops += n

    def traffic(self, batch):
        touched = 1 - (1 - self.used / self.experts) ** batch if self.experts else 0
        return self.fixed + self.expert * touched

    def flops(self, with_head):
        """Operations of the matrices for one token; a prompt needs the head only for its last token."""
        experts = self.expert_flops * self.used / self.experts if self.experts else 0
        return self.fixed_flops + experts - (0 if with_head else self.head_flops)


def verdict(met):
    return "met" if met else "NOT MET"


def measure(a, path, peak):
    print(f"\n{os.path.basename(path)}")
    peers = [Peer("baton", [os.path.join(a.baton, "bench_engine"), path, a.isa, str(a.threads)]),
             Peer("llama.cpp", [sys.executable, os.path.join(HERE, "llama_cpp_steps.py"), path, str(a.threads)])]
    if any(p.failed for p in peers):
        print("  " + ", ".join(f"{p.name} cannot load it" for p in peers if p.failed))
        for p in peers:
            p.close()
        return False
    questions = {"prefill": f"prefill {CONTEXT}", "decode, batch 1": f"decode 1 {CONTEXT} {a.steps}",
                 f"decode, batch {STREAMS}": f"decode {STREAMS} {CONTEXT} {a.steps}"}
    got = {what: [] for what in questions}
    reading = []
    for i in range(a.rounds + 1):
        for what, question in questions.items():
            order = peers if i % 2 else peers[::-1]
            rates = {p.name: p.rate(question) for p in order}
            reading.append(peers[0].rate("read") / 1e9)
            if i:
                got[what].append((rates["baton"], rates["llama.cpp"]))
    for p in peers:
        p.close()
    file, gbytes = File(path), statistics.median(reading)
    gflops = peak[file.kind]
    print(f"  loaded in {peers[0].load_ms:.0f} ms (backend {peers[0].backend}), llama.cpp {peers[1].load_ms:.0f} ms; memory is read at {gbytes:.1f} GB/s, peak of {file.kind} products {gflops:.0f} Gop/s")
    alone = gbytes * 1e9 / file.traffic(1)
    for what, rows in got.items():
        mine, theirs = (statistics.median(column) for column in zip(*rows))
        ratio = statistics.median(m / t for m, t in rows)
        if what == "prefill":
            gops = mine * file.flops(False) / 1e9
            against = f"{gops:6.1f} GOP/s, {gops / gflops:.2f} of peak; wanted ratio >= 1.5: {verdict(ratio >= 1.5)}"
        elif "batch 1" in what:
            share = mine / alone
            with_kv = mine * (file.traffic(1) + file.kv) / 1e9 / gbytes
            met = ratio >= 1.2 or (share >= 0.9 and ratio >= 1)
            against = f"{mine * file.traffic(1) / 1e9:6.1f} GB/s, {share:.2f} of reading ({with_kv:.2f} with KV); wanted ratio >= 1.2, or 0.9 of reading and not behind: {verdict(met)}"
        else:
            limit = min(STREAMS * alone, gflops * 1e9 / file.flops(True))
            step = mine / STREAMS * file.traffic(STREAMS) / 1e9
            with_kv = (step + mine * file.kv / 1e9) / gbytes
            against = f"{step:6.1f} GB/s, {mine / limit:.2f} of min(8 x reading, peak), {with_kv:.2f} of reading with KV; wanted 0.70 and not behind: {verdict(mine / limit >= 0.7 and ratio >= 1)}"
        print(f"  {what:16} {mine:8.1f} tok/s   llama.cpp {theirs:8.1f}   ratio {ratio:5.2f}   {against}", flush=True)
    return True


def main():
    a = argparse.ArgumentParser()
    a.add_argument("models", nargs="+")
    a.add_argument("--baton", required=True, help="folder of bench_engine and bench_kernels")
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--rounds", type=int, default=7)
    a.add_argument("--steps", type=int, default=24)
    a.add_argument("--isa", default="auto")
    a = a.parse_args()
    print(f"prefill of {CONTEXT} tokens, decode behind {CONTEXT} tokens of context, {a.threads} threads, medians of {a.rounds} rounds")
    peak = peaks(a)
    failed = [path for path in a.models if not measure(a, path, peak)]
    if failed:
        sys.exit(f"peer_llama_cpp: not compared: {', '.join(os.path.basename(f) for f in failed)}")


if __name__ == "__main__":
    main()
