/* moe_router_call.cuh - what the kernels of moe_router.cu have in common. Thread: device. */
#ifndef BATON_KERNELS_CUDA_MOE_ROUTER_CALL_CUH
#define BATON_KERNELS_CUDA_MOE_ROUTER_CALL_CUH

#include "kernels/cuda/gemm/gemm_f32.cuh"
#include "kernels/cuda/moe/moe_route_block.cuh"
#include "kernels/cuda/rms_norm.cuh"

enum {
    ROUTER_THREADS = ROUTE_BLOCK_THREADS,
    ROUTER_WARPS = ROUTE_BLOCK_WARPS,
    ROUTER_ROWS = ROUTE_BLOCK_ROWS,  /* of a row of blocks */
    ROUTER_ACROSS = WARP / F32_LANES /* a warp's columns */
};

struct router_call {
    route_args route;
    moe_sort_args sort; /* rows NULL: not to be sorted here */
    const unsigned char *w;
    size_t row_bytes;
    const float *x, *norm;
    float *h;
    float eps;
    int32_t n_in;
    unsigned *arrived; /* [blocks in y] zero between calls */
    unsigned h_steps;  /* of F32_STEP elements of h, that each block stores of one row */
};

static __host__ __device__ __forceinline__ int32_t router_steps(int32_t n_in)
{
    return (n_in + F32_STEP - 1) / F32_STEP;
}

/* For the block that will route. */
static __device__ __forceinline__ void prefetch_bias(const router_call &c)
{
    if (c.route.bias && threadIdx.x == 0 && (uintptr_t)c.route.bias % 16 == 0)
        prefetch_l2(c.route.bias,
                    (unsigned)c.route.n_experts / RMS_QUAD * (unsigned)sizeof(float4));
}

/* Adds lanes, then warps, and stores the block's columns of logits. */
template <int K_WARPS, int ROWS>
static __device__ __forceinline__ void store_logits(const router_call &c, const router_rows &rows,
                                                    const float *sums)
{
    enum { COLUMNS = ROUTER_WARPS / K_WARPS * ROUTER_ACROSS };
    __shared__ float part[ROUTER_WARPS][ROWS][ROUTER_ACROSS];
    const int warp = (int)(threadIdx.x / WARP), eighth = (int)(threadIdx.x % WARP / F32_LANES);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float sum = add_lanes(sums[r]);
        if (threadIdx.x % F32_LANES == 0) part[warp][r][eighth] = sum;
    }
    __syncthreads();
    static_assert((int)COLUMNS * ROWS <= ROUTER_THREADS, "a thread each");
    const int r = (int)(threadIdx.x / COLUMNS), at = (int)(threadIdx.x % COLUMNS),
              column = (int)blockIdx.x * COLUMNS + at;
    if (r >= rows.n || column >= c.route.n_experts) return;
    const unsigned first = (unsigned)at / ROUTER_ACROSS * K_WARPS, j = (unsigned)at % ROUTER_ACROSS;
    float sum = part[first][r][j];
#pragma unroll
    for (int k = 1; k < K_WARPS; k++) sum = __fadd_rn(sum, part[first + k][r][j]);
    /* as a product without bias adds 0 */
    c.route.logits[(rows.first + (size_t)r) * (size_t)c.route.n_experts + (size_t)column] =
        __fadd_rn(sum, 0.0f);
}

/* Whether all other blocks have stored their logits of these rows. */
static __device__ __forceinline__ bool is_last_block(const router_call &c)
{
    __shared__ unsigned before;
    __syncthreads();
    if (threadIdx.x == 0) before = atomic_inc_acq_rel(c.arrived + blockIdx.y, gridDim.x - 1);
    __syncthreads();
    return before == gridDim.x - 1;
}

#endif
