/* h2_client.h - a client of gRPC on HTTP/2, by nghttp2, for tests whose thread turns the server's
 * loop and is its client too. */
#ifndef BATON_TESTS_UNIT_NET_H2_CLIENT_H
#define BATON_TESTS_UNIT_NET_H2_CLIENT_H

#include <errno.h>
#include <fcntl.h>
#include <nghttp2/nghttp2.h>
#include <stdio.h>
#include <stdlib.h>

#include "shared/base/mem.h"
#include "tests/unit/net/net_fixture.h"

enum { H2_CALLS_MAX = 1100 };

struct h2_call {
    int32_t stream;
    int http, status; /* -1: not said */
    char text[1200];  /* grpc-message, as it came */
    struct buf data;  /* messages with their heads */
    bool closed;
    uint32_t error;
};

struct h2_client {
    struct loop *loop; /* of the server */
    int fd;
    nghttp2_session *session;
    nghttp2_session_callbacks *callbacks;
    struct h2_call *calls; /* [H2_CALLS_MAX] */
    int n_calls, n_goaways;
    uint32_t goaway_error;
    int32_t goaway_last;
    bool closed; /* by the server */
    struct buf out;
};

/* What a call sends. */
struct h2_source {
    struct buf bytes;
    size_t n_sent;
    bool stays_open; /* no END_STREAM */
};

static inline struct h2_call *h2_find(struct h2_client *c, int32_t stream)
{
    for (int i = 0; i < c->n_calls; i++)
        if (c->calls[i].stream == stream) return &c->calls[i];
    return NULL;
}

static inline int h2_on_header(nghttp2_session *session, const nghttp2_frame *f,
                               const uint8_t *name, size_t n_name, const uint8_t *value,
                               size_t n_value, uint8_t flags, void *arg)
{
    struct h2_call *call = h2_find(arg, f->hd.stream_id);
    const struct str key = { (const char *)name, n_name };
    (void)session;
    (void)flags;
    if (str_eq_c(key, ":status")) call->http = atoi((const char *)value);
    if (str_eq_c(key, "grpc-status")) call->status = atoi((const char *)value);
    if (str_eq_c(key, "grpc-message"))
        snprintf(call->text, sizeof call->text, "%.*s", (int)n_value, (const char *)value);
    return 0;
}

static inline int h2_on_data(nghttp2_session *session, uint8_t flags, int32_t stream,
                             const uint8_t *data, size_t n, void *arg)
{
    (void)session;
    (void)flags;
    buf_add(&h2_find(arg, stream)->data, data, n);
    return 0;
}

static inline int h2_on_close(nghttp2_session *session, int32_t stream, uint32_t error, void *arg)
{
    struct h2_call *call = h2_find(arg, stream);
    (void)session;
    if (!call) return 0;
    call->closed = true;
    call->error = error;
    return 0;
}

static inline int h2_on_frame(nghttp2_session *session, const nghttp2_frame *f, void *arg)
{
    struct h2_client *c = arg;
    (void)session;
    if (f->hd.type != NGHTTP2_GOAWAY) return 0;
    c->n_goaways++;
    c->goaway_error = f->goaway.error_code;
    c->goaway_last = f->goaway.last_stream_id;
    return 0;
}

static inline ssize_t h2_read(nghttp2_session *session, int32_t stream, uint8_t *to, size_t cap,
                              uint32_t *flags, nghttp2_data_source *source, void *arg)
{
    struct h2_source *s = source->ptr;
    size_t n = s->bytes.len - s->n_sent < cap ? s->bytes.len - s->n_sent : cap;
    (void)session;
    (void)stream;
    (void)arg;
    if (n) memcpy(to, s->bytes.data + s->n_sent, n);
    s->n_sent += n;
    if (s->n_sent < s->bytes.len) return (ssize_t)n;
    if (!s->stays_open) *flags |= NGHTTP2_DATA_FLAG_EOF;
    else if (n == 0) return NGHTTP2_ERR_DEFERRED;
    return (ssize_t)n;
}

static inline void h2_setup(struct h2_client *c, struct loop *loop, bool reads)
{
    nghttp2_option *option;
    *c = (struct h2_client){ .loop = loop, .fd = -1 };
    c->calls = MEM_ARRAY(struct h2_call, H2_CALLS_MAX);
    CHECK_OK(nghttp2_session_callbacks_new(&c->callbacks));
    nghttp2_session_callbacks_set_on_header_callback(c->callbacks, h2_on_header);
    nghttp2_session_callbacks_set_on_data_chunk_recv_callback(c->callbacks, h2_on_data);
    nghttp2_session_callbacks_set_on_stream_close_callback(c->callbacks, h2_on_close);
    nghttp2_session_callbacks_set_on_frame_recv_callback(c->callbacks, h2_on_frame);
    CHECK_OK(nghttp2_option_new(&option));
    nghttp2_option_set_no_auto_window_update(option, !reads);
    nghttp2_option_set_peer_max_concurrent_streams(option, H2_CALLS_MAX);
    CHECK_OK(nghttp2_session_client_new2(&c->session, c->callbacks, c, option));
    nghttp2_option_del(option);
}

/* reads: false: it takes no more bytes of answers than the first windows have. */
static inline void h2_dial(struct h2_client *c, struct loop *loop, uint16_t port, bool reads,
                           unsigned host)
{
    h2_setup(c, loop, reads);
    CHECK_OK(nghttp2_submit_settings(c->session, NGHTTP2_FLAG_NONE, NULL, 0));
    c->fd = fixture_dial_as(port, host);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
}

