/* test_directory_meter.c - every backend of the directory counts what the tenants of a topic use by
 * the rules of meter.h; then what only a server elsewhere can do: vanish, or be of an earlier
 * version. */
#include "tests/conformance/meter_rig.h"

enum { LONG_S = 150 };

/* ---- cases for every backend ---- */

static void case_sums_are_over_all_entries(struct rig *r)
{
    const uint64_t tenant = 0xfedcba9876543210u;
    struct answer a;
    tell(r, A, use(tenant, 2, 300, 30, 2), &a);
    struct meter_sum s = tell(r, B, (struct meter_use){ tenant, 1, 70, 7, 1, 4 }, &a);
    CHECK_EQ_INT(s.requests, 3);
    CHECK_EQ_INT(s.tokens, 370);
    CHECK_EQ_INT(s.served, 37);
    CHECK_EQ_INT(s.n_running, 3);
    CHECK_EQ_INT(s.n_waiting, 4);
    CHECK_EQ_INT(a.n_entries, 2);
    CHECK_EQ_INT(a.least, 37);
    s = tell(r, A, use(2, 0, 0, 0, 0), &a); /* asks about another; its own are over */
    CHECK_EQ_INT(s.requests + s.tokens + s.served, 0);
    s = tell(r, B, (struct meter_use){ tenant, 0, 0, 0, 1, 4 }, &a);
    CHECK_EQ_INT(s.n_running, 1);
    CHECK_EQ_INT(s.requests, 3);
    CHECK_OK(send_as(r, C, 1, NULL, 0, &a)); /* nothing to tell: it is there */
    CHECK_EQ_INT(a.n_entries, 3);
    CHECK_EQ_INT(a.least, 37);
}

static void case_a_report_counts_once(struct rig *r)
{
    const struct meter_use first = use(1, 1, 100, 10, 1), later = use(1, 1, 50, 5, 0);
    struct answer a;
    for (int i = 0; i < 3; i++) {
        CHECK_OK(send_as(r, A, 7, &first, 1, &a));
        CHECK_EQ_INT(a.sums[0].tokens, 100);
        CHECK_EQ_INT(a.sums[0].n_running, 1);
    }
    CHECK_OK(send_as(r, A, METER_NUMBER_END - 1, &later, 1, &a));
    CHECK_OK(send_as(r, A, METER_NUMBER_END - 2, &first, 1, &a)); /* overtaken */
    CHECK_EQ_INT(a.sums[0].tokens, 150);
    CHECK_EQ_INT(a.sums[0].served, 15);
    CHECK_EQ_INT(a.sums[0].n_running, 0);
    CHECK_OK(send_as(r, B, 7, &first, 1, &a)); /* numbers are of each entry */
    CHECK_EQ_INT(a.sums[0].tokens, 250);
}

/* The dead entry's last report comes again after its lease: its answer had been lost. */
static void case_a_dead_entry_has_nothing_running(struct rig *r)
{
    const struct meter_use u = use(1, 1, 100, 10, 5);
    struct answer a;
    uint64_t t0 = clock_ms(), ms = 0;
    CHECK_OK(send_as(r, A, 1, &u, 1, &a));
    CHECK_EQ_INT(tell(r, B, use(1, 0, 0, 0, 1), &a).n_running, 6);
    CHECK_EQ_INT(a.n_entries, 2);
    for (; ms < WAIT_MS && tell(r, B, use(1, 0, 0, 0, 1), &a).n_running > 1; run_for(r, 20)) {
        CHECK_EQ_INT(a.n_entries, 2);
        ms = clock_ms() - t0;
    }
    CHECK(ms > METER_LEASE_MS - 200 && ms < METER_LEASE_MS + 1500);
    CHECK_EQ_INT(a.n_entries, 1);
    CHECK_EQ_INT(a.sums[0].tokens, 100); /* what was used was used */
    CHECK_OK(send_as(r, A, 1, &u, 1, &a));
    CHECK_EQ_INT(a.sums[0].n_running, 6);
    CHECK_EQ_INT(a.sums[0].tokens, 100);
    CHECK_EQ_INT(a.n_entries, 2);
}

