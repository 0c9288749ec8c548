/* act_quant_avx2.c - quantises inputs to two int8 terms in blocks of 32, as act_quant.h defines, on
 * 8 lanes; and unpacks integer panels for tile_int. Thread: engine, compute pool. */
#include "kernels/cpu/matmul/int_accumulate_avx2.h"
#include "kernels/cpu/microkernels_avx2.h"

/* Packs four registers of eight numbers into 32 bytes, in order. */
static inline __m256i bytes_of(const __m256i v[4])
{
    /* packs works within 128 bits, so groups of four come out as 0 2 4 6 | 1 3 5 7 */
    __m256i q = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

static inline int32_t sum8(__m256i v)
{
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

/* Stores the two terms of x times r, and the sum of each half. */
static inline void store_terms(struct act_block *out, const __m256 x[4], __m256 r)
{
    __m256i number[4], high[4], low[4];
    for (int i = 0; i < 4; i++) {
        number[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], r));
        high[i] = _mm256_srai_epi32(_mm256_add_epi32(number[i], _mm256_set1_epi32(64)),
                                    ACT_LOW_BITS);
        low[i] = _mm256_sub_epi32(number[i], _mm256_slli_epi32(high[i], ACT_LOW_BITS));
    }
    _mm256_storeu_si256((__m256i *)out->q[0], bytes_of(high));
    _mm256_storeu_si256((__m256i *)out->q[1], bytes_of(low));
    out->sum[0] = sum8(_mm256_add_epi32(number[0], number[1]));
    out->sum[1] = sum8(_mm256_add_epi32(number[2], number[3]));
}

static inline void quantize_block(struct act_block *out, const float *in)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    __m256 x[4];
    __m256i top = _mm256_setzero_si256();
    /* Magnitudes are compared as integers, in which infinities and NaNs are the largest, so the
     * maximum cannot miss one. */
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_loadu_ps(in + 8 * i);
        top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_castps_si256(x[i]), magnitude));
    }
    __m128i top4 = _mm_max_epi32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    top4 = _mm_max_epi32(top4, _mm_shuffle_epi32(top4, 0x4e));
    top4 = _mm_max_epi32(top4, _mm_shuffle_epi32(top4, 0xb1));
    int32_t a_bits = _mm_cvtsi128_si32(top4);
    float a;
    __builtin_memcpy(&a, &a_bits, sizeof a);
    if (a_bits >= 0x7f800000 || a < ACT_ABSMAX_MIN) {
        *out = (struct act_block){ .s = a_bits >= 0x7f800000 ? __builtin_nanf("") : 0 };
        out->ssum = out->s;
        return;
    }
    store_terms(out, x, _mm256_set1_ps(ACT_Q_MAX / a));
    out->s = a / ACT_Q_MAX;
    out->ssum = (float)(out->sum[0] + out->sum[1]) * out->s;
}

void avx2_quantize(struct act_block *out, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + BLOCK_K <= n; i += BLOCK_K) quantize_block(out++, x + i);
    if (i == n) return;
    float last[BLOCK_K] = { 0 };
    __builtin_memcpy(last, x + i, (n - i) * sizeof *x);
    quantize_block(out, last);
}

BLOCK_INLINE void unpack_layout(struct unpacked_panel *dst, const char *panel, size_t b0,
                                size_t n_blocks, const int layout)
{
    const struct block_kind kind = block_kind(layout);
    const size_t n_parts = kind.halves ? 2 : 1;
    for (size_t b = 0; b < n_blocks; b++) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
#pragma GCC unroll 8
            for (int i = 0; i < WORDS; i++)
                _mm256_storeu_si256((__m256i *)dst->q[b * WORDS + (size_t)i][HALF * h],
                                    block_word256(layout, panel, b0 + b, i, h));
            for (size_t part = 0; part < n_parts && kind.scaled; part++) {
                struct scales256 s = block_scales256(layout, panel, b0 + b, part, h);
                _mm256_storeu_ps(dst->d[b * n_parts + part] + HALF * h, s.d);
                if (kind.has_m) _mm256_storeu_ps(dst->m[b * n_parts + part] + HALF * h, s.m);
            }
        }
    }
}

void avx2_unpack_int(struct unpacked_panel *dst, const struct weight *w, size_t i_panel,
                     size_t k_begin, size_t n_k)
{
    const char *panel = panel_at(w, i_panel, weight_layout_panel_bytes(w->layout, w->n_in));
    size_t b = k_begin / BLOCK_K, n = n_k / BLOCK_K;
    dst->next_bytes = 0;
    switch (w->layout) {
        INTEGER_LAYOUTS(LAYOUT_CASE, unpack_layout(dst, panel, b, n, LAYOUT))
    }
}
