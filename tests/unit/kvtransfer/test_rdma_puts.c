/* test_rdma_puts.c - puts and rails over a simulated NIC: it executes or fails work requests on
 * command and refuses what does not fit its send queue. No device is needed: the transport's calls
 * of libibverbs either go through the context's table (posting, polling) or are defined here
 * (states of queue pairs, destroying). */
#include "tests/harness/test.h"

#ifdef BATON_HAVE_RDMA
#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

#include "kvtransfer/rdma/conn.h"
#include "kvtransfer/rdma/rdma.h"
#include "kvtransfer/transports.h"
#include "shared/base/mem.h"

enum { DEPTH = 512, POOL = 1 << 20, STRIDE = 512, PIECE = 200, WCS = 1024 };

struct request {
    struct ibv_send_wr wr;
    struct ibv_sge sge[RDMA_SGE_MAX];
};

struct fake_nic {
    struct ibv_context ctx;
    struct ibv_qp qp;
    struct ibv_cq cq;
    struct request queue[DEPTH];
    uint32_t head, n, n_unknown; /* n: not executed; n_unknown: the poster saw no completion */
    uint32_t room;               /* of the send queue; what does not fit is refused */
    struct ibv_wc wc[WCS];
    uint32_t n_wc;
    uint32_t freed[WCS]; /* entries that this completion frees */
    uint32_t since_signal;
    bool in_error;
};

static bool stuck; /* queue pairs can neither be moved to the error state nor destroyed */

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
    struct fake_nic *k = qp->qp_context;
    (void)mask;
    if (stuck) return EIO;
    k->in_error |= a->qp_state == IBV_QPS_ERR;
    return 0;
}
int ibv_destroy_qp(struct ibv_qp *qp) { return (void)qp, stuck ? EBUSY : 0; }
int ibv_destroy_cq(struct ibv_cq *cq) { return (void)cq, 0; }

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct fake_nic *k = qp->qp_context;
    for (; wr; wr = wr->next) {
        *bad = wr;
        if (k->n_unknown == k->room) return ENOMEM;
        CHECK(wr->num_sge <= RDMA_SGE_MAX);
        struct request *r = &k->queue[(k->head + k->n) % DEPTH];
        r->wr = *wr;
        if (wr->num_sge) memcpy(r->sge, wr->sg_list, sizeof *wr->sg_list * (size_t)wr->num_sge);
        k->n++;
        k->n_unknown++;
    }
    return 0;
}

static int poll_cq(struct ibv_cq *cq, int cap, struct ibv_wc *out)
{
    struct fake_nic *k = cq->cq_context;
    int n = 0;
    for (; n < cap && (uint32_t)n < k->n_wc; n++) {
        out[n] = k->wc[n];
        k->n_unknown -= k->freed[n];
    }
    k->n_wc -= (uint32_t)n;
    memmove(k->wc, k->wc + n, k->n_wc * sizeof *k->wc);
    memmove(k->freed, k->freed + n, k->n_wc * sizeof *k->freed);
    return n;
}

static int arm(struct ibv_cq *cq, int solicited) { return (void)cq, (void)solicited, 0; }

static void complete(struct fake_nic *k, struct ibv_wc wc, uint32_t freed)
{
    wc.qp_num = k->qp.qp_num;
    k->freed[k->n_wc] = freed;
    k->wc[k->n_wc++] = wc;
}

/* Executes the oldest n requests; `st` is the status of the last. An error completes even if it is
 * not signalled. */
static void execute(struct fake_nic *k, uint32_t n, enum ibv_wc_status st)
{
    for (; n && k->n; n--, k->n--, k->head = (k->head + 1) % DEPTH) {
        const struct request *r = &k->queue[k->head];
        char *remote = (char *)(uintptr_t)r->wr.wr.rdma.remote_addr;
        bool bad = n == 1 && st != IBV_WC_SUCCESS, read = r->wr.opcode == IBV_WR_RDMA_READ;
        for (int i = 0; i < r->wr.num_sge && !bad; remote += r->sge[i++].length) {
            char *local = (char *)(uintptr_t)r->sge[i].addr;
            memcpy(read ? local : remote, read ? remote : local, r->sge[i].length);
        }
        k->since_signal++;
        if (!bad && !(r->wr.send_flags & IBV_SEND_SIGNALED)) continue;
        complete(k, (struct ibv_wc){ .wr_id = r->wr.wr_id, .status = bad ? st : IBV_WC_SUCCESS },
                 k->since_signal);
        k->since_signal = 0;
    }
}

