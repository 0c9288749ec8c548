/* moe_route_row.cuh - routes a row to experts, by a warp.
 *
 * A lane has every 32nd expert. Exponentials are computed in f64 and rounded once, as on the CPU,
 * so near-ties between experts are decided as exactly as f32 logits allow. What is compared are
 * unsigned keys in the order of the values, which a warp reduces in one instruction. Thread:
 * device. */
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

/* Of the lanes' best keys and their indices: the index of the best, of equal ones the lowest, in
 * every lane. */
static __device__ __forceinline__ int warp_best(unsigned key, int at)
{
    const unsigned best = __reduce_max_sync(0xffffffffu, key);
    return __reduce_min_sync(0xffffffffu, key == best ? at : INT32_MAX);
}

static __device__ __forceinline__ double warp_sum_f64(double x)
{
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

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
    float top = -INFINITY;
    double value[PER_LANE], sum = 0;
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++)
        if (lane + i * WARP < n) top = fmaxf(top, p->v[i]);
    top = warp_max(top);
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++) {
        if (lane + i * WARP >= n) break;
        value[i] = exp((double)p->v[i] - (double)top);
        sum += value[i];
    }
    sum = warp_sum_f64(sum);
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++)
        if (lane + i * WARP < n) p->v[i] = (float)(value[i] / sum);
}

template <int PER_LANE>
static __device__ __forceinline__ void sigmoid(int n, route_lane<PER_LANE> *p)
{
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++)
        if ((int)(threadIdx.x % WARP) + i * WARP < n)
            p->v[i] = (float)(1.0 / (1.0 + exp(-(double)p->v[i])));
}

static __device__ __forceinline__ float group_score(const route_args &a, const float *choice, int n)
{
    float first = -INFINITY, second = -INFINITY;
    for (int i = 0; i < n; i++) {
        if (choice[i] > first) {
            second = first;
            first = choice[i];
        } else if (choice[i] > second) {
            second = choice[i];
        }
    }
    return a.group_score == route_args::GROUP_TOP2_SUM && n > 1 ? first + second : first;
}

/* Marks in is_kept [n_groups] the groups that are among the best. choice [n_experts]; groups
 * [n_groups]: scratch. */
static __device__ __forceinline__ void keep_groups(const route_args &a, const float *choice,
                                                   unsigned *groups, unsigned *is_kept)
{
    const int lane = (int)(threadIdx.x % WARP), size = a.n_experts / a.n_groups;
    for (int g = lane; g < a.n_groups; g += WARP) {
        groups[g] = order_key(group_score(a, choice + g * size, size));
        is_kept[g] = 0;
    }
    __syncwarp();
    for (int i = 0; i < a.topk_groups; i++) {
        unsigned key = 0;
        int at = a.n_groups;
        for (int g = lane; g < a.n_groups; g += WARP)
            if (groups[g] > key || at == a.n_groups) key = groups[g], at = g;
        const int best = warp_best(key, at);
        __syncwarp();
        if (lane == 0) is_kept[best] = 1, groups[best] = 0;
        __syncwarp();
    }
}

/* Keys of the experts that may be chosen; the others get that of NaN. p: the row's shared memory.
 */
template <int PER_LANE>
static __device__ __forceinline__ void choice_keys(const route_args &a,
                                                   const route_lane<PER_LANE> &score,
                                                   const route_lane<PER_LANE> &bias, float *p,
                                                   unsigned *key)
{
    const int lane = (int)(threadIdx.x % WARP), n = a.n_experts;
    float *choice = p + n;
    unsigned *groups = (unsigned *)(void *)(choice + n), *is_kept = groups + a.n_groups;
    route_lane<PER_LANE> v = score;
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++) {
        const int e = lane + i * WARP;
        key[i] = 0;
        if (e >= n) continue;
        p[e] = v.v[i];
        if (a.bias) v.v[i] += bias.v[i];
        key[i] = order_key(v.v[i]);
        if (a.n_groups > 1) choice[e] = v.v[i];
    }
    __syncwarp();
    if (a.n_groups == 1) return;
    keep_groups(a, choice, groups, is_kept);
    const int size = n / a.n_groups;
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++)
        if (lane + i * WARP < n && !is_kept[(lane + i * WARP) / size]) key[i] = 0;
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

/* Scales the weights w [n_used], in shared memory, and stores them. */
static __device__ __forceinline__ void store_weights(const route_args &a, size_t row,
                                                     const float *w)
{
    float sum = 0;
    for (int j = 0; j < a.n_used; j++) sum += w[j];
    const float by = a.norm == route_args::NORM_MAX   ? fmaxf(sum, a.norm_min)
                     : a.norm == route_args::NORM_SUM ? sum + a.norm_min
                                                      : 1.0f;
    for (int j = (int)(threadIdx.x % WARP); j < a.n_used; j += WARP)
        a.weights[row * (size_t)a.n_used + (size_t)j] = w[j] / by * a.scale;
}

/* Floats of a row's shared memory: scores, what is compared, and two words per group. */
static __host__ __device__ __forceinline__ size_t route_floats(const route_args &a)
{
    return 2 * ((size_t)a.n_experts + (size_t)a.n_groups);
}

template <int PER_LANE>
static __device__ __forceinline__ void route_row_of(const route_args &a, size_t row, float *p,
                                                    int32_t *chosen)
{
    const int lane = (int)(threadIdx.x % WARP);
    const float *logits = a.logits + row * (size_t)a.n_experts;
    float *weights = p + a.n_experts; /* where choices were compared */
    route_lane<PER_LANE> scores, bias;
    unsigned key[PER_LANE];
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++)
        scores.v[i] = lane + i * WARP < a.n_experts ? __ldcg(logits + lane + i * WARP) : 0;
#pragma unroll route_lane < PER_LANE> ::UNROLLED
    for (int i = 0; i < PER_LANE; i++)
        bias.v[i] = a.bias && lane + i * WARP < a.n_experts ? __ldg(a.bias + lane + i * WARP) : 0;
    if (a.score == route_args::ROUTE_SOFTMAX) softmax<PER_LANE>(a.n_experts, &scores);
    else sigmoid<PER_LANE>(a.n_experts, &scores);
    choice_keys<PER_LANE>(a, scores, bias, p, key);
    __syncwarp();
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

/* Routes a row. p: its shared memory. chosen [n_used], in shared memory: its experts, too. */
static __device__ __forceinline__ void route_row(const route_args &a, size_t row, float *p,
                                                 int32_t *chosen)
{
    if (a.n_experts <= 4 * WARP) route_row_of<4>(a, row, p, chosen);
    else if (a.n_experts <= 8 * WARP) route_row_of<8>(a, row, p, chosen);
    else route_row_of<KERNEL_EXPERTS_MAX / WARP>(a, row, p, chosen);
}

#endif
