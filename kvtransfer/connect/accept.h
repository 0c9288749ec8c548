/* accept.h - taking connections from a listener that a full descriptor table must not turn into a
 * busy loop. Used by local, tcp and control.
 *
 * A connection that cannot be taken stays in the backlog and keeps the listener readable; the
 * listener is then left alone for a moment (*again_ms says until when; 0: it is watched). The
 * listener is in the epoll set with data.ptr NULL. Thread: transfer. */
#ifndef BATON_KVTRANSFER_CONNECT_ACCEPT_H
#define BATON_KVTRANSFER_CONNECT_ACCEPT_H

#include <stdint.h>

/* The next connection, non-blocking, close-on-exec, the caller's; -1: none, or (*again_ms is set)
 * no descriptor for it, which the log says with the name of the row. Connections that went before
 * they were taken (accept(2)) are passed over. */
int kvt_accept(const char *transport, int epoll_fd, int listen_fd, uint64_t *again_ms);
/* Watch the listener again when its time has come. */
void kvt_accept_resume(int epoll_fd, int listen_fd, uint64_t *again_ms, uint64_t now_ms);

#endif
