/* simd_avx512.h - building blocks on 16 lanes: masks, the tree of sum16, exp. Only for files built
 * with AVX-512. Thread: any. */
#ifndef BATON_KERNELS_CPU_SIMD_AVX512_H
#define BATON_KERNELS_CPU_SIMD_AVX512_H

#include "kernels/cpu/simd_avx2.h"

/* The first n of 16 lanes; n may exceed 16. */
static inline __mmask16 mask16(size_t n) { return (__mmask16)(n >= 16 ? 0xffff : (1u << n) - 1); }

/* Lanes l + l+8, the first step of sum16's tree. */
static inline __m256 fold16(__m512 v)
{
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

static inline float tree16(__m512 v) { return tree8(fold16(v)); }

/* exp.h's exp_ref on 16 lanes; see exp8. */
static inline __m512 exp16(__m512 x)
{
    __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(EXP_MIN), _CMP_NLT_UQ);
    x = _mm512_min_ps(_mm512_set1_ps(EXP_MAX), x);
    __m512 t = _mm512_fmadd_ps(x, _mm512_set1_ps(EXP_LOG2E), _mm512_set1_ps(EXP_ROUND));
    __m512 n = _mm512_sub_ps(t, _mm512_set1_ps(EXP_ROUND));
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(EXP_LN2_HI), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(EXP_LN2_LO), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(EXP_C6), r, _mm512_set1_ps(EXP_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(EXP_C2));
    __m512 e = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r), _mm512_set1_ps(1.0f));
    __m512i scale = _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(t), 23),
                                     _mm512_set1_epi32(0x3f800000));
    return _mm512_maskz_mul_ps(keep, e, _mm512_castsi512_ps(scale));
}

/* The lower and the upper bf16 of each pair. */
static inline __m512 even16_bf16(__m512i pair)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
}
static inline __m512 odd16_bf16(__m512i pair)
{
    return _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(-65536)));
}

#endif
