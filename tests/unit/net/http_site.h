/* http_site.h - a server on a loop of its own, with handlers that answer in every way; for tests of
 * the HTTP server. */
#ifndef BATON_TESTS_HTTP_SITE_H
#define BATON_TESTS_HTTP_SITE_H

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "shared/base/mem.h"
#include "shared/base/metrics.h"
#include "shared/net/http/http_server.h"
#include "shared/net/sse.h"
#include "tests/unit/net/net_fixture.h"

struct site {
    struct loop *loop;
    pthread_t thread;
    struct http_server *server;
    struct http_limits limits;
    struct metrics *metrics;
    struct err err;
    enum status st;
    uint16_t port;
    atomic_int n_handled, n_ended, n_gone, n_full;
    atomic_ullong gone_ms;
    sem_t stopped;
    int fds[2]; /* of clients; the test's */
};

struct answer {
    struct site *site;
    struct http_exchange *x;
    struct loop_timer *timer;
    int n;
};

static inline void on_end(void *arg, bool gone)
{
    struct answer *a = arg;
    if (gone) {
        atomic_store(&a->site->gone_ms, clock_ms());
        atomic_fetch_add(&a->site->n_gone, 1);
    }
    atomic_fetch_add(&a->site->n_ended, 1);
    loop_timer_free(a->timer);
    mem_free(a);
}

static inline void on_later(void *arg)
{
    struct answer *a = arg;
    loop_timer_free(a->timer);
    a->timer = NULL;
    http_reply(a->x, 200, "text/plain", NULL, STR("later"));
}

static inline void on_stream_tick(void *arg)
{
    struct answer *a = arg;
    char text[32];
    snprintf(text, sizeof text, "{\"i\":%d}", a->n);
    enum status st = sse_event(a->x, str_of(text));
    if (st != OK) return;
    if (++a->n < 3) return;
    st = sse_event(a->x, STR("[DONE]"));
    (void)st; /* a client that left shows in on_end */
    http_stream_end(a->x);
    loop_timer_free(a->timer);
    a->timer = NULL;
}

/* Writes without end to a client that does not read. */
static inline void on_flood_tick(void *arg)
{
    static char block[65536];
    struct answer *a = arg;
    for (int i = 0; i < 16; i++) {
        enum status st = http_stream_write(a->x, (struct str){ block, sizeof block });
        if (st == ERR_FULL) atomic_fetch_add(&a->site->n_full, 1);
        if (st != OK) return;
    }
}

/* Goes on, after a first part that fills the kernel's buffers. */
static inline void on_grow_tick(void *arg)
{
    static char more[1024];
    struct answer *a = arg;
    enum status st = http_stream_write(a->x, (struct str){ more, sizeof more });
    (void)st; /* a client that is cut shows in on_end */
}

static inline void handle_growing(struct answer *a)
{
    http_stream_begin(a->x, 200, "text/plain", NULL);
    for (int i = 0; i < 20; i++) on_flood_tick(a);
    a->timer = loop_timer_start(a->site->loop, 5, 5, on_grow_tick, a);
}

static inline void handle_echo(struct http_exchange *x)
{
    struct buf b = { 0 };
    struct str path = http_path(x), id = http_header(x, "X-Id"), body = http_body(x);
    buf_printf(&b, "%s|%.*s|%.*s|%.*s", http_method(x), STR_ARG(path), STR_ARG(id), STR_ARG(body));
    http_reply(x, 200, "text/plain", "X-More: yes\r\n", buf_str(&b));
    buf_release(&b);
}

static inline void handle_large(struct http_exchange *x)
{
    size_t n = 20u << 20;
    char *p = mem_calloc(n, 1);
    memset(p, 'z', n);
    http_reply(x, 200, "text/plain", NULL, (struct str){ p, n });
    mem_free(p);
}

struct taken {
    struct http_taken_body body;
    struct loop_timer *timer;
};

static inline void on_release(void *arg)
{
    struct taken *t = arg;
    loop_timer_free(t->timer);
    http_taken_body_release(&t->body);
    mem_free(t);
}

