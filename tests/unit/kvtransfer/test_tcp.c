/* test_tcp.c - transport tcp alone, against a hand-made receiver: zero-copy completions, and the
 * events at the end of a connection. */
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kvtransfer/tcp/tcp.h"
#include "kvtransfer/transports.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { CALLS_BEFORE_WRAP = 3 };

/* MSG_ZEROCOPY completions in any order: a call is complete when all earlier calls are, also where
 * the counter wraps around. */
TEST(tcp_zerocopy_notices_in_any_order)
{
    for (int wraps = 0; wraps < 2; wraps++) {
        uint32_t at = wraps ? UINT32_MAX - CALLS_BEFORE_WRAP + 1 : 0;
        struct tcp_link l = { .zc_sent = at + 8, .zc_done = at };
        tcp_zerocopy_completed(&l, at + 1, at + 1);
        CHECK_EQ_INT(l.zc_done - at, 0); /* call 0 may still be sent again */
        tcp_zerocopy_completed(&l, at + 4, at + 6);
        CHECK_EQ_INT(l.zc_done - at, 0);
        tcp_zerocopy_completed(&l, at, at);
        CHECK_EQ_INT(l.zc_done - at, 2);
        tcp_zerocopy_completed(&l, at + 2, at + 3);
        CHECK_EQ_INT(l.zc_done - at, 7);
        tcp_zerocopy_completed(&l, at + 2, at + 3); /* reported before */
        CHECK_EQ_INT(l.zc_done - at, 7);
        tcp_zerocopy_completed(&l, at + 7, at + 7);
        CHECK_EQ_INT(l.zc_done, l.zc_sent);
        for (size_t i = 0; i < COUNT_OF(l.zc_early); i++) CHECK(l.zc_early[i] == 0);
    }
}

/* ---- a hand-made receiver ---- */

static int listen_here(uint16_t *port)
{
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof a) == 0 && listen(fd, 8) == 0);
    CHECK_OK(getsockname(fd, (struct sockaddr *)&a, &n));
    *port = ntohs(a.sin_port);
    return fd;
}

static enum status admit(void *arg, const uint8_t ticket[KVT_TICKET_BYTES])
{
    (void)arg, (void)ticket;
    return ERR_UNAUTHORIZED;
}

static size_t poll_once(struct kvt_transport *t, struct kvt_transport_event *out, size_t cap)
{
    size_t n = 0;
    for (uint64_t end = clock_ms() + 3000; n == 0 && clock_ms() < end;)
        n = t->ops->poll(t, out, cap);
    return n;
}

/* Accepts one connection's ticket and answers with n_links. */
static int welcome(struct kvt_transport *t, int listener, uint32_t n_links)
{
    uint8_t bytes[KVT_PREAMBLE_BYTES];
    struct kvt_transport_event in[4];
    CHECK_EQ_INT(t->ops->poll(t, in, COUNT_OF(in)), 0); /* sends the ticket */
    int fd = accept(listener, NULL, NULL);
    CHECK(fd >= 0);
    CHECK_EQ_INT(recv(fd, bytes, sizeof bytes, MSG_WAITALL), sizeof bytes);
    kvt_preamble_encode(&(struct kvt_preamble){ .kind = KVT_PREAMBLE_WELCOME, .value = n_links },
                        bytes);
    CHECK_EQ_INT(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL), sizeof bytes);
    return fd;
}

struct by_hand {
    struct dev_mem mem;
    struct kvt_env env;
    struct kvt_transport *t;
    struct kvt_conn *conn;
    int fd, listener;
};

/* Opens the transport with pool[bytes] and connects it to this test as the receiver. */
static void connect_by_hand(struct by_hand *h, void *pool, size_t bytes)
{
    struct kvt_transport_event in[4];
    struct err err = { 0 };
    struct buf address = { 0 };
    uint8_t ticket[KVT_TICKET_BYTES] = { 1 };
    uint16_t port;
    h->mem = (struct dev_mem){ .ptr = pool, .bytes = bytes, .fd = -1 };
    h->env = (struct kvt_env){
        .mem = &h->mem, .tuning.tcp_connections = 1, .max_copies = 4, .max_peers = 4, .admit = admit
    };
    h->listener = listen_here(&port);
    CHECK_OK(kvt_tcp_ops.open(&h->env, &h->t, &err));
    buf_printf(&address, "127.0.0.1 %u", port);
    CHECK_OK(kvt_tcp_ops.connect(h->t, buf_str(&address), &h->env.layout, ticket, &h->conn, &err));
    h->fd = welcome(h->t, h->listener, 1);
    CHECK_EQ_INT(poll_once(h->t, in, COUNT_OF(in)), 1);
    CHECK_EQ_INT(in[0].kind, KVT_UP);
    buf_release(&address);
}

