/* disk_io_threads.c - reads and writes by pread and pwrite, each on one of a few threads.
 *
 * Thread: the owner's; `work` runs on the others. */
#include <errno.h>
#include <unistd.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mailbox.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"
#include "shared/kv/tier/disk/disk_io.h"

enum { THREADS_MAX = 8 };

struct disk_io_threads {
    struct disk_io base;
    /* One mailbox for each thread: only its owner takes from a mailbox. */
    struct mailbox *given[THREADS_MAX], *over; /* of struct disk_io_op * */
    pthread_t threads[THREADS_MAX];
    uint32_t n_threads, next;
};

struct disk_io_thread {
    struct disk_io_threads *io;
    uint32_t i;
};

static struct disk_io_threads *threads_of(struct disk_io *io)
{
    return (struct disk_io_threads *)io;
}

static void run(struct disk_io_op *op)
{
    while (op->moved < op->bytes && op->error == 0) {
        char *buf = (char *)op->buf + op->moved;
        const size_t n = op->bytes - op->moved;
        const off_t at = (off_t)(op->offset + op->moved);
        const ssize_t rc = op->writes ? pwrite(op->fd, buf, n, at) : pread(op->fd, buf, n, at);
        if (rc > 0) op->moved += (size_t)rc;
        else if (rc == 0) op->error = EIO; /* the file ends before that */
        else if (errno != EINTR) op->error = errno;
    }
}

static void *work(void *arg)
{
    struct disk_io_thread *t = arg;
    struct mailbox *given = t->io->given[t->i], *over = t->io->over;
    struct disk_io_op *op;
    mem_free(t);
    thread_become(THREAD_ANY, "kv-disk-io");
    while (mailbox_wait(given, -1)) {
        if (!mailbox_take(given, &op)) continue;
        run(op);
        enum status st = mailbox_post(over, &op);
        ASSERT(st == OK); /* it has room for all */
    }
    return NULL;
}

static bool threads_free(struct disk_io *io, uint32_t ms);

static enum status threads_create(uint32_t depth, struct disk_io **out, struct err *err)
{
    struct disk_io_threads *t = MEM_NEW(struct disk_io_threads);
    const uint32_t n = depth < THREADS_MAX ? depth : THREADS_MAX;
    t->base.ops = &disk_io_threads_ops;
    t->over = mailbox_create(sizeof(struct disk_io_op *), depth, NULL, NULL);
    for (; t->n_threads < n; t->n_threads++) {
        struct disk_io_thread *one = MEM_NEW(struct disk_io_thread);
        *one = (struct disk_io_thread){ t, t->n_threads };
        t->given[t->n_threads] = mailbox_create(sizeof(struct disk_io_op *), depth, NULL, NULL);
        if (thread_start(&t->threads[t->n_threads], work, one) == OK) continue;
        mailbox_free(t->given[t->n_threads]);
        mem_free(one);
        threads_free(&t->base, 0);
        return err_set(err, ERR_FULL, "a thread that reads and writes could not be started");
    }
    *out = &t->base;
    return OK;
}

static void threads_submit(struct disk_io *io, struct disk_io_op *op)
{
    struct disk_io_threads *t = threads_of(io);
    op->moved = 0;
    op->error = 0;
    io->n_running++;
    enum status st = mailbox_post(t->given[t->next++ % t->n_threads], &op);
    ASSERT(st == OK);
}

static struct disk_io_op *threads_wait(struct disk_io *io, uint32_t ms)
{
    struct disk_io_threads *t = threads_of(io);
    struct disk_io_op *op;
    if (io->n_running == 0 || !mailbox_wait(t->over, (int)ms)) return NULL;
    if (!mailbox_take(t->over, &op)) return NULL;
    io->n_running--;
    return op;
}

static bool threads_free(struct disk_io *io, uint32_t ms)
{
    struct disk_io_threads *t = threads_of(io);
    const uint64_t end = clock_ms() + ms;
    for (uint64_t now = clock_ms(); io->n_running > 0; now = clock_ms())
        if (now >= end || (!threads_wait(io, (uint32_t)(end - now)) && clock_ms() >= end)) break;
    const bool all_over = io->n_running == 0;
    for (uint32_t i = 0; i < t->n_threads; i++) {
        mailbox_close(t->given[i]);
        if (!all_over) {
            pthread_detach(t->threads[i]);
            continue;
        }
        pthread_join(t->threads[i], NULL);
        mailbox_free(t->given[i]);
    }
    if (!all_over) return false;
    mailbox_free(t->over);
    mem_free(t);
    return true;
}

const struct disk_io_ops disk_io_threads_ops = {
    .name = "threads",
    .create = threads_create,
    .free = threads_free,
    .submit = threads_submit,
    .wait = threads_wait,
};
