/* f8_to_bf16_avx512.h - converts e4m3 to bf16, exactly, on 32 lanes of 16 bits. Only for files
 * built with AVX-512. Thread: any. */
#ifndef BATON_KERNELS_CPU_MATMUL_F8_TO_BF16_AVX512_H
#define BATON_KERNELS_CPU_MATMUL_F8_TO_BF16_AVX512_H

#include "kernels/cpu/matmul/int_blocks.h"
#include "kernels/cpu/simd_avx512.h"

/* Each 16-bit lane has a byte of e4m3 in its upper half. Shifted right by four, exponent and
 * mantissa are in the fields of bf16 and need another bias; the eight magnitudes below 2^-6 are
 * subnormal and come from a table. */
BLOCK_INLINE __m512i bf16_of_f8(__m512i v)
{
    /* k * 2^-9: */
    const __m512i tiny = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                          0, 0, 0, 0, 0, 0x3c60, 0x3c40, 0x3c20, 0x3c00, 0x3bc0,
                                          0x3b80, 0x3b00, 0);
    __m512i bits = _mm512_and_si512(v, _mm512_set1_epi16(0x7f00));
    __m512i magnitude = _mm512_add_epi16(_mm512_srli_epi16(bits, 4),
                                         _mm512_set1_epi16((127 - 7) << 7));
    __mmask32 is_tiny = _mm512_cmplt_epu16_mask(bits, _mm512_set1_epi16(0x0800)),
              is_nan = _mm512_cmpeq_epi16_mask(bits, _mm512_set1_epi16(0x7f00));
    magnitude = _mm512_mask_permutexvar_epi16(magnitude, is_tiny, _mm512_srli_epi16(bits, 8), tiny);
    magnitude = _mm512_mask_mov_epi16(magnitude, is_nan, _mm512_set1_epi16(0x7fc0));
    /* magnitude | (v & sign) */
    return _mm512_ternarylogic_epi32(magnitude, v, _mm512_set1_epi16(-32768), 0xf8);
}

/* Converts one word to the pairs (4i, 4i+1) and (4i+2, 4i+3). */
BLOCK_INLINE void pairs_of_f8(__m512i pairs[2], __m512i word)
{
    const __m512i first = _mm512_broadcast_i32x4(
        _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13));
    const __m512i second = _mm512_broadcast_i32x4(
        _mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15));
    pairs[0] = bf16_of_f8(_mm512_shuffle_epi8(word, first));
    pairs[1] = bf16_of_f8(_mm512_shuffle_epi8(word, second));
}

BLOCK_INLINE const float *f8_scales(const char *panel, size_t n_in)
{
    return (const float *)(panel + (n_in + 3) / 4 * PANEL * 4);
}

#endif
