/* puts.c - turns puts into lists of work requests: choice of the queue pair, scatter lists,
 * selective signalling, completion, repetition.
 *
 * A put is a slot in a ring of RDMA_WINDOW, by its number. It is posted in one list of work
 * requests if the send queue has room, otherwise in several; the last request of each list is
 * signalled, the very last is a write with immediate. Thread: transfer. */
#include "kvtransfer/rdma/puts.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "kvtransfer/rdma/conn.h"
#include "kvtransfer/rdma/rdma.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"

/* of one work request: far below every device's limit (2^31 by IBA, 8 MiB in Soft-RoCE) */
enum { MESSAGE_BYTES_MAX = RDMA_CHAIN_BYTES };

/* ---- posting ---- */

/* Makes the next work request of p: one contiguous range of remote memory, gathered from up to
 * max_sge places. Returns its bytes. `read_back`: reads into the scratch memory instead. */
static uint32_t next_request(struct rdma_qp *q, struct rdma_put *p, struct ibv_send_wr *wr,
                             struct ibv_sge *sge, bool read_back)
{
    const struct rdma_rail *r = q->rail;
    struct rdma_transport *t = r->conn->t;
    const struct rdma_device *d = rdma_rail_local_port(r)->device;
    uint64_t remote = p->copies[p->i_copy].remote + p->copy_at;
    uint32_t total = 0, n = 0;
    do {
        const struct kvt_copy *c = &p->copies[p->i_copy];
        uint64_t left = c->bytes - p->copy_at;
        uint32_t now = left < MESSAGE_BYTES_MAX - total ? (uint32_t)left
                                                        : MESSAGE_BYTES_MAX - total;
        if (read_back)
            sge[n++] = (struct ibv_sge){ (uintptr_t)t->scratch + p->read_at, now,
                                         d->scratch->lkey };
        else
            sge[n++] = (struct ibv_sge){ (uintptr_t)kvt_source(t->env, c->local) + p->copy_at, now,
                                         rdma_memory_key(d, c->local) };
        if (read_back) p->read_at += now;
        total += now;
        p->copy_at += now;
        if (p->copy_at == c->bytes) {
            p->i_copy++;
            p->copy_at = 0;
        }
    } while (p->i_copy < p->n_copies && p->copy_at == 0 && n < r->max_sge &&
             total < MESSAGE_BYTES_MAX && p->copies[p->i_copy].remote == remote + total);
    *wr = (struct ibv_send_wr){
        .sg_list = sge,
        .num_sge = (int)n,
        .opcode = read_back ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
        .send_flags = !read_back && total <= r->max_inline ? IBV_SEND_INLINE : 0,
        .wr.rdma = { q->base + remote, q->key },
    };
    return total;
}

static uint32_t slot_of(const struct rdma_put *p) { return (uint32_t)(p->number % RDMA_WINDOW); }

/* Makes the write with immediate: the last write itself, or one without bytes. */
static uint32_t add_immediate(struct rdma_qp *q, struct rdma_put *p, uint32_t n)
{
    struct rdma_transport *t = q->rail->conn->t;
    const struct kvt_rdma_tuning *tuning = &t->env->tuning.rdma;
    if (tuning->flush_read && n && !p->abandoned) {
        /* A read flushes earlier writes out of the bridges on the receiver's side; IBV_SEND_FENCE
         * delays the immediate until the read is answered. */
        const struct ibv_send_wr *last = &t->wrs[n - 1];
        struct ibv_sge *sge = &t->sges[n * RDMA_SGE_MAX];
        uint64_t end = last->wr.rdma.remote_addr;
        for (int i = 0; i < last->num_sge; i++) end += last->sg_list[i].length;
        *sge = (struct ibv_sge){ (uintptr_t)t->scratch, 1,
                                 rdma_rail_local_port(q->rail)->device->scratch->lkey };
        t->wrs[n++] = (struct ibv_send_wr){
            .sg_list = sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ, .wr.rdma = { end - 1, q->key }
        };
        t->wrs[n++] = (struct ibv_send_wr){
            .send_flags = IBV_SEND_FENCE,
            .wr.rdma = { q->base, q->key },
        };
    } else if (n == 0) {
        t->wrs[n++] = (struct ibv_send_wr){ .wr.rdma = { q->base, q->key } };
    }
    t->wrs[n - 1].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    t->wrs[n - 1].imm_data = htonl((uint32_t)p->number);
    p->posted = true;
    return n;
}

/* Posts what fits of p. False: it must wait (for room, or for its bytes to be read back), or the
 * rail broke. */
