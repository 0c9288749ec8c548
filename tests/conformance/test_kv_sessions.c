/* test_kv_sessions.c - guarantees of the session layer over every transport: grants that are
 * unknown, out of range, used or stale give an error and change no byte; late writes reach no
 * block; a slow peer delays only itself; checksums can be off; calls never wait.
 *
 * The first five cases are those in which a public server returned another prompt's answer (see
 * docs/kv-transfer.md). Cases named *_tcp, *_ipc, ... run one body per transport; a transport that
 * this build or this host lacks is skipped by name. */
#include "kvtransfer/progress.h"
#include "kvtransfer/transport.h"
#include "tests/conformance/kvt_fixture.h"

enum { POOL_BLOCKS = 64, TABLE_MAX = 48 };

static struct node_options options(const char *transport)
{
    return (struct node_options){ .layout = small_layout(POOL_BLOCKS), .protocols = transport };
}

static void grant_of(struct node *to, uint64_t id, const int32_t *blocks, uint32_t n_tokens,
                     struct buf *out)
{
    buf_clear(out);
    CHECK_OK(kvt_expect(to->kvt, id, blocks, kvt_plan_n_blocks(&to->layout, n_tokens), 0, n_tokens,
                        out));
}

static void open_send(struct node *from, uint64_t id, uint64_t peer, const struct buf *grant)
{
    struct err err = { 0 };
    if (kvt_send_open(from->kvt, id, peer, buf_str(grant), &err) != OK)
        test_fail(__FILE__, __LINE__, "kvt_send_open: %s", err.text);
}

static void ready(struct node *from, uint64_t id, const int32_t *blocks, uint32_t begin,
                  uint32_t end)
{
    for (uint32_t layer = 0; layer < from->layout.n_layers; layer++)
        CHECK_OK(kvt_send_ready(from->kvt, id, layer, begin, end, blocks));
}

static void fill(struct node *from, uint64_t seed, const int32_t *blocks, uint32_t n)
{
    for (uint32_t layer = 0; layer < from->layout.n_layers; layer++)
        fill_layer(from, seed, layer, blocks, 0, n);
}

static void send_all(struct node *from, uint64_t id, uint64_t peer, const struct buf *grant,
                     const int32_t *blocks, uint32_t n_tokens)
{
    open_send(from, id, peer, grant);
    ready(from, id, blocks, 0, n_tokens);
    kvt_send_finish(from->kvt, id);
}

static void check_untouched(struct node *n, const uint8_t *before)
{
    const uint8_t *now = n->mem.ptr;
    for (size_t i = 0; i < kv_layout_pool_bytes(&n->layout); i++)
        if (now[i] != before[i])
            test_fail(__FILE__, __LINE__, "byte %zu of the pool changed from %u to %u", i,
                      before[i], now[i]);
}

/* ---- five kinds of wrong grants ---- */

struct rig {
    struct node *from, *other, *to;
    uint64_t peer, other_peer;
    struct buf grant, again;
    struct metrics *metrics; /* of `to` */
    int32_t src[8], dst[8];
    uint8_t *before;
};

enum { RIG_TOKENS = 8 * 16 };

static struct rig rig_make(const char *transport)
{
    need_transport(transport);
    struct node_options o = options(transport);
    struct rig b = { .metrics = metrics_create() };
    o.metrics = b.metrics;
    b.from = node_start(options(transport));
    b.other = node_start(options(transport));
    b.to = node_start(o);
    b.peer = node_connect(b.from, b.to);
    b.other_peer = node_connect(b.other, b.to);
    random_table(POOL_BLOCKS, 8, b.src);
    random_table(POOL_BLOCKS, 8, b.dst);
    memset(b.to->mem.ptr, 0xcc, kv_layout_pool_bytes(&b.to->layout));
    fill(b.from, 1, b.src, 8);
    fill(b.other, 2, b.src, 8);
    return b;
}

static void rig_snapshot(struct rig *b)
{
    mem_free(b->before);
    b->before = mem_dup(b->to->mem.ptr, kv_layout_pool_bytes(&b->to->layout));
}

