/* kv_codec.cuh - elements of KV rows from f32 and back, bit for bit as kernels/kv_rows.c (formulas:
 * float_bits.h, dtype.c).
 *
 * Elements are handled as codes: their bits, in a register each. Only integer and single IEEE
 * operations are used, never the hardware's conversions, which give other NaNs. Thread: device. */
#ifndef BATON_KERNELS_CUDA_KV_KV_CODEC_CUH
#define BATON_KERNELS_CUDA_KV_KV_CODEC_CUH

#include "kernels/cuda/dtype_convert.cuh"
#include "kernels/dtype.h"

enum { KV_QUIET = 0x400000, KV_NAN = 0x7fc00000, KV_INFINITY = 0x7f800000 };

static __device__ __forceinline__ int kv_code_bytes(unsigned t)
{
    return t == DTYPE_F32 ? 4 : t == DTYPE_BF16 || t == DTYPE_F16 ? 2 : 1;
}
static __device__ __forceinline__ bool kv_is_scaled(unsigned t)
{
    return t == DTYPE_I8 || t == DTYPE_F8_E4M3;
}
/* The value that a row's largest magnitude is scaled to. */
static __device__ __forceinline__ float kv_largest(unsigned t)
{
    return t == DTYPE_I8 ? 127.0f : 448.0f;
}

/* ---- to f32 ---- */

static __device__ __forceinline__ float kv_from_f16(unsigned code)
{
    const unsigned magnitude = code & 0x7fff;
    unsigned bits = __float_as_uint(__fmul_rn(__uint_as_float(magnitude << 13), 0x1p112f));
    if (magnitude >= 0x7c00) bits |= KV_INFINITY;
    if (magnitude > 0x7c00) bits |= KV_QUIET;
    return __uint_as_float((code & 0x8000) << 16 | bits);
}

static __device__ __forceinline__ float kv_from_e4m3(unsigned code)
{
    const unsigned magnitude = code & 0x7f;
    const unsigned bits = __float_as_uint(__fmul_rn(__uint_as_float(magnitude << 20), 0x1p120f));
    return __uint_as_float((code & 0x80) << 24 | (magnitude == 0x7f ? (unsigned)KV_NAN : bits));
}

/* `scale`: for types that have one. The GPU's default NaN has other bits than the CPU's. */
static __device__ __forceinline__ float kv_from_code(unsigned t, unsigned code, float scale)
{
    if (t == DTYPE_F32) return __uint_as_float(code);
    if (t == DTYPE_BF16) return __uint_as_float(code << 16);
    if (t == DTYPE_F16) return kv_from_f16(code);
    const float q = t == DTYPE_I8 ? (float)(signed char)code : kv_from_e4m3(code);
    if (scale != scale) return __uint_as_float(__float_as_uint(scale) | KV_QUIET);
    return q != q ? q : __fmul_rn(q, scale);
}

/* ---- from f32 ---- */

static __device__ __forceinline__ unsigned kv_to_bf16(unsigned bits)
{
    return (bits & 0x7fffffff) > KV_INFINITY ? bits >> 16 | 0x40
                                             : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static __device__ __forceinline__ unsigned kv_to_f16(unsigned bits)
{
    const unsigned sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > KV_INFINITY) return sign | 0x7e00 | (magnitude >> 13 & 0x3ff);
    if (magnitude >= 0x477ff000) return sign | 0x7c00;
    if (magnitude < 0x38800000)
        return sign | (__float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0.5f)) - 0x3f000000);
    return sign | (((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112u << 10));
}

/* The scale of a row whose largest magnitude has the bits `top`. */
static __device__ __forceinline__ float kv_scale_of(unsigned t, unsigned top)
{
    return top < KV_INFINITY ? __fdiv_rn(__uint_as_float(top), kv_largest(t))
                             : __uint_as_float(KV_NAN);
}

static __device__ __forceinline__ unsigned kv_to_code(unsigned t, float x, float scale)
{
    const unsigned bits = __float_as_uint(x);
    if (t == DTYPE_F32) return bits;
    if (t == DTYPE_BF16) return kv_to_bf16(bits) & 0xffff;
    if (t == DTYPE_F16) return kv_to_f16(bits);
    if (!(scale > 0)) return 0;
    const float largest = kv_largest(t), r = __fdiv_rn(x, scale),
                q = r > largest    ? largest
                    : r < -largest ? -largest
                                   : r;
    return t == DTYPE_I8 ? (unsigned)__float2int_rn(q) & 0xff : float_to_e4m3(q);
}

#endif
