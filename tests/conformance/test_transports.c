/* test_transports.c - every transport against the same contract (kvtransfer.h): whole transfers,
 * skips, partly filled blocks, chunks, concurrent transfers, cancels and fences, stale and foreign
 * grants, wrong tickets, restarts, killed senders, flipped bits. A case named *_tcp, *_ipc, ... runs
 * the same body on that transport; a host without an RDMA device skips rdma and ucx. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "kvtransfer/session.h"
#include "kvtransfer/transport.h"
#include "tests/conformance/kvt_fixture.h"

enum { POOL_BLOCKS = 64, TABLE_MAX = 48 };

struct transfer {
    uint64_t id;
    uint32_t n_tokens, n_skip, n_used;
    int32_t src[TABLE_MAX], dst[TABLE_MAX];
    struct buf grant;
};

static struct transfer transfer_grant(struct node *to, uint64_t id, const int32_t *dst,
                                      uint32_t n_tokens, uint32_t n_skip)
{
    struct transfer t = {
        .id = id,
        .n_tokens = n_tokens,
        .n_skip = n_skip,
        .n_used = kvt_plan_n_blocks(&to->layout, n_tokens),
    };
    memcpy(t.dst, dst, sizeof t.dst[0] * t.n_used);
    CHECK_OK(kvt_expect(to->kvt, id, t.dst, t.n_used, n_skip, n_tokens, &t.grant));
    return t;
}

static void transfer_open(struct node *from, uint64_t peer, struct transfer *t, const int32_t *src)
{
    struct err err = { 0 };
    memcpy(t->src, src, sizeof t->src[0] * t->n_used);
    if (kvt_send_open(from->kvt, t->id, peer, buf_str(&t->grant), &err) != OK)
        test_fail(__FILE__, __LINE__, "kvt_send_open: %s", err.text);
    buf_release(&t->grant);
}

/* Pushes all layers of chunk [begin, end). */
static void transfer_chunk(struct node *from, const struct transfer *t, uint32_t begin,
                           uint32_t end)
{
    for (uint32_t layer = 0; layer < from->layout.n_layers; layer++)
        CHECK_OK(kvt_send_ready(from->kvt, t->id, layer, begin, end, t->src));
}

static void fill(struct node *from, const struct transfer *t)
{
    for (uint32_t layer = 0; layer < from->layout.n_layers; layer++)
        fill_layer(from, t->id, layer, t->src, 0, t->n_used);
}

static struct node_options options(const char *protocols)
{
    return (struct node_options){ .layout = small_layout(POOL_BLOCKS), .protocols = protocols };
}

/* Makes one complete transfer over `peer` and checks contents, counts and bytes. */
static void move(struct node *from, struct node *to, uint64_t peer, uint64_t id, uint32_t n_tokens,
                 uint32_t n_skip, uint32_t chunk)
{
    int32_t src[TABLE_MAX], dst[TABLE_MAX];
    uint32_t n_used = kvt_plan_n_blocks(&to->layout, n_tokens);
    random_table(from->layout.n_blocks, n_used, src);
    random_table(to->layout.n_blocks, n_used, dst);
    pool_set(to, 0xee);
    struct transfer t = transfer_grant(to, id, dst, n_tokens, n_skip);
    transfer_open(from, peer, &t, src);
    fill(from, &t);
    for (uint32_t begin = 0; begin < n_tokens; begin += chunk)
        transfer_chunk(from, &t, begin, begin + chunk < n_tokens ? begin + chunk : n_tokens);
    kvt_send_finish(from->kvt, id);
    struct kvt_event got = node_wait(to, KVT_RECEIVED, id, 10000),
                     sent = node_wait(from, KVT_SENT, id, 10000);
    CHECK_EQ_INT(got.bytes, layout_total_bytes(&to->layout, n_tokens, n_skip));
    CHECK_EQ_INT(sent.bytes, got.bytes);
    CHECK_EQ_STR(got.transport, node_transport(from, peer));
    check_blocks_hold(to, id, dst, n_skip, n_tokens, 0xee);
    for (uint32_t b = 0; b < n_skip && b < n_used; b++)
        for (size_t i = 0; i < kv_layout_piece_bytes(&to->layout); i++)
            CHECK_EQ_INT((uint8_t)piece_of(to, 0, dst[b])[i], 0xee);
}

static void whole_transfers(const char *transport)
{
    srand(11);
    struct node_options big = options(transport);
    big.layout.n_blocks = 100; /* pools may differ in size */
    struct node *from = node_start(big), *to = node_start(options(transport));
    uint64_t peer = node_connect(from, to), id = 1;
    CHECK_EQ_STR(node_transport(from, peer), transport);
    const uint32_t tokens[] = { 1, 15, 16, 17, 160, 333, 700 };
    for (size_t i = 0; i < COUNT_OF(tokens); i++) {
        uint32_t n_used = kvt_plan_n_blocks(&to->layout, tokens[i]);
        move(from, to, peer, id++, tokens[i], 0, tokens[i]);
        move(from, to, peer, id++, tokens[i], 0, 24);
        move(from, to, peer, id++, tokens[i], n_used / 2, 7);
        move(from, to, peer, id++, tokens[i], n_used, 64);
    }
    for (int i = 0; i < 30; i++) {
        uint32_t n = 1 + (uint32_t)rand() % (TABLE_MAX * 16 - 1);
        move(from, to, peer, id++, n, (uint32_t)rand() % (kvt_plan_n_blocks(&to->layout, n) + 1),
             1 + (uint32_t)rand() % 200);
    }
    CHECK_EQ_INT(node_count(to, KVT_RECEIVED, 1), 1);
    CHECK_EQ_INT(node_count(from, KVT_SENT, 1), 1);
    node_stop(from);
    node_stop(to);
}

