/* test_engine_life.c - how sequences begin and end: limits, stops, echo, cancel, quarantine,
 * release, idling. */
#include <math.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "shared/base/log.h"
#include "tests/unit/engine/engine_rig.h"

static struct rig_event await_kind(struct rig *r, enum engine_event_kind kind)
{
    for (;;) {
        struct rig_event e = rig_next(r);
        if (e.ev.kind == kind) return e;
    }
}

static void check_nothing_follows(struct rig *r)
{
    struct rig_event e;
    struct engine_request q = rig_request(999999, 3, 1,
                                          1); /* other events would arrive before its end */
    CHECK_OK(engine_submit(r->engine, &q));
    do {
        e = rig_next(r);
        CHECK_EQ_INT(e.ev.id, 999999);
    } while (e.ev.kind != ENGINE_FINISHED);
}

TEST(requests_that_cannot_fit_are_refused)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ .n_blocks = 4 });
    struct engine_request q = rig_request(1, 65, 1, 1);
    CHECK_STATUS(engine_submit(r.engine, &q), ERR_TOO_LONG);
    q = rig_request(1, 64, 1, 1); /* room for the prompt, none for an answer */
    CHECK_STATUS(engine_submit(r.engine, &q), ERR_TOO_LONG);
    CHECK_STATUS(engine_reserve(r.engine, &q), ERR_TOO_LONG);
    q = rig_request(1, 0, 1, 1);
    CHECK_STATUS(engine_submit(r.engine, &q), ERR_INVALID);
    int32_t bad[2] = { 5, RIG_VOCAB };
    q = rig_request(1, 2, 1, 1);
    q.tokens = bad;
    CHECK_STATUS(engine_submit(r.engine, &q), ERR_INVALID);
    bad[1] = -1;
    CHECK_STATUS(engine_submit(r.engine, &q), ERR_INVALID);
    struct token_logprobs first = { .id = RIG_VOCAB };
    CHECK_STATUS(engine_activate(r.engine, 1, &first, NULL, 0), ERR_INVALID);
    q = rig_request(1, 63, 1, 100); /* ends where the pool ends */
    struct answer *a = rig_run(&r, &q, 1);
    CHECK_EQ_INT(a->n_out, 1);
    CHECK_EQ_INT(a->end.finish, FINISH_LENGTH);
    mem_free(a);
    q = rig_request(2, 10, 1, 100);
    a = rig_run(&r, &q, 1);
    CHECK_EQ_INT(a->n_out, 54);
    CHECK_EQ_INT(a->end.finish, FINISH_LENGTH);
    mem_free(a);
    rig_await_free_blocks(&r, 4);
    rig_close(&r);
}

TEST(full_queue_is_refused)
{
    struct rig r;
    enum status st = OK;
    rig_open(&r, (struct rig_options){ .max_waiting = 2, .max_seqs = 1 });
    uint64_t n = 0;
    for (; n < 5 && st == OK; n++) {
        struct engine_request q = rig_request(n, 500, n, 200);
        st = engine_submit(r.engine, &q);
    }
    CHECK_STATUS(st, ERR_FULL); /* one runs, two wait */
    for (uint64_t id = 0; id + 1 < n; id++) CHECK_OK(engine_cancel(r.engine, id, true));
    for (uint64_t id = 0; id + 1 < n; id++) await_kind(&r, ENGINE_CANCELED);
    struct engine_request q = rig_request(77, 5, 1, 2);
    struct answer *a = rig_run(&r, &q, 1);
    CHECK_EQ_INT(a->n_out, 2);
    mem_free(a);
    rig_close(&r);
}

/* One place: they run one after the other, so the order of their starts is that of the line. */
TEST(prompts_that_go_first_overtake_others)
{
    static const uint64_t want[] = { 3, 4, 1, 2 };
    struct rig r;
    rig_open(&r, (struct rig_options){ .max_seqs = 1 });
    for (uint64_t id = 0; id < 5; id++) {
        struct engine_request q = rig_request(id, id ? 8 : 500, id, id ? 2 : 200);
        q.goes_first = id >= 3;
        CHECK_OK(engine_submit(r.engine, &q));
        if (id == 0) await_kind(&r, ENGINE_STARTED); /* and runs while the others come */
    }
    for (size_t i = 0; i < 4; i++) CHECK(await_kind(&r, ENGINE_STARTED).ev.id == want[i]);
    await_kind(&r, ENGINE_FINISHED); /* the last; the others' came before it started */
    rig_close(&r);
}

