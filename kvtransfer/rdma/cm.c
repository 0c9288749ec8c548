/* cm.c - ids and events of librdmacm: listeners, requests, answers. Purpose and invariants: cm.h.
 * Thread: transfer. */
#include "kvtransfer/rdma/cm.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "kvtransfer/rdma/conn.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    LISTENERS = 2 * RDMA_RAILS_MAX, /* more than one per port if peers use several addresses */
    BACKLOG = 1024,
    WAKE_MS = 1000,     /* until a port that is active again has its routes */
    EVENTS_AT_ONCE = 64 /* then the thread's other work has its turn */
};

struct rdma_cm_listener {
    struct rdma_cm_id *id; /* NULL: none. Its context is NULL; other ids have their queue pair */
    struct sockaddr_storage address; /* without a port */
};

/* The id of a destroyed queue pair over a port that is down. Destroying the id sends a message to
 * the peer, which is lost on such a port at best; Soft-RoCE (Linux 6.1) never again receives a
 * connection manager's message on a port that had no route for one. */
struct rdma_cm_deferred_id {
    struct rdma_cm_id *id;
    const struct rdma_local_port *local_port;
    uint64_t wake_ms; /* 0: its port is down */
};

struct rdma_cm {
    struct rdma_event_channel *channel;
    struct rdma_cm_deferred_id *deferred_ids; /* at most the queue pairs over a port when it went
                                               * down: none is connected while it is down */
    size_t n_deferred_ids;
    struct rdma_cm_listener listeners[LISTENERS];
    uint32_t next; /* to replace when all are in use */
};

/* A copy of an event that was acknowledged. */
struct rdma_cm_event_copy {
    enum rdma_cm_event_type type;
    struct rdma_cm_id *id;
    int status;
    uint32_t qp_num;
    uint8_t data[64];
    size_t n;
};

static const char *port_name(const struct rdma_rail *r)
{
    return rdma_rail_local_port(r)->port->device;
}

static enum status fail(struct rdma_rail *r, const char *what)
{
    snprintf(r->why, sizeof r->why, "%.24s: librdmacm: %s: %s", port_name(r), what,
             strerror(errno));
    return ERR_IO;
}

/* ---- life ---- */

enum status rdma_cm_open(struct rdma_transport *t, struct err *err)
{
    static const char path[] = "/dev/infiniband/rdma_cm"; /* checked first, because librdmacm
                                                           * waits seconds for it */
    if (access(path, R_OK | W_OK) != 0)
        return err_set(
            err, ERR_CONFIG, "BATON_RDMA_CM=1: %s cannot be opened: %s; %s", path, strerror(errno),
            errno == ENOENT
                ? "load the connection manager (modprobe rdma_ucm), or leave the variable out"
                : "this user needs to read and write it");
    struct rdma_event_channel *channel = rdma_create_event_channel();
    if (!channel)
        return err_set(err, ERR_CONFIG,
                       "BATON_RDMA_CM=1: librdmacm does not start: %s; is rdma_ucm loaded "
                       "(modprobe rdma_ucm)?",
                       strerror(errno));
    t->cm = MEM_NEW(struct rdma_cm);
    t->cm->channel = channel;
    struct epoll_event e = { .events = EPOLLIN, .data.ptr = t->cm };
    int flags = fcntl(channel->fd, F_GETFL);
    if (flags < 0 || fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK) != 0 ||
        epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, channel->fd, &e) != 0)
        return err_set(err, ERR_IO, "rdma: cannot wait for events of librdmacm: %s",
                       strerror(errno));
    return OK;
}

static void end_listener(struct rdma_cm_listener *l)
{
    if (l->id) rdma_destroy_id(l->id);
    *l = (struct rdma_cm_listener){ 0 };
}

