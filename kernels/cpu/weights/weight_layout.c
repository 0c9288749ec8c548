/* weight_layout.c - the content of packed matrices: sizes, and reading elements back.
 * weight_layout_pack.c writes them. Thread: any (packed matrices are only read). */
#include "kernels/cpu/weights/weight_layout.h"

#include <string.h>

#include "kernels/cpu/weights/weight_layout_offsets.h"
#include "kernels/float_bits.h"
#include "kernels/host/pages.h"
#include "shared/base/assert.h"

enum { LINE = 64 };

static const uint8_t LAYOUT_OF[DTYPE_COUNT] = {
    [DTYPE_F32] = LAYOUT_F32,      [DTYPE_F16] = LAYOUT_F16,    [DTYPE_BF16] = LAYOUT_BF16,
    [DTYPE_F8_E4M3] = LAYOUT_F8,   [DTYPE_Q8_0] = LAYOUT_Q8,    [DTYPE_Q4_0] = LAYOUT_Q4,
    [DTYPE_Q4_1] = LAYOUT_Q4M,     [DTYPE_Q5_0] = LAYOUT_Q8,    [DTYPE_Q5_1] = LAYOUT_Q8M,
    [DTYPE_IQ4_NL] = LAYOUT_Q8,    [DTYPE_Q2_K] = LAYOUT_Q4K16, [DTYPE_Q3_K] = LAYOUT_Q4K16,
    [DTYPE_Q4_K] = LAYOUT_Q4K32,   [DTYPE_Q5_K] = LAYOUT_Q8K32, [DTYPE_Q6_K] = LAYOUT_Q8K16,
    [DTYPE_IQ4_XS] = LAYOUT_Q8K32,
};
static const uint8_t LAYOUT_QUANTIZED[] = {
    [QUANTIZE_WINT8] = LAYOUT_W8, [QUANTIZE_WINT4] = LAYOUT_W4, [QUANTIZE_BLOCK_FP8] = LAYOUT_F8
};

const struct weight_layout_info *weight_layout_info(int layout)
{
    ASSERT(layout >= 0 && layout < LAYOUT_COUNT);
    return &LAYOUTS[layout];
}

int weight_layout_of(enum dtype t, enum quantize q)
{
    ASSERT((unsigned)t < DTYPE_COUNT);
    bool quantizable = t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16;
    return quantizable && q != QUANTIZE_NONE ? LAYOUT_QUANTIZED[q] : LAYOUT_OF[t];
}

size_t weight_layout_panel_bytes(int layout, size_t n_in)
{
    size_t tail = 0;
    if (layout == LAYOUT_W8 || layout == LAYOUT_W4) tail = PANEL * sizeof(float);
    if (layout == LAYOUT_F8) tail = (n_in + F8_BLOCK - 1) / F8_BLOCK * sizeof(float);
    /* panels of words begin on cache lines */
    return weight_layout_tail_at(layout, n_in) + (tail + LINE - 1) / LINE * LINE;
}

void weight_layout_release(struct kernel_ctx *c, struct weight *w)
{
    (void)c;
    pages_unmap(w->data, w->bytes);
}

/* ---- reading ---- */

/* One lane of one panel. */
struct panel_lane {
    const struct weight_layout_info *info;
    const struct weight_layout_offsets *at;
    const char *panel;
    const char *tail;
    size_t i;
};

static struct panel_lane panel_lane_of(const struct weight *w, size_t i_panel, size_t i)
{
    const char *panel = panel_at(w, i_panel, weight_layout_panel_bytes(w->layout, w->n_in));
    return (struct panel_lane){ weight_layout_info(w->layout), &LAYOUT_OFFSETS[w->layout], panel,
                                panel + weight_layout_tail_at(w->layout, w->n_in), i };
}

static uint16_t half_at(const char *array, size_t i)
{
    uint16_t h;
    memcpy(&h, array + i * sizeof h, sizeof h);
    return h;
}

static uint32_t word_at(const char *array, size_t i)
{
    uint32_t w;
    memcpy(&w, array + i * sizeof w, sizeof w);
    return w;
}

/* Words of the 32 k around k. */
static const char *words_of(const struct panel_lane *l, size_t k)
{
    size_t bytes = BLOCK_K * PANEL * (size_t)l->info->bits / 8;
    return l->panel + k / l->at->k * l->at->bytes + l->at->q + k % l->at->k / BLOCK_K * bytes;
}

static inline int stored_q(const struct panel_lane *l, const char *words, size_t i)
{
    if (l->info->bits == 8) return (int)(word_at(words, i / 4 * PANEL + l->i) >> i % 4 * 8 & 255);
    return (int)(word_at(words, i / 8 * PANEL + l->i) >> (i % 4 * 8 + i / 4 % 2 * 4) & 15);
}

/* d and m of the group of k. -(0 * 0) is -0, which changes no sum, so types that share a layout and
 * have no offset stay exact. */
