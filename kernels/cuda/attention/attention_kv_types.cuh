/* attention_kv_types.cuh - elements of a pool's types (kernels/kv_rows.h) in registers: converted
 * to f32, to what tensor cores multiply, and multiplied.
 *
 * Tensor cores take bf16, and f16 if the pool is f16; int8 and e4m3 convert exactly to bf16. A
 * row's scale multiplies scores or weights instead. e4m3's NaN, which kv_row_store never writes, is
 * NaN in f32 and 480 in bf16. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_KV_TYPES_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_KV_TYPES_CUH

#include "kernels/cuda/gemm/gemm_upconvert.cuh"
#include "kernels/dtype.h"

enum { CHUNK = 8 }; /* elements that a lane takes at a time: 16 bytes of bf16 */

/* What the compiler knows of a type. */
template <enum dtype T> struct kv_traits {
    static constexpr bool SCALED = T == DTYPE_I8 || T == DTYPE_F8_E4M3;
    static constexpr int BYTES = T == DTYPE_F32 ? 4 : SCALED ? 1 : 2;
};
template <int BYTES> struct bits_of {
    using type = uint8_t;
};
template <> struct bits_of<2> {
    using type = uint16_t;
};
template <> struct bits_of<4> {
    using type = float;
};

/* The largest number of a type with scales that kv_row_store makes. */
template <enum dtype T> static constexpr __host__ __device__ float kv_dtype_max()
{
    return T == DTYPE_I8 ? 127.0f : 448.0f;
}

/* ---- to f32 ---- */

/* int8 bytes with flipped sign count from -128; they become the last mantissa bits of 2^23. */
static __device__ __forceinline__ void int8_to_floats(float to[4], unsigned v)
{
    const unsigned u = v ^ 0x80808080u;
    UNROLL for (unsigned i = 0; i < 4; i++)
        to[i] = __uint_as_float(__byte_perm(u, 0x4b000000u, 0x7650u | i)) - 8388736.0f;
}

/* The N-th byte: as e4m3_pair of gemm_upconvert.cuh, in f32's place. */
template <int N> static __device__ __forceinline__ float e4m3_byte(unsigned v)
{
    const float x = __uint_as_float(permute_bytes<0x8044u | N << 8 | N << 12>(v, 0) << 4 &
                                    0x87f00000u) *
                    0x1p120f;
    return fabsf(x) > 448.0f ? __uint_as_float(0x7fc00000u) : x;
}

template <enum dtype T> static __device__ __forceinline__ float load_1(const char *from)
{
    if constexpr (T == DTYPE_F32) return *(const float *)(const void *)from;
    else if constexpr (T == DTYPE_BF16) return bf16_to_float(*(const uint16_t *)(const void *)from);
    else if constexpr (T == DTYPE_F16) return f16_to_float(*(const uint16_t *)(const void *)from);
    else if constexpr (T == DTYPE_I8) return (float)*(const int8_t *)(const void *)from;
    else return e4m3_to_float(*(const uint8_t *)(const void *)from);
}

/* Eight elements that are aligned to as many bytes as they have, 16 at most. */
template <enum dtype T>
static __device__ __forceinline__ void load_8(float to[CHUNK], const char *from)
{
    if constexpr (T == DTYPE_F32) {
        const float4 a = ((const float4 *)(const void *)from)[0],
                     b = ((const float4 *)(const void *)from)[1];
        to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
        to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
    } else if constexpr (kv_traits<T>::SCALED) {
        const uint2 bytes = *(const uint2 *)(const void *)from;
        const unsigned four[2] = { bytes.x, bytes.y };
        UNROLL for (int i = 0; i < 2; i++)
        {
            float *at = to + 4 * i;
            if constexpr (T == DTYPE_I8) int8_to_floats(at, four[i]);
            else
                at[0] = e4m3_byte<0>(four[i]), at[1] = e4m3_byte<1>(four[i]),
                at[2] = e4m3_byte<2>(four[i]), at[3] = e4m3_byte<3>(four[i]);
        }
    } else {
        const uint4 bits = *(const uint4 *)(const void *)from;
        const unsigned pair[4] = { bits.x, bits.y, bits.z, bits.w };
        UNROLL for (int i = 0; i < 4; i++)
        {
            if constexpr (T == DTYPE_F16)
                to[2 * i] = f16_to_float((uint16_t)pair[i]),
                       to[2 * i + 1] = f16_to_float((uint16_t)(pair[i] >> 16));
            else to[2 * i] = bf16_low(pair[i]), to[2 * i + 1] = bf16_high(pair[i]);
        }
    }
}

/* Elements CHUNK * chunk .. of a row of dim; those past its end are 0. WHOLE: rows are whole
 * chunks, and so aligned. */
template <enum dtype T, bool WHOLE>
static __device__ __forceinline__ void load_chunk(float to[CHUNK], const char *row, int chunk,
                                                  int dim)
{
    const char *from =
        (const char *)((const typename bits_of<kv_traits<T>::BYTES>::type *)(const void *)row +
                       chunk * CHUNK);
    if constexpr (WHOLE) load_8<T>(to, from);
    else {
        UNROLL for (int i = 0; i < CHUNK; i++)
            to[i] = chunk * CHUNK + i < dim ? load_1<T>(from + i * kv_traits<T>::BYTES) : 0.0f;
    }
}

/* ---- to tensor cores ---- */

/* Bytes A and B of four, as two bf16. */
template <enum dtype T, int A, int B>
static __device__ __forceinline__ unsigned pair_of_bytes(unsigned v)
{
    if constexpr (T == DTYPE_I8) return int8_pair<A, B>(v);
    else return e4m3_pair<A, B>(v);
}

template <enum dtype T> static __device__ __forceinline__ unsigned pack_query(float low, float high)
{
    if constexpr (T == DTYPE_F16) return pack_f16(low, high);
    else return pack_bf16(low, high);
}

/* Returns what is added to the exponent of attention weights, which are 2^x with x <= 0. f16 has
 * nothing below 2^-24, so there all weights and their sum are 2^15 times as large; the factor
 * cancels in the result. */
template <enum dtype T> static constexpr __device__ float weight_lift()
{
    return T == DTYPE_F16 ? 15.0f : 0.0f;
}
template <enum dtype T>
static __device__ __forceinline__ unsigned pack_weight(float low, float high)
{
    if constexpr (T == DTYPE_F16) return round_f16x2(low, high);
    else return pack_bf16(low, high);
}

template <enum dtype T>
static __device__ __forceinline__ void mma_kv(float d[4], const unsigned a[4], const unsigned b[2])
{
    if constexpr (T == DTYPE_F16) mma_f16(d, a, b);
    else mma_bf16(d, a, b);
}

/* ---- scales ---- */

/* They need not be aligned. */
static __device__ __forceinline__ float load_scale(const char *from)
{
    const unsigned char *b = (const unsigned char *)from;
    if ((uintptr_t)from % sizeof(float) == 0) return *(const float *)(const void *)from;
    return __uint_as_float(b[0] | (unsigned)b[1] << 8 | (unsigned)b[2] << 16 |
                           (unsigned)b[3] << 24);
}
static __device__ __forceinline__ void store_scale(char *to, float scale)
{
    const unsigned bits = __float_as_uint(scale);
    if ((uintptr_t)to % sizeof(float) == 0) *(float *)(void *)to = scale;
    else
        for (int i = 0; i < 4; i++) to[i] = (char)(bits >> 8 * i & 0xff);
}

#endif
