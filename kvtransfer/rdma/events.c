/* events.c - asynchronous events of devices: completion events, ports that go down and come back,
 * changed addresses, fatal errors. ibv_get_async_event(3) names every event and what it carries.
 * Thread: transfer. */
#include <string.h>
#include <sys/epoll.h>

#include "kvtransfer/rdma/conn.h"
#include "kvtransfer/rdma/rdma.h"
#include "shared/base/log.h"

/* Breaks every rail over this port (0: all ports of the device). */
static void break_rails(struct rdma_transport *t, const struct rdma_device *d, int port,
                        const char *why)
{
    LIST_FOREACH (c, &t->conns, struct rdma_conn, link)
        for (uint32_t i = 0; i < c->n_rails; i++) {
            const struct rdma_local_port *e = rdma_rail_local_port(&c->rails[i]);
            if (e->device == d && (!port || e->port->number == port))
                rdma_rail_break(&c->rails[i], why);
        }
}

/* Retries rails that are down after a port came back; the side that may try them does. */
static void retry_rails(struct rdma_transport *t, const struct rdma_device *d, int port)
{
    LIST_FOREACH (c, &t->conns, struct rdma_conn, link) {
        bool any = false;
        for (uint32_t i = 0; i < c->n_rails; i++) {
            struct rdma_rail *r = &c->rails[i];
            const struct rdma_local_port *e = rdma_rail_local_port(r);
            if (e->device != d || e->port->number != port || r->state == RDMA_RAIL_UP) continue;
            any = true;
            if (r->state == RDMA_RAIL_DOWN && !c->base.incoming) r->deadline_ms = 0;
        }
        if (any && c->base.incoming && c->state == RDMA_CONN_UP)
            rdma_conn_send(c, RDMA_FRAME_RETRY, NULL);
    }
}

static void on_port(struct rdma_transport *t, struct rdma_device *d, int port, bool active)
{
    for (size_t i = 0; i < t->ports.n; i++) {
        struct rdma_local_port *e = &t->local_ports[i];
        if (e->device != d || e->port->number != port) continue;
        if (active != e->active)
            log_line(active ? LOG_INFO : LOG_WARN, "rdma port", "device=%s port=%d state=%s",
                     d->port->device, port, active ? "active" : "down");
        e->active = active;
        if (active) retry_rails(t, d, port);
        else break_rails(t, d, port, "its port went down");
    }
}

/* Reads the GID tables again, because their indices may have changed. A port that is gone keeps its
 * old table. */
static void refresh_gids(struct rdma_transport *t)
{
    struct rdma_devices now = { 0 };
    struct err err = { 0 };
    if (rdma_devices_list(&now, &err) != OK) {
        log_warn("rdma addresses not read", "why=\"%s\"", err.text);
        return;
    }
    for (size_t i = 0; i < t->ports.n; i++)
        for (size_t j = 0; j < now.n; j++) {
            struct rdma_port *mine = &t->ports.ports[i], *theirs = &now.ports[j], old = *mine;
            if (strcmp(mine->device, theirs->device) != 0 || mine->number != theirs->number ||
                !theirs->n_gids)
                continue;
            mine->gids = theirs->gids;
            mine->n_gids = theirs->n_gids;
            theirs->gids = old.gids;
            theirs->n_gids = old.n_gids;
        }
    rdma_devices_release(&now);
}

/* Breaks rails whose address the port has lost; others are not affected. */
static void address_changed(struct rdma_transport *t, struct rdma_device *d, int port,
                            const char *what)
{
    refresh_gids(t);
    LIST_FOREACH (c, &t->conns, struct rdma_conn, link)
        for (uint32_t i = 0; i < c->n_rails; i++) {
            struct rdma_rail *r = &c->rails[i];
            const struct rdma_local_port *e = rdma_rail_local_port(r);
            struct rdma_port_addr now;
            struct err err = { 0 };
            if (e->device != d || e->port->number != port || r->state == RDMA_RAIL_DOWN ||
                !c->control)
                continue;
            if (rdma_qp_port_addr(c->t, c->control, r->my_port, &now, NULL, &err) != OK ||
                memcmp(now.gid, r->gid, sizeof r->gid) != 0 || now.lid != r->lid)
                rdma_rail_break(r, what);
        }
}

static void lose_device(struct rdma_transport *t, struct rdma_device *d, const char *why)
{
    if (d->dead) return;
    log_error("rdma device lost", "device=%s why=\"%s\"", d->port->device, why);
    d->dead = true;
    break_rails(t, d, 0, why);
}

static void on_device_event(struct rdma_transport *t, struct rdma_device *d,
                            const struct ibv_async_event *ev)
{
    const char *what = ibv_event_type_str(ev->event_type);
    switch (ev->event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_PATH_MIG_ERR:
        rdma_rail_break(((struct rdma_qp *)ev->element.qp->qp_context)->rail, what);
        break;
    case IBV_EVENT_CQ_ERR: rdma_rail_break(ev->element.cq->cq_context, what); break;
    case IBV_EVENT_PORT_ERR: on_port(t, d, ev->element.port_num, false); break;
    case IBV_EVENT_PORT_ACTIVE: on_port(t, d, ev->element.port_num, true); break;
    case IBV_EVENT_GID_CHANGE: /* the GID that queue pairs use may be gone: their rails are broken,
                                * and new queue pairs use the current table */
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE: address_changed(t, d, ev->element.port_num, what); break;
    case IBV_EVENT_DEVICE_FATAL: lose_device(t, d, what); break;
    default: log_debug("rdma event", "device=%s event=\"%s\"", d->port->device, what);
    }
}

void rdma_events_process(struct rdma_device *d)
{
    struct rdma_transport *t = d->t;
    struct ibv_cq *cq;
    struct ibv_async_event ev;
    void *context;
    while (ibv_get_cq_event(d->channel, &cq, &context) == 0) {
        struct rdma_rail *r = context;
        ibv_ack_cq_events(cq, 1);
        list_remove(&r->link);
        list_push(&t->ready, &r->link);
    }
    while (ibv_get_async_event(d->ctx, &ev) == 0) {
        on_device_event(t, d, &ev);
        ibv_ack_async_event(&ev); /* after its last use: destroying waits for it */
    }
}

void rdma_events_device_lost(struct rdma_device *d)
{
    rdma_events_process(d); /* its earlier events */
    /* A closed descriptor polls as an error for ever (Linux, ib_uverbs_event_poll), so the thread
     * would never sleep again. */
    (void)epoll_ctl(d->t->epoll_fd, EPOLL_CTL_DEL, d->channel->fd, NULL);
    (void)epoll_ctl(d->t->epoll_fd, EPOLL_CTL_DEL, d->ctx->async_fd, NULL);
    lose_device(d->t, d, "the kernel has taken it away");
}
