/* kv_store.h - the memories behind the KV pool, as an engine uses them: host memory, a disk.
 *
 * Down (demotion): a block that the pool has published is offered, and copied to the first tier in
 * the background, from there to the next. So evicting it from the pool costs nothing later; one
 * that is evicted before it was copied is lost, and counted.
 * Up (promotion): a plan says how many blocks after those of the pool the tiers have, and how many
 * of them they bring sooner than they would be computed, by measured times. A load brings them:
 *
 *   kv_store_plan ─▶ kv_store_load ─▶ (threads of the tiers) ─▶ kv_store_take_loaded: n_good lead
 *                          │                                    blocks hold their KV
 *                          └─ kv_store_cancel: nobody writes to its blocks any more
 *
 * A load that takes far longer than was predicted ends, too: what came is used. Blocks of one tier
 * that can do it come layer by layer, where the plan allows it: the first layers compute meanwhile.
 * Thread: engine. */
#ifndef BATON_KV_TIER_KV_STORE_H
#define BATON_KV_TIER_KV_STORE_H

#include <stdatomic.h>

#include "shared/base/metrics.h"
#include "shared/kv/kv_pool.h"
#include "shared/kv/tier/disk/tier_disk.h"
#include "shared/kv/tier/kv_tier.h"

struct kv_store;
struct tier_ranks;

struct kv_store_options {
    uint64_t host_bytes;           /* 0: no host tier */
    struct tier_disk_options disk; /* folder NULL: no disk tier. The path is copied */
    struct tier_ranks *ranks; /* the other ranks of the node, whose tiers follow these; borrowed.
                               * NULL: none */
    bool rounds;              /* the tiers hold KV as slot_dtype, in place of the pool's type */
    enum dtype slot_dtype;
    /* For tests. */
    bool always; /* load what the tiers have, even if computing is sooner */
    struct kv_tier *(*wrap)(void *arg, struct kv_tier *t); /* takes a tier, returns what stands for
                                                            * it; NULL: none */
    void *wrap_arg;
};

/* What the store stands behind; all borrowed. */
struct kv_store_of {
    struct kv_layout layout;
    struct device *device;
    void *memory; /* of the pool */
    struct kv_pool *pool;
    struct metrics *metrics;
    void (*wake)(void *arg); /* kv_store_run has something to do. Any thread */
    void *arg;
};

enum status kv_store_create(const struct kv_store_options *o, const struct kv_store_of *of,
                            struct kv_store **out, struct err *err) MUST_CHECK;
/* Ends the tiers' threads; loads that run are over. Blocks held for copies go back to the pool. */
void kv_store_free(struct kv_store *s);

/* Takes reports and begins copies; between steps, and after `wake`. */
void kv_store_run(struct kv_store *s);
/* For how long, at most, nobody need call kv_store_run; -1: until `wake`. */
int kv_store_wait_ms(const struct kv_store *s);
/* What /metrics says. */
void kv_store_update_metrics(struct kv_store *s);

/* ---- down ---- */

/* The pool has published this block. */
void kv_store_offer(struct kv_store *s, const struct tier_block *b);
/* The pool's blocks that are held for copies. */
uint32_t kv_store_n_held(const struct kv_store *s);
/* Waits until none is, for `ms` at most. */
void kv_store_settle(struct kv_store *s, uint32_t ms);

/* Puts a HELD block into host memory now, ahead of what was offered, and waits for its turn for
 * `ms` at most; it stays held until it is copied. It goes to no other tier. ERR_UNSUPPORTED: there
 * is no host tier. */
enum status kv_store_keep(struct kv_store *s, const struct tier_block *b, int32_t block,
                          uint32_t ms) MUST_CHECK;
/* Has the host memory this block, or gets it? */
bool kv_store_is_kept(const struct kv_store *s, struct hash128 key);
/* What keeping n_keep blocks and bringing n back would take. */
double kv_store_swap_seconds(struct kv_store *s, uint32_t n_keep, uint32_t n);
void kv_store_drop(struct kv_store *s, struct hash128 key);

/* ---- up ---- */

struct kv_store_plan {
    uint32_t n;               /* lead blocks to load; 0: compute them */
    uint32_t n_found;         /* that the tiers have */
    bool by_layers;           /* set by the caller: the blocks may come layer by layer */
    double load_s, compute_s; /* predicted for n blocks, or for n_found if n is 0; compute_s 0:
                                 * not measured yet */
};

/* `keys` follow the blocks that the pool has; block_s: seconds in which one is computed, 0: not
 * measured. */
void kv_store_plan(struct kv_store *s, const struct hash128 *keys, uint32_t n, double block_s,
                   struct kv_store_plan *out);

struct kv_load {
    void *owner;
    uint32_t n, n_good;             /* n_good: lead blocks, once it is loaded */
    uint32_t n_from[KV_TIER_KINDS]; /* of n_good */
    uint64_t begin_ns, ns;          /* ns: that it took */
    /* Layer by layer: the blocks are good all or none, and kv_load_n_layers counts. */
    bool by_layers;
    _Atomic uint32_t n_layers;
    double expected_s;
};

/* Loads plan->n blocks into blocks that stay held until it is taken or cancelled. */
struct kv_load *kv_store_load(struct kv_store *s, const struct hash128 *keys, const int32_t *blocks,
                              const struct kv_store_plan *plan, void *owner);
/* Layers of which all its blocks are there, of a load by layers. */
uint32_t kv_load_n_layers(const struct kv_load *load);
/* Waits until a layer is there, of a load by layers, for `ms` at most. ERR_IO: it ended before;
 * ERR_TIMEOUT. */
enum status kv_store_await_layer(struct kv_store *s, const struct kv_load *load, uint32_t layer,
                                 uint32_t ms) MUST_CHECK;
/* Is it over, within `ms`? */
bool kv_store_await_end(struct kv_store *s, const struct kv_load *load, uint32_t ms);
/* Ends and frees it. Waits for the copy of one block at most; on a node of several ranks, for word
 * from the others as well (ranks/tier_ranks.h). */
void kv_store_cancel(struct kv_store *s, struct kv_load *load);
/* One that is over, which the caller frees; NULL: none. */
struct kv_load *kv_store_take_loaded(struct kv_store *s);
void kv_load_free(struct kv_load *load);
bool kv_store_loads(const struct kv_store *s); /* does any load run? */
/* Is a load that begins with this block running? */
bool kv_store_is_loading(const struct kv_store *s, struct hash128 key);
/* The pool had these blocks: the tiers should keep them as well. */
void kv_store_touch(struct kv_store *s, const struct hash128 *keys, uint32_t n);

#endif
