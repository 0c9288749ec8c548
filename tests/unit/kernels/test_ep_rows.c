/* test_ep_rows.c - the loops over rows in transit (ep_host_rows.h) that this CPU has give the bits
 * of the plain ones, for every kind of number and any part of a row. */
#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu_features.h"
#include "kernels/ep/ep_host_rows.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static size_t implementations(const struct ep_host_rows **out)
{
    size_t n = 0;
    if (cpu_supports_avx2()) out[n++] = &ep_host_rows_avx2;
    if (cpu_supports_avx512()) out[n++] = &ep_host_rows_avx512;
    return n;
}

/* All bf16 and what lies between them: just above, below the middle, the middle, above it, just
 * below the next. Subnormals, infinities and NaNs, also signalling ones, are among them. */
static const uint32_t BETWEEN[] = { 0, 1, 0x7fff, 0x8000, 0x8001, 0xffff };
enum { N_ALL = 65536 * (int)(sizeof BETWEEN / sizeof *BETWEEN) };

static uint32_t number(size_t i)
{
    return (uint32_t)(i / COUNT_OF(BETWEEN)) << 16 | BETWEEN[i % COUNT_OF(BETWEEN)];
}

static float *all_numbers(void)
{
    float *x = MEM_ARRAY(float, N_ALL);
    for (size_t i = 0; i < N_ALL; i++) {
        const uint32_t bits = number(i);
        memcpy(&x[i], &bits, sizeof bits);
    }
    return x;
}

TEST(rounding_gives_the_bits_of_the_definition)
{
    const struct ep_host_rows *rows[2];
    const size_t n = implementations(rows);
    float *x = all_numbers();
    unsigned char *mine = mem_calloc(2 * (size_t)N_ALL + 1, 1);
    if (n == 0) SKIP("this CPU has neither AVX2 nor AVX-512");
    for (size_t r = 0; r < n; r++) {
        rows[r]->to_bf16(mine + 1, x, N_ALL); /* at an odd address */
        for (size_t i = 0; i < N_ALL; i++) {
            uint16_t half;
            memcpy(&half, mine + 1 + 2 * i, sizeof half);
            CHECK_EQ_INT(half, float_to_bf16(x[i]));
        }
    }
    mem_free(mine);
    mem_free(x);
}

TEST(any_part_of_a_row_is_that_of_the_whole)
{
    enum { N = 75, BYTES = 2 * N };
    const struct ep_host_rows *rows[3] = { &ep_host_rows_plain };
    const size_t n_rows = 1 + implementations(rows + 1);
    unsigned char whole[BYTES], part[BYTES + 1];
    float x[N];
    for (int i = 0; i < N; i++) x[i] = sinf((float)i) * ldexpf(1, i - 40);
    ep_host_rows_plain.to_bf16(whole, x, N);
    for (size_t r = 0; r < n_rows; r++)
        for (size_t at = 0; at <= BYTES; at++)
            for (size_t n = 0; n <= BYTES - at; n++) {
                memset(part, 0xa5, sizeof part);
                ep_host_rows_send_part(rows[r], x, at, n, part);
                CHECK(memcmp(part, whole + at, n) == 0);
                CHECK_EQ_INT(part[n], 0xa5);
            }
}

/* Every number as a result, rounded, with others of both types; odd lengths; with and without what
 * y has. */
static void check_sums(const struct ep_host_rows *r, const float *x, const uint16_t *half, size_t n)
{
    static const float weights[] = { 0.75f, -1.25f, 0.5f };
    const struct ep_row_result results[] = { { .f32 = x }, { .bf16 = half }, { .f32 = x } };
    float *y = MEM_ARRAY(float, n), *want = MEM_ARRAY(float, n);
    for (int way = 0; way < 4; way++) {
        struct ep_row_sum s = { .y = want,
                                .results = results,
                                .weights = weights,
                                .n = n,
                                .n_used = COUNT_OF(results),
                                .add = way & 1,
                                .rounds = way & 2 };
        for (size_t i = 0; i < n; i++) y[i] = want[i] = (float)i * 0.125f;
        ep_host_rows_plain.sum(&s);
        s.y = y;
        r->sum(&s);
        for (size_t i = 0; i < n; i++)
            CHECK(isnan(want[i]) ? isnan(y[i]) : memcmp(&y[i], &want[i], sizeof *y) == 0);
    }
    mem_free(y);
    mem_free(want);
}

TEST(sums_have_the_bits_of_the_definition)
{
    const struct ep_host_rows *rows[2];
    const size_t n = implementations(rows);
    float *x = all_numbers();
    uint16_t *half = MEM_ARRAY(uint16_t, N_ALL);
    if (n == 0) SKIP("this CPU has neither AVX2 nor AVX-512");
    for (size_t i = 0; i < N_ALL; i++) half[i] = (uint16_t)(i * 40503u);
    for (size_t r = 0; r < n; r++) {
        check_sums(rows[r], x, half, N_ALL);
        for (size_t k = 1; k < 200; k += 13) check_sums(rows[r], x + 1000 * k, half, k);
    }
    mem_free(half);
    mem_free(x);
}

TEST_MAIN(CASE(rounding_gives_the_bits_of_the_definition),
          CASE(any_part_of_a_row_is_that_of_the_whole), CASE(sums_have_the_bits_of_the_definition))
