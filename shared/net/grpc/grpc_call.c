/* grpc_call.c - see grpc_conn.h: a call from its head to its end, and the messages that come.
 * Thread: loop. */
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/net/grpc/grpc_conn.h"

enum {
    MESSAGE_RATE = 16,        /* bytes per ms that extend a message's deadline */
    UNPARSED_MAX = 256 * 1024 /* bytes that calls of one connection keep while they wait */
};

static void on_place(struct http_place *p)
{
    struct grpc_call *c = LIST_ENTRY(p, struct grpc_call, place);
    c->t_input += grpc_conn_now(c->conn) - c->t_wait; /* the client may not be blamed for it */
    c->conn->has_news = true;
    grpc_conn_wake(c->conn);
}

struct grpc_call *grpc_call_create(struct grpc_conn *conn, int32_t stream)
{
    struct grpc_server *s = conn->server;
    struct grpc_call *c = MEM_NEW(struct grpc_call);
    c->conn = conn;
    c->stream = stream;
    c->t_start_ns = clock_ns();
    c->deadline_ms = UINT64_MAX;
    c->reader.max_bytes = s->o.limits.message_bytes;
    c->t_input = grpc_conn_now(conn);
    list_init(&c->backlog_link);
    http_place_init(&c->place, conn->client ? &conn->client->turn : &s->unknown, on_place);
    list_push(&conn->calls, &c->link);
    s->n_calls++;
    conn->n_calls++;
    conn->n_calls_ever++;
    grpc_conn_due(conn, c->t_input + s->o.limits.begin_timeout_ms);
    return c;
}

/* ---- the end ---- */

/* From here on the handler is not called any more. */
static void end_handler(struct grpc_call *c, bool gone)
{
    struct http_client_entry *client = c->conn->client;
    if (client) client->n_requests -= c->n_requests;
    c->n_requests = 0;
    if (!c->has_handler) return;
    c->has_handler = false;
    if (gone && c->conn->server->m_gone) counter_add(c->conn->server->m_gone, 1);
    if (c->on_end) c->on_end(c->on_end_arg, gone);
}

static void set_unparsed(struct grpc_call *c, size_t n)
{
    c->conn->n_unparsed += n - c->n_unparsed; /* unsigned: the sums come out right */
    c->conn->server->n_unparsed += n - c->n_unparsed;
    c->n_unparsed = n;
}

void grpc_call_free(struct grpc_call *c, bool gone)
{
    struct grpc_conn *conn = c->conn;
    struct grpc_server *s = conn->server;
    list_remove(&c->link);
    s->n_calls--;
    conn->n_calls--;
    grpc_backlog_leave(c);
    http_bodies_release(s->bodies, &c->place);
    set_unparsed(c, 0);
    if (gone && c->state != GRPC_CALL_FINISHED) c->st = GRPC_CANCELLED;
    grpc_server_count(s, c->method, c->st);
    log_debug("grpc call", "peer=%s path=%s status=%s gone=%d ms=%.1f", conn->peer,
              c->method ? c->method->path : "?", grpc_status_name(c->st), gone,
              (double)(clock_ns() - c->t_start_ns) * 1e-6);
    end_handler(c, gone);
    grpc_fields_release(&c->fields);
    grpc_reader_release(&c->reader);
    buf_release(&c->in);
    buf_release(&c->out);
    buf_release(&c->text);
    mem_free(c);
    if (s->draining) grpc_conn_notify(conn);
    if (conn->n_calls == 0) {
        conn->t_phase = grpc_conn_now(conn);
        grpc_conn_due(conn, conn->t_phase + s->o.limits.idle_timeout_ms);
    }
    grpc_conn_wake(conn); /* it may have been the last one */
}

void grpc_call_abort(struct grpc_call *c, enum grpc_status st, const char *text)
{
    end_handler(c, true);
    grpc_conn_wake(c->conn);
    if (c->broken) return;
    if (c->state == GRPC_CALL_FINISHED) { /* its end waits to be read */
        grpc_call_reset(c, NGHTTP2_CANCEL);
        c->st = st;
        return;
    }
    c->state = GRPC_CALL_FINISHED;
    grpc_call_set_status(c, st, text);
    grpc_call_submit_end(c);
}

