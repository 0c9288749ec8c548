/* attention_avx512.c - attention's micro-kernels on 16 lanes; the bits of attention_ref.c.
 *
 * Keys are transposed (transpose_avx512.h) as f32 or as pairs of bf16, which are unpacked
 * afterwards. Sums run in tiles of up to four panels by six rows: 24 accumulators hide the latency
 * of a multiply-add, and an input is broadcast once for four of them. Thread: engine, compute pool.
 */
#include <math.h>

#include "kernels/cpu/attention/attention.h"
#include "kernels/cpu/attention/transpose_avx512.h"

/* ---- keys ---- */

static void keys_f32(float *dst, const char *const rows[16], size_t dim)
{
    for (size_t d = 0; d < dim; d += 16) {
        __m512i r[16];
        load_f32(r, rows, d * 4, dim - d);
#pragma GCC unroll 16
        for (size_t i = 0; i < 16; i++, dst += PANEL)
            if (d + 16 <= dim || d + i < dim) _mm512_storeu_si512(dst, r[i]);
    }
}

static void keys_bf16(float *dst, const char *const rows[16], size_t dim)
{
    for (size_t d = 0; d < dim; d += 32) {
        __m512i r[16];
        load_bf16(r, rows, d * 2, dim - d);
#pragma GCC unroll 16
        for (size_t i = 0; i < 16; i++, dst += 2 * PANEL) {
            if (d + 32 <= dim || d + 2 * i < dim) _mm512_storeu_ps(dst, even16_bf16(r[i]));
            if (d + 32 <= dim || d + 2 * i + 1 < dim)
                _mm512_storeu_ps(dst + PANEL, odd16_bf16(r[i]));
        }
    }
}

void avx512_load_keys(float *dst, const struct kv_row_ptrs *rows, enum dtype t, size_t n_keys,
                      size_t dim)
{
    for (size_t j = 0; j < n_keys; j += 16, dst += dim * PANEL) {
        const char *panel[16];
        panel_rows(panel, rows, j, n_keys);
        if (t == DTYPE_F32) keys_f32(dst, panel, dim);
        else keys_bf16(dst, panel, dim);
    }
}

/* ---- values ---- */

/* Elements d .. d + 15 of a row, of which `left` are there. */
INLINE __m512 value16(const char *row, enum dtype t, size_t d, size_t left)
{
    if (t == DTYPE_F32)
        return left >= 16 ? _mm512_loadu_ps(row + d * 4)
                          : _mm512_maskz_loadu_ps(mask16(left), row + d * 4);
    const char *p = row + d * 2;
    __m256i h = left >= 16 ? _mm256_loadu_si256((const __m256i *)(const void *)p)
                           : _mm256_maskz_loadu_epi16(mask16(left), p);
    return even16_bf16(_mm512_cvtepu16_epi32(h));
}

INLINE void values(float *dst, const struct kv_row_ptrs *rows, enum dtype t, size_t n_keys,
                   size_t dim)
{
    for (size_t d = 0; d < dim; d += 16, dst += ATTN_TILE * PANEL)
        for (size_t j = 0; j < n_keys; j++)
            _mm512_storeu_ps(dst + j * PANEL, value16(rows->at[j] + rows->offset, t, d, dim - d));
}

void avx512_load_values(float *dst, const struct kv_row_ptrs *rows, enum dtype t, size_t n_keys,
                        size_t dim)
{
    if (t == DTYPE_F32) values(dst, rows, DTYPE_F32, n_keys, dim);
    else values(dst, rows, DTYPE_BF16, n_keys, dim);
}

/* ---- sums ---- */

enum { FMA_PANELS = 4, FMA_ACCUMULATORS = 24 };

INLINE __m512 begin16(const float *acc, const float *rescale, int row)
{
    return rescale ? _mm512_mul_ps(_mm512_loadu_ps(acc), _mm512_set1_ps(rescale[row]))
                   : _mm512_setzero_ps();
}

