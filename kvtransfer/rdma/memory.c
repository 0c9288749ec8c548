/* memory.c - what devices may access: protection domains, the pool's one registration per device,
 * and the peers' keys.
 *
 * A device's region of the pool lets that device read it (puts) and binds windows; its own rkey
 * grants nothing, because the region has no remote access. A peer's key is a window bound to one
 * queue pair, or a region in a separate domain of the rail; both end with the rail. A pool in GPU
 * memory is registered by a dma-buf (GPUDirect RDMA); if driver, GPU or NIC cannot do that, the
 * transport is not available. It is always pinned. That path is compiled and has not run with a GPU
 * yet.
 * Thread: transfer; open: loop. */
#include "kvtransfer/rdma/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include "kvtransfer/rdma/rail.h"
#include "kvtransfer/rdma/rdma.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

/* ---- regions ---- */

static enum status no_region(const struct rdma_device *d, const char *what, size_t bytes, int code,
                             struct err *err)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        limit.rlim_cur < bytes)
        return err_set(
            err, ERR_CONFIG,
            "rdma: %s cannot register the %s: it has %zu bytes, and RLIMIT_MEMLOCK lets this "
            "process lock %llu: raise it (ulimit -l unlimited, "
            "LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 for a container)",
            d->port->device, what, bytes, (unsigned long long)limit.rlim_cur);
    return err_set(err, ERR_CONFIG, "rdma: %s cannot register the %s of %zu bytes: %s",
                   d->port->device, what, bytes, strerror(code));
}

/* Whether the device supports on-demand paging for the operations that are used. */
static bool can_page(const struct rdma_device *d)
{
    const struct kvt_rdma_tuning *t = &d->t->env->tuning.rdma;
    return d->port->odp_write && (d->port->odp_read || !(t->flush_read || t->verify_read));
}

/* Whether on-demand paging may replace locking that fails. */
static bool may_page(const struct rdma_device *d)
{
    const struct kvt_rdma_tuning *t = &d->t->env->tuning.rdma;
    return t->odp != KVT_OFF && t->key != KVT_RDMA_KEY_WINDOW && can_page(d);
}

/* Registers GPU memory. Addresses in the region are the GPU's, which peers' keys and window bounds
 * use. The region keeps the memory; the descriptor is not needed afterwards. */
static enum status register_device_memory(struct rdma_device *d, struct ibv_pd *pd, int access,
                                          struct ibv_mr **out, struct err *err)
{
    const struct kvt_env *env = d->t->env;
    struct err why = { 0 };
    int fd = -1;
    if (device_mem_dmabuf(env->device, env->mem, &fd, &why) != OK)
        return err_set(err, ERR_NODEV, "rdma: %s", why.text);
    *out = ibv_reg_dmabuf_mr(pd, 0, env->mem->bytes, (uintptr_t)env->mem->ptr, fd, access);
    int code = errno;
    close(fd);
    return *out ? OK
                : err_set(err, ERR_NODEV, "rdma: %s cannot register GPU memory: %s",
                          d->port->device, strerror(code));
}

static enum status register_region(struct rdma_device *d, struct ibv_pd *pd, const char *what,
                                   void *p, size_t bytes, int access, struct ibv_mr **out,
                                   struct err *err)
{
    /* An optional flag: providers without relaxed ordering ignore it. */
    if (d->t->env->tuning.rdma.relaxed_ordering) access |= IBV_ACCESS_RELAXED_ORDERING;
    if (d->t->env->device && p == d->t->env->mem->ptr)
        return register_device_memory(d, pd, access, out, err);
    struct ibv_mr *mr = ibv_reg_mr(pd, p, bytes,
                                   access | (d->on_demand ? IBV_ACCESS_ON_DEMAND : 0));
    int code = errno;
    if (!mr && !d->on_demand && may_page(d) && !(access & IBV_ACCESS_MW_BIND)) {
        mr = ibv_reg_mr(pd, p, bytes, access | IBV_ACCESS_ON_DEMAND);
        if (mr)
            log_warn("rdma memory is not locked but paged on demand, slower at first touch",
                     "device=%s what=\"%s\" bytes=%zu why=\"%s\"", d->port->device, what, bytes,
                     strerror(code));
    }
    if (!mr) return no_region(d, what, bytes, code, err);
    *out = mr;
    return OK;
}

