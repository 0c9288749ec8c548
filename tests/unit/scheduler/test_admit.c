/* test_admit.c - the rules of admission, one by one: order, limits, verdicts, promises, and what is
 * told to the directory. */
#include "scheduler/admission/admit.h"

#include <stdio.h>
#include <string.h>

#include "tests/harness/test.h"

enum { NOW = 5000000, MAX_QUEUE_MS = 30000, REQUESTS_MAX = 64, PROMPT = 100 };

struct rig {
    struct tenants tenants;
    struct admit *a;
    struct admit_request r[REQUESTS_MAX];
    size_t n;
    uint64_t now;
};

/* Tenants are numbered as in `keys`, from 1. */
static void open_with(struct rig *g, const char *keys, uint32_t max_queue_ms)
{
    *g = (struct rig){ .now = NOW };
    tenants_init(&g->tenants);
    CHECK_OK(tenants_parse(&g->tenants, str_of(keys), "keys", NULL));
    const struct admit_options o = { &g->tenants, max_queue_ms };
    g->a = admit_create(&o);
}

static void open_rig(struct rig *g, const char *keys) { open_with(g, keys, MAX_QUEUE_MS); }

static void close_rig(struct rig *g)
{
    admit_free(g->a);
    tenants_release(&g->tenants);
}

static struct admit_ask ask_of(uint32_t tenant)
{
    return (
        struct admit_ask){ .wanted = { .tenant = tenant }, .n_prompt = PROMPT, .max_output = 10 };
}

static struct admit_verdict verdict(struct rig *g, const struct admit_ask *q)
{
    struct admit_verdict v;
    admit_ask(g->a, q, g->now, &v);
    if (!v.taken) CHECK(v.why.err.code != OK && v.why.err.text[0]);
    return v;
}

/* Takes it into the line, whatever the verdict would be. */
static struct admit_request *push(struct rig *g, uint32_t tenant, int32_t priority)
{
    struct admit_ask q = ask_of(tenant);
    CHECK(g->n < REQUESTS_MAX);
    q.wanted.priority = priority;
    admit_push(g->a, &g->r[g->n], &q, g->now);
    return &g->r[g->n++];
}

static struct admit_request *take_next(struct rig *g)
{
    struct admit_request *r = admit_next(g->a);
    if (r) admit_take(g->a, r, g->now);
    return r;
}

static bool is_taken(struct rig *g, uint32_t tenant)
{
    const struct admit_ask q = ask_of(tenant);
    struct admit_verdict v = verdict(g, &q);
    return v.taken;
}

/* ---- order ---- */

TEST(first_come_first_served)
{
    struct rig g;
    open_rig(&g, "a k\n");
    CHECK(!admit_next(g.a));
    struct admit_request *r1 = push(&g, 1, 0), *r2 = push(&g, 1, 0), *r3 = push(&g, 1, 0);
    CHECK_EQ_INT(admit_n_waiting(g.a), 3);
    admit_leave(g.a, r2, g.now); /* canceled in line */
    CHECK(take_next(&g) == r1 && take_next(&g) == r3 && !take_next(&g));
    CHECK(r1->state == ADMIT_RUNNING && r2->state == ADMIT_UNKNOWN);
    admit_leave(g.a, r1, g.now);
    admit_leave(g.a, r1, g.now); /* once is enough */
    struct admit_numbers n;
    admit_numbers(g.a, 1, g.now, &n);
    CHECK(n.n_waiting == 0 && n.n_running == 1);
    close_rig(&g);
}

TEST(lower_priority_is_sooner_among_a_tenants_requests)
{
    struct rig g;
    open_rig(&g, "a k\n");
    struct admit_request *late = push(&g, 1, 5), *usual = push(&g, 1, 0), *soon = push(&g, 1, -3),
                         *usual2 = push(&g, 1, 0), *late2 = push(&g, 1, 5);
    CHECK(take_next(&g) == soon && take_next(&g) == usual && take_next(&g) == usual2);
    CHECK(take_next(&g) == late && take_next(&g) == late2);
    close_rig(&g);
}

TEST(a_higher_class_goes_first)
{
    struct rig g;
    open_rig(&g, "a k class=low\nb l\nc m class=high\n");
    struct admit_request *low = push(&g, 1, -9), *normal = push(&g, 2, 0), *high = push(&g, 3, 9);
    CHECK(take_next(&g) == high && take_next(&g) == normal && take_next(&g) == low);
    close_rig(&g);
}

/* 1 : 3, by tokens: a request of the one costs as much as three of the other. */
TEST(tokens_go_by_weight)
{
    struct rig g;
    uint32_t n[3] = { 0 };
    open_rig(&g, "a k\nb l weight=3\n");
    for (int i = 0; i < 24; i++) {
        push(&g, 1, 0);
        push(&g, 2, 0);
    }
    for (int i = 0; i < 16; i++) n[take_next(&g)->tenant]++;
    CHECK(n[1] == 4 && n[2] == 12);
    close_rig(&g);
}

/* Output tokens count as they come. */
TEST(long_answers_cost_turns)
{
    struct rig g;
    open_rig(&g, "a k\nb l\n");
    for (int i = 0; i < 4; i++) {
        push(&g, 1, 0);
        push(&g, 2, 0);
    }
    struct admit_request *first = take_next(&g);
    uint32_t one = first->tenant, other = 3 - one;
    CHECK_EQ_INT(take_next(&g)->tenant, other);
    for (int i = 0; i < 2 * PROMPT; i++) admit_charge(g.a, first, g.now);
    CHECK_EQ_INT(take_next(&g)->tenant, other);
    CHECK_EQ_INT(take_next(&g)->tenant, other);
    CHECK_EQ_INT(take_next(&g)->tenant, one);
    close_rig(&g);
}

