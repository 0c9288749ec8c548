/* conn.c - one connection: frames in and out, messages that wait for earlier puts, set-up and end.
 * Thread: transfer. */
#include <stdio.h>
#include <string.h>

#include "kvtransfer/rdma/conn.h"
#include "kvtransfer/rdma/rdma.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

/* ---- events ---- */

struct kvt_transport_event *rdma_conn_add_event(struct rdma_conn *c,
                                                enum kvt_transport_event_kind kind)
{
    struct rdma_event_queue *q = &c->t->event_queue;
    if (c->detached) return &q->discarded;
    if (q->n == q->cap) {
        size_t cap = q->cap ? q->cap * 2 : 64;
        struct kvt_transport_event *v = MEM_ARRAY(struct kvt_transport_event, cap);
        for (size_t i = 0; i < q->n; i++) v[i] = q->v[(q->head + i) % q->cap];
        mem_free(q->v);
        q->v = v;
        q->cap = cap;
        q->head = 0;
    }
    struct kvt_transport_event *i = &q->v[(q->head + q->n++) % q->cap];
    i->kind = kind;
    i->conn = &c->base;
    i->status = OK;
    i->text[0] = 0;
    return i;
}

static void drop_events(struct rdma_conn *c)
{
    struct rdma_event_queue *q = &c->t->event_queue;
    size_t kept = 0;
    for (size_t i = 0; i < q->n; i++) {
        struct kvt_transport_event *from = &q->v[(q->head + i) % q->cap];
        if (from->conn != &c->base) q->v[(q->head + kept++) % q->cap] = *from;
    }
    q->n = kept;
}

/* ---- life ---- */

struct rdma_conn *rdma_conn_new(struct rdma_transport *t, struct control_conn *control,
                                bool incoming)
{
    struct rdma_conn *c = MEM_NEW(struct rdma_conn);
    c->base.t = &t->base;
    c->base.incoming = incoming;
    c->t = t;
    c->control = control;
    c->opened_ms = c->last_up_ms = clock_ms();
    list_init(&c->unassigned);
    for (uint32_t i = 0; i < RDMA_RAILS_MAX; i++) {
        c->rails[i].conn = c;
        c->rails[i].t = t;
        c->rails[i].incoming = incoming;
        c->rails[i].index = i;
        list_init(&c->rails[i].link);
    }
    list_push(&t->conns, &c->link);
    t->n_conns++;
    return c;
}

bool rdma_conn_unfenced(const struct rdma_conn *c)
{
    /* Also of rails that are gone: n_rails is 0 at the end. */
    for (uint32_t i = 0; i < RDMA_RAILS_MAX; i++)
        if (c->rails[i].unfenced) return true;
    return false;
}

static void destroy_rails(struct rdma_conn *c)
{
    for (uint32_t i = 0; i < c->n_rails; i++) {
        rdma_qp_destroy(&c->rails[i]);
        c->rails[i].state = RDMA_RAIL_DOWN;
    }
    c->n_rails = 0; /* no rail is tried again */
}

void rdma_conn_free(struct rdma_conn *c)
{
    destroy_rails(c);
    if (c->control) control_close(c->control);
    drop_events(c);
    list_remove(&c->link);
    c->t->n_conns--;
    rdma_puts_release(c);
    buf_release(&c->held);
    mem_free(c);
}

void rdma_conn_up(struct rdma_conn *c)
{
    if (c->state != RDMA_CONN_OPENING) return;
    c->state = RDMA_CONN_UP;
    rdma_conn_add_event(c, KVT_UP);
}

void rdma_conn_fail(struct rdma_conn *c, enum status st, const char *text)
{
    if (c->failed) return;
    c->failed = true;
    c->status = st;
    snprintf(c->text, sizeof c->text, "%s%.113s",
             str_starts(str_of(text), "rdma: ") ? "" : "rdma: ", text);
}

void rdma_conn_end(struct rdma_conn *c, enum status st, const char *text)
{
    if (c->state == RDMA_CONN_DOWN) return;
    if (c->base.incoming && c->state == RDMA_CONN_OPENING) {
        log_info("rdma connection refused", "why=\"%s\"", text);
        rdma_conn_free(c);
        return;
    }
    c->state = RDMA_CONN_DOWN;
    destroy_rails(c);
    if (c->control) control_close(c->control);
    c->control = NULL;
    struct kvt_transport_event *i = rdma_conn_add_event(c, KVT_DOWN);
    i->status = st;
    snprintf(i->text, sizeof i->text, "%s", text);
}

