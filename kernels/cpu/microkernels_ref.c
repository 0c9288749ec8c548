/* microkernels_ref.c - the definition of every micro-kernel, in plain C.
 *
 * Nothing here is fast: the code defines which operations a result consists of, and in which order.
 * The other backends perform the same operations in more lanes; tests/conformance/test_kernels.c
 * checks that they give the same bits. Thread: engine, compute pool. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/attention/attention.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/fma_ref.h"
#include "kernels/exp.h"

static bool always(void) { return true; }

/* acc of row i: the columns of a panel stay in registers over all k. */
FMA_LOOP void tile_loop(float *acc, const float *x, size_t x_stride, size_t n_rows, const float *w,
                        size_t n_k)
{
    for (size_t i = 0; i < n_rows; i++) {
        float sum[PANEL];
        memcpy(sum, acc + i * PANEL, sizeof sum);
        for (size_t k = 0; k < n_k; k++)
            for (size_t j = 0; j < PANEL; j++)
                sum[j] = fmaf(w[k * PANEL + j], x[i * x_stride + k], sum[j]);
        memcpy(acc + i * PANEL, sum, sizeof sum);
    }
}

WITH_FMA(static, ref_tile, tile_loop,
         (float *acc, const float *x, size_t x_stride, size_t n_rows, const float *w, size_t n_k),
         (acc, x, x_stride, n_rows, w, n_k))

static void ref_gemv(float *out, const float *x, const struct weight *w, size_t i_panel,
                     size_t n_panels)
{
    enum { GEMV_K = 32 };
    float part[GEMV_K * PANEL];
    memset(out, 0, n_panels * PANEL * sizeof *out);
    for (size_t p = 0; p < n_panels; p++)
        for (size_t k = 0, n_k; k < w->n_in; k += n_k) {
            n_k = w->n_in - k < GEMV_K ? w->n_in - k : GEMV_K;
            weight_layout_dequantize(part, w, i_panel + p, k, n_k);
            ref_tile(out + p * PANEL, x + k, 0, 1, part, n_k);
        }
}

/* ---- integer GEMM ---- */

static void ref_quantize(struct act_block *out, const float *x, size_t n)
{
    for (size_t k0 = 0; k0 < n; k0 += BLOCK_K, out++) {
        size_t left = n - k0 < BLOCK_K ? n - k0 : BLOCK_K;
        float most = 0;
        bool finite = true;
        for (size_t k = 0; k < left; k++) {
            most = fabsf(x[k0 + k]) > most ? fabsf(x[k0 + k]) : most;
            finite = finite && isfinite(x[k0 + k]);
        }
        bool some = finite && most >= ACT_ABSMAX_MIN;
        float by = some ? ACT_Q_MAX / most : 0;
        *out = (struct act_block){ .s = some ? most / ACT_Q_MAX : finite ? 0 : NAN };
        for (size_t k = 0; some && k < left; k++) {
            int number = (int)nearbyintf(x[k0 + k] * by), high = (number + 64) >> ACT_LOW_BITS;
            out->q[0][k] = (int8_t)high;
            out->q[1][k] = (int8_t)(number - high * (1 << ACT_LOW_BITS));
            out->sum[k / 16] += number;
        }
        out->ssum = (float)(out->sum[0] + out->sum[1]) * out->s;
    }
}

/* Accumulates one output over n_k k of an unpacked panel. */
static float accumulate_int(float acc, const struct act_block *x, const struct unpacked_panel *w,
                            const struct weight_layout_info *f, size_t n_k, size_t lane)
{
    size_t group = f->group ? (size_t)f->group : BLOCK_K;
    for (size_t k0 = 0; k0 < n_k; k0 += group) {
        const struct act_block *block = &x[k0 / BLOCK_K];
        int32_t sum = group == BLOCK_K ? block->sum[0] + block->sum[1]
                                       : block->sum[k0 % BLOCK_K / 16],
                dot = -f->zero * sum;
        for (size_t k = k0; k < k0 + group; k++) {
            int32_t number = block->q[0][k % BLOCK_K] * (1 << ACT_LOW_BITS) +
                             block->q[1][k % BLOCK_K];
            dot += (int32_t)w->q[k / 4][lane][k % 4] * number;
        }
        if (f->group == 0) {
            acc = fmaf((float)dot, block->s, acc);
            continue;
        }
        acc = fmaf((float)dot * block->s, w->d[k0 / group][lane], acc);
        if (f->has_m) acc = fmaf((float)sum * block->s, w->m[k0 / group][lane], acc);
    }
    return acc;
}

