/* prepare_inputs_rows.cuh - reads rows for the kernels that prepare inputs: four elements at
 * a time, aligned or not, and applies a norm. Thread: device. */
#ifndef BATON_KERNELS_CUDA_INPUTS_PREPARE_INPUTS_ROWS_CUH
#define BATON_KERNELS_CUDA_INPUTS_PREPARE_INPUTS_ROWS_CUH

#include "kernels/cuda/dtype_convert.cuh"

enum { PREPARE_INPUTS_THREADS = 256, QUAD = 4 };

static __device__ __forceinline__ bool is_aligned(const void *p, size_t to)
{
    return (uintptr_t)p % to == 0;
}

/* Elements k .. k + 3, zeros from n on. */
static __device__ __forceinline__ float4 read_quad(const float *x, size_t k, size_t n, bool aligned)
{
    if (aligned && k + QUAD <= n) return *(const float4 *)(x + k);
    float4 v = make_float4(0, 0, 0, 0);
    if (k < n) v.x = x[k];
    if (k + 1 < n) v.y = x[k + 1];
    if (k + 2 < n) v.z = x[k + 2];
    if (k + 3 < n) v.w = x[k + 3];
    return v;
}

/* The same of bf16. */
static __device__ __forceinline__ float4 read_bf16_quad(const uint16_t *x, size_t k, size_t n)
{
    if (k + QUAD <= n && is_aligned(x + k, 8)) {
        const uint2 v = *(const uint2 *)(x + k);
        return make_float4(bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y));
    }
    float4 v = make_float4(0, 0, 0, 0);
    if (k < n) v.x = bf16_to_float(x[k]);
    if (k + 1 < n) v.y = bf16_to_float(x[k + 1]);
    if (k + 2 < n) v.z = bf16_to_float(x[k + 2]);
    if (k + 3 < n) v.w = bf16_to_float(x[k + 3]);
    return v;
}

/* The same of e4m3, of a row with a scale for every 128 elements. */
enum { E4M3_SCALE_STEP = 128 };
static __device__ __forceinline__ float4 read_e4m3_quad(const unsigned char *row,
                                                        const float *scales, size_t k, size_t n)
{
    if (k >= n) return make_float4(0, 0, 0, 0);
    const unsigned v = *(const unsigned *)(row + k); /* rows are filled up */
    const float scale = scales[k / E4M3_SCALE_STEP];
    return make_float4(__fmul_rn(e4m3_to_float((uint8_t)v), scale),
                       k + 1 < n ? __fmul_rn(e4m3_to_float((uint8_t)(v >> 8)), scale) : 0,
                       k + 2 < n ? __fmul_rn(e4m3_to_float((uint8_t)(v >> 16)), scale) : 0,
                       k + 3 < n ? __fmul_rn(e4m3_to_float((uint8_t)(v >> 24)), scale) : 0);
}

static __device__ __forceinline__ float norm_factor(const float *x, size_t n, float eps,
                                                    bool aligned)
{
    __shared__ float room[PREPARE_INPUTS_THREADS / WARP];
    float sum = 0;
    for (size_t k = threadIdx.x * QUAD; k < n; k += PREPARE_INPUTS_THREADS * QUAD) {
        const float4 v = read_quad(x, k, n, aligned);
        sum = add_squares(sum, v);
    }
    return 1.0f / sqrtf(block_sum(sum, room) / (float)n + eps);
}

/* What lies behind the row of x must not come through: an infinite factor would make NaN of the
 * zeros. */
static __device__ __forceinline__ float4 keep_below(const float4 &v, size_t k, size_t n)
{
    return make_float4(k < n ? v.x : 0, k + 1 < n ? v.y : 0, k + 2 < n ? v.z : 0,
                       k + 3 < n ? v.w : 0);
}

/* Elements k .. k + 3 normalised. */
static __device__ __forceinline__ float4 norm_quad(const float4 &v, const float4 &by, float factor,
                                                   size_t k, size_t n)
{
    return keep_below(make_float4(by.x * (v.x * factor), by.y * (v.y * factor),
                                  by.z * (v.z * factor), by.w * (v.w * factor)),
                      k, n);
}

#endif
