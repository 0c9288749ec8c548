/* tcp_stream.c - plain TCP from one probe server to another: the limit of the tcp transport where
 * iperf3 is not installed. See hardware_limits.h. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deploy/probe/hardware_limits.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

enum { BUFFER_BYTES = 256 * 1024, SILENCE_S = 5 };

struct stream_conn {
    pthread_t thread;
    int fd;
    uint64_t n_bytes;         /* bytes to move */
    uint64_t t_first, t_last; /* sink: times of the first and the last byte */
    int error;                /* errno, or 0 */
};

static socklen_t make_address(const char *host, uint16_t port, struct sockaddr_storage *sa)
{
    struct sockaddr_in *v4 = (struct sockaddr_in *)sa;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)sa;
    memset(sa, 0, sizeof *sa);
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        return sizeof *v4;
    }
    if (inet_pton(AF_INET6, host, &v6->sin6_addr) != 1) return 0;
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    return sizeof *v6;
}

static void set_limits(int fd)
{
    struct timeval silence = { .tv_sec = SILENCE_S };
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &silence, sizeof silence);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &silence, sizeof silence);
}

/* ---- receiving ---- */

enum status probe_sink_open(struct probe_sink *s, const char *host, uint16_t *port, struct err *err)
{
    struct sockaddr_storage sa;
    socklen_t len = make_address(host, 0, &sa);
    probe_sink_close(s);
    int fd = len ? socket(sa.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
    if (fd < 0 || bind(fd, (struct sockaddr *)&sa, len) != 0 ||
        listen(fd, PROBE_THREADS_MAX) != 0 || getsockname(fd, (struct sockaddr *)&sa, &len) != 0) {
        int error = errno;
        if (fd >= 0) close(fd);
        return err_set(err, ERR_CONFIG, "cannot listen on %s for the plain stream: %s", host,
                       strerror(error));
    }
    *port = ntohs(sa.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&sa)->sin6_port
                                           : ((struct sockaddr_in *)&sa)->sin_port);
    s->fd = fd;
    random_bytes(s->ticket, sizeof s->ticket);
    return OK;
}

void probe_sink_close(struct probe_sink *s)
{
    if (s->fd >= 0) close(s->fd);
    s->fd = -1;
}

static void *conn_read(void *arg)
{
    struct stream_conn *c = arg;
    char *buffer = mem_aligned(4096, BUFFER_BYTES);
    for (uint64_t got = 0; got < c->n_bytes && !c->error;) {
        uint64_t left = c->n_bytes - got;
        ssize_t n = recv(c->fd, buffer, left < BUFFER_BYTES ? (size_t)left : BUFFER_BYTES, 0);
        if (n <= 0) c->error = n == 0 ? ECONNRESET : errno;
        else got += (uint64_t)n;
        if (c->t_first == 0) c->t_first = clock_ns();
    }
    c->t_last = clock_ns();
    mem_free(buffer);
    return NULL;
}

/* Accepts one connection that presents the ticket; closes others and waits on. */
static int accept_conn(const struct probe_sink *s, uint64_t deadline_ms)
{
    uint8_t ticket[PROBE_STREAM_TICKET];
    for (;;) {
        uint64_t now = clock_ms();
        struct pollfd p = { .fd = s->fd, .events = POLLIN };
        if (now >= deadline_ms || poll(&p, 1, (int)(deadline_ms - now)) != 1) return -1;
        int fd = accept4(s->fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0) continue;
        set_limits(fd);
        if (recv(fd, ticket, sizeof ticket, MSG_WAITALL) == sizeof ticket &&
            equal_constant_time(ticket, s->ticket, sizeof ticket))
            return fd;
        close(fd);
    }
}