/* 16 transfers interleaved over two connections, from two senders. */
static void many_at_once(const char *transport)
{
    enum { N = 16, BLOCKS = 3, TOKENS = 40 };
    srand(12);
    struct node *to = node_start(options(transport)),
                *senders[2] = { node_start(options(transport)), node_start(options(transport)) };
    uint64_t peers[2] = { node_connect(senders[0], to), node_connect(senders[1], to) };
    int32_t dst[N * BLOCKS], src[2][N * BLOCKS];
    random_table(POOL_BLOCKS, N * BLOCKS, dst);
    for (int s = 0; s < 2; s++) random_table(POOL_BLOCKS, N * BLOCKS, src[s]);
    struct transfer t[N];
    for (uint32_t i = 0; i < N; i++) {
        t[i] = transfer_grant(to, 100 + i, dst + i * BLOCKS, TOKENS, i % 3 == 0);
        transfer_open(senders[i % 2], peers[i % 2], &t[i], src[i % 2] + i * BLOCKS);
        fill(senders[i % 2], &t[i]);
    }
    for (uint32_t begin = 0; begin < TOKENS; begin += 10)
        for (uint32_t i = 0; i < N; i++) transfer_chunk(senders[i % 2], &t[i], begin, begin + 10);
    for (uint32_t i = 0; i < N; i++) kvt_send_finish(senders[i % 2]->kvt, t[i].id);
    for (uint32_t i = 0; i < N; i++) {
        node_wait(to, KVT_RECEIVED, t[i].id, 10000);
        node_wait(senders[i % 2], KVT_SENT, t[i].id, 10000);
        check_blocks_hold(to, t[i].id, t[i].dst, t[i].n_skip, TOKENS, 0);
    }
    node_stop(senders[0]);
    node_stop(to);
    node_stop(senders[1]);
}

/* Cancels before OPEN, in the middle, and after RECEIVED; late pushes change nothing, and the next
 * transfer works. */
static void cancel_and_fence(const char *transport)
{
    struct node *from = node_start(options(transport)), *to = node_start(options(transport));
    uint64_t peer = node_connect(from, to);
    int32_t table[TABLE_MAX];
    random_table(POOL_BLOCKS, 10, table);
    /* before the sender opens: FENCED at once, then the grant is stale */
    struct transfer t = transfer_grant(to, 1, table, 160, 0);
    kvt_expect_cancel(to->kvt, 1);
    CHECK_STATUS(node_wait(to, KVT_RECEIVE_FAILED, 1, 3000).status, ERR_CANCELED);
    node_wait(to, KVT_FENCED, 1, 3000);
    pool_set(to, 0x55);
    transfer_open(from, peer, &t, table);
    transfer_chunk(from, &t, 0, 160);
    CHECK_STATUS(node_wait(from, KVT_SEND_FAILED, 1, 3000).status, ERR_STALE);
    pool_is(to, 0x55);
    /* in the middle */
    t = transfer_grant(to, 2, table, 160, 0);
    transfer_open(from, peer, &t, table);
    transfer_chunk(from, &t, 0, 80);
    pause_ms(20);
    kvt_expect_cancel(to->kvt, 2);
    kvt_expect_cancel(to->kvt, 2);
    node_wait(to, KVT_FENCED, 2, 3000);
    pool_set(to, 0x66);
    transfer_chunk(from, &t, 80, 160);
    kvt_send_finish(from->kvt, 2);
    enum status why = node_wait(from, KVT_SEND_FAILED, 2, 3000).status;
    CHECK(why == ERR_CANCELED || why == ERR_STALE); /* STALE: cancelled before OPEN */
    pause_ms(20);
    pool_is(to, 0x66);
    /* by the sender */
    t = transfer_grant(to, 3, table, 160, 0);
    transfer_open(from, peer, &t, table);
    transfer_chunk(from, &t, 0, 100);
    kvt_send_cancel(from->kvt, 3);
    CHECK_STATUS(node_wait(from, KVT_SEND_FAILED, 3, 3000).status, ERR_CANCELED);
    node_wait(to, KVT_RECEIVE_FAILED, 3, 3000);
    node_wait(to, KVT_FENCED, 3, 3000);
    move(from, to, peer, 4, 160, 0, 160);
    kvt_expect_cancel(to->kvt, 4); /* RECEIVED and the cancel crossed */
    node_wait(to, KVT_FENCED, 4, 3000);
    pause_ms(50);
    for (uint64_t id = 1; id <= 4; id++) {
        CHECK_EQ_INT(node_count(to, KVT_FENCED, id), 1);
        CHECK_EQ_INT(node_count(to, KVT_RECEIVE_FAILED, id) + node_count(to, KVT_RECEIVED, id), 1);
        CHECK_EQ_INT(node_count(from, KVT_SENT, id) + node_count(from, KVT_SEND_FAILED, id), 1);
    }
    node_stop(to);
    node_stop(from);
}

/* Grants of an earlier generation, of another receiver, used twice, and modified. */
static void stale_and_foreign_grants(const char *transport)
{
    struct node *from = node_start(options(transport)), *to = node_start(options(transport)),
                *other = node_start(options(transport));
    uint64_t peer = node_connect(from, to);
    struct err err = { 0 };
    int32_t table[TABLE_MAX];
    random_table(POOL_BLOCKS, 4, table);
    struct transfer t = transfer_grant(other, 1, table, 64, 0);
    transfer_open(from, peer, &t, table);
    CHECK_STATUS(node_wait(from, KVT_SEND_FAILED, 1, 3000).status, ERR_STALE);
    t = transfer_grant(to, 2, table, 64, 0);
    struct buf again = { 0 }, broken = { 0 };
    buf_add_str(&again, buf_str(&t.grant));
    buf_add_str(&broken, buf_str(&t.grant));
    transfer_open(from, peer, &t, table);
    CHECK_OK(kvt_send_open(from->kvt, 3, peer, buf_str(&again), &err));
    node_wait(from, KVT_SEND_FAILED, 3, 3000); /* the grant is bound to the first send */
    fill(from, &t);
    transfer_chunk(from, &t, 0, 64);
    kvt_send_finish(from->kvt, 2);
    node_wait(to, KVT_RECEIVED, 2, 3000);
    CHECK_OK(kvt_send_open(from->kvt, 4, peer, buf_str(&again), &err));
    CHECK_STATUS(node_wait(from, KVT_SEND_FAILED, 4, 3000).status, ERR_STALE);
    broken.data[broken.len - 1] = 0x7f; /* a block number outside the pool */
    CHECK_OK(kvt_send_open(from->kvt, 5, peer, buf_str(&broken), &err));
    CHECK_STATUS(node_wait(from, KVT_SEND_FAILED, 5, 3000).status, ERR_FORMAT);
    CHECK_STATUS(
        kvt_send_open(from->kvt, 6, peer, (struct str){ broken.data, broken.len - 1 }, &err),
        ERR_FORMAT);
    CHECK_OK(kvt_send_open(from->kvt, 7, peer + 1, buf_str(&again), &err));
    CHECK_STATUS(node_wait(from, KVT_SEND_FAILED, 7, 3000).status, ERR_PEER_LOST);
    buf_release(&again);
    buf_release(&broken);
    node_stop(from);
    node_stop(to);
    node_stop(other);
}

