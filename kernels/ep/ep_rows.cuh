/* ep_rows.cuh - the transit formats of rows: f32, bf16, and e4m3 with scales, four elements at a
 * time. Thread: device. */
#ifndef BATON_KERNELS_EP_EP_ROWS_CUH
#define BATON_KERNELS_EP_EP_ROWS_CUH

#include "kernels/cuda/dtype_convert.cuh"
#include "kernels/ep/ep_kernels.h"

enum { EP_QUAD = 4 };

static __device__ __forceinline__ int real_rows(const ep_call &c)
{
    return c.n_real ? min(c.n_rows, max(0, *c.n_real - c.first_row)) : c.n_rows;
}

/* Returns elements k .. k + 3, with zeros from n on. */
static __device__ __forceinline__ float4 quad_from(const float *x, size_t k, size_t n)
{
    if ((uintptr_t)(x + k) % 16 == 0 && k + EP_QUAD <= n)
        return *(const float4 *)(const void *)(x + k);
    return make_float4(k < n ? x[k] : 0, k + 1 < n ? x[k + 1] : 0, k + 2 < n ? x[k + 2] : 0,
                       k + 3 < n ? x[k + 3] : 0);
}

/* Returns the common scale of a warp's 128 elements, four per lane. */
static __device__ __forceinline__ float warp_scale(float4 v)
{
    const float top = warp_max(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    return top > 0 ? __fdiv_rn(top, 448.0f) : 1.0f;
}

static __device__ __forceinline__ unsigned quad_to_e4m3(float4 v, float scale)
{
    return float_to_e4m3(__fdiv_rn(v.x, scale)) | float_to_e4m3(__fdiv_rn(v.y, scale)) << 8 |
           float_to_e4m3(__fdiv_rn(v.z, scale)) << 16 | float_to_e4m3(__fdiv_rn(v.w, scale)) << 24;
}

#endif
