/* test_engine_pace.c - an engine whose steps last what a curve or an injected fault says: the
 * tokens are the same, the time passes without computing, progress is told as in a long step, and a
 * stop is not held up. */
#include <sys/resource.h>

#include "shared/base/clock.h"
#include "tests/unit/engine/engine_rig.h"

static struct pace_curve of(double fixed_us, double prompt_row_us, double decode_row_us)
{
    return (struct pace_curve){ .fixed_us = fixed_us,
                                .prompt.row_us = prompt_row_us,
                                .decode.row_us = decode_row_us };
}

static struct engine_fault_plan faults(const char *text)
{
    struct engine_fault_plan p;
    struct err err = { 0 };
    if (engine_fault_parse(str_of(text), &p, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
    return p;
}

static struct answer *plain_answer(const struct engine_request *q)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ 0 });
    struct answer *a = rig_run(&r, q, 1);
    rig_close(&r);
    return a;
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static struct engine_stats stats_of(const struct rig *r)
{
    struct engine_stats st;
    engine_get_stats(r->engine, &st);
    return st;
}

/* Runs prompts of different lengths: then it is known how many rows fill a step. */
static void measure_steps(struct rig *r)
{
    for (uint32_t i = 0; i < 6; i++) {
        const struct engine_request q = rig_request(1000 + i, 10 + 10 * i, 1000 + i, 1);
        mem_free(rig_run(r, &q, 1));
    }
}

static void await_work(const struct rig *r)
{
    for (int ms = 0; ms < RIG_WAIT_MS && !stats_of(r).has_work; ms++) usleep(1000);
    CHECK(stats_of(r).has_work);
}

/* Waits until the step is computed and waits: the compute threads are done. */
static void await_wait(const struct rig *r)
{
    await_work(r);
    usleep(100000);
}

/* ---- curves ---- */

/* A step is counted after its tokens are told. */
static void await_steps(struct rig *r, uint64_t n)
{
    const uint64_t until = clock_ms() + 5000;
    while (rig_count(r, "baton_engine_steps_total") < n && clock_ms() < until) usleep(1000);
    CHECK_EQ_INT(rig_count(r, "baton_engine_steps_total"), n);
}

/* 40 rows of a prompt, and then seven steps of a row each. */
TEST(a_paced_engine_gives_the_same_tokens_in_the_time_of_the_curve)
{
    const struct engine_request q = rig_request(1, 40, 3, 8);
    const struct pace_curve c = of(10000, 1000, 20000);
    struct answer *want = plain_answer(&q);
    struct rig r;
    rig_open(&r, (struct rig_options){ .pace = &c });
    const uint64_t begin = clock_ms();
    struct answer *got = rig_run(&r, &q, 1);
    const uint64_t ms = clock_ms() - begin;
    check_same(want, got);
    CHECK(ms >= 10 + 40 + 7 * (10 + 20) - 2);
    CHECK(got->end.prefill_ns >= 49 * UINT64_C(1000000));
    CHECK(got->end.decode_ns >= 209 * UINT64_C(1000000));
    CHECK_EQ_INT(gauge_value(metrics_gauge(r.metrics, "baton_engine_paced", "", "")), 1);
    await_steps(&r, 8);
    rig_close(&r);
    mem_free(want);
    mem_free(got);
}

/* Three of 64 rows wait behind one of 250. The first of them has its token before the others are
 * computed. */
TEST(a_step_takes_no_more_prompts_than_fill_it)
{
    const struct pace_curve c = of(500, 4000, 0);
    struct engine_request q[4];
    struct rig r;
    rig_open(&r, (struct rig_options){ .pace = &c });
    measure_steps(&r);
    await_steps(&r, 6);
    for (uint32_t i = 0; i < COUNT_OF(q); i++) q[i] = rig_request(i + 1, i ? 64 : 250, i, 1);
    CHECK_OK(engine_submit(r.engine, &q[0]));
    await_work(&r);
    mem_free(rig_run(&r, q + 1, 3));
    await_steps(&r, 6 + 4);
    rig_close(&r);
}

/* The prompt of 250 rows takes 750 ms. Submits one that goes first once it has begun, and returns
 * whether that overtakes it. */
static bool overtakes(struct rig *r, uint64_t id)
{
    const struct engine_request slow = rig_request(id, 250, id, 1);
    struct engine_request first = rig_request(id + 1, 16, id + 1, 1);
    struct rig_event e;
    first.goes_first = true;
    CHECK_OK(engine_submit(r->engine, &slow));
    while ((e = rig_next(r)).ev.kind != ENGINE_STARTED) {}
    CHECK_OK(engine_submit(r->engine, &first));
    while ((e = rig_next(r)).ev.kind != ENGINE_FINISHED) {}
    const bool overtook = e.ev.id == first.id;
    while ((e = rig_next(r)).ev.kind != ENGINE_FINISHED) {}
    CHECK(e.ev.id == (overtook ? slow.id : first.id));
    return overtook;
}

