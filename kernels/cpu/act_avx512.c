/* act_avx512.c - inputs rounded to int8 in blocks of 32, as act.h defines; and integer panels unpacked for tile_int. Thread: engine, pool. */
#include "kernels/cpu/blocks_avx512.h"
#include "kernels/cpu/loops_avx512.h"

/* The two sums of q: bytes are added up as unsigned ones 128 too large. */
static inline void store_sums(struct act_block *out, __m256i q)
{
    __m256i sad = _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    __m256i half = _mm256_add_epi64(sad, _mm256_shuffle_epi32(sad, 0x4e));
    int     low = _mm256_cvtsi256_si32(half) - 128 * 16, high = _mm_cvtsi128_si32(_mm256_extracti128_si256(half, 1)) - 128 * 16;
    out->sum[0] = (int16_t)low;
    out->sum[1] = (int16_t)high;
    out->ssum = (float)(low + high) * out->s;
}

static inline void quantize_block(struct act_block *out, __m512 x0, __m512 x1)
{
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    /* As integers the bits of magnitudes are in order, infinities and NaNs on top: neither can hide behind a comparison. */
    __m512i top = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(x0), magnitude), _mm512_and_si512(_mm512_castps_si512(x1), magnitude));
    int32_t a_bits = _mm512_reduce_max_epi32(top);
    float   a;
    __builtin_memcpy(&a, &a_bits, sizeof a);
    __m256i q = _mm256_setzero_si256();
    out->s = a_bits >= 0x7f800000 ? __builtin_nanf("") : 0;
    if (a < ACT_TOP_LEAST || a_bits >= 0x7f800000) {
        _mm256_storeu_si256((__m256i *)out->q, q);
    } else {
        __m512 r = _mm512_set1_ps(127.0f / a);
        __m128i q0 = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x0, r))), q1 = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(x1, r)));
        q = _mm256_set_m128i(q1, q0);
        out->s = a / 127.0f;
        _mm256_storeu_si256((__m256i *)out->q, q);
    }
    store_sums(out, q);
}

void avx512_quantize(struct act_block *out, const float *x, size_t n)
{
    size_t i = 0;
    for (; i + FORM_BLOCK <= n; i += FORM_BLOCK) quantize_block(out++, _mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i + 16));
    if (i < n) quantize_block(out, _mm512_maskz_loadu_ps(mask16(n - i), x + i), _mm512_maskz_loadu_ps(mask16(n - i > 16 ? n - i - 16 : 0), x + i + 16));
}

BLOCK_INLINE void widen_form(struct wide_int *dst, const char *panel, size_t b0, size_t n_blocks, const int form)
{
    const struct block_kind kind = block_kind(form);
    const size_t n_parts = kind.halves ? 2 : 1;
    for (size_t b = 0; b < n_blocks; b++) {
#pragma GCC unroll 8
        for (int i = 0; i < WORDS; i++) _mm512_storeu_si512(dst->q[b * WORDS + (size_t)i], block_word512(form, panel, b0 + b, i));
        if (!kind.scaled) continue;
        for (size_t part = 0; part < n_parts; part++) {
            struct scales512 s = block_scales512(form, panel, b0 + b, part);
            _mm512_storeu_ps(dst->d[b * n_parts + part], s.d);
            if (kind.has_m) _mm512_storeu_ps(dst->m[b * n_parts + part], s.m);
        }
    }
}

void avx512_widen_int(struct wide_int *dst, const struct weight *w, size_t i_panel, size_t k_begin, size_t n_k)
{
    const char *panel = panel_at(w, i_panel, form_panel_bytes(w->form, w->n_in));
    size_t      b = k_begin / FORM_BLOCK, n = n_k / FORM_BLOCK;
    switch (w->form) {
    case FORM_I8: widen_form(dst, panel, b, n, FORM_I8); break;
    case FORM_I8M: widen_form(dst, panel, b, n, FORM_I8M); break;
    case FORM_U4: widen_form(dst, panel, b, n, FORM_U4); break;
    case FORM_U4M: widen_form(dst, panel, b, n, FORM_U4M); break;
    case FORM_K8: widen_form(dst, panel, b, n, FORM_K8); break;
    case FORM_S8: widen_form(dst, panel, b, n, FORM_S8); break;
    case FORM_K4: widen_form(dst, panel, b, n, FORM_K4); break;
    case FORM_S4: widen_form(dst, panel, b, n, FORM_S4); break;
    case FORM_C8: widen_form(dst, panel, b, n, FORM_C8); break;
    default: widen_form(dst, panel, b, n, FORM_C4); break;
    }
}
