/* rope.cuh - a head's norm and rotation (struct rope_args) by a warp: lanes take every 32nd pair,
 * and every 32nd element of what is not rotated. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ROPE_CUH
#define BATON_KERNELS_CUDA_ROPE_CUH

#include "kernels/cuda/dtype_convert.cuh"
#include "kernels/kernels.h"

/* squares: the sum of the head's. */
static __device__ __forceinline__ float head_factor(float squares, size_t dim, float eps)
{
    return 1.0f / sqrtf(squares / (float)dim + eps);
}
/* The sum, in every lane: each adds every 32nd element's in ascending order. */
static __device__ __forceinline__ float head_squares(const float *x, size_t dim)
{
    float squares = 0;
    for (size_t i = threadIdx.x % WARP; i < dim; i += WARP) squares = fmaf(x[i], x[i], squares);
    return warp_sum(squares);
}

/* An element whose pair has `other`; sin: of the pair's second element, negative of its first.
 * Roundings are spelt out, so that all kernels give the same bits. */
static __device__ __forceinline__ float rotated(float x, float other, float cos, float sin)
{
    return __fmaf_rn(x, cos, __fmul_rn(other, sin));
}
static __device__ __forceinline__ float2 rotate_pair(float x0, float x1, const float2 &cos_sin)
{
    return make_float2(rotated(x0, x1, cos_sin.x, -cos_sin.y),
                       rotated(x1, x0, cos_sin.x, cos_sin.y));
}

/* Head x of list h, whose row is at position pos. Other lanes than the writing ones may read it
 * after a __syncwarp. */
static __device__ __forceinline__ void rotate_head(const rope_args &a, const rope_heads &h,
                                                   float *x, int pos)
{
    const size_t half = a.rot_dim / 2, lane = threadIdx.x % WARP;
    const float *rotations = a.cos_sin + (size_t)pos * half * 2;
    const float factor = h.norm ? head_factor(head_squares(x, h.head_dim), h.head_dim, a.norm_eps)
                                : 1.0f;
    for (size_t pair = lane; pair < half; pair += WARP) {
        const size_t i0 = a.interleaved ? 2 * pair : pair,
                     i1 = a.interleaved ? 2 * pair + 1 : pair + half;
        const float x0 = h.norm ? h.norm[i0] * (x[i0] * factor) : x[i0],
                    x1 = h.norm ? h.norm[i1] * (x[i1] * factor) : x[i1];
        const float2 y = rotate_pair(x0, x1,
                                     make_float2(rotations[2 * pair], rotations[2 * pair + 1]));
        x[i0] = y.x, x[i1] = y.y;
    }
    for (size_t i = 2 * half + lane; h.norm && i < h.head_dim; i += WARP)
        x[i] = h.norm[i] * (x[i] * factor);
}

#endif
