/* microkernels_avx512.c - backend avx512, and its micro-kernels over single rows. Equal to
 * microkernels_ref.c bit for bit. Thread: engine, compute pool. */
#include "kernels/cpu/microkernels_avx512.h"

#include <float.h>
#include <math.h>

#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/simd_avx512.h"

static float avx512_rms_factor(const float *x, size_t n, float eps)
{
    __m512 sum = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += 16) {
        __m512 v = _mm512_maskz_loadu_ps(mask16(n - i), x + i);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return 1.0f / sqrtf(tree16(sum) / (float)n + eps);
}

static void avx512_rms_apply(float *y, const float *x, const float *weight, float factor, size_t n)
{
    __m512 r = _mm512_set1_ps(factor);
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = mask16(n - i);
        __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(m, x + i), r);
        _mm512_mask_storeu_ps(y + i, m, _mm512_mul_ps(_mm512_maskz_loadu_ps(m, weight + i), v));
    }
}

static void avx512_add(float *x, const float *y, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = mask16(n - i);
        _mm512_mask_storeu_ps(
            x + i, m,
            _mm512_add_ps(_mm512_maskz_loadu_ps(m, x + i), _mm512_maskz_loadu_ps(m, y + i)));
    }
}

static void avx512_silu_mul(float *out, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = mask16(n - i);
        __m512 g = _mm512_maskz_loadu_ps(m, gate + i);
        __m512 e = exp16(_mm512_xor_ps(g, _mm512_set1_ps(-0.0f)));
        __m512 s = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
        _mm512_mask_storeu_ps(out + i, m, _mm512_mul_ps(s, _mm512_maskz_loadu_ps(m, up + i)));
    }
}

/* Rotates pairs (i, i + half): the table's (cos, sin) pairs are split into two registers. */
static void rope_half(float *x, const float *cs, size_t half)
{
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28,
                                           30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    for (size_t i = 0; i < half; i += 16) {
        size_t left = half - i;
        __mmask16 m = mask16(left), m1 = mask16(2 * left > 16 ? 2 * left - 16 : 0);
        __m512 t0 = _mm512_maskz_loadu_ps(mask16(2 * left), cs + 2 * i),
               t1 = _mm512_maskz_loadu_ps(m1, cs + 2 * i + 16);
        __m512 c = _mm512_permutex2var_ps(t0, even, t1), s = _mm512_permutex2var_ps(t0, odd, t1);
        __m512 a = _mm512_maskz_loadu_ps(m, x + i), b = _mm512_maskz_loadu_ps(m, x + half + i);
        _mm512_mask_storeu_ps(x + i, m, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        _mm512_mask_storeu_ps(x + half + i, m, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

/* Rotates pairs (2i, 2i + 1): even lanes subtract, odd lanes add. */
static void rope_interleaved(float *x, const float *cs, size_t rot_dim)
{
    for (size_t i = 0; i < rot_dim; i += 16) {
        __mmask16 m = mask16(rot_dim - i);
        __m512 t = _mm512_maskz_loadu_ps(m, cs + i), v = _mm512_maskz_loadu_ps(m, x + i);
        __m512 cross = _mm512_mul_ps(_mm512_permute_ps(v, 0xb1), _mm512_movehdup_ps(t));
        _mm512_mask_storeu_ps(x + i, m, _mm512_fmaddsub_ps(v, _mm512_moveldup_ps(t), cross));
    }
}

static void avx512_rope(float *x, const float *cs, size_t rot_dim, bool interleaved)
{
    if (interleaved) rope_interleaved(x, cs, rot_dim);
    else rope_half(x, cs, rot_dim / 2);
}

static void avx512_scale(float *x, float factor, size_t n)
{
    __m512 f = _mm512_set1_ps(factor);
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = mask16(n - i);
        _mm512_mask_storeu_ps(x + i, m, _mm512_mul_ps(_mm512_maskz_loadu_ps(m, x + i), f));
    }
}

static float avx512_max(const float *x, size_t n)
{
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (size_t i = 0; i < n; i += 16)
        top = _mm512_max_ps(_mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), mask16(n - i), x + i),
                            top);
    return _mm512_reduce_max_ps(top);
}

static float avx512_sum_exp(const float *x, float max, size_t n)
{
    __m512 top = _mm512_set1_ps(max), sum = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = mask16(n - i);
        sum = _mm512_mask_add_ps(sum, m, sum,
                                 exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(m, x + i), top)));
    }
    return tree16(sum);
}

static void avx512_exp_terms(float *p, const float *x, size_t n, float max, float by)
{
    __m512 top = _mm512_set1_ps(max), f = _mm512_set1_ps(by), most = _mm512_set1_ps(FLT_MAX);
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = mask16(n - i);
        __m512 v = _mm512_maskz_loadu_ps(m, x + i);
        __mmask16 number = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
        __m512 e = exp16(_mm512_mul_ps(_mm512_sub_ps(_mm512_min_ps(v, most), top), f));
        _mm512_mask_storeu_ps(p + i, m, _mm512_maskz_mov_ps(number, e));
    }
}

static void avx512_axpy(float *y, const float *x, float factor, size_t n)
{
    __m512 f = _mm512_set1_ps(factor);
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 m = mask16(n - i);
        _mm512_mask_storeu_ps(
            y + i, m,
            _mm512_fmadd_ps(f, _mm512_maskz_loadu_ps(m, x + i), _mm512_maskz_loadu_ps(m, y + i)));
    }
}

static const struct gemm_microkernels avx512_gemm = { AVX512_GEMM_MICROKERNELS,
                                                      .gemv_int_rows = DOT_ROWS,
                                                      .gemv_int = avx512_gemv_int,
                                                      .tile_int = avx512_tile_int };

const struct elementwise_microkernels avx512_elementwise = {
    .rms_factor = avx512_rms_factor,
    .rms_apply = avx512_rms_apply,
    .add = avx512_add,
    .silu_mul = avx512_silu_mul,
    .rope = avx512_rope,
    .axpy = avx512_axpy,
    .scale = avx512_scale,
    .max = avx512_max,
    .sum_exp = avx512_sum_exp,
    .exp_terms = avx512_exp_terms,
};

const struct attention_microkernels avx512_attention = { ATTENTION_MICROKERNELS(avx512) };

const struct cpu_backend cpu_backend_avx512 = {
    .base = CPU_BACKEND("avx512", cpu_supports_avx512),
    .microkernels = { &avx512_gemm, &avx512_elementwise, &avx512_attention, .bf16 = NULL },
};