static void rig_free(struct rig *b)
{
    node_stop(b->from);
    node_stop(b->other);
    node_stop(b->to);
    metrics_free(b->metrics);
    buf_release(&b->grant);
    buf_release(&b->again);
    mem_free(b->before);
}

static void fails_with(struct rig *b, struct node *from, uint64_t id, enum status st)
{
    CHECK_STATUS(node_wait(from, KVT_SEND_FAILED, id, 5000).status, st);
    CHECK_EQ_INT(node_count(from, KVT_SENT, id), 0);
    pause_ms(10);
    if (b->before) check_untouched(b->to, b->before);
}

static uint64_t dropped_stale(struct rig *b)
{
    return counter_value(
        metrics_counter(b->metrics, "baton_kv_transfer_dropped_total", "reason=\"stale\"", ""));
}

/* 1: an unknown session, generation, or peer. */
static void unknown_reference(const char *transport)
{
    struct rig b = rig_make(transport);
    struct kvt_grant_msg g;
    rig_snapshot(&b);
    grant_of(b.to, 1, b.dst, RIG_TOKENS, &b.grant);
    CHECK_OK(kvt_grant_decode(buf_str(&b.grant), &g, NULL));
    const struct kvt_grant_msg wrong[] = { { .session = g.session + 1, .generation = g.generation },
                                           { .session = UINT32_MAX, .generation = g.generation },
                                           { .session = g.session, .generation = g.generation + 1 },
                                           { .session = g.session, .generation = 0 } };
    for (uint64_t i = 0; i < COUNT_OF(wrong); i++) {
        struct kvt_grant_msg m = g;
        struct buf bent = { 0 };
        m.session = wrong[i].session;
        m.generation = wrong[i].generation;
        kvt_grant_encode(&m, b.dst, &bent);
        send_all(b.from, 10 + i, b.peer, &bent, b.src, RIG_TOKENS);
        fails_with(&b, b.from, 10 + i, ERR_STALE);
        buf_release(&bent);
    }
    CHECK_EQ_INT(dropped_stale(&b), COUNT_OF(wrong));
    send_all(b.from, 20, b.peer + 1, &b.grant, b.src, RIG_TOKENS);
    fails_with(&b, b.from, 20, ERR_PEER_LOST);
    send_all(b.from, 1, b.peer, &b.grant, b.src, RIG_TOKENS); /* the original grant still works */
    node_wait(b.to, KVT_RECEIVED, 1, 5000);
    check_blocks_hold(b.to, 1, b.dst, 0, RIG_TOKENS, 0xcc);
    rig_free(&b);
}

/* 2: block numbers outside the pool, on either side. */
static void blocks_out_of_range(const char *transport)
{
    struct rig b = rig_make(transport);
    struct kvt_grant_msg g;
    int32_t bad[8];
    const int32_t values[] = { POOL_BLOCKS, -1, INT32_MAX, INT32_MIN };
    rig_snapshot(&b);
    for (uint64_t i = 0; i < COUNT_OF(values); i++) {
        struct buf bent = { 0 };
        memcpy(bad, b.dst, sizeof bad);
        bad[i] = values[i];
        CHECK_STATUS(kvt_expect(b.to->kvt, 1, bad, 8, 0, RIG_TOKENS, &bent), ERR_INVALID);
        CHECK_EQ_INT(bent.len, 0);
        grant_of(b.to, 10 + i, b.dst, RIG_TOKENS, &b.grant);
        CHECK_OK(kvt_grant_decode(buf_str(&b.grant), &g, NULL));
        kvt_grant_encode(&g, bad, &bent);
        send_all(b.from, 10 + i, b.peer, &bent, b.src, RIG_TOKENS);
        fails_with(&b, b.from, 10 + i, ERR_FORMAT);
        memcpy(bad, b.src, sizeof bad);
        bad[i] = values[i];
        /* the original grant with source blocks outside the pool */
        send_all(b.from, 20 + i, b.peer, &b.grant, bad, RIG_TOKENS);
        fails_with(&b, b.from, 20 + i, ERR_INVALID);
        node_wait(b.to, KVT_RECEIVE_FAILED, 10 + i, 5000);
        node_wait(b.to, KVT_FENCED, 10 + i, 5000);
        check_untouched(b.to, b.before);
        buf_release(&bent);
    }
    rig_free(&b);
}

