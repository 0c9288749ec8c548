/* http_pass.c - see http_pass.h. Thread: loop. */
#include "shared/net/http/http_pass.h"

#include <stdio.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/net/http/http_answer.h"
#include "shared/net/sse.h"

enum {
    WHOLE_MAX = 1 << 20,    /* bytes of an answer that is held until it is complete */
    EVENT_MAX = 1 << 20,    /* bytes of an event that are held until it is complete */
    QUEUE_HIGH = 256 << 10, /* bytes that the client has not read; then reading pauses */
    READ_BYTES = 16 << 10,
    KEEPALIVE_S = 10
};

struct http_pass {
    struct http_pass_options o;
    char *host;
    uv_tcp_t tcp;
    uv_connect_t connect;
    uv_getaddrinfo_t resolve;
    uv_write_t write;
    struct loop_timer *deadline;
    struct buf head;             /* of the request; libuv reads it, and the body, while `writing` */
    struct http_taken_body body; /* taken when the answer begins: nobody needs it again */
    struct http_answer answer;
    struct buf held;                    /* a whole answer, or the beginning of an event */
    bool is_events, is_lines, is_whole; /* is_lines: instead of is_events */
    bool begun;                         /* the client has a part of the answer */
    bool writing, paused, closing, resolving;
    uint64_t t_heard; /* uv_now */
    uint32_t n_refs;  /* the tcp handle; a name being resolved */
    char read_buf[READ_BYTES];
};

/* The statuses with which another node may refuse a request that a third one would take: it is full
 * (429, 503); it has other keys (401), which is nothing to tell a client whose key was good here;
 * or another model (404), which may be the client's fault. */
static bool is_full(int status) { return status == 429 || status == 503; }
static bool is_unknown(int status) { return status == 401 || status == 404; }

static bool is_refusal(int status, bool last)
{
    return is_full(status) || status == 401 || (status == 404 && !last);
}

/* ---- the end ---- */

static void unref(struct http_pass *p)
{
    if (--p->n_refs > 0) return;
    http_answer_release(&p->answer);
    http_taken_body_release(&p->body);
    buf_release(&p->head);
    buf_release(&p->held);
    mem_free(p->host);
    mem_free(p);
}

static void on_closed(uv_handle_t *h) { unref(h->data); }

static void close_pass(struct http_pass *p)
{
    p->closing = true;
    loop_timer_free(p->deadline);
    p->deadline = NULL;
    if (p->resolving) uv_cancel((uv_req_t *)&p->resolve);
    uv_close((uv_handle_t *)&p->tcp, on_closed);
}

static void finish(struct http_pass *p, enum http_pass_end end)
{
    http_on_drain(p->o.x, NULL, NULL);
    close_pass(p);
    p->o.done(p->o.arg, end, p->answer.has_head ? p->answer.status : 0);
}

/* The stream ends as the API ends one that fails: with an error event. */
static void end_with_error(struct http_pass *p)
{
    if (p->is_lines) {
        if (json_lines_write(p->o.x, p->o.broken_line) == OK) http_stream_end(p->o.x);
    } else if (sse_event(p->o.x, p->o.broken_event) == OK && sse_event(p->o.x, STR("[DONE]")) == OK)
        http_stream_end(p->o.x);
    finish(p, PASS_BROKEN);
}

void http_pass_peer_lost(struct http_pass *p)
{
    if (!p->begun) {
        finish(p, PASS_NOT_TAKEN);
    } else if (p->is_events || p->is_lines) {
        end_with_error(p);
    } else {
        http_stream_cut(p->o.x); /* the only sign that HTTP has for half an answer */
        finish(p, PASS_BROKEN);
    }
}

void http_pass_cancel(struct http_pass *p) { close_pass(p); }

uint64_t http_pass_silent_ms(const struct http_pass *p) { return uv_now(p->tcp.loop) - p->t_heard; }

static void on_deadline(void *arg) { http_pass_peer_lost(arg); }

/* ---- the answer ---- */

static void release_body(struct http_pass *p)
{
    if (p->begun && !p->writing) http_taken_body_release(&p->body);
}

/* Has the head this line, or one that begins with it? */
static bool has_header(const struct http_answer *a, const char *line)
{
    struct str rest = buf_str(&a->headers), one;
    while (str_split(&rest, '\n', &one))
        if (str_starts(one, line)) return true;
    return false;
}

/* From here on no other node is tried. */
static void begin(struct http_pass *p)
{
    p->begun = true;
    loop_timer_free(p->deadline);
    p->deadline = NULL;
    http_take_body(p->o.x, &p->body);
    release_body(p);
}

static enum status on_head(void *arg)
{
    struct http_pass *p = arg;
    struct http_answer *a = &p->answer;
    if (is_refusal(a->status, p->o.last)) return ERR_PEER_REFUSED;
    p->is_lines = has_header(a, SSE_LINES_HEADER ": " SSE_LINES);
    p->is_events = !p->is_lines && str_starts(buf_str(&a->type), "text/event-stream");
    p->is_whole = a->length <= WHOLE_MAX;
    if (p->is_whole) return OK;
    begin(p);
    http_stream_begin(p->o.x, a->status, a->type.data, a->headers.data);
    return OK;
}