static void ticket_is_needed_once(const char *transport)
{
    struct node *from = node_start(options(transport)), *to = node_start(options(transport));
    struct buf hello = { 0 }, answer = { 0 };
    struct err err = { 0 };
    uint64_t peer;
    kvt_hello(from->kvt, &hello);
    CHECK_OK(kvt_answer(to->kvt, buf_str(&hello), &answer, &err));
    answer.data[8] ^= 1; /* first byte of the ticket */
    CHECK_OK(kvt_connect(from->kvt, buf_str(&answer), &peer, &err));
    CHECK_STATUS(node_wait(from, KVT_PEER_LOST, peer, 5000).status, ERR_UNAUTHORIZED);
    answer.data[8] ^= 1;
    CHECK_OK(kvt_connect(from->kvt, buf_str(&answer), &peer, &err));
    node_wait(from, KVT_CONNECTED, peer, 5000);
    CHECK_OK(kvt_connect(from->kvt, buf_str(&answer), &peer, &err));
    CHECK_STATUS(node_wait(from, KVT_PEER_LOST, peer, 5000).status, ERR_UNAUTHORIZED);
    CHECK_EQ_INT(node_count(from, KVT_CONNECTED, peer), 0);
    buf_release(&hello);
    buf_release(&answer);
    node_stop(from);
    node_stop(to);
}

static void mismatch_has_a_sentence(const char *transport)
{
    struct node_options o = options(transport);
    o.layout.head_dim = 64;
    struct node *from = node_start(o), *to = node_start(options(transport));
    struct buf hello = { 0 }, answer = { 0 };
    struct err err = { 0 };
    kvt_hello(from->kvt, &hello);
    CHECK_STATUS(kvt_answer(to->kvt, buf_str(&hello), &answer, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "head_dim") && strstr(err.text, "32") && strstr(err.text, "64"));
    CHECK_EQ_INT(answer.len, 0);
    buf_release(&hello);
    node_stop(from);
    node_stop(to);
}

/* The receiver restarts (tcp: at the same port): the peer is lost, sends fail, and a new connection
 * works. */
static void receiver_restarts(const char *transport)
{
    struct node *from = node_start(options(transport)), *to = node_start(options(transport));
    uint64_t peer = node_connect(from, to);
    int32_t table[TABLE_MAX];
    random_table(POOL_BLOCKS, 10, table);
    struct transfer t = transfer_grant(to, 1, table, 160, 0);
    transfer_open(from, peer, &t, table);
    transfer_chunk(from, &t, 0, 80);
    struct node_options o = options(transport);
    o.port = kvt_port(to->kvt);
    kvt_free(to->kvt);
    node_wait(from, KVT_PEER_LOST, peer, 5000);
    node_gone(to); /* only now: transport mem has a pointer to the pool, and no process ends here */
    CHECK_STATUS(node_wait(from, KVT_SEND_FAILED, 1, 5000).status, ERR_PEER_LOST);
    CHECK(node_transport(from, peer) == NULL);
    to = node_start(o);
    CHECK_EQ_INT(kvt_port(to->kvt), o.port);
    peer = node_connect(from, to);
    move(from, to, peer, 2, 160, 0, 160);
    node_stop(from);
    node_stop(to);
}

/* The sender shuts down while a transfer is in flight. */
static void sender_leaves(const char *transport)
{
    struct node *from = node_start(options(transport)), *to = node_start(options(transport));
    uint64_t peer = node_connect(from, to);
    int32_t table[TABLE_MAX];
    random_table(POOL_BLOCKS, 10, table);
    struct transfer t = transfer_grant(to, 1, table, 160, 0),
                    u = transfer_grant(to, 2, table, 160, 0);
    transfer_open(from, peer, &t, table);
    transfer_chunk(from, &t, 0, 80);
    pause_ms(20);
    kvt_disconnect(from->kvt, peer);
    CHECK_STATUS(node_wait(from, KVT_PEER_LOST, peer, 3000).status, ERR_CANCELED);
    node_wait(from, KVT_SEND_FAILED, 1, 3000);
    CHECK_STATUS(node_wait(to, KVT_RECEIVE_FAILED, 1, 3000).status, ERR_PEER_LOST);
    node_wait(to, KVT_FENCED, 1, 3000);
    peer = node_connect(from, to);
    transfer_open(from, peer, &u, table);
    transfer_chunk(from, &u, 0, 80);
    pause_ms(20);
    node_stop(from);
    node_wait(to, KVT_RECEIVE_FAILED, 2, 3000);
    node_wait(to, KVT_FENCED, 2, 3000);
    node_stop(to);
}

