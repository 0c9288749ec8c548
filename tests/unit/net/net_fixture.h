/* net_fixture.h - for tests of shared/net: a loop on its own thread, and blocking sockets on the
 * test's thread. */
#ifndef BATON_TESTS_NET_FIXTURE_H
#define BATON_TESTS_NET_FIXTURE_H

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/base/buf.h"
#include "shared/base/clock.h"
#include "shared/base/thread.h"
#include "shared/net/loop.h"
#include "tests/harness/test.h"

struct fixture_call {
    void (*fn)(void *arg);
    void *arg;
    sem_t done;
};

static void *fixture_thread(void *arg)
{
    loop_run(arg);
    return NULL;
}

static inline pthread_t fixture_start(struct loop **l)
{
    pthread_t t;
    CHECK_OK(loop_create(l, NULL));
    CHECK_OK(thread_start(&t, fixture_thread, *l));
    return t;
}

static void fixture_call_run(void *arg)
{
    struct fixture_call *c = arg;
    c->fn(c->arg);
    sem_post(&c->done);
}

/* Runs fn(arg) on the loop and waits for it. */
static inline void fixture_on_loop(struct loop *l, void (*fn)(void *arg), void *arg)
{
    struct fixture_call c = { .fn = fn, .arg = arg };
    sem_init(&c.done, 0, 0);
    CHECK_OK(loop_post(l, fixture_call_run, &c));
    while (sem_wait(&c.done) != 0) {}
    sem_destroy(&c.done);
}

static inline void fixture_stop(struct loop *l, pthread_t t)
{
    loop_stop(l);
    pthread_join(t, NULL);
    loop_free(l);
}

static inline int fixture_listen(uint16_t *port)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    CHECK(bind(fd, (struct sockaddr *)&a, sizeof a) == 0);
    CHECK(listen(fd, 16) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&a, &n) == 0);
    *port = ntohs(a.sin_port);
    return fd;
}

/* As a client of the address 127.0.0.`host`. */
static inline int fixture_dial_as(uint16_t port, unsigned host)
{
    struct sockaddr_in own = { .sin_family = AF_INET, .sin_addr = { htonl(0x7F000000 + host) } };
    struct sockaddr_in a = {
        .sin_family = AF_INET,
        .sin_port = htons(port),
        .sin_addr = { htonl(INADDR_LOOPBACK) },
    };
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    CHECK(bind(fd, (struct sockaddr *)&own, sizeof own) == 0);
    CHECK(connect(fd, (struct sockaddr *)&a, sizeof a) == 0);
    return fd;
}

static inline int fixture_dial(uint16_t port) { return fixture_dial_as(port, 1); }

/* Returns false when the peer has closed. */
static inline bool fixture_send(int fd, const void *p, size_t n)
{
    for (size_t at = 0; at < n;) {
        ssize_t k = send(fd, (const char *)p + at, n - at, MSG_NOSIGNAL);
        if (k <= 0) return false;
        at += (size_t)k;
    }
    return true;
}

/* Reads `n` more bytes into b (SIZE_MAX: all), for at most timeout_ms. Returns whether the stream
 * ended. */
static inline bool fixture_read(int fd, struct buf *b, size_t n, int timeout_ms)
{
    uint64_t end = clock_ms() + (uint64_t)timeout_ms;
    while (n > 0) {
        uint64_t now = clock_ms();
        struct pollfd p = { .fd = fd, .events = POLLIN };
        if (now >= end || poll(&p, 1, (int)(end - now)) <= 0) return false;
        char *at = buf_reserve(b, 65536);
        ssize_t k = recv(fd, at, n < 65536 ? n : 65536, 0);
        if (k <= 0) return true;
        b->len += (size_t)k;
        at[k] = 0;
        if (n != SIZE_MAX) n -= (size_t)k;
    }
    return false;
}

/* Reads until `text` appears after position `from`. */
static inline void fixture_read_until(int fd, struct buf *b, size_t from, const char *text)
{
    uint64_t end = clock_ms() + 10000;
    while (b->len <= from || !strstr(b->data + from, text)) {
        bool over = fixture_read(fd, b, 1, 5000);
        if ((over || clock_ms() > end) && (b->len <= from || !strstr(b->data + from, text)))
            test_fail(__FILE__, __LINE__, "\"%s\" did not come; got \"%s\"", text,
                      b->data ? b->data : "");
    }
}

#endif