void rdma_cm_close(struct rdma_transport *t)
{
    if (!t->cm) return;
    for (size_t i = 0; i < LISTENERS; i++) end_listener(&t->cm->listeners[i]);
    for (size_t i = 0; i < t->cm->n_deferred_ids; i++) rdma_destroy_id(t->cm->deferred_ids[i].id);
    mem_free(t->cm->deferred_ids);
    rdma_destroy_event_channel(t->cm->channel);
    mem_free(t->cm);
    t->cm = NULL;
}

void rdma_cm_release_id(struct rdma_qp *q)
{
    struct rdma_cm *cm = q->rail->conn->t->cm;
    const struct rdma_local_port *e = rdma_rail_local_port(q->rail);
    if (e->active || e->device->dead) rdma_destroy_id(q->id);
    else {
        q->id->context = NULL;
        cm->deferred_ids = mem_realloc(cm->deferred_ids, cm->n_deferred_ids + 1,
                                       sizeof *cm->deferred_ids);
        cm->deferred_ids[cm->n_deferred_ids++] = (struct rdma_cm_deferred_id){
            .id = q->id,
            .local_port = e,
        };
    }
    q->id = NULL;
}

static void destroy_deferred_id(struct rdma_cm *cm, size_t i)
{
    rdma_destroy_id(cm->deferred_ids[i].id);
    cm->deferred_ids[i] = cm->deferred_ids[--cm->n_deferred_ids];
}

void rdma_cm_tick(struct rdma_transport *t, uint64_t now_ms)
{
    for (size_t i = t->cm ? t->cm->n_deferred_ids : 0; i-- > 0;) {
        struct rdma_cm_deferred_id *s = &t->cm->deferred_ids[i];
        if (!s->local_port->active) s->wake_ms = 0;
        else if (!s->wake_ms) s->wake_ms = now_ms + WAKE_MS;
        if (s->local_port->device->dead || (s->wake_ms && now_ms >= s->wake_ms))
            destroy_deferred_id(t->cm, i);
    }
}

/* Whether the id's port is the one that r uses. */
static bool on_port_of(const struct rdma_cm_id *id, const struct rdma_rail *r)
{
    const struct rdma_port *p = rdma_rail_local_port(r)->port;
    return id->verbs && id->port_num == p->number &&
           strcmp(ibv_get_device_name(id->verbs->device), p->device) == 0;
}

/* The address of r's port, which r uses from now on. */
static enum status my_address(struct rdma_rail *r, struct sockaddr_storage *out)
{
    struct rdma_port_addr mine;
    TRY(rdma_rail_update_addr(r, &mine, NULL));
    if (rdma_cm_address(rdma_rail_local_port(r)->port, &mine, out)) return OK;
    snprintf(r->why, sizeof r->why,
             "%.24s: BATON_RDMA_CM=1 needs an IP address of its network interface", port_name(r));
    return ERR_NODEV;
}

/* ---- receiver: listening ---- */

static struct rdma_cm_listener *listener_at(struct rdma_cm *cm,
                                            const struct sockaddr_storage *address)
{
    struct rdma_cm_listener *vacant = NULL;
    for (size_t i = 0; i < LISTENERS; i++) {
        struct rdma_cm_listener *l = &cm->listeners[i];
        if (l->id && memcmp(&l->address, address, sizeof *address) == 0) return l;
        if (!l->id && !vacant) vacant = l;
    }
    if (vacant) return vacant;
    vacant = &cm->listeners[cm->next++ % LISTENERS]; /* peers invited to it try again */
    end_listener(vacant);
    return vacant;
}

static enum status open_listener(struct rdma_rail *r, struct rdma_cm_listener *l,
                                 struct sockaddr_storage *address)
{
    struct rdma_cm *cm = r->conn->t->cm;
    enum status st = OK;
    if (rdma_create_id(cm->channel, &l->id, NULL, RDMA_PS_TCP) != 0) {
        l->id = NULL;
        return fail(r, "no listener");
    }
    l->address = *address;
    if (rdma_bind_addr(l->id, (struct sockaddr *)address) != 0)
        st = fail(r, "its address cannot be listened on");
    else if (!on_port_of(l->id, r)) {
        snprintf(r->why, sizeof r->why,
                 "%.24s: the connection manager takes its address for another port's",
                 port_name(r));
        st = ERR_NODEV;
    } else if (rdma_listen(l->id, BACKLOG) != 0) st = fail(r, "its address cannot be listened on");
    if (st != OK) end_listener(l);
    return st;
}