/* 3: a used grant. */
static void consumed_reference(const char *transport)
{
    struct rig b = rig_make(transport);
    grant_of(b.to, 1, b.dst, RIG_TOKENS, &b.grant);
    send_all(b.from, 1, b.peer, &b.grant, b.src, RIG_TOKENS);
    node_wait(b.to, KVT_RECEIVED, 1, 5000);
    rig_snapshot(&b);
    /* by another sender, with other bytes */
    send_all(b.other, 2, b.other_peer, &b.grant, b.src, RIG_TOKENS);
    fails_with(&b, b.other, 2, ERR_STALE);
    fill(b.from, 3, b.src, 8);
    send_all(b.from, 3, b.peer, &b.grant, b.src, RIG_TOKENS); /* and by the same sender */
    fails_with(&b, b.from, 3, ERR_STALE);
    CHECK_EQ_INT(node_count(b.to, KVT_RECEIVED, 1), 1);
    rig_free(&b);
}

/* 4: a grant whose blocks were granted to another transfer: used before that one begins, in its
 * middle, and after it. */
static void stale_reference_after_reuse(const char *transport)
{
    struct rig b = rig_make(transport);
    grant_of(b.to, 1, b.dst, RIG_TOKENS, &b.grant);
    kvt_expect_cancel(b.to->kvt, 1);
    node_wait(b.to, KVT_FENCED, 1, 5000);
    grant_of(b.to, 2, b.dst, RIG_TOKENS, &b.again); /* the same blocks, usually the same slot */
    send_all(b.from, 10, b.peer, &b.grant, b.src, RIG_TOKENS);
    fails_with(&b, b.from, 10, ERR_STALE);
    open_send(b.other, 2, b.other_peer, &b.again);
    ready(b.other, 2, b.src, 0, RIG_TOKENS / 2);
    send_all(b.from, 11, b.peer, &b.grant, b.src, RIG_TOKENS);
    fails_with(&b, b.from, 11, ERR_STALE);
    ready(b.other, 2, b.src, RIG_TOKENS / 2, RIG_TOKENS);
    kvt_send_finish(b.other->kvt, 2);
    node_wait(b.to, KVT_RECEIVED, 2, 5000);
    check_blocks_hold(b.to, 2, b.dst, 0, RIG_TOKENS, 0xcc);
    rig_snapshot(&b);
    send_all(b.from, 12, b.peer, &b.grant, b.src, RIG_TOKENS);
    fails_with(&b, b.from, 12, ERR_STALE);
    CHECK(dropped_stale(&b) >= 3);
    rig_free(&b);
}

/* Causes an event and blocks the node's transfer thread in it. */
static void hold(struct node *n, uint64_t id)
{
    struct buf grant = { 0 };
    const int32_t block = 0;
    pthread_mutex_lock(&n->lock);
    grant_of(n, id, &block, 1, &grant);
    kvt_expect_cancel(n->kvt, id);
    buf_release(&grant);
    pause_ms(30);
}

static void release(struct node *n) { pthread_mutex_unlock(&n->lock); }

/* 5: the late write. A writer that is stopped when its transfer is cancelled continues afterwards
 * and sends all it has. Its blocks are granted again only after FENCED, and hold the second
 * transfer's bytes in the end. */
