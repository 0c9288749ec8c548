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
