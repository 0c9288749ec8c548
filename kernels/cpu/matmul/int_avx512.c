/* int_avx512.c - integer GEMM on 16 lanes without vpdpbusd, by vpmaddubsw, which multiplies
 * unsigned by signed bytes and adds neighbours in 16 bits, saturating. docs/kernels.md says how
 * nibbles and bytes keep every sum exact. Otherwise as int_vnni.c. Thread: engine, compute pool. */
#include "kernels/cpu/matmul/int_accumulate_avx512.h"
#include "kernels/cpu/microkernels_avx512.h"

enum { ROWS = 4 };

/* A word as vpmaddubsw takes it: magnitudes, and for byte layouts a mask of the negative ones. */
struct int_factor512 {
    __m512i q;
    __mmask64 negative;
};

BLOCK_INLINE struct int_factor512 factor_of(__m512i word, const bool bytes)
{
    if (!bytes) return (struct int_factor512){ .q = word };
    __m512i w = _mm512_xor_si512(word, _mm512_set1_epi8(-128));
    return (struct int_factor512){ .q = _mm512_abs_epi8(w), .negative = _mm512_movepi8_mask(w) };
}

/* Sums have 16 bits for nibble layouts, until add_pairs_i32, and 32 bits for byte layouts. */
BLOCK_INLINE __m512i add_products(__m512i sum, struct int_factor512 w, __m512i x, const bool bytes)
{
    if (!bytes) {
        sum = _mm512_add_epi16(sum, _mm512_maddubs_epi16(w.q, x));
    } else {
        x = _mm512_mask_sub_epi8(x, w.negative, _mm512_setzero_si512(), x);
        sum = _mm512_add_epi32(
            sum, _mm512_madd_epi16(_mm512_maddubs_epi16(w.q, x), _mm512_set1_epi16(1)));
    }
    /* This keeps the additions in order. The compiler would add in a tree, whose leaves do not fit
     * into the registers. */
    __asm__("" : "+v"(sum));
    return sum;
}

/* Returns one term's sum with 32 bits for each output. */
BLOCK_INLINE __m512i add_pairs_i32(__m512i sum, const bool bytes)
{
    return bytes ? sum : _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
}

/* Returns the group's integer sum of both terms. It subtracts what remains of the zero point: all
 * of it for nibble layouts, 128 for byte layouts. */
BLOCK_INLINE __m512i combine_terms(__m512i high, __m512i low, const struct act_block *x,
                                   const int part, const int layout)
{
    const bool bytes = block_kind(layout).bytes;
    const int missing = bytes ? 128 - LAYOUTS[layout].zero : -LAYOUTS[layout].zero;
    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(add_pairs_i32(high, bytes), ACT_LOW_BITS),
                                   add_pairs_i32(low, bytes));
    return missing ? _mm512_add_epi32(sum, x_sum_times(x, part, missing)) : sum;
}

/* ---- few rows ---- */

BLOCK_INLINE void block_rows(__m512 *acc, const struct act_block *const *x, const char *panel,
                             size_t b, const int layout, const int n)
{
    const struct block_kind kind = block_kind(layout);
    const int n_parts = kind.halves ? 2 : 1, n_words = WORDS / n_parts;
#pragma GCC unroll 2
    for (int part = 0; part < n_parts; part++) {
        const int which = kind.halves ? part : 2;
        __m512i high[ROWS], low[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) high[r] = low[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int i = part * n_words; i < (part + 1) * n_words; i++) {
            struct int_factor512 q = factor_of(block_word512(layout, panel, b, i), kind.bytes);
#pragma GCC unroll 4
            for (int r = 0; r < n; r++) {
                high[r] = add_products(high[r], q, broadcast_x(x[r] + b, 0, i), kind.bytes);
                low[r] = add_products(low[r], q, broadcast_x(x[r] + b, 1, i), kind.bytes);
            }
        }
        struct scales512 scales = block_scales512(layout, panel, b, (size_t)part);
#pragma GCC unroll 4
        for (int r = 0; r < n; r++)
            acc[r] = accumulate(acc[r], combine_terms(high[r], low[r], x[r] + b, which, layout),
                                x[r] + b, which, kind, scales);
    }
}

/* Computes n rows (a constant) of one panel. Only the first n_rows of x [n] differ; the others
 * repeat the last row, and their results are dropped. */
BLOCK_INLINE void gemv_rows(float *out, size_t out_stride, const struct act_block *const *x,
                            size_t n_rows, const struct weight *w, size_t i_panel, const int layout,
                            const int n)
{
    __m512 acc[ROWS];
    const char *panel = panel_at(w, i_panel, weight_layout_panel_bytes(layout, w->n_in));
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) acc[r] = _mm512_setzero_ps();
    for (size_t b = 0; b < act_blocks(w->n_in); b++) {
        const char *next = panel + b * block_bytes(layout) + PREFETCH_BYTES;
#pragma GCC unroll 16
        for (size_t line = 0; line < block_bytes(layout); line += 64)
            _mm_prefetch(next + line, _MM_HINT_T0);
        block_rows(acc, x, panel, b, layout, n);
    }
    const float *scale = weight_layout_channel_scale(w, i_panel);
    for (int r = 0; r < n && (size_t)r < n_rows; r++) {
        if (!block_kind(layout).scaled) acc[r] = _mm512_mul_ps(acc[r], _mm512_loadu_ps(scale));
        _mm512_storeu_ps(out + (size_t)r * out_stride, acc[r]);
    }
}

