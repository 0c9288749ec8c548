/* gemm_reference.cc - packing and plain products for tests. Thread: the test's. */
#include "tests/cuda/gemm_reference.h"

#include <math.h>
#include <string.h>

double numbers::next(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(int32_t)(state >> 32) * 0x1p-31;
}

uint16_t bf16_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float float_of_bf16(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

float float_of_e4m3(uint8_t bits)
{
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    if ((bits & 127) == 127) return NAN;
    const float size = exponent ? ldexpf((float)(8 + mantissa), exponent - 10)
                                : ldexpf((float)mantissa, -9);
    return bits & 128 ? -size : size;
}

uint16_t f16_of(float x)
{
    const double size = fabs((double)x);
    const int sign = signbit(x) ? 0x8000 : 0, e = size < 0x1p-14 ? -14 : ilogb(size);
    if (isnan(x)) return 0x7fff;
    if (isinf(x)) return (uint16_t)(sign | 0x7c00);
    if (size > 65504) return (uint16_t)(sign | 0x7bff);
    /* a normal number is at least 1,024 steps, a subnormal one fewer */
    return (uint16_t)(sign | ((e + 14) * 1024 + (int)nearbyint(ldexp(size, 10 - e))));
}

float float_of_f16(uint16_t bits)
{
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent ? ldexpf((float)(1024 + mantissa), exponent - 25)
                                : ldexpf((float)mantissa, -24);
    if (exponent == 31) return mantissa ? NAN : bits & 0x8000 ? -INFINITY : INFINITY;
    return bits & 0x8000 ? -size : size;
}

uint16_t bits_of(enum dtype type, float x) { return type == DTYPE_F16 ? f16_of(x) : bf16_of(x); }
float float_of(enum dtype type, uint16_t bits)
{
    return type == DTYPE_F16 ? float_of_f16(bits) : float_of_bf16(bits);
}

/* Writes element k of a row and returns its value without the scale. */
static double put(enum gemm_weight_layout layout, unsigned char *row, size_t k, double number)
{
    if (layout == GEMM_F32) {
        const float v = (float)number;
        memcpy(row + 4 * k, &v, sizeof v);
        return v;
    }
    if (gemm_is_16(layout)) {
        const uint16_t bits = bits_of(gemm_x_type(layout), (float)number);
        memcpy(row + 2 * k, &bits, sizeof bits);
        return float_of(gemm_x_type(layout), bits);
    }
    if (layout == GEMM_W4) {
        const int nibble = (int)floor((number + 1) * 7.9999);
        row[k / 2] = (unsigned char)(k % 2 ? (row[k / 2] & 0x0f) | nibble << 4
                                           : (row[k / 2] & 0xf0) | nibble);
        return nibble - 8;
    }
    const int byte = (int)floor((number + 1) * 127.9999);
    row[k] = (unsigned char)(layout == GEMM_F8 && (byte & 127) == 127 ? byte - 1 : byte);
    return layout == GEMM_F8 ? (double)float_of_e4m3(row[k]) : (double)(int8_t)row[k];
}

/* The index of an element's scale. With row and k past the end: the number of scales. */
static size_t scale_of(enum gemm_weight_layout layout, bool paired, size_t n_out, size_t n_in,
                       size_t row, size_t k)
{
    if (layout != GEMM_F8) return row;
    const size_t across = (n_in + 127) / 128;
    if (!paired) return row / 128 * across + k / 128;
    return (row / 2 / 128 + row % 2 * ((n_out / 2 + 127) / 128)) * across + k / 128;
}

reference_matrix reference_pack(enum gemm_weight_layout layout, bool paired, size_t n_out,
                                size_t n_in, numbers *from)
{
    reference_matrix m;
    const bool scaled = layout == GEMM_W8 || layout == GEMM_W4 || layout == GEMM_F8;
    const size_t row_bytes = gemm_row_bytes(layout, n_in),
                 all = gemm_matrix_bytes(layout, paired, n_out, n_in),
                 at = gemm_scales_at(layout, n_out, n_in);
    m.bytes.assign(all, 0);
    m.numbers.resize(n_out * n_in);
    std::vector<float> scales((all - at) / sizeof(float));
    /* all scales differ, so that using the wrong one is found */
    for (float &s : scales) s = (float)((1.5 + from->next()) / 64);
    for (size_t row = 0; row < n_out; row++)
        for (size_t k = 0; k < n_in; k++) {
            const double element = put(layout, m.bytes.data() + row * row_bytes, k, from->next());
            m.numbers[row * n_in + k] =
                scaled ? element * (double)scales[scale_of(layout, paired, n_out, n_in, row, k)]
                       : element;
        }
    if (scaled) memcpy(m.bytes.data() + at, scales.data(), scales.size() * sizeof(float));
    return m;
}

reference_sum reference_dot(const reference_matrix &w, size_t n_in, size_t column, const double *x)
{
    reference_sum s = { 0, 0 };
    for (size_t k = 0; k < n_in; k++) {
        const double term = w.numbers[column * n_in + k] * x[k];
        s.value += term;
        s.magnitude += fabs(term);
    }
    return s;
}
