/* int_accumulate_avx512.h - integer accumulation on 16 lanes, without the integer products: sums of
 * inputs, the step from a group's integer sum to the f32 sum, and a tile's arguments. Only for
 * files built with AVX-512. Thread: any. */
#ifndef BATON_KERNELS_CPU_MATMUL_INT_ACCUMULATE_AVX512_H
#define BATON_KERNELS_CPU_MATMUL_INT_ACCUMULATE_AVX512_H

#include "kernels/cpu/matmul/int_blocks_avx512.h"

/* Returns the sum of a block's inputs: of one half (0, 1), or of both (2). */
BLOCK_INLINE int32_t x_sum(const struct act_block *x, const int part)
{
    return part == 2 ? x->sum[0] + x->sum[1] : x->sum[part];
}

BLOCK_INLINE __m512i x_sum_times(const struct act_block *x, const int part, const int factor)
{
    return _mm512_set1_epi32(x_sum(x, part) * factor);
}

BLOCK_INLINE __m512i broadcast_x(const struct act_block *x, int term, int word)
{
    int32_t four;
    __builtin_memcpy(&four, x->q[term] + 4 * word, sizeof four);
    return _mm512_set1_epi32(four);
}

/* Adds one group, whose integer sum is `sum`, to acc. */
BLOCK_INLINE __m512 accumulate(__m512 acc, __m512i sum, const struct act_block *x, const int part,
                               const struct block_kind kind, struct scales512 w)
{
    __m512 s = _mm512_set1_ps(x->s), i = _mm512_cvtepi32_ps(sum);
    if (!kind.scaled) return _mm512_fmadd_ps(i, s, acc);
    acc = _mm512_fmadd_ps(_mm512_mul_ps(i, s), w.d, acc);
    if (!kind.has_m) return acc;
    __m512 ssum = part == 2 ? _mm512_set1_ps(x->ssum)
                            : _mm512_set1_ps((float)x_sum(x, part) * x->s);
    return _mm512_fmadd_ps(ssum, w.m, acc);
}

/* ---- tiles ---- */

struct int_tile {
    float *acc;
    size_t acc_stride; /* from panel to panel */
    const struct act_block *x[INT_TILE_ROWS];
    size_t n_rows, n_blocks; /* of x only n_rows differ; the others repeat the
                              * last */
    const struct unpacked_panel *w;
    int zero;
    const char *next; /* asked for meanwhile, NEXT_LINES per block; or NULL */
};

enum { NEXT_LINES = 3 };

BLOCK_INLINE float *acc_at(const struct int_tile *t, int p, int r)
{
    size_t row = (size_t)r < t->n_rows ? (size_t)r : t->n_rows - 1;
    return t->acc + (size_t)p * t->acc_stride + row * PANEL;
}

#endif
