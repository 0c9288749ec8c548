/* http_listen.c - binds the server's socket, and accepts. Thread: loop. */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/base/address/port.h"
#include "shared/base/log.h"
#include "shared/net/http/http_conn.h"

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

enum status http_listen(const struct http_server_options *o, int *out, uint16_t *bound,
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

static void accept_wait(struct http_server *s, int code);

static void accept_on_readable(uv_poll_t *p, int status, int events)
{
    struct http_server *s = p->data;
    (void)events;
    if (status != 0) {
        accept_wait(s, -status);
        return;
    }
    for (int i = 0; i < ACCEPT_TURN; i++) {
        int fd = accept4(s->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            http_conn_open(s, fd);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            s->accept_waits = false; /* nobody waits any more */
            return;
        } else if (errno != EINTR && errno != ECONNABORTED) {
            accept_wait(s, errno);
            return;
        }
    }
}

static void accept_again(uv_timer_t *t)
{
    struct http_server *s = t->data;
    if (s->listen_fd >= 0) http_accept_start(s);
}

/* Without descriptors connections wait in the kernel until there are some. libuv's own listener
 * would take and close them then, and their clients had to guess whether a request was read. */
static void accept_wait(struct http_server *s, int code)
{
    if (!s->accept_waits)
        log_warn("http connections wait", "port=%u retry_ms=%d why=\"%s\"", s->port,
                 ACCEPT_RETRY_MS, strerror(code));
    s->accept_waits = true;
    uv_poll_stop(&s->listener);
    uv_timer_start(&s->accept_timer, accept_again, ACCEPT_RETRY_MS, 0);
}

void http_accept_start(struct http_server *s)
{
    uv_poll_start(&s->listener, UV_READABLE, accept_on_readable);
}
