/* http_listen.c - binds the server's socket. Thread: loop, at start. */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/base/address/port.h"
#include "shared/net/http/http_conn.h"

enum { LISTEN_BACKLOG = 1024 };

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

/* libuv 1.44 cannot ask for a shared port, so the socket is made here. Returns 0 or its code. */
static int bind_shared(uv_tcp_t *listener, const struct sockaddr_storage *a)
{
    const int one = 1;
    const socklen_t n = a->ss_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                                 : sizeof(struct sockaddr_in);
    int fd = socket(a->ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), rc = 0;
    if (fd < 0) return -errno;
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one) != 0 ||
        bind(fd, (const struct sockaddr *)a, n) != 0)
        rc = -errno;
    if (rc == 0) rc = uv_tcp_open(listener, fd);
    if (rc != 0) close(fd);
    return rc;
}

enum status http_listen(uv_tcp_t *listener, const struct http_server_options *o,
                        uv_connection_cb cb, uint16_t *bound, struct err *err)
{
    struct sockaddr_storage a = { 0 };
    TRY(listen_resolve(o->host, o->port, &a, err));
    /* libuv sets SO_REUSEADDR (a restart finds its port) and not SO_REUSEPORT (two servers must not
     * share one by accident). */
    int rc = o->share_port ? bind_shared(listener, &a)
                           : uv_tcp_bind(listener, (const struct sockaddr *)&a, 0);
    if (rc == 0) rc = uv_listen((uv_stream_t *)listener, LISTEN_BACKLOG, cb);
    if (rc != 0) return port_fail(-rc, o->host, o->port, o->option, err);
    int n = sizeof a;
    rc = uv_tcp_getsockname(listener, (struct sockaddr *)&a, &n);
    if (rc != 0) return port_fail(-rc, o->host, o->port, o->option, err);
    *bound = ntohs(a.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&a)->sin6_port
                                           : ((struct sockaddr_in *)&a)->sin_port);
    return OK;
}
