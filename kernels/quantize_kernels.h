/* quantize_kernels.h - the loops of --quantization, compiled once for every x86-64 (quantize.c) and
 * once with the registers of AVX2 (quantize_avx2.c), which makes them three times as fast. No
 * operation is contracted, so both give the same bits. Thread: any. */
#ifndef BATON_KERNELS_QUANTIZE_KERNELS_H
#define BATON_KERNELS_QUANTIZE_KERNELS_H

#include <stddef.h>

#include "kernels/float_bits.h"

struct quantize_kernels {
    int32_t (*absmax_bits)(const float *w, size_t n, int32_t largest);
    /* q = round(w / a * bound) */
    void (*channel)(const float *w, size_t n, float a, float bound, int8_t *q);
    /* q = e4m3(w * factor) */
    void (*f8)(const float *w, size_t n, float factor, uint8_t *q);
};

extern const struct quantize_kernels quantize_kernels_avx2;

/* The largest magnitude as bits, which order as magnitudes do: infinity and then NaNs are above all
 * numbers. */
static inline int32_t absmax_bits(const float *w, size_t n, int32_t largest)
{
    for (size_t i = 0; i < n; i++) {
        int32_t bits = (int32_t)(bits_of_float(w[i]) & 0x7fffffff);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* To the nearest whole number, halves away from zero: the fraction of a magnitude is exact, so
 * nothing is rounded on the way. */
static inline int8_t round_away(float x)
{
    float magnitude = float_of_bits(bits_of_float(x) & 0x7fffffff);
    int32_t whole = (int32_t)magnitude, sign = -(x < 0);
    whole += magnitude - (float)whole >= 0.5f;
    return (int8_t)((whole ^ sign) - sign);
}

static inline void round_channel(const float *w, size_t n, float a, float bound, int8_t *q)
{
    for (size_t i = 0; i < n; i++) q[i] = round_away(w[i] / a * bound);
}

static inline void round_f8(const float *w, size_t n, float factor, uint8_t *q)
{
    for (size_t i = 0; i < n; i++) q[i] = float_to_f8(w[i] * factor);
}

#define QUANTIZE_KERNELS                                                                           \
    {                                                                                              \
        .absmax_bits = absmax_bits, .channel = round_channel, .f8 = round_f8                       \
    }

#endif
