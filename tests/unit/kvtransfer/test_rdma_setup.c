/* test_rdma_setup.c - set-up frames: decoding inverts encoding; every truncation, extra byte and
 * wrong field is refused. */
#include "tests/harness/test.h"

#ifdef BATON_HAVE_RDMA
#include <string.h>

#include "kvtransfer/rdma/setup.h"

static struct rdma_port_addr place(uint8_t id)
{
    return (struct rdma_port_addr){
        .gid = { 0xfe, 0x80, [15] = id },
        .lid = 7,
        .link = RDMA_LINK_ETHERNET,
        .gid_type = RDMA_GID_ROCE_V2,
        .mtu = 4096,
        .bytes_per_s = 12500000000,
    };
}

/* Every proper prefix, one byte more, and each byte set to 0xff in turn: the last must be refused
 * or decode to something that encodes to itself. */
#define CHECK_STRICT(decode, encode, b, type)                                                      \
    do {                                                                                           \
        type back_;                                                                                \
        for (size_t n_ = 0; n_ < (b).len; n_++)                                                    \
            CHECK(decode((struct str){ (b).data, n_ }, &back_) != OK);                             \
        for (size_t i_ = 0; i_ < (b).len; i_++) {                                                  \
            struct buf again_ = { 0 };                                                             \
            char old_ = (b).data[i_];                                                              \
            (b).data[i_] = (char)0xff;                                                             \
            if (decode(buf_str(&(b)), &back_) == OK) {                                             \
                encode(&back_, &again_);                                                           \
                CHECK(again_.len == (b).len && memcmp(again_.data, (b).data, (b).len) == 0);       \
            }                                                                                      \
            buf_release(&again_);                                                                  \
            (b).data[i_] = old_;                                                                   \
        }                                                                                          \
        buf_add_char(&(b), 0);                                                                     \
        CHECK_STATUS(decode(buf_str(&(b)), &back_), ERR_FORMAT);                                   \
        (b).len--;                                                                                 \
    } while (0)

TEST(hello_round_trip)
{
    struct rdma_hello m = { .pool_base = 0x7f0000000000,
                            .pool_bytes = 1 << 30,
                            .mtu_asked = 2048,
                            .reads = true,
                            .cm = true,
                            .n_ports = 2,
                            .ports = { place(1), place(2) }, },
                      back;
    struct buf b = { 0 };
    rdma_hello_encode(&m, &b);
    CHECK_OK(rdma_hello_decode(buf_str(&b), &back));
    CHECK(memcmp(&m, &back, sizeof m) == 0);
    CHECK_STRICT(rdma_hello_decode, rdma_hello_encode, b, struct rdma_hello);
    b.data[4]++;
    CHECK_STATUS(rdma_hello_decode(buf_str(&b), &back), ERR_PEER_MISMATCH);
    buf_release(&b);
    struct rdma_hello bad[] = { m, m, m, m };
    bad[0].mtu_asked = 1500;
    bad[1].n_ports = 0;
    bad[2].pool_base = UINT64_MAX;
    bad[3].ports[1].mtu = 9000;
    for (size_t i = 0; i < 4; i++) {
        rdma_hello_encode(&bad[i], &b);
        CHECK_STATUS(rdma_hello_decode(buf_str(&b), &back), ERR_FORMAT);
        buf_release(&b);
        b = (struct buf){ 0 };
    }
}

TEST(half_round_trip)
{
    struct rdma_rail_info m = { .rail = 1,
                           .epoch = 3,
                           .sender_port = 1,
                           .receiver_port = 0,
                           .mtu = 1024,
                           .reads = true,
                           .addr = place(9),
                           .n_qps = 2,
                           .qps = { { 17, 0xffffff, 0 }, { 0xffffff, 5, 0x12345678 } }, },
                     back;
    struct buf b = { 0 };
    rdma_rail_info_encode(&m, &b);
    CHECK_OK(rdma_rail_info_decode(buf_str(&b), &back));
    CHECK(memcmp(&m, &back, sizeof m) == 0);
    CHECK_STRICT(rdma_rail_info_decode, rdma_rail_info_encode, b, struct rdma_rail_info);
    buf_release(&b);
    struct rdma_rail_info bad[] = { m, m, m, m, m };
    bad[0].rail = RDMA_RAILS_MAX;
    bad[1].epoch = 0;
    bad[2].n_qps = RDMA_QPS_MAX + 1;
    bad[3].qps[1].psn = 1 << 24;
    bad[4].mtu = 0;
    for (size_t i = 0; i < 5; i++) {
        b = (struct buf){ 0 };
        bad[i].n_qps = i == 2 ? 0 : bad[i].n_qps;
        rdma_rail_info_encode(&bad[i], &b);
        CHECK_STATUS(rdma_rail_info_decode(buf_str(&b), &back), ERR_FORMAT);
        buf_release(&b);
    }
}

