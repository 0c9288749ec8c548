/* tier_disk_read.c - gets: slots are read ahead into staging memory, compared and copied to the
 * pool in order.
 *
 * Before a slot is read its header is read again: another process may have stored another block
 * there. What is overwritten while it is read fails its checksum.
 * Thread: engine; `bring` runs on the reader. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/kv/tier/disk/tier_disk_internal.h"

/* ---- on the reader ---- */

/* A get that runs: reads of blocks up to n_begun have begun, each into stage i % n. */
struct reading {
    struct kv_tier_disk *t;
    struct tier_worker *w;
    struct disk_get *g;
    uint32_t n_begun;
    enum status ahead; /* why no more reads begin */
    bool is_over[DISK_STAGES_MAX];
};

static enum status failed(struct reading *r, const char *what, int code)
{
    snprintf(r->g->why, sizeof r->g->why, "%s: %s", what, strerror(code));
    return ERR_IO;
}

/* Is the block still there? */
static enum status look_again(struct reading *r, const struct disk_source *s)
{
    struct disk_header h;
    const enum status st = disk_segment_read_header(s->place.segment, s->place.slot, &h);
    if (st == ERR_IO) return failed(r, "a header cannot be read", errno);
    const bool is_same = st == OK && hash128_eq(h.block.key, s->key) &&
                         h.checksum == s->place.checksum && h.generation == s->place.generation;
    return is_same ? OK : ERR_NOT_FOUND;
}

static void begin_read(struct reading *r, uint32_t i)
{
    struct kv_tier_disk *t = r->t;
    const struct disk_source *s = &r->g->from[i];
    const uint32_t stage = i % t->get_stages.n;
    struct disk_io_op *op = &t->reads[stage];
    *op = (struct disk_io_op){ .fd = s->place.segment->direct_fd,
                               .buf = disk_stage(t, &t->get_stages, stage),
                               .bytes = t->slot_bytes,
                               .offset = disk_segment_offset(s->place.segment, s->place.slot) };
    r->is_over[stage] = false;
    t->read_io->ops->submit(t->read_io, op);
    r->n_begun = i + 1;
}

static void read_ahead(struct reading *r)
{
    const struct disk_get *g = r->g;
    while (r->ahead == OK && r->n_begun < g->n && r->n_begun - g->n_good < r->t->get_stages.n) {
        r->ahead = look_again(r, &g->from[r->n_begun]);
        if (r->ahead == OK) begin_read(r, r->n_begun);
    }
}

/* False: the worker stops. */
static bool await_one(struct reading *r)
{
    const struct disk_io_op *op = disk_await(r->t, r->w, r->t->read_io);
    if (!op) return false;
    r->is_over[op - r->t->reads] = true;
    return true;
}

/* Copies block i, which was read, to the pool. */
static enum status use(struct reading *r, uint32_t i)
{
    struct kv_tier_disk *t = r->t;
    const uint32_t stage = i % t->get_stages.n;
    const void *bytes = disk_stage(t, &t->get_stages, stage);
    if (t->reads[stage].error) return failed(r, "a block cannot be read", t->reads[stage].error);
    if (kv_slot_checksum(&t->slot, bytes) != r->g->from[i].place.checksum) return ERR_CHECKSUM;
    if (tier_worker_is_stopping(r->w) || !tier_worker_enter(r->w, &r->g->job)) return ERR_CANCELED;
    const enum status st = block_copy_load(t->get_copy, bytes, r->g->from[i].block);
    tier_worker_leave(r->w, &r->g->job);
    return st;
}

static void bring(struct tier_job *j, struct tier_worker *w, void *arg)
{
    struct disk_get *g = (struct disk_get *)j;
    struct reading r = { .t = arg, .w = w, .g = g };
    const uint64_t begin_ns = clock_ns();
    bool goes_on = true;
    while (g->status == OK && g->n_good < g->n) {
        const uint32_t i = g->n_good;
        read_ahead(&r);
        while (i < r.n_begun && goes_on && !r.is_over[i % r.t->get_stages.n])
            goes_on = await_one(&r);
        g->status = i == r.n_begun ? r.ahead : goes_on ? use(&r, i) : ERR_CANCELED;
        g->n_good += g->status == OK;
    }
    while (goes_on && r.t->read_io->n_running > 0) goes_on = await_one(&r);
    g->ns = clock_ns() - begin_ns;
}

