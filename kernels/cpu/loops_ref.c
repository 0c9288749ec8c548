/* loops_ref.c - the definition of every inner loop, in plain C.
 *
 * Nothing here is fast; it says which operations make up a result and in which order. The other rows do the same
 * operations with more lanes and are held to the same bits by tests/conformance/test_kernels.c. Thread: engine, pool. */
#include <math.h>

#include "kernels/cpu/cpu_row.h"
#include "kernels/cpu/exp.h"

static bool always(void) { return true; }

static void ref_tile(float *acc, const float *x, size_t x_stride, size_t n_rows, const float *w, size_t n_k)
{
    for (size_t i = 0; i < n_rows; i++)
        for (size_t k = 0; k < n_k; k++)
            for (size_t j = 0; j < PANEL; j++)
                acc[i * PANEL + j] = fmaf(w[k * PANEL + j], x[i * x_stride + k], acc[i * PANEL + j]);
}

static void ref_widen(float *dst, const struct weight *w, size_t i_panel, size_t k_begin, size_t n_k)
{
    for (size_t k = 0; k < n_k; k++)
        for (size_t j = 0; j < PANEL; j++) dst[k * PANEL + j] = panel_weight(w, i_panel, k_begin + k, j);
}

static void ref_gemv(float *out, const float *x, const struct weight *w, size_t i_panel, size_t n_panels)
{
    for (size_t i = 0; i < n_panels * PANEL; i++) {
        out[i] = 0;
        for (size_t k = 0; k < w->n_in; k++)
            out[i] = fmaf(panel_weight(w, i_panel + i / PANEL, k, i % PANEL), x[k], out[i]);
    }
}

/* The tree of sum16 over its 16 partial sums. */
static float tree16(float lane[16])
{
    for (int half = 8; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    return lane[0];
}

static float dot16(const float *a, const float *b, size_t n)
{
    float lane[16] = { 0 };
    for (size_t i = 0; i < n; i++) lane[i % 16] = fmaf(a[i], b[i], lane[i % 16]);
    return tree16(lane);
}

static void ref_rms_norm(float *y, const float *x, const float *weight, size_t n, float eps)
{
    float r = 1.0f / sqrtf(dot16(x, x, n) / (float)n + eps);
    for (size_t i = 0; i < n; i++) y[i] = weight[i] * (x[i] * r);
}

static void ref_add(float *x, const float *y, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] += y[i];
}

static void ref_silu_mul(float *out, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i++) out[i] = gate[i] / (1.0f + exp_ref(-gate[i])) * up[i];
}

static void ref_rope(float *x, const float *cs, size_t rot_dim, bool interleaved)
{
    size_t half = rot_dim / 2;
    for (size_t i = 0; i < half; i++) {
        float *a = interleaved ? &x[2 * i] : &x[i], *b = interleaved ? &x[2 * i + 1] : &x[i + half];
        float  cosine = cs[2 * i], sine = cs[2 * i + 1], a0 = *a, b0 = *b;
        *a = fmaf(a0, cosine, -(b0 * sine));
        *b = fmaf(b0, cosine, a0 * sine);
    }
}

static float ref_max(const float *x, size_t n)
{
    float m = -INFINITY;
    for (size_t i = 0; i < n; i++) m = x[i] > m ? x[i] : m;
    return m;
}

static float ref_sum_exp(const float *x, float max, size_t n)
{
    float lane[16] = { 0 };
    for (size_t i = 0; i < n; i++) lane[i % 16] += exp_ref(x[i] - max);
    return tree16(lane);
}

static void ref_scale(float *x, float factor, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] *= factor;
}

static void ref_attend(float *out, struct attn_state *s, const float *q, const struct attn_tile *t)
{
    float score[KERNEL_BLOCK_TOKENS_MAX], lane[16] = { 0 };
    for (size_t j = 0; j < t->n_keys; j++) score[j] = dot16(q, t->k + j * t->head_dim, t->head_dim) * t->scale;
    float tile_max = ref_max(score, t->n_keys), max = tile_max > s->max ? tile_max : s->max;
    float shrink = exp_ref(s->max - max);
    for (size_t j = 0; j < t->n_keys; j++) {
        score[j] = exp_ref(score[j] - max);
        lane[j % 16] += score[j];
    }
    s->sum = s->sum * shrink + tree16(lane);
    s->max = max;
    for (size_t d = 0; d < t->head_dim; d++) {
        float sum = out[d] * shrink;
        for (size_t j = 0; j < t->n_keys; j++) sum = fmaf(score[j], t->v[j * t->head_dim + d], sum);
        out[d] = sum;
    }
}

const struct cpu_row cpu_row_ref = {
    .ops = CPU_ROW_OPS("ref", always),
    .loops = { .gemv = ref_gemv, .widen = ref_widen, .tile = ref_tile, .rms_norm = ref_rms_norm, .add = ref_add,
               .silu_mul = ref_silu_mul, .rope = ref_rope, .attend = ref_attend, .scale = ref_scale, .max = ref_max,
               .sum_exp = ref_sum_exp },
};
