/* ipc.c - transport ipc: a writer with a ticket copies straight into the pool of another process on
 * the same host.
 *
 *   pool in shared memory                 WELCOME carries the memfd (SCM_RIGHTS), which is mapped
 *   pool in private memory, tuning.cma    WELCOME carries the pool's address: process_vm_writev
 *   pool in GPU memory                    a descriptor carries a handle (ipc_device.c)
 *
 * The receiver chooses. The fence is local.h's: BYE after detaching from the pool, or the end of
 * the writer's process. LIMIT: the mapping covers the whole pool, so a bug in the writer could
 * write outside its grants; the checksums of those pages would tell. Only processes with a ticket
 * get there; docs/security.md says who is trusted.
 * Thread: transfer. */
#include "kvtransfer/local/ipc.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvtransfer/transports.h"

static void offer(const struct local_transport *t, uint64_t *value, int *fd)
{
    const struct dev_mem *mem = t->env->mem;
    bool by_address = mem->kind == DEV_MEM_HOST && (mem->fd < 0 || t->env->tuning.cma == KVT_ON);
    *value = by_address ? (uintptr_t)mem->ptr : mem->bytes;
    *fd = mem->kind == DEV_MEM_CUDA ? t->offer_fd : by_address ? -1 : mem->fd;
}

/* Why a descriptor is refused, or NULL: it must be a memfd of the promised size that its owner
 * cannot shrink under the mapping, which would be SIGBUS here. */
static const char *refuse_reason(int fd, uint64_t bytes, size_t need)
{
    struct stat s;
    if (ipc_is_device_offer(fd))
        return "the receiver's pool is in GPU memory and this node's is not";
    if (bytes < need || bytes > (uint64_t)PTRDIFF_MAX)
        return "the receiver's memory is smaller than its layout says";
    if (fstat(fd, &s) != 0 || s.st_size < 0 || (uint64_t)s.st_size < bytes)
        return "the receiver's memory is smaller than it says";
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return "the receiver's memory is not sealed against shrinking";
    return NULL;
}

static void unmap(struct local_conn *c)
{
    munmap(c->remote, c->remote_bytes);
    c->remote = NULL;
}

static const struct local_copy_method MAPPED = {
    .name = "mapped",
    .begin = local_begin_jobs,
    .move = local_move_mapped,
    .wait = local_wait_none,
    .detach = unmap,
};

static enum status map(struct local_conn *c, uint64_t bytes, int fd, char *text, size_t text_max)
{
    const char *reason = refuse_reason(fd, bytes, c->need_bytes);
    void *p = reason ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!reason && p == MAP_FAILED) reason = strerror(errno);
    close(fd);
    if (reason) {
        snprintf(text, text_max, "%s", reason);
        return ERR_UNSUPPORTED;
    }
    /* A child could outlive the fence; if this fails, the pidfd still covers this process. */
    (void)madvise(p, bytes, MADV_DONTFORK);
    (void)madvise(p, bytes, MADV_HUGEPAGE); /* maps the owner's huge pages as huge pages */
    c->method = &MAPPED;
    c->remote = p;
    c->remote_bytes = bytes;
    return OK;
}

static enum status attach(struct local_conn *c, uint64_t value, int fd, char *text, size_t text_max)
{
    if (c->lt->env->mem->kind == DEV_MEM_CUDA) return ipc_device_attach(c, fd, text, text_max);
    return fd >= 0 ? map(c, value, fd, text, text_max) : ipc_cma_attach(c, value, text, text_max);
}

static const struct local_address_method IPC = {
    .prefix = "baton-ipc-",
    .offer = offer,
    .attach = attach,
};

static enum status ipc_open(const struct kvt_env *env, struct kvt_transport **out, struct err *err)
{
    int offer_fd = -1;
    if (env->mem->kind == DEV_MEM_CUDA) TRY(ipc_device_offer(env, &offer_fd, err));
    if (env->mem->kind == DEV_MEM_HOST && env->mem->fd < 0 && env->tuning.cma == KVT_OFF)
        return err_set(err, ERR_CONFIG,
                       "ipc needs a KV pool in shared memory or BATON_IPC_CMA not off, and this "
                       "pool is private");
    enum status st = local_open(env, &kvt_ipc_ops, &IPC, out, err);
    if (st == OK) ((struct local_transport *)*out)->offer_fd = offer_fd;
    else if (offer_fd >= 0) close(offer_fd);
    return st;
}

const struct kvt_transport_ops kvt_ipc_ops = {
    .name = "ipc", .caps = KVT_CAP_SAME_HOST | KVT_CAP_DEVICE_MEM, .open = ipc_open, LOCAL_OPS
};
