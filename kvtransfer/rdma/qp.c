/* qp.c - the queue pairs of a rail: created, connected, moved to the error state, destroyed.
 * ibv_modify_qp(3) says which transition needs which attribute. Thread: transfer. */
#include "kvtransfer/rdma/qp.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "kvtransfer/connect/control.h"
#include "kvtransfer/rdma/cm.h"
#include "kvtransfer/rdma/rail.h"
#include "kvtransfer/rdma/rdma.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

struct rdma_local_port *rdma_rail_local_port(const struct rdma_rail *r)
{
    return &r->t->local_ports[r->my_port];
}

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

static enum status fail(struct rdma_rail *r, const char *what)
{
    snprintf(r->why, sizeof r->why, "%.24s: %s: %s", rdma_rail_local_port(r)->port->device, what,
             strerror(errno));
    return ERR_IO;
}

/* ---- where ---- */

enum status rdma_qp_port_addr(struct rdma_transport *t, const struct control_conn *control,
                              uint32_t port, struct rdma_port_addr *out, uint8_t *gid_index,
                              struct err *err)
{
    const struct rdma_port *p = t->local_ports[port].port;
    struct ibv_context *ctx = t->local_ports[port].device->ctx;
    const struct rdma_gid *g;
    struct sockaddr_storage local, remote;
    struct ibv_port_attr now;
    union ibv_gid raw;
    control_addresses(control, &local, &remote);
    TRY(rdma_gid_choose(p, (struct sockaddr *)&local, &t->env->tuning.rdma, &g, err));
    /* The list dates from the start; if the address at this index has changed, use the new one. */
    if (ibv_query_gid(ctx, p->number, (int)g->index, &raw) != 0 ||
        ibv_query_port(ctx, p->number, &now) != 0)
        return err_set(err, ERR_NODEV, "%s does not answer any more: %s", p->device,
                       strerror(errno));
    *out = (struct rdma_port_addr){
        .lid = now.lid,
        .link = (uint8_t)p->link,
        .gid_type = (uint8_t)g->type,
        .bytes_per_s = p->bytes_per_s,
        .mtu = rdma_mtu_bytes((unsigned)now.active_mtu),
    };
    if (!out->mtu) out->mtu = 256;
    memcpy(out->gid, raw.raw, sizeof out->gid);
    if (gid_index) *gid_index = (uint8_t)g->index;
    return OK;
}

/* ---- made ---- */

/* Creates a queue pair; without inline data if the device has none. */
static struct ibv_qp *create_qp(struct rdma_rail *r, struct ibv_pd *pd, struct rdma_qp *q)
{
    bool receiver = r->incoming;
    struct ibv_qp_init_attr a = {
        .qp_context = q,
        .send_cq = r->cq,
        .recv_cq = r->cq,
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 0,
        .cap = {
            .max_send_wr = r->send_wrs, /* providers size entries by it: not 0 */
            .max_recv_wr = receiver ? RDMA_WINDOW : 1,
            .max_recv_sge = 1,
            .max_send_sge = receiver ? 1 : r->max_sge,
            .max_inline_data = receiver ? 0 : RDMA_INLINE_BYTES,
        },
    };
    struct ibv_qp_init_attr again = a;
    struct ibv_qp *qp = ibv_create_qp(pd, &a);
    if (!qp && again.cap.max_inline_data) {
        again.cap.max_inline_data = 0;
        a = again;
        qp = ibv_create_qp(pd, &a);
    }
    /* of all its queue pairs */
    if (qp) r->max_inline = smaller(r->max_inline, a.cap.max_inline_data);
    return qp;
}

