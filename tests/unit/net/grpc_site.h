/* grpc_site.h - a gRPC server whose methods answer in every way, and clients that speak HTTP/2 well
 * (h2_client.h) or badly (frame by frame). The test's thread turns the loop and is both. */
#ifndef BATON_TESTS_UNIT_NET_GRPC_SITE_H
#define BATON_TESTS_UNIT_NET_GRPC_SITE_H

#include "shared/base/mem.h"
#include "shared/net/grpc/grpc_server.h"
#include "tests/unit/net/h2_client.h"

struct grpc_site {
    struct loop *loop;
    struct grpc_server *server;
    struct grpc_limits limits;
    struct metrics *metrics;
    uint16_t port;
    int n_begun, n_messages, n_half_closed, n_ended, n_gone, n_full, n_stopped;
    uint32_t n_busy;        /* requests of /t.T/Hold that are admitted */
    size_t n_largest;       /* bytes of a message */
    uint64_t deadline_ms;   /* of the last call */
    struct grpc_call *held; /* the last of /t.T/Hold */
    struct http_taken_body taken[4];
    int n_taken;
};

/* ---- the server ---- */

static inline void site_on_end(void *arg, bool gone)
{
    struct grpc_site *s = arg;
    s->n_ended++;
    s->n_gone += gone;
}

static inline void site_begin(void *arg, struct grpc_call *c)
{
    struct grpc_site *s = arg;
    s->n_begun++;
    s->deadline_ms = grpc_deadline_ms(c);
    grpc_on_end(c, site_on_end, s);
}

static inline void site_count(struct grpc_site *s, struct str message)
{
    s->n_messages++;
    if (message.n > s->n_largest) s->n_largest = message.n;
}

static inline void site_echo(void *arg, struct grpc_call *c, struct str message)
{
    site_count(arg, message);
    if (grpc_send(c, message) == OK) grpc_finish(c, GRPC_OK, NULL);
}

static inline void site_fail(void *arg, struct grpc_call *c, struct str message)
{
    site_count(arg, message);
    grpc_finish(c, GRPC_NOT_FOUND, "no, 100 % not\n");
}

static inline void site_each(void *arg, struct grpc_call *c, struct str message)
{
    site_count(arg, message);
    const enum status st = grpc_send(c, message);
    (void)st; /* a client that left shows in on_end */
}

static inline void site_half_close(void *arg, struct grpc_call *c)
{
    struct grpc_site *s = arg;
    s->n_half_closed++;
    grpc_finish(c, GRPC_OK, NULL);
}

/* Admits each message and answers none. */
static inline void site_hold(void *arg, struct grpc_call *c, struct str message)
{
    struct grpc_site *s = arg;
    site_count(s, message);
    if (!grpc_admit(c)) {
        grpc_finish(c, GRPC_RESOURCE_EXHAUSTED, "too many");
        return;
    }
    s->n_busy++;
    s->held = c;
}

/* Keeps what the message counts for. */
static inline void site_take(void *arg, struct grpc_call *c, struct str message)
{
    struct grpc_site *s = arg;
    site_count(s, message);
    CHECK(s->n_taken < 4);
    grpc_take_message(c, &s->taken[s->n_taken++]);
    grpc_finish(c, GRPC_OK, NULL);
}

/* Sends a megabyte at a time until it is told to stop. */
static inline void site_flood(void *arg, struct grpc_call *c, struct str message)
{
    static char block[1 << 20];
    struct grpc_site *s = arg;
    site_count(s, message);
    for (int i = 0; i < 64; i++) {
        const enum status st = grpc_send(c, (struct str){ block, sizeof block });
        if (st == OK) continue;
        s->n_full += st == ERR_FULL;
        return;
    }
    grpc_finish(c, GRPC_OK, NULL);
}

/* Sends so many bytes as the message says. */
static inline void site_give(void *arg, struct grpc_call *c, struct str message)
{
    struct grpc_site *s = arg;
    int64_t n = 0;
    CHECK_OK(str_to_i64(message, &n));
    char *bytes = mem_calloc((size_t)n, 1);
    const enum status st = grpc_send(c, (struct str){ bytes, (size_t)n });
    mem_free(bytes);
    s->n_full += st == ERR_FULL;
    if (st == OK) grpc_finish(c, GRPC_OK, NULL);
}

static const struct grpc_method SITE_METHODS[] = {
    { .path = "/t.T/Echo", .begin = site_begin, .message = site_echo },
    { .path = "/t.T/Fail", .begin = site_begin, .message = site_fail },
    { .path = "/t.T/Take", .begin = site_begin, .message = site_take },
    { .path = "/t.T/Flood", .begin = site_begin, .message = site_flood },
    { .path = "/t.T/Give", .begin = site_begin, .message = site_give },
    { .path = "/t.T/HoldOne", .begin = site_begin, .message = site_hold },
    { .path = "/t.T/Each",
      .streams = true,
      .begin = site_begin,
      .message = site_each,
      .half_close = site_half_close },
    { .path = "/t.T/Hold",
      .streams = true,
      .begin = site_begin,
      .message = site_hold,
      .half_close = site_half_close },
    { .path = NULL },
};