static void late_write(const char *transport, bool fenced_without_writer)
{
    struct rig b = rig_make(transport);
    grant_of(b.to, 1, b.dst, RIG_TOKENS, &b.grant);
    open_send(b.from, 1, b.peer, &b.grant);
    ready(b.from, 1, b.src, 0, 32);
    pause_ms(30);
    hold(b.from, 99);
    ready(b.from, 1, b.src, 32, RIG_TOKENS);
    kvt_send_finish(b.from->kvt, 1);
    kvt_expect_cancel(b.to->kvt, 1);
    node_wait(b.to, KVT_RECEIVE_FAILED, 1, 5000);
    pause_ms(200);
    CHECK_EQ_INT(node_count(b.to, KVT_FENCED, 1), fenced_without_writer);
    if (!fenced_without_writer) {
        release(b.from);
        node_wait(b.to, KVT_FENCED, 1, 5000);
    }
    /* after FENCED the pool is the receiver's again */
    memset(b.to->mem.ptr, 0xcc, kv_layout_pool_bytes(&b.to->layout));
    grant_of(b.to, 2, b.dst, RIG_TOKENS, &b.again);
    send_all(b.other, 2, b.other_peer, &b.again, b.src, RIG_TOKENS);
    node_wait(b.to, KVT_RECEIVED, 2, 5000);
    if (fenced_without_writer) release(b.from);
    CHECK_STATUS(node_wait(b.from, KVT_SEND_FAILED, 1, 5000).status, ERR_CANCELED);
    pause_ms(50);
    check_blocks_hold(b.to, 2, b.dst, 0, RIG_TOKENS, 0xcc);
    CHECK_EQ_INT(node_count(b.to, KVT_FENCED, 1), 1);
    rig_free(&b);
}

/* ---- checksums off ---- */

static uint64_t hashed(struct metrics *m, const char *direction)
{
    char label[40];
    snprintf(label, sizeof label, "direction=\"%s\"", direction);
    return counter_value(metrics_counter(m, "baton_kv_transfer_hashed_bytes_total", label, ""));
}

static void checksums_off(const char *transport)
{
    need_transport(transport);
    for (int off = 0; off < 4; off++) { /* bit 0: at the sender, bit 1: at the receiver */
        struct node_options a = options(transport), b = options(transport);
        a.metrics = metrics_create();
        b.metrics = metrics_create();
        a.no_checksum = off & 1;
        b.no_checksum = off & 2;
        struct node *from = node_start(a), *to = node_start(b);
        struct buf grant = { 0 };
        const int32_t src[] = { 1, 2, 7 }, dst[] = { 5, 9, 6 };
        uint64_t peer = node_connect(from, to);
        fill(from, 1, src, 3);
        grant_of(to, 1, dst, 40, &grant);
        send_all(from, 1, peer, &grant, src, 40);
        uint64_t bytes = node_wait(to, KVT_RECEIVED, 1, 5000).bytes;
        node_wait(from, KVT_SENT, 1, 5000);
        check_blocks_hold(to, 1, dst, 0, 40, 0);
        CHECK_EQ_INT(hashed(a.metrics, "send"), off ? 0 : bytes);
        CHECK_EQ_INT(hashed(b.metrics, "receive"), off ? 0 : bytes);
        /* errors that need no checksum are still detected */
        grant_of(to, 2, dst, 40, &grant);
        open_send(from, 2, peer, &grant);
        ready(from, 2, src, 0, 32);
        kvt_send_finish(from->kvt, 2);
        node_wait(from, KVT_SEND_FAILED, 2, 5000);
        node_wait(to, KVT_RECEIVE_FAILED, 2, 5000);
        buf_release(&grant);
        node_stop(from);
        node_stop(to);
        metrics_free(a.metrics);
        metrics_free(b.metrics);
    }
}

/* ---- a draft layer ---- */

/* One of both may have a layer that the other lacks: what both have is exchanged, and the rest of
 * the receiver's pool stays as it is. */
