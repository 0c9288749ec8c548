/* grpc_server.c - see grpc_server.h: start, drain and stop.
 *
 *     SERVING ──drain──▶ DRAINING ──stop──▶ GRACE ──nothing runs, grace_ms──▶ LINGER ──▶ closed
 *
 * DRAINING: connections get a GOAWAY that lets streams which are on their way through. GRACE: what
 * is admitted goes on; streams on which nothing runs end. LINGER: connections get the GOAWAY that
 * names the last stream that was looked at, so clients send the others again elsewhere. The server
 * is freed when its own handles and the last connection are closed. Thread: loop. */
#include "shared/net/grpc/grpc_server.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/net/grpc/grpc_conn.h"

enum {
    STOP_TICK_MS = 5,
    STOP_QUIET_MS = 50,   /* what clients have just sent is on its way for no longer */
    STOP_LISTEN_MS = 300, /* handshakes that have begun end within it */
    STOP_LINGER_MS = 50
};

const struct grpc_limits GRPC_LIMITS_DEFAULT = {
    .header_bytes = 16 * 1024,
    .n_headers = 100,
    .message_bytes = 45u << 20,
    .n_connections = 10000,
    .n_calls = 512,
    .n_calls_all = 32768,
    .n_requests = 1024,
    .begin_timeout_ms = 10000,
    .idle_timeout_ms = 300000,
    .message_timeout_ms = 60000,
    .write_stall_ms = 60000,
    .call_queue_bytes = 8u << 20,
    .answers_bytes = 256u << 20,
    .large_bodies_bytes = 96u << 20,
    .body_wait_ms = 30000,
    .control_burst = 256,
    .control_per_s = 32,
    .reset_burst = 1024,
    .reset_per_s = 128,
};

/* ---- the end of the memory ---- */

static void maybe_free(struct grpc_server *s)
{
    if (s->n_conns > 0 || s->n_handles > 0) return;
    void (*done)(void *arg) = s->done;
    void *arg = s->done_arg;
    http_bodies_close(s->bodies);
    map_release(&s->clients);
    nghttp2_session_callbacks_del(s->callbacks);
    nghttp2_option_del(s->option);
    mem_free(s->m_calls);
    mem_free(s->host);
    mem_free(s);
    if (done) done(arg);
}

void grpc_server_conn_freed(struct grpc_server *s)
{
    s->n_conns--;
    if (s->m_conns) gauge_set(s->m_conns, s->n_conns);
    maybe_free(s);
}

static void on_handle_closed(uv_handle_t *h)
{
    struct grpc_server *s = h->data;
    s->n_handles--;
    maybe_free(s);
}

static void on_listener_closed(void *arg)
{
    struct grpc_server *s = arg;
    s->n_handles--;
    maybe_free(s);
}

static void close_handles(struct grpc_server *s)
{
    listener_close(&s->listener, on_listener_closed);
    uv_close((uv_handle_t *)&s->idle, on_handle_closed);
    uv_close((uv_handle_t *)&s->grace, on_handle_closed);
}

/* ---- turns ---- */

static void on_idle(uv_idle_t *idle)
{
    struct grpc_server *s = idle->data;
    struct list batch;
    list_init(&batch);
    while (!list_empty(&s->ready)) {
        struct list *first = s->ready.next;
        list_remove(first);
        list_push(&batch, first);
    }
    while (!list_empty(&batch)) {
        struct grpc_conn *c = LIST_FIRST(&batch, struct grpc_conn, ready_link);
        list_remove(&c->ready_link);
        grpc_conn_advance(c);
    }
    if (list_empty(&s->ready)) uv_idle_stop(idle);
}

void grpc_conn_wake(struct grpc_conn *c)
{
    struct grpc_server *s = c->server;
    if (c->state == GRPC_CONN_CLOSING || uv_is_closing((uv_handle_t *)&s->idle)) return;
    if (!list_empty(&c->ready_link)) return;
    list_push(&s->ready, &c->ready_link);
    uv_idle_start(&s->idle, on_idle);
}

/* ---- metrics ---- */

