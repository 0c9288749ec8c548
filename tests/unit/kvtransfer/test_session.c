/* test_session.c - the state machines alone: a transport that only records, hand-made messages,
 * counted events. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kvtransfer/session.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "tests/fixtures/kvt_bytes.h"
#include "tests/harness/test.h"

enum { TOKENS = 40, BLOCKS = 3 };

static struct kvt_message sent[64];
static size_t n_sent, n_puts, n_abandoned;
static struct kvt_put last_put;
static enum status put_status, notify_status;

static enum status fake_put(struct kvt_conn *c, const struct kvt_put *p)
{
    (void)c;
    if (put_status != OK) return put_status;
    last_put = *p;
    n_puts++;
    return OK;
}
static void fake_abandon(struct kvt_conn *c, uint32_t s, uint64_t g)
{
    (void)c, (void)s, (void)g, n_abandoned++;
}
static enum status fake_notify(struct kvt_conn *c, const struct kvt_message *m)
{
    (void)c;
    if (notify_status == OK && n_sent < COUNT_OF(sent)) sent[n_sent++] = *m;
    return notify_status;
}
static enum status fake_flush(struct kvt_transport *t)
{
    (void)t;
    return OK;
}
static uint64_t fake_link_speed(const struct kvt_conn *c)
{
    (void)c;
    return 12500000000;
}

static struct kvt_transport_ops ops = {
    .name = "fake",
    .put = fake_put,
    .abandon = fake_abandon,
    .notify = fake_notify,
    .flush = fake_flush,
    .link_speed = fake_link_speed,
};
static struct kvt_transport transport = { &ops };
static struct kvt_event events[64];
static size_t n_events;

static struct metrics *registry; /* of the sides created next; NULL: none */

/* The peer's own (KVT_PEER_QUIET) are the conformance tests'. */
static void on_event(void *arg, const struct kvt_event *ev)
{
    (void)arg;
    if (!kvt_event_is_of_peer(ev->kind)) events[n_events++] = *ev;
}

struct side {
    struct kvt_core core;
    struct kvt_conn conn;
    struct kvt_peer peer;
    struct dev_mem mem;
};

static void side_init(struct side *s)
{
    struct kv_layout l = {
        .dtype = DTYPE_F32,
        .block_tokens = 16,
        .n_layers = 2,
        .n_kv_heads = 1,
        .model_kv_heads = 1,
        .head_dim = 8,
        .tp_size = 1,
        .n_blocks = 8,
    };
    s->mem = (struct dev_mem){
        .ptr = calloc(1, kv_layout_pool_bytes(&l)),
        .bytes = kv_layout_pool_bytes(&l),
        .fd = -1,
    };
    struct kvt_options o = {
        .layout = l,
        .mem = &s->mem,
        .checksum = true,
        .n_transfers = 2,
        .stall_ms = 1000,
        .deadline_ms = 100000,
        .metrics = registry,
        .on_event = on_event,
    };
    kvt_core_init(&s->core, &o);
    kvt_peer_init(&s->peer);
    s->conn = (struct kvt_conn){ .t = &transport, .peer = &s->peer };
    s->peer.conn = &s->conn;
    s->peer.ops = &ops;
    s->peer.layout = l;
    s->peer.checksum = s->peer.up = true;
}

static void side_release(struct side *s)
{
    kvt_core_release(&s->core);
    free(s->mem.ptr);
}

static struct kvt_grant_msg claim(struct side *s, uint64_t id, struct buf *grant)
{
    int32_t blocks[BLOCKS] = { 5, 2, 7 };
    struct kvt_grant_msg g;
    CHECK_OK(kvt_recv_claim(
        &s->core, &(struct kvt_expectation){ id, 0, 1, blocks, BLOCKS, 0, TOKENS }, grant));
    CHECK_OK(kvt_grant_decode(buf_str(grant), &g, NULL));
    return g;
}

static void send_add(struct kvt_core *c, uint64_t id, uint32_t layer, uint32_t begin, uint32_t end,
                     const int32_t *blocks)
{
    kvt_send_add(c, id, &(struct kvt_token_range){ layer, begin, end, 0 }, blocks);
}

static void deliver(struct side *s, const struct kvt_grant_msg *g, enum kvt_message_kind kind,
                    struct kvt_message m)
{
    m.kind = kind;
    m.session = g->session;
    m.generation = g->generation;
    kvt_recv_message(&s->core, &s->peer, &m);
}

/* Adds the checksums of one layer to a NOTE. */
static void add_sums(struct side *s, struct kvt_message *m, uint32_t layer, uint32_t first,
                     uint32_t n)
{
    const int32_t blocks[BLOCKS] = { 5, 2, 7 };
    struct kvt_head_slice all = head_slice_all(&s->core.layout);
    for (uint32_t i = 0; i < n && first + i < BLOCKS; i++)
        m->sums[m->bytes / 8 + i] = kvt_plan_checksum(
            &all, s->core.pool, layer, blocks[first + i],
            kvt_plan_tokens(&s->core.layout, TOKENS, first + i), s->core.scratch);
    m->bytes += 8 * n;
}

static void note(struct side *s, const struct kvt_grant_msg *g, uint32_t layer, uint32_t first,
                 uint32_t n)
{
    struct kvt_message m = { .layer = layer, .first = first, .n = n };
    add_sums(s, &m, layer, first, n);
    deliver(s, g, KVT_MSG_NOTE, m);
}

TEST(session_receives_when_every_piece_is_verified)
{
    struct side s;
    struct buf grant = { 0 };
    side_init(&s);
    struct kvt_grant_msg g = claim(&s, 1, &grant);
    deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ .bytes = KVT_OPEN_SUMS });
    CHECK_EQ_INT(sent[0].kind, KVT_MSG_OPENED);
    note(&s, &g, 1, 0, 1);
    note(&s, &g, 0, 0, 3);
    note(&s, &g, 1, 1, 2);
    CHECK_EQ_INT(n_events, 0);
    deliver(&s, &g, KVT_MSG_FINISH,
            (struct kvt_message){ .bytes = layout_total_bytes(&s.core.layout, TOKENS, 0) });
    CHECK_EQ_INT(n_events, 1);
    CHECK_EQ_INT(events[0].kind, KVT_RECEIVED);
    CHECK_EQ_INT(events[0].link_speed, 12500000000);
    CHECK_EQ_INT(sent[1].kind, KVT_MSG_DONE);
    /* late: the session has ended */
    deliver(&s, &g, KVT_MSG_FINISH, (struct kvt_message){ 0 });
    CHECK_EQ_INT(n_events, 1);
    buf_release(&grant);
    side_release(&s);
}

