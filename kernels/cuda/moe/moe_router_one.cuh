/* moe_router_one.cuh - the router of one row, by a matrix whose k warps split: what a decode step of
 * one sequence waits for. Thread: device. */
#ifndef BATON_KERNELS_CUDA_MOE_ROUTER_ONE_CUH
#define BATON_KERNELS_CUDA_MOE_ROUTER_ONE_CUH

#include "kernels/cuda/moe/moe_route_few.cuh"
#include "kernels/cuda/moe/moe_router_call.cuh"

/* The thread's quads, all of them loaded at once. */
template <int AHEAD> struct router_one_quads {
    float4 w[AHEAD], x[AHEAD];
};

template <int AHEAD> static __device__ __forceinline__ unsigned one_k(unsigned first, int a)
{
    return (first + (unsigned)a * F32_SPLIT_K_WARPS * F32_LANES) * RMS_QUAD;
}

/* Loads those of W and, for the four that have the same of the row, the norm's weights. norm: by
 * quad. */
template <int AHEAD>
static __device__ __forceinline__ void load_one(const router_call &c, router_one_quads<AHEAD> *q,
                                                float4 *norm, unsigned first)
{
    const unsigned n = (unsigned)c.n_in, across = threadIdx.x % WARP / F32_LANES;
    const int32_t column = min((int32_t)(blockIdx.x * ROUTER_ACROSS + across),
                               c.route.n_experts - 1);
    const float *row = (const float *)(const void *)(c.w + (size_t)column * c.row_bytes);
    const float4 zero = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        const unsigned k = one_k<AHEAD>(first, a);
        q->w[a] = k < n ? __ldg((const float4 *)(const void *)(row + k)) : zero;
    }
#pragma unroll
    for (int a = (int)across; a < AHEAD; a += ROUTER_ACROSS) {
        const unsigned k = one_k<AHEAD>(first, a);
        norm[k / RMS_QUAD] = k < n ? __ldg((const float4 *)(const void *)(c.norm + k)) : zero;
    }
    __syncwarp();
}

/* Normalises x in place and multiplies. */
template <int AHEAD>
static __device__ __forceinline__ float multiply_one(const router_call &c,
                                                     router_one_quads<AHEAD> *q, const float4 *norm,
                                                     float factor, unsigned first)
{
    float sum = 0;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        const unsigned k = one_k<AHEAD>(first, a);
        if (k >= (unsigned)c.n_in) break;
        q->x[a] = rms_apply(q->x[a], norm[k / RMS_QUAD], factor);
        sum = multiply_quad(sum, q->w[a], q->x[a]);
    }
    return sum;
}

/* Each block stores its part of h. */
template <int AHEAD>
static __device__ __forceinline__ void store_one(const router_call &c,
                                                 const router_one_quads<AHEAD> &q, unsigned first)
{
    if (threadIdx.x % WARP >= F32_LANES) return;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        const unsigned k = one_k<AHEAD>(first, a);
        const unsigned step = threadIdx.x / WARP + (unsigned)a * F32_SPLIT_K_WARPS;
        if (k < (unsigned)c.n_in && step - blockIdx.x * c.h_steps < c.h_steps)
            *(float4 *)(void *)(c.h + k) = q.x[a];
    }
}

/* The row's sum of a thread, which has the same k's of x, of the norm's weights and of W, and its
 * row in q->x. Its part of what does not depend on the kernel before is loaded while that ends. Not
 * real: a rehearsal, with a row of zeros. */
