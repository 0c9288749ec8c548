/* test_rdma_offers.c - a receiver of transport rdma with a fake libibverbs, defined here: each call
 * can be made to fail, and live objects are counted. Senders are control connections driven by
 * hand. The result of one sender's offer must not affect the listener or other senders. */
#include "tests/harness/test.h"

#ifdef BATON_HAVE_RDMA
#include <arpa/inet.h>
#include <errno.h>
#include <rdma/rdma_cma.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kvtransfer/connect/control.h"
#include "kvtransfer/rdma/cm.h"
#include "kvtransfer/transports.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"

/* ---- the fake libibverbs ---- */

/* Calls so far that may fail; the one that does (0: none); objects created and not destroyed. */
static uint32_t calls, fail_at, n_live;
static uint8_t init_port;
static int n_domains, n_regions;

static bool fails(void)
{
    errno = ENOMEM;
    return ++calls == fail_at;
}

static void *give(size_t n)
{
    if (fails()) return NULL;
    n_live++;
    return calloc(1, n);
}

static int take_back(void *p)
{
    n_live--;
    free(p);
    return 0;
}

static int poll_nothing(struct ibv_cq *cq, int n, struct ibv_wc *wc)
{
    return (void)cq, (void)n, (void)wc, 0;
}
static int arm(struct ibv_cq *cq, int solicited)
{
    return (void)cq, (void)solicited, fails() ? ENOMEM : 0;
}
static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    (void)qp;
    *bad = wr;
    return fails() ? ENOMEM : 0;
}
static struct ibv_context context = {
    .ops = { .poll_cq = poll_nothing, .req_notify_cq = arm, .post_recv = post_recv }
};

struct ibv_pd *ibv_alloc_pd(struct ibv_context *c)
{
    struct ibv_pd *pd = give(sizeof *pd);
    if (pd) pd->context = c, n_domains++;
    return pd;
}
int ibv_dealloc_pd(struct ibv_pd *pd) { return n_domains--, take_back(pd); }
static struct ibv_mr *region(struct ibv_pd *pd)
{
    struct ibv_mr *mr = give(sizeof *mr);
    if (mr) mr->pd = pd, mr->rkey = 100 + (uint32_t)++n_regions;
    return mr;
}
#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *p, size_t n, int access)
{
    return (void)p, (void)n, (void)access, region(pd);
}
struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *p, size_t n, uint64_t iova,
                                unsigned access)
{
    return (void)p, (void)n, (void)iova, (void)access, region(pd);
}
int ibv_dereg_mr(struct ibv_mr *mr) { return n_regions--, take_back(mr); }
struct ibv_cq *ibv_create_cq(struct ibv_context *c, int n, void *arg,
                             struct ibv_comp_channel *channel, int vector)
{
    struct ibv_cq *cq = give(sizeof *cq);
    (void)n, (void)channel, (void)vector;
    if (cq) cq->context = c, cq->cq_context = arg;
    return cq;
}
int ibv_destroy_cq(struct ibv_cq *cq) { return take_back(cq); }
struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a)
{
    struct ibv_qp *qp = give(sizeof *qp);
    if (qp) qp->context = pd->context, qp->pd = pd, qp->qp_context = a->qp_context, qp->qp_num = 17;
    return qp;
}
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
    (void)qp;
    if (mask & IBV_QP_PORT) init_port = a->port_num;
    return a->qp_state != IBV_QPS_ERR && fails() ? ENOMEM : 0;
}
int ibv_destroy_qp(struct ibv_qp *qp) { return take_back(qp); }
int ibv_query_gid(struct ibv_context *c, uint8_t port, int index, union ibv_gid *gid)
{
    (void)c, (void)port, (void)index;
    memset(gid, 7, sizeof *gid);
    return 0;
}
#undef ibv_query_port
int ibv_query_port(struct ibv_context *c, uint8_t port, struct _compat_ibv_port_attr *out)
{
    struct ibv_port_attr *a = (struct ibv_port_attr *)(void *)out;
    (void)c, (void)port;
    a->active_mtu = IBV_MTU_1024;
    return 0;
}

/* ---- the connection manager: requests are made by hand ---- */