static void scales_of(const struct panel_lane *l, size_t k, float *d, float *m)
{
    const char *block = l->panel + k / l->at->k * l->at->bytes;
    *m = 0;
    if (l->info->group == 0) {
        *d = float_of_bits(word_at(l->tail, l->i));
        return;
    }
    *d = float_from_f16(half_at(block + l->at->d, l->i));
    if (l->info->has_m) *m = float_from_f16(half_at(block + l->at->m, l->i));
    if (!l->at->scale) return;
    size_t at = k % l->at->k / (size_t)l->info->group * PANEL + l->i;
    *d *= (float)(int8_t)block[l->at->scale + at];
    *m = -(*m * (float)(int8_t)block[l->at->min + at]);
}

/* d * (q - zero) is exact for every layout (dtype_blocks.h), so the sum has the one rounding of a
 * fused multiply-add. */
static inline float dequantized(const struct weight_layout_info *f, int q, float d, float m)
{
    float w = d * (float)(q - f->zero);
    return f->has_m ? w + m : w;
}

static inline float scalar_element(const struct panel_lane *l, int layout, size_t k)
{
    switch (layout) {
    case LAYOUT_F32: return float_of_bits(word_at(l->panel, k * PANEL + l->i));
    case LAYOUT_F16:
        return float_from_f16((uint16_t)(word_at(l->panel, k / 2 * PANEL + l->i) >> k % 2 * 16));
    case LAYOUT_BF16:
        return float_from_bf16((uint16_t)(word_at(l->panel, k / 2 * PANEL + l->i) >> k % 2 * 16));
    default:
        return float_from_f8((uint8_t)(word_at(l->panel, k / 4 * PANEL + l->i) >> k % 4 * 8)) *
               float_of_bits(word_at(l->tail, k / F8_BLOCK));
    }
}

/* Dequantises n_k elements of a lane from k on to dst, `stride` apart. */
static void lane_elements(const struct weight *w, size_t i_panel, size_t lane, size_t k, size_t n_k,
                          float *dst, size_t stride)
{
    struct panel_lane l = panel_lane_of(w, i_panel, lane);
    size_t group = l.info->group ? (size_t)l.info->group : BLOCK_K, end = k + n_k;
    while (k < end) {
        if (!l.info->integer) {
            *dst = scalar_element(&l, w->layout, k++);
            dst += stride;
            continue;
        }
        float d, m;
        const char *words = words_of(&l, k);
        scales_of(&l, k, &d, &m);
        do {
            *dst = dequantized(l.info, stored_q(&l, words, k % BLOCK_K), d, m);
            dst += stride;
        } while (++k < end && k % group != 0);
    }
}

float weight_layout_element(const struct weight *w, size_t i_panel, size_t k, size_t lane)
{
    float element;
    lane_elements(w, i_panel, lane, k, 1, &element, 1);
    return element;
}

void weight_layout_dequantize(float *dst, const struct weight *w, size_t i_panel, size_t k_begin,
                              size_t n_k)
{
    for (size_t j = 0; j < PANEL; j++) lane_elements(w, i_panel, j, k_begin, n_k, dst + j, PANEL);
}

void weight_layout_dequantize_row(const struct weight *w, size_t row, float *dst)
{
    ASSERT(row < w->n_out);
    size_t half = w->n_out / 2, i_panel = row / PANEL;
    if (w->paired) {
        i_panel = row < half ? 2 * (row / PANEL) : 2 * ((row - half) / PANEL) + 1;
        row -= row < half ? 0 : half;
    }
    lane_elements(w, i_panel, row % PANEL, 0, w->n_in, dst, 1);
}

void weight_layout_unpack_int(struct unpacked_panel *dst, const struct weight *w, size_t i_panel,
                              size_t k_begin, size_t n_k)
{
    ASSERT(k_begin % UNPACK_K == 0 && n_k % BLOCK_K == 0 && n_k <= UNPACK_K);
    size_t group = (size_t)weight_layout_info(w->layout)->group;
    dst->next_bytes = 0;
    for (size_t i = 0; i < PANEL; i++) {
        struct panel_lane l = panel_lane_of(w, i_panel, i);
        for (size_t k = 0; k < n_k; k++)
            dst->q[k / 4][i][k % 4] = k_begin + k < w->n_in
                                          ? (uint8_t)stored_q(&l, words_of(&l, k_begin + k),
                                                              k % BLOCK_K)
                                          : 0;
        for (size_t g = 0; group && g < n_k / group; g++) {
            dst->d[g][i] = dst->m[g][i] = 0;
            if (k_begin + g * group < w->n_in)
                scales_of(&l, k_begin + g * group, &dst->d[g][i], &dst->m[g][i]);
        }
    }
}

const float *weight_layout_channel_scale(const struct weight *w, size_t i_panel)
{
    if (w->layout != LAYOUT_W8 && w->layout != LAYOUT_W4) return NULL;
    return (const float *)((const char *)panel_at(w, i_panel,
                                                  weight_layout_panel_bytes(w->layout, w->n_in)) +
                           weight_layout_tail_at(w->layout, w->n_in));
}
