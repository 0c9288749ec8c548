/* tier_disk_scan.c - segments of the disk tier: more of them to write to, what others have written,
 * and giving one up for others.
 *
 * The writer runs these tasks, since they wait for the file system; the engine's thread changes the
 * indexes by what they found. Thread: engine; `run_task` runs on the writer. */
#include <string.h>

#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/kv/tier/disk/tier_disk_internal.h"

enum { GROW_AGAIN_MS = 10000 };
static const uint64_t NS_PER_S = 1000000000;

/* ---- slots of segments ---- */

void disk_slots_init(struct disk_slots *s)
{
    *s = (struct disk_slots){ .index = tier_index_create() };
}

void disk_slots_release(struct disk_slots *s)
{
    for (uint32_t i = 0; i < s->n_segments; i++) disk_segment_release(s->segments[i].segment);
    tier_index_free(s->index);
    mem_free(s->places);
    mem_free(s->segments);
    mem_free(s->holes);
}

static struct disk_known *known_of(struct disk_slots *s, const struct disk_segment *segment)
{
    for (uint32_t i = 0; i < s->n_segments; i++)
        if (strcmp(s->segments[i].segment->name, segment->name) == 0) return &s->segments[i];
    return NULL;
}

/* Segments of a folder have the same number of slots, but for those that were made for more or less
 * room. */
static uint32_t find_slots(struct disk_slots *s, uint32_t n)
{
    for (uint32_t i = 0; i < s->n_holes; i++) {
        const struct disk_hole h = s->holes[i];
        if (h.n != n) continue;
        s->holes[i] = s->holes[--s->n_holes];
        tier_index_return_slots(s->index, h.first, n);
        return h.first;
    }
    return tier_index_add_slots(s->index, n);
}

static struct disk_known *add_segment(struct disk_slots *s, struct disk_segment *segment)
{
    const uint32_t n = segment->super.n_slots, first = find_slots(s, n);
    if (s->n_segments == s->cap_segments) {
        s->cap_segments = s->cap_segments ? 2 * s->cap_segments : 8;
        s->segments = mem_realloc(s->segments, s->cap_segments, sizeof *s->segments);
    }
    if (first + n > s->cap) {
        s->cap = first + n + s->cap / 2;
        s->places = mem_realloc(s->places, s->cap, sizeof *s->places);
    }
    for (uint32_t i = 0; i < n; i++)
        s->places[first + i] = (struct disk_place){ .segment = segment, .slot = i };
    disk_segment_use(segment);
    s->segments[s->n_segments] = (struct disk_known){ segment, first, n, false };
    return &s->segments[s->n_segments++];
}

static void remove_segment(struct disk_slots *s, struct disk_known *k)
{
    tier_index_remove_slots(s->index, k->first, k->n);
    if (s->n_holes == s->cap_holes) {
        s->cap_holes = s->cap_holes ? 2 * s->cap_holes : 8;
        s->holes = mem_realloc(s->holes, s->cap_holes, sizeof *s->holes);
    }
    s->holes[s->n_holes++] = (struct disk_hole){ k->first, k->n };
    disk_segment_release(k->segment);
    *k = s->segments[--s->n_segments];
}

/* ---- on the writer ---- */

static void look_around(struct kv_tier_disk *t, struct disk_task *k)
{
    struct disk_listing *l;
    while (k->n_listings < DISK_LISTINGS_MAX && (l = disk_folder_scan(t->folder)))
        k->listings[k->n_listings++] = l;
    k->has_too_many = disk_folder_has_too_many(t->folder);
}

static void run_task(struct tier_job *j, struct tier_worker *w, void *arg)
{
    struct disk_task *k = (struct disk_task *)j;
    struct kv_tier_disk *t = arg;
    (void)w;
    switch (k->what) {
    case DISK_GROW:
        k->status = disk_folder_grow(t->folder, &k->listings[0], &k->err);
        k->n_listings = k->status == OK;
        break;
    case DISK_SCAN: look_around(t, k); break;
    case DISK_GIVE_UP: disk_folder_give_up(t->folder, k->segment); break;
    case DISK_CLEAR: k->status = disk_segment_clear(k->segment, k->slot); break;
    }
}

bool disk_is_task(const struct tier_job *j) { return j->run == run_task; }

/* ---- on the engine's thread ---- */

static void give_task(struct kv_tier_disk *t, struct disk_task task)
{
    struct disk_task *k = MEM_NEW(struct disk_task);
    *k = task;
    k->job.run = run_task;
    if (k->segment) disk_segment_use(k->segment);
    if (tier_worker_give(t->writer, &k->job) == OK) t->folder_is_busy |= k->what != DISK_CLEAR;
    else disk_task_free(k);
}

