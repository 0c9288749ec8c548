/* dequantize_avx512.h - dequantises weights of any layout to f32, 32 k of a panel at a time, on 16
 * lanes, bit for bit as weight_layout_dequantize. `layout` is a constant at every call. Only for
 * files built with AVX-512. Thread: any. */
#ifndef BATON_KERNELS_CPU_MATMUL_DEQUANTIZE_AVX512_H
#define BATON_KERNELS_CPU_MATMUL_DEQUANTIZE_AVX512_H

#include "kernels/cpu/matmul/f8_to_bf16_avx512.h"
#include "kernels/cpu/matmul/int_blocks_avx512.h"
#include "kernels/cpu/simd_avx512.h"

BLOCK_INLINE __m512 even_f16(__m512i pair) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pair)); }
BLOCK_INLINE __m512 odd_f16(__m512i pair)
{
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pair, 16)));
}
BLOCK_INLINE __m512 even_of(const int layout, __m512i pair)
{
    return layout == LAYOUT_F16 ? even_f16(pair) : even16_bf16(pair);
}
BLOCK_INLINE __m512 odd_of(const int layout, __m512i pair)
{
    return layout == LAYOUT_F16 ? odd_f16(pair) : odd16_bf16(pair);
}

/* Converts F16 and BF16 in whole pairs, so an odd n_k writes one row more. */
BLOCK_INLINE void dequantize_pairs(float *dst, const char *panel, size_t k, size_t n_k,
                                   const int layout)
{
    const char *pairs = panel + k / 2 * PANEL * 4;
    for (size_t i = 0; i < (n_k + 1) / 2; i++, dst += 2 * PANEL) {
        __m512i pair = _mm512_loadu_si512(pairs + i * PANEL * 4);
        _mm512_storeu_ps(dst, even_of(layout, pair));
        _mm512_storeu_ps(dst + PANEL, odd_of(layout, pair));
    }
}

/* Converts whole words of four k; k .. k+n_k share a scale. */
BLOCK_INLINE void dequantize_f8(float *dst, const char *panel, size_t n_in, size_t k, size_t n_k)
{
    __m512 scale = _mm512_set1_ps(f8_scales(panel, n_in)[k / F8_BLOCK]);
    const char *words = panel + k / 4 * PANEL * 4;
    for (size_t i = 0; i < (n_k + 3) / 4; i++) {
        __m512i pairs[2];
        pairs_of_f8(pairs, _mm512_loadu_si512(words + i * PANEL * 4));
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++, dst += 2 * PANEL) {
            _mm512_storeu_ps(dst, _mm512_mul_ps(even16_bf16(pairs[j]), scale));
            _mm512_storeu_ps(dst + PANEL, _mm512_mul_ps(odd16_bf16(pairs[j]), scale));
        }
    }
}

/* Converts a block of integers; `scale` is for layouts W4 and W8. */
BLOCK_INLINE void dequantize_block(float *dst, const char *panel, size_t b, const float *scale,
                                   const int layout)
{
    const struct block_kind kind = block_kind(layout);
    const int n_parts = kind.halves ? 2 : 1, n_words = WORDS / n_parts;
#pragma GCC unroll 2
    for (int part = 0; part < n_parts; part++) {
        struct scales512 s = block_scales512(layout, panel, b, (size_t)part);
        if (!kind.scaled) s.d = _mm512_loadu_ps(scale);
#pragma GCC unroll 8
        for (int i = part * n_words; i < (part + 1) * n_words; i++) {
            __m512i word = block_word512(layout, panel, b, i);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++, word = _mm512_srli_epi32(word, 8), dst += PANEL) {
                __m512i q = _mm512_and_si512(word, _mm512_set1_epi32(255));
                if (kind.zero) q = _mm512_sub_epi32(q, _mm512_set1_epi32(LAYOUTS[layout].zero));
                __m512 f = _mm512_mul_ps(_mm512_cvtepi32_ps(q), s.d);
                _mm512_storeu_ps(dst, kind.has_m ? _mm512_add_ps(f, s.m) : f);
            }
        }
    }
}

/* Writes k .. k+n_k of a panel to dst [up to 32][16]; k is a multiple of 32. Integer layouts write
 * all 32, others whole words. */
BLOCK_INLINE void dequantize_group(float *dst, const char *panel, const float *scale, size_t n_in,
                                   size_t k, size_t n_k, const int layout)
{
    if (layout == LAYOUT_F16 || layout == LAYOUT_BF16) dequantize_pairs(dst, panel, k, n_k, layout);
    else if (layout == LAYOUT_F8) dequantize_f8(dst, panel, n_in, k, n_k);
    else dequantize_block(dst, panel, k / BLOCK_K, scale, layout);
}

#endif
