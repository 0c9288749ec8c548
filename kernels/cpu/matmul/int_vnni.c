/* int_vnni.c - integer GEMM with vpdpbusd: one instruction multiplies four k's of 16 outputs by
 * four inputs broadcast to all lanes.
 *
 * The stored q is unsigned and the input signed, as the instruction requires. The two terms of an
 * input are multiplied one after the other, and the sum of the high one is shifted in between; the
 * zero point enters the sum as -zero * sum of inputs. Two such instructions start per cycle and
 * each has a latency of four, so eight sums must be in flight.
 *   gemv_int  computes one panel after the other, so that memory is read as one stream, which was
 *             measured to be a third faster than four streams. One row needs only one sum, because
 *             the CPU executes the next blocks out of order; several rows are side by side.
 *   tile_int  computes two panels by six rows: 12 sums and 12 accumulators in registers, and eight
 *             loads for twelve products.
 * The scales of a group cost two or three operations on the same units as its eight products, which
 * limits it to 73 to 76 % of the peak. Thread: engine, compute pool. */
#include "kernels/cpu/matmul/int_accumulate_avx512.h"
#include "kernels/cpu/microkernels_vnni.h"

/* ---- few rows: weights are unpacked into registers ---- */

/* Adds one block of a panel for n rows, whose sums are computed side by side, word by word. */
BLOCK_INLINE void block_rows(__m512 *acc, const struct act_block *const *x, const char *panel,
                             size_t b, const int layout, const int n)
{
    const struct block_kind kind = block_kind(layout);
    const int n_parts = kind.halves ? 2 : 1, n_words = WORDS / n_parts;
#pragma GCC unroll 2
    for (int part = 0; part < n_parts; part++) {
        const int which = kind.halves ? part : 2;
        __m512i high[DOT_ROWS], low[DOT_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) {
            high[r] = _mm512_setzero_si512();
            low[r] = kind.zero ? x_sum_times(x[r] + b, which, -LAYOUTS[layout].zero)
                               : _mm512_setzero_si512();
        }
#pragma GCC unroll 8
        for (int i = part * n_words; i < (part + 1) * n_words; i++) {
            __m512i q = block_word512(layout, panel, b, i);
#pragma GCC unroll 8
            for (int r = 0; r < n; r++) {
                high[r] = _mm512_dpbusd_epi32(high[r], q, broadcast_x(x[r] + b, 0, i));
                low[r] = _mm512_dpbusd_epi32(low[r], q, broadcast_x(x[r] + b, 1, i));
            }
        }
        struct scales512 scales = block_scales512(layout, panel, b, (size_t)part);
#pragma GCC unroll 8
        for (int r = 0; r < n; r++) {
            __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r], ACT_LOW_BITS), low[r]);
            acc[r] = accumulate(acc[r], sum, x[r] + b, which, kind, scales);
        }
    }
}

/* Computes n rows of one panel; n is a constant, so that the accumulators are in registers. Only
 * n_rows of x [n] differ; the others repeat the last one, and their results are dropped. */
BLOCK_INLINE void gemv_rows(float *out, size_t out_stride, const struct act_block *const *x,
                            size_t n_rows, const struct weight *w, size_t i_panel, const int layout,
                            const int n)
{
    __m512 acc[DOT_ROWS];
    const char *panel = panel_at(w, i_panel, weight_layout_panel_bytes(layout, w->n_in));
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) acc[r] = _mm512_setzero_ps();
    for (size_t b = 0; b < act_blocks(w->n_in); b++) {
        const char *next = panel + b * block_bytes(layout) + PREFETCH_BYTES;
#pragma GCC unroll 16
        for (size_t line = 0; line < block_bytes(layout); line += 64)
            _mm_prefetch(next + line, _MM_HINT_T0);
        block_rows(acc, x, panel, b, layout, n);
    }
    const float *scale = weight_layout_channel_scale(w, i_panel);
#pragma GCC unroll 8
    for (int r = 0; r < n; r++) {
        if ((size_t)r >= n_rows) break;
        if (!block_kind(layout).scaled) acc[r] = _mm512_mul_ps(acc[r], _mm512_loadu_ps(scale));
        _mm512_storeu_ps(out + (size_t)r * out_stride, acc[r]);
    }
}

BLOCK_INLINE void gemv_layout(float *out, const struct act_block *const *x, size_t n_rows,
                              const struct weight *w, size_t i_panel, size_t n_panels,
                              const int layout)
{
    size_t stride = n_panels * PANEL;
    for (size_t end = i_panel + n_panels; i_panel < end; i_panel++, out += PANEL) {
        if (n_rows > 6) gemv_rows(out, stride, x, n_rows, w, i_panel, layout, 8);
        else if (n_rows > 4) gemv_rows(out, stride, x, n_rows, w, i_panel, layout, 6);
        else if (n_rows > 2) gemv_rows(out, stride, x, n_rows, w, i_panel, layout, 4);
        else if (n_rows > 1) gemv_rows(out, stride, x, n_rows, w, i_panel, layout, 2);
        else gemv_rows(out, stride, x, n_rows, w, i_panel, layout, 1);
    }
}