enum status rdma_cm_listen(struct rdma_rail *r, struct rdma_invite *m)
{
    struct sockaddr_storage address;
    TRY(my_address(r, &address));
    struct rdma_cm_listener *l = listener_at(r->conn->t->cm, &address);
    if (!l->id) TRY(open_listener(r, l, &address));
    random_bytes(r->token, sizeof r->token);
    memcpy(m->token, r->token, sizeof m->token);
    m->port = ntohs(rdma_get_src_port(l->id));
    m->ipv6 = address.ss_family == AF_INET6;
    if (m->ipv6) memcpy(m->address, &((struct sockaddr_in6 *)&address)->sin6_addr, 16);
    else memcpy(m->address, &((struct sockaddr_in *)&address)->sin_addr, 4);
    return OK;
}

/* ---- both: one queue pair ---- */

static enum status transit(struct rdma_qp *q, enum ibv_qp_state state)
{
    struct ibv_qp_attr a = { .qp_state = state };
    int mask = 0;
    if (rdma_init_qp_attr(q->id, &a, &mask) != 0)
        return fail(q->rail, "no attributes for a queue pair");
    if (state == IBV_QPS_INIT) {
        /* qp.c has already set it */
        if (!(mask & IBV_QP_PKEY_INDEX) || a.pkey_index == 0) return OK;
        mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX;
    }
    return mask ? rdma_qp_modify(q, &a, mask) : OK;
}

/* iWARP has no attributes: the kernel connects the queue pair and reports ESTABLISHED on both
 * sides. */
static bool is_iwarp(const struct rdma_cm_id *id)
{
    return id->verbs->device->transport_type == IBV_TRANSPORT_IWARP;
}

static enum status to_send(struct rdma_qp *q)
{
    if (is_iwarp(q->id)) return OK;
    TRY(transit(q, IBV_QPS_INIT));
    TRY(transit(q, IBV_QPS_RTR));
    return transit(q, IBV_QPS_RTS);
}

static struct rdma_conn_param parameters(const struct rdma_qp *q)
{
    const struct kvt_rdma_tuning *t = &q->rail->conn->t->env->tuning.rdma;
    return (struct rdma_conn_param){
        .responder_resources = 1,
        .initiator_depth = 1,
        .retry_count = rdma_retries(t),
        .rnr_retry_count = 7,
        .qp_num = q->qp->qp_num,
    };
}

/* ---- receiver: being called ---- */

/* The rail that waits for this token. Compares every rail, so that the time reveals nothing. */
static struct rdma_rail *rail_of_token(struct rdma_transport *t,
                                       const struct rdma_cm_request *request)
{
    struct rdma_rail *found = NULL;
    LIST_FOREACH (c, &t->conns, struct rdma_conn, link)
        for (uint32_t i = 0; c->base.incoming && !c->failed && i < c->n_rails; i++) {
            struct rdma_rail *r = &c->rails[i];
            if (r->state == RDMA_RAIL_BINDING &&
                equal_constant_time(r->token, request->token, sizeof r->token))
                found = r;
        }
    return found;
}

static struct rdma_qp *requested_qp(struct rdma_transport *t, const struct rdma_cm_event_copy *e)
{
    struct rdma_cm_request request;
    if (rdma_cm_request_decode((struct str){ (const char *)e->data, e->n }, &request) != OK)
        return NULL;
    struct rdma_rail *r = rail_of_token(t, &request);
    if (!r || r->index != request.rail || r->epoch != request.epoch || request.i_qp >= r->n_qps ||
        !on_port_of(e->id, r))
        return NULL;
    struct rdma_qp *q = &r->qps[request.i_qp];
    return q->qp && !q->id && q->peer == e->qp_num ? q : NULL;
}