static void draft_layer_at_one_side(const char *transport)
{
    need_transport(transport);
    for (uint32_t who = 0; who < 4; who++) { /* bit 0: at the sender, bit 1: at the receiver */
        struct node_options a = options(transport), b = options(transport);
        const uint32_t n_common = a.layout.n_layers + (who == 3);
        a.layout.n_layers += a.layout.n_draft_layers = who & 1;
        b.layout.n_layers += b.layout.n_draft_layers = who >> 1;
        struct node *from = node_start(a), *to = node_start(b);
        struct buf grant = { 0 };
        const int32_t src[] = { 1, 2, 7 }, dst[] = { 5, 9, 6 };
        uint64_t peer = node_connect(from, to);
        pool_set(to, 0xcc);
        fill(from, 1, src, 3);
        for (uint64_t id = 1; id < 3; id++) { /* the session is used again */
            grant_of(to, id, dst, 40, &grant);
            send_all(from, id, peer, &grant, src, 40);
            node_wait(to, KVT_RECEIVED, id, 5000);
            node_wait(from, KVT_SENT, id, 5000);
        }
        for (size_t i = kv_layout_offset(&to->layout, n_common, 0);
             i < kv_layout_pool_bytes(&to->layout); i++)
            CHECK_EQ_INT((uint8_t)to->image[i], 0xcc);
        to->layout.n_layers = n_common;
        check_blocks_hold(to, 1, dst, 0, 40, 0xcc);
        /* a transfer without a layer that both have is not whole */
        grant_of(to, 3, dst, 40, &grant);
        open_send(from, 3, peer, &grant);
        for (uint32_t layer = 0; layer + 1 < n_common; layer++)
            CHECK_OK(kvt_send_ready(from->kvt, 3, layer, 0, 40, src));
        kvt_send_finish(from->kvt, 3);
        node_wait(from, KVT_SEND_FAILED, 3, 5000);
        node_wait(to, KVT_RECEIVE_FAILED, 3, 5000);
        buf_release(&grant);
        node_stop(from);
        node_stop(to);
    }
}

/* ---- slow peers ---- */

enum { BIG_TOKENS = 1024 };

/* 16 MiB of KV: more than sockets hold. */
static struct kv_layout big_layout(uint32_t block_tokens)
{
    return (struct kv_layout){
        .model_fingerprint = 7,
        .dtype = DTYPE_BF16,
        .block_tokens = block_tokens,
        .n_layers = 4,
        .n_kv_heads = 8,
        .model_kv_heads = 8,
        .head_dim = 128,
        .tp_size = 1,
        .n_blocks = BIG_TOKENS / block_tokens,
    };
}

/* One sender with receivers of which only the last one reads: its transfers complete, and those of
 * the others complete when they read again. */
static void slow_receivers(uint32_t their_block_tokens, uint32_t n_slow)
{
    enum { SLOW_MAX = 6 };
    struct node *from = node_start((struct node_options){
                    .layout = big_layout(16), .protocols = "tcp", .stall_ms = 30000 }),
                *to[SLOW_MAX + 1];
    uint64_t peers[SLOW_MAX + 1];
    struct buf grant = { 0 };
    int32_t table[BIG_TOKENS / 16];
    for (int32_t i = 0; i < BIG_TOKENS / 16; i++) table[i] = i;
    fill(from, 1, table, BIG_TOKENS / 16);
    for (uint32_t i = 0; i <= n_slow; i++) {
        to[i] = node_start((struct node_options){
            .layout = big_layout(their_block_tokens), .protocols = "tcp", .stall_ms = 30000 });
        peers[i] = node_connect(from, to[i]);
    }
    for (uint32_t i = 0; i < n_slow; i++) {
        grant_of(to[i], 1 + i, table, BIG_TOKENS, &grant);
        open_send(from, 1 + i, peers[i], &grant);
    }
    pause_ms(50);
    for (uint32_t i = 0; i < n_slow; i++) {
        hold(to[i], 999);
        ready(from, 1 + i, table, 0, BIG_TOKENS);
        kvt_send_finish(from->kvt, 1 + i);
    }
    pause_ms(300);
    for (uint64_t id = 100; id < 103; id++) {
        grant_of(to[n_slow], id, table, BIG_TOKENS, &grant);
        send_all(from, id, peers[n_slow], &grant, table, BIG_TOKENS);
        node_wait(to[n_slow], KVT_RECEIVED, id, 20000);
        node_wait(from, KVT_SENT, id, 20000);
    }
    for (uint32_t i = 0; i < n_slow; i++) {
        CHECK_EQ_INT(node_count(from, KVT_SENT, 1 + i), 0);
        release(to[i]);
    }
    for (uint32_t i = 0; i < n_slow; i++) {
        node_wait(to[i], KVT_RECEIVED, 1 + i, 20000);
        for (size_t at = 0; their_block_tokens == 16 && at < kv_layout_pool_bytes(&from->layout);
             at += 64)
            CHECK_EQ_INT(((uint8_t *)to[i]->mem.ptr)[at], ((uint8_t *)from->mem.ptr)[at]);
    }
    for (uint32_t i = 0; i <= n_slow; i++) node_stop(to[i]);
    node_stop(from);
    buf_release(&grant);
}

