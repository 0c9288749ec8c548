/* bench_engine.c - speed of a model's forward pass, without server, scheduler and sampling.
 *
 *     bench_engine MODEL [isa] [threads] [ROWS_MAX] [auto|f32] [CACHE_FOLDER]
 *     defaults: auto, 2, 512, auto, no weight cache
 *
 * Each line of standard input asks for one measurement and gets one line of answer, so that a
 * script can alternate between this program and another one that runs the same steps:
 *     prefill N            one prompt of N tokens, in steps of at most ROWS_MAX, logits of the last
 *     decode B C STEPS     STEPS steps of B sequences with C tokens of context each (the first such
 *                          line computes the context)
 *     verify R C STEPS     STEPS steps of one sequence with C tokens of context, whose next token and
 *                          R - 1 drafts are verified (speculative decoding); the same step each time
 *     read                 memory bandwidth on the same threads: the limit of decoding at that time
 * The answer is "TOKENS NANOSECONDS", of read "BYTES NANOSECONDS". The first line printed is "ready
 * WEIGHT_BYTES BACKEND LOAD_NANOSECONDS". Token ids are a fixed sequence (id_at), the same in the
 * other program, because they determine which experts a mixture reads. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/model/model.h"
#include "tests/perf/limits.h"

enum { BLOCK_TOKENS = 64, STREAMS_MAX = 16, TOKENS_MAX = 4096 };

struct rig {
    struct kernel_ctx *kernels;
    struct model *model;
    struct dev_mem kv;
    uint32_t n_blocks, rows_max;
    int32_t *ids, *pos;
    float *logits;
    int32_t *table; /* blocks of all sequences, one after the other */
    struct read_limit read;
    int32_t contexts[STREAMS_MAX]; /* tokens whose KV each sequence has */
};

static int32_t id_at(const struct rig *r, int32_t seq, int32_t pos)
{
    return (int32_t)(((int64_t)pos * 7919 + (int64_t)seq * 131) %
                     (r->model->config.n_vocab - 200)) +
           100;
}

/* Runs `n` tokens of each of the sequences [first, first + n_seqs) from position `begin` on, with
 * the logits of the last of each. verify: as generated tokens, with the logits of all. */
static void step(struct rig *r, int32_t first, int32_t n_seqs, int32_t begin, int32_t n,
                 bool verify)
{
    struct attn_seq seqs[STREAMS_MAX];
    int32_t logit_rows[STREAMS_MAX], row = 0, n_logits = 0;
    int32_t blocks = (int32_t)(r->n_blocks / STREAMS_MAX);
    for (int32_t s = 0; s < n_seqs; s++) {
        seqs[s] = (struct attn_seq){
            .q_begin = row,
            .n_q = n,
            .pos_begin = begin,
            .block_table = r->table + (first + s) * blocks,
            .is_decode = verify,
        };
        for (int32_t i = 0; i < n; i++, row++) {
            r->ids[row] = id_at(r, first + s, begin + i);
            r->pos[row] = begin + i;
            if (verify || i == n - 1) logit_rows[n_logits++] = row;
        }
    }
    struct model_batch b = {
        .n_rows = row,
        .ids = r->ids,
        .pos = r->pos,
        .seqs = seqs,
        .n_seqs = n_seqs,
        .logit_rows = logit_rows,
        .n_logits = n_logits,
        .logits = r->logits,
        .kv = r->kv.ptr,
        .n_blocks = r->n_blocks,
        .block_tokens = BLOCK_TOKENS,
    };
    (void)model_submit(r->model, &b);
}

static void prefill(struct rig *r, int32_t seq, int32_t n)
{
    for (int32_t begin = 0; begin < n;) {
        int32_t part = n - begin < (int32_t)r->rows_max ? n - begin : (int32_t)r->rows_max;
        step(r, seq, 1, begin, part, false);
        begin += part;
    }
    r->contexts[seq] = n;
}

static uint64_t decode(struct rig *r, int32_t n_seqs, int32_t context, int32_t steps)
{
    for (int32_t s = 0; s < n_seqs; s++)
        if (r->contexts[s] < context) prefill(r, s, context);
    uint64_t t0 = clock_ns();
    for (int32_t i = 0; i < steps; i++) step(r, 0, n_seqs, context + i, 1, false);
    return clock_ns() - t0;
}

static uint64_t verify(struct rig *r, int32_t n_rows, int32_t context, int32_t steps)
{
    if (r->contexts[0] < context) prefill(r, 0, context);
    uint64_t t0 = clock_ns();
    for (int32_t i = 0; i < steps; i++) step(r, 0, 1, context, n_rows, true);
    return clock_ns() - t0;
}

static void read_memory(struct rig *r)
{
    if (!r->read.device && !read_limit_open(&r->read)) {
        fprintf(stderr, "bench_engine: no memory to read\n");
        exit(1);
    }
    printf("%zu %.0f\n", MEMORY_BYTES,
           (double)MEMORY_BYTES / read_limit_once(&r->read, r->kernels));
}