TEST(who_has_nothing_in_line_saves_nothing_up)
{
    struct rig g;
    open_rig(&g, "a k\nb l\n");
    for (int i = 0; i < 20; i++) push(&g, 1, 0);
    for (int i = 0; i < 10; i++) CHECK_EQ_INT(take_next(&g)->tenant, 1);
    for (int i = 0; i < 8; i++) push(&g, 2, 0); /* has used nothing so far */
    uint32_t n[3] = { 0 };
    for (int i = 0; i < 8; i++) n[take_next(&g)->tenant]++;
    CHECK(n[1] >= 3 && n[2] >= 4);
    close_rig(&g);
}

/* ---- limits ---- */

/* Two tenants: the first is taken twice in ten, each of as many tokens. */
TEST(who_had_less_than_its_share_goes_first)
{
    struct rig g;
    open_rig(&g, "a key-a\nb key-b\nc key-c weight=8\n");
    struct admit_request *r = push(&g, 1, 0);
    CHECK(!admit_goes_first(g.a, take_next(&g), g.now)); /* nobody else had anything */
    for (int i = 0; i < 4; i++) {
        push(&g, 2, 0);
        CHECK(!admit_goes_first(g.a, take_next(&g), g.now) || i == 0);
    }
    CHECK(admit_goes_first(g.a, r, g.now)); /* 1 of 5 */
    admit_leave(g.a, r, g.now);
    r = push(&g, 1, 0);
    CHECK(admit_goes_first(g.a, r, g.now)); /* in line, too */
    for (int i = 0; i < 3; i++) {
        push(&g, 1, 0);
        take_next(&g);
    }
    CHECK(!admit_goes_first(g.a, r, g.now)); /* 4 of 8: its half */
    r = push(&g, 3, 0);
    CHECK(admit_goes_first(g.a, r, g.now)); /* it has had nothing */
    for (int i = 0; i < 4; i++) {
        push(&g, 3, 0);
        take_next(&g);
    }
    CHECK(admit_goes_first(g.a, r, g.now)); /* a third is little for its weight */
    g.now += 120000;
    CHECK(!admit_goes_first(g.a, push(&g, 2, 0), g.now)); /* all that is long ago */
    close_rig(&g);
}

TEST(requests_per_minute)
{
    struct rig g;
    open_rig(&g, "a k requests_per_minute=5\nb l\n");
    for (int i = 0; i < 5; i++) {
        CHECK(is_taken(&g, 1));
        admit_leave(g.a, push(&g, 1, 0), g.now);
        g.now += 2000;
    }
    struct admit_ask q = ask_of(1);
    struct admit_verdict v = verdict(&g, &q);
    CHECK(!v.taken && v.reason == ADMIT_REQUESTS);
    CHECK_STATUS(v.why.err.code, ERR_FULL);
    CHECK(strstr(v.why.err.text, "tenant a") && strstr(v.why.err.text, "requests_per_minute is 5"));
    CHECK(v.why.retry_after_s >= 50 && v.why.retry_after_s <= 65 && v.why.retry[0]);
    CHECK(is_taken(&g, 2) && v.why.takes_others); /* it is no limit of others */
    struct gen_limits l;
    admit_limits(g.a, 1, g.now, &l);
    CHECK(l.requests == 5 && l.requests_left == 0 && l.requests_reset_s > 50 && l.tokens == 0);
    q.wanted.follows = true; /* of the same API request */
    CHECK(verdict(&g, &q).taken);
    q.wanted.follows = false;
    g.now += v.why.retry_after_s * 1000; /* who comes when it was told ... */
    memcpy(q.wanted.retry, v.why.retry, sizeof q.wanted.retry);
    struct admit_verdict again = verdict(&g, &q);
    CHECK(again.taken && again.was_promised);
    again = verdict(&g, &q); /* ... once */
    CHECK(!again.was_promised);
    g.now += 60000;
    admit_limits(g.a, 1, g.now, &l);
    CHECK(l.requests_left == 5 && l.requests_reset_s == 0);
    close_rig(&g);
}

/* Nobody is told to wait for those who were refused before it while there were none. */
TEST(the_first_that_is_refused_waits_for_room_alone)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    struct gen_limits l;
    open_rig(&g, "a k requests_per_minute=3 concurrent=4\n");
    for (int i = 0; i < 3; i++) admit_leave(g.a, push(&g, 1, 0), g.now);
    admit_limits(g.a, 1, g.now, &l);
    const uint32_t first = verdict(&g, &q).why.retry_after_s;
    CHECK_EQ_INT(first, l.requests_reset_s);
    CHECK(first >= 60 && first <= 61);
    CHECK_EQ_INT(verdict(&g, &q).why.retry_after_s, first + 20);
    CHECK_EQ_INT(verdict(&g, &q).why.retry_after_s, first + 40);
    close_rig(&g);
}

