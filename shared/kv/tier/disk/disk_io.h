/* disk_io.h - reads and writes of files that run side by side: an ops table, uring (liburing) and
 * threads (pread and pwrite).
 *
 *   submit .. submit ─▶ wait: one that is over ─▶ wait ..
 *
 * An operation is over when all its bytes were moved, or with an error; fewer bytes than asked for
 * are one. Its buffer stays until then.
 * Thread: its owner's, one at a time. */
#ifndef BATON_KV_TIER_DISK_DISK_IO_H
#define BATON_KV_TIER_DISK_DISK_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shared/base/err.h"

struct disk_io;

struct disk_io_op {
    int fd;
    bool writes;
    void *buf; /* of an O_DIRECT file at a multiple of KV_SLOT_ALIGN, as are offset and bytes */
    size_t bytes;
    uint64_t offset;
    int error;    /* once it is over: an errno, 0: none */
    size_t moved; /* for the implementation */
};

struct disk_io_ops {
    const char *name;
    /* ERR_UNSUPPORTED: not in this build, or the kernel refuses it. */
    enum status (*create)(uint32_t depth, struct disk_io **out, struct err *err);
    /* Operations that run are waited for, `ms` at most. False: some still run, so that they, their
     * buffers and what they need must stay: nothing is freed. */
    bool (*free)(struct disk_io *io, uint32_t ms);
    /* At most `depth` run. The operation stays until it is over. */
    void (*submit)(struct disk_io *io, struct disk_io_op *op);
    /* The next one that is over; NULL: none within `ms`. */
    struct disk_io_op *(*wait)(struct disk_io *io, uint32_t ms);
};

struct disk_io {
    const struct disk_io_ops *ops; /* first member of every implementation's struct */
    uint32_t n_running;
};

extern const struct disk_io_ops disk_io_uring_ops, disk_io_threads_ops;

/* The best that works here. */
enum status disk_io_create(uint32_t depth, struct disk_io **out, struct err *err) MUST_CHECK;

#endif
