/* kv_rows_kernels.h - the loops of kv_rows.h, compiled once for every x86-64 (kv_rows.c) and once
 * with the registers of AVX2 (kv_rows_avx2.c): attention dequantises every key and value.
 * No operation is contracted, so both give the same bits. Thread: any. */
#ifndef BATON_KERNELS_KV_ROWS_KERNELS_H
#define BATON_KERNELS_KV_ROWS_KERNELS_H

#include <stddef.h>

#include "kernels/float_bits.h"

struct kv_row_kernels {
    int32_t (*absmax_bits)(const float *x, size_t n); /* magnitude, as bits */
    void (*to_i8)(const float *x, float s, uint8_t *q, size_t n);
    void (*to_e4m3)(const float *x, float s, uint8_t *q, size_t n);
    void (*from_i8)(const uint8_t *q, float s, float *x, size_t n);
    void (*from_e4m3)(const uint8_t *q, float s, float *x, size_t n);
    void (*from_f16)(const char *h, float *x, size_t n);
};

extern const struct kv_row_kernels kv_row_kernels_avx2;

#define KV_I8_MAX   127.0f
#define KV_E4M3_MAX 448.0f

/* Magnitudes compare as their bit patterns do; those of infinity and NaN are above all others.
 * Signed: vector units before AVX-512 compare no other way. */
static inline int32_t kv_absmax_bits(const float *x, size_t n)
{
    int32_t top = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t bits = (int32_t)(bits_of_float(x[i]) & 0x7fffffff);
        top = bits > top ? bits : top;
    }
    return top;
}

/* A subnormal scale may be rounded so far that |x| / s exceeds what the type has. */
static inline float kv_divided(float x, float s, float largest)
{
    float r = x / s;
    return r > largest ? largest : r < -largest ? -largest : r;
}

/* Adding and taking away 1.5 * 2^23 rounds a float of less than 2^22 to the nearest integer, halves
 * to even (IEEE 754 addition): unlike a call of rintf it leaves the loop to the vectoriser. */
static inline void kv_to_i8(const float *x, float s, uint8_t *q, size_t n)
{
    const float round_to_integer = 12582912.0f;
    for (size_t i = 0; i < n; i++)
        q[i] = (uint8_t)(int8_t)(int32_t)((kv_divided(x[i], s, KV_I8_MAX) + round_to_integer) -
                                          round_to_integer);
}

static inline void kv_to_e4m3(const float *x, float s, uint8_t *q, size_t n)
{
    for (size_t i = 0; i < n; i++) q[i] = float_to_f8(kv_divided(x[i], s, KV_E4M3_MAX));
}

static inline void kv_from_i8(const uint8_t *q, float s, float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = (float)(int8_t)q[i] * s;
}

/* As float_from_f8, but no operand is a subnormal f32, for which CPUs take a hundred
 * times as long: the codes below 8 are multiples of 2^-9. */
static inline float kv_e4m3(uint8_t b)
{
    int32_t magnitude = b & 0x7f, is_small = -(magnitude < 8), is_nan = -(magnitude == 0x7f);
    uint32_t normal = (uint32_t)(magnitude + (120 << 3)) << 20,
             small = bits_of_float((float)magnitude * 0x1p-9f);
    uint32_t bits = (small & (uint32_t)is_small) | (normal & (uint32_t)~is_small);
    return float_of_bits((bits & (uint32_t)~is_nan) | (0x7fc00000 & (uint32_t)is_nan) |
                         (uint32_t)(b & 0x80) << 24);
}

static inline void kv_from_e4m3(const uint8_t *q, float s, float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) x[i] = kv_e4m3(q[i]) * s;
}

static inline void kv_from_f16(const char *h, float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t bits;
        memcpy(&bits, h + 2 * i, sizeof bits);
        x[i] = float_from_f16(bits);
    }
}

#define KV_ROW_KERNELS                                                                             \
    {                                                                                              \
        .absmax_bits = kv_absmax_bits, .to_i8 = kv_to_i8, .to_e4m3 = kv_to_e4m3,                   \
        .from_i8 = kv_from_i8, .from_e4m3 = kv_from_e4m3, .from_f16 = kv_from_f16                  \
    }

#endif
