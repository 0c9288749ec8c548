/* int_avx2.c - integer GEMM on 8 lanes by vpmaddubsw, which multiplies unsigned by signed bytes and
 * adds neighbours in 16 bits, saturating. docs/kernels.md says how nibbles and bytes keep every sum
 * exact. gemv_int takes one row by both halves of a panel, so that memory is one stream, and leaves
 * more rows to int_few_avx2.c; tile_int takes four rows by one half at a time.
 * Thread: engine, compute pool. */
#include "kernels/cpu/matmul/int_accumulate_avx2.h"
#include "kernels/cpu/microkernels_avx2.h"

enum { ROWS = 4 };

/* A word as vpmaddubsw takes it: magnitudes, and for byte layouts the signs that are applied to the
 * inputs. */
struct int_factor256 {
    __m256i q, sign;
};

BLOCK_INLINE struct int_factor256 factor_of(__m256i word, const bool bytes)
{
    if (!bytes) return (struct int_factor256){ .q = word };
    __m256i w = _mm256_xor_si256(word, _mm256_set1_epi8(-128));
    return (struct int_factor256){ .q = _mm256_abs_epi8(w), .sign = w };
}

/* Sums have 16 bits for nibble layouts, until add_pairs_i32, and 32 bits for byte layouts. */
BLOCK_INLINE __m256i add_products(__m256i sum, struct int_factor256 w, __m256i x, const bool bytes)
{
    if (!bytes) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w.q, x));
    } else {
        __m256i pairs = _mm256_maddubs_epi16(w.q, _mm256_sign_epi8(x, w.sign));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    /* This keeps the additions in order. The compiler would add in a tree, whose leaves do not fit
     * into the registers. */
    __asm__("" : "+x"(sum));
    return sum;
}

/* Returns one term's sum with 32 bits for each output. */
BLOCK_INLINE __m256i add_pairs_i32(__m256i sum, const bool bytes)
{
    return bytes ? sum : _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
}

/* Returns the group's integer sum of both terms. It subtracts what remains of the zero point: all
 * of it for nibble layouts, 128 for byte layouts. */
BLOCK_INLINE __m256i combine_terms(__m256i high, __m256i low, const struct act_block *x,
                                   const int part, const int layout)
{
    const bool bytes = block_kind(layout).bytes;
    const int missing = bytes ? 128 - LAYOUTS[layout].zero : -LAYOUTS[layout].zero;
    __m256i sum = _mm256_add_epi32(_mm256_slli_epi32(add_pairs_i32(high, bytes), ACT_LOW_BITS),
                                   add_pairs_i32(low, bytes));
    return missing ? _mm256_add_epi32(sum, x_sum_times(x, part, missing)) : sum;
}

/* ---- one row ---- */

/* Adds block b of half h of a panel. */
BLOCK_INLINE __m256 add_block(__m256 acc, const struct act_block *x, const char *panel, size_t b,
                              const int h, const int layout)
{
    const struct block_kind kind = block_kind(layout);
    const int n_parts = kind.halves ? 2 : 1, n_words = WORDS / n_parts;
#pragma GCC unroll 2
    for (int part = 0; part < n_parts; part++) {
        const int which = kind.halves ? part : 2;
        __m256i high = _mm256_setzero_si256(), low = high;
#pragma GCC unroll 8
        for (int i = part * n_words; i < (part + 1) * n_words; i++) {
            struct int_factor256 q = factor_of(block_word256(layout, panel, b, i, h), kind.bytes);
            high = add_products(high, q, broadcast_x(x, 0, i), kind.bytes);
            low = add_products(low, q, broadcast_x(x, 1, i), kind.bytes);
        }
        acc = accumulate(acc, combine_terms(high, low, x, which, layout), x, which, kind,
                         block_scales256(layout, panel, b, (size_t)part, h));
    }
    return acc;
}

/* Computes both halves of a panel. */
BLOCK_INLINE void gemv_panel(float *out, const struct act_block *x, const char *panel,
                             size_t n_blocks, const int layout)
{
    __m256 low = _mm256_setzero_ps(), high = low;
    for (size_t b = 0; b < n_blocks; b++) {
        const char *next = panel + b * block_bytes(layout) + PREFETCH_BYTES;
#pragma GCC unroll 16
        for (size_t line = 0; line < block_bytes(layout); line += CACHE_LINE)
            _mm_prefetch(next + line, _MM_HINT_T0);
        low = add_block(low, x + b, panel, b, 0, layout);
        high = add_block(high, x + b, panel, b, 1, layout);
    }
    _mm256_storeu_ps(out, low);
    _mm256_storeu_ps(out + HALF, high);
}