/* It has room, and yet it refuses: it says for whom. */
TEST(a_refusal_for_a_promise_says_so)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k requests_per_minute=3\nb k2 tokens_per_minute=300\n");
    for (int i = 0; i < 3; i++) admit_leave(g.a, push(&g, 1, 0), g.now);
    struct admit_verdict v = verdict(&g, &q);
    CHECK(!v.taken && strstr(v.why.err.text, "it has 3 requests in the last minute; try again"));
    g.now += v.why.retry_after_s * 1000;
    for (int i = 0; i < 2; i++) admit_leave(g.a, push(&g, 1, 0), g.now);
    v = verdict(&g, &q);
    CHECK(!v.taken && strstr(v.why.err.text, "it has 2 requests in the last minute, beside 1 kept "
                                             "for those that were told to come back now"));
    q = ask_of(2);
    for (int i = 0; i < 3; i++) (void)push(&g, 2, 0), (void)take_next(&g);
    v = verdict(&g, &q);
    CHECK(!v.taken && v.reason == ADMIT_TOKENS && !strstr(v.why.err.text, "beside"));
    g.now += v.why.retry_after_s * 1000;
    for (int i = 0; i < 2; i++) (void)push(&g, 2, 0), (void)take_next(&g);
    v = verdict(&g, &q);
    CHECK(!v.taken && strstr(v.why.err.text, "200 tokens in the last minute, beside 100 kept"));
    close_rig(&g);
}

/* Its own promise, which it does not show, keeps it out once, and not for ever. */
TEST(who_never_shows_its_promise_is_served)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    uint32_t n_taken = 0;
    open_rig(&g, "a k requests_per_minute=1\n");
    for (int i = 0; i < 12; i++) {
        struct admit_verdict v = verdict(&g, &q);
        n_taken += v.taken;
        if (v.taken) admit_leave(g.a, push(&g, 1, 0), g.now);
        g.now += v.taken ? 1000 : v.why.retry_after_s * 1000;
    }
    CHECK(n_taken >= 5);
    close_rig(&g);
}

TEST(a_place_that_was_promised_is_kept)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k requests_per_minute=2\n");
    for (int i = 0; i < 2; i++) admit_leave(g.a, push(&g, 1, 0), g.now);
    struct admit_verdict first = verdict(&g, &q), second = verdict(&g, &q);
    CHECK(!first.taken && !second.taken);
    CHECK(second.why.retry_after_s > first.why.retry_after_s); /* not all at once */
    g.now += first.why.retry_after_s * 1000;
    CHECK(is_taken(&g, 1)); /* one of two places is free for anybody, ... */
    admit_leave(g.a, push(&g, 1, 0), g.now);
    CHECK(!is_taken(&g, 1));
    memcpy(q.wanted.retry, first.why.retry, sizeof q.wanted.retry);
    CHECK(verdict(&g, &q).taken); /* ... the other is for who was told to come */
    close_rig(&g);
}

TEST(tokens_per_minute)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k tokens_per_minute=350\n");
    struct admit_request *r = push(&g, 1, 0);
    CHECK(take_next(&g) == r);
    for (int i = 0; i < 100; i++) admit_charge(g.a, r, g.now); /* 200 */
    CHECK(is_taken(&g, 1));
    admit_leave(g.a, push(&g, 1, 0), g.now); /* what is not computed costs nothing */
    CHECK(is_taken(&g, 1));
    for (int i = 0; i < 60; i++) admit_charge(g.a, r, g.now); /* 260 */
    struct admit_verdict v = verdict(&g, &q);
    CHECK(!v.taken && v.reason == ADMIT_TOKENS && v.why.retry_after_s >= 59);
    CHECK(strstr(v.why.err.text, "tokens_per_minute is 350") && strstr(v.why.err.text, "260"));
    CHECK(v.why.takes_others);
    q.n_prompt = 351; /* can never be */
    v = verdict(&g, &q);
    CHECK(!v.taken && v.why.retry_after_s == 0);
    CHECK_STATUS(v.why.err.code, ERR_TOO_LONG);
    g.now += 61000;
    q.n_prompt = 350;
    CHECK(verdict(&g, &q).taken);
    close_rig(&g);
}

/* The first sequence asks for all prompts of its API request; those that follow are taken then. */
TEST(tokens_per_minute_of_several_prompts)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k tokens_per_minute=350\n");
    q.wanted.all_prompts = 351;
    struct admit_verdict v = verdict(&g, &q);
    CHECK(!v.taken && strstr(v.why.err.text, "the prompts of all choices have together 351"));
    CHECK_STATUS(v.why.err.code, ERR_TOO_LONG);
    push(&g, 1, 0);
    take_next(&g);
    q.wanted.all_prompts = 300;
    v = verdict(&g, &q);
    CHECK(!v.taken && v.reason == ADMIT_TOKENS && v.why.retry_after_s >= 59);
    q.wanted.all_prompts = 200;
    CHECK(verdict(&g, &q).taken);
    q.wanted = (struct gen_admission){ .tenant = 1, .follows = true };
    q.n_prompt = 300;
    CHECK(verdict(&g, &q).taken);
    q.comes_back = true; /* the first of them may have been kept */
    CHECK(!verdict(&g, &q).taken);
    close_rig(&g);
}

/* Nor does a prompt that is no request take what was promised. */
TEST(tokens_that_were_promised_are_kept)
{
    struct rig g;
    struct gen_limits l;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k tokens_per_minute=150\nb l\n");
    CHECK(admit_has_tokens(g.a, 1, PROMPT, g.now));
    push(&g, 1, 0);
    take_next(&g);
    CHECK(!admit_has_tokens(g.a, 1, PROMPT, g.now));
    CHECK(admit_has_tokens(g.a, 2, PROMPT, g.now)); /* without limits */
    struct admit_verdict v = verdict(&g, &q);
    CHECK(!v.taken);
    g.now += v.why.retry_after_s * 1000;
    admit_limits(g.a, 1, g.now, &l);
    CHECK_EQ_INT(l.tokens_left, 150);
    CHECK(!admit_has_tokens(g.a, 1, PROMPT, g.now));
    memcpy(q.wanted.retry, v.why.retry, sizeof q.wanted.retry);
    CHECK(verdict(&g, &q).taken);
    CHECK(admit_has_tokens(g.a, 1, PROMPT, g.now)); /* it has come, and pays when it is placed */
    close_rig(&g);
}

