/* f32_avx2.c - f32 GEMM on 8 lanes: matrix times one row (gemv) and times many (dequantise, tile).
 * A panel is two registers of outputs.
 *
 * Every accumulator runs over k in order, and a multiply-add takes four cycles, so speed needs many
 * accumulators. F32 needs no second panel to keep up with memory, 16-bit layouts two; all others
 * are dequantised 32 k at a time, four panels in parallel. Tiles hold six rows of one panel.
 * Thread: engine, compute pool. */
#include "kernels/cpu/matmul/dequantize_avx2.h"
#include "kernels/cpu/microkernels_avx2.h"

enum { PAIR_PANELS = 2 };

/* ---- one row ---- */

static void gemv_f32(float *out, const float *x, const char *panel, size_t n_in)
{
    __m256 low = _mm256_setzero_ps(), high = low;
    for (size_t k = 0; k < n_in; k++) {
        const float *at = (const float *)panel + k * PANEL;
        __m256 xk = _mm256_broadcast_ss(x + k);
        _mm_prefetch((const char *)at + PREFETCH_BYTES, _MM_HINT_T0);
        low = _mm256_fmadd_ps(_mm256_loadu_ps(at), xk, low);
        high = _mm256_fmadd_ps(_mm256_loadu_ps(at + HALF), xk, high);
    }
    _mm256_storeu_ps(out, low);
    _mm256_storeu_ps(out + HALF, high);
}

/* Computes n panels (a constant) of a 16-bit layout, `bytes` apart. Near their end the n panels
 * that follow are prefetched. */
BLOCK_INLINE void gemv_pairs(float *out, const float *x, const char *panel, size_t bytes,
                             size_t n_in, const int layout, const int n)
{
    __m256 acc[PAIR_PANELS][2];
#pragma GCC unroll 2
    for (int p = 0; p < n; p++) acc[p][0] = acc[p][1] = _mm256_setzero_ps();
    for (size_t k = 0; k < n_in; k += 2) {
        const bool whole = k + 1 < n_in;
        size_t at = k / 2 * PANEL * 4, next_at = at + PREFETCH_BYTES / (size_t)n;
        __m256 x0 = _mm256_broadcast_ss(x + k), x1 = _mm256_broadcast_ss(x + (whole ? k + 1 : k));
        if (next_at >= bytes) next_at += (size_t)(n - 1) * bytes;
#pragma GCC unroll 2
        for (int p = 0; p < n; p++) {
            _mm_prefetch(panel + (size_t)p * bytes + next_at, _MM_HINT_T0);
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                __m256i pair = load8(panel + (size_t)p * bytes + at + (size_t)(h * HALF * 4));
                acc[p][h] = _mm256_fmadd_ps(even_of(layout, pair), x0, acc[p][h]);
                if (whole) acc[p][h] = _mm256_fmadd_ps(odd_of(layout, pair), x1, acc[p][h]);
            }
        }
    }
#pragma GCC unroll 2
    for (int p = 0; p < n; p++) {
        _mm256_storeu_ps(out + p * PANEL, acc[p][0]);
        _mm256_storeu_ps(out + p * PANEL + HALF, acc[p][1]);
    }
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
    __m256 acc[GEMV_PANELS][2];
    for (size_t p = 0; p < GEMV_PANELS; p++) acc[p][0] = acc[p][1] = _mm256_setzero_ps();
    for (size_t k0 = 0; k0 < w->n_in; k0 += BLOCK_K) {
        size_t n_k = w->n_in - k0 < BLOCK_K ? w->n_in - k0 : BLOCK_K;
        for (size_t p = 0; p < n_panels; p++)
            dequantize_group(f32[p], panel_at(w, i_panel + p, bytes),
                             weight_layout_channel_scale(w, i_panel + p), w->n_in, k0, n_k, layout);
        for (size_t k = 0; k < n_k; k++) {
            __m256 xk = _mm256_broadcast_ss(x + k0 + k);
#pragma GCC unroll 4
            for (size_t p = 0; p < GEMV_PANELS; p++) {
                const float *at = f32[p < n_panels ? p : 0] + k * PANEL;
                acc[p][0] = _mm256_fmadd_ps(_mm256_load_ps(at), xk, acc[p][0]);
                acc[p][1] = _mm256_fmadd_ps(_mm256_load_ps(at + HALF), xk, acc[p][1]);
            }
        }
    }
    for (size_t p = 0; p < n_panels; p++) {
        _mm256_storeu_ps(out + p * PANEL, acc[p][0]);
        _mm256_storeu_ps(out + p * PANEL + HALF, acc[p][1]);
    }
}

void avx2_gemv(float *out, const float *x, const struct weight *w, size_t i_panel, size_t n_panels)
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

void avx2_dequantize(float *dst, const struct weight *w, size_t i_panel, size_t k_begin, size_t n_k)
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

/* Computes n rows by one panel with 2n accumulators, two weight registers, and one input that is
 * broadcast at a time. */
BLOCK_INLINE void tile_rows(float *acc, const float *x, size_t x_stride, const float *w, size_t n_k,
                            const int n)
{
    __m256 sum[6][2];
#pragma GCC unroll 6
    for (int i = 0; i < n; i++) {
        sum[i][0] = _mm256_loadu_ps(acc + i * PANEL);
        sum[i][1] = _mm256_loadu_ps(acc + i * PANEL + 8);
    }
    for (size_t k = 0; k < n_k; k++, w += PANEL) {
        __m256 w0 = _mm256_loadu_ps(w), w1 = _mm256_loadu_ps(w + 8);
#pragma GCC unroll 6
        for (int i = 0; i < n; i++) {
            __m256 xk = _mm256_broadcast_ss(x + (size_t)i * x_stride + k);
            sum[i][0] = _mm256_fmadd_ps(w0, xk, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(w1, xk, sum[i][1]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < n; i++) {
        _mm256_storeu_ps(acc + i * PANEL, sum[i][0]);
        _mm256_storeu_ps(acc + i * PANEL + 8, sum[i][1]);
    }
}

/* Divides the rows into tiles of nearly equal height: 7 into 4 + 3 and not 6 + 1, because a single
 * row would wait for its own additions. */
void avx2_tile(float *acc, const float *x, size_t x_stride, size_t n_rows, const float *w,
               size_t n_k)
{
    for (size_t n_tiles = (n_rows + 5) / 6; n_tiles > 0; n_tiles--) {
        size_t n = (n_rows + n_tiles - 1) / n_tiles;
        switch (n) {
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
