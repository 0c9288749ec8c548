/* weight_layout.c - what packed matrices hold: sizes, and reading them back. weight_layout_pack.c writes them.
 *
 * Life cycle of a weight: form_pack maps its memory, form_release unmaps it. Thread: any (packed matrices are only read). */
#include "kernels/cpu/weights/weight_layout.h"

#include <string.h>

#include "kernels/cpu/weights/weight_layout_offsets.h"
#include "kernels/cpu/pages.h"
#include "kernels/float_bits.h"
#include "shared/base/assert.h"

enum { LINE = 64 };

static const uint8_t FORM_OF[DTYPE_COUNT] = {
    [DTYPE_F32] = FORM_F32, [DTYPE_F16] = FORM_F16,   [DTYPE_BF16] = FORM_BF16, [DTYPE_F8_E4M3] = FORM_F8, [DTYPE_Q8_0] = FORM_I8,
    [DTYPE_Q4_0] = FORM_U4, [DTYPE_Q4_1] = FORM_U4M,  [DTYPE_Q5_0] = FORM_I8,   [DTYPE_Q5_1] = FORM_I8M,   [DTYPE_IQ4_NL] = FORM_I8,
    [DTYPE_Q2_K] = FORM_K4, [DTYPE_Q3_K] = FORM_K4,   [DTYPE_Q4_K] = FORM_S4,   [DTYPE_Q5_K] = FORM_S8,    [DTYPE_Q6_K] = FORM_K8,
    [DTYPE_IQ4_XS] = FORM_S8,
};
static const uint8_t FORM_QUANTIZED[] = { [QUANTIZE_WINT8] = FORM_C8, [QUANTIZE_WINT4] = FORM_C4, [QUANTIZE_BLOCK_FP8] = FORM_F8 };

const struct form_info *form_info(int form)
{
    ASSERT(form >= 0 && form < FORM_COUNT);
    return &FORMS[form];
}

int form_of(enum dtype t, enum quantize q)
{
    ASSERT((unsigned)t < DTYPE_COUNT);
    bool quantizable = t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16;
    return quantizable && q != QUANTIZE_NONE ? FORM_QUANTIZED[q] : FORM_OF[t];
}

size_t form_panel_bytes(int form, size_t n_in)
{
    size_t tail = 0;
    if (form == FORM_C8 || form == FORM_C4) tail = PANEL * sizeof(float);
    if (form == FORM_F8) tail = (n_in + F8_BLOCK - 1) / F8_BLOCK * sizeof(float);
    return form_tail_at(form, n_in) + (tail + LINE - 1) / LINE * LINE; /* so that panels of words begin on cache lines */
}

void form_release(struct kernel_ctx *c, struct weight *w)
{
    (void)c;
    pages_unmap(w->data, w->bytes);
}

/* ---- reading ---- */

/* One lane of one panel. */
struct lane {
    const struct form_info   *info;
    const struct form_layout *at;
    const char               *panel;
    const char               *tail;
    size_t                    i;
};