static inline void site_open(struct grpc_site *s)
{
    struct err err = { 0 };
    CHECK_OK(loop_create(&s->loop, &err));
    s->metrics = metrics_create();
    const struct grpc_server_options o = {
        .loop = s->loop,
        .host = "127.0.0.1",
        .limits = s->limits,
        .methods = SITE_METHODS,
        .arg = s,
        .metrics = s->metrics,
    };
    CHECK_OK(grpc_server_start(&o, &s->server, &err));
    s->port = grpc_server_port(s->server);
}

static inline void site_turn(struct grpc_site *s) { h2_turn_loop(s->loop); }

static inline void site_stopped(void *arg) { ++*(int *)arg; }

static inline void site_close(struct grpc_site *s)
{
    if (!s->n_stopped) grpc_server_stop(s->server, 0, site_stopped, &s->n_stopped);
    while (!s->n_stopped) site_turn(s);
    CHECK_EQ_INT(s->n_begun, s->n_ended);
    for (int i = 0; i < s->n_taken; i++) http_taken_body_release(&s->taken[i]);
    loop_free(s->loop);
    metrics_free(s->metrics);
}

static inline uint64_t site_metric(struct grpc_site *s, const char *name, const char *labels)
{
    return counter_value(metrics_counter(s->metrics, name, labels, ""));
}

/* ---- clients ---- */

static inline void h2_open_as(struct h2_client *c, struct grpc_site *s, bool reads, unsigned host)
{
    h2_dial(c, s->loop, s->port, reads, host);
}

static inline void h2_open(struct h2_client *c, struct grpc_site *s) { h2_open_as(c, s, true, 1); }

/* ---- frame by frame ---- */

#define H2_PREFACE "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

static inline void raw_frame(struct buf *out, uint8_t type, uint8_t flags, uint32_t stream,
                             const void *payload, size_t n)
{
    const uint8_t head[9] = { (uint8_t)(n >> 16),
                              (uint8_t)(n >> 8),
                              (uint8_t)n,
                              type,
                              flags,
                              (uint8_t)(stream >> 24),
                              (uint8_t)(stream >> 16),
                              (uint8_t)(stream >> 8),
                              (uint8_t)stream };
    buf_add(out, head, sizeof head);
    buf_add(out, payload, n);
}

/* The block of a request's header fields, without a dynamic table. */
static inline void raw_head(struct buf *out, const char *path)
{
    const char *pairs[][2] = { { ":method", "POST" },
                               { ":scheme", "http" },
                               { ":path", path },
                               { ":authority", "test" },
                               { "content-type", "application/grpc" } };
    for (size_t i = 0; i < COUNT_OF(pairs); i++) {
        buf_add_char(out, 0);
        for (int k = 0; k < 2; k++) {
            buf_add_char(out, (char)strlen(pairs[i][k]));
            buf_add_c(out, pairs[i][k]);
        }
    }
}

/* Connects, and sends the preface and settings. */
static inline int raw_open(struct grpc_site *s)
{
    struct buf b = { 0 };
    int fd = fixture_dial_as(s->port, 1);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    buf_add_c(&b, H2_PREFACE);
    raw_frame(&b, NGHTTP2_SETTINGS, 0, 0, NULL, 0);
    CHECK_EQ_INT(send(fd, b.data, b.len, 0), b.len);
    buf_release(&b);
    return fd;
}

/* Sends all, turning the loop; false: the server closed the connection meanwhile. */
static inline bool raw_send(struct grpc_site *s, int fd, struct str bytes)
{
    size_t at = 0;
    for (int i = 0; at < bytes.n && i < 100000; i++) {
        const ssize_t n = send(fd, bytes.p + at, bytes.n - at, MSG_NOSIGNAL);
        if (n < 0 && errno != EAGAIN) return false;
        if (n > 0) at += (size_t)n;
        else site_turn(s);
    }
    return at == bytes.n;
}

/* Reads to the end of the connection. */
static inline void raw_read_all(struct grpc_site *s, int fd, struct buf *out)
{
    char bytes[65536];
    for (int i = 0; i < 30000; i++) {
        const ssize_t n = recv(fd, bytes, sizeof bytes, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN)) return;
        if (n > 0) buf_add(out, bytes, (size_t)n);
        else site_turn(s);
    }
    test_fail(__FILE__, __LINE__, "the connection is still open");
}

/* The error of the last GOAWAY among frames; -1: there is none. */
static inline int raw_goaway(const struct buf *frames)
{
    const uint8_t *p = (const uint8_t *)frames->data;
    int error = -1;
    for (size_t at = 0; at + 9 <= frames->len;) {
        const size_t n = (size_t)p[at] << 16 | (size_t)p[at + 1] << 8 | p[at + 2];
        if (p[at + 3] == NGHTTP2_GOAWAY && at + 17 <= frames->len) error = p[at + 9 + 7];
        at += 9 + n;
    }
    return error;
}

#endif
