/* float_bits.h - conversions between f32 and smaller floats without branches and calls, so that
 * loops over them become vector code. Rounding is to nearest even. dtype.h has some
 * as functions. Thread: any. */
#ifndef BATON_KERNELS_FLOAT_BITS_H
#define BATON_KERNELS_FLOAT_BITS_H

#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t bits_of_float(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static inline float float_from_bf16(uint16_t h) { return float_of_bits((uint32_t)h << 16); }

/* The bits of a small float shifted to f32's place are that value times a power of two, subnormals
 * included: one exact product puts it right. Infinities and NaNs (then quiet, as hardware makes
 * them) get their exponent by hand. */
static inline float float_from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    uint32_t bits = bits_of_float(float_of_bits(magnitude << 13) * 0x1p112f);
    bits |= magnitude >= 0x7c00 ? 0x7f800000 : 0;
    bits |= magnitude > 0x7c00 ? 0x400000 : 0;
    return float_of_bits(sign | bits);
}

static inline float float_from_f8(uint8_t b)
{
    uint32_t sign = (uint32_t)(b & 0x80) << 24, magnitude = b & 0x7f;
    uint32_t bits = bits_of_float(float_of_bits(magnitude << 20) * 0x1p120f);
    return float_of_bits(sign | (magnitude == 0x7f ? 0x7fc00000 : bits));
}

static inline uint16_t float_to_bf16(float f)
{
    uint32_t b = bits_of_float(f), rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    /* a NaN stays one */
    return (uint16_t)((b & 0x7fffffff) > 0x7f800000 ? b >> 16 | 0x40 : rounded);
}

/* Beyond 448 becomes 448 of the same sign, NaN stays NaN. */
static inline uint8_t float_to_f8(float f)
{
    /* signed: vector units before AVX-512 compare no other way */
    int32_t b = (int32_t)bits_of_float(f), magnitude = b & 0x7fffffff;
    /* Below 2^-6: adding 2^14 makes the f32 adder round to a multiple of 2^-9, to nearest even. */
    int32_t small = (int32_t)bits_of_float(float_of_bits((uint32_t)magnitude) + 0x1p14f) -
                    0x46800000;
    int32_t large = (int32_t)(((uint32_t)magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) -
                    (120 << 3);
    /* Masks, not choices: a compiler would put the sum above behind a branch. */
    int32_t is_small = -(magnitude < 0x3c800000), is_over = -(magnitude >= 0x43e00000),
            is_nan = -(magnitude > 0x7f800000);
    /* 448 and more: 0x7e */
    int32_t code = (((small & is_small) | (large & ~is_small)) & ~is_over) | (0x7e & is_over) |
                   (1 & is_nan);
    return (uint8_t)(code | (b >> 24 & 0x80));
}

#endif
