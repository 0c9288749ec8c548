/* sse.c - see sse.h. */
#include "shared/net/sse.h"

#include <string.h>

void sse_begin(struct http_exchange *x, const char *headers)
{
    struct buf all = { 0 };
    buf_add_c(&all, "Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n");
    if (headers) buf_add_c(&all, headers);
    http_stream_begin(x, 200, "text/event-stream; charset=utf-8", all.data);
    buf_release(&all);
}

static enum status sse_write(struct http_exchange *x, const char *prefix, struct str text)
{
    if (text.n > 0 && (memchr(text.p, '\n', text.n) || memchr(text.p, '\r', text.n)))
        return ERR_INVALID;
    struct buf event = { 0 };
    buf_add_c(&event, prefix);
    buf_add_str(&event, text);
    buf_add_c(&event, "\n\n");
    enum status st = http_stream_write(x, buf_str(&event));
    buf_release(&event);
    return st;
}

enum status sse_event(struct http_exchange *x, struct str json)
{
    return sse_write(x, "data: ", json);
}

enum status sse_comment(struct http_exchange *x, const char *text)
{
    return sse_write(x, ": ", str_of(text));
}

void sse_done(struct http_exchange *x)
{
    /* Whether the client still listens shows in on_end; there is nothing else to do about it
     * here. */
    enum status st = sse_event(x, STR("[DONE]"));
    (void)st;
    http_stream_end(x);
}
