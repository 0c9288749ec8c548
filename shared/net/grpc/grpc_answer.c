/* grpc_answer.c - see grpc_conn.h: the answer of a call, from its headers to its trailers, and the
 * bytes of all answers that wait to be read.
 *
 * Answers wait in their calls, and nghttp2 takes from them what the windows of the client, and the
 * socket, have room for. Thread: loop. */
#include <stdio.h>
#include <string.h>

#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/net/grpc/grpc_conn.h"

enum {
    TEXT_MAX = 1024,            /* bytes of a grpc-message, before they are escaped */
    KEEP_BYTES = 64 * 1024,     /* of an empty queue */
    CONSUME_BYTES = 256 * 1024, /* taken bytes that are moved out of the queue at once */
    BACKLOG_STALL_MS = 1000     /* a call that took nothing for so long gives way to others */
};

static nghttp2_nv field(const char *name, struct str value)
{
    return (nghttp2_nv){ .name = (uint8_t *)(uintptr_t)name,
                         .value = (uint8_t *)(uintptr_t)value.p,
                         .namelen = strlen(name),
                         .valuelen = value.n };
}

/* What nghttp2 cannot do for one stream (it has just been reset) shows when the stream closes. */
static void check(struct grpc_conn *c, int rc)
{
    if (nghttp2_is_fatal(rc)) c->broken = true;
    if (rc != 0)
        log_debug("grpc answer not sent", "peer=%s why=\"%s\"", c->peer, nghttp2_strerror(rc));
    grpc_conn_wake(c);
}

/* ---- the backlog ---- */

static size_t n_waiting(const struct grpc_call *c) { return c->out.len - c->n_sent; }

/* Of all, after n bytes more, or (n < 0) less, wait. */
static void backlog_add(struct grpc_server *s, size_t more, size_t less)
{
    s->n_backlog += more - less;
    if (s->m_backlog) gauge_set(s->m_backlog, (double)s->n_backlog);
}

/* It made progress, or has just begun to wait: it goes behind all others. */
static void backlog_renew(struct grpc_call *c)
{
    struct grpc_server *s = c->conn->server;
    c->t_progress = grpc_conn_now(c->conn);
    list_remove(&c->backlog_link);
    if (n_waiting(c) > 0) list_push(&s->backlog, &c->backlog_link);
}

void grpc_backlog_leave(struct grpc_call *c)
{
    list_remove(&c->backlog_link);
    backlog_add(c->conn->server, 0, n_waiting(c));
    c->n_sent = c->out.len;
}

static void cut(struct grpc_call *c)
{
    log_debug("grpc client does not read", "peer=%s queued=%zu", c->conn->peer, n_waiting(c));
    if (c->conn->server->m_slow) counter_add(c->conn->server->m_slow, 1);
    grpc_call_reset(c, NGHTTP2_ENHANCE_YOUR_CALM);
}

/* Makes room for n more bytes of c, by cutting calls whose clients read nothing. */
static bool backlog_admit(struct grpc_call *c, size_t n)
{
    struct grpc_server *s = c->conn->server;
    while (s->n_backlog > n_waiting(c) && s->n_backlog + n > s->o.limits.answers_bytes) {
        if (list_empty(&s->backlog)) return false;
        struct grpc_call *first = LIST_FIRST(&s->backlog, struct grpc_call, backlog_link);
        if (first == c || grpc_conn_now(c->conn) - first->t_progress < BACKLOG_STALL_MS)
            return false;
        cut(first);
    }
    return true;
}

/* ---- what nghttp2 takes ---- */

static void submit_trailers(struct grpc_call *c)
{
    char number[4];
    const int n = snprintf(number, sizeof number, "%d", (int)c->st);
    const nghttp2_nv trailers[] = { field("grpc-status", (struct str){ number, (size_t)n }),
                                    field("grpc-message", buf_str(&c->text)) };
    check(c->conn,
          nghttp2_submit_trailer(c->conn->session, c->stream, trailers, c->text.len ? 2 : 1));
}

/* Some bytes have been taken; what is left is moved to the front now and then. */
static void drop_sent(struct grpc_call *c)
{
    if (n_waiting(c) == 0) {
        buf_clear(&c->out);
        c->n_sent = 0;
        if (c->out.cap > KEEP_BYTES) buf_release(&c->out);
    } else if (c->n_sent >= CONSUME_BYTES) {
        buf_consume(&c->out, c->n_sent);
        c->n_sent = 0;
    }
}

