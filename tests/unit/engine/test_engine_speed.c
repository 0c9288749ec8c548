/* test_engine_speed.c - how fast an engine says that it is: of the time that it is busy, by the last
 * seconds of it; and that a paced engine says what its curve does. */
#include "shared/base/clock.h"
#include "shared/engine/engine_speed.h"
#include "tests/unit/engine/engine_rig.h"

enum { TRIES = 6 };

/* ---- the means ---- */

static void count(struct engine_speed *s, uint32_t n, uint64_t prompt_rows, uint64_t decode_rows,
                  double seconds)
{
    const struct engine_speed_step step = { prompt_rows, decode_rows, prompt_rows >= 128, 1,
                                            seconds };
    for (uint32_t i = 0; i < n; i++) engine_speed_count(s, &step);
}

TEST(nothing_is_said_before_it_is_measured)
{
    struct engine_speed s = { 0 };
    CHECK_EQ_INT(engine_speed_prefill_per_s(&s), 0);
    CHECK_EQ_INT(engine_speed_step_us(&s), 0);
    count(&s, ENGINE_SPEED_STEPS_MIN - 1, 256, 0, 0.02);
    count(&s, 100, 0, 0, 0.02); /* steps of a group without rows here */
    CHECK_EQ_INT(engine_speed_prefill_per_s(&s), 0);
    CHECK_EQ_INT(engine_speed_step_us(&s), 0);
    count(&s, 1, 256, 0, 0.02);
    CHECK_EQ_INT(engine_speed_prefill_per_s(&s), 12800);
    CHECK_EQ_INT(engine_speed_step_us(&s), 0);
}

/* A prompt of 8 tokens alone says nothing of how long one of 8,000 takes. */
TEST(steps_that_were_not_full_say_nothing_of_prompts)
{
    struct engine_speed s = { 0 };
    count(&s, 100, 8, 0, 0.0126);
    CHECK_EQ_INT(engine_speed_prefill_per_s(&s), 0);
    count(&s, 10, 4096, 0, 0.06);
    count(&s, 1000, 8, 0, 0.0126);
    CHECK_NEAR(engine_speed_prefill_per_s(&s), 68267, 1);
}

/* Chunks with decoding sequences beside count for both, with all of their time. */
TEST(steps_of_both_kinds_count_for_both)
{
    struct engine_speed s = { 0 };
    count(&s, 200, 200, 8, 0.05);
    CHECK_EQ_INT(engine_speed_prefill_per_s(&s), 4000);
    CHECK_EQ_INT(engine_speed_step_us(&s), 50000);
}

/* With drafts, a step of 30 ms that gives 3 tokens is as fast for a sequence as one of 10 ms. */
TEST(steps_of_several_tokens_count_as_as_many)
{
    struct engine_speed s = { 0 };
    const struct engine_speed_step step = { .decode_rows = 9, .tokens = 3, .seconds = 0.03 };
    for (int i = 0; i < 100; i++) engine_speed_count(&s, &step);
    CHECK_EQ_INT(engine_speed_step_us(&s), 10000);
}

/* Ten seconds of steps with the new speed, tenfold either way; of mixed work only those count. */
static void check_change(double before_s, double after_s)
{
    struct engine_speed s = { 0 };
    const uint32_t n = (uint32_t)(10 / after_s);
    count(&s, (uint32_t)(60 / before_s), 256, 0, before_s);
    count(&s, (uint32_t)(60 / before_s), 0, 4, before_s);
    CHECK_NEAR(engine_speed_prefill_per_s(&s), 256 / before_s, 256 / before_s * 1e-3);
    CHECK_NEAR(engine_speed_step_us(&s), before_s * 1e6, before_s * 1e3);
    for (uint32_t i = 0; i < n; i++) {
        count(&s, 1, 256, 0, after_s);
        count(&s, 1, 0, 4, after_s);
    }
    CHECK_NEAR(engine_speed_prefill_per_s(&s), 256 / after_s, 256 / after_s * 0.1);
    CHECK_NEAR(engine_speed_step_us(&s), after_s * 1e6, after_s * 1e5);
}