TEST(prompts_are_cut_while_others_go_first)
{
    const struct pace_curve c = of(500, 3000, 0);
    struct rig r;
    rig_open(&r, (struct rig_options){ .pace = &c });
    measure_steps(&r);
    CHECK(!overtakes(&r, 1)); /* nobody expects it */
    CHECK(overtakes(&r, 11));
    rig_close(&r);
}

TEST(waiting_uses_no_cpu)
{
    const struct pace_curve c = of(2000000, 0, 0);
    const struct engine_request q = rig_request(1, 10, 3, 1);
    struct rig r;
    rig_open(&r, (struct rig_options){ .pace = &c });
    CHECK_OK(engine_submit(r.engine, &q));
    await_wait(&r);
    usleep(200000); /* the compute threads stop spinning */
    const double before = cpu_seconds();
    usleep(1000000);
    CHECK(cpu_seconds() - before < 0.5);
    CHECK(stats_of(&r).has_work);
    rig_close(&r);
}

/* A step that takes longer anyway is not held up, and counted. */
TEST(a_step_that_is_late_is_counted)
{
    const struct pace_curve c = of(0, 0, 0);
    const struct engine_request q = rig_request(1, 20, 3, 4);
    struct rig r;
    rig_open(&r, (struct rig_options){ .pace = &c });
    mem_free(rig_run(&r, &q, 1));
    CHECK_EQ_INT(rig_count(&r, "baton_engine_paced_late_steps_total"), 4);
    rig_close(&r);
}

/* Peers take an engine for lost that has work and tells the same progress for 2.5 s. */
TEST(a_waiting_step_makes_progress)
{
    const struct pace_curve c = of(1500000, 0, 0);
    const struct engine_request q = rig_request(1, 10, 3, 1);
    struct rig r;
    rig_open(&r, (struct rig_options){ .pace = &c });
    CHECK_OK(engine_submit(r.engine, &q));
    await_wait(&r);
    for (int i = 0; i < 4; i++) {
        const uint64_t before = stats_of(&r).progress;
        usleep(250000);
        CHECK(stats_of(&r).has_work);
        CHECK(stats_of(&r).progress > before);
    }
    rig_close(&r);
}

TEST(a_stop_ends_the_wait)
{
    const struct pace_curve c = of(60e6, 0, 0);
    const struct engine_request q = rig_request(1, 10, 3, 1);
    struct rig r;
    rig_open(&r, (struct rig_options){ .pace = &c });
    CHECK_OK(engine_submit(r.engine, &q));
    await_wait(&r);
    const uint64_t begin = clock_ms();
    engine_stop(r.engine);
    CHECK(clock_ms() - begin < 5000); /* 20 ms, on a host that is not busy */
    rig_close(&r);
}

/* What arrives in a step is looked at when it ends, as in one that computes. */
TEST(a_cancel_waits_for_the_end_of_the_step_and_no_longer)
{
    const struct pace_curve c = of(600000, 0, 0);
    const struct engine_request q = rig_request(1, 10, 3, 100);
    struct rig r;
    struct answer a = { .id = 1 };
    rig_open(&r, (struct rig_options){ .pace = &c });
    CHECK_OK(engine_submit(r.engine, &q));
    CHECK_EQ_INT(rig_next(&r).ev.kind, ENGINE_STARTED); /* from inside the first step */
    CHECK_OK(engine_cancel(r.engine, 1, true));
    rig_gather(&r, &a, 1);
    CHECK(a.canceled);
    CHECK_EQ_INT(a.n_out, 1); /* that of the first step */
    await_steps(&r, 1);
    rig_close(&r);
}

/* ---- faults ---- */

TEST(a_hanging_step_makes_no_progress_until_it_ends)
{
    const struct engine_request q = rig_request(1, 20, 5, 6);
    const struct engine_fault_plan p = faults("hang@3:1500");
    struct answer *want = plain_answer(&q), got = { .id = 1 };
    struct rig r;
    rig_open(&r, (struct rig_options){ .fault = &p });
    CHECK_OK(engine_submit(r.engine, &q));
    for (uint32_t n = 0; n < 2;) { /* the tokens before it */
        const struct rig_event e = rig_next(&r);
        answer_add(&got, &e.ev);
        n += e.ev.kind == ENGINE_TOKEN;
    }
    usleep(300000); /* it hangs by now */
    const uint64_t stands = stats_of(&r).progress;
    for (int i = 0; i < 5; i++) {
        usleep(100000);
        CHECK_EQ_INT(stats_of(&r).progress, stands);
        CHECK(stats_of(&r).has_work);
    }
    rig_gather(&r, &got, 1);
    check_same(want, &got);
    CHECK(stats_of(&r).progress > stands);
    rig_close(&r);
    mem_free(want);
}

