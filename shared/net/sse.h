/* sse.h - server-sent events on an exchange: one "data: <json>" event per token, "[DONE]" once at
 * the end.
 *
 * sse_begin, any number of sse_event, then http_stream_end. Every event is handed to the socket at
 * once. Thread: loop. */
#ifndef BATON_NET_SSE_H
#define BATON_NET_SSE_H

#include "shared/net/http/http_server.h"

/* Status 200 and the headers that keep proxies from holding events back. headers: as in
 * http_stream_begin. */
void sse_begin(struct http_exchange *x, const char *headers);
/* `json` has no line break (a break would end the field early: ERR_INVALID). Otherwise as
 * http_stream_write. */
enum status sse_event(struct http_exchange *x, struct str json) MUST_CHECK;

#endif