static void expect_checksum_failure(struct node *from, struct node *to, uint64_t id)
{
    struct kvt_event ev = node_wait(to, KVT_RECEIVE_FAILED, id, 5000);
    CHECK_STATUS(ev.status, ERR_CHECKSUM);
    CHECK(strstr(ev.text, "layer 0"));
    node_wait(to, KVT_FENCED, id, 3000);
    CHECK_STATUS(node_wait(from, KVT_SEND_FAILED, id, 3000).status, ERR_CHECKSUM);
    CHECK_EQ_INT(node_count(to, KVT_RECEIVED, id), 0);
}

/* The block table names one block twice, so that the second piece overwrites the first before it is
 * verified. Checksums detect this; a receiver without checksums accepts it. */
static void overwritten_piece(const char *transport)
{
    for (int off = 0; off < 2; off++) {
        struct node_options o = options(transport);
        o.no_checksum = off;
        struct node *from = node_start(options(transport)), *to = node_start(o);
        uint64_t peer = node_connect(from, to);
        const int32_t src[] = { 1, 2 }, dst[] = { 5, 5 };
        struct transfer t = transfer_grant(to, 1, dst, 32, 0);
        transfer_open(from, peer, &t, src);
        fill(from, &t);
        transfer_chunk(from, &t, 0, 32);
        kvt_send_finish(from->kvt, 1);
        if (off) node_wait(to, KVT_RECEIVED, 1, 5000);
        else expect_checksum_failure(from, to, 1);
        node_stop(from);
        node_stop(to);
    }
}

/* ---- a wire between sender and receiver that flips a bit in byte FLIP_AT of the sender's stream
 * ---- */

/* In the first DATA's payload: behind the preamble, OPEN and the DATA's head. */
enum { FLIP_AT = 32 + 32 + 32 + 100 };

struct wire {
    int listen_fd;
    uint16_t to_port;
};

static int tcp_to(uint16_t port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in a = {
        .sin_family = AF_INET,
        .sin_port = htons(port),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    CHECK_OK(connect(fd, (struct sockaddr *)&a, sizeof a));
    return fd;
}

static void *wire_run(void *arg)
{
    struct wire *w = arg;
    int a = accept(w->listen_fd, NULL, NULL), b = tcp_to(w->to_port);
    struct pollfd p[2] = { { .fd = a, .events = POLLIN }, { .fd = b, .events = POLLIN } };
    size_t passed = 0;
    while (poll(p, 2, 10000) > 0) {
        char bytes[4096];
        for (int side = 0; side < 2; side++) {
            if (!(p[side].revents & (POLLIN | POLLHUP))) continue;
            ssize_t n = recv(p[side].fd, bytes, sizeof bytes, 0);
            if (n <= 0) goto out;
            if (side == 0) {
                if (passed <= FLIP_AT && FLIP_AT < passed + (size_t)n) bytes[FLIP_AT - passed] ^= 4;
                passed += (size_t)n;
            }
            if (send(p[!side].fd, bytes, (size_t)n, MSG_NOSIGNAL) != n) goto out;
        }
    }
out:
    close(a);
    close(b);
    return NULL;
}

TEST(bit_flipped_on_the_wire_tcp)
{
    unsetenv("BATON_TCP_CONNECTIONS"); /* the wire has one connection */
    struct node *from = node_start(options("tcp")), *to = node_start(options("tcp"));
    struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t n = sizeof a;
    struct wire w = {
        .listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0),
        .to_port = kvt_port(to->kvt),
    };
    CHECK_OK(bind(w.listen_fd, (struct sockaddr *)&a, n));
    CHECK_OK(listen(w.listen_fd, 1));
    CHECK_OK(getsockname(w.listen_fd, (struct sockaddr *)&a, &n));
    pthread_t thread;
    CHECK_OK(pthread_create(&thread, NULL, wire_run, &w));
    struct buf hello = { 0 }, answer = { 0 }, address = { 0 };
    struct err err = { 0 };
    struct kvt_answer_msg m;
    uint64_t peer;
    kvt_hello(from->kvt, &hello);
    CHECK_OK(kvt_answer(to->kvt, buf_str(&hello), &answer, &err));
    CHECK_OK(kvt_answer_decode(buf_str(&answer), &m, &err));
    buf_printf(&address, "127.0.0.1 %u", ntohs(a.sin_port));
    m.transports[0].address = buf_str(&address);
    struct buf bent = { 0 };
    kvt_answer_encode(&m, &bent);
    CHECK_OK(kvt_connect(from->kvt, buf_str(&bent), &peer, &err));
    node_wait(from, KVT_CONNECTED, peer, 5000);
    const int32_t src[] = { 1, 2 }, dst[] = { 5, 6 };
    struct transfer t = transfer_grant(to, 1, dst, 32, 0);
    transfer_open(from, peer, &t, src);
    fill(from, &t);
    transfer_chunk(from, &t, 0, 32);
    kvt_send_finish(from->kvt, 1);
    expect_checksum_failure(from, to, 1);
    move(from, to, peer, 2, 32, 0, 32); /* connection and node still work */
    node_stop(from);
    node_stop(to);
    pthread_join(thread, NULL);
    close(w.listen_fd);
    struct buf *all[] = { &hello, &answer, &address, &bent };
    for (size_t i = 0; i < COUNT_OF(all); i++) buf_release(all[i]);
}

/* ---- a sender in its own process ---- */

struct child {
    pid_t pid;
    int to, from; /* pipes */
};

static void put_bytes(int fd, const void *p, size_t n)
{
    if (write(fd, p, n) != (ssize_t)n) _exit(3);
}
static void get_bytes(int fd, void *p, size_t n)
{
    for (size_t have = 0; have < n;) {
        ssize_t got = read(fd, (char *)p + have, n - have);
        if (got <= 0) _exit(4);
        have += (size_t)got;
    }
}

/* The child process: writes its hello, reads answer and grant, sends layer after layer slowly, and
 * never finishes. */
