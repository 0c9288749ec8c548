/* test_admit_overload.c - admission before a simulated cluster, for minutes of simulated time: what
 * a tenant gets, whether refusals tell the truth, and that no request is lost on the way. */
#include "tests/unit/scheduler/admit_sim.h"

static const char THREE[] = "a ka weight=1\nb kb weight=2\nc kc weight=4\n";

enum { TTFT_MS = 3000 };

static void load(struct sim *s, double times, uint32_t ttft_ms)
{
    for (uint32_t i = 1; i < s->tenants.n; i++) {
        s->t[i].per_s = times * sim_capacity() / (s->tenants.n - 1);
        s->t[i].ttft_ms = ttft_ms;
    }
}

/* Begins to count anew: the time before was to get there. */
static void forget(struct sim *s)
{
    for (uint32_t i = 0; i < s->tenants.n; i++) {
        struct sim_tenant *t = &s->t[i], now = { .per_s = t->per_s,
                                                 .ttft_ms = t->ttft_ms,
                                                 .deadline_ms = t->deadline_ms,
                                                 .honest = t->honest,
                                                 .tells = t->tells };
        *t = now;
    }
    s->busy_ms = 0;
}

static double tokens(const struct sim *s)
{
    double n = 0;
    for (uint32_t i = 0; i < s->tenants.n; i++) n += (double)s->t[i].tokens;
    return n;
}

static void check_shares(const struct sim *s)
{
    double weights = 0;
    for (uint32_t i = 1; i < s->tenants.n; i++) weights += s->tenants.list[i].weight;
    for (uint32_t i = 1; i < s->tenants.n; i++) {
        double share = (double)s->t[i].tokens / tokens(s),
               right = s->tenants.list[i].weight / weights;
        CHECK_NEAR(share / right, 1, 0.05);
    }
}

TEST(below_capacity_nobody_is_refused)
{
    struct sim s;
    sim_open(&s, THREE, 30000, 1);
    load(&s, 0.8, TTFT_MS);
    sim_run(&s, 120);
    sim_print(&s, 120);
    for (int i = 1; i <= 3; i++) CHECK(s.t[i].n_refused == 0 && s.t[i].n_taken == s.t[i].n_new);
    sim_close(&s);
}

TEST(five_times_the_capacity)
{
    struct sim s;
    sim_open(&s, THREE, 30000, 2);
    load(&s, 5, TTFT_MS);
    sim_run(&s, 20);
    forget(&s);
    sim_run(&s, 200);
    sim_print(&s, 200);
    CHECK((double)s.busy_ms / 200e3 / SIM_NODES > 0.95); /* the nodes are kept busy */
    check_shares(&s);
    for (int i = 1; i <= 3; i++) {
        const struct sim_tenant *t = &s.t[i];
        CHECK(t->n_back > 1000);
        CHECK((double)t->n_back_taken / (double)t->n_back >= 0.8);
        CHECK((double)t->ttft_over / (double)t->n_ttft < 0.01);
        CHECK((double)t->n_late / (double)t->n_refused < 0.01); /* refusals come at once */
    }
    sim_close(&s);
}

enum {
    LEARN_S = 70,   /* until it is known that nobody comes back */
    BEARABLE_S = 60 /* OpenAI's clients take a longer Retry-After for none */
};

static void check_told(const struct sim *s)
{
    for (int i = 1; i <= 3; i++) CHECK(s->t[i].n_refused && s->t[i].told_max_s <= BEARABLE_S);
}

/* Nobody comes back: places kept for them must not stay empty, and nobody is told to wait for
 * them, then or when the next ones come. */
TEST(nobody_comes_back)
{
    struct sim s;
    sim_open(&s, THREE, 30000, 3);
    load(&s, 5, TTFT_MS);
    for (int i = 1; i <= 3; i++) s.t[i].honest = 0;
    sim_run(&s, LEARN_S);
    forget(&s);
    sim_run(&s, 100);
    sim_print(&s, 100);
    CHECK((double)s.busy_ms / 100e3 / SIM_NODES > 0.95);
    check_shares(&s);
    check_told(&s);
    load(&s, 0, TTFT_MS);
    sim_run(&s, 60);
    forget(&s);
    load(&s, 5, TTFT_MS);
    sim_run(&s, 10);
    sim_print(&s, 10);
    check_told(&s);
    sim_close(&s);
}

/* Those who come back are taken, though half of those who were told to come do not. */
TEST(half_come_back)
{
    struct sim s;
    sim_open(&s, THREE, 30000, 7);
    load(&s, 5, TTFT_MS);
    for (int i = 1; i <= 3; i++) s.t[i].honest = 0.5;
    sim_run(&s, 20);
    forget(&s);
    sim_run(&s, 100);
    sim_print(&s, 100);
    CHECK((double)s.busy_ms / 100e3 / SIM_NODES > 0.95);
    check_shares(&s);
    for (int i = 1; i <= 3; i++) CHECK((double)s.t[i].n_back_taken / (double)s.t[i].n_back >= 0.8);
    sim_close(&s);
}

TEST(the_nodes_are_slower_than_they_say)
{
    struct sim s;
    sim_open(&s, THREE, 30000, 4);
    load(&s, 5, TTFT_MS);
    s.slower = 2;
    sim_run(&s, 60);
    forget(&s);
    sim_run(&s, 100);
    sim_print(&s, 100);
    check_shares(&s);
    for (int i = 1; i <= 3; i++) CHECK((double)s.t[i].ttft_over / (double)s.t[i].n_ttft < 0.02);
    sim_close(&s);
}