TEST(a_change_of_speed_is_followed_within_ten_seconds_of_work)
{
    check_change(0.01, 0.1);
    check_change(0.1, 0.01);
    check_change(0.02, 0.03);
    check_change(4, 5);
}

TEST(steps_that_differ_are_averaged)
{
    struct engine_speed s = { 0 };
    for (int i = 0; i < 1000; i++) {
        count(&s, 1, 256, 0, 0.01);
        count(&s, 1, 512, 0, 0.03);
        count(&s, 1, 0, 1, 0.01);
        count(&s, 1, 0, 1, 0.03);
    }
    CHECK_NEAR(engine_speed_prefill_per_s(&s), 768 / 0.04, 200); /* tokens by time */
    CHECK_NEAR(engine_speed_step_us(&s), 20000, 200);            /* time by steps */
}

TEST(what_is_said_has_limits)
{
    struct engine_speed s = { 0 };
    count(&s, 5, UINT64_MAX, 1, 1e-9);
    CHECK_EQ_INT(engine_speed_prefill_per_s(&s), 1 << 30);
    CHECK_EQ_INT(engine_speed_step_us(&s), 1);
    count(&s, 5, 128, 1, 600);
    CHECK_EQ_INT(engine_speed_prefill_per_s(&s), 1);
    CHECK_EQ_INT(engine_speed_step_us(&s), 600000000);
    count(&s, 5, 128, 1, 0);
    count(&s, 5, 128, 1, -1);
    CHECK_EQ_INT(engine_speed_step_us(&s), 600000000);
}

/* ---- what fills a step ---- */

static double line_s(double fixed_s, double row_s, uint64_t rows)
{
    return fixed_s + row_s * (double)rows;
}

/* 31 times as long as a step without rows. */
TEST(a_step_is_filled_when_its_fixed_part_is_small)
{
    struct engine_speed s = { 0 };
    for (uint64_t i = 0; i < 100; i++) {
        const uint64_t rows = 10 + i * 37 % 200;
        CHECK(i || engine_speed_fill_rows(&s) == 0);
        count(&s, 1, rows, i % 3, line_s(0.01, 0.001, rows + i % 3));
    }
    CHECK_NEAR(engine_speed_fill_rows(&s), 310, 2);
    for (uint64_t i = 0; i < 400; i++) { /* it is another machine now */
        const uint64_t rows = 10 + i * 37 % 200;
        count(&s, 1, rows, 0, line_s(0.02, 0.0005, rows));
    }
    CHECK_NEAR(engine_speed_fill_rows(&s), 1240, 20);
}

TEST(what_fills_a_step_has_limits)
{
    struct engine_speed s = { 0 };
    count(&s, 100, 256, 0, 0.2); /* all alike: no line */
    CHECK_EQ_INT(engine_speed_fill_rows(&s), 0);
    s = (struct engine_speed){ 0 };
    for (uint64_t i = 0; i < 100; i++) count(&s, 1, 10 + i, 0, line_s(0, 0.001, 10 + i));
    CHECK_EQ_INT(engine_speed_fill_rows(&s), ENGINE_SPEED_FILL_MIN);
    for (uint64_t i = 0; i < 400; i++) count(&s, 1, 10 + i % 100, 0, 0.05);
    CHECK(engine_speed_fill_rows(&s) > 100000); /* rows take no time */
}

/* ---- an engine ---- */

static struct engine_stats stats_of(const struct rig *r)
{
    struct engine_stats st;
    engine_get_stats(r->engine, &st);
    return st;
}

static bool is_within(double got, double want, double part)
{
    return got >= want * (1 - part) && got <= want * (1 + part);
}

static void check_within(double got, double want, double part)
{
    if (!is_within(got, want, part))
        test_fail(__FILE__, __LINE__, "%g is not within %g %% of %g", got, part * 100, want);
}

/* Prompts in chunks of 64, then steps of one row: the curve's figures, and they stay while the
 * engine has nothing to do. The steps are long, so that a busy host does not make them much longer;
 * where it did, the next ones count. */