/* ---- out ---- */

static enum status send_after(struct rdma_conn *c, enum rdma_frame frame, uint64_t after,
                              const void *body, size_t n)
{
    if (!c->control || c->failed) return ERR_PEER_LOST;
    return control_send(c->control, (uint8_t)frame, after, body, n);
}

void rdma_conn_send(struct rdma_conn *c, enum rdma_frame frame, const struct buf *body)
{
    enum status st = send_after(c, frame, 0, body ? body->data : NULL, body ? body->len : 0);
    /* LOST will report it */
    if (st != OK && st != ERR_PEER_LOST)
        rdma_conn_fail(c, ERR_PEER_LOST, "the peer does not read what it is told");
}

enum status rdma_conn_notify(struct rdma_conn *c, const struct kvt_message *m)
{
    if (c->state != RDMA_CONN_UP || !c->control) return ERR_PEER_LOST;
    if (m->kind == KVT_MSG_NOTE && control_queued(c->control) > KVT_QUEUE_BYTES) return ERR_BUSY;
    uint8_t bytes[KVT_MESSAGE_MAX];
    return send_after(c, RDMA_FRAME_MESSAGE,
                      c->base.incoming ? c->recv_window.completed : c->issued, bytes,
                      kvt_message_encode(m, bytes));
}

/* The address of every port. A port that has lost its address is listed without one: rails over
 * other ports work, and rails over it are tried until it has one again. False, and the connection
 * fails, if no port has an address. */
static bool port_addrs(struct rdma_conn *c, struct rdma_port_addr out[RDMA_RAILS_MAX])
{
    struct err err = { 0 };
    bool any = false;
    for (uint32_t i = 0; i < c->t->ports.n; i++) {
        const struct rdma_port *p = c->t->local_ports[i].port;
        if (rdma_qp_port_addr(c->t, c->control, i, &out[i], NULL, &err) == OK) any = true;
        else
            out[i] = (struct rdma_port_addr){
                .link = (uint8_t)p->link,
                .gid_type = p->link == RDMA_LINK_INFINIBAND ? RDMA_GID_IB : RDMA_GID_ROCE_V2,
                .mtu = 256,
                .bytes_per_s = p->bytes_per_s,
            };
    }
    if (!any) rdma_conn_fail(c, ERR_IO, err.text);
    return any;
}

static void send_hello(struct rdma_conn *c)
{
    const struct kvt_env *env = c->t->env;
    const struct kvt_rdma_tuning *t = &env->tuning.rdma;
    struct rdma_hello m = {
        .pool_base = (uintptr_t)env->mem->ptr,
        .pool_bytes = env->mem->bytes,
        .mtu_asked = t->mtu,
        .reads = t->flush_read || t->verify_read,
        .cm = c->t->cm != NULL,
        .n_ports = (uint32_t)c->t->ports.n,
    };
    struct buf body = { 0 };
    if (!port_addrs(c, m.ports)) return;
    rdma_hello_encode(&m, &body);
    rdma_conn_send(c, RDMA_FRAME_HELLO, &body);
    buf_release(&body);
}

/* ---- messages ---- */

/* Complete puts, as messages count them. */
static uint64_t completed_puts(const struct rdma_conn *c)
{
    return c->base.incoming ? c->recv_window.completed : c->finished;
}

static void hand_on(struct rdma_conn *c, struct str bytes)
{
    struct kvt_message m;
    if (kvt_message_decode(bytes.p, bytes.n, &m) != OK)
        rdma_conn_fail(c, ERR_FORMAT, "malformed message");
    else rdma_conn_add_event(c, KVT_MESSAGE)->message = m;
}

struct rdma_held_message {
    uint64_t after, bytes;
};

void rdma_conn_release_held(struct rdma_conn *c)
{
    struct rdma_held_message h;
    while (c->held_at < c->held.len) {
        memcpy(&h, c->held.data + c->held_at, sizeof h);
        if (h.after > completed_puts(c)) return;
        hand_on(c, (struct str){ c->held.data + c->held_at + sizeof h, h.bytes });
        c->held_at += sizeof h + h.bytes;
    }
    buf_clear(&c->held);
    c->held_at = 0;
}

