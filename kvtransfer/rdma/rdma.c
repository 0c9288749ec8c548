/* rdma.c - the ops of transport rdma: open, poll over events of devices and control connections,
 * ends. Contract: transport.h; how it works: rdma.h. Thread: transfer; open and close: the owner's.
 */
#include "kvtransfer/rdma/rdma.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "kvtransfer/rdma/cm.h"
#include "kvtransfer/rdma/conn.h"
#include "kvtransfer/transports.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

/* ---- life ---- */

static void rdma_close(struct kvt_transport *base)
{
    struct rdma_transport *t = (struct rdma_transport *)base;
    LIST_FOREACH (c, &t->conns, struct rdma_conn, link) rdma_conn_free(c);
    rdma_cm_close(t);
    if (t->hub) control_hub_free(t->hub);
    rdma_memory_close(t);
    rdma_devices_release(&t->ports);
    if (t->epoll_fd >= 0) close(t->epoll_fd);
    mem_free(t->event_queue.v);
    mem_free(t->scratch);
    mem_free(t);
}

static enum status open_all(struct rdma_transport *t, struct err *err)
{
    const struct kvt_tuning *tuning = &t->env->tuning;
    TRY(rdma_devices_find(&tuning->rdma, rdma_numa_node_of(t->env->mem->ptr, t->env->mem->bytes),
                          &t->ports, err));
    if (t->ports.n_left_out)
        log_warn("rdma ports not used", "limit=%d left_out=%zu%s%s", RDMA_RAILS_MAX,
                 t->ports.n_left_out, tuning->rdma.nics ? " KVCACHE_RDMA_NICS=" : "",
                 tuning->rdma.nics ? tuning->rdma.nics : "");
    for (size_t i = 0; i < t->ports.n; i++)
        if (tuning->rdma.mtu > t->ports.ports[i].mtu_max)
            return err_set(err, ERR_CONFIG, "rdma: MTU %u was asked for, but %s carries %u at most",
                           tuning->rdma.mtu, t->ports.ports[i].device, t->ports.ports[i].mtu_max);
    const struct rdma_gid *gid;
    /* a missing index is an error at start, not at the first peer */
    for (size_t i = 0; i < t->ports.n && tuning->rdma.gid_given; i++)
        TRY(rdma_gid_choose(&t->ports.ports[i], NULL, &tuning->rdma, &gid, err));
    if (tuning->rdma.flush_read || tuning->rdma.verify_read) {
        /* a peer's elements have at most four times as many bytes */
        uint64_t piece = 4 * (uint64_t)kv_layout_piece_bytes(&t->env->layout);
        t->scratch_bytes = !tuning->rdma.verify_read         ? 4096
                           : piece > RDMA_QP_IN_FLIGHT_BYTES ? piece
                                                             : RDMA_QP_IN_FLIGHT_BYTES;
        t->scratch = mem_aligned(4096, t->scratch_bytes);
    }
    TRY(rdma_memory_open(t, err));
    if (tuning->rdma.rdma_cm) TRY(rdma_cm_open(t, err));
    TRY(control_open(t->env, "rdma", tuning->rdma.port, tuning->socket_ifname, &t->hub, err));
    struct epoll_event e = { .events = EPOLLIN, .data.ptr = NULL };
    if (epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, control_wait_fd(t->hub), &e) != 0)
        return err_set(err, ERR_IO, "rdma: cannot wait for control connections: %s",
                       strerror(errno));
    return OK;
}

static enum status rdma_open(const struct kvt_env *env, struct kvt_transport **out, struct err *err)
{
    struct rdma_transport *t = MEM_NEW(struct rdma_transport);
    t->base.ops = &kvt_rdma_ops;
    t->env = env;
    list_init(&t->conns);
    list_init(&t->ready);
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    enum status st = t->epoll_fd < 0
                         ? err_set(err, ERR_CONFIG, "rdma: no epoll: %s", strerror(errno))
                         : open_all(t, err);
    if (st != OK) {
        rdma_close(&t->base);
        return st;
    }
    *out = &t->base;
    return OK;
}

static int rdma_wait_fd(struct kvt_transport *t) { return ((struct rdma_transport *)t)->epoll_fd; }
static uint16_t rdma_port_number(struct kvt_transport *t)
{
    return control_port(((struct rdma_transport *)t)->hub);
}

static void rdma_export_address(const struct kvt_transport *t, struct buf *out)
{
    buf_add_str(out, control_address(((const struct rdma_transport *)t)->hub));
}

static bool rdma_can_reach(struct kvt_transport *t, struct str address)
{
    (void)t;
    return control_can_reach(address);
}

static enum status rdma_connect(struct kvt_transport *base, struct str address,
                                const struct kv_layout *theirs,
                                const uint8_t ticket[KVT_TICKET_BYTES], struct kvt_conn **out,
                                struct err *err)
{
    struct rdma_transport *t = (struct rdma_transport *)base;
    if (t->n_conns >= t->env->max_peers)
        return err_set(err, ERR_FULL, "rdma: too many connections");
    struct rdma_conn *c = rdma_conn_new(t, NULL, false);
    c->need_bytes = kv_layout_pool_bytes(theirs);
    enum status st = control_connect(t->hub, address, ticket, c, &c->control, err);
    if (st != OK) {
        rdma_conn_free(c);
        return st;
    }
    *out = &c->base;
    return OK;
}

