/* matmul_avx512.c - matrix times one row (gemv) and times many (widen, tile) on 16 lanes: a panel is one register of outputs.
 * The same chains as matmul_avx2.c; see there for the ideas. Thread: engine, pool. */
#include "kernels/cpu/lanes_avx512.h"
#include "kernels/cpu/loops_avx512.h"

#define INLINE static inline __attribute__((always_inline))

enum { TILE_ROWS = 12 };

/* ---- weights of one k as f32 ---- */

INLINE __m512i load_word(const uint32_t *p) { return _mm512_loadu_si512(p); }
INLINE __m512  even_bf16(__m512i pair) { return _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16)); }
INLINE __m512  odd_bf16(__m512i pair) { return _mm512_castsi512_ps(_mm512_and_si512(pair, _mm512_set1_epi32(-65536))); }

/* ---- one row ---- */

INLINE void gemv_f32(__m512 *acc, const float *x, const char *data, size_t bytes, size_t n_in, const int n)
{
    for (size_t k = 0; k < n_in; k++) {
        __m512 xk = _mm512_set1_ps(x[k]);
#pragma GCC unroll 4
        for (int p = 0; p < n; p++)
            acc[p] = _mm512_fmadd_ps(_mm512_loadu_ps((const float *)(data + (size_t)p * bytes) + k * PANEL), xk, acc[p]);
    }
}

INLINE void gemv_bf16(__m512 *acc, const float *x, const char *data, size_t bytes, size_t n_in, const int n)
{
    for (size_t k = 0; k < n_in; k += 2) {
        __m512 x0 = _mm512_set1_ps(x[k]), x1 = _mm512_set1_ps(x[k + 1 < n_in ? k + 1 : k]);
#pragma GCC unroll 4
        for (int p = 0; p < n; p++) {
            __m512i pair = load_word((const uint32_t *)(data + (size_t)p * bytes) + k / 2 * PANEL);
            acc[p] = _mm512_fmadd_ps(even_bf16(pair), x0, acc[p]);
            if (k + 1 < n_in) acc[p] = _mm512_fmadd_ps(odd_bf16(pair), x1, acc[p]);
        }
    }
}

/* n is a constant at each call, so that the accumulators live in registers. */
INLINE void gemv_panels(float *out, const float *x, const struct weight *w, size_t i_panel, const int n)
{
    size_t      bytes = form_panel_bytes(w->form, w->n_in);
    const char *data = panel_at(w, i_panel, bytes);
    __m512      acc[GEMV_PANELS];
    for (int p = 0; p < n; p++) acc[p] = _mm512_setzero_ps();
    if (w->form == FORM_F32) gemv_f32(acc, x, data, bytes, w->n_in, n);
    else gemv_bf16(acc, x, data, bytes, w->n_in, n);
    for (int p = 0; p < n; p++) _mm512_storeu_ps(out + p * PANEL, acc[p]);
}

void avx512_gemv(float *out, const float *x, const struct weight *w, size_t i_panel, size_t n_panels)
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
        __m512i pair = load_word(pairs + k / 2 * PANEL);
        _mm512_storeu_ps(dst + k * PANEL, even_bf16(pair));
        if (k + 1 < n_k) _mm512_storeu_ps(dst + (k + 1) * PANEL, odd_bf16(pair));
    }
}

void avx512_widen(float *dst, const struct weight *w, size_t i_panel, size_t k_begin, size_t n_k)
{
    const void *panel = panel_at(w, i_panel, form_panel_bytes(w->form, w->n_in));
    if (w->form == FORM_BF16) widen_bf16(dst, (const uint32_t *)panel + k_begin / 2 * PANEL, n_k);
    else cpu_row_ref.loops.widen(dst, w, i_panel, k_begin, n_k);
}

INLINE void tile_rows(float *acc, const float *x, size_t x_stride, const float *w, size_t n_k, const int n)
{
    __m512 sum[TILE_ROWS];
#pragma GCC unroll 12
    for (int i = 0; i < n; i++) sum[i] = _mm512_loadu_ps(acc + i * PANEL);
    for (size_t k = 0; k < n_k; k++, w += PANEL) {
        __m512 wk = _mm512_loadu_ps(w);
#pragma GCC unroll 12
        for (int i = 0; i < n; i++) sum[i] = _mm512_fmadd_ps(wk, _mm512_set1_ps(x[(size_t)i * x_stride + k]), sum[i]);
    }
#pragma GCC unroll 12
    for (int i = 0; i < n; i++) _mm512_storeu_ps(acc + i * PANEL, sum[i]);
}

/* Tiles of nearly equal height, as in avx2_tile. */
void avx512_tile(float *acc, const float *x, size_t x_stride, size_t n_rows, const float *w, size_t n_k)
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
