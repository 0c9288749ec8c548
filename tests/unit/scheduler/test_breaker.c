/* test_breaker.c - every transition of a breaker, its pauses, its one probe, and what is thrown
 * out when there is no room. */
#include "scheduler/breaker.h"

#include <string.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { REQUEST = 7, OTHER = 8, T0 = 1000000 };

static const struct breaker_of NODE = { 1, 0 }, PAIR = { 1, 2 };

/* The entry's state, in a letter; '-': there is none. */
static char state_of(const struct breaker *b, struct breaker_of of)
{
    const struct breaker_entry *e = breaker_find(b, of);
    return e ? "coh"[e->state] : '-';
}

static void note(struct breaker *b, enum breaker_event ev, uint64_t request, uint64_t now_ms)
{
    breaker_note(b, PAIR, ev, request, now_ms, "the test wanted it");
}

/* A breaker of the pair in this state; OPEN until T0, HALF_OPEN with REQUEST as its probe. */
static struct breaker in_state(enum breaker_state s)
{
    struct breaker b = { .n = 1 };
    b.entries[0] = (struct breaker_entry){ .of = PAIR,
                                           .state = s,
                                           .n_failures = s == BREAKER_CLOSED,
                                           .n_pauses = s != BREAKER_CLOSED,
                                           .until_ms = s == BREAKER_OPEN ? T0 : 0,
                                           .prober = s == BREAKER_HALF_OPEN ? REQUEST : 0 };
    return b;
}

TEST(every_transition_is_as_written_down)
{
    /* A letter per event, in the order of enum breaker_event. */
    static const struct {
        enum breaker_state from;
        uint64_t now_ms, request;
        const char *to;
    } rows[] = {
        { BREAKER_CLOSED, T0, REQUEST, "co-cc" },
        { BREAKER_OPEN, T0 - 1, REQUEST, "oo-oo" },  /* in the pause */
        { BREAKER_OPEN, T0, REQUEST, "oo-ho" },      /* after it */
        { BREAKER_HALF_OPEN, T0, REQUEST, "oo-ho" }, /* the probe itself */
        { BREAKER_HALF_OPEN, T0, OTHER, "hh-hh" },   /* placed before the breaker opened */
        { BREAKER_HALF_OPEN, T0, 0, "oo-ho" },       /* a lost link */
    };
    for (size_t i = 0; i < COUNT_OF(rows); i++)
        for (int ev = 0; ev < BREAKER_N_EVENTS; ev++) {
            struct breaker b = in_state(rows[i].from);
            note(&b, (enum breaker_event)ev, rows[i].request, rows[i].now_ms);
            if (state_of(&b, PAIR) != rows[i].to[ev])
                test_fail(__FILE__, __LINE__, "row %zu, event %d: %c, not %c", i, ev,
                          state_of(&b, PAIR), rows[i].to[ev]);
        }
}

TEST(what_never_failed_is_not_kept)
{
    struct breaker b = { 0 };
    for (int ev = BREAKER_WORKED; ev < BREAKER_N_EVENTS; ev++)
        note(&b, (enum breaker_event)ev, REQUEST, T0);
    CHECK_EQ_INT(b.n, 0);
    CHECK(breaker_allows(breaker_find(&b, PAIR), T0));
}

TEST(single_failures_open_it_only_in_a_row)
{
    struct breaker b = { 0 };
    for (int round = 0; round < 3; round++) {
        for (int i = 1; i < BREAKER_FAILURES; i++) {
            note(&b, BREAKER_FAILED, REQUEST, T0);
            CHECK(breaker_allows(breaker_find(&b, PAIR), T0));
        }
        note(&b, BREAKER_WORKED, REQUEST, T0);
        CHECK_EQ_INT(b.n, 0);
    }
    for (int i = 0; i < BREAKER_FAILURES; i++) note(&b, BREAKER_FAILED, REQUEST, T0);
    CHECK_EQ_INT(state_of(&b, PAIR), 'o');
    CHECK(!breaker_allows(breaker_find(&b, PAIR), T0));
    CHECK_EQ_STR(breaker_find(&b, PAIR)->why, "the test wanted it");
}

