/* kv_store_internal.h - the store itself, shared by its files.
 *
 *   kv_store.c       life, reports, metrics
 *   kv_store_down.c  offers and copies to the tiers
 *   kv_store_up.c    plans and loads
 * Thread: engine. */
#ifndef BATON_KV_TIER_KV_STORE_INTERNAL_H
#define BATON_KV_TIER_KV_STORE_INTERNAL_H

#include "shared/base/list.h"
#include "shared/kv/tier/kv_store.h"

enum { STORE_TIERS = KV_TIER_KINDS };
enum { STORE_PUTS_MAX = 8 /* of a tier at a time */ };

/* A copy to a tier that runs. */
struct store_put {
    bool runs;
    bool is_kept; /* by kv_store_keep */
    struct tier_block of;
    int32_t block; /* of the pool, held; -1: `pin` of the tier before */
    struct kv_tier_pin pin;
};

/* Blocks that a tier should get, first come first served. */
struct store_queue {
    struct tier_block *blocks; /* ring [cap] */
    uint32_t first, n, cap;
};

struct store_tier {
    struct kv_tier *tier;
    struct store_queue queue;
    struct store_put puts[STORE_PUTS_MAX];
    uint32_t n_puts;
    uint64_t n_lost;              /* left the memory before it before they were copied */
    uint64_t n_refused;           /* the tier had no room for them, or was off */
    uint64_t n_loaded;            /* blocks of loads that were used */
    struct kv_tier_stats counted; /* what the metrics say */
    uint64_t counted_lost, counted_refused, counted_loaded;
    struct gauge *blocks, *capacity, *bytes, *off, *rate, *waiting;
    struct counter *promoted, *demoted, *lost, *refused, *evicted, *bad, *errors;
};

/* The blocks of a load that one tier brings. */
struct load_part {
    bool runs;
    uint64_t tag;
    uint32_t n;
    uint32_t *at; /* [n] their places in the load, ascending */
};

struct store_load {
    struct kv_load out; /* first member: what the caller sees */
    struct list link;   /* in `loading`, or in `loaded` */
    struct hash128 first;
    uint8_t *from; /* [n] tier of each block */
    struct load_part parts[STORE_TIERS];
    uint32_t n_running; /* parts */
    uint64_t deadline_ns;
};

struct kv_store {
    struct kv_store_of of;
    struct store_tier tiers[STORE_TIERS];
    uint32_t n_tiers;
    bool always;   /* of the options */
    bool is_exact; /* the tiers hold what the pool does: no values are rounded */
    struct list loading, loaded;
    uint64_t next_tag, t_tick_ms;
    struct counter *timeouts;
};

/* kv_store.c */
void store_take_reports(struct kv_store *s);
/* kv_store_down.c */
void store_down_init(struct kv_store *s);
void store_down_release(struct kv_store *s);
void store_begin_puts(struct kv_store *s);
void store_end_put(struct kv_store *s, uint32_t tier, const struct kv_tier_done *d);
/* kv_store_up.c */
void store_end_get(struct kv_store *s, uint32_t tier, const struct kv_tier_done *d);
void store_end_late_loads(struct kv_store *s, uint64_t now_ns);
void store_up_release(struct kv_store *s);

#endif
