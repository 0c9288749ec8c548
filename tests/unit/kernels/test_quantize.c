/* test_quantize.c - the rounding of --quantization: corner values here, and whole matrices against
 * the numbers that tests/fixtures/quant_reference.py made of them (tests/data/quant says how its
 * files lie). */
#include "kernels/quantize.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/quantize_kernels.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

/* ---- corner values ---- */

TEST(halves_go_away_from_zero)
{
    /* a is 127, so that w / a * 127 is w where that division is exact enough: halves of powers of
     * two */
    float w[8] = { 127, 0.5f, -0.5f, 1.5f, -1.5f, 0.25f, -126.5f, 0.49999997f };
    int8_t q[8], want[8] = { 127, 1, -1, 2, -2, 0, -127, 0 };
    for (int i = 0; i < 8; i++) w[i] *= 0x1p-7f;
    CHECK(quantize_channel(w, 8, 127, q) ==
          dtype_bf16_to_f32(dtype_f32_to_bf16(127 * 0x1p-7f / 127)));
    for (int i = 0; i < 8; i++) {
        float share = w[i] / w[0] * 127; /* the rule's own roundings */
        CHECK_EQ_INT(q[i], lroundf(share));
        if (share == w[i] * 128) CHECK_EQ_INT(q[i], want[i]);
    }
}

/* x + 0.5 in f32 would make 1 of the float below a half. Weights in bf16 have no such share, these
 * in f32 do. */
TEST(the_float_below_a_half_is_no_half)
{
    float w[3] = { 0x1.af5de8p+0f, 0x1.ecfd98p-4f, -0x1.ecfd98p-4f };
    int8_t q[3];
    CHECK(w[1] / w[0] * 7 == nextafterf(0.5f, 0));
    (void)quantize_channel(w, 3, 7, q);
    CHECK_EQ_INT(q[0], 7);
    CHECK_EQ_INT(q[1], 0);
    CHECK_EQ_INT(q[2], 0);
}

TEST(every_share_rounds_as_roundf_does)
{
    float w[257];
    int8_t q[257];
    w[0] = 1;
    for (int step = 0; step < 2000; step++) {
        for (int i = 1; i < 257; i++) w[i] = ((float)(step * 256 + i - 256000) + 0.5f) / 256000.0f;
        for (int i = 1; i < 257; i++) w[i] = w[i] > 1 ? 1 : w[i] < -1 ? -1 : w[i];
        for (int limit = 7; limit <= 127; limit += 120) {
            (void)quantize_channel(w, 257, limit, q);
            for (int i = 0; i < 257; i++) CHECK_EQ_INT(q[i], lroundf(w[i] * (float)limit));
        }
    }
}

TEST(channels_of_nothing_and_of_no_numbers)
{
    float w[3] = { 0, -0.0f, 0 };
    int8_t q[3] = { 1, 1, 1 };
    CHECK(quantize_channel(w, 3, 127, q) == 0);
    for (int i = 0; i < 3; i++) CHECK_EQ_INT(q[i], 0);
    w[1] = NAN;
    CHECK(isnan(quantize_channel(w, 3, 7, q)));
    w[1] = -INFINITY;
    CHECK(isnan(quantize_channel(w, 3, 7, q)));
    for (int i = 0; i < 3; i++) CHECK_EQ_INT(q[i], 0);
    w[1] = -1e-40f; /* subnormal: a scale below bf16's least number is 0, the whole numbers are as
                     * ever */
    (void)quantize_channel(w, 3, 7, q);
    CHECK_EQ_INT(q[1], -7);
}

TEST(blocks_have_a_least_scale)
{
    float w[6] = { 1e-5f, -2e-5f, 99, 0, 0, 99 }; /* the third column is not part of the block */
    uint8_t q[4];
    CHECK(quantize_f8_block(w, 3, 2, 2, q, 2) == 1e-4f / 448.0f);
    CHECK_EQ_INT(q[0], float_to_f8(1e-5f * (448.0f / 1e-4f)));
    CHECK_EQ_INT(q[1], float_to_f8(-2e-5f * (448.0f / 1e-4f)));
    CHECK_EQ_INT(q[2], 0);
    w[0] = -3;
    CHECK(quantize_f8_block(w, 3, 2, 2, q, 2) == 3 / 448.0f);
    CHECK_EQ_INT(q[0], 0xfe);
}

