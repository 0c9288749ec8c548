/* listener.c - see listener.h. Thread: loop. */
#include "shared/net/listener.h"

#include <errno.h>
#include <linux/filter.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/base/address/port.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    LISTEN_BACKLOG = 1024,
    ACCEPT_TURN = 64, /* connections in one turn of the loop */
    ACCEPT_RETRY_MS = 100
};

static enum status listen_resolve(const char *host, uint16_t port, struct sockaddr_storage *out,
                                  struct err *err)
{
    struct addrinfo hints = { .ai_family = AF_UNSPEC,
                              .ai_socktype = SOCK_STREAM,
                              .ai_flags = AI_PASSIVE | AI_NUMERICSERV, },
                    *list = NULL;
    char service[8];
    snprintf(service, sizeof service, "%u", port);
    int rc = getaddrinfo(host, service, &hints, &list);
    if (rc != 0)
        return err_set(err, ERR_CONFIG, "cannot listen on %s:%u: %s", host, port, gai_strerror(rc));
    memcpy(out, list->ai_addr, list->ai_addrlen);
    freeaddrinfo(list);
    return OK;
}

/* Returns a listening socket, or -errno. With SO_REUSEADDR a restart finds its port; two servers
 * must not share one by accident. */
static int listen_at(const struct sockaddr_storage *a, bool shared)
{
    const int one = 1;
    const socklen_t n = a->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                                 : sizeof(struct sockaddr_in);
    const int both = 0; /* IPv4 as well, whatever the host's default is */
    int fd = socket(a->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -errno;
    if (a->ss_family == AF_INET6)
        (void)setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &both, sizeof both);
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
        (!shared || setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one) == 0) &&
        bind(fd, (const struct sockaddr *)a, n) == 0 && listen(fd, LISTEN_BACKLOG) == 0)
        return fd;
    int rc = -errno;
    close(fd);
    return rc;
}

static enum status listen_bound(const struct listener_options *o, int *out, uint16_t *bound,
                                struct err *err)
{
    struct sockaddr_storage a = { 0 };
    TRY(listen_resolve(o->host, o->port, &a, err));
    int fd = listen_at(&a, o->share_port);
    if (fd < 0) return port_fail(-fd, o->host, o->port, o->option, err);
    socklen_t n = sizeof a;
    if (getsockname(fd, (struct sockaddr *)&a, &n) != 0) {
        int code = errno;
        close(fd);
        return port_fail(code, o->host, o->port, o->option, err);
    }
    *out = fd;
    *bound = ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port
                                           : ((struct sockaddr_in *)&a)->sin_port);
    return OK;
}

/* ---- accepting ---- */

static void accept_start(struct listener *l);

static void accept_again(uv_timer_t *t)
{
    struct listener *l = t->data;
    if (l->fd >= 0) accept_start(l);
}

/* libuv's own listener would take and close connections without a descriptor, and their clients had
 * to guess whether a request was read. */
static void accept_wait(struct listener *l, int code)
{
    if (!l->waits)
        log_warn("connections wait", "protocol=%s port=%u retry_ms=%d why=\"%s\"", l->protocol,
                 l->port, ACCEPT_RETRY_MS, strerror(code));
    l->waits = true;
    uv_poll_stop(&l->poll);
    uv_timer_start(&l->retry, accept_again, ACCEPT_RETRY_MS, 0);
}

static void accept_on_readable(uv_poll_t *p, int status, int events)
{
    struct listener *l = p->data;
    (void)events;
    if (status != 0) {
        accept_wait(l, -status);
        return;
    }
    for (int i = 0; i < ACCEPT_TURN && l->fd >= 0; i++) {
        int fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            l->on_connection(l->arg, fd);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            l->waits = false; /* nobody waits any more */
            return;
        } else if (errno != EINTR && errno != ECONNABORTED) {
            accept_wait(l, errno);
            return;
        }
    }
}

static void accept_start(struct listener *l)
{
    uv_poll_start(&l->poll, UV_READABLE, accept_on_readable);
}

enum status listener_open(struct listener *l, const struct listener_options *o, struct err *err)
{
    uv_loop_t *uv = loop_uv(o->loop);
    int fd = -1;
    *l = (struct listener){
        .fd = -1, .protocol = o->protocol, .on_connection = o->on_connection, .arg = o->arg
    };
    TRY(listen_bound(o, &fd, &l->port, err));
    if (uv_poll_init(uv, &l->poll, fd) != 0) {
        close(fd);
        return err_set(err, ERR_INTERNAL, "cannot watch the socket of port %u", l->port);
    }
    uv_timer_init(uv, &l->retry);
    l->poll.data = l->retry.data = l;
    l->n_handles = 2;
    l->fd = fd;
    accept_start(l);
    return OK;
}

/* ---- the end ---- */

/* Segments other than SYNs pass, so handshakes that have begun are finished; accepted connections
 * inherit the filter, and get no SYNs. */
void listener_stop_handshakes(struct listener *l)
{
    enum { TCP_FLAGS = 13, TCP_SYN = 2 };
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_B | BPF_ABS, TCP_FLAGS),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, TCP_SYN, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, 0),
        BPF_STMT(BPF_RET | BPF_K, UINT32_MAX),
    };
    struct sock_fprog filter = { .len = COUNT_OF(code), .filter = code };
    if (l->fd < 0 || setsockopt(l->fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) == 0)
        return;
    /* The listener is closed all the same; a client that connects in that moment is reset. */
    log_debug("listener takes no filter", "protocol=%s port=%u", l->protocol, l->port);
}

static void on_handle_closed(uv_handle_t *h)
{
    struct listener *l = h->data;
    if (--l->n_handles == 0) l->closed(l->arg);
}

void listener_close(struct listener *l, void (*closed)(void *arg))
{
    if (l->fd < 0) return;
    l->closed = closed;
    uv_close((uv_handle_t *)&l->poll, on_handle_closed);
    uv_close((uv_handle_t *)&l->retry, on_handle_closed);
    close(l->fd);
    l->fd = -1;
}
