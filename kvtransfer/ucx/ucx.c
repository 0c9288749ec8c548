/* ucx.c - transport ucx: KV over remote writes of UCX (UCP): InfiniBand and RoCE by rc, dc and ud.
 * The ops table and the poll.
 *
 * conn.h has the states of a connection, its ordering argument and the fence; control.h carries
 * tickets, set-up and messages; setup.h says which UCX transports may be used. This file turns
 * control events and progress into transport events.
 *
 * Waiting: one epoll descriptor watches the hub's, each worker's, and `more_fd`, which is readable
 * while work is left. A worker's descriptor reports only when armed (ucp.h, ucp_worker_arm); a poll
 * arms every worker that it leaves. Events are queued, because one poll can yield more than the
 * caller's array takes. Thread: transfer. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kvtransfer/transports.h"
#include "kvtransfer/ucx/conn.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"

enum { EVENTS = 64, DEADLINE_CHECK_MS = 50 };

struct ucx_transport {
    struct kvt_transport base;
    const struct kvt_env *env;
    struct control_hub *hub;
    struct ucx_setup setup;
    struct list conns;
    int epoll_fd, more_fd;
    bool more; /* more_fd is readable */
    uint64_t checked_ms;
    struct kvt_transport_event *queue; /* [q_head, q_len) are to be reported */
    size_t q_head, q_len, q_cap;
};

/* ---- events ---- */

static struct kvt_transport_event *add_event(struct ucx_conn *c, enum kvt_transport_event_kind kind)
{
    struct ucx_transport *t = c->t;
    if (t->q_len == t->q_cap) {
        t->q_cap = t->q_cap ? 2 * t->q_cap : 64;
        t->queue = mem_realloc(t->queue, t->q_cap, sizeof *t->queue);
    }
    struct kvt_transport_event *i = &t->queue[t->q_len++];
    i->kind = kind;
    i->conn = &c->base;
    i->status = OK;
    i->text[0] = 0;
    return i;
}

static size_t hand_out(struct ucx_transport *t, struct kvt_transport_event *out, size_t cap)
{
    size_t n = t->q_len - t->q_head < cap ? t->q_len - t->q_head : cap;
    if (n) memcpy(out, t->queue + t->q_head, n * sizeof *out);
    t->q_head += n;
    if (t->q_head == t->q_len) t->q_head = t->q_len = 0;
    return n;
}

/* Drops the queued events of a connection that is about to be freed. */
static void drop_events(struct ucx_conn *c)
{
    struct ucx_transport *t = c->t;
    size_t kept = t->q_head;
    for (size_t i = t->q_head; i < t->q_len; i++)
        if (t->queue[i].conn != &c->base) t->queue[kept++] = t->queue[i];
    t->q_len = kept;
}

static void want_more(struct ucx_transport *t, bool more)
{
    uint64_t n = 1;
    if (t->more == more) return;
    t->more = more;
    ssize_t done = more ? write(t->more_fd, &n, sizeof n) : read(t->more_fd, &n, sizeof n);
    (void)done; /* one writer, one reader, counter 0 or 1: neither can fail */
}

/* ---- life of a connection ---- */

/* Restarts the deadline for the next step of the set-up. */
static void allow_time(struct ucx_conn *c) { c->deadline_ms = clock_ms() + KVT_CONNECT_MS; }

static struct ucx_conn *new_conn(struct ucx_transport *t, bool incoming, enum ucx_state state)
{
    struct ucx_conn *c = MEM_NEW(struct ucx_conn);
    c->base = (struct kvt_conn){ .t = &t->base, .incoming = incoming };
    c->t = t;
    c->state = state;
    c->event_fd = -1;
    allow_time(c);
    list_push(&t->conns, &c->link);
    return c;
}