/* Delivers a NOTE of pieces [first, + n) of both layers; `wrong`: the number of a checksum that
 * does not agree, or -1. */
static void note_both(struct side *s, const struct kvt_grant_msg *g, uint32_t first, uint32_t n,
                      int wrong)
{
    struct kvt_message m = { .more_layers = 1, .first = first, .n = n };
    add_sums(s, &m, 0, first, n);
    add_sums(s, &m, 1, first, n);
    if (wrong >= 0) m.sums[wrong]++;
    deliver(s, g, KVT_MSG_NOTE, m);
}

TEST(session_receives_pieces_of_several_layers_by_one_note)
{
    struct buf grant = { 0 };
    for (int wrong = -1; wrong < 4; wrong++) {
        struct side s;
        side_init(&s);
        n_events = n_sent = 0;
        buf_clear(&grant);
        struct kvt_grant_msg g = claim(&s, 1, &grant);
        deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ .bytes = KVT_OPEN_SUMS });
        note_both(&s, &g, 0, 1, -1);
        note_both(&s, &g, 1, 2, wrong);
        deliver(&s, &g, KVT_MSG_FINISH,
                (struct kvt_message){ .bytes = layout_total_bytes(&s.core.layout, TOKENS, 0) });
        CHECK_EQ_INT(n_events, 1);
        CHECK_EQ_INT(events[0].kind, wrong < 0 ? KVT_RECEIVED : KVT_RECEIVE_FAILED);
        if (wrong >= 0) {
            char place[32];
            snprintf(place, sizeof place, "layer %d, block %d ", wrong / 2, 1 + wrong % 2);
            CHECK_STATUS(events[0].status, ERR_CHECKSUM);
            CHECK(strstr(events[0].text, place));
        }
        side_release(&s);
    }
    buf_release(&grant);
}

TEST(session_refuses_a_note_whose_layers_are_not_there_or_not_next)
{
    const struct kvt_message bad[] = {
        { .layer = 1, .more_layers = 1, .n = 1, .bytes = 16 },
        { .more_layers = KVT_PUT_PIECES - 1, .n = 1, .bytes = 8 * KVT_PUT_PIECES },
        { .more_layers = 1, .n = 1, .bytes = 16 }, /* layer 1 has piece 0 */
        { .more_layers = 1, .first = 1, .n = 1, .bytes = 16 },
        { .layer = 1, .first = 1, .n = 1, .more_layers = UINT32_MAX, .bytes = 0 },
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        struct side s;
        struct buf grant = { 0 };
        side_init(&s);
        n_events = n_sent = 0;
        struct kvt_grant_msg g = claim(&s, 1, &grant);
        deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ .bytes = KVT_OPEN_SUMS });
        note(&s, &g, 1, 0, 1);
        deliver(&s, &g, KVT_MSG_NOTE, bad[i]);
        CHECK_EQ_INT(n_events, 1);
        CHECK_EQ_INT(events[0].kind, KVT_RECEIVE_FAILED);
        CHECK_STATUS(events[0].status, ERR_FORMAT);
        buf_release(&grant);
        side_release(&s);
    }
}

TEST(session_fails_on_a_wrong_checksum_and_waits_for_the_writer)
{
    struct side s;
    struct buf grant = { 0 };
    side_init(&s);
    struct kvt_grant_msg g = claim(&s, 1, &grant);
    deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ .bytes = KVT_OPEN_SUMS });
    struct kvt_message bad = { .layer = 0, .first = 0, .n = 1, .bytes = 8, .sums = { 42 } };
    deliver(&s, &g, KVT_MSG_NOTE, bad);
    CHECK_EQ_INT(n_events, 0); /* the writer may be about to stop */
    note(&s, &g, 0, 0, 3);
    note(&s, &g, 1, 0, 3);
    deliver(&s, &g, KVT_MSG_FINISH,
            (struct kvt_message){ .bytes = layout_total_bytes(&s.core.layout, TOKENS, 0) });
    CHECK_EQ_INT(n_events, 1);
    CHECK_EQ_INT(events[0].kind, KVT_RECEIVE_FAILED);
    CHECK_STATUS(events[0].status, ERR_CHECKSUM);
    CHECK_EQ_INT(sent[1].kind, KVT_MSG_STOP);
    note(&s, &g, 0, 0, 1);
    kvt_recv_cancel(&s.core, 1);
    CHECK_EQ_INT(n_events, 1); /* no FENCED before the writer's STOPPED */
    deliver(&s, &g, KVT_MSG_STOPPED, (struct kvt_message){ 0 });
    CHECK_EQ_INT(n_events, 2);
    CHECK_EQ_INT(events[1].kind, KVT_FENCED);
    kvt_recv_cancel(&s.core, 1);
    CHECK_EQ_INT(n_events, 2);
    buf_release(&grant);
    side_release(&s);
}

/* After a wrong checksum the receiver waits a moment: STOPPED means that the writer gave up,
 * silence is a checksum failure. */
