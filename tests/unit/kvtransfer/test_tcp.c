/* test_tcp.c - the tcp row alone, against a receiver played by hand: what the kernel lets go of, and what is told after an end. */
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "kvtransfer/rows.h"
#include "kvtransfer/tcp.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { CALLS_BEFORE_WRAP = 3 };

/* Notices of MSG_ZEROCOPY in any order: a call is over when all before it are, also where the numbers begin again. */
TEST(tcp_zerocopy_notices_in_any_order)
{
    for (int wraps = 0; wraps < 2; wraps++) {
        uint32_t at = wraps ? UINT32_MAX - CALLS_BEFORE_WRAP + 1 : 0;
        struct tcp_link l = { .zc_sent = at + 8, .zc_done = at };
        tcp_let_go(&l, at + 1, at + 1);
        CHECK_EQ_INT(l.zc_done - at, 0); /* call 0 may still be sent again */
        tcp_let_go(&l, at + 4, at + 6);
        CHECK_EQ_INT(l.zc_done - at, 0);
        tcp_let_go(&l, at, at);
        CHECK_EQ_INT(l.zc_done - at, 2);
        tcp_let_go(&l, at + 2, at + 3);
        CHECK_EQ_INT(l.zc_done - at, 7);
        tcp_let_go(&l, at + 2, at + 3); /* of the past */
        CHECK_EQ_INT(l.zc_done - at, 7);
        tcp_let_go(&l, at + 7, at + 7);
        CHECK_EQ_INT(l.zc_done, l.zc_sent);
        for (size_t i = 0; i < COUNT_OF(l.zc_early); i++) CHECK(l.zc_early[i] == 0);
    }
}

/* ---- a receiver by hand ---- */

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

static enum status admit(void *arg, const uint8_t ticket[KVT_TICKET_BYTES]) { (void)arg, (void)ticket; return ERR_UNAUTHORIZED; }

static size_t poll_once(struct kvt_transport *t, struct kvt_incident *out, size_t cap)
{
    size_t n = 0;
    for (uint64_t end = clock_ms() + 3000; n == 0 && clock_ms() < end;) n = t->ops->poll(t, out, cap);
    return n;
}

/* Take the ticket of one connection and say that there are n_links. */
static int welcome(struct kvt_transport *t, int listener, uint32_t n_links)
{
    uint8_t bytes[KVT_PREAMBLE_BYTES];
    struct kvt_incident in[4];
    CHECK_EQ_INT(t->ops->poll(t, in, COUNT_OF(in)), 0); /* the ticket leaves */
    int fd = accept(listener, NULL, NULL);
    CHECK(fd >= 0);
    CHECK_EQ_INT(recv(fd, bytes, sizeof bytes, MSG_WAITALL), sizeof bytes);
    kvt_preamble_encode(&(struct kvt_preamble){ .kind = KVT_PREAMBLE_WELCOME, .value = n_links }, bytes);
    CHECK_EQ_INT(send(fd, bytes, sizeof bytes, MSG_NOSIGNAL), sizeof bytes);
    return fd;
}

/* One turn of the poll may see both the end of a put and the end of the connection; the session layer frees the connection at DOWN, so a
 * PUT_DONE behind it would name freed memory. */
TEST(tcp_tells_nothing_after_down)
{
    static char pool[8192];
    struct dev_mem mem = { .ptr = pool, .bytes = sizeof pool, .fd = -1 };
    struct kvt_env env = { .mem = &mem, .tuning.tcp_connections = 1, .max_copies = 4, .max_peers = 4, .admit = admit };
    struct kvt_transport *t = NULL;
    struct kvt_conn *conn = NULL;
    struct kvt_incident in[8];
    struct err err = { 0 };
    struct buf address = { 0 };
    uint8_t ticket[KVT_TICKET_BYTES] = { 1 };
    uint16_t port;
    int listener = listen_here(&port);
    CHECK_OK(kvt_tcp_ops.open(&env, &t, &err));
    buf_printf(&address, "127.0.0.1 %u", port);
    CHECK_OK(kvt_tcp_ops.connect(t, buf_str(&address), &env.layout, ticket, &conn, &err));
    int fd = welcome(t, listener, 1);
    CHECK_EQ_INT(poll_once(t, in, COUNT_OF(in)), 1);
    CHECK_EQ_INT(in[0].kind, KVT_UP);

    struct kvt_copy copy = { 0, 0, sizeof pool };
    struct kvt_put put = { .head = { .kind = KVT_MSG_DATA, .n = 1, .bytes = sizeof pool }, .copies = &copy, .n_copies = 1, .tag = 7 };
    CHECK_OK(kvt_tcp_ops.put(conn, &put)); /* the socket takes it whole: PUT_DONE is to be told */
    CHECK_EQ_INT(((struct tcp_transport *)t)->n_done, 1);
    struct tcp_incidents told = { in, 0, COUNT_OF(in) };
    tcp_go_down(&told, (struct tcp_conn *)conn, ERR_PEER_LOST, "another of its sockets ended");
    CHECK_EQ_INT(told.n, 1);
    CHECK_EQ_INT(in[0].kind, KVT_DOWN);
    CHECK_EQ_INT(kvt_tcp_ops.poll(t, in, COUNT_OF(in)), 0);
    kvt_tcp_ops.disconnect(conn);
    kvt_tcp_ops.close(t);
    buf_release(&address);
    close(fd);
    close(listener);
}

TEST_MAIN(CASE(tcp_zerocopy_notices_in_any_order), CASE(tcp_tells_nothing_after_down))
