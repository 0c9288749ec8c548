/* bench_kernels.c - speed of the matrix product and of attention next to the limits of this machine, measured in the same run.
 *
 *     bench_kernels [isa] [threads]      defaults: auto, all processors
 *
 * One row (decode) is held against reading the weights from memory; many rows (prefill) against the peak of fused
 * multiply-adds. "ratio" is achieved / limit. Matrices are larger than the last-level cache unless a name says cache. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/kernels.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"

enum { REPEATS = 5, BLOCK_TOKENS = 64 };
static const size_t MEMORY_BYTES = (size_t)256 << 20;

static volatile float sink;

struct limits {
    double gflops, gbytes;
};

/* ---- limits ---- */

/* Ten independent chains per thread: enough to keep two multiply-add units busy at a latency of four or five. The empty asm
 * keeps each in a register and the loop in place. */
#define STEP(fma, a) a = fma(a, m, d); __asm__ volatile("" : "+v"(a))
#define CHAINS(vec, fma, set)                                                                              \
    vec m = set(0.9999f), d = set(0.0001f), a0 = d, a1 = m, a2 = d, a3 = m, a4 = d, a5 = m, a6 = d, a7 = m, a8 = d, a9 = m; \
    for (long n = 0; n < FMA_ROUNDS; n++) {                                                                \
        STEP(fma, a0); STEP(fma, a1); STEP(fma, a2); STEP(fma, a3); STEP(fma, a4);                         \
        STEP(fma, a5); STEP(fma, a6); STEP(fma, a7); STEP(fma, a8); STEP(fma, a9);                         \
    }

#include <immintrin.h>
enum { FMA_ROUNDS = 250000, FMA_ITEMS = 16 }; /* items per thread: short, so that a late thread still gets its share */

__attribute__((target("avx2,fma"))) static void fma_avx2(void *arg, int index, int thread)
{
    (void)arg;
    (void)index;
    (void)thread;
    CHAINS(__m256, _mm256_fmadd_ps, _mm256_set1_ps)
}

__attribute__((target("avx512f"))) static void fma_avx512(void *arg, int index, int thread)
{
    (void)arg;
    (void)index;
    (void)thread;
    CHAINS(__m512, _mm512_fmadd_ps, _mm512_set1_ps)
}

static double peak_gflops(struct kernel_ctx *c)
{
    bool   wide = strcmp(c->ops->name, "avx512") == 0;
    int    n = compute_pool_threads(c->pool) * FMA_ITEMS;
    double best = 0;
    if (strcmp(c->ops->name, "ref") == 0) return 0;
    for (int r = 0; r < REPEATS; r++) {
        uint64_t t0 = clock_ns();
        compute_pool_run(c->pool, n, wide ? fma_avx512 : fma_avx2, NULL);
        double gflops = (wide ? 32.0 : 16.0) * 10 * FMA_ROUNDS * n / (double)(clock_ns() - t0);
        best = gflops > best ? gflops : best;
    }
    return best;
}

struct reading {
    const char *bytes;
    size_t      piece;
    uint64_t    sum[1024];
};

__attribute__((target("avx2"))) static void read_piece(void *arg, int index, int thread)
{
    struct reading *r = arg;
    const __m256i  *p = (const __m256i *)(r->bytes + (size_t)index * r->piece);
    __m256i a = _mm256_setzero_si256(), b = a, d = a, e = a;
    size_t  n = r->piece / sizeof *p / 4; /* four streams: one alone does not fill the memory channels */
    for (size_t i = 0; i < n; i++) {
        a = _mm256_add_epi64(a, _mm256_loadu_si256(p + i));
        b = _mm256_add_epi64(b, _mm256_loadu_si256(p + n + i));
        d = _mm256_add_epi64(d, _mm256_loadu_si256(p + 2 * n + i));
        e = _mm256_add_epi64(e, _mm256_loadu_si256(p + 3 * n + i));
    }
    a = _mm256_add_epi64(_mm256_add_epi64(a, b), _mm256_add_epi64(d, e));
    r->sum[thread] += (uint64_t)_mm256_extract_epi64(a, 0);
}

