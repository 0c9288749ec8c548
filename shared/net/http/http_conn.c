/* http_conn.c - see http_conn.h: reading, deadlines, and passing complete requests to the handler.
 * Thread: loop. */
#include "shared/net/http/http_conn.h"

#include <unistd.h>

#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    HTTP_LINGER_MS = 2000,
    HTTP_BODY_RATE = 16,         /* bytes per ms that extend a body's deadline */
    HTTP_CONTENDED_RATE = 1000,  /* the same while other bodies wait for its room */
    HTTP_PLACE_TICK_MS = 500,    /* a body looks whether others wait for its room */
    HTTP_TURN_REQUESTS = 16,     /* pipelined requests of one connection in one turn of the loop */
    HTTP_CONN_REQUESTS = 100000, /* then the connection is renewed */
    HTTP_TURNED_AWAY_MAX = 64,   /* connections above the limit that get a 503; others are closed */
    HTTP_KEEPALIVE_S = 60,
    HTTP_KEEP_IN = 16 * 1024, /* bytes of an empty input buffer, */
    HTTP_KEEP_SERVING = 1024  /* and while an answer is awaited, which may take long */
};

static void conn_on_closed(uv_handle_t *h)
{
    struct http_conn *c = h->data;
    if (--c->n_handles > 0) return;
    struct http_server *s = c->server;
    if (c->client) http_clients_leave(&s->clients, c->client);
    http_parse_release(&c->parse);
    buf_release(&c->in);
    buf_release(&c->next);
    buf_release(&c->in_flight);
    mem_free(c);
    http_server_conn_freed(s);
}

static void conn_close(struct http_conn *c)
{
    if (c->state == HTTP_CONN_CLOSING) return;
    c->state = HTTP_CONN_CLOSING;
    list_remove(&c->link);
    list_remove(&c->ready_link);
    http_backlog_leave(c);
    http_bodies_release(c->server->bodies, &c->place);
    if (c->hangup_fd >= 0) {
        uv_close((uv_handle_t *)&c->hangup, conn_on_closed);
        close(c->hangup_fd);
    }
    uv_close((uv_handle_t *)&c->tcp, conn_on_closed);
    uv_close((uv_handle_t *)&c->timer, conn_on_closed);
}

static void conn_end_exchange(struct http_conn *c, bool gone)
{
    if (!c->x.open) return;
    c->x.open = false;
    c->server->n_open--;
    if (c->client) c->client->n_requests--;
    if (gone && c->server->m_gone) counter_add(c->server->m_gone, 1);
    if (c->x.on_end) c->x.on_end(c->x.on_end_arg, gone);
}

void http_conn_lost(struct http_conn *c)
{
    if (c->state == HTTP_CONN_CLOSING) return;
    conn_close(c);
    conn_end_exchange(c, true);
}

bool http_conn_is_idle(const struct http_conn *c)
{
    return c->state == HTTP_CONN_READING && c->parse.state == HTTP_PARSE_IDLE && c->in.len == 0 &&
           http_conn_queue(c) == 0;
}

/* Returns the end of the current wait in uv_now time. */
static uint64_t conn_deadline(const struct http_conn *c)
{
    const struct http_limits *l = &c->server->o.limits;
    if (c->state == HTTP_CONN_LINGER && http_conn_queue(c) == 0) return c->t_phase + HTTP_LINGER_MS;
    if (http_conn_queue(c) > 0) return c->t_progress + l->write_stall_ms;
    if (c->state != HTTP_CONN_READING) return UINT64_MAX;
    if (http_place_waits(&c->place)) return c->t_wait + l->body_wait_ms - c->waited_ms;
    if (c->parse.state == HTTP_PARSE_BODY && http_bodies_wanted(c->server->bodies, &c->place))
        return c->t_phase + l->body_contended_ms + c->parse.body.len / HTTP_CONTENDED_RATE;
    if (c->parse.state == HTTP_PARSE_BODY)
        return c->t_phase + l->body_timeout_ms + c->parse.body.len / HTTP_BODY_RATE;
    if (c->parse.state == HTTP_PARSE_IDLE && c->n_requests > 0)
        return c->t_phase + l->idle_timeout_ms;
    return c->t_phase + l->header_timeout_ms;
}

static void conn_arm(struct http_conn *c);

