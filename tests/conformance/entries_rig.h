/* entries_rig.h - entry nodes that have one directory, over any of its backends. Backend http talks
 * to a directory server in this process, or mounted on an API's port, redis to a Redis server on a
 * free port. Thread: the test's. */
#ifndef BATON_TESTS_CONFORMANCE_ENTRIES_RIG_H
#define BATON_TESTS_CONFORMANCE_ENTRIES_RIG_H

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
    uint64_t numbers[ENTRIES]; /* for the test */
    bool is_mounted;
    int n_up, n_down;
};

static uint32_t entries_lease_ms; /* of nodes; 0: the usual one */

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
        .lease_ms = entries_lease_ms,
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
    if (served_view_start(&r->served, r->loop, r->is_mounted, entries_lease_ms, r->port,
                          STR("s3cret"), &err) != OK)
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

/* A test of each backend, and of those whose state is elsewhere, for a function case_<name>. */
static inline void run_case(const char *backend, void (*fn)(struct rig *))
{
    struct rig r;
    rig_open(&r, backend);
    fn(&r);
    rig_close(&r);
}

#define REMOTE_BACKENDS(name)                                                                      \
    TEST(name##_http) { run_case("http", case_##name); }                                           \
    TEST(name##_mounted) { run_case("mounted", case_##name); }                                     \
    TEST(name##_redis) { run_case("redis", case_##name); }
#define ALL_BACKENDS(name)                                                                         \
    TEST(name##_local) { run_case("local", case_##name); }                                         \
    REMOTE_BACKENDS(name)
#define REMOTE_CASES(name)                                                                         \
    CASE_T(name##_http, CASE_S), CASE_T(name##_mounted, CASE_S), CASE_T(name##_redis, CASE_S)
#define ALL_CASES(name) CASE_T(name##_local, CASE_S), REMOTE_CASES(name)

/* ---- a server of another version ---- */

/* Answers the calls of one entry node by `handler`. */
static inline struct http_server *other_open(struct rig *r,
                                             void (*handler)(void *arg, struct http_exchange *x),
                                             void *arg)
{
    struct http_server *http;
    struct err err = { 0 };
    *r = (struct rig){ .backend = "http" };
    CHECK_OK(loop_create(&r->loop, NULL));
    const struct http_server_options options = {
        .loop = r->loop,
        .host = "127.0.0.1",
        .limits = HTTP_LIMITS_DEFAULT,
        .handler = handler,
        .arg = arg,
    };
    CHECK_OK(http_server_start(&options, &http, &err));
    r->port = http_server_port(http);
    r->d[A] = open_entry(r, "default");
    return http;
}

static inline void other_close(struct rig *r, struct http_server *http)
{
    bool stopped = false;
    directory_close(r->d[A]);
    http_server_stop(http, 0, on_stopped, &stopped);
    WAIT_FOR(r, stopped);
    loop_free(r->loop);
}

#endif
