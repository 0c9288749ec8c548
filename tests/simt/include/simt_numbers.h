/* simt_numbers.h - device code's fast mathematics, bits of numbers, minima. Part of cuda_runtime.h;
 * empty for C. */
#ifndef BATON_TESTS_SIMT_SIMT_NUMBERS_H
#define BATON_TESTS_SIMT_SIMT_NUMBERS_H

#ifdef __cplusplus
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <cmath>

/* Computed by powers and logarithms of two, as on a GPU, so that large arguments lose as many
 * bits. */
static inline float simt_expf(float x) { return ::exp2f(x * 1.4426950408889634f); }
static inline float simt_exp10f(float x) { return ::exp2f(x * 3.3219280948873623f); }
static inline float simt_log2f(float x) { return ::log2f(x); }
static inline float simt_logf(float x) { return ::log2f(x) * 0.6931471805599453f; }
static inline float simt_log10f(float x) { return ::log2f(x) * 0.30102999566398120f; }
static inline float simt_powf(float x, float y) { return ::exp2f(y * ::log2f(x)); }
static inline float simt_sinf(float x) { return ::sinf(x); }
static inline float simt_cosf(float x) { return ::cosf(x); }
static inline void simt_sincosf(float x, float *s, float *c) { *s = ::sinf(x), *c = ::cosf(x); }
static inline float simt_tanf(float x) { return ::tanf(x); }
/* Macros, because glibc declares functions of these names. */
#define __expf(x)          simt_expf(x)
#define __exp10f(x)        simt_exp10f(x)
#define __log2f(x)         simt_log2f(x)
#define __logf(x)          simt_logf(x)
#define __log10f(x)        simt_log10f(x)
#define __powf(x, y)       simt_powf(x, y)
#define __sinf(x)          simt_sinf(x)
#define __cosf(x)          simt_cosf(x)
#define __sincosf(x, s, c) simt_sincosf(x, s, c)
#define __tanf(x)          simt_tanf(x)
/* 0 for denominators between 2^126 and 2^128 */
static inline float __fdividef(float x, float y)
{
    return ::fabsf(y) > 0x1p126f && ::fabsf(y) <= 3.4028234e38f ? x * 0.0f : x / y;
}
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return ::sqrtf(x); }
static inline float __frsqrt_rn(float x) { return (float)(1.0 / ::sqrt((double)x)); }
static inline float rsqrtf(float x) { return (float)(1.0 / ::sqrt((double)x)); }
static inline float rsqrt(float x) { return rsqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / ::sqrt(x); }
static inline float __fmaf_rn(float x, float y, float z) { return ::fmaf(x, y, z); }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
static inline void sincospif(float x, float *s, float *c)
{
    *s = (float)::sin(M_PI * (double)x), *c = (float)::cos(M_PI * (double)x);
}
static inline float normcdff(float x) { return 0.5f * ::erfcf(-x * 0.70710678118654752f); }

template <class To, class From> static inline To simt_same_bits(From x)
{
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
static inline unsigned __float_as_uint(float x) { return simt_same_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return simt_same_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return simt_same_bits<float>(x); }
static inline float __int_as_float(int x) { return simt_same_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return simt_same_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return simt_same_bits<double>(x); }

/* Conversions to integers saturate, and NaN becomes 0, as with cvt. */
static inline int simt_to_int(float r)
{
    return r != r               ? 0
           : r >= 2147483648.0f ? 2147483647
           : r < -2147483648.0f ? -2147483647 - 1
                                : (int)r;
}
static inline unsigned simt_to_uint(float r)
{
    return r != r || r <= 0.0f ? 0u : r >= 4294967296.0f ? 4294967295u : (unsigned)r;
}
static inline int __float2int_rn(float x) { return simt_to_int(::rintf(x)); }
static inline int __float2int_rz(float x) { return simt_to_int(::truncf(x)); }
static inline int __float2int_rd(float x) { return simt_to_int(::floorf(x)); }
static inline int __float2int_ru(float x) { return simt_to_int(::ceilf(x)); }
static inline unsigned __float2uint_rn(float x) { return simt_to_uint(::rintf(x)); }
static inline unsigned __float2uint_rz(float x) { return simt_to_uint(::truncf(x)); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline unsigned __brev(unsigned x)
{
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1u) << (31 - i);
    return y;
}
/* The selector has four nibbles, of which three bits count: nvcc clears the fourth, with which prmt
 * would replicate a byte's sign. */
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector)
{
    uint64_t both = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned s = selector >> (4 * i), byte = (unsigned)(both >> (8 * (s & 7))) & 0xff;
        r |= byte << (8 * i);
    }
    return r;
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) << (n & 31) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (n & 31));
}
static inline unsigned __umulhi(unsigned x, unsigned y)
{
    return (unsigned)((uint64_t)x * y >> 32);
}
static inline int __mulhi(int x, int y) { return (int)((int64_t)x * y >> 32); }
static inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y)
{
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
static inline int __dp4a(int a, int b, int c)
{
    unsigned sum = (unsigned)c;
    for (int i = 0; i < 32; i += 8) sum += (unsigned)((int8_t)(a >> i) * (int8_t)(b >> i));
    return (int)sum;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c)
{
    for (int i = 0; i < 32; i += 8) c += (a >> i & 0xff) * (b >> i & 0xff);
    return c;
}
static inline unsigned __vabsdiffu4(unsigned a, unsigned b)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8) {
        int d = (int)(a >> i & 0xff) - (int)(b >> i & 0xff);
        r |= (unsigned)(d < 0 ? -d : d) << i;
    }
    return r;
}

/* If one operand is NaN the result is the other one, as with fminf. */
static inline float min(float a, float b) { return ::fminf(a, b); }
static inline float max(float a, float b) { return ::fmaxf(a, b); }
static inline double min(double a, double b) { return ::fmin(a, b); }
static inline double max(double a, double b) { return ::fmax(a, b); }
#define SIMT_MIN_MAX(T)                                                                            \
    static inline constexpr T min(T a, T b) { return b < a ? b : a; }                              \
    static inline constexpr T max(T a, T b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
#undef SIMT_MIN_MAX
#endif
#endif
