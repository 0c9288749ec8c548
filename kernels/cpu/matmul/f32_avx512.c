/* f32_avx512.c - f32 GEMM on 16 lanes: matrix times one row (gemv) and times many (dequantise,
 * tile). A panel is one register of outputs.
 *
 * Every accumulator runs over k in order, and a multiply-add takes four cycles, so speed needs many
 * accumulators. F32 needs no second panel to keep up with memory, 16-bit layouts two; all others
 * are dequantised 32 k at a time, four panels in parallel. Tiles hold 12 rows of one panel.
 * Thread: engine, compute pool. */
#include "kernels/cpu/matmul/dequantize_avx512.h"
#include "kernels/cpu/microkernels_avx512.h"

enum { TILE_ROWS = 12, PAIR_PANELS = 2 };

/* ---- one row ---- */

static void gemv_f32(float *out, const float *x, const char *panel, size_t n_in)
{
    __m512 acc = _mm512_setzero_ps();
    for (size_t k = 0; k < n_in; k++) {
        const char *at = panel + k * PANEL * 4;
        _mm_prefetch(at + PREFETCH_BYTES, _MM_HINT_T0);
        acc = _mm512_fmadd_ps(_mm512_loadu_ps(at), _mm512_set1_ps(x[k]), acc);
    }
    _mm512_storeu_ps(out, acc);
}

/* Computes n panels (a constant) of a 16-bit layout, `bytes` apart. Near their end the n panels
 * that follow are prefetched. */
BLOCK_INLINE void gemv_pairs(float *out, const float *x, const char *panel, size_t bytes,
                             size_t n_in, const int layout, const int n)
{
    __m512 acc[PAIR_PANELS];
#pragma GCC unroll 2
    for (int p = 0; p < n; p++) acc[p] = _mm512_setzero_ps();
    for (size_t k = 0; k < n_in; k += 2) {
        const bool whole = k + 1 < n_in;
        size_t at = k / 2 * PANEL * 4, next_at = at + PREFETCH_BYTES / (size_t)n;
        __m512 x0 = _mm512_set1_ps(x[k]), x1 = _mm512_set1_ps(whole ? x[k + 1] : 0);
        if (next_at >= bytes) next_at += (size_t)(n - 1) * bytes;
#pragma GCC unroll 2
        for (int p = 0; p < n; p++) {
            _mm_prefetch(panel + (size_t)p * bytes + next_at, _MM_HINT_T0);
            __m512i pair = _mm512_loadu_si512(panel + (size_t)p * bytes + at);
            acc[p] = _mm512_fmadd_ps(even_of(layout, pair), x0, acc[p]);
            if (whole) acc[p] = _mm512_fmadd_ps(odd_of(layout, pair), x1, acc[p]);
        }
    }
#pragma GCC unroll 2
    for (int p = 0; p < n; p++) _mm512_storeu_ps(out + p * PANEL, acc[p]);
}

static void gemv_16bit(float *out, const float *x, const struct weight *w, size_t i_panel,
                       size_t n_panels)
{
    size_t bytes = weight_layout_panel_bytes(w->layout, w->n_in);
    while (n_panels > 0) {
        const char *panel = panel_at(w, i_panel, bytes);
        size_t n = n_panels >= PAIR_PANELS ? PAIR_PANELS : 1;
        if (w->layout == LAYOUT_F16 && n > 1)
            gemv_pairs(out, x, panel, bytes, w->n_in, LAYOUT_F16, PAIR_PANELS);
        else if (w->layout == LAYOUT_F16) gemv_pairs(out, x, panel, bytes, w->n_in, LAYOUT_F16, 1);
        else if (n > 1) gemv_pairs(out, x, panel, bytes, w->n_in, LAYOUT_BF16, PAIR_PANELS);
        else gemv_pairs(out, x, panel, bytes, w->n_in, LAYOUT_BF16, 1);
        out += n * PANEL;
        i_panel += n;
        n_panels -= n;
    }
}

/* Uses GEMV_PANELS accumulators; if there are fewer panels, the first is repeated and its result
 * dropped. */
BLOCK_INLINE void gemv_dequantized(float *out, const float *x, const struct weight *w,
                                   size_t i_panel, size_t n_panels, const int layout)
{
    float f32[GEMV_PANELS][BLOCK_K * PANEL] __attribute__((aligned(64)));
    size_t bytes = weight_layout_panel_bytes(layout, w->n_in);
    __m512 acc[GEMV_PANELS] = { _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(),
                                _mm512_setzero_ps() };
    for (size_t k0 = 0; k0 < w->n_in; k0 += BLOCK_K) {
        size_t n_k = w->n_in - k0 < BLOCK_K ? w->n_in - k0 : BLOCK_K;
        for (size_t p = 0; p < n_panels; p++)
            dequantize_group(f32[p], panel_at(w, i_panel + p, bytes),
                             weight_layout_channel_scale(w, i_panel + p), w->n_in, k0, n_k, layout);
        for (size_t k = 0; k < n_k; k++) {
            __m512 xk = _mm512_set1_ps(x[k0 + k]);
#pragma GCC unroll 4
            for (size_t p = 0; p < GEMV_PANELS; p++)
                acc[p] = _mm512_fmadd_ps(_mm512_load_ps(f32[p < n_panels ? p : 0] + k * PANEL), xk,
                                         acc[p]);
        }
    }
    for (size_t p = 0; p < n_panels; p++) _mm512_storeu_ps(out + p * PANEL, acc[p]);
}

