/* blocks_avx512.h - packed integers in 16 lanes: the words and the scales of one block of 32 k's of a panel, whatever the form.
 *
 * `form` is a constant wherever these are called, so each caller is left with the few instructions of its own form. Only for files built
 * with AVX-512. */
#ifndef BATON_KERNELS_CPU_BLOCKS_AVX512_H
#define BATON_KERNELS_CPU_BLOCKS_AVX512_H

#include "kernels/cpu/blocks.h"
#include "kernels/cpu/lanes_avx512.h"

struct scales512 {
    __m512 d, m;
};

static inline __m512 f16x16(const uint16_t *h) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)h)); }

/* Word i of the eight of a block: k's 4i .. 4i+3, a byte each. */
BLOCK_INLINE __m512i block_word512(const int form, const char *panel, size_t b, const int i)
{
    const uint32_t(*word)[PANEL] = block_words(form, panel, b);
    if (block_is_bytes(form)) return _mm512_loadu_si512(word[i]);
    __m512i both = _mm512_loadu_si512(word[i / 2]);
    return _mm512_and_si512(i % 2 ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
}

/* Scales of a super block's group: d and m are f16 times a small integer, both exact in f32. */
BLOCK_INLINE struct scales512 super_scales512(const uint16_t *d, const uint16_t *dmin, __m128i scale, __m512i min)
{
    __m512 minus = _mm512_xor_ps(f16x16(dmin), _mm512_set1_ps(-0.0f));
    return (struct scales512){ .d = _mm512_mul_ps(f16x16(d), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scale))),
                               .m = _mm512_mul_ps(minus, _mm512_cvtepi32_ps(min)) };
}

/* Of group `half` (groups of 16) of block b, or of the block. Forms without d leave it zero. */
BLOCK_INLINE struct scales512 block_scales512(const int form, const char *panel, size_t b, const size_t half)
{
    struct scales512 s = { _mm512_setzero_ps(), _mm512_setzero_ps() };
    size_t           g = b % 8 * 2 + half;
    switch (form) {
    case FORM_I8: s.d = f16x16(((const struct block_i8 *)panel)[b].d); break;
    case FORM_U4: s.d = f16x16(((const struct block_u4 *)panel)[b].d); break;
    case FORM_I8M:
        s.d = f16x16(((const struct block_i8m *)panel)[b].d);
        s.m = f16x16(((const struct block_i8m *)panel)[b].m);
        break;
    case FORM_U4M:
        s.d = f16x16(((const struct block_u4m *)panel)[b].d);
        s.m = f16x16(((const struct block_u4m *)panel)[b].m);
        break;
    case FORM_K8: {
        const struct block_k8 *k = (const struct block_k8 *)panel + b / 8;
        s = super_scales512(k->d, k->dmin, _mm_loadu_si128((const __m128i *)k->scale[g]),
                            _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)k->min[g])));
        break;
    }
    case FORM_K4: {
        const struct block_k4 *k = (const struct block_k4 *)panel + b / 8;
        s = super_scales512(k->d, k->dmin, _mm_loadu_si128((const __m128i *)k->scale[g]),
                            _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)k->min[g])));
        break;
    }
    case FORM_S8: {
        const struct block_s8 *k = (const struct block_s8 *)panel + b / 8;
        s = super_scales512(k->d, k->dmin, _mm_loadu_si128((const __m128i *)k->scale[b % 8]),
                            _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)k->min[b % 8])));
        break;
    }
    case FORM_S4: {
        const struct block_s4 *k = (const struct block_s4 *)panel + b / 8;
        s = super_scales512(k->d, k->dmin, _mm_loadu_si128((const __m128i *)k->scale[b % 8]),
                            _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)k->min[b % 8])));
        break;
    }
    default: break;
    }
    return s;
}

#endif