static struct ibv_device cm_device = { .name = "fake" };
static struct ibv_context cm_context = { .device = &cm_device };
static struct rdma_event_channel channel;
static struct rdma_cm_event *request; /* the next event */
static uint32_t n_taken, n_rejected;

int access(const char *path, int mode)
{
    return (void)mode, strcmp(path, "/dev/infiniband/rdma_cm") == 0 ? 0 : -1;
}
struct rdma_event_channel *rdma_create_event_channel(void)
{
    channel.fd = eventfd(0, EFD_NONBLOCK);
    return &channel;
}
void rdma_destroy_event_channel(struct rdma_event_channel *c) { close(c->fd); }
int rdma_create_id(struct rdma_event_channel *c, struct rdma_cm_id **out, void *arg,
                   enum rdma_port_space space)
{
    (void)c, (void)space;
    if (!(*out = give(sizeof **out))) return -1;
    **out = (struct rdma_cm_id){ .verbs = &cm_context, .port_num = 2, .context = arg };
    return 0;
}
int rdma_destroy_id(struct rdma_cm_id *id) { return take_back(id); }
int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *a)
{
    return (void)id, (void)a, fails() ? -1 : 0;
}
int rdma_listen(struct rdma_cm_id *id, int backlog)
{
    return (void)id, (void)backlog, fails() ? -1 : 0;
}
__be16 rdma_get_src_port(struct rdma_cm_id *id) { return (void)id, htons(7471); }
int rdma_get_cm_event(struct rdma_event_channel *c, struct rdma_cm_event **out)
{
    uint64_t n;
    *out = request;
    request = NULL;
    if (!*out && read(c->fd, &n, sizeof n) < 0) errno = EAGAIN;
    return *out ? 0 : -1;
}
int rdma_ack_cm_event(struct rdma_cm_event *e) { return memset(e, 0x5a, sizeof *e), 0; }
int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *a, int *mask)
{
    (void)id;
    if (fails()) return -1;
    a->path_mtu = IBV_MTU_512;
    *mask = IBV_QP_STATE | (a->qp_state == IBV_QPS_RTR ? IBV_QP_AV | IBV_QP_PATH_MTU : 0);
    return 0;
}
int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
    return (void)id, (void)p, n_taken++, fails() ? -1 : 0;
}
int rdma_reject(struct rdma_cm_id *id, const void *p, uint8_t n)
{
    return (void)id, (void)p, (void)n, n_rejected++, 0;
}

/* ---- the receiver and its senders ---- */

struct sender {
    struct control_conn *conn;
    uint32_t n_accepted, n_refused, key;
    bool cm, handshaken, lost, invited;
    struct rdma_invite invite;
    uint32_t mtu;
};

struct world {
    struct kvt_env env, far;
    struct dev_mem mem;
    struct rdma_transport *t;
    struct control_hub *hub; /* of the senders */
    struct sender senders[2];
    uint32_t n_up, n_down;
    struct kvt_conn *down;
};

static enum status admit(void *arg, const uint8_t ticket[KVT_TICKET_BYTES])
{
    return (void)arg, (void)ticket, OK;
}

static struct world *world(void)
{
    struct world *w = MEM_NEW(struct world);
    struct err err = { 0 };
    w->mem = (struct dev_mem){ .ptr = mem_calloc(1, 4096), .bytes = 4096 };
    w->far = (struct kvt_env){ .listen_host = "127.0.0.1", .max_peers = 4, .admit = admit };
    w->env = (struct kvt_env){
        .mem = &w->mem, .listen_host = "127.0.0.1", .max_peers = 4, .admit = admit
    };
    w->t = MEM_NEW(struct rdma_transport);
    w->t->base.ops = &kvt_rdma_ops;
    w->t->env = &w->env;
    list_init(&w->t->conns);
    list_init(&w->t->ready);
    w->t->ports = (struct rdma_devices){ .ports = MEM_NEW(struct rdma_port), .n = 1 };
    w->t->ports.ports[0] = (struct rdma_port){
        .device = "fake",
        .number = 2,
        .link = RDMA_LINK_ETHERNET,
        .active = true,
        .max_sge = 4,
        .max_qp_wr = 1024,
        .max_cqe = 4096,
        .gids = MEM_NEW(struct rdma_gid),
        .n_gids = 1,
    };
    w->t->ports.ports[0].gids->type = RDMA_GID_ROCE_V2;
    w->t->devices[0] =
        (struct rdma_device){ .t = w->t, .port = w->t->ports.ports, .ctx = &context };
    w->t->local_ports[0] = (struct rdma_local_port){ w->t->devices, w->t->ports.ports, true };
    CHECK_OK(control_open(&w->env, "rdma", 0, NULL, &w->t->hub, &err));
    CHECK_OK(control_open(&w->far, "senders", 0, NULL, &w->hub, &err));
    w->t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event e = { .events = EPOLLIN };
    CHECK_OK(epoll_ctl(w->t->epoll_fd, EPOLL_CTL_ADD, control_wait_fd(w->t->hub), &e));
    return w;
}

