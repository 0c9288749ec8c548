/* rail.c - the states of a rail on both sides; diagram: rail.h.
 *
 * The queue pairs of a broken rail are moved to the error state at once. They are destroyed later,
 * by a tick, a frame or the end of the connection, never inside the loop that polls completions.
 * Thread: transfer. */
#include "kvtransfer/rdma/rail.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "kvtransfer/rdma/cm.h"
#include "kvtransfer/rdma/conn.h"
#include "kvtransfer/rdma/rdma.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"

static const char DISCONNECTED[] = "the peer has disconnected a queue pair";

static const char *port_name(const struct rdma_rail *r)
{
    return rdma_rail_local_port(r)->port->device;
}

bool rdma_any_rail_is_up(const struct rdma_conn *c)
{
    for (uint32_t i = 0; i < c->n_rails; i++)
        if (c->rails[i].state == RDMA_RAIL_UP) return true;
    return false;
}

static void send_rail_status(struct rdma_rail *r, enum rdma_frame frame, const char *reason,
                             bool final)
{
    struct rdma_rail_status v = { .rail = r->index, .epoch = r->epoch, .final = final };
    struct buf body = { 0 };
    if (frame == RDMA_FRAME_FENCED) v.recv_window = r->conn->recv_window;
    if (frame == RDMA_FRAME_REFUSE) snprintf(v.reason, sizeof v.reason, "%s", reason);
    rdma_rail_status_encode(frame, &v, &body);
    rdma_conn_send(r->conn, frame, &body);
    buf_release(&body);
}

/* ---- sender ---- */

static void back_off(struct rdma_rail *r)
{
    r->state = RDMA_RAIL_DOWN;
    r->deadline_ms = clock_ms() +
                     rdma_schedule_backoff_ms(r->n_failed++, rdma_any_rail_is_up(r->conn));
}

/* Ends an attempt in OFFERED or PROBING. A connection whose rails all fail ends at once. */
static void fail_attempt(struct rdma_rail *r)
{
    struct rdma_conn *c = r->conn;
    rdma_qp_error(r);
    log_debug("rdma rail not up", "device=%s rail=%u try=%u why=\"%s\"", port_name(r), r->index,
              r->n_failed, r->why);
    back_off(r);
    if (c->state != RDMA_CONN_OPENING) return;
    for (uint32_t i = 0; i < c->n_rails; i++)
        if (c->rails[i].state != RDMA_RAIL_DOWN || c->rails[i].n_failed == 0) return;
    rdma_conn_fail(c, ERR_PEER_LOST, r->why);
}

/* False, with a sentence in r->why, if the operator's MTU is one that the port cannot carry or that
 * differs from the peer's. */
static bool mtu_fits(struct rdma_rail *r, const struct rdma_port_addr *mine, uint32_t mine_asked,
                     uint32_t theirs_asked)
{
    if (mine_asked > mine->mtu)
        snprintf(r->why, sizeof r->why, "MTU %u was asked for here, but %.24s carries %u",
                 mine_asked, port_name(r), mine->mtu);
    else if (theirs_asked > mine->mtu)
        snprintf(r->why, sizeof r->why,
                 "MTU %u was asked for by the peer, but %.24s here carries %u", theirs_asked,
                 port_name(r), mine->mtu);
    else if (mine_asked && theirs_asked && mine_asked != theirs_asked)
        snprintf(r->why, sizeof r->why, "MTU %u was asked for here, %u by the peer: set both alike",
                 mine_asked, theirs_asked);
    else return true;
    return false;
}

static uint32_t n_qps_wanted(const struct kvt_rdma_tuning *t)
{
    if (!t->qps_per_rail) return RDMA_QPS_DEFAULT;
    return t->qps_per_rail < RDMA_QPS_MAX ? t->qps_per_rail : RDMA_QPS_MAX;
}