TEST(stop_ids_and_end_tokens_end_the_answer)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ 0 });
    struct engine_request q = rig_request(1, 20, 3, 20);
    struct answer *want = rig_run(&r, &q, 1);
    q.id = 2;
    q.sampling.n_stop_ids = 1;
    q.sampling.stop_ids[0] = want->out[5].id;
    uint32_t at = 0;
    while (want->out[at].id != want->out[5].id) at++;
    struct answer *got = rig_run(&r, &q, 1);
    CHECK_EQ_INT(got->n_out, at + 1);
    CHECK_EQ_INT(got->end.finish, FINISH_STOP);
    CHECK_EQ_INT(got->end.stop_token, want->out[5].id);
    mem_free(got);
    q.id = 3;
    q.sampling.min_tokens = at + 3;
    got = rig_run(&r, &q, 1);
    CHECK(got->n_out > at + 3);
    mem_free(got);
    /* Forces the checkpoint's end token (1). */
    const struct logit_bias bias = { 1, 100 };
    q = rig_request(4, 20, 3, 20);
    q.sampling.bias = &bias;
    q.sampling.n_bias = 1;
    got = rig_run(&r, &q, 1);
    CHECK_EQ_INT(got->n_out, 20); /* ignore_eos */
    mem_free(got);
    q.id = 5;
    q.sampling.ignore_eos = false;
    got = rig_run(&r, &q, 1);
    CHECK_EQ_INT(got->n_out, 1);
    CHECK_EQ_INT(got->end.finish, FINISH_STOP);
    CHECK_EQ_INT(got->end.stop_token, 1);
    mem_free(got);
    mem_free(want);
    rig_close(&r);
}

TEST(echo_scores_the_prompt_without_an_answer)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ .max_batched_tokens = 512 });
    struct engine_request q = rig_request(1, 300, 3, 2); /* more rows than one step scores */
    q.want_prompt_logprobs = true;
    struct answer *with = rig_run(&r, &q, 1);
    CHECK_EQ_INT(with->n_scored, 299);
    q.id = 2;
    q.sampling.max_tokens = 0;
    struct answer *echo = rig_run(&r, &q, 1);
    CHECK_EQ_INT(echo->n_scored, 299);
    CHECK_EQ_INT(echo->n_out, 0);
    CHECK_EQ_INT(echo->end.finish, FINISH_LENGTH);
    CHECK_EQ_INT(echo->end.n_cached, 0); /* cached positions have no logits */
    CHECK(memcmp(with->scored, echo->scored, sizeof with->scored) == 0);
    mem_free(echo);
    q = rig_request(3, 1, 3, 0);
    q.want_prompt_logprobs = true;
    echo = rig_run(&r, &q, 1);
    CHECK_EQ_INT(echo->n_scored, 0);
    CHECK_EQ_INT(echo->n_out, 0);
    CHECK_EQ_INT(echo->end.finish, FINISH_LENGTH);
    mem_free(echo);
    mem_free(with);
    rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
    rig_close(&r);
}

/* Prompt logprobs are sent once each although the sequences are preempted and start again. */
TEST(echo_survives_preemption)
{
    enum { N = 4 };
    struct rig r;
    struct engine_request reqs[N];
    rig_open(&r, (struct rig_options){ .n_blocks = 12, .max_batched_tokens = 20 });
    for (uint32_t i = 0; i < N; i++) {
        reqs[i] = rig_request(i, 40, 9, 60);
        reqs[i].want_prompt_logprobs = true;
    }
    struct answer *a = rig_run(&r, reqs, N);
    CHECK(rig_count(&r, "baton_engine_preemptions_total") > 0);
    for (uint32_t i = 0; i < N; i++) {
        CHECK_EQ_INT(a[i].n_scored, 39);
        check_same(&a[0], &a[i]);
    }
    mem_free(a);
    rig_close(&r);
}

/* Whoever loses its blocks is told of, with what it waits for; it may be canceled then, and the
 * others end well. */
