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

enum status sse_event(struct http_exchange *x, struct str json)
{
    if (json.n > 0 && (memchr(json.p, '\n', json.n) || memchr(json.p, '\r', json.n)))
        return ERR_INVALID;
    struct buf event = { 0 };
    buf_add_c(&event, "data: ");
    buf_add_str(&event, json);
    buf_add_c(&event, "\n\n");
    enum status st = http_stream_write(x, buf_str(&event));
    buf_release(&event);
    return st;
}
