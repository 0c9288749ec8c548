/* test_dtype.c - sizes and conversions of element types. */
#include <math.h>
#include <string.h>

#include "kernels/dtype.h"
#include "kernels/float_bits.h"
#include "tests/harness/test.h"

TEST(sizes_are_those_of_the_formats)
{
    CHECK_EQ_INT(dtype_row_bytes(DTYPE_F32, 7), 28);
    CHECK_EQ_INT(dtype_row_bytes(DTYPE_F16, 7), 14);
    CHECK_EQ_INT(dtype_row_bytes(DTYPE_BF16, 7), 14);
    CHECK_EQ_INT(dtype_row_bytes(DTYPE_Q8_0, 64), 68);
    CHECK_EQ_INT(dtype_row_bytes(DTYPE_Q4_1, 64), 40);
    CHECK_EQ_STR(dtype_name(DTYPE_Q4_1), "q4_1");
    CHECK_EQ_INT(dtype_block(DTYPE_Q8_0), 32);
    CHECK_EQ_INT(dtype_block(DTYPE_BF16), 1);
    CHECK_EQ_INT(dtype_row_bytes(DTYPE_F8_E4M3, 7), 7);
    CHECK_EQ_INT(dtype_row_bytes(DTYPE_Q4_K, 512), 288); /* 4.5 bits */
    CHECK_EQ_INT(dtype_row_bytes(DTYPE_Q6_K, 512), 420); /* 6.5625 bits */
}

/* Value of a finite f16 by its definition. */
static double f16_value(uint16_t h)
{
    int e = h >> 10 & 31, f = h & 0x3ff;
    double magnitude = e == 0 ? ldexp(f, -24) : ldexp(f + 1024, e - 25);
    return h & 0x8000 ? -magnitude : magnitude;
}

TEST(every_f16_goes_there_and_back)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float f = float_from_f16((uint16_t)h);
        if ((h & 0x7fff) > 0x7c00) {
            CHECK(isnan(f));
            CHECK((dtype_f32_to_f16(f) & 0x7fff) > 0x7c00);
            continue;
        }
        if ((h & 0x7fff) == 0x7c00) CHECK(isinf(f));
        else CHECK((double)f == f16_value((uint16_t)h));
        CHECK_EQ_INT(dtype_f32_to_f16(f), h);
    }
}

TEST(f16_rounds_to_nearest_even)
{
    for (uint32_t h = 0; h < 0x7bff; h++) { /* each neighbour pair: below, at and above the
                                             * middle */
        double low = f16_value((uint16_t)h), high = f16_value((uint16_t)(h + 1));
        float middle = (float)((low + high) / 2);
        CHECK_EQ_INT(dtype_f32_to_f16(middle), h % 2 ? h + 1 : h);
        CHECK_EQ_INT(dtype_f32_to_f16(nextafterf(middle, 0)), h);
        CHECK_EQ_INT(dtype_f32_to_f16(nextafterf(middle, 1e9f)), h + 1);
        CHECK_EQ_INT(dtype_f32_to_f16(-middle), (h % 2 ? h + 1 : h) | 0x8000);
    }
    CHECK_EQ_INT(dtype_f32_to_f16(65519.996f), 0x7bff);
    CHECK_EQ_INT(dtype_f32_to_f16(65520.0f), 0x7c00);
    CHECK_EQ_INT(dtype_f32_to_f16(INFINITY), 0x7c00);
    CHECK_EQ_INT(dtype_f32_to_f16(-1e30f), 0xfc00);
    CHECK_EQ_INT(dtype_f32_to_f16(1e-10f), 0);
}

TEST(bf16_rounds_to_nearest_even)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float f = dtype_bf16_to_f32((uint16_t)h);
        if ((h & 0x7fff) > 0x7f80)
            CHECK(isnan(f) && isnan(dtype_bf16_to_f32(dtype_f32_to_bf16(f))));
        else CHECK_EQ_INT(dtype_f32_to_bf16(f), h);
    }
    uint32_t bits = 0x3f808000; /* halfway: to the even neighbour */
    float f;
    memcpy(&f, &bits, 4);
    CHECK_EQ_INT(dtype_f32_to_bf16(f), 0x3f80);
    bits = 0x3f818000;
    memcpy(&f, &bits, 4);
    CHECK_EQ_INT(dtype_f32_to_bf16(f), 0x3f82);
    bits = 0x3f808001;
    memcpy(&f, &bits, 4);
    CHECK_EQ_INT(dtype_f32_to_bf16(f), 0x3f81);
    bits = 0x7f800001; /* a NaN whose payload is lost in the cut */
    memcpy(&f, &bits, 4);
    CHECK(isnan(dtype_bf16_to_f32(dtype_f32_to_bf16(f))));
}