/* ---- on the engine's thread ---- */

/* Own slots come first: they are never another process's by surprise. */
static bool find_source(struct kv_tier_disk *t, const struct hash128 *key, struct disk_source *out)
{
    const int32_t own = tier_index_find(t->own.index, *key),
                  other = own < 0 ? tier_index_find(t->others.index, *key) : -1;
    if (own < 0 && other < 0) return false;
    *out = (struct disk_source){ .place = own >= 0 ? t->own.places[own] : t->others.places[other],
                                 .key = *key,
                                 .is_own = own >= 0,
                                 .in_index = (uint32_t)(own >= 0 ? own : other) };
    return true;
}

static void hold_sources(struct kv_tier_disk *t, struct disk_get *j)
{
    const uint64_t now_ns = clock_ns();
    for (uint32_t i = 0; i < j->n; i++) {
        disk_segment_use(j->from[i].place.segment);
        if (!j->from[i].is_own) continue;
        tier_index_touch(t->own.index, j->from[i].in_index, now_ns);
        tier_index_pin(t->own.index, j->from[i].in_index);
    }
}

enum status disk_get(struct kv_tier *tier, const struct kv_tier_get *g)
{
    struct kv_tier_disk *t = disk_of(tier);
    if (t->is_off) return ERR_UNAVAILABLE;
    if (!tier_worker_has_room(t->reader)) return ERR_BUSY;
    struct disk_get *j = mem_calloc(1, sizeof *j + g->n * sizeof *j->from);
    j->job.run = bring;
    j->tag = g->tag;
    j->n = g->n;
    j->begin_ns = clock_ns();
    for (uint32_t i = 0; i < g->n; i++) {
        if (!find_source(t, &g->keys[i], &j->from[i])) {
            mem_free(j);
            return ERR_NOT_FOUND;
        }
        j->from[i].block = g->blocks[i];
    }
    hold_sources(t, j);
    void *was = map_put(&t->gets, map_key_u64(&j->tag), j);
    ASSERT(was == NULL);
    tier_rate_begin(&tier->rate, j->n);
    const enum status st = tier_worker_give(t->reader, &j->job);
    ASSERT(st == OK);
    return OK;
}

void disk_cancel(struct kv_tier *tier, uint64_t tag)
{
    struct kv_tier_disk *t = disk_of(tier);
    struct disk_get *j = map_del(&t->gets, map_key_u64(&tag));
    if (!j) return;
    tier_worker_cancel(t->reader, &j->job);
}

/* The block that did not come is forgotten, in whichever index it was. */
static void forget(struct kv_tier_disk *t, const struct disk_source *s)
{
    struct disk_slots *in = s->is_own ? &t->own : &t->others;
    const int32_t slot = tier_index_find(in->index, s->key);
    if (slot < 0) return;
    if (s->is_own) disk_clear_slot(t, &in->places[slot]);
    tier_index_drop(in->index, s->key);
}

static void end_get(struct kv_tier_disk *t, struct disk_get *j)
{
    for (uint32_t i = 0; i < j->n; i++) {
        if (j->from[i].is_own) tier_index_unpin(t->own.index, j->from[i].in_index);
        disk_segment_release(j->from[i].place.segment);
    }
    t->stats.n_gets += j->n_good;
    t->stats.n_bad_checksums += j->status == ERR_CHECKSUM;
    if (j->status == ERR_CHECKSUM || j->status == ERR_NOT_FOUND) forget(t, &j->from[j->n_good]);
    else if (j->status != OK && j->status != ERR_CANCELED) disk_switch_off(t, j->why);
    tier_rate_end(&t->base.rate, j->n, j->status == OK ? (double)j->ns * 1e-9 : 0, clock_ns());
}

bool disk_take_get(struct kv_tier_disk *t, struct kv_tier_done *out)
{
    struct disk_get *j;
    bool is_wanted = false;
    while (!is_wanted && (j = (struct disk_get *)tier_worker_take(t->reader))) {
        is_wanted = map_get(&t->gets, map_key_u64(&j->tag)) == j;
        if (is_wanted) map_del(&t->gets, map_key_u64(&j->tag));
        *out = (struct kv_tier_done){
            .kind = KV_TIER_GET, .tag = j->tag, .status = j->status, .n_good = j->n_good
        };
        end_get(t, j);
        mem_free(j);
    }
    return is_wanted;
}