static void on_event(void *arg, const struct control_event *ev)
{
    struct sender *s = ev->conn->owner;
    struct rdma_rail_info m;
    (void)arg;
    if (ev->kind == CONTROL_LOST) s->lost = true;
    if (ev->kind != CONTROL_FRAME) return;
    s->handshaken |= ev->frame == RDMA_FRAME_HELLO;
    s->n_refused += ev->frame == RDMA_FRAME_REFUSE;
    if (ev->frame == RDMA_FRAME_INVITE) {
        CHECK_OK(rdma_invite_decode(ev->body, &s->invite));
        s->invited = true;
    }
    if (ev->frame != RDMA_FRAME_ACCEPT) return;
    CHECK_OK(rdma_rail_info_decode(ev->body, &m));
    s->n_accepted++;
    s->key = m.qps[0].key;
    s->mtu = m.mtu;
}

static void turn(struct world *w)
{
    struct kvt_transport_event in[8];
    size_t n = kvt_rdma_ops.poll(&w->t->base, in, COUNT_OF(in));
    for (size_t i = 0; i < n; i++) {
        w->n_up += in[i].kind == KVT_UP;
        w->n_down += in[i].kind == KVT_DOWN;
        if (in[i].kind == KVT_DOWN) w->down = in[i].conn;
    }
    control_poll(w->hub, on_event, w);
    usleep(200);
}

#define UNTIL(condition)                                                                           \
    for (uint64_t end_ = clock_ms() + 5000; !(condition); turn(w)) CHECK(clock_ms() < end_)

static const struct rdma_port_addr place = {
    .link = RDMA_LINK_ETHERNET,
    .gid_type = RDMA_GID_ROCE_V2,
    .mtu = 1024,
};

static void join(struct world *w, struct sender *s)
{
    struct err err = { 0 };
    const uint8_t ticket[KVT_TICKET_BYTES] = { 1 };
    struct buf body = { 0 };
    struct rdma_hello hello = { .n_ports = 1, .ports = { place }, .cm = s->cm };
    CHECK_OK(control_connect(w->hub, control_address(w->t->hub), ticket, s, &s->conn, &err));
    UNTIL(s->handshaken);
    rdma_hello_encode(&hello, &body);
    CHECK_OK(control_send(s->conn, RDMA_FRAME_HELLO, 0, body.data, body.len));
    buf_release(&body);
}

static void offer(struct world *w, struct sender *s, uint32_t epoch)
{
    struct buf body = { 0 };
    struct rdma_rail_info m = {
        .epoch = epoch, .mtu = 1024, .addr = place, .n_qps = 2, .qps = { { 1, 1, 0 }, { 2, 2, 0 } }
    };
    uint32_t before = s->n_accepted + s->n_refused;
    rdma_rail_info_encode(&m, &body);
    CHECK_OK(control_send(s->conn, RDMA_FRAME_OFFER, 0, body.data, body.len));
    buf_release(&body);
    UNTIL(s->n_accepted + s->n_refused > before || s->invited || s->lost);
    CHECK(!s->lost);
}

static void world_end(struct world *w)
{
    control_hub_free(w->hub);
    kvt_rdma_ops.close(&w->t->base);
    mem_free(w->mem.ptr);
    mem_free(w);
    CHECK_EQ_INT(n_live, 0);
}

/* A request of the peer's queue pair `number` arrives over a port, with n bytes of private data.
 * A later turn handles it. */