static bool post_chain(struct rdma_qp *q, struct rdma_put *p)
{
    struct rdma_rail *r = q->rail;
    struct rdma_transport *t = r->conn->t;
    const struct kvt_rdma_tuning *tuning = &t->env->tuning.rdma;
    struct ibv_send_wr *bad;
    uint32_t room = r->send_wrs - q->n_wrs, n = 0, bytes = 0;
    if (room < 3 || p->waits) return false; /* 3: a write, a read, an immediate */
    uint32_t most = room - 2 < RDMA_CHAIN_MAX ? room - 2 : RDMA_CHAIN_MAX;
    bool back = p->phase == RDMA_PHASE_READ;
    if (p->abandoned) p->i_copy = p->n_copies;
    else if (p->phase != RDMA_PHASE_NOTIFY)
        for (; p->i_copy < p->n_copies && n < most && bytes < RDMA_CHAIN_BYTES; n++)
            bytes += next_request(q, p, &t->wrs[n], &t->sges[n * RDMA_SGE_MAX], back);
    if (p->i_copy == p->n_copies) {
        bool verify = tuning->verify_read && !p->abandoned && p->phase != RDMA_PHASE_NOTIFY;
        if (!verify) n = add_immediate(q, p, n);
        p->waits = verify;
    }
    for (uint32_t i = 0; i + 1 < n; i++) t->wrs[i].next = &t->wrs[i + 1];
    t->wrs[n - 1].next = NULL;
    t->wrs[n - 1].send_flags |= IBV_SEND_SIGNALED;
    t->wrs[n - 1].wr_id = rdma_wr_id(RDMA_WR_PUT, n, slot_of(p), p->posted);
    q->n_wrs += n;
    int code = ibv_post_send(q->qp, t->wrs, &bad);
    if (code == 0) return true;
    char why[RDMA_REASON_MAX];
    snprintf(why, sizeof why, "%s takes no work request: %s", rdma_rail_local_port(r)->port->device,
             strerror(code));
    rdma_rail_break(r, why);
    return false;
}

static void pump_qp(struct rdma_qp *q)
{
    while (q->next && q->rail->state == RDMA_RAIL_UP) {
        struct rdma_put *p = q->next;
        if (!post_chain(q, p)) return;
        if (!p->posted) continue;
        q->next = p->link.next == &q->puts ? NULL : LIST_ENTRY(p->link.next, struct rdma_put, link);
    }
}

/* ---- choosing ---- */

static struct rdma_qp *choose(struct rdma_conn *c, uint64_t bytes)
{
    struct rdma_qp_load loads[RDMA_RAILS_MAX * RDMA_QPS_MAX];
    struct rdma_qp *of[RDMA_RAILS_MAX * RDMA_QPS_MAX];
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->n_rails; i++) {
        struct rdma_rail *r = &c->rails[i];
        if (r->state != RDMA_RAIL_UP) continue;
        for (uint32_t j = 0; j < r->n_qps; j++, n++) {
            struct rdma_qp *q = of[n] = &r->qps[j];
            loads[n] = (struct rdma_qp_load){ q->in_flight, r->bytes_per_s / r->n_qps,
                                              q->in_flight < RDMA_QP_IN_FLIGHT_BYTES };
        }
    }
    if (!n) return NULL;
    uint32_t best = rdma_schedule_pick(loads, n, bytes);
    return best < n ? of[best] : NULL;
}

static void assign(struct rdma_put *p, struct rdma_qp *q)
{
    p->state = RDMA_PUT_ON_QP;
    p->rail = q->rail->index;
    p->epoch = q->rail->epoch;
    p->i_copy = 0;
    p->copy_at = p->read_at = 0;
    p->posted = p->waits = false;
    p->phase = RDMA_PHASE_WRITE;
    if (list_empty(&q->puts)) q->last_progress_ms = clock_ms();
    list_push(&q->puts, &p->link);
    q->in_flight += p->bytes;
    if (!q->next) q->next = p;
    pump_qp(q);
}

/* verify_read: all connections share the scratch memory, so one put is in flight at a time. */
static bool scratch_is_free(const struct rdma_transport *t)
{
    LIST_FOREACH (c, &t->conns, struct rdma_conn, link)
        if (!c->base.incoming && c->issued != c->finished) return false;
    return true;
}

enum status rdma_puts_add(struct rdma_conn *c, const struct kvt_put *p)
{
    uint64_t oldest = c->finished < c->reported ? c->finished : c->reported;
    if (c->state != RDMA_CONN_UP) return ERR_PEER_LOST;
    if (c->issued - oldest >= RDMA_WINDOW || !list_empty(&c->unassigned)) return ERR_BUSY;
    if (c->t->env->tuning.rdma.verify_read &&
        (!scratch_is_free(c->t) || p->head.bytes > c->t->scratch_bytes))
        return ERR_BUSY;
    struct rdma_qp *q = choose(c, p->head.bytes);
    if (!q) return ERR_BUSY;
    struct rdma_put *s = &c->puts[c->issued % RDMA_WINDOW];
    if (s->cap_copies < p->n_copies) {
        s->copies = mem_realloc(s->copies, p->n_copies, sizeof *s->copies);
        s->cap_copies = p->n_copies;
    }
    memcpy(s->copies, p->copies, sizeof *s->copies * p->n_copies);
    s->number = c->issued++;
    s->tag = p->tag;
    s->session = p->head.session;
    s->generation = p->head.generation;
    s->bytes = p->head.bytes;
    s->n_copies = p->n_copies;
    s->abandoned = false;
    assign(s, q);
    return OK;
}

