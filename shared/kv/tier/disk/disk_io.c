/* disk_io.c - which implementation is used. Thread: any. */
#include "shared/kv/tier/disk/disk_io.h"

#include "shared/base/log.h"

enum status disk_io_create(uint32_t depth, struct disk_io **out, struct err *err)
{
    struct err why = { 0 };
    if (disk_io_uring_ops.create(depth, out, &why) == OK) return OK;
    log_info("io_uring is not used", "why=\"%s\" instead=threads", why.text);
    return disk_io_threads_ops.create(depth, out, err);
}
