/* int_accumulate_avx2.h - integer accumulation on 8 lanes: a panel is two halves of 8 outputs;
 * these functions handle half h of its words, scales and sums. `layout`, `part` and similar
 * arguments are constants at every call. Only for files built with AVX2. Thread: any. */
#ifndef BATON_KERNELS_CPU_MATMUL_INT_ACCUMULATE_AVX2_H
#define BATON_KERNELS_CPU_MATMUL_INT_ACCUMULATE_AVX2_H

#include "kernels/cpu/matmul/int_blocks.h"
#include "kernels/cpu/simd_avx2.h"

enum { HALF = PANEL / 2 };

struct scales256 {
    __m256 d, m;
};

static inline __m256 f16x8(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
static inline __m256 i8x8(const void *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p)));
}

/* Returns word i of the eight of a block: k = 4i .. 4i+3, a byte each. */
BLOCK_INLINE __m256i block_word256(const int layout, const char *panel, size_t b, const int i,
                                   const int h)
{
    const uint32_t(*word)[PANEL] = block_words(layout, panel, b);
    if (block_kind(layout).bytes) return _mm256_loadu_si256((const __m256i *)(word[i] + HALF * h));
    __m256i both = _mm256_loadu_si256((const __m256i *)(word[i / 2] + HALF * h));
    return _mm256_and_si256(i % 2 ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
}

/* Returns the scales of group `part` of block b if groups have 16 k, otherwise of the block. In
 * super blocks they are f16 times a small integer, which is exact in f32. Layouts without d leave
 * it zero. */
BLOCK_INLINE struct scales256 block_scales256(const int layout, const char *panel, size_t b,
                                              const size_t part, const int h)
{
    const struct weight_layout_offsets *at = &LAYOUT_OFFSETS[layout];
    const char *block = block_at(layout, panel, b);
    const size_t lane = (size_t)(HALF * h);
    struct scales256 s = { _mm256_setzero_ps(), _mm256_setzero_ps() };
    if (!block_kind(layout).scaled) return s;
    s.d = f16x8(block + at->d + 2 * lane);
    if (block_kind(layout).has_m) s.m = f16x8(block + at->m + 2 * lane);
    if (!at->scale) return s;
    const char *group = block + block_group(layout, b, part) + lane;
    s.d = _mm256_mul_ps(s.d, i8x8(group + at->scale));
    s.m = _mm256_mul_ps(_mm256_xor_ps(s.m, _mm256_set1_ps(-0.0f)), i8x8(group + at->min));
    return s;
}

/* Returns the sum of a block's inputs: of one half (0, 1), or of both (2). */
BLOCK_INLINE int32_t x_sum(const struct act_block *x, const int part)
{
    return part == 2 ? x->sum[0] + x->sum[1] : x->sum[part];
}

BLOCK_INLINE __m256i x_sum_times(const struct act_block *x, const int part, const int factor)
{
    return _mm256_set1_epi32(x_sum(x, part) * factor);
}

BLOCK_INLINE __m256i broadcast_x(const struct act_block *x, int term, int word)
{
    int32_t four;
    __builtin_memcpy(&four, x->q[term] + 4 * word, sizeof four);
    return _mm256_set1_epi32(four);
}

/* Adds one group, whose integer sum is `sum`, to acc. */
BLOCK_INLINE __m256 accumulate(__m256 acc, __m256i sum, const struct act_block *x, const int part,
                               const struct block_kind kind, struct scales256 w)
{
    __m256 s = _mm256_set1_ps(x->s), i = _mm256_cvtepi32_ps(sum);
    if (!kind.scaled) return _mm256_fmadd_ps(i, s, acc);
    acc = _mm256_fmadd_ps(_mm256_mul_ps(i, s), w.d, acc);
    if (!kind.has_m) return acc;
    __m256 ssum = part == 2 ? _mm256_set1_ps(x->ssum)
                            : _mm256_set1_ps((float)x_sum(x, part) * x->s);
    return _mm256_fmadd_ps(ssum, w.m, acc);
}

#endif