/* ---- data and messages ---- */

static enum status rdma_put(struct kvt_conn *c, const struct kvt_put *p)
{
    return rdma_puts_add((struct rdma_conn *)c, p);
}
static enum status rdma_notify(struct kvt_conn *c, const struct kvt_message *m)
{
    return rdma_conn_notify((struct rdma_conn *)c, m);
}

static void rdma_abandon(struct kvt_conn *c, uint32_t session, uint64_t generation)
{
    rdma_puts_abandon((struct rdma_conn *)c, session, generation);
}

/* For host memory a polled completion is proof enough (conn.h, 1 to 4). For GPU memory the
 * completion is still in host memory, so the GPU must make the data visible. */
static enum status rdma_flush(struct kvt_transport *t)
{
    struct device *device = ((struct rdma_transport *)t)->env->device;
    return device ? device_flush_rdma_writes(device) : OK;
}

/* Destroyed queue pairs accept no packet, and their windows and regions are gone: the peer cannot
 * write. */
static enum status rdma_fence(struct kvt_conn *base)
{
    struct rdma_conn *c = (struct rdma_conn *)base;
    c->detached = true;
    rdma_conn_end(c, OK, "");
    return rdma_conn_unfenced(c) ? ERR_BUSY : OK;
}

static uint64_t rdma_speed(const struct kvt_conn *base)
{
    const struct rdma_conn *c = (const struct rdma_conn *)base;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < c->n_rails; i++) {
        const struct rdma_rail *r = &c->rails[i];
        if (r->state != RDMA_RAIL_UP) continue;
        uint64_t mine = rdma_rail_local_port(r)->port->bytes_per_s,
                 other = c->theirs.ports[r->their_port].bytes_per_s;
        sum += mine < other ? mine : other;
    }
    return sum;
}

static void rdma_disconnect(struct kvt_conn *c) { rdma_conn_free((struct rdma_conn *)c); }

/* ---- poll ---- */

static void end_failed(struct rdma_transport *t)
{
    LIST_FOREACH (c, &t->conns, struct rdma_conn, link)
        if (c->failed) rdma_conn_end(c, c->status, c->text);
}

static void tick(struct rdma_transport *t)
{
    uint64_t now = clock_ms();
    if (now < t->ticked_ms + RDMA_TICK_MS) return;
    t->ticked_ms = now;
    LIST_FOREACH (c, &t->conns, struct rdma_conn, link) rdma_conn_tick(c, now);
    rdma_cm_tick(t, now);
    control_poll(t->hub, rdma_conn_on_control, t); /* its deadlines */
}

static size_t rdma_poll(struct kvt_transport *base, struct kvt_transport_event *out, size_t cap)
{
    struct rdma_transport *t = (struct rdma_transport *)base;
    struct epoll_event events[2 * RDMA_RAILS_MAX + 2];
    int n = epoll_wait(t->epoll_fd, events, COUNT_OF(events), 0);
    bool control = false, cm = false;
    for (int i = 0; i < n; i++) {
        if (!events[i].data.ptr) control = true;
        else if (events[i].data.ptr == t->cm) cm = true;
        else if (events[i].events & (EPOLLERR | EPOLLHUP))
            rdma_events_device_lost(events[i].data.ptr);
        else rdma_events_process(events[i].data.ptr);
    }
    /* Completions before frames: a message usually finds its puts complete. */
    LIST_FOREACH (r, &t->ready, struct rdma_rail, link) (void)rdma_rail_poll(r);
    if (cm) rdma_cm_process_events(t);
    if (control) control_poll(t->hub, rdma_conn_on_control, t);
    tick(t);
    end_failed(t);
    struct rdma_event_queue *q = &t->event_queue;
    size_t taken = 0;
    for (; taken < cap && q->n; taken++, q->n--) {
        out[taken] = q->v[q->head];
        q->head = (q->head + 1) % q->cap;
    }
    return taken;
}

const struct kvt_transport_ops kvt_rdma_ops = {
    .name = "rdma",
    .caps = KVT_CAP_FENCE_TEARDOWN | KVT_CAP_GPUDIRECT | KVT_CAP_HEALS,
    .put_bytes = 8 << 20, /* two fill a queue pair: one is in flight while the next is posted */
    .open = rdma_open,
    .close = rdma_close,
    .wait_fd = rdma_wait_fd,
    .port = rdma_port_number,
    .export_address = rdma_export_address,
    .can_reach = rdma_can_reach,
    .connect = rdma_connect,
    .put = rdma_put,
    .abandon = rdma_abandon,
    .notify = rdma_notify,
    .flush = rdma_flush,
    .fence = rdma_fence,
    .poll = rdma_poll,
    .link_speed = rdma_speed,
    .disconnect = rdma_disconnect,
};
