/* test_directory_meter.c - every backend of the directory counts what the tenants of a topic use by
 * the rules of meter.h. Backend http talks to a directory server in this process, or mounted on an
 * API's port, redis to a Redis server on a free port. */
#include "scheduler/directory/directory.h"
#include "shared/base/mem.h"
#include "tests/fixtures/loop_turns.h"
#include "tests/fixtures/redis_process.h"
#include "tests/fixtures/served_view.h"

enum { A = 0, B = 1, C = 2, ENTRIES = 3, WAIT_MS = 10000, CASE_S = 60 };

struct rig {
    const char *backend;
    struct loop *loop;
    struct directory *d[ENTRIES]; /* of each entry node; the same one for local */
    struct served_view served;    /* http */
    struct redis_process redis;
    uint16_t port;
    uint64_t numbers[ENTRIES];
    bool is_mounted;
    int n_up, n_down;
};

struct answer {
    int n_calls;
    bool inside; /* set during the asking call, in which no callback may come */
    enum status st;
    struct meter_sum sums[METER_TENANTS_MAX];
    uint32_t n, n_entries;
    uint64_t least;
};

static void turn(struct rig *r) { loop_turn(r->loop); }

static void run_for(struct rig *r, uint64_t ms) { loop_turn_for(r->loop, ms); }