/* Runs `work` on every connection, the first on this thread, and returns the first error. */
static int run_conns(struct stream_conn *conns, uint32_t n, void *(*work)(void *))
{
    int error = 0;
    uint32_t started = 1;
    while (started < n && thread_start(&conns[started].thread, work, &conns[started]) == OK)
        started++;
    if (started == n) work(&conns[0]);
    for (uint32_t i = 1; i < started; i++) pthread_join(conns[i].thread, NULL);
    if (started < n) return EAGAIN;
    for (uint32_t i = 0; i < n; i++)
        if (conns[i].error) error = conns[i].error;
    return error;
}

enum status probe_sink_drain(struct probe_sink *s, uint32_t n, uint64_t n_bytes, uint64_t *ns,
                             struct err *err)
{
    struct stream_conn conns[PROBE_THREADS_MAX] = { 0 };
    uint64_t deadline = clock_ms() + SILENCE_S * 1000, first = UINT64_MAX, last = 0;
    uint32_t n_open = 0;
    if (n < 1) n = 1;
    if (s->fd < 0) return err_set(err, ERR_INVALID, "drain before listen");
    for (; n_open < n; n_open++) {
        conns[n_open] = (struct stream_conn){
            .fd = accept_conn(s, deadline),
            .n_bytes = n_bytes / n,
        };
        if (conns[n_open].fd < 0) break;
    }
    int error = n_open < n ? ETIMEDOUT : run_conns(conns, n, conn_read);
    for (uint32_t i = 0; i < n_open; i++) {
        close(conns[i].fd);
        if (conns[i].t_first < first) first = conns[i].t_first;
        if (conns[i].t_last > last) last = conns[i].t_last;
    }
    probe_sink_close(s);
    if (error) return err_set(err, ERR_IO, "the plain stream ended early: %s", strerror(error));
    *ns = last - first;
    return OK;
}

/* ---- sending ---- */

static void *conn_write(void *arg)
{
    struct stream_conn *c = arg;
    char *buffer = mem_aligned(4096, BUFFER_BYTES);
    memset(buffer, 1, BUFFER_BYTES);
    for (uint64_t sent = 0; sent < c->n_bytes && !c->error;) {
        uint64_t left = c->n_bytes - sent;
        ssize_t n = send(c->fd, buffer, left < BUFFER_BYTES ? (size_t)left : BUFFER_BYTES,
                         MSG_NOSIGNAL);
        if (n <= 0) c->error = errno;
        else sent += (uint64_t)n;
    }
    mem_free(buffer);
    return NULL;
}

static int connect_conn(const char *address, uint16_t port, struct str ticket)
{
    struct sockaddr_storage sa;
    socklen_t len = make_address(address, port, &sa);
    int one = 1, fd = len ? socket(sa.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0) : -1;
    if (fd < 0) return -1;
    set_limits(fd); /* SO_SNDTIMEO bounds connect too */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(fd, (struct sockaddr *)&sa, len) == 0 &&
        send(fd, ticket.p, ticket.n, MSG_NOSIGNAL) == (ssize_t)ticket.n)
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

enum status probe_stream(const char *address, uint16_t port, struct str ticket, uint32_t n,
                         uint64_t n_bytes, struct err *err)
{
    struct stream_conn conns[PROBE_THREADS_MAX] = { 0 };
    uint32_t n_open = 0;
    int error = 0;
    if (n < 1) n = 1;
    if (ticket.n != PROBE_STREAM_TICKET)
        return err_set(err, ERR_INVALID, "a stream's ticket has %d bytes", PROBE_STREAM_TICKET);
    for (; n_open < n && !error; n_open++) {
        conns[n_open] = (struct stream_conn){
            .fd = connect_conn(address, port, ticket),
            .n_bytes = n_bytes / n,
        };
        if (conns[n_open].fd < 0) error = errno ? errno : EINVAL;
    }
    if (!error) error = run_conns(conns, n, conn_write);
    for (uint32_t i = 0; i < n_open; i++)
        if (conns[i].fd >= 0) close(conns[i].fd);
    if (error)
        return err_set(err, ERR_IO, "the plain stream to %s:%u: %s", address, port,
                       strerror(error));
    return OK;
}
