/* group_reach.c - whether the other hosts of a group answer, before an ep object connects to them.
 *
 * A network that was cut off and is back reaches one host after the other: until the kernel has
 * asked again where each is (ARP, once a second), a connection that was begun before may fail.
 * UCX 1.13 ends the process, or hangs, if only one of two connections that ranks make to each other
 * fails. So one rank of each host is connected to, again and again, and left without a word; the
 * epoch of a host that does not answer is given up, and the next one asks again.
 * Thread: the one that makes the ep object. */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/cluster/group_internal.h"
#include "shared/net/loop.h"

enum { REACH_MS = 2000, AGAIN_MS = 250, SLICE_MS = 50 };

/* A host that has not answered yet. */
struct knock {
    const struct group_member *at;
    int fd;        /* -1: none */
    uint64_t t_ms; /* of the last try; 0: there was none */
};

static void end(struct knock *k)
{
    if (k->fd >= 0) close(k->fd);
    k->fd = -1;
}

static void begin(struct knock *k)
{
    struct sockaddr_storage to;
    k->t_ms = clock_ms();
    if (uv_ip4_addr(k->at->host, k->at->port, (struct sockaddr_in *)&to) != 0 &&
        uv_ip6_addr(k->at->host, k->at->port, (struct sockaddr_in6 *)&to) != 0)
        return;
    k->fd = socket(to.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (k->fd >= 0 && connect(k->fd, (struct sockaddr *)&to, sizeof to) != 0 &&
        errno != EINPROGRESS)
        end(k);
}

/* Is there an answer? One that refuses is there, too. */
static bool is_answered(struct knock *k, short events)
{
    int e = 0;
    socklen_t n = sizeof e;
    if (k->fd < 0 || !events) return false;
    if (getsockopt(k->fd, SOL_SOCKET, SO_ERROR, &e, &n) != 0) e = errno;
    end(k);
    return e == 0 || e == ECONNREFUSED;
}

/* One rank of each other host. */
static size_t choose(const struct group_roster *r, uint32_t me, struct knock *out)
{
    size_t n = 0;
    for (uint32_t i = 0; i < r->n; i++) {
        const struct group_member *m = &r->members[i];
        bool is_new = m->port != 0 && strcmp(m->host, r->members[me].host) != 0;
        for (size_t k = 0; k < n; k++) is_new = is_new && strcmp(out[k].at->host, m->host) != 0;
        if (is_new) out[n++] = (struct knock){ .at = m, .fd = -1 };
    }
    return n;
}

/* Waits for a moment. Returns how many have not answered, which are the first of `k` then. */
static size_t knock_once(struct knock *k, size_t n, struct pollfd *p)
{
    size_t left = 0;
    for (size_t i = 0; i < n; i++) {
        if (clock_ms() - k[i].t_ms > AGAIN_MS) {
            end(&k[i]);
            begin(&k[i]);
        }
        p[i] = (struct pollfd){ .fd = k[i].fd, .events = POLLOUT };
    }
    (void)poll(p, n, SLICE_MS);
    for (size_t i = 0; i < n; i++)
        if (!is_answered(&k[i], p[i].revents)) k[left++] = k[i];
    return left;
}

enum status group_reach(struct group *g, const struct group_roster *r, uint32_t me, struct err *err)
{
    enum status st = OK;
    struct knock *k = MEM_ARRAY(struct knock, r->n);
    struct pollfd *p = MEM_ARRAY(struct pollfd, r->n);
    const uint64_t until = clock_ms() + REACH_MS;
    size_t n = choose(r, me, k);
    while (n > 0 && clock_ms() < until && group_prepares(g, r->epoch)) n = knock_once(k, n, p);
    if (n > 0 && group_prepares(g, r->epoch))
        st = err_set(err, ERR_PEER_LOST, "the host of rank %u does not answer at %s:%u",
                     k[0].at->rank, k[0].at->host, k[0].at->port);
    for (size_t i = 0; i < n; i++) end(&k[i]);
    mem_free(p);
    mem_free(k);
    return st;
}