TEST(session_doubts_a_wrong_checksum_for_a_moment)
{
    struct side s;
    struct buf grant = { 0 };
    const struct kvt_message bad = { .layer = 1, .first = 0, .n = 1, .bytes = 8, .sums = { 42 } };
    registry = metrics_create();
    side_init(&s);
    s.core.stall_ms = 60000;
    struct kvt_grant_msg g = claim(&s, 1, &grant);
    deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ .bytes = KVT_OPEN_SUMS });
    deliver(&s, &g, KVT_MSG_NOTE, bad);
    kvt_recv_tick(&s.core, clock_ms() + KVT_DOUBT_MS / 2);
    deliver(&s, &g, KVT_MSG_STOPPED, (struct kvt_message){ .status = ERR_CANCELED });
    CHECK_EQ_INT(n_events, 2);
    CHECK_EQ_INT(events[0].kind, KVT_RECEIVE_FAILED);
    CHECK_STATUS(events[0].status, ERR_CANCELED);
    CHECK_EQ_INT(events[1].kind, KVT_FENCED);
    CHECK_EQ_INT(counter_value(metrics_counter(
                     registry, "baton_kv_transfer_checksum_failures_total", "", "")),
                 0);

    g = claim(&s, 2, (buf_clear(&grant), &grant));
    deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ .bytes = KVT_OPEN_SUMS });
    deliver(&s, &g, KVT_MSG_NOTE, bad);
    kvt_recv_tick(&s.core, clock_ms() + KVT_DOUBT_MS + 100);
    CHECK_EQ_INT(n_events, 3);
    CHECK_STATUS(events[2].status, ERR_CHECKSUM);
    CHECK(strstr(events[2].text, "layer 1, block 0"));
    buf_release(&grant);
    side_release(&s);
    metrics_free(registry);
    registry = NULL;
}

/* If STOP or its answer is lost, the blocks must not stay in quarantine as long as the writer
 * lives. */
TEST(session_repeats_a_stop_that_is_not_answered)
{
    struct side s;
    struct buf grant = { 0 };
    side_init(&s);
    struct kvt_grant_msg g = claim(&s, 1, &grant);
    deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ 0 });
    kvt_recv_cancel(&s.core, 1);
    uint64_t now = clock_ms();
    n_sent = 0;
    kvt_recv_tick(&s.core, now + KVT_STOP_AGAIN_MS / 2);
    CHECK_EQ_INT(n_sent, 0);
    for (uint64_t after = 0; after < 10 * KVT_STOP_AGAIN_MS; after += 50)
        kvt_recv_tick(&s.core, now + after);
    CHECK_EQ_INT(n_sent, 4); /* after 1, 2, 4 and 8 pauses */
    CHECK_EQ_INT(sent[3].kind, KVT_MSG_STOP);
    CHECK_EQ_INT(sent[3].generation, g.generation);
    uint64_t day = 24 * 3600 * 1000;
    n_sent = 0;
    for (uint64_t i = 0; i < 40; i++) kvt_recv_tick(&s.core, now + day + 50 * i);
    CHECK_EQ_INT(n_sent, 13); /* 16 s to 18 h, one per tick; the next is due after 36 h */
    n_sent = 4;
    deliver(&s, &g, KVT_MSG_STOPPED, (struct kvt_message){ 0 });
    CHECK_EQ_INT(events[n_events - 1].kind, KVT_FENCED);
    kvt_recv_tick(&s.core, now + 100 * KVT_STOP_AGAIN_MS);
    CHECK_EQ_INT(n_sent, 4);
    buf_release(&grant);
    side_release(&s);
}

TEST(session_refuses_pieces_out_of_order_missing_or_twice)
{
    const struct {
        uint32_t layer, first, n;
    } bad[] = { { 2, 0, 1 }, { 0, 1, 1 }, { 0, 0, 4 }, { 0, UINT32_MAX, 2 } };
    for (size_t i = 0; i < COUNT_OF(bad) + 2; i++) {
        struct side s;
        struct buf grant = { 0 };
        side_init(&s);
        n_events = n_sent = 0;
        struct kvt_grant_msg g = claim(&s, 1, &grant);
        deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ .bytes = KVT_OPEN_SUMS });
        if (i < COUNT_OF(bad)) {
            note(&s, &g, bad[i].layer < 2 ? bad[i].layer : 0, 0, 0);
            struct kvt_message m = { .layer = bad[i].layer, .first = bad[i].first, .n = bad[i].n };
            deliver(&s, &g, KVT_MSG_NOTE, m);
        } else if (i == COUNT_OF(bad)) {
            note(&s, &g, 0, 0, 2);
            note(&s, &g, 0, 0, 2);
        } else {
            note(&s, &g, 0, 0, 3);
            deliver(&s, &g, KVT_MSG_FINISH, (struct kvt_message){ 0 });
        }
        CHECK_EQ_INT(n_events, 1);
        CHECK_STATUS(events[0].status, ERR_FORMAT);
        kvt_recv_peer_lost(&s.core, &s.peer, ERR_PEER_LOST, "gone");
        CHECK_EQ_INT(n_events, 1);
        kvt_recv_peer_fenced(&s.core, &s.peer);
        CHECK_EQ_INT(events[1].kind, KVT_FENCED);
        buf_release(&grant);
        side_release(&s);
    }
}

TEST(session_scatter_follows_the_session)
{
    struct side s;
    struct buf grant = { 0 };
    struct iovec iov[8];
    side_init(&s);
    ops.caps = KVT_CAP_RECEIVER_SCATTERS;
    struct kvt_grant_msg g = claim(&s, 1, &grant);
    struct kvt_message head = {
        .kind = KVT_MSG_DATA,
        .session = g.session,
        .generation = g.generation,
        .n = 1,
        .bytes = kv_layout_piece_bytes(&s.core.layout),
    };
    CHECK_EQ_INT(kvt_recv_scatter(&s.core, &s.peer, &head, 0, iov, 8), 0); /* not opened */
    deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ .bytes = KVT_OPEN_SUMS });
    CHECK_EQ_INT(kvt_recv_scatter(&s.core, &s.peer, &head, 0, iov, 8), 1);
    CHECK(iov[0].iov_base == s.core.pool + kv_layout_offset(&s.core.layout, 0, 5));
    kvt_recv_cancel(&s.core, 1); /* in mid-frame: FENCED at once, the rest is dropped */
    CHECK_EQ_INT(n_events, 2);
    CHECK_EQ_INT(events[1].kind, KVT_FENCED);
    CHECK_EQ_INT(kvt_recv_scatter(&s.core, &s.peer, &head, 100, iov, 8), 0);
    g = claim(&s, 2, (buf_clear(&grant), &grant));
    deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ .bytes = KVT_OPEN_SUMS });
    note(&s, &g, 0, 0, 1); /* announced, but nothing was scattered */
    CHECK_STATUS(events[2].status, ERR_FORMAT);
    buf_release(&grant);
    side_release(&s);
}

