/* tier_disk.c - the disk tier's life, its ops, and what it does about errors. Thread: engine;
 * disk_await: the worker's. */
#include "shared/kv/tier/disk/tier_disk.h"

#include "shared/base/arith.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/kv/tier/disk/tier_disk_internal.h"

enum {
    STAGING_BYTES = 64 << 20, /* for each direction, at least two slots */
    GETS_MAX = 4096,
    WRITES_MAX = 4 * DISK_STAGES_MAX,
    AWAIT_MS = 100,
    STUCK_MS = 3000
};
static const double EXPECTED_BYTES_PER_S = 500e6, EXPECTED_FIRST_S = 500e-6;

struct disk_io_op *disk_await(struct kv_tier_disk *t, struct tier_worker *w, struct disk_io *io)
{
    struct disk_io_op *op;
    uint32_t stopping_ms = 0;
    while (!(op = io->ops->wait(io, AWAIT_MS))) {
        if (!tier_worker_is_stopping(w)) continue;
        stopping_ms += AWAIT_MS;
        if (stopping_ms < STUCK_MS) continue;
        t->is_stuck = true;
        return NULL;
    }
    return op;
}

void disk_switch_off(struct kv_tier_disk *t, const char *why)
{
    t->stats.n_errors++;
    if (t->is_off) return;
    t->is_off = true;
    t->t_on_ms = clock_ms() + t->o.off_ms;
    log_error("kv tier switched off", "tier=disk folder=%s why=\"%s\" again_s=%.0f", t->folder_path,
              why, t->o.off_ms * 1e-3);
}

/* ---- ops ---- */

static bool disk_has(struct kv_tier *tier, const struct hash128 *key)
{
    struct kv_tier_disk *t = disk_of(tier);
    return !t->is_off && (tier_index_find(t->own.index, *key) >= 0 ||
                          tier_index_find(t->others.index, *key) >= 0);
}

static void disk_drop(struct kv_tier *tier, const struct hash128 *key)
{
    struct kv_tier_disk *t = disk_of(tier);
    const int32_t own = tier_index_find(t->own.index, *key);
    if (own >= 0) disk_clear_slot(t, &t->own.places[own]);
    tier_index_drop(t->own.index, *key);
    tier_index_drop(t->others.index, *key);
}

static void disk_touch(struct kv_tier *tier, const struct hash128 *key, uint64_t now_ns)
{
    struct kv_tier_disk *t = disk_of(tier);
    const int32_t own = tier_index_find(t->own.index, *key);
    if (own >= 0) tier_index_touch(t->own.index, (uint32_t)own, now_ns);
}

static bool disk_poll(struct kv_tier *tier, struct kv_tier_done *out)
{
    struct kv_tier_disk *t = disk_of(tier);
    return disk_take_get(t, out) || disk_take_put(t, out);
}

static void disk_tick(struct kv_tier *tier, uint64_t now_ms)
{
    struct kv_tier_disk *t = disk_of(tier);
    if (t->is_off && now_ms >= t->t_on_ms) {
        t->is_off = false;
        log_info("kv tier tried again", "tier=disk folder=%s", t->folder_path);
    }
    if (t->is_full && now_ms >= t->t_grow_ms) t->is_full = false;
    if (!t->is_off && now_ms >= t->t_scan_ms) disk_begin_task(t, DISK_SCAN);
}

static void disk_stats(const struct kv_tier *tier, struct kv_tier_stats *out)
{
    const struct kv_tier_disk *t = (const struct kv_tier_disk *)tier;
    *out = t->stats;
    out->n_slots = tier_index_n_slots(t->own.index);
    out->n_stored = tier_index_n_stored(t->own.index) + tier_index_n_stored(t->others.index);
    out->n_evicted = tier_index_n_evicted(t->own.index);
    out->slot_bytes = t->slot_bytes;
    out->is_off = t->is_off;
    out->is_looking = t->is_looking;
}

static bool disk_pin(struct kv_tier *t, const struct hash128 *key, struct kv_tier_pin *out)
{
    (void)t, (void)key, (void)out;
    return false;
}

static void disk_unpin(struct kv_tier *t, const struct kv_tier_pin *pin) { (void)t, (void)pin; }

/* ---- life ---- */

static void stop_workers(struct kv_tier_disk *t)
{
    struct kv_tier_done d;
    if (t->copier) tier_worker_stop(t->copier);
    if (t->writer) tier_worker_stop(t->writer);
    if (t->reader) tier_worker_stop(t->reader);
    if (t->is_stuck) return;
    while (t->reader && disk_take_get(t, &d)) {}
    /* What was copied is not written any more. */
    for (struct tier_job *j; t->copier && (j = tier_worker_take(t->copier));) mem_free(j);
    for (struct tier_job *j; t->writer && (j = tier_worker_take(t->writer));) {
        if (disk_is_task(j)) disk_task_free((struct disk_task *)j);
        else mem_free(j);
    }
}

static void free_io(struct disk_io *io)
{
    if (!io) return;
    const bool is_freed = io->ops->free(io, STUCK_MS);
    ASSERT(is_freed); /* its worker has waited for all */
}

