/* gemm_upconvert.cuh - converts stored weights to pairs of bf16 in registers (F16: f16), and
 * multiplies them. Every stored number is exact.
 *
 * The trick puts a number's bits into the lowest mantissa bits of bf16: 0x43uu is 128 + u for u <
 * 128, and 256 for u = 128. One fma subtracts the 128. Elements keep their order: the lower k is in
 * the low half. Thread: device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_UPCONVERT_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_UPCONVERT_CUH

#include "kernels/cuda/gemm/gemm_call.cuh"

/* IS_16: elements of 16 bits, which are multiplied as they are. PER_16_BYTES: elements in 16 bytes
 * of a row. */
template <enum gemm_weight_layout F> struct gemm_stored {
    enum {
        IS_16 = F == GEMM_BF16 || F == GEMM_F16, /* gemm_is_16 */
        PER_16_BYTES = IS_16          ? 8
                       : F == GEMM_W4 ? 32
                                      : 16,
        WORDS_PER_8 = IS_16          ? 4
                      : F == GEMM_W4 ? 1
                                     : 2
    };
};

enum : unsigned { BF16_ONES = 0x3f803f80u, BF16_MINUS_ONES = 0xbf80bf80u };

/* Bytes a and b of v's four to the halves' low bytes, 0x43 above them. */
template <int A, int B> static __device__ __forceinline__ unsigned spread_bytes(unsigned v)
{
    return __byte_perm(v, 0x43434343u, 0x4040u | A | B << 8);
}

/* Bytes a and b of four, -128 .. 127: the low seven bits count from 128, the sign takes away 128 or
 * 256. */
template <int A, int B> static __device__ __forceinline__ unsigned int8_pair(unsigned v)
{
    const unsigned s = spread_bytes<A, B>(v);
    return fma_bf16x2(s & 0xff80ff80u, BF16_MINUS_ONES, s & 0xff7fff7fu);
}
static __device__ __forceinline__ void upconvert_int8(unsigned out[4], const unsigned in[2])
{
    for (int i = 0; i < 4; i++)
        out[i] = i % 2 ? int8_pair<2, 3>(in[i / 2]) : int8_pair<0, 1>(in[i / 2]);
}

/* Nibbles in k's order; 136 = 128 + 8 off. */
static __device__ __forceinline__ void upconvert_int4(unsigned out[4], unsigned in)
{
    const unsigned above = in >> 4; /* the odd ones, where the even ones were */
    const unsigned both[4] = { __byte_perm(in, above, 0x0400), __byte_perm(in, above, 0x0501),
                               __byte_perm(in, above, 0x0602), __byte_perm(in, above, 0x0703) };
    for (int i = 0; i < 4; i++)
        out[i] = fma_bf16x2(and_or(both[i], 0x000f000fu, 0x43004300u), BF16_ONES, 0xc308c308u);
}

/* Shifted left by 4, exponent and mantissa of e4m3 are in the fields of bf16, with an exponent that
 * is 120 too small; the product with 2^120 corrects it, for subnormals too. Each byte is first
 * sign-extended to 16 bits, so that the shift also moves the sign into place. NaN becomes 480 with
 * its sign. */
template <int A, int B> static __device__ __forceinline__ unsigned e4m3_pair(unsigned v)
{
    constexpr unsigned SELECTOR = 0x8080u | A | A << 4 | B << 8 | B << 12;
    return fma_bf16x2(permute_bytes<SELECTOR>(v, 0) << 4 & 0x87f087f0u, 0x7b807b80u, 0x80008000u);
}
static __device__ __forceinline__ void upconvert_e4m3_numbers(unsigned out[4], const unsigned in[2])
{
    for (int i = 0; i < 4; i++)
        out[i] = i % 2 ? e4m3_pair<2, 3>(in[i / 2]) : e4m3_pair<0, 1>(in[i / 2]);
}

/* Bytes of 0x80 where e4m3 has its one pattern of NaN. */
static __device__ __forceinline__ unsigned nan_e4m3(unsigned v)
{
    return ((v & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

static __device__ __forceinline__ void upconvert_e4m3(unsigned out[4], const unsigned in[2])
{
    upconvert_e4m3_numbers(out, in);
    const unsigned nan[2] = { nan_e4m3(in[0]), nan_e4m3(in[1]) };
    if (nan[0] | nan[1]) /* which a checkpoint should not have */
        for (int i = 0; i < 4; i++) {
            const unsigned of = i % 2 ? nan[i / 2] >> 16 : nan[i / 2];
            out[i] |= (of & 0x80u ? 0x00007fffu : 0) | (of & 0x8000u ? 0x7fff0000u : 0);
        }
}

/* Eight elements from gemm_stored<F>::WORDS_PER_8 words. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void upconvert_8(unsigned out[4], const unsigned *in)
{
    if (gemm_stored<F>::IS_16) {
        for (int i = 0; i < 4; i++) out[i] = in[i];
    } else if (F == GEMM_W8) {
        upconvert_int8(out, in);
    } else if (F == GEMM_W4) {
        upconvert_int4(out, in[0]);
    } else {
        upconvert_e4m3(out, in);
    }
}

/* d += a b of what upconvert_8 makes and x in the layout's type, m16n8k16. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void mma_of(float d[4], const unsigned a[4], const unsigned b[2])
{
    if (F == GEMM_F16) mma_f16(d, a, b);
    else mma_bf16(d, a, b);
}

#endif
