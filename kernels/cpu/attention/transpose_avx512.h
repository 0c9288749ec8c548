/* transpose_avx512.h - transposes rows of the KV cache: 16 rows become registers
 * whose lanes are those rows, in squares of 16 x 16 words, which are f32 or pairs of bf16. Only for
 * files built with AVX-512. Thread: any. */
#ifndef BATON_KERNELS_CPU_ATTENTION_TRANSPOSE_AVX512_H
#define BATON_KERNELS_CPU_ATTENTION_TRANSPOSE_AVX512_H

#include "kernels/cpu/attention/attention.h"
#include "kernels/cpu/simd_avx512.h"

#define INLINE static inline __attribute__((always_inline))

/* out[i] lane j = in[j] lane i, of 32-bit lanes. */
INLINE void transpose16x16(__m512i r[16])
{
    __m512i t[16];
    /* 2 x 2 words, then 2 x 2 pairs, inside each quarter of a register: quarter q of r[4g + i]
     * holds column 4q + i of rows 4g .. 4g + 3. */
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < 16; g += 4) {
        r[g] = _mm512_unpacklo_epi64(t[g], t[g + 2]);
        r[g + 1] = _mm512_unpackhi_epi64(t[g], t[g + 2]);
        r[g + 2] = _mm512_unpacklo_epi64(t[g + 1], t[g + 3]);
        r[g + 3] = _mm512_unpackhi_epi64(t[g + 1], t[g + 3]);
    }
    /* Quarters: the same, four by four. */
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i even0 = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88),
                odd0 = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        __m512i even1 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88),
                odd1 = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        t[i] = _mm512_shuffle_i32x4(even0, even1, 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
        t[4 + i] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = t[i];
}

/* Elements d .. d + 15 (bf16: d + 31) of 16 rows, transposed; `left` of them exist. Whole
 * loads are not masked: masked ones are slow to come. */
INLINE void load_f32(__m512i r[16], const char *const rows[16], size_t at, size_t left)
{
    if (left >= 16)
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) r[j] = _mm512_loadu_si512(rows[j] + at);
    else
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) r[j] = _mm512_maskz_loadu_epi32(mask16(left), rows[j] + at);
    transpose16x16(r);
}

INLINE void load_bf16(__m512i r[16], const char *const rows[16], size_t at, size_t left)
{
    if (left >= 32)
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) r[j] = _mm512_loadu_si512(rows[j] + at);
    else
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            r[j] = _mm512_maskz_loadu_epi16((1u << left) - 1, rows[j] + at);
    transpose16x16(r);
}

/* Rows j..j+15; past the end the last row is repeated. */
INLINE void panel_rows(const char *out[16], const struct kv_row_ptrs *rows, size_t j, size_t n)
{
    for (size_t i = 0; i < 16; i++) out[i] = rows->at[j + i < n ? j + i : n - 1] + rows->offset;
}

INLINE void prefetch_lines(const char *p, size_t bytes)
{
#pragma GCC unroll 4
    for (size_t at = 0; at < bytes; at += CACHE_LINE) _mm_prefetch(p + at, _MM_HINT_T0);
}

#endif
