/* kv_rows.c - rows of KV from f32 and back, in loops that the compiler turns into vectors. See kv_rows.h. */
#include "kernels/kv_rows.h"

#include <math.h>
#include <string.h>

#include "kernels/float_bits.h"
#include "shared/base/assert.h"

bool kv_rows_known(enum dtype t) { return t == DTYPE_F32 || t == DTYPE_F16 || t == DTYPE_BF16 || kv_rows_scaled(t); }

bool kv_rows_scaled(enum dtype t) { return t == DTYPE_I8 || t == DTYPE_F8_E4M3; }

size_t kv_rows_bytes(enum dtype t, size_t n) { return t == DTYPE_I8 ? n : dtype_row_bytes(t, n); }

/* ---- scales ---- */

/* max|x| / largest; NaN where an element is not finite. Magnitudes compare as their bit patterns do; those of infinity and NaN are above all others. */
static float scale_of(const float *x, size_t n, float largest)
{
    uint32_t top = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = bits_of_float(x[i]) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float max = float_of_bits(top);
    return isfinite(max) ? max / largest : NAN;
}

/* A subnormal scale may be rounded so far that |x| / s exceeds what the type has. */
static float divided(float x, float s, float largest)
{
    float r = x / s;
    return r > largest ? largest : r < -largest ? -largest : r;
}

/* Adding and taking away 1.5 * 2^23 rounds a float of less than 2^22 to the nearest integer, halves to even (IEEE 754 addition): unlike a
 * call of rintf it leaves the loop to the vectoriser. */
static const float ROUND_TO_INTEGER = 12582912.0f;
static const float I8_MAX = 127.0f, E4M3_MAX = 448.0f;

static void store_scaled(enum dtype t, const float *x, uint8_t *q, void *scale, size_t n)
{
    const float largest = t == DTYPE_I8 ? I8_MAX : E4M3_MAX, s = scale_of(x, n, largest);
    memcpy(scale, &s, sizeof s);
    if (!(s > 0)) memset(q, 0, n); /* all zero, too small for a scale, or not finite */
    else if (t == DTYPE_I8)
        for (size_t i = 0; i < n; i++) q[i] = (uint8_t)(int8_t)(int32_t)((divided(x[i], s, largest) + ROUND_TO_INTEGER) - ROUND_TO_INTEGER);
    else
        for (size_t i = 0; i < n; i++) q[i] = float_to_f8(divided(x[i], s, largest));
}

/* ---- rows ---- */

void kv_row_store(enum dtype t, const float *x, void *values, void *scale, size_t n)
{
    char *to = values;
    ASSERT(kv_rows_known(t));
    if (kv_rows_scaled(t)) {
        store_scaled(t, x, values, scale, n);
        return;
    }
    if (t == DTYPE_F32) {
        memcpy(to, x, n * sizeof *x);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint16_t h = t == DTYPE_BF16 ? float_to_bf16(x[i]) : dtype_f32_to_f16(x[i]);
        memcpy(to + 2 * i, &h, sizeof h);
    }
}

void kv_row_load(enum dtype t, const void *values, const void *scale, float *x, size_t n)
{
    float s = 1;
    if (!kv_rows_scaled(t)) {
        dtype_to_f32(t, values, x, n);
        return;
    }
    memcpy(&s, scale, sizeof s);
    const int8_t *q = values;
    if (t == DTYPE_I8)
        for (size_t i = 0; i < n; i++) x[i] = (float)q[i] * s;
    else
        for (size_t i = 0; i < n; i++) x[i] = float_from_f8((uint8_t)q[i]) * s;
}