static void disk_free(struct kv_tier *tier)
{
    struct kv_tier_disk *t = disk_of(tier);
    stop_workers(t);
    if (t->is_stuck) { /* the system may still read and write its memory */
        log_warn("kv tier left behind", "tier=disk folder=%s why=\"an operation does not end\"",
                 t->folder_path);
        return;
    }
    tier_worker_free(t->copier);
    tier_worker_free(t->writer);
    tier_worker_free(t->reader);
    free_io(t->write_io);
    free_io(t->read_io);
    disk_slots_release(&t->own);
    disk_slots_release(&t->others);
    disk_folder_close(t->folder);
    block_copy_free(t->put_copy);
    block_copy_free(t->get_copy);
    if (t->put_stages.mem.ptr) device_mem_free(t->device, &t->put_stages.mem);
    if (t->get_stages.mem.ptr) device_mem_free(t->device, &t->get_stages.mem);
    map_release(&t->gets);
    mem_free(t->folder_path);
    mem_free(t);
}

static const struct kv_tier_ops DISK_OPS = {
    .name = "disk",
    .kind = KV_TIER_DISK,
    .free = disk_free,
    .has = disk_has,
    .put = disk_put,
    .get = disk_get,
    .cancel = disk_cancel,
    .drop = disk_drop,
    .touch = disk_touch,
    .poll = disk_poll,
    .tick = disk_tick,
    .stats = disk_stats,
    .pin = disk_pin,
    .unpin = disk_unpin,
};

enum status disk_stages_create(struct kv_tier_disk *t, struct disk_stages *out, struct err *err)
{
    const size_t n = STAGING_BYTES / t->slot_bytes;
    out->n = (uint32_t)min_size(max_size(n, 2), DISK_STAGES_MAX);
    return device_mem_alloc(t->device, out->n * t->slot_bytes, DEVICE_MEM_HOST, &out->mem, err);
}

static enum status open_io(struct kv_tier_disk *t, struct disk_io **out, struct err *err)
{
    if (t->o.io) return t->o.io->create(DISK_STAGES_MAX, out, err);
    return disk_io_create(DISK_STAGES_MAX, out, err);
}

static enum status start_workers(struct kv_tier_disk *t, const struct kv_tier_options *o,
                                 struct err *err)
{
    struct tier_worker_options w = { .name = "kv-to-disk",
                                     .is_low = true,
                                     .max_jobs = DISK_STAGES_MAX,
                                     .wake = o->wake,
                                     .wake_arg = o->arg,
                                     .arg = t };
    TRY(tier_worker_create(&w, &t->copier, err));
    w.name = "kv-disk";
    w.max_jobs = WRITES_MAX;
    TRY(tier_worker_create(&w, &t->writer, err));
    w.name = "kv-from-disk";
    w.is_low = false;
    w.max_jobs = GETS_MAX;
    return tier_worker_create(&w, &t->reader, err);
}

static enum status prepare(struct kv_tier_disk *t, const struct kv_tier_options *o, struct err *err)
{
    const struct block_copy_options c = { o->layout, o->slot_dtype, o->device, o->pool };
    TRY(kv_slot_layout(&o->layout, o->slot_dtype, &t->slot, err));
    t->slot_bytes = kv_slot_bytes(&t->slot);
    t->layout_hash = kv_layout_hash(&t->slot);
    const struct disk_folder_options f = { .path = t->folder_path,
                                           .bytes = t->o.bytes,
                                           .slot = t->slot };
    TRY(disk_folder_open(&f, &t->folder, err));
    TRY(block_copy_create(&c, &t->put_copy, err));
    TRY(block_copy_create(&c, &t->get_copy, err));
    TRY(disk_stages_create(t, &t->put_stages, err));
    TRY(disk_stages_create(t, &t->get_stages, err));
    TRY(open_io(t, &t->write_io, err));
    TRY(open_io(t, &t->read_io, err));
    return start_workers(t, o, err);
}

/* Only evictions: the blocks of a segment that is given up are found again, as another's. */
static void on_evicted(void *arg, const struct hash128 *key)
{
    const struct kv_tier_disk *t = arg;
    if (t->forgot) t->forgot(t->forgot_arg, KV_TIER_DISK, key);
}

enum status kv_tier_disk_create(const struct kv_tier_options *o, const struct tier_disk_options *d,
                                struct kv_tier **out, struct err *err)
{
    struct kv_tier_disk *t = MEM_NEW(struct kv_tier_disk);
    t->base.ops = &DISK_OPS;
    t->o = *d;
    t->o.folder = NULL;
    if (!t->o.off_ms) t->o.off_ms = TIER_DISK_OFF_MS;
    if (!t->o.scan_ms) t->o.scan_ms = TIER_DISK_SCAN_MS;
    t->folder_path = mem_strdup(d->folder);
    t->device = o->device;
    disk_slots_init(&t->own);
    disk_slots_init(&t->others);
    t->forgot = o->forgot;
    t->forgot_arg = o->forgot_arg;
    t->is_looking = true;
    tier_index_on_evicted(t->own.index, on_evicted, t);
    random_bytes(&t->next_generation, sizeof t->next_generation);
    t->next_generation >>= 1; /* room to grow */
    const enum status st = prepare(t, o, err);
    if (st != OK) {
        disk_free(&t->base);
        return st;
    }
    tier_rate_init(&t->base.rate, EXPECTED_FIRST_S, EXPECTED_BYTES_PER_S, t->slot_bytes);
    log_info("kv tier", "tier=disk folder=%s gib=%.2f io=%s", t->folder_path,
             (double)t->o.bytes / (1 << 30), t->read_io->ops->name);
    *out = &t->base;
    return OK;
}