static void offer_rail(struct rdma_rail *r)
{
    struct rdma_conn *c = r->conn;
    const struct kvt_rdma_tuning *t = &c->t->env->tuning.rdma;
    struct rdma_rail_info m = {
        .rail = r->index,
        .epoch = ++r->epoch,
        .sender_port = r->my_port,
        .receiver_port = r->their_port,
        .reads = t->flush_read || t->verify_read,
    };
    struct err err = { 0 };
    r->deadline_ms = clock_ms() + RDMA_SETUP_MS;
    r->state = RDMA_RAIL_OFFERED;
    r->accepted = false;
    r->disconnected_ms = 0;
    rdma_qp_destroy(r);
    enum status st = rdma_qp_port_addr(c->t, c->control, r->my_port, &m.addr, NULL, &err);
    if (st != OK) snprintf(r->why, sizeof r->why, "%.*s", RDMA_REASON_MAX, err.text);
    else if (!mtu_fits(r, &m.addr, t->mtu, c->theirs.mtu_asked)) {
        rdma_conn_fail(c, ERR_CONFIG, r->why);
        return;
    } else st = rdma_qp_create(r, n_qps_wanted(t), false);
    if (st != OK) {
        fail_attempt(r);
        return;
    }
    m.mtu = t->mtu ? t->mtu : m.addr.mtu;
    m.n_qps = r->n_qps;
    for (uint32_t i = 0; i < r->n_qps; i++)
        m.qps[i] = (struct rdma_qp_info){ .number = r->qps[i].qp->qp_num, .psn = r->qps[i].psn };
    struct buf body = { 0 };
    rdma_rail_info_encode(&m, &body);
    rdma_conn_send(c, RDMA_FRAME_OFFER, &body);
    buf_release(&body);
}

/* Posts a write of no bytes, which is acknowledged only by an existing queue pair over a working
 * path. */
static enum status probe(struct rdma_qp *q)
{
    struct ibv_send_wr wr = { .wr_id = rdma_wr_id(RDMA_WR_PROBE, 1, 0, false),
                              .opcode = IBV_WR_RDMA_WRITE,
                              .send_flags = IBV_SEND_SIGNALED,
                              .wr.rdma = { .remote_addr = q->base, .rkey = q->key }, },
                       *bad;
    if (ibv_post_send(q->qp, &wr, &bad) != 0) return ERR_IO;
    q->n_wrs++;
    return OK;
}

/* Probes after ACCEPT came (with the keys) and every queue pair is connected. */
static void probe_when_connected(struct rdma_rail *r)
{
    enum status st = OK;
    if (!r->accepted) return;
    for (uint32_t i = 0; i < r->n_qps; i++)
        if (!r->qps[i].rts) return;
    for (uint32_t i = 0; i < r->n_qps && st == OK; i++) {
        st = probe(&r->qps[i]);
        if (st != OK)
            snprintf(r->why, sizeof r->why, "%s takes no work request: %s", port_name(r),
                     strerror(errno));
    }
    if (st != OK) {
        fail_attempt(r);
        return;
    }
    r->state = RDMA_RAIL_PROBING;
    snprintf(r->why, sizeof r->why, "%.24s: the peer's queue pair does not acknowledge",
             port_name(r));
}

void rdma_rail_on_accept(struct rdma_rail *r, const struct rdma_rail_info *m)
{
    struct rdma_conn *c = r->conn;
    /* of an attempt that was given up */
    if (r->state != RDMA_RAIL_OFFERED || m->epoch != r->epoch) return;
    if (m->n_qps != r->n_qps) {
        rdma_conn_fail(c, ERR_FORMAT,
                       "it accepted another number of queue pairs than were offered");
        return;
    }
    r->mtu = m->mtu;
    r->accepted = true;
    for (uint32_t i = 0; i < r->n_qps; i++) {
        r->qps[i].key = m->qps[i].key;
        r->qps[i].base = c->theirs.pool_base;
    }
    if (c->t->cm || rdma_qp_connect(r, m) == OK) probe_when_connected(r);
    else fail_attempt(r);
}

void rdma_rail_on_invite(struct rdma_rail *r, const struct rdma_invite *m)
{
    /* of an attempt that was given up */
    if (r->state != RDMA_RAIL_OFFERED || m->epoch != r->epoch) return;
    if (r->qps[0].id) {
        rdma_conn_fail(r->conn, ERR_FORMAT, "it invited the same queue pairs twice");
        return;
    }
    r->mtu = m->mtu;
    if (rdma_cm_connect(r, m) != OK) fail_attempt(r);
}

