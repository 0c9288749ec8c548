/* ipc.c - same host, two processes: the receiver's pool is a memfd that a writer with a ticket maps and writes straight into.
 *
 * The descriptor travels with WELCOME (SCM_RIGHTS), after the ticket was taken. The fence is local.h's: BYE after unmapping, or the end of
 * the writer's process.
 * LIMIT: the mapping covers the whole pool, so a writer's own bug could write outside its grants; checksums of the pages it hits would
 * tell. Only processes that hold a ticket get there. Thread: transfer. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvtransfer/local.h"
#include "kvtransfer/rows.h"

static void offer(const struct kvt_env *env, uint64_t *value, int *fd)
{
    *value = env->mem->bytes;
    *fd = env->mem->fd;
}

/* A memfd of the size that was promised, which its owner cannot shrink under the mapping (that would be SIGBUS here). */
static const char *refuse_reason(int fd, uint64_t bytes, size_t need)
{
    struct stat s;
    if (fd < 0) return "no memory came with the welcome";
    if (bytes < need || bytes > (uint64_t)PTRDIFF_MAX) return "the receiver's memory is smaller than its layout says";
    if (fstat(fd, &s) != 0 || s.st_size < 0 || (uint64_t)s.st_size < bytes) return "the receiver's memory is smaller than it says";
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) return "the receiver's memory is not sealed against shrinking";
    return NULL;
}

static enum status attach(struct local_conn *c, uint64_t bytes, int fd, char *text, size_t text_max)
{
    const char *reason = refuse_reason(fd, bytes, c->need_bytes);
    void *p = reason ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!reason && p == MAP_FAILED) reason = strerror(errno);
    if (fd >= 0) close(fd);
    if (reason) {
        snprintf(text, text_max, "%s", reason);
        return ERR_UNSUPPORTED;
    }
    (void)madvise(p, bytes, MADV_DONTFORK); /* a child could outlive the fence; without the advice the pidfd still covers this process */
    c->remote = p;
    c->remote_bytes = bytes;
    return OK;
}

static void detach(struct local_conn *c)
{
    munmap(c->remote, c->remote_bytes);
    c->remote = NULL;
}

static const struct local_kind IPC = { .prefix = "baton-ipc-", .offer = offer, .attach = attach, .detach = detach, .move = local_move_mapped };

static enum status ipc_open(const struct kvt_env *env, struct kvt_transport **out, struct err *err)
{
    if (env->mem->fd < 0) return err_set(err, ERR_CONFIG, "ipc needs a KV pool in shared memory, and this one is private");
    return local_open(env, &kvt_ipc_ops, &IPC, out, err);
}

const struct kvt_transport_ops kvt_ipc_ops = { .name = "ipc", .caps = KVT_CAP_SAME_HOST, .open = ipc_open, LOCAL_SLOTS };
