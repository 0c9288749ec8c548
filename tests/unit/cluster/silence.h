/* silence.h - a port of which nothing is heard, as of a host that is cut off: its queue of
 * connections is full, so the kernel answers no more of them. At all addresses of this host. */
#ifndef BATON_TESTS_UNIT_CLUSTER_SILENCE_H
#define BATON_TESTS_UNIT_CLUSTER_SILENCE_H

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"

struct silence {
    int listener, waiting[8];
};

static void be_silent(struct silence *s, uint16_t port)
{
    const struct sockaddr_in at = { .sin_family = AF_INET,
                                    .sin_port = htons(port),
                                    .sin_addr.s_addr = htonl(INADDR_ANY) };
    const int one = 1;
    s->listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(setsockopt(s->listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0);
    CHECK(bind(s->listener, (const struct sockaddr *)&at, sizeof at) == 0);
    CHECK(listen(s->listener, 0) == 0);
    for (size_t i = 0; i < COUNT_OF(s->waiting); i++) {
        s->waiting[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)connect(s->waiting[i], (const struct sockaddr *)&at, sizeof at);
    }
}

static void be_heard(struct silence *s)
{
    for (size_t i = 0; i < COUNT_OF(s->waiting); i++) close(s->waiting[i]);
    close(s->listener);
}

#endif