static struct lane lane_of(const struct weight *w, size_t i_panel, size_t i)
{
    const char *panel = panel_at(w, i_panel, form_panel_bytes(w->form, w->n_in));
    return (struct lane){ form_info(w->form), &FORM_LAYOUTS[w->form], panel, panel + form_tail_at(w->form, w->n_in), i };
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

/* Words of the 32 k's around k; with a lane they give its element i. */
static const char *words_of(const struct lane *l, size_t k)
{
    size_t bytes = FORM_BLOCK * PANEL * (size_t)l->info->bits / 8;
    return l->panel + k / l->at->k * l->at->bytes + l->at->q + k % l->at->k / FORM_BLOCK * bytes;
}

static inline int stored(const struct lane *l, const char *words, size_t i)
{
    if (l->info->bits == 8) return (int)(word_at(words, i / 4 * PANEL + l->i) >> i % 4 * 8 & 255);
    return (int)(word_at(words, i / 8 * PANEL + l->i) >> (i % 4 * 8 + i / 4 % 2 * 4) & 15);
}

/* d and m of the group that k is in. -(0 * 0) is -0, which changes no sum: types that share a form and have no offset stay exact. */
static void unit_of(const struct lane *l, size_t k, float *d, float *m)
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

/* d * (q - zero) is exact for every form (dtype_blocks.h), so the sum has the one rounding of a fused multiply-add. */
static inline float meaning(const struct form_info *f, int q, float d, float m)
{
    float w = d * (float)(q - f->zero);
    return f->has_m ? w + m : w;
}

static inline float plain(const struct lane *l, int form, size_t k)
{
    switch (form) {
    case FORM_F32: return float_of_bits(word_at(l->panel, k * PANEL + l->i));
    case FORM_F16: return float_from_f16((uint16_t)(word_at(l->panel, k / 2 * PANEL + l->i) >> k % 2 * 16));
    case FORM_BF16: return float_from_bf16((uint16_t)(word_at(l->panel, k / 2 * PANEL + l->i) >> k % 2 * 16));
    default:
        return float_from_f8((uint8_t)(word_at(l->panel, k / 4 * PANEL + l->i) >> k % 4 * 8)) * float_of_bits(word_at(l->tail, k / F8_BLOCK));
    }
}

float form_weight(const struct weight *w, size_t i_panel, size_t k, size_t lane)
{
    struct lane l = lane_of(w, i_panel, lane);
    float       d, m;
    if (!l.info->integer) return plain(&l, w->form, k);
    unit_of(&l, k, &d, &m);
    return meaning(l.info, stored(&l, words_of(&l, k), k % FORM_BLOCK), d, m);
}

void form_row(const struct weight *w, size_t row, float *dst)
{
    ASSERT(row < w->n_out);
    size_t half = w->n_out / 2, i_panel = row / PANEL;
    if (w->paired) {
        i_panel = row < half ? 2 * (row / PANEL) : 2 * ((row - half) / PANEL) + 1;
        row -= row < half ? 0 : half;
    }
    struct lane l = lane_of(w, i_panel, row % PANEL);
    if (!l.info->integer) {
        for (size_t k = 0; k < w->n_in; k++) dst[k] = plain(&l, w->form, k);
        return;
    }
    size_t group = l.info->group ? (size_t)l.info->group : FORM_BLOCK;
    for (size_t begin = 0; begin < w->n_in; begin += group) {
        float       d, m;
        const char *words = words_of(&l, begin);
        unit_of(&l, begin, &d, &m);
        for (size_t k = begin; k < begin + group && k < w->n_in; k++) dst[k] = meaning(l.info, stored(&l, words, k % FORM_BLOCK), d, m);
    }
}

void form_widen_int(struct wide_int *dst, const struct weight *w, size_t i_panel, size_t k_begin, size_t n_k)
{
    ASSERT(k_begin % WIDE_K == 0 && n_k % FORM_BLOCK == 0 && n_k <= WIDE_K);
    size_t group = (size_t)form_info(w->form)->group;
    dst->next_bytes = 0;
    for (size_t i = 0; i < PANEL; i++) {
        struct lane l = lane_of(w, i_panel, i);
        for (size_t k = 0; k < n_k; k++)
            dst->q[k / 4][i][k % 4] = k_begin + k < w->n_in ? (uint8_t)stored(&l, words_of(&l, k_begin + k), k % FORM_BLOCK) : 0;
        for (size_t g = 0; group && g < n_k / group; g++) {
            dst->d[g][i] = dst->m[g][i] = 0;
            if (k_begin + g * group < w->n_in) unit_of(&l, k_begin + g * group, &dst->d[g][i], &dst->m[g][i]);
        }
    }
}

const float *form_scale(const struct weight *w, size_t i_panel)
{
    if (w->form != FORM_C8 && w->form != FORM_C4) return NULL;
    return (const float *)((const char *)panel_at(w, i_panel, form_panel_bytes(w->form, w->n_in)) + form_tail_at(w->form, w->n_in));
}
