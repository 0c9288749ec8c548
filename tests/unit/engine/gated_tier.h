/* gated_tier.h - a tier around another one whose gets and puts are over when the test says so, and
 * whose gets fail when it says so: what a slow or broken disk does. Only the engine's test programs
 * include this. Thread: the test's sets the gate, the engine's calls the tier. */
#ifndef BATON_TESTS_UNIT_ENGINE_GATED_TIER_H
#define BATON_TESTS_UNIT_ENGINE_GATED_TIER_H

#include <stdatomic.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/kv/tier/kv_tier.h"

enum { GATE_REPORTS_MAX = 256, GATE_LAYERS_MAX = 32 };

/* Set by the test. */
struct gate {
    _Atomic bool is_shut;        /* no get is over */
    _Atomic bool keeps_puts;     /* no put is over: their blocks are held */
    _Atomic int n_good;          /* gets end with ERR_IO after so many blocks; -1: they do not */
    _Atomic bool refuses;        /* gets are ERR_UNAVAILABLE */
    _Atomic bool claims;         /* it says that it has all blocks, but brings those that it has */
    _Atomic uint32_t n_got;      /* gets that began */
    bool by_layers;              /* gets may bring layers one by one; before the tier is made */
    _Atomic uint32_t max_layers; /* of which the engine sees no more than these */
    _Atomic uint32_t n_layered;  /* gets by layers that began */
    _Atomic int first_freed;     /* 1 + enum kv_tier_kind of the tier that was freed first */
};

/* A get by layers: the inner tier counts in `is`, the engine looks at *seen. */
struct gated_layers {
    uint64_t tag; /* 0: none */
    _Atomic uint32_t is, *seen;
};

struct gated_tier {
    struct kv_tier base;
    struct kv_tier_ops ops;
    struct kv_tier *inner;
    struct gate *gate;
    struct kv_tier_done held[GATE_REPORTS_MAX];
    struct kv_tier_done puts[GATE_REPORTS_MAX];
    uint32_t n_held, n_puts;
    struct gated_layers layers[GATE_LAYERS_MAX];
};

static inline struct gated_tier *gated_of(struct kv_tier *t) { return (struct gated_tier *)t; }

static inline void gated_free(struct kv_tier *t)
{
    int none = 0;
    atomic_compare_exchange_strong(&gated_of(t)->gate->first_freed, &none, 1 + (int)t->ops->kind);
    gated_of(t)->inner->ops->free(gated_of(t)->inner);
    mem_free(t);
}
static inline bool gated_has(struct kv_tier *t, const struct hash128 *key)
{
    if (atomic_load(&gated_of(t)->gate->claims)) return true;
    return gated_of(t)->inner->ops->has(gated_of(t)->inner, key);
}
static inline enum status gated_put(struct kv_tier *t, const struct kv_tier_put *p)
{
    return gated_of(t)->inner->ops->put(gated_of(t)->inner, p);
}
static inline enum status gated_get(struct kv_tier *t, const struct kv_tier_get *g)
{
    atomic_fetch_add(&gated_of(t)->gate->n_got, 1);
    if (atomic_load(&gated_of(t)->gate->refuses)) return ERR_UNAVAILABLE;
    if (!g->n_layers) {
        struct kv_tier_get some = *g;
        some.n = kv_tier_find(gated_of(t)->inner, g->keys, g->n);
        return gated_of(t)->inner->ops->get(gated_of(t)->inner, &some);
    }
    struct gated_layers *l = gated_of(t)->layers;
    while (l->tag) ASSERT(++l < gated_of(t)->layers + GATE_LAYERS_MAX);
    l->tag = g->tag;
    l->seen = g->n_layers;
    atomic_store(&l->is, 0);
    atomic_fetch_add(&gated_of(t)->gate->n_layered, 1);
    struct kv_tier_get inner = *g;
    inner.n_layers = &l->is;
    const enum status st = gated_of(t)->inner->ops->get(gated_of(t)->inner, &inner);
    if (st != OK) l->tag = 0;
    return st;
}