/* ---- the head ---- */

static void refuse(struct grpc_call *c, const struct grpc_refusal *why)
{
    log_debug("grpc call refused", "peer=%s why=\"%s\"", c->conn->peer, why->text);
    c->state = GRPC_CALL_FINISHED;
    grpc_call_set_status(c, why->st, why->text);
    if (why->http != 200) grpc_call_refuse_http(c, why->http);
    else grpc_call_submit_end(c);
}

static const struct grpc_method *find_method(const struct grpc_server *s, struct str path)
{
    for (const struct grpc_method *m = s->o.methods; m->path; m++)
        if (str_eq_c(path, m->path)) return m;
    return NULL;
}

static void refuse_path(struct grpc_call *c, struct str path)
{
    struct buf text = { 0 };
    enum { SHOWN_MAX = 120 };
    buf_printf(&text, "there is no method %.*s here",
               (int)(path.n < SHOWN_MAX ? path.n : SHOWN_MAX), path.p ? path.p : "");
    const struct grpc_refusal unknown = { 200, GRPC_UNIMPLEMENTED, text.data };
    refuse(c, &unknown);
    buf_release(&text);
}

static bool check_head(const struct grpc_call *c, uint64_t *timeout_ms, struct grpc_refusal *why)
{
    static const struct grpc_refusal large = { 200, GRPC_RESOURCE_EXHAUSTED,
                                               "the call's headers are too large" },
                                     many = {
                                         200, GRPC_RESOURCE_EXHAUSTED,
                                         "the server has as many calls as it accepts; try again"
                                     };
    const struct grpc_server *s = c->conn->server;
    if (c->fields_too_large) *why = large;
    else if (s->n_calls > s->o.limits.n_calls_all) *why = many;
    else return grpc_head_check(&c->fields, timeout_ms, why);
    return false;
}

static void begin(struct grpc_call *c)
{
    const struct str path = grpc_fields_get(&c->fields, ":path");
    const struct grpc_method *m = find_method(c->conn->server, path);
    const uint64_t now = grpc_conn_now(c->conn);
    struct grpc_refusal why;
    uint64_t timeout_ms;
    if (!check_head(c, &timeout_ms, &why)) {
        refuse(c, &why);
        return;
    }
    if (!m) {
        refuse_path(c, path);
        return;
    }
    c->method = m;
    c->state = GRPC_CALL_RUNNING;
    c->has_handler = true;
    c->t_input = now;
    if (timeout_ms != GRPC_NO_TIMEOUT) {
        c->deadline_ms = now + timeout_ms;
        c->deadline_clock_ms = clock_ms() + timeout_ms;
        grpc_conn_due(c->conn, c->deadline_ms);
    }
    grpc_conn_due(c->conn, now + c->conn->server->o.limits.message_timeout_ms);
    if (m->begin) m->begin(c->conn->server->o.arg, c);
}

/* The head is not needed any more, and its client chose how large it is. */
void grpc_call_begin(struct grpc_call *c)
{
    begin(c);
    grpc_fields_release(&c->fields);
    c->fields = (struct grpc_fields){ .n = 0 };
}

/* ---- messages ---- */

static bool is_running(const struct grpc_call *c)
{
    return c->state == GRPC_CALL_RUNNING && c->has_handler && !c->broken;
}

static void give_message(struct grpc_call *c)
{
    struct grpc_server *s = c->conn->server;
    c->method->message(s->o.arg, c, buf_str(&c->reader.buf));
    grpc_reader_next(&c->reader);
    http_bodies_release(s->bodies, &c->place);
    c->t_input = grpc_conn_now(c->conn);
}

/* Counts what has come of the message; false: it waits for room. */
static bool hold(struct grpc_call *c)
{
    const struct grpc_server *s = c->conn->server;
    const size_t n = c->reader.buf.len;
    if (n == 0 || http_bodies_hold(s->bodies, &c->place, n, c->reader.n_length)) return true;
    c->t_wait = grpc_conn_now(c->conn);
    grpc_conn_due(c->conn, c->t_wait + s->o.limits.body_wait_ms);
    return false;
}

