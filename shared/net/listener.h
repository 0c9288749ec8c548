/* listener.h - a listening TCP socket on the loop: binds, accepts, and ends so that no client is
 * reset.
 *
 *     listener_open ──▶ listener_stop_handshakes ──▶ listener_close
 *                        (only those that had begun)
 *
 * Without descriptors connections wait in the kernel until there are some. Embedded in a server;
 * its memory may go when `closed` has been called. Thread: loop. */
#ifndef BATON_NET_LISTENER_H
#define BATON_NET_LISTENER_H

#include "shared/net/loop.h"

struct listener {
    int fd;        /* -1: closed */
    uint16_t port; /* that it has */
    const char *protocol;
    uv_poll_t poll;
    uv_timer_t retry;
    uint32_t n_handles; /* not yet closed */
    bool waits;         /* connections wait in the kernel; this was said */
    void (*on_connection)(void *arg, int fd);
    void (*closed)(void *arg);
    void *arg;
};

struct listener_options {
    struct loop *loop;
    const char *protocol; /* "http", for the log */
    const char *host;
    uint16_t port;      /* 0: any free one */
    const char *option; /* that chose the port, for the error; NULL: none. Used in the call only */
    bool share_port;    /* with other processes that ask for the same (SO_REUSEPORT) */
    /* Gets each connection's socket, which it owns then. */
    void (*on_connection)(void *arg, int fd);
    void *arg;
};

/* ERR_CONFIG names host and port, and the process that has the port when it is in use; *l is closed
 * then. */
enum status listener_open(struct listener *l, const struct listener_options *o,
                          struct err *err) MUST_CHECK;
/* Lets the kernel drop requests for new connections, which clients repeat after a second; those
 * that it has already established are still accepted. */
void listener_stop_handshakes(struct listener *l);
/* Calls closed(arg) once nothing of it is left; does nothing to one that is closed. */
void listener_close(struct listener *l, void (*closed)(void *arg));

#endif