/* n_p panels by n_r rows, both constants at each call. */
INLINE void fma_panels(float *acc, size_t acc_stride, const float *x, size_t x_stride,
                       const float *w, size_t w_stride, size_t n_k, const float *rescale,
                       const int n_p, const int n_r)
{
    __m512 sum[FMA_ACCUMULATORS];
#pragma GCC unroll 12
    for (int i = 0; i < n_r; i++)
#pragma GCC unroll 4
        for (int p = 0; p < n_p; p++)
            sum[i * n_p + p] = begin16(acc + (size_t)i * acc_stride + p * PANEL, rescale, i);
    for (size_t k = 0; k < n_k; k++) {
        __m512 wk[FMA_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < n_p; p++) wk[p] = _mm512_loadu_ps(w + (size_t)p * w_stride + k * PANEL);
#pragma GCC unroll 12
        for (int i = 0; i < n_r; i++) {
            __m512 xk = _mm512_set1_ps(x[(size_t)i * x_stride + k]);
#pragma GCC unroll 4
            for (int p = 0; p < n_p; p++)
                sum[i * n_p + p] = _mm512_fmadd_ps(wk[p], xk, sum[i * n_p + p]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < n_r; i++)
#pragma GCC unroll 4
        for (int p = 0; p < n_p; p++)
            _mm512_storeu_ps(acc + (size_t)i * acc_stride + p * PANEL, sum[i * n_p + p]);
}

#define FMA_ROWS(p, r)                                                                             \
    case r: fma_panels(acc, acc_stride, x, x_stride, w, w_stride, n_k, rescale, p, r); break;

/* All rows against n_p panels, in tiles of nearly equal height. */
#define FMA_FUNCTION(n_p, most, cases)                                                             \
    static void fma_##n_p(float *acc, size_t acc_stride, const float *x, size_t x_stride,          \
                          size_t n_rows, const float *w, size_t w_stride, size_t n_k,              \
                          const float *rescale)                                                    \
    {                                                                                              \
        for (size_t n_tiles = (n_rows + (most)-1) / (most); n_tiles > 0; n_tiles--) {              \
            size_t n = (n_rows + n_tiles - 1) / n_tiles;                                           \
            switch (n) {                                                                           \
                cases                                                                              \
            }                                                                                      \
            acc += n * acc_stride;                                                                 \
            rescale = rescale ? rescale + n : NULL;                                                \
            x += n * x_stride;                                                                     \
            n_rows -= n;                                                                           \
        }                                                                                          \
    }
#define ROWS_6(p)                                                                                  \
    FMA_ROWS(p, 1) FMA_ROWS(p, 2) FMA_ROWS(p, 3) FMA_ROWS(p, 4) FMA_ROWS(p, 5) FMA_ROWS(p, 6)
#define ROWS_12(p)                                                                                 \
    ROWS_6(p)                                                                                      \
    FMA_ROWS(p, 7) FMA_ROWS(p, 8) FMA_ROWS(p, 9) FMA_ROWS(p, 10) FMA_ROWS(p, 11) FMA_ROWS(p, 12)
FMA_FUNCTION(4, 6, ROWS_6(4))
FMA_FUNCTION(3, 6, ROWS_6(3))
FMA_FUNCTION(2, 12, ROWS_12(2))
FMA_FUNCTION(1, 12, ROWS_12(1))

void avx512_fma_tile(float *acc, size_t acc_stride, const float *x, size_t x_stride, size_t n_rows,
                     const float *w, size_t w_stride, size_t n_panels, size_t n_k,
                     const float *rescale)
{
    for (; n_panels >= FMA_PANELS;
         n_panels -= FMA_PANELS, acc += FMA_PANELS * PANEL, w += FMA_PANELS * w_stride)
        fma_4(acc, acc_stride, x, x_stride, n_rows, w, w_stride, n_k, rescale);
    if (n_panels == 3) fma_3(acc, acc_stride, x, x_stride, n_rows, w, w_stride, n_k, rescale);
    else if (n_panels == 2) fma_2(acc, acc_stride, x, x_stride, n_rows, w, w_stride, n_k, rescale);
    else if (n_panels == 1) fma_1(acc, acc_stride, x, x_stride, n_rows, w, w_stride, n_k, rescale);
}

/* ---- few rows ---- */

/* Carries on n_r rows' sums over one step of elements of one panel. n_r and t are constants. */
INLINE void scores_step(__m512 *sum, const float *q, size_t q_stride, const char *const rows[16],
                        const char *const prefetch[16], size_t d, size_t dim, enum dtype t,
                        const int n_r)
{
    const size_t step = t == DTYPE_F32 ? 16 : 32;
    __m512i r[16];
    if (t == DTYPE_F32) load_f32(r, rows, d * 4, dim - d);
    else load_bf16(r, rows, d * 2, dim - d);
#pragma GCC unroll 16
    for (size_t k = 0; k < 16; k++) {
        size_t at = t == DTYPE_F32 ? d + k : d + 2 * k;
        __m512 k0 = t == DTYPE_F32 ? _mm512_castsi512_ps(r[k]) : even16_bf16(r[k]),
               k1 = odd16_bf16(r[k]);
        prefetch_lines(prefetch[k] + d * (t == DTYPE_F32 ? 4 : 2), CACHE_LINE);
        if (d + step > dim && at >= dim) break;
#pragma GCC unroll 8
        for (int i = 0; i < n_r; i++)
            sum[i] = _mm512_fmadd_ps(k0, _mm512_set1_ps(q[(size_t)i * q_stride + at]), sum[i]);
        if (t == DTYPE_F32 || (d + step > dim && at + 1 >= dim)) continue;
#pragma GCC unroll 8
        for (int i = 0; i < n_r; i++)
            sum[i] = _mm512_fmadd_ps(k1, _mm512_set1_ps(q[(size_t)i * q_stride + at + 1]), sum[i]);
    }
}

/* Two panels alternate: while one accumulates, the next step of the other is transposed. */
INLINE void scores_panels(float *scores, const float *q, size_t q_stride,
                          const char *const rows[32], const char *const prefetch[32], size_t dim,
                          enum dtype t, const int n_r)
{
    __m512 sum0[ATTN_SKINNY_PAIRS], sum1[ATTN_SKINNY_PAIRS];
#pragma GCC unroll 8
    for (int i = 0; i < n_r; i++) sum0[i] = sum1[i] = _mm512_setzero_ps();
    for (size_t d = 0; d < dim; d += t == DTYPE_F32 ? 16 : 32) {
        scores_step(sum0, q, q_stride, rows, prefetch, d, dim, t, n_r);
        scores_step(sum1, q, q_stride, rows + 16, prefetch + 16, d, dim, t, n_r);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_r; i++) {
        _mm512_storeu_ps(scores + i * ATTN_TILE, sum0[i]);
        _mm512_storeu_ps(scores + i * ATTN_TILE + PANEL, sum1[i]);
    }
}

#define SCORES_CASE(n_r, t)                                                                        \
    case n_r:                                                                                      \
        scores_panels(scores + j, q, q_stride, panel, panel_prefetch, dim, t, n_r);                \
        break;
#define SCORES_CASES(t)                                                                            \
    SCORES_CASE(1, t)                                                                              \
    SCORES_CASE(2, t)                                                                              \
    SCORES_CASE(3, t)                                                                              \
    SCORES_CASE(4, t) SCORES_CASE(5, t) SCORES_CASE(6, t) SCORES_CASE(7, t) SCORES_CASE(8, t)

void avx512_scores_skinny(float *scores, const float *q, size_t q_stride, size_t n_rows,
                          const struct kv_row_ptrs *keys, const struct kv_row_ptrs *prefetch,
                          enum dtype t, size_t n_keys, size_t dim)
{
    for (size_t j = 0; j < n_keys; j += 32) {
        const char *panel[32], *panel_prefetch[32];
        panel_rows(panel, keys, j, n_keys);
        panel_rows(panel + 16, keys, j + 16, n_keys);
        panel_rows(panel_prefetch, prefetch, j, n_keys);
        panel_rows(panel_prefetch + 16, prefetch, j + 16, n_keys);
        if (t == DTYPE_F32) switch (n_rows) {
                SCORES_CASES(DTYPE_F32)
            }
        else switch (n_rows) {
                SCORES_CASES(DTYPE_BF16)
            }
    }
}

struct skinny_v {
    const struct kv_row_ptrs *rows, *prefetch;
    size_t n_keys, dim;
    const float *rescale;
};

/* n_p registers of each row from element d on (`left` elements) against n_r rows of weights. */
INLINE void accumulate_v_part(float *o, size_t o_stride, const float *p, const struct skinny_v *f,
                              enum dtype t, size_t d, size_t left, const int n_p, const int n_r)
{
    const size_t bytes = t == DTYPE_F32 ? 4 : 2;
    __m512 sum[FMA_ACCUMULATORS];
#pragma GCC unroll 8
    for (int i = 0; i < n_r; i++)
#pragma GCC unroll 4
        for (int v = 0; v < n_p; v++)
            sum[i * n_p + v] = begin16(o + d + (size_t)i * o_stride + v * PANEL, f->rescale, i);
    for (size_t j = 0; j < f->n_keys; j++) {
        __m512 value[FMA_PANELS];
        prefetch_lines(f->prefetch->at[j] + f->prefetch->offset + d * bytes,
                       (size_t)n_p * 16 * bytes);
#pragma GCC unroll 4
        for (int v = 0; v < n_p; v++)
            value[v] = value16(f->rows->at[j] + f->rows->offset, t, d + 16 * (size_t)v,
                               v == n_p - 1 ? left - 16 * (size_t)v : 16);
#pragma GCC unroll 8
        for (int i = 0; i < n_r; i++) {
            __m512 w = _mm512_set1_ps(p[i * ATTN_TILE + j]);
#pragma GCC unroll 4
            for (int v = 0; v < n_p; v++)
                sum[i * n_p + v] = _mm512_fmadd_ps(value[v], w, sum[i * n_p + v]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n_r; i++)
#pragma GCC unroll 4
        for (int v = 0; v < n_p; v++)
            _mm512_storeu_ps(o + d + (size_t)i * o_stride + v * PANEL, sum[i * n_p + v]);
}

/* Whole parts of four registers, of two where more rows than fit share them; then one by one. */
INLINE void accumulate_v_rows(float *o, size_t o_stride, const float *p, const struct skinny_v *f,
                              enum dtype t, const int n_r)
{
    const int n_p = n_r <= 6 ? 4 : 2;
    size_t d = 0;
    for (; d + (size_t)n_p * 16 <= f->dim; d += (size_t)n_p * 16)
        accumulate_v_part(o, o_stride, p, f, t, d, (size_t)n_p * 16, n_p, n_r);
    for (; d + 16 <= f->dim; d += 16) accumulate_v_part(o, o_stride, p, f, t, d, 16, 1, n_r);
    if (d < f->dim) accumulate_v_part(o, o_stride, p, f, t, d, f->dim - d, 1, n_r);
}

#define ACCUMULATE_V_CASE(n_r, t)                                                                  \
    case n_r:                                                                                      \
        accumulate_v_rows(o, o_stride, p, &f, t, n_r);                                             \
        break;
#define ACCUMULATE_V_CASES(t)                                                                      \
    ACCUMULATE_V_CASE(1, t)                                                                        \
    ACCUMULATE_V_CASE(2, t)                                                                        \
    ACCUMULATE_V_CASE(3, t)                                                                        \
    ACCUMULATE_V_CASE(4, t)                                                                        \
    ACCUMULATE_V_CASE(5, t) ACCUMULATE_V_CASE(6, t) ACCUMULATE_V_CASE(7, t) ACCUMULATE_V_CASE(8, t)

void avx512_accumulate_v_skinny(float *o, size_t o_stride, const float *p, size_t n_rows,
                                const struct kv_row_ptrs *values,
                                const struct kv_row_ptrs *prefetch, enum dtype t, size_t n_keys,
                                size_t dim, const float *rescale)
{
    const struct skinny_v f = { values, prefetch, n_keys, dim, rescale };
    if (t == DTYPE_F32) switch (n_rows) {
            ACCUMULATE_V_CASES(DTYPE_F32)
        }
    else switch (n_rows) {
            ACCUMULATE_V_CASES(DTYPE_BF16)
        }
}

/* ---- softmax ---- */

enum { SOFTMAX_ROWS = 8 }; /* whose maxima and sums are added up side by side */

/* The largest of each of eight registers' lanes. */
INLINE __m256 max8x8(const __m256 v[8])
{
    __m256 pair[4], quad[2];
    for (int i = 0; i < 4; i++)
        pair[i] = _mm256_max_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20),
                                _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
    for (int i = 0; i < 2; i++)
        quad[i] = _mm256_max_ps(_mm256_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0x44),
                                _mm256_shuffle_ps(pair[2 * i], pair[2 * i + 1], 0xee));
    return _mm256_max_ps(_mm256_shuffle_ps(quad[0], quad[1], 0x88),
                         _mm256_shuffle_ps(quad[0], quad[1], 0xdd));
}

/* Up to eight rows of n registers (a constant), the last of them masked. */
INLINE void online_softmax_rows(float *scores, size_t n_rows, __mmask16 last, float scale,
                                float *max, float *sum, float *rescale, const int n)
{
    __m512 by = _mm512_set1_ps(scale), low = _mm512_set1_ps(-INFINITY);
    __m256 part[SOFTMAX_ROWS];
    __mmask8 rows = (__mmask8)((1u << n_rows) - 1);
    float now[SOFTMAX_ROWS] __attribute__((aligned(32)));
    for (size_t r = 0; r < SOFTMAX_ROWS; r++) part[r] = _mm256_setzero_ps();
    for (size_t r = 0; r < n_rows; r++) {
        const float *s = scores + r * ATTN_TILE;
        __m512 top = low;
#pragma GCC unroll 4
        for (int i = 0; i < n; i++)
            top = _mm512_max_ps(
                _mm512_mask_loadu_ps(low, i < n - 1 ? (__mmask16)0xffff : last, s + 16 * i), top);
        part[r] = _mm256_max_ps(_mm512_castps512_ps256(top), _mm512_extractf32x8_ps(top, 1));
    }
    __m256 before = _mm256_maskz_loadu_ps(rows, max),
           top = _mm256_max_ps(_mm256_mul_ps(max8x8(part), _mm256_set1_ps(scale)), before);
    __m256 by_then = exp8(_mm256_sub_ps(before, top));
    _mm256_store_ps(now, top);
    _mm256_mask_storeu_ps(max, rows, top);
    _mm256_mask_storeu_ps(rescale, rows, by_then);
    for (size_t r = 0; r < n_rows; r++) {
        float *s = scores + r * ATTN_TILE;
        __m512 total = _mm512_setzero_ps(), most = _mm512_set1_ps(now[r]);
#pragma GCC unroll 4
        for (int i = 0; i < n; i++) {
            __m512 p = exp16(_mm512_fmsub_ps(_mm512_loadu_ps(s + 16 * i), by, most));
            if (i == n - 1) p = _mm512_maskz_mov_ps(last, p);
            _mm512_storeu_ps(s + 16 * i, p);
            total = _mm512_add_ps(total, p);
        }
        part[r] = fold16(total);
    }
    __m256 old = _mm256_maskz_loadu_ps(rows, sum);
    _mm256_mask_storeu_ps(sum, rows, _mm256_add_ps(_mm256_mul_ps(old, by_then), tree8x8(part)));
}

void avx512_online_softmax(float *scores, size_t n_rows, size_t n_keys, float scale, float *max,
                           float *sum, float *rescale)
{
    __mmask16 last = mask16((n_keys - 1) % 16 + 1);
    for (size_t r = 0; r < n_rows; r += SOFTMAX_ROWS) {
        size_t n = n_rows - r < SOFTMAX_ROWS ? n_rows - r : SOFTMAX_ROWS;
        float *s = scores + r * ATTN_TILE;
        switch ((n_keys + 15) / 16) {
        case 4: online_softmax_rows(s, n, last, scale, max + r, sum + r, rescale + r, 4); break;
        case 3: online_softmax_rows(s, n, last, scale, max + r, sum + r, rescale + r, 3); break;
        case 2: online_softmax_rows(s, n, last, scale, max + r, sum + r, rescale + r, 2); break;
        default: online_softmax_rows(s, n, last, scale, max + r, sum + r, rescale + r, 1); break;
        }
    }
}