static void on_fenced(struct rdma_rail *r, const struct rdma_recv_window *window)
{
    struct rdma_conn *c = r->conn;
    if (r->state == RDMA_RAIL_OFFERED || r->state == RDMA_RAIL_PROBING) {
        snprintf(r->why, sizeof r->why, "the peer's queue pair went into error");
        fail_attempt(r);
    }
    if (r->state != RDMA_RAIL_UP && r->state != RDMA_RAIL_FENCING) return;
    if (r->state == RDMA_RAIL_UP)
        log_warn("rdma rail broken", "device=%s rail=%u why=\"the receiver says so\"", port_name(r),
                 r->index);
    r->state = RDMA_RAIL_FENCING; /* so the completions below post nothing new on this rail */
    rdma_qp_error(r);
    (void)rdma_rail_poll(r); /* acknowledged before it broke */
    rdma_qp_destroy(r);
    back_off(r);
    log_debug("rdma rail fenced", "device=%s rail=%u puts=%llu acknowledged=%llu completed=%llu",
              port_name(r), r->index, (unsigned long long)c->issued,
              (unsigned long long)c->finished, (unsigned long long)window->completed);
    enum status st = rdma_puts_requeue(r, window);
    if (st != OK)
        rdma_conn_fail(
            c, st, "a put was acknowledged by a queue pair that never showed it to the receiver");
    rdma_puts_pump(c);
}

/* ---- receiver ---- */

/* Why this offer is refused, or NULL. *final: trying again is of no use. */
static const char *refusal(struct rdma_rail *r, const struct rdma_rail_info *m,
                           struct rdma_port_addr *mine, bool *final)
{
    const struct rdma_conn *c = r->conn;
    const struct kvt_rdma_tuning *t = &c->t->env->tuning.rdma;
    struct err err = { 0 };
    *final = false;
    if (rdma_rail_local_port(r)->device->dead) return "the device is gone";
    if (rdma_qp_port_addr(r->t, r->conn->control, r->my_port, mine, NULL, &err) != OK) {
        snprintf(r->why, sizeof r->why, "%.*s", RDMA_REASON_MAX, err.text);
        return r->why;
    }
    *final = true;
    if (m->reads && !(t->flush_read || t->verify_read))
        return "reading back (KVCACHE_GDRCOPY_FLUSH_ENABLE, KVCACHE_VERIFY_READ) has to be on here "
               "too";
    if (!mtu_fits(r, mine, t->mtu, c->theirs.mtu_asked)) return r->why;
    return NULL;
}

static void accept_offer(struct rdma_rail *r)
{
    struct rdma_rail_info m = {
        .rail = r->index,
        .epoch = r->epoch,
        .sender_port = r->their_port,
        .receiver_port = r->my_port,
        .mtu = r->mtu,
        .n_qps = r->n_qps,
    };
    struct err err = { 0 };
    if (rdma_qp_port_addr(r->t, r->conn->control, r->my_port, &m.addr, NULL, &err) != OK) {
        rdma_rail_break(r, err.text);
        return;
    }
    for (uint32_t i = 0; i < r->n_qps; i++)
        m.qps[i] = (struct rdma_qp_info){ r->qps[i].qp->qp_num, r->qps[i].psn, r->qps[i].key };
    r->state = RDMA_RAIL_UP;
    log_debug("rdma rail up", "device=%s rail=%u side=receiver qps=%u mtu=%u key=%s", port_name(r),
              r->index, r->n_qps, r->mtu, r->region ? "region" : "window");
    struct buf body = { 0 };
    rdma_rail_info_encode(&m, &body);
    rdma_conn_send(r->conn, RDMA_FRAME_ACCEPT, &body);
    buf_release(&body);
    rdma_conn_up(r->conn);
}

static void accept_when_ready(struct rdma_rail *r)
{
    for (uint32_t i = 0; i < r->n_qps; i++)
        if (!r->qps[i].usable) return;
    if (r->state == RDMA_RAIL_BINDING) accept_offer(r);
}

static enum status grant(struct rdma_qp *q)
{
    struct rdma_rail *r = q->rail;
    enum status st = rdma_memory_grant(q, r->reads);
    q->usable = st == OK;
    if (st == OK || st == ERR_BUSY) return OK;
    snprintf(r->why, sizeof r->why, "%s binds no memory window: %s", port_name(r), strerror(errno));
    return st;
}