/* A connection that is UP over `n_rails` NICs. */
struct world {
    struct fake_nic nics[2];
    struct rdma_transport *t;
    struct rdma_conn *c;
    struct kvt_env env;
    struct dev_mem mem;
    struct ibv_mr mr;
    struct rdma_port port;
    char *remote, *scratch;
    struct kvt_copy copies[256];
};

static struct world *world(bool incoming, uint32_t n_rails, bool verify)
{
    struct world *w = MEM_NEW(struct world);
    w->mem = (struct dev_mem){ .ptr = mem_calloc(1, POOL), .bytes = POOL };
    for (uint32_t i = 0; i < POOL; i++) ((char *)w->mem.ptr)[i] = (char)(i * 7 + i / 251 + 1);
    w->remote = mem_calloc(1, POOL);
    w->env = (struct kvt_env){
        .mem = &w->mem,
        .max_copies = COUNT_OF(w->copies),
        .max_peers = 2,
        .tuning = { .rdma = { .verify_read = verify } },
    };
    w->t = MEM_NEW(struct rdma_transport);
    w->t->base.ops = &kvt_rdma_ops;
    w->t->env = &w->env;
    list_init(&w->t->conns);
    list_init(&w->t->ready);
    w->t->scratch = w->scratch = mem_calloc(1, POOL);
    w->t->scratch_bytes = POOL;
    w->port = (struct rdma_port){ .device = "fake", .number = 1 };
    w->c = rdma_conn_new(w->t, NULL, incoming);
    w->c->state = RDMA_CONN_UP;
    w->c->n_rails = n_rails;
    for (uint32_t i = 0; i < n_rails; i++) {
        struct fake_nic *k = &w->nics[i];
        k->room = DEPTH;
        k->ctx.ops.post_send = post_send;
        k->ctx.ops.poll_cq = poll_cq;
        k->ctx.ops.req_notify_cq = arm;
        k->qp = (struct ibv_qp){ .context = &k->ctx, .qp_context = k, .qp_num = 5 + i };
        k->cq = (struct ibv_cq){ .context = &k->ctx, .cq_context = k };
        w->t->devices[i] = (struct rdma_device){
            .t = w->t, .port = &w->port, .ctx = &k->ctx, .pool = &w->mr, .scratch = &w->mr
        };
        w->t->local_ports[i] = (struct rdma_local_port){ &w->t->devices[i], &w->port, true };
        struct rdma_rail *r = &w->c->rails[i];
        r->my_port = i;
        r->epoch = 1;
        r->state = RDMA_RAIL_UP;
        r->cq = &k->cq;
        r->n_qps = 1;
        r->send_wrs = DEPTH;
        r->max_sge = RDMA_SGE_MAX;
        r->bytes_per_s = i ? 1 : 1000; /* the first is preferred while it has room */
        r->qps[0] = (struct rdma_qp){
            .rail = r,
            .qp = &k->qp,
            .base = (uintptr_t)w->remote,
            .usable = true,
            .n_recvs = incoming ? RDMA_WINDOW : 0,
        };
        list_init(&r->qps[0].puts);
    }
    return w;
}

static void world_end(struct world *w)
{
    stuck = false;
    rdma_conn_free(w->c);
    mem_free(w->t->event_queue.v);
    mem_free(w->t);
    mem_free(w->mem.ptr);
    mem_free(w->remote);
    mem_free(w->scratch);
    mem_free(w);
}

/* n copies that no request can join; copy i is from and to STRIDE * (first + i). */
static enum status put(struct world *w, uint64_t tag, uint32_t first, uint32_t n)
{
    struct kvt_put p = { .head = { .kind = KVT_MSG_DATA,
                                   .session = 1,
                                   .generation = 1,
                                   .bytes = (uint64_t)n * PIECE, },
                         .copies = w->copies,
                         .n_copies = n,
                         .tag = tag, };
    for (uint32_t i = 0; i < n; i++)
        w->copies[i] = (struct kvt_copy){ STRIDE * (uint64_t)(first + i),
                                          STRIDE * (uint64_t)(first + i), PIECE };
    return rdma_puts_add(w->c, &p);
}

static bool arrived(const struct world *w, uint32_t first, uint32_t n)
{
    for (uint32_t i = first; i < first + n; i++)
        if (memcmp(w->remote + STRIDE * i, (char *)w->mem.ptr + STRIDE * i, PIECE) != 0)
            return false;
    return true;
}

static size_t n_done(const struct world *w)
{
    size_t n = 0;
    for (size_t i = 0; i < w->t->event_queue.n; i++)
        n += w->t->event_queue.v[(w->t->event_queue.head + i) % w->t->event_queue.cap].kind ==
             KVT_PUT_DONE;
    return n;
}

