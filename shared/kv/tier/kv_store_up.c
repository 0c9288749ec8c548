/* kv_store_up.c - loads: which blocks the tiers bring, and what came.
 *
 * Each block comes from the first tier that has it. A load has a part for each tier that takes part
 * in it; its lead blocks up to the first that did not come are good. Thread: engine. */
#include <string.h>
#include <time.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/kv/tier/kv_store_internal.h"

/* A load is given up after so many times what was predicted, and no sooner than this. */
static const double LATE_FACTOR = 10, LATE_AT_LEAST_S = 2;
enum { LAYER_POLL_NS = 20000 };

static struct store_load *load_of(struct kv_load *l) { return (struct store_load *)l; }

/* ---- plans ---- */

/* The first tier that has the block; n_tiers: none. */
static uint32_t tier_with(const struct kv_store *s, const struct hash128 *key)
{
    uint32_t i = 0;
    while (i < s->n_tiers && !s->tiers[i].tier->ops->has(s->tiers[i].tier, key)) i++;
    return i;
}

/* All tiers bring their blocks at the same time. */
static double seconds_for(const struct kv_store *s, const uint32_t *n_of, uint64_t now_ns)
{
    double most = 0;
    for (uint32_t i = 0; i < s->n_tiers; i++) {
        const double t = n_of[i] ? tier_rate_seconds(&s->tiers[i].tier->rate, n_of[i], now_ns) : 0;
        if (t > most) most = t;
    }
    return most;
}

void kv_store_plan(struct kv_store *s, const struct hash128 *keys, uint32_t n, double block_s,
                   struct kv_store_plan *out)
{
    const uint64_t now_ns = clock_ns();
    uint32_t n_of[STORE_TIERS] = { 0 };
    double best = 0, load_s = 0;
    *out = (struct kv_store_plan){ .by_layers = out->by_layers };
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t tier = tier_with(s, &keys[i]);
        if (tier == s->n_tiers) break;
        n_of[tier]++;
        out->n_found = i + 1;
        load_s = seconds_for(s, n_of, now_ns);
        const double gain = (i + 1) * block_s - load_s;
        if (block_s > 0 && gain <= best && !s->always) continue;
        best = gain;
        out->n = i + 1;
        out->load_s = load_s;
    }
    if (!out->n) out->load_s = load_s;
    out->compute_s = (out->n ? out->n : out->n_found) * block_s;
}

bool kv_store_loads(const struct kv_store *s) { return !list_empty(&s->loading); }

bool kv_store_is_loading(const struct kv_store *s, struct hash128 key)
{
    LIST_FOREACH (l, &s->loading, struct store_load, link)
        if (hash128_eq(l->first, key)) return true;
    return false;
}

void kv_store_touch(struct kv_store *s, const struct hash128 *keys, uint32_t n)
{
    const uint64_t now_ns = clock_ns();
    for (uint32_t t = 0; t < s->n_tiers; t++)
        for (uint32_t i = 0; i < n; i++)
            s->tiers[t].tier->ops->touch(s->tiers[t].tier, &keys[i], now_ns);
}

/* ---- the life of a load ---- */

static void free_load(struct store_load *l)
{
    for (uint32_t i = 0; i < STORE_TIERS; i++) mem_free(l->parts[i].at);
    mem_free(l->from);
    mem_free(l);
}

void kv_load_free(struct kv_load *load)
{
    if (load) free_load(load_of(load));
}

/* It is over once no part runs. */
static void end_if_over(struct kv_store *s, struct store_load *l)
{
    if (l->n_running > 0) return;
    l->out.ns = clock_ns() - l->out.begin_ns;
    for (uint32_t i = 0; i < l->out.n_good; i++) {
        struct store_tier *t = &s->tiers[l->from[i]];
        l->out.n_from[t->tier->ops->kind]++;
        t->n_loaded++;
    }
    list_remove(&l->link);
    list_push(&s->loaded, &l->link);
}

/* The part's first n_good blocks are there, the one after them is not. */
static void end_part(struct store_load *l, struct load_part *p, uint32_t n_good)
{
    ASSERT(p->runs && n_good <= p->n);
    p->runs = false;
    l->n_running--;
    if (n_good < p->n && p->at[n_good] < l->out.n_good) l->out.n_good = p->at[n_good];
}

static void begin_part(struct kv_store *s, struct store_load *l, uint32_t tier,
                       const struct hash128 *keys, const int32_t *blocks)
{
    struct load_part *p = &l->parts[tier];
    struct kv_tier *t = s->tiers[tier].tier;
    struct hash128 *part_keys = MEM_ARRAY(struct hash128, p->n);
    int32_t *part_blocks = MEM_ARRAY(int32_t, p->n);
    for (uint32_t i = 0; i < p->n; i++) {
        part_keys[i] = keys[p->at[i]];
        part_blocks[i] = blocks[p->at[i]];
    }
    const struct kv_tier_get g = {
        .keys = part_keys,
        .blocks = part_blocks,
        .n = p->n,
        .tag = p->tag = ++s->next_tag,
        .n_layers = l->out.by_layers ? &l->out.n_layers : NULL,
    };
    p->runs = true;
    l->n_running++;
    if (t->ops->get(t, &g) != OK) end_part(l, p, 0);
    mem_free(part_keys);
    mem_free(part_blocks);
}