/* Tells the sender where its queue pairs connect. */
static enum status invite(struct rdma_rail *r, const struct rdma_rail_info *offer)
{
    struct rdma_invite m = { .rail = r->index, .epoch = r->epoch, .mtu = r->mtu };
    struct buf body = { 0 };
    for (uint32_t i = 0; i < r->n_qps; i++) r->qps[i].peer = offer->qps[i].number;
    TRY(rdma_cm_listen(r, &m));
    rdma_invite_encode(&m, &body);
    rdma_conn_send(r->conn, RDMA_FRAME_INVITE, &body);
    buf_release(&body);
    return OK;
}

void rdma_rail_on_offer(struct rdma_conn *c, const struct rdma_rail_info *m)
{
    struct rdma_rail *r = &c->rails[m->rail];
    if (m->epoch <= r->epoch || m->receiver_port >= c->t->ports.n ||
        m->sender_port >= c->theirs.n_ports) {
        rdma_conn_fail(c, ERR_FORMAT,
                       "it offered queue pairs out of order, or of a port that there is not");
        return;
    }
    if (r->cq) (void)rdma_rail_poll(r);
    rdma_qp_destroy(r);
    if (c->n_rails <= m->rail) c->n_rails = m->rail + 1;
    r->state = RDMA_RAIL_BINDING;
    r->epoch = m->epoch;
    r->my_port = m->receiver_port;
    r->their_port = m->sender_port;
    r->deadline_ms = clock_ms() + RDMA_SETUP_MS;
    r->disconnected_ms = 0;
    r->why[0] = 0;
    struct rdma_port_addr mine;
    bool final;
    const char *why = refusal(r, m, &mine, &final);
    if (why) {
        r->state = RDMA_RAIL_DOWN;
        send_rail_status(r, RDMA_FRAME_REFUSE, why, final);
        return;
    }
    uint32_t limit = c->t->env->tuning.rdma.mtu ? c->t->env->tuning.rdma.mtu : mine.mtu;
    r->mtu = m->mtu < limit ? m->mtu : limit;
    r->reads = m->reads;
    enum status st = rdma_qp_create(r, m->n_qps, m->reads);
    if (st == OK && c->t->cm) st = invite(r, m);
    else if (st == OK) st = rdma_qp_connect(r, m);
    for (uint32_t i = 0; i < r->n_qps && st == OK && !c->t->cm; i++) st = grant(&r->qps[i]);
    if (st != OK) rdma_rail_break(r, r->why);
    else accept_when_ready(r);
}

/* Ends DRAINING when every receive has completed: all complete puts are counted then. */
static void end_draining(struct rdma_rail *r, bool now)
{
    for (uint32_t i = 0; i < r->n_qps && !now; i++)
        if (r->qps[i].n_recvs) return;
    uint32_t left = 0;
    for (uint32_t i = 0; i < r->n_qps; i++) left += r->qps[i].n_recvs;
    rdma_qp_destroy(r);
    r->state = RDMA_RAIL_DOWN;
    if (rdma_conn_unfenced(r->conn)) {
        rdma_conn_fail(r->conn, ERR_IO, "a queue pair cannot be ended");
        return;
    }
    log_debug("rdma rail fenced", "device=%s rail=%u completed=%llu not_flushed=%u", port_name(r),
              r->index, (unsigned long long)r->conn->recv_window.completed, left);
    send_rail_status(r, RDMA_FRAME_FENCED, NULL, false);
}

/* ---- both ---- */

enum status rdma_rail_update_addr(struct rdma_rail *r, struct rdma_port_addr *out,
                                  uint8_t *gid_index)
{
    struct err err = { 0 };
    enum status st = rdma_qp_port_addr(r->t, r->conn->control, r->my_port, out, gid_index, &err);
    if (st != OK) {
        snprintf(r->why, sizeof r->why, "%.*s", RDMA_REASON_MAX, err.text);
        return st;
    }
    memcpy(r->gid, out->gid, sizeof r->gid);
    r->lid = out->lid;
    return OK;
}

void rdma_rail_connected(struct rdma_qp *q)
{
    struct rdma_rail *r = q->rail;
    if (q->rts) return;
    q->rts = true;
    if (r->state == RDMA_RAIL_OFFERED) probe_when_connected(r);
    if (r->state != RDMA_RAIL_BINDING) return;
    if (grant(q) != OK) rdma_rail_break(r, r->why);
    else accept_when_ready(r);
}