/* Nodes are asked whether they have its answer: so long it counts, and is in no line. */
TEST(what_is_expected_counts_against_the_limits)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    struct admit_request r[2] = { 0 };
    struct admit_numbers n;
    open_rig(&g, "a k concurrent=2 requests_per_minute=3\n");
    admit_expect(g.a, &r[0], &q, g.now); /* a new one: its request counts now */
    q.comes_back = true;
    admit_expect(g.a, &r[1], &q, g.now);
    admit_numbers(g.a, 1, g.now, &n);
    CHECK(n.n_waiting == 2 && n.n_running == 0 && !admit_next(g.a));
    q.comes_back = false;
    CHECK(verdict(&g, &q).reason == ADMIT_CONCURRENT); /* it was promised a place */
    admit_adopt(g.a, &r[1], 1, g.now);                 /* a node had it: it costs no request */
    admit_push(g.a, &r[0], &q, g.now);                 /* none had it: no second one */
    CHECK(take_next(&g) == &r[0]);
    admit_leave(g.a, &r[0], g.now);
    CHECK(verdict(&g, &q).taken);
    r[0] = (struct admit_request){ 0 };
    q.comes_back = true;
    admit_expect(g.a, &r[0], &q, g.now);
    admit_leave(g.a, &r[0], g.now); /* its client left */
    CHECK(verdict(&g, &q).taken);
    admit_push(g.a, &r[0], &q, g.now);
    admit_leave(g.a, &r[1], g.now);
    CHECK(verdict(&g, &q).reason == ADMIT_REQUESTS);
    admit_leave(g.a, &r[0], g.now);
    admit_numbers(g.a, 1, g.now, &n);
    CHECK(n.n_waiting == 0 && n.n_running == 0);
    close_rig(&g);
}

TEST(concurrent)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k concurrent=2\n");
    struct admit_request *r = push(&g, 1, 0);
    take_next(&g);
    push(&g, 1, 0); /* waits */
    struct admit_verdict v = verdict(&g, &q);
    CHECK(!v.taken && v.reason == ADMIT_CONCURRENT && v.why.takes_others);
    q.wanted.follows = true; /* this is of sequences */
    CHECK(!verdict(&g, &q).taken);
    admit_leave(g.a, r, g.now);
    CHECK(verdict(&g, &q).taken);
    close_rig(&g);
}

/* Between the ends of its requests: a night in which none ran is no part of that. */
TEST(a_quiet_night_is_not_the_time_of_a_request)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k concurrent=1\n");
    for (int i = 0; i < 3; i++) {
        struct admit_request *r = push(&g, 1, 0);
        take_next(&g);
        g.now += 2000;
        admit_leave(g.a, r, g.now);
        g.now += 8 * 3600 * 1000;
    }
    push(&g, 1, 0);
    struct admit_verdict v = verdict(&g, &q);
    CHECK(!v.taken && v.reason == ADMIT_CONCURRENT);
    CHECK(v.why.retry_after_s >= 1 && v.why.retry_after_s <= 3);
    close_rig(&g);
}

/* ---- other entry nodes ---- */

static uint32_t report(struct rig *g, struct meter_use *out, uint64_t *number)
{
    return admit_report(g->a, g->now, out, number);
}

static struct meter_sum sum_of(const struct rig *g, uint32_t tenant)
{
    return (struct meter_sum){ .tenant = g->tenants.list[tenant].id };
}

TEST(what_others_used_counts)
{
    struct rig g;
    struct meter_use uses[METER_TENANTS_MAX];
    uint64_t number;
    open_rig(&g, "a k requests_per_minute=10 concurrent=6\n");
    CHECK(!admit_has_report(g.a, g.now)); /* nothing to tell */
    admit_take(g.a, push(&g, 1, 0), g.now);
    CHECK(admit_has_report(g.a, g.now));
    CHECK_EQ_INT(report(&g, uses, &number), 1);
    CHECK(number == 1 && uses[0].tenant == g.tenants.list[1].id && uses[0].requests == 1);
    CHECK(uses[0].tokens == PROMPT && uses[0].cost == PROMPT * ADMIT_COST);
    CHECK(uses[0].n_running == 1 && uses[0].n_waiting == 0);
    struct meter_sum sum = sum_of(&g, 1);
    sum.requests = 9;
    sum.n_running = 4;
    sum.n_waiting = 1;
    const struct meter_sums sums = { .sums = &sum, .n_sums = 1, .n_entries = 3 };
    admit_on_sums(g.a, OK, &sums, g.now);
    CHECK_EQ_INT(admit_n_entries(g.a), 3);
    CHECK(is_taken(&g, 1)); /* the tenth, and the sixth at once */
    admit_leave(g.a, push(&g, 1, 0), g.now);
    CHECK(!is_taken(&g, 1));
    g.now += 61000; /* what was heard is old; only what is known here counts */
    CHECK(is_taken(&g, 1));
    close_rig(&g);
}

TEST(without_the_directory_an_entry_node_gives_its_share)
{
    struct rig g;
    struct meter_use uses[METER_TENANTS_MAX];
    uint64_t number;
    open_rig(&g, "a k requests_per_minute=10\n");
    struct meter_sum sum = sum_of(&g, 1);
    const struct meter_sums sums = { .sums = &sum, .n_sums = 1, .n_entries = 3 };
    admit_leave(g.a, push(&g, 1, 0), g.now);
    CHECK_EQ_INT(report(&g, uses, &number), 1);
    admit_on_sums(g.a, OK, &sums, g.now);
    CHECK(report(&g, uses, &number) == 0 && number == 2);
    admit_on_sums(g.a, ERR_UNAVAILABLE, NULL, g.now);
    int n = 1;
    for (; n < 20 && is_taken(&g, 1); n++) admit_leave(g.a, push(&g, 1, 0), g.now);
    CHECK_EQ_INT(n, 4); /* a third of ten, rounded up */
    CHECK(!admit_has_report(g.a, g.now) && admit_has_report(g.a, g.now + 1000));
    close_rig(&g);
}