static void on_request(struct rdma_transport *t, const struct rdma_cm_event_copy *e)
{
    struct rdma_qp *q = requested_qp(t, e);
    e->id->context = NULL;
    if (!q) {
        log_debug("rdma connection rejected", "why=\"nobody waits for it here\"");
        (void)rdma_reject(e->id, NULL, 0);
        rdma_destroy_id(e->id);
        return;
    }
    q->id = e->id;
    q->id->context = q;
    struct rdma_conn_param p = parameters(q);
    enum status st = to_send(q);
    if (st == OK && rdma_accept(q->id, &p) != 0) st = fail(q->rail, "a queue pair is not accepted");
    if (st != OK) rdma_rail_break(q->rail, q->rail->why);
    else if (!is_iwarp(q->id)) rdma_rail_connected(q);
}

/* ---- sender: calling ---- */

static void set_options(const struct rdma_qp *q)
{
    const struct kvt_rdma_tuning *t = &q->rail->conn->t->env->tuning.rdma;
    uint8_t tos = t->traffic_class, timeout = rdma_timeout(t);
    /* For the peer's half of the path, and for iWARP; older kernels support fewer of them.
     * rdma_qp_modify sets our own half. */
    if (t->traffic_class_given)
        (void)rdma_set_option(q->id, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof tos);
    (void)rdma_set_option(q->id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout,
                          sizeof timeout);
}

static enum status connect_qp(struct rdma_qp *q, struct sockaddr_storage *from,
                              struct sockaddr_storage *to)
{
    struct rdma_rail *r = q->rail;
    if (rdma_create_id(r->conn->t->cm->channel, &q->id, q, RDMA_PS_TCP) != 0) {
        q->id = NULL;
        return fail(r, "no id for a queue pair");
    }
    set_options(q);
    if (rdma_bind_addr(q->id, (struct sockaddr *)from) != 0)
        return fail(r, "its address cannot be used");
    if (rdma_resolve_addr(q->id, NULL, (struct sockaddr *)to, RDMA_SETUP_MS) != 0)
        return fail(r, "the peer's address cannot be resolved");
    return OK;
}

enum status rdma_cm_connect(struct rdma_rail *r, const struct rdma_invite *m)
{
    struct sockaddr_storage from, to;
    TRY(my_address(r, &from));
    if (m->ipv6 != (from.ss_family == AF_INET6)) {
        snprintf(r->why, sizeof r->why,
                 "%.24s and the peer's port have addresses of different families (IPv4, IPv6)",
                 port_name(r));
        return ERR_CONFIG;
    }
    rdma_cm_address_of(rdma_rail_local_port(r)->port, m, &to);
    memcpy(r->token, m->token, sizeof r->token);
    for (uint32_t i = 0; i < r->n_qps; i++) TRY(connect_qp(&r->qps[i], &from, &to));
    return OK;
}

static enum status on_address(struct rdma_qp *q)
{
    struct rdma_rail *r = q->rail;
    if (!on_port_of(q->id, r)) {
        snprintf(r->why, sizeof r->why,
                 "%.24s: the connection manager goes to the peer through another port",
                 port_name(r));
        return ERR_NODEV;
    }
    return rdma_resolve_route(q->id, RDMA_SETUP_MS) == 0 ? OK : fail(r, "no route to the peer");
}

static enum status on_route(struct rdma_qp *q)
{
    struct rdma_rail *r = q->rail;
    struct rdma_cm_request request = {
        .rail = r->index,
        .epoch = r->epoch,
        .i_qp = (uint32_t)(q - r->qps),
    };
    struct rdma_conn_param p = parameters(q);
    uint8_t data[RDMA_CM_REQUEST_BYTES];
    memcpy(request.token, r->token, sizeof request.token);
    rdma_cm_request_encode(&request, data);
    p.private_data = data;
    p.private_data_len = sizeof data;
    return rdma_connect(q->id, &p) == 0 ? OK : fail(r, "the peer cannot be asked for a connection");
}

