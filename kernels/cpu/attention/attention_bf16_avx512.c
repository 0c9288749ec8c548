/* attention_bf16_avx512.c - attention's scores on vdpbf16ps: two neighbouring elements of 16 keys
 * by the same two of a query, broadcast to all lanes.
 *
 * Keys are transposed as the pairs that the cache holds. Many queries use tiles of up to four
 * panels by six rows, few four panels by two rows or two by up to eight: the instruction takes six
 * cycles, so one query's two accumulators would wait for themselves. Thread: engine, compute pool.
 */
#include "kernels/cpu/attention/transpose_avx512.h"
#include "kernels/cpu/microkernels_vnni.h"

enum {
    SCORE_PANELS = 4,
    SCORE_ROWS = 6,
    SCORE_ACCUMULATORS = SCORE_PANELS * SCORE_ROWS,
    STEP = 32 /* elements transposed at a time */
};

INLINE __m512 dot(__m512 acc, __m512i keys, const uint16_t *q)
{
    int32_t two;
    __builtin_memcpy(&two, q, sizeof two);
    return _mm512_dpbf16_ps(acc, (__m512bh)keys, (__m512bh)_mm512_set1_epi32(two));
}

void bf16_load_keys(uint32_t *dst, const struct kv_row_ptrs *rows, size_t n_keys, size_t dim)
{
    for (size_t j = 0; j < n_keys; j += PANEL) {
        const char *panel[16];
        panel_rows(panel, rows, j, n_keys);
        for (size_t d = 0; d < dim; d += STEP) {
            __m512i r[16];
            load_bf16(r, panel, d * 2, dim - d);
#pragma GCC unroll 16
            for (size_t i = 0; i < 16; i++) {
                if (d + STEP > dim && d + 2 * i >= dim) break;
                _mm512_storeu_si512(dst, r[i]);
                dst += PANEL;
            }
        }
    }
}

/* ---- many rows ---- */

/* Computes the scores of n_p panels for n_r rows; both are compile-time constants. */
INLINE void scores_tile(float *scores, const uint16_t *q, size_t q_stride, const uint32_t *keys,
                        size_t n_pairs, const int n_p, const int n_r)
{
    __m512 sum[SCORE_ACCUMULATORS];
#pragma GCC unroll 24
    for (int i = 0; i < n_r * n_p; i++) sum[i] = _mm512_setzero_ps();
    for (size_t k = 0; k < n_pairs; k++) {
        __m512i two[SCORE_PANELS];
#pragma GCC unroll 4
        for (int p = 0; p < n_p; p++)
            two[p] = _mm512_loadu_si512(keys + ((size_t)p * n_pairs + k) * PANEL);
#pragma GCC unroll 6
        for (int i = 0; i < n_r; i++)
#pragma GCC unroll 4
            for (int p = 0; p < n_p; p++)
                sum[i * n_p + p] = dot(sum[i * n_p + p], two[p], q + (size_t)i * q_stride + 2 * k);
    }
#pragma GCC unroll 6
    for (int i = 0; i < n_r; i++)
#pragma GCC unroll 4
        for (int p = 0; p < n_p; p++)
            _mm512_storeu_ps(scores + i * ATTN_TILE + p * PANEL, sum[i * n_p + p]);
}

INLINE void scores_rows(float *scores, const uint16_t *q, size_t q_stride, size_t n_rows,
                        const uint32_t *keys, size_t n_pairs, const int n_p)
{
    /* of nearly equal height */
    for (size_t n_tiles = (n_rows + SCORE_ROWS - 1) / SCORE_ROWS; n_tiles > 0; n_tiles--) {
        size_t n = (n_rows + n_tiles - 1) / n_tiles;
        switch (n) {
        case 6: scores_tile(scores, q, q_stride, keys, n_pairs, n_p, 6); break;
        case 5: scores_tile(scores, q, q_stride, keys, n_pairs, n_p, 5); break;
        case 4: scores_tile(scores, q, q_stride, keys, n_pairs, n_p, 4); break;
        case 3: scores_tile(scores, q, q_stride, keys, n_pairs, n_p, 3); break;
        case 2: scores_tile(scores, q, q_stride, keys, n_pairs, n_p, 2); break;
        default: scores_tile(scores, q, q_stride, keys, n_pairs, n_p, 1); break;
        }
        scores += n * ATTN_TILE;
        q += n * q_stride;
        n_rows -= n;
    }
}