TEST(verdict_round_trip)
{
    struct rdma_rail_status m = { .rail = 2,
                              .epoch = 4,
                              .final = true,
                              .reason = "MTU 4096 was asked for here, but mlx5_0 carries 1024", },
                        back;
    struct buf b = { 0 };
    rdma_rail_status_encode(RDMA_FRAME_REFUSE, &m, &b);
    CHECK_OK(rdma_rail_status_decode(RDMA_FRAME_REFUSE, buf_str(&b), &back));
    CHECK(back.final && back.rail == 2 && back.epoch == 4);
    CHECK_EQ_STR(back.reason, m.reason);
    b.data[b.len - 1] = '\n'; /* a log line of its own */
    CHECK_STATUS(rdma_rail_status_decode(RDMA_FRAME_REFUSE, buf_str(&b), &back), ERR_FORMAT);
    b.data[b.len - 1] = ' ';
    CHECK_STATUS(rdma_rail_status_decode(RDMA_FRAME_BROKEN, buf_str(&b), &back), ERR_FORMAT);
    while (b.len < 8 + RDMA_REASON_MAX) buf_add_char(&b, 'x');
    CHECK_OK(rdma_rail_status_decode(RDMA_FRAME_REFUSE, buf_str(&b), &back));
    buf_add_char(&b, 'x');
    CHECK_STATUS(rdma_rail_status_decode(RDMA_FRAME_REFUSE, buf_str(&b), &back), ERR_FORMAT);
    buf_release(&b);
    b = (struct buf){ 0 };
    m = (struct rdma_rail_status){
        .rail = 0,
        .epoch = 1,
        .recv_window = { .completed = 1000, .bits = { [1] = 5 } },
    };
    rdma_rail_status_encode(RDMA_FRAME_FENCED, &m, &b);
    CHECK_OK(rdma_rail_status_decode(RDMA_FRAME_FENCED, buf_str(&b), &back));
    CHECK(back.recv_window.completed == 1000 && back.recv_window.bits[1] == 5);
    for (size_t n = 0; n < b.len; n++)
        CHECK(rdma_rail_status_decode(RDMA_FRAME_FENCED, (struct str){ b.data, n }, &back) != OK);
    /* The put at `completed` is marked as complete, so the count would have passed it. */
    memset(b.data + 16, 0xff, 32);
    CHECK_STATUS(rdma_rail_status_decode(RDMA_FRAME_FENCED, buf_str(&b), &back), ERR_FORMAT);
    buf_release(&b);
}

TEST(invite_round_trip)
{
    struct rdma_invite m = { .rail = 3,
                             .epoch = 9,
                             .mtu = 4096,
                             .ipv6 = true,
                             .address = { 0xfd, [15] = 1 },
                             .port = 4791,
                             .token = { 1, 2, [15] = 3 }, },
                       back;
    struct buf b = { 0 };
    rdma_invite_encode(&m, &b);
    CHECK_OK(rdma_invite_decode(buf_str(&b), &back));
    CHECK(back.rail == 3 && back.epoch == 9 && back.mtu == 4096 && back.ipv6 && back.port == 4791);
    CHECK(memcmp(back.address, m.address, 16) == 0 &&
          memcmp(back.token, m.token, sizeof m.token) == 0);
    CHECK_STRICT(rdma_invite_decode, rdma_invite_encode, b, struct rdma_invite);
    buf_release(&b);
    struct rdma_invite bad[] = { m, m, m, m, m };
    bad[0].rail = RDMA_RAILS_MAX;
    bad[1].epoch = 0;
    bad[2].mtu = 1500;
    bad[3].port = 0;
    bad[4].ipv6 = false; /* an IPv4 address of more than four bytes */
    for (size_t i = 0; i < 5; i++) {
        b = (struct buf){ 0 };
        rdma_invite_encode(&bad[i], &b);
        CHECK_STATUS(rdma_invite_decode(buf_str(&b), &back), ERR_FORMAT);
        buf_release(&b);
    }
}

TEST(call_round_trip)
{
    struct rdma_cm_request m = { .rail = 2, .epoch = 5, .i_qp = 15, .token = { 7, [15] = 8 } },
                           back;
    uint8_t bytes[56] = { 0 }; /* the connection manager delivers more bytes than were sent */
    rdma_cm_request_encode(&m, bytes);
    CHECK_OK(rdma_cm_request_decode((struct str){ (char *)bytes, sizeof bytes }, &back));
    CHECK(back.rail == 2 && back.epoch == 5 && back.i_qp == 15 &&
          memcmp(back.token, m.token, sizeof m.token) == 0);
    for (size_t n = 0; n < RDMA_CM_REQUEST_BYTES; n++)
        CHECK(rdma_cm_request_decode((struct str){ (char *)bytes, n }, &back) == ERR_FORMAT);
    for (size_t i = 0; i < 8; i++) { /* magic, rail, queue pair, zeros */
        uint8_t old = bytes[i];
        bytes[i] = 0xff;
        CHECK_STATUS(rdma_cm_request_decode((struct str){ (char *)bytes, sizeof bytes }, &back),
                     ERR_FORMAT);
        bytes[i] = old;
    }
    m.epoch = 0;
    rdma_cm_request_encode(&m, bytes);
    CHECK_STATUS(rdma_cm_request_decode((struct str){ (char *)bytes, sizeof bytes }, &back),
                 ERR_FORMAT);
}

TEST_MAIN(CASE(hello_round_trip), CASE(half_round_trip), CASE(verdict_round_trip),
          CASE(invite_round_trip), CASE(call_round_trip))

#else

TEST(not_built) { SKIP("built without libibverbs and librdmacm: rdma's logic is NOT tested"); }

TEST_MAIN(CASE(not_built))

#endif
