/* test_rope.c - RoPE frequencies against published values of llama3 scaling and YaRN, and the
 * table. */
#include "shared/model/rope.h"

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
    double inv[64], plain[64];
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
    double plain[8], scaled[8];
    float factors[8] = { 1, 2, 1, 1, 1, 1, 1, 8 };
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

/* DeepSeek-V3: 64 of the 192 elements of a head are rotated, factor 40 over 4096 positions. */
static struct model_config deepseek(uint32_t dim, double factor, double original_max)
{
    struct model_config c = {
        .rope_theta = 10000.0,
        .mla = { .kv_lora = 512, .nope = 128, .rope = dim, .v = 128 },
    };
    c.rope.kind = ROPE_YARN;
    c.rope.factor = factor;
    c.rope.original_max = original_max;
    c.rope.beta_fast = 32;
    c.rope.beta_slow = 1;
    return c;
}

TEST(yarn_frequencies)
{
    static const struct {
        int i;
        double inv;
    } V3[] = { { 0, 1.0 },
               { 5, 2.371373706e-01 },
               { 10, 5.623413252e-02 },
               { 11, 3.900692657e-02 },
               { 12, 2.687936011e-02 },
               { 16, 5.5e-03 },
               { 20, 7.905694150e-04 },
               { 22, 1.778279410e-04 },
               { 23, 3.333803580e-05 },
               { 31, 3.333803580e-06 } };
    double inv[64];
    struct model_config c = deepseek(64, 40, 4096);
    rope_inv_freq(&c, NULL, inv);
    for (size_t i = 0; i < sizeof V3 / sizeof V3[0]; i++)
        CHECK_NEAR(inv[V3[i].i] / V3[i].inv, 1, 1e-9);
    c = deepseek(8, 4, 64); /* the ramp begins before the first frequency */
    rope_inv_freq(&c, NULL, inv);
    CHECK_NEAR(inv[0], 1.0, 1e-12);
    CHECK_NEAR(inv[1], 6.25e-02, 1e-12);
    CHECK_NEAR(inv[2], 2.5e-03, 1e-12);
    CHECK_NEAR(inv[3], 2.5e-04, 1e-12);
    c.rope.no_truncate = true;
    rope_inv_freq(&c, NULL, inv);
    CHECK(inv[1] > 1e-2 && fabs(inv[1] - 6.25e-02) > 1e-3);
}

TEST(mscale)
{
    CHECK_NEAR(rope_mscale(40, 1.0), 1.36888795, 1e-8);
    CHECK_NEAR(rope_mscale(40, 0.707), 1.26080378, 1e-8);
    CHECK_NEAR(rope_mscale(40, 1.0) * rope_mscale(40, 1.0) / sqrt(192.0), 0.135233779, 1e-8);
    CHECK_NEAR(rope_mscale(4, 1.0) * rope_mscale(4, 1.0), 1.2964769927807063, 1e-12);
    CHECK(rope_mscale(1, 1.0) == 1 && rope_mscale(0.5, 1.0) == 1);
}

/* ERNIE-4.5's frequencies have no scaling. */
TEST(plain_frequencies)
{
    double inv[64];
    struct model_config c = { .head_dim = 128, .rope_theta = 500000.0 };
    rope_inv_freq(&c, NULL, inv);
    CHECK_NEAR(inv[1], 8.146172339e-01, 1e-10);
    CHECK_NEAR(inv[2], 6.636012377e-01, 1e-10);
    CHECK_NEAR(inv[31], 1.736046702e-03, 1e-12);
    CHECK_NEAR(inv[63], 2.455140791e-06, 1e-15);
}

TEST(table_is_exact_at_far_positions)
{
    struct model_config c = { .head_dim = 16, .rope_theta = 500000.0 };
    double inv[8];
    struct compute_pool *pool;
    struct err err;
    CHECK_OK(compute_pool_create(2, &pool, &err));
    float *t = mem_aligned(64, rope_table_bytes(&c, 131072));
    rope_table(&c, NULL, 131072, pool, t);
    CHECK_EQ_INT(rope_table_bytes(&c, 131072), 131072u * 8 * 2 * 4);
    rope_inv_freq(&c, NULL, inv);
    for (size_t pos = 131000; pos < 131072; pos++)
        for (size_t i = 0; i < 8; i++) {
            CHECK(t[(pos * 8 + i) * 2] == (float)cos((double)pos * inv[i]));
            CHECK(t[(pos * 8 + i) * 2 + 1] == (float)sin((double)pos * inv[i]));
        }
    CHECK(t[0] == 1.0f && t[1] == 0.0f);
    c.rope.cos_sin_factor = 1.25;
    rope_table(&c, NULL, 4, pool, t);
    CHECK(t[0] == 1.25f && t[3 * 16] == (float)(cos(3.0) * 1.25));
    mem_free(t);
    compute_pool_free(pool);
}

TEST_MAIN(CASE(llama3_frequencies), CASE(linear_and_factors_divide), CASE(yarn_frequencies),
          CASE(mscale), CASE(plain_frequencies), CASE(table_is_exact_at_far_positions))