TEST(a_receiver_that_does_not_read_holds_up_itself_alone) { slow_receivers(16, 1); }
/* Peers share the staging memory: those that do not drain it leave a part for the others. */
TEST(receivers_of_another_layout_that_do_not_read_hold_up_themselves_alone)
{
    slow_receivers(64, 5);
}

/* ---- calls that never wait ---- */

/* While the transfer thread is blocked and its mailbox full, ends and cancels return at once; they
 * take effect later, after the caller's earlier calls. */
TEST(ends_and_cancels_never_wait)
{
    struct node *from = node_start(options("mem")), *to = node_start(options("mem"));
    struct buf grant = { 0 };
    struct err err = { 0 };
    const int32_t src[] = { 1, 2 }, dst[] = { 5, 9 };
    uint64_t peer = node_connect(from, to);
    fill(from, 1, src, 2);
    grant_of(to, 1, dst, 32, &grant);
    hold(from, 99);
    open_send(from, 1, peer, &grant);
    ready(from, 1, src, 0, 32);
    grant_of(from, 2, dst, 32, &grant); /* something to cancel on the same thread */
    size_t n = 0;
    while (kvt_send_ready(from->kvt, 1, 0, 0, 1, src) == OK) n++; /* repeated: harmless */
    CHECK(n > 1000);
    CHECK_STATUS(kvt_send_open(from->kvt, 3, peer, buf_str(&grant), &err), ERR_FULL);
    for (uint64_t i = 0; i < 2 * (KVT_COMMANDS_HARD - KVT_COMMANDS_SOFT); i++)
        kvt_send_cancel(from->kvt, 1000000 + i);
    kvt_send_finish(from->kvt, 1);
    kvt_expect_cancel(from->kvt, 2);
    kvt_disconnect(from->kvt, 424242);
    release(from);
    node_wait(to, KVT_RECEIVED, 1, 10000);
    node_wait(from, KVT_SENT, 1, 10000);
    node_wait(from, KVT_FENCED, 2, 10000);
    check_blocks_hold(to, 1, dst, 0, 32, 0);
    /* kvt_free with such calls still queued leaks nothing */
    hold(from, 98);
    while (kvt_send_ready(from->kvt, 1, 0, 0, 1, src) == OK) {}
    for (uint64_t i = 0; i < 2 * (KVT_COMMANDS_HARD - KVT_COMMANDS_SOFT); i++)
        kvt_send_cancel(from->kvt, 1000000 + i);
    release(from);
    node_stop(from);
    node_stop(to);
    buf_release(&grant);
}

/* ---- deadlines ---- */

/* The transfer makes progress all the time, but takes too long. */
TEST(a_transfer_has_a_deadline)
{
    for (int who = 0; who < 2; who++) {
        struct node_options a = options("mem"), b = options("mem");
        (who ? &a : &b)->deadline_ms = 400;
        struct node *from = node_start(a), *to = node_start(b);
        struct buf grant = { 0 };
        int32_t table[TABLE_MAX];
        uint64_t peer = node_connect(from, to);
        random_table(POOL_BLOCKS, TABLE_MAX, table);
        grant_of(to, 1, table, TABLE_MAX * 16, &grant);
        open_send(from, 1, peer, &grant);
        for (uint32_t t = 0; t < TABLE_MAX * 16 && !node_count(from, KVT_SEND_FAILED, 1); t += 16) {
            ready(from, 1, table, t, t + 16);
            pause_ms(20);
        }
        struct kvt_event ev = node_wait(from, KVT_SEND_FAILED, 1, 5000);
        CHECK_STATUS(ev.status, ERR_TIMEOUT);
        CHECK(who == 0 || strstr(ev.text, "not complete after 400 ms"));
        CHECK_STATUS(node_wait(to, KVT_RECEIVE_FAILED, 1, 5000).status, ERR_TIMEOUT);
        node_wait(to, KVT_FENCED, 1, 5000);
        buf_release(&grant);
        node_stop(from);
        node_stop(to);
    }
}