TEST(preempted_sequences_are_told_of)
{
    enum { N = 4, PROMPT = 40, OUT = 60 };
    struct rig r;
    uint64_t canceled = 0;
    uint32_t n_preempted = 0, n_done = 0;
    rig_open(&r, (struct rig_options){ .n_blocks = 12, .max_batched_tokens = 200 });
    for (uint32_t i = 0; i < N; i++) {
        struct engine_request q = rig_request(i + 1, PROMPT, 9, OUT);
        CHECK_OK(engine_submit(r.engine, &q));
    }
    while (n_done < N) {
        struct rig_event e = rig_next(&r);
        n_done += e.ev.kind == ENGINE_FINISHED || e.ev.kind == ENGINE_CANCELED;
        if (e.ev.kind == ENGINE_FINISHED) CHECK_OK(e.ev.status);
        if (e.ev.kind == ENGINE_CANCELED) CHECK_EQ_INT(e.ev.id, canceled);
        if (e.ev.kind != ENGINE_PREEMPTED) continue;
        n_preempted++;
        CHECK(e.ev.n_tokens > PROMPT && e.ev.n_tokens < PROMPT + OUT);
        CHECK(e.ev.wait_steps > 0 && e.ev.wait_steps < OUT);
        if (canceled) continue;
        canceled = e.ev.id;
        CHECK_OK(engine_cancel(r.engine, canceled, true));
    }
    CHECK(canceled != 0);
    CHECK_EQ_INT(rig_count(&r, "baton_engine_preemptions_total"), n_preempted);
    rig_await_free_blocks(&r, 12);
    rig_close(&r);
}

TEST(canceled_sequences_leave_nothing_behind)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ .max_seqs = 2 });
    for (uint64_t id = 0; id < 4; id++) { /* two run, two wait */
        struct engine_request q = rig_request(id, 100, id, 1000);
        CHECK_OK(engine_submit(r.engine, &q));
    }
    await_kind(&r, ENGINE_TOKEN);
    for (uint64_t id = 0; id < 4; id++) CHECK_OK(engine_cancel(r.engine, id, true));
    CHECK_OK(engine_cancel(r.engine, 12345, true)); /* unknown: no event */
    for (int i = 0; i < 4; i++) await_kind(&r, ENGINE_CANCELED);
    rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
    check_nothing_follows(&r);
    struct engine_stats s;
    engine_get_stats(r.engine, &s);
    CHECK_EQ_INT(s.n_running + s.n_waiting, 0);
    CHECK_EQ_INT(s.waiting_tokens, 0);
    rig_close(&r);
}

TEST(reservation_without_blocks_is_busy_at_once)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ .n_blocks = 8 });
    struct engine_request q = rig_request(1, 100, 1, 10);
    CHECK_OK(engine_reserve(r.engine, &q));
    CHECK_OK(rig_next(&r).ev.status);
    rig_await_free_blocks(&r, 1);
    q = rig_request(2, 20, 1, 10);
    CHECK_OK(engine_reserve(r.engine, &q));
    CHECK_STATUS(rig_next(&r).ev.status, ERR_BUSY);
    q.id = 1; /* in use */
    CHECK_OK(engine_reserve(r.engine, &q));
    CHECK_STATUS(rig_next(&r).ev.status, ERR_INVALID);
    CHECK_OK(engine_cancel(r.engine, 1, true));
    CHECK_EQ_INT(rig_next(&r).ev.kind, ENGINE_CANCELED);
    rig_await_free_blocks(&r, 8);
    rig_close(&r);
}

TEST(unfenced_blocks_wait_in_quarantine)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ .n_blocks = 10 });
    struct engine_request q = rig_request(1, 64, 1, 2);
    mem_free(rig_run(&r, &q, 1)); /* leaves 4 cached blocks, 3 of which the reservation shares */
    q.id = 2;
    CHECK_OK(engine_reserve(r.engine, &q));
    struct rig_event e = rig_next(&r);
    CHECK_EQ_INT(e.ev.n_cached, 48);
    CHECK_OK(engine_cancel(r.engine, 2, false));
    CHECK_EQ_INT(rig_next(&r).ev.kind, ENGINE_CANCELED);
    rig_await_free_blocks(&r, 9);
    CHECK_OK(engine_cancel(r.engine, 2,
                           true)); /* canceled before: no second event, the quarantine goes on */
    check_nothing_follows(&r);
    rig_await_free_blocks(&r, 9);
    CHECK_OK(engine_free_quarantined(r.engine, 2));
    rig_await_free_blocks(&r, 10);
    CHECK_OK(engine_free_quarantined(r.engine, 2));
    check_nothing_follows(&r);
    rig_close(&r);
}

