/* moe_router_few.cuh - the router of up to 8 rows a block row, by a matrix whose k warps split, and
 * routes that are is_route_of_few. A thread loads all that it needs of the rows at once; in the
 * last block to arrive a warp routes each row. Thread: device. */
#ifndef BATON_KERNELS_CUDA_MOE_ROUTER_FEW_CUH
#define BATON_KERNELS_CUDA_MOE_ROUTER_FEW_CUH

#include "kernels/cuda/moe/moe_route_few.cuh"
#include "kernels/cuda/moe/moe_router_call.cuh"

enum {
    ROUTER_HALVES = ROUTER_THREADS / RMS_THREADS, /* each has every second row */
    ROUTER_HALF_ROWS = ROUTER_ROWS / ROUTER_HALVES
};

/* Of a row, padded to STRIDE quads: those that a thread normalises, and its steps of W. */
template <int STRIDE> struct router_few_shape {
    enum {
        QUADS = (STRIDE + RMS_THREADS - 1) / RMS_THREADS,
        STEPS = STRIDE / (F32_SPLIT_K_WARPS * F32_LANES)
    };
    static_assert(STEPS * F32_SPLIT_K_WARPS * F32_LANES == STRIDE, "whole steps");
};

/* Adds as warp_sum does, but a quarter of the warp gets the sum of one of the 4 values: the one of
 * its number. */