void rdma_rail_break(struct rdma_rail *r, const char *why)
{
    if (why != r->why) snprintf(r->why, sizeof r->why, "%.*s", RDMA_REASON_MAX, why);
    switch (r->state) {
    case RDMA_RAIL_OFFERED:
    case RDMA_RAIL_PROBING: fail_attempt(r); return;
    case RDMA_RAIL_BINDING:
        rdma_qp_error(r);
        r->state = RDMA_RAIL_DOWN;
        send_rail_status(r, RDMA_FRAME_REFUSE, r->why, false);
        return;
    case RDMA_RAIL_UP: break;
    case RDMA_RAIL_DOWN:
    case RDMA_RAIL_FENCING:
    case RDMA_RAIL_DRAINING: return;
    }
    log_warn("rdma rail broken", "device=%s rail=%u side=%s why=\"%s\"", port_name(r), r->index,
             r->conn->base.incoming ? "receiver" : "sender", r->why);
    rdma_qp_error(r);
    if (r->conn->base.incoming) {
        r->state = RDMA_RAIL_DRAINING;
        r->deadline_ms = clock_ms() + RDMA_DRAIN_MS;
    } else {
        r->state = RDMA_RAIL_FENCING;
        send_rail_status(r, RDMA_FRAME_BROKEN, NULL, false);
    }
}

void rdma_rail_disconnected(struct rdma_rail *r)
{
    if (r->state != RDMA_RAIL_UP) rdma_rail_break(r, DISCONNECTED);
    else if (!r->disconnected_ms) r->disconnected_ms = clock_ms();
}

void rdma_rail_on_status(struct rdma_rail *r, enum rdma_frame frame,
                         const struct rdma_rail_status *m)
{
    if (m->epoch != r->epoch) return; /* of earlier queue pairs */
    if (frame == RDMA_FRAME_FENCED) on_fenced(r, &m->recv_window);
    else if (frame == RDMA_FRAME_BROKEN) {
        if (r->state == RDMA_RAIL_UP) rdma_rail_break(r, "the sender says so");
    } else if (r->state == RDMA_RAIL_OFFERED) {
        snprintf(r->why, sizeof r->why, "%s", m->reason);
        if (m->final) rdma_conn_fail(r->conn, ERR_PEER_REFUSED, r->why);
        else fail_attempt(r);
    }
}

static void rail_up(struct rdma_rail *r)
{
    for (uint32_t i = 0; i < r->n_qps; i++)
        if (!r->qps[i].usable) return;
    if (r->state != RDMA_RAIL_PROBING) return;
    r->state = RDMA_RAIL_UP;
    r->why[0] = 0;
    if (r->epoch > 1)
        log_info("rdma rail up again", "device=%s rail=%u tries=%u", port_name(r), r->index,
                 r->n_failed);
    r->n_failed = 0;
    rdma_conn_up(r->conn);
    rdma_puts_pump(r->conn);
}

static struct rdma_qp *qp_of(struct rdma_rail *r, uint32_t number)
{
    for (uint32_t i = 0; i < r->n_qps; i++)
        if (r->qps[i].qp && r->qps[i].qp->qp_num == number) return &r->qps[i];
    return NULL;
}

static void on_completion(struct rdma_rail *r, const struct ibv_wc *wc)
{
    struct rdma_qp *q = qp_of(r, wc->qp_num);
    enum rdma_wr_kind kind = (enum rdma_wr_kind)(wc->wr_id >> 56);
    if (!q) return;
    if (kind == RDMA_WR_RECV) q->n_recvs--;
    if (wc->status != IBV_WC_SUCCESS) {
        char why[RDMA_REASON_MAX];
        snprintf(why, sizeof why, "%s: %s (vendor code %u)", port_name(r),
                 ibv_wc_status_str(wc->status), wc->vendor_err);
        rdma_rail_break(r, why);
        return;
    }
    switch (kind) {
    case RDMA_WR_RECV:
        if (wc->wc_flags & IBV_WC_WITH_IMM) rdma_conn_completed(r->conn, ntohl(wc->imm_data));
        break;
    case RDMA_WR_PUT: rdma_puts_completed(q, wc->wr_id); break;
    case RDMA_WR_PROBE:
        q->n_wrs--;
        q->usable = true;
        rail_up(r);
        break;
    case RDMA_WR_BIND:
        q->usable = true;
        accept_when_ready(r);
        break;
    }
}

