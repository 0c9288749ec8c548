/* sse.c - see sse.h. */
#include "shared/net/sse.h"

#include <string.h>

static void begin(struct http_exchange *x, const char *more, const char *headers)
{
    struct buf all = { 0 };
    buf_printf(&all, "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n%s", more);
    if (headers) buf_add_c(&all, headers);
    http_stream_begin(x, 200, "text/event-stream; charset=utf-8", all.data);
    buf_release(&all);
}

void sse_begin(struct http_exchange *x, const char *headers) { begin(x, "", headers); }

static bool has_break(struct str s)
{
    return s.n > 0 && (memchr(s.p, '\n', s.n) || memchr(s.p, '\r', s.n));
}

enum status sse_event(struct http_exchange *x, struct str json)
{
    return sse_event_with_id(x, (struct str){ 0 }, json);
}

enum status sse_event_with_id(struct http_exchange *x, struct str id, struct str json)
{
    if (has_break(id) || has_break(json)) return ERR_INVALID;
    struct buf event = { 0 };
    if (id.n) buf_printf(&event, "id: %.*s\n", STR_ARG(id));
    buf_add_c(&event, "data: ");
    buf_add_str(&event, json);
    buf_add_c(&event, "\n\n");
    enum status st = http_stream_write(x, buf_str(&event));
    buf_release(&event);
    return st;
}

void json_lines_begin(struct http_exchange *x, const char *headers)
{
    begin(x, SSE_LINES_HEADER ": " SSE_LINES "\r\n", headers);
}

enum status json_lines_write(struct http_exchange *x, struct str json)
{
    if (has_break(json)) return ERR_INVALID;
    struct buf line = { 0 };
    buf_add_str(&line, json);
    buf_add_char(&line, '\n');
    enum status st = http_stream_write(x, buf_str(&line));
    buf_release(&line);
    return st;
}
