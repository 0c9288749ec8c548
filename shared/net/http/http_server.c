/* http_server.c - see http_server.h: start, and the getters of an exchange (http_stop.c: the stop).
 * The server is freed when its own handles and the last connection are closed. Thread: loop. */
#include <string.h>

#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/net/http/http_conn.h"

const struct http_limits HTTP_LIMITS_DEFAULT = {
    .header_bytes = 16 * 1024,
    .n_headers = 100,
    .url_bytes = 8 * 1024,
    .body_bytes = 45u << 20,
    .n_connections = 10000,
    .header_timeout_ms = 10000,
    .idle_timeout_ms = 120000,
    .body_timeout_ms = 60000,
    .write_stall_ms = 60000,
    .write_queue_bytes = 8u << 20,
    .answers_bytes = 256u << 20,
    .large_bodies_bytes = 96u << 20,
    .body_wait_ms = 30000,
    .body_contended_ms = 5000,
};

static void server_maybe_free(struct http_server *s)
{
    if (s->n_conns > 0 || s->n_handles > 0) return;
    void (*done)(void *arg) = s->done;
    void *arg = s->done_arg;
    http_bodies_close(s->bodies);
    map_release(&s->clients);
    mem_free(s->host);
    mem_free(s);
    if (done) done(arg);
}

void http_server_conn_freed(struct http_server *s)
{
    s->n_conns--;
    if (s->m_conns) gauge_set(s->m_conns, s->n_conns);
    server_maybe_free(s);
}

static void server_on_closed(uv_handle_t *h)
{
    struct http_server *s = h->data;
    s->n_handles--;
    server_maybe_free(s);
}

static void server_close(uv_handle_t *h)
{
    if (!uv_is_closing(h)) uv_close(h, server_on_closed);
}

static void server_on_listener_closed(void *arg)
{
    struct http_server *s = arg;
    s->n_handles--;
    server_maybe_free(s);
}

void http_server_close_listener(struct http_server *s)
{
    listener_close(&s->listener, server_on_listener_closed);
}

void http_server_close_handles(struct http_server *s)
{
    http_server_close_listener(s);
    server_close((uv_handle_t *)&s->idle);
    server_close((uv_handle_t *)&s->grace);
    server_close((uv_handle_t *)&s->trim);
}

static void server_on_idle(uv_idle_t *idle)
{
    struct http_server *s = idle->data;
    struct list batch;
    list_init(&batch);
    while (!list_empty(&s->ready)) {
        struct list *first = s->ready.next;
        list_remove(first);
        list_push(&batch, first);
    }
    while (!list_empty(&batch)) {
        struct http_conn *c = LIST_FIRST(&batch, struct http_conn, ready_link);
        list_remove(&c->ready_link);
        http_conn_advance(c);
    }
    if (list_empty(&s->ready) && !uv_is_closing((uv_handle_t *)idle)) uv_idle_stop(idle);
}

void http_conn_wake(struct http_conn *c)
{
    struct http_server *s = c->server;
    /* A running advance looks again by itself. */
    if (c->advancing || c->state == HTTP_CONN_CLOSING) return;
    list_remove(&c->ready_link);
    list_push(&s->ready, &c->ready_link);
    uv_idle_start(&s->idle, server_on_idle);
}

static void server_set_limits(struct http_limits *l)
{
    const struct http_limits *d = &HTTP_LIMITS_DEFAULT;
    if (!l->header_bytes) l->header_bytes = d->header_bytes;
    if (!l->n_headers) l->n_headers = d->n_headers;
    if (!l->url_bytes) l->url_bytes = d->url_bytes;
    if (!l->body_bytes) l->body_bytes = d->body_bytes;
    if (!l->n_connections) l->n_connections = d->n_connections;
    if (!l->header_timeout_ms) l->header_timeout_ms = d->header_timeout_ms;
    if (!l->idle_timeout_ms) l->idle_timeout_ms = d->idle_timeout_ms;
    if (!l->body_timeout_ms) l->body_timeout_ms = d->body_timeout_ms;
    if (!l->write_stall_ms) l->write_stall_ms = d->write_stall_ms;
    if (!l->write_queue_bytes) l->write_queue_bytes = d->write_queue_bytes;
    if (!l->answers_bytes) l->answers_bytes = d->answers_bytes;
    if (!l->large_bodies_bytes) l->large_bodies_bytes = d->large_bodies_bytes;
    if (!l->body_wait_ms) l->body_wait_ms = d->body_wait_ms;
    if (!l->body_contended_ms) l->body_contended_ms = d->body_contended_ms;
}