static _Noreturn void child_run(const char *transport, int in, int out)
{
    struct node *n = node_start(options(transport));
    struct buf hello = { 0 };
    struct err err = { 0 };
    char answer[2048], grant[2048];
    uint32_t len[2];
    kvt_hello(n->kvt, &hello);
    len[0] = (uint32_t)hello.len;
    put_bytes(out, len, 4);
    put_bytes(out, hello.data, hello.len);
    get_bytes(in, len, 8);
    get_bytes(in, answer, len[0]);
    get_bytes(in, grant, len[1]);
    uint64_t peer;
    if (kvt_connect(n->kvt, (struct str){ answer, len[0] }, &peer, &err) != OK) _exit(5);
    node_wait(n, KVT_CONNECTED, peer, 5000);
    if (kvt_send_open(n->kvt, 1, peer, (struct str){ grant, len[1] }, &err) != OK) _exit(6);
    int32_t table[TABLE_MAX];
    random_table(POOL_BLOCKS, 10, table);
    for (uint32_t end = 16; end <= 144; end += 16) {
        for (uint32_t layer = 0; layer < 4; layer++)
            if (kvt_send_ready(n->kvt, 1, layer, end - 16, end, table) != OK) _exit(7);
        if (end == 80) put_bytes(out, "m", 1);
    }
    for (;;) pause(), pause_ms(1000);
}

static struct child child_start(const char *transport)
{
    int down[2], up[2];
    CHECK_OK(pipe(down));
    CHECK_OK(pipe(up));
    nodes_are_apart = true;
    struct child c = { .pid = fork(), .to = down[1], .from = up[0] };
    if (c.pid == 0) {
        close(down[1]);
        close(up[0]);
        child_run(transport, down[0], up[1]);
    }
    close(down[0]);
    close(up[1]);
    return c;
}

static void child_connect(struct child *c, struct node *to, struct buf *grant)
{
    char hello[1024];
    uint32_t n, len[2];
    struct buf answer = { 0 };
    struct err err = { 0 };
    get_bytes(c->from, &n, 4);
    get_bytes(c->from, hello, n);
    CHECK_OK(kvt_answer(to->kvt, (struct str){ hello, n }, &answer, &err));
    len[0] = (uint32_t)answer.len;
    len[1] = (uint32_t)grant->len;
    put_bytes(c->to, len, 8);
    put_bytes(c->to, answer.data, answer.len);
    put_bytes(c->to, grant->data, grant->len);
    buf_release(&answer);
}

static void sender_killed(const char *transport)
{
    int32_t table[TABLE_MAX];
    struct child c = child_start(transport); /* before this process has threads */
    struct node *to = node_start(options(transport));
    random_table(POOL_BLOCKS, 10, table);
    struct transfer t = transfer_grant(to, 9, table, 160, 0);
    child_connect(&c, to, &t.grant);
    char middle;
    get_bytes(c.from, &middle, 1);
    pause_ms(20);
    uint64_t begin = clock_ms();
    kill(c.pid, SIGKILL);
    CHECK_STATUS(node_wait(to, KVT_RECEIVE_FAILED, 9, 3000).status, ERR_PEER_LOST);
    node_wait(to, KVT_FENCED, 9, 3000);
    CHECK(clock_ms() - begin < 3000);
    waitpid(c.pid, NULL, 0);
    buf_release(&t.grant);
    node_stop(to);
}

/* A stopped writer: no FENCED while it could still write; FENCED follows when it continues or is
 * killed. */
static void sender_stopped(const char *transport, bool scatters)
{
    int32_t table[TABLE_MAX];
    struct child c = child_start(transport);
    struct node *to = node_start(options(transport));
    random_table(POOL_BLOCKS, 10, table);
    struct transfer t = transfer_grant(to, 9, table, 160, 0);
    child_connect(&c, to, &t.grant);
    char middle;
    get_bytes(c.from, &middle, 1);
    pause_ms(20);
    kill(c.pid, SIGSTOP);
    pause_ms(50);
    uint64_t begin = clock_ms();
    kvt_expect_cancel(to->kvt, 9);
    node_wait(to, KVT_RECEIVE_FAILED, 9, 3000);
    pause_ms(500);
    bool fenced = node_count(to, KVT_FENCED, 9) > 0;
    /* A receiver that can end the connection alone does so after KVT_STOP_AGAIN_MS without an
     * answer, which a busy machine may reach. */
    if (clock_ms() - begin < KVT_STOP_AGAIN_MS || strcmp(transport, "ipc") == 0)
        CHECK_EQ_INT(fenced, scatters);
    kill(c.pid, SIGCONT);
    node_wait(to, KVT_FENCED, 9, 3000);
    kill(c.pid, SIGKILL);
    waitpid(c.pid, NULL, 0);
    pause_ms(100);
    CHECK_EQ_INT(node_count(to, KVT_FENCED, 9), 1);
    buf_release(&t.grant);
    node_stop(to);
}

/* A sender leaves while the receiver does not read and the socket is full: the blocks are returned
 * when the receiver reads again. */
static void leaves_a_slow_receiver(const char *transport)
{
    int32_t table[TABLE_MAX];
    struct node *from = node_start(options(transport)), *to = node_start(options(transport));
    uint64_t peer = node_connect(from, to);
    random_table(POOL_BLOCKS, 10, table);
    struct transfer t = transfer_grant(to, 9, table, 160, 0),
                    blocker = transfer_grant(to, 10, table, 16, 0),
                    over = transfer_grant(to, 11, table, 16, 0);
    kvt_expect_cancel(to->kvt, 11);
    node_wait(to, KVT_FENCED, 11, 2000);
    transfer_open(from, peer, &t, table);
    transfer_chunk(from, &t, 0, 32);
    pause_ms(100);
    pthread_mutex_lock(&to->lock); /* blocks the receiver's transfer thread in its next event */
    kvt_expect_cancel(to->kvt, 10);
    pause_ms(50);
    for (uint64_t id = 1000; id < 1600; id++) { /* each sends OPEN and STOPPED */
        struct err err;
        CHECK_OK(kvt_send_open(from->kvt, id, peer, buf_str(&over.grant), &err));
        kvt_send_cancel(from->kvt, id);
        node_wait(from, KVT_SEND_FAILED, id, 2000);
    }
    kvt_disconnect(from->kvt, peer);
    node_wait(from, KVT_PEER_LOST, peer, 2000);
    pause_ms(150);
    pthread_mutex_unlock(&to->lock);
    node_wait(to, KVT_RECEIVE_FAILED, 9, 2000);
    node_wait(to, KVT_FENCED, 9, 2000);
    CHECK_EQ_INT(node_count(to, KVT_FENCED, 9), 1);
    peer = node_connect(from, to); /* nothing is left over */
    buf_release(&t.grant);
    buf_release(&blocker.grant);
    buf_release(&over.grant);
    node_stop(from);
    node_stop(to);
}

