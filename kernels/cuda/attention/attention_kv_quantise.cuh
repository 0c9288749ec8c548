/* attention_kv_quantise.cuh - rows as pools of types with scales keep them (kernels/kv_rows.h), bit
 * for bit. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_KV_QUANTISE_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_KV_QUANTISE_CUH

#include "kernels/cuda/attention/attention_kv_types.cuh"

/* Quantises x / scale to one byte, bit for bit as kv_rows.c; scale > 0. */
template <enum dtype T> static __device__ __forceinline__ unsigned quantised(float x, float scale)
{
    constexpr float LARGEST = kv_dtype_max<T>();
    const float r = fminf(fmaxf(__fdiv_rn(x, scale), -LARGEST), LARGEST);
    if constexpr (T == DTYPE_I8) return (unsigned)__float2int_rn(r) & 0xffu;
    else return float_to_e4m3(r);
}

/* The scale of a row whose largest magnitude has these bits, which compare as the numbers do:
 * infinity and NaN are above all others. */
template <enum dtype T> static __device__ __forceinline__ float scale_for(unsigned top)
{
    return top < 0x7f800000u ? __fdiv_rn(__uint_as_float(top), kv_dtype_max<T>())
                             : __uint_as_float(0x7fc00000u);
}

/* The largest of the warp. */
static __device__ __forceinline__ unsigned warp_top(unsigned x)
{
    for (int step = WARP / 2; step > 0; step /= 2)
        x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

#endif
