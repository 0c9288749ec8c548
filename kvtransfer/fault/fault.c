/* fault.c - opens the wrapper around a transport, and the ops that only forward. Meaning: fault.h;
 * internals: fault_internal.h.
 * Thread: transfer; open and close: as the inner transport's. */
#include "kvtransfer/fault/fault.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "kvtransfer/fault/fault_internal.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum { EXTRA_COPIES = 2 /* a flipped bit cuts one copy into three */ };

/* ---- callbacks of the inner transport ---- */

static enum status admit(void *arg, const uint8_t ticket[KVT_TICKET_BYTES])
{
    struct fault_transport *r = arg;
    return r->outer->admit(r->outer->arg, ticket);
}

static int scatter(void *arg, struct kvt_conn *inner, const struct kvt_message *head,
                   uint64_t offset, struct iovec *iov, int cap)
{
    struct fault_transport *r = arg;
    struct fault_conn *c = inner->peer;
    if (!c || c->detached || c->force_down) return 0;
    return r->outer->scatter(r->outer->arg, &c->base, head, offset, iov, cap);
}

static void scattered(void *arg, struct kvt_conn *inner, const struct kvt_message *head,
                      uint64_t bytes)
{
    struct fault_transport *r = arg;
    struct fault_conn *c = inner->peer;
    if (!c || c->detached || c->force_down) return;
    if (bytes == head->bytes && fault_inject(r, FAULT_AT_PUT, false).kind == FAULT_DISCONNECT)
        (void)fault_force_down(c);
    else r->outer->scattered(r->outer->arg, &c->base, head, bytes);
}

/* ---- ops that forward ---- */

static int fault_wait_fd(struct kvt_transport *t)
{
    return ((struct fault_transport *)t)->epoll_fd;
}
static uint16_t fault_port(struct kvt_transport *t)
{
    return ((struct fault_transport *)t)->inner_ops->port(((struct fault_transport *)t)->inner);
}
static enum status fault_flush(struct kvt_transport *t)
{
    return ((struct fault_transport *)t)->inner_ops->flush(((struct fault_transport *)t)->inner);
}
static bool fault_can_reach(struct kvt_transport *t, struct str address)
{
    return ((struct fault_transport *)t)
        ->inner_ops->can_reach(((struct fault_transport *)t)->inner, address);
}

static void fault_export_address(const struct kvt_transport *t, struct buf *out)
{
    const struct fault_transport *r = (const struct fault_transport *)t;
    r->inner_ops->export_address(r->inner, out);
}

static uint64_t fault_link_speed(const struct kvt_conn *base)
{
    const struct fault_conn *c = (const struct fault_conn *)base;
    return c->transport->inner_ops->link_speed(c->inner);
}

static enum status fault_connect(struct kvt_transport *t, struct str address,
                                 const struct kv_layout *theirs,
                                 const uint8_t ticket[KVT_TICKET_BYTES], struct kvt_conn **out,
                                 struct err *err)
{
    struct fault_transport *r = ((struct fault_transport *)t);
    struct kvt_conn *inner = NULL;
    if (fault_inject(r, FAULT_AT_CONNECT, false).kind == FAULT_DISCONNECT) {
        fault_count(r, FAULT_DISCONNECT);
        return err_set(err, ERR_PEER_LOST, "%s: not connected, as the fault plan says",
                       r->ops.name);
    }
    TRY(r->inner_ops->connect(r->inner, address, theirs, ticket, &inner, err));
    *out = &fault_new_conn(r, inner)->base;
    return OK;
}

static void fault_abandon(struct kvt_conn *base, uint32_t session, uint64_t generation)
{
    struct fault_conn *c = (struct fault_conn *)base;
    if (!c->inner_down) c->transport->inner_ops->abandon(c->inner, session, generation);
}

static enum status fault_fence(struct kvt_conn *base)
{
    struct fault_conn *c = (struct fault_conn *)base;
    struct fault_action f = fault_inject(c->transport, FAULT_AT_FENCE, false);
    c->detached = true;
    if (f.kind == FAULT_DELAY) {
        fault_count(c->transport, f.kind);
        c->fence_ms = clock_ms() + f.ms;
    }
    enum status st = c->transport->inner_ops->fence(c->inner);
    return clock_ms() < c->fence_ms ? ERR_BUSY : st;
}

static void fault_disconnect(struct kvt_conn *base)
{
    struct fault_conn *c = (struct fault_conn *)base;
    struct fault_transport *r = c->transport;
    (void)fault_inject(r, FAULT_AT_DISCONNECT, false);
    c->inner->peer = NULL;
    r->inner_ops->disconnect(c->inner);
    fault_free_conn(c);
}

