/* test_kv_rows.c - what rows of a KV pool are held as, against the formulas of kv_rows.h in f64 and
 * a search among all that a type can hold. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/kv_rows.h"
#include "kernels/kv_rows_kernels.h"
#include "tests/harness/test.h"

enum { N_MAX = 256 };

static uint32_t rng = 2463534242u;

static float random_float(void)
{
    rng ^= rng << 13, rng ^= rng >> 17, rng ^= rng << 5;
    return (float)((double)rng / 2147483648.0 - 1);
}

/* Value of a finite e4m3 by its definition: 4 bits of exponent with bias 7, 3 of fraction. */
static double e4m3_value(uint8_t b)
{
    int e = b >> 3 & 15, f = b & 7;
    double magnitude = e == 0 ? ldexp(f, -9) : ldexp(8 + f, e - 10);
    return b & 0x80 ? -magnitude : magnitude;
}

/* Codes as numbers that ascend with the value, so that an even code has an even last bit. */
static double value_of(enum dtype t, int code)
{
    if (t == DTYPE_I8) return code;
    return code < 0 ? -e4m3_value((uint8_t)-code) : e4m3_value((uint8_t)code);
}

static int codes_max(enum dtype t) { return t == DTYPE_I8 ? 127 : 0x7e; }

static int code_at(enum dtype t, const uint8_t *q, size_t i)
{
    if (t == DTYPE_I8) return (int8_t)q[i];
    return q[i] & 0x80 ? -(int)(q[i] & 0x7f) : q[i];
}

/* The code whose value is nearest to x, the even one of two; x is within what the type has. */
static int nearest(enum dtype t, double x)
{
    int best = -codes_max(t);
    for (int code = best + 1; code <= codes_max(t); code++) {
        double now = fabs(value_of(t, code) - x), then = fabs(value_of(t, best) - x);
        if (now < then || (now == then && code % 2 == 0)) best = code;
    }
    return best;
}

/* The row and its scale lie at odd addresses. */
struct held {
    uint8_t bytes[N_MAX * 4 + 1], scale_bytes[5];
};

static float scale_in(const struct held *h)
{
    float s;
    memcpy(&s, h->scale_bytes + 1, sizeof s);
    return s;
}

static void store(enum dtype t, const float *x, size_t n, struct held *h)
{
    memset(h, 0x5a, sizeof *h);
    kv_row_store(t, x, h->bytes + 1, h->scale_bytes + 1, n);
    for (size_t i = kv_rows_bytes(t, n) + 1; i < sizeof h->bytes; i++)
        CHECK_EQ_INT(h->bytes[i], 0x5a);
}

static void load(enum dtype t, const struct held *h, size_t n, float *x)
{
    kv_row_load(t, h->bytes + 1, h->scale_bytes + 1, x, n);
}

static void check_scaled(enum dtype t, const float *x, size_t n)
{
    struct held h;
    float back[N_MAX], top = 0;
    for (size_t i = 0; i < n; i++) top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
    store(t, x, n, &h);
    const float s = scale_in(&h);
    /* one division, rounded once: a double's quotient rounds to the same f32 */
    CHECK(s == (float)((double)top / (t == DTYPE_I8 ? 127 : 448)));
    load(t, &h, n, back);
    for (size_t i = 0; i < n; i++) {
        double limit = t == DTYPE_I8 ? 127 : 448, r = s > 0 ? (double)(x[i] / s) : 0;
        int want = nearest(t, r > limit    ? limit
                              : r < -limit ? -limit
                                           : r),
            got = code_at(t, h.bytes + 1, i);
        if (got != want)
            test_fail(__FILE__, __LINE__, "%s: %.9g by scale %.9g is code %d, not %d",
                      kv_rows_name(t), (double)x[i], (double)s, got, want);
        CHECK(back[i] == (float)(value_of(t, got) * (double)s)); /* the product is exact in f64 */
    }
}

TEST(types_and_sizes)
{
    CHECK(kv_rows_known(DTYPE_F32) && kv_rows_known(DTYPE_F16) && kv_rows_known(DTYPE_BF16) &&
          kv_rows_known(DTYPE_I8) && kv_rows_known(DTYPE_F8_E4M3));
    CHECK(!kv_rows_known(DTYPE_Q8_0) && !kv_rows_known((enum dtype)DTYPE_COUNT) &&
          !kv_rows_known((enum dtype)65));
    CHECK(kv_rows_scaled(DTYPE_I8) && kv_rows_scaled(DTYPE_F8_E4M3) && !kv_rows_scaled(DTYPE_F16) &&
          !kv_rows_scaled(DTYPE_F32));
    CHECK_EQ_INT(kv_rows_bytes(DTYPE_I8, 64), 64);
    CHECK_EQ_INT(kv_rows_bytes(DTYPE_F8_E4M3, 65), 65);
    CHECK_EQ_INT(kv_rows_bytes(DTYPE_F16, 64), 128);
    CHECK_EQ_INT(kv_rows_bytes(DTYPE_F32, 3), 12);
    CHECK_EQ_STR(kv_rows_name(DTYPE_I8), "int8");
    CHECK_EQ_STR(kv_rows_name(DTYPE_F8_E4M3), "f8_e4m3");
    CHECK_EQ_STR(kv_rows_name((enum dtype)65), "unknown");
}