/* Stops the connection: nothing is read for the peer and the peer writes nothing afterwards. */
static void stop(struct ucx_conn *c)
{
    c->state = UCX_DOWN;
    if (c->event_fd >= 0) (void)epoll_ctl(c->t->epoll_fd, EPOLL_CTL_DEL, c->event_fd, NULL);
    ucx_conn_tear_down(c);
    if (c->control) control_close(c->control);
    c->control = NULL;
}

static void free_conn(struct ucx_conn *c)
{
    stop(c);
    drop_events(c);
    list_remove(&c->link);
    mem_free(c);
}

/* Ends a connection, and reports it if the session layer knows it. An outgoing one first stops
 * reading its sources; an incoming one keeps its worker until fence(). May free a connection that
 * was never announced. */
static void go_down(struct ucx_conn *c, enum status st, const char *text)
{
    if (c->state == UCX_DOWN) return;
    if (c->base.incoming && c->state == UCX_ACCEPTED) {
        free_conn(c);
        return;
    }
    if (!c->base.incoming && c->rail) c->rail->failed_ms = clock_ms();
    if (!c->base.incoming) stop(c);
    c->state = UCX_DOWN;
    if (c->control) control_close(c->control);
    c->control = NULL;
    if (c->detached) return;
    struct kvt_transport_event *i = add_event(c, KVT_DOWN);
    i->status = st;
    snprintf(i->text, sizeof i->text, "%s%s", strncmp(text, "ucx: ", 5) == 0 ? "" : "ucx: ", text);
}

/* Creates a worker, but not over a port that is down: UCX wires up over a UD queue pair, which goes
 * into the error state when Soft-RoCE cannot route a packet, and UCX 1.13 then ends the process
 * ("receive completion with error"). */
static enum status start_worker(struct ucx_conn *c, struct err *err)
{
    if (!ucx_device_active(c->rail->device))
        return err_set(err, ERR_PEER_LOST, "the port %s is down", c->rail->device);
    TRY(ucx_conn_worker(c, err));
    struct epoll_event e = { .events = EPOLLIN, .data.ptr = c };
    if (epoll_ctl(c->t->epoll_fd, EPOLL_CTL_ADD, c->event_fd, &e) != 0)
        return err_set(err, ERR_IO, "cannot wait for a UCX worker: %s", strerror(errno));
    want_more(c->t, true);
    return OK;
}

static void go_up(struct ucx_conn *c)
{
    c->state = UCX_UP;
    add_event(c, KVT_UP);
}

/* ---- what comes over the control connection ---- */

/* Outgoing: sends the rail's number, then creates a worker on it while the peer creates its own. */
static void begin_rail(struct ucx_conn *c)
{
    struct err err = { 0 };
    struct ucx_setup *s = &c->t->setup;
    c->state = UCX_EXCHANGING;
    c->rail = ucx_rail_choose(s);
    uint32_t number = (uint32_t)(c->rail - s->rails);
    enum status st = control_send(c->control, UCX_FRAME_RAIL, 0, &number, sizeof number);
    st = st == OK ? start_worker(c, &err) : err_set(&err, st, "the peer closed the connection");
    allow_time(c);
    if (st != OK) go_down(c, st, err.text);
}

static void on_opened(struct ucx_transport *t, struct control_conn *control)
{
    struct ucx_conn *c = control->owner;
    if (!control->incoming) {
        begin_rail(c);
        return;
    }
    c = new_conn(t, true, UCX_ACCEPTED);
    c->control = control;
    control->owner = c;
}

/* Incoming: handles the rail's number. */
static void on_rail(struct ucx_conn *c, struct str body)
{
    struct err err = { 0 };
    uint32_t number;
    memcpy(&number, body.p, sizeof number);
    c->rail = ucx_rail_by_number(&c->t->setup, number);
    enum status st = start_worker(c, &err);
    if (st == OK) st = ucx_conn_send_address(c, c->t->env->mem, &err);
    allow_time(c);
    if (st != OK) go_down(c, st, err.text);
}