/* Passes complete events, or lines, on, so that one with an error can follow them. */
static enum status pass_events(struct http_pass *p, struct str piece)
{
    const size_t n_end = p->is_lines ? 1 : 2;
    buf_add_str(&p->held, piece);
    size_t n = p->held.len;
    while (n >= n_end && memcmp(p->held.data + n - n_end, "\n\n", n_end) != 0) n--;
    if (n < n_end && p->held.len > EVENT_MAX) n = p->held.len;
    if (n < n_end) return OK;
    enum status st = http_stream_write(p->o.x, (struct str){ p->held.data, n });
    buf_consume(&p->held, n);
    return st;
}

static enum status on_body(void *arg, struct str piece)
{
    struct http_pass *p = arg;
    if (p->is_whole) {
        buf_add_str(&p->held, piece);
        return OK;
    }
    return p->is_events || p->is_lines ? pass_events(p, piece) : http_stream_write(p->o.x, piece);
}

static void on_complete(struct http_pass *p)
{
    struct http_exchange *x = p->o.x;
    struct http_answer *a = &p->answer;
    enum status st = OK;
    if (p->is_whole) {
        begin(p);
        http_reply(x, a->status, a->type.data, a->headers.data, buf_str(&p->held));
    } else {
        if (p->held.len) st = http_stream_write(x, buf_str(&p->held));
        if (st == OK) http_stream_end(x);
    }
    finish(p, st == OK ? PASS_ANSWERED : PASS_CLIENT_GONE);
}

static void resume(void *arg);

static void pause_if_full(struct http_pass *p)
{
    if (!p->begun || http_stream_queue(p->o.x) <= QUEUE_HIGH) return;
    p->paused = true;
    uv_read_stop((uv_stream_t *)&p->tcp);
    http_on_drain(p->o.x, resume, p);
}

static enum http_pass_end refusal_of(const struct http_answer *a)
{
    if (is_unknown(a->status)) return PASS_REFUSED;
    return has_header(a, HTTP_PASS_HAS_ROOM_HEADER ":") ? PASS_REFUSED : PASS_FULL;
}

static void on_data(struct http_pass *p, const char *data, size_t n)
{
    enum status st = http_answer_feed(&p->answer, data, n);
    p->t_heard = uv_now(p->tcp.loop);
    if (st == ERR_PEER_REFUSED) finish(p, refusal_of(&p->answer));
    else if (p->begun && (st == ERR_CANCELED || st == ERR_FULL)) finish(p, PASS_CLIENT_GONE);
    else if (st != OK) http_pass_peer_lost(p);
    else if (p->answer.complete) on_complete(p);
    else pause_if_full(p);
}

static void on_alloc(uv_handle_t *h, size_t suggested, uv_buf_t *out)
{
    struct http_pass *p = h->data;
    (void)suggested;
    *out = uv_buf_init(p->read_buf, sizeof p->read_buf);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *b)
{
    struct http_pass *p = stream->data;
    if (n == 0 || p->closing) return;
    if (n > 0) on_data(p, b->base, (size_t)n);
    else http_pass_peer_lost(p);
}

static enum status read_on(struct http_pass *p)
{
    return uv_read_start((uv_stream_t *)&p->tcp, on_alloc, on_read) == 0 ? OK : ERR_PEER_LOST;
}

/* The client has read something. */
static void resume(void *arg)
{
    struct http_pass *p = arg;
    if (!p->paused || http_stream_queue(p->o.x) > QUEUE_HIGH / 2) return;
    p->paused = false;
    p->t_heard = uv_now(p->tcp.loop);
    http_on_drain(p->o.x, NULL, NULL);
    if (read_on(p) != OK) http_pass_peer_lost(p);
}

/* ---- the request ---- */

static void on_written(uv_write_t *w, int rc)
{
    struct http_pass *p = w->handle->data;
    (void)rc; /* reading shows what became of the connection, also an answer given early */
    p->writing = false;
    release_body(p);
}

static void add_header(struct buf *out, const struct http_exchange *x, const char *name)
{
    struct str value = http_header(x, name);
    if (value.n) buf_printf(out, "%s: %.*s\r\n", name, STR_ARG(value));
}

/* Of a time that began when the request came here: what is left, at least a millisecond. What is no
 * such time goes as it is, so that the other node says what is wrong with it. */
static void add_time_left(struct buf *out, const struct http_pass *p, const char *name)
{
    const struct str value = http_header(p->o.x, name);
    const int64_t gone_ms = (int64_t)((clock_ns() - p->o.t_start_ns) / 1000000);
    int64_t ms = 0;
    if (str_to_i64(value, &ms) != OK || ms < 1) add_header(out, p->o.x, name);
    else buf_printf(out, "%s: %lld\r\n", name, (long long)(ms > gone_ms ? ms - gone_ms : 1));
}