static void poll(struct world *w, uint32_t rail) { (void)rdma_rail_poll(&w->c->rails[rail]); }

static void fenced(struct world *w, uint32_t rail, uint64_t completed)
{
    const struct rdma_rail_status v = {
        .rail = rail,
        .epoch = w->c->rails[rail].epoch,
        .recv_window = { .completed = completed },
    };
    rdma_rail_on_status(&w->c->rails[rail], RDMA_FRAME_FENCED, &v);
}

/* ---- sender ---- */

TEST(a_put_is_done_when_its_last_request_is_complete)
{
    struct world *w = world(false, 1, false);
    CHECK_OK(put(w, 1, 0, 10));
    execute(&w->nics[0], 9, IBV_WC_SUCCESS);
    poll(w, 0);
    CHECK_EQ_INT(n_done(w), 0);
    execute(&w->nics[0], 1, IBV_WC_SUCCESS);
    poll(w, 0);
    CHECK_EQ_INT(n_done(w), 1);
    CHECK(arrived(w, 0, 10));
    world_end(w);
}

/* If any request of a put fails, the put is not done and is not posted again before the receiver
 * has fenced its side. */
TEST(a_completion_with_an_error_is_never_done)
{
    for (uint32_t at = 1; at <= 10; at++) {
        struct world *w = world(false, 2, false);
        CHECK_OK(put(w, 1, 0, 10));
        execute(&w->nics[0], at, IBV_WC_RETRY_EXC_ERR);
        poll(w, 0);
        CHECK_EQ_INT(n_done(w), 0);
        CHECK_EQ_INT(w->c->rails[0].state, RDMA_RAIL_FENCING);
        CHECK(w->nics[0].in_error);
        CHECK_EQ_INT(w->nics[1].n, 0);
        fenced(w, 0, 0);
        CHECK_EQ_INT(n_done(w), 0);
        memset(w->remote, 0, POOL); /* the whole put is sent again */
        execute(&w->nics[1], DEPTH, IBV_WC_SUCCESS);
        poll(w, 1);
        CHECK_EQ_INT(n_done(w), 1);
        CHECK(arrived(w, 0, 10));
        CHECK(!w->c->failed);
        world_end(w);
    }
}

TEST(a_put_that_had_arrived_is_not_sent_again)
{
    struct world *w = world(false, 2, false);
    CHECK_OK(put(w, 1, 0, 10));
    execute(&w->nics[0], 9, IBV_WC_SUCCESS);
    rdma_rail_break(&w->c->rails[0], "pulled");
    fenced(w, 0, 1); /* the acknowledgement was lost, the put was not */
    CHECK_EQ_INT(n_done(w), 1);
    CHECK_EQ_INT(w->nics[1].n, 0);
    world_end(w);
}

TEST(acknowledged_but_never_arrived_ends_the_connection)
{
    struct world *w = world(false, 2, false);
    CHECK_OK(put(w, 1, 0, 10));
    execute(&w->nics[0], 10, IBV_WC_SUCCESS);
    poll(w, 0);
    CHECK_EQ_INT(n_done(w), 1);
    rdma_rail_break(&w->c->rails[0], "pulled");
    fenced(w, 0, 0);
    CHECK(w->c->failed);
    CHECK_STATUS(w->c->status, ERR_IO);
    world_end(w);
}

/* The queue refuses one request more than it holds. Everything posted fits, even if a put is longer
 * than the queue. */
TEST(the_send_queue_never_overflows)
{
    struct world *w = world(false, 1, false);
    w->nics[0].room = w->c->rails[0].send_wrs = 64;
    for (uint64_t tag = 0; tag < 6; tag++) CHECK_OK(put(w, tag, (uint32_t)tag * 200, 200));
    for (uint32_t turns = 0; n_done(w) < 6; turns++) {
        CHECK(turns < 1500);
        CHECK_EQ_INT(w->c->rails[0].state, RDMA_RAIL_UP);
        execute(&w->nics[0], 1, IBV_WC_SUCCESS);
        poll(w, 0);
    }
    CHECK(arrived(w, 0, 1200));
    world_end(w);
}