static inline void h2_send(struct h2_client *c)
{
    const uint8_t *p;
    ssize_t n;
    while (c->out.len < (1 << 20) && (n = nghttp2_session_mem_send(c->session, &p)) > 0)
        buf_add(&c->out, p, (size_t)n);
    if (c->out.len == 0) return;
    n = send(c->fd, c->out.data, c->out.len, MSG_NOSIGNAL);
    if (n > 0) buf_consume(&c->out, (size_t)n);
    else if (n < 0 && errno != EAGAIN) c->closed = true;
}

/* A GOAWAY that follows another one is not shown by nghttp2: it is looked for at the end of what
 * came. */
static inline void h2_see_goaway(struct h2_client *c, const uint8_t *bytes, size_t n)
{
    enum { N_GOAWAY = 17 };
    const uint8_t *p = bytes + n - N_GOAWAY;
    if (n < N_GOAWAY || p[0] || p[1] || p[2] != 8 || p[3] != NGHTTP2_GOAWAY) return;
    c->goaway_last = (int32_t)((uint32_t)p[9] << 24 | (uint32_t)p[10] << 16 | (uint32_t)p[11] << 8 |
                               p[12]);
}

static inline void h2_receive(struct h2_client *c)
{
    uint8_t bytes[65536];
    for (int i = 0; i < 16; i++) {
        const ssize_t n = recv(c->fd, bytes, sizeof bytes, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN)) c->closed = true;
        if (n <= 0) return;
        h2_see_goaway(c, bytes, (size_t)n);
        if (nghttp2_session_mem_recv(c->session, bytes, (size_t)n) < 0) c->closed = true;
    }
}

static inline void h2_turn_loop(struct loop *loop)
{
    uv_run(loop_uv(loop), UV_RUN_NOWAIT);
    usleep(100);
}

static inline void h2_turn(struct h2_client *c)
{
    h2_send(c);
    h2_turn_loop(c->loop);
    h2_receive(c);
}

#define H2_UNTIL(c, condition)                                                                     \
    do {                                                                                           \
        for (int turn_ = 0; !(condition) && turn_ < 30000; turn_++) h2_turn(c);                    \
        CHECK(condition);                                                                          \
    } while (0)

static inline nghttp2_nv h2_field(const char *name, const char *value)
{
    return (nghttp2_nv){ .name = (uint8_t *)(uintptr_t)name,
                         .value = (uint8_t *)(uintptr_t)value,
                         .namelen = strlen(name),
                         .valuelen = strlen(value) };
}

/* Header fields of a call; NULL: as they should be. */
struct h2_head {
    const char *method, *type, *encoding, *timeout, *more, *more_value;
};

static inline struct h2_call *h2_begin(struct h2_client *c, const char *path,
                                       const struct h2_head *head, struct h2_source *from)
{
    const nghttp2_data_provider source = { .source.ptr = from, .read_callback = h2_read };
    nghttp2_nv nv[10];
    size_t n = 0;
    nv[n++] = h2_field(":method", head && head->method ? head->method : "POST");
    nv[n++] = h2_field(":scheme", "http");
    nv[n++] = h2_field(":path", path);
    nv[n++] = h2_field(":authority", "test");
    nv[n++] = h2_field("content-type", head && head->type ? head->type : "application/grpc");
    nv[n++] = h2_field("te", "trailers");
    if (head && head->encoding) nv[n++] = h2_field("grpc-encoding", head->encoding);
    if (head && head->timeout) nv[n++] = h2_field("grpc-timeout", head->timeout);
    if (head && head->more) nv[n++] = h2_field(head->more, head->more_value);
    CHECK(c->n_calls < H2_CALLS_MAX);
    struct h2_call *call = &c->calls[c->n_calls++];
    call->http = call->status = -1;
    call->stream = nghttp2_submit_request(c->session, NULL, nv, n, &source, NULL);
    CHECK(call->stream > 0);
    return call;
}

static inline void h2_add_bytes(struct h2_source *from, const void *bytes, size_t n)
{
    const uint8_t head[5] = { 0, (uint8_t)(n >> 24), (uint8_t)(n >> 16), (uint8_t)(n >> 8),
                              (uint8_t)n };
    buf_add(&from->bytes, head, sizeof head);
    buf_add(&from->bytes, bytes, n);
}

static inline void h2_add_message(struct h2_source *from, const char *text)
{
    h2_add_bytes(from, text, strlen(text));
}

/* A whole call of one message. */
static inline struct h2_call *h2_call(struct h2_client *c, const char *path,
                                      const struct h2_head *head, const char *message)
{
    struct h2_source from = { .n_sent = 0 };
    h2_add_message(&from, message);
    struct h2_call *call = h2_begin(c, path, head, &from);
    H2_UNTIL(c, call->closed || c->closed);
    buf_release(&from.bytes);
    return call;
}

static inline void h2_close(struct h2_client *c)
{
    for (int i = 0; i < c->n_calls; i++) buf_release(&c->calls[i].data);
    mem_free(c->calls);
    nghttp2_session_del(c->session);
    nghttp2_session_callbacks_del(c->callbacks);
    buf_release(&c->out);
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

#endif