/* A peer that answers nothing is told as quiet before any transfer fails, and heard once it does.
 * No quiet is told of one that answers, nor of one of which nothing is awaited. */
static void a_silent_peer_is_told(const char *transport)
{
    int32_t table[TABLE_MAX];
    struct node_options o = options(transport);
    o.stall_ms = 2000;
    struct node *from = node_start(o), *to = node_start(options(transport));
    uint64_t peer = node_connect(from, to);
    random_table(POOL_BLOCKS, 10, table);
    struct transfer t = transfer_grant(to, 9, table, 160, 0),
                    blocker = transfer_grant(to, 10, table, 16, 0);
    transfer_open(from, peer, &t, table);
    pause_ms(600); /* the next layer is awaited, of this side */
    CHECK_EQ_INT(node_count(from, KVT_PEER_QUIET, peer), 0);
    pthread_mutex_lock(&to->lock); /* blocks the receiver's transfer thread in its next event */
    kvt_expect_cancel(to->kvt, 10);
    pause_ms(50);
    transfer_chunk(from, &t, 0, 160);
    kvt_send_finish(from->kvt, 9);
    node_wait(from, KVT_PEER_QUIET, peer, 2000);
    CHECK_EQ_INT(node_count(from, KVT_SEND_FAILED, 9), 0);
    CHECK_EQ_INT(node_count(from, KVT_PEER_HEARD, peer), 0);
    pthread_mutex_unlock(&to->lock);
    node_wait(from, KVT_SENT, 9, 2000);
    node_wait(from, KVT_PEER_HEARD, peer, 2000);
    CHECK_EQ_INT(node_count(from, KVT_PEER_QUIET, peer), 1);
    buf_release(&t.grant);
    buf_release(&blocker.grant);
    node_stop(from);
    node_stop(to);
}

/* Sends 16 tokens while the receiver's transfer thread stands still for `hold_ms`. Returns how often
 * the peer was told as quiet until it answered. */
static int quiets_of_one(struct node *from, struct node *to, uint64_t peer, uint64_t id,
                         int hold_ms)
{
    int32_t table[TABLE_MAX];
    random_table(POOL_BLOCKS, 4, table);
    struct transfer t = transfer_grant(to, id, table, 16, 0),
                    blocker = transfer_grant(to, id + 1, table + 2, 16, 0);
    const int before = (int)node_count(from, KVT_PEER_QUIET, peer);
    transfer_open(from, peer, &t, table);
    if (hold_ms) pthread_mutex_lock(&to->lock); /* blocks that thread in its next event */
    kvt_expect_cancel(to->kvt, id + 1);
    if (hold_ms) pause_ms(50);
    transfer_chunk(from, &t, 0, 16);
    kvt_send_finish(from->kvt, id);
    pause_ms(hold_ms);
    if (hold_ms) pthread_mutex_unlock(&to->lock);
    node_wait(from, KVT_SENT, id, 2000);
    node_wait(to, KVT_FENCED, id + 1, 2000);
    buf_release(&t.grant);
    buf_release(&blocker.grant);
    return (int)node_count(from, KVT_PEER_QUIET, peer) - before;
}

/* A peer that answers fast is quiet sooner than one that is new or slow, and never so soon where the
 * transport goes over to another link. */
static void who_is_slow_has_more_time(const char *transport)
{
    const bool heals = kvt_transport_caps((struct str){ transport, strlen(transport) }) &
                       KVT_CAP_HEALS;
    struct node *from = node_start(options(transport)), *to = node_start(options(transport));
    uint64_t peer = node_connect(from, to), id = 100;
    int quiets = 0;
    for (int tries = 0; tries < (heals ? 1 : 5) && quiets == 0; tries++) {
        const uint64_t until = clock_ms() + 1800;
        while (clock_ms() < until) {
            quiets_of_one(from, to, peer, id += 2, 0);
            pause_ms(20);
        }
        quiets = quiets_of_one(from, to, peer, id += 2, 1000); /* fast by now, if this host is */
    }
    if (quiets == 0 && !heals)
        SKIP("its answers take longer than a quarter of a second on this host");
    CHECK_EQ_INT(quiets, heals ? 0 : 1);
    CHECK_EQ_INT(quiets_of_one(from, to, peer, id += 2, 1000), 0); /* slow by now */
    node_stop(from);
    node_stop(to);
}

static void nothing_moves_fails(const char *transport)
{
    struct node_options o = options(transport);
    o.stall_ms = 300;
    struct node *from = node_start(options(transport)), *to = node_start(o);
    uint64_t peer = node_connect(from, to);
    int32_t table[TABLE_MAX];
    random_table(POOL_BLOCKS, 10, table);
    struct transfer t = transfer_grant(to, 1, table, 160, 0);
    transfer_open(from, peer, &t, table);
    transfer_chunk(from, &t, 0, 80);
    CHECK_STATUS(node_wait(to, KVT_RECEIVE_FAILED, 1, 2000).status, ERR_TIMEOUT);
    node_wait(to, KVT_FENCED, 1, 2000);
    CHECK_STATUS(node_wait(from, KVT_SEND_FAILED, 1, 2000).status, ERR_TIMEOUT);
    /* tokens missing */
    t = transfer_grant(to, 2, table, 160, 0);
    transfer_open(from, peer, &t, table);
    transfer_chunk(from, &t, 0, 80);
    kvt_send_finish(from->kvt, 2);
    CHECK_STATUS(node_wait(from, KVT_SEND_FAILED, 2, 2000).status, ERR_INVALID);
    node_wait(to, KVT_FENCED, 2, 2000);
    node_stop(from);
    node_stop(to);
}