static double read_gbytes(struct kernel_ctx *c)
{
    static struct reading r;
    struct device *d;
    struct dev_mem m;
    struct err     err;
    double         best = 0;
    if (device_open("cpu", &d, &err) != OK || device_mem_alloc(d, MEMORY_BYTES, DEVICE_MEM_PRIVATE, &m, &err) != OK) return 0;
    memset(m.ptr, 1, m.bytes);
    r.bytes = m.ptr;
    r.piece = (size_t)256 << 10;
    for (int i = 0; i < REPEATS; i++) {
        uint64_t t0 = clock_ns();
        compute_pool_run(c->pool, (int)(MEMORY_BYTES / r.piece), read_piece, &r);
        double gbytes = (double)MEMORY_BYTES / (double)(clock_ns() - t0);
        best = gbytes > best ? gbytes : best;
    }
    sink = (float)r.sum[0];
    device_mem_free(d, &m);
    device_close(d);
    return best;
}

/* ---- kernels ---- */

static void fill(float *x, size_t n)
{
    uint32_t s = 1;
    for (size_t i = 0; i < n; i++) {
        s = s * 1664525u + 1013904223u;
        x[i] = (float)(s >> 8) * 0x1p-24f - 0.5f;
    }
}

/* Any bytes are valid quantised weights once the scales are: f16 0x2400 is 1/64. */
static void *make_weights(enum dtype t, size_t n_out, size_t n_in)
{
    size_t   bytes = n_out * dtype_row_bytes(t, n_in), block = dtype_block_bytes(t);
    uint8_t *p = mem_calloc(bytes, 1);
    if (t == DTYPE_F32) {
        fill((float *)p, n_out * n_in);
        return p;
    }
    for (size_t i = 0; i < bytes; i++) p[i] = (uint8_t)(i * 37 >> 3);
    for (size_t i = 0; i < bytes; i += block) {
        p[i] = 0;
        p[i + 1] = t == DTYPE_BF16 ? 0x3c : 0x24;
        if (t == DTYPE_Q4_1) p[i + 2] = 0, p[i + 3] = 0xa4;
    }
    return p;
}

static void bench_matmul(struct kernel_ctx *c, enum dtype t, size_t n_out, size_t n_in, size_t n_rows, const struct limits *l)
{
    void             *data = make_weights(t, n_out, n_in);
    struct weight_src src = { .dtype = t, .data = data, .n_out = n_out, .n_in = n_in };
    struct weight     w;
    float            *x = MEM_ARRAY(float, n_rows * n_in), *y = MEM_ARRAY(float, n_rows * n_out);
    double            best = 1e30;
    fill(x, n_rows * n_in);
    if (c->ops->weight_pack(c, &src, &w) != OK) exit(1);
    for (int r = 0; r < REPEATS; r++) {
        uint64_t t0 = clock_ns();
        c->ops->matmul(c, y, n_out, x, n_rows, &w, NULL);
        double ns = (double)(clock_ns() - t0);
        best = ns < best ? ns : best;
    }
    sink = y[0];
    double gflops = 2.0 * (double)(n_out * n_in * n_rows) / best, gbytes = (double)w.bytes / best;
    printf("matmul %-5s %6zu x %-5zu rows %4zu  %9.1f us  %7.1f GFLOP/s (ratio %.2f)  %6.1f GB/s (ratio %.2f)\n", dtype_name(t),
           n_out, n_in, n_rows, best / 1e3, gflops, l->gflops > 0 ? gflops / l->gflops : 0, gbytes, gbytes / l->gbytes);
    weight_release(&w);
    mem_free(data);
    mem_free(x);
    mem_free(y);
}

