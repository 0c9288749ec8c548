/* disk_folder.h - the folder of the disk tier: its segments, who may write to which, and how many
 * there may be. Several processes of a host share it.
 *
 *     lock                 locked while somebody looks for a segment to write to
 *     node-<id>            locked by each process as long as it lives: how many share the folder
 *     segment-<id>.kv      locked by the process that writes to it; all read it
 *     new-<id>             a segment that is being made
 *
 * Locks are flock's: they end with their process. Then its segments are anybody's to take over with
 * what is in them, and of other layouts are removed when room is needed. Where all room is taken
 * each process gives up segments beyond its share while another has fewer than that. Files are made
 * with their full size, so that a full disk is noticed then and not later. A segment is a struct
 * that outlives its place in the folder: readers may still have it open.
 * Thread: one at a time, of low priority: calls wait for the file system. */
#ifndef BATON_KV_TIER_DISK_DISK_FOLDER_H
#define BATON_KV_TIER_DISK_DISK_FOLDER_H

#include <stdatomic.h>

#include "shared/base/list.h"
#include "shared/kv/tier/disk/disk_format.h"

struct disk_folder;

struct disk_segment {
    struct list link; /* in the folder */
    char name[64];
    struct disk_superblock super;
    uint64_t data_begin;
    int fd;        /* headers, by the page cache; has the lock of one that is written here */
    int direct_fd; /* slots, past the page cache where the file system can; else `fd` */
    bool is_own;
    uint64_t changed;         /* when its headers were read: the file's time of change, in ns */
    _Atomic uint32_t n_users; /* each releases it once (disk_segment_release) */
};

/* Slots of a segment, as its headers tell. */
struct disk_listing {
    struct disk_segment *segment; /* one use of it */
    bool is_gone;                 /* it is in the folder no more; no headers */
    uint32_t n;
    struct disk_listed {
        uint32_t slot;
        struct disk_header header;
    } slots[];
};

struct disk_folder_options {
    const char *path;
    uint64_t bytes;        /* of all segments of the folder together */
    struct kv_layout slot; /* kv_slot_layout */
};

/* Makes the folder if need be. ERR_CONFIG says why it cannot be used: not a folder, not writable,
 * less room than one slot takes. */
enum status disk_folder_open(const struct disk_folder_options *o, struct disk_folder **out,
                             struct err *err) MUST_CHECK;
/* Could a folder be made or used there? Makes nothing, so that it can be asked before a model is
 * loaded. ERR_CONFIG as above; where no folder is it looks at the nearest one above. */
enum status disk_folder_check(const char *path, struct err *err) MUST_CHECK;
/* Segments in use elsewhere stay valid. */
void disk_folder_close(struct disk_folder *f);

/* A segment to write to: a new one, or one that nobody writes to any more, with what is in it.
 * ERR_FULL: all room is others'. ERR_IO: the file system refused, err says why. The caller frees
 * the listing (mem_free) and has a use of its segment. */
enum status disk_folder_grow(struct disk_folder *f, struct disk_listing **out,
                             struct err *err) MUST_CHECK;
/* Should this process give a segment up, since others have less than their share? */
bool disk_folder_has_too_many(struct disk_folder *f);
/* Gives up writing to an own segment. */
void disk_folder_give_up(struct disk_folder *f, struct disk_segment *s);
/* The next segment that others write to, or nobody, and that is new or changed since it was listed,
 * or one, own or not, that somebody has removed; NULL: none now. Call it until then, every few
 * seconds. */
struct disk_listing *disk_folder_scan(struct disk_folder *f);

/* An own slot's header: emptied before its bytes are written, set after that. */
enum status disk_segment_clear(const struct disk_segment *s, uint32_t slot) MUST_CHECK;
enum status disk_segment_set(const struct disk_segment *s, uint32_t slot,
                             const struct disk_header *h) MUST_CHECK;
/* Any segment's slot: ERR_NOT_FOUND, ERR_FORMAT, ERR_IO. */
enum status disk_segment_read_header(const struct disk_segment *s, uint32_t slot,
                                     struct disk_header *out) MUST_CHECK;
static inline uint64_t disk_segment_offset(const struct disk_segment *s, uint32_t slot)
{
    return s->data_begin + slot * s->super.slot_bytes;
}
void disk_segment_use(struct disk_segment *s);
void disk_segment_release(struct disk_segment *s);

#endif