/* The directory has been away since the entry node began: it knows of no others, but sees nodes. */
TEST(who_has_not_heard_of_others_counts_the_nodes)
{
    struct rig g;
    struct meter_use uses[METER_TENANTS_MAX];
    uint64_t number;
    int n = 0;
    open_rig(&g, "a k requests_per_minute=10\n");
    admit_set_speed(g.a, &(struct admit_speed){ .n_nodes = 5 });
    CHECK_EQ_INT(report(&g, uses, &number), 0);
    admit_on_sums(g.a, ERR_UNAVAILABLE, NULL, g.now);
    for (; n < 20 && is_taken(&g, 1); n++) admit_leave(g.a, push(&g, 1, 0), g.now);
    CHECK_EQ_INT(n, 2);
    CHECK_EQ_INT(admit_n_entries(g.a), 1); /* it shares the nodes with none that it knows */
    close_rig(&g);
}

TEST(a_report_that_was_not_answered_is_sent_again)
{
    struct rig g;
    struct meter_use uses[METER_TENANTS_MAX];
    uint64_t number;
    open_rig(&g, "a k\nb l\n");
    struct admit_request *r = push(&g, 1, 0);
    admit_take(g.a, r, g.now);
    CHECK(report(&g, uses, &number) == 1 && number == 1);
    admit_on_sums(g.a, ERR_TIMEOUT, NULL, g.now);
    admit_charge(g.a, r, g.now);
    push(&g, 2, 0);
    CHECK(report(&g, uses, &number) == 2 && number == 1); /* what was used then, who runs now */
    CHECK(uses[0].tokens == PROMPT && uses[0].requests == 1);
    CHECK(uses[1].tokens == 0 && uses[1].requests == 0 && uses[1].n_waiting == 1);
    struct meter_sum sum[2] = { sum_of(&g, 1), sum_of(&g, 2) };
    const struct meter_sums sums = { .sums = sum, .n_sums = 2, .n_entries = 1 };
    admit_on_sums(g.a, OK, &sums, g.now);
    CHECK(report(&g, uses, &number) == 2 && number == 2);
    CHECK(uses[0].tokens == 1 && uses[0].requests == 0 && uses[1].requests == 1);
    close_rig(&g);
}

/* What a tenant was served elsewhere costs it turns here. */
TEST(fairness_is_over_all_entry_nodes)
{
    struct rig g;
    struct meter_use uses[METER_TENANTS_MAX];
    uint64_t number;
    open_rig(&g, "a k\nb l\n");
    for (int i = 0; i < 6; i++) {
        push(&g, 1, 0);
        push(&g, 2, 0);
    }
    CHECK_EQ_INT(report(&g, uses, &number), 2);
    struct meter_sum sum[2] = { sum_of(&g, 1), sum_of(&g, 2) };
    sum[0].served = 3 * PROMPT * ADMIT_COST;
    const struct meter_sums sums = { .sums = sum, .n_sums = 2, .n_entries = 2 };
    admit_on_sums(g.a, OK, &sums, g.now);
    for (int i = 0; i < 3; i++) CHECK_EQ_INT(take_next(&g)->tenant, 2);
    CHECK_EQ_INT(take_next(&g)->tenant, 1);
    close_rig(&g);
}

static void hear(struct rig *g, uint64_t served1, uint64_t served2)
{
    struct meter_use uses[METER_TENANTS_MAX];
    struct meter_sum sum[2] = { sum_of(g, 1), sum_of(g, 2) };
    uint64_t number;
    sum[0].served = served1 * ADMIT_COST;
    sum[1].served = served2 * ADMIT_COST;
    const struct meter_sums sums = { .sums = sum, .n_sums = 2, .n_entries = 2 };
    (void)report(g, uses, &number);
    admit_on_sums(g->a, OK, &sums, g->now);
}

/* It begins at zero: what was served before counts neither for nor against anybody. */
TEST(a_directory_that_lost_its_counters_starves_nobody)
{
    struct rig g;
    open_rig(&g, "a k\nb l\n");
    for (int i = 0; i < 20; i++) push(&g, 1, 0);
    hear(&g, 1000 * PROMPT, 900 * PROMPT);
    for (int i = 0; i < 5; i++) CHECK_EQ_INT(take_next(&g)->tenant, 1);
    hear(&g, 5 * PROMPT, 0);
    for (int i = 0; i < 4; i++) push(&g, 2, 0); /* before anybody is taken again */
    uint32_t n[3] = { 0 };
    for (int i = 0; i < 8; i++) n[take_next(&g)->tenant]++;
    CHECK(n[1] >= 3 && n[2] >= 3);
    close_rig(&g);
}

/* ---- how long it takes ---- */

/* 100 tokens a second: what is in line takes a second each, with the answers 1.1. */
static void make_slow(struct rig *g)
{
    const struct admit_speed s = { .prompts_per_s = 100, .one_prompts_per_s = 100 };
    admit_set_speed(g->a, &s);
}

