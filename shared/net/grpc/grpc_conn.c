/* grpc_conn.c - see grpc_conn.h: a connection, from its first byte to its end. Thread: loop. */
#include "shared/net/grpc/grpc_conn.h"

#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "shared/base/address/host_port.h"
#include "shared/base/assert.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    LINGER_MS = 2000,
    NOTICE_MS =
        1000, /* without a call after it was told to send none: those on their way are there */
    KEEPALIVE_S = 60,
    OUTBOUND_MAX = 4096 /* frames that wait to be sent: more are answers to a flood */
};

uint64_t grpc_conn_now(const struct grpc_conn *c) { return uv_now(c->tcp.loop); }

/* ---- the end ---- */

static void on_handle_closed(uv_handle_t *h)
{
    struct grpc_conn *c = h->data;
    if (--c->n_handles > 0) return;
    struct grpc_server *s = c->server;
    if (c->client) http_clients_leave(&s->clients, c->client);
    nghttp2_session_del(c->session);
    buf_release(&c->next);
    buf_release(&c->in_flight);
    mem_free(c);
    grpc_server_conn_freed(s);
}

static void close_handles(struct grpc_conn *c)
{
    c->state = GRPC_CONN_CLOSING;
    list_remove(&c->link);
    list_remove(&c->ready_link);
    uv_close((uv_handle_t *)&c->tcp, on_handle_closed);
    uv_close((uv_handle_t *)&c->timer, on_handle_closed);
}

void grpc_conn_lost(struct grpc_conn *c)
{
    if (c->state == GRPC_CONN_CLOSING) return;
    ASSERT(!c->advancing);
    close_handles(c);
    LIST_FOREACH (call, &c->calls, struct grpc_call, link) grpc_call_free(call, true);
}

static void on_shutdown(uv_shutdown_t *r, int status)
{
    struct grpc_conn *c = r->handle->data;
    if (c->state == GRPC_CONN_CLOSING || status == UV_ECANCELED) return;
    if (status != 0) grpc_conn_lost(c);
}

/* Sends a FIN once all is sent, and waits for the client's. */
static void linger(struct grpc_conn *c)
{
    if (c->state == GRPC_CONN_OPEN) {
        c->state = GRPC_CONN_LINGER;
        c->t_phase = grpc_conn_now(c);
        grpc_conn_due(c, c->t_phase + LINGER_MS);
        LIST_FOREACH (call, &c->calls, struct grpc_call, link) grpc_call_free(call, true);
    }
    if (c->state != GRPC_CONN_LINGER || c->shut || grpc_conn_has_output(c)) return;
    c->shut = true;
    if (uv_shutdown(&c->shutdown, (uv_stream_t *)&c->tcp, on_shutdown) != 0) c->broken = true;
}

void grpc_conn_terminate(struct grpc_conn *c, uint32_t error)
{
    if (c->state != GRPC_CONN_OPEN) return;
    c->terminated = true;
    if (!c->session) linger(c);
    else if (nghttp2_session_terminate_session(c->session, error) != 0) c->broken = true;
    grpc_conn_wake(c);
}

void grpc_conn_notify(struct grpc_conn *c)
{
    if (c->notified || !c->session || c->state != GRPC_CONN_OPEN) return;
    c->notified = true;
    c->t_phase = grpc_conn_now(c);
    grpc_conn_due(c, c->t_phase + NOTICE_MS);
    if (nghttp2_submit_shutdown_notice(c->session) != 0) c->broken = true;
    grpc_conn_wake(c);
}

/* ---- what is due ---- */

static void on_timer(uv_timer_t *t);

void grpc_conn_due(struct grpc_conn *c, uint64_t at)
{
    if (c->state == GRPC_CONN_CLOSING || at >= c->t_due) return;
    const uint64_t now = grpc_conn_now(c);
    c->t_due = at;
    uv_timer_start(&c->timer, on_timer, at > now ? at - now : 0, 0);
}

