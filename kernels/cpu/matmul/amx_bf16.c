/* amx_bf16.c - bf16 GEMM on AMX tiles: one tdpbf16ps multiplies up to 16 rows of 32 inputs by 32 k
 * of a panel.
 *
 * A tile accumulates even and odd k separately, so few rows use tiles too, and a row gets the same
 * bits whatever it is computed with. Steps have 32 k from 0 on; past the end the inputs are zero
 * (act_quant.h) and the weights come from a padded copy. Every call sets and releases the tile
 * configuration. Thread: engine, compute pool. */
#include <immintrin.h>
#include <string.h>

#include "kernels/cpu/microkernels_amx.h"
#include "kernels/cpu/microkernels_vnni.h"

/* As in amx_int8.c. */
#define T_SUM 0
#define T_X   1
#define T_W   2

enum { STEP_K = 32, STEP_PAIRS = STEP_K / 2, STEP_WORDS = STEP_PAIRS * PANEL };

static void configure(size_t n_rows)
{
    struct amx_tile_config c = {
        .palette = 1,
        .row_bytes = { [T_SUM] = PANEL * 4, [T_X] = STEP_K * 2, [T_W] = PANEL * 4 },
        .rows = { [T_SUM] = (uint8_t)n_rows, [T_X] = (uint8_t)n_rows, [T_W] = STEP_PAIRS },
    };
    amx_written(&c);
    _tile_loadconfig(&c);
}

/* Adds the products over n_k k's to T_SUM, for the rows that the tiles are configured for. */
static void add_products(const uint16_t *x, size_t x_stride, const uint32_t *w, size_t n_k)
{
    size_t k = 0;
    for (; k + STEP_K <= n_k; k += STEP_K, w += STEP_WORDS) {
        _tile_loadd(T_X, x + k, x_stride * sizeof *x);
        _tile_loadd(T_W, w, PANEL * sizeof *w);
        _tile_dpbf16ps(T_SUM, T_X, T_W);
    }
    if (k == n_k) return;
    uint32_t last[STEP_WORDS] = { 0 };
    memcpy(last, w, (n_k - k + 1) / 2 * PANEL * sizeof *w);
    amx_written(last);
    _tile_loadd(T_X, x + k, x_stride * sizeof *x);
    _tile_loadd(T_W, last, PANEL * sizeof *w);
    _tile_dpbf16ps(T_SUM, T_X, T_W);
}

static void add_scaled(float *acc, size_t n_rows, float scale)
{
    float sum[AMX_ROWS][PANEL] __attribute__((aligned(64)));
    __m512 s = _mm512_set1_ps(scale);
    _tile_stored(T_SUM, sum, sizeof sum[0]);
    for (size_t r = 0; r < n_rows; r++, acc += PANEL)
        _mm512_storeu_ps(acc, _mm512_fmadd_ps(_mm512_load_ps(sum[r]), s, _mm512_loadu_ps(acc)));
}

void amx_tile_bf16(float *acc, const uint16_t *x, size_t x_stride, size_t n_rows, const uint32_t *w,
                   size_t w_stride, size_t n_panels, const float *scale, size_t n_k)
{
    for (size_t r = 0, n; r < n_rows; r += n) {
        n = n_rows - r < AMX_ROWS ? n_rows - r : AMX_ROWS;
        configure(n);
        amx_written(acc);
        amx_written(w);
        for (size_t p = 0; p < n_panels; p++) {
            float *at = acc + (p * n_rows + r) * PANEL;
            if (scale) _tile_zero(T_SUM);
            else _tile_loadd(T_SUM, at, PANEL * sizeof *at);
            add_products(x + r * x_stride, x_stride, w + p * w_stride, n_k);
            if (scale) add_scaled(at, n, scale[p]);
            else _tile_stored(T_SUM, at, PANEL * sizeof *at);
        }
    }
    _tile_release();
}

/* Computes one panel; acc [n_rows][16] is zero on entry. */
static void gemv_panel(float *acc, const uint16_t *x, size_t x_stride, size_t n_rows,
                       const struct weight *w, size_t i_panel)
{
    if (w->layout == LAYOUT_BF16) {
        amx_tile_bf16(acc, x, x_stride, n_rows,
                      panel_at(w, i_panel, weight_layout_panel_bytes(w->layout, w->n_in)), 0, 1,
                      NULL, w->n_in);
        return;
    }
    uint32_t pairs[F8_BLOCK / 2 * PANEL] __attribute__((aligned(64)));
    for (size_t k = 0; k < w->n_in; k += F8_BLOCK) {
        size_t n_k = w->n_in - k < F8_BLOCK ? w->n_in - k : F8_BLOCK;
        float scale;
        bf16_upconvert(pairs, &scale, w, i_panel, k, n_k);
        amx_tile_bf16(acc, x + k, x_stride, n_rows, pairs, 0, 1, &scale, n_k);
    }
}

void amx_gemv_bf16(float *out, const uint16_t *x, size_t x_stride, size_t n_rows,
                   const struct weight *w, size_t i_panel, size_t n_panels)
{
    for (size_t p = 0; p < n_panels; p++) {
        float acc[DOT_ROWS * PANEL] = { 0 };
        gemv_panel(acc, x, x_stride, n_rows, w, i_panel + p);
        for (size_t r = 0; r < n_rows; r++)
            memcpy(out + (r * n_panels + p) * PANEL, acc + r * PANEL, PANEL * sizeof *acc);
    }
}