/* The portable implementation and the one for AVX2 agree on random bits, including NaNs, infinities
 * and subnormal numbers. */
TEST(both_sets_of_kernels_give_the_same_bits)
{
    static const struct quantize_kernels plain = QUANTIZE_KERNELS;
    enum { N = 1003 };
    float w[N];
    uint8_t q[2][N];
    uint32_t state = 99;
    if (!__builtin_cpu_supports("avx2")) SKIP("this CPU has no AVX2");
    for (int round = 0; round < 500; round++) {
        for (int i = 0; i < N; i++) {
            state = state * 1664525u + 1013904223u;
            w[i] = float_of_bits(round % 2 ? state : (state & 0x83ffffff) | 0x3c000000);
        }
        CHECK_EQ_INT(plain.absmax_bits(w, N, 0), quantize_kernels_avx2.absmax_bits(w, N, 0));
        plain.f8(w, N, 0.37f, q[0]);
        quantize_kernels_avx2.f8(w, N, 0.37f, q[1]);
        CHECK(memcmp(q[0], q[1], N) == 0);
        float a = float_of_bits((uint32_t)plain.absmax_bits(w, N, 0));
        if (!isfinite(a)) continue;
        plain.channel(w, N, a, 127, (int8_t *)q[0]);
        quantize_kernels_avx2.channel(w, N, a, 127, (int8_t *)q[1]);
        CHECK(memcmp(q[0], q[1], N) == 0);
    }
}

TEST(names_are_found)
{
    static const char *const NAMES[] = { [QUANTIZE_NONE] = "none",
                                         [QUANTIZE_WINT8] = "wint8",
                                         [QUANTIZE_WINT4] = "wint4",
                                         [QUANTIZE_BLOCK_FP8] = "block_wise_fp8" };
    enum quantize q;
    struct err err;
    for (int i = QUANTIZE_NONE; i <= QUANTIZE_BLOCK_FP8; i++) {
        CHECK_OK(quantize_from_name(NAMES[i], &q, &err));
        CHECK_EQ_INT(q, i);
    }
    CHECK_OK(quantize_from_name("", &q, &err));
    CHECK_EQ_INT(q, QUANTIZE_NONE);
    CHECK_STATUS(quantize_from_name("int3", &q, &err), ERR_INVALID);
    CHECK(strstr(err.text, "int3") && strstr(err.text, "block_wise_fp8"));
}

/* ---- vectors ---- */

/* The whole file; freed with mem_free. */
static uint8_t *read_vectors(const char *name, size_t *n)
{
    char path[64];
    snprintf(path, sizeof path, "quant/%s.bin", name);
    FILE *f = fopen(test_data(path), "rb");
    if (!f) test_fail(__FILE__, __LINE__, "%s is missing", test_data(path));
    CHECK(fseek(f, 0, SEEK_END) == 0);
    *n = (size_t)ftell(f);
    rewind(f);
    uint8_t *bytes = mem_calloc(*n, 1);
    CHECK(fread(bytes, 1, *n, f) == *n);
    fclose(f);
    return bytes;
}

struct vectors {
    size_t rows, cols, n_scales;
    uint8_t *bytes;
    const uint8_t *q, *scales; /* in bytes */
    float *w;
};

static void free_vectors(struct vectors *v)
{
    mem_free(v->bytes);
    mem_free(v->w);
}

static struct vectors read_weights(const char *name, size_t scale_bytes)
{
    size_t n;
    uint8_t *bytes = read_vectors(name, &n);
    uint32_t head[3];
    struct vectors v = { .bytes = bytes };
    CHECK(n > sizeof head);
    memcpy(head, bytes, sizeof head);
    v.rows = head[0], v.cols = head[1], v.n_scales = head[2];
    size_t count = v.rows * v.cols;
    CHECK_EQ_INT(n, sizeof head + 3 * count + v.n_scales * scale_bytes);
    v.w = MEM_ARRAY(float, count);
    dtype_to_f32(DTYPE_BF16, bytes + sizeof head, v.w, count);
    v.q = bytes + sizeof head + 2 * count;
    v.scales = v.q + count;
    return v;
}