TEST(a_wait_that_is_too_long_is_refused_at_once)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_with(&g, "a k\n", 5000);
    make_slow(&g);
    int n = 0;
    for (; n < 20 && is_taken(&g, 1); n++) push(&g, 1, 0);
    CHECK(n >= 4 && n <= 6);
    struct admit_verdict v = verdict(&g, &q);
    CHECK(!v.taken && v.reason == ADMIT_WAIT && v.why.retry_after_s >= 3 && !v.why.takes_others);
    CHECK_STATUS(v.why.err.code, ERR_BUSY);
    CHECK(strstr(v.why.err.text, "--max-queue-time is 5.0 s"));
    q.wanted.priority = -1; /* before the others */
    CHECK(verdict(&g, &q).taken);
    close_rig(&g);
}

/* A node that is slow to begin, as while its KV connection is made: one request in two seconds says
 * little of the next ones, so nobody is refused for it. */
TEST(one_slow_beginning_refuses_nobody)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_with(&g, "a k\n", 5000);
    for (int i = 0; i < 12; i++) push(&g, 1, 0);
    for (int i = 0; i < 20; i++) {
        g.now += 100;
        CHECK(verdict(&g, &q).taken);
    }
    CHECK(take_next(&g));
    CHECK(verdict(&g, &q).taken);
    for (int i = 0; i < 9; i++) { /* but ten in a row of a second each do */
        g.now += 1000;
        CHECK(take_next(&g));
        push(&g, 1, 0);
    }
    CHECK(!verdict(&g, &q).taken);
    close_rig(&g);
}

/* While no node lives nobody is taken, which does not say how fast the line is. */
TEST(an_outage_is_no_slow_line)
{
    struct rig g;
    struct admit_numbers before, after;
    open_rig(&g, "a k\n");
    for (int i = 0; i < 10; i++) push(&g, 1, 0);
    for (int i = 0; i < 4; i++) {
        g.now += 1000;
        CHECK(take_next(&g));
    }
    admit_numbers(g.a, 1, g.now, &before);
    admit_set_outage(g.a, true, g.now);
    g.now += 4000;
    admit_set_outage(g.a, false, g.now);
    admit_numbers(g.a, 1, g.now, &after);
    CHECK(before.wait_ms > 1000 && after.wait_ms < 1.01 * before.wait_ms);
    close_rig(&g);
}

/* --max-queue-time counts while nodes live; x-baton-ttft-ms always. */
TEST(an_outage_is_no_time_in_line)
{
    struct rig g;
    enum admit_reason why;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k\n");
    struct admit_request *r = push(&g, 1, 0), *hasty = &g.r[g.n++];
    q.wanted.ttft_ms = MAX_QUEUE_MS - 1000;
    admit_push(g.a, hasty, &q, g.now);
    g.now += 1000;
    admit_set_outage(g.a, true, g.now);
    g.now += MAX_QUEUE_MS;
    CHECK(!admit_is_late(g.a, r, g.now, &why));
    CHECK(admit_is_late(g.a, hasty, g.now, &why) && why == ADMIT_TTFT);
    admit_set_outage(g.a, false, g.now);
    g.now += MAX_QUEUE_MS - 1001;
    CHECK(!admit_is_late(g.a, r, g.now, &why));
    g.now += 1;
    CHECK(admit_is_late(g.a, r, g.now, &why) && why == ADMIT_WAIT);
    CHECK_EQ_INT(admit_waited_ms(g.a, r, g.now), MAX_QUEUE_MS);
    close_rig(&g);
}

/* What comes again by itself would never use a promise. */
TEST(what_follows_is_promised_nothing_when_it_is_late)
{
    struct rig g;
    uint32_t after_s;
    char retry[GEN_RETRY_MAX];
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k\n");
    for (int i = 0; i < 5; i++) push(&g, 1, 0);
    q.wanted.follows = true;
    admit_push(g.a, &g.r[g.n], &q, g.now);
    g.now += MAX_QUEUE_MS;
    admit_refuse_late(g.a, &g.r[g.n], g.now, &after_s, retry);
    CHECK(after_s == 1 && !retry[0]);
    admit_refuse_late(g.a, &g.r[0], g.now, &after_s, retry);
    CHECK(retry[0]);
    close_rig(&g);
}

/* A second for each prompt, however short: a few long ones do not take minutes by that. */
TEST(short_prompts_say_little_of_long_ones)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k\n");
    q.n_prompt = 5;
    for (int i = 0; i < 2; i++) admit_push(g.a, &g.r[g.n++], &q, g.now);
    for (int i = 0; i < 12; i++) {
        g.now += 1000;
        CHECK(take_next(&g));
        admit_push(g.a, &g.r[g.n++], &q, g.now);
    }
    q.n_prompt = 50 * PROMPT;
    for (int i = 0; i < 8; i++) {
        CHECK(verdict(&g, &q).taken);
        admit_push(g.a, &g.r[g.n++], &q, g.now);
    }
    close_rig(&g);
}

/* 10 output tokens a second: an answer of 10 tokens needs a place for a second. */
TEST(places_for_answers_may_be_scarcer_than_prompts)
{
    struct rig g;
    const struct admit_speed s = { .prompts_per_s = 1e6,
                                   .one_prompts_per_s = 1e6,
                                   .outputs_per_s = 10 };
    open_with(&g, "a k\n", 5000);
    admit_set_speed(g.a, &s);
    int n = 0;
    for (; n < 20 && is_taken(&g, 1); n++) push(&g, 1, 0);
    CHECK(n >= 4 && n <= 6);
    close_rig(&g);
}