/* Gives each block to the first tier that has it. */
static void divide(struct kv_store *s, struct store_load *l, const struct hash128 *keys)
{
    for (uint32_t i = 0; i < l->out.n; i++) {
        const uint32_t tier = tier_with(s, &keys[i]);
        ASSERT(tier < s->n_tiers); /* the plan is of this turn */
        struct load_part *p = &l->parts[tier];
        if (!p->at) p->at = MEM_ARRAY(uint32_t, l->out.n);
        p->at[p->n++] = i;
        l->from[i] = (uint8_t)tier;
    }
}

/* Do all blocks come from one tier that can bring them layer by layer? */
static bool can_bring_layers(const struct kv_store *s, const struct store_load *l)
{
    for (uint32_t t = 0; s->is_exact && t < s->n_tiers; t++)
        if (l->parts[t].n == l->out.n) return (s->tiers[t].tier->ops->caps & KV_TIER_LAYERS) != 0;
    return false;
}

struct kv_load *kv_store_load(struct kv_store *s, const struct hash128 *keys, const int32_t *blocks,
                              const struct kv_store_plan *plan, void *owner)
{
    struct store_load *l = MEM_NEW(struct store_load);
    const double late_s = plan->load_s * LATE_FACTOR > LATE_AT_LEAST_S ? plan->load_s * LATE_FACTOR
                                                                       : LATE_AT_LEAST_S;
    l->out.owner = owner;
    l->out.n = l->out.n_good = plan->n;
    l->out.expected_s = plan->load_s;
    l->out.begin_ns = clock_ns();
    l->deadline_ns = l->out.begin_ns + (uint64_t)(late_s * 1e9);
    l->first = keys[0];
    l->from = MEM_ARRAY(uint8_t, plan->n);
    list_push(&s->loading, &l->link);
    divide(s, l, keys);
    l->out.by_layers = plan->by_layers && can_bring_layers(s, l);
    for (uint32_t t = 0; t < s->n_tiers; t++)
        if (l->parts[t].n > 0) begin_part(s, l, t, keys, blocks);
    end_if_over(s, l);
    return &l->out;
}

uint32_t kv_load_n_layers(const struct kv_load *load)
{
    return atomic_load_explicit(&load->n_layers, memory_order_acquire);
}

bool kv_store_await_end(struct kv_store *s, const struct kv_load *load, uint32_t ms)
{
    const struct store_load *l = (const struct store_load *)load;
    for (const uint64_t end = clock_ms() + ms; l->n_running > 0 && clock_ms() <= end;) {
        const struct timespec pause = { 0, LAYER_POLL_NS };
        store_take_reports(s);
        if (l->n_running > 0) nanosleep(&pause, NULL);
    }
    return l->n_running == 0;
}

enum status kv_store_await_layer(struct kv_store *s, const struct kv_load *load, uint32_t layer,
                                 uint32_t ms)
{
    const uint64_t end = clock_ms() + ms;
    const struct store_load *l = (const struct store_load *)load;
    while (kv_load_n_layers(load) <= layer) {
        const struct timespec pause = { 0, LAYER_POLL_NS };
        if (l->n_running == 0) return ERR_IO;
        if (clock_ms() > end) return ERR_TIMEOUT;
        nanosleep(&pause, NULL);
        store_take_reports(s);
    }
    return OK;
}

static void cancel_parts(struct kv_store *s, struct store_load *l)
{
    for (uint32_t i = 0; i < s->n_tiers; i++) {
        if (!l->parts[i].runs) continue;
        s->tiers[i].tier->ops->cancel(s->tiers[i].tier, l->parts[i].tag);
        end_part(l, &l->parts[i], 0);
    }
}

void kv_store_cancel(struct kv_store *s, struct kv_load *load)
{
    struct store_load *l = load_of(load);
    cancel_parts(s, l);
    list_remove(&l->link);
    free_load(l);
}

struct kv_load *kv_store_take_loaded(struct kv_store *s)
{
    if (list_empty(&s->loaded)) return NULL;
    struct store_load *l = LIST_FIRST(&s->loaded, struct store_load, link);
    list_remove(&l->link);
    return &l->out;
}

void store_end_get(struct kv_store *s, uint32_t tier, const struct kv_tier_done *d)
{
    LIST_FOREACH (l, &s->loading, struct store_load, link) {
        struct load_part *p = &l->parts[tier];
        if (!p->runs || p->tag != d->tag) continue;
        end_part(l, p, d->n_good);
        end_if_over(s, l);
        return;
    }
}

void store_end_late_loads(struct kv_store *s, uint64_t now_ns)
{
    LIST_FOREACH (l, &s->loading, struct store_load, link) {
        if (now_ns < l->deadline_ns) continue;
        log_warn("kv load given up", "blocks=%u after_ms=%.0f", l->out.n,
                 (double)(now_ns - l->out.begin_ns) * 1e-6);
        counter_add(s->timeouts, 1);
        for (uint32_t t = 0; t < s->n_tiers; t++)
            if (l->parts[t].runs) tier_rate_late(&s->tiers[t].tier->rate, now_ns);
        cancel_parts(s, l);
        end_if_over(s, l);
    }
}

void store_up_release(struct kv_store *s)
{
    LIST_FOREACH (l, &s->loading, struct store_load, link) free_load(l);
    LIST_FOREACH (l, &s->loaded, struct store_load, link) free_load(l);
}
