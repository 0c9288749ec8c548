#!/usr/bin/env python3
"""llama_cpp_steps.py - llama.cpp runs the steps of bench_engine.c and prints the same lines. usage: llama_cpp_steps.py MODEL.gguf [threads]

Needs llama-cpp-python. One context serves a single sequence and another several, like a program for one user and one for many. The settings are those
of llama.cpp's own tools: batches of 2048, steps of 512 tokens, KV cache in f16, flash attention as the library chooses."""
import sys
import time

import llama_cpp as L

BATCH, STEP, STREAMS, LONGEST = 2048, 512, 8, 4096
QUIET = L.llama_log_callback(lambda level, text, data: None)  # the library keeps the pointer, so this must stay alive


def id_at(n_vocab, seq, pos):
    return (pos * 7919 + seq * 131) % (n_vocab - 200) + 100


class Context:
    def __init__(self, model, n_vocab, threads, n_seqs, length):
        p = L.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = n_seqs * length, BATCH, STEP, n_seqs
        p.n_threads = p.n_threads_batch = threads
        p.no_perf = True
        self.ctx, self.n_vocab = L.llama_init_from_model(model, p), n_vocab
        if not self.ctx:
            sys.exit("llama_cpp_steps: no context")
        self.memory, self.batch, self.known = L.llama_get_memory(self.ctx), L.llama_batch_init(BATCH, 0, 1), [0] * n_seqs

    def step(self, rows):
        """rows: (sequence, position, wants logits)"""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (seq, pos, wanted) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = id_at(self.n_vocab, seq, pos), pos, 1, wanted
            b.seq_id[i][0] = seq
        t0 = time.perf_counter_ns()
        if L.llama_decode(self.ctx, b):
            sys.exit("llama_cpp_steps: llama_decode failed")
        L.llama_synchronize(self.ctx)
        return time.perf_counter_ns() - t0

    def cut(self, seq, length):
        L.llama_memory_seq_rm(self.memory, seq, length, -1)

    def prefill(self, seq, n):
        self.cut(seq, 0)
        ns = sum(self.step([(seq, p, p + 1 == n) for p in range(begin, min(n, begin + BATCH))]) for begin in range(0, n, BATCH))
        self.known[seq] = n
        return ns

    def decode(self, n_seqs, context, steps):
        for s in range(n_seqs):
            if self.known[s] < context:
                self.prefill(s, context)
            self.cut(s, context)
            self.known[s] = context
        return sum(self.step([(s, context + i, True) for s in range(n_seqs)]) for i in range(steps))


def main():
    threads = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    L.llama_log_set(QUIET, None)
    L.llama_backend_init()
    t0 = time.perf_counter_ns()
    model = L.llama_model_load_from_file(sys.argv[1].encode(), L.llama_model_default_params())
    if not model:
        sys.exit("llama_cpp_steps: the model cannot be loaded")
    n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
    one, many = Context(model, n_vocab, threads, 1, LONGEST), Context(model, n_vocab, threads, STREAMS, 1024)
    print("ready", L.llama_model_size(model), "llama.cpp", time.perf_counter_ns() - t0, flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        n = [int(x) for x in numbers]
        if what == "prefill":
            print(n[0], one.prefill(0, n[0]), flush=True)
        else:
            print(n[0] * n[2], (one if n[0] == 1 else many).decode(*n), flush=True)


if __name__ == "__main__":
    main()