static void fault_close(struct kvt_transport *t)
{
    struct fault_transport *r = ((struct fault_transport *)t);
    LIST_FOREACH (c, &r->conns, struct fault_conn, link) fault_disconnect(&c->base);
    if (r->inner) r->inner_ops->close(r->inner);
    if (r->epoll_fd >= 0) close(r->epoll_fd);
    if (r->timer_fd >= 0) close(r->timer_fd);
    mem_free(r->memory.ptr);
    mem_free(r->copies);
    mem_free(r);
}

/* ---- opening ---- */

/* A wrapper needs the transport inside and its plan: kvt_fault_open. */
static enum status fault_open(const struct kvt_env *env, struct kvt_transport **out,
                              struct err *err)
{
    (void)env, (void)out;
    return err_set(err, ERR_INVALID, "fault injection needs a transport and a plan");
}

static const struct kvt_transport_ops FAULT_OPS = {
    .open = fault_open,
    .close = fault_close,
    .wait_fd = fault_wait_fd,
    .port = fault_port,
    .export_address = fault_export_address,
    .can_reach = fault_can_reach,
    .connect = fault_connect,
    .put = fault_put,
    .abandon = fault_abandon,
    .notify = fault_notify,
    .flush = fault_flush,
    .fence = fault_fence,
    .poll = fault_poll,
    .link_speed = fault_link_speed,
    .disconnect = fault_disconnect,
};

static void register_counters(struct fault_transport *r, struct metrics *m)
{
    struct buf labels = { 0 };
    for (int k = 0; m && k < FAULT_KINDS; k++) {
        buf_clear(&labels);
        buf_printf(&labels, "transport=\"%s\",kind=\"%s\"", r->ops.name, kvt_fault_kind_names[k]);
        r->injected[k] = metrics_counter(m, "baton_kv_fault_injected_total", labels.data,
                                         "Faults injected into KV transfers by the fault plan.");
    }
    buf_release(&labels);
}

/* Allocates our own sources: an image of the staging memory, then the windows. */
static void make_memory(struct fault_transport *r)
{
    enum { PAGE = 4096 };
    size_t staging = r->outer->staging ? r->outer->staging->bytes : 0;
    staging = (staging + PAGE - 1) / PAGE * PAGE;
    r->memory = (struct dev_mem){ .bytes = staging + (size_t)FAULT_SLOTS * FAULT_WINDOW, .fd = -1 };
    r->memory.ptr = mem_aligned(PAGE, r->memory.bytes);
    r->copies = MEM_ARRAY(struct kvt_copy, r->outer->max_copies + EXTRA_COPIES);
}

static enum status open_inner(struct fault_transport *r, struct err *err)
{
    r->env = *r->outer;
    r->env.staging = &r->memory;
    r->env.max_copies += EXTRA_COPIES;
    r->env.arg = r;
    r->env.admit = admit;
    r->env.scatter = scatter;
    r->env.scattered = scattered;
    TRY(r->inner_ops->open(&r->env, &r->inner, err));
    r->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    r->timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    struct epoll_event e = { .events = EPOLLIN };
    if (r->epoll_fd < 0 || r->timer_fd < 0 ||
        epoll_ctl(r->epoll_fd, EPOLL_CTL_ADD, r->timer_fd, &e) != 0 ||
        epoll_ctl(r->epoll_fd, EPOLL_CTL_ADD, r->inner_ops->wait_fd(r->inner), &e) != 0)
        return err_set(err, ERR_INTERNAL, "no event descriptors for the fault plan: %s",
                       strerror(errno));
    return OK;
}

enum status kvt_fault_open(const struct kvt_transport_ops *inner, const struct kvt_env *env,
                           const char *text, struct metrics *m, struct kvt_transport **out,
                           struct err *err)
{
    struct kvt_fault_plan plan;
    TRY(kvt_fault_parse(str_of(text), &plan, err));
    struct fault_transport *r = MEM_NEW(struct fault_transport);
    r->ops = FAULT_OPS;
    r->ops.name = inner->name;
    r->ops.caps = inner->caps;
    r->ops.put_bytes = inner->put_bytes;
    r->base.ops = &r->ops;
    r->inner_ops = inner;
    r->outer = env;
    r->plan = plan;
    r->random = plan.seed;
    r->epoll_fd = r->timer_fd = -1;
    list_init(&r->conns);
    make_memory(r);
    enum status st = open_inner(r, err);
    if (st != OK) {
        fault_close(&r->base);
        return st;
    }
    register_counters(r, m);
    struct buf said = { 0 };
    kvt_fault_write(&plan, &said);
    log_warn("KV FAULTS ARE BEING INJECTED ON PURPOSE", "transport=%s plan=\"%s\"", inner->name,
             said.data);
    buf_release(&said);
    *out = &r->base;
    return OK;
}