TEST(pauses_double_up_to_the_longest_and_begin_anew_when_it_worked)
{
    struct breaker b = { 0 };
    uint64_t now = T0, pause = BREAKER_PAUSE_MS;
    note(&b, BREAKER_BROKEN, REQUEST, now);
    for (uint64_t probe = 20; probe < 40; probe++) {
        CHECK(!breaker_allows(breaker_find(&b, PAIR), now + pause - 1));
        CHECK(breaker_allows(breaker_find(&b, PAIR), now + pause));
        now += pause;
        note(&b, BREAKER_TAKEN, probe, now);
        note(&b, probe % 2 ? BREAKER_FAILED : BREAKER_BROKEN, probe, now);
        CHECK_EQ_INT(state_of(&b, PAIR), 'o');
        pause = pause * 2 < BREAKER_PAUSE_MAX_MS ? pause * 2 : BREAKER_PAUSE_MAX_MS;
    }
    CHECK_EQ_INT(pause, BREAKER_PAUSE_MAX_MS);
    note(&b, BREAKER_TAKEN, REQUEST, now + pause);
    note(&b, BREAKER_WORKED, REQUEST, now + pause);
    note(&b, BREAKER_BROKEN, REQUEST, now + pause);
    CHECK(breaker_allows(breaker_find(&b, PAIR), now + pause + BREAKER_PAUSE_MS));
}

TEST(one_request_probes_and_all_others_wait)
{
    struct breaker b = { 0 };
    note(&b, BREAKER_BROKEN, OTHER, T0);
    uint64_t due = T0 + BREAKER_PAUSE_MS;
    note(&b, BREAKER_TAKEN, OTHER, due - 1); /* one that has no other node: it is no probe */
    CHECK_EQ_INT(state_of(&b, PAIR), 'o');
    note(&b, BREAKER_TAKEN, REQUEST, due);
    for (uint64_t t = due; t < due + 600000; t += 1000)
        CHECK(!breaker_allows(breaker_find(&b, PAIR), t));
    note(&b, BREAKER_TAKEN, OTHER, due);
    CHECK_EQ_INT(breaker_find(&b, PAIR)->prober, REQUEST);
    note(&b, BREAKER_GIVEN_UP, OTHER, due);
    CHECK_EQ_INT(state_of(&b, PAIR), 'h');
    note(&b, BREAKER_GIVEN_UP, REQUEST, due + 5); /* cancelled: the next one probes at once */
    CHECK(breaker_allows(breaker_find(&b, PAIR), due + 5));
    note(&b, BREAKER_TAKEN, OTHER, due + 5);
    CHECK_EQ_INT(breaker_find(&b, PAIR)->prober, OTHER);
    note(&b, BREAKER_WORKED, REQUEST, due + 6); /* whoever shows that it works */
    CHECK_EQ_INT(state_of(&b, PAIR), '-');
}

TEST(nodes_and_pairs_are_told_apart)
{
    struct breaker b = { 0 };
    note(&b, BREAKER_BROKEN, REQUEST, T0);
    CHECK_EQ_INT(state_of(&b, NODE), '-');
    CHECK_EQ_INT(state_of(&b, (struct breaker_of){ 2, 1 }), '-');
    breaker_note(&b, NODE, BREAKER_BROKEN, 0, T0, NULL);
    note(&b, BREAKER_WORKED, REQUEST, T0);
    CHECK_EQ_INT(state_of(&b, NODE), 'o');
    CHECK_EQ_INT(state_of(&b, PAIR), '-');
    CHECK_EQ_INT(breaker_scope_of(NODE), BREAKER_OF_NODE);
    CHECK_EQ_INT(breaker_scope_of(PAIR), BREAKER_OF_PAIR);
}

static bool is_not_two(void *arg, uint64_t node)
{
    (void)arg;
    return node != 2;
}

static bool is_there(void *arg, uint64_t node)
{
    (void)arg;
    return node != 0;
}

TEST(what_a_lost_node_left_behind_is_forgotten)
{
    static const struct breaker_of all[] = { { 1, 0 }, { 2, 0 }, { 1, 2 }, { 2, 3 }, { 1, 3 } };
    struct breaker b = { 0 };
    for (size_t i = 0; i < COUNT_OF(all); i++)
        breaker_note(&b, all[i], BREAKER_BROKEN, 0, T0, NULL);
    breaker_forget(&b, is_not_two, NULL, T0);
    CHECK_EQ_INT(b.n, COUNT_OF(all)); /* the directory may only have lost its records */
    breaker_forget(&b, is_there, NULL, T0 + BREAKER_GONE_MS);
    breaker_forget(&b, is_not_two, NULL, T0 + BREAKER_GONE_MS + 1);
    CHECK_EQ_INT(b.n, COUNT_OF(all));
    breaker_forget(&b, is_not_two, NULL, T0 + 2 * BREAKER_GONE_MS + 1);
    CHECK_EQ_INT(b.n, 2);
    CHECK(breaker_find(&b, all[0]) && breaker_find(&b, all[4]));
}

