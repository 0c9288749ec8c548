/* rms_norm.cuh - the arithmetic of an rms_norm of a row: every kernel that computes one gives the
 * same bits. RMS_THREADS threads sum the squares of a row, each of every RMS_THREADS-th element in
 * ascending order; then a warp's lanes as warp_sum does, then warps in ascending order.
 * Thread: device. */
#ifndef BATON_KERNELS_CUDA_RMS_NORM_CUH
#define BATON_KERNELS_CUDA_RMS_NORM_CUH

#include "kernels/cuda/dtype_convert.cuh"

enum { RMS_THREADS = 256, RMS_WARPS = RMS_THREADS / WARP };

/* The sum of a thread's warp. thread: its number among the row's. */
static __device__ __forceinline__ float rms_warp_squares(const float *x, size_t n, unsigned thread)
{
    float squares = 0;
#pragma unroll 8
    for (size_t i = thread; i < n; i += RMS_THREADS) squares = fmaf(x[i], x[i], squares);
    return warp_sum(squares);
}

/* What elements are multiplied by, before their weights. warps [RMS_WARPS]: their squares. */
static __device__ __forceinline__ float rms_factor(const float *warps, size_t n, float eps)
{
    float squares = 0;
    for (int i = 0; i < RMS_WARPS; i++) squares += warps[i];
    return 1.0f / sqrtf(squares / (float)n + eps);
}

static __device__ __forceinline__ float rms_element(float x, float weight, float factor)
{
    return weight * (x * factor);
}

#endif