static void case_who_comes_back_is_lifted(struct rig *r)
{
    const struct meter_use both[] = { use(3, 1, 0, 7, 1), use(4, 1, 0, 9, 1) };
    struct answer a;
    tell(r, A, use(1, 1, 0, 50, 1), &a);
    CHECK_EQ_INT(tell(r, B, use(2, 1, 0, 0, 1), &a).served, 50);  /* it begins where 1 is */
    CHECK_EQ_INT(tell(r, B, use(2, 0, 0, 30, 0), &a).served, 80); /* and goes */
    tell(r, A, use(1, 0, 0, 500, 1), &a);
    CHECK_EQ_INT(a.least, 550);
    CHECK_EQ_INT(tell(r, B, use(2, 1, 0, 5, 0), &a).served, 555);
    CHECK_EQ_INT(tell(r, B, use(2, 1, 0, 1000, 1), &a).served, 1555);
    CHECK_EQ_INT(tell(r, B, use(2, 0, 0, 0, 0), &a).served, 1555);
    CHECK_EQ_INT(tell(r, B, use(2, 0, 0, 0, 1), &a).served,
                 1555); /* who had more is not put back */
    CHECK_EQ_INT(a.least, 550);
    tell(r, A, use(1, 0, 0, 0, 0), &a);
    tell(r, B, use(2, 0, 0, 0, 0), &a);
    CHECK_EQ_INT(a.least, 0);
    CHECK_OK(send_as(r, C, 1, both, 2, &a)); /* neither is lifted by the other */
    CHECK_EQ_INT(a.sums[0].served, 1562);
    CHECK_EQ_INT(a.sums[1].served, 1564);
    CHECK_EQ_INT(a.least, 1562);
}

static void case_a_topic_counts_so_many_tenants(struct rig *r)
{
    static struct meter_use all[METER_TENANTS_MAX];
    const struct meter_use mixed[] = { use(1, 1, 10, 1, 1), use(9999, 1, 10, 1, 0) };
    struct answer a;
    for (uint32_t i = 0; i < METER_TENANTS_MAX; i++)
        all[i] = (struct meter_use){ UINT64_MAX - i, UINT32_MAX, UINT64_MAX - i,
                                     UINT64_MAX,     UINT32_MAX, UINT32_MAX };
    all[0] = use(1, 1, 10, 1, 0);
    CHECK_OK(send_as(r, A, METER_NUMBER_END - 2, all, METER_TENANTS_MAX, &a));
    for (uint32_t i = 1; i < METER_TENANTS_MAX; i++) {
        CHECK(a.sums[i].tokens == METER_QUANTITY_MAX && a.sums[i].requests == UINT32_MAX);
        CHECK(a.sums[i].n_running == UINT32_MAX && a.sums[i].n_waiting == UINT32_MAX);
    }
    CHECK_STATUS(send_as(r, B, 1, mixed, 2, &a), ERR_FULL);
    CHECK_EQ_INT(r->n_down, 0); /* that says nothing about the server */
    CHECK_EQ_INT(tell(r, C, use(1, 0, 0, 0, 0), &a).tokens, 10);   /* it was refused whole */
    CHECK_EQ_INT(tell(r, C, use(9999, 0, 0, 0, 0), &a).tokens, 0); /* asking takes no place */
}

/* By the clock of whoever counts. test_meter_book and test_directory_meter_redis have it in no
 * time. */