void avx512_gemv(float *out, const float *x, const struct weight *w, size_t i_panel,
                 size_t n_panels)
{
    switch (w->layout) {
    case LAYOUT_F32:
        for (size_t p = 0; p < n_panels; p++)
            gemv_f32(out + p * PANEL, x,
                     panel_at(w, i_panel + p, weight_layout_panel_bytes(LAYOUT_F32, w->n_in)),
                     w->n_in);
        break;
    case LAYOUT_F16:
    case LAYOUT_BF16:
        gemv_16bit(out, x, w, i_panel, n_panels);
        break;
        LAYOUT_CASE(F8, gemv_dequantized(out, x, w, i_panel, n_panels, LAYOUT))
        INTEGER_LAYOUTS(LAYOUT_CASE, gemv_dequantized(out, x, w, i_panel, n_panels, LAYOUT))
    }
}

/* ---- many rows ---- */

BLOCK_INLINE void dequantize_layout(float *dst, const struct weight *w, size_t i_panel,
                                    size_t k_begin, size_t n_k, const int layout)
{
    const char *panel = panel_at(w, i_panel, weight_layout_panel_bytes(layout, w->n_in));
    const float *scale = weight_layout_channel_scale(w, i_panel);
    for (size_t k = 0; k < n_k; k += BLOCK_K, dst += BLOCK_K * PANEL)
        dequantize_group(dst, panel, scale, w->n_in, k_begin + k,
                         n_k - k < BLOCK_K ? n_k - k : BLOCK_K, layout);
}

void avx512_dequantize(float *dst, const struct weight *w, size_t i_panel, size_t k_begin,
                       size_t n_k)
{
    switch (w->layout) {
    case LAYOUT_F32: {
        const float *panel = panel_at(w, i_panel, weight_layout_panel_bytes(LAYOUT_F32, w->n_in));
        __builtin_memcpy(dst, panel + k_begin * PANEL, n_k * PANEL * sizeof *dst);
        break;
    }
        LAYOUT_CASE(F16, dequantize_layout(dst, w, i_panel, k_begin, n_k, LAYOUT))
        LAYOUT_CASE(BF16, dequantize_layout(dst, w, i_panel, k_begin, n_k, LAYOUT))
        LAYOUT_CASE(F8, dequantize_layout(dst, w, i_panel, k_begin, n_k, LAYOUT))
        INTEGER_LAYOUTS(LAYOUT_CASE, dequantize_layout(dst, w, i_panel, k_begin, n_k, LAYOUT))
    }
}

BLOCK_INLINE void tile_rows(float *acc, const float *x, size_t x_stride, const float *w, size_t n_k,
                            const int n)
{
    __m512 sum[TILE_ROWS];
#pragma GCC unroll 12
    for (int i = 0; i < n; i++) sum[i] = _mm512_loadu_ps(acc + i * PANEL);
    for (size_t k = 0; k < n_k; k++, w += PANEL) {
        __m512 wk = _mm512_loadu_ps(w);
#pragma GCC unroll 12
        for (int i = 0; i < n; i++)
            sum[i] = _mm512_fmadd_ps(wk, _mm512_set1_ps(x[(size_t)i * x_stride + k]), sum[i]);
    }
#pragma GCC unroll 12
    for (int i = 0; i < n; i++) _mm512_storeu_ps(acc + i * PANEL, sum[i]);
}

/* Divides the rows into tiles of nearly equal height: 13 into 7 + 6 and not 12 + 1, because a
 * single row would wait for its own additions. */
void avx512_tile(float *acc, const float *x, size_t x_stride, size_t n_rows, const float *w,
                 size_t n_k)
{
    for (size_t n_tiles = (n_rows + TILE_ROWS - 1) / TILE_ROWS; n_tiles > 0; n_tiles--) {
        size_t n = (n_rows + n_tiles - 1) / n_tiles;
        switch (n) {
        case 12: tile_rows(acc, x, x_stride, w, n_k, 12); break;
        case 11: tile_rows(acc, x, x_stride, w, n_k, 11); break;
        case 10: tile_rows(acc, x, x_stride, w, n_k, 10); break;
        case 9: tile_rows(acc, x, x_stride, w, n_k, 9); break;
        case 8: tile_rows(acc, x, x_stride, w, n_k, 8); break;
        case 7: tile_rows(acc, x, x_stride, w, n_k, 7); break;
        case 6: tile_rows(acc, x, x_stride, w, n_k, 6); break;
        case 5: tile_rows(acc, x, x_stride, w, n_k, 5); break;
        case 4: tile_rows(acc, x, x_stride, w, n_k, 4); break;
        case 3: tile_rows(acc, x, x_stride, w, n_k, 3); break;
        case 2: tile_rows(acc, x, x_stride, w, n_k, 2); break;
        default: tile_rows(acc, x, x_stride, w, n_k, 1); break;
        }
        acc += n * PANEL;
        x += n * x_stride;
        n_rows -= n;
    }
}