TEST(session_stalls_and_full)
{
    struct side s;
    struct buf grant = { 0 };
    int32_t blocks[BLOCKS] = { 1, 2, 3 };
    side_init(&s);
    (void)claim(&s, 1, &grant);
    (void)claim(&s, 2, (buf_clear(&grant), &grant));
    const struct kvt_expectation third = { 3, 0, 1, blocks, BLOCKS, 0, TOKENS };
    CHECK_STATUS(kvt_recv_claim(&s.core, &third, &grant), ERR_FULL);
    kvt_recv_tick(&s.core, clock_ms());
    CHECK_EQ_INT(n_events, 0);
    kvt_recv_tick(&s.core, clock_ms() + 1500);
    CHECK_EQ_INT(n_events, 4);
    CHECK_STATUS(events[0].status, ERR_TIMEOUT);
    CHECK_OK(kvt_recv_claim(&s.core, &third, &grant));
    buf_release(&grant);
    side_release(&s);
}

static struct kvt_send *open_send(struct side *s, uint64_t id, struct buf *grant)
{
    struct kvt_send *send = NULL;
    CHECK_OK(kvt_send_create(&s->core, id, id, 1, buf_str(grant), &send, NULL));
    kvt_send_begin(&s->core, send, &s->peer);
    return send;
}

static void answer(struct side *s, const struct kvt_send *send, enum kvt_message_kind kind,
                   enum status st)
{
    struct kvt_message m = {
        .kind = kind, .session = send->session, .generation = send->generation, .status = st
    };
    kvt_send_message(&s->core, &s->peer, &m);
}

TEST(session_sends_nothing_before_opened_and_a_partial_block_last)
{
    struct side s;
    struct buf grant = { 0 };
    int32_t src[BLOCKS] = { 0, 1, 2 };
    side_init(&s);
    (void)claim(&s, 1, &grant);
    struct kvt_send *send = open_send(&s, 9, &grant);
    send_add(&s.core, 9, 0, 0, 20, src);
    CHECK(!kvt_send_pump(&s.core, &s.peer));
    CHECK_EQ_INT(n_puts, 0);
    answer(&s, send, KVT_MSG_OPENED, OK);
    CHECK(kvt_send_pump(&s.core, &s.peer));
    CHECK_EQ_INT(last_put.head.n, 1); /* 20 tokens: one full block */
    CHECK_EQ_INT(sent[n_sent - 1].kind, KVT_MSG_NOTE);
    send_add(&s.core, 9, 0, 20, TOKENS, src);
    put_status = ERR_BUSY;
    CHECK(!kvt_send_pump(&s.core, &s.peer));
    put_status = OK;
    CHECK(kvt_send_pump(&s.core, &s.peer));
    CHECK_EQ_INT(last_put.head.first, 1);
    CHECK_EQ_INT(last_put.head.n, 2);
    send_add(&s.core, 9, 1, 0, TOKENS, src);
    kvt_send_end(&s.core, 9, clock_ns(), false);
    kvt_send_pump(&s.core, &s.peer);
    CHECK_EQ_INT(last_put.tag / KVT_SEND_PUTS, send->serial);
    for (uint64_t i = 0; i < 3; i++) {
        CHECK_EQ_INT(sent[n_sent - 1].kind, KVT_MSG_NOTE); /* no FINISH before the put ends */
        kvt_send_put_done(&s.core, &s.peer, send->serial * KVT_SEND_PUTS + i);
    }
    CHECK_EQ_INT(send->unfinished, 0);
    CHECK_EQ_INT(sent[n_sent - 1].kind, KVT_MSG_FINISH);
    CHECK_EQ_INT(sent[n_sent - 1].bytes, layout_total_bytes(&s.core.layout, TOKENS, 0));
    answer(&s, send, KVT_MSG_DONE, OK);
    CHECK_EQ_INT(n_events, 1);
    CHECK_EQ_INT(events[0].kind, KVT_SENT);
    buf_release(&grant);
    side_release(&s);
}

TEST(session_send_failed_waits_for_unfinished_puts)
{
    struct side s;
    struct buf grant = { 0 };
    int32_t src[BLOCKS] = { 0, 1, 2 };
    side_init(&s);
    (void)claim(&s, 1, &grant);
    struct kvt_send *send = open_send(&s, 9, &grant);
    answer(&s, send, KVT_MSG_OPENED, OK);
    send_add(&s.core, 9, 0, 0, TOKENS, src);
    kvt_send_pump(&s.core, &s.peer);
    answer(&s, send, KVT_MSG_STOP, ERR_CHECKSUM);
    CHECK_EQ_INT(n_events, 0); /* the put still reads the source */
    CHECK_EQ_INT(n_abandoned, 1);
    kvt_send_put_done(&s.core, &s.peer, last_put.tag + 1); /* an unknown tag */
    CHECK_EQ_INT(n_events, 0);
    kvt_send_put_done(&s.core, &s.peer, last_put.tag);
    CHECK_EQ_INT(n_events, 1);
    CHECK_STATUS(events[0].status, ERR_CHECKSUM);
    CHECK_EQ_INT(sent[n_sent - 1].kind, KVT_MSG_STOPPED);
    send_add(&s.core, 9, 1, 0, TOKENS, src); /* late calls of the caller */
    kvt_send_end(&s.core, 9, 0, false);
    CHECK_EQ_INT(n_events, 1);
    /* STOP of an unknown session is answered too */
    struct kvt_message stop = { .kind = KVT_MSG_STOP, .session = 1, .generation = 77 };
    n_sent = 0;
    kvt_send_message(&s.core, &s.peer, &stop);
    CHECK_EQ_INT(sent[0].kind, KVT_MSG_STOPPED);
    CHECK_EQ_INT(sent[0].generation, 77);
    buf_release(&grant);
    side_release(&s);
}

