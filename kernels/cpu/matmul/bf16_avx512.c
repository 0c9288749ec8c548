/* bf16_avx512.c - bf16 GEMM on vdpbf16ps: two neighbouring k of 16 outputs by two inputs broadcast
 * to all lanes. docs/kernels.md has the throughput reasoning. F8 is converted to bf16 exactly, in
 * registers for few rows and once per 128 k for many. Thread: engine, compute pool. */
#include "kernels/cpu/matmul/f8_to_bf16_avx512.h"
#include "kernels/cpu/microkernels_vnni.h"

enum { TILE_ROWS = 8, PAIRS = 16 /* of a step of gemv: 32 k's, 1 KiB of bf16 */ };

void bf16_round(uint16_t *out, const float *x, size_t n)
{
    for (size_t i = 0; i < act_bf16_stride(n); i += 16) {
        __m512 v = _mm512_maskz_loadu_ps(mask16(n > i ? n - i : 0), x + i);
        _mm256_storeu_si256((__m256i *)(out + i), (__m256i)_mm512_cvtneps_pbh(v));
    }
}

BLOCK_INLINE __m512bh broadcast_x(const uint16_t *x, size_t pair)
{
    int32_t two;
    __builtin_memcpy(&two, x + 2 * pair, sizeof two);
    return (__m512bh)_mm512_set1_epi32(two);
}

BLOCK_INLINE __m512 dot(__m512 acc, __m512i pairs, __m512bh x)
{
    return _mm512_dpbf16_ps(acc, (__m512bh)pairs, x);
}

void bf16_upconvert(uint32_t *dst, float *scale, const struct weight *w, size_t i_panel,
                    size_t k_begin, size_t n_k)
{
    const char *panel = panel_at(w, i_panel, weight_layout_panel_bytes(w->layout, w->n_in)),
               *words = panel + k_begin / 4 * PANEL * 4;
    const bool last = k_begin + n_k >= w->n_in; /* then the panel that takes its place in the next
                                                 * group is prefetched */
    const char *next = last ? panel + GEMM_PANELS * weight_layout_panel_bytes(w->layout, w->n_in)
                            : words + n_k / 4 * PANEL * 4;
    *scale = f8_scales(panel, w->n_in)[k_begin / F8_BLOCK];
    for (size_t i = 0; i < (n_k + 3) / 4; i++) {
        __m512i pairs[2];
        _mm_prefetch(next + i * PANEL * 4, _MM_HINT_T1);
        pairs_of_f8(pairs, _mm512_loadu_si512(words + i * PANEL * 4));
        _mm512_storeu_si512(dst + 2 * i * PANEL, pairs[0]);
        _mm512_storeu_si512(dst + (2 * i + 1) * PANEL, pairs[1]);
    }
}

/* ---- few rows ---- */

/* Adds the products of n_pairs pairs of a panel for n rows; PAIRS is passed as a constant. */
BLOCK_INLINE void step_bf16(__m512 *acc, const uint16_t *const *x, size_t k, const char *pairs,
                            size_t n_pairs, const int n)
{
#pragma GCC unroll 16
    for (size_t i = 0; i < n_pairs; i++) {
        __m512i two = _mm512_loadu_si512(pairs + i * PANEL * 4);
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) acc[r] = dot(acc[r], two, broadcast_x(x[r] + k, i));
    }
}

BLOCK_INLINE void rows_bf16(__m512 *acc, const uint16_t *const *x, const char *panel, size_t n_in,
                            const int n)
{
    size_t k = 0;
    for (; k + 2 * PAIRS <= n_in; k += 2 * PAIRS) {
        const char *at = panel + k / 2 * PANEL * 4;
#pragma GCC unroll 16
        for (int i = 0; i < PAIRS; i++) _mm_prefetch(at + PREFETCH_BYTES + 64 * i, _MM_HINT_T0);
        step_bf16(acc, x, k, at, PAIRS, n);
    }
    step_bf16(acc, x, k, panel + k / 2 * PANEL * 4, (n_in - k + 1) / 2, n);
}

