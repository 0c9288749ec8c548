/* cluster_rig.h - nodes for tests of messages: clusters on one loop, each with a log of what it
 * received.
 *
 * The test's thread turns the loop itself (RIG_WAIT), so every check runs between two turns. A
 * node's `hook` may answer messages at once; what it does not take goes into the log. Included by
 * one test program each. */
#ifndef BATON_TESTS_UNIT_CLUSTER_CLUSTER_RIG_H
#define BATON_TESTS_UNIT_CLUSTER_CLUSTER_RIG_H

#include <stdio.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/cluster/cluster.h"
#include "tests/harness/test.h"

enum { RIG_TICK_MS = 2, RIG_LONG_MS = 20000 };

struct received_message {
    uint64_t from, request;
    enum frame_type type;
    uint32_t attempt;
    struct buf body;
    bool taken;
};

struct peer_node {
    struct cluster *c;
    uint64_t id;
    struct received_message *log;
    size_t n_log, cap_log;
    uint64_t lost[256];
    size_t n_lost;
    uint64_t t_lost_ms;
    char why[160];
    uint64_t progress;
    bool has_work;
    bool (*hook)(void *arg, const struct cluster_message *m); /* true: taken */
    void (*lost_hook)(void *arg, uint64_t node, const char *why);
    void (*met_hook)(void *arg, uint32_t purpose, uint64_t node);
    void *arg;
};

struct peer_options {
    const char *secret;
    uint32_t lost_ms, forget_ms;
    size_t queue_bytes;
    uint16_t port;
};

struct cluster_rig {
    struct loop *loop;
    struct loop_timer *tick; /* so that a turn never sleeps long */
    struct metrics *metrics;
};

static void rig_tick(void *arg) { (void)arg; }

static void cluster_rig_open(struct cluster_rig *r)
{
    CHECK_OK(loop_create(&r->loop, NULL));
    r->metrics = metrics_create();
    r->tick = loop_timer_start(r->loop, RIG_TICK_MS, RIG_TICK_MS, rig_tick, NULL);
}

static void cluster_rig_close(struct cluster_rig *r)
{
    loop_timer_free(r->tick);
    loop_free(r->loop);
    metrics_free(r->metrics);
}

#define RIG_WAIT_MS(rig, cond, ms)                                                                 \
    do {                                                                                           \
        for (uint64_t end_ = clock_ms() + (ms); !(cond);) {                                        \
            if (clock_ms() > end_)                                                                 \
                test_fail(__FILE__, __LINE__, "%s did not happen in %d ms", #cond, (int)(ms));     \
            uv_run(loop_uv((rig)->loop), UV_RUN_ONCE);                                             \
        }                                                                                          \
    } while (0)
#define RIG_WAIT(rig, cond) RIG_WAIT_MS(rig, cond, RIG_LONG_MS)

__attribute__((unused)) static void rig_turn_ms(struct cluster_rig *r, uint64_t ms)
{
    for (uint64_t end = clock_ms() + ms; clock_ms() < end;) uv_run(loop_uv(r->loop), UV_RUN_ONCE);
}

static void peer_on_message(void *arg, const struct cluster_message *m)
{
    struct peer_node *n = arg;
    if (n->hook && n->hook(n->arg, m)) return;
    if (n->n_log == n->cap_log) {
        n->cap_log = n->cap_log ? 2 * n->cap_log : 64;
        n->log = mem_realloc(n->log, n->cap_log, sizeof *n->log);
    }
    struct received_message *h = &n->log[n->n_log++];
    *h = (struct received_message){
        .from = m->from, .request = m->request, .type = m->type, .attempt = m->attempt
    };
    buf_add_str(&h->body, m->body);
}

static void peer_on_lost(void *arg, uint64_t node, const char *why)
{
    struct peer_node *n = arg;
    CHECK(n->n_lost < COUNT_OF(n->lost));
    n->lost[n->n_lost++] = node;
    n->t_lost_ms = clock_ms();
    snprintf(n->why, sizeof n->why, "%s", why);
    if (n->lost_hook) n->lost_hook(n->arg, node, why);
}

static void peer_progress(void *arg, uint64_t *counter, bool *has_work)
{
    struct peer_node *n = arg;
    *counter = n->progress;
    *has_work = n->has_work;
}

static void peer_on_met(void *arg, uint32_t purpose, uint64_t node)
{
    struct peer_node *n = arg;
    if (n->met_hook) n->met_hook(n->arg, purpose, node);
}

static struct peer_node *peer_open(struct cluster_rig *r, uint64_t id, struct peer_options o)
{
    struct peer_node *n = MEM_NEW(struct peer_node);
    struct err err = { 0 };
    char name[32];
    snprintf(name, sizeof name, "node-%llu", (unsigned long long)id);
    struct cluster_options co = {
        .loop = r->loop,
        .listen_host = "127.0.0.1",
        .port = o.port,
        .name = name,
        .node = id,
        .secret = str_of(o.secret ? o.secret : "a shared secret"),
        .lost_ms = o.lost_ms,
        .forget_ms = o.forget_ms,
        .queue_bytes = o.queue_bytes,
        .metrics = r->metrics,
        .on_message = peer_on_message,
        .on_lost = peer_on_lost,
        .on_met = peer_on_met,
        .progress = peer_progress,
        .arg = n,
    };
    n->id = id;
    if (cluster_create(&co, &n->c, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return n;
}

static void peer_close(struct peer_node *n)
{
    cluster_free(n->c);
    for (size_t i = 0; i < n->n_log; i++) buf_release(&n->log[i].body);
    mem_free(n->log);
    mem_free(n);
}

__attribute__((unused)) static void peer_meet(struct peer_node *a, const struct peer_node *b)
{
    cluster_learn(a->c, b->id, "127.0.0.1", cluster_port(b->c));
}

/* Counts the messages of `type` that received_take has not taken yet. */
__attribute__((unused)) static size_t received_count(const struct peer_node *n,
                                                     enum frame_type type)
{
    size_t count = 0;
    for (size_t i = 0; i < n->n_log; i++) count += n->log[i].type == type && !n->log[i].taken;
    return count;
}

/* Takes the oldest message of `type`; NULL: none. */
__attribute__((unused)) static struct received_message *received_take(struct peer_node *n,
                                                                      enum frame_type type)
{
    for (size_t i = 0; i < n->n_log; i++) {
        if (n->log[i].type != type || n->log[i].taken) continue;
        n->log[i].taken = true;
        return &n->log[i];
    }
    return NULL;
}

#endif