static enum status on_response(struct rdma_qp *q)
{
    TRY(to_send(q));
    if (rdma_establish(q->id) != 0) return fail(q->rail, "a connection is not established");
    rdma_rail_connected(q);
    return OK;
}

/* ---- events ---- */

static const char *what_ended(enum rdma_cm_event_type type)
{
    switch (type) {
    case RDMA_CM_EVENT_ADDR_ERROR: return "the peer's address cannot be resolved";
    case RDMA_CM_EVENT_ROUTE_ERROR: return "no route to the peer";
    case RDMA_CM_EVENT_UNREACHABLE: return "the peer cannot be reached, or does not answer";
    case RDMA_CM_EVENT_REJECTED: return "the peer rejected the connection";
    case RDMA_CM_EVENT_CONNECT_ERROR: return "the connection was not established";
    case RDMA_CM_EVENT_DEVICE_REMOVAL: return "its device is being removed";
    case RDMA_CM_EVENT_ADDR_CHANGE: return "its address has moved to another interface";
    default: return NULL; /* does not end anything of a rail (TIMEWAIT_EXIT, multicast) */
    }
}

static void on_event(struct rdma_transport *t, const struct rdma_cm_event_copy *e)
{
    struct rdma_qp *q = e->id->context;
    const char *what = what_ended(e->type);
    enum status st = OK;
    if (e->type == RDMA_CM_EVENT_CONNECT_REQUEST) {
        on_request(t, e);
        return;
    }
    if (!q) { /* a listener's: a new one is made when needed; or a deferred id's, which nobody
               * needs */
        for (size_t i = 0; i < LISTENERS && what; i++)
            if (t->cm->listeners[i].id == e->id) end_listener(&t->cm->listeners[i]);
        for (size_t i = t->cm->n_deferred_ids; i-- > 0 && e->type == RDMA_CM_EVENT_DEVICE_REMOVAL;)
            if (t->cm->deferred_ids[i].id == e->id) destroy_deferred_id(t->cm, i);
        return;
    }
    bool wanted = q->rail->state == RDMA_RAIL_OFFERED; /* not of an attempt that was given up */
    if (e->type == RDMA_CM_EVENT_ADDR_RESOLVED && wanted) st = on_address(q);
    else if (e->type == RDMA_CM_EVENT_ROUTE_RESOLVED && wanted) st = on_route(q);
    else if (e->type == RDMA_CM_EVENT_CONNECT_RESPONSE && wanted) st = on_response(q);
    else if (e->type == RDMA_CM_EVENT_ESTABLISHED) rdma_rail_connected(q);
    else if (e->type == RDMA_CM_EVENT_DISCONNECTED) rdma_rail_disconnected(q->rail);
    if (st != OK) rdma_rail_break(q->rail, q->rail->why);
    if (!what) return;
    char why[RDMA_REASON_MAX];
    if (e->status < 0)
        snprintf(why, sizeof why, "%.24s: %s: %s", port_name(q->rail), what, strerror(-e->status));
    else if (e->status)
        snprintf(why, sizeof why, "%.24s: %s (code %d)", port_name(q->rail), what, e->status);
    else snprintf(why, sizeof why, "%.24s: %s", port_name(q->rail), what);
    rdma_rail_break(q->rail, why);
}

void rdma_cm_process_events(struct rdma_transport *t)
{
    struct rdma_cm_event *ev;
    for (int i = 0; i < EVENTS_AT_ONCE && rdma_get_cm_event(t->cm->channel, &ev) == 0; i++) {
        struct rdma_cm_event_copy e = { .type = ev->event, .id = ev->id, .status = ev->status };
        if (ev->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
            e.qp_num = ev->param.conn.qp_num;
            e.n = ev->param.conn.private_data_len < sizeof e.data ? ev->param.conn.private_data_len
                                                                  : sizeof e.data;
            if (e.n) memcpy(e.data, ev->param.conn.private_data, e.n);
        }
        rdma_ack_cm_event(ev);
        on_event(t, &e);
    }
}
