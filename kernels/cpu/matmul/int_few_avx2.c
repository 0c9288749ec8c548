/* int_few_avx2.c - integer GEMM of 2 to SKINNY_ROWS_MAX rows on 8 lanes.
 *
 * One row waits for memory; several do too, as long as a further row takes few instructions. So the
 * two terms of an input are joined to the 15 bits that they came from, and vpmaddwd multiplies them
 * by weights of 16 bits: one sum instead of two, which needs nothing behind it, and bytes need no
 * signs. A sum of 32 products is below 32 * 255 * 2^14 < 2^31, and exact. Both halves of a panel
 * are multiplied together, so that an input is copied to all lanes once for both, and memory is one
 * stream. Thread: engine, compute pool. */
#include "kernels/cpu/matmul/int_accumulate_avx2.h"
#include "kernels/cpu/microkernels_avx2.h"

enum {
    ROWS = 5, /* at once: two sums of each, and the factors, fill the registers */
    PARTS = (SKINNY_ROWS_MAX + ROWS - 1) / ROWS,
    JOINED = 256 /* blocks of inputs that are joined at a time: 20 KiB of the L1 cache */
};

/* A block of inputs as a layout takes it: joined numbers, of which a word has the pairs 0, 2 and
 * 1, 3; and, for groups of 16 of each half, their sum times the scale and times minus the zero
 * point. */
struct joined_block {
    int32_t pairs[2][WORDS];
    float s, ssum[2];
    int32_t zero[2];
};

/* The numbers whose terms are the upper bytes of each 16 bits. */
BLOCK_INLINE __m256i join_terms(__m256i high, __m256i low)
{
    return _mm256_add_epi16(_mm256_srai_epi16(high, 8 - ACT_LOW_BITS), _mm256_srai_epi16(low, 8));
}

BLOCK_INLINE void join_block(struct joined_block *to, const struct act_block *x, const int layout)
{
    const struct block_kind kind = block_kind(layout);
    const __m256i high = _mm256_loadu_si256((const __m256i *)x->q[0]),
                  low = _mm256_loadu_si256((const __m256i *)x->q[1]),
                  upper = _mm256_set1_epi16((short)0xff00);
    _mm256_storeu_si256((__m256i *)to->pairs[0],
                        join_terms(_mm256_slli_epi16(high, 8), _mm256_slli_epi16(low, 8)));
    _mm256_storeu_si256((__m256i *)to->pairs[1], join_terms(_mm256_and_si256(high, upper), low));
    to->s = x->s;
    for (int part = 0; part < (kind.halves ? 2 : 1); part++) {
        const int which = kind.halves ? part : 2;
        to->ssum[part] = kind.halves ? (float)x_sum(x, part) * x->s : x->ssum;
        to->zero[part] = x_sum(x, which) * -LAYOUTS[layout].zero;
    }
}

/* Weights of a word with 16 bits each: numbers 0 and 2 of each lane, and 1 and 3. */
struct word_pairs {
    __m256i even, odd;
};

BLOCK_INLINE struct word_pairs pairs_of_word(const int layout, const char *panel, size_t b,
                                             const int i, const int h)
{
    const uint32_t(*word)[PANEL] = block_words(layout, panel, b);
    const bool bytes = block_kind(layout).bytes;
    const __m256i mask = _mm256_set1_epi16(bytes ? 255 : 15),
                  v = _mm256_loadu_si256((const __m256i *)(word[bytes ? i : i / 2] + HALF * h));
    if (bytes) return (struct word_pairs){ _mm256_and_si256(v, mask), _mm256_srli_epi16(v, 8) };
    if (i % 2 == 0)
        return (struct word_pairs){ _mm256_and_si256(v, mask),
                                    _mm256_and_si256(_mm256_srli_epi16(v, 8), mask) };
    return (struct word_pairs){ _mm256_and_si256(_mm256_srli_epi16(v, 4), mask),
                                _mm256_srli_epi16(v, 12) };
}

BLOCK_INLINE __m256i add_pairs(__m256i sum, __m256i w, __m256i x)
{
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
    /* The additions stay in order: a tree's leaves do not fit into the registers. */
    __asm__("" : "+x"(sum));
    return sum;
}

/* Adds word i (a constant) of block b to the sums of n rows, in both halves. */
BLOCK_INLINE void add_word(__m256i sum[ROWS][2], const struct joined_block *x, const char *panel,
                           size_t b, const int i, const int layout, const int n)
{
    const struct word_pairs low = pairs_of_word(layout, panel, b, i, 0),
                            high = pairs_of_word(layout, panel, b, i, 1);
#pragma GCC unroll 5
    for (int r = 0; r < n; r++) {
        const __m256i even = _mm256_set1_epi32(x[r].pairs[0][i]);
        sum[r][0] = add_pairs(sum[r][0], low.even, even);
        sum[r][1] = add_pairs(sum[r][1], high.even, even);
    }
#pragma GCC unroll 5
    for (int r = 0; r < n; r++) {
        const __m256i odd = _mm256_set1_epi32(x[r].pairs[1][i]);
        sum[r][0] = add_pairs(sum[r][0], low.odd, odd);
        sum[r][1] = add_pairs(sum[r][1], high.odd, odd);
    }
}