static void case_the_window_slides_long(struct rig *r)
{
    struct answer a;
    if (!test_runs_all())
        SKIP("a minute passes in it: with tests/run.sh --all; the window's end by the clock of "
             "the directory was NOT tested");
    tell(r, A, use(1, 1, 100, 10, 0), &a);
    const uint64_t t0 = clock_ms();
    while (clock_ms() < t0 + METER_WINDOW_MS / 2) { /* who is silent lets no time of Redis pass */
        run_for(r, 500);
        for (int entry = A; entry <= B; entry++)
            CHECK_EQ_INT(tell(r, entry, use(1, 0, 0, 0, 0), &a).tokens, 100);
    }
    CHECK_EQ_INT(tell(r, B, use(1, 1, 11, 1, 0), &a).tokens, 111);
    uint64_t ms = 0;
    for (; ms < 2 * METER_WINDOW_MS; run_for(r, 50)) {
        const struct meter_sum s = tell(r, B, use(1, 0, 0, 0, 0), &a);
        if (s.tokens == 11 && s.requests == 1) break;
        CHECK_EQ_INT(s.tokens, 111);
        ms = clock_ms() - t0;
    }
    CHECK(ms > METER_WINDOW_MS - 200 && ms < METER_WINDOW_MS + METER_SLOT_MS + 1500);
}

static void case_topics_are_apart(struct rig *r)
{
    struct answer a;
    const struct meter_use u = use(1, 1, 10, 1, 1);
    const struct meter_report report = { .entry = 9, .number = 1, .uses = &u, .n_uses = 1 };
    struct directory *other = open_entry(r, "other");
    tell(r, A, use(1, 1, 5, 5, 1), &a);
    CHECK_OK(report_to(r, other, &report, &a));
    CHECK_EQ_INT(a.sums[0].tokens, 10);
    CHECK_EQ_INT(a.n_entries, 1);
    CHECK_EQ_INT(tell(r, A, use(1, 0, 0, 0, 0), &a).tokens, 5);
    directory_close(other);
}

static void case_close_ends_all_callbacks(struct rig *r)
{
    struct answer a = { 0 };
    const struct meter_use u = use(1, 1, 10, 1, 1);
    const struct meter_report report = { .entry = 9, .number = 1, .uses = &u, .n_uses = 1 };
    struct directory *d = open_entry(r, "other");
    CHECK_OK(directory_meter(d, &report, on_sums, &a));
    directory_close(d);
    run_for(r, 100);
    CHECK_EQ_INT(a.n_calls, 0);
}

/* ---- a server that vanishes ---- */

/* Counted or not: under its number it counts once. */
static void case_an_unanswered_report_is_sent_again(struct rig *r)
{
    const struct meter_use u = use(1, 1, 100, 10, 1);
    struct answer a;
    tell(r, A, use(1, 1, 100, 10, 1), &a);
    if (r->redis.pid) kill(r->redis.pid, SIGSTOP);
    else server_stop(r);
    CHECK_STATUS(send_as(r, A, 2, &u, 1, &a), ERR_UNAVAILABLE);
    WAIT_FOR(r, r->n_down > 0);
    for (int i = 0; i < 3; i++) /* and at once from now on */
        CHECK_STATUS(send_as(r, A, 2, &u, 1, &a), ERR_UNAVAILABLE);
    const int n_up = r->n_up;
    if (r->redis.pid) kill(r->redis.pid, SIGCONT);
    else server_start(r);
    WAIT_FOR(r, r->n_up > n_up);
    const uint64_t before = r->redis.pid ? 100 : 0; /* a server that starts has lost everything */
    for (int i = 0; i < 2; i++) {
        CHECK_OK(send_as(r, A, 2, &u, 1, &a));
        CHECK_EQ_INT(a.sums[0].tokens, before + 100);
        CHECK_EQ_INT(a.sums[0].n_running, 1);
    }
}

/* ---- servers of other versions ---- */

/* One that does not know reports, as all before them; or answers them with `sums`. */
struct other_server {
    int n_reports;
    const char *sums;
};

static void on_other_request(void *arg, struct http_exchange *x)
{
    struct other_server *o = arg;
    const bool is_meter = str_eq_c(http_path(x), DIRECTORY_PATH "meter");
    o->n_reports += is_meter;
    if (!is_meter)
        http_reply(x, 200, "application/json", NULL, STR("{\"topics\":\"\",\"nodes\":[]}"));
    else if (o->sums) http_reply(x, 200, "application/json", NULL, str_of(o->sums));
    else http_reply_error(x, 404, NULL, "error", "there is no such call");
}