static __device__ __forceinline__ float warp_sums_of_rows(const float (&v)[ROUTER_HALF_ROWS])
{
    static_assert(ROUTER_HALF_ROWS == 4, "a row a quarter");
    const bool is_upper = threadIdx.x & 16, is_odd = threadIdx.x & 8;
    float low = v[0], high = v[1], other = is_upper ? v[0] : v[2];
    low = (is_upper ? v[2] : v[0]) + __shfl_xor_sync(0xffffffffu, other, 16);
    other = is_upper ? v[1] : v[3];
    high = (is_upper ? v[3] : v[1]) + __shfl_xor_sync(0xffffffffu, other, 16);
    float sum = (is_odd ? high : low) + __shfl_xor_sync(0xffffffffu, is_odd ? low : high, 8);
#pragma unroll
    for (int apart = 4; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    return sum;
}

/* The thread's rows, which are zeros where there are none, and from n_in on. */
template <int QUADS>
static __device__ __forceinline__ void load_few(const router_call &c, const router_rows &rows,
                                                float4 (&x)[ROUTER_HALF_ROWS][QUADS])
{
    const int32_t thread = (int32_t)(threadIdx.x % RMS_THREADS),
                  half = (int32_t)(threadIdx.x / RMS_THREADS), n = c.n_in / RMS_QUAD;
    const float4 *from = (const float4 *)(const void *)c.x +
                         (rows.first + (size_t)half) * (size_t)n + thread;
#pragma unroll
    for (int i = 0; i < ROUTER_HALF_ROWS; i++)
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            x[i][q] = half + i * ROUTER_HALVES < rows.n && thread + q * RMS_THREADS < n
                          ? __ldca(from + i * ROUTER_HALVES * n + q * RMS_THREADS)
                          : make_float4(0, 0, 0, 0);
}

/* Loads the rows and normalises them into h [ROUTER_ROWS][STRIDE]. What pads a row is 0, or NaN as
 * all of the row is. norm [STRIDE], padded with zeros. */
template <int STRIDE>
static __device__ __forceinline__ void normalise_few(const router_call &c, const router_rows &rows,
                                                     const float4 *norm, float4 *h)
{
    enum { QUADS = router_few_shape<STRIDE>::QUADS };
    __shared__ float warps[ROUTER_ROWS][RMS_WARPS];
    const int thread = (int)(threadIdx.x % RMS_THREADS), half = (int)(threadIdx.x / RMS_THREADS),
              lane = lane_number();
    float4 x[ROUTER_HALF_ROWS][QUADS];
    float squares[ROUTER_HALF_ROWS];
    load_few<QUADS>(c, rows, x);
#pragma unroll
    for (int i = 0; i < ROUTER_HALF_ROWS; i++) squares[i] = rms_squares<QUADS>(0.0f, x[i]);
    const float sum = warp_sums_of_rows(squares);
    if (lane % 8 == 0) warps[half + lane / 8 * ROUTER_HALVES][thread / WARP] = sum;
    __syncthreads();
    /* a lane computes the factor of one of the thread's rows */
    const float factors = rms_factor(warps[half + lane % ROUTER_HALF_ROWS * ROUTER_HALVES],
                                     (unsigned)c.n_in, c.eps);
    float4 *to = h + half * STRIDE + thread;
#pragma unroll
    for (int i = 0; i < ROUTER_HALF_ROWS; i++) {
        const float factor = __shfl_sync(0xffffffffu, factors, i);
#pragma unroll
        for (int q = 0; q < QUADS; q++)
            if (thread + q * RMS_THREADS < STRIDE)
                to[i * ROUTER_HALVES * STRIDE + q * RMS_THREADS] = rms_apply(
                    x[i][q], norm[thread + q * RMS_THREADS], factor);
    }
    __syncthreads();
}

/* The sum of a column and one of the rows: of the 8 lanes that have the column each gets the row of
 * its number. Rows in a loop, so that the code is short; two at a time. */
template <int STRIDE>
static __device__ __forceinline__ float multiply_few(
    const float4 (&w)[router_few_shape<STRIDE>::STEPS], const float4 *h)
{
    enum { AT_A_TIME = 2 };
    static_assert((int)ROUTER_ROWS == (int)F32_LANES, "a row a lane");
    const int lane = (int)(threadIdx.x % F32_LANES);
    const float4 *x = h + threadIdx.x / WARP * F32_LANES + lane;
    float mine = 0;
#pragma unroll 1
    for (int r = 0; r < ROUTER_ROWS; r += AT_A_TIME) {
#pragma unroll
        for (int i = 0; i < AT_A_TIME; i++) {
            float sum = 0;
#pragma unroll
            for (int s = 0; s < router_few_shape<STRIDE>::STEPS; s++)
                sum = multiply_quad(sum, w[s], x[i * STRIDE + s * F32_SPLIT_K_WARPS * F32_LANES]);
            sum = add_lanes(sum);
            mine = lane == r + i ? sum : mine;
        }
        x += AT_A_TIME * STRIDE;
    }
    return mine;
}

/* Adds warps and stores the block's columns of logits, by the first warp. part: a lane's row and
 * column, of each warp. */
static __device__ __forceinline__ void store_few_logits(const router_call &c,
                                                        const router_rows &rows,
                                                        const float (*part)[WARP])
{
    const int lane = lane_number(), r = lane % F32_LANES,
              column = (int)blockIdx.x * ROUTER_ACROSS + lane / F32_LANES;
    float sum = part[0][lane];
#pragma unroll
    for (int k = 1; k < F32_SPLIT_K_WARPS; k++) sum = __fadd_rn(sum, part[k][lane]);
    if (r >= rows.n || column >= c.route.n_experts) return;
    /* as a product without bias adds 0 */
    c.route.logits[(rows.first + (size_t)r) * (size_t)c.route.n_experts + (size_t)column] =
        __fadd_rn(sum, 0.0f);
}

/* Each block stores its part of h, by the warps that will not route. */
template <int STRIDE>
static __device__ __forceinline__ void store_few(const router_call &c, const router_rows &rows,
                                                 const float4 *h)
{
    const int r = (int)(threadIdx.x / WARP) - (ROUTER_WARPS - ROUTER_ROWS);
    if (r < 0 || r >= rows.n) return;
    const int32_t n = c.n_in / RMS_QUAD, each = (int32_t)c.h_steps * F32_LANES,
                  first = (int32_t)blockIdx.x * each, end = min(first + each, n);
    float4 *to = (float4 *)(void *)c.h + (rows.first + (size_t)r) * (size_t)n;
#pragma unroll 1
    for (int32_t q = first + lane_number(); q < end; q += WARP) to[q] = h[r * STRIDE + q];
}

/* The thread's quads of W, and the norm's weights. */
template <int STRIDE>
static __device__ __forceinline__ void load_few_weights(
    const router_call &c, float4 (&w)[router_few_shape<STRIDE>::STEPS], float4 *norm)
{
    const int32_t n_steps = router_steps(c.n_in),
                  column = min(
                      (int32_t)(blockIdx.x * ROUTER_ACROSS + threadIdx.x % WARP / F32_LANES),
                      c.route.n_experts - 1);
    const float4 *row = (const float4 *)(const void *)(c.w + (size_t)column * c.row_bytes) +
                        threadIdx.x % F32_LANES;
#pragma unroll
    for (int s = 0; s < router_few_shape<STRIDE>::STEPS; s++) {
        const int32_t step = (int32_t)(threadIdx.x / WARP) + s * F32_SPLIT_K_WARPS;
        w[s] = step < n_steps ? __ldg(row + step * F32_LANES) : make_float4(0, 0, 0, 0);
    }
#pragma unroll 1
    for (int32_t q = (int32_t)threadIdx.x; q < STRIDE; q += ROUTER_THREADS)
        norm[q] = q < c.n_in / RMS_QUAD ? __ldg((const float4 *)(const void *)c.norm + q)
                                        : make_float4(0, 0, 0, 0);
}

/* n_in: at most 4 STRIDE. Shared memory: h [ROUTER_ROWS][STRIDE] and the norm's weights. */
template <int STRIDE>
static __global__ void __launch_bounds__(ROUTER_THREADS, STRIDE <= 512 ? 2 : 1)
    router_few_kernel(const __grid_constant__ router_call c)
{
    __shared__ float part[F32_SPLIT_K_WARPS][WARP];
    __shared__ unsigned before;
    float4 *h = (float4 *)(void *)shared_memory(), *norm = h + ROUTER_ROWS * STRIDE,
           w[router_few_shape<STRIDE>::STEPS];
    router_rows rows = { (size_t)blockIdx.y * ROUTER_ROWS, 0 };
    rows.n = (int32_t)min(c.route.n_rows - rows.first, (size_t)ROUTER_ROWS);
    load_few_weights<STRIDE>(c, w, norm);
    prefetch_bias(c);
    grid_dependency_sync();
    normalise_few<STRIDE>(c, rows, norm, h);
    part[threadIdx.x / WARP][threadIdx.x % WARP] = multiply_few<STRIDE>(w, h);
    __syncthreads();
    if (threadIdx.x < WARP) {
        store_few_logits(c, rows, part);
        __syncwarp();
        if (threadIdx.x == 0) before = atomic_inc_acq_rel(c.arrived + blockIdx.y, gridDim.x - 1);
    }
    store_few<STRIDE>(c, rows, h);
    __syncthreads();
    if (before == gridDim.x - 1) few_route_rows(c.route, c.sort, rows);
}

#endif