static void arrive(const struct rdma_cm_request *call, uint32_t number, uint8_t port, size_t n)
{
    static struct rdma_cm_event ev;
    static uint8_t data[56];
    uint64_t one = 1;
    uint32_t was = fail_at;
    fail_at = 0; /* the id is created here */
    ev = (struct rdma_cm_event){ .event = RDMA_CM_EVENT_CONNECT_REQUEST };
    CHECK_OK(rdma_create_id(NULL, &ev.id, NULL, RDMA_PS_TCP));
    calls--;
    fail_at = was;
    ev.id->port_num = port;
    rdma_cm_request_encode(call, data);
    ev.param.conn.private_data = data;
    ev.param.conn.private_data_len = (uint8_t)n;
    ev.param.conn.qp_num = number;
    request = &ev;
    CHECK(write(channel.fd, &one, sizeof one) == sizeof one);
}

/* True if the request is accepted. */
static bool ask(struct world *w, const struct rdma_cm_request *call, uint32_t number, uint8_t port,
                size_t n)
{
    uint32_t taken = n_taken, rejected = n_rejected;
    arrive(call, number, port, n);
    UNTIL(n_taken + n_rejected > taken + rejected);
    CHECK_EQ_INT(n_taken + n_rejected, taken + rejected + 1);
    return n_taken > taken;
}

/* With BATON_RDMA_CM: a request without the token, or of a queue pair that was not offered, is
 * rejected; so is a second one, and one after the rail is up. */
TEST(only_who_was_invited_may_connect)
{
    struct world *w = world();
    struct sender *s = &w->senders[0];
    struct err err = { 0 };
    CHECK_OK(rdma_cm_open(w->t, &err));
    s->cm = true;
    join(w, s);
    offer(w, s, 1);
    CHECK(s->invited && s->invite.port == 7471 && s->invite.ipv6 && s->invite.epoch == 1);
    struct rdma_cm_request call = { .rail = 0, .epoch = 1, .i_qp = 0 }, bad;
    CHECK(!ask(w, &call, 1, 2, 56)); /* a token of zeros */
    memcpy(call.token, s->invite.token, sizeof call.token);
    bad = call;
    bad.token[15] ^= 1;
    CHECK(!ask(w, &bad, 1, 2, 56));
    bad = call;
    bad.rail = 1;
    CHECK(!ask(w, &bad, 1, 2, 56));
    bad = call;
    bad.epoch = 2;
    CHECK(!ask(w, &bad, 1, 2, 56));
    bad = call;
    bad.i_qp = 2;
    CHECK(!ask(w, &bad, 1, 2, 56));
    CHECK(!ask(w, &call, 2, 2, 56)); /* the number of the other queue pair */
    CHECK(!ask(w, &call, 1, 1, 56)); /* over another port */
    CHECK(!ask(w, &call, 1, 2, RDMA_CM_REQUEST_BYTES - 1));
    CHECK(ask(w, &call, 1, 2, 56));
    CHECK(!ask(w, &call, 1, 2, 56)); /* already connected */
    CHECK_EQ_INT(s->n_accepted, 0);
    call.i_qp = 1;
    CHECK(ask(w, &call, 2, 2, RDMA_CM_REQUEST_BYTES));
    UNTIL(s->n_accepted == 1);
    CHECK_EQ_INT(s->mtu, 512); /* what the connection manager said */
    UNTIL(w->n_up == 1);
    CHECK(!ask(w, &call, 2, 2, 56)); /* the rail is up */
    CHECK_EQ_INT(w->n_down, 0);
    world_end(w);
}

/* After call `fail_at` failed: the next tick clears a rail that is down. */
static void nothing_is_left(struct world *w, uint32_t but)
{
    for (uint64_t end = clock_ms() + 2000; n_live > but && clock_ms() < end;) turn(w);
    if (n_live > but)
        test_fail(__FILE__, __LINE__, "%u things are left after call %u failed", n_live, fail_at);
}

/* Each failure led to a refusal, the next offer was accepted, and the connection survived. */
static void end_of_failures(struct world *w, struct sender *s)
{
    CHECK_EQ_INT(s->n_refused, fail_at - 1);
    UNTIL(w->n_up == 1);
    CHECK_EQ_INT(w->n_down, 0);
    fail_at = 0;
    world_end(w);
}