static enum status create_one(struct rdma_rail *r, struct ibv_pd *pd, struct rdma_qp *q, bool reads)
{
    uint32_t psn;
    q->qp = create_qp(r, pd, q);
    if (!q->qp) return fail(r, "no queue pair");
    random_bytes(&psn, sizeof psn);
    q->psn = psn & 0xffffff; /* packets of an earlier connection with the same number are outside
                              * the window */
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_INIT,
        .pkey_index = 0,
        .port_num = rdma_rail_local_port(r)->port->number,
    };
    if (r->incoming)
        a.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | (reads ? IBV_ACCESS_REMOTE_READ : 0u);
    if (ibv_modify_qp(q->qp, &a,
                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) != 0)
        return fail(r, "queue pair not to INIT");
    if (r->incoming && rdma_qp_post_recvs(q, RDMA_WINDOW) != OK) return fail(r, "no receives");
    return OK;
}

enum status rdma_qp_create(struct rdma_rail *r, uint32_t n, bool reads)
{
    const struct rdma_local_port *e = rdma_rail_local_port(r);
    struct ibv_pd *pd;
    bool receiver = r->incoming;
    r->send_wrs = receiver ? 4 : smaller(RDMA_SEND_WRS, e->port->max_qp_wr);
    if (!receiver && n * r->send_wrs > e->port->max_cqe) r->send_wrs = e->port->max_cqe / n;
    r->max_sge = smaller(RDMA_SGE_MAX, e->port->max_sge);
    r->max_inline = receiver ? 0 : RDMA_INLINE_BYTES;
    r->n_qps = 0;
    TRY(rdma_memory_domain(r, reads, &pd));
    /* Room for everything that is posted: unsignalled requests also complete when they are
     * flushed. */
    uint32_t entries = n * (r->send_wrs + (receiver ? RDMA_WINDOW : 1));
    r->cq = ibv_create_cq(e->device->ctx, (int)smaller(entries, e->port->max_cqe), r,
                          e->device->channel, 0);
    enum status st = r->cq && ibv_req_notify_cq(r->cq, 0) == 0 ? OK
                                                               : fail(r, "no completion queue");
    for (uint32_t i = 0; i < n && st == OK; i++) {
        struct rdma_qp *q = &r->qps[i];
        *q = (struct rdma_qp){ .rail = r };
        list_init(&q->puts);
        r->n_qps++;
        st = create_one(r, pd, q, reads);
    }
    if (st != OK) rdma_qp_destroy(r);
    return st;
}

/* ---- receives ---- */

enum status rdma_qp_post_recvs(struct rdma_qp *q, uint32_t n)
{
    struct ibv_recv_wr *v = q->rail->t->recvs, *bad = v;
    for (uint32_t i = 0; i < n; i++)
        v[i] = (struct ibv_recv_wr){
            .wr_id = rdma_wr_id(RDMA_WR_RECV, 0, 0, false),
            .next = i + 1 < n ? &v[i + 1] : NULL,
        };
    enum status st = n && ibv_post_recv(q->qp, v, &bad) != 0 ? ERR_IO : OK;
    q->n_recvs += st == OK ? n : (uint32_t)(bad - v); /* earlier ones were posted and complete when
                                                       * the queue pair is flushed */
    return st;
}

/* ---- connected ---- */

/* Attributes of both transitions, however the queue pair is set up; the mask selects those of
 * one. */
static void set_limits(struct ibv_qp_attr *a, const struct kvt_rdma_tuning *t)
{
    a->max_dest_rd_atomic = a->max_rd_atomic = 1;
    a->min_rnr_timer = 12;
    a->timeout = rdma_timeout(t);
    a->retry_cnt = rdma_retries(t);
    a->rnr_retry = 7;
}