TEST(a_first_token_that_would_be_late_is_refused_at_once)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k\n");
    make_slow(&g);
    q.wanted.ttft_ms = 900; /* the prompt alone takes a second */
    struct admit_verdict v = verdict(&g, &q);
    CHECK(!v.taken && v.reason == ADMIT_TTFT && v.why.retry_after_s >= 1 && v.why.takes_others);
    CHECK_EQ_STR(v.why.err.field, "x-baton-ttft-ms");
    CHECK(strstr(v.why.err.text, "x-baton-ttft-ms is 900"));
    q.wanted.ttft_ms = 1500;
    CHECK(verdict(&g, &q).taken);
    for (int i = 0; i < 3; i++) push(&g, 1, 0);
    CHECK(!verdict(&g, &q).taken);
    q.wanted.ttft_ms = 20000;
    CHECK(verdict(&g, &q).taken);
    q.wanted.deadline_ms = 2000;
    q.deadline_ms = g.now + 2000;
    v = verdict(&g, &q);
    CHECK(!v.taken && v.reason == ADMIT_DEADLINE && v.why.takes_others);
    CHECK_EQ_STR(v.why.err.field, "x-baton-deadline-ms");
    CHECK(strstr(v.why.err.text, "x-baton-deadline-ms is 2000, but"));
    q.wanted.deadline_by = GEN_DEADLINE_GRPC; /* it hears of what it gave */
    v = verdict(&g, &q);
    CHECK_EQ_STR(v.why.err.field, "grpc-timeout");
    CHECK(strstr(v.why.err.text, "grpc-timeout left 2000 ms for this request, but"));
    q.wanted.deadline_by = GEN_DEADLINE_PARAMETER;
    v = verdict(&g, &q);
    CHECK_EQ_STR(v.why.err.field, "timeout");
    CHECK(strstr(v.why.err.text, "parameter timeout is 2000 ms, but"));
    close_rig(&g);
}

/* What a start takes is known from first tokens. When all are refused for it there are none, so one
 * request now and then is let through, and shows whether it is still true. */
TEST(slow_starts_do_not_refuse_for_ever)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k\n");
    q.wanted.ttft_ms = 1000;
    for (int i = 0; i < 3; i++) push(&g, 1, 0);
    for (int i = 0; i < 3; i++) take_next(&g);
    g.now += 3000;
    for (int i = 0; i < 3; i++) admit_started(g.a, &g.r[i], g.now);
    for (int i = 0; i < 3; i++) admit_leave(g.a, &g.r[i], g.now);
    CHECK(!verdict(&g, &q).taken);
    for (int tries = 0; tries < 2; tries++) { /* the first one is slow as well */
        int n = 0;
        while (g.now += 100, !verdict(&g, &q).taken) CHECK(++n < 50);
        admit_push(g.a, &g.r[g.n++], &q, g.now);
        CHECK(!verdict(&g, &q).taken); /* one at a time */
        struct admit_request *r = take_next(&g);
        g.now += tries ? 50 : 3000;
        admit_started(g.a, r, g.now);
    }
    for (int i = 0; i < 20; i++) CHECK(verdict(&g, &q).taken);
    close_rig(&g);
}

/* Likewise of the speed that a node publishes, which it measured when it was slow. */
TEST(an_old_speed_does_not_refuse_for_ever)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    enum admit_reason why;
    int n = 0;
    open_rig(&g, "a k\n");
    make_slow(&g);
    q.wanted.ttft_ms = 500; /* the prompt alone takes a second */
    CHECK(!verdict(&g, &q).taken);
    while (g.now += 100, !verdict(&g, &q).taken) CHECK(++n < 50);
    admit_push(g.a, &g.r[g.n++], &q, g.now);
    CHECK(!admit_is_late(g.a, &g.r[0], g.now + 100, &why));
    struct admit_request *r = take_next(&g);
    g.now += 50;
    admit_started(g.a, r, g.now);
    for (int i = 0; i < 4; i++) CHECK(verdict(&g, &q).taken);
    close_rig(&g);
}

TEST(who_waited_for_too_long_may_not_begin)
{
    struct rig g;
    enum admit_reason why;
    uint32_t after_s = 0;
    char retry[GEN_RETRY_MAX];
    open_with(&g, "a k\n", 5000);
    make_slow(&g);
    struct admit_ask q = ask_of(1);
    q.wanted.ttft_ms = 3000;
    admit_push(g.a, &g.r[0], &q, g.now);
    g.n = 1;
    struct admit_request *plain = push(&g, 1, 0);
    CHECK(!admit_is_late(g.a, &g.r[0], g.now + 1999, &why));
    CHECK(admit_is_late(g.a, &g.r[0], g.now + 2000, &why) && why == ADMIT_TTFT);
    CHECK(!admit_is_late(g.a, plain, g.now + 4999, &why));
    CHECK(admit_is_late(g.a, plain, g.now + 5000, &why) && why == ADMIT_WAIT);
    admit_refuse_late(g.a, plain, g.now + 5000, &after_s, retry);
    CHECK(after_s >= 1 && retry[0]);
    close_rig(&g);
}

/* ---- no room ---- */

static struct admit_verdict verdict_when_full(struct rig *g, uint32_t tenant, int32_t priority)
{
    struct admit_ask q = ask_of(tenant);
    q.n_held = q.n_max = 9;
    q.wanted.priority = priority;
    return verdict(g, &q);
}

