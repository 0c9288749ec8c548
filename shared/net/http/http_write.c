/* http_write.c - see http_conn.h: writes answers, from the status line to the last chunk, and
 * queues what the socket does not take.
 *
 * Bytes go to the kernel at once (uv_try_write). What it does not take is copied to `next`, which
 * becomes `in_flight` when libuv has finished the write before. Thread: loop. */
#include <string.h>
#include <time.h>

#include "shared/base/clock.h"
#include "shared/base/json/json.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/net/http/http_conn.h"

enum {
    HTTP_PARTS_MAX = 4,
    HTTP_SMALL_ANSWER = 64 * 1024, /* bytes of a whole answer that the kernel takes from most */
    HTTP_KEEP_BYTES = 64 * 1024,   /* of a buffer, for the next write of the same answer */
    HTTP_JOIN_BYTES = 1024         /* an event of a stream */
};

size_t http_conn_queue(const struct http_conn *c)
{
    return c->next.len +
           (c->writing ? uv_stream_get_write_queue_size((const uv_stream_t *)&c->tcp) : 0);
}

uint64_t http_conn_taken(const struct http_conn *c)
{
    return c->held.n_queued - http_conn_queue(c);
}

void http_conn_break(struct http_conn *c)
{
    c->broken = true;
    http_conn_wake(c);
}

static void write_on_done(uv_write_t *w, int status);

static void write_start(struct http_conn *c)
{
    struct buf swap = c->in_flight;
    c->in_flight = c->next;
    c->next = swap;
    buf_clear(&c->next);
    uv_buf_t b = { .base = c->in_flight.data, .len = c->in_flight.len };
    c->writing = true;
    if (uv_write(&c->write, (uv_stream_t *)&c->tcp, &b, 1, write_on_done) == 0) return;
    c->writing = false;
    http_conn_break(c);
}

static void write_on_done(uv_write_t *w, int status)
{
    struct http_conn *c = w->handle->data;
    c->writing = false;
    if (c->state == HTTP_CONN_CLOSING) return;
    buf_clear(&c->in_flight);
    if (c->in_flight.cap > HTTP_KEEP_BYTES) buf_release(&c->in_flight);
    http_backlog_update(c);
    c->t_progress = uv_now(c->tcp.loop);
    if (status < 0) {
        http_conn_lost(c);
        return;
    }
    if (c->next.len > 0) write_start(c);
    if (c->x.open && c->x.on_drain) c->x.on_drain(c->x.on_drain_arg);
    http_conn_advance(c);
}

/* The parts as one: for so few bytes a copy costs less than what the kernel does for a vector. */
static uv_buf_t write_join(char *out, const struct str *parts, size_t n_parts)
{
    size_t n = 0;
    for (size_t i = 0; i < n_parts; n += parts[i++].n)
        if (parts[i].n > 0) memcpy(out + n, parts[i].p, parts[i].n);
    return (uv_buf_t){ .base = out, .len = n };
}

/* Offers the parts, `total` bytes, to the kernel; *sent counts what it took. */
static enum status write_try(struct http_conn *c, const struct str *parts, size_t n_parts,
                             size_t total, size_t *sent)
{
    uv_buf_t b[HTTP_PARTS_MAX];
    char joined[HTTP_JOIN_BYTES];
    unsigned n = 0;
    if (total == 0) return OK;
    if (total <= sizeof joined) b[n++] = write_join(joined, parts, n_parts);
    else
        for (size_t i = 0; i < n_parts; i++)
            if (parts[i].n > 0)
                b[n++] = (uv_buf_t){ .base = (char *)(uintptr_t)parts[i].p, .len = parts[i].n };
    int rc = uv_try_write((uv_stream_t *)&c->tcp, b, n);
    if (rc < 0 && rc != UV_EAGAIN) return ERR_CANCELED;
    *sent = rc > 0 ? (size_t)rc : 0;
    return OK;
}