BLOCK_INLINE void gemv_layout(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                              const struct weight *w, size_t i_panel, size_t n_panels,
                              const int layout)
{
    for (size_t r0 = 0; r0 < n_rows; r0 += ROWS) {
        const struct act_block *rows[ROWS];
        size_t n = n_rows - r0 < ROWS ? n_rows - r0 : ROWS;
        for (size_t r = 0; r < ROWS; r++) rows[r] = x + (r0 + (r < n ? r : n - 1)) * x_stride;
        for (size_t p = 0; p < n_panels; p++) {
            float *at = out + (r0 * n_panels + p) * PANEL;
            if (n > 1) gemv_rows(at, n_panels * PANEL, rows, n, w, i_panel + p, layout, ROWS);
            else gemv_rows(at, n_panels * PANEL, rows, n, w, i_panel + p, layout, 1);
        }
    }
}

void avx512_gemv_int(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                     const struct weight *w, size_t i_panel, size_t n_panels)
{
    switch (w->layout) {
        INTEGER_LAYOUTS(LAYOUT_CASE,
                        gemv_layout(out, x, x_stride, n_rows, w, i_panel, n_panels, LAYOUT))
    }
}

/* ---- many rows: six rows of one panel at a time, as a word's magnitudes and signs serve all of
 * them ---- */

BLOCK_INLINE void tile_rows(const struct int_tile *t, int p, const int layout)
{
    const struct block_kind kind = block_kind(layout);
    const int n_parts = kind.halves ? 2 : 1, n_words = WORDS / n_parts;
    const struct unpacked_panel *w = t->w + p;
    __m512 acc[INT_TILE_ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < INT_TILE_ROWS; r++) acc[r] = _mm512_loadu_ps(acc_at(t, p, r));
    for (size_t b = 0; b < t->n_blocks; b++) {
#pragma GCC unroll 2
        for (int part = 0; part < n_parts; part++) {
            const size_t group = kind.halves ? 2 * b + (size_t)part : b;
            const int which = kind.halves ? part : 2;
            struct scales512 scales = { _mm512_setzero_ps(), _mm512_setzero_ps() };
            __m512i high[INT_TILE_ROWS], low[INT_TILE_ROWS];
#pragma GCC unroll 6
            for (int r = 0; r < INT_TILE_ROWS; r++) high[r] = low[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int i = part * n_words; i < (part + 1) * n_words; i++) {
                struct int_factor512 q = factor_of(_mm512_load_si512(w->q[b * WORDS + (size_t)i]),
                                                   kind.bytes);
#pragma GCC unroll 6
                for (int r = 0; r < INT_TILE_ROWS; r++) {
                    high[r] = add_products(high[r], q, broadcast_x(t->x[r] + b, 0, i), kind.bytes);
                    low[r] = add_products(low[r], q, broadcast_x(t->x[r] + b, 1, i), kind.bytes);
                }
            }
            if (kind.scaled) scales.d = _mm512_load_ps(w->d[group]);
            if (kind.has_m) scales.m = _mm512_load_ps(w->m[group]);
#pragma GCC unroll 6
            for (int r = 0; r < INT_TILE_ROWS; r++)
                acc[r] = accumulate(acc[r],
                                    combine_terms(high[r], low[r], t->x[r] + b, which, layout),
                                    t->x[r] + b, which, kind, scales);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < INT_TILE_ROWS; r++) _mm512_storeu_ps(acc_at(t, p, r), acc[r]);
}

void avx512_tile_int(float *acc, const struct act_block *x, size_t x_stride, size_t n_rows,
                     const struct unpacked_panel *w, size_t n_panels, int layout, size_t n_k)
{
    struct int_tile t = {
        .acc = acc,
        .acc_stride = n_rows * PANEL,
        .n_blocks = n_k / BLOCK_K,
        .w = w,
        .zero = LAYOUTS[layout].zero,
    };
    for (; n_rows > 0; n_rows -= t.n_rows, x += t.n_rows * x_stride, t.acc += t.n_rows * PANEL) {
        t.n_rows = n_rows < INT_TILE_ROWS ? n_rows : INT_TILE_ROWS;
        for (size_t r = 0; r < INT_TILE_ROWS; r++)
            t.x[r] = x + (r < t.n_rows ? r : t.n_rows - 1) * x_stride;
        for (int p = 0; p < (int)n_panels; p++) {
            switch (layout) {
                INTEGER_LAYOUTS(LAYOUT_CASE, tile_rows(&t, p, LAYOUT))
            }
        }
    }
}