TEST(a_request_that_is_refused_breaks_the_rail_and_loses_nothing)
{
    struct world *w = world(false, 2, false);
    w->nics[0].room = 5;
    CHECK_OK(put(w, 1, 0, 10));
    CHECK_EQ_INT(w->c->rails[0].state, RDMA_RAIL_FENCING);
    CHECK_EQ_INT(w->nics[0].n, 5);
    execute(&w->nics[0], 5, IBV_WC_SUCCESS);
    poll(w, 0);
    CHECK_EQ_INT(n_done(w), 0);
    fenced(w, 0, 0);
    execute(&w->nics[1], DEPTH, IBV_WC_SUCCESS);
    poll(w, 1);
    CHECK_EQ_INT(n_done(w), 1);
    CHECK(arrived(w, 0, 10));
    world_end(w);
}

/* A put of several lists of work requests: reading back starts after the last write, comparing
 * after the last read. */
TEST(what_is_read_back_is_compared_when_all_of_it_is_there)
{
    struct world *w = world(false, 1, true);
    CHECK_OK(put(w, 1, 0, 200));
    CHECK_STATUS(put(w, 2, 200, 1), ERR_BUSY); /* one at a time: there is one scratch memory */
    for (uint32_t turns = 0; n_done(w) < 1; turns++) {
        CHECK(turns < 500);
        if (w->c->failed) test_fail(__FILE__, __LINE__, "%s", w->c->text);
        execute(&w->nics[0], 1, IBV_WC_SUCCESS);
        poll(w, 0);
    }
    CHECK(arrived(w, 0, 200));
    CHECK_OK(put(w, 2, 200, 200));
    for (uint32_t turns = 0; turns < 600; turns++) {
        execute(&w->nics[0], 1, IBV_WC_SUCCESS);
        /* the last copy reads back other bytes */
        w->remote[STRIDE * 399] = (char)~((char *)w->mem.ptr)[STRIDE * 399];
        poll(w, 0);
    }
    CHECK_EQ_INT(n_done(w), 1);
    CHECK(w->c->failed);
    CHECK_STATUS(w->c->status, ERR_CHECKSUM);
    world_end(w);
}

/* ---- receiver ---- */

static void immediate(struct world *w, uint32_t number)
{
    complete(&w->nics[0],
             (struct ibv_wc){
                 .wr_id = rdma_wr_id(RDMA_WR_RECV, 0, 0, false),
                 .status = IBV_WC_SUCCESS,
                 .wc_flags = IBV_WC_WITH_IMM,
                 .imm_data = htonl(number),
             },
             0);
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    return (void)qp, (void)wr, (void)bad, 0;
}

TEST(an_immediate_twice_or_of_no_put_ends_the_connection)
{
    static const uint32_t second[] = { 3, RDMA_WINDOW, UINT32_MAX };
    for (size_t i = 0; i < COUNT_OF(second); i++) {
        struct world *w = world(true, 1, false);
        w->nics[0].ctx.ops.post_recv = post_recv;
        immediate(w, 3);
        poll(w, 0);
        CHECK(!w->c->failed);
        CHECK_EQ_INT(w->c->rails[0].qps[0].n_recvs, RDMA_WINDOW);
        immediate(w, second[i]);
        poll(w, 0);
        CHECK(w->c->failed);
        CHECK_STATUS(w->c->status, ERR_FORMAT);
        world_end(w);
    }
}

/* A queue pair that can neither be moved to the error state nor destroyed may still write, so the
 * pages must not be freed. */
TEST(a_queue_pair_that_cannot_be_ended_is_no_fence)
{
    struct world *w = world(true, 1, false);
    stuck = true;
    CHECK_STATUS(kvt_rdma_ops.fence(&w->c->base), ERR_BUSY);
    CHECK_STATUS(kvt_rdma_ops.fence(&w->c->base), ERR_BUSY);
    world_end(w);
    w = world(true, 1, false);
    CHECK_OK(kvt_rdma_ops.fence(&w->c->base));
    CHECK(w->nics[0].in_error);
    world_end(w);
}

TEST_MAIN(CASE(a_put_is_done_when_its_last_request_is_complete),
          CASE(a_completion_with_an_error_is_never_done),
          CASE(a_put_that_had_arrived_is_not_sent_again),
          CASE(acknowledged_but_never_arrived_ends_the_connection),
          CASE(the_send_queue_never_overflows),
          CASE(a_request_that_is_refused_breaks_the_rail_and_loses_nothing),
          CASE(what_is_read_back_is_compared_when_all_of_it_is_there),
          CASE(an_immediate_twice_or_of_no_put_ends_the_connection),
          CASE(a_queue_pair_that_cannot_be_ended_is_no_fence))
#else
TEST(rdma) { SKIP("built without libibverbs and librdmacm: rdma is NOT tested"); }
TEST_MAIN(CASE(rdma))
#endif