#define WAIT_FOR(r, cond)                                                                          \
    do {                                                                                           \
        uint64_t end_ = clock_ms() + WAIT_MS;                                                      \
        while (!(cond) && clock_ms() < end_) turn(r);                                              \
        if (!(cond)) test_fail(__FILE__, __LINE__, "%s did not come true", #cond);                 \
    } while (0)

static void on_up(void *arg) { ((struct rig *)arg)->n_up++; }

static void on_down(void *arg, const char *why)
{
    CHECK(why);
    ((struct rig *)arg)->n_down++;
}

static struct directory *open_entry(struct rig *r, const char *topic)
{
    struct directory *d = NULL;
    struct err err = { 0 };
    const int n_up = r->n_up;
    const struct directory_options o = {
        .loop = r->loop,
        .topic = topic,
        .renew_ms = 100,
        .http_host = "127.0.0.1",
        .http_port = r->port,
        .secret = STR("s3cret"),
        .redis = { .host = "127.0.0.1", .port = r->port },
        .on_up = on_up,
        .on_down = on_down,
        .arg = r,
    };
    if (directory_open(r->backend, &o, &d, &err) != OK)
        test_fail(__FILE__, __LINE__, "open: %s", err.text);
    WAIT_FOR(r, r->n_up > n_up);
    return d;
}

static void server_start(struct rig *r)
{
    struct err err = { 0 };
    if (served_view_start(&r->served, r->loop, r->is_mounted, 0, r->port, STR("s3cret"), &err) !=
        OK)
        test_fail(__FILE__, __LINE__, "serve: %s", err.text);
    r->port = r->served.port;
}

static void on_stopped(void *arg) { *(bool *)arg = true; }

static void server_stop(struct rig *r)
{
    bool stopped = false;
    if (!r->served.local) return;
    served_view_stop(&r->served, on_stopped, &stopped);
    WAIT_FOR(r, stopped);
    served_view_free(&r->served);
}

static void rig_open(struct rig *r, const char *backend)
{
    *r = (struct rig){ .backend = backend };
    r->is_mounted = strcmp(backend, "mounted") == 0;
    if (r->is_mounted) r->backend = "http";
    const bool is_local = strcmp(backend, "local") == 0;
    CHECK_OK(loop_create(&r->loop, NULL));
    if (strcmp(backend, "redis") == 0) {
        redis_process_words(&r->redis);
        redis_process_start(&r->redis);
        redis_process_wait(&r->redis, "PING", "PONG");
        r->port = r->redis.port;
    } else if (!is_local) {
        server_start(r);
    }
    for (int i = 0; i < ENTRIES; i++) r->d[i] = is_local && i ? r->d[0] : open_entry(r, "default");
}

static void rig_close(struct rig *r)
{
    for (int i = ENTRIES - 1; i >= 0; i--)
        if (i == 0 || r->d[i] != r->d[0]) directory_close(r->d[i]);
    server_stop(r);
    redis_process_kill(&r->redis);
    loop_free(r->loop);
}

/* ---- calls ---- */

static void on_sums(void *arg, enum status st, const struct meter_sums *s)
{
    struct answer *a = arg;
    CHECK(!a->inside);
    CHECK((st == OK) == (s != NULL));
    a->n_calls++;
    a->st = st;
    if (st != OK) return;
    CHECK(s->n_sums <= METER_TENANTS_MAX);
    a->n = s->n_sums;
    a->n_entries = s->n_entries;
    a->least = s->least;
    if (s->n_sums) memcpy(a->sums, s->sums, s->n_sums * sizeof *s->sums);
}

static enum status report_to(struct rig *r, struct directory *d, const struct meter_report *report,
                             struct answer *a)
{
    memset(a, 0, sizeof *a);
    a->inside = true;
    enum status st = directory_meter(d, report, on_sums, a);
    a->inside = false;
    if (st != OK) return st;
    WAIT_FOR(r, a->n_calls == 1);
    for (uint32_t i = 0; a->st == OK && i < report->n_uses; i++)
        CHECK(a->n == report->n_uses && a->sums[i].tenant == report->uses[i].tenant);
    return a->st;
}

/* The entry's report of this number. */
static enum status send_as(struct rig *r, int entry, uint64_t number, const struct meter_use *u,
                           uint32_t n, struct answer *a)
{
    const struct meter_report report = {
        .entry = 0xffffffffffffff00u + (uint64_t)entry, .number = number, .uses = u, .n_uses = n
    };
    return report_to(r, r->d[entry], &report, a);
}

/* One tenant's next report of an entry. */
static struct meter_sum tell(struct rig *r, int entry, struct meter_use u, struct answer *a)
{
    CHECK_OK(send_as(r, entry, ++r->numbers[entry], &u, 1, a));
    return a->sums[0];
}

static struct meter_use use(uint64_t tenant, uint32_t requests, uint64_t tokens, uint64_t cost,
                            uint32_t n_running)
{
    return (struct meter_use){ tenant, requests, tokens, cost, n_running, 0 };
}

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

static void run(const char *backend, void (*fn)(struct rig *))
{
    struct rig r;
    rig_open(&r, backend);
    fn(&r);
    rig_close(&r);
}

#define ALL_BACKENDS(name)                                                                         \
    TEST(name##_local) { run("local", case_##name); }                                              \
    TEST(name##_http) { run("http", case_##name); }                                                \
    TEST(name##_mounted) { run("mounted", case_##name); }                                          \
    TEST(name##_redis) { run("redis", case_##name); }
#define ALL_CASES(name)                                                                            \
    CASE_T(name##_local, CASE_S), CASE_T(name##_http, CASE_S), CASE_T(name##_mounted, CASE_S),     \
        CASE_T(name##_redis, CASE_S)

ALL_BACKENDS(sums_are_over_all_entries)
ALL_BACKENDS(a_report_counts_once)
ALL_BACKENDS(a_dead_entry_has_nothing_running)
ALL_BACKENDS(who_comes_back_is_lifted)
ALL_BACKENDS(a_topic_counts_so_many_tenants)
ALL_BACKENDS(topics_are_apart)
ALL_BACKENDS(close_ends_all_callbacks)

TEST_MAIN(ALL_CASES(sums_are_over_all_entries), ALL_CASES(a_report_counts_once),
          ALL_CASES(a_dead_entry_has_nothing_running), ALL_CASES(who_comes_back_is_lifted),
          ALL_CASES(a_topic_counts_so_many_tenants), ALL_CASES(topics_are_apart),
          ALL_CASES(close_ends_all_callbacks))
