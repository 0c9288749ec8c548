/* kv_store.c - the store's life, what the tiers report, and its metrics. Thread: engine. */
#include "shared/kv/tier/kv_store.h"

#include <stdio.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/kv/tier/block_copy.h"
#include "shared/kv/tier/kv_store_internal.h"
#include "shared/kv/tier/ranks/tier_ranks.h"

enum { WAIT_FOR_LOADS_MS = 100, NS_PER_MS = 1000000 };

/* ---- metrics ---- */

static struct counter *counter_of(struct metrics *m, const char *what, const char *tier,
                                  const char *help)
{
    char name[64], labels[64];
    snprintf(name, sizeof name, "baton_kv_tier_%s_total", what);
    snprintf(labels, sizeof labels, "tier=\"%s\"", tier);
    return metrics_counter(m, name, labels, help);
}

static struct gauge *gauge_of(struct metrics *m, const char *what, const char *tier,
                              const char *help)
{
    char name[64], labels[64];
    snprintf(name, sizeof name, "baton_kv_tier_%s", what);
    snprintf(labels, sizeof labels, "tier=\"%s\"", tier);
    return metrics_gauge(m, name, labels, help);
}

static void init_metrics(struct store_tier *t, struct metrics *m)
{
    const char *name = t->tier->ops->name;
    t->blocks = gauge_of(m, "blocks", name, "KV blocks that a tier behind the pool holds.");
    t->capacity = gauge_of(m, "capacity_blocks", name, "KV blocks that a tier has room for now.");
    t->bytes = gauge_of(m, "bytes", name, "Bytes of the blocks that a tier holds.");
    t->off = gauge_of(m, "off", name, "1 while a tier is switched off after errors.");
    t->rate = gauge_of(m, "load_bytes_per_second", name,
                       "Bytes per second at which a tier is expected to bring blocks back.");
    t->waiting = gauge_of(m, "waiting_blocks", name, "Blocks that wait to be copied to a tier.");
    t->promoted = counter_of(m, "promoted_blocks", name,
                             "Blocks that a tier brought back for prompts.");
    t->demoted = counter_of(m, "demoted_blocks", name, "Blocks that were copied to a tier.");
    t->lost = counter_of(m, "lost_blocks", name,
                         "Blocks that were evicted from the memory before it before a tier had "
                         "them.");
    t->refused = counter_of(m, "refused_blocks", name,
                            "Blocks that a tier did not take, because it was off or full.");
    t->evicted = counter_of(m, "evicted_blocks", name,
                            "Blocks that a tier forgot in favour of others.");
    t->bad = counter_of(m, "checksum_failures", name,
                        "Blocks of a tier whose bytes were not those that were put; they were "
                        "computed.");
    t->errors = counter_of(m, "errors", name, "Reads and writes of a tier that failed.");
}

static void grow(struct counter *c, uint64_t *counted, uint64_t now)
{
    counter_add(c, now - *counted);
    *counted = now;
}

static void update_tier(struct store_tier *t)
{
    struct kv_tier_stats now, *was = &t->counted;
    t->tier->ops->stats(t->tier, &now);
    gauge_set(t->blocks, now.n_stored);
    gauge_set(t->capacity, now.n_slots);
    gauge_set(t->bytes, (double)now.n_stored * (double)now.slot_bytes);
    gauge_set(t->off, now.is_off);
    gauge_set(t->rate, (double)now.slot_bytes / t->tier->rate.block_s);
    gauge_set(t->waiting, t->queue.n);
    grow(t->demoted, &was->n_puts, now.n_puts);
    grow(t->evicted, &was->n_evicted, now.n_evicted);
    grow(t->bad, &was->n_bad_checksums, now.n_bad_checksums);
    grow(t->errors, &was->n_errors, now.n_errors);
    grow(t->promoted, &t->counted_loaded, t->n_loaded);
    grow(t->lost, &t->counted_lost, t->n_lost);
    grow(t->refused, &t->counted_refused, t->n_refused);
}

void kv_store_update_metrics(struct kv_store *s)
{
    for (uint32_t i = 0; i < s->n_tiers; i++) update_tier(&s->tiers[i]);
}

/* ---- life ---- */

