/* test_meter_book.c - the counters of one topic, by a time that the test gives. */
#include "scheduler/directory/meter_book.h"

#include <string.h>

#include "tests/harness/test.h"

enum { ENTRY_A = 100, ENTRY_B = 200, T0 = 1000000 };

struct rig {
    struct meter_book *book;
    uint64_t now;
    uint64_t numbers[300]; /* of the entries, by id */
    struct meter_sum sums[METER_TENANTS_MAX];
    struct meter_sums out;
    struct err err;
};

static void rig_open(struct rig *r)
{
    memset(r, 0, sizeof *r);
    r->book = meter_book_create();
    r->now = T0;
}

static enum status send(struct rig *r, uint64_t entry, uint64_t number, const struct meter_use *u,
                        uint32_t n)
{
    const struct meter_report report = { .entry = entry, .number = number, .uses = u, .n_uses = n };
    return meter_book_report(r->book, &report, r->now, r->sums, &r->out, &r->err);
}

/* One tenant's next report of an entry; returns its sum. */
static const struct meter_sum *tell(struct rig *r, uint64_t entry, struct meter_use u)
{
    CHECK_OK(send(r, entry, ++r->numbers[entry], &u, 1));
    CHECK_EQ_INT(r->out.n_sums, 1);
    CHECK(r->out.sums == r->sums && r->sums[0].tenant == u.tenant);
    return r->sums;
}

static struct meter_use use(uint64_t tenant, uint32_t requests, uint64_t tokens, uint64_t cost,
                            uint32_t n_running)
{
    return (struct meter_use){ tenant, requests, tokens, cost, n_running, 0 };
}

TEST(sums_are_over_all_entries)
{
    struct rig r;
    rig_open(&r);
    tell(&r, ENTRY_A, use(1, 2, 300, 30, 2));
    const struct meter_sum *s = tell(&r, ENTRY_B, (struct meter_use){ 1, 1, 70, 7, 1, 4 });
    CHECK_EQ_INT(s->requests, 3);
    CHECK_EQ_INT(s->tokens, 370);
    CHECK_EQ_INT(s->served, 37);
    CHECK_EQ_INT(s->n_running, 3);
    CHECK_EQ_INT(s->n_waiting, 4);
    CHECK_EQ_INT(r.out.n_entries, 2);
    CHECK_EQ_INT(r.out.least, 37);
    s = tell(&r, ENTRY_A,
             use(2, 0, 0, 0, 0)); /* asks about another; its own of tenant 1 are over */
    CHECK_EQ_INT(s->requests + s->tokens + s->served, 0);
    s = tell(&r, ENTRY_B, (struct meter_use){ 1, 0, 0, 0, 1, 4 });
    CHECK_EQ_INT(s->n_running, 1);
    CHECK_EQ_INT(s->requests, 3);
    meter_book_free(r.book);
}

TEST(a_report_counts_once)
{
    const struct meter_use first = use(1, 1, 100, 10, 1), later = use(1, 1, 50, 5, 0);
    struct rig r;
    rig_open(&r);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(send(&r, ENTRY_A, 7, &first, 1));
        CHECK_EQ_INT(r.sums[0].tokens, 100);
        CHECK_EQ_INT(r.sums[0].n_running, 1);
    }
    CHECK_OK(send(&r, ENTRY_A, 9, &later, 1));
    CHECK_OK(send(&r, ENTRY_A, 7, &first, 1)); /* overtaken: it brings back nothing */
    CHECK_EQ_INT(r.sums[0].tokens, 150);
    CHECK_EQ_INT(r.sums[0].served, 15);
    CHECK_EQ_INT(r.sums[0].n_running, 0);
    CHECK_OK(send(&r, ENTRY_B, 7, &first, 1)); /* numbers are of each entry */
    CHECK_EQ_INT(r.sums[0].tokens, 250);
    meter_book_free(r.book);
}

TEST(a_lapsed_entry_has_nothing_but_its_number)
{
    const struct meter_use u = use(1, 1, 100, 10, 5);
    struct rig r;
    rig_open(&r);
    CHECK_OK(send(&r, ENTRY_A, 1, &u, 1));
    r.now += METER_LEASE_MS - 1;
    CHECK_EQ_INT(tell(&r, ENTRY_B, use(1, 0, 0, 0, 0))->n_running, 5);
    CHECK_EQ_INT(r.out.n_entries, 2);
    r.now++;
    CHECK_EQ_INT(tell(&r, ENTRY_B, use(1, 0, 0, 0, 0))->n_running, 0);
    CHECK_EQ_INT(r.out.n_entries, 1);
    CHECK_EQ_INT(r.out.least, 0);
    r.now += METER_FORGET_MS / 2; /* it was cut off; its report's answer was lost */
    CHECK_OK(send(&r, ENTRY_A, 1, &u, 1));
    CHECK_EQ_INT(r.sums[0].n_running, 5);
    CHECK_EQ_INT(r.sums[0].served, 10);
    r.now += METER_LEASE_MS + METER_FORGET_MS;
    CHECK_OK(send(&r, ENTRY_A, 1, &u, 1)); /* nobody knows any more */
    CHECK_EQ_INT(r.sums[0].served, 20);
    CHECK(!meter_book_is_over(r.book, r.now));
    CHECK(meter_book_is_over(r.book, r.now + METER_LEASE_MS + METER_FORGET_MS));
    meter_book_free(r.book);
}