static inline void gated_show_layers(struct gated_tier *g)
{
    const uint32_t most = atomic_load(&g->gate->max_layers);
    for (int i = 0; i < GATE_LAYERS_MAX; i++) {
        const uint32_t n = atomic_load(&g->layers[i].is);
        if (g->layers[i].tag) atomic_store(g->layers[i].seen, n < most ? n : most);
    }
}

static inline void gated_forget_layers(struct gated_tier *g, uint64_t tag)
{
    for (int i = 0; i < GATE_LAYERS_MAX; i++)
        if (g->layers[i].tag == tag) g->layers[i].tag = 0;
}
static inline void gated_cancel(struct kv_tier *t, uint64_t tag)
{
    struct gated_tier *g = gated_of(t);
    for (uint32_t i = 0; i < g->n_held; i++)
        if (g->held[i].tag == tag) g->held[i] = g->held[--g->n_held];
    g->inner->ops->cancel(g->inner, tag);
    gated_forget_layers(g, tag);
}
static inline void gated_drop(struct kv_tier *t, const struct hash128 *key)
{
    gated_of(t)->inner->ops->drop(gated_of(t)->inner, key);
}
static inline void gated_touch(struct kv_tier *t, const struct hash128 *key, uint64_t now_ns)
{
    gated_of(t)->inner->ops->touch(gated_of(t)->inner, key, now_ns);
}
static inline bool gated_poll(struct kv_tier *t, struct kv_tier_done *out)
{
    struct gated_tier *g = gated_of(t);
    const int n_good = atomic_load(&g->gate->n_good);
    struct kv_tier_done d;
    gated_show_layers(g);
    while (g->inner->ops->poll(g->inner, &d)) {
        if (d.kind == KV_TIER_PUT) {
            ASSERT(g->n_puts < GATE_REPORTS_MAX);
            g->puts[g->n_puts++] = d;
            continue;
        }
        if (n_good >= 0 && (uint32_t)n_good < d.n_good) {
            d.n_good = (uint32_t)n_good;
            d.status = ERR_IO;
        }
        g->held[g->n_held++] = d;
    }
    if (g->n_puts > 0 && !atomic_load(&g->gate->keeps_puts)) {
        *out = g->puts[--g->n_puts];
        return true;
    }
    if (g->n_held == 0 || atomic_load(&g->gate->is_shut)) return false;
    *out = g->held[--g->n_held];
    gated_forget_layers(g, out->tag);
    return true;
}
static inline void gated_tick(struct kv_tier *t, uint64_t now_ms)
{
    gated_of(t)->inner->ops->tick(gated_of(t)->inner, now_ms);
}
static inline void gated_stats(const struct kv_tier *t, struct kv_tier_stats *out)
{
    const struct gated_tier *g = (const struct gated_tier *)t;
    g->inner->ops->stats(g->inner, out);
}
static inline bool gated_pin(struct kv_tier *t, const struct hash128 *key, struct kv_tier_pin *out)
{
    return gated_of(t)->inner->ops->pin(gated_of(t)->inner, key, out);
}
static inline void gated_unpin(struct kv_tier *t, const struct kv_tier_pin *pin)
{
    gated_of(t)->inner->ops->unpin(gated_of(t)->inner, pin);
}

/* kv_store_options.wrap, with a struct gate. */
static inline struct kv_tier *gated_tier_wrap(void *arg, struct kv_tier *inner)
{
    struct gated_tier *g = MEM_NEW(struct gated_tier);
    g->ops = (struct kv_tier_ops){
        .name = inner->ops->name,
        .caps = inner->ops->caps & ~(((struct gate *)arg)->by_layers ? 0u : KV_TIER_LAYERS),
        .kind = inner->ops->kind,
        .free = gated_free,
        .has = gated_has,
        .put = gated_put,
        .get = gated_get,
        .cancel = gated_cancel,
        .drop = gated_drop,
        .touch = gated_touch,
        .poll = gated_poll,
        .tick = gated_tick,
        .stats = gated_stats,
        .pin = gated_pin,
        .unpin = gated_unpin,
    };
    g->base = (struct kv_tier){ .ops = &g->ops, .rate = inner->rate };
    g->inner = inner;
    g->gate = arg;
    return &g->base;
}

#endif