void rdma_puts_pump(struct rdma_conn *c)
{
    LIST_FOREACH (p, &c->unassigned, struct rdma_put, link) {
        struct rdma_qp *q = choose(c, p->bytes);
        if (!q) return;
        list_remove(&p->link);
        assign(p, q);
    }
}

void rdma_puts_abandon(struct rdma_conn *c, uint32_t session, uint64_t generation)
{
    /* Bytes that are not posted yet are skipped; the immediate is still sent, because later
     * messages count it. */
    for (uint64_t n = c->finished; n < c->issued; n++) {
        struct rdma_put *p = &c->puts[n % RDMA_WINDOW];
        if (p->session == session && p->generation == generation) p->abandoned = true;
    }
}

/* ---- completing ---- */

/* Ends a put whose source is not read any more: it is acknowledged, or the receiver's window has
 * it. */
static void finish_put(struct rdma_conn *c, struct rdma_put *p)
{
    list_remove(&p->link);
    p->state = RDMA_PUT_FINISHED;
    rdma_conn_add_event(c, KVT_PUT_DONE)->tag = p->tag;
    while (c->finished < c->issued && c->puts[c->finished % RDMA_WINDOW].state == RDMA_PUT_FINISHED)
        c->finished++;
    rdma_conn_release_held(c);
}

/* Handles the completion of a list without the immediate: room was short, or bytes are verified.
 * Several lists of a put may be in flight; verify_read continues when the last is complete, and has
 * no other put on this queue pair. */
static void chain_completed(struct rdma_qp *q, struct rdma_put *p)
{
    const struct kvt_env *env = q->rail->conn->t->env;
    if (!p->waits || q->n_wrs) return;
    p->waits = false;
    if (p->phase == RDMA_PHASE_WRITE) {
        p->phase = RDMA_PHASE_READ;
        p->i_copy = 0;
        p->read_at = 0;
        return;
    }
    p->phase = RDMA_PHASE_NOTIFY;
    const char *back = q->rail->conn->t->scratch;
    for (uint32_t i = 0; i < p->n_copies; back += p->copies[i++].bytes) {
        if (memcmp(back, kvt_source(env, p->copies[i].local), p->copies[i].bytes) == 0) continue;
        rdma_conn_fail(q->rail->conn, ERR_CHECKSUM,
                       "bytes read back from the receiver are not those that were written");
        p->waits = true; /* for the end of the connection: the receiver never gets its immediate */
        return;
    }
}

void rdma_puts_completed(struct rdma_qp *q, uint64_t wr_id)
{
    struct rdma_conn *c = q->rail->conn;
    struct rdma_put *p = &c->puts[wr_id & 0xffff];
    q->n_wrs -= (uint32_t)(wr_id >> 16) & 0xffff;
    q->last_progress_ms = clock_ms();
    if (wr_id >> 48 & 1) {
        q->in_flight -= p->bytes;
        finish_put(c, p);
        if (!list_empty(&c->unassigned)) rdma_puts_pump(c);
    } else {
        chain_completed(q, p);
    }
    pump_qp(q);
}

enum status rdma_puts_requeue(struct rdma_rail *r, const struct rdma_recv_window *window)
{
    struct rdma_conn *c = r->conn;
    for (uint64_t n = c->reported; n < c->issued; n++) {
        const struct rdma_put *p = &c->puts[n % RDMA_WINDOW];
        if (p->state == RDMA_PUT_FINISHED && p->rail == r->index && p->epoch == r->epoch &&
            !rdma_recv_window_has(window, n))
            return ERR_IO;
    }
    for (uint32_t i = 0; i < r->n_qps; i++) {
        struct rdma_qp *q = &r->qps[i];
        q->in_flight = 0;
        q->next = NULL;
        LIST_FOREACH (p, &q->puts, struct rdma_put, link) {
            if (rdma_recv_window_has(window, p->number)) {
                finish_put(c, p);
                continue;
            }
            list_remove(&p->link);
            p->state = RDMA_PUT_UNASSIGNED;
            list_push(&c->unassigned, &p->link);
        }
    }
    return OK;
}

void rdma_puts_release(struct rdma_conn *c)
{
    for (uint32_t i = 0; i < RDMA_WINDOW; i++) mem_free(c->puts[i].copies);
}
