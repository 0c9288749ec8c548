/* meter_rig.h - entry nodes that report to one directory what their tenants use, over any of its
 * backends. Backend http talks to a directory server in this process, or mounted on an API's port,
 * redis to a Redis server on a free port. */
#ifndef BATON_TESTS_CONFORMANCE_METER_RIG_H
#define BATON_TESTS_CONFORMANCE_METER_RIG_H

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

static inline void turn(struct rig *r) { loop_turn(r->loop); }

static inline void run_for(struct rig *r, uint64_t ms) { loop_turn_for(r->loop, ms); }

#define WAIT_FOR(r, cond) LOOP_WAIT((r)->loop, cond, WAIT_MS)

static inline void on_up(void *arg) { ((struct rig *)arg)->n_up++; }

static inline void on_down(void *arg, const char *why)
{
    CHECK(why);
    ((struct rig *)arg)->n_down++;
}

static inline struct directory *open_entry(struct rig *r, const char *topic)
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

static inline void server_start(struct rig *r)
{
    struct err err = { 0 };
    if (served_view_start(&r->served, r->loop, r->is_mounted, 0, r->port, STR("s3cret"), &err) !=
        OK)
        test_fail(__FILE__, __LINE__, "serve: %s", err.text);
    r->port = r->served.port;
}

static inline void on_stopped(void *arg) { *(bool *)arg = true; }

static inline void server_stop(struct rig *r)
{
    bool stopped = false;
    if (!r->served.local) return;
    served_view_stop(&r->served, on_stopped, &stopped);
    WAIT_FOR(r, stopped);
    served_view_free(&r->served);
}

static inline void rig_open(struct rig *r, const char *backend)
{
    *r = (struct rig){ .backend = backend };
    r->is_mounted = strcmp(backend, "mounted") == 0;
    if (r->is_mounted) r->backend = "http";
    const bool is_local = strcmp(backend, "local") == 0;
    CHECK_OK(loop_create(&r->loop, NULL));
    if (strcmp(backend, "redis") == 0) {
        const size_t n = redis_process_words(&r->redis);
        r->redis.words[n] = "--repl-diskless-sync-delay"; /* 5 s by default */
        r->redis.words[n + 1] = "0";
        r->redis.words[n + 2] = NULL;
        redis_process_start(&r->redis);
        redis_process_wait(&r->redis, "PING", "PONG");
        r->port = r->redis.port;
    } else if (!is_local) {
        server_start(r);
    }
    for (int i = 0; i < ENTRIES; i++) r->d[i] = is_local && i ? r->d[0] : open_entry(r, "default");
}

static inline void rig_close(struct rig *r)
{
    for (int i = ENTRIES - 1; i >= 0; i--)
        if (i == 0 || r->d[i] != r->d[0]) directory_close(r->d[i]);
    server_stop(r);
    redis_process_kill(&r->redis);
    loop_free(r->loop);
}

/* ---- calls ---- */

static inline void on_sums(void *arg, enum status st, const struct meter_sums *s)
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

static inline enum status report_to(struct rig *r, struct directory *d,
                                    const struct meter_report *report, struct answer *a)
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
static inline enum status send_as(struct rig *r, int entry, uint64_t number,
                                  const struct meter_use *u, uint32_t n, struct answer *a)
{
    const struct meter_report report = {
        .entry = 0xffffffffffffff00u + (uint64_t)entry, .number = number, .uses = u, .n_uses = n
    };
    return report_to(r, r->d[entry], &report, a);
}

/* One tenant's next report of an entry. */
static inline struct meter_sum tell(struct rig *r, int entry, struct meter_use u, struct answer *a)
{
    CHECK_OK(send_as(r, entry, ++r->numbers[entry], &u, 1, a));
    return a->sums[0];
}

static inline struct meter_use use(uint64_t tenant, uint32_t requests, uint64_t tokens,
                                   uint64_t cost, uint32_t n_running)
{
    return (struct meter_use){ tenant, requests, tokens, cost, n_running, 0 };
}

#endif