/* Answers at once and keeps the body for another 300 ms. */
static inline void handle_take(struct site *s, struct http_exchange *x)
{
    struct taken *t = MEM_NEW(struct taken);
    struct buf b = { 0 };
    http_take_body(x, &t->body);
    buf_printf(&b, "took %zu, left %zu", t->body.bytes.len, http_body(x).n);
    http_reply(x, 200, "text/plain", NULL, buf_str(&b));
    buf_release(&b);
    t->timer = loop_timer_start(s->loop, 300, 0, on_release, t);
}

static inline void handle(void *arg, struct http_exchange *x)
{
    struct site *s = arg;
    struct answer *a = MEM_NEW(struct answer);
    struct str path = http_path(x);
    *a = (struct answer){ .site = s, .x = x };
    atomic_fetch_add(&s->n_handled, 1);
    http_on_end(x, on_end, a);
    CHECK(strncmp(http_peer(x), "127.0.0.", 8) == 0);
    if (str_eq_c(path, "/hang")) return;
    if (str_eq_c(path, "/take")) handle_take(s, x);
    else if (str_eq_c(path, "/later")) a->timer = loop_timer_start(s->loop, 20, 0, on_later, a);
    else if (str_eq_c(path, "/large")) handle_large(x);
    else if (str_eq_c(path, "/growing")) handle_growing(a);
    else if (str_eq_c(path, "/none")) http_reply(x, 204, NULL, NULL, STR(""));
    else if (str_eq_c(path, "/stream")) {
        sse_begin(x, "X-Id: 7\r\n");
        a->timer = loop_timer_start(s->loop, 1, 1, on_stream_tick, a);
    } else if (str_eq_c(path, "/flood")) {
        http_stream_begin(x, 200, "text/plain", NULL);
        a->timer = loop_timer_start(s->loop, 1, 1, on_flood_tick, a);
    } else if (str_eq_c(path, "/trickle")) {
        http_stream_begin(x, 200, "text/plain", NULL);
        on_flood_tick(a);
    } else handle_echo(x);
}

/* The value of a metric whose line begins with `name`; 0 when there is none. */
static inline double site_metric(struct site *s, const char *name)
{
    struct buf all = { 0 };
    metrics_write(s->metrics, &all);
    const char *line = strstr(all.data, name);
    double v = line ? strtod(line + strlen(name), NULL) : 0;
    buf_release(&all);
    return v;
}

static inline void site_start_on_loop(void *arg)
{
    struct site *s = arg;
    struct http_server_options o = {
        .loop = s->loop,
        .host = "127.0.0.1",
        .port = s->port,
        .limits = s->limits,
        .handler = handle,
        .arg = s,
        .metrics = s->metrics,
    };
    s->st = http_server_start(&o, &s->server, &s->err);
    if (s->st == OK) s->port = http_server_port(s->server);
}

static inline void site_on_stopped(void *arg)
{
    struct site *s = arg;
    sem_post(&s->stopped);
}

static inline void site_stop_on_loop(void *arg)
{
    struct site *s = arg;
    http_server_stop(s->server, 300, site_on_stopped, s);
}

static inline struct site *site_open(struct http_limits limits)
{
    struct site *s = MEM_NEW(struct site);
    s->limits = limits;
    s->metrics = metrics_create();
    sem_init(&s->stopped, 0, 0);
    s->thread = fixture_start(&s->loop);
    fixture_on_loop(s->loop, site_start_on_loop, s);
    CHECK_OK(s->st);
    return s;
}

/* Checks that every exchange has ended; loop_free checks that every handle is closed. */
static inline void site_close(struct site *s)
{
    fixture_on_loop(s->loop, site_stop_on_loop, s);
    while (sem_wait(&s->stopped) != 0) {}
    fixture_stop(s->loop, s->thread);
    CHECK_EQ_INT(atomic_load(&s->n_ended), atomic_load(&s->n_handled));
    metrics_free(s->metrics);
    mem_free(s);
}

static inline struct site *site_default(void) { return site_open(HTTP_LIMITS_DEFAULT); }

static inline void site_wait_gone(struct site *s, int n)
{
    for (int i = 0; i < 2000 && atomic_load(&s->n_gone) < n; i++) usleep(1000);
    CHECK_EQ_INT(atomic_load(&s->n_gone), n);
}

static inline bool send_text(int fd, const char *text)
{
    return fixture_send(fd, text, strlen(text));
}

#endif
