/* attention_avx2.c - attention's micro-kernels on 8 lanes, two registers per panel; the bits of
 * attention_ref.c.
 *
 * Keys are transposed in squares of 8 x 8 words: f32, or pairs of bf16, which are unpacked
 * afterwards. Sums run in tiles of one panel by six rows, or two by three: twelve accumulators hide
 * the latency of a multiply-add. Thread: engine, compute pool. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/attention/attention.h"
#include "kernels/cpu/simd_avx2.h"

#define INLINE static inline __attribute__((always_inline))

/* ---- keys ---- */

/* out[i] lane j = in[j] lane i, of 32-bit lanes. */
INLINE void transpose8x8(__m256i r[8])
{
    __m256i t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int g = 0; g < 8; g += 4) {
        r[g] = _mm256_unpacklo_epi64(t[g], t[g + 2]);
        r[g + 1] = _mm256_unpackhi_epi64(t[g], t[g + 2]);
        r[g + 2] = _mm256_unpacklo_epi64(t[g + 1], t[g + 3]);
        r[g + 3] = _mm256_unpackhi_epi64(t[g + 1], t[g + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m256i a = r[i], b = r[4 + i];
        r[i] = _mm256_permute2x128_si256(a, b, 0x20);
        r[4 + i] = _mm256_permute2x128_si256(a, b, 0x31);
    }
}

/* Eight keys of a panel; the others of them, from n on, are zero. */
static void keys_f32(float *dst, const char *const *rows, size_t offset, size_t n, size_t dim)
{
    for (size_t d = 0; d < dim; d += 8) {
        __m256i r[8], m = mask8(dim - d);
        for (size_t j = 0; j < 8; j++)
            r[j] = j < n ? _mm256_maskload_epi32(
                               (const int *)(const void *)(rows[j] + offset + d * 4), m)
                         : _mm256_setzero_si256();
        transpose8x8(r);
        for (size_t i = 0; i < 8 && d + i < dim; i++)
            _mm256_storeu_si256((__m256i *)(void *)(dst + (d + i) * PANEL), r[i]);
    }
}

/* n elements of bf16, at most 16, zeros behind them. */
INLINE __m256i load_bf16(const char *p, size_t n)
{
    if (n >= 16) return _mm256_loadu_si256((const __m256i *)(const void *)p);
    uint16_t some[16] = { 0 };
    memcpy(some, p, n * sizeof *some);
    return _mm256_loadu_si256((const __m256i *)(const void *)some);
}

static void keys_bf16(float *dst, const char *const *rows, size_t offset, size_t n, size_t dim)
{
    for (size_t d = 0; d < dim; d += 16) {
        __m256i r[8];
        for (size_t j = 0; j < 8; j++)
            r[j] = j < n ? load_bf16(rows[j] + offset + d * 2, dim - d) : _mm256_setzero_si256();
        transpose8x8(r);
        for (size_t i = 0; i < 8 && d + 2 * i < dim; i++) {
            _mm256_storeu_ps(dst + (d + 2 * i) * PANEL, even8_bf16(r[i]));
            if (d + 2 * i + 1 < dim)
                _mm256_storeu_ps(dst + (d + 2 * i + 1) * PANEL, odd8_bf16(r[i]));
        }
    }
}

void avx2_load_keys(float *dst, const struct kv_row_ptrs *rows, enum dtype t, size_t n_keys,
                    size_t dim)
{
    for (size_t j = 0; j < (n_keys + PANEL - 1) / PANEL * PANEL; j += 8) {
        float *at = dst + j / PANEL * PANEL * dim + j % PANEL;
        size_t n = n_keys > j ? n_keys - j : 0;
        if (t == DTYPE_F32) keys_f32(at, rows->at + (n ? j : 0), rows->offset, n, dim);
        else keys_bf16(at, rows->at + (n ? j : 0), rows->offset, n, dim);
    }
}

/* ---- values ---- */

/* 16 elements of a row, of which `left` are there. */
INLINE void value16(__m256 v[2], const char *row, enum dtype t, size_t d, size_t left)
{
    if (t == DTYPE_F32) {
        v[0] = _mm256_maskload_ps((const float *)(const void *)(row + d * 4), mask8(left));
        v[1] = _mm256_maskload_ps((const float *)(const void *)(row + d * 4 + 32),
                                  mask8_from(left, 8));
    } else {
        __m256i h = load_bf16(row + d * 2, left);
        v[0] = even8_bf16(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(h)));
        v[1] = even8_bf16(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(h, 1)));
    }
}