void bf16_scores(float *scores, const uint16_t *q, size_t q_stride, size_t n_rows,
                 const uint32_t *keys, size_t n_panels, size_t dim)
{
    size_t n_pairs = (dim + 1) / 2;
    switch (n_panels) {
    case 4: scores_rows(scores, q, q_stride, n_rows, keys, n_pairs, 4); break;
    case 3: scores_rows(scores, q, q_stride, n_rows, keys, n_pairs, 3); break;
    case 2: scores_rows(scores, q, q_stride, n_rows, keys, n_pairs, 2); break;
    default: scores_rows(scores, q, q_stride, n_rows, keys, n_pairs, 1); break;
    }
}

/* ---- few rows ---- */

/* Carries on n_r rows' sums over one step of elements of one panel. */
INLINE void skinny_step(__m512 *sum, const uint16_t *q, size_t q_stride, const char *const rows[16],
                        const char *const prefetch[16], size_t d, size_t dim, const int n_r)
{
    __m512i r[16];
    load_bf16(r, rows, d * 2, dim - d);
#pragma GCC unroll 16
    for (size_t k = 0; k < 16; k++) {
        prefetch_lines(prefetch[k] + d * 2, CACHE_LINE);
        if (d + STEP > dim && d + 2 * k >= dim) break;
#pragma GCC unroll 8
        for (int i = 0; i < n_r; i++)
            sum[i] = dot(sum[i], r[k], q + (size_t)i * q_stride + d + 2 * k);
    }
}

/* n_p panels alternate: while one accumulates, the next step of another is transposed. */
INLINE void skinny_panels(float *scores, const uint16_t *q, size_t q_stride,
                          const char *const *rows, const char *const *prefetch, size_t dim,
                          const int n_p, const int n_r)
{
    __m512 sum[SCORE_PANELS][ATTN_SKINNY_PAIRS];
#pragma GCC unroll 4
    for (int p = 0; p < n_p; p++)
#pragma GCC unroll 8
        for (int i = 0; i < n_r; i++) sum[p][i] = _mm512_setzero_ps();
    for (size_t d = 0; d < dim; d += STEP)
#pragma GCC unroll 4
        for (int p = 0; p < n_p; p++)
            skinny_step(sum[p], q, q_stride, rows + 16 * p, prefetch + 16 * p, d, dim, n_r);
#pragma GCC unroll 4
    for (int p = 0; p < n_p; p++)
#pragma GCC unroll 8
        for (int i = 0; i < n_r; i++)
            _mm512_storeu_ps(scores + i * ATTN_TILE + p * PANEL, sum[p][i]);
}

#define SKINNY_CASE(n_p, n_r)                                                                      \
    case n_r: skinny_panels(scores + j, q, q_stride, rows, prefetch_rows, dim, n_p, n_r); break;

void bf16_scores_skinny(float *scores, const uint16_t *q, size_t q_stride, size_t n_rows,
                        const struct kv_row_ptrs *keys, const struct kv_row_ptrs *prefetch,
                        size_t n_keys, size_t dim)
{
    const size_t step = n_rows <= 2 ? 4 * PANEL : 2 * PANEL;
    for (size_t j = 0; j < n_keys; j += step) {
        const char *rows[ATTN_TILE], *prefetch_rows[ATTN_TILE];
        for (size_t p = 0; p < step; p += PANEL) {
            panel_rows(rows + p, keys, j + p, n_keys);
            panel_rows(prefetch_rows + p, prefetch, j + p, n_keys);
        }
        switch (n_rows) {
            SKINNY_CASE(4, 1)
            SKINNY_CASE(4, 2)
            SKINNY_CASE(2, 3)
            SKINNY_CASE(2, 4)
            SKINNY_CASE(2, 5) SKINNY_CASE(2, 6) SKINNY_CASE(2, 7) SKINNY_CASE(2, 8)
        }
    }
}