static void on_address(struct ucx_conn *c, const struct control_event *ev)
{
    struct err err = { 0 };
    struct ucx_region r;
    enum status st = ERR_FORMAT;
    if (ev->frame == UCX_FRAME_ADDRESS && c->address.len + ev->body.n <= UCX_ADDRESS_MAX) {
        buf_add_str(&c->address, ev->body);
        return;
    }
    snprintf(err.text, sizeof err.text, "malformed set-up");
    if (ev->frame == UCX_FRAME_REGION) st = ucx_region_decode(ev->body, &r);
    /* see start_worker */
    if (st == OK && !ucx_device_active(c->rail->device))
        st = err_set(&err, ERR_PEER_LOST, "the port %s is down", c->rail->device);
    if (st == OK) st = ucx_conn_wireup(c, &r, &err);
    allow_time(c);
    if (st == OK) c->state = UCX_WIREUP;
    else go_down(c, st, err.text);
}

static void hold(struct ucx_conn *c, uint64_t after, const struct kvt_message *m)
{
    if (!c->held) c->held = MEM_ARRAY(struct ucx_held, UCX_HELD_MAX);
    if (c->n_held == UCX_HELD_MAX) {
        go_down(c, ERR_FORMAT, "the peer sends messages without the bytes they speak of");
        return;
    }
    c->held[(c->held_head + c->n_held++) % UCX_HELD_MAX] = (struct ucx_held){ after, *m };
}

static void on_message(struct ucx_conn *c, const struct control_event *ev)
{
    struct kvt_message m;
    if (kvt_message_decode(ev->body.p, ev->body.n, &m) != OK || m.kind == KVT_MSG_DATA ||
        (ev->after && !c->base.incoming))
        go_down(c, ERR_FORMAT, "malformed message");
    /* none before UP, because the session layer does not know the connection yet */
    else if (c->state != UCX_UP || c->n_held || ev->after > c->seq_received) hold(c, ev->after, &m);
    else add_event(c, KVT_MESSAGE)->message = m;
}

static void on_control(void *arg, const struct control_event *ev)
{
    struct ucx_conn *c = ev->conn->owner;
    if (ev->kind == CONTROL_OPENED) on_opened(arg, ev->conn);
    else if (ev->kind == CONTROL_LOST) go_down(c, ev->status, ev->text);
    else if (c->state == UCX_EXCHANGING) on_address(c, ev);
    else if (c->state == UCX_ACCEPTED && ev->frame == UCX_FRAME_RAIL && !c->rail &&
             ev->body.n == sizeof(uint32_t))
        on_rail(c, ev->body);
    else if (c->state == UCX_ACCEPTED && ev->frame == UCX_FRAME_READY && c->worker && !c->ready &&
             ev->body.n == 0) {
        c->ready = true;
        if (c->seq_received) go_up(c);
    } else if ((c->state == UCX_UP || c->ready) && ev->frame == UCX_FRAME_MESSAGE)
        on_message(c, ev);
    else go_down(c, ERR_FORMAT, "malformed set-up");
}

/* ---- progress ---- */

static void release_held(struct ucx_conn *c)
{
    while (c->n_held && c->held[c->held_head].after <= c->seq_received) {
        add_event(c, KVT_MESSAGE)->message = c->held[c->held_head].message;
        c->held_head = (c->held_head + 1) % UCX_HELD_MAX;
        c->n_held--;
    }
}

/* May free c. */
static void progress_conn(struct ucx_conn *c)
{
    uint64_t done[UCX_PUTS_MAX];
    size_t n = ucx_conn_progress(c, done);
    if (c->failed != UCS_OK) {
        char text[120];
        snprintf(text, sizeof text, "the UCX connection failed: %s", ucs_status_string(c->failed));
        go_down(c, ERR_PEER_LOST, text);
        return;
    }
    for (size_t i = 0; i < n; i++) add_event(c, KVT_PUT_DONE)->tag = done[i];
    if (c->state == UCX_WIREUP && c->n_flushed) {
        if (control_send(c->control, UCX_FRAME_READY, 0, NULL, 0) == OK) go_up(c);
        else go_down(c, ERR_PEER_LOST, "the peer closed the connection");
    } else if (c->state == UCX_ACCEPTED && c->ready && c->seq_received) go_up(c);
    if (c->state == UCX_UP) release_held(c);
}

