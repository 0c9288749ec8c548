/* test_tier_rate.c - what a tier is expected to take: from its kind, from measurements, and again
 * from its kind when there are none for long. */
#include "shared/kv/tier/tier_rate.h"

#include "tests/harness/test.h"

enum { BLOCK = 1000000 };
static const uint64_t S = 1000000000;

static struct tier_rate expecting(void)
{
    struct tier_rate r;
    tier_rate_init(&r, 0.001, 1e9, BLOCK); /* 1 ms and 1 ms per block */
    return r;
}

TEST(without_measurements_it_is_what_is_expected)
{
    struct tier_rate r = expecting();
    CHECK_NEAR(tier_rate_seconds(&r, 9, S), 0.010, 1e-9);
    CHECK_NEAR(tier_rate_seconds(&r, 9, 1000 * S), 0.010, 1e-9);
}

TEST(what_runs_comes_first)
{
    struct tier_rate r = expecting();
    tier_rate_begin(&r, 10);
    CHECK_NEAR(tier_rate_seconds(&r, 9, S), 0.020, 1e-9);
    tier_rate_end(&r, 10, 0, S); /* cancelled: says nothing of the speed */
    CHECK_NEAR(tier_rate_seconds(&r, 9, S), 0.010, 1e-9);
}

TEST(it_follows_what_is_measured)
{
    struct tier_rate r = expecting();
    for (uint64_t i = 0; i < 40; i++) {
        tier_rate_begin(&r, 9);
        tier_rate_end(&r, 9, 0.100, S + i);
    }
    CHECK_NEAR(tier_rate_seconds(&r, 9, S + 40), 0.100, 0.001);
    for (uint64_t i = 0; i < 40; i++) {
        tier_rate_begin(&r, 99);
        tier_rate_end(&r, 99, 0.010, 2 * S + i);
    }
    CHECK_NEAR(tier_rate_seconds(&r, 99, 2 * S + 40), 0.010, 0.001);
}

TEST(a_slow_one_is_tried_again_later)
{
    struct tier_rate r = expecting();
    for (uint64_t i = 0; i < 40; i++) {
        tier_rate_begin(&r, 9);
        tier_rate_end(&r, 9, 10, S + i);
    }
    CHECK_NEAR(tier_rate_seconds(&r, 9, 2 * S), 10, 0.3);
    CHECK_NEAR(tier_rate_seconds(&r, 9, 32 * S), 5, 0.3);
    CHECK_NEAR(tier_rate_seconds(&r, 9, 1000 * S), 0.010, 0.001);
}

/* All that wait for it are given up together, again and again. */
TEST(one_that_hung_is_tried_again_in_minutes)
{
    struct tier_rate r = expecting();
    tier_rate_late(&r, S);
    CHECK_NEAR(tier_rate_seconds(&r, 9, S), 0.1, 0.001);
    for (uint64_t i = 0; i < 1000; i++) tier_rate_late(&r, S + i);
    CHECK_NEAR(tier_rate_seconds(&r, 9, S), 1, 0.01);
    CHECK_NEAR(tier_rate_seconds(&r, 9, 301 * S), 0.011, 0.001);
}

/* One that is slower still by what was measured does not get faster by hanging. */
TEST(what_was_measured_is_not_made_faster)
{
    struct tier_rate r = expecting();
    for (uint64_t i = 0; i < 60; i++) {
        tier_rate_begin(&r, 9);
        tier_rate_end(&r, 9, 100, S + i);
    }
    tier_rate_late(&r, S + 60);
    CHECK_NEAR(tier_rate_seconds(&r, 9, S + 60), 100, 1);
}

TEST_MAIN(CASE(without_measurements_it_is_what_is_expected), CASE(what_runs_comes_first),
          CASE(it_follows_what_is_measured), CASE(a_slow_one_is_tried_again_later),
          CASE(one_that_hung_is_tried_again_in_minutes), CASE(what_was_measured_is_not_made_faster))