TEST(reserved_prompt_is_not_in_the_cache_before_it_is_there)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ 0 });
    struct engine_request q = rig_request(1, 64, 1, 2);
    CHECK_OK(engine_reserve(r.engine, &q));
    CHECK_OK(rig_next(&r).ev.status);
    q.id = 2;
    struct answer *a = rig_run(&r, &q, 1);
    CHECK_EQ_INT(a->end.n_cached, 0);
    mem_free(a);
    rig_close(&r);
}

TEST(activation_may_be_the_end)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ 0 });
    const uint32_t max_tokens[3] = { 1, 10, 10 };
    const enum finish_reason want[3] = { FINISH_LENGTH, FINISH_STOP, FINISH_STOP };
    for (uint64_t i = 0; i < 3; i++) {
        struct engine_request q = rig_request(i, 30, i, max_tokens[i]);
        /* 1 is this checkpoint's end token */
        struct token_logprobs first = { .id = i == 1 ? 1 : 200 };
        q.sampling.ignore_eos = false;
        q.sampling.n_stop_ids = i == 2;
        q.sampling.stop_ids[0] = 200;
        CHECK_OK(engine_reserve(r.engine, &q));
        CHECK_EQ_INT(rig_next(&r).ev.kind, ENGINE_RESERVED);
        CHECK_OK(engine_activate(r.engine, i, &first, NULL, 0));
        struct rig_event e = rig_next(&r);
        CHECK_EQ_INT(e.ev.kind, ENGINE_TOKEN);
        CHECK_EQ_INT(e.ev.index, 0);
        CHECK_EQ_INT(e.ev.lp.id, first.id);
        e = rig_next(&r);
        CHECK_EQ_INT(e.ev.kind, ENGINE_FINISHED);
        CHECK_EQ_INT(e.ev.finish, want[i]);
        rig_await_free_blocks(&r, RIG_BLOCKS_MAX);
    }
    rig_close(&r);
}

TEST(prefilled_blocks_are_held_until_released)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ .n_blocks = 10 });
    for (uint64_t id = 0; id < 2; id++) {
        struct engine_request q = rig_request(id, 64, 1, 5);
        q.prefill_only = true;
        struct answer *a = rig_run(&r, &q, 1);
        CHECK_EQ_INT(a->end.finish, FINISH_PREFILLED);
        mem_free(a);
        rig_await_free_blocks(&r, 6);
        if (id == 0) CHECK_OK(engine_release(r.engine, id));
        else CHECK_OK(engine_cancel(r.engine, id, true));
        rig_await_free_blocks(&r, 10);
    }
    CHECK_EQ_INT(rig_next(&r).ev.kind, ENGINE_CANCELED);
    rig_close(&r);
}

/* Held blocks leave no room for the next request: the engine waits without spinning and continues
 * when they are released. */
TEST(waiting_for_blocks_uses_no_cpu)
{
    struct rig r;
    struct rusage before, after;
    struct engine_stats s;
    rig_open(&r, (struct rig_options){ .n_blocks = 6 });
    struct engine_request q = rig_request(1, 64, 1, 5);
    q.prefill_only = true;
    mem_free(rig_run(&r, &q, 1));
    q = rig_request(2, 60, 2, 5);
    CHECK_OK(engine_submit(r.engine, &q));
    usleep(200000); /* the compute threads stop spinning */
    getrusage(RUSAGE_SELF, &before);
    usleep(300000);
    getrusage(RUSAGE_SELF, &after);
    double used = (double)(after.ru_utime.tv_sec - before.ru_utime.tv_sec) +
                  (double)(after.ru_utime.tv_usec - before.ru_utime.tv_usec) * 1e-6;
    CHECK(used < 0.05);
    engine_get_stats(r.engine, &s);
    CHECK_EQ_INT(s.n_waiting, 1);
    CHECK_EQ_INT(s.waiting_tokens, 60);
    CHECK(!s.has_work);
    CHECK_OK(engine_release(r.engine, 1));
    CHECK_EQ_INT(await_kind(&r, ENGINE_FINISHED).ev.id, 2);
    rig_close(&r);
}