static void check_deadlines(struct ucx_transport *t)
{
    uint64_t now = clock_ms();
    if (now < t->checked_ms + DEADLINE_CHECK_MS) return;
    t->checked_ms = now;
    LIST_FOREACH (c, &t->conns, struct ucx_conn, link) {
        if (c->state < UCX_UP && now > c->deadline_ms)
            go_down(c, ERR_TIMEOUT, "the peer's UCX did not answer in time");
        else if (c->state == UCX_UP && ucx_conn_is_stalled(c, now))
            go_down(c, ERR_TIMEOUT,
                    c->base.incoming ? "bytes that the peer has sent do not come"
                                     : "puts are in flight and none of them ends");
    }
}

static size_t ucx_poll(struct kvt_transport *base, struct kvt_transport_event *out, size_t cap)
{
    struct ucx_transport *t = (struct ucx_transport *)base;
    struct epoll_event events[EVENTS];
    if (t->q_head < t->q_len) return hand_out(t, out, cap);
    int n = epoll_wait(t->epoll_fd, events, EVENTS, 0);
    for (int i = 0; i < n; i++) /* the hub's and more_fd have no connection */
        if (events[i].data.ptr) ((struct ucx_conn *)events[i].data.ptr)->armed = false;
    LIST_FOREACH (c, &t->conns, struct ucx_conn, link)
        if (c->worker && !c->armed && c->state != UCX_DOWN) progress_conn(c);
    control_poll(t->hub, on_control, t);
    check_deadlines(t);
    bool more = false;
    LIST_FOREACH (c, &t->conns, struct ucx_conn, link)
        if (c->worker && c->state != UCX_DOWN && !ucx_conn_arm(c)) more = true;
    want_more(t, more || t->q_len > cap);
    return hand_out(t, out, cap);
}

/* ---- the other slots ---- */

static enum status ucx_put(struct kvt_conn *base, const struct kvt_put *p)
{
    struct ucx_conn *c = (struct ucx_conn *)base;
    if (c->state != UCX_UP || c->failed != UCS_OK) return ERR_PEER_LOST;
    if (c->n_put - c->n_flushed == UCX_PUTS_MAX || c->in_flight >= UCX_IN_FLIGHT_BYTES)
        return ERR_BUSY;
    ucx_conn_put(c, c->t->env, p);
    c->armed = false;
    want_more(c->t, true);
    return OK; /* a failure is reported as DOWN */
}

/* Remote writes in UCX cannot be cancelled one by one: they end by themselves, or with the
 * connection. */
static void ucx_abandon(struct kvt_conn *c, uint32_t session, uint64_t generation)
{
    (void)c, (void)session, (void)generation;
}

static enum status ucx_notify(struct kvt_conn *base, const struct kvt_message *m)
{
    struct ucx_conn *c = (struct ucx_conn *)base;
    uint8_t bytes[KVT_MESSAGE_MAX];
    if (c->state != UCX_UP) return ERR_PEER_LOST;
    if (m->kind == KVT_MSG_NOTE && control_queued(c->control) > KVT_QUEUE_BYTES) return ERR_BUSY;
    return control_send(c->control, UCX_FRAME_MESSAGE, c->n_put, bytes,
                        kvt_message_encode(m, bytes));
}

static enum status ucx_fence(struct kvt_conn *base)
{
    struct ucx_conn *c = (struct ucx_conn *)base;
    c->detached = true;
    if (c->worker || c->control) stop(c);
    c->state = UCX_DOWN;
    drop_events(c);
    return OK;
}

static void ucx_disconnect(struct kvt_conn *base) { free_conn((struct ucx_conn *)base); }

