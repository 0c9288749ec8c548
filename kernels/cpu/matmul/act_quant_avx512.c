/* act_quant_avx512.c - quantises inputs to two int8 terms in blocks of 32, as act_quant.h defines;
 * and unpacks integer panels for tile_int. Thread: engine, compute pool. */
#include "kernels/cpu/matmul/int_blocks_avx512.h"
#include "kernels/cpu/microkernels_avx512.h"

/* Stores the two terms of 16 numbers and returns the sum of the numbers. */
static inline int32_t store_half(struct act_block *out, int half, __m512i number)
{
    __m512i high = _mm512_srai_epi32(_mm512_add_epi32(number, _mm512_set1_epi32(64)), ACT_LOW_BITS);
    __m512i low = _mm512_sub_epi32(number, _mm512_slli_epi32(high, ACT_LOW_BITS));
    _mm_storeu_si128((__m128i *)(out->q[0] + 16 * half), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128((__m128i *)(out->q[1] + 16 * half), _mm512_cvtepi32_epi8(low));
    return _mm512_reduce_add_epi32(number);
}

static inline void quantize_block(struct act_block *out, __m512 x0, __m512 x1)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    /* Magnitudes are compared as integers, in which infinities and NaNs are the largest, so the
     * maximum cannot miss one. */
    __m512i top = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(x0), magnitude),
                                   _mm512_and_si512(_mm512_castps_si512(x1), magnitude));
    int32_t a_bits = _mm512_reduce_max_epi32(top);
    float a;
    __builtin_memcpy(&a, &a_bits, sizeof a);
    if (a_bits >= 0x7f800000 || a < ACT_ABSMAX_MIN) {
        *out = (struct act_block){ .s = a_bits >= 0x7f800000 ? __builtin_nanf("") : 0 };
        out->ssum = out->s;
        return;
    }
    __m512 r = _mm512_set1_ps(ACT_Q_MAX / a);
    out->s = a / ACT_Q_MAX;
    out->sum[0] = store_half(out, 0, _mm512_cvtps_epi32(_mm512_mul_ps(x0, r)));
    out->sum[1] = store_half(out, 1, _mm512_cvtps_epi32(_mm512_mul_ps(x1, r)));
    out->ssum = (float)(out->sum[0] + out->sum[1]) * out->s;
}

void avx512_quantize(struct act_block *out, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + BLOCK_K <= n; i += BLOCK_K)
        quantize_block(out++, _mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i + 16));
    if (i < n)
        quantize_block(out, _mm512_maskz_loadu_ps(mask16(n - i), x + i),
                       _mm512_maskz_loadu_ps(mask16(n - i > 16 ? n - i - 16 : 0), x + i + 16));
}

/* Prefetches what is unpacked next: the panel's next blocks, or after its last one the panel that
 * takes its place in the next group of GEMM_PANELS. */
BLOCK_INLINE void unpack_layout(struct unpacked_panel *dst, const char *panel, size_t b0,
                                size_t n_blocks, const struct weight *w, const int layout)
{
    const struct block_kind kind = block_kind(layout);
    const size_t n_parts = kind.halves ? 2 : 1;
    const size_t all = act_blocks(w->n_in), first = b0 + n_blocks < all ? b0 + n_blocks : 0,
                 left = all - first;
    dst->next = panel + first * block_bytes(layout) +
                (first ? 0 : GEMM_PANELS * weight_layout_panel_bytes(layout, w->n_in));
    dst->next_bytes = (left < UNPACK_K / BLOCK_K ? left : UNPACK_K / BLOCK_K) * block_bytes(layout);
    for (size_t b = 0; b < n_blocks; b++) {
#pragma GCC unroll 8
        for (int i = 0; i < WORDS; i++)
            _mm512_storeu_si512(dst->q[b * WORDS + (size_t)i],
                                block_word512(layout, panel, b0 + b, i));
        if (!kind.scaled) continue;
        for (size_t part = 0; part < n_parts; part++) {
            struct scales512 s = block_scales512(layout, panel, b0 + b, part);
            _mm512_storeu_ps(dst->d[b * n_parts + part], s.d);
            if (kind.has_m) _mm512_storeu_ps(dst->m[b * n_parts + part], s.m);
        }
    }
}

void avx512_unpack_int(struct unpacked_panel *dst, const struct weight *w, size_t i_panel,
                       size_t k_begin, size_t n_k)
{
    const char *panel = panel_at(w, i_panel, weight_layout_panel_bytes(w->layout, w->n_in));
    size_t b = k_begin / BLOCK_K, n = n_k / BLOCK_K;
    switch (w->layout) {
        INTEGER_LAYOUTS(LAYOUT_CASE, unpack_layout(dst, panel, b, n, w, LAYOUT))
    }
}
