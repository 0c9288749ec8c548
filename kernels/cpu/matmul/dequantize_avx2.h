/* dequantize_avx2.h - dequantises weights of any layout to f32, 32 k of a panel at a time, on 8
 * lanes, bit for bit as weight_layout_dequantize. `layout` and `h`, the half of a panel, are
 * constants at every call. Only for files built with AVX2. Thread: any. */
#ifndef BATON_KERNELS_CPU_MATMUL_DEQUANTIZE_AVX2_H
#define BATON_KERNELS_CPU_MATMUL_DEQUANTIZE_AVX2_H

#include "kernels/cpu/matmul/int_accumulate_avx2.h"
#include "kernels/cpu/simd_avx2.h"

BLOCK_INLINE __m256i load8(const void *p) { return _mm256_loadu_si256(p); }

/* Sorts the f16 of each pair: the lower halves of all lanes come first, then the upper ones, within
 * each half of the register. */
BLOCK_INLINE __m256i split_f16(__m256i pair)
{
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0,
                                           1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(pair, order), 0xd8);
}

BLOCK_INLINE __m256 even_of(const int layout, __m256i pair)
{
    return layout == LAYOUT_F16 ? _mm256_cvtph_ps(_mm256_castsi256_si128(split_f16(pair)))
                                : even8_bf16(pair);
}

BLOCK_INLINE __m256 odd_of(const int layout, __m256i pair)
{
    return layout == LAYOUT_F16 ? _mm256_cvtph_ps(_mm256_extracti128_si256(split_f16(pair), 1))
                                : odd8_bf16(pair);
}

/* A byte of e4m3 in each lane. Subnormals (below 2^-6) get the exponent of 2^-6, whose implicit
 * leading 1 is then subtracted as 2^-6. */
BLOCK_INLINE __m256 f32_of_f8(__m256i byte)
{
    __m256i bits = _mm256_and_si256(byte, _mm256_set1_epi32(127)), at = _mm256_slli_epi32(bits, 20);
    __m256 normal = _mm256_castsi256_ps(_mm256_add_epi32(at, _mm256_set1_epi32(120 << 23)));
    __m256 tiny = _mm256_sub_ps(
        _mm256_castsi256_ps(_mm256_add_epi32(at, _mm256_set1_epi32(121 << 23))),
        _mm256_set1_ps(0x1p-6f));
    __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), bits),
            is_nan = _mm256_cmpeq_epi32(bits, _mm256_set1_epi32(127));
    __m256i magnitude = _mm256_castps_si256(
        _mm256_blendv_ps(normal, tiny, _mm256_castsi256_ps(is_tiny)));
    __m256i sign = _mm256_slli_epi32(_mm256_and_si256(byte, _mm256_set1_epi32(128)), 24);
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_or_si256(magnitude, sign), is_nan));
}

/* Converts F16 and BF16 in whole pairs, so an odd n_k writes one row more. */
BLOCK_INLINE void dequantize_pairs(float *dst, const char *panel, size_t k, size_t n_k,
                                   const int layout)
{
    const char *pairs = panel + k / 2 * PANEL * 4;
    for (size_t i = 0; i < (n_k + 1) / 2 * 2; i++) { /* half registers */
        __m256i pair = load8(pairs + i * HALF * 4);
        float *at = dst + i / 2 * 2 * PANEL + i % 2 * HALF;
        _mm256_storeu_ps(at, even_of(layout, pair));
        _mm256_storeu_ps(at + PANEL, odd_of(layout, pair));
    }
}

/* Converts whole words of four k; k .. k+n_k share a scale. */
BLOCK_INLINE void dequantize_f8(float *dst, const char *panel, size_t n_in, size_t k, size_t n_k)
{
    const float *scales = (const float *)(panel + (n_in + 3) / 4 * PANEL * 4);
    __m256 scale = _mm256_broadcast_ss(scales + k / F8_BLOCK);
    const char *words = panel + k / 4 * PANEL * 4;
    for (size_t i = 0; i < (n_k + 3) / 4 * 2; i++) { /* half registers */
        __m256i word = load8(words + i * HALF * 4);
        float *at = dst + i / 2 * 4 * PANEL + i % 2 * HALF;
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++, word = _mm256_srli_epi32(word, 8))
            _mm256_storeu_ps(at + j * PANEL, _mm256_mul_ps(f32_of_f8(word), scale));
    }
}

/* Converts a block of integers; `scale` is for layouts W4 and W8. */
BLOCK_INLINE void dequantize_block(float *dst, const char *panel, size_t b, const float *scale,
                                   const int layout)
{
    const struct block_kind kind = block_kind(layout);
    const int n_parts = kind.halves ? 2 : 1, n_words = WORDS / n_parts;
    for (int part = 0; part < n_parts; part++) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            struct scales256 s = block_scales256(layout, panel, b, (size_t)part, h);
            if (!kind.scaled) s.d = _mm256_loadu_ps(scale + HALF * h);
            for (int i = part * n_words; i < (part + 1) * n_words; i++) {
                __m256i word = block_word256(layout, panel, b, i, h);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++, word = _mm256_srli_epi32(word, 8)) {
                    __m256i q = _mm256_and_si256(word, _mm256_set1_epi32(255));
                    if (kind.zero) q = _mm256_sub_epi32(q, _mm256_set1_epi32(LAYOUTS[layout].zero));
                    __m256 f = _mm256_mul_ps(_mm256_cvtepi32_ps(q), s.d);
                    _mm256_storeu_ps(dst + (4 * i + j) * PANEL + HALF * h,
                                     kind.has_m ? _mm256_add_ps(f, s.m) : f);
                }
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