TEST(limits_and_bad_arguments)
{
    struct node *n = node_start(options("mem"));
    struct buf out = { 0 };
    struct err err = { 0 };
    int32_t good[4] = { 0, 1, 2, 3 }, bad[4] = { 0, 1, 2, POOL_BLOCKS };
    CHECK_STATUS(kvt_expect(n->kvt, 1, bad, 4, 0, 64, &out), ERR_INVALID);
    CHECK_STATUS(kvt_expect(n->kvt, 1, good, 4, 5, 64, &out), ERR_INVALID);
    CHECK_STATUS(kvt_expect(n->kvt, 1, good, 4, 0, 65, &out), ERR_INVALID);
    CHECK_EQ_INT(out.len, 0);
    for (uint64_t i = 0; i < 64; i++) CHECK_OK(kvt_expect(n->kvt, i, good, 4, 0, 64, &out));
    CHECK_STATUS(kvt_expect(n->kvt, 64, good, 4, 0, 64, &out), ERR_FULL);
    kvt_expect_cancel(n->kvt, 5);
    node_wait(n, KVT_FENCED, 5, 2000);
    CHECK_OK(kvt_expect(n->kvt, 64, good, 4, 0, 64, &out));
    struct kvt *k = NULL;
    struct kvt_options o = {
        .layout = n->layout, .mem = &n->mem, .protocols = "ipc,warp", .n_transfers = 1
    };
    CHECK_STATUS(kvt_create(&o, &k, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "warp") && strstr(err.text, "tcp"));
    struct node *tcp = node_start(options("tcp"));
    o.protocols = "tcp";
    o.listen_host = "127.0.0.1";
    o.port = kvt_port(tcp->kvt);
    CHECK_STATUS(kvt_create(&o, &k, &err), ERR_CONFIG);
    CHECK(strstr(err.text, "another port option of this node has the same port"));
    buf_release(&out);
    node_stop(tcp);
    node_stop(n);
}

/* Only transports that both sides allow are used; if the preferred one does not reach the peer, the
 * next allowed one is tried. */
TEST(choice_of_transport)
{
    struct node *from = node_start(options("ipc,tcp")), *to = node_start(options("tcp,ipc")),
                *only_tcp = node_start(options("tcp")), *only_mem = node_start(options("mem"));
    struct err err = { 0 };
    uint64_t a = node_connect(from, to), b = node_connect(from, only_tcp), c;
    CHECK_EQ_STR(node_transport(from, a), "ipc");
    CHECK_EQ_STR(node_transport(from, b), "tcp");
    move(from, to, a, 1, 100, 0, 100);
    move(from, only_tcp, b, 2, 100, 0, 100);
    struct buf hello = { 0 }, answer = { 0 };
    kvt_hello(from->kvt, &hello);
    CHECK_OK(kvt_answer(only_mem->kvt, buf_str(&hello), &answer, &err));
    CHECK_STATUS(kvt_connect(from->kvt, buf_str(&answer), &c, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "ipc,tcp") && strstr(err.text, "mem"));
    /* an ipc address that does not exist: tcp is used */
    buf_clear(&answer);
    CHECK_OK(kvt_answer(to->kvt, buf_str(&hello), &answer, &err));
    size_t at = str_find(buf_str(&answer), STR("ipc")) + 3 + 36;
    answer.data[at] = answer.data[at] == 'x' ? 'y' : 'x';
    CHECK_OK(kvt_connect(from->kvt, buf_str(&answer), &c, &err));
    node_wait(from, KVT_CONNECTED, c, 5000);
    CHECK_EQ_STR(node_transport(from, c), "tcp");
    /* only ipc allowed: no other is used */
    struct node *strict = node_start(options("ipc"));
    buf_clear(&hello);
    kvt_hello(strict->kvt, &hello);
    buf_clear(&answer);
    CHECK_OK(kvt_answer(to->kvt, buf_str(&hello), &answer, &err));
    answer.data[at] = answer.data[at] == 'x' ? 'y' : 'x';
    CHECK_OK(kvt_connect(strict->kvt, buf_str(&answer), &c, &err));
    CHECK_STATUS(node_wait(strict, KVT_PEER_LOST, c, 5000).status, ERR_PEER_LOST);
    buf_release(&hello);
    buf_release(&answer);
    struct node *all[] = { from, to, only_tcp, only_mem, strict };
    for (size_t i = 0; i < COUNT_OF(all); i++) node_stop(all[i]);
}

/* Bytes that no sender sends: the connection ends, and the node continues. */
TEST(garbage_on_the_tcp_port)
{
    struct node *from = node_start(options("tcp")), *to = node_start(options("tcp"));
    for (int i = 0; i < 20; i++) {
        int fd = tcp_to(kvt_port(to->kvt));
        char junk[64];
        memset(junk, i * 13, sizeof junk);
        CHECK(send(fd, junk, sizeof junk, MSG_NOSIGNAL) == sizeof junk);
        struct timeval limit = { 2, 0 };
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        ssize_t n;
        while ((n = recv(fd, junk, sizeof junk, 0)) > 0) {}
        CHECK(n == 0 || errno != EAGAIN);
        close(fd);
    }
    uint64_t peer = node_connect(from, to);
    move(from, to, peer, 1, 100, 0, 100);
    node_stop(from);
    node_stop(to);
}