TEST(engine_ends_with_work_in_it)
{
    struct rig r;
    rig_open(&r, (struct rig_options){ .max_seqs = 2 });
    for (uint64_t id = 0; id < 6; id++) {
        struct engine_request q = rig_request(id, 100, id, 1000);
        CHECK_OK(id % 2 ? engine_reserve(r.engine, &q) : engine_submit(r.engine, &q));
    }
    CHECK_OK(engine_cancel(r.engine, 1, false));
    await_kind(&r, ENGINE_CANCELED);
    rig_close(&r);
}

/* Returns what was logged to that file (static). */
static const char *log_of(const struct log_file_options *o)
{
    static char log[1 << 16];
    char path[600];
    snprintf(path, sizeof path, "%s/%s", o->dir, o->name);
    FILE *f = fopen(path, "r");
    CHECK(f);
    log[fread(log, 1, sizeof log - 1, f)] = 0;
    fclose(f);
    return log;
}

/* Returns how often `text` is in the log of an engine that tells every `ms`. */
static int times_told(uint32_t ms, const char *text)
{
    struct rig r;
    const struct log_file_options o = { .dir = test_tmpdir(), .name = ms ? "told" : "untold" };
    CHECK_OK(log_set_file(&o));
    rig_open(&r, (struct rig_options){ .max_batched_tokens = 8, .tell_prefill_ms = ms });
    struct engine_request q = rig_request(77, 1200, 1, 2);
    q.request = 0xabc;
    mem_free(rig_run(&r, &q, 1));
    rig_close(&r);
    int n = 0;
    for (const char *p = log_of(&o); (p = strstr(p, text)) != NULL; p++) n++;
    return n;
}

TEST(long_prefill_says_how_far_it_is)
{
    CHECK(times_told(1, " long prefill request=0000000000000abc tokens=") > 0);
    CHECK(times_told(1, " of=1200 percent=") > 0);
    CHECK_EQ_INT(times_told(0, " long prefill "), 0); /* this one does not take 10 s */
}

/* One sequence has most of its prompt from the cache; the other one needs all blocks, so the
 * first starts again with an empty cache. The rate is that of what is computed since. */
TEST(long_prefill_counts_from_the_last_start)
{
    struct rig r;
    int n_told = 0;
    const struct log_file_options o = { .dir = test_tmpdir(), .name = "again" };
    CHECK_OK(log_set_file(&o));
    rig_open(&r,
             (struct rig_options){ .n_blocks = 37, .max_batched_tokens = 8, .tell_prefill_ms = 1 });
    struct engine_request q[2] = { rig_request(2, 320, 2, 230), rig_request(1, 200, 1, 100) };
    q[1].request = 0xabc;
    mem_free(rig_run(&r, &q[1], 1));
    struct answer *a = rig_run(&r, q, 2);
    CHECK(a[1].end.n_cached >= 150);
    CHECK(rig_count(&r, "baton_engine_preemptions_total") > 0);
    mem_free(a);
    rig_close(&r);
    for (const char *p = log_of(&o); (p = strstr(p, " long prefill request=0000000000000abc "));
         p++) {
        const char *rate = strstr(p, " tokens_per_s=");
        CHECK(rate && strtod(rate + 14, NULL) < 1e7);
        n_told++;
    }
    CHECK(n_told > 0);
}

TEST_MAIN(CASE(requests_that_cannot_fit_are_refused), CASE(full_queue_is_refused),
          CASE(prompts_that_go_first_overtake_others), CASE(stop_ids_and_end_tokens_end_the_answer),
          CASE(echo_scores_the_prompt_without_an_answer), CASE(echo_survives_preemption),
          CASE(preempted_sequences_are_told_of), CASE(canceled_sequences_leave_nothing_behind),
          CASE(reservation_without_blocks_is_busy_at_once),
          CASE(unfenced_blocks_wait_in_quarantine),
          CASE(reserved_prompt_is_not_in_the_cache_before_it_is_there),
          CASE(activation_may_be_the_end), CASE(prefilled_blocks_are_held_until_released),
          CASE(waiting_for_blocks_uses_no_cpu), CASE(engine_ends_with_work_in_it),
          CASE(long_prefill_says_how_far_it_is), CASE(long_prefill_counts_from_the_last_start))
