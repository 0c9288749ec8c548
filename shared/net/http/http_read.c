/* http_read.c - see http_conn.h: reads from the socket, or holds the client back and still notices
 * that it leaves. Thread: loop. */
#include <fcntl.h>
#include <unistd.h>

#include "shared/net/http/http_conn.h"

enum { HTTP_READ_SMALL = 4096 /* while room for bodies is scarce */ };

static void conn_stop_hangup(struct http_conn *c)
{
    if (c->hangup_fd >= 0 && c->state != HTTP_CONN_CLOSING) uv_poll_stop(&c->hangup);
}

/* What was read is in memory before it is counted (http_bodies.h), so reads are small while room is
 * scarce, except those of a body that has room for them. */
static void conn_on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *out)
{
    struct http_conn *c = h->data;
    struct http_server *s = c->server;
    size_t n = sizeof s->read_buf;
    (void)suggested;
    if (http_bodies_scarce(s->bodies) && http_share_bytes(&c->place.share) < c->parse.body.len + n)
        n = HTTP_READ_SMALL;
    *out = uv_buf_init(s->read_buf, (unsigned)n);
}

/* After EOF the client counts as gone, except while a finished answer is still being sent. */
static void conn_on_eof(struct http_conn *c, bool reset)
{
    c->eof = true;
    bool flushing = !reset && !c->broken && http_conn_queue(c) > 0 &&
                    (c->state == HTTP_CONN_LINGER ||
                     (c->state == HTTP_CONN_SERVING && c->x.complete));
    if (!flushing) {
        http_conn_lost(c);
        return;
    }
    c->keep_alive = false;
    uv_read_stop((uv_stream_t *)&c->tcp);
    c->reading = false;
    conn_stop_hangup(c);
}

static void conn_on_hangup(uv_poll_t *h, int status, int events)
{
    (void)events;
    conn_on_eof(h->data, status < 0);
}

static bool conn_open_hangup(struct http_conn *c)
{
    int fd = -1;
    if (uv_fileno((uv_handle_t *)&c->tcp, &fd) != 0) return false;
    fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return false;
    if (uv_poll_init(c->tcp.loop, &c->hangup, fd) != 0) {
        close(fd);
        return false;
    }
    c->hangup_fd = fd;
    c->hangup.data = c;
    c->n_handles++;
    return true;
}

/* Stops reading, so that TCP holds the client back. Polling a duplicate descriptor still reports
 * the client's FIN or reset. LIMIT: a client that has pipelined more than the kernel buffers (128
 * KiB or so) cannot deliver its FIN while its window is closed; it is noticed when the answer is
 * written or the kernel's keep-alive fails. */
void http_conn_pause(struct http_conn *c)
{
    if (!c->reading) return;
    if (c->hangup_fd < 0 && !conn_open_hangup(c)) {
        http_conn_lost(c); /* a client that leaves would not be noticed */
        return;
    }
    uv_poll_start(&c->hangup, UV_DISCONNECT, conn_on_hangup);
    uv_read_stop((uv_stream_t *)&c->tcp);
    c->reading = false;
}

static void conn_on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *b)
{
    struct http_conn *c = stream->data;
    if (n == 0 || c->state == HTTP_CONN_CLOSING) return;
    if (n < 0) {
        conn_on_eof(c, n != UV_EOF);
        return;
    }
    if (c->state == HTTP_CONN_LINGER) return;
    buf_add(&c->in, b->base, (size_t)n);
    if (c->state == HTTP_CONN_READING) http_conn_advance(c);
    else if (c->in.len > c->server->o.limits.header_bytes) http_conn_pause(c);
}

void http_conn_resume(struct http_conn *c)
{
    conn_stop_hangup(c);
    if (c->reading || c->eof || c->state == HTTP_CONN_CLOSING) return;
    c->reading = true;
    if (uv_read_start((uv_stream_t *)&c->tcp, conn_on_alloc, conn_on_read) != 0) http_conn_lost(c);
}