TEST(the_window_slides)
{
    struct rig r;
    rig_open(&r);
    for (int i = 0; i < 30; i++, r.now += 2000) tell(&r, ENTRY_A, use(1, 1, 10, 0, 0));
    r.now = T0 + METER_WINDOW_MS;
    CHECK_EQ_INT(tell(&r, ENTRY_A, use(1, 0, 0, 0, 0))->tokens, 300); /* the first still counts */
    r.now += METER_SLOT_MS;
    CHECK_EQ_INT(tell(&r, ENTRY_A, use(1, 0, 0, 0, 0))->tokens, 290);
    CHECK_EQ_INT(r.sums[0].requests, 29);
    r.now += 20 * METER_SLOT_MS;
    CHECK_EQ_INT(tell(&r, ENTRY_A, use(1, 0, 0, 0, 0))->tokens, 190);
    r.now += 1000000;
    CHECK_EQ_INT(tell(&r, ENTRY_A, use(1, 0, 5, 0, 0))->tokens, 5);
    CHECK_EQ_INT(r.sums[0].requests, 0);
    meter_book_free(r.book);
}

TEST(who_comes_back_is_lifted)
{
    struct rig r;
    rig_open(&r);
    tell(&r, ENTRY_A, use(1, 1, 0, 50, 1));
    CHECK_EQ_INT(tell(&r, ENTRY_B, use(2, 1, 0, 0, 1))->served, 50);  /* it begins where 1 is */
    CHECK_EQ_INT(tell(&r, ENTRY_B, use(2, 0, 0, 30, 0))->served, 80); /* and goes */
    tell(&r, ENTRY_A, use(1, 0, 0, 500, 1));
    CHECK_EQ_INT(r.out.least, 550);
    CHECK_EQ_INT(tell(&r, ENTRY_B, use(2, 1, 0, 5, 0))->served, 555); /* what was between is lost */
    CHECK_EQ_INT(r.out.least, 550);
    tell(&r, ENTRY_B, use(2, 1, 0, 1000, 1)); /* who has had more is not put back */
    CHECK_EQ_INT(r.sums[0].served, 1555);
    CHECK_EQ_INT(tell(&r, ENTRY_B, use(2, 0, 0, 0, 0))->served, 1555);
    CHECK_EQ_INT(tell(&r, ENTRY_B, use(2, 0, 0, 0, 1))->served, 1555);
    CHECK_EQ_INT(r.out.least, 550);
    meter_book_free(r.book);
}

/* Of two in one report neither is lifted by the other. */
TEST(who_comes_back_to_an_idle_topic_begins_with_the_most)
{
    const struct meter_use both[] = { use(2, 1, 0, 7, 1), use(3, 1, 0, 9, 1) };
    struct rig r;
    rig_open(&r);
    tell(&r, ENTRY_A, use(1, 1, 0, 100, 1));
    tell(&r, ENTRY_A, use(1, 0, 0, 0, 0));
    CHECK_EQ_INT(r.out.least, 0);
    CHECK_OK(send(&r, ENTRY_B, 1, both, 2));
    CHECK_EQ_INT(r.sums[0].served, 107);
    CHECK_EQ_INT(r.sums[1].served, 109);
    CHECK_EQ_INT(r.out.least, 107);
    meter_book_free(r.book);
}

TEST(served_is_lowered_before_it_is_too_large)
{
    struct rig r;
    rig_open(&r);
    uint64_t last = 0;
    bool lowered = false;
    for (int i = 0; i < 200; i++) {
        const struct meter_use two[] = { use(1, 0, 0, UINT64_MAX, 1), use(2, 0, 0, 1 << 20, 1) };
        CHECK_OK(send(&r, i % 2 ? ENTRY_A : ENTRY_B, (uint64_t)i + 1, two, 2));
        const uint64_t apart = r.sums[0].served - r.sums[1].served;
        CHECK(r.sums[0].served <= UINT64_C(1) << 53 && apart <= UINT64_C(1) << 53);
        CHECK(r.sums[0].served >= r.sums[1].served);
    }
    for (int i = 0; i < 200; i++) { /* both alike: the distance stays where they are lowered */
        const struct meter_use two[] = { use(3, 0, 0, METER_QUANTITY_MAX, 1),
                                         use(4, 0, 0, METER_QUANTITY_MAX, 1) };
        CHECK_OK(send(&r, 250, (uint64_t)i + 1, two, 2));
        CHECK(r.sums[0].served == r.sums[1].served);
        lowered |= r.sums[0].served < last;
        last = r.sums[0].served;
        r.now += METER_LEASE_MS; /* the others have lapsed */
    }
    CHECK(lowered);
    meter_book_free(r.book);
}

