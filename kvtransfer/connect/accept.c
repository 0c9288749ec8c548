/* accept.c - see accept.h. */
#include "kvtransfer/connect/accept.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"

enum { ACCEPT_PAUSE_MS = 100 }; /* until some descriptor is closed */

static void watch(int epoll_fd, int listen_fd, bool yes)
{
    struct epoll_event e = { .events = yes ? EPOLLIN : 0u };
    /* cannot fail: both descriptors are ours and listen_fd is in the set */
    (void)epoll_ctl(epoll_fd, EPOLL_CTL_MOD, listen_fd, &e);
}

int kvt_accept(const char *transport, int epoll_fd, int listen_fd, uint64_t *again_ms)
{
    int fd;
    do fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    while (fd < 0 && (errno == ECONNABORTED || errno == EINTR));
    if (fd < 0 && (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)) {
        log_warn("kv connections wait", "transport=%s why=\"%s\" again_ms=%d", transport,
                 strerror(errno), ACCEPT_PAUSE_MS);
        watch(epoll_fd, listen_fd, false);
        *again_ms = clock_ms() + ACCEPT_PAUSE_MS;
    }
    return fd;
}

void kvt_accept_resume(int epoll_fd, int listen_fd, uint64_t *again_ms, uint64_t now_ms)
{
    if (!*again_ms || now_ms < *again_ms) return;
    *again_ms = 0;
    watch(epoll_fd, listen_fd, true);
}