static ssize_t read_answer(nghttp2_session *session, int32_t stream, uint8_t *to, size_t cap,
                           uint32_t *flags, nghttp2_data_source *source, void *arg)
{
    struct grpc_call *c = source->ptr;
    const size_t n = n_waiting(c) < cap ? n_waiting(c) : cap;
    (void)session;
    (void)stream;
    (void)arg;
    if (n > 0) {
        memcpy(to, c->out.data + c->n_sent, n);
        c->n_sent += n;
        backlog_add(c->conn->server, 0, n);
        drop_sent(c);
        backlog_renew(c);
    }
    if (n_waiting(c) == 0 && c->state == GRPC_CALL_FINISHED) {
        *flags |= NGHTTP2_DATA_FLAG_EOF | NGHTTP2_DATA_FLAG_NO_END_STREAM;
        submit_trailers(c);
    } else if (n == 0) {
        c->deferred = true;
        return NGHTTP2_ERR_DEFERRED;
    }
    return (ssize_t)n;
}

static void resume(struct grpc_call *c)
{
    if (!c->deferred) return;
    c->deferred = false;
    check(c->conn, nghttp2_session_resume_data(c->conn->session, c->stream));
}

static void begin_answer(struct grpc_call *c)
{
    const nghttp2_nv head[] = { field(":status", STR("200")),
                                field("content-type", STR("application/grpc")),
                                field("grpc-accept-encoding", STR("identity")) };
    const nghttp2_data_provider from = { .source.ptr = c, .read_callback = read_answer };
    c->begun = true;
    check(c->conn,
          nghttp2_submit_response(c->conn->session, c->stream, head, COUNT_OF(head), &from));
}

/* ---- the end ---- */

void grpc_call_set_status(struct grpc_call *c, enum grpc_status st, const char *text)
{
    c->st = st;
    buf_clear(&c->text);
    grpc_escape(&c->text, str_of(text), TEXT_MAX);
}

/* Without any message the end comes with the headers. */
static void submit_only_end(struct grpc_call *c)
{
    char number[4];
    const int n = snprintf(number, sizeof number, "%d", (int)c->st);
    const nghttp2_nv head[] = { field(":status", STR("200")),
                                field("content-type", STR("application/grpc")),
                                field("grpc-accept-encoding", STR("identity")),
                                field("grpc-status", (struct str){ number, (size_t)n }),
                                field("grpc-message", buf_str(&c->text)) };
    const size_t n_fields = COUNT_OF(head) - (c->text.len ? 0 : 1);
    c->begun = true;
    check(c->conn, nghttp2_submit_response(c->conn->session, c->stream, head, n_fields, NULL));
}

void grpc_call_submit_end(struct grpc_call *c)
{
    if (c->broken) return;
    if (!c->begun) submit_only_end(c);
    else resume(c);
    c->conn->has_news = true; /* what still comes of the call is dropped */
    grpc_conn_wake(c->conn);
}

void grpc_call_refuse_http(struct grpc_call *c, int http)
{
    char number[12];
    const int n = snprintf(number, sizeof number, "%d", http);
    const nghttp2_nv head[] = { field(":status", (struct str){ number, (size_t)n }) };
    c->begun = true;
    check(c->conn,
          nghttp2_submit_response(c->conn->session, c->stream, head, COUNT_OF(head), NULL));
}

void grpc_call_reset(struct grpc_call *c, uint32_t error)
{
    if (c->broken) return;
    c->broken = true;
    grpc_backlog_leave(c);
    check(c->conn,
          nghttp2_submit_rst_stream(c->conn->session, NGHTTP2_FLAG_NONE, c->stream, error));
    c->conn->has_news = true; /* its handler is told in the next turn */
}

/* ---- what handlers do ---- */

enum status grpc_send(struct grpc_call *c, struct str message)
{
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(c->has_handler && c->state == GRPC_CALL_RUNNING);
    const size_t n = message.n + GRPC_HEAD_BYTES, waiting = n_waiting(c);
    struct grpc_conn *conn = c->conn;
    if (c->broken || conn->broken) return ERR_CANCELED;
    if (message.n > UINT32_MAX ||
        (waiting > 0 && waiting + n > conn->server->o.limits.call_queue_bytes) ||
        !backlog_admit(c, n)) {
        cut(c);
        return ERR_FULL;
    }
    grpc_message_add(&c->out, message);
    backlog_add(conn->server, n, 0);
    if (waiting == 0) {
        backlog_renew(c);
        grpc_conn_due(conn, c->t_progress + conn->server->o.limits.write_stall_ms);
    }
    if (!c->begun) begin_answer(c);
    else resume(c);
    grpc_conn_wake(conn);
    return OK;
}

void grpc_finish(struct grpc_call *c, enum grpc_status st, const char *text)
{
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(c->has_handler && c->state == GRPC_CALL_RUNNING);
    c->state = GRPC_CALL_FINISHED;
    grpc_call_set_status(c, st, text);
    grpc_call_submit_end(c);
}

size_t grpc_queue(const struct grpc_call *c) { return n_waiting(c); }