void disk_begin_task(struct kv_tier_disk *t, enum disk_folder_task what)
{
    if (!t->folder_is_busy) give_task(t, (struct disk_task){ .what = what });
}

void disk_clear_slot(struct kv_tier_disk *t, const struct disk_place *p)
{
    give_task(t, (struct disk_task){ .what = DISK_CLEAR, .segment = p->segment, .slot = p->slot });
}

void disk_task_free(struct disk_task *k)
{
    for (uint32_t i = 0; i < k->n_listings; i++) {
        disk_segment_release(k->listings[i]->segment);
        mem_free(k->listings[i]);
    }
    disk_segment_release(k->segment);
    mem_free(k);
}

/* The blocks that a listing has. How long each was unused is known from when it was written: the
 * wall clock only orders them. */
static void adopt(struct kv_tier_disk *t, struct disk_slots *in, const struct disk_known *k,
                  const struct disk_listing *l)
{
    const uint64_t now_ns = clock_ns(), now_s = (uint64_t)clock_unix_s();
    for (uint32_t i = 0; i < l->n; i++) {
        const struct disk_header *h = &l->slots[i].header;
        const uint32_t slot = k->first + l->slots[i].slot;
        const uint64_t age_ns = now_s > h->written_s ? (now_s - h->written_s) * NS_PER_S : 0;
        if (tier_index_has(t->own.index, h->block.key) ||
            !tier_index_adopt(in->index, slot, &h->block, now_ns > age_ns ? now_ns - age_ns : 0))
            continue;
        in->places[slot].checksum = h->checksum;
        in->places[slot].generation = h->generation;
    }
}

/* A segment that another process writes to, or nobody. */
static void take_listing(struct kv_tier_disk *t, const struct disk_listing *l)
{
    struct disk_known *own = known_of(&t->own, l->segment), *k = known_of(&t->others, l->segment);
    if (own) own->is_gone |= l->is_gone;
    if (own) return;
    if (k) remove_segment(&t->others, k);
    if (!l->is_gone) adopt(t, &t->others, add_segment(&t->others, l->segment), l);
}

/* Own segments whose files were removed: they would take room that nobody sees. */
static void leave_gone(struct kv_tier_disk *t)
{
    for (uint32_t i = t->own.n_segments; i-- > 0;) {
        struct disk_known *k = &t->own.segments[i];
        if (k->is_gone && tier_index_are_idle(t->own.index, k->first, k->n))
            remove_segment(&t->own, k);
    }
}

static void give_one_up(struct kv_tier_disk *t)
{
    for (uint32_t i = t->own.n_segments; i-- > 0;) {
        struct disk_known *k = &t->own.segments[i];
        if (!tier_index_are_idle(t->own.index, k->first, k->n)) continue;
        give_task(t, (struct disk_task){ .what = DISK_GIVE_UP, .segment = k->segment });
        log_info("kv segment given up",
                 "folder=%s file=%s why=\"others have less than their share\"", t->folder_path,
                 k->segment->name);
        remove_segment(&t->own, k);
        t->is_full = true;
        t->t_grow_ms = clock_ms() + GROW_AGAIN_MS;
        return;
    }
}

static void end_grow(struct kv_tier_disk *t, const struct disk_task *k)
{
    if (k->status == OK) {
        const struct disk_listing *l = k->listings[0];
        struct disk_known *was = known_of(&t->others, l->segment);
        if (was) remove_segment(&t->others, was);
        adopt(t, &t->own, add_segment(&t->own, l->segment), l);
        return;
    }
    t->is_full = true;
    t->t_grow_ms = clock_ms() + GROW_AGAIN_MS;
    if (k->status == ERR_FULL) return;
    t->stats.n_errors++;
    log_warn("kv tier does not grow", "tier=disk why=\"%s\" again_s=%d blocks=%u", k->err.text,
             GROW_AGAIN_MS / 1000, tier_index_n_slots(t->own.index));
}

void disk_end_task(struct kv_tier_disk *t, struct disk_task *k)
{
    if (k->what != DISK_CLEAR) t->folder_is_busy = false;
    if (k->what == DISK_GROW) end_grow(t, k);
    if (k->what == DISK_SCAN) {
        for (uint32_t i = 0; i < k->n_listings; i++) take_listing(t, k->listings[i]);
        /* more of them: soon */
        t->t_scan_ms = k->n_listings == DISK_LISTINGS_MAX ? 0 : clock_ms() + t->o.scan_ms;
        t->is_looking &= k->n_listings == DISK_LISTINGS_MAX;
        leave_gone(t);
        if (k->has_too_many) give_one_up(t);
    }
    disk_task_free(k);
}
