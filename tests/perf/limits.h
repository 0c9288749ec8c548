/* limits.h - what this machine can do at most, measured in the same run as the figures that stand next to it: fused multiply-adds in f32,
 * and reading memory. On the pool of a kernel context, so with the same threads. */
#ifndef BATON_TESTS_PERF_LIMITS_H
#define BATON_TESTS_PERF_LIMITS_H

#include <immintrin.h>
#include <string.h>

#include "kernels/kernels.h"
#include "shared/base/clock.h"

struct limits {
    double gflops, gbytes;
};

/* Ten independent chains per thread: enough to keep two multiply-add units busy at a latency of four or five. The empty asm
 * keeps each in a register and the loop in place. */
#define LIMITS_STEP(fma, a) a = fma(a, m, d); __asm__ volatile("" : "+v"(a))
#define LIMITS_CHAINS(vec, fma, set)                                                                       \
    vec m = set(0.9999f), d = set(0.0001f), a0 = d, a1 = m, a2 = d, a3 = m, a4 = d, a5 = m, a6 = d, a7 = m, a8 = d, a9 = m; \
    for (long n = 0; n < LIMITS_ROUNDS; n++) {                                                             \
        LIMITS_STEP(fma, a0); LIMITS_STEP(fma, a1); LIMITS_STEP(fma, a2); LIMITS_STEP(fma, a3); LIMITS_STEP(fma, a4); \
        LIMITS_STEP(fma, a5); LIMITS_STEP(fma, a6); LIMITS_STEP(fma, a7); LIMITS_STEP(fma, a8); LIMITS_STEP(fma, a9); \
    }

enum { LIMITS_ROUNDS = 250000, LIMITS_ITEMS = 16 /* per thread: short, so that a late thread still gets its share */, LIMITS_REPEATS = 5 };

__attribute__((target("avx2,fma"))) static inline void limits_fma_avx2(void *arg, int index, int thread)
{
    (void)arg, (void)index, (void)thread;
    LIMITS_CHAINS(__m256, _mm256_fmadd_ps, _mm256_set1_ps)
}

__attribute__((target("avx512f"))) static inline void limits_fma_avx512(void *arg, int index, int thread)
{
    (void)arg, (void)index, (void)thread;
    LIMITS_CHAINS(__m512, _mm512_fmadd_ps, _mm512_set1_ps)
}

/* Of the widest registers that the row uses; 0 for ref. */
static inline double limits_gflops(struct kernel_ctx *c)
{
    bool   wide = strcmp(c->ops->name, "avx2") != 0;
    int    n = compute_pool_threads(c->pool) * LIMITS_ITEMS;
    double best = 0;
    if (strcmp(c->ops->name, "ref") == 0) return 0;
    for (int r = 0; r < LIMITS_REPEATS; r++) {
        uint64_t t0 = clock_ns();
        compute_pool_run(c->pool, n, wide ? limits_fma_avx512 : limits_fma_avx2, NULL);
        double gflops = (wide ? 32.0 : 16.0) * 10 * LIMITS_ROUNDS * n / (double)(clock_ns() - t0);
        best = gflops > best ? gflops : best;
    }
    return best;
}

struct limits_reading {
    const char *bytes;
    size_t      piece;
    uint64_t    sum[1024]; /* per thread: so that nothing is optimised away */
};

__attribute__((target("avx2"))) static inline void limits_read_piece(void *arg, int index, int thread)
{
    struct limits_reading *r = arg;
    const __m256i *p = (const __m256i *)(const void *)(r->bytes + (size_t)index * r->piece);
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

/* Reading `bytes` once, best of several; 0 when there is no such memory. */
static inline double limits_gbytes(struct kernel_ctx *c, size_t bytes)
{
    static struct limits_reading r;
    struct device *d;
    struct dev_mem m;
    struct err     err;
    double         best = 0;
    if (device_open("cpu", &d, &err) != OK || device_mem_alloc(d, bytes, DEVICE_MEM_PRIVATE, &m, &err) != OK) return 0;
    memset(m.ptr, 1, m.bytes);
    r.bytes = m.ptr;
    r.piece = (size_t)256 << 10;
    for (int i = 0; i < LIMITS_REPEATS; i++) {
        uint64_t t0 = clock_ns();
        compute_pool_run(c->pool, (int)(bytes / r.piece), limits_read_piece, &r);
        double gbytes = (double)bytes / (double)(clock_ns() - t0);
        best = gbytes > best ? gbytes : best;
    }
    device_mem_free(d, &m);
    device_close(d);
    return best;
}

#endif
