/* simt_convert.cc - numbers of fewer bits, bit by bit. Thread: any; nothing is kept. */
#include <math.h>
#include <string.h>

#include "tests/simt/include/simt.h"

static uint32_t bits_of(float x)
{
    uint32_t b;
    memcpy(&b, &x, sizeof b);
    return b;
}

static float float_of(uint32_t b)
{
    float x;
    memcpy(&x, &b, sizeof x);
    return x;
}

/* Sign, exponent and mantissa of a small format. In one without infinities, the largest exponent
 * has numbers and one NaN. */
struct format {
    int mantissa_bits, exponent_bits, bias;
    bool has_infinity;
};
static const format F16 = { 10, 5, 15, true }, E4M3 = { 3, 4, 7, false }, E5M2 = { 2, 5, 15, true };

static float upconvert(unsigned bits, const format &f)
{
    unsigned m = bits & ((1u << f.mantissa_bits) - 1),
             e = bits >> f.mantissa_bits & ((1u << f.exponent_bits) - 1);
    float sign = bits >> (f.mantissa_bits + f.exponent_bits) & 1 ? -1.0f : 1.0f;
    unsigned e_max = (1u << f.exponent_bits) - 1, m_max = (1u << f.mantissa_bits) - 1;
    if (e == e_max && f.has_infinity) return m ? NAN : sign * INFINITY;
    if (e == e_max && m == m_max) return NAN;
    if (!e) return sign * ldexpf((float)m, 1 - f.bias - f.mantissa_bits);
    return sign * ldexpf((float)(m | 1u << f.mantissa_bits), (int)e - f.bias - f.mantissa_bits);
}

/* Rounds to nearest even. Beyond the range the result is the largest number (saturate) or
 * infinity. */
static unsigned downconvert(float x, const format &f, bool saturate)
{
    unsigned sign = (bits_of(x) >> 31) << (f.mantissa_bits + f.exponent_bits),
             e_max = (1u << f.exponent_bits) - 1;
    unsigned infinity = e_max << f.mantissa_bits,
             top = f.has_infinity ? infinity - 1 : (infinity | ((1u << f.mantissa_bits) - 2));
    if (isnan(x)) return f.has_infinity ? (infinity | ((1u << f.mantissa_bits) - 1)) : 0x7f;
    float a = fabsf(x);
    int e = a > 0 && isfinite(a) ? ilogbf(a) : 1 - f.bias;
    if (e < 1 - f.bias) e = 1 - f.bias;
    /* steps of the format at this size; a carry moves into the exponent by itself */
    float steps = isfinite(a) ? rintf(ldexpf(a, f.mantissa_bits - e)) : INFINITY;
    float code = steps + (float)((e + f.bias - 1) << f.mantissa_bits);
    if (code > (float)top) return sign | (saturate ? top : infinity);
    return sign | (unsigned)code;
}

/* Every number of a format: products of tiles upconvert millions. */
struct table {
    float *of;
    table(const format &f, unsigned n) : of(new float[n])
    {
        for (unsigned i = 0; i < n; i++) of[i] = upconvert(i, f);
    }
};

float simt_f16_to_float(uint16_t bits)
{
    static const table *all = new table(F16, 0x10000);
    return all->of[bits];
}

float simt_e4m3_to_float(uint8_t bits)
{
    static const table *all = new table(E4M3, 0x100);
    return all->of[bits];
}

float simt_e5m2_to_float(uint8_t bits)
{
    static const table *all = new table(E5M2, 0x100);
    return all->of[bits];
}

uint16_t simt_float_to_f16(float x) { return (uint16_t)downconvert(x, F16, false); }
uint8_t simt_float_to_e4m3(float x) { return (uint8_t)downconvert(x, E4M3, true); }
uint8_t simt_float_to_e5m2(float x) { return (uint8_t)downconvert(x, E5M2, true); }
float simt_bf16_to_float(uint16_t bits) { return float_of((uint32_t)bits << 16); }

uint16_t simt_float_to_bf16(float x)
{
    uint32_t b = bits_of(x);
    if (isnan(x)) return 0x7fff;
    return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

uint32_t simt_float_to_tf32(float x)
{
    uint32_t b = bits_of(x);
    return isfinite(x) ? (b + 0x1000) & ~0x1fffu : b;
}