void avx2_load_values(float *dst, const struct kv_row_ptrs *rows, enum dtype t, size_t n_keys,
                      size_t dim)
{
    for (size_t j = 0; j < n_keys; j++, dst += PANEL)
        for (size_t d = 0; d < dim; d += 16) {
            __m256 v[2];
            value16(v, rows->at[j] + rows->offset, t, d, dim - d);
            _mm256_storeu_ps(dst + d * ATTN_TILE, v[0]);
            _mm256_storeu_ps(dst + d * ATTN_TILE + 8, v[1]);
        }
}

/* ---- sums ---- */

enum { FMA_PANELS = 2, FMA_ACCUMULATORS = 12 };

INLINE __m256 begin8(const float *acc, const float *rescale, int row)
{
    return rescale ? _mm256_mul_ps(_mm256_loadu_ps(acc), _mm256_broadcast_ss(rescale + row))
                   : _mm256_setzero_ps();
}

/* n_p panels by n_r rows, both constants at each call. */
INLINE void fma_panels(float *acc, size_t acc_stride, const float *x, size_t x_stride,
                       const float *w, size_t w_stride, size_t n_k, const float *rescale,
                       const int n_p, const int n_r)
{
    const int n = 2 * n_p; /* registers to a row */
    __m256 sum[FMA_ACCUMULATORS];
#pragma GCC unroll 6
    for (int i = 0; i < n_r; i++)
#pragma GCC unroll 4
        for (int p = 0; p < n; p++)
            sum[i * n + p] = begin8(acc + (size_t)i * acc_stride + p * 8, rescale, i);
    for (size_t k = 0; k < n_k; k++) {
        __m256 wk[2 * FMA_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < n; p++)
            wk[p] = _mm256_loadu_ps(w + (size_t)(p / 2) * w_stride + k * PANEL + p % 2 * 8);
#pragma GCC unroll 6
        for (int i = 0; i < n_r; i++) {
            __m256 xk = _mm256_broadcast_ss(x + (size_t)i * x_stride + k);
#pragma GCC unroll 4
            for (int p = 0; p < n; p++) sum[i * n + p] = _mm256_fmadd_ps(wk[p], xk, sum[i * n + p]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < n_r; i++)
#pragma GCC unroll 4
        for (int p = 0; p < n; p++)
            _mm256_storeu_ps(acc + (size_t)i * acc_stride + p * 8, sum[i * n + p]);
}

/* Rows of one or two panels, in tiles of nearly equal height. */
static void fma_one(float *acc, size_t acc_stride, const float *x, size_t x_stride, size_t n_rows,
                    const float *w, size_t n_k, const float *rescale)
{
    for (size_t n_tiles = (n_rows + 5) / 6; n_tiles > 0; n_tiles--) {
        size_t n = (n_rows + n_tiles - 1) / n_tiles;
        switch (n) {
        case 6: fma_panels(acc, acc_stride, x, x_stride, w, 0, n_k, rescale, 1, 6); break;
        case 5: fma_panels(acc, acc_stride, x, x_stride, w, 0, n_k, rescale, 1, 5); break;
        case 4: fma_panels(acc, acc_stride, x, x_stride, w, 0, n_k, rescale, 1, 4); break;
        case 3: fma_panels(acc, acc_stride, x, x_stride, w, 0, n_k, rescale, 1, 3); break;
        case 2: fma_panels(acc, acc_stride, x, x_stride, w, 0, n_k, rescale, 1, 2); break;
        default: fma_panels(acc, acc_stride, x, x_stride, w, 0, n_k, rescale, 1, 1); break;
        }
        acc += n * acc_stride;
        x += n * x_stride;
        rescale = rescale ? rescale + n : NULL;
        n_rows -= n;
    }
}

static void fma_two(float *acc, size_t acc_stride, const float *x, size_t x_stride, size_t n_rows,
                    const float *w, size_t w_stride, size_t n_k, const float *rescale)
{
    if (n_rows == 3) fma_panels(acc, acc_stride, x, x_stride, w, w_stride, n_k, rescale, 2, 3);
    else if (n_rows == 2) fma_panels(acc, acc_stride, x, x_stride, w, w_stride, n_k, rescale, 2, 2);
    else fma_panels(acc, acc_stride, x, x_stride, w, w_stride, n_k, rescale, 2, 1);
}

void avx2_fma_tile(float *acc, size_t acc_stride, const float *x, size_t x_stride, size_t n_rows,
                   const float *w, size_t w_stride, size_t n_panels, size_t n_k,
                   const float *rescale)
{
    if (n_rows == 0) return;
    for (; n_rows <= 3 && n_panels >= FMA_PANELS;
         n_panels -= FMA_PANELS, acc += FMA_PANELS * PANEL, w += FMA_PANELS * w_stride)
        fma_two(acc, acc_stride, x, x_stride, n_rows, w, w_stride, n_k, rescale);
    for (; n_panels > 0; n_panels--, acc += PANEL, w += w_stride)
        fma_one(acc, acc_stride, x, x_stride, n_rows, w, n_k, rescale);
}

/* ---- softmax ---- */

static void online_softmax_row(float *scores, size_t n_keys, float scale, float *max, float *sum,
                               float *rescale)
{
    __m256 by = _mm256_set1_ps(scale), low = _mm256_set1_ps(-INFINITY), top = low;
    size_t n = (n_keys + 15) / 16 * 16;
    for (size_t j = 0; j < n; j += 8) {
        __m256 s = _mm256_blendv_ps(low, _mm256_loadu_ps(scores + j),
                                    _mm256_castsi256_ps(mask8_from(n_keys, j)));
        top = _mm256_max_ps(s, top);
    }
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    float before = *max, now = _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m))) * scale;
    now = now > before ? now : before;
    top = _mm256_set1_ps(now);
    struct sum16 total = { _mm256_setzero_ps(), _mm256_setzero_ps() };
    for (size_t j = 0; j < n; j += 16) {
        __m256 p0 = exp8(_mm256_fmsub_ps(_mm256_loadu_ps(scores + j), by, top));
        __m256 p1 = exp8(_mm256_fmsub_ps(_mm256_loadu_ps(scores + j + 8), by, top));
        p0 = _mm256_and_ps(p0, _mm256_castsi256_ps(mask8_from(n_keys, j)));
        p1 = _mm256_and_ps(p1, _mm256_castsi256_ps(mask8_from(n_keys, j + 8)));
        _mm256_storeu_ps(scores + j, p0);
        _mm256_storeu_ps(scores + j + 8, p1);
        total.low = _mm256_add_ps(total.low, p0);
        total.high = _mm256_add_ps(total.high, p1);
    }
    *rescale = exp_ref(before - now);
    *sum = *sum * *rescale + sum16_tree(total);
    *max = now;
}

