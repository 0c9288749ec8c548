/* port_claim.c - see port_claim.h. */
#include "shared/base/address/port_claim.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "shared/base/mem.h"

bool port_is_free(uint16_t port)
{
    struct sockaddr_in sa = {
        .sin_family = AF_INET,
        .sin_addr.s_addr = htonl(INADDR_ANY),
        .sin_port = htons(port),
    };
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool ok = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
              bind(fd, (struct sockaddr *)&sa, sizeof sa) == 0 && listen(fd, 1) == 0;
    if (fd >= 0) close(fd);
    return ok;
}

/* The name is an abstract one (unix(7)): no file stays, and it ends with the process. Where there
 * are no such sockets nothing is claimed, and the process that finds its port taken reports it. */
bool port_claim(struct port_claims *c, uint16_t port)
{
    struct sockaddr_un name = { .sun_family = AF_UNIX };
    const int n = snprintf(name.sun_path + 1, sizeof name.sun_path - 1, "baton-port-%u", port);
    const socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return true;
    if (bind(fd, (struct sockaddr *)&name, bytes) != 0) {
        const bool is_taken = errno == EADDRINUSE;
        close(fd);
        return !is_taken;
    }
    c->fds = mem_realloc(c->fds, c->n + 1, sizeof *c->fds);
    c->fds[c->n++] = fd;
    return true;
}

void port_claims_release(struct port_claims *c)
{
    for (size_t i = 0; i < c->n; i++) close(c->fds[i]);
    mem_free(c->fds);
    *c = (struct port_claims){ 0 };
}
