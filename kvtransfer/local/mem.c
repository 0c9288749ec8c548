/* mem.c - transport mem, the reference: two kvt in one process, with memcpy to the receiver's
 * address.
 *
 * WELCOME carries the address of the receiver's pool. That is safe because the kernel tells both
 * ends that the other is this same process. For tests; nodes of a cluster are separate processes.
 * Thread: transfer. */
#include "kvtransfer/local/local.h"
#include "kvtransfer/transports.h"

static void offer(const struct local_transport *t, uint64_t *value, int *fd)
{
    *value = (uintptr_t)t->env->mem->ptr;
    *fd = -1;
}

static void detach(struct local_conn *c) { c->remote = NULL; }

static const struct local_copy_method DIRECT = {
    .name = "direct",
    .begin = local_begin_jobs,
    .move = local_move_mapped,
    .wait = local_wait_none,
    .detach = detach,
};

static enum status attach(struct local_conn *c, uint64_t value, int fd, char *text, size_t text_max)
{
    (void)fd, (void)text, (void)text_max; /* this process's own WELCOME */
    c->method = &DIRECT;
    c->remote = (char *)(uintptr_t)value;
    c->remote_bytes = c->need_bytes;
    return OK;
}

static const struct local_address_method MEM = {
    .prefix = "baton-mem-", .same_process = true, .offer = offer, .attach = attach
};

static enum status mem_open(const struct kvt_env *env, struct kvt_transport **out, struct err *err)
{
    return local_open(env, &kvt_mem_ops, &MEM, out, err);
}

const struct kvt_transport_ops kvt_mem_ops = {
    .name = "mem", .caps = KVT_CAP_SAME_PROCESS | KVT_CAP_SAME_HOST, .open = mem_open, LOCAL_OPS
};