/* The send is cancelled after its caller finished it, with a put in flight: the transport may skip
 * bytes of the put, so no FINISH may follow. */
TEST(session_cancelled_late_says_no_finish)
{
    struct side s;
    struct buf grant = { 0 };
    int32_t src[BLOCKS] = { 0, 1, 2 };
    side_init(&s);
    (void)claim(&s, 1, &grant);
    struct kvt_send *send = open_send(&s, 9, &grant);
    answer(&s, send, KVT_MSG_OPENED, OK);
    for (uint32_t layer = 0; layer < 2; layer++) send_add(&s.core, 9, layer, 0, TOKENS, src);
    while (kvt_send_pump(&s.core, &s.peer)) {}
    kvt_send_end(&s.core, 9, clock_ns(), false);
    kvt_send_put_done(&s.core, &s.peer, send->serial * KVT_SEND_PUTS);
    kvt_send_fail(&s.core, send, ERR_CANCELED, "cancelled");
    CHECK_EQ_INT(n_abandoned, 1);
    kvt_send_put_done(&s.core, &s.peer, last_put.tag);
    CHECK_EQ_INT(events[0].kind, KVT_SEND_FAILED);
    for (size_t i = 0; i < n_sent; i++) CHECK(sent[i].kind != KVT_MSG_FINISH);
    CHECK_EQ_INT(sent[n_sent - 1].kind, KVT_MSG_STOPPED);
    buf_release(&grant);
    side_release(&s);
}

TEST(session_send_refuses_gaps_and_an_early_done)
{
    struct side s;
    struct buf grant = { 0 };
    int32_t src[BLOCKS] = { 0, 1, 2 };
    side_init(&s);
    (void)claim(&s, 1, &grant);
    struct kvt_send *send = open_send(&s, 9, &grant);
    answer(&s, send, KVT_MSG_OPENED, OK);
    send_add(&s.core, 9, 0, 16, TOKENS, src); /* tokens 0..16 never came */
    CHECK_STATUS(events[0].status, ERR_INVALID);
    send = open_send(&s, 10, &grant);
    answer(&s, send, KVT_MSG_OPENED, OK);
    answer(&s, send, KVT_MSG_DONE, OK);
    CHECK_EQ_INT(n_events, 2);
    CHECK_STATUS(events[1].status, ERR_FORMAT);
    buf_release(&grant);
    side_release(&s);
}

/* ---- why a transfer failed ---- */

/* Two transfers of the same tokens: what the caller says is for both, and each has its own end. */
TEST(session_sends_of_one_sequence)
{
    struct side s;
    struct buf grants[2] = { { 0 }, { 0 } };
    struct kvt_send *send[2] = { NULL };
    int32_t src[BLOCKS] = { 0, 1, 2 };
    side_init(&s);
    for (uint64_t i = 0; i < 2; i++) {
        (void)claim(&s, 1 + i, &grants[i]);
        CHECK_OK(kvt_send_create(&s.core, 100 + i, 100, 1, buf_str(&grants[i]), &send[i], NULL));
        kvt_send_begin(&s.core, send[i], &s.peer);
        answer(&s, send[i], KVT_MSG_OPENED, OK);
    }
    send_add(&s.core, 100, 0, 0, TOKENS, src);
    CHECK(send[0]->tokens[0] == TOKENS && send[1]->tokens[0] == TOKENS);
    send_add(&s.core, 101, 1, 0, TOKENS, src); /* `of` is the name, not the id */
    CHECK(send[0]->tokens[1] == 0 && send[1]->tokens[1] == 0);
    kvt_send_fail(&s.core, send[0], ERR_IO, "this one alone");
    CHECK(n_events == 1 && events[0].id == 100);
    CHECK_EQ_INT(send[1]->state, KVT_SEND_ACTIVE);
    kvt_send_cancel_of(&s.core, 100);
    CHECK(n_events == 2 && events[1].id == 101);
    CHECK_STATUS(events[1].status, ERR_CANCELED);
    CHECK(map_get(&s.core.sends, map_key_u64(&(uint64_t){ 100 })) == NULL);
    for (int i = 0; i < 2; i++) buf_release(&grants[i]);
    side_release(&s);
}

/* FINISH waits for tokens that are still to be announced, and for no longer than a stall. */
TEST(session_finishes_once_the_rest_is_there)
{
    for (int comes = 0; comes < 2; comes++) {
        struct side s;
        struct buf grant = { 0 };
        int32_t src[BLOCKS] = { 0, 1, 2 };
        n_events = n_puts = n_sent = 0;
        side_init(&s);
        (void)claim(&s, 1, &grant);
        struct kvt_send *send = open_send(&s, 9, &grant);
        answer(&s, send, KVT_MSG_OPENED, OK);
        send_add(&s.core, 9, 0, 0, TOKENS, src);
        kvt_send_end(&s.core, 9, clock_ns(), true);
        while (kvt_send_pump(&s.core, &s.peer)) {}
        for (uint64_t i = 0; i < n_puts; i++)
            kvt_send_put_done(&s.core, &s.peer, send->serial * KVT_SEND_PUTS + i);
        CHECK_EQ_INT(n_events, 0);
        if (comes) {
            send_add(&s.core, 9, 1, 0, TOKENS, src);
            while (kvt_send_pump(&s.core, &s.peer)) {}
            kvt_send_put_done(&s.core, &s.peer, last_put.tag);
            CHECK_EQ_INT(sent[n_sent - 1].kind, KVT_MSG_FINISH);
        } else {
            kvt_send_tick(&s.core, &s.peer, clock_ms() + s.core.stall_ms + 1000);
            CHECK_EQ_INT(n_events, 1);
            CHECK_STATUS(events[0].status, ERR_TIMEOUT);
        }
        buf_release(&grant);
        side_release(&s);
    }
}

static uint64_t failures(const char *direction, const char *reason)
{
    char label[80];
    snprintf(label, sizeof label, "direction=\"%s\",reason=\"%s\"", direction, reason);
    return counter_value(metrics_counter(registry, "baton_kv_transfer_failures_total", label, ""));
}

