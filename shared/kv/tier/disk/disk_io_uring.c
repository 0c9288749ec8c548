/* disk_io_uring.c - reads and writes by io_uring: the kernel runs them side by side without a
 * thread for each.
 *
 * A kernel may lack it, or refuse it to processes (kernel.io_uring_disabled, seccomp in
 * containers). Thread: the owner's. */
#include <errno.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/kv/tier/disk/disk_io.h"

#if BATON_HAVE_URING
#include <liburing.h>

enum { MS_PER_S = 1000, NS_PER_MS = 1000000 };

struct disk_io_uring {
    struct disk_io base;
    struct io_uring ring;
};

static struct disk_io_uring *uring_of(struct disk_io *io) { return (struct disk_io_uring *)io; }

static enum status uring_create(uint32_t depth, struct disk_io **out, struct err *err)
{
    struct disk_io_uring *u = MEM_NEW(struct disk_io_uring);
    const int rc = io_uring_queue_init(depth, &u->ring, 0);
    if (rc < 0) {
        mem_free(u);
        return err_set(err, ERR_UNSUPPORTED, "the kernel refuses io_uring: %s", strerror(-rc));
    }
    u->base.ops = &disk_io_uring_ops;
    *out = &u->base;
    return OK;
}

/* What is left of an operation. */
static void submit_rest(struct disk_io_uring *u, struct disk_io_op *op)
{
    struct io_uring_sqe *e = io_uring_get_sqe(&u->ring);
    ASSERT(e != NULL); /* no more than `depth` run, and each is submitted at once */
    char *buf = (char *)op->buf + op->moved;
    const unsigned n = (unsigned)(op->bytes - op->moved);
    if (op->writes) io_uring_prep_write(e, op->fd, buf, n, op->offset + op->moved);
    else io_uring_prep_read(e, op->fd, buf, n, op->offset + op->moved);
    io_uring_sqe_set_data(e, op);
    int rc;
    do rc = io_uring_submit(&u->ring);
    while (rc == -EINTR || rc == -EAGAIN || rc == -EBUSY);
    ASSERT(rc == 1);
}

static void uring_submit(struct disk_io *io, struct disk_io_op *op)
{
    op->moved = 0;
    op->error = 0;
    io->n_running++;
    submit_rest(uring_of(io), op);
}

/* Is it over? */
static bool advance(struct disk_io_uring *u, struct disk_io_op *op, int res)
{
    if (res > 0) op->moved += (size_t)res;
    if (res < 0 && res != -EINTR && res != -EAGAIN) op->error = -res;
    else if (res == 0) op->error = EIO; /* the file ends before that */
    else if (op->moved < op->bytes) {
        submit_rest(u, op);
        return false;
    }
    return true;
}

static struct disk_io_op *uring_wait(struct disk_io *io, uint32_t ms)
{
    struct disk_io_uring *u = uring_of(io);
    struct __kernel_timespec t = { ms / MS_PER_S, (long long)(ms % MS_PER_S) * NS_PER_MS };
    struct io_uring_cqe *c;
    while (io->n_running > 0) {
        const int rc = io_uring_wait_cqe_timeout(&u->ring, &c, &t);
        if (rc == -EINTR) continue;
        if (rc < 0) return NULL;
        struct disk_io_op *op = io_uring_cqe_get_data(c);
        const int res = c->res;
        io_uring_cqe_seen(&u->ring, c);
        if (!advance(u, op, res)) continue;
        io->n_running--;
        return op;
    }
    return NULL;
}

static bool uring_free(struct disk_io *io, uint32_t ms)
{
    const uint64_t end = clock_ms() + ms;
    for (uint64_t now = clock_ms(); io->n_running > 0; now = clock_ms())
        if (now >= end || (!uring_wait(io, (uint32_t)(end - now)) && clock_ms() >= end))
            return false;
    io_uring_queue_exit(&uring_of(io)->ring);
    mem_free(io);
    return true;
}
#else
static enum status uring_create(uint32_t depth, struct disk_io **out, struct err *err)
{
    (void)depth, (void)out;
    return err_set(err, ERR_UNSUPPORTED, "this build has no liburing");
}
static bool uring_free(struct disk_io *io, uint32_t ms)
{
    (void)io, (void)ms;
    return true;
}
static void uring_submit(struct disk_io *io, struct disk_io_op *op) { (void)io, (void)op; }
static struct disk_io_op *uring_wait(struct disk_io *io, uint32_t ms)
{
    (void)io, (void)ms;
    return NULL;
}
#endif

const struct disk_io_ops disk_io_uring_ops = {
    .name = "uring",
    .create = uring_create,
    .free = uring_free,
    .submit = uring_submit,
    .wait = uring_wait,
};