static void conn_on_deadline(struct http_conn *c)
{
    static const struct http_fault late = { 408, "request_timeout",
                                            "The request did not arrive in time." };
    static const struct http_fault full = {
        429, "server_busy", "The server holds as many request bodies as it can; try again."
    };
    if (http_conn_queue(c) > 0) {
        log_debug("http client does not read", "peer=%s queued=%zu", c->peer, http_conn_queue(c));
        if (c->server->m_slow) counter_add(c->server->m_slow, 1);
        http_conn_lost(c);
    } else if (c->state == HTTP_CONN_READING && c->parse.state != HTTP_PARSE_IDLE) {
        http_conn_refuse(c, http_place_waits(&c->place) ? &full : &late);
        http_conn_linger(c);
    } else if (c->state == HTTP_CONN_READING) {
        http_conn_linger(c); /* no request, so no answer */
    } else {
        http_conn_lost(c);
    }
}

static void conn_on_timer(uv_timer_t *t)
{
    struct http_conn *c = t->data;
    if (c->state == HTTP_CONN_CLOSING) return;
    uint64_t now = uv_now(c->tcp.loop), taken = http_conn_taken(c);
    if (taken != c->taken_seen) { /* not the queue: that of an answer which goes on grows */
        c->taken_seen = taken;
        c->t_progress = now;
    }
    if (now >= conn_deadline(c)) conn_on_deadline(c);
    conn_arm(c);
}

/* Sets the timer to the deadline; to earlier while bytes are queued, to see whether the kernel
 * takes any, and while the body has a place. */
static void conn_arm(struct http_conn *c)
{
    if (c->state == HTTP_CONN_CLOSING) return;
    uint64_t now = uv_now(c->tcp.loop), at = conn_deadline(c);
    if (at == UINT64_MAX) {
        uv_timer_stop(&c->timer);
        return;
    }
    uint64_t wait = at > now ? at - now : 0, tick = c->server->o.limits.write_stall_ms / 4 + 1;
    if (http_conn_queue(c) > 0 && wait > tick) wait = tick;
    if (http_share_bytes(&c->place.share) && wait > HTTP_PLACE_TICK_MS) wait = HTTP_PLACE_TICK_MS;
    uv_timer_start(&c->timer, conn_on_timer, wait, 0);
}

static void conn_on_shutdown(uv_shutdown_t *r, int status)
{
    struct http_conn *c = r->handle->data;
    if (c->state == HTTP_CONN_CLOSING || status == UV_ECANCELED) return;
    if (status != 0 || c->eof) {
        http_conn_lost(c);
        return;
    }
    c->t_phase = uv_now(c->tcp.loop);
    conn_arm(c);
}

void http_conn_linger(struct http_conn *c)
{
    if (c->state >= HTTP_CONN_LINGER) return;
    c->state = HTTP_CONN_LINGER;
    c->t_phase = uv_now(c->tcp.loop);
    http_bodies_release(c->server->bodies, &c->place);
    buf_release(&c->parse.body);
    buf_release(&c->in);
    if (http_conn_queue(c) == 0 &&
        uv_shutdown(&c->shutdown, (uv_stream_t *)&c->tcp, conn_on_shutdown) != 0) {
        http_conn_lost(c);
        return;
    }
    http_conn_resume(c);
    conn_arm(c);
}

static void conn_refuse_request(struct http_conn *c, const struct http_fault *f)
{
    log_debug("http request refused", "peer=%s status=%d code=%s", c->peer, f->status, f->code);
    http_conn_refuse(c, f);
    http_conn_linger(c);
}

/* Refuses a request when its client has as many running as one may have. */
static bool conn_has_too_many(struct http_conn *c)
{
    static const struct http_fault many = {
        429, "too_many_requests",
        "This address has as many running requests as the server accepts; try again."
    };
    uint32_t max = c->server->o.limits.n_client_requests;
    if (!c->client || max == 0 || c->client->n_requests < max) return false;
    conn_refuse_request(c, &many);
    return true;
}

static void conn_serve(struct http_conn *c)
{
    struct http_server *s = c->server;
    if (conn_has_too_many(c)) return;
    if (c->client) c->client->n_requests++;
    s->n_open++;
    http_trim_note(s);
    c->state = HTTP_CONN_SERVING;
    c->n_requests++;
    c->keep_alive = c->parse.keep_alive && !s->draining && c->n_requests < HTTP_CONN_REQUESTS;
    c->x = (struct http_exchange){
        .conn = c,
        .open = true,
        .bodiless = c->parse.llhttp.method == HTTP_HEAD,
    };
    if (s->m_requests) counter_add(s->m_requests, 1);
    s->o.handler(s->o.arg, &c->x);
}