/* Does `what` to an opened, bound receiver, which must fail for `reason` and no other. */
static void receive_fails(const char *reason, unsigned caps,
                          void (*what)(struct side *s, const struct kvt_grant_msg *g))
{
    struct side s;
    struct buf grant = { 0 };
    uint64_t before = failures("receive", reason);
    ops.caps = caps;
    side_init(&s);
    n_events = 0;
    struct kvt_grant_msg g = claim(&s, 1, &grant);
    deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ .bytes = KVT_OPEN_SUMS });
    what(&s, &g);
    CHECK(n_events >= 1);
    CHECK_EQ_INT(events[0].kind, KVT_RECEIVE_FAILED);
    if (failures("receive", reason) != before + 1)
        test_fail(__FILE__, __LINE__, "no failure was counted as %s (%s)", reason, events[0].text);
    kvt_recv_peer_fenced(&s.core, &s.peer);
    buf_release(&grant);
    side_release(&s);
}

static void wrong_sum(struct side *s, const struct kvt_grant_msg *g)
{
    deliver(s, g, KVT_MSG_NOTE, (struct kvt_message){ .n = 1, .bytes = 8 });
    deliver(s, g, KVT_MSG_FINISH, (struct kvt_message){ 0 });
}
static void no_sums(struct side *s, const struct kvt_grant_msg *g)
{
    deliver(s, g, KVT_MSG_NOTE, (struct kvt_message){ .n = 1 });
}
static void no_such_piece(struct side *s, const struct kvt_grant_msg *g)
{
    deliver(s, g, KVT_MSG_NOTE, (struct kvt_message){ .layer = 2, .n = 1, .bytes = 8 });
}
static void other_total(struct side *s, const struct kvt_grant_msg *g)
{
    for (uint32_t layer = 0; layer < 2; layer++) note(s, g, layer, 0, BLOCKS);
    deliver(s, g, KVT_MSG_FINISH, (struct kvt_message){ .bytes = 1 });
}
static void twice(struct side *s, const struct kvt_grant_msg *g)
{
    note(s, g, 0, 0, 2);
    note(s, g, 0, 1, 1);
}
static void too_early(struct side *s, const struct kvt_grant_msg *g) { note(s, g, 0, 1, 1); }
static void finish_early(struct side *s, const struct kvt_grant_msg *g)
{
    note(s, g, 0, 0, BLOCKS);
    deliver(s, g, KVT_MSG_FINISH,
            (struct kvt_message){ .bytes = layout_total_bytes(&s->core.layout, TOKENS, 0) });
}
static void not_arrived(struct side *s, const struct kvt_grant_msg *g) { note(s, g, 0, 0, 1); }
static void frame(struct side *s, const struct kvt_grant_msg *g, uint32_t first, uint64_t bytes)
{
    struct iovec iov[8];
    struct kvt_message head = {
        .kind = KVT_MSG_DATA,
        .session = g->session,
        .generation = g->generation,
        .first = first,
        .n = 1,
        .bytes = bytes,
    };
    if (kvt_recv_scatter(&s->core, &s->peer, &head, 0, iov, 8) > 0)
        kvt_recv_scattered(&s->core, &s->peer, &head, bytes);
}
static void frame_twice(struct side *s, const struct kvt_grant_msg *g)
{
    frame(s, g, 0, kv_layout_piece_bytes(&s->core.layout));
    frame(s, g, 0, kv_layout_piece_bytes(&s->core.layout));
}
static void frame_early(struct side *s, const struct kvt_grant_msg *g)
{
    frame(s, g, 1, kv_layout_piece_bytes(&s->core.layout));
}
static void frame_short(struct side *s, const struct kvt_grant_msg *g)
{
    frame(s, g, 0, kv_layout_piece_bytes(&s->core.layout) - 1);
}
static void silent(struct side *s, const struct kvt_grant_msg *g)
{
    (void)g, kvt_recv_tick(&s->core, clock_ms() + 1500);
}
static void endless(struct side *s, const struct kvt_grant_msg *g)
{
    (void)g;
    s->core.stall_ms = 1000000;
    kvt_recv_tick(&s->core, clock_ms() + 100500);
    CHECK(strstr(events[0].text, "not complete after 100000 ms"));
}
static void lost(struct side *s, const struct kvt_grant_msg *g)
{
    (void)g, kvt_recv_peer_lost(&s->core, &s->peer, ERR_PEER_LOST, "gone");
}
static void cancel(struct side *s, const struct kvt_grant_msg *g)
{
    (void)g, kvt_recv_cancel(&s->core, 1);
}
static void stopped_for(struct side *s, const struct kvt_grant_msg *g)
{
    deliver(s, g, KVT_MSG_STOPPED, (struct kvt_message){ .status = ERR_NOMEM });
}

TEST(session_counts_what_a_receiver_died_of)
{
    registry = metrics_create();
    receive_fails("checksum", 0, wrong_sum);
    receive_fails("format", 0, no_sums);
    receive_fails("format", 0, no_such_piece);
    receive_fails("format", 0, other_total);
    receive_fails("duplicate", 0, twice);
    receive_fails("duplicate", KVT_CAP_RECEIVER_SCATTERS, frame_twice);
    receive_fails("reordered", 0, too_early);
    receive_fails("reordered", KVT_CAP_RECEIVER_SCATTERS, frame_early);
    receive_fails("truncated", 0, finish_early);
    receive_fails("truncated", KVT_CAP_RECEIVER_SCATTERS, not_arrived);
    receive_fails("truncated", KVT_CAP_RECEIVER_SCATTERS, frame_short);
    receive_fails("timeout", 0, silent);
    receive_fails("timeout", 0, endless);
    receive_fails("peer_lost", 0, lost);
    receive_fails("canceled", 0, cancel);
    receive_fails("other", 0, stopped_for);
    metrics_free(registry);
}

/* A sender that gets STOP counts the receiver's reason; an ended grant counts as stale on both
 * sides. */