TEST(an_engine_that_hangs_for_ever_can_be_stopped)
{
    const struct engine_request q = rig_request(1, 20, 5, 6);
    const struct engine_fault_plan p = faults("hang@1");
    struct rig r;
    rig_open(&r, (struct rig_options){ .fault = &p });
    CHECK_OK(engine_submit(r.engine, &q));
    await_wait(&r);
    const uint64_t begin = clock_ms();
    engine_stop(r.engine);
    CHECK(clock_ms() - begin < 5000);
    rig_close(&r);
}

/* Steps of 20 ms, three times as long from the third on. */
TEST(slow_steps_take_a_multiple)
{
    const struct pace_curve c = of(20000, 0, 0);
    const struct engine_fault_plan p = faults("slow@3:3");
    const struct engine_request q = rig_request(1, 20, 5, 6);
    struct rig r;
    rig_open(&r, (struct rig_options){ .pace = &c, .fault = &p });
    const uint64_t begin = clock_ms();
    mem_free(rig_run(&r, &q, 1));
    CHECK(clock_ms() - begin >= 2 * 20 + 4 * 60 - 2);
    rig_close(&r);
}

TEST(a_plan_says_which_step)
{
    const struct engine_fault_plan p = faults("hang@3, slow@10:2,slow@5:4.5,hang@7:250");
    CHECK_EQ_INT(p.n, 4);
    CHECK(engine_fault_factor(&p, 4) == 1);
    CHECK(engine_fault_factor(&p, 5) == 4.5);
    CHECK(engine_fault_factor(&p, 9) == 4.5);
    CHECK(engine_fault_factor(&p, 10) == 2);
    CHECK_EQ_INT(engine_fault_hang_ms(&p, 3), ENGINE_FAULT_FOREVER);
    CHECK_EQ_INT(engine_fault_hang_ms(&p, 7), 250);
    CHECK_EQ_INT(engine_fault_hang_ms(&p, 8), 0);
}

TEST(a_wrong_plan_is_named)
{
    static const struct {
        const char *text, *says;
    } bad[] = {
        { "", "is not hang@STEP" },
        { "hang", "'hang' is not hang@STEP" },
        { "stop@3", "'stop@3' is not hang@STEP" },
        { "hang@3,", "'' is not hang@STEP" },
        { "hang@0", "'0' in 'hang@0' is not a step, counted from 1" },
        { "hang@x:5", "'x' in 'hang@x:5' is not a step" },
        { "hang@3:0", "a number of milliseconds from 1 to 600000" },
        { "hang@3:600001", "'600001'" },
        { "slow@3", "is not a factor from 1 to 1000" },
        { "slow@3:0.5", "'0.5' in 'slow@3:0.5' is not a factor" },
        { "slow@3:nan", "is not a factor" },
        { "hang@1,hang@1,hang@1,hang@1,hang@1,hang@1,hang@1,hang@1,hang@1", "more than 8 faults" },
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        struct engine_fault_plan p;
        struct err err = { 0 };
        CHECK_STATUS(engine_fault_parse(str_of(bad[i].text), &p, &err), ERR_CONFIG);
        if (!strstr(err.text, bad[i].says) || !strstr(err.text, "BATON_ENGINE_FAULT"))
            test_fail(__FILE__, __LINE__, "'%s': %s", bad[i].text, err.text);
    }
}

TEST_MAIN(CASE(a_paced_engine_gives_the_same_tokens_in_the_time_of_the_curve),
          CASE(a_step_takes_no_more_prompts_than_fill_it),
          CASE(prompts_are_cut_while_others_go_first), CASE(waiting_uses_no_cpu),
          CASE(a_step_that_is_late_is_counted), CASE(a_waiting_step_makes_progress),
          CASE(a_stop_ends_the_wait), CASE(a_cancel_waits_for_the_end_of_the_step_and_no_longer),
          CASE(a_hanging_step_makes_no_progress_until_it_ends),
          CASE(an_engine_that_hangs_for_ever_can_be_stopped), CASE(slow_steps_take_a_multiple),
          CASE(a_plan_says_which_step), CASE(a_wrong_plan_is_named))