/* A tenant that asks for less than its share gets it at once, whatever another one does. */
TEST(a_flood_of_one_does_not_delay_the_other)
{
    struct sim s;
    sim_open(&s, "a ka\nb kb\n", 30000, 5);
    load(&s, 0.8, TTFT_MS);
    s.t[2].per_s = s.t[1].per_s;
    sim_run(&s, 100);
    double before = p99_ms(&s.t[1]);
    forget(&s);
    s.t[2].per_s *= 10;
    sim_run(&s, 100);
    sim_print(&s, 100);
    CHECK_EQ_INT(s.t[1].n_refused, 0);
    CHECK(p99_ms(&s.t[1]) <= before + 200);
    sim_close(&s);
}

/* What an operator calls batch work: it takes what is left, and all of that. */
TEST(a_low_class_gets_what_is_left)
{
    struct sim s;
    sim_open(&s, "a ka class=high\nb kb class=low\n", 30000, 6);
    s.t[1].per_s = 0.5 * sim_capacity();
    s.t[2].per_s = 2 * sim_capacity();
    sim_run(&s, 20);
    forget(&s);
    sim_run(&s, 100);
    sim_print(&s, 100);
    CHECK_EQ_INT(s.t[1].n_refused, 0);
    CHECK(p99_ms(&s.t[1]) <= 1000);
    CHECK_NEAR((double)s.t[2].tokens / tokens(&s), 0.5, 0.1);
    CHECK((double)s.busy_ms / 100e3 / SIM_NODES > 0.95);
    sim_close(&s);
}

/* All that can happen, at random: the sums hold (check_sums), and nobody starves who waits. */
TEST(whatever_happens_none_is_lost)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        struct sim s;
        sim_open(&s,
                 "a ka weight=3 class=low\nb kb weight=5 requests_per_minute=300\n"
                 "c kc weight=7 concurrent=20 tokens_per_minute=200000\n",
                 2000 + 3000 * (uint32_t)seed, seed);
        load(&s, (double)seed, 0);
        s.max_live = 40 + 30 * (uint32_t)seed;
        s.leave_per_s = seed % 2 ? 0.2 : 0;
        s.t[0].per_s = 2;
        s.t[1].ttft_ms = seed % 3 ? 1500 : 0;
        s.t[2].deadline_ms = 4000;
        s.t[2].honest = 0.5;
        s.t[3].tells = false;
        sim_run(&s, 30);
        sim_print(&s, 30);
        uint64_t before = s.t[2].n_ended;
        CHECK(before > 0 && s.t[3].n_ended > 0);
        for (uint32_t i = 0; i < 4; i++) s.t[i].per_s = 0;
        s.n_back = 0;
        sim_run(&s, 30);
        CHECK_EQ_INT(s.n_live, 0);
        CHECK_EQ_INT(s.n_begun, s.n_ended);
        CHECK_EQ_INT(s.n_places, 0);
        for (size_t i = 0; i < s.fill.n; i++) CHECK_EQ_INT(s.fill.nodes[i].n, 0);
        sim_close(&s);
    }
}

/* ---- as many as the entry node may hold ---- */

/* A service that has little to do is asked for more than it holds: those who are refused are told
 * to come when the first have ended, and not only when the line is empty. */
TEST(a_burst_is_told_when_there_is_room)
{
    enum { WAIT_MAX = 600, REFUSED = 30 };
    const double empty_s = (SIM_PLACES + WAIT_MAX) / sim_capacity(),
                 end_s = SIM_OUTPUT * SIM_STEP_MS / 1e3, more_s = REFUSED / sim_capacity();
    struct sim s;
    sim_open(&s, NULL, 300000, 8);
    s.max_live = SIM_PLACES + WAIT_MAX;
    s.t[0].per_s = 1;
    sim_run(&s, 30);
    s.t[0].per_s = 0;
    sim_run(&s, 5);
    for (uint32_t i = 0; i < SIM_PLACES + WAIT_MAX + REFUSED; i++) come_new(&s, 0);
    printf("told %u s at most; the first ends after %.1f s, %d more %.1f s later, all %.1f s\n",
           s.t[0].told_max_s, end_s, REFUSED, more_s, empty_s);
    CHECK_EQ_INT(s.t[0].n_refused, REFUSED);
    CHECK(s.t[0].told_max_s <= 1 + 2.5 * (end_s + more_s) && s.t[0].told_max_s < empty_s / 2);
    sim_run(&s, 60);
    sim_print(&s, 60);
    CHECK((double)s.t[0].n_back_taken / (double)s.t[0].n_back >= 0.8);
    sim_close(&s);
}

/* Five times the load, and no wait but for the next end: who is told to come finds a place. */
TEST(places_are_kept_for_those_who_were_told_to_come)
{
    struct sim s;
    sim_open(&s, NULL, 300000, 9);
    s.t[0].per_s = 5 * sim_capacity();
    s.max_live = SIM_PLACES + 128;
    sim_run(&s, 20);
    forget(&s);
    sim_run(&s, 100);
    sim_print(&s, 100);
    CHECK((double)s.busy_ms / 100e3 / SIM_NODES > 0.95);
    CHECK((double)s.t[0].n_back_taken / (double)s.t[0].n_back >= 0.8);
    sim_close(&s);
}

TEST_MAIN(CASE(below_capacity_nobody_is_refused), CASE(five_times_the_capacity),
          CASE(nobody_comes_back), CASE(half_come_back), CASE(the_nodes_are_slower_than_they_say),
          CASE(a_flood_of_one_does_not_delay_the_other), CASE(a_low_class_gets_what_is_left),
          CASE(whatever_happens_none_is_lost), CASE(a_burst_is_told_when_there_is_room),
          CASE(places_are_kept_for_those_who_were_told_to_come))
