/* microkernels_avx2.c - backend avx2, and its micro-kernels over single rows: norm, activation,
 * rotation, sums of exponentials. Equal to microkernels_ref.c bit for bit.
 * Thread: engine, compute pool. */
#include "kernels/cpu/microkernels_avx2.h"

#include <float.h>
#include <math.h>

#include "kernels/cpu/attention/attention.h"
#include "kernels/cpu/cpu_features.h"
#include "kernels/cpu/simd_avx2.h"

static float sum_of_squares(const float *x, size_t n)
{
    struct sum16 s = { _mm256_setzero_ps(), _mm256_setzero_ps() };
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        s.low = _mm256_fmadd_ps(a, a, s.low);
        s.high = _mm256_fmadd_ps(b, b, s.high);
    }
    if (i < n) {
        __m256 a = _mm256_maskload_ps(x + i, mask8(n - i)),
               b = _mm256_maskload_ps(x + i + 8, mask8_from(n - i, 8));
        s.low = _mm256_fmadd_ps(a, a, s.low);
        s.high = _mm256_fmadd_ps(b, b, s.high);
    }
    return sum16_tree(s);
}

static float avx2_rms_factor(const float *x, size_t n, float eps)
{
    return 1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps);
}

static void avx2_rms_apply(float *y, const float *x, const float *weight, float factor, size_t n)
{
    __m256 r = _mm256_set1_ps(factor);
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_mul_ps(_mm256_loadu_ps(weight + i),
                                              _mm256_mul_ps(_mm256_loadu_ps(x + i), r)));
    if (i < n) {
        __m256i m = mask8(n - i);
        __m256 v = _mm256_mul_ps(_mm256_maskload_ps(x + i, m), r);
        _mm256_maskstore_ps(y + i, m, _mm256_mul_ps(_mm256_maskload_ps(weight + i, m), v));
    }
}

static void avx2_add(float *x, const float *y, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
    if (i < n) {
        __m256i m = mask8(n - i);
        _mm256_maskstore_ps(
            x + i, m, _mm256_add_ps(_mm256_maskload_ps(x + i, m), _mm256_maskload_ps(y + i, m)));
    }
}

static inline __m256 silu_mul8(__m256 gate, __m256 up)
{
    __m256 e = exp8(_mm256_xor_ps(gate, _mm256_set1_ps(-0.0f)));
    return _mm256_mul_ps(_mm256_div_ps(gate, _mm256_add_ps(_mm256_set1_ps(1.0f), e)), up);
}

static void avx2_silu_mul(float *out, const float *gate, const float *up, size_t n)
{
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, silu_mul8(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(up + i)));
    if (i < n) {
        __m256i m = mask8(n - i);
        _mm256_maskstore_ps(
            out + i, m, silu_mul8(_mm256_maskload_ps(gate + i, m), _mm256_maskload_ps(up + i, m)));
    }
}

/* Rotates pairs (i, i + half): the table's (cos, sin) pairs are split into two registers. */
static void rope_half(float *x, const float *cs, size_t half)
{
    for (size_t i = 0; i < half; i += 8) {
        __m256i m = mask8(half - i), m0 = mask8(2 * (half - i)), m1 = mask8_from(2 * (half - i), 8);
        __m256 t0 = _mm256_maskload_ps(cs + 2 * i, m0), t1 = _mm256_maskload_ps(cs + 2 * i + 8, m1);
        __m256 low = _mm256_permute2f128_ps(t0, t1, 0x20),
               high = _mm256_permute2f128_ps(t0, t1, 0x31);
        /* low holds pairs 0 1 | 4 5, high 2 3 | 6 7 */
        __m256 c = _mm256_shuffle_ps(low, high, 0x88), s = _mm256_shuffle_ps(low, high, 0xdd);
        __m256 a = _mm256_maskload_ps(x + i, m), b = _mm256_maskload_ps(x + half + i, m);
        _mm256_maskstore_ps(x + i, m, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
        _mm256_maskstore_ps(x + half + i, m, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
    }
}

/* Rotates pairs (2i, 2i + 1): even lanes subtract, odd lanes add. */
static void rope_interleaved(float *x, const float *cs, size_t rot_dim)
{
    for (size_t i = 0; i < rot_dim; i += 8) {
        __m256i m = mask8(rot_dim - i);
        __m256 t = _mm256_maskload_ps(cs + i, m), v = _mm256_maskload_ps(x + i, m);
        __m256 cross = _mm256_mul_ps(_mm256_permute_ps(v, 0xb1), _mm256_movehdup_ps(t));
        _mm256_maskstore_ps(x + i, m, _mm256_fmaddsub_ps(v, _mm256_moveldup_ps(t), cross));
    }
}

static void avx2_rope(float *x, const float *cs, size_t rot_dim, bool interleaved)
{
    if (interleaved) rope_interleaved(x, cs, rot_dim);
    else rope_half(x, cs, rot_dim / 2);
}

static void avx2_scale(float *x, float factor, size_t n)
{
    __m256 f = _mm256_set1_ps(factor);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(x + i, _mm256_mul_ps(_mm256_loadu_ps(x + i), f));
    if (i < n) {
        __m256i m = mask8(n - i);
        _mm256_maskstore_ps(x + i, m, _mm256_mul_ps(_mm256_maskload_ps(x + i, m), f));
    }
}

static float avx2_max(const float *x, size_t n)
{
    __m256 a = _mm256_set1_ps(-INFINITY), b = a;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        a = _mm256_max_ps(_mm256_loadu_ps(x + i), a);
        b = _mm256_max_ps(_mm256_loadu_ps(x + i + 8), b);
    }
    for (; i < n; i += 8) {
        __m256 v = _mm256_maskload_ps(x + i, mask8(n - i));
        v = _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), v, _mm256_castsi256_ps(mask8(n - i)));
        a = _mm256_max_ps(v, a);
    }
    a = _mm256_max_ps(a, b);
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

