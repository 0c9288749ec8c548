/* kernel_fixture.h - what the conformance tests of the kernel backends share: random numbers,
 * contexts, comparison of bits, matrices of every type. */
#ifndef BATON_TESTS_CONFORMANCE_KERNEL_FIXTURE_H
#define BATON_TESTS_CONFORMANCE_KERNEL_FIXTURE_H

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/float_bits.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static uint32_t rng_state = 12345;

static inline uint32_t random_u32(void)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 17;
    rng_state ^= rng_state << 5;
    return rng_state;
}

static inline float random_float(float range)
{
    return ((float)(random_u32() >> 8) * 0x1p-23f - 1.0f) * range;
}

static inline float *random_floats(size_t n, float range)
{
    float *x = MEM_ARRAY(float, n);
    for (size_t i = 0; i < n; i++) x[i] = random_float(range);
    return x;
}

/* Every backend in KERNEL_BACKENDS, for tests that exist once per backend: EVERY_BACKEND(T) expands
 * to T(name, isa) for each, EVERY_BACKEND_CASES(C) to C(name). The test of a backend that this
 * machine cannot run is skipped by name; test_kernels compares this list with the table.
 * EVERY_CPU_BACKEND has those that compute on the CPU, which all give the same bits. */
#define EVERY_CPU_BACKEND(T)                                                                       \
    T(ref, "ref")                                                                                  \
    T(avx2, "avx2")                                                                                \
    T(avx512, "avx512") T(avx512_vnni, "avx512-vnni") T(avx512_bf16, "avx512-bf16") T(amx, "amx")
#define EVERY_CPU_BACKEND_CASES(C)                                                                 \
    C(ref), C(avx2), C(avx512), C(avx512_vnni), C(avx512_bf16), C(amx)
#ifdef BATON_HAVE_CUDA_KERNELS
#define EVERY_BACKEND(T)       EVERY_CPU_BACKEND(T) T(cuda, "cuda")
#define EVERY_BACKEND_CASES(C) EVERY_CPU_BACKEND_CASES(C), C(cuda)
#else
#define EVERY_BACKEND       EVERY_CPU_BACKEND
#define EVERY_BACKEND_CASES EVERY_CPU_BACKEND_CASES
#endif

/* Skips the current test by name if this machine cannot run the backend. */
static inline struct kernel_ctx *open_backend(const char *isa, enum activations activations,
                                              int n_threads)
{
    struct err err;
    struct kernel_ctx *c;
    for (const struct kernel_backend *const *b = KERNEL_BACKENDS; *b; b++) {
        static char why[64];
        if (strcmp((*b)->name, isa) != 0 || (*b)->available()) continue;
        snprintf(why, sizeof why, "this machine cannot run the %s backend", isa);
        SKIP(why);
    }
    CHECK_OK(kernel_ctx_create(kernel_options_default(isa, activations, n_threads), &c, &err));
    return c;
}

static inline void check_bits(const float *got, const float *want, size_t n, const char *what,
                              size_t a, size_t b)
{
    for (size_t i = 0; i < n; i++)
        if (memcmp(&got[i], &want[i], sizeof *got) != 0)
            test_fail(__FILE__, __LINE__, "%s (%zu, %zu): element %zu is %.9g, not %.9g", what, a,
                      b, i, (double)got[i], (double)want[i]);
}

/* ---- matrices ---- */

/* The offsets of a block type's f16 scale and f16 minimum (0: none; it is never first). */
static inline void scale_places(enum dtype t, size_t *scale, size_t *min)
{
    *scale = t == DTYPE_Q2_K ? 80 : t == DTYPE_Q3_K ? 108 : t == DTYPE_Q6_K ? 208 : 0;
    *min = t == DTYPE_Q4_1 || t == DTYPE_Q5_1 || t == DTYPE_Q4_K || t == DTYPE_Q5_K ? 2
           : t == DTYPE_Q2_K                                                        ? 82
                                                                                    : 0;
}

/* One element or block of plausible magnitude; everything but the scales is random bits. */
static inline void random_block(enum dtype t, uint8_t *p)
{
    /* now and then a subnormal f16 */
    float value = random_float(random_u32() % 16 ? 0.05f : 3e-7f);
    uint16_t half = t == DTYPE_BF16 ? dtype_f32_to_bf16(value) : dtype_f32_to_f16(value),
             low = dtype_f32_to_f16(random_float(0.3f));
    size_t scale, min;
    if (t == DTYPE_F32) memcpy(p, &value, 4);
    else if (t == DTYPE_F16 || t == DTYPE_BF16) memcpy(p, &half, 2);
    else if (t == DTYPE_F8_E4M3) *p = float_to_f8(random_float(8));
    else {
        for (size_t i = 0; i < dtype_block_bytes(t); i++) p[i] = (uint8_t)random_u32();
        scale_places(t, &scale, &min);
        memcpy(p + scale, &half, 2);
        if (min) memcpy(p + min, &low, 2);
    }
}

/* One matrix at an odd address, and its numbers in f32. */
struct matrix {
    uint8_t *bytes;
    float *scales; /* for F8_E4M3 */
    struct weight_src src;
    float *wide; /* [n_out, n_in] */
};

static inline struct matrix make_matrix(enum dtype t, size_t n_out, size_t n_in)
{
    size_t row_bytes = dtype_row_bytes(t, n_in), cols = (n_in + F8_BLOCK - 1) / F8_BLOCK,
           rows = (n_out + F8_BLOCK - 1) / F8_BLOCK;
    struct matrix m = {
        .bytes = mem_calloc(n_out * row_bytes + 1, 1),
        .wide = MEM_ARRAY(float, n_out *n_in),
    };
    if (t == DTYPE_F8_E4M3) m.scales = random_floats(rows * cols, 0.01f);
    m.src = (struct weight_src){
        .dtype = t, .data = m.bytes + 1, .n_out = n_out, .n_in = n_in, .scales = m.scales
    };
    for (size_t i = 0; i < n_out * n_in / dtype_block(t); i++)
        random_block(t, m.bytes + 1 + i * dtype_block_bytes(t));
    for (size_t i = 0; i < n_out; i++) {
        float *row = m.wide + i * n_in;
        dtype_to_f32(t, m.bytes + 1 + i * row_bytes, row, n_in);
        for (size_t k = 0; k < n_in && m.scales; k++)
            row[k] *= m.scales[i / F8_BLOCK * cols + k / F8_BLOCK];
    }
    return m;
}

static inline void free_matrix(struct matrix *m)
{
    mem_free(m->bytes);
    mem_free(m->scales);
    mem_free(m->wide);
}

/* Packs the matrix and checks the properties of the result against its source. */
static inline struct weight pack_one(struct kernel_ctx *c, const struct matrix *m)
{
    struct weight w;
    const struct weight_pack_args a = { .parts = &m->src, .n_parts = 1 };
    CHECK_OK(c->weight_ops->pack(c, &a, &w, NULL));
    float *row = MEM_ARRAY(float, m->src.n_in);
    for (size_t i = 0; i < m->src.n_out; i++) {
        const int32_t id = (int32_t)i;
        c->ops->embed(c, row, &w, &id, 1);
        check_bits(row, m->wide + i * m->src.n_in, m->src.n_in, "embed", i, m->src.n_in);
    }
    mem_free(row);
    return w;
}

#endif
