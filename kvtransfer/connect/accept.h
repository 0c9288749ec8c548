/* accept.h - accepts connections without spinning when the descriptor table is full. Used by local,
 * tcp and control.
 *
 * A connection that cannot be accepted stays in the backlog and keeps the listener readable, so the
 * listener is not watched for a moment (*again_ms says until when; 0: it is watched). The listener
 * is in the epoll set with data.ptr NULL. Thread: transfer. */
#ifndef BATON_KVTRANSFER_CONNECT_ACCEPT_H
#define BATON_KVTRANSFER_CONNECT_ACCEPT_H

#include <stdint.h>

/* Returns the next connection, non-blocking and close-on-exec, owned by the caller. -1: none, or
 * (*again_ms is set) no descriptor is free, which is logged with the transport's name. Skips
 * connections that ended before they were accepted (accept(2)). */
int kvt_accept(const char *transport, int epoll_fd, int listen_fd, uint64_t *again_ms);
/* Watches the listener again when *again_ms has passed. */
void kvt_accept_resume(int epoll_fd, int listen_fd, uint64_t *again_ms, uint64_t now_ms);

#endif