static void on_message(struct rdma_conn *c, uint64_t after, struct str body)
{
    uint64_t most = c->base.incoming ? c->recv_window.completed + RDMA_WINDOW : c->issued;
    if (c->state != RDMA_CONN_UP || after > most || c->held.len > RDMA_HELD_BYTES) {
        rdma_conn_fail(c, ERR_FORMAT, "a message that belongs to no put");
        return;
    }
    if (c->held.len == 0 && after <= completed_puts(c)) {
        hand_on(c, body);
        return;
    }
    if (c->held_at > RDMA_HELD_BYTES / 4) {
        buf_consume(&c->held, c->held_at);
        c->held_at = 0;
    }
    struct rdma_held_message h = { after, body.n };
    buf_add(&c->held, &h, sizeof h);
    buf_add_str(&c->held, body);
}

void rdma_conn_completed(struct rdma_conn *c, uint32_t immediate)
{
    if (rdma_recv_window_set(&c->recv_window, immediate) != OK)
        rdma_conn_fail(c, ERR_FORMAT, "an immediate that names no put");
}

void rdma_conn_report(struct rdma_conn *c)
{
    rdma_conn_release_held(c);
    if (c->recv_window.completed - c->last_reported < RDMA_REPORT_EVERY) return;
    c->last_reported = c->recv_window.completed;
    struct buf body = { 0 };
    buf_add_u64le(&body, c->last_reported);
    rdma_conn_send(c, RDMA_FRAME_COMPLETED, &body);
    buf_release(&body);
}

/* ---- in ---- */

/* Why the peer's HELLO does not fit, or NULL. */
static const char *hello_refusal(const struct rdma_conn *c)
{
    if (c->theirs.cm != (c->t->cm != NULL))
        return c->t->cm ? "BATON_RDMA_CM is 1 here and 0 at the peer: set it alike on both nodes"
                        : "BATON_RDMA_CM is 0 here and 1 at the peer: set it alike on both nodes";
    if (!c->base.incoming && c->theirs.pool_bytes < c->need_bytes)
        return "the receiver's pool is smaller than its layout says";
    return NULL;
}

/* Sender: makes rails of our ports and the peer's. */
static void make_rails(struct rdma_conn *c)
{
    struct rdma_port_addr mine[RDMA_RAILS_MAX];
    struct rdma_pair pairs[RDMA_RAILS_MAX];
    if (!port_addrs(c, mine)) return;
    c->n_rails = rdma_schedule_pair(mine, (uint32_t)c->t->ports.n, c->theirs.ports,
                                    c->theirs.n_ports, pairs);
    if (!c->n_rails)
        rdma_conn_fail(c, ERR_PEER_LOST,
                       "the peer's ports are InfiniBand and ours Ethernet, or the other way round");
    for (uint32_t i = 0; i < c->n_rails; i++) {
        struct rdma_rail *r = &c->rails[i];
        r->my_port = pairs[i].mine;
        r->their_port = pairs[i].theirs;
        uint64_t a = mine[r->my_port].bytes_per_s, b = c->theirs.ports[r->their_port].bytes_per_s;
        r->bytes_per_s = a < b ? a : b;
        r->deadline_ms = 0; /* the first tick offers it */
    }
    rdma_conn_tick(c, clock_ms());
}

static void on_hello(struct rdma_conn *c, struct str body)
{
    enum status st = c->handshaken ? ERR_FORMAT : rdma_hello_decode(body, &c->theirs);
    if (st != OK) {
        rdma_conn_fail(
            c, st,
            st == ERR_PEER_MISMATCH
                ? "the peer sets queue pairs up in another way: run the same release on both"
                : "malformed hello");
        return;
    }
    c->handshaken = true;
    const char *refusal = hello_refusal(c);
    if (refusal) rdma_conn_fail(c, ERR_PEER_MISMATCH, refusal);
    else if (!c->base.incoming) make_rails(c);
}

static void on_completed(struct rdma_conn *c, struct str body)
{
    uint64_t completed;
    if (body.n == sizeof completed) memcpy(&completed, body.p, sizeof completed);
    if (body.n != sizeof completed || completed < c->reported || completed > c->issued)
        rdma_conn_fail(c, ERR_FORMAT, "a report of puts that were not made");
    else c->reported = completed;
}

static void on_rail_info(struct rdma_conn *c, enum rdma_frame frame, struct str body)
{
    struct rdma_rail_info m;
    bool offer = frame == RDMA_FRAME_OFFER;
    if (offer != c->base.incoming || !c->handshaken || rdma_rail_info_decode(body, &m) != OK ||
        (!offer && m.rail >= c->n_rails))
        rdma_conn_fail(c, ERR_FORMAT, "malformed offer of queue pairs, or answer to one");
    else if (offer) rdma_rail_on_offer(c, &m);
    else rdma_rail_on_accept(&c->rails[m.rail], &m);
}

