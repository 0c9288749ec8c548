/* limits.h - this machine's limits, measured in the run they are compared with: operations per
 * second of each instruction that the kernels use, and memory bandwidth. All run on the threads of
 * a context's pool. Only for programs under tests/perf. */
#ifndef BATON_TESTS_PERF_LIMITS_H
#define BATON_TESTS_PERF_LIMITS_H

#include <immintrin.h>
#include <stdio.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/cpu/cpu_features.h"
#include "shared/base/clock.h"

enum {
    ROUNDS = 20000,
    ACCUMULATORS = 12,
    ITEMS = 8 /* per thread: short, so that a late thread still gets its share */
};
static const size_t MEMORY_BYTES = (size_t)256 << 20;
static const uint64_t MEASURE_NS = 300000000; /* how long each thing is repeated; the best counts,
                                               * as others may be using the machine */

struct limits {
    double f32, i8, bf16; /* 1e9 operations per second, a multiply and an add being two */
    double gbytes;        /* read per second */
    const char *i8_by, *bf16_by;
};

static volatile uint64_t limit_sink;

/* ACCUMULATORS independent accumulators are enough for two units with a latency of six. The empty
 * asm keeps each in its register and the loop in place. */
#define PEAK(name, isa, vec, zero, step)                                                           \
    __attribute__((target(isa))) static void name(void *arg, int index, int thread)                \
    {                                                                                              \
        vec a[ACCUMULATORS], m = zero;                                                             \
        (void)arg, (void)index, (void)thread;                                                      \
        __asm__ volatile("" : "+v"(m));                                                            \
        _Pragma("GCC unroll 12") for (int i = 0; i < ACCUMULATORS; i++) a[i] = m;                  \
        for (int n = 0; n < ROUNDS; n++) {                                                         \
            _Pragma("GCC unroll 12") for (int i = 0; i < ACCUMULATORS; i++)                        \
            {                                                                                      \
                a[i] = step;                                                                       \
                __asm__ volatile("" : "+v"(a[i]));                                                 \
            }                                                                                      \
        }                                                                                          \
    }
PEAK(peak_f32_256, "avx2,fma", __m256, _mm256_setzero_ps(), _mm256_fmadd_ps(m, m, a[i]))
PEAK(peak_f32_512, "avx512f", __m512, _mm512_setzero_ps(), _mm512_fmadd_ps(m, m, a[i]))
PEAK(peak_i8_256, "avx2", __m256i, _mm256_setzero_si256(), _mm256_maddubs_epi16(a[i], m))
PEAK(peak_i8_512, "avx512f,avx512bw", __m512i, _mm512_setzero_si512(),
     _mm512_maddubs_epi16(a[i], m))
PEAK(peak_vnni, "avx512f,avx512vnni", __m512i, _mm512_setzero_si512(),
     _mm512_dpbusd_epi32(a[i], m, m))
PEAK(peak_bf16, "avx512f,avx512bf16", __m512, _mm512_setzero_ps(),
     _mm512_dpbf16_ps(a[i], (__m512bh)m, (__m512bh)m))

static inline double peak(struct kernel_ctx *c, void (*fn)(void *, int, int), double operations)
{
    int n = compute_pool_threads(c->pool) * ITEMS;
    double best = 0;
    for (uint64_t end = clock_ns() + MEASURE_NS; clock_ns() < end;) {
        uint64_t t0 = clock_ns();
        compute_pool_run(c->pool, n, fn, NULL);
        double rate = operations * ACCUMULATORS * ROUNDS * n / (double)(clock_ns() - t0);
        best = rate > best ? rate : best;
    }
    return best;
}

struct reading {
    const char *bytes;
    size_t piece;
    uint64_t sum[1024];
};

/* One stream per thread that prefetches 8 KiB ahead: nothing faster was found here, and several
 * streams per thread are a third slower. */
__attribute__((target("avx2"))) static void read_piece(void *arg, int index, int thread)
{
    struct reading *r = arg;
    const char *p = r->bytes + (size_t)index * r->piece;
    __m256i a = _mm256_setzero_si256(), b = a;
    for (size_t i = 0; i < r->piece; i += 64) {
        _mm_prefetch(p + i + 8192, _MM_HINT_T0);
        a = _mm256_add_epi64(a, _mm256_loadu_si256((const __m256i *)(p + i)));
        b = _mm256_add_epi64(b, _mm256_loadu_si256((const __m256i *)(p + i + 32)));
    }
    r->sum[thread] += (uint64_t)_mm256_extract_epi64(_mm256_add_epi64(a, b), 0);
}

/* Memory to read again and again, larger than a last-level cache. */
struct read_limit {
    struct device *device;
    struct dev_mem mem;
    struct reading reading;
};

static inline bool read_limit_open(struct read_limit *l)
{
    struct err err;
    if (device_open("cpu", &l->device, &err) != OK) return false;
    if (device_mem_alloc(l->device, MEMORY_BYTES, DEVICE_MEM_PRIVATE, &l->mem, &err) != OK) {
        device_close(l->device);
        return false;
    }
    memset(l->mem.ptr, 1, l->mem.bytes);
    l->reading = (struct reading){ .bytes = l->mem.ptr, .piece = (size_t)1 << 20 };
    return true;
}

/* GB/s of reading all of it once. */
static inline double read_limit_once(struct read_limit *l, struct kernel_ctx *c)
{
    uint64_t t0 = clock_ns();
    compute_pool_run(c->pool, (int)(MEMORY_BYTES / l->reading.piece), read_piece, &l->reading);
    limit_sink = l->reading.sum[0];
    return (double)MEMORY_BYTES / (double)(clock_ns() - t0);
}

static inline void read_limit_close(struct read_limit *l)
{
    device_mem_free(l->device, &l->mem);
    device_close(l->device);
}

static inline double read_gbytes(struct kernel_ctx *c)
{
    static struct read_limit l;
    double best = 0;
    if (!read_limit_open(&l)) return 0;
    for (uint64_t end = clock_ns() + 2 * MEASURE_NS; clock_ns() < end;) {
        double gbytes = read_limit_once(&l, c);
        best = gbytes > best ? gbytes : best;
    }
    read_limit_close(&l);
    return best;
}

/* The peaks of the instructions that the context's backend multiplies with. */
static inline struct limits limits_measure(struct kernel_ctx *c)
{
    struct cpu_features f;
    struct limits l = { .gbytes = read_gbytes(c), .i8_by = "none", .bf16_by = "none" };
    const char *backend = c->backend->name;
    bool wide = strcmp(backend, "avx2") != 0;
    cpu_features_read(&f);
    if (strcmp(backend, "ref") == 0) return l;
    l.f32 = wide ? peak(c, peak_f32_512, 32) : peak(c, peak_f32_256, 16);
    if (wide && strcmp(backend, "avx512") != 0)
        l.i8 = peak(c, peak_vnni, 128), l.i8_by = "vpdpbusd";
    else l.i8 = wide ? peak(c, peak_i8_512, 128) : peak(c, peak_i8_256, 64), l.i8_by = "vpmaddubsw";
    if (strcmp(backend, "avx512-bf16") == 0 || strcmp(backend, "amx") == 0)
        l.bf16 = peak(c, peak_bf16, 64), l.bf16_by = "vdpbf16ps";
    return l;
}

#endif
