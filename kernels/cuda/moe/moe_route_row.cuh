/* moe_route_row.cuh - how a row's experts are chosen; and routing by a warp, which has every 32nd
 * expert in a lane.
 *
 * Exponentials are computed in f64 and scores are rounded once, as on the CPU, so near-ties between
 * experts are decided as exactly as f32 logits allow. What is compared are unsigned keys in the
 * order of the values. Loops are rolled where they can be: kernels of a decode step are short and
 * fetch their instructions from L2. Thread: device. */
#ifndef BATON_KERNELS_CUDA_MOE_ROUTE_ROW_CUH
#define BATON_KERNELS_CUDA_MOE_ROUTE_ROW_CUH

#include "kernels/cuda/dtype_convert.cuh"
#include "kernels/kernels.h"

/* Orders floats: NaN is the smallest, -0 equals 0. */
static __device__ __forceinline__ unsigned order_key(float v)
{
    const unsigned bits = v == 0 ? 0 : __float_as_uint(v);
    return isnan(v) ? 0 : bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
static __device__ __forceinline__ float key_value(unsigned key)
{
    return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

/* Of the lanes' best keys and their indices: the index of the best, of equal ones the lowest, in
 * every lane. */
static __device__ __forceinline__ int warp_best(unsigned key, int at)
{
    const unsigned best = __reduce_max_sync(0xffffffffu, key);
    return __reduce_min_sync(0xffffffffu, key == best ? at : INT32_MAX);
}

static __device__ __forceinline__ double warp_sum_f64(double x)
{
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* e^x to an ulp or two, without branches: 2^k times a Taylor series of what is left. Where |x| is
 * above 708 scores are 0 or 1 in f32 whatever the value. */
static __device__ __forceinline__ double exp_f64(double x)
{
    const double ROUND = 6755399441055744.0;         /* 1.5 2^52: adding it rounds to an integer */
    x = x < -708.0 ? -708.0 : x > 708.0 ? 708.0 : x; /* NaN stays */
    const double k = fma(x, 1.4426950408889634, ROUND) - ROUND;
    const double r = fma(k, -1.9082149292705877e-10, fma(k, -6.93147180369123816490e-01, x));
    double y = 1.0 / 6227020800.0;
    y = fma(y, r, 1.0 / 479001600.0);
    y = fma(y, r, 1.0 / 39916800.0);
    y = fma(y, r, 1.0 / 3628800.0);
    y = fma(y, r, 1.0 / 362880.0);
    y = fma(y, r, 1.0 / 40320.0);
    y = fma(y, r, 1.0 / 5040.0);
    y = fma(y, r, 1.0 / 720.0);
    y = fma(y, r, 1.0 / 120.0);
    y = fma(y, r, 1.0 / 24.0);
    y = fma(y, r, 1.0 / 6.0);
    y = fma(y, r, 0.5);
    y = fma(y, r, 1.0);
    y = fma(y, r, 1.0);
    const int whole = isnan(x) ? 0 : (int)k;
    return y * __longlong_as_double((long long)(whole + 1023) << 52);
}

static __device__ __forceinline__ float sigmoid_score(float logit)
{
    return (float)(1.0 / (1.0 + exp_f64(-(double)logit)));
}

static __device__ __forceinline__ float group_score(const route_args &a, const unsigned *key, int n)
{
    float first = -INFINITY, second = -INFINITY;
    for (int i = 0; i < n; i++) {
        const float v = key_value(key[i]);
        if (v > first) {
            second = first;
            first = v;
        } else if (v > second) {
            second = v;
        }
    }
    return a.group_score == route_args::GROUP_TOP2_SUM && n > 1 ? first + second : first;
}

/* Gives experts whose groups are not among the best the key of NaN. key [n_experts]; groups
 * [2 n_groups]: scratch. By a warp. */
static __device__ __forceinline__ void drop_groups(const route_args &a, unsigned *key,
                                                   unsigned *groups)
{
    const int lane = (int)(threadIdx.x % WARP), size = a.n_experts / a.n_groups;
    unsigned *is_kept = groups + a.n_groups;
    for (int g = lane; g < a.n_groups; g += WARP) {
        groups[g] = order_key(group_score(a, key + g * size, size));
        is_kept[g] = 0;
    }
    __syncwarp();
    for (int i = 0; i < a.topk_groups; i++) {
        unsigned best_key = 0;
        int at = a.n_groups;
        for (int g = lane; g < a.n_groups; g += WARP)
            if (groups[g] > best_key || at == a.n_groups) best_key = groups[g], at = g;
        const int best = warp_best(best_key, at);
        __syncwarp();
        if (lane == 0) is_kept[best] = 1, groups[best] = 0;
        __syncwarp();
    }
    for (int e = lane; e < a.n_experts; e += WARP)
        if (!is_kept[e / size]) key[e] = 0;
    __syncwarp();
}

/* What the weights, whose sum is given, are divided by. */
static __device__ __forceinline__ float weights_divisor(const route_args &a, float sum)
{
    return a.norm == route_args::NORM_MAX   ? fmaxf(sum, a.norm_min)
           : a.norm == route_args::NORM_SUM ? sum + a.norm_min
                                            : 1.0f;
}

/* Scales the weights w [n_used], in shared memory, and stores them. By a warp. */
static __device__ __forceinline__ void store_weights(const route_args &a, size_t row,
                                                     const float *w)
{
    float sum = 0;
#pragma unroll 4
    for (int j = 0; j < a.n_used; j++) sum += w[j];
    const float by = weights_divisor(a, sum);
#pragma unroll 1
    for (int j = (int)(threadIdx.x % WARP); j < a.n_used; j += WARP)
        a.weights[row * (size_t)a.n_used + (size_t)j] = w[j] / by * a.scale;
}

/* ---- by a warp ---- */

/* Experts lane, lane + 32, .. of a row. */
template <int PER_LANE> struct route_lane {
    /* of loops over them, so that they are in registers unless they are many */
    enum { UNROLLED = PER_LANE <= 8 ? PER_LANE : 1 };
    float v[PER_LANE];
};

/* Probabilities of a softmax from logits; past the last expert they mean nothing. */
template <int PER_LANE>
static __device__ __forceinline__ void softmax(int n, route_lane<PER_LANE> *p)
{
    const int lane = (int)(threadIdx.x % WARP);
    float top = -INFINITY; /* NaN is not larger */
    double value[PER_LANE], sum = 0;
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++)
        if (lane + i * WARP < n) top = fmaxf(top, p->v[i]);
    const double most = (double)key_value(__reduce_max_sync(0xffffffffu, order_key(top)));
    /* Without branches if unrolled, so that the exponentials' steps overlap. */
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++) {
        const bool is_one = lane + i * WARP < n;
        if (route_lane<PER_LANE>::UNROLLED == 1 && !is_one) break;
        const double v = exp_f64((double)p->v[i] - most);
        value[i] = is_one ? v : 0;
        sum += value[i];
    }
    const double by = 1.0 / warp_sum_f64(sum);
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++) {
        if (route_lane<PER_LANE>::UNROLLED == 1 && lane + i * WARP >= n) break;
        p->v[i] = (float)(value[i] * by);
    }
}