template <int AHEAD>
static __device__ __forceinline__ float router_one_sum(const router_call &c, bool is_real,
                                                       router_one_quads<AHEAD> *q, unsigned first)
{
    enum { SQUARES = AHEAD * F32_SPLIT_K_WARPS * F32_STEP / RMS_STEP };
    static_assert(SQUARES * RMS_STEP == AHEAD * F32_SPLIT_K_WARPS * F32_STEP, "all of a row");
    __shared__ float warps[ROUTER_WARPS]; /* of which RMS_WARPS count */
    __shared__ float4 norm[AHEAD * F32_SPLIT_K_WARPS * F32_LANES];
    const unsigned n = is_real ? (unsigned)c.n_in : 0;
    float4 v[SQUARES];
    if (is_real) {
        load_one<AHEAD>(c, q, norm, first);
        prefetch_bias(c);
        grid_dependency_sync();
    }
    rms_load<true, SQUARES>(v, c.x, threadIdx.x * RMS_QUAD, threadIdx.x < RMS_THREADS ? n : 0);
#pragma unroll
    for (int a = 0; a < AHEAD; a++) q->x[a] = rms_quad<true>(c.x, one_k<AHEAD>(first, a), n);
    const float squares = warp_sum(rms_squares<SQUARES>(0.0f, v));
    if (lane_number() == 0) warps[threadIdx.x / WARP] = squares;
    if (is_real) __syncthreads();
    const float factor = rms_factor(warps, (unsigned)c.n_in, c.eps);
    return multiply_one<AHEAD>(c, q, norm, factor, first);
}

/* Adds lanes, then warps, and stores the block's logits, by the first warp. */
static __device__ __forceinline__ void store_one_logits(const router_call &c, bool is_real,
                                                        float sum)
{
    __shared__ float part[F32_SPLIT_K_WARPS][ROUTER_ACROSS];
    const int lane = lane_number(), at = lane % ROUTER_ACROSS,
              column = (int)blockIdx.x * ROUTER_ACROSS + at;
    sum = add_lanes(sum);
    if (lane % F32_LANES == 0) part[threadIdx.x / WARP][lane / F32_LANES] = sum;
    if (is_real) __syncthreads();
    if (is_real && warp_number() > 0) return;
    sum = part[0][at];
#pragma unroll
    for (int k = 1; k < F32_SPLIT_K_WARPS; k++) sum = __fadd_rn(sum, part[k][at]);
    /* as a product without bias adds 0 */
    if (is_real && lane == at && column < c.route.n_experts)
        c.route.logits[column] = __fadd_rn(sum, 0.0f);
}

/* One row by a matrix whose k warps split. FEW: is_route_of_few; then one warp per block stores the
 * logits, and that of the last block routes. h is stored meanwhile: nobody waits for it. */
template <int AHEAD, bool FEW>
static __global__ void __launch_bounds__(ROUTER_THREADS, AHEAD <= 4 ? 2 : 1)
    router_one_kernel(const __grid_constant__ router_call c)
{
    const unsigned first = threadIdx.x / WARP * F32_LANES + threadIdx.x % F32_LANES;
    unsigned steps = FEW ? few_rehearsal() : 0;
    router_one_quads<AHEAD> q = {};
#pragma unroll 1
    for (;;) {                                      /* of each step there is one copy */
        steps = __shfl_sync(0xffffffffu, steps, 0); /* a warp's, which the compiler sees */
        if (FEW && steps & FEW_ROUTE) few_route_one(c.route, c.sort, steps);
        if (FEW && steps == FEW_ROUTE) return;
        const bool is_real = !(FEW && steps == FEW_LOGITS);
        store_one_logits(c, is_real, router_one_sum<AHEAD>(c, is_real, &q, first));
        steps = 0;
        if (!is_real) continue;
        if (!FEW) break;
        unsigned before = 0;
        __syncwarp(); /* the warp's logits */
        if (threadIdx.x == 0) before = atomic_inc_acq_rel(c.arrived, gridDim.x - 1);
        store_one<AHEAD>(c, q, first);
        if (warp_number() > 0) return;
        if (__shfl_sync(0xffffffffu, before, 0) != gridDim.x - 1) return;
        steps = FEW_ROUTE;
    }
    const bool is_last = is_last_block(c);
    store_one<AHEAD>(c, q, first);
    const router_rows rows = { 0, 1 };
    if (is_last) route_rows(c.route, c.sort, rows, (float *)(void *)shared_memory());
}

#endif