/* Tells a client that waits for it to send its body, unless it sends already. */
static void conn_continue(struct http_conn *c)
{
    struct str go = STR("HTTP/1.1 100 Continue\r\n\r\n");
    if (!c->parse.wants_continue || c->continued || c->parse.body.len > 0) return;
    c->continued = true;
    enum status st = http_conn_write(c, &go, 1, false);
    if (st != OK) log_debug("http continue not sent", "peer=%s st=%s", c->peer, status_name(st));
}

static void conn_on_place(struct http_place *p)
{
    struct http_conn *c = LIST_ENTRY(p, struct http_conn, place);
    uint64_t waited = uv_now(c->tcp.loop) - c->t_wait;
    c->t_phase += waited; /* the client may not be blamed for it */
    c->waited_ms += waited;
    http_conn_wake(c); /* which reads on; another connection may be closing just now */
}

/* Counts the body so far; false: it waits for room, and nothing more is read. */
static bool conn_hold_body(struct http_conn *c)
{
    const struct http_parse *p = &c->parse;
    bool chunked = p->llhttp.flags & F_CHUNKED, done = p->state == HTTP_PARSE_DONE;
    size_t n = p->body.len, n_max = done ? n : n + p->scan.n_raw;
    if (chunked && !done)
        n_max = n <= HTTP_SMALL_BODY ? HTTP_SMALL_BODY : c->server->o.limits.body_bytes;
    /* Leave to send a large body is given together with its first step. */
    if (n == 0 && p->wants_continue && n_max > HTTP_SMALL_BODY) n = 1;
    bool held = n == 0 || http_bodies_hold(c->server->bodies, &c->place, n, n_max);
    http_trim_note(c->server);
    if (held) return true;
    c->t_wait = uv_now(c->tcp.loop);
    http_conn_pause(c);
    return false;
}

/* Parses what has arrived; returns whether the state changed. */
static bool conn_read_request(struct http_conn *c)
{
    enum http_parse_state before = c->parse.state;
    size_t used = http_parse_feed(&c->parse, c->in.data, c->in.len);
    buf_consume(&c->in, used);
    enum http_parse_state now = c->parse.state;
    const size_t keep = now == HTTP_PARSE_DONE ? HTTP_KEEP_SERVING : HTTP_KEEP_IN;
    if (c->in.len == 0 && c->in.cap > keep) buf_release(&c->in);
    if (now != before)
        c->t_phase = before == HTTP_PARSE_IDLE && c->n_requests == 0 && now == HTTP_PARSE_HEAD
                         ? c->t_phase
                         : uv_now(c->tcp.loop);
    if ((now == HTTP_PARSE_BODY || now == HTTP_PARSE_DONE) && !conn_hold_body(c)) return false;
    if (now == HTTP_PARSE_FAILED) {
        conn_refuse_request(c, &c->parse.fault);
        return true;
    }
    if (now == HTTP_PARSE_DONE) {
        conn_serve(c);
        return true;
    }
    if (now == HTTP_PARSE_BODY) conn_continue(c);
    return false;
}

/* Once the answer is flushed, goes on to the next request or ends the connection. */
static bool conn_finish_answer(struct http_conn *c)
{
    if (!c->x.complete || http_conn_queue(c) > 0) return false;
    conn_end_exchange(c, false);
    if (c->state == HTTP_CONN_CLOSING) return false; /* on_end may stop the server */
    if (!c->keep_alive || c->eof) {
        http_conn_linger(c);
        return true;
    }
    c->continued = false;
    c->state = HTTP_CONN_READING;
    c->waited_ms = 0;
    c->t_phase = uv_now(c->tcp.loop);
    http_parse_next(&c->parse);
    http_bodies_release(c->server->bodies, &c->place);
    if (c->in.len == 0) buf_release(&c->in); /* idle connections keep no buffers */
    buf_release(&c->next);
    buf_release(&c->in_flight);
    http_conn_resume(c);
    return true;
}

/* Is there something to parse, or a whole request that has waited for room? */
static bool conn_has_input(const struct http_conn *c)
{
    return c->state == HTTP_CONN_READING && !http_place_waits(&c->place) &&
           (c->in.len > 0 || c->parse.state == HTTP_PARSE_DONE);
}