/* Value of a finite e4m3 by its definition. */
static float f8_value(uint32_t b)
{
    int e = (int)(b >> 3 & 15), f = (int)(b & 7);
    float magnitude = e == 0 ? ldexpf((float)f, -9) : ldexpf((float)(f + 8), e - 10);
    return b & 0x80 ? -magnitude : magnitude;
}

TEST(every_f8_goes_there_and_back)
{
    for (uint32_t b = 0; b < 256; b++) {
        float f = dtype_f8_e4m3_to_f32((uint8_t)b);
        if ((b & 0x7f) == 0x7f) CHECK(isnan(f));
        else CHECK(f == f8_value(b));
        CHECK_EQ_INT(float_to_f8(f), b);
    }
}

TEST(f8_rounds_to_nearest_even_and_saturates)
{
    for (uint32_t b = 0; b < 0x7e; b++) { /* each neighbour pair: below, at and above the middle */
        float middle = (f8_value(b) + f8_value(b + 1)) / 2;
        CHECK_EQ_INT(float_to_f8(middle), b % 2 ? b + 1 : b);
        CHECK_EQ_INT(float_to_f8(nextafterf(middle, 0)), b);
        CHECK_EQ_INT(float_to_f8(nextafterf(middle, 1e9f)), b + 1);
        CHECK_EQ_INT(float_to_f8(-middle), (b % 2 ? b + 1 : b) | 0x80);
    }
    float over[] = { 448, 449, 464, 480, 1e30f, INFINITY };
    for (size_t i = 0; i < sizeof over / sizeof *over; i++) {
        CHECK_EQ_INT(float_to_f8(over[i]), 0x7e);
        CHECK_EQ_INT(float_to_f8(-over[i]), 0xfe);
    }
    CHECK_EQ_INT(float_to_f8(1e-30f), 0);
}

TEST(blocks_follow_the_gguf_layout)
{
    uint8_t q8[34] = { 0 }, q4[20] = { 0 };
    float out[32];
    q8[1] = 0x38; /* d = 0.5 */
    for (int i = 0; i < 32; i++) q8[2 + i] = (uint8_t)(i - 16);
    dtype_to_f32(DTYPE_Q8_0, q8, out, 32);
    for (int i = 0; i < 32; i++) CHECK(out[i] == 0.5f * (float)(i - 16));
    q4[1] = 0x34; /* d = 0.25 */
    q4[3] = 0xbc; /* m = -1 */
    for (int i = 0; i < 16; i++) q4[4 + i] = (uint8_t)(i | (15 - i) << 4);
    dtype_to_f32(DTYPE_Q4_1, q4, out, 32);
    for (int i = 0; i < 16; i++) {
        CHECK(out[i] == 0.25f * (float)i - 1);
        CHECK(out[i + 16] == 0.25f * (float)(15 - i) - 1);
    }
}

TEST(plain_types_convert_from_odd_addresses)
{
    uint8_t bytes[1 + 12] = { 0 };
    float in[3] = { 1.5f, -2, 0.25f }, out[3];
    memcpy(bytes + 1, in, sizeof in);
    dtype_to_f32(DTYPE_F32, bytes + 1, out, 3);
    CHECK(memcmp(in, out, sizeof in) == 0);
    for (int i = 0; i < 3; i++) {
        uint16_t h = dtype_f32_to_f16(in[i]);
        memcpy(bytes + 1 + 2 * i, &h, 2);
    }
    dtype_to_f32(DTYPE_F16, bytes + 1, out, 3);
    CHECK(memcmp(in, out, sizeof in) == 0);
    for (int i = 0; i < 3; i++) {
        uint16_t h = dtype_f32_to_bf16(in[i]);
        memcpy(bytes + 1 + 2 * i, &h, 2);
    }
    dtype_to_f32(DTYPE_BF16, bytes + 1, out, 3);
    CHECK(memcmp(in, out, sizeof in) == 0);
}

TEST_MAIN(CASE(sizes_are_those_of_the_formats), CASE(every_f16_goes_there_and_back),
          CASE(f16_rounds_to_nearest_even), CASE(bf16_rounds_to_nearest_even),
          CASE(every_f8_goes_there_and_back), CASE(f8_rounds_to_nearest_even_and_saturates),
          CASE(blocks_follow_the_gguf_layout), CASE(plain_types_convert_from_odd_addresses))