TEST(session_counts_what_a_sender_died_of)
{
    const struct {
        enum status st;
        const char *reason;
    } stops[] = {
        { ERR_CHECKSUM, "checksum" }, { ERR_STALE, "stale" },       { ERR_FORMAT, "format" },
        { ERR_TIMEOUT, "timeout" },   { ERR_CANCELED, "canceled" },
    };
    registry = metrics_create();
    for (size_t i = 0; i < COUNT_OF(stops); i++) {
        struct side s;
        struct buf grant = { 0 };
        side_init(&s);
        n_events = 0;
        (void)claim(&s, 1, &grant);
        struct kvt_send *send = open_send(&s, 9, &grant);
        answer(&s, send, KVT_MSG_STOP, stops[i].st);
        CHECK_STATUS(events[0].status, stops[i].st);
        CHECK_EQ_INT(failures("send", stops[i].reason), 1);
        buf_release(&grant);
        side_release(&s);
    }
    struct side s;
    struct buf grant = { 0 };
    side_init(&s);
    struct kvt_grant_msg g = claim(&s, 1, &grant);
    g.generation--;
    deliver(&s, &g, KVT_MSG_OPEN, (struct kvt_message){ .bytes = KVT_OPEN_SUMS });
    CHECK_STATUS(sent[n_sent - 1].status, ERR_STALE);
    deliver(&s, &g, KVT_MSG_NOTE, (struct kvt_message){ .n = 1, .bytes = 8 });
    CHECK_EQ_INT(counter_value(metrics_counter(registry, "baton_kv_transfer_dropped_total",
                                               "reason=\"stale\"", "")),
                 2);
    g.generation++;
    /* live, but opened over another connection */
    deliver(&s, &g, KVT_MSG_NOTE, (struct kvt_message){ .n = 1, .bytes = 8 });
    CHECK_EQ_INT(counter_value(metrics_counter(registry, "baton_kv_transfer_dropped_total",
                                               "reason=\"foreign\"", "")),
                 1);
    buf_release(&grant);
    side_release(&s);
    metrics_free(registry);
}

/* A transport that never completes puts gets a bounded number of them. */
TEST(session_bounds_its_puts)
{
    struct side s;
    struct buf grant = { 0 };
    int32_t blocks[64];
    side_init(&s);
    for (int32_t i = 0; i < 64; i++) blocks[i] = i % 8;
    CHECK_OK(
        kvt_recv_claim(&s.core, &(struct kvt_expectation){ 1, 0, 1, blocks, 64, 0, 1024 }, &grant));
    struct kvt_send *send = open_send(&s, 9, &grant);
    answer(&s, send, KVT_MSG_OPENED, OK);
    n_puts = 0;
    for (uint32_t t = 0; t < 1024; t += 16) {
        send_add(&s.core, 9, 0, t, t + 16, blocks);
        kvt_send_pump(&s.core, &s.peer);
    }
    CHECK_EQ_INT(n_puts, KVT_SEND_PUTS);
    kvt_send_put_done(&s.core, &s.peer, send->serial * KVT_SEND_PUTS + 5);
    CHECK(kvt_send_pump(&s.core, &s.peer));
    CHECK_EQ_INT(n_puts, KVT_SEND_PUTS + 1);
    CHECK_EQ_INT(last_put.tag, send->serial * KVT_SEND_PUTS + 5);
    CHECK_EQ_INT(last_put.head.n, 32); /* all that became ready meanwhile is one put */
    buf_release(&grant);
    side_release(&s);
}

/* The transport's put size applies only if this side does not read the bytes; with checksums all
 * transports use the same size. */
TEST(session_takes_the_size_of_puts_from_the_transport)
{
    for (int sums = 0; sums < 2; sums++) {
        struct side s;
        struct buf grant = { 0 };
        int32_t blocks[64];
        side_init(&s);
        s.core.checksum = sums;
        ops.put_bytes = 4 * (uint32_t)kv_layout_piece_bytes(&s.core.layout);
        for (int32_t i = 0; i < 64; i++) blocks[i] = i % 8;
        CHECK_OK(kvt_recv_claim(&s.core, &(struct kvt_expectation){ 1, 0, 1, blocks, 64, 0, 1024 },
                                &grant));
        struct kvt_send *send = open_send(&s, 9, &grant);
        answer(&s, send, KVT_MSG_OPENED, OK);
        n_puts = 0;
        send_add(&s.core, 9, 0, 0, 1024, blocks);
        while (kvt_send_pump(&s.core, &s.peer)) {}
        CHECK_EQ_INT(n_puts, sums ? 1 : 16);
        CHECK_EQ_INT(last_put.head.n, sums ? 64 : 4);
        ops.put_bytes = 0;
        buf_release(&grant);
        side_release(&s);
    }
}

/* OPEN and FINISH are round trips: a silent receiver ends the transfer within seconds, however long
 * stall_ms is. Waiting for the caller's next layer may take all of stall_ms. */
TEST(session_waits_seconds_for_an_answer)
{
    struct side s;
    struct buf grant = { 0 };
    int32_t src[BLOCKS] = { 0, 1, 2 };
    side_init(&s);
    s.core.stall_ms = 60000;
    (void)claim(&s, 1, &grant);
    (void)open_send(&s, 9, &grant);
    kvt_send_tick(&s.core, &s.peer, clock_ms() + KVT_ANSWER_MS - 1000);
    CHECK_EQ_INT(n_events, 0);
    kvt_send_tick(&s.core, &s.peer, clock_ms() + KVT_ANSWER_MS + 1000);
    CHECK_EQ_INT(n_events, 1);
    CHECK_STATUS(events[0].status, ERR_TIMEOUT);
    CHECK(strstr(events[0].text, "OPEN"));

    (void)claim(&s, 2, (buf_clear(&grant), &grant));
    struct kvt_send *send = open_send(&s, 10, &grant);
    answer(&s, send, KVT_MSG_OPENED, OK);
    kvt_send_tick(&s.core, &s.peer, clock_ms() + 100 + 60000); /* nothing to send yet */
    for (uint32_t layer = 0; layer < 2; layer++) send_add(&s.core, 10, layer, 0, TOKENS, src);
    kvt_send_end(&s.core, 10, clock_ns(), false);
    while (kvt_send_pump(&s.core, &s.peer)) {}
    /* its puts are in flight */
    kvt_send_tick(&s.core, &s.peer, clock_ms() + KVT_MOVE_MS - 1000);
    CHECK_EQ_INT(n_events, 1);
    for (uint64_t i = 0; i < 2; i++)
        kvt_send_put_done(&s.core, &s.peer, send->serial * KVT_SEND_PUTS + i);
    CHECK_EQ_INT(send->state, KVT_SEND_FINISHING);
    kvt_send_tick(&s.core, &s.peer, clock_ms() + KVT_ANSWER_MS + 1000);
    CHECK_EQ_INT(n_events, 2);
    CHECK_STATUS(events[1].status, ERR_TIMEOUT);
    CHECK(strstr(events[1].text, "FINISH"));
    buf_release(&grant);
    side_release(&s);
}

