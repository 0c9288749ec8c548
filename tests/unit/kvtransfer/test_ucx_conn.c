/* test_ucx_conn.c - transport ucx and a hostile peer with a valid ticket: its control connection is
 * driven by hand. UCX's own tcp carries nothing here; it lets the transport open on a host without
 * RDMA devices. */
#include "tests/harness/test.h"

#ifdef BATON_HAVE_UCX
#include <string.h>
#include <unistd.h>

#include "kernels/device.h"
#include "kvtransfer/transports.h"
#include "kvtransfer/ucx/conn.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"

struct open_transport {
    struct device *device;
    struct dev_mem mem;
    struct kvt_env env;
    struct kvt_transport *t;
};

static enum status admit(void *arg, const uint8_t ticket[KVT_TICKET_BYTES])
{
    return (void)arg, (void)ticket, OK;
}

static void transport_open(struct open_transport *r)
{
    struct err err = { 0 };
#ifdef __SANITIZE_THREAD__
    SKIP("ThreadSanitizer ends the process when a thread of UCX does (libucm calls into it then): "
         "ucx is NOT tested");
#endif
    *r = (struct open_transport){ 0 };
    CHECK_OK(device_open("cpu", &r->device, &err));
    CHECK_OK(device_mem_alloc(r->device, 1 << 16, DEVICE_MEM_SHARED, &r->mem, &err));
    r->env = (struct kvt_env){
        .mem = &r->mem,
        .listen_host = "127.0.0.1",
        .max_copies = 8,
        .max_peers = 8,
        .admit = admit,
        .tuning = { .ucx_tls = "tcp" },
    };
    if (kvt_ucx_ops.open(&r->env, &r->t, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
}

static void transport_close(struct open_transport *r)
{
    kvt_ucx_ops.close(r->t);
    device_mem_free(r->device, &r->mem);
    device_close(r->device);
}

/* The hostile side: what it has received. Tests send their frames once REGION came. */
struct peer {
    struct kvt_env env;
    struct control_hub *hub;
    struct control_conn *conn;
    bool opened, region, lost, mute; /* mute: names no rail */
};

static void on_event(void *arg, const struct control_event *ev)
{
    struct peer *p = arg;
    if (ev->kind == CONTROL_OPENED) {
        p->opened = true;
        /* no such rail: any number means one */
        if (!p->mute) CHECK_OK(control_send(ev->conn, UCX_FRAME_RAIL, 0, "\7\0\0\xff", 4));
    }
    if (ev->kind == CONTROL_FRAME && ev->frame == UCX_FRAME_REGION) p->region = true;
    if (ev->kind == CONTROL_LOST) p->lost = true;
}

static void peer_open(struct peer *p, const struct open_transport *r)
{
    struct err err = { 0 };
    struct buf address = { 0 };
    const uint8_t ticket[KVT_TICKET_BYTES] = { 1 };
    *p = (struct peer){ .env = { .listen_host = "127.0.0.1", .max_peers = 8, .admit = admit } };
    CHECK_OK(control_open(&p->env, "peer", 0, NULL, &p->hub, &err));
    kvt_ucx_ops.export_address(r->t, &address);
    CHECK_OK(control_connect(p->hub, buf_str(&address), ticket, p, &p->conn, &err));
    buf_release(&address);
}

/* Runs until *done or the peer is lost; returns the number of transport events of any kind. */
static size_t run(struct open_transport *r, struct peer *p, const bool *done, uint64_t ms)
{
    struct kvt_transport_event in[8];
    size_t n = 0;
    for (uint64_t end = clock_ms() + ms; !*done && !p->lost && clock_ms() < end; usleep(500)) {
        n += kvt_ucx_ops.poll(r->t, in, COUNT_OF(in));
        control_poll(p->hub, on_event, p);
    }
    return n;
}

/* READY without wiring, then messages that claim to follow no put: the session layer does not know
 * the connection yet and must not get them. */
TEST(no_message_of_a_connection_that_is_not_up)
{
    static const bool never = false;
    struct open_transport r;
    struct peer p;
    uint8_t bytes[KVT_MESSAGE_MAX];
    transport_open(&r);
    peer_open(&p, &r);
    CHECK_EQ_INT(run(&r, &p, &p.region, 5000), 0);
    CHECK(p.region);
    struct kvt_message m = { .kind = KVT_MSG_OPEN, .generation = 1 };
    CHECK_OK(control_send(p.conn, UCX_FRAME_READY, 0, NULL, 0));
    for (uint64_t after = 0; after < 2; after++)
        CHECK_OK(
            control_send(p.conn, UCX_FRAME_MESSAGE, after, bytes, kvt_message_encode(&m, bytes)));
    CHECK_EQ_INT(run(&r, &p, &never, 300), 0);
    CHECK(!p.lost);
    control_hub_free(p.hub);
    transport_close(&r);
}

/* Each message ends the connection, and the transport reports no event for it. */
TEST(set_up_out_of_order_ends_the_connection)
{
    static const struct {
        uint8_t frame;
        const char *body;
        uint32_t times;
    } bad[] = {
        { UCX_FRAME_MESSAGE, "x", 1 },
        { UCX_FRAME_READY, "x", 1 },
        { UCX_FRAME_READY, "", 2 },
        { UCX_FRAME_ADDRESS, "x", 1 },
        { UCX_FRAME_REGION, "x", 1 },
        { UCX_FRAME_RAIL, "abcd", 1 },
        { 9, "", 1 },
    };
    static const bool never = false;
    struct open_transport r;
    transport_open(&r);
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        struct peer p;
        peer_open(&p, &r);
        (void)run(&r, &p, &p.region, 5000);
        CHECK(p.region);
        for (uint32_t n = 0; n < bad[i].times; n++)
            CHECK_OK(control_send(p.conn, bad[i].frame, 0, bad[i].body, strlen(bad[i].body)));
        CHECK_EQ_INT(run(&r, &p, &never, 5000), 0);
        CHECK(p.lost);
        control_hub_free(p.hub);
    }
    transport_close(&r);
}

/* Before the peer names a rail there is no worker, and no other frame is allowed. */
TEST(a_rail_is_named_first)
{
    static const struct {
        uint8_t frame;
        const char *body;
    } bad[] = { { UCX_FRAME_READY, "" },
                { UCX_FRAME_RAIL, "" },
                { UCX_FRAME_RAIL, "abc" },
                { UCX_FRAME_RAIL, "abcde" },
                { UCX_FRAME_MESSAGE, "x" } };
    static const bool never = false;
    struct open_transport r;
    transport_open(&r);
    for (size_t i = 0; i < COUNT_OF(bad); i++) {
        struct peer p;
        peer_open(&p, &r);
        p.mute = true;
        (void)run(&r, &p, &p.opened, 5000);
        CHECK(p.opened);
        CHECK_OK(control_send(p.conn, bad[i].frame, 0, bad[i].body, strlen(bad[i].body)));
        CHECK_EQ_INT(run(&r, &p, &never, 5000), 0);
        CHECK(p.lost && !p.region);
        control_hub_free(p.hub);
    }
    transport_close(&r);
}

static enum status decode(const struct ucx_region *r, size_t cut, size_t more)
{
    struct buf b = { 0 };
    struct ucx_region out;
    ucx_region_encode(r, &b);
    for (size_t i = 0; i < more; i++) buf_add(&b, "", 1);
    char *exact = mem_dup(b.data, b.len - cut); /* so that a read beyond it is detected */
    enum status st = ucx_region_decode((struct str){ exact, b.len - cut }, &out);
    mem_free(exact);
    buf_release(&b);
    return st;
}

TEST(a_region_is_decoded_strictly)
{
    static char key[UCX_KEY_MAX + 1];
    const struct ucx_region good = {
        .base = 4096, .bytes = 4096, .address_bytes = 10, .key = { key, 9 }
    };
    struct ucx_region r = good;
    CHECK_OK(decode(&good, 0, 0));
    for (size_t cut = 1; cut <= 24 + 9; cut++) CHECK_STATUS(decode(&good, cut, 0), ERR_FORMAT);
    CHECK_STATUS(decode(&good, 0, 1), ERR_FORMAT);
    r.base = UINT64_MAX;
    CHECK_STATUS(decode(&r, 0, 0), ERR_FORMAT);
    r = good, r.bytes = 0;
    CHECK_STATUS(decode(&r, 0, 0), ERR_FORMAT);
    r = good, r.address_bytes = 0;
    CHECK_STATUS(decode(&r, 0, 0), ERR_FORMAT);
    r = good, r.address_bytes = UCX_ADDRESS_MAX + 1;
    CHECK_STATUS(decode(&r, 0, 0), ERR_FORMAT);
    r = good, r.key.n = UCX_KEY_MAX + 1;
    CHECK_STATUS(decode(&r, 0, 0), ERR_FORMAT);
    r = good, r.key.n = 0;
    CHECK_STATUS(decode(&r, 0, 0), ERR_FORMAT);
}

TEST_MAIN(CASE(no_message_of_a_connection_that_is_not_up),
          CASE(set_up_out_of_order_ends_the_connection), CASE(a_rail_is_named_first),
          CASE(a_region_is_decoded_strictly))
#else
TEST(ucx) { SKIP("built without UCX: it is NOT tested"); }
TEST_MAIN(CASE(ucx))
#endif
