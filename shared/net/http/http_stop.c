/* http_stop.c - see http_server.h: draining and stopping, so that no request ends in a reset.
 *
 *     SERVING ──drain──▶ DRAINING ──stop──▶ GRACE ──grace_ms──▶ LINGER ──50 ms──▶ closed
 *
 * DRAINING: answers say Connection: close. GRACE: the kernel drops requests for new connections,
 * which their clients repeat after a second, at another server of this port or in vain; those that
 * it has already established are accepted, and whatever comes on them is served. The listener is
 * closed once no handshake can be on its way: its queue is empty, so closing it resets nobody.
 * LINGER: idle connections have got a FIN, and half a request a 503; what they still send is read
 * and dropped. GRACE and LINGER end early when no connection is left; GRACE also after quiet_ms,
 * when no exchange is open. Thread: loop. */
#include <sys/socket.h>

#include "shared/base/thread.h"
#include "shared/net/http/http_conn.h"

enum {
    STOP_TICK_MS = 5,
    STOP_ACCEPT_MS =
        20, /* for handshakes that were on their way, when no connection is left, ... */
    STOP_LISTEN_MS = 300, /* ... and else */
    STOP_LINGER_MS = 50
};

/* Has a request come that the loop has not read yet? */
static bool has_unread(const struct http_conn *c)
{
    int fd = -1;
    char byte;
    return uv_fileno((const uv_handle_t *)&c->tcp, &fd) == 0 &&
           recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
}

static void end_conn(struct http_conn *c)
{
    static const struct http_fault stopping = {
        503, "shutting_down", "The server is shutting down; send the request again."
    };
    if (c->state == HTTP_CONN_SERVING && !c->x.complete) {
        http_conn_lost(c);
    } else if (http_conn_is_idle(c)) {
        if (!has_unread(c)) http_conn_linger(c);
    } else if (c->state == HTTP_CONN_READING) {
        http_conn_refuse(c, &stopping);
        http_conn_linger(c);
    }
}

static void begin_linger(struct http_server *s, uint64_t now)
{
    s->linger_until = now + (s->grace_ms ? STOP_LINGER_MS : 0);
    http_server_close_listener(s);
    LIST_FOREACH (c, &s->conns, struct http_conn, link) end_conn(c);
}

static bool is_quiet(const struct http_server *s)
{
    LIST_FOREACH (c, &s->conns, struct http_conn, link)
        if (c->state < HTTP_CONN_LINGER && (!http_conn_is_idle(c) || has_unread(c))) return false;
    return true;
}

static bool is_grace_over(const struct http_server *s, uint64_t now)
{
    if (now >= s->grace_until) return true;
    if (list_empty(&s->conns)) return now >= s->t_stop + STOP_ACCEPT_MS;
    return now >= s->t_stop + s->quiet_ms && is_quiet(s);
}

static void on_tick(uv_timer_t *t)
{
    struct http_server *s = t->data;
    uint64_t now = uv_now(t->loop);
    if (!s->t_stop) { /* only now: the caller's turn of the loop may have been long */
        s->t_stop = now;
        s->grace_until = now + s->grace_ms;
        if (s->grace_ms) return; /* the sockets are looked at before any end */
    }
    if (!s->linger_until) {
        if (now >= s->t_stop + STOP_LISTEN_MS) http_server_close_listener(s);
        if (!is_grace_over(s, now)) return;
        begin_linger(s, now);
    }
    if (now < s->linger_until && !list_empty(&s->conns)) return;
    LIST_FOREACH (c, &s->conns, struct http_conn, link) http_conn_lost(c);
    http_server_close_handles(s);
}

void http_server_drain(struct http_server *s)
{
    ASSERT_THREAD(THREAD_LOOP);
    s->draining = true;
    LIST_FOREACH (c, &s->conns, struct http_conn, link)
        if (c->state == HTTP_CONN_SERVING && !c->x.begun) c->keep_alive = false;
}

void http_server_leave(struct http_server *s, uint32_t grace_ms, uint32_t quiet_ms,
                       void (*done)(void *arg), void *arg)
{
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(!s->stopping);
    s->stopping = true;
    s->done = done;
    s->done_arg = arg;
    s->grace_ms = grace_ms;
    s->quiet_ms = quiet_ms;
    http_server_drain(s);
    listener_stop_handshakes(&s->listener);
    /* Even without grace in the next turn, since a handler may call stop. */
    uv_timer_start(&s->grace, on_tick, 0, STOP_TICK_MS);
}

void http_server_stop(struct http_server *s, uint32_t grace_ms, void (*done)(void *arg), void *arg)
{
    http_server_leave(s, grace_ms, grace_ms, done, arg);
}

void http_server_hurry(struct http_server *s, uint32_t grace_ms)
{
    ASSERT_THREAD(THREAD_LOOP);
    const uint64_t until = uv_now(s->grace.loop) + grace_ms;
    if (grace_ms < s->grace_ms) s->grace_ms = grace_ms;
    if (until < s->grace_until) s->grace_until = until;
}