/* Fills it with open ones, of which number i is due at T0 + pause + i. */
static void fill(struct breaker *b)
{
    *b = (struct breaker){ 0 };
    for (uint64_t i = 0; i < BREAKER_MAX; i++)
        breaker_note(b, (struct breaker_of){ 100 + i, 0 }, BREAKER_BROKEN, 0, T0 + i, NULL);
    CHECK_EQ_INT(b->n, BREAKER_MAX);
}

TEST(the_one_that_is_missed_least_is_thrown_out)
{
    static struct breaker b;
    const uint64_t due = T0 + BREAKER_PAUSE_MS + BREAKER_MAX;
    fill(&b); /* the open one whose pause ends first */
    note(&b, BREAKER_FAILED, REQUEST, due);
    CHECK_EQ_INT(b.n, BREAKER_MAX);
    CHECK_EQ_INT(state_of(&b, PAIR), 'c');
    CHECK_EQ_INT(state_of(&b, (struct breaker_of){ 100, 0 }), '-');
    breaker_note(&b, NODE, BREAKER_BROKEN, 0, due, NULL); /* a closed one before any open one */
    CHECK_EQ_INT(state_of(&b, PAIR), '-');
    CHECK_EQ_INT(state_of(&b, (struct breaker_of){ 101, 0 }), 'o');
    for (uint64_t i = 0; i < BREAKER_MAX; i++) /* one that is being probed never */
        breaker_note(&b, b.entries[i].of, BREAKER_TAKEN, REQUEST, due + BREAKER_PAUSE_MS, NULL);
    note(&b, BREAKER_BROKEN, REQUEST, due);
    CHECK_EQ_INT(state_of(&b, PAIR), '-');
    CHECK_EQ_INT(b.n, BREAKER_MAX);
}

struct seen {
    char states[16];
    size_t n;
};

static void on_change(void *arg, const struct breaker_entry *e)
{
    struct seen *s = arg;
    CHECK(s->n + 1 < sizeof s->states);
    s->states[s->n++] = "coh"[e->state];
}

TEST(each_change_of_state_is_told_once)
{
    struct seen s = { 0 };
    struct breaker b = { .on_change = on_change, .arg = &s };
    uint64_t now = T0;
    for (int i = 0; i < 2 * BREAKER_FAILURES; i++) note(&b, BREAKER_FAILED, REQUEST, now);
    note(&b, BREAKER_TAKEN, REQUEST, now += BREAKER_PAUSE_MS);
    note(&b, BREAKER_FAILED, REQUEST, now);
    note(&b, BREAKER_TAKEN, REQUEST, now += 2 * BREAKER_PAUSE_MS);
    note(&b, BREAKER_TAKEN, OTHER, now);
    note(&b, BREAKER_WORKED, REQUEST, now);
    note(&b, BREAKER_WORKED, OTHER, now);
    CHECK_EQ_STR(s.states, "ohohc");
}

TEST(a_status_says_if_it_is_broken)
{
    static const enum status broken[] = { ERR_PEER_LOST, ERR_PEER_REFUSED, ERR_PEER_MISMATCH,
                                          ERR_TIMEOUT,   ERR_NODEV,        ERR_INTERNAL };
    static const enum status failed[] = { ERR_CHECKSUM, ERR_IO, ERR_STALE, ERR_NOMEM,
                                          ERR_CANCELED };
    for (size_t i = 0; i < COUNT_OF(broken); i++)
        CHECK_EQ_INT(breaker_event_of(broken[i]), BREAKER_BROKEN);
    for (size_t i = 0; i < COUNT_OF(failed); i++)
        CHECK_EQ_INT(breaker_event_of(failed[i]), BREAKER_FAILED);
}

TEST_MAIN(CASE(every_transition_is_as_written_down), CASE(what_never_failed_is_not_kept),
          CASE(single_failures_open_it_only_in_a_row),
          CASE(pauses_double_up_to_the_longest_and_begin_anew_when_it_worked),
          CASE(one_request_probes_and_all_others_wait), CASE(nodes_and_pairs_are_told_apart),
          CASE(what_a_lost_node_left_behind_is_forgotten),
          CASE(the_one_that_is_missed_least_is_thrown_out), CASE(each_change_of_state_is_told_once),
          CASE(a_status_says_if_it_is_broken))