/* The end of what the connection itself waits for. */
static uint64_t own_due(const struct grpc_conn *c)
{
    const struct grpc_limits *l = &c->server->o.limits;
    if (grpc_conn_has_output(c)) return c->t_progress + l->write_stall_ms;
    if (c->state == GRPC_CONN_LINGER) return c->t_phase + LINGER_MS;
    if (!c->settled) return c->t_phase + l->begin_timeout_ms;
    if (c->n_calls > 0) return UINT64_MAX;
    return c->t_phase + (c->notified ? NOTICE_MS : l->idle_timeout_ms);
}

static void end_wait(struct grpc_conn *c)
{
    if (grpc_conn_has_output(c)) {
        if (c->server->m_slow) counter_add(c->server->m_slow, 1);
        log_debug("grpc client does not read", "peer=%s", c->peer);
        c->broken = true;
    } else if (c->state == GRPC_CONN_OPEN && c->settled) {
        grpc_conn_terminate(c, NGHTTP2_NO_ERROR); /* idle; the client connects again when needed */
        c->t_phase = grpc_conn_now(c);
    } else {
        c->broken = true;
    }
}

static void on_timer(uv_timer_t *t)
{
    struct grpc_conn *c = t->data;
    const uint64_t now = grpc_conn_now(c);
    if (c->state == GRPC_CONN_CLOSING) return;
    c->t_due = UINT64_MAX;
    if (now >= own_due(c)) end_wait(c);
    uint64_t next = own_due(c);
    LIST_FOREACH (call, &c->calls, struct grpc_call, link) {
        const uint64_t due = grpc_call_look(call, now);
        if (due < next) next = due;
    }
    grpc_conn_due(c, next);
    grpc_conn_advance(c);
}

/* ---- progress ---- */

/* After a notice nghttp2 wants no more as soon as no stream is open; but a call that is on its way
 * must learn by a last GOAWAY that it was not looked at. */
static bool has_ended(const struct grpc_conn *c)
{
    return c->session && (c->terminated || !c->notified) &&
           !nghttp2_session_want_read(c->session) && !nghttp2_session_want_write(c->session) &&
           !grpc_conn_has_output(c);
}

static void look_at_calls(struct grpc_conn *c)
{
    c->has_news = false;
    LIST_FOREACH (call, &c->calls, struct grpc_call, link) grpc_call_read_on(call);
}

void grpc_conn_advance(struct grpc_conn *c)
{
    if (c->advancing || c->state == GRPC_CONN_CLOSING) return;
    c->advancing = true;
    if (c->has_news) look_at_calls(c);
    if (!c->broken && c->session && c->state == GRPC_CONN_OPEN) grpc_conn_flush(c);
    c->advancing = false;
    if (c->state == GRPC_CONN_LINGER || has_ended(c)) linger(c);
    if (c->broken) grpc_conn_lost(c);
    else if (c->has_news) grpc_conn_wake(c);
}

/* ---- reading ---- */

static void on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *out)
{
    struct grpc_conn *c = h->data;
    (void)suggested;
    *out = uv_buf_init(c->server->read_buf, sizeof c->server->read_buf);
}

static void feed(struct grpc_conn *c, struct str bytes)
{
    if (c->flooded) return;
    c->advancing = true; /* nothing is sent, and no stream freed twice, inside nghttp2 */
    const ssize_t used = nghttp2_session_mem_recv(c->session, (const uint8_t *)bytes.p, bytes.n);
    c->advancing = false;
    if (used < 0 && !c->flooded) {
        log_debug("grpc client refused", "peer=%s why=\"%s\"", c->peer,
                  nghttp2_strerror((int)used));
        c->broken = true;
    } else if (nghttp2_session_get_outbound_queue_size(c->session) > OUTBOUND_MAX) {
        log_debug("grpc client floods", "peer=%s", c->peer);
        if (c->server->m_flood) counter_add(c->server->m_flood, 1);
        c->broken = true;
    }
}

/* Who sends a request of HTTP/1 here has mistaken the port. */
static void refuse_other_protocol(struct grpc_conn *c)
{
    static const char text[] =
        "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n"
        "Content-Length: 69\r\n\r\n"
        "This port speaks gRPC, which is HTTP/2; the HTTP API has another one.";
    if (c->first[0] >= 'A' && c->first[0] <= 'Z')
        grpc_conn_write_plain(c, (struct str){ text, sizeof text - 1 });
    linger(c);
}

