/* bench_attention.c - speed of attention next to this machine's limits in the same run.
 *
 *     bench_attention [isa] [threads] [shape] [keys]
 *     defaults: auto, all cores, all shapes (else part of a shape's name), one decode context
 *
 * Prefill is compared with the peak of fused multiply-adds (only keys that a query sees count),
 * decode with reading keys and values from memory: every repeat reads other sequences, so that they
 * do not come from a cache if there is enough memory. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernels/kv_rows.h"
#include "shared/base/mem.h"
#include "tests/perf/limits.h"

enum { REPEATS = 7, BLOCK_TOKENS = 64 };
static const size_t POOL_BYTES = (size_t)512 << 20;

static void fill(float *x, size_t n)
{
    uint32_t s = 1;
    for (size_t i = 0; i < n; i++) {
        s = s * 1664525u + 1013904223u;
        x[i] = (float)(s >> 8) * 0x1p-24f - 0.5f;
    }
}

struct shape {
    const char *name;
    enum dtype dtype;
    bool latent;
    int32_t n_heads, n_kv, dim, v_dim;
};

struct pool {
    struct device *d;
    struct dev_mem mem;
};

/* Fills everything, scales too, with small numbers of any type. */
static void open_pool(struct pool *p, enum dtype t)
{
    struct err err;
    if (device_open("cpu", &p->d, &err) != OK ||
        device_mem_alloc(p->d, POOL_BYTES, DEVICE_MEM_SHARED, &p->mem, &err) != OK) {
        fprintf(stderr, "bench_attention: %s\n", err.text);
        exit(1);
    }
    if (t == DTYPE_F32) fill(p->mem.ptr, POOL_BYTES / 4);
    else
        for (size_t i = 0; i < POOL_BYTES / 2; i++)
            ((uint16_t *)p->mem.ptr)[i] =
                (uint16_t)(0x3c00 + (i * 2654435761u >> 24) % (t == DTYPE_F8_E4M3 ? 0x40 : 0x100));
}

/* Sets up n_seqs sequences of n_keys tokens, of which the last n_q are new. */
static void bench(struct kernel_ctx *c, const struct shape *s, const struct pool *pool, int n_q,
                  int n_keys, int n_seqs, const struct limits *l)
{
    struct kv_layer kv = {
        .data = pool->mem.ptr,
        .dtype = s->dtype,
        .latent = s->latent,
        .n_heads = s->n_kv,
        .head_dim = s->dim,
        .block_tokens = BLOCK_TOKENS,
    };
    size_t block_bytes = (size_t)s->n_kv * (s->latent ? 1 : 2) * BLOCK_TOKENS *
                         (kv_rows_bytes(s->dtype, (size_t)s->dim) +
                          (kv_rows_scaled(s->dtype) ? 4 : 0));
    int32_t blocks = (n_keys + BLOCK_TOKENS - 1) / BLOCK_TOKENS,
            in_pool = (int32_t)(POOL_BYTES / block_bytes), next = 0;
    size_t q_floats = (size_t)n_q * n_seqs * s->n_heads * s->dim,
           out_floats = (size_t)n_q * n_seqs * s->n_heads * s->v_dim;
    float *q = MEM_ARRAY(float, q_floats), *out = MEM_ARRAY(float, out_floats);
    int32_t *table = MEM_ARRAY(int32_t, (size_t)(blocks * n_seqs));
    struct attn_seq *seqs = MEM_ARRAY(struct attn_seq, (size_t)n_seqs);
    fill(q, q_floats);
    for (int32_t i = 0; i < n_seqs; i++)
        seqs[i] = (struct attn_seq){
            .q_begin = i * n_q,
            .n_q = n_q,
            .pos_begin = n_keys - n_q,
            .block_table = table + i * blocks,
        };
    struct attn_args a = {
        .q = q,
        .out = out,
        .kv = kv,
        .on = { seqs, n_seqs },
        .n_heads = s->n_heads,
        .v_dim = s->v_dim,
        .scale = 0.125f,
    };
    double best = 1e30;
    for (int r = 0; r < REPEATS; r++) {
        for (int32_t i = 0; i < blocks * n_seqs; i++, next = (next + 1) % in_pool) table[i] = next;
        uint64_t t0 = clock_ns();
        c->ops->attention(c, &a);
        double ns = (double)(clock_ns() - t0);
        best = ns < best ? ns : best;
    }
    double keys = ((double)n_q * (n_keys - n_q) + (double)n_q * (n_q + 1) / 2) * n_seqs;
    double gflops = 2.0 * keys * s->n_heads * (s->dim + s->v_dim) / best,
           gbytes = (double)block_bytes * n_keys / BLOCK_TOKENS * n_seqs / best;
    printf("%-22s q %4d keys %5d seqs %2d  %10.1f us  %7.1f GFLOP/s (ratio %.2f)  %6.1f GB/s "
           "(ratio %.2f)\n",
           s->name, n_q, n_keys, n_seqs, best / 1e3, gflops, l->f32 > 0 ? gflops / l->f32 : 0,
           gbytes, gbytes / l->gbytes);
    mem_free(q), mem_free(out), mem_free(table), mem_free(seqs);
}