uint32_t rdma_memory_key(const struct rdma_device *d, uint64_t local)
{
    return local < KVT_STAGING ? d->pool->lkey : d->staging->lkey;
}

/* ---- devices ---- */

static enum status watch(struct rdma_transport *t, int fd, struct rdma_device *d, struct err *err)
{
    struct epoll_event e = { .events = EPOLLIN, .data.ptr = d };
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 ||
        epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, fd, &e) != 0)
        return err_set(err, ERR_IO, "rdma: cannot wait for events of %s: %s", d->port->device,
                       strerror(errno));
    return OK;
}

/* Registers what this side reads and writes. The pool is bound to windows or only read; with region
 * keys each peer has a separate region. */
static enum status register_all(struct rdma_transport *t, struct rdma_device *d, struct err *err)
{
    const struct kvt_env *env = t->env;
    int access = d->uses_mw ? IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND : 0;
    TRY(register_region(d, d->pd, "KV pool", env->mem->ptr, env->mem->bytes, access, &d->pool,
                        err));
    if (env->staging)
        TRY(register_region(d, d->pd, "staging memory", env->staging->ptr, env->staging->bytes, 0,
                            &d->staging, err));
    if (t->scratch)
        TRY(register_region(d, d->pd, "scratch memory", t->scratch, t->scratch_bytes,
                            IBV_ACCESS_LOCAL_WRITE, &d->scratch, err));
    return OK;
}

static void forget_all(struct rdma_device *d)
{
    struct ibv_mr **all[] = { &d->scratch, &d->staging, &d->pool };
    for (size_t i = 0; i < COUNT_OF(all); i++) {
        if (*all[i]) ibv_dereg_mr(*all[i]);
        *all[i] = NULL;
    }
}

/* Chooses between windows and regions. Windows need pinned memory, so keys of memory with on-demand
 * paging are regions. */
static enum status choose_keys(struct rdma_device *d, struct err *err)
{
    const struct kvt_rdma_tuning *t = &d->t->env->tuning.rdma;
    bool on_demand = t->odp == KVT_ON;
    if (on_demand && !can_page(d))
        return err_set(err, ERR_CONFIG,
                       "rdma: BATON_RDMA_ODP=on: %s cannot page on demand: leave it out, and let "
                       "this process lock its KV memory",
                       d->port->device);
    if (on_demand && t->key == KVT_RDMA_KEY_WINDOW)
        return err_set(err, ERR_CONFIG,
                       "rdma: BATON_RDMA_KEY=window needs locked memory, BATON_RDMA_ODP=on does "
                       "not lock it: leave one of them out");
    if (t->key == KVT_RDMA_KEY_WINDOW && !d->port->has_mw)
        return err_set(
            err, ERR_CONFIG,
            "rdma: %s has no type 2 memory windows: let each peer have a region of its own instead",
            d->port->device);
    d->on_demand = on_demand;
    d->uses_mw = !on_demand && d->port->has_mw && t->key != KVT_RDMA_KEY_REGION;
    return OK;
}

/* Tries locked memory first, because it is faster, unless paging was requested: with windows, then
 * without, then with paging if that is allowed. */
static enum status register_somehow(struct rdma_transport *t, struct rdma_device *d,
                                    struct err *err)
{
    TRY(choose_keys(d, err));
    enum status st = register_all(t, d, err);
    if (st == OK || !d->uses_mw || !may_page(d)) return st;
    forget_all(d);
    d->uses_mw = false;
    return register_all(t, d, err);
}

static enum status open_device(struct rdma_transport *t, struct rdma_device *d,
                               const struct rdma_port *p, struct err *err)
{
    d->t = t;
    d->port = p;
    TRY(rdma_port_open(p, &d->ctx, err));
    d->pd = ibv_alloc_pd(d->ctx);
    d->channel = ibv_create_comp_channel(d->ctx);
    if (!d->pd || !d->channel)
        return err_set(err, ERR_IO, "rdma: %s gives no protection domain or completion channel: %s",
                       p->device, strerror(errno));
    TRY(watch(t, d->channel->fd, d, err));
    TRY(watch(t, d->ctx->async_fd, d, err));
    return register_somehow(t, d, err);
}

