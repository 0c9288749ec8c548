/* attention_ref.c - the definition of attention's micro-kernels, in plain C: see struct
 * cpu_microkernels. Thread: engine, compute pool. */
#include <string.h>

#include "kernels/cpu/attention/attention.h"
#include "kernels/cpu/fma_ref.h"
#include "kernels/exp.h"

/* Element d of row j; rows of odd length leave later ones unaligned. */
static float element(const struct kv_row_ptrs *rows, size_t j, enum dtype t, size_t d)
{
    const char *row = rows->at[j] + rows->offset;
    float f;
    uint16_t h;
    if (t == DTYPE_F32) {
        memcpy(&f, row + d * sizeof f, sizeof f);
        return f;
    }
    memcpy(&h, row + d * sizeof h, sizeof h);
    return dtype_bf16_to_f32(h);
}

void attention_ref_load_keys(float *dst, const struct kv_row_ptrs *rows, enum dtype t,
                             size_t n_keys, size_t dim)
{
    for (size_t j = 0; j < (n_keys + PANEL - 1) / PANEL * PANEL; j++)
        for (size_t d = 0; d < dim; d++)
            dst[(j / PANEL * dim + d) * PANEL + j % PANEL] = j < n_keys ? element(rows, j, t, d)
                                                                        : 0;
}

void attention_ref_load_values(float *dst, const struct kv_row_ptrs *rows, enum dtype t,
                               size_t n_keys, size_t dim)
{
    for (size_t d = 0; d < (dim + PANEL - 1) / PANEL * PANEL; d++)
        for (size_t j = 0; j < n_keys; j++)
            dst[(d / PANEL * ATTN_TILE + j) * PANEL + d % PANEL] = d < dim ? element(rows, j, t, d)
                                                                           : 0;
}

FMA_LOOP void tile_loop(float *acc, size_t acc_stride, const float *x, size_t x_stride,
                        size_t n_rows, const float *w, size_t w_stride, size_t n_panels, size_t n_k,
                        const float *rescale)
{
    for (size_t i = 0; i < n_rows; i++)
        for (size_t p = 0; p < n_panels; p++) {
            float sum[PANEL];
            for (size_t l = 0; l < PANEL; l++)
                sum[l] = rescale ? acc[i * acc_stride + p * PANEL + l] * rescale[i] : 0;
            for (size_t k = 0; k < n_k; k++)
                for (size_t l = 0; l < PANEL; l++)
                    sum[l] = fmaf(w[p * w_stride + k * PANEL + l], x[i * x_stride + k], sum[l]);
            memcpy(acc + i * acc_stride + p * PANEL, sum, sizeof sum);
        }
}

WITH_FMA(, attention_ref_fma_tile, tile_loop,
         (float *acc, size_t acc_stride, const float *x, size_t x_stride, size_t n_rows,
          const float *w, size_t w_stride, size_t n_panels, size_t n_k, const float *rescale),
         (acc, acc_stride, x, x_stride, n_rows, w, w_stride, n_panels, n_k, rescale))

static void online_softmax_row(float *scores, size_t n_keys, float scale, float *max, float *sum,
                               float *rescale)
{
    float top = -INFINITY, lane[16] = { 0 };
    for (size_t j = 0; j < n_keys; j++) top = scores[j] > top ? scores[j] : top;
    top *= scale; /* rounding keeps the order */
    top = top > *max ? top : *max;
    for (size_t j = 0; j < n_keys; j++) {
        scores[j] = exp_ref(fmaf(scores[j], scale, -top));
        lane[j % 16] += scores[j];
    }
    for (int half = 8; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    *rescale = exp_ref(*max - top);
    *sum = *sum * *rescale + lane[0];
    *max = top;
}

void attention_ref_online_softmax(float *scores, size_t n_rows, size_t n_keys, float scale,
                                  float *max, float *sum, float *rescale)
{
    for (size_t i = 0; i < n_rows; i++)
        online_softmax_row(scores + i * ATTN_TILE, n_keys, scale, max + i, sum + i, rescale + i);
}

void attention_ref_scores_skinny(float *scores, const float *q, size_t q_stride, size_t n_rows,
                                 const struct kv_row_ptrs *rows, const struct kv_row_ptrs *prefetch,
                                 enum dtype t, size_t n_keys, size_t dim)
{
    (void)prefetch;
    for (size_t i = 0; i < n_rows; i++)
        for (size_t j = 0; j < n_keys; j++) {
            float sum = 0;
            for (size_t d = 0; d < dim; d++)
                sum = fmaf(element(rows, j, t, d), q[i * q_stride + d], sum);
            scores[i * ATTN_TILE + j] = sum;
        }
}

void attention_ref_accumulate_v_skinny(float *o, size_t o_stride, const float *p, size_t n_rows,
                                       const struct kv_row_ptrs *rows,
                                       const struct kv_row_ptrs *prefetch, enum dtype t,
                                       size_t n_keys, size_t dim, const float *rescale)
{
    (void)prefetch;
    for (size_t i = 0; i < n_rows; i++)
        for (size_t d = 0; d < dim; d++) {
            float sum = rescale ? o[i * o_stride + d] * rescale[i] : 0;
            for (size_t j = 0; j < n_keys; j++)
                sum = fmaf(element(rows, j, t, d), p[i * ATTN_TILE + j], sum);
            o[i * o_stride + d] = sum;
        }
}