enum status http_conn_write(struct http_conn *c, const struct str *parts, size_t n_parts,
                            bool bounded)
{
    ASSERT(n_parts <= HTTP_PARTS_MAX);
    if (c->broken || c->state == HTTP_CONN_CLOSING) return ERR_CANCELED;
    size_t queued = http_conn_queue(c), total = 0, sent = 0;
    for (size_t i = 0; i < n_parts; i++) total += parts[i].n;
    if (bounded && queued > 0 && queued + total > c->server->o.limits.write_queue_bytes) {
        log_debug("http client does not read", "peer=%s queued=%zu", c->peer, queued);
        if (c->server->m_slow) counter_add(c->server->m_slow, 1);
        http_conn_break(c);
        return ERR_FULL;
    }
    if (queued == 0 && !c->writing && write_try(c, parts, n_parts, total, &sent) != OK) {
        http_conn_break(c);
        return ERR_CANCELED;
    }
    if (sent == total) return OK;
    if (!http_backlog_admit(c, total - sent)) {
        if (c->server->backlog.m_cut) counter_add(c->server->backlog.m_cut, 1);
        http_conn_break(c);
        return ERR_FULL;
    }
    c->held.n_queued += total - sent;
    for (size_t i = 0; i < n_parts; i++) {
        size_t skip = sent < parts[i].n ? sent : parts[i].n;
        buf_add(&c->next, parts[i].p + skip, parts[i].n - skip);
        sent -= skip;
    }
    if (queued == 0) {
        c->t_progress = uv_now(c->tcp.loop);
        c->taken_seen = http_conn_taken(c);
        http_conn_wake(c); /* sets the stall timer */
    }
    if (!c->writing) write_start(c);
    http_backlog_update(c);
    return OK;
}

static const struct {
    int status;
    const char *text;
} REASONS[] = {
    { 200, "OK" },
    { 201, "Created" },
    { 202, "Accepted" },
    { 204, "No Content" },
    { 206, "Partial Content" },
    { 301, "Moved Permanently" },
    { 302, "Found" },
    { 304, "Not Modified" },
    { 307, "Temporary Redirect" },
    { 308, "Permanent Redirect" },
    { 400, "Bad Request" },
    { 401, "Unauthorized" },
    { 403, "Forbidden" },
    { 404, "Not Found" },
    { 405, "Method Not Allowed" },
    { 406, "Not Acceptable" },
    { 408, "Request Timeout" },
    { 409, "Conflict" },
    { 410, "Gone" },
    { 411, "Length Required" },
    { 413, "Content Too Large" },
    { 414, "URI Too Long" },
    { 415, "Unsupported Media Type" },
    { 417, "Expectation Failed" },
    { 422, "Unprocessable Content" },
    { 429, "Too Many Requests" },
    { 431, "Request Header Fields Too Large" },
    { 499, "Client Closed Request" },
    { 500, "Internal Server Error" },
    { 501, "Not Implemented" },
    { 502, "Bad Gateway" },
    { 503, "Service Unavailable" },
    { 504, "Gateway Timeout" },
    { 505, "HTTP Version Not Supported" },
};

static const char *write_reason(int status)
{
    for (size_t i = 0; i < COUNT_OF(REASONS); i++)
        if (REASONS[i].status == status) return REASONS[i].text;
    return "Status";
}

/* IMF-fixdate; written by hand because strftime follows the locale. */
static void write_date(struct buf *b)
{
    static const char days[] = "SunMonTueWedThuFriSat",
                      months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    time_t now = (time_t)clock_unix_s();
    struct tm t;
    if (!gmtime_r(&now, &t)) return;
    buf_printf(b, "Date: %.3s, %02d %.3s %d %02d:%02d:%02d GMT\r\n", days + 3 * t.tm_wday,
               t.tm_mday, months + 3 * t.tm_mon, t.tm_year + 1900, t.tm_hour, t.tm_min, t.tm_sec);
}

static void write_head(struct buf *b, const struct http_conn *c, int status,
                       const char *content_type, const char *headers)
{
    buf_printf(b, "HTTP/1.1 %d %s\r\n", status, write_reason(status));
    write_date(b);
    if (content_type) buf_printf(b, "Content-Type: %s\r\n", content_type);
    if (!c->keep_alive) buf_add_c(b, "Connection: close\r\n");
    else if (c->parse.is_http10) buf_add_c(b, "Connection: keep-alive\r\n");
    if (headers) buf_add_c(b, headers);
}

static bool write_has_no_body(int status) { return status == 204 || status == 304 || status < 200; }

static void write_fault(struct http_conn *c, const struct http_fault *f)
{
    struct buf body = { 0 }, head = { 0 };
    buf_printf(&body,
               "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,\"code\":\"%s\"}}",
               f->message,
               f->status >= 500   ? "server_error"
               : f->status == 429 ? "rate_limit_error"
                                  : "invalid_request_error",
               f->code);
    c->keep_alive = false;
    const char *more = f->status == 503 || f->status == 429 ? "Retry-After: 1\r\n"
                       : f->status == 405
                           ? "Allow: GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS\r\n"
                           : NULL;
    write_head(&head, c, f->status, "application/json", more);
    buf_printf(&head, "Content-Length: %zu\r\n\r\n", body.len);
    struct str parts[] = { buf_str(&head), buf_str(&body) };
    enum status st = http_conn_write(c, parts, 2, false);
    if (st != OK) log_debug("http refusal not sent", "peer=%s st=%s", c->peer, status_name(st));
    buf_release(&head);
    buf_release(&body);
}

