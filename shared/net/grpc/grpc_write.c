/* grpc_write.c - see grpc_conn.h: hands a session's frames to the socket.
 *
 * Frames are collected, so that the tokens of many calls go out together, and taken from nghttp2
 * only while the socket takes what was collected before: the rest waits in the calls, where it is
 * counted. Thread: loop. */
#include <string.h>

#include "shared/base/mem.h"
#include "shared/net/grpc/grpc_conn.h"

enum {
    COLLECT_BYTES = 32 * 1024,
    TURN_BYTES = 1024 * 1024 /* of one connection in one turn of the loop */
};

static void on_written(uv_write_t *w, int status);

/* What the kernel did not take at once is given to libuv. */
static void write_rest(struct grpc_conn *c)
{
    struct buf swap = c->in_flight;
    c->in_flight = c->next;
    c->next = swap;
    buf_clear(&c->next);
    uv_buf_t b = { .base = c->in_flight.data, .len = c->in_flight.len };
    c->writing = true;
    c->t_progress = grpc_conn_now(c);
    grpc_conn_due(c, c->t_progress + c->server->o.limits.write_stall_ms);
    if (uv_write(&c->write, (uv_stream_t *)&c->tcp, &b, 1, on_written) == 0) return;
    c->writing = false;
    c->broken = true;
}

static void send_collected(struct grpc_conn *c)
{
    if (c->writing || c->next.len == 0) return;
    uv_buf_t b = { .base = c->next.data, .len = c->next.len };
    const int rc = uv_try_write((uv_stream_t *)&c->tcp, &b, 1);
    if (rc < 0 && rc != UV_EAGAIN) {
        c->broken = true;
        return;
    }
    buf_consume(&c->next, rc > 0 ? (size_t)rc : 0);
    if (c->next.len > 0) write_rest(c);
}

static void on_written(uv_write_t *w, int status)
{
    struct grpc_conn *c = w->handle->data;
    c->writing = false;
    if (c->state == GRPC_CONN_CLOSING) return;
    buf_release(&c->in_flight);
    c->t_progress = grpc_conn_now(c);
    if (status < 0) c->broken = true;
    else send_collected(c);
    grpc_conn_wake(c);
}

/* Takes frames until there is a good piece for the socket; false: the session has no more now. */
static bool collect(struct grpc_conn *c)
{
    while (c->next.len < COLLECT_BYTES) {
        const uint8_t *bytes;
        c->sending = true;
        const ssize_t n = nghttp2_session_mem_send(c->session, &bytes);
        c->sending = false;
        if (n < 0) c->broken = true;
        if (n <= 0) return false;
        buf_add(&c->next, bytes, (size_t)n);
    }
    return true;
}

void grpc_conn_flush(struct grpc_conn *c)
{
    size_t sent = 0;
    bool more = true;
    while (more && !c->writing && !c->broken) {
        if (sent >= TURN_BYTES) {
            grpc_conn_wake(c); /* others have a turn as well */
            break;
        }
        more = collect(c);
        sent += c->next.len;
        send_collected(c);
    }
    if (c->next.len == 0 && c->next.cap > COLLECT_BYTES) buf_release(&c->next);
}

void grpc_conn_write_plain(struct grpc_conn *c, struct str bytes)
{
    buf_add_str(&c->next, bytes);
    send_collected(c);
}
