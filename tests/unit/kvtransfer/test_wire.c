/* test_wire.c - encoding and decoding are inverse; every truncation, extra byte and wrong field is
 * refused. */
#include <string.h>

#include "kvtransfer/event_wire.h"
#include "kvtransfer/wire.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

static const struct kv_layout LAYOUT = {
    .model_fingerprint = 0x1234567890abcdef,
    .dtype = DTYPE_BF16,
    .block_tokens = 64,
    .n_layers = 30,
    .n_kv_heads = 3,
    .model_kv_heads = 3,
    .head_dim = 64,
    .tp_size = 1,
    .n_blocks = 100,
};

static bool same_layout(const struct kv_layout *a, const struct kv_layout *b)
{
    struct buf x = { 0 }, y = { 0 };
    kv_layout_encode(a, &x);
    kv_layout_encode(b, &y);
    bool same = x.len == y.len && memcmp(x.data, y.data, x.len) == 0;
    buf_release(&x);
    buf_release(&y);
    return same;
}

TEST(wire_hello_round_trip)
{
    struct kvt_hello_msg m = { .layout = LAYOUT, .node = { 1, 2, 3 }, .lossy = true }, back;
    struct buf b = { 0 };
    struct err err = { 0 };
    kvt_hello_encode(&m, &b);
    CHECK_EQ_INT(b.len, 80);
    CHECK_OK(kvt_hello_decode(buf_str(&b), &back, &err));
    CHECK(same_layout(&back.layout, &LAYOUT) && memcmp(back.node, m.node, 16) == 0 && back.lossy &&
          !back.checksum);
    for (size_t n = 0; n < b.len; n++)
        CHECK(kvt_hello_decode((struct str){ b.data, n }, &back, &err) != OK);
    buf_add_char(&b, 0);
    CHECK_STATUS(kvt_hello_decode(buf_str(&b), &back, &err), ERR_FORMAT);
    b.len--;
    b.data[6] = 4; /* an unknown flag */
    CHECK_STATUS(kvt_hello_decode(buf_str(&b), &back, &err), ERR_FORMAT);
    b.data[4] = 9;
    CHECK_STATUS(kvt_hello_decode(buf_str(&b), &back, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "version 9"));
    buf_release(&b);
}

TEST(wire_answer_round_trip)
{
    struct kvt_answer_msg m = { .layout = LAYOUT,
                                .checksum = true,
                                .ticket = { 7, 8 },
                                .node = { 4, 5 },
                                .n_transports = 2,
                                .transports = { { "ipc", STR("somewhere") },
                                          { "tcp", STR("10.0.0.1 77") } }, },
                          back;
    struct buf b = { 0 };
    struct err err = { 0 };
    kvt_answer_encode(&m, &b);
    CHECK_OK(kvt_answer_decode(buf_str(&b), &back, &err));
    CHECK(back.checksum && !back.lossy && back.n_transports == 2 && back.ticket[1] == 8 &&
          back.node[1] == 5);
    CHECK_EQ_STR(back.transports[1].name, "tcp");
    CHECK(str_eq_c(back.transports[1].address, "10.0.0.1 77"));
    for (size_t n = 0; n < b.len; n++)
        CHECK(kvt_answer_decode((struct str){ b.data, n }, &back, &err) != OK);
    buf_add_char(&b, 'x');
    CHECK_STATUS(kvt_answer_decode(buf_str(&b), &back, &err), ERR_FORMAT);
    b.len--;
    b.data[6] = 0; /* no transports */
    CHECK_STATUS(kvt_answer_decode(buf_str(&b), &back, &err), ERR_FORMAT);
    b.data[6] = 2;
    b.data[96] = 0; /* an empty name */
    CHECK_STATUS(kvt_answer_decode(buf_str(&b), &back, &err), ERR_FORMAT);
    buf_release(&b);
}

TEST(wire_grant_round_trip)
{
    int32_t blocks[] = { 5, 9, 1000000 };
    struct kvt_grant_msg m = { .session = 3,
                               .generation = 0xfedcba9876543210,
                               .n_blocks = 3,
                               .n_skip = 1,
                               .n_tokens = 150,
                               .first_head = 2,
                               .n_heads = 6,
                               .block_tokens = 64, },
                         back;
    struct buf b = { 0 };
    struct err err = { 0 };
    kvt_grant_encode(&m, blocks, &b);
    CHECK_EQ_INT(b.len, 48 + 12);
    CHECK_OK(kvt_grant_decode(buf_str(&b), &back, &err));
    CHECK(back.session == 3 && back.generation == m.generation && back.n_skip == 1 &&
          back.n_tokens == 150);
    CHECK(back.first_head == 2 && back.n_heads == 6 && back.block_tokens == 64);
    CHECK_EQ_INT(kvt_grant_block(&back, 2), 1000000);
    for (size_t n = 0; n < b.len; n++)
        CHECK(kvt_grant_decode((struct str){ b.data, n }, &back, &err) != OK);
    b.data[24] = 4; /* n_skip > n_blocks */
    CHECK_STATUS(kvt_grant_decode(buf_str(&b), &back, &err), ERR_FORMAT);
    b.data[24] = 1;
    b.data[36] = 0; /* no heads */
    CHECK_STATUS(kvt_grant_decode(buf_str(&b), &back, &err), ERR_FORMAT);
    b.data[36] = 6;
    b.data[40] = 0; /* no tokens per block */
    CHECK_STATUS(kvt_grant_decode(buf_str(&b), &back, &err), ERR_FORMAT);
    b.data[40] = 64;
    CHECK_OK(kvt_grant_decode(buf_str(&b), &back, &err));
    b.data[23] = 0x7f; /* n_blocks beyond any limit */
    CHECK_STATUS(kvt_grant_decode(buf_str(&b), &back, &err), ERR_FORMAT);
    buf_release(&b);
}