void http_conn_refuse(struct http_conn *c, const struct http_fault *f)
{
    if (c->server->m_refused) counter_add(c->server->m_refused, 1);
    write_fault(c, f);
}

/* on_end reports a failed write to the handler. */
static void write_or_leave(struct http_conn *c, const struct str *parts, size_t n_parts)
{
    enum status st = http_conn_write(c, parts, n_parts, false);
    if (st != OK) log_debug("http answer not sent", "peer=%s st=%s", c->peer, status_name(st));
}

/* An answer that finds no room is not kept: its client may ask again. */
static int reply_refused(struct http_conn *c)
{
    static const struct http_fault full = {
        503, "server_busy",
        "Too many answers wait to be read by their clients; ask again, or for a smaller answer."
    };
    if (c->server->backlog.m_refused) counter_add(c->server->backlog.m_refused, 1);
    write_fault(c, &full);
    http_conn_wake(c);
    return full.status;
}

int http_reply(struct http_exchange *x, int status, const char *content_type, const char *headers,
               struct str body)
{
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(x->open);
    ASSERT(!x->begun);
    struct http_conn *c = x->conn;
    struct buf head = { 0 };
    bool none = write_has_no_body(status);
    x->begun = x->complete = true;
    if (body.n > HTTP_SMALL_ANSWER && !none && !x->bodiless && !http_backlog_admit(c, body.n))
        return reply_refused(c);
    write_head(&head, c, status, none ? NULL : content_type, headers);
    if (none) buf_add_c(&head, "\r\n");
    else buf_printf(&head, "Content-Length: %zu\r\n\r\n", body.n);
    struct str parts[] = { buf_str(&head), body };
    write_or_leave(c, parts, none || x->bodiless ? 1 : 2);
    buf_release(&head);
    http_conn_wake(c);
    return status;
}

void http_reply_error(struct http_exchange *x, int status, const char *headers, const char *member,
                      const char *why)
{
    struct buf body = { 0 };
    buf_printf(&body, "{\"%s\":", member);
    json_add_string(&body, str_of(why));
    buf_add_char(&body, '}');
    http_reply(x, status, "application/json", headers, buf_str(&body));
    buf_release(&body);
}

void http_stream_begin(struct http_exchange *x, int status, const char *content_type,
                       const char *headers)
{
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(x->open);
    ASSERT(!x->begun);
    struct http_conn *c = x->conn;
    struct buf head = { 0 };
    x->begun = true;
    x->bodiless = x->bodiless || write_has_no_body(status);
    x->chunked = !c->parse.is_http10;
    if (!x->chunked && !x->bodiless)
        c->keep_alive = false; /* in HTTP/1.0 the end of the connection ends the body */
    write_head(&head, c, status, content_type, headers);
    buf_add_c(&head, x->chunked && !write_has_no_body(status) ? "Transfer-Encoding: chunked\r\n\r\n"
                                                              : "\r\n");
    struct str parts[] = { buf_str(&head) };
    write_or_leave(c, parts, 1);
    buf_release(&head);
}

enum status http_stream_write(struct http_exchange *x, struct str data)
{
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(x->begun);
    ASSERT(!x->complete);
    struct http_conn *c = x->conn;
    if (c->broken || !x->open) return ERR_CANCELED;
    if (data.n == 0 || x->bodiless) return OK;
    if (!x->chunked) return http_conn_write(c, &data, 1, true);
    char size[24];
    int n = snprintf(size, sizeof size, "%zx\r\n", data.n);
    struct str parts[] = { { size, (size_t)n }, data, STR("\r\n") };
    return http_conn_write(c, parts, 3, true);
}

void http_stream_end(struct http_exchange *x)
{
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(x->begun);
    ASSERT(!x->complete);
    struct http_conn *c = x->conn;
    x->complete = true;
    if (x->chunked && !x->bodiless && !c->broken) {
        struct str last = STR("0\r\n\r\n");
        write_or_leave(c, &last, 1);
    }
    http_conn_wake(c);
}

void http_stream_cut(struct http_exchange *x)
{
    ASSERT_THREAD(THREAD_LOOP);
    ASSERT(x->begun);
    ASSERT(!x->complete);
    http_conn_break(x->conn);
}

size_t http_stream_queue(const struct http_exchange *x) { return http_conn_queue(x->conn); }

void http_on_drain(struct http_exchange *x, void (*fn)(void *arg), void *arg)
{
    x->on_drain = fn;
    x->on_drain_arg = arg;
}