/* All that the serving side reads. The parser has refused control characters in the values. */
static void write_head(struct http_pass *p)
{
    static const char *const passed[] = {
        "authorization", "content-type",           "content-encoding", "accept",
        "user-agent",    "x-request-id",           "x-baton-trace",    "traceparent",
        "tracestate",    "last-event-id",          "x-baton-resume",   "x-baton-hedge-ms",
        "x-baton-retry", "x-stainless-retry-count"
    };
    const struct http_exchange *x = p->o.x;
    bool is_ip6 = strchr(p->host, ':') != NULL;
    buf_printf(&p->head, "%s %s HTTP/1.1\r\nHost: %s%s%s:%u\r\n", http_method(x), p->o.path,
               is_ip6 ? "[" : "", p->host, is_ip6 ? "]" : "", p->o.port);
    for (size_t i = 0; i < COUNT_OF(passed); i++) add_header(&p->head, x, passed[i]);
    add_time_left(&p->head, p, "x-baton-ttft-ms");
    add_time_left(&p->head, p, "x-baton-deadline-ms");
    if (p->o.name) buf_printf(&p->head, "%s: %s\r\n", HTTP_PASS_NAME_HEADER, p->o.name);
    buf_printf(&p->head, "%s: %s\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n",
               HTTP_PASS_HEADER, p->o.from, http_body(x).n);
}

static enum status send_request(struct http_pass *p)
{
    struct str body = http_body(p->o.x);
    uv_buf_t parts[] = { { .base = p->head.data, .len = p->head.len },
                         { .base = (char *)(uintptr_t)body.p, .len = body.n } };
    p->writing = uv_write(&p->write, (uv_stream_t *)&p->tcp, parts, body.n ? 2 : 1, on_written) ==
                 0;
    return p->writing ? OK : ERR_PEER_LOST;
}

static void on_connect(uv_connect_t *req, int rc)
{
    struct http_pass *p = req->handle->data;
    if (p->closing) return;
    uv_tcp_nodelay(&p->tcp, 1);
    uv_tcp_keepalive(&p->tcp, 1, KEEPALIVE_S);
    enum status st = rc == 0 ? read_on(p) : ERR_PEER_LOST;
    if (st == OK) st = send_request(p);
    if (st != OK) {
        http_pass_peer_lost(p);
        return;
    }
    p->t_heard = uv_now(p->tcp.loop);
    loop_timer_free(p->deadline);
    p->deadline = loop_timer_start(p->o.loop, p->o.answer_ms, 0, on_deadline, p);
}

static enum status dial(struct http_pass *p, const struct sockaddr *a)
{
    return uv_tcp_connect(&p->connect, &p->tcp, a, on_connect) == 0 ? OK : ERR_PEER_LOST;
}

static void on_resolved(uv_getaddrinfo_t *req, int rc, struct addrinfo *list)
{
    struct http_pass *p = req->data;
    p->resolving = false;
    enum status st = rc == 0 ? OK : ERR_PEER_LOST;
    if (!p->closing && st == OK) st = dial(p, list->ai_addr);
    if (list) uv_freeaddrinfo(list);
    if (!p->closing && st != OK) http_pass_peer_lost(p);
    unref(p);
}

static enum status resolve(struct http_pass *p)
{
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC,
        .ai_socktype = SOCK_STREAM,
        .ai_flags = AI_NUMERICSERV,
    };
    char service[8];
    snprintf(service, sizeof service, "%u", p->o.port);
    p->resolve.data = p;
    if (uv_getaddrinfo(loop_uv(p->o.loop), &p->resolve, on_resolved, p->host, service, &hints) != 0)
        return ERR_PEER_LOST;
    p->resolving = true;
    p->n_refs++;
    return OK;
}

enum status http_pass_start(const struct http_pass_options *o, struct http_pass **out)
{
    ASSERT_THREAD(THREAD_LOOP);
    struct sockaddr_storage a;
    struct http_pass *p = MEM_NEW(struct http_pass);
    p->o = *o;
    p->host = mem_strdup(o->host);
    p->n_refs = 1;
    p->answer.on_head = on_head;
    p->answer.on_body = on_body;
    p->answer.arg = p;
    http_answer_init(&p->answer);
    write_head(p);
    uv_tcp_init(loop_uv(o->loop), &p->tcp);
    p->tcp.data = p;
    p->t_heard = uv_now(p->tcp.loop);
    enum status st;
    if (uv_ip4_addr(p->host, o->port, (struct sockaddr_in *)&a) == 0 ||
        uv_ip6_addr(p->host, o->port, (struct sockaddr_in6 *)&a) == 0)
        st = dial(p, (const struct sockaddr *)&a);
    else st = resolve(p);
    if (st != OK) {
        close_pass(p);
        return st;
    }
    p->deadline = loop_timer_start(o->loop, o->connect_ms, 0, on_deadline, p);
    *out = p;
    return OK;
}