static void on_invite(struct rdma_conn *c, struct str body)
{
    struct rdma_invite m;
    if (c->base.incoming || !c->t->cm || rdma_invite_decode(body, &m) != OK || m.rail >= c->n_rails)
        rdma_conn_fail(c, ERR_FORMAT, "malformed invitation of queue pairs");
    else rdma_rail_on_invite(&c->rails[m.rail], &m);
}

static void on_rail_status(struct rdma_conn *c, enum rdma_frame frame, struct str body)
{
    struct rdma_rail_status m;
    bool of_sender = frame == RDMA_FRAME_BROKEN;
    if (of_sender != c->base.incoming || rdma_rail_status_decode(frame, body, &m) != OK ||
        m.rail >= c->n_rails)
        rdma_conn_fail(c, ERR_FORMAT, "malformed word about a rail");
    else rdma_rail_on_status(&c->rails[m.rail], frame, &m);
}

static void on_retry(struct rdma_conn *c)
{
    for (uint32_t i = 0; i < c->n_rails; i++)
        if (c->rails[i].state == RDMA_RAIL_DOWN) c->rails[i].deadline_ms = 0;
}

static void on_frame(struct rdma_conn *c, enum rdma_frame frame, uint64_t after, struct str body)
{
    switch (frame) {
    case RDMA_FRAME_HELLO: on_hello(c, body); return;
    case RDMA_FRAME_OFFER:
    case RDMA_FRAME_ACCEPT: on_rail_info(c, frame, body); return;
    case RDMA_FRAME_REFUSE:
    case RDMA_FRAME_BROKEN:
    case RDMA_FRAME_FENCED: on_rail_status(c, frame, body); return;
    case RDMA_FRAME_COMPLETED:
        if (c->base.incoming) break;
        on_completed(c, body);
        return;
    case RDMA_FRAME_RETRY:
        if (c->base.incoming || body.n) break;
        on_retry(c);
        return;
    case RDMA_FRAME_MESSAGE: on_message(c, after, body); return;
    case RDMA_FRAME_INVITE: on_invite(c, body); return;
    case RDMA_FRAME_END: break;
    }
    rdma_conn_fail(c, ERR_FORMAT, "a frame of no known kind");
}

/* Handles what the peer sent before it closed: first completions, then the messages that waited for
 * them. */
static void on_lost(struct rdma_conn *c, enum status st, const char *text)
{
    for (uint32_t i = 0; i < c->n_rails; i++)
        if (c->rails[i].cq) (void)rdma_rail_poll(&c->rails[i]);
    if (c->control) control_close(c->control);
    c->control = NULL;
    rdma_conn_fail(c, st, text);
}

void rdma_conn_on_control(void *transport, const struct control_event *ev)
{
    struct rdma_transport *t = transport;
    struct rdma_conn *c = ev->conn->owner;
    if (!c && t->n_conns >= t->env->max_peers) {
        control_close(ev->conn);
        return;
    }
    if (!c) c = ev->conn->owner = rdma_conn_new(t, ev->conn, true);
    if (ev->kind == CONTROL_OPENED) send_hello(c);
    else if (ev->kind == CONTROL_LOST) on_lost(c, ev->status, ev->text);
    else if (!c->failed && !c->detached)
        on_frame(c, (enum rdma_frame)ev->frame, ev->after, ev->body);
}

/* ---- time ---- */

void rdma_conn_tick(struct rdma_conn *c, uint64_t now_ms)
{
    if (c->state == RDMA_CONN_DOWN || c->failed) return;
    for (uint32_t i = 0; i < c->n_rails; i++) rdma_rail_tick(&c->rails[i], now_ms);
    if (c->state == RDMA_CONN_OPENING) {
        char why[RDMA_REASON_MAX + 32];
        const char *last = c->n_rails && c->rails[0].why[0] ? c->rails[0].why : "no answer";
        snprintf(why, sizeof why, "no queue pair came up: %s", last);
        if (now_ms > c->opened_ms + KVT_CONNECT_MS) rdma_conn_fail(c, ERR_TIMEOUT, why);
    } else if (!c->base.incoming) {
        if (rdma_any_rail_is_up(c)) c->last_up_ms = now_ms;
        else if (now_ms > c->last_up_ms + RDMA_NO_RAIL_MS)
            rdma_conn_fail(c, ERR_PEER_LOST,
                           c->rails[0].why[0] ? c->rails[0].why : "all rails are broken");
    }
}
