/* sse.h - server-sent events on an exchange: "data: <json>" events; the last one is "[DONE]".
 *
 * sse_begin, any number of sse_event, then http_stream_end. Every event is handed to the socket at
 * once. Thread: loop. */
#ifndef BATON_NET_SSE_H
#define BATON_NET_SSE_H

#include "shared/net/http/http_server.h"

/* A stream of JSON lines has the content type of events, since clients of FastDeploy's native
 * protocol know it by that; this header says what it is. */
#define SSE_LINES_HEADER "x-baton-stream"
#define SSE_LINES        "lines"

/* Sends status 200 and headers that keep proxies from buffering events. headers: as in
 * http_stream_begin. */
void sse_begin(struct http_exchange *x, const char *headers);
/* Sends one event. ERR_INVALID: `json` has a line break, which would end the field early; otherwise
 * as http_stream_write. */
enum status sse_event(struct http_exchange *x, struct str json) MUST_CHECK;
/* With "id: <id>" before it, which a client sends as Last-Event-ID; id.n 0: without. */
enum status sse_event_with_id(struct http_exchange *x, struct str id, struct str json) MUST_CHECK;

/* The same for a stream of JSON objects, each of which is a line and nothing more. */
void json_lines_begin(struct http_exchange *x, const char *headers);
enum status json_lines_write(struct http_exchange *x, struct str json) MUST_CHECK;

#endif