TEST(wire_preamble_round_trip)
{
    uint8_t bytes[KVT_PREAMBLE_BYTES + 1];
    struct kvt_preamble m = { .kind = KVT_PREAMBLE_TICKET, .ticket = { 1 } }, back;
    kvt_preamble_encode(&m, bytes);
    CHECK_OK(kvt_preamble_decode(bytes, KVT_PREAMBLE_BYTES, &back));
    CHECK(back.kind == KVT_PREAMBLE_TICKET && back.ticket[0] == 1);
    CHECK_STATUS(kvt_preamble_decode(bytes, KVT_PREAMBLE_BYTES - 1, &back), ERR_FORMAT);
    CHECK_STATUS(kvt_preamble_decode(bytes, KVT_PREAMBLE_BYTES + 1, &back), ERR_FORMAT);
    bytes[6] = KVT_PREAMBLE_WELCOME; /* with a ticket */
    CHECK_STATUS(kvt_preamble_decode(bytes, KVT_PREAMBLE_BYTES, &back), ERR_FORMAT);
    bytes[6] = 4;
    CHECK_STATUS(kvt_preamble_decode(bytes, KVT_PREAMBLE_BYTES, &back), ERR_FORMAT);
}

TEST(wire_message_round_trip)
{
    struct kvt_message all[] = {
        { .kind = KVT_MSG_OPEN, .session = 4, .generation = 5 },
        {
            .kind = KVT_MSG_DATA,
            .session = 4,
            .generation = 5,
            .layer = 2,
            .first = 7,
            .n = 3,
            .bytes = 999,
        },
        {
            .kind = KVT_MSG_NOTE,
            .session = 4,
            .generation = 5,
            .layer = 2,
            .first = 7,
            .n = 3,
            .bytes = 24,
            .sums = { 1, 2, UINT64_MAX },
        },
        /* without checksums */
        {
            .kind = KVT_MSG_NOTE,
            .session = 4,
            .generation = 5,
            .layer = 2,
            .first = 7,
            .n = KVT_PUT_PIECES,
        },
        /* of several layers */
        {
            .kind = KVT_MSG_NOTE,
            .session = 4,
            .generation = 5,
            .layer = 2,
            .more_layers = 1,
            .first = 7,
            .n = 2,
            .bytes = 32,
            .sums = { 1, 2, 3, UINT64_MAX },
        },
        { .kind = KVT_MSG_OPEN, .session = 4, .generation = 5, .bytes = KVT_OPEN_SUMS },
        { .kind = KVT_MSG_OPEN,
          .session = 4,
          .generation = 5,
          .bytes = KVT_OPEN_SUMS | KVT_OPEN_NO_DRAFT },
        { .kind = KVT_MSG_FINISH, .session = 4, .generation = 5, .bytes = 0 },
        { .kind = KVT_MSG_STOP, .session = 4, .generation = 5, .status = ERR_CHECKSUM },
        { .kind = KVT_MSG_BYE },
    };
    for (size_t i = 0; i < COUNT_OF(all); i++) {
        uint8_t bytes[KVT_MESSAGE_MAX];
        struct kvt_message back = { 0 };
        size_t n = kvt_message_encode(&all[i], bytes);
        CHECK_EQ_INT(n, KVT_MESSAGE_BYTES + kvt_message_tail(&all[i]));
        CHECK_OK(kvt_message_decode(bytes, n, &back));
        CHECK(back.kind == all[i].kind && back.status == all[i].status &&
              back.session == all[i].session && back.bytes == all[i].bytes);
        CHECK(back.generation == all[i].generation && back.layer == all[i].layer &&
              back.first == all[i].first && back.n == all[i].n &&
              back.more_layers == all[i].more_layers);
        CHECK(back.kind != KVT_MSG_NOTE || memcmp(back.sums, all[i].sums, all[i].bytes) == 0);
        CHECK_STATUS(kvt_message_decode(bytes, n - 1, &back), ERR_FORMAT);
        CHECK_STATUS(kvt_message_decode(bytes, n + 1, &back), ERR_FORMAT);
    }
}

