/* amx_int8.c - integer GEMM of many rows on AMX tiles: one tdpbsud multiplies one term of 16 rows
 * of 32 inputs by 32 k of a panel.
 *
 * A block of inputs is 32 bytes and a block of a panel eight rows of 64 bytes, as tiles need them;
 * both are loaded in place. The sums of a block are stored and accumulated in f32 on vector lanes,
 * which takes most of the time. Rows that do not fill a tile, and layouts with groups of 16 k, take
 * the micro-kernels of int_vnni.c, with the same bits. Every call sets and releases the tile
 * configuration. Thread: engine, compute pool. */
#include <string.h>

#include "kernels/cpu/matmul/int_accumulate_avx512.h"
#include "kernels/cpu/microkernels_amx.h"
#include "kernels/cpu/microkernels_vnni.h"

/* Tile numbers are part of the instruction's text, so they are macros and not enum constants. */
#define T_SUM 0 /* 16 x 16 i32 */
#define T_X   1 /* 16 rows x 32 bytes */
#define T_W   2 /* 8 rows x 16 words */

static const struct amx_tile_config CONFIG = {
    .palette = 1,
    .row_bytes = { [T_SUM] = PANEL * 4, [T_X] = BLOCK_K, [T_W] = PANEL * 4 },
    .rows = { [T_SUM] = AMX_ROWS, [T_X] = AMX_ROWS, [T_W] = WORDS },
};

/* Computes AMX_ROWS rows of one panel. */
BLOCK_INLINE void tile_layout(float *acc, const struct act_block *x, size_t x_stride,
                              const struct unpacked_panel *w, size_t n_blocks, const int zero,
                              const int layout)
{
    const struct block_kind kind = block_kind(layout);
    int32_t sum[ACT_TERMS][AMX_ROWS][PANEL] __attribute__((aligned(64)));
    for (size_t b = 0; b < n_blocks; b++) {
        struct scales512 scales = { _mm512_setzero_ps(), _mm512_setzero_ps() };
        if (kind.scaled) scales.d = _mm512_load_ps(w->d[b]);
        if (kind.has_m) scales.m = _mm512_load_ps(w->m[b]);
        _tile_loadd(T_W, w->q[b * WORDS], sizeof w->q[0]);
        for (int term = 0; term < ACT_TERMS; term++) {
            _tile_zero(T_SUM);
            _tile_loadd(T_X, x[b].q[term], x_stride * sizeof *x);
            _tile_dpbsud(T_SUM, T_X, T_W);
            _tile_stored(T_SUM, sum[term], sizeof sum[term][0]);
        }
        for (size_t r = 0; r < AMX_ROWS; r++) {
            const struct act_block *in = x + r * x_stride + b;
            __m512i total = _mm512_add_epi32(
                _mm512_slli_epi32(_mm512_load_si512(sum[0][r]), ACT_LOW_BITS),
                _mm512_load_si512(sum[1][r]));
            if (kind.zero) total = _mm512_add_epi32(total, x_sum_times(in, 2, -zero));
            float *at = acc + r * PANEL;
            _mm512_storeu_ps(at, accumulate(_mm512_loadu_ps(at), total, in, 2, kind, scales));
        }
    }
}

void amx_tile_int(float *acc, const struct act_block *x, size_t x_stride, size_t n_rows,
                  const struct unpacked_panel *w, size_t n_panels, int layout, size_t n_k)
{
    if (LAYOUTS[layout].group == BLOCK_K / 2 || n_rows < AMX_ROWS) {
        vnni_tile_int(acc, x, x_stride, n_rows, w, n_panels, layout, n_k);
        return;
    }
    const int kernel_layout = block_kernel_layout(layout), zero = LAYOUTS[layout].zero;
    _tile_loadconfig(&CONFIG);
    for (size_t p = 0; p < n_panels; p++, w++, acc += n_rows * PANEL) {
        size_t r = 0, n_blocks = n_k / BLOCK_K;
        for (; r + AMX_ROWS <= n_rows; r += AMX_ROWS) {
            const struct act_block *rows = x + r * x_stride;
            if (kernel_layout == LAYOUT_W8)
                tile_layout(acc + r * PANEL, rows, x_stride, w, n_blocks, zero, LAYOUT_W8);
            else if (kernel_layout == LAYOUT_Q8K32)
                tile_layout(acc + r * PANEL, rows, x_stride, w, n_blocks, zero, LAYOUT_Q8K32);
            else if (kernel_layout == LAYOUT_Q4M)
                tile_layout(acc + r * PANEL, rows, x_stride, w, n_blocks, zero, LAYOUT_Q4M);
            else tile_layout(acc + r * PANEL, rows, x_stride, w, n_blocks, zero, LAYOUT_Q8);
        }
        if (r < n_rows)
            vnni_tile_int(acc + r * PANEL, x + r * x_stride, x_stride, n_rows - r, w, 1, layout,
                          n_k);
    }
    _tile_release();
}
