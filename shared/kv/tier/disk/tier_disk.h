/* tier_disk.h - the tier disk: slots in files of a folder, which the nodes of a host share and that
 * outlive them (disk_folder.h, disk_format.h).
 *
 *   kv-to-disk    copies blocks of the pool to staging memory          low priority
 *   kv-disk       writes slots, makes and looks for segments           low priority
 *   kv-from-disk  reads slots ahead, compares, copies to the pool
 *
 * What the folder holds is found out in the background: a node serves before that. A block that
 * another process has stored is read where it lies, and not written again. An error of the file
 * system switches the tier off for TIER_DISK_OFF_MS: it finds and takes nothing then, and is tried
 * again. A segment that cannot be made, since the disk is full, leaves those that there are.
 * Thread: engine. */
#ifndef BATON_KV_TIER_DISK_TIER_DISK_H
#define BATON_KV_TIER_DISK_TIER_DISK_H

#include "shared/kv/tier/disk/disk_io.h"
#include "shared/kv/tier/kv_tier.h"

enum { TIER_DISK_OFF_MS = 30000, TIER_DISK_SCAN_MS = 2000 };

struct tier_disk_options {
    const char *folder;
    uint64_t bytes; /* of the folder, whoever writes to it */
    /* For tests: 0 and NULL. */
    uint32_t off_ms, scan_ms;
    const struct disk_io_ops *io; /* in place of the best one */
};

/* ERR_CONFIG: the folder cannot be used, or has no room for a block. ERR_NOMEM. */
enum status kv_tier_disk_create(const struct kv_tier_options *o, const struct tier_disk_options *d,
                                struct kv_tier **out, struct err *err) MUST_CHECK;

#endif