static enum status connect_one(struct rdma_rail *r, struct rdma_qp *q,
                               const struct rdma_rail_info *m, const struct rdma_qp_info *peer,
                               uint8_t gid_index)
{
    const struct kvt_rdma_tuning *t = &r->t->env->tuning.rdma;
    struct ibv_qp_attr a = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = (enum ibv_mtu)rdma_mtu_code(r->mtu),
        .dest_qp_num = peer->number,
        .rq_psn = peer->psn,
    };
    set_limits(&a, t);
    a.ah_attr = (struct ibv_ah_attr){
        .dlid = m->addr.lid,
        .sl = t->service_level,
        .is_global = 1,
        .port_num = rdma_rail_local_port(r)->port->number,
        .grh = { .sgid_index = gid_index, .hop_limit = 255, .traffic_class = t->traffic_class }
    };
    memcpy(a.ah_attr.grh.dgid.raw, m->addr.gid, sizeof m->addr.gid);
    if (ibv_modify_qp(q->qp, &a,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) != 0)
        return fail(r, "queue pair not to RTR");
    a.qp_state = IBV_QPS_RTS;
    a.sq_psn = q->psn;
    if (ibv_modify_qp(q->qp, &a,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) != 0)
        return fail(r, "queue pair not to RTS");
    q->rts = true;
    return OK;
}

enum status rdma_qp_connect(struct rdma_rail *r, const struct rdma_rail_info *theirs)
{
    struct rdma_port_addr mine;
    uint8_t gid_index;
    TRY(rdma_rail_update_addr(r, &mine, &gid_index));
    for (uint32_t i = 0; i < r->n_qps; i++)
        TRY(connect_one(r, &r->qps[i], theirs, &theirs->qps[i], gid_index));
    return OK;
}

enum status rdma_qp_modify(struct rdma_qp *q, struct ibv_qp_attr *a, int mask)
{
    struct rdma_rail *r = q->rail;
    const struct kvt_rdma_tuning *t = &r->t->env->tuning.rdma;
    if (mask & IBV_QP_AV) {
        if (t->service_level) a->ah_attr.sl = t->service_level;
        if (t->traffic_class_given) a->ah_attr.grh.traffic_class = t->traffic_class;
        if (t->gid_given) a->ah_attr.grh.sgid_index = t->gid_index;
    }
    if (mask & IBV_QP_PATH_MTU) {
        if (rdma_mtu_bytes(a->path_mtu) > r->mtu) a->path_mtu = (enum ibv_mtu)rdma_mtu_code(r->mtu);
        else r->mtu = rdma_mtu_bytes(a->path_mtu);
    }
    set_limits(a, t);
    if (ibv_modify_qp(q->qp, a, mask) == 0) return OK;
    if (a->qp_state == IBV_QPS_INIT) return fail(r, "queue pair not to another partition");
    return a->qp_state == IBV_QPS_RTR ? fail(r, "queue pair not to RTR")
                                      : fail(r, "queue pair not to RTS");
}

/* ---- ended ---- */

static bool into_error(struct ibv_qp *qp)
{
    struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };
    return ibv_modify_qp(qp, &a, IBV_QP_STATE) == 0;
}

void rdma_qp_error(struct rdma_rail *r)
{
    for (uint32_t i = 0; i < r->n_qps; i++)
        if (r->qps[i].qp)
            (void)into_error(r->qps[i].qp); /* rdma_qp_destroy tries again and checks */
}

void rdma_qp_destroy(struct rdma_rail *r)
{
    for (uint32_t i = 0; i < r->n_qps; i++) {
        struct rdma_qp *q = &r->qps[i];
        bool ended = !q->qp || into_error(q->qp);
        rdma_memory_revoke(q); /* before the queue pair that it refers to, for which Soft-RoCE
                                * would otherwise wait for ever */
        int code = q->qp ? ibv_destroy_qp(q->qp) : 0; /* OK for a removed device (rdma-core,
                                                       * verbs_is_destroy_err) */
        if (code && !ended) {
            log_error("rdma queue pair cannot be ended", "device=%s why=\"%s\"",
                      rdma_rail_local_port(r)->port->device, strerror(code));
            r->unfenced = true;
        }
        q->qp = NULL;
        if (q->id) rdma_cm_release_id(q); /* after its queue pair: rdma_destroy_id(3) */
        q->usable = q->rts = false;
        q->n_recvs = q->n_wrs = 0;
    }
    list_remove(&r->link);
    if (r->cq) ibv_destroy_cq(r->cq);
    r->cq = NULL;
    rdma_memory_deregister(r);
}