int main(int argc, char **argv)
{
    static const struct shape shapes[] = {
        { "9/3 x 64 bf16", DTYPE_BF16, false, 9, 3, 64, 64 },
        { "9/3 x 64 f32", DTYPE_F32, false, 9, 3, 64, 64 },
        { "32/8 x 128 bf16", DTYPE_BF16, false, 32, 8, 128, 128 },
        { "32/8 x 128 f32", DTYPE_F32, false, 32, 8, 128, 128 },
        { "32/8 x 128 f16", DTYPE_F16, false, 32, 8, 128, 128 },
        { "32/8 x 128 int8", DTYPE_I8, false, 32, 8, 128, 128 },
        { "32/8 x 128 e4m3", DTYPE_F8_E4M3, false, 32, 8, 128, 128 },
        { "14/2 x 64 bf16", DTYPE_BF16, false, 14, 2, 64, 64 },
        { "8/8 x 80 bf16", DTYPE_BF16, false, 8, 8, 80, 80 },
        { "latent 16 x 576 bf16", DTYPE_BF16, true, 16, 1, 576, 512 },
    };
    static const int decode[][2] = {
        { 512, 1 }, { 4096, 1 }, { 32768, 1 }, { 512, 8 }, { 4096, 8 }
    };
    struct kernel_ctx *c;
    struct err err;
    int n_threads = argc > 2 ? atoi(argv[2]) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (kernel_ctx_create(
            kernel_options_default(argc > 1 ? argv[1] : "auto", ACTIVATIONS_FAST, n_threads), &c,
            &err) != OK) {
        fprintf(stderr, "bench_attention: %s\n", err.text);
        return 1;
    }
    int only = argc > 4 ? atoi(argv[4]) : 0;
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        struct pool pool;
        if (argc > 3 && !strstr(shapes[i].name, argv[3])) continue;
        struct limits l = limits_measure(c);
        if (i == 0) printf("backend %s, %d threads\n", c->backend->name, n_threads);
        printf("limits now: %.1f GFLOP/s fused multiply-add, %.1f GB/s memory read\n", l.f32,
               l.gbytes);
        open_pool(&pool, shapes[i].dtype);
        if (!only) bench(c, &shapes[i], &pool, 512, 4096, 1, &l);
        if (!only) bench(c, &shapes[i], &pool, 512, 512, 1, &l);
        for (size_t k = 0; k < COUNT_OF(decode) && !only; k++)
            bench(c, &shapes[i], &pool, 1, decode[k][0], decode[k][1], &l);
        if (only) bench(c, &shapes[i], &pool, 1, only, 1, &l);
        device_mem_free(pool.d, &pool.mem);
        device_close(pool.d);
    }
    kernel_ctx_free(c);
    return 0;
}