TEST(scaled_rows_are_the_nearest_that_their_scale_allows)
{
    static const enum dtype types[] = { DTYPE_I8, DTYPE_F8_E4M3 };
    static const float sizes[] = { 1, 300, 1e-3f, 1e30f, 1e-30f };
    static const size_t n[] = { 1, 2, 7, 64, 128, 255, N_MAX };
    float x[N_MAX];
    for (size_t t = 0; t < 2; t++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
            for (size_t m = 0; m < sizeof n / sizeof *n; m++) {
                for (size_t i = 0; i < n[m]; i++)
                    x[i] = random_float() * sizes[k] * (i % 5 == 4 ? 1e-3f : 1);
                check_scaled(types[t], x, n[m]);
            }
}

/* The largest is what the type has most of, so the scale is 1 and the others lie half way between
 * two codes. */
TEST(ties_go_to_the_even_code)
{
    static const float ints[] = { 127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -125.5f, 126.5f, 0, -0.0f };
    static const int int_codes[] = { 127, 0, 2, 2, 0, -2, -126, 126, 0, 0 };
    /* 17 is between 16 and 18, 19 between 18 and 20; 432 between 416 and 448; 2^-10 between 0 and
     * 2^-9; 3 * 2^-10 between 2^-9 and 2^-8. */
    static const float floats[] = { 448,      17,       19,        -17,     432,
                                    0x1p-10f, 0x3p-10f, -0x1p-10f, 0x1p-9f, 240 };
    static const uint8_t float_codes[] = { 0x7e, 0x58, 0x5a, 0xd8, 0x7e,
                                           0x00, 0x02, 0x80, 0x01, 0x77 };
    struct held h;
    store(DTYPE_I8, ints, 10, &h);
    CHECK(scale_in(&h) == 1);
    for (size_t i = 0; i < 10; i++) CHECK_EQ_INT((int8_t)h.bytes[1 + i], int_codes[i]);
    store(DTYPE_F8_E4M3, floats, 10, &h);
    CHECK(scale_in(&h) == 1);
    for (size_t i = 0; i < 10; i++) CHECK_EQ_INT(h.bytes[1 + i], float_codes[i]);
}

static void check_edges(enum dtype t)
{
    struct held h;
    float x[3], back[3];
    const float limit = t == DTYPE_I8 ? 127 : 448;
    for (int i = 0; i < 3; i++) x[i] = i == 1 ? -0.0f : 0;
    store(t, x, 3, &h);
    CHECK(scale_in(&h) == 0 && h.bytes[1] == 0 && h.bytes[2] == 0 && h.bytes[3] == 0);
    load(t, &h, 3, back);
    for (int i = 0; i < 3; i++) CHECK(back[i] == 0);
    /* too small for a scale: zeros, not a division by one */
    x[0] = FLT_TRUE_MIN, x[1] = -FLT_TRUE_MIN, x[2] = 0;
    store(t, x, 3, &h);
    CHECK(scale_in(&h) == 0);
    load(t, &h, 3, back);
    for (int i = 0; i < 3; i++) CHECK(back[i] == 0);
    /* a subnormal scale, rounded to less than it should be: the quotient is held at what the type
     * has */
    x[0] = FLT_TRUE_MIN * limit * 1.4f, x[1] = -x[0], x[2] = FLT_TRUE_MIN;
    store(t, x, 3, &h);
    CHECK(scale_in(&h) == FLT_TRUE_MIN);
    CHECK(x[0] / scale_in(&h) > limit);
    load(t, &h, 3, back);
    CHECK(back[0] == limit * FLT_TRUE_MIN && back[1] == -back[0] && back[2] == FLT_TRUE_MIN);
    x[0] = FLT_MAX, x[1] = -FLT_MAX, x[2] = 1;
    store(t, x, 3, &h);
    CHECK(scale_in(&h) == FLT_MAX / limit);
    load(t, &h, 3, back);
    CHECK(back[0] > 0.99f * FLT_MAX && back[1] == -back[0] && back[2] == 0);
}

TEST(zeros_and_subnormal_scales)
{
    check_edges(DTYPE_I8);
    check_edges(DTYPE_F8_E4M3);
}

TEST(a_row_that_is_not_finite_reads_back_as_nan)
{
    static const enum dtype types[] = { DTYPE_I8, DTYPE_F8_E4M3 };
    const float odd[] = { INFINITY, -INFINITY, NAN, -NAN };
    for (size_t t = 0; t < 2; t++)
        for (size_t k = 0; k < 4; k++)
            for (size_t at = 0; at < 40; at += 13) {
                struct held h;
                float x[40], back[40];
                for (size_t i = 0; i < 40; i++) x[i] = i == at ? odd[k] : (float)i;
                store(types[t], x, 40, &h);
                CHECK(isnan(scale_in(&h)));
                load(types[t], &h, 40, back);
                for (size_t i = 0; i < 40; i++) CHECK(isnan(back[i]));
            }
}

TEST(plain_rows_are_rounded_once_and_touch_no_scale)
{
    static const enum dtype types[] = { DTYPE_F32, DTYPE_BF16, DTYPE_F16 };
    float x[37], back[37];
    for (size_t i = 0; i < 37; i++) x[i] = random_float() * (i % 3 ? 1 : 1e-6f);
    x[0] = INFINITY, x[1] = -0.0f, x[2] = 1e-40f;
    for (size_t t = 0; t < 3; t++) {
        struct held h;
        store(types[t], x, 37, &h);
        for (size_t i = 0; i < sizeof h.scale_bytes; i++) CHECK_EQ_INT(h.scale_bytes[i], 0x5a);
        kv_row_load(types[t], h.bytes + 1, NULL, back, 37);
        for (size_t i = 0; i < 37; i++) {
            float want = types[t] == DTYPE_F32    ? x[i]
                         : types[t] == DTYPE_BF16 ? dtype_bf16_to_f32(dtype_f32_to_bf16(x[i]))
                                                  : float_from_f16(dtype_f32_to_f16(x[i]));
            CHECK(memcmp(&back[i], &want, sizeof want) == 0);
        }
    }
}

/* The CPU decides which implementation is used: both give the same for all codes and for rows of
 * any length. */
TEST(kernels_of_every_isa_give_the_same_bits)
{
    static const struct kv_row_kernels plain = KV_ROW_KERNELS;
    uint8_t codes[2 * 256 + 1], a8[N_MAX], b8[N_MAX];
    float x[N_MAX], a[N_MAX], b[N_MAX];
    if (!__builtin_cpu_supports("avx2")) SKIP("this machine has no AVX2");
    for (size_t i = 0; i < 256; i++) {
        CHECK((i & 0x7f) == 0x7f ? isnan(kv_e4m3((uint8_t)i))
                                 : kv_e4m3((uint8_t)i) == dtype_f8_e4m3_to_f32((uint8_t)i));
        CHECK(((i & 0x80) != 0) == (signbit(kv_e4m3((uint8_t)i)) != 0));
        x[i] = random_float() * 448;
    }
    for (size_t i = 0; i < sizeof codes; i++) codes[i] = (uint8_t)(i * 167);
    for (size_t n = 1; n <= N_MAX; n += n < 40 ? 1 : 27) {
        CHECK_EQ_INT(plain.absmax_bits(x, n), kv_row_kernels_avx2.absmax_bits(x, n));
        plain.from_i8(codes + 1, 0.37f, a, n), kv_row_kernels_avx2.from_i8(codes + 1, 0.37f, b, n);
        CHECK(memcmp(a, b, n * sizeof *a) == 0);
        plain.from_e4m3(codes + 1, 0.37f, a, n),
            kv_row_kernels_avx2.from_e4m3(codes + 1, 0.37f, b, n);
        CHECK(memcmp(a, b, n * sizeof *a) == 0);
        plain.from_f16((const char *)codes + 1, a, n),
            kv_row_kernels_avx2.from_f16((const char *)codes + 1, b, n);
        CHECK(memcmp(a, b, n * sizeof *a) == 0);
        plain.to_i8(x, 3.6f, a8, n), kv_row_kernels_avx2.to_i8(x, 3.6f, b8, n);
        CHECK(memcmp(a8, b8, n) == 0);
        plain.to_e4m3(x, 3.6f, a8, n), kv_row_kernels_avx2.to_e4m3(x, 3.6f, b8, n);
        CHECK(memcmp(a8, b8, n) == 0);
    }
}

TEST_MAIN(CASE(types_and_sizes), CASE(scaled_rows_are_the_nearest_that_their_scale_allows),
          CASE(ties_go_to_the_even_code), CASE(zeros_and_subnormal_scales),
          CASE(a_row_that_is_not_finite_reads_back_as_nan),
          CASE(plain_rows_are_rounded_once_and_touch_no_scale),
          CASE(kernels_of_every_isa_give_the_same_bits))
