/* simd_avx2.h - building blocks on 8 lanes: partial loads, the tree of sum16, exp. Only for files
 * built with AVX2. Thread: any. */
#ifndef BATON_KERNELS_CPU_SIMD_AVX2_H
#define BATON_KERNELS_CPU_SIMD_AVX2_H

#include <immintrin.h>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/exp.h"

/* The 16 partial sums of sum16: lanes 0..7 and 8..15. */
struct sum16 {
    __m256 low, high;
};

/* All ones in the first n of 8 lanes; n may exceed 8. */
static inline __m256i mask8(size_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n > 8 ? 8 : (int)n),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline __m256i mask8_from(size_t n, size_t skip) { return mask8(n > skip ? n - skip : 0); }

/* Lanes l + l+4, then l + l+2, then l + l+1. */
static inline float tree8(__m256 v)
{
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}

static inline float sum16_tree(struct sum16 s) { return tree8(_mm256_add_ps(s.low, s.high)); }

/* tree8 of eight vectors at once, result i from v[i]: the same additions, transposed. */
static inline __m256 tree8x8(const __m256 v[8])
{
    __m256 pair[4], quad[2];
    for (int i = 0; i < 4; i++) /* lanes of v[i] | lanes of v[i + 4] */
        pair[i] = _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20),
                                _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
    for (int i = 0; i < 2; i++)
        quad[i] = _mm256_add_ps(_mm256_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0x44),
                                _mm256_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0xee));
    return _mm256_add_ps(_mm256_shuffle_ps(quad[0], quad[1], 0x88),
                         _mm256_shuffle_ps(quad[0], quad[1], 0xdd));
}

/* exp.h's exp_ref on 8 lanes. min has NaN as its second operand come through; the comparison is
 * true for NaN. */
static inline __m256 exp8(__m256 x)
{
    __m256 keep = _mm256_cmp_ps(x, _mm256_set1_ps(EXP_MIN), _CMP_NLT_UQ);
    x = _mm256_min_ps(_mm256_set1_ps(EXP_MAX), x);
    __m256 t = _mm256_fmadd_ps(x, _mm256_set1_ps(EXP_LOG2E), _mm256_set1_ps(EXP_ROUND));
    __m256 n = _mm256_sub_ps(t, _mm256_set1_ps(EXP_ROUND));
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(EXP_LN2_HI), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(EXP_LN2_LO), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(EXP_C6), r, _mm256_set1_ps(EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(EXP_C2));
    __m256 e = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(r, r), p, r), _mm256_set1_ps(1.0f));
    __m256i scale = _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(t), 23),
                                     _mm256_set1_epi32(0x3f800000));
    return _mm256_and_ps(_mm256_mul_ps(e, _mm256_castsi256_ps(scale)), keep);
}

/* The lower and the upper bf16 of each pair. */
static inline __m256 even8_bf16(__m256i pair)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16));
}
static inline __m256 odd8_bf16(__m256i pair)
{
    return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(-65536)));
}

#endif