/* Adds n_blocks (1 or 2, a constant) scale blocks of n_k k's each from k on. Their sums start from
 * zero, so two blocks are computed in parallel. */
BLOCK_INLINE void blocks_f8(__m512 *acc, const uint16_t *const *x, const char *panel,
                            const float *scale, size_t k, size_t n_k, const int n,
                            const int n_blocks)
{
    __m512 sum[2 * DOT_ROWS];
#pragma GCC unroll 16
    for (int i = 0; i < n * n_blocks; i++) sum[i] = _mm512_setzero_ps();
    for (size_t end = k + n_k; k < end; k += 4) {
#pragma GCC unroll 2
        for (int b = 0; b < n_blocks; b++) {
            const char *at = panel + (k + (size_t)b * F8_BLOCK) / 4 * PANEL * 4;
            __m512i pairs[2];
            _mm_prefetch(at + PREFETCH_BYTES, _MM_HINT_T0);
            pairs_of_f8(pairs, _mm512_loadu_si512(at));
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                const uint16_t *in = x[r] + k + b * F8_BLOCK;
                sum[b * n + r] = dot(dot(sum[b * n + r], pairs[0], broadcast_x(in, 0)), pairs[1],
                                     broadcast_x(in, 1));
            }
        }
    }
#pragma GCC unroll 2
    for (int b = 0; b < n_blocks; b++)
#pragma GCC unroll 8
        for (int r = 0; r < n; r++)
            acc[r] = _mm512_fmadd_ps(sum[b * n + r], _mm512_set1_ps(scale[b]), acc[r]);
}

BLOCK_INLINE void rows_f8(__m512 *acc, const uint16_t *const *x, const char *panel, size_t n_in,
                          const int n)
{
    const float *scale = f8_scales(panel, n_in);
    size_t k = 0;
    for (; k + 2 * F8_BLOCK <= n_in; k += 2 * F8_BLOCK, scale += 2)
        blocks_f8(acc, x, panel, scale, k, F8_BLOCK, n, 2);
    for (; k < n_in; k += F8_BLOCK, scale++)
        blocks_f8(acc, x, panel, scale, k, n_in - k < F8_BLOCK ? n_in - k : F8_BLOCK, n, 1);
}

/* Computes n rows, a constant. Only the first n_rows of x [n] differ; the others repeat the last
 * row, and their results are dropped. */
BLOCK_INLINE void gemv_rows(float *out, size_t out_stride, const uint16_t *const *x, size_t n_rows,
                            const struct weight *w, size_t i_panel, const int n)
{
    __m512 acc[DOT_ROWS];
    const char *panel = panel_at(w, i_panel, weight_layout_panel_bytes(w->layout, w->n_in));
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) acc[r] = _mm512_setzero_ps();
    if (w->layout == LAYOUT_BF16) rows_bf16(acc, x, panel, w->n_in, n);
    else rows_f8(acc, x, panel, w->n_in, n);
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        if ((size_t)r >= n_rows) break;
        _mm512_storeu_ps(out + (size_t)r * out_stride, acc[r]);
    }
}

void bf16_gemv(float *out, const uint16_t *x, size_t x_stride, size_t n_rows,
               const struct weight *w, size_t i_panel, size_t n_panels)
{
    const uint16_t *rows[DOT_ROWS];
    size_t stride = n_panels * PANEL;
    for (size_t r = 0; r < DOT_ROWS; r++) rows[r] = x + (r < n_rows ? r : n_rows - 1) * x_stride;
    for (size_t p = i_panel; p < i_panel + n_panels; p++, out += PANEL) {
        if (n_rows > 6) gemv_rows(out, stride, rows, n_rows, w, p, 8);
        else if (n_rows > 4) gemv_rows(out, stride, rows, n_rows, w, p, 6);
        else if (n_rows > 2) gemv_rows(out, stride, rows, n_rows, w, p, 4);
        else if (n_rows > 1) gemv_rows(out, stride, rows, n_rows, w, p, 2);
        else gemv_rows(out, stride, rows, n_rows, w, p, 1);
    }
}

/* ---- many rows ---- */

