/* fuzz_kvt_wire.c - hostile bytes for the KV transfer; the first byte chooses a decoder or a
 * receiver.
 *
 * Decoder: an accepted message must encode to the same bytes. Receiver: after a valid OPEN it gets
 * arbitrary messages and frames; nothing may be written outside the granted head of the granted
 * blocks (AddressSanitizer and the check below), and every transfer ends at most once. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvtransfer/event_wire.h"
#include "kvtransfer/session.h"
#include "kvtransfer/wire.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"

static void same(const struct buf *again, struct str in)
{
    ASSERT(again->len == in.n);
    ASSERT(memcmp(again->data, in.p, in.n) == 0);
}

static void decode(unsigned which, struct str in)
{
    struct buf again = { 0 };
    struct kvt_hello_msg hello;
    struct kvt_answer_msg answer;
    struct kvt_grant_msg grant;
    struct kvt_preamble preamble;
    struct kvt_message message;
    if (which == 0 && kvt_hello_decode(in, &hello, NULL) == OK) {
        kvt_hello_encode(&hello, &again);
        same(&again, in);
    } else if (which == 1 && kvt_answer_decode(in, &answer, NULL) == OK) {
        kvt_answer_encode(&answer, &again);
        same(&again, in);
    } else if (which == 2 && kvt_grant_decode(in, &grant, NULL) == OK) {
        int32_t *blocks = MEM_ARRAY(int32_t, grant.n_blocks + 1);
        for (uint32_t i = 0; i < grant.n_blocks; i++) blocks[i] = kvt_grant_block(&grant, i);
        kvt_grant_encode(&grant, blocks, &again);
        same(&again, in);
        mem_free(blocks);
    } else if (which == 3 && kvt_preamble_decode(in.p, in.n, &preamble) == OK) {
        uint8_t bytes[KVT_PREAMBLE_BYTES];
        kvt_preamble_encode(&preamble, bytes);
        buf_add(&again, bytes, sizeof bytes);
        same(&again, in);
    } else if (which == 4 && kvt_message_decode(in.p, in.n, &message) == OK) {
        uint8_t bytes[KVT_MESSAGE_MAX];
        buf_add(&again, bytes, kvt_message_encode(&message, bytes));
        same(&again, in);
    }
    buf_release(&again);
}

static void decode_event(struct str in)
{
    struct buf again = { 0 };
    struct kvt_event ev;
    if (kvt_event_decode(in, &ev) != OK) return;
    kvt_event_encode(&ev, &again);
    if (ev.transport[0]) same(&again, in); /* the name of an unknown transport is not kept */
    buf_release(&again);
}

static enum status take(struct kvt_conn *c, const struct kvt_message *m)
{
    (void)c, (void)m;
    return OK;
}
static enum status flush(struct kvt_transport *t)
{
    (void)t;
    return OK;
}
static uint64_t link_speed(const struct kvt_conn *c)
{
    (void)c;
    return 0;
}
static void count(void *arg, const struct kvt_event *ev)
{
    size_t *n = arg;
    ASSERT(++n[ev->kind] == 1); /* one transfer: each kind at most once */
    ASSERT(n[KVT_RECEIVED] + n[KVT_RECEIVE_FAILED] <= 1);
}

/* no_draft: the last layer is a draft layer, which the sender does not have. */
static void receive(struct str in, unsigned caps, bool sums, bool no_draft)
{
    enum { UNTOUCHED = 0 };
    const struct kvt_transport_ops ops = {
        .name = "fuzz", .caps = caps, .notify = take, .flush = flush, .link_speed = link_speed
    };
    struct kvt_transport t = { &ops };
    struct kv_layout l = {
        .dtype = DTYPE_F32,
        .block_tokens = 4,
        .n_layers = 2,
        .n_draft_layers = no_draft,
        .n_kv_heads = 2,
        .model_kv_heads = 2,
        .head_dim = 1,
        .tp_size = 1,
        .n_blocks = 4,
    };
    struct dev_mem mem = {
        .ptr = mem_calloc(1, kv_layout_pool_bytes(&l)),
        .bytes = kv_layout_pool_bytes(&l),
        .fd = -1,
    };
    size_t n_events[KVT_SEND_FAILED + 1] = { 0 };
    struct kvt_options o = {
        .layout = l,
        .mem = &mem,
        .checksum = sums,
        .n_transfers = 1,
        .on_event = count,
        .arg = n_events,
    };
    struct kvt_core core;
    struct kvt_peer peer;
    struct buf grant = { 0 };
    struct kvt_grant_msg g;
    kvt_core_init(&core, &o);
    kvt_peer_init(&peer);
    struct kvt_conn conn = { .t = &t, .incoming = true, .peer = &peer };
    peer.conn = &conn;
    peer.ops = &ops;
    peer.up = true;
    ASSERT(kvt_recv_claim(&core, &(struct kvt_expectation){ 1, 1, 1, (int32_t[]){ 2, 3 }, 2, 0, 6 },
                          &grant) == OK);
    ASSERT(kvt_grant_decode(buf_str(&grant), &g, NULL) == OK);
    kvt_recv_message(&core, &peer,
                     &(struct kvt_message){
                         .kind = KVT_MSG_OPEN,
                         .session = g.session,
                         .generation = g.generation,
                         .bytes = (sums ? KVT_OPEN_SUMS : 0) | (no_draft ? KVT_OPEN_NO_DRAFT : 0),
                     });
    for (; in.n >= KVT_MESSAGE_BYTES; in = str_sub(in, KVT_MESSAGE_BYTES, in.n)) {
        struct kvt_message m = { 0 };
        if (kvt_message_decode_head(in.p, &m) != OK) continue;
        if (m.generation == 1)
            m.generation = g.generation; /* so that inputs can name the live one */
        size_t tail = kvt_message_tail(&m);
        if (tail && in.n >= KVT_MESSAGE_BYTES + tail) {
            memcpy(m.sums, in.p + KVT_MESSAGE_BYTES, tail);
            in = str_sub(in, tail, in.n);
        }
        if (m.kind != KVT_MSG_DATA) {
            kvt_recv_message(&core, &peer, &m);
            continue;
        }
        struct iovec iov[4];
        uint64_t offset = m.layer >> 8;
        m.layer &= 0xff;
        int n = kvt_recv_scatter(&core, &peer, &m, offset, iov, 4);
        for (int i = 0; i < n; i++) memset(iov[i].iov_base, 1, iov[i].iov_len);
        if (n) kvt_recv_scattered(&core, &peer, &m, m.bytes);
    }
    for (size_t i = 0; i < kv_layout_pool_bytes(&l); i++) {
        size_t piece = i / kv_layout_piece_bytes(&l),
               head = i % kv_layout_piece_bytes(&l) / (2 * kv_layout_segment_stride(&l));
        bool granted = piece % l.n_blocks >= 2 && head == 1 && /* head 1 of blocks 2 and 3 */
                       piece / l.n_blocks < l.n_layers - l.n_draft_layers;
        ASSERT(granted || ((char *)mem.ptr)[i] == UNTOUCHED);
    }
    kvt_recv_peer_fenced(&core, &peer);
    buf_release(&grant);
    kvt_core_release(&core);
    mem_free(mem.ptr);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0) return 0;
    struct str in = { (const char *)data + 1, size - 1 };
    if (data[0] == UINT8_MAX) decode_event(in);
    else if (data[0] % 9 < 5) decode(data[0] % 9, in);
    else receive(in, data[0] % 9 < 7 ? 0 : KVT_CAP_RECEIVER_SCATTERS, data[0] % 2, data[0] / 9 % 2);
    return 0;
}