static bool answer(struct rig *r, const char *line)
{
    int n_seqs, context, steps;
    if (strcmp(line, "read\n") == 0) {
        read_memory(r);
        return true;
    }
    if (sscanf(line, "prefill %d", &context) == 1 && context > 0 && context <= TOKENS_MAX) {
        uint64_t t0 = clock_ns();
        prefill(r, 0, context);
        printf("%d %llu\n", context, (unsigned long long)(clock_ns() - t0));
        return true;
    }
    if (sscanf(line, "decode %d %d %d", &n_seqs, &context, &steps) == 3 && n_seqs > 0 &&
        n_seqs <= STREAMS_MAX && n_seqs <= (int)r->rows_max && context > 0 && steps > 0 &&
        context + steps <= TOKENS_MAX) {
        printf("%d %llu\n", n_seqs * steps, (unsigned long long)decode(r, n_seqs, context, steps));
        return true;
    }
    if (sscanf(line, "verify %d %d %d", &n_seqs, &context, &steps) == 3 && n_seqs > 0 &&
        n_seqs <= STREAMS_MAX && n_seqs <= (int)r->rows_max && context > 0 && steps > 0 &&
        context + n_seqs <= TOKENS_MAX) {
        printf("%d %llu\n", n_seqs * steps, (unsigned long long)verify(r, n_seqs, context, steps));
        return true;
    }
    return false;
}

static enum status rig_open(struct rig *r, const char *path, const char *isa, int n_threads,
                            bool exact, const char *packed, struct err *err)
{
    struct kv_layout layout;
    enum status st = kernel_ctx_create(
        kernel_options_default(isa, exact ? ACTIVATIONS_F32 : ACTIVATIONS_FAST, n_threads),
        &r->kernels, err);
    if (st != OK) return st;
    struct model_options o = {
        .path = path,
        .max_rows = r->rows_max,
        .max_model_len = TOKENS_MAX,
        .weight_cache_folder = packed,
        .kernels = r->kernels,
    };
    st = model_load(&o, &r->model, err);
    if (st != OK) return st;
    r->n_blocks = STREAMS_MAX * (TOKENS_MAX / BLOCK_TOKENS);
    model_kv_layout(r->model, BLOCK_TOKENS, r->n_blocks, &layout);
    /* writing allocates the pages */
    st = device_mem_alloc(r->kernels->device, kv_layout_pool_bytes(&layout), DEVICE_MEM_SHARED,
                          &r->kv, err);
    if (st != OK) return st;
    r->ids = MEM_ARRAY(int32_t, r->rows_max);
    r->pos = MEM_ARRAY(int32_t, r->rows_max);
    r->logits = MEM_ARRAY(float, (size_t)STREAMS_MAX * r->model->config.n_vocab);
    r->table = MEM_ARRAY(int32_t, r->n_blocks);
    for (uint32_t i = 0; i < r->n_blocks; i++) r->table[i] = (int32_t)i;
    return OK;
}

static void rig_close(struct rig *r)
{
    if (r->read.device) read_limit_close(&r->read);
    mem_free(r->ids), mem_free(r->pos), mem_free(r->logits), mem_free(r->table);
    device_mem_free(r->kernels->device, &r->kv);
    model_free(r->model);
    kernel_ctx_free(r->kernels);
}

int main(int argc, char **argv)
{
    struct rig r = { 0 };
    struct err err;
    char line[128];
    if (argc < 2) {
        fprintf(
            stderr,
            "usage: bench_engine MODEL [isa] [threads] [ROWS_MAX] [auto|f32] [PACKED_FOLDER]\n");
        return 2;
    }
    int rows = argc > 4 ? atoi(argv[4]) : 512;
    r.rows_max = rows < 1 ? 1 : (uint32_t)rows;
    uint64_t t0 = clock_ns();
    if (rig_open(&r, argv[1], argc > 2 ? argv[2] : "auto", argc > 3 ? atoi(argv[3]) : 2,
                 strcmp(argc > 5 ? argv[5] : "auto", "f32") == 0, argc > 6 ? argv[6] : NULL,
                 &err) != OK) {
        fprintf(stderr, "bench_engine: %s\n", err.text); /* the process's end frees the rest */
        return 1;
    }
    printf("ready %zu %s %llu\n", r.model->weight_bytes, r.kernels->backend->name,
           (unsigned long long)(clock_ns() - t0));
    fflush(stdout);
    int status = 0;
    while (status == 0 && fgets(line, sizeof line, stdin)) {
        if (!answer(&r, line)) {
            fprintf(stderr, "bench_engine: not understood: %s", line);
            status = 2;
        }
        fflush(stdout);
    }
    rig_close(&r);
    return status;
}