/* What accumulate does, of a joined block. */
BLOCK_INLINE __m256 accumulate_joined(__m256 acc, __m256i sum, const struct joined_block *x,
                                      const int part, const struct block_kind kind,
                                      struct scales256 w)
{
    if (kind.zero) sum = _mm256_add_epi32(sum, _mm256_set1_epi32(x->zero[part]));
    __m256 s = _mm256_set1_ps(x->s), i = _mm256_cvtepi32_ps(sum);
    if (!kind.scaled) return _mm256_fmadd_ps(i, s, acc);
    acc = _mm256_fmadd_ps(_mm256_mul_ps(i, s), w.d, acc);
    return kind.has_m ? _mm256_fmadd_ps(_mm256_set1_ps(x->ssum[part]), w.m, acc) : acc;
}

/* Adds block b to n rows (a constant) of out. */
BLOCK_INLINE void add_block(float *out, size_t out_stride, const struct joined_block *x,
                            const char *panel, size_t b, const int layout, const int n)
{
    const struct block_kind kind = block_kind(layout);
    const int n_parts = kind.halves ? 2 : 1, n_words = WORDS / n_parts;
#pragma GCC unroll 2
    for (int part = 0; part < n_parts; part++) {
        __m256i sum[ROWS][2];
#pragma GCC unroll 5
        for (int r = 0; r < n; r++) sum[r][0] = sum[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
        for (int i = part * n_words; i < (part + 1) * n_words; i++)
            add_word(sum, x, panel, b, i, layout, n);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            const struct scales256 scales = block_scales256(layout, panel, b, (size_t)part, h);
#pragma GCC unroll 5
            for (int r = 0; r < n; r++) {
                float *at = out + (size_t)r * out_stride + HALF * h;
                _mm256_storeu_ps(at, accumulate_joined(_mm256_loadu_ps(at), sum[r][h], x + r, part,
                                                       kind, scales));
            }
        }
    }
}

/* Inputs of `n` rows: those of a block side by side. */
struct few_rows {
    const struct joined_block *x; /* [n_blocks][n] */
    size_t n, b, n_blocks;        /* blocks [b, b + n_blocks) */
    float *out;                   /* rows out_stride floats apart */
    size_t out_stride;
};

/* Adds the rows' blocks of a panel; n is a constant. */
BLOCK_INLINE void add_panel(const struct few_rows *rows, float *out, const char *panel,
                            const int layout, const int n)
{
    for (size_t i = 0; i < rows->n_blocks; i++) {
        const char *next = panel + (rows->b + i) * block_bytes(layout) + PREFETCH_BYTES;
#pragma GCC unroll 16
        for (size_t line = 0; line < block_bytes(layout); line += CACHE_LINE)
            _mm_prefetch(next + line, _MM_HINT_T0);
        add_block(out, rows->out_stride, rows->x + i * (size_t)n, panel, rows->b + i, layout, n);
    }
}

/* The switch is out here, so that the compiler does not move the weights of a block before it. */
BLOCK_INLINE void add_rows(const struct few_rows *rows, size_t p, const char *panel,
                           const int layout)
{
    float *out = rows->out + p * PANEL;
    switch (rows->n) {
    case 2: add_panel(rows, out, panel, layout, 2); break;
    case 3: add_panel(rows, out, panel, layout, 3); break;
    case 4: add_panel(rows, out, panel, layout, 4); break;
    default: add_panel(rows, out, panel, layout, ROWS); break;
    }
}

/* Joins blocks [b, b + n_blocks) of rows, divided into parts of nearly as many; returns how many
 * parts there are. */
BLOCK_INLINE size_t join_rows(struct few_rows parts[PARTS], struct joined_block *joined, float *out,
                              size_t out_stride, const struct act_block *x, size_t x_stride,
                              size_t n_rows, size_t b, size_t n_blocks, const int layout)
{
    const size_t n_parts = (n_rows + ROWS - 1) / ROWS;
    for (size_t part = 0, row = 0; part < n_parts; part++) {
        const size_t n = (n_rows - row) / (n_parts - part);
        parts[part] =
            (struct few_rows){ joined, n, b, n_blocks, out + row * out_stride, out_stride };
        for (size_t i = 0; i < n_blocks; i++)
            for (size_t r = 0; r < n; r++)
                join_block(joined++, x + (row + r) * x_stride + b + i, layout);
        row += n;
    }
    return n_parts;
}

BLOCK_INLINE void gemv_layout(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                              const struct weight *w, size_t i_panel, size_t n_panels,
                              const int layout)
{
    const size_t stride = n_panels * PANEL, n_blocks = act_blocks(w->n_in), most = JOINED / n_rows,
                 panel_bytes = weight_layout_panel_bytes(layout, w->n_in);
    struct joined_block joined[JOINED];
    struct few_rows parts[PARTS];
    for (size_t i = 0; i < n_rows * stride; i++) out[i] = 0;
    for (size_t b = 0; b < n_blocks; b += most) {
        const size_t n_parts = join_rows(parts, joined, out, stride, x, x_stride, n_rows, b,
                                         n_blocks - b < most ? n_blocks - b : most, layout);
        for (size_t p = 0; p < n_panels; p++)
            for (size_t part = 0; part < n_parts; part++)
                add_rows(&parts[part], p, panel_at(w, i_panel + p, panel_bytes), layout);
    }
    for (size_t p = 0; p < n_panels && !block_kind(layout).scaled; p++) {
        const float *scale = weight_layout_channel_scale(w, i_panel + p);
        for (size_t i = 0; i < n_rows * PANEL; i++)
            out[i / PANEL * stride + p * PANEL + i % PANEL] *= scale[i % PANEL];
    }
}

void avx2_gemv_int_few(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                       const struct weight *w, size_t i_panel, size_t n_panels)
{
    switch (w->layout) {
        INTEGER_LAYOUTS(LAYOUT_CASE,
                        gemv_layout(out, x, x_stride, n_rows, w, i_panel, n_panels, LAYOUT))
    }
}
