/* test_pressure.c - where a sequence that lost its KV blocks goes on sooner. */
#include "scheduler/pressure/pressure.h"

#include "tests/harness/test.h"

/* A second here; elsewhere 500 tokens at 1,000 per second. */
static const struct pressure USUAL = {
    .here_us = 1000000,
    .has_room = true,
    .there_tokens = 500,
    .there_tokens_per_s = 1000,
};

static void is(struct pressure p, enum pressure_action want)
{
    CHECK_EQ_STR(pressure_action_name(pressure_choose(&p)), pressure_action_name(want));
}

TEST(pressure_goes_where_it_is_sooner)
{
    struct pressure p = USUAL;
    is(p, PRESSURE_HAND_BACK);
    p.here_us = 500000 + PRESSURE_PLACE_US; /* as long: it stays */
    is(p, PRESSURE_RECOMPUTE);
    p.here_us++;
    is(p, PRESSURE_HAND_BACK);
    p = USUAL;
    p.there_tokens = 5000; /* that node has a line */
    is(p, PRESSURE_RECOMPUTE);
    p.there_tokens_per_s = 10000;
    is(p, PRESSURE_HAND_BACK);
    p.there_tokens = UINT64_MAX;
    is(p, PRESSURE_RECOMPUTE);
}

TEST(pressure_stays_where_nothing_better_is_known)
{
    struct pressure p = USUAL;
    p.has_room = false;
    is(p, PRESSURE_RECOMPUTE);
    p = USUAL;
    p.here_us = 0; /* this node has not measured */
    is(p, PRESSURE_RECOMPUTE);
    p = USUAL;
    p.there_tokens_per_s = 0; /* nor has that one */
    is(p, PRESSURE_RECOMPUTE);
}

TEST(pressure_sends_nobody_around)
{
    struct pressure p = USUAL;
    for (p.n_handed_back = 0; p.n_handed_back < PRESSURE_HAND_BACKS_MAX; p.n_handed_back++)
        is(p, PRESSURE_HAND_BACK);
    is(p, PRESSURE_RECOMPUTE);
}

TEST_MAIN(CASE(pressure_goes_where_it_is_sooner),
          CASE(pressure_stays_where_nothing_better_is_known), CASE(pressure_sends_nobody_around))
