/* quantize.c - the rounding of --quantization, one channel or block at a time. Loops have no branches: compilers make vectors of them.
 * Thread: any. */
#include "kernels/quantize.h"

#include <math.h>
#include <string.h>

#include "kernels/float_bits.h"

static const char *const NAMES[] = {
    [QUANTIZE_NONE] = "none", [QUANTIZE_WINT8] = "wint8", [QUANTIZE_WINT4] = "wint4", [QUANTIZE_BLOCK_FP8] = "block_wise_fp8"
};

/* The largest magnitude as bits, which order as magnitudes do: infinity and then NaNs are above all numbers. */
static uint32_t largest_bits(const float *w, size_t n, uint32_t largest)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = bits_of_float(w[i]) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* To the nearest whole number, halves away from zero: the fraction of a magnitude is exact, so nothing is rounded on the way. */
static inline int8_t round_away(float x)
{
    float   magnitude = float_of_bits(bits_of_float(x) & 0x7fffffff);
    int32_t whole = (int32_t)magnitude, sign = -(x < 0);
    whole += magnitude - (float)whole >= 0.5f;
    return (int8_t)((whole ^ sign) - sign);
}

float quantize_channel(const float *w, size_t n, int limit, int8_t *q)
{
    float bound = (float)limit, a = float_of_bits(largest_bits(w, n, 0));
    if (a == 0 || !isfinite(a)) {
        memset(q, 0, n);
        return a == 0 ? 0 : NAN;
    }
    for (size_t i = 0; i < n; i++) q[i] = round_away(w[i] / a * bound);
    return float_from_bf16(float_to_bf16(a / bound));
}

float quantize_f8_block(const float *w, size_t w_stride, size_t n_rows, size_t n_cols, uint8_t *q, size_t q_stride)
{
    uint32_t largest = 0;
    for (size_t i = 0; i < n_rows; i++) largest = largest_bits(w + i * w_stride, n_cols, largest);
    float a = float_of_bits(largest);
    a = a < 1e-4f ? 1e-4f : a; /* a NaN is no less than anything: it stays */
    float factor = 448.0f / a;
    for (size_t i = 0; i < n_rows; i++)
        for (size_t k = 0; k < n_cols; k++) q[i * q_stride + k] = float_to_f8(w[i * w_stride + k] * factor);
    return a / 448.0f;
}

enum status quantize_from_name(const char *name, enum quantize *out, struct err *err)
{
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (strcmp(name, NAMES[i]) == 0 || (i == QUANTIZE_NONE && !*name)) {
            *out = (enum quantize)i;
            return OK;
        }
    return err_field(err, ERR_INVALID, "quantization", "there is no quantization \"%s\"; there are none, wint8, wint4 and block_wise_fp8", name);
}

const char *quantize_name(enum quantize q) { return NAMES[q]; }
