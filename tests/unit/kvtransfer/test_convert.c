/* test_convert.c - KV rows converted to another element type: upconversion is exact, narrowing
 * rounds to nearest, int8 and e4m3 are at most half a step off. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kvtransfer/convert.h"
#include "tests/harness/test.h"

enum { N = 64 };

static void random_row(float *x)
{
    float size = ldexpf(1, rand() % 40 - 20);
    for (int i = 0; i < N; i++) x[i] = size * ((float)rand() / (float)RAND_MAX * 2 - 1);
}

TEST(convert_there_and_back_is_exact_where_nothing_is_lost)
{
    const uint32_t types[] = { DTYPE_F16, DTYPE_BF16 };
    for (int k = 0; k < 2; k++)
        for (uint32_t h = 0; h < 65536; h += N) {
            uint16_t from[N], back[N];
            float wide[N];
            for (uint32_t i = 0; i < N; i++) from[i] = (uint16_t)(h + i);
            kvt_convert_row(types[k], from, NULL, DTYPE_F32, wide, NULL, N);
            kvt_convert_row(DTYPE_F32, wide, NULL, types[k], back, NULL, N);
            for (int i = 0; i < N; i++) CHECK(from[i] == back[i] || isnan(wide[i]));
        }
}

TEST(convert_to_int8_is_off_by_half_a_step_at_most)
{
    srand(9);
    for (int round = 0; round < 2000; round++) {
        float x[N], back[N], scale, largest = 0;
        int8_t q[N];
        random_row(x);
        for (int i = 0; i < N; i++) largest = fmaxf(largest, fabsf(x[i]));
        kvt_convert_row(DTYPE_F32, x, NULL, DTYPE_I8, q, &scale, N);
        CHECK(scale == largest / 127);
        kvt_convert_row(DTYPE_I8, q, &scale, DTYPE_F32, back, NULL, N);
        int n_ends = 0;
        for (int i = 0; i < N; i++) {
            CHECK_NEAR(back[i], x[i], 0.5001 * (double)scale);
            CHECK(q[i] == (int8_t)nearbyintf(x[i] / scale) && q[i] >= -127);
            n_ends += abs(q[i]) == 127;
        }
        CHECK(n_ends >= 1); /* the largest uses the whole range */
    }
}

TEST(convert_to_int8_at_its_edges)
{
    float x[N] = { 0 }, back[N], scale = 7;
    int8_t q[N];
    memset(q, 1, sizeof q);
    kvt_convert_row(DTYPE_F32, x, NULL, DTYPE_I8, q, &scale, N);
    CHECK(scale == 0);
    for (int i = 0; i < N; i++) CHECK_EQ_INT(q[i], 0);
    x[3] = 1.4e-45f; /* its scale would be below the smallest float */
    kvt_convert_row(DTYPE_F32, x, NULL, DTYPE_I8, q, &scale, N);
    CHECK(scale == 0 && q[3] == 0);
    x[3] = 1e-43f; /* a subnormal scale */
    kvt_convert_row(DTYPE_F32, x, NULL, DTYPE_I8, q, &scale, N);
    CHECK_EQ_INT(q[3], scale > 0 ? 71 : 0);
    const float bad[] = { INFINITY, -INFINITY, NAN };
    for (int k = 0; k < 3; k++) {
        random_row(x);
        x[N - 1] = bad[k];
        kvt_convert_row(DTYPE_F32, x, NULL, DTYPE_I8, q, &scale, N);
        kvt_convert_row(DTYPE_I8, q, &scale, DTYPE_F32, back, NULL, N);
        for (int i = 0; i < N; i++) CHECK(isnan(back[i])); /* NaN, not invented numbers */
    }
}

/* The error of 3 fraction bits, at least 2^-10 of the scale. */
TEST(convert_to_e4m3_is_off_by_a_sixteenth_at_most)
{
    srand(10);
    for (int round = 0; round < 2000; round++) {
        float x[N], back[N], scale, again, largest = 0;
        uint8_t q[N], same[N];
        random_row(x);
        for (int i = 0; i < N; i++) largest = fmaxf(largest, fabsf(x[i]));
        kvt_convert_row(DTYPE_F32, x, NULL, DTYPE_F8_E4M3, q, &scale, N);
        CHECK(scale == largest / 448);
        kvt_convert_row(DTYPE_F8_E4M3, q, &scale, DTYPE_F32, back, NULL, N);
        for (int i = 0; i < N; i++)
            CHECK_NEAR(back[i], x[i],
                       fmax(0.0626 * fabs((double)x[i]), 0x1.01p-10 * (double)scale));
        /* The largest value is exact, so converting again gives the same KV row. */
        kvt_convert_row(DTYPE_F32, back, NULL, DTYPE_F8_E4M3, same, &again, N);
        CHECK(fabsf(again - scale) <= 1e-6f * scale && memcmp(q, same, N) == 0);
    }
}

TEST_MAIN(CASE(convert_there_and_back_is_exact_where_nothing_is_lost),
          CASE(convert_to_int8_is_off_by_half_a_step_at_most), CASE(convert_to_int8_at_its_edges),
          CASE(convert_to_e4m3_is_off_by_a_sixteenth_at_most))