static void refuse_message(struct grpc_call *c, enum grpc_read why)
{
    struct buf text = { 0 };
    const size_t max = c->reader.max_bytes;
    if (why == GRPC_READ_ENCODED)
        grpc_call_abort(c, GRPC_UNIMPLEMENTED,
                        "the message is compressed, which this server does not take");
    if (why != GRPC_READ_LONG) return;
    buf_printf(&text, "the message has %u bytes, but at most %zu are taken", c->reader.n_length,
               max);
    grpc_call_abort(c, GRPC_RESOURCE_EXHAUSTED, text.data);
    buf_release(&text);
}

/* A message that is whole, and must wait for its turn, or (without streams) for the end. */
static bool must_wait(const struct grpc_call *c)
{
    if (http_place_waits(&c->place)) return true;
    return c->method->streams && c->n_requests >= c->conn->server->o.limits.n_requests;
}

static bool is_whole(const struct grpc_reader *r)
{
    return r->n_head == GRPC_HEAD_BYTES && r->buf.len == r->n_length;
}

/* Parses as far as it may; what was parsed makes room in the stream's window. */
static void parse(struct grpc_call *c)
{
    struct str rest = buf_str(&c->in);
    while (is_running(c) && !must_wait(c)) {
        if (is_whole(&c->reader)) {
            if (!c->method->streams) break;
            give_message(c);
            continue;
        }
        if (rest.n == 0) break;
        const enum grpc_read got = grpc_reader_feed(&c->reader, &rest);
        if (got == GRPC_READ_LONG || got == GRPC_READ_ENCODED) refuse_message(c, got);
        else if (!hold(c)) break;
    }
    if (!is_running(c)) { /* nobody reads it */
        rest.n = 0;
        grpc_reader_next(&c->reader);
        http_bodies_release(c->conn->server->bodies, &c->place);
    }
    if (is_running(c) && !c->method->streams && is_whole(&c->reader) && rest.n) {
        grpc_call_abort(c, GRPC_INVALID_ARGUMENT, "this method takes one message, but more came");
        rest.n = 0;
    }
    const size_t used = c->in.len - rest.n;
    if (used && nghttp2_session_consume_stream(c->conn->session, c->stream, used) != 0)
        c->conn->broken = true;
    buf_consume(&c->in, used);
    if (c->in.len == 0) buf_release(&c->in);
    set_unparsed(c, c->in.len + (http_place_waits(&c->place) ? c->reader.buf.len : 0));
}

/* The client has sent all, and it is parsed. */
static void take_half_close(struct grpc_call *c)
{
    if (!is_running(c) || !c->half_closed || c->half_close_seen || c->in.len || must_wait(c))
        return;
    if (c->method->streams ? !grpc_reader_is_between(&c->reader) : !is_whole(&c->reader)) {
        grpc_call_abort(c, GRPC_INVALID_ARGUMENT,
                        c->reader.n_head ? "the call ended within a message"
                                         : "this method takes one message, but none came");
        return;
    }
    c->half_close_seen = true;
    if (c->method->streams) c->method->half_close(c->conn->server->o.arg, c);
    else give_message(c);
}

void grpc_call_read_on(struct grpc_call *c)
{
    if (c->broken) end_handler(c, true);
    if (c->state == GRPC_CALL_HEAD) return;
    parse(c);
    take_half_close(c);
}

/* Does it wait for its turn, and too much else as well? */
static bool has_too_much(const struct grpc_call *c)
{
    const struct grpc_server *s = c->conn->server;
    return c->n_unparsed > 0 && is_running(c) &&
           (c->conn->n_unparsed > UNPARSED_MAX || s->n_unparsed > s->o.limits.large_bodies_bytes);
}

void grpc_call_receive(struct grpc_call *c, struct str bytes)
{
    if (grpc_reader_is_between(&c->reader) && c->in.len == 0) {
        c->t_input = grpc_conn_now(c->conn);
        grpc_conn_due(c->conn, c->t_input + c->conn->server->o.limits.message_timeout_ms);
    }
    buf_add_str(&c->in, bytes);
    grpc_call_read_on(c);
    if (!has_too_much(c)) return;
    grpc_call_abort(c, GRPC_RESOURCE_EXHAUSTED, "too many messages wait for their turn; try again");
    parse(c); /* drops them */
}