/* The same with the connection manager: after any failure the offer is refused, only the listener
 * is left, and the next offer is accepted. */
TEST(an_invitation_that_comes_to_nothing_leaves_nothing)
{
    struct world *w = world();
    struct sender *s = &w->senders[0];
    struct err err = { 0 };
    CHECK_OK(rdma_cm_open(w->t, &err));
    s->cm = true;
    join(w, s);
    for (fail_at = 1; !s->n_accepted; fail_at++) {
        uint32_t refused = s->n_refused;
        calls = 0;
        s->invited = false;
        offer(w, s, fail_at);
        for (uint32_t i = 0; i < 2 && s->n_refused == refused; i++) {
            struct rdma_cm_request call = { .epoch = fail_at, .i_qp = i };
            memcpy(call.token, s->invite.token, sizeof call.token);
            arrive(&call, i + 1, 2, RDMA_CM_REQUEST_BYTES);
            UNTIL(!request && (i == 0 || s->n_refused > refused || s->n_accepted));
            /* may be refused already */
            for (uint64_t end = clock_ms() + 30;
                 i == 0 && s->n_refused == refused && clock_ms() < end;)
                turn(w);
        }
        if (s->n_accepted) break;
        nothing_is_left(w, 1);
    }
    CHECK(fail_at > 16);
    end_of_failures(w, s);
}

/* Both sides must use the connection manager, or neither. */
TEST(a_peer_that_sets_up_otherwise_is_refused)
{
    struct world *w = world();
    struct sender *s = &w->senders[0];
    struct err err = { 0 };
    CHECK_OK(rdma_cm_open(w->t, &err));
    join(w, s);
    UNTIL(s->lost);
    CHECK(list_empty(&w->t->conns));
    world_end(w);
}

/* Each call of libibverbs fails once: the offer is refused, nothing leaks, the connection survives,
 * and the next offer is accepted. */
TEST(an_offer_that_cannot_be_taken_is_refused_and_leaves_nothing)
{
    struct world *w = world();
    struct sender *s = &w->senders[0];
    join(w, s);
    for (fail_at = 1; !s->n_accepted; fail_at++) {
        calls = 0;
        offer(w, s, fail_at);
        if (s->n_accepted) break;
        nothing_is_left(w, 0);
    }
    CHECK(fail_at > 10);
    CHECK_EQ_INT(init_port, 2); /* the port's own number, not 1 */
    end_of_failures(w, s);
}

/* A sender's key is a region of its own in a protection domain of its own. Both are freed with the
 * sender; those of other senders stay. */
TEST(a_sender_that_leaves_takes_nothing_of_the_others)
{
    struct world *w = world();
    struct sender *a = &w->senders[0], *b = &w->senders[1];
    join(w, a);
    join(w, b);
    offer(w, a, 1);
    uint32_t of_one = n_live;
    offer(w, b, 1);
    CHECK(a->n_accepted && b->n_accepted && a->key != b->key);
    CHECK_EQ_INT(n_domains, 2);
    CHECK_EQ_INT(n_regions, 2);
    CHECK_EQ_INT(n_live, 2 * of_one);
    control_close(a->conn);
    UNTIL(w->n_down == 1);
    CHECK_OK(kvt_rdma_ops.fence(w->down));
    kvt_rdma_ops.disconnect(w->down);
    CHECK_EQ_INT(n_live, of_one);
    offer(w, b, 2); /* the other sender continues */
    CHECK_EQ_INT(b->n_accepted, 2);
    CHECK_EQ_INT(n_live, of_one);
    world_end(w);
}

TEST_MAIN(CASE(an_offer_that_cannot_be_taken_is_refused_and_leaves_nothing),
          CASE(a_sender_that_leaves_takes_nothing_of_the_others),
          CASE(only_who_was_invited_may_connect),
          CASE(an_invitation_that_comes_to_nothing_leaves_nothing),
          CASE(a_peer_that_sets_up_otherwise_is_refused))
#else
TEST(rdma) { SKIP("built without libibverbs and librdmacm: rdma is NOT tested"); }
TEST_MAIN(CASE(rdma))
#endif