/* Looks at the first bytes: those of HTTP/2 are "PRI * HTTP/2.0". True: the session is there. */
static bool begin_session(struct grpc_conn *c, struct str *bytes)
{
    static const char begin[] = { 'P', 'R', 'I' };
    while (c->n_first < sizeof begin && bytes->n > 0) {
        const uint32_t at = c->n_first++;
        (void)str_take(bytes, c->first + at, 1);
        if (c->first[at] != begin[at]) {
            refuse_other_protocol(c);
            return false;
        }
    }
    if (c->n_first < sizeof begin) return false;
    if (grpc_session_create(c) != OK) {
        c->broken = true;
        return false;
    }
    c->is_http2 = true;
    feed(c, (struct str){ c->first, c->n_first });
    return true;
}

/* After EOF the client counts as gone, as in HTTP. */
static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *b)
{
    struct grpc_conn *c = stream->data;
    if (n == 0 || c->state == GRPC_CONN_CLOSING) return;
    if (n < 0) {
        grpc_conn_lost(c);
        return;
    }
    struct str bytes = { b->base, (size_t)n };
    if (c->state == GRPC_CONN_LINGER) return;
    if (c->is_http2 || begin_session(c, &bytes)) feed(c, bytes);
    grpc_conn_advance(c);
}

/* ---- the beginning ---- */

static void name_peer(struct grpc_conn *c)
{
    struct sockaddr_storage a;
    int n = sizeof a;
    char host[HOST_TEXT_MAX], service[8], at[HOST_PORT_TEXT_MAX];
    snprintf(c->peer, sizeof c->peer, "?");
    if (uv_tcp_getpeername(&c->tcp, (struct sockaddr *)&a, &n) != 0) return;
    if (a.ss_family != AF_INET && a.ss_family != AF_INET6) return;
    c->client = http_clients_enter(&c->server->clients, &a);
    if (getnameinfo((struct sockaddr *)&a, (socklen_t)n, host, sizeof host, service, sizeof service,
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        return;
    snprintf(c->peer, sizeof c->peer, "%.63s",
             host_port_text(host, (uint16_t)strtoul(service, NULL, 10), at));
}

/* gRPC has no answer to a connection: a client whose connection is closed tries again by itself,
 * after longer and longer waits. */
static bool is_too_many(const struct grpc_conn *c)
{
    const struct grpc_limits *l = &c->server->o.limits;
    return c->server->n_conns > l->n_connections ||
           (c->client && l->n_client_connections && c->client->n_conns > l->n_client_connections);
}

void grpc_conn_open(struct grpc_server *s, int fd)
{
    struct grpc_conn *c = MEM_NEW(struct grpc_conn);
    uv_loop_t *uv = loop_uv(s->o.loop);
    c->server = s;
    c->n_handles = 2;
    c->t_due = UINT64_MAX;
    list_init(&c->ready_link);
    list_init(&c->calls);
    list_push(&s->conns, &c->link);
    s->n_conns++;
    if (s->m_conns) gauge_set(s->m_conns, s->n_conns);
    uv_tcp_init(uv, &c->tcp);
    uv_timer_init(uv, &c->timer);
    c->tcp.data = c->timer.data = c;
    c->t_phase = uv_now(uv);
    if (uv_tcp_open(&c->tcp, fd) != 0) {
        close(fd);
        close_handles(c);
        return;
    }
    uv_tcp_nodelay(&c->tcp, 1);
    uv_tcp_keepalive(&c->tcp, 1, KEEPALIVE_S);
    name_peer(c);
    if (is_too_many(c)) {
        if (s->m_turned_away) counter_add(s->m_turned_away, 1);
        close_handles(c);
        return;
    }
    grpc_conn_due(c, c->t_phase + s->o.limits.begin_timeout_ms);
    if (uv_read_start((uv_stream_t *)&c->tcp, on_alloc, on_read) != 0) close_handles(c);
}