void vnni_gemv_int(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                   const struct weight *w, size_t i_panel, size_t n_panels)
{
    const struct act_block *rows[DOT_ROWS];
    for (size_t r = 0; r < DOT_ROWS; r++) rows[r] = x + (r < n_rows ? r : n_rows - 1) * x_stride;
    switch (w->layout) {
        INTEGER_LAYOUTS(LAYOUT_CASE, gemv_layout(out, rows, n_rows, w, i_panel, n_panels, LAYOUT))
    }
}

/* ---- many rows: weights have been unpacked to bytes ---- */

/* A tile has n rows by n_panels panels. Both are constants, as is the layout, of which only the
 * block_kind matters. Values are ordered by panel, then row. */
typedef __m512 tile_accumulators[DOT_PANELS][INT_TILE_ROWS];
typedef __m512i tile_sums[DOT_PANELS][INT_TILE_ROWS];

/* In layouts with minima and groups of 32, keeps the operations before and after the value in the
 * order they are written in, which was measured to be 5 % faster than the compiler's own. */
#define KEEP_HERE(kind, v)                                                                         \
    do {                                                                                           \
        if ((kind).has_m && !(kind).halves) __asm__("" : "+v"(v));                                 \
    } while (0)

/* Sets the integer sums to their value at the beginning of a group. */
BLOCK_INLINE void clear_sums(tile_sums sum, const int n, const int n_panels)
{
#pragma GCC unroll 6
    for (int r = 0; r < n; r++)
#pragma GCC unroll 2
        for (int p = 0; p < n_panels; p++) sum[p][r] = _mm512_setzero_si512();
}

/* Adds the products of words i_begin .. i_end of block b with one term of the inputs. */
BLOCK_INLINE void add_products(tile_sums sum, const struct int_tile *t, size_t b, int term,
                               const int i_begin, const int i_end, const struct block_kind kind,
                               const int n, const int n_panels)
{
#pragma GCC unroll 8
    for (int i = i_begin; i < i_end; i++) {
        __m512i q[DOT_PANELS];
#pragma GCC unroll 2
        for (int p = 0; p < n_panels; p++) {
            q[p] = _mm512_load_si512(t->w[p].q[b * WORDS + (size_t)i]);
            KEEP_HERE(kind, q[p]);
        }
#pragma GCC unroll 6
        for (int r = 0; r < n; r++) {
            __m512i in = broadcast_x(t->x[r] + b, term, i);
            KEEP_HERE(kind, in);
#pragma GCC unroll 2
            for (int p = 0; p < n_panels; p++) {
                sum[p][r] = _mm512_dpbusd_epi32(sum[p][r], q[p], in);
                KEEP_HERE(kind, sum[p][r]);
            }
        }
    }
}

/* Between the terms: shifts the sums for the low one, and subtracts the zero point. */
BLOCK_INLINE void shift_sums(tile_sums sum, const struct int_tile *t, size_t b, const int which,
                             const struct block_kind kind, const int n, const int n_panels)
{
#pragma GCC unroll 6
    for (int r = 0; r < n; r++) {
        __m512i start = kind.zero ? x_sum_times(t->x[r] + b, which, -t->zero)
                                  : _mm512_setzero_si512();
#pragma GCC unroll 2
        for (int p = 0; p < n_panels; p++)
            sum[p][r] = _mm512_add_epi32(_mm512_slli_epi32(sum[p][r], ACT_LOW_BITS), start);
    }
}

/* Adds a group's sums to the accumulators. */
BLOCK_INLINE void accumulate_sums(tile_accumulators acc, tile_sums sum, const struct int_tile *t,
                                  size_t b, const int part, const struct block_kind kind,
                                  const int n, const int n_panels)
{
    const size_t group = kind.halves ? 2 * b + (size_t)part : b;
    const int which = kind.halves ? part : 2;
#pragma GCC unroll 2
    for (int p = 0; p < n_panels; p++) {
        struct scales512 scales = { _mm512_setzero_ps(), _mm512_setzero_ps() };
        if (kind.scaled) scales.d = _mm512_load_ps(t->w[p].d[group]);
        if (kind.has_m) scales.m = _mm512_load_ps(t->w[p].m[group]);
#pragma GCC unroll 6
        for (int r = 0; r < n; r++) {
            acc[p][r] = accumulate(acc[p][r], sum[p][r], t->x[r] + b, which, kind, scales);
            KEEP_HERE(kind, acc[p][r]);
        }
    }
}