void avx2_online_softmax(float *scores, size_t n_rows, size_t n_keys, float scale, float *max,
                         float *sum, float *rescale)
{
    for (size_t i = 0; i < n_rows; i++)
        online_softmax_row(scores + i * ATTN_TILE, n_keys, scale, max + i, sum + i, rescale + i);
}

/* ---- few rows ---- */

/* A panel at a time in order, while it is in the first-level cache: this row's turning round is
 * what few rows cost most. */
void avx2_scores_skinny(float *scores, const float *q, size_t q_stride, size_t n_rows,
                        const struct kv_row_ptrs *keys, const struct kv_row_ptrs *prefetch,
                        enum dtype t, size_t n_keys, size_t dim)
{
    (void)prefetch;
    float panel[KERNEL_LATENT_MAX * PANEL];
    for (size_t j = 0; j < n_keys; j += PANEL) {
        avx2_load_keys(panel, &(struct kv_row_ptrs){ keys->at + j, keys->offset }, t,
                       n_keys - j < PANEL ? n_keys - j : PANEL, dim);
        avx2_fma_tile(scores + j, ATTN_TILE, q, q_stride, n_rows, panel, 0, 1, dim, NULL);
    }
}

INLINE void accumulate_v_part(float *o, size_t o_stride, const float *p,
                              const struct kv_row_ptrs *rows, enum dtype t, size_t n_keys, size_t d,
                              size_t left, const float *rescale, const int n_p, const int n_r)
{
    __m256 sum[FMA_ACCUMULATORS];
#pragma GCC unroll 4
    for (int i = 0; i < n_r; i++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * n_p; v++)
            sum[i * 2 * n_p + v] = begin8(o + (size_t)i * o_stride + v * 8, rescale, i);
    for (size_t j = 0; j < n_keys; j++) {
        __m256 value[2 * FMA_PANELS];
#pragma GCC unroll 2
        for (int v = 0; v < n_p; v++)
            value16(value + 2 * v, rows->at[j] + rows->offset, t, d + 16 * (size_t)v,
                    left - 16 * (size_t)v);
#pragma GCC unroll 4
        for (int i = 0; i < n_r; i++) {
            __m256 w = _mm256_broadcast_ss(p + i * ATTN_TILE + j);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * n_p; v++)
                sum[i * 2 * n_p + v] = _mm256_fmadd_ps(value[v], w, sum[i * 2 * n_p + v]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < n_r; i++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * n_p; v++)
            _mm256_storeu_ps(o + (size_t)i * o_stride + v * 8, sum[i * 2 * n_p + v]);
}

/* Two panels for up to two rows, one for up to four. */
INLINE void accumulate_v_rows(float *o, size_t o_stride, const float *p,
                              const struct kv_row_ptrs *rows, enum dtype t, size_t n_keys,
                              size_t dim, const float *rescale, const int n_r)
{
    const int n_p = n_r <= 2 ? 2 : 1;
    size_t d = 0;
    for (; d + (size_t)n_p * 16 <= dim; d += (size_t)n_p * 16)
        accumulate_v_part(o + d, o_stride, p, rows, t, n_keys, d, (size_t)n_p * 16, rescale, n_p,
                          n_r);
    for (; d < dim; d += 16)
        accumulate_v_part(o + d, o_stride, p, rows, t, n_keys, d, dim - d < 16 ? dim - d : 16,
                          rescale, 1, n_r);
}

INLINE void accumulate_v(float *o, size_t o_stride, const float *p, size_t n_rows,
                         const struct kv_row_ptrs *rows, enum dtype t, size_t n_keys, size_t dim,
                         const float *rescale)
{
    while (n_rows > 0) {
        size_t n = n_rows > 4 ? 4 : n_rows;
        switch (n) {
        case 4: accumulate_v_rows(o, o_stride, p, rows, t, n_keys, dim, rescale, 4); break;
        case 3: accumulate_v_rows(o, o_stride, p, rows, t, n_keys, dim, rescale, 3); break;
        case 2: accumulate_v_rows(o, o_stride, p, rows, t, n_keys, dim, rescale, 2); break;
        default: accumulate_v_rows(o, o_stride, p, rows, t, n_keys, dim, rescale, 1); break;
        }
        o += n * o_stride;
        p += n * ATTN_TILE;
        rescale = rescale ? rescale + n : NULL;
        n_rows -= n;
    }
}

void avx2_accumulate_v_skinny(float *o, size_t o_stride, const float *p, size_t n_rows,
                              const struct kv_row_ptrs *values, const struct kv_row_ptrs *prefetch,
                              enum dtype t, size_t n_keys, size_t dim, const float *rescale)
{
    (void)prefetch;
    if (t == DTYPE_F32)
        accumulate_v(o, o_stride, p, n_rows, values, DTYPE_F32, n_keys, dim, rescale);
    else accumulate_v(o, o_stride, p, n_rows, values, DTYPE_BF16, n_keys, dim, rescale);
}
