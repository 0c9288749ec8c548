/* int_blocks_avx512.h - packed integers in 16 lanes: the words and the scales of one block of 32 k
 * of a panel, for any layout. `layout` is a constant at every call, so each caller is left with the
 * few instructions of its layout. Only for files built with AVX-512. Thread: any. */
#ifndef BATON_KERNELS_CPU_MATMUL_INT_BLOCKS_AVX512_H
#define BATON_KERNELS_CPU_MATMUL_INT_BLOCKS_AVX512_H

#include "kernels/cpu/matmul/int_blocks.h"
#include "kernels/cpu/simd_avx512.h"

struct scales512 {
    __m512 d, m;
};

static inline __m512 f16x16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
static inline __m512 i8x16(const void *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p)));
}

/* Returns word i of the eight of a block: k = 4i .. 4i+3, a byte each. */
BLOCK_INLINE __m512i block_word512(const int layout, const char *panel, size_t b, const int i)
{
    const uint32_t(*word)[PANEL] = block_words(layout, panel, b);
    if (block_kind(layout).bytes) return _mm512_loadu_si512(word[i]);
    __m512i both = _mm512_loadu_si512(word[i / 2]);
    return _mm512_and_si512(i % 2 ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
}

/* Returns the scales of group `part` of block b if groups have 16 k, otherwise of the block. In
 * super blocks they are f16 times a small integer, which is exact in f32. Layouts without d leave
 * it zero. */
BLOCK_INLINE struct scales512 block_scales512(const int layout, const char *panel, size_t b,
                                              const size_t part)
{
    const struct weight_layout_offsets *at = &LAYOUT_OFFSETS[layout];
    const char *block = block_at(layout, panel, b);
    struct scales512 s = { _mm512_setzero_ps(), _mm512_setzero_ps() };
    if (!block_kind(layout).scaled) return s;
    s.d = f16x16(block + at->d);
    if (block_kind(layout).has_m) s.m = f16x16(block + at->m);
    if (!at->scale) return s;
    const char *group = block + block_group(layout, b, part);
    s.d = _mm512_mul_ps(s.d, i8x16(group + at->scale));
    s.m = _mm512_mul_ps(_mm512_xor_ps(s.m, _mm512_set1_ps(-0.0f)), i8x16(group + at->min));
    return s;
}

#endif