static void check_channels(const char *name, int limit)
{
    struct vectors v = read_weights(name, 2);
    int8_t *q = MEM_ARRAY(int8_t, v.cols);
    CHECK_EQ_INT(v.n_scales, v.rows);
    for (size_t i = 0; i < v.rows; i++) {
        uint16_t scale = dtype_f32_to_bf16(quantize_channel(v.w + i * v.cols, v.cols, limit, q));
        CHECK(memcmp(q, v.q + i * v.cols, v.cols) == 0);
        CHECK(memcmp(&scale, v.scales + 2 * i, sizeof scale) == 0);
    }
    mem_free(q);
    free_vectors(&v);
}

TEST(channels_equal_the_reference)
{
    check_channels("wint8", 127);
    check_channels("wint4", 7);
}

TEST(f8_blocks_equal_the_reference)
{
    struct vectors v = read_weights("block_wise_fp8", 4);
    size_t i_block = 0;
    for (size_t r = 0; r < v.rows; r += F8_BLOCK)
        for (size_t c = 0; c < v.cols; c += F8_BLOCK, i_block++) {
            uint8_t q[F8_BLOCK * F8_BLOCK];
            size_t n_rows = v.rows - r < F8_BLOCK ? v.rows - r : F8_BLOCK,
                   n_cols = v.cols - c < F8_BLOCK ? v.cols - c : F8_BLOCK;
            float scale = quantize_f8_block(v.w + r * v.cols + c, v.cols, n_rows, n_cols, q,
                                            F8_BLOCK);
            CHECK(memcmp(&scale, v.scales + 4 * i_block, sizeof scale) == 0);
            for (size_t i = 0; i < n_rows; i++)
                CHECK(memcmp(q + i * F8_BLOCK, v.q + (r + i) * v.cols + c, n_cols) == 0);
        }
    CHECK_EQ_INT(i_block, v.n_scales);
    free_vectors(&v);
}

TEST(block_types_mean_what_the_reference_says)
{
    for (int t = DTYPE_F8_E4M3; t < DTYPE_COUNT; t++) {
        size_t n;
        uint8_t *bytes = read_vectors(t == DTYPE_F8_E4M3 ? "e4m3" : dtype_name((enum dtype)t), &n);
        uint32_t head[3];
        CHECK(n > sizeof head);
        memcpy(head, bytes, sizeof head);
        size_t count = (size_t)head[0] * head[2];
        CHECK_EQ_INT(head[1], dtype_block_bytes((enum dtype)t));
        CHECK_EQ_INT(head[2], dtype_block((enum dtype)t));
        CHECK_EQ_INT(n, sizeof head + (size_t)head[0] * head[1] + 4 * count);
        float *got = MEM_ARRAY(float, count), *want = MEM_ARRAY(float, count);
        dtype_to_f32((enum dtype)t, bytes + sizeof head, got, count);
        memcpy(want, bytes + sizeof head + (size_t)head[0] * head[1], 4 * count);
        for (size_t i = 0; i < count; i++) /* == : a zero's sign is not part of a format */
            if (got[i] != want[i] && !(isnan(got[i]) && isnan(want[i])))
                test_fail(__FILE__, __LINE__, "%s: element %zu is %.9g, not %.9g",
                          dtype_name((enum dtype)t), i, (double)got[i], (double)want[i]);
        mem_free(bytes);
        mem_free(got);
        mem_free(want);
    }
}

TEST_MAIN(CASE(halves_go_away_from_zero), CASE(the_float_below_a_half_is_no_half),
          CASE(every_share_rounds_as_roundf_does), CASE(channels_of_nothing_and_of_no_numbers),
          CASE(blocks_have_a_least_scale), CASE(both_sets_of_kernels_give_the_same_bits),
          CASE(names_are_found), CASE(channels_equal_the_reference),
          CASE(f8_blocks_equal_the_reference), CASE(block_types_mean_what_the_reference_says))