static void add_metrics(struct grpc_server *s, struct metrics *m)
{
    while (s->o.methods[s->n_methods].path) s->n_methods++;
    s->m_calls = MEM_ARRAY(struct counter *, (s->n_methods + 1) * GRPC_N_STATUSES);
    if (!m) return;
    s->m_conns = metrics_gauge(m, "baton_grpc_connections", "", "Open gRPC connections.");
    s->m_backlog = metrics_gauge(m, "baton_grpc_answer_bytes", "",
                                 "Bytes of answers that gRPC clients have not read yet.");
    s->m_turned_away = metrics_counter(m, "baton_grpc_turned_away_total", "",
                                       "gRPC connections above the connection limits.");
    s->m_slow = metrics_counter(m, "baton_grpc_slow_readers_total", "",
                                "gRPC calls and connections cut because the client did not read.");
    s->m_flood = metrics_counter(m, "baton_grpc_floods_total", "",
                                 "gRPC connections ended because of frames that only cost.");
    s->m_gone = metrics_counter(m, "baton_grpc_clients_gone_total", "",
                                "gRPC calls that ended before their answer did.");
}

/* Those of unknown methods count under one name, since clients choose it. */
void grpc_server_count(struct grpc_server *s, const struct grpc_method *method, enum grpc_status st)
{
    const size_t i = method ? (size_t)(method - s->o.methods) : s->n_methods;
    struct counter **m = &s->m_calls[i * GRPC_N_STATUSES + st];
    char labels[160];
    if (!s->o.metrics) return;
    snprintf(labels, sizeof labels, "method=\"%.100s\",code=\"%s\"",
             method ? method->path + 1 : "other", grpc_status_name(st));
    if (!*m)
        *m = metrics_counter(s->o.metrics, "baton_grpc_calls_total", labels,
                             "gRPC calls by method and status.");
    counter_add(*m, 1);
}

/* ---- start ---- */

static void set_limits(struct grpc_limits *l)
{
    const struct grpc_limits *d = &GRPC_LIMITS_DEFAULT;
#define DEFAULT(name)                                                                              \
    if (!l->name) l->name = d->name
    DEFAULT(header_bytes);
    DEFAULT(n_headers);
    DEFAULT(message_bytes);
    DEFAULT(n_connections);
    DEFAULT(n_calls);
    DEFAULT(n_calls_all);
    DEFAULT(n_requests);
    DEFAULT(begin_timeout_ms);
    DEFAULT(idle_timeout_ms);
    DEFAULT(message_timeout_ms);
    DEFAULT(write_stall_ms);
    DEFAULT(call_queue_bytes);
    DEFAULT(answers_bytes);
    DEFAULT(large_bodies_bytes);
    DEFAULT(body_wait_ms);
    DEFAULT(control_burst);
    DEFAULT(control_per_s);
    DEFAULT(reset_burst);
    DEFAULT(reset_per_s);
#undef DEFAULT
}

static void on_connection(void *arg, int fd) { grpc_conn_open(arg, fd); }

static enum status open_listener(struct grpc_server *s, struct err *err)
{
    const struct listener_options o = {
        .loop = s->o.loop,
        .protocol = "grpc",
        .host = s->host,
        .port = s->o.port,
        .option = s->o.option,
        .share_port = s->o.share_port,
        .on_connection = on_connection,
        .arg = s,
    };
    if (grpc_session_setup(s) != OK)
        return err_set(err, ERR_NOMEM, "no memory for the gRPC server of port %u", s->o.port);
    return listener_open(&s->listener, &o, err);
}

enum status grpc_server_start(const struct grpc_server_options *o, struct grpc_server **out,
                              struct err *err)
{
    ASSERT_THREAD(THREAD_LOOP);
    struct grpc_server *s = MEM_NEW(struct grpc_server);
    uv_loop_t *uv = loop_uv(o->loop);
    s->o = *o;
    s->host = mem_strdup(o->host && o->host[0] ? o->host : "0.0.0.0");
    s->listener.fd = -1;
    set_limits(&s->o.limits);
    s->bodies = http_bodies_create(s->o.limits.large_bodies_bytes, s->o.limits.message_bytes);
    http_turn_init(&s->unknown);
    list_init(&s->conns);
    list_init(&s->ready);
    list_init(&s->backlog);
    uv_idle_init(uv, &s->idle);
    uv_timer_init(uv, &s->grace);
    s->idle.data = s->grace.data = s;
    s->n_handles = 2;
    const enum status st = open_listener(s, err);
    add_metrics(s, st == OK ? o->metrics : NULL);
    if (st != OK) {
        close_handles(s);
        return st;
    }
    s->n_handles++;
    *out = s;
    return OK;
}

