/* matmul_avx2.c - matrix times one row (gemv) and times many (widen, tile) on 8 lanes.
 *
 * A panel is two registers of outputs. Every accumulator is one chain over k, so speed comes from many chains: four panels
 * side by side for one row, six rows by one panel for many. Quantised weights become f32 in registers (gemv) or once per 96
 * rows (widen). Thread: engine, pool. */
#include "kernels/cpu/lanes_avx2.h"
#include "kernels/cpu/loops_avx2.h"

#define INLINE static inline __attribute__((always_inline))

/* ---- weights of one k as f32 ---- */

INLINE __m256i load_word(const uint32_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE __m256  even_bf16(__m256i pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); }
INLINE __m256  odd_bf16(__m256i pair) { return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(-65536))); }

/* ---- one row ---- */

INLINE void gemv_f32(__m256 (*acc)[2], const float *x, const char *data, size_t bytes, size_t n_in, const int n)
{
    for (size_t k = 0; k < n_in; k++) {
        __m256 xk = _mm256_broadcast_ss(x + k);
#pragma GCC unroll 4
        for (int p = 0; p < n; p++) {
            const float *w = (const float *)(data + (size_t)p * bytes) + k * PANEL;
            acc[p][0] = _mm256_fmadd_ps(_mm256_loadu_ps(w), xk, acc[p][0]);
            acc[p][1] = _mm256_fmadd_ps(_mm256_loadu_ps(w + 8), xk, acc[p][1]);
        }
    }
}

INLINE void gemv_bf16(__m256 (*acc)[2], const float *x, const char *data, size_t bytes, size_t n_in, const int n)
{
    for (size_t k = 0; k < n_in; k += 2) {
        __m256 x0 = _mm256_broadcast_ss(x + k), x1 = _mm256_broadcast_ss(x + (k + 1 < n_in ? k + 1 : k));
#pragma GCC unroll 4
        for (int p = 0; p < n; p++) {
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++) {
                __m256i pair = load_word((const uint32_t *)(data + (size_t)p * bytes) + k / 2 * PANEL + 8 * h);
                acc[p][h] = _mm256_fmadd_ps(even_bf16(pair), x0, acc[p][h]);
                if (k + 1 < n_in) acc[p][h] = _mm256_fmadd_ps(odd_bf16(pair), x1, acc[p][h]);
            }
        }
    }
}

/* n is a constant at each call, so that the accumulators live in registers. */
INLINE void gemv_panels(float *out, const float *x, const struct weight *w, size_t i_panel, const int n)
{
    size_t      bytes = form_panel_bytes(w->form, w->n_in);
    const char *data = panel_at(w, i_panel, bytes);
    __m256      acc[GEMV_PANELS][2];
    for (int p = 0; p < n; p++) acc[p][0] = acc[p][1] = _mm256_setzero_ps();
    if (w->form == FORM_F32) gemv_f32(acc, x, data, bytes, w->n_in, n);
    else gemv_bf16(acc, x, data, bytes, w->n_in, n);
    for (int p = 0; p < n; p++) {
        _mm256_storeu_ps(out + p * PANEL, acc[p][0]);
        _mm256_storeu_ps(out + p * PANEL + 8, acc[p][1]);
    }
}

void avx2_gemv(float *out, const float *x, const struct weight *w, size_t i_panel, size_t n_panels)
{
    switch (n_panels) {
    case 4: gemv_panels(out, x, w, i_panel, 4); break;
    case 3: gemv_panels(out, x, w, i_panel, 3); break;
    case 2: gemv_panels(out, x, w, i_panel, 2); break;
    default: gemv_panels(out, x, w, i_panel, 1); break;
    }
}

/* ---- many rows ---- */

static void widen_bf16(float *dst, const uint32_t *pairs, size_t n_k)
{
    for (size_t k = 0; k < n_k; k += 2) {
        for (size_t h = 0; h < PANEL; h += 8) {
            __m256i pair = load_word(pairs + k / 2 * PANEL + h);
            _mm256_storeu_ps(dst + k * PANEL + h, even_bf16(pair));
            if (k + 1 < n_k) _mm256_storeu_ps(dst + (k + 1) * PANEL + h, odd_bf16(pair));
        }
    }
}

void avx2_widen(float *dst, const struct weight *w, size_t i_panel, size_t k_begin, size_t n_k)
{
    const void *panel = panel_at(w, i_panel, form_panel_bytes(w->form, w->n_in));
    if (w->form == FORM_BF16) widen_bf16(dst, (const uint32_t *)panel + k_begin / 2 * PANEL, n_k);
    else cpu_row_ref.loops.widen(dst, w, i_panel, k_begin, n_k);
}

/* n rows by one panel: 2n accumulators, two weight registers, one input broadcast at a time. */
INLINE void tile_rows(float *acc, const float *x, size_t x_stride, const float *w, size_t n_k, const int n)
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

/* Tiles of nearly equal height: 7 rows as 4 + 3, not 6 + 1, whose single row would wait for its own additions. */
void avx2_tile(float *acc, const float *x, size_t x_stride, size_t n_rows, const float *w, size_t n_k)
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
