/* gemm_f32.cuh - the order in which f32 products sum: docs/kernels.md. A row's bits depend on it
 * alone, so every kernel of such products keeps it. Thread: device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_F32_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_F32_CUH

#include "kernels/cuda/gemm/gemm_call.cuh"

enum { F32_LANES = 8, F32_QUAD = 4, F32_STEP = F32_LANES * F32_QUAD };
/* most columns, least n_in, and the warps that then split k */
enum { F32_NARROW = 512, F32_LONG = 1024, F32_SPLIT_K_WARPS = 16 };

/* Whether warps split k, too. */
static inline bool f32_splits_k(size_t n_out, size_t n_in)
{
    return n_out <= F32_NARROW && n_in >= F32_LONG;
}

static __device__ __forceinline__ float multiply_quad(float sum, const float4 &w, const float4 &x)
{
    sum = __fmaf_rn(w.x, x.x, sum);
    sum = __fmaf_rn(w.y, x.y, sum);
    sum = __fmaf_rn(w.z, x.z, sum);
    return __fmaf_rn(w.w, x.w, sum);
}

/* Adds over the 8 lanes that split k, in a fixed order; all get the sum. */
static __device__ __forceinline__ float add_lanes(float x)
{
    for (int apart = F32_LANES / 2; apart > 0; apart /= 2)
        x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, apart));
    return x;
}

#endif
