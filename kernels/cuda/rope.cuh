/* rope.cuh - a head's norm and rotation (struct rope_args) by a warp: lanes take every 32nd pair,
 * and every 32nd element of what is not rotated. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ROPE_CUH
#define BATON_KERNELS_CUDA_ROPE_CUH

#include "kernels/cuda/dtype_convert.cuh"
#include "kernels/kernels.h"

static __device__ __forceinline__ float head_factor(const float *x, size_t dim, float eps)
{
    float squares = 0;
    for (size_t i = threadIdx.x % WARP; i < dim; i += WARP) squares = fmaf(x[i], x[i], squares);
    return 1.0f / sqrtf(warp_sum(squares) / (float)dim + eps);
}

/* Head x of list h, whose row is at position pos. Other lanes than the writing ones may read it
 * after a __syncwarp. */
static __device__ __forceinline__ void rotate_head(const rope_args &a, const rope_heads &h,
                                                   float *x, int pos)
{
    const size_t half = a.rot_dim / 2, lane = threadIdx.x % WARP;
    const float *rotations = a.cos_sin + (size_t)pos * half * 2;
    const float factor = h.norm ? head_factor(x, h.head_dim, a.norm_eps) : 1.0f;
    for (size_t pair = lane; pair < half; pair += WARP) {
        const size_t i0 = a.interleaved ? 2 * pair : pair,
                     i1 = a.interleaved ? 2 * pair + 1 : pair + half;
        const float x0 = h.norm ? h.norm[i0] * (x[i0] * factor) : x[i0],
                    x1 = h.norm ? h.norm[i1] * (x[i1] * factor) : x[i1];
        const float *rotation = rotations + 2 * pair;
        x[i0] = x0 * rotation[0] - x1 * rotation[1];
        x[i1] = x1 * rotation[0] + x0 * rotation[1];
    }
    for (size_t i = 2 * half + lane; h.norm && i < h.head_dim; i += WARP)
        x[i] = h.norm[i] * (x[i] * factor);
}

#endif