/* Keys of the experts that may be chosen; the others get that of NaN. p: the row's shared memory.
 */
template <int PER_LANE>
static __device__ __forceinline__ void choice_keys(const route_args &a,
                                                   const route_lane<PER_LANE> &score, float *p,
                                                   unsigned *key)
{
    const int lane = (int)(threadIdx.x % WARP), n = a.n_experts;
    unsigned *keys = (unsigned *)(void *)(p + n);
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++) {
        const int e = lane + i * WARP;
        key[i] = 0;
        if (e >= n) continue;
        p[e] = score.v[i];
        key[i] = order_key(a.bias ? score.v[i] + __ldg(a.bias + e) : score.v[i]);
        if (a.n_groups > 1) keys[e] = key[i];
    }
    __syncwarp();
    if (a.n_groups == 1) return;
    drop_groups(a, keys, keys + n);
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++)
        if (lane + i * WARP < n) key[i] = keys[lane + i * WARP];
    __syncwarp();
}

/* The best of the lanes' keys, which it takes away. */
template <int PER_LANE> static __device__ __forceinline__ int take_best(unsigned *key)
{
    const int lane = (int)(threadIdx.x % WARP);
    unsigned best = key[0];
    int at = lane;
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 1; i < PER_LANE; i++)
        if (key[i] > best) best = key[i], at = lane + i * WARP;
    const int e = warp_best(best, at);
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++)
        if (lane + i * WARP == e) key[i] = 0;
    return e;
}

/* Floats of a row's shared memory: scores, keys or weights, and two words per group. */
static __host__ __device__ __forceinline__ size_t route_floats(const route_args &a)
{
    return 2 * ((size_t)a.n_experts + (size_t)a.n_groups);
}

/* Routes a row of at most 32 PER_LANE experts. p: its shared memory. chosen [n_used], in shared
 * memory: its experts, too. */
template <int PER_LANE>
static __device__ __forceinline__ void route_row(const route_args &a, size_t row, float *p,
                                                 int32_t *chosen)
{
    const int lane = (int)(threadIdx.x % WARP);
    const float *logits = a.logits + row * (size_t)a.n_experts;
    float *weights = p + a.n_experts; /* where keys were */
    route_lane<PER_LANE> scores;
    unsigned key[PER_LANE];
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++)
        scores.v[i] = lane + i * WARP < a.n_experts ? __ldcg(logits + lane + i * WARP) : 0;
    if (a.score == route_args::ROUTE_SOFTMAX) softmax<PER_LANE>(a.n_experts, &scores);
    else
#pragma unroll route_lane < PER_LANE> ::UNROLLED
        for (int i = 0; i < PER_LANE; i++) scores.v[i] = sigmoid_score(scores.v[i]);
    choice_keys<PER_LANE>(a, scores, p, key);
#pragma unroll 1
    for (int j = 0; j < a.n_used; j++) {
        const int e = take_best<PER_LANE>(key);
        if (lane != j % WARP) continue;
        chosen[j] = e;
        weights[j] = p[e];
        a.experts[row * (size_t)a.n_used + (size_t)j] = e;
    }
    __syncwarp();
    store_weights(a, row, weights);
    __syncwarp(); /* the next row has the same shared memory */
}

#endif