TEST(a_paced_engine_is_as_fast_as_its_curve)
{
    const struct pace_curve c = { .fixed_us = 50000,
                                  .prompt.row_us = 1000,
                                  .decode.row_us = 50000 };
    const double chunk_s = 0.114, step_us = 100000;
    struct engine_request q;
    struct rig r;
    rig_open(&r,
             (struct rig_options){ .pace = &c, .max_batched_tokens = 64, .no_prefix_cache = true });
    CHECK_EQ_INT(stats_of(&r).prefill_tokens_per_s, 0);
    for (uint32_t i = 0; i < TRIES; i++) {
        q = rig_request(i + 1, 320, i, 1);
        mem_free(rig_run(&r, &q, 1));
        if (is_within(stats_of(&r).prefill_tokens_per_s, 64 / chunk_s, 0.1)) break;
    }
    CHECK_EQ_INT(stats_of(&r).step_us, 0); /* the first token is the prompt's */
    for (uint32_t i = 0; i < TRIES; i++) {
        q = rig_request(TRIES + i + 1, 30, 7, 8);
        mem_free(rig_run(&r, &q, 1));
        if (is_within(stats_of(&r).step_us, step_us, 0.1)) break;
    }
    usleep(500000);
    check_within(stats_of(&r).step_us, step_us, 0.1);
    check_within(stats_of(&r).prefill_tokens_per_s, 64 / chunk_s, 0.1);
    CHECK_NEAR(gauge_value(metrics_gauge(r.metrics, "baton_engine_decode_step_seconds", "", "")),
               stats_of(&r).step_us * 1e-6, 1e-9);
    CHECK_EQ_INT(
        gauge_value(metrics_gauge(r.metrics, "baton_engine_prefill_tokens_per_second", "", "")),
        stats_of(&r).prefill_tokens_per_s);
    rig_close(&r);
}

/* Short prompts one by one: no step is full of them. A backlog of them fills steps. */
TEST(only_a_backlog_measures_short_prompts)
{
    const struct pace_curve c = { .fixed_us = 50000, .prompt.row_us = 1000 };
    struct engine_request q[12];
    struct rig r;
    rig_open(&r,
             (struct rig_options){
                 .pace = &c, .max_batched_tokens = 64, .max_seqs = 16, .no_prefix_cache = true });
    for (uint32_t i = 0; i < 6; i++) {
        q[i] = rig_request(i + 1, 10, i, 1);
        mem_free(rig_run(&r, &q[i], 1));
    }
    CHECK_EQ_INT(stats_of(&r).prefill_tokens_per_s, 0);
    for (uint32_t i = 0; i < COUNT_OF(q); i++) q[i] = rig_request(100 + i, 40, 50 + i, 1);
    mem_free(rig_run(&r, q, COUNT_OF(q)));
    check_within(stats_of(&r).prefill_tokens_per_s, 64 / 0.114, 0.25); /* not all were quite full */
    rig_close(&r);
}

/* They wait for the one place, each alone in a step, however many rows that could have. */
TEST(prompts_that_wait_for_a_place_say_nothing)
{
    const struct pace_curve c = { .fixed_us = 20000, .prompt.row_us = 100 };
    struct engine_request q[8];
    struct rig r;
    rig_open(&r,
             (struct rig_options){
                 .pace = &c, .max_batched_tokens = 64, .max_seqs = 1, .no_prefix_cache = true });
    for (uint32_t i = 0; i < COUNT_OF(q); i++) q[i] = rig_request(1 + i, 10, i, 1);
    mem_free(rig_run(&r, q, COUNT_OF(q)));
    CHECK_EQ_INT(stats_of(&r).prefill_tokens_per_s, 0);
    rig_close(&r);
}

TEST_MAIN(CASE(nothing_is_said_before_it_is_measured),
          CASE(steps_that_were_not_full_say_nothing_of_prompts),
          CASE(steps_of_both_kinds_count_for_both), CASE(steps_of_several_tokens_count_as_as_many),
          CASE(a_change_of_speed_is_followed_within_ten_seconds_of_work),
          CASE(steps_that_differ_are_averaged), CASE(what_is_said_has_limits),
          CASE(a_step_is_filled_when_its_fixed_part_is_small), CASE(what_fills_a_step_has_limits),
          CASE(a_paced_engine_is_as_fast_as_its_curve), CASE(only_a_backlog_measures_short_prompts),
          CASE(prompts_that_wait_for_a_place_say_nothing))
