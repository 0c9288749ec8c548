/* moe_router_one.cuh - the router of one row, by a matrix whose k warps split: what a decode step
 * of one sequence waits for. Thread: device. */
#ifndef BATON_KERNELS_CUDA_MOE_ROUTER_ONE_CUH
#define BATON_KERNELS_CUDA_MOE_ROUTER_ONE_CUH

#include "kernels/cuda/moe/moe_route_few.cuh"
#include "kernels/cuda/moe/moe_router_call.cuh"

/* The thread's quads of the row, all of them loaded at once. */
template <int AHEAD> struct router_one_quads {
    float4 w[AHEAD], norm[AHEAD], x[AHEAD];
};

template <int AHEAD> static __device__ __forceinline__ unsigned one_k(unsigned first, int a)
{
    return (first + (unsigned)a * F32_SPLIT_K_WARPS * F32_LANES) * RMS_QUAD;
}

template <int AHEAD>
static __device__ __forceinline__ void load_one(const router_call &c, router_one_quads<AHEAD> *q,
                                                unsigned first)
{
    const int32_t column = min(
        (int32_t)(blockIdx.x * ROUTER_ACROSS + threadIdx.x % WARP / F32_LANES),
        c.route.n_experts - 1);
    const float *row = (const float *)(const void *)(c.w + (size_t)column * c.row_bytes);
    const float4 zero = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        const unsigned k = one_k<AHEAD>(first, a);
        const bool is_in = k < (unsigned)c.n_in;
        q->w[a] = is_in ? __ldg((const float4 *)(const void *)(row + k)) : zero;
        q->norm[a] = is_in ? __ldg((const float4 *)(const void *)(c.norm + k)) : zero;
    }
}

/* Normalises x in place and multiplies. */
template <int AHEAD>
static __device__ __forceinline__ float multiply_one(const router_call &c,
                                                     router_one_quads<AHEAD> *q, float factor,
                                                     unsigned first)
{
    float sum = 0;
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
        if (one_k<AHEAD>(first, a) >= (unsigned)c.n_in) break;
        q->x[a] = rms_apply(q->x[a], q->norm[a], factor);
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

/* One row by a matrix whose k warps split: a thread has the same k's of x, of the norm's weights
 * and of W in registers, AHEAD quads of each. FEW: is_route_of_few; then one warp per block stores
 * the logits, and that of the last block routes. h is stored meanwhile: nobody waits for it. */
template <int AHEAD, bool FEW>
static __global__ void __launch_bounds__(ROUTER_THREADS, AHEAD <= 4 ? 2 : 1)
    router_one_kernel(const __grid_constant__ router_call c)
{
    enum { K_WARPS = F32_SPLIT_K_WARPS, SQUARES = AHEAD * K_WARPS * F32_STEP / RMS_STEP };
    static_assert(SQUARES * RMS_STEP == AHEAD * K_WARPS * F32_STEP, "all of a row");
    __shared__ float warps[RMS_WARPS];
    const unsigned n = (unsigned)c.n_in, first = threadIdx.x / WARP * F32_LANES +
                                                 threadIdx.x % F32_LANES /* quad of the row */;
    router_one_quads<AHEAD> q;
    float4 v[SQUARES];
    load_one<AHEAD>(c, &q, first);
    prefetch_bias(c);
    grid_dependency_sync();
    if (threadIdx.x < RMS_THREADS) rms_load<true, SQUARES>(v, c.x, threadIdx.x * RMS_QUAD, n);
#pragma unroll
    for (int a = 0; a < AHEAD; a++) q.x[a] = rms_quad<true>(c.x, one_k<AHEAD>(first, a), n);
    if (threadIdx.x < RMS_THREADS) {
        const float squares = warp_sum(rms_squares<SQUARES>(0.0f, v));
        if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = squares;
    }
    __syncthreads();
    const float sum = multiply_one<AHEAD>(c, &q, rms_factor(warps, n, c.eps), first);
    const router_rows rows = { 0, 1 };
    store_logits<K_WARPS, 1>(c, rows, &sum);
    if (FEW) {
        unsigned before = 0;
        __syncwarp(); /* the warp's logits */
        if (threadIdx.x == 0) before = atomic_inc_acq_rel(c.arrived, gridDim.x - 1);
        store_one<AHEAD>(c, q, first);
        if (threadIdx.x >= WARP) return;
        if (__shfl_sync(0xffffffffu, before, 0) == gridDim.x - 1) few_route_one(c.route, c.sort);
    } else {
        const bool is_last = is_last_block(c);
        store_one<AHEAD>(c, q, first);
        if (is_last) route_rows(c.route, c.sort, rows, (float *)(void *)shared_memory());
    }
}

#endif
