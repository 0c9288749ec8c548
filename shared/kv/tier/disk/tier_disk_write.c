/* tier_disk_write.c - puts: a block of the pool is copied to staging memory first, so that it is
 * held for that long only, then written; a slot of another tier is written from where it lies.
 *
 * Thread: engine; `copy` runs on the copier, `write_slot` on the writer. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/kv/tier/disk/tier_disk_internal.h"

enum { SLOT_WRITES_MAX = 4 };

static struct disk_put *put_of(struct tier_job *j) { return (struct disk_put *)j; }

/* ---- on the workers ---- */

static void copy(struct tier_job *j, struct tier_worker *w, void *arg)
{
    struct disk_put *p = put_of(j);
    struct kv_tier_disk *t = arg;
    (void)w;
    p->status = block_copy_save(t->put_copy, p->block, p->bytes);
    p->place.checksum = kv_slot_checksum(&t->slot, p->bytes);
    if (p->status != OK) snprintf(p->why, sizeof p->why, "the device failed");
}

static enum status failed(struct disk_put *p, const char *what, int code)
{
    snprintf(p->why, sizeof p->why, "%s: %s", what, strerror(code));
    return ERR_IO;
}

static enum status write_bytes(struct kv_tier_disk *t, struct disk_put *p, struct tier_worker *w)
{
    const struct disk_segment *s = p->place.segment;
    p->op = (struct disk_io_op){ .fd = s->direct_fd,
                                 .writes = true,
                                 .buf = p->bytes,
                                 .bytes = t->slot_bytes,
                                 .offset = disk_segment_offset(s, p->place.slot) };
    t->write_io->ops->submit(t->write_io, &p->op);
    if (!disk_await(t, w, t->write_io)) return ERR_CANCELED;
    return p->op.error ? failed(p, "a block cannot be written", p->op.error) : OK;
}

/* In this order: whoever reads meanwhile, or after the end of this process, finds an empty header
 * or one that fits the bytes. */
static void write_slot(struct tier_job *j, struct tier_worker *w, void *arg)
{
    struct disk_put *p = put_of(j);
    struct kv_tier_disk *t = arg;
    const struct disk_header h = { .block = p->of,
                                   .layout_hash = t->layout_hash,
                                   .used_bytes = kv_slot_used_bytes(&t->slot),
                                   .checksum = p->place.checksum,
                                   .generation = p->place.generation,
                                   .written_s = (uint64_t)clock_unix_s() };
    if (disk_segment_clear(p->place.segment, p->place.slot) != OK) {
        p->status = failed(p, "a header cannot be written", errno);
        return;
    }
    p->status = write_bytes(t, p, w);
    if (p->status == OK && disk_segment_set(p->place.segment, p->place.slot, &h) != OK)
        p->status = failed(p, "a header cannot be written", errno);
}

/* ---- accepting ---- */

/* Makes room before it evicts. -1: none now, *st says why. */
static int32_t take_slot(struct kv_tier_disk *t, const struct tier_block *of, enum status *st)
{
    const uint64_t now_ns = clock_ns();
    int32_t slot = tier_index_take(t->own.index, of, false, now_ns);
    if (slot >= 0) return slot;
    if (!t->is_full && clock_ms() >= t->t_grow_ms) {
        disk_begin_task(t, DISK_GROW);
        *st = ERR_BUSY;
        return -1;
    }
    slot = tier_index_take(t->own.index, of, true, now_ns);
    *st = slot < 0 ? ERR_FULL : OK;
    return slot;
}

static int32_t take_stage(struct disk_stages *s)
{
    for (uint32_t i = 0; i < s->n; i++) {
        if (s->is_used[i]) continue;
        s->is_used[i] = true;
        return (int32_t)i;
    }
    return DISK_NO_STAGE;
}

static bool has_room(const struct kv_tier_disk *t, const struct kv_tier_put *p)
{
    if (p->slot) return t->n_slot_writes < SLOT_WRITES_MAX && tier_worker_has_room(t->writer);
    for (uint32_t i = 0; i < t->put_stages.n; i++)
        if (!t->put_stages.is_used[i]) return true;
    return false;
}

static void begin(struct kv_tier_disk *t, const struct kv_tier_put *p, uint32_t own)
{
    struct disk_put *j = MEM_NEW(struct disk_put);
    *j = (struct disk_put){ .job.run = p->slot ? write_slot : copy,
                            .block = p->slot ? -1 : p->block,
                            .stage = p->slot ? DISK_NO_STAGE : take_stage(&t->put_stages),
                            .own = own,
                            .place = t->own.places[own],
                            .of = p->of,
                            .tag = p->tag };
    j->bytes = p->slot ? (void *)(uintptr_t)p->slot
                       : disk_stage(t, &t->put_stages, (uint32_t)j->stage);
    j->place.checksum = p->checksum;
    j->place.generation = ++t->next_generation;
    t->n_slot_writes += p->slot != NULL;
    const enum status st = tier_worker_give(p->slot ? t->writer : t->copier, &j->job);
    ASSERT(st == OK);
}

enum status disk_put(struct kv_tier *tier, const struct kv_tier_put *p)
{
    struct kv_tier_disk *t = disk_of(tier);
    enum status st = OK;
    if (t->is_off) return ERR_UNAVAILABLE;
    if (tier_index_has(t->own.index, p->of.key) || tier_index_has(t->others.index, p->of.key))
        return ERR_CONFLICT;
    if (!has_room(t, p)) return ERR_BUSY;
    const int32_t own = take_slot(t, &p->of, &st);
    if (own < 0) return st;
    begin(t, p, (uint32_t)own);
    return OK;
}

/* ---- reports ---- */

static void end(struct kv_tier_disk *t, struct disk_put *p)
{
    if (p->status == OK) {
        t->own.places[p->own] = p->place;
        if (tier_index_commit(t->own.index, p->own)) t->stats.n_puts++;
        else disk_clear_slot(t, &p->place);
    } else {
        tier_index_abandon(t->own.index, p->own);
        if (p->status != ERR_CANCELED) disk_switch_off(t, p->why);
    }
    if (p->stage != DISK_NO_STAGE) t->put_stages.is_used[p->stage] = false;
    else t->n_slot_writes--;
    mem_free(p);
}

static struct kv_tier_done report(const struct disk_put *p)
{
    return (struct kv_tier_done){ .kind = KV_TIER_PUT, .tag = p->tag, .status = p->status };
}

/* A copy is complete: its block may go, and it is written. */
static bool take_copied(struct kv_tier_disk *t, struct kv_tier_done *out)
{
    struct tier_job *j = tier_worker_take(t->copier);
    if (!j) return false;
    struct disk_put *p = put_of(j);
    *out = report(p);
    p->job.run = write_slot;
    if (p->status == OK && tier_worker_give(t->writer, &p->job) == OK) return true;
    if (p->status == OK) p->status = ERR_CANCELED; /* it is not written: too much waits for that */
    end(t, p);
    return true;
}

bool disk_take_put(struct kv_tier_disk *t, struct kv_tier_done *out)
{
    struct tier_job *j;
    if (take_copied(t, out)) return true;
    while ((j = tier_worker_take(t->writer))) {
        if (disk_is_task(j)) {
            disk_end_task(t, (struct disk_task *)j);
            continue;
        }
        struct disk_put *p = put_of(j);
        const bool is_due = p->stage == DISK_NO_STAGE; /* others were reported when copied */
        *out = report(p);
        end(t, p);
        if (is_due) return true;
    }
    return false;
}