/* A path that takes no bytes ends the transfers on it in KVT_MOVE_MS, and the connection with them;
 * bytes of any of them show that it works, as does the end of a stop of this process. */
TEST(session_fails_when_its_connection_moves_nothing)
{
    struct side s;
    struct buf grant = { 0 };
    int32_t src[BLOCKS] = { 0, 1, 2 };
    struct kvt_send *send[2];
    side_init(&s);
    n_events = n_puts = 0;
    s.core.stall_ms = 60000;
    for (uint64_t i = 0; i < 2; i++) {
        (void)claim(&s, 1 + i, (buf_clear(&grant), &grant));
        send[i] = open_send(&s, 9 + i, &grant);
        answer(&s, send[i], KVT_MSG_OPENED, OK);
        send_add(&s.core, 9 + i, 0, 0, TOKENS, src);
        send[i]->t_moved_ms = 1; /* its layer took long: that is no stall of the path */
    }
    while (kvt_send_pump(&s.core, &s.peer)) {}
    CHECK(send[0]->unfinished && send[1]->unfinished);
    uint64_t t = clock_ms();
    kvt_send_tick(&s.core, &s.peer, t + KVT_MOVE_MS - 500);
    kvt_send_put_done(&s.core, &s.peer, send[1]->serial * KVT_SEND_PUTS);
    s.peer.t_moved_ms = t + 2000;
    kvt_send_tick(&s.core, &s.peer, t + KVT_MOVE_MS + 1000);
    CHECK_EQ_INT(n_events, 0);
    kvt_send_wait_again(&s.peer, t + 4000);
    kvt_send_tick(&s.core, &s.peer, t + KVT_MOVE_MS + 3000);
    CHECK_EQ_INT(n_events, 0);
    kvt_send_tick(&s.core, &s.peer, t + KVT_MOVE_MS + 4100);
    CHECK_EQ_INT(send[0]->state, KVT_SEND_STOPPING);
    CHECK_STATUS(send[0]->status, ERR_TIMEOUT);
    CHECK(strstr(send[0]->text, "no KV left for 3000 ms"));
    CHECK(send[1]->state == KVT_SEND_ACTIVE); /* it waits for its next layer */
    CHECK(!s.peer.must_close);
    kvt_send_tick(&s.core, &s.peer, t + KVT_MOVE_MS + 4200);
    CHECK(s.peer.must_close);
    buf_release(&grant);
    side_release(&s);
}

/* A receiver that repeats its messages makes no progress, so the stall deadline still applies. */
TEST(session_repeated_messages_are_no_progress)
{
    struct side s;
    struct buf grant = { 0 };
    int32_t src[BLOCKS] = { 0, 1, 2 };
    side_init(&s);
    s.core.stall_ms = 60000;
    (void)claim(&s, 1, &grant);
    struct kvt_send *send = open_send(&s, 9, &grant);
    answer(&s, send, KVT_MSG_OPENED, OK);
    send_add(&s.core, 9, 0, 0, TOKENS, src);
    kvt_send_pump(&s.core, &s.peer);
    answer(&s, send, KVT_MSG_STOP, ERR_CANCELED);
    CHECK_EQ_INT(send->state, KVT_SEND_STOPPING);
    uint64_t since = send->t_moved_ms = 5;
    answer(&s, send, KVT_MSG_OPENED, OK);
    answer(&s, send, KVT_MSG_STOP, ERR_CANCELED);
    CHECK_EQ_INT(send->t_moved_ms, since);
    kvt_send_tick(&s.core, &s.peer, since + 60001);
    CHECK(s.peer.must_close); /* the abandoned put does not complete */
    buf_release(&grant);
    side_release(&s);
}

TEST_MAIN(CASE(session_receives_when_every_piece_is_verified),
          CASE(session_receives_pieces_of_several_layers_by_one_note),
          CASE(session_refuses_a_note_whose_layers_are_not_there_or_not_next),
          CASE(session_fails_on_a_wrong_checksum_and_waits_for_the_writer),
          CASE(session_doubts_a_wrong_checksum_for_a_moment),
          CASE(session_repeats_a_stop_that_is_not_answered),
          CASE(session_refuses_pieces_out_of_order_missing_or_twice),
          CASE(session_scatter_follows_the_session), CASE(session_stalls_and_full),
          CASE(session_sends_nothing_before_opened_and_a_partial_block_last),
          CASE(session_send_failed_waits_for_unfinished_puts),
          CASE(session_cancelled_late_says_no_finish),
          CASE(session_send_refuses_gaps_and_an_early_done),
          CASE(session_counts_what_a_receiver_died_of), CASE(session_counts_what_a_sender_died_of),
          CASE(session_bounds_its_puts), CASE(session_takes_the_size_of_puts_from_the_transport),
          CASE(session_waits_seconds_for_an_answer),
          CASE(session_fails_when_its_connection_moves_nothing),
          CASE(session_repeated_messages_are_no_progress), CASE(session_sends_of_one_sequence),
          CASE(session_finishes_once_the_rest_is_there))