BLOCK_INLINE void tile_block(tile_accumulators acc, const struct int_tile *t, size_t b,
                             const struct block_kind kind, const int n, const int n_panels)
{
    const int n_parts = kind.halves ? 2 : 1, n_words = WORDS / n_parts;
#pragma GCC unroll 2
    for (int part = 0; part < n_parts; part++) {
        tile_sums sum;
        clear_sums(sum, n, n_panels);
        for (int term = 0; term < ACT_TERMS; term++) {
            add_products(sum, t, b, term, part * n_words, (part + 1) * n_words, kind, n, n_panels);
            if (term == 0) shift_sums(sum, t, b, kind.halves ? part : 2, kind, n, n_panels);
        }
        accumulate_sums(acc, sum, t, b, part, kind, n, n_panels);
    }
}

BLOCK_INLINE void tile_rows(const struct int_tile *t, const int layout, const int n,
                            const int n_panels)
{
    const struct block_kind kind = block_kind(layout);
    const size_t n_blocks = t->n_blocks;
    tile_accumulators acc;
#pragma GCC unroll 2
    for (int p = 0; p < n_panels; p++)
#pragma GCC unroll 6
        for (int r = 0; r < n; r++) acc[p][r] = _mm512_loadu_ps(acc_at(t, p, r));
    for (size_t b = 0; b < n_blocks; b++) {
        if (t->next) {
#pragma GCC unroll 3
            for (size_t i = 0; i < NEXT_LINES; i++)
                _mm_prefetch(t->next + (b * NEXT_LINES + i) * 64, _MM_HINT_T1);
        }
        tile_block(acc, t, b, kind, n, n_panels);
    }
#pragma GCC unroll 2
    for (int p = 0; p < n_panels; p++)
#pragma GCC unroll 6
        for (int r = 0; r < n; r++) _mm512_storeu_ps(acc_at(t, p, r), acc[p][r]);
}

BLOCK_INLINE void tile_layout(const struct int_tile *t, size_t n_panels, const int layout)
{
    if (n_panels == 2) {
        if (t->n_rows > 4) tile_rows(t, layout, 6, 2);
        else if (t->n_rows > 2) tile_rows(t, layout, 4, 2);
        else tile_rows(t, layout, 2, 2);
    } else {
        if (t->n_rows > 4) tile_rows(t, layout, 6, 1);
        else if (t->n_rows > 2) tile_rows(t, layout, 4, 1);
        else tile_rows(t, layout, 2, 1);
    }
}

/* Divides the rows into tiles of nearly equal height, such as 14 into 5 + 5 + 4. During the first
 * of them the weights that follow are prefetched, a few lines at a time, because a few dozen rows
 * are computed faster than memory delivers the next weights. */
void vnni_tile_int(float *acc, const struct act_block *x, size_t x_stride, size_t n_rows,
                   const struct unpacked_panel *w, size_t n_panels, int layout, size_t n_k)
{
    struct int_tile t = {
        .acc = acc,
        .acc_stride = n_rows * PANEL,
        .n_blocks = n_k / BLOCK_K,
        .w = w,
        .zero = LAYOUTS[layout].zero,
    };
    size_t i_next = 0, at_next = 0; /* panel and byte */
    for (size_t n_tiles = (n_rows + INT_TILE_ROWS - 1) / INT_TILE_ROWS; n_tiles > 0; n_tiles--) {
        if (i_next < n_panels && at_next >= w[i_next].next_bytes) i_next++, at_next = 0;
        t.next = i_next < n_panels && w[i_next].next_bytes > 0 ? w[i_next].next + at_next : NULL;
        at_next += t.n_blocks * NEXT_LINES * 64;
        t.n_rows = (n_rows + n_tiles - 1) / n_tiles;
        for (size_t r = 0; r < INT_TILE_ROWS; r++)
            t.x[r] = x + (r < t.n_rows ? r : t.n_rows - 1) * x_stride;
        switch (block_kernel_layout(layout)) {
        case LAYOUT_W8: tile_layout(&t, n_panels, LAYOUT_W8); break;
        case LAYOUT_Q8K16: tile_layout(&t, n_panels, LAYOUT_Q8K16); break;
        case LAYOUT_Q8K32: tile_layout(&t, n_panels, LAYOUT_Q8K32); break;
        case LAYOUT_Q4K16: tile_layout(&t, n_panels, LAYOUT_Q4K16); break;
        case LAYOUT_Q4M: tile_layout(&t, n_panels, LAYOUT_Q4M); break;
        default: tile_layout(&t, n_panels, LAYOUT_Q8); break;
        }
        t.acc += t.n_rows * PANEL;
        x += t.n_rows * x_stride;
        n_rows -= t.n_rows;
    }
}