void http_conn_advance(struct http_conn *c)
{
    if (c->advancing || c->state == HTTP_CONN_CLOSING) return;
    c->advancing = true;
    if (c->state == HTTP_CONN_READING && !c->reading && !http_place_waits(&c->place)) {
        conn_continue(c);
        http_conn_resume(c);
    }
    bool moved = true;
    int n_served = 0;
    while (moved && c->state != HTTP_CONN_CLOSING && !c->broken) {
        moved = false;
        if (conn_has_input(c) && n_served++ < HTTP_TURN_REQUESTS) moved = conn_read_request(c);
        else if (c->state == HTTP_CONN_SERVING) moved = conn_finish_answer(c);
        if (c->state == HTTP_CONN_SERVING && c->in.len > c->server->o.limits.header_bytes)
            http_conn_pause(c);
    }
    c->advancing = false;
    if (c->broken) http_conn_lost(c);
    if (conn_has_input(c)) http_conn_wake(c);
    if (c->state == HTTP_CONN_LINGER && http_conn_queue(c) == 0 && c->eof) http_conn_lost(c);
    else if (c->state == HTTP_CONN_LINGER && http_conn_queue(c) == 0 &&
             c->shutdown.handle == NULL) {
        if (uv_shutdown(&c->shutdown, (uv_stream_t *)&c->tcp, conn_on_shutdown) != 0)
            http_conn_lost(c);
    }
    conn_arm(c);
}

static void conn_name_peer(struct http_conn *c)
{
    struct sockaddr_storage a;
    int n = sizeof a;
    char ip[46] = "?";
    if (uv_tcp_getpeername(&c->tcp, (struct sockaddr *)&a, &n) != 0) return;
    c->client = http_clients_enter(&c->server->clients, &a);
    c->place.turn = &c->client->turn;
    if (a.ss_family == AF_INET6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)&a;
        uv_ip6_name(six, ip, sizeof ip);
        snprintf(c->peer, sizeof c->peer, "[%s]:%u", ip, (unsigned)ntohs(six->sin6_port));
    } else {
        const struct sockaddr_in *four = (const struct sockaddr_in *)&a;
        uv_ip4_name(four, ip, sizeof ip);
        snprintf(c->peer, sizeof c->peer, "%s:%u", ip, (unsigned)ntohs(four->sin_port));
    }
}

/* Answers a connection above the limits; so many at once that even this costs too much are just
 * closed. */
static bool conn_turn_away(struct http_conn *c)
{
    static const struct http_fault full = {
        503, "too_many_connections", "The server has as many connections as it accepts; try again."
    };
    static const struct http_fault many = {
        429, "too_many_connections",
        "This address has as many connections as the server accepts; try again."
    };
    const struct http_limits *l = &c->server->o.limits;
    bool all = c->server->n_conns > l->n_connections,
         own = c->client && l->n_client_connections && c->client->n_conns > l->n_client_connections;
    if (!all && !own) return false;
    if (c->server->m_turned_away) counter_add(c->server->m_turned_away, 1);
    if ((all && c->server->n_conns > l->n_connections + HTTP_TURNED_AWAY_MAX) ||
        (own && c->client->n_conns > l->n_client_connections + HTTP_TURNED_AWAY_MAX)) {
        conn_close(c);
        return true;
    }
    http_conn_refuse(c, all ? &full : &many);
    http_conn_linger(c);
    return true;
}

void http_conn_open(struct http_server *s, int fd)
{
    struct http_conn *c = MEM_NEW(struct http_conn);
    uv_loop_t *uv = loop_uv(s->o.loop);
    c->server = s;
    c->hangup_fd = -1;
    c->n_handles = 2;
    http_parse_init(&c->parse, &s->o.limits);
    list_init(&c->ready_link);
    list_init(&c->held.link);
    http_place_init(&c->place, &s->unknown, conn_on_place);
    list_push(&s->conns, &c->link);
    s->n_conns++;
    if (s->m_conns) gauge_set(s->m_conns, s->n_conns);
    uv_tcp_init(uv, &c->tcp);
    uv_timer_init(uv, &c->timer);
    c->tcp.data = c->timer.data = c;
    c->t_phase = uv_now(uv);
    if (uv_tcp_open(&c->tcp, fd) != 0) {
        close(fd);
        conn_close(c);
        return;
    }
    uv_tcp_nodelay(&c->tcp, 1);
    uv_tcp_keepalive(&c->tcp, 1, HTTP_KEEPALIVE_S);
    conn_name_peer(c);
    if (conn_turn_away(c)) return;
    http_conn_resume(c);
    conn_arm(c);
}
