/* dtype_convert.cuh - bf16, f16 and e4m3 as bits in device memory, and sums over a warp and a
 * block.
 * Thread: device. */
#ifndef BATON_KERNELS_CUDA_DTYPE_CONVERT_CUH
#define BATON_KERNELS_CUDA_DTYPE_CONVERT_CUH

#include "kernels/cuda/launch.cuh"

static __device__ __forceinline__ float bf16_to_float(uint16_t bits)
{
    return __uint_as_float((unsigned)bits << 16);
}

/* Rounds to nearest even; a NaN stays NaN. Two in a register, the first in the low half. */
static __device__ __forceinline__ unsigned pack_bf16(float low, float high)
{
    return round_bf16x2(low, high);
}
static __device__ __forceinline__ uint16_t float_to_bf16(float x)
{
    return (uint16_t)round_bf16x2(x, 0.0f);
}
static __device__ __forceinline__ float bf16_low(unsigned pair)
{
    return __uint_as_float(pair << 16);
}
static __device__ __forceinline__ float bf16_high(unsigned pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

/* Saturates to f16's largest number, 65504; infinities and NaNs are kept. */
static __device__ __forceinline__ float keep_in_f16(float x)
{
    const float size = fabsf(x);
    return size > 65504.0f && size < INFINITY ? copysignf(65504.0f, x) : x;
}
static __device__ __forceinline__ unsigned pack_f16(float low, float high)
{
    return round_f16x2(keep_in_f16(low), keep_in_f16(high));
}
static __device__ __forceinline__ uint16_t float_to_f16(float x)
{
    return (uint16_t)pack_f16(x, 0.0f);
}

/* e4m3 "fn": 0x7f and 0xff are NaN. */
static __device__ __forceinline__ float e4m3_to_float(uint8_t bits)
{
    const unsigned sign = (unsigned)(bits & 0x80) << 24, exponent = bits >> 3 & 15,
                   mantissa = bits & 7;
    if ((bits & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000u | sign);
    if (exponent == 0) return __uint_as_float(sign | __float_as_uint((float)mantissa * 0x1p-9f));
    return __uint_as_float(sign | (exponent + 120) << 23 | mantissa << 20);
}

/* As kernels/float_bits.h: to nearest even, saturates at 448, a NaN stays NaN. Uses integers,
 * because GPUs before 8.9 have no instruction. */
static __device__ __forceinline__ unsigned float_to_e4m3(float x)
{
    const unsigned bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu,
                   sign = bits >> 24 & 0x80u;
    if (magnitude > 0x7f800000u) return sign | 0x7f;
    if (magnitude >= 0x43e00000u) return sign | 0x7e;
    if (magnitude < 0x3c800000u)
        return sign |
               (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) - 0x46800000u);
    return sign | (((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3));
}

/* With an accurate exponential: the inexact __expf is no faster next to sums of a thousand products
 * or more. */
static __device__ __forceinline__ float silu(float x)
{
    return __fdiv_rn(x, __fadd_rn(1.0f, expf(-x)));
}

/* sum and the squares of v, in ascending order. */
static __device__ __forceinline__ float add_squares(float sum, const float4 &v)
{
    sum = __fmaf_rn(v.x, v.x, sum);
    sum = __fmaf_rn(v.y, v.y, sum);
    sum = __fmaf_rn(v.z, v.z, sum);
    return __fmaf_rn(v.w, v.w, sum);
}

/* Sums over a warp, in a fixed order, in every lane. */
static __device__ __forceinline__ float warp_sum(float x)
{
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
static __device__ __forceinline__ float warp_max(float x)
{
    for (int step = WARP / 2; step > 0; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

/* Sums over a block of whole warps (blockDim.x threads), in a fixed order, in every thread. `room`:
 * a float per warp in shared memory; the next call may reuse it. */
static __device__ __forceinline__ float block_sum(float x, float *room)
{
    const unsigned n_warps = blockDim.x / WARP, warp = threadIdx.x / WARP;
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) room[warp] = x;
    __syncthreads();
    float all = 0;
    for (unsigned i = 0; i < n_warps; i++) all += room[i];
    __syncthreads();
    return all;
}

#endif
