/* test_layers.c - rotary frequencies against published values of llama3 scaling, and the table made from them. */
#include "shared/model/layers.h"

#include <math.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"

static struct model_config llama3(uint32_t head_dim, double factor)
{
    struct model_config c = { .head_dim = head_dim, .rope_theta = 500000.0 };
    c.rope.kind = ROPE_LLAMA3;
    c.rope.factor = factor;
    c.rope.low_freq_factor = 1;
    c.rope.high_freq_factor = 4;
    c.rope.original_max = 8192;
    return c;
}

TEST(llama3_frequencies)
{
    double              inv[64], plain[64];
    struct model_config c = llama3(128, 8);
    rope_inv_freq(&c, NULL, inv);
    CHECK_NEAR(inv[29], 2.166570764e-03, 1e-12);
    CHECK_NEAR(inv[31], 8.567514129e-04, 1e-13);
    CHECK_NEAR(inv[35], 9.556212354e-05, 1e-14);
    CHECK_NEAR(inv[63], 3.068925989e-07, 1e-16);
    c.rope.kind = ROPE_PLAIN;
    rope_inv_freq(&c, NULL, plain);
    for (int i = 0; i < 29; i++) CHECK(inv[i] == plain[i]);
    CHECK(inv[29] != plain[29]);
    c = llama3(64, 32);
    rope_inv_freq(&c, NULL, inv);
    CHECK_NEAR(inv[15], 1.290547928e-03, 1e-12);
    CHECK_NEAR(inv[17], 9.708287803e-05, 1e-14);
    CHECK_NEAR(inv[18], 1.946163818e-05, 1e-14);
    CHECK_NEAR(inv[31], 9.418306725e-08, 1e-17);
}

TEST(linear_and_factors_divide)
{
    double              plain[8], scaled[8];
    float               factors[8] = { 1, 2, 1, 1, 1, 1, 1, 8 };
    struct model_config c = { .head_dim = 16, .rope_theta = 10000.0 };
    rope_inv_freq(&c, NULL, plain);
    CHECK(plain[0] == 1.0);
    rope_inv_freq(&c, factors, scaled);
    CHECK(scaled[1] == plain[1] / 2 && scaled[7] == plain[7] / 8 && scaled[2] == plain[2]);
    c.rope.kind = ROPE_LINEAR;
    c.rope.factor = 4;
    rope_inv_freq(&c, NULL, scaled);
    for (int i = 0; i < 8; i++) CHECK(scaled[i] == plain[i] / 4);
}

TEST(table_is_exact_at_far_positions)
{
    struct model_config c = { .head_dim = 16, .rope_theta = 500000.0 };
    double              inv[8];
    float              *t = rope_table(&c, NULL, 131072);
    rope_inv_freq(&c, NULL, inv);
    for (size_t pos = 131000; pos < 131072; pos++)
        for (size_t i = 0; i < 8; i++) {
            CHECK(t[(pos * 8 + i) * 2] == (float)cos((double)pos * inv[i]));
            CHECK(t[(pos * 8 + i) * 2 + 1] == (float)sin((double)pos * inv[i]));
        }
    CHECK(t[0] == 1.0f && t[1] == 0.0f);
    mem_free(t);
}

TEST_MAIN(CASE(llama3_frequencies), CASE(linear_and_factors_divide), CASE(table_is_exact_at_far_positions))