static float avx2_sum_exp(const float *x, float max, size_t n)
{
    __m256 top = _mm256_set1_ps(max);
    struct sum16 s = { _mm256_setzero_ps(), _mm256_setzero_ps() };
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        s.low = _mm256_add_ps(s.low, exp8(_mm256_sub_ps(_mm256_loadu_ps(x + i), top)));
        s.high = _mm256_add_ps(s.high, exp8(_mm256_sub_ps(_mm256_loadu_ps(x + i + 8), top)));
    }
    if (i < n) {
        __m256i m0 = mask8(n - i), m1 = mask8_from(n - i, 8);
        __m256 e0 = exp8(_mm256_sub_ps(_mm256_maskload_ps(x + i, m0), top));
        __m256 e1 = exp8(_mm256_sub_ps(_mm256_maskload_ps(x + i + 8, m1), top));
        s.low = _mm256_add_ps(s.low, _mm256_and_ps(e0, _mm256_castsi256_ps(m0)));
        s.high = _mm256_add_ps(s.high, _mm256_and_ps(e1, _mm256_castsi256_ps(m1)));
    }
    return sum16_tree(s);
}

static inline __m256 exp_terms8(__m256 v, __m256 top, __m256 by)
{
    __m256 number = _mm256_cmp_ps(v, v, _CMP_ORD_Q);
    return _mm256_and_ps(
        number,
        exp8(_mm256_mul_ps(_mm256_sub_ps(_mm256_min_ps(v, _mm256_set1_ps(FLT_MAX)), top), by)));
}

static void avx2_exp_terms(float *p, const float *x, size_t n, float max, float by)
{
    __m256 top = _mm256_set1_ps(max), f = _mm256_set1_ps(by);
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(p + i, exp_terms8(_mm256_loadu_ps(x + i), top, f));
    if (i < n) {
        __m256i m = mask8(n - i);
        _mm256_maskstore_ps(p + i, m, exp_terms8(_mm256_maskload_ps(x + i, m), top, f));
    }
}

static void avx2_axpy(float *y, const float *x, float factor, size_t n)
{
    __m256 f = _mm256_set1_ps(factor);
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_fmadd_ps(f, _mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
    if (i < n) {
        __m256i m = mask8(n - i);
        _mm256_maskstore_ps(
            y + i, m,
            _mm256_fmadd_ps(f, _mm256_maskload_ps(x + i, m), _mm256_maskload_ps(y + i, m)));
    }
}

static const struct gemm_microkernels avx2_gemm = {
    .gemv = avx2_gemv,
    .dequantize = avx2_dequantize,
    .tile = avx2_tile,
    .quantize = avx2_quantize,
    .gemv_int_rows = SKINNY_ROWS_MAX,
    .gemv_int = avx2_gemv_int,
    .unpack_int = avx2_unpack_int,
    .tile_int = avx2_tile_int,
};

static const struct elementwise_microkernels avx2_elementwise = {
    .rms_factor = avx2_rms_factor,
    .rms_apply = avx2_rms_apply,
    .add = avx2_add,
    .silu_mul = avx2_silu_mul,
    .rope = avx2_rope,
    .axpy = avx2_axpy,
    .scale = avx2_scale,
    .max = avx2_max,
    .sum_exp = avx2_sum_exp,
    .exp_terms = avx2_exp_terms,
};

static const struct attention_microkernels avx2_attention = { ATTENTION_MICROKERNELS(avx2) };

const struct cpu_backend cpu_backend_avx2 = {
    .base = CPU_BACKEND("avx2", cpu_supports_avx2),
    .microkernels = { &avx2_gemm, &avx2_elementwise, &avx2_attention, .bf16 = NULL },
};