TEST(wire_message_refuses_fields_of_other_kinds)
{
    struct kvt_message bad[] = {
        { .kind = KVT_MSG_OPEN, .n = 1 },
        { .kind = KVT_MSG_OPEN, .layer = 1 },
        { .kind = KVT_MSG_OPEN, .bytes = 4 },
        { .kind = KVT_MSG_OPEN, .status = ERR_BUSY },
        { .kind = KVT_MSG_DATA, .n = 1, .bytes = 0 },
        { .kind = KVT_MSG_DATA, .n = 0, .bytes = 1 },
        { .kind = KVT_MSG_DATA, .n = KVT_BATCH_PIECES + 1, .bytes = 1 },
        { .kind = KVT_MSG_DATA, .n = 1, .bytes = 1, .more_layers = 1 },
        { .kind = KVT_MSG_FINISH, .more_layers = 1 },
        { .kind = KVT_MSG_NOTE, .n = KVT_PUT_PIECES + 1, .bytes = 8 * (KVT_PUT_PIECES + 1) },
        { .kind = KVT_MSG_NOTE, .n = KVT_PUT_PIECES + 1 },
        { .kind = KVT_MSG_NOTE, .n = 1, .more_layers = KVT_PUT_PIECES },
        { .kind = KVT_MSG_NOTE, .n = 65535, .more_layers = 65535 },
        { .kind = KVT_MSG_NOTE, .n = 2, .more_layers = 1, .bytes = 16 },
        { .kind = KVT_MSG_NOTE, .n = 1, .bytes = 1 },
        { .kind = KVT_MSG_NOTE, .n = 1, .bytes = 16 },
        { .kind = KVT_MSG_BYE, .session = 1 },
        { .kind = KVT_MSG_STOP, .status = (enum status) - 22 },
    };
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        uint8_t bytes[KVT_MESSAGE_MAX + 8];
        struct kvt_message back;
        (void)kvt_message_encode(&bad[i], bytes);
        CHECK_STATUS(kvt_message_decode_head(bytes, &back), ERR_FORMAT);
        bytes[0] = 0;
        CHECK_STATUS(kvt_message_decode_head(bytes, &back), ERR_FORMAT);
        bytes[0] = KVT_MSG_KIND_END;
        CHECK_STATUS(kvt_message_decode_head(bytes, &back), ERR_FORMAT);
    }
}

TEST(wire_event_round_trip)
{
    struct kvt_event ev = {
        .kind = KVT_RECEIVE_FAILED,
        .id = UINT64_MAX - 31,
        .status = ERR_CHECKSUM,
        .transport = "tcp",
        .bytes = 1,
        .ns = 2,
        .busy_ns = 3,
        .tail_ns = 4,
        .link_speed = 5,
        .text = "a sentence",
    };
    struct kvt_event back = { 0 };
    struct buf b = { 0 };
    kvt_event_encode(&ev, &b);
    CHECK_OK(kvt_event_decode(buf_str(&b), &back));
    CHECK(back.kind == ev.kind && back.id == ev.id && back.status == ERR_CHECKSUM);
    CHECK(back.bytes == 1 && back.ns == 2 && back.busy_ns == 3 && back.tail_ns == 4);
    CHECK_EQ_INT(back.link_speed, 5);
    CHECK_EQ_STR(back.transport, "tcp");
    CHECK_EQ_STR(back.text, ev.text);
    for (size_t n = 0; n < b.len; n++)
        CHECK(kvt_event_decode((struct str){ b.data, n }, &back) != OK);
    for (size_t at = 0; at < 8; at++) { /* magic, version, kind, status */
        char was = b.data[at];
        b.data[at] = 127;
        CHECK(kvt_event_decode(buf_str(&b), &back) != OK);
        b.data[at] = was;
    }
    b.data[6] = KVT_CONNECTED; /* of a peer, which means nothing elsewhere */
    CHECK_STATUS(kvt_event_decode(buf_str(&b), &back), ERR_FORMAT);
    b.data[6] = KVT_FENCED;
    b.data[64] = 'x'; /* "xcp": no transport of this release */
    CHECK_OK(kvt_event_decode(buf_str(&b), &back));
    CHECK_EQ_STR(back.transport, "");
    buf_add_char(&b, 0);
    CHECK_STATUS(kvt_event_decode(buf_str(&b), &back), ERR_FORMAT);
    buf_release(&b);
}

TEST_MAIN(CASE(wire_hello_round_trip), CASE(wire_answer_round_trip), CASE(wire_grant_round_trip),
          CASE(wire_preamble_round_trip), CASE(wire_message_round_trip),
          CASE(wire_message_refuses_fields_of_other_kinds), CASE(wire_event_round_trip))