void grpc_call_half_close(struct grpc_call *c)
{
    c->half_closed = true;
    grpc_call_read_on(c);
}

/* ---- what is due ---- */

static uint64_t sooner(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* When the wait for bytes of the client is over. */
static uint64_t input_due(const struct grpc_call *c)
{
    const struct grpc_limits *l = &c->conn->server->o.limits;
    if (c->state == GRPC_CALL_HEAD) return c->t_input + l->begin_timeout_ms;
    if (!is_running(c)) return UINT64_MAX;
    if (http_place_waits(&c->place)) return c->t_wait + l->body_wait_ms;
    const bool is_awaited = !c->half_closed && !must_wait(c) &&
                            (!c->method->streams || !grpc_reader_is_between(&c->reader));
    return is_awaited ? c->t_input + l->message_timeout_ms + c->reader.buf.len / MESSAGE_RATE
                      : UINT64_MAX;
}

static void end_input(struct grpc_call *c)
{
    if (c->state == GRPC_CALL_HEAD) c->conn->broken = true; /* no other frame may come either */
    else if (http_place_waits(&c->place))
        grpc_call_abort(c, GRPC_RESOURCE_EXHAUSTED,
                        "the server holds as many messages as it can; try again");
    else grpc_call_abort(c, GRPC_DEADLINE_EXCEEDED, "the message did not arrive in time");
}

uint64_t grpc_call_look(struct grpc_call *c, uint64_t now)
{
    const uint64_t stall = c->out.len > c->n_sent
                               ? c->t_progress + c->conn->server->o.limits.write_stall_ms
                               : UINT64_MAX;
    if (c->broken) return UINT64_MAX;
    if (now >= c->deadline_ms) {
        c->deadline_ms = UINT64_MAX;
        grpc_call_abort(c, GRPC_DEADLINE_EXCEEDED, "the time that grpc-timeout gave is over");
    } else if (now >= stall) {
        if (c->conn->server->m_slow) counter_add(c->conn->server->m_slow, 1);
        end_handler(c, true);
        grpc_call_reset(c, NGHTTP2_ENHANCE_YOUR_CALM);
    } else if (now >= input_due(c)) {
        end_input(c);
    } else {
        return sooner(c->deadline_ms, sooner(stall, input_due(c)));
    }
    return UINT64_MAX;
}

/* ---- what handlers ask ---- */

const char *grpc_peer(const struct grpc_call *c) { return c->conn->peer; }

struct str grpc_header(const struct grpc_call *c, const char *name)
{
    return grpc_fields_get(&c->fields, name);
}

uint64_t grpc_deadline_ms(const struct grpc_call *c) { return c->deadline_clock_ms; }

void grpc_on_end(struct grpc_call *c, void (*fn)(void *arg, bool gone), void *arg)
{
    c->on_end = fn;
    c->on_end_arg = arg;
}

void *grpc_on_end_arg(const struct grpc_call *c) { return c->on_end_arg; }

void grpc_take_message(struct grpc_call *c, struct http_taken_body *out)
{
    struct grpc_server *s = c->conn->server;
    *out = (struct http_taken_body){ .bytes = c->reader.buf,
                                     .bodies = s->bodies,
                                     .share = http_place_take(&c->place) };
    if (http_share_bytes(&out->share) == 0) out->bodies = NULL;
    c->reader.buf = (struct buf){ 0 };
}

bool grpc_admit(struct grpc_call *c)
{
    struct http_client_entry *client = c->conn->client;
    const uint32_t max = c->conn->server->o.limits.n_client_requests;
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(c->has_handler);
    if (client && max && client->n_requests >= max) return false;
    if (client) client->n_requests++;
    c->n_requests++;
    return true;
}

void grpc_done(struct grpc_call *c)
{
    ASSERT(c->n_requests > 0);
    c->n_requests--;
    if (c->conn->client) c->conn->client->n_requests--;
    c->conn->has_news = true; /* the next message may have waited for this */
    grpc_conn_wake(c->conn);
}