uint16_t grpc_server_port(const struct grpc_server *s) { return s->listener.port; }

/* ---- drain and stop ---- */

void grpc_server_drain(struct grpc_server *s)
{
    ASSERT_THREAD(THREAD_LOOP);
    s->draining = true;
    LIST_FOREACH (c, &s->conns, struct grpc_conn, link)
        if (c->n_calls_ever > 0) grpc_conn_notify(c);
}

/* Does anything run on it, or is an answer not sent yet? */
static bool is_busy(const struct grpc_call *c, uint64_t since)
{
    if (grpc_queue(c) > 0 || c->n_requests > 0 || c->t_input >= since) return true;
    if (c->state != GRPC_CALL_RUNNING) return !c->broken;
    return !c->method->streams || !grpc_reader_is_between(&c->reader);
}

/* Ends streams that are open for later messages only; true: something runs. */
static bool end_idle_calls(struct grpc_server *s, uint64_t now)
{
    bool busy = false;
    LIST_FOREACH (c, &s->conns, struct grpc_conn, link) {
        if (c->state != GRPC_CONN_OPEN) continue;
        LIST_FOREACH (call, &c->calls, struct grpc_call, link) {
            if (is_busy(call, now - STOP_QUIET_MS)) busy = true;
            else if (call->has_handler)
                grpc_call_abort(call, GRPC_UNAVAILABLE, "the server is shutting down");
        }
        if (c->n_calls > 0) busy = true;
    }
    return busy;
}

static void begin_linger(struct grpc_server *s, uint64_t now)
{
    s->linger_until = now + (s->grace_ms ? STOP_LINGER_MS : 0);
    listener_close(&s->listener, on_listener_closed);
    LIST_FOREACH (c, &s->conns, struct grpc_conn, link) {
        LIST_FOREACH (call, &c->calls, struct grpc_call, link)
            if (call->has_handler)
                grpc_call_abort(call, GRPC_UNAVAILABLE, "the server is shutting down");
        grpc_conn_advance(c);
        grpc_conn_terminate(c, NGHTTP2_NO_ERROR);
    }
}

static void on_tick(uv_timer_t *t)
{
    struct grpc_server *s = t->data;
    const uint64_t now = uv_now(t->loop);
    if (!s->t_stop) { /* only now: the caller's turn of the loop may have been long */
        s->t_stop = now;
        s->grace_until = now + s->grace_ms;
        if (s->grace_ms) return; /* the sockets are looked at before any end */
    }
    if (!s->linger_until) {
        const bool is_quiet = now >= s->t_stop + STOP_QUIET_MS && !end_idle_calls(s, now);
        if (now >= s->t_stop + STOP_LISTEN_MS) listener_close(&s->listener, on_listener_closed);
        if (now < s->grace_until && !is_quiet) return;
        begin_linger(s, now);
    }
    if (now < s->linger_until && !list_empty(&s->conns)) return;
    LIST_FOREACH (c, &s->conns, struct grpc_conn, link) grpc_conn_lost(c);
    close_handles(s);
}

void grpc_server_stop(struct grpc_server *s, uint32_t grace_ms, void (*done)(void *arg), void *arg)
{
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(!s->stopping);
    s->stopping = true;
    s->done = done;
    s->done_arg = arg;
    s->grace_ms = grace_ms;
    grpc_server_drain(s);
    LIST_FOREACH (c, &s->conns, struct grpc_conn, link) grpc_conn_notify(c);
    listener_stop_handshakes(&s->listener);
    /* Even without grace in the next turn, since a handler may call stop. */
    uv_timer_start(&s->grace, on_tick, 0, STOP_TICK_MS);
}

void grpc_server_hurry(struct grpc_server *s, uint32_t grace_ms)
{
    ASSERT_THREAD(THREAD_LOOP);
    const uint64_t until = uv_now(s->grace.loop) + grace_ms;
    if (grace_ms < s->grace_ms) s->grace_ms = grace_ms;
    if (until < s->grace_until) s->grace_until = until;
}