/* Posts receives for those that puts have consumed, before anything tells the sender that it may
 * use more. */
static void post_receives(struct rdma_rail *r)
{
    if (r->state != RDMA_RAIL_UP) return;
    for (uint32_t i = 0; i < r->n_qps; i++)
        if (rdma_qp_post_recvs(&r->qps[i], RDMA_WINDOW - r->qps[i].n_recvs) != OK)
            rdma_rail_break(r, "no receive can be posted");
}

bool rdma_rail_poll(struct rdma_rail *r)
{
    struct ibv_wc wc[32];
    bool any = false, armed = false;
    for (;;) {
        int n = ibv_poll_cq(r->cq, (int)(sizeof wc / sizeof wc[0]), wc);
        for (int i = 0; i < n; i++) on_completion(r, &wc[i]);
        if (n > 0) {
            any = true;
            if (r->conn->base.incoming) post_receives(r);
            continue;
        }
        if (n < 0) rdma_rail_break(r, "its completion queue cannot be read");
        /* Armed before the last poll: a completion in between is either polled or causes an
         * event. */
        if (n < 0 || armed) break;
        armed = true;
        if (ibv_req_notify_cq(r->cq, 0) != 0)
            rdma_rail_break(r, "its completion queue gives no events");
    }
    list_remove(&r->link);
    if (r->conn->base.incoming) {
        rdma_conn_report(r->conn);
        if (r->state == RDMA_RAIL_DRAINING) end_draining(r, false);
    }
    return any;
}

static void check_progress(struct rdma_rail *r, uint64_t now_ms)
{
    const struct kvt_rdma_tuning *t = &r->conn->t->env->tuning.rdma;
    uint64_t limit = 2 * (uint64_t)rdma_schedule_timeout_ms(rdma_timeout(t));
    if (limit < RDMA_STALL_MS) limit = RDMA_STALL_MS;
    for (uint32_t i = 0; i < r->n_qps; i++) {
        const struct rdma_qp *q = &r->qps[i];
        if (list_empty(&q->puts) || now_ms <= q->last_progress_ms + limit) continue;
        char why[RDMA_REASON_MAX];
        snprintf(why, sizeof why, "%s: nothing was acknowledged for %llu ms", port_name(r),
                 (unsigned long long)(now_ms - q->last_progress_ms));
        rdma_rail_break(r, why);
        return;
    }
}

void rdma_rail_tick(struct rdma_rail *r, uint64_t now_ms)
{
    bool late = now_ms > r->deadline_ms;
    switch (r->state) {
    case RDMA_RAIL_DOWN:
        if (r->cq) rdma_qp_destroy(r);
        if (!r->conn->base.incoming && late && rdma_rail_local_port(r)->active &&
            !rdma_rail_local_port(r)->device->dead)
            offer_rail(r);
        break;
    case RDMA_RAIL_OFFERED:
        if (late)
            rdma_rail_break(
                r, r->qps[0].id ? "the connection manager did not connect the queue pairs in time"
                                : "the peer did not answer an offer of queue pairs");
        break;
    case RDMA_RAIL_PROBING:
        if (late) rdma_rail_break(r, r->why);
        break;
    case RDMA_RAIL_BINDING:
        if (late)
            rdma_rail_break(
                r, r->conn->t->cm
                       ? "the queue pairs were not connected and their windows bound in time"
                       : "memory windows were not bound in time");
        break;
    case RDMA_RAIL_UP:
        if (r->disconnected_ms && now_ms > r->disconnected_ms + RDMA_DISCONNECT_MS)
            rdma_rail_break(r, DISCONNECTED);
        else if (!r->conn->base.incoming) check_progress(r, now_ms);
        break;
    case RDMA_RAIL_DRAINING:
        if (late) (void)rdma_rail_poll(r); /* the last poll; may find it drained */
        if (r->state == RDMA_RAIL_DRAINING) end_draining(r, late);
        break;
    case RDMA_RAIL_FENCING:
        break; /* ends with FENCED, within RDMA_DRAIN_MS, or with the connection */
    }
}