TEST(the_newest_of_the_lowest_class_gives_way)
{
    struct rig g;
    open_rig(&g, "a k class=low\nb l\nc m class=high\n");
    CHECK(!verdict_when_full(&g, 3, 0).taken); /* nobody waits, all run */
    push(&g, 1, 0);
    struct admit_request *newest = push(&g, 1, 0), *normal = push(&g, 2, 0);
    struct admit_verdict v = verdict_when_full(&g, 3, 0);
    CHECK(v.taken && v.shed == newest);
    v = verdict_when_full(&g, 2, 0);
    CHECK(v.taken && v.shed == newest);
    v = verdict_when_full(&g, 1, 0); /* it is the newest of the lowest class itself */
    CHECK(!v.taken && v.reason == ADMIT_FULL && v.why.retry_after_s >= 1 && !v.why.takes_others);
    CHECK_STATUS(v.why.err.code, ERR_FULL);
    v = verdict_when_full(&g, 1, -1);
    CHECK(v.taken && v.shed == newest);
    while (g.r[0].state == ADMIT_WAITING || newest->state == ADMIT_WAITING) {
        admit_leave(g.a, &g.r[0], g.now);
        admit_leave(g.a, newest, g.now);
    }
    v = verdict_when_full(&g, 3, 0);
    CHECK(v.taken && v.shed == normal);
    CHECK(!verdict_when_full(&g, 1, -9).taken); /* a lower class drives nobody out */
    close_rig(&g);
}

/* The one that was refused comes back as it was told, and another one does not take its place. */
TEST(a_place_is_kept_for_who_was_told_to_come)
{
    struct rig g;
    struct admit_ask q = ask_of(1);
    open_rig(&g, "a k\n");
    push(&g, 1, 0);
    struct admit_verdict v = verdict_when_full(&g, 1, 0);
    CHECK(!v.taken && v.why.retry[0]);
    g.now += 1000 * v.why.retry_after_s;
    q.n_held = 8;
    q.n_max = 9;
    const struct admit_verdict other = verdict(&g, &q);
    CHECK(!other.taken && other.reason == ADMIT_FULL);
    CHECK(strstr(other.why.err.text, "8 requests of 9 that it may (--max-concurrency), beside 1 "));
    snprintf(q.wanted.retry, sizeof q.wanted.retry, "%s", v.why.retry);
    CHECK(verdict(&g, &q).taken);
    admit_leave(g.a, &g.r[0], g.now); /* nobody waits: places do not stay empty */
    q.wanted.retry[0] = 0;
    CHECK(verdict(&g, &q).taken);
    close_rig(&g);
}

/* A tenant that fills the line does not keep out another one of its class. */
TEST(the_longest_line_of_a_class_gives_way)
{
    struct rig g;
    open_rig(&g, "a k\nb l\n");
    for (int i = 0; i < 5; i++) push(&g, 1, 0);
    struct admit_verdict v = verdict_when_full(&g, 2, 0);
    CHECK(v.taken && v.shed == &g.r[4]);
    CHECK(!verdict_when_full(&g, 1, 0).taken);
    close_rig(&g);
}

/* The new one counts in the line of its tenant: it does not drive out another tenant's only one,
 * whatever that one's weight. */
TEST(a_line_that_is_empty_is_not_the_shortest)
{
    struct rig g;
    open_rig(&g, "bulk k\nvip l weight=10\n");
    push(&g, 1, 0);
    take_next(&g); /* all of it runs */
    struct admit_request *vip = push(&g, 2, 0);
    CHECK(!verdict_when_full(&g, 1, 0).taken);
    CHECK(!verdict_when_full(&g, 1, -9).taken); /* priorities are a tenant's own affair */
    take_next(&g);
    push(&g, 1, 0);
    struct admit_verdict v = verdict_when_full(&g, 2, 0);
    CHECK(v.taken && v.shed->tenant == 1 && vip->state == ADMIT_RUNNING);
    close_rig(&g);
}

TEST_MAIN(
    CASE(first_come_first_served), CASE(lower_priority_is_sooner_among_a_tenants_requests),
    CASE(who_had_less_than_its_share_goes_first), CASE(a_higher_class_goes_first),
    CASE(tokens_go_by_weight), CASE(long_answers_cost_turns),
    CASE(who_has_nothing_in_line_saves_nothing_up), CASE(requests_per_minute),
    CASE(the_first_that_is_refused_waits_for_room_alone), CASE(a_refusal_for_a_promise_says_so),
    CASE(who_never_shows_its_promise_is_served), CASE(a_place_that_was_promised_is_kept),
    CASE(tokens_per_minute), CASE(tokens_per_minute_of_several_prompts),
    CASE(tokens_that_were_promised_are_kept), CASE(what_is_expected_counts_against_the_limits),
    CASE(concurrent), CASE(a_quiet_night_is_not_the_time_of_a_request),
    CASE(what_others_used_counts), CASE(without_the_directory_an_entry_node_gives_its_share),
    CASE(who_has_not_heard_of_others_counts_the_nodes),
    CASE(a_report_that_was_not_answered_is_sent_again), CASE(fairness_is_over_all_entry_nodes),
    CASE(a_directory_that_lost_its_counters_starves_nobody),
    CASE(a_wait_that_is_too_long_is_refused_at_once), CASE(one_slow_beginning_refuses_nobody),
    CASE(an_outage_is_no_slow_line), CASE(short_prompts_say_little_of_long_ones),
    CASE(an_outage_is_no_time_in_line), CASE(what_follows_is_promised_nothing_when_it_is_late),
    CASE(places_for_answers_may_be_scarcer_than_prompts),
    CASE(a_first_token_that_would_be_late_is_refused_at_once),
    CASE(slow_starts_do_not_refuse_for_ever), CASE(an_old_speed_does_not_refuse_for_ever),
    CASE(who_waited_for_too_long_may_not_begin), CASE(the_newest_of_the_lowest_class_gives_way),
    CASE(a_place_is_kept_for_who_was_told_to_come), CASE(the_longest_line_of_a_class_gives_way),
    CASE(a_line_that_is_empty_is_not_the_shortest))