TEST(a_server_of_an_earlier_version_is_asked_now_and_then)
{
    struct rig r;
    struct other_server o = { 0 };
    struct answer a;
    const struct meter_use u = use(1, 1, 100, 10, 1);
    struct http_server *http = other_open(&r, on_other_request, &o);
    for (int i = 0; i < 5; i++) CHECK_STATUS(send_as(&r, A, 1, &u, 1, &a), ERR_UNSUPPORTED);
    CHECK_EQ_INT(o.n_reports, 1);
    CHECK_EQ_INT(r.n_down, 0); /* in all else it is a directory server */
    other_close(&r, http);
}

TEST(malformed_sums_are_no_answer)
{
    static const char *const answers[] = {
        "{}",
        "{\"entries\":1,\"least\":0,\"sums\":[]}",
        "{\"entries\":1,\"least\":0,\"sums\":[[1,2,3,4]]}",
        "{\"entries\":1,\"least\":0,\"sums\":[[1,2,3,4,5,6]]}",
        "{\"entries\":1,\"least\":0,\"sums\":[[1,2,3,4,-5]]}",
        "{\"entries\":1,\"least\":0,\"sums\":[[4294967296,2,3,4,5]]}",
        "{\"entries\":1,\"least\":0,\"sums\":[[1,2,1e16,4,5]]}",
        "{\"entries\":1,\"least\":1.5,\"sums\":[[1,2,3,4,5]]}",
        "{\"entries\":4097,\"least\":0,\"sums\":[[1,2,3,4,5]]}",
        "{\"entries\":1,\"sums\":[[1,2,3,4,5]]}",
        "[]",
        "",
    };
    struct rig r;
    struct other_server o = { 0 };
    struct answer a;
    const struct meter_use u = use(1, 1, 100, 10, 1);
    struct http_server *http = other_open(&r, on_other_request, &o);
    for (size_t i = 0; i < COUNT_OF(answers); i++) {
        o.sums = answers[i];
        enum status st = send_as(&r, A, 1, &u, 1, &a);
        if (st != ERR_UNAVAILABLE || o.n_reports != (int)i + 1)
            test_fail(__FILE__, __LINE__, "%s: %s", answers[i], status_name(st));
        const int n_up = r.n_up;
        WAIT_FOR(&r, r.n_up > n_up);
    }
    o.sums = "{\"entries\":1,\"least\":0,\"sums\":[[1,2,3,4,5]],\"of a later version\":{}}";
    CHECK_OK(send_as(&r, A, 1, &u, 1, &a));
    CHECK_EQ_INT(a.sums[0].tokens, 2);
    other_close(&r, http);
}

#define ALL_LONG_CASES(name)                                                                       \
    CASE_T(name##_local, LONG_S), CASE_T(name##_http, LONG_S), CASE_T(name##_mounted, LONG_S),     \
        CASE_T(name##_redis, LONG_S)

ALL_BACKENDS(sums_are_over_all_entries)
ALL_BACKENDS(a_report_counts_once)
ALL_BACKENDS(a_dead_entry_has_nothing_running)
ALL_BACKENDS(who_comes_back_is_lifted)
ALL_BACKENDS(a_topic_counts_so_many_tenants)
ALL_BACKENDS(topics_are_apart)
ALL_BACKENDS(close_ends_all_callbacks)
ALL_BACKENDS(the_window_slides_long)
REMOTE_BACKENDS(an_unanswered_report_is_sent_again)

TEST_MAIN(ALL_CASES(sums_are_over_all_entries), ALL_CASES(a_report_counts_once),
          ALL_CASES(a_dead_entry_has_nothing_running), ALL_CASES(who_comes_back_is_lifted),
          ALL_CASES(a_topic_counts_so_many_tenants), ALL_CASES(topics_are_apart),
          ALL_CASES(close_ends_all_callbacks), ALL_LONG_CASES(the_window_slides_long),
          REMOTE_CASES(an_unanswered_report_is_sent_again),
          CASE_T(a_server_of_an_earlier_version_is_asked_now_and_then, CASE_S),
          CASE_T(malformed_sums_are_no_answer, CASE_S))
