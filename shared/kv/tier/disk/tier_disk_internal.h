/* tier_disk_internal.h - the disk tier itself, shared by its files.
 *
 *   tier_disk.c        life, the ops of kv_tier.h, errors
 *   tier_disk_write.c  puts: copies to staging memory, writes
 *   tier_disk_read.c   gets
 *   tier_disk_scan.c   segments: own ones, and what others write
 * Thread: engine, but for what its workers run. */
#ifndef BATON_KV_TIER_DISK_TIER_DISK_INTERNAL_H
#define BATON_KV_TIER_DISK_TIER_DISK_INTERNAL_H

#include "shared/base/map.h"
#include "shared/kv/tier/block_copy.h"
#include "shared/kv/tier/disk/disk_folder.h"
#include "shared/kv/tier/disk/tier_disk.h"
#include "shared/kv/tier/tier_worker.h"

enum { DISK_STAGES_MAX = 8, DISK_NO_STAGE = -1 };

/* Where a slot of an index lies. */
struct disk_place {
    struct disk_segment *segment; /* of `segments`, which has a use of it */
    uint32_t slot;                /* in the segment */
    uint64_t checksum, generation;
};

/* The slots of some segments. */
struct disk_slots {
    struct tier_index *index;
    struct disk_place *places; /* by slot of the index */
    uint32_t cap;
    struct disk_known *segments; /* [n_segments] */
    uint32_t n_segments, cap_segments;
    struct disk_hole *holes; /* [n_holes] */
    uint32_t n_holes, cap_holes;
};

/* Slots of the index that no segment has: a segment is listed again whenever it has changed, so
 * they must come back. */
struct disk_hole {
    uint32_t first, n;
};

struct disk_known {
    struct disk_segment *segment; /* a use of it */
    uint32_t first, n;            /* its slots in the index */
    bool is_gone;                 /* somebody has removed its file */
};

/* Slots of staging memory, one for each operation that runs. */
struct disk_stages {
    struct dev_mem mem;
    uint32_t n;
    bool is_used[DISK_STAGES_MAX];
};

/* A put, from the pool or from another tier's slot. */
struct disk_put {
    struct tier_job job;
    struct kv_tier_disk *t;
    int32_t block; /* -1: from another tier */
    int32_t stage; /* DISK_NO_STAGE: `bytes` are the other tier's */
    void *bytes;
    bool is_copied; /* `bytes` are complete, and written next */
    uint32_t own;   /* slot of the own index */
    struct disk_place place;
    struct tier_block of;
    uint64_t tag;
    struct disk_io_op op;
    enum status status;
    char why[128];
};

struct disk_source {
    struct disk_place place; /* with a use of its segment */
    struct hash128 key;
    int32_t block; /* destination */
    bool is_own;
    uint32_t in_index;
};

struct disk_get {
    struct tier_job job;
    uint64_t tag, begin_ns, ns;
    enum status status;
    char why[128];
    uint32_t n, n_good;
    struct disk_source from[];
};

enum disk_folder_task { DISK_GROW, DISK_SCAN, DISK_GIVE_UP, DISK_CLEAR };
enum { DISK_LISTINGS_MAX = 16 };

struct disk_task {
    struct tier_job job;
    enum disk_folder_task what;
    struct disk_segment *segment;                     /* GIVE_UP, CLEAR: a use of it */
    uint32_t slot;                                    /* CLEAR */
    struct disk_listing *listings[DISK_LISTINGS_MAX]; /* GROW: one; SCAN */
    uint32_t n_listings;
    bool has_too_many; /* SCAN */
    enum status status;
    struct err err;
};

struct kv_tier_disk {
    struct kv_tier base;
    struct tier_disk_options o; /* folder: not valid after creation */
    char *folder_path;
    struct kv_layout slot;
    size_t slot_bytes;
    uint64_t layout_hash;
    struct device *device;
    struct disk_slots own, others;
    struct block_copy *put_copy, *get_copy;
    struct disk_stages put_stages, get_stages;
    struct tier_worker *copier, *writer, *reader;
    struct disk_folder *folder;               /* the writer's */
    struct disk_io *write_io, *read_io;       /* of writer and reader */
    struct disk_io_op reads[DISK_STAGES_MAX]; /* the reader's, by stage */
    struct map gets;                          /* tag → struct disk_get, those not cancelled */
    uint32_t n_slot_writes;                   /* puts from another tier's slots that run */
    /* A worker ended with an operation that never came back: its memory stays for ever. */
    _Atomic bool is_stuck;
    uint64_t next_generation;
    bool is_off, folder_is_busy;
    bool is_looking;                        /* the folder was not looked through to its end yet */
    bool is_full;                           /* no segment could be had lately */
    uint64_t t_on_ms, t_grow_ms, t_scan_ms; /* when each is tried again */
    struct kv_tier_stats stats;
    void (*forgot)(void *arg, enum kv_tier_kind kind, const struct hash128 *key);
    void *forgot_arg;
};

static inline struct kv_tier_disk *disk_of(struct kv_tier *t) { return (struct kv_tier_disk *)t; }

/* tier_disk.c */
/* Waits for the next operation of a worker's that is over; NULL: the worker stops, and it has not
 * come for long (is_stuck). On the worker's thread. */
struct disk_io_op *disk_await(struct kv_tier_disk *t, struct tier_worker *w, struct disk_io *io);
/* An operation failed. */
void disk_switch_off(struct kv_tier_disk *t, const char *why);
enum status disk_stages_create(struct kv_tier_disk *t, struct disk_stages *out,
                               struct err *err) MUST_CHECK;
static inline void *disk_stage(const struct kv_tier_disk *t, const struct disk_stages *s,
                               uint32_t i)
{
    return (char *)s->mem.ptr + i * t->slot_bytes;
}

/* tier_disk_write.c */
enum status disk_put(struct kv_tier *t, const struct kv_tier_put *p);
bool disk_take_put(struct kv_tier_disk *t, struct kv_tier_done *out);

/* tier_disk_read.c */
enum status disk_get(struct kv_tier *t, const struct kv_tier_get *g);
void disk_cancel(struct kv_tier *t, uint64_t tag);
bool disk_take_get(struct kv_tier_disk *t, struct kv_tier_done *out);

/* tier_disk_scan.c */
void disk_begin_task(struct kv_tier_disk *t, enum disk_folder_task what);
void disk_clear_slot(struct kv_tier_disk *t, const struct disk_place *p);
void disk_end_task(struct kv_tier_disk *t, struct disk_task *k);
/* Is it one of those that the writer runs? */
bool disk_is_task(const struct tier_job *j);
void disk_slots_init(struct disk_slots *s);
void disk_slots_release(struct disk_slots *s);
/* Frees a task whose worker has stopped. */
void disk_task_free(struct disk_task *k);

#endif