struct bf16_gemm_tile {
    float *acc;
    size_t acc_stride; /* from panel to panel */
    const uint16_t *x[TILE_ROWS];
    size_t n_rows, n_pairs; /* only the first n_rows of x differ; the others repeat the last */
    const uint32_t *w;
    size_t w_stride;
    const float *scale;
    const uint32_t *next; /* is prefetched meanwhile, a line per pair */
};

BLOCK_INLINE float *acc_at(const struct bf16_gemm_tile *t, int p, int r)
{
    size_t row = (size_t)r < t->n_rows ? (size_t)r : t->n_rows - 1;
    return t->acc + (size_t)p * t->acc_stride + row * PANEL;
}

/* Computes n rows by n_panels panels; both are constants. */
BLOCK_INLINE void tile_rows(const struct bf16_gemm_tile *t, const int n, const int n_panels)
{
    const uint16_t *const *x = t->x;
    const uint32_t *w = t->w;
    __m512 sum[DOT_PANELS][TILE_ROWS];
#pragma GCC unroll 2
    for (int p = 0; p < n_panels; p++)
#pragma GCC unroll 8
        for (int r = 0; r < n; r++)
            sum[p][r] = t->scale ? _mm512_setzero_ps() : _mm512_loadu_ps(acc_at(t, p, r));
    for (size_t i = 0; i < t->n_pairs; i++, w += PANEL) {
        __m512i two[DOT_PANELS];
        _mm_prefetch((const char *)(t->next + i * PANEL), _MM_HINT_T1);
#pragma GCC unroll 2
        for (int p = 0; p < n_panels; p++) two[p] = _mm512_loadu_si512(w + (size_t)p * t->w_stride);
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) {
            __m512bh in = broadcast_x(x[r], i);
#pragma GCC unroll 2
            for (int p = 0; p < n_panels; p++) sum[p][r] = dot(sum[p][r], two[p], in);
        }
    }
#pragma GCC unroll 2
    for (int p = 0; p < n_panels; p++)
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) {
            if ((size_t)r >= t->n_rows) break;
            float *acc = acc_at(t, p, r);
            _mm512_storeu_ps(acc, t->scale ? _mm512_fmadd_ps(sum[p][r], _mm512_set1_ps(t->scale[p]),
                                                             _mm512_loadu_ps(acc))
                                           : sum[p][r]);
        }
}

BLOCK_INLINE void tile_panels(const struct bf16_gemm_tile *t, const int n_panels)
{
    if (t->n_rows > 6) tile_rows(t, 8, n_panels);
    else if (t->n_rows > 4) tile_rows(t, 6, n_panels);
    else if (t->n_rows > 2) tile_rows(t, 4, n_panels);
    else tile_rows(t, 2, n_panels);
}

/* Divides the rows into tiles of nearly equal height, such as 18 into 6 + 6 + 6. During the first
 * of them the k's that follow are prefetched, because a few dozen rows are computed faster than
 * memory delivers the next weights. */
void bf16_tile(float *acc, const uint16_t *x, size_t x_stride, size_t n_rows, const uint32_t *w,
               size_t w_stride, size_t n_panels, const float *scale, size_t n_k)
{
    struct bf16_gemm_tile t = {
        .acc = acc,
        .acc_stride = n_rows * PANEL,
        .n_pairs = (n_k + 1) / 2,
        .w = w,
        .w_stride = w_stride,
        .scale = scale,
    };
    size_t i_tile = 0;
    for (size_t n_tiles = (n_rows + TILE_ROWS - 1) / TILE_ROWS; n_tiles > 0; n_tiles--, i_tile++) {
        t.next = i_tile < n_panels ? w + i_tile * w_stride + t.n_pairs * PANEL : w;
        t.n_rows = (n_rows + n_tiles - 1) / n_tiles;
        for (size_t r = 0; r < TILE_ROWS; r++)
            t.x[r] = x + (r < t.n_rows ? r : t.n_rows - 1) * x_stride;
        if (n_panels == 2) tile_panels(&t, 2);
        else tile_panels(&t, 1);
        t.acc += t.n_rows * PANEL;
        x += t.n_rows * x_stride;
        n_rows -= t.n_rows;
    }
}