BLOCK_INLINE void gemv_layout(float *out, const struct act_block *x, const struct weight *w,
                              size_t i_panel, size_t n_panels, const int layout)
{
    for (size_t p = 0; p < n_panels; p++) {
        float *at = out + p * PANEL;
        gemv_panel(at, x, panel_at(w, i_panel + p, weight_layout_panel_bytes(layout, w->n_in)),
                   act_blocks(w->n_in), layout);
        const float *scale = weight_layout_channel_scale(w, i_panel + p);
        for (size_t i = 0; i < PANEL && !block_kind(layout).scaled; i++) at[i] *= scale[i];
    }
}

void avx2_gemv_int(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                   const struct weight *w, size_t i_panel, size_t n_panels)
{
    if (n_rows > 1) {
        avx2_gemv_int_few(out, x, x_stride, n_rows, w, i_panel, n_panels);
        return;
    }
    switch (w->layout) {
        INTEGER_LAYOUTS(LAYOUT_CASE, gemv_layout(out, x, w, i_panel, n_panels, LAYOUT))
    }
}

/* ---- many rows ---- */

struct int_avx2_tile {
    float *acc;
    const struct act_block *x[ROWS];
    size_t n_rows, n_blocks; /* only the first n_rows of x differ; the others repeat the last */
};

BLOCK_INLINE float *acc_at(const struct int_avx2_tile *t, int r, int h)
{
    return t->acc + ((size_t)r < t->n_rows ? (size_t)r : t->n_rows - 1) * PANEL + HALF * h;
}

BLOCK_INLINE void tile_rows(const struct int_avx2_tile *t, const struct unpacked_panel *w, int h,
                            const int layout)
{
    const struct block_kind kind = block_kind(layout);
    const int n_parts = kind.halves ? 2 : 1, n_words = WORDS / n_parts;
    __m256 acc[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) acc[r] = _mm256_loadu_ps(acc_at(t, r, h));
    for (size_t b = 0; b < t->n_blocks; b++) {
#pragma GCC unroll 2
        for (int part = 0; part < n_parts; part++) {
            const size_t group = kind.halves ? 2 * b + (size_t)part : b;
            const int which = kind.halves ? part : 2;
            struct scales256 scales = { _mm256_setzero_ps(), _mm256_setzero_ps() };
            __m256i high[ROWS], low[ROWS];
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) high[r] = low[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (int i = part * n_words; i < (part + 1) * n_words; i++) {
                struct int_factor256 q = factor_of(
                    _mm256_load_si256((const __m256i *)w->q[b * WORDS + (size_t)i][HALF * h]),
                    kind.bytes);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) {
                    high[r] = add_products(high[r], q, broadcast_x(t->x[r] + b, 0, i), kind.bytes);
                    low[r] = add_products(low[r], q, broadcast_x(t->x[r] + b, 1, i), kind.bytes);
                }
            }
            if (kind.scaled) scales.d = _mm256_loadu_ps(w->d[group] + HALF * h);
            if (kind.has_m) scales.m = _mm256_loadu_ps(w->m[group] + HALF * h);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++)
                acc[r] = accumulate(acc[r],
                                    combine_terms(high[r], low[r], t->x[r] + b, which, layout),
                                    t->x[r] + b, which, kind, scales);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) _mm256_storeu_ps(acc_at(t, r, h), acc[r]);
}

static void tile_panel(const struct int_avx2_tile *t, const struct unpacked_panel *w, int layout)
{
    for (int h = 0; h < 2; h++) {
        switch (layout) {
            INTEGER_LAYOUTS(LAYOUT_CASE, tile_rows(t, w, h, LAYOUT))
        }
    }
}

void avx2_tile_int(float *acc, const struct act_block *x, size_t x_stride, size_t n_rows,
                   const struct unpacked_panel *w, size_t n_panels, int layout, size_t n_k)
{
    for (size_t p = 0; p < n_panels; p++) {
        for (size_t r0 = 0; r0 < n_rows; r0 += ROWS) {
            struct int_avx2_tile t = {
                .acc = acc + (p * n_rows + r0) * PANEL,
                .n_rows = n_rows - r0 < ROWS ? n_rows - r0 : ROWS,
                .n_blocks = n_k / BLOCK_K,
            };
            for (size_t r = 0; r < ROWS; r++)
                t.x[r] = x + (r0 + (r < t.n_rows ? r : t.n_rows - 1)) * x_stride;
            tile_panel(&t, w + p, layout);
        }
    }
}