static void bench_attention(struct kernel_ctx *c, int n_q, int n_keys, int n_seqs, const struct limits *l)
{
    enum { HEADS = 9, KV_HEADS = 3, DIM = 64 };
    int32_t  blocks = (n_keys + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    size_t   kv_floats = (size_t)blocks * n_seqs * KV_HEADS * 2 * BLOCK_TOKENS * DIM, q_floats = (size_t)n_q * n_seqs * HEADS * DIM;
    float   *kv = MEM_ARRAY(float, kv_floats), *q = MEM_ARRAY(float, q_floats), *out = MEM_ARRAY(float, q_floats);
    int32_t *table = MEM_ARRAY(int32_t, (size_t)(blocks * n_seqs));
    struct attn_seq *seqs = MEM_ARRAY(struct attn_seq, (size_t)n_seqs);
    for (int32_t i = 0; i < blocks * n_seqs; i++) table[i] = i;
    for (int32_t s = 0; s < n_seqs; s++)
        seqs[s] = (struct attn_seq){ .q_begin = s * n_q, .n_q = n_q, .pos_begin = n_keys - n_q, .block_table = table + s * blocks };
    fill(kv, kv_floats);
    fill(q, q_floats);
    struct attn_args a = { .q = q, .out = out, .kv = kv, .seqs = seqs, .n_seqs = n_seqs, .n_heads = HEADS, .n_kv_heads = KV_HEADS,
                           .head_dim = DIM, .block_tokens = BLOCK_TOKENS, .scale = 0.125f };
    double best = 1e30;
    for (int r = 0; r < REPEATS; r++) {
        uint64_t t0 = clock_ns();
        c->ops->attention(c, &a);
        double ns = (double)(clock_ns() - t0);
        best = ns < best ? ns : best;
    }
    sink = out[0];
    double keys = (double)n_q * (n_keys - n_q) + (double)n_q * (n_q + 1) / 2;
    double gflops = 4.0 * keys * n_seqs * HEADS * DIM / best, gbytes = (double)(kv_floats * sizeof *kv) / best;
    printf("attention q %4d keys %5d seqs %3d        %9.1f us  %7.1f GFLOP/s (ratio %.2f)  %6.1f GB/s (ratio %.2f)\n", n_q, n_keys,
           n_seqs, best / 1e3, gflops, l->gflops > 0 ? gflops / l->gflops : 0, gbytes, gbytes / l->gbytes);
    mem_free(kv), mem_free(q), mem_free(out), mem_free(table), mem_free(seqs);
}

int main(int argc, char **argv)
{
    struct kernel_ctx *c;
    struct err         err;
    int n_threads = argc > 2 ? atoi(argv[2]) : (int)sysconf(_SC_NPROCESSORS_ONLN);
    if (kernel_ctx_create(argc > 1 ? argv[1] : "auto", n_threads, &c, &err) != OK) {
        fprintf(stderr, "bench_kernels: %s\n", err.text);
        return 1;
    }
    struct limits l = { .gflops = peak_gflops(c), .gbytes = read_gbytes(c) };
    printf("row %s, %d threads; limits: %.1f GFLOP/s fused multiply-add, %.1f GB/s memory read\n", c->ops->name, n_threads, l.gflops,
           l.gbytes);
    static const enum dtype types[] = { DTYPE_F32, DTYPE_BF16, DTYPE_Q8_0, DTYPE_Q4_1 };
    static const size_t     rows[] = { 1, 2, 6, 16, 64, 512 };
    for (size_t t = 0; t < COUNT_OF(types); t++)
        for (size_t r = 0; r < COUNT_OF(rows); r++)
            bench_matmul(c, types[t], rows[r] == 1 ? 32768 : 4096, rows[r] == 1 ? 2048 : 1536, rows[r], &l);
    printf("shapes of a 135M model (weights in cache)\n");
    bench_matmul(c, DTYPE_Q4_1, 960, 576, 1, &l);
    bench_matmul(c, DTYPE_Q4_1, 3072, 576, 1, &l);
    bench_matmul(c, DTYPE_Q4_1, 576, 1536, 1, &l);
    bench_matmul(c, DTYPE_Q4_1, 49152, 576, 1, &l);
    bench_matmul(c, DTYPE_Q4_1, 3072, 576, 256, &l);
    bench_attention(c, 1, 2000, 1, &l);
    bench_attention(c, 1, 2000, 32, &l);
    bench_attention(c, 512, 512, 1, &l);
    bench_attention(c, 512, 2048, 1, &l);
    kernel_ctx_free(c);
    return 0;
}