static enum status ucx_connect(struct kvt_transport *base, struct str address,
                               const struct kv_layout *theirs,
                               const uint8_t ticket[KVT_TICKET_BYTES], struct kvt_conn **out,
                               struct err *err)
{
    struct ucx_transport *t = (struct ucx_transport *)base;
    struct ucx_conn *c = new_conn(t, false, UCX_CONNECTING);
    c->need_bytes = kv_layout_pool_bytes(theirs);
    enum status st = control_connect(t->hub, address, ticket, c, &c->control, err);
    if (st != OK) {
        free_conn(c);
        return st;
    }
    *out = &c->base;
    return OK;
}

static void ucx_close(struct kvt_transport *base)
{
    struct ucx_transport *t = (struct ucx_transport *)base;
    LIST_FOREACH (c, &t->conns, struct ucx_conn, link) free_conn(c);
    control_hub_free(t->hub);
    ucx_release(&t->setup);
    if (t->epoll_fd >= 0) close(t->epoll_fd);
    if (t->more_fd >= 0) close(t->more_fd);
    mem_free(t->queue);
    mem_free(t);
}

static enum status ucx_open(const struct kvt_env *env, struct kvt_transport **out, struct err *err)
{
    struct ucx_transport *t = MEM_NEW(struct ucx_transport);
    t->base.ops = &kvt_ucx_ops;
    t->env = env;
    list_init(&t->conns);
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    t->more_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    enum status st = t->epoll_fd < 0 || t->more_fd < 0
                         ? err_set(err, ERR_CONFIG, "ucx: no event descriptors: %s",
                                   strerror(errno))
                         : OK;
    if (st == OK) st = ucx_setup(env, &t->setup, err);
    if (st == OK)
        st = control_open(env, "ucx", env->tuning.ucx_port, env->tuning.socket_ifname, &t->hub,
                          err);
    if (st != OK) {
        ucx_close(&t->base);
        return st;
    }
    struct epoll_event e = { .events = EPOLLIN };
    (void)epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, control_wait_fd(t->hub), &e);
    (void)epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, t->more_fd, &e);
    *out = &t->base;
    return OK;
}

static int ucx_wait_fd(struct kvt_transport *t) { return ((struct ucx_transport *)t)->epoll_fd; }
static uint16_t ucx_port(struct kvt_transport *t)
{
    return control_port(((struct ucx_transport *)t)->hub);
}

/* As for rdma: the marker is in host memory while the data are in GPU memory, so the GPU must make
 * them visible. */
static enum status ucx_flush(struct kvt_transport *t)
{
    struct device *device = ((struct ucx_transport *)t)->env->device;
    return device ? device_flush_rdma_writes(device) : OK;
}

/* UCX 1.13 does not tell which device an endpoint uses. */
static uint64_t ucx_link_speed(const struct kvt_conn *c)
{
    (void)c;
    return 0;
}

static void ucx_export_address(const struct kvt_transport *t, struct buf *out)
{
    buf_add_str(out, control_address(((const struct ucx_transport *)t)->hub));
}

static bool ucx_can_reach(struct kvt_transport *t, struct str address)
{
    (void)t;
    return control_can_reach(address);
}

const struct kvt_transport_ops kvt_ucx_ops = {
    .name = "ucx",
    .caps = KVT_CAP_FENCE_TEARDOWN | KVT_CAP_GPUDIRECT | KVT_CAP_HEALS,
    .put_bytes = 8 << 20, /* as for rdma: one message less per MiB is 3 % of a Soft-RoCE link */
    .open = ucx_open,
    .close = ucx_close,
    .wait_fd = ucx_wait_fd,
    .port = ucx_port,
    .export_address = ucx_export_address,
    .can_reach = ucx_can_reach,
    .connect = ucx_connect,
    .put = ucx_put,
    .abandon = ucx_abandon,
    .notify = ucx_notify,
    .flush = ucx_flush,
    .fence = ucx_fence,
    .poll = ucx_poll,
    .link_speed = ucx_link_speed,
    .disconnect = ucx_disconnect,
};