/* ---- metrics of a transfer's rate ---- */

TEST(rate_and_bytes_are_counted_per_transport)
{
    struct node_options a = options("tcp"), b = options("tcp");
    struct buf grant = { 0 }, out = { 0 };
    const int32_t src[] = { 1, 2 }, dst[] = { 5, 9 };
    a.metrics = metrics_create();
    b.metrics = metrics_create();
    struct node *from = node_start(a), *to = node_start(b);
    uint64_t peer = node_connect(from, to);
    grant_of(to, 1, dst, 32, &grant);
    send_all(from, 1, peer, &grant, src, 32);
    node_wait(to, KVT_RECEIVED, 1, 5000);
    node_wait(from, KVT_SENT, 1, 5000);
    metrics_write(b.metrics, &out);
    CHECK(strstr(out.data, "baton_kv_transfer_rate_bytes_per_second_count{transport=\"tcp\","
                           "direction=\"receive\"} 1"));
    CHECK(strstr(out.data, "baton_kv_link_speed_bytes_per_second{transport=\"tcp\"}"));
    CHECK(strstr(out.data,
                 "baton_kv_transfer_failures_total{direction=\"receive\",reason=\"duplicate\"} 0"));
    buf_clear(&out);
    metrics_write(a.metrics, &out);
    CHECK(strstr(
        out.data,
        "baton_kv_transfer_rate_bytes_per_second_count{transport=\"tcp\",direction=\"send\"} 1"));
    buf_release(&out);
    buf_release(&grant);
    node_stop(from);
    node_stop(to);
    metrics_free(a.metrics);
    metrics_free(b.metrics);
}

#define PER_TRANSPORT(body)                                                                        \
    TEST(body##_mem) { body("mem"); }                                                              \
    TEST(body##_ipc) { body("ipc"); }                                                              \
    TEST(body##_tcp) { body("tcp"); }                                                              \
    TEST(body##_rdma) { body("rdma"); }                                                            \
    TEST(body##_ucx) { body("ucx"); }
#define TRANSPORTS(body)                                                                           \
    CASE(body##_mem), CASE(body##_ipc), CASE(body##_tcp), CASE(body##_rdma), CASE(body##_ucx)

PER_TRANSPORT(unknown_reference)
PER_TRANSPORT(blocks_out_of_range)
PER_TRANSPORT(consumed_reference)
PER_TRANSPORT(stale_reference_after_reuse)
PER_TRANSPORT(checksums_off)
PER_TRANSPORT(draft_layer_at_one_side)
TEST(late_write_mem) { late_write("mem", false); }
TEST(late_write_ipc) { late_write("ipc", false); }
TEST(late_write_tcp) { late_write("tcp", true); }

TEST_MAIN(TRANSPORTS(unknown_reference), TRANSPORTS(blocks_out_of_range),
          TRANSPORTS(consumed_reference), TRANSPORTS(stale_reference_after_reuse),
          CASE(late_write_mem), CASE(late_write_ipc), CASE(late_write_tcp),
          TRANSPORTS(checksums_off), TRANSPORTS(draft_layer_at_one_side),
          CASE(a_receiver_that_does_not_read_holds_up_itself_alone),
          CASE(receivers_of_another_layout_that_do_not_read_hold_up_themselves_alone),
          CASE(ends_and_cancels_never_wait), CASE(a_transfer_has_a_deadline),
          CASE(rate_and_bytes_are_counted_per_transport))