static void add_tier(struct kv_store *s, const struct kv_store_options *o, struct kv_tier *t)
{
    struct store_tier *st = &s->tiers[s->n_tiers++];
    if (o->ranks) t = tier_ranks_wrap(o->ranks, t, s->of.wake, s->of.arg);
    st->tier = o->wrap ? o->wrap(o->wrap_arg, t) : t;
    init_metrics(st, s->of.metrics);
}

static enum status add_host(struct kv_store *s, const struct kv_store_options *o,
                            const struct kv_tier_options *of_tier, struct err *err)
{
    struct kv_tier *t;
    if (!o->host_bytes) return OK;
    if (kv_tier_host_create(of_tier, o->host_bytes, &t, err) != OK)
        return err_prefix(err, "--swap-space: ");
    add_tier(s, o, t);
    return OK;
}

static enum status add_disk(struct kv_store *s, const struct kv_store_options *o,
                            const struct kv_tier_options *of_tier, struct err *err)
{
    struct kv_tier *t;
    if (!o->disk.folder) return OK;
    TRY(kv_tier_disk_create(of_tier, &o->disk, &t, err));
    add_tier(s, o, t);
    return OK;
}

enum status kv_store_create(const struct kv_store_options *o, const struct kv_store_of *of,
                            struct kv_store **out, struct err *err)
{
    struct kv_store *s = MEM_NEW(struct kv_store);
    const struct kv_tier_options of_tier = {
        .layout = of->layout,
        .device = of->device,
        .pool = of->memory,
        .slot_dtype = o->rounds ? o->slot_dtype : (enum dtype)of->layout.dtype,
        .wake = of->wake,
        .arg = of->arg,
        .forgot = o->ranks ? tier_ranks_forgot : NULL,
        .forgot_arg = o->ranks,
    };
    s->of = *of;
    s->always = o->always;
    s->is_exact = of_tier.slot_dtype == (enum dtype)of->layout.dtype;
    list_init(&s->loading);
    list_init(&s->loaded);
    struct kv_layout slot;
    enum status st = kv_slot_layout(&of->layout, of_tier.slot_dtype, &slot, err);
    if (st == OK) st = add_host(s, o, &of_tier, err);
    if (st == OK) st = add_disk(s, o, &of_tier, err);
    if (st != OK) {
        kv_store_free(s);
        return st;
    }
    s->timeouts = metrics_counter(of->metrics, "baton_kv_tier_load_timeouts_total", "",
                                  "Loads of KV blocks that took far longer than was expected; the "
                                  "rest was computed.");
    store_down_init(s);
    *out = s;
    return OK;
}

void kv_store_free(struct kv_store *s)
{
    if (!s) return;
    /* The last first: it may still write from slots of the one before. */
    for (uint32_t i = s->n_tiers; i-- > 0;) s->tiers[i].tier->ops->free(s->tiers[i].tier);
    store_down_release(s);
    store_up_release(s);
    mem_free(s);
}

/* ---- between steps ---- */

static void take_reports_of(struct kv_store *s, uint32_t tier)
{
    struct kv_tier *t = s->tiers[tier].tier;
    struct kv_tier_done d;
    while (t->ops->poll(t, &d)) {
        if (d.kind == KV_TIER_PUT) store_end_put(s, tier, &d);
        else store_end_get(s, tier, &d);
    }
}

void store_take_reports(struct kv_store *s)
{
    for (uint32_t i = 0; i < s->n_tiers; i++) take_reports_of(s, i);
}

static void tick(struct kv_store *s, uint64_t now_ms)
{
    if (now_ms - s->t_tick_ms < KV_TIER_TICK_MS) return;
    s->t_tick_ms = now_ms;
    for (uint32_t i = 0; i < s->n_tiers; i++) s->tiers[i].tier->ops->tick(s->tiers[i].tier, now_ms);
}

void kv_store_run(struct kv_store *s)
{
    const uint64_t now_ns = clock_ns();
    store_take_reports(s);
    store_end_late_loads(s, now_ns);
    tick(s, now_ns / NS_PER_MS);
    store_begin_puts(s);
}

int kv_store_wait_ms(const struct kv_store *s)
{
    if (!list_empty(&s->loaded)) return 0;
    return list_empty(&s->loading) ? KV_TIER_TICK_MS : WAIT_FOR_LOADS_MS;
}