static enum status put_pool(struct by_hand *h)
{
    struct kvt_copy copy = { 0, 0, h->mem.bytes };
    struct kvt_put put = {
        .head = { .kind = KVT_MSG_DATA, .n = 1, .bytes = h->mem.bytes },
        .copies = &copy,
        .n_copies = 1,
        .tag = 7,
    };
    return kvt_tcp_ops.put(h->conn, &put);
}

static void end_by_hand(struct by_hand *h)
{
    kvt_tcp_ops.disconnect(h->conn);
    kvt_tcp_ops.close(h->t);
    close(h->fd);
    close(h->listener);
}

/* One poll may see both the end of a put and the end of the connection. The session layer frees the
 * connection at DOWN, so a later PUT_DONE would name freed memory. */
TEST(tcp_tells_nothing_after_down)
{
    static char pool[8192];
    struct by_hand h;
    struct kvt_transport_event in[8];
    connect_by_hand(&h, pool, sizeof pool);
    CHECK_OK(put_pool(&h)); /* the socket accepts it whole: PUT_DONE is due */
    CHECK_EQ_INT(((struct tcp_transport *)h.t)->n_done, 1);
    struct tcp_events told = { in, 0, COUNT_OF(in) };
    tcp_go_down(&told, (struct tcp_conn *)h.conn, ERR_PEER_LOST, "another of its sockets ended");
    CHECK_EQ_INT(told.n, 1);
    CHECK_EQ_INT(in[0].kind, KVT_DOWN);
    CHECK_EQ_INT(kvt_tcp_ops.poll(h.t, in, COUNT_OF(in)), 0);
    end_by_hand(&h);
}

/* A send that fails for a local reason (here an unreadable source) leaves the socket alive. The
 * connection must end, so that the put ends. */
TEST(tcp_failed_send_ends_the_connection)
{
    enum { PAGE = 4096 };
    struct by_hand h;
    struct kvt_transport_event in[4];
    void *pool = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pool != MAP_FAILED);
    connect_by_hand(&h, pool, PAGE);
    CHECK_OK(put_pool(&h));
    CHECK_EQ_INT(poll_once(h.t, in, COUNT_OF(in)), 1);
    CHECK_EQ_INT(in[0].kind, KVT_DOWN);
    end_by_hand(&h);
    munmap(pool, PAGE);
}

static enum status admit_all(void *arg, const uint8_t ticket[KVT_TICKET_BYTES])
{
    (void)arg, (void)ticket;
    return OK;
}

TEST(tcp_half_open_connections_keep_no_sender_out)
{
    enum { STRANGERS = 12 };
    static char pool[4096];
    struct dev_mem mem = { .ptr = pool, .bytes = sizeof pool, .fd = -1 };
    struct kvt_env env = {
        .mem = &mem, .max_copies = 4, .max_peers = 4, .listen_host = "127.0.0.1", .admit = admit_all
    };
    struct kvt_transport *to, *from;
    struct kvt_transport_event in[8];
    struct kvt_conn *conn;
    struct err err = { 0 };
    struct buf address = { 0 };
    uint8_t ticket[KVT_TICKET_BYTES] = { 1 };
    int fds[STRANGERS];
    bool up = false;
    CHECK_OK(kvt_tcp_ops.open(&env, &to, &err));
    CHECK_OK(kvt_tcp_ops.open(&env, &from, &err));
    struct sockaddr_in a = {
        .sin_family = AF_INET,
        .sin_port = htons(kvt_tcp_ops.port(to)),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    for (int i = 0; i < STRANGERS; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        CHECK_OK(connect(fds[i], (struct sockaddr *)&a, sizeof a));
        CHECK_EQ_INT(kvt_tcp_ops.poll(to, in, COUNT_OF(in)), 0);
    }
    CHECK(((struct tcp_transport *)to)->strangers.n <= 4);
    kvt_tcp_ops.export_address(to, &address);
    CHECK_OK(kvt_tcp_ops.connect(from, buf_str(&address), &env.layout, ticket, &conn, &err));
    for (uint64_t end = clock_ms() + 1000; !up && clock_ms() < end;) {
        (void)kvt_tcp_ops.poll(to, in, COUNT_OF(in));
        up = kvt_tcp_ops.poll(from, in, COUNT_OF(in)) == 1 && in[0].kind == KVT_UP;
    }
    CHECK(up); /* before the strangers' deadline */
    for (int i = 0; i < STRANGERS; i++) close(fds[i]);
    buf_release(&address);
    kvt_tcp_ops.close(from);
    kvt_tcp_ops.close(to);
}

TEST_MAIN(CASE(tcp_zerocopy_notices_in_any_order), CASE(tcp_tells_nothing_after_down),
          CASE(tcp_failed_send_ends_the_connection),
          CASE(tcp_half_open_connections_keep_no_sender_out))