TEST(metrics_say_which_transport)
{
    struct metrics *m = metrics_create();
    struct node_options o = options("tcp");
    o.metrics = m;
    struct node *from = node_start(options("tcp")), *to = node_start(o);
    uint64_t peer = node_connect(from, to);
    move(from, to, peer, 1, 100, 0, 100);
    struct buf out = { 0 };
    char want[128];
    metrics_write(m, &out);
    snprintf(want, sizeof want,
             "baton_kv_transfer_bytes_total{transport=\"tcp\",direction=\"receive\"} %llu",
             (unsigned long long)layout_total_bytes(&to->layout, 100, 0));
    CHECK(strstr(out.data, want));
    CHECK(strstr(out.data,
                 "baton_kv_transfer_seconds_count{transport=\"tcp\",direction=\"receive\"} 1"));
    buf_release(&out);
    node_stop(from);
    node_stop(to);
    metrics_free(m);
}

TEST(every_op_is_filled)
{
    for (size_t i = 0; kvt_transports[i]; i++) {
        const struct kvt_transport_ops *o = kvt_transports[i];
        CHECK(o->name && o->open && o->close && o->wait_fd && o->port && o->export_address &&
              o->can_reach && o->connect && o->put && o->link_speed);
        CHECK(o->abandon && o->notify && o->flush && o->fence && o->poll && o->disconnect);
    }
}

static void need_rdma(void) { need_transport("rdma"); }

/* A stopped, silent writer loses its access: the receiver destroys its own queue pairs, and the
 * blocks are free. */
static void stopped_sender_is_fenced(const char *transport)
{
    int32_t table[TABLE_MAX];
    need_transport(transport);
    struct child c = child_start(transport);
    struct node *to = node_start(options(transport));
    random_table(POOL_BLOCKS, 10, table);
    struct transfer t = transfer_grant(to, 9, table, 160, 0);
    child_connect(&c, to, &t.grant);
    char middle;
    get_bytes(c.from, &middle, 1);
    pause_ms(20);
    kill(c.pid, SIGSTOP);
    kvt_expect_cancel(to->kvt, 9);
    node_wait(to, KVT_FENCED, 9, 5000);
    pool_set(to, 0x77);
    kill(c.pid, SIGCONT);
    pause_ms(300);
    pool_is(to, 0x77);
    kill(c.pid, SIGKILL);
    waitpid(c.pid, NULL, 0);
    buf_release(&t.grant);
    node_stop(to);
}
TEST(stopped_sender_is_fenced_rdma) { stopped_sender_is_fenced("rdma"); }
TEST(stopped_sender_is_fenced_ucx) { stopped_sender_is_fenced("ucx"); }

#define PER_TRANSPORT(body)                                                                        \
    TEST(body##_mem) { body("mem"); }                                                              \
    TEST(body##_ipc) { body("ipc"); }                                                              \
    TEST(body##_tcp) { body("tcp"); }                                                              \
    TEST(body##_rdma)                                                                              \
    {                                                                                              \
        need_rdma();                                                                               \
        body("rdma");                                                                              \
    }                                                                                              \
    TEST(body##_ucx)                                                                               \
    {                                                                                              \
        need_transport("ucx");                                                                     \
        body("ucx");                                                                               \
    }
#define TRANSPORTS(body)                                                                           \
    CASE(body##_mem), CASE(body##_ipc), CASE(body##_tcp), CASE(body##_rdma), CASE(body##_ucx)

PER_TRANSPORT(whole_transfers)
PER_TRANSPORT(many_at_once)
PER_TRANSPORT(cancel_and_fence)
PER_TRANSPORT(stale_and_foreign_grants)
PER_TRANSPORT(ticket_is_needed_once)
PER_TRANSPORT(mismatch_has_a_sentence)
PER_TRANSPORT(receiver_restarts)
PER_TRANSPORT(sender_leaves)
PER_TRANSPORT(leaves_a_slow_receiver)
PER_TRANSPORT(overwritten_piece)
PER_TRANSPORT(a_silent_peer_is_told)
PER_TRANSPORT(who_is_slow_has_more_time)
PER_TRANSPORT(nothing_moves_fails)
TEST(sender_killed_ipc) { sender_killed("ipc"); }
TEST(sender_killed_tcp) { sender_killed("tcp"); }
TEST(sender_stopped_ipc) { sender_stopped("ipc", false); }
TEST(sender_stopped_tcp) { sender_stopped("tcp", true); }
TEST(sender_killed_rdma)
{
    need_rdma();
    sender_killed("rdma");
}
TEST(sender_stopped_rdma)
{
    need_rdma();
    sender_stopped("rdma", false);
}
TEST(sender_killed_ucx)
{
    need_transport("ucx");
    sender_killed("ucx");
}
TEST(sender_stopped_ucx)
{
    need_transport("ucx");
    sender_stopped("ucx", false);
}

TEST_MAIN(TRANSPORTS(whole_transfers), TRANSPORTS(many_at_once), TRANSPORTS(cancel_and_fence),
          TRANSPORTS(stale_and_foreign_grants), TRANSPORTS(ticket_is_needed_once),
          TRANSPORTS(mismatch_has_a_sentence), TRANSPORTS(receiver_restarts),
          TRANSPORTS(sender_leaves), TRANSPORTS(leaves_a_slow_receiver),
          TRANSPORTS(overwritten_piece), TRANSPORTS(nothing_moves_fails),
          TRANSPORTS(a_silent_peer_is_told), TRANSPORTS(who_is_slow_has_more_time),
          CASE(sender_killed_ipc), CASE(sender_killed_tcp), CASE(sender_stopped_ipc),
          CASE(sender_stopped_tcp), CASE(sender_killed_rdma), CASE(sender_stopped_rdma),
          CASE(sender_killed_ucx), CASE(sender_stopped_ucx), CASE(stopped_sender_is_fenced_rdma),
          CASE(stopped_sender_is_fenced_ucx), CASE(limits_and_bad_arguments),
          CASE(choice_of_transport), CASE(garbage_on_the_tcp_port),
          CASE(metrics_say_which_transport), CASE(bit_flipped_on_the_wire_tcp),
          CASE(every_op_is_filled))