static void close_device(struct rdma_device *d)
{
    forget_all(d);
    if (d->channel) ibv_destroy_comp_channel(d->channel);
    if (d->pd) ibv_dealloc_pd(d->pd);
    if (d->ctx) ibv_close_device(d->ctx);
}

static struct rdma_device *device_of(struct rdma_transport *t, const char *name)
{
    for (uint32_t i = 0; i < t->n_devices; i++)
        if (strcmp(t->devices[i].port->device, name) == 0) return &t->devices[i];
    return NULL;
}

enum status rdma_memory_open(struct rdma_transport *t, struct err *err)
{
    for (size_t i = 0; i < t->ports.n; i++) {
        struct rdma_port *p = &t->ports.ports[i];
        struct rdma_device *d = device_of(t, p->device);
        if (!d) {
            d = &t->devices[t->n_devices++];
            TRY(open_device(t, d, p, err));
        }
        t->local_ports[i] = (struct rdma_local_port){ .device = d, .port = p, .active = p->active };
    }
    return OK;
}

void rdma_memory_close(struct rdma_transport *t)
{
    for (uint32_t i = 0; i < t->n_devices; i++) close_device(&t->devices[i]);
}

/* ---- keys ---- */

static int remote_access(bool reads)
{
    return IBV_ACCESS_REMOTE_WRITE | (reads ? IBV_ACCESS_REMOTE_READ : 0);
}

enum status rdma_memory_domain(struct rdma_rail *r, bool reads, struct ibv_pd **out)
{
    struct rdma_device *d = rdma_rail_local_port(r)->device;
    if (!r->incoming || d->uses_mw) {
        *out = d->pd;
        return OK;
    }
    const struct dev_mem *pool = d->t->env->mem;
    struct err err = { 0 };
    r->pd = ibv_alloc_pd(d->ctx);
    enum status st = r->pd ? register_region(d, r->pd, "KV pool", pool->ptr, pool->bytes,
                                             IBV_ACCESS_LOCAL_WRITE | remote_access(reads),
                                             &r->region, &err)
                           : ERR_IO;
    if (st != OK) {
        snprintf(r->why, sizeof r->why, "%.*s", RDMA_REASON_MAX,
                 r->pd ? err.text : "no protection domain for another connection");
        rdma_memory_deregister(r);
        return st;
    }
    *out = r->pd;
    return OK;
}

enum status rdma_memory_grant(struct rdma_qp *q, bool reads)
{
    struct rdma_device *d = rdma_rail_local_port(q->rail)->device;
    if (q->rail->region) {
        q->key = q->rail->region->rkey;
        return OK;
    }
    const struct dev_mem *pool = d->t->env->mem;
    q->mw = ibv_alloc_mw(d->pd, IBV_MW_TYPE_2);
    if (!q->mw) return ERR_IO;
    q->key = ibv_inc_rkey(q->mw->rkey); /* the owner chooses the low byte of a type 2 key, which
                                             * must change with each bind */
    struct ibv_send_wr wr = { .wr_id = rdma_wr_id(RDMA_WR_BIND, 1, 0, false),
                              .opcode = IBV_WR_BIND_MW,
                              .send_flags = IBV_SEND_SIGNALED, },
                       *bad;
    wr.bind_mw.mw = q->mw;
    wr.bind_mw.rkey = q->key;
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
        .mr = d->pool,
        .addr = (uintptr_t)pool->ptr,
        .length = pool->bytes,
        .mw_access_flags = (unsigned)remote_access(reads),
    };
    return ibv_post_send(q->qp, &wr, &bad) == 0 ? ERR_BUSY : ERR_IO;
}

void rdma_memory_revoke(struct rdma_qp *q)
{
    if (q->mw) ibv_dealloc_mw(q->mw);
    q->mw = NULL;
    q->key = 0;
}

void rdma_memory_deregister(struct rdma_rail *r)
{
    if (r->region) ibv_dereg_mr(r->region);
    if (r->pd) ibv_dealloc_pd(r->pd);
    r->region = NULL;
    r->pd = NULL;
}
