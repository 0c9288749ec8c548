/* http_backlog.h - bounds the answer bytes that the connections of one server hold together for
 * clients that have not read them yet.
 *
 * What the kernel takes at once is not counted, so small answers to clients that read never wait
 * for others. Past the limit the connections that took the least for the longest are cut: those
 * that took less than HTTP_PACE_BYTES within HTTP_STALL_MS, the oldest first. While there is none,
 * a whole answer is replaced by a 503 and a streamed one is cut. One connection alone may hold any
 * answer, so that no limit makes an answer impossible.
 * Owner: the server. Thread: loop. */
#ifndef BATON_NET_HTTP_HTTP_BACKLOG_H
#define BATON_NET_HTTP_HTTP_BACKLOG_H

#include <stdint.h>

#include "shared/base/list.h"
#include "shared/base/metrics.h"

enum { HTTP_PACE_BYTES = 64 * 1024, HTTP_STALL_MS = 1000 };

struct http_conn;

struct http_backlog {
    size_t max_bytes, n_bytes; /* n_bytes: sum of the shares */
    struct list conns;         /* of http_backlog_share.link, by t_pace */
    struct gauge *m_bytes;
    struct counter *m_cut, *m_refused; /* may be NULL */
};

/* What one connection holds. */
struct http_backlog_share {
    struct list link; /* in the list while n_bytes > 0 */
    size_t n_bytes;
    uint64_t n_queued; /* bytes that the kernel did not take at once, ever */
    uint64_t n_taken;  /* of them, those that it had taken at t_pace */
    uint64_t t_pace;   /* uv_now when HTTP_PACE_BYTES had been taken since the time before */
};

void http_backlog_init(struct http_backlog *b, size_t max_bytes, struct metrics *m);
/* Makes room for n more bytes of this connection, by cutting others. False: there is none. */
bool http_backlog_admit(struct http_conn *c, size_t n);
/* Counts what the connection's buffers hold now; after each change of them. */
void http_backlog_update(struct http_conn *c);
/* The connection holds nothing any more. */
void http_backlog_leave(struct http_conn *c);

#endif