static void server_add_metrics(struct http_server *s, struct metrics *m)
{
    if (!m) return;
    s->m_conns = metrics_gauge(m, "baton_http_connections", "", "Open HTTP connections.");
    s->m_requests = metrics_counter(m, "baton_http_requests_total", "",
                                    "HTTP requests handed to the handler.");
    s->m_refused = metrics_counter(
        m, "baton_http_refused_total", "",
        "Requests refused before the handler: malformed, too large or too slow.");
    s->m_turned_away = metrics_counter(m, "baton_http_turned_away_total", "",
                                       "Connections above the connection limit.");
    s->m_slow = metrics_counter(m, "baton_http_slow_readers_total", "",
                                "Connections cut because the client did not read.");
    s->m_gone = metrics_counter(m, "baton_http_clients_gone_total", "",
                                "Exchanges whose client left before the answer was sent.");
}

static void server_on_connection(void *arg, int fd) { http_conn_open(arg, fd); }

static enum status server_listen(struct http_server *s, struct err *err)
{
    const struct listener_options o = {
        .loop = s->o.loop,
        .protocol = "http",
        .host = s->host,
        .port = s->o.port,
        .option = s->o.option,
        .share_port = s->o.share_port,
        .on_connection = server_on_connection,
        .arg = s,
    };
    return listener_open(&s->listener, &o, err);
}

enum status http_server_start(const struct http_server_options *o, struct http_server **out,
                              struct err *err)
{
    ASSERT_THREAD(THREAD_LOOP);
    struct http_server *s = MEM_NEW(struct http_server);
    uv_loop_t *uv = loop_uv(o->loop);
    s->o = *o;
    s->host = mem_strdup(o->host && o->host[0] ? o->host : "0.0.0.0");
    s->o.host = s->host;
    server_set_limits(&s->o.limits);
    s->bodies = http_bodies_create(s->o.limits.large_bodies_bytes, s->o.limits.body_bytes);
    http_backlog_init(&s->backlog, s->o.limits.answers_bytes, o->metrics);
    http_turn_init(&s->unknown);
    list_init(&s->conns);
    list_init(&s->ready);
    uv_idle_init(uv, &s->idle);
    uv_timer_init(uv, &s->grace);
    uv_timer_init(uv, &s->trim);
    s->idle.data = s->grace.data = s->trim.data = s;
    s->n_handles = 3;
    enum status st = server_listen(s, err);
    if (st != OK) {
        http_server_close_handles(s);
        return st;
    }
    s->n_handles++;
    server_add_metrics(s, o->metrics);
    *out = s;
    return OK;
}

uint16_t http_server_port(const struct http_server *s) { return s->listener.port; }

const char *http_method(const struct http_exchange *x)
{
    return llhttp_method_name(x->conn->parse.llhttp.method);
}

struct str http_path(const struct http_exchange *x) { return buf_str(&x->conn->parse.path); }

struct str http_header(const struct http_exchange *x, const char *name)
{
    return http_parse_header(&x->conn->parse, name);
}

struct str http_body(const struct http_exchange *x) { return buf_str(&x->conn->parse.body); }

void http_take_body(struct http_exchange *x, struct http_taken_body *out)
{
    struct http_conn *c = x->conn;
    *out = (struct http_taken_body){ .bytes = c->parse.body,
                                     .bodies = c->server->bodies,
                                     .share = http_place_take(&c->place) };
    /* The server may end before a body that it does not count. */
    if (http_share_bytes(&out->share) == 0) out->bodies = NULL;
    c->parse.body = (struct buf){ 0 };
}

void http_taken_body_release(struct http_taken_body *b)
{
    buf_release(&b->bytes);
    if (b->bodies) http_bodies_return(b->bodies, b->share);
    b->bodies = NULL;
}

const char *http_peer(const struct http_exchange *x) { return x->conn->peer; }

void http_on_end(struct http_exchange *x, void (*fn)(void *arg, bool gone), void *arg)
{
    x->on_end = fn;
    x->on_end_arg = arg;
}