static void ref_tile_int(float *acc, const struct act_block *x, size_t x_stride, size_t n_rows,
                         const struct unpacked_panel *w, size_t n_panels, int layout, size_t n_k)
{
    for (size_t p = 0; p < n_panels; p++)
        for (size_t i = 0; i < n_rows; i++, acc += PANEL)
            for (size_t j = 0; j < PANEL; j++)
                acc[j] = accumulate_int(acc[j], x + i * x_stride, &w[p], weight_layout_info(layout),
                                        n_k, j);
}

/* Computes one row of one panel. */
static void ref_dot_int(float *out, const struct act_block *x, const struct weight *w,
                        size_t i_panel)
{
    struct unpacked_panel unpacked;
    size_t n_in = act_blocks(w->n_in) * BLOCK_K;
    const float *scale = weight_layout_channel_scale(w, i_panel);
    memset(out, 0, PANEL * sizeof *out);
    for (size_t k0 = 0; k0 < n_in; k0 += UNPACK_K) {
        size_t n_k = n_in - k0 < UNPACK_K ? n_in - k0 : UNPACK_K;
        weight_layout_unpack_int(&unpacked, w, i_panel, k0, n_k);
        ref_tile_int(out, x + k0 / BLOCK_K, 0, 1, &unpacked, 1, w->layout, n_k);
    }
    for (size_t j = 0; scale && j < PANEL; j++) out[j] *= scale[j];
}

static void ref_gemv_int(float *out, const struct act_block *x, size_t x_stride, size_t n_rows,
                         const struct weight *w, size_t i_panel, size_t n_panels)
{
    for (size_t i = 0; i < n_rows; i++)
        for (size_t p = 0; p < n_panels; p++, out += PANEL)
            ref_dot_int(out, x + i * x_stride, w, i_panel + p);
}

/* ---- rows ---- */

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

static float ref_rms_factor(const float *x, size_t n, float eps)
{
    return 1.0f / sqrtf(dot16(x, x, n) / (float)n + eps);
}

static void ref_rms_apply(float *y, const float *x, const float *weight, float factor, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] = weight[i] * (x[i] * factor);
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
        float cosine = cs[2 * i], sine = cs[2 * i + 1], a0 = *a, b0 = *b;
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

static void ref_exp_terms(float *p, const float *x, size_t n, float max, float by)
{
    for (size_t i = 0; i < n; i++) {
        float v = x[i] < FLT_MAX ? x[i] : FLT_MAX;
        p[i] = isnan(x[i]) ? 0 : exp_ref((v - max) * by);
    }
}

static void ref_scale(float *x, float factor, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] *= factor;
}

static void ref_axpy(float *y, const float *x, float factor, size_t n)
{
    for (size_t i = 0; i < n; i++) y[i] = fmaf(factor, x[i], y[i]);
}

static const struct gemm_microkernels ref_gemm = {
    .gemv = ref_gemv,
    .dequantize = weight_layout_dequantize,
    .tile = ref_tile,
    .quantize = ref_quantize,
    .gemv_int_rows = DOT_ROWS,
    .gemv_int = ref_gemv_int,
    .unpack_int = weight_layout_unpack_int,
    .tile_int = ref_tile_int,
};

static const struct elementwise_microkernels ref_elementwise = {
    .rms_factor = ref_rms_factor,
    .rms_apply = ref_rms_apply,
    .add = ref_add,
    .silu_mul = ref_silu_mul,
    .rope = ref_rope,
    .axpy = ref_axpy,
    .scale = ref_scale,
    .max = ref_max,
    .sum_exp = ref_sum_exp,
    .exp_terms = ref_exp_terms,
};

static const struct attention_microkernels ref_attention = {
    ATTENTION_MICROKERNELS(attention_ref),
};

const struct cpu_backend cpu_backend_ref = {
    .base = CPU_BACKEND("ref", always),
    .microkernels = { &ref_gemm, &ref_elementwise, &ref_attention, .bf16 = NULL },
};
