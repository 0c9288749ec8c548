/* redis_client.h - a client of shared/net/redis on a loop of its own, for tests that look at how it
 * finds its server and what it says when it does not. */
#ifndef BATON_TESTS_REDIS_CLIENT_H
#define BATON_TESTS_REDIS_CLIENT_H

#include <stdatomic.h>

#include "shared/net/redis/redis.h"
#include "tests/unit/net/net_fixture.h"

struct redis_client {
    struct redis_server server;
    struct loop *loop;
    pthread_t thread;
    struct redis *redis;
    atomic_int n_up, n_down;
    /* written on the loop, read there or by client_look */
    char why[ERR_TEXT_MAX];
    enum redis_cause cause;
    struct redis_address where;
    const char *tls;
    /* of client_ask */
    int argc;
    const char *argv[8];
    enum status st;
    struct buf text;
    sem_t done;
};

static inline void client_on_up(void *arg)
{
    struct redis_client *c = arg;
    c->why[0] = 0;
    c->where = *redis_where(c->redis);
    c->tls = redis_tls_version(c->redis);
    CHECK_EQ_INT(redis_why_down(c->redis), REDIS_CAUSE_NONE);
    atomic_fetch_add(&c->n_up, 1);
}

static inline void client_on_down(void *arg, const char *why)
{
    struct redis_client *c = arg;
    CHECK(strcmp(c->why, why) != 0); /* only what is new */
    snprintf(c->why, sizeof c->why, "%s", why);
    c->cause = redis_why_down(c->redis);
    atomic_fetch_add(&c->n_down, 1);
}

static inline void client_create(void *arg)
{
    struct redis_client *c = arg;
    const struct redis_options o = {
        .loop = c->loop,
        .server = c->server,
        .timeout_ms = 1000,
        .on_up = client_on_up,
        .on_down = client_on_down,
        .arg = c,
    };
    CHECK_OK(redis_create(&o, &c->redis, NULL));
}

static inline void client_free(void *arg) { redis_free(((struct redis_client *)arg)->redis); }

static inline void client_open(struct redis_client *c, struct redis_server server)
{
    *c = (struct redis_client){ .server = server };
    sem_init(&c->done, 0, 0);
    c->thread = fixture_start(&c->loop);
    fixture_on_loop(c->loop, client_create, c);
}

static inline void client_close(struct redis_client *c)
{
    fixture_on_loop(c->loop, client_free, c);
    fixture_stop(c->loop, c->thread);
    buf_release(&c->text);
}

static inline void client_wait_up(struct redis_client *c, int n_up)
{
    for (int i = 0; i < 6000 && atomic_load(&c->n_up) < n_up; i++) usleep(10000);
    if (atomic_load(&c->n_up) < n_up)
        test_fail(__FILE__, __LINE__, "it did not come up: %s", c->why);
}

struct client_seen {
    struct redis_client *client;
    char why[ERR_TEXT_MAX];
    enum redis_cause cause;
    struct redis_address where;
};

static inline void client_read(void *arg)
{
    struct client_seen *s = arg;
    memcpy(s->why, s->client->why, sizeof s->why);
    s->cause = s->client->cause;
    s->where = s->client->where;
}

static inline struct client_seen client_look(struct redis_client *c)
{
    struct client_seen s = { .client = c };
    fixture_on_loop(c->loop, client_read, &s);
    return s;
}

/* Waits until it is down for this cause, with all these words in the reason (NULL-ended). */
static inline void client_wait_down(struct redis_client *c, enum redis_cause cause,
                                    const char *const *words)
{
    struct client_seen s = { 0 };
    for (int i = 0; i < 1000; i++, usleep(10000)) {
        bool all = true;
        s = client_look(c);
        for (const char *const *w = words; *w; w++) all = all && strstr(s.why, *w);
        if (all && s.why[0] && s.cause == cause) return;
    }
    test_fail(__FILE__, __LINE__, "cause %d, why: %s", s.cause, s.why);
}

static inline void client_on_reply(void *arg, enum status st, const redisReply *r)
{
    struct redis_client *c = arg;
    c->st = st;
    buf_clear(&c->text);
    if (r && r->str) buf_add(&c->text, r->str, (size_t)r->len);
    sem_post(&c->done);
}

static inline void client_send(void *arg)
{
    struct redis_client *c = arg;
    c->st = redis_command(c->redis, client_on_reply, c, c->argc, c->argv, NULL);
    if (c->st != OK) sem_post(&c->done);
}

/* Runs a command of up to 3 words; its answer is in c->text. */
static inline enum status client_ask(struct redis_client *c, const char *a, const char *b,
                                     const char *d)
{
    c->argc = d ? 3 : b ? 2 : 1;
    c->argv[0] = a;
    c->argv[1] = b;
    c->argv[2] = d;
    fixture_on_loop(c->loop, client_send, c);
    while (sem_wait(&c->done) != 0) {}
    return c->st;
}

#define WORDS(...) ((const char *const[]){ __VA_ARGS__, NULL })

#endif