TEST(a_topic_counts_so_many_tenants)
{
    static struct meter_use all[METER_TENANTS_MAX];
    struct rig r;
    rig_open(&r);
    for (uint32_t i = 0; i < METER_TENANTS_MAX; i++) all[i] = use(i + 1, 1, 10, 1, 0);
    CHECK_OK(send(&r, ENTRY_A, 1, all, METER_TENANTS_MAX));
    const struct meter_use mixed[] = { use(1, 1, 10, 1, 1), use(9999, 1, 10, 1, 0) };
    r.now += METER_WINDOW_MS - 1;
    CHECK_STATUS(send(&r, ENTRY_B, 1, mixed, 2), ERR_FULL);
    CHECK(strstr(r.err.text, "the topic counts 256 already"));
    CHECK_EQ_INT(tell(&r, ENTRY_A + 1, use(1, 0, 0, 0, 0))->tokens, 10); /* refused whole */
    CHECK_EQ_INT(tell(&r, ENTRY_A + 1, use(9999, 0, 0, 0, 0))->tokens,
                 0); /* asking takes no place */
    r.now += 2 * METER_SLOT_MS;
    CHECK_OK(send(&r, ENTRY_B, 1, mixed, 2)); /* one that is idle gives way, not tenant 1 */
    CHECK_EQ_INT(r.sums[0].served, 2);
    CHECK_EQ_INT(r.sums[0].tokens, 10);
    CHECK_EQ_INT(r.sums[1].tokens, 10);
    meter_book_free(r.book);
}

TEST(a_topic_hears_so_many_entries)
{
    struct rig r;
    const struct meter_use u = use(1, 1, 1, 1, 1);
    rig_open(&r);
    for (uint64_t i = 1; i <= METER_ENTRIES_MAX; i++) CHECK_OK(send(&r, i, 1, &u, 1));
    CHECK_EQ_INT(r.out.n_entries, METER_ENTRIES_MAX);
    CHECK_STATUS(send(&r, 9999, 1, &u, 1), ERR_FULL);
    CHECK(strstr(r.err.text, "4096 entry nodes"));
    r.now += METER_LEASE_MS;
    CHECK_OK(send(&r, 9999, 1, &u, 1));
    CHECK_EQ_INT(r.out.n_entries, 1);
    CHECK_EQ_INT(r.sums[0].n_running, 1);
    CHECK_EQ_INT(r.sums[0].requests, METER_ENTRIES_MAX + 1);
    meter_book_free(r.book);
}

TEST(large_counts_stay_at_their_limits)
{
    const struct meter_use most = { 1, UINT32_MAX, UINT64_MAX, UINT64_MAX, UINT32_MAX, UINT32_MAX };
    struct rig r;
    rig_open(&r);
    for (uint64_t i = 1; i < 200; i++, r.now += 500) {
        CHECK_OK(send(&r, ENTRY_A + i % 2, i, &most, 1));
        CHECK(r.sums[0].tokens <= UINT64_C(1) << 53 && r.sums[0].served <= UINT64_C(1) << 53);
        CHECK(r.sums[0].requests == UINT32_MAX && r.sums[0].n_running == UINT32_MAX);
    }
    r.now += 100000;
    CHECK_EQ_INT(tell(&r, 250, use(1, 0, 1, 0, 0))->tokens, 1); /* no sum has run over */
    CHECK_EQ_INT(r.sums[0].requests, 0);
    CHECK_EQ_INT(r.sums[0].n_running, 0);
    meter_book_free(r.book);
}

TEST_MAIN(CASE(sums_are_over_all_entries), CASE(a_report_counts_once),
          CASE(a_lapsed_entry_has_nothing_but_its_number), CASE(the_window_slides),
          CASE(who_comes_back_is_lifted),
          CASE(who_comes_back_to_an_idle_topic_begins_with_the_most),
          CASE(served_is_lowered_before_it_is_too_large), CASE(a_topic_counts_so_many_tenants),
          CASE(a_topic_hears_so_many_entries), CASE(large_counts_stay_at_their_limits))
