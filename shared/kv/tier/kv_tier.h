/* kv_tier.h - a memory behind the KV pool: what every tier must do.
 *
 * A tier keeps copies of full blocks, each under its key (kv_prefix.h; model and salt are in it)
 * and with a checksum made when it was put. It decides what it forgets for newer blocks.
 *
 *   put ─▶ PUT: the block's bytes are not needed any more; `has` finds it once it is stored
 *   get ─▶ GET: the first n_good blocks of the destination hold what was put
 *
 * Invariants:
 *   1. A block, or a piece of it, goes to its destination only after its checksum was compared. One
 *      that fails is dropped and counted, and ends its get.
 *   2. After GET or cancel nobody writes to the destination blocks. cancel waits for the copy of
 *      one block at most; of a node of several ranks (ranks/), for word from the others as well.
 *   3. Each put that was accepted ends in one PUT, each get in one GET or cancel.
 * Thread: engine, except `wake`, which any thread calls. */
#ifndef BATON_KV_TIER_KV_TIER_H
#define BATON_KV_TIER_KV_TIER_H

#include "kernels/device.h"
#include "shared/base/err.h"
#include "shared/kv/kv_layout.h"
#include "shared/kv/tier/tier_index.h"
#include "shared/kv/tier/tier_rate.h"

struct kv_tier;

enum kv_tier_kind { KV_TIER_HOST, KV_TIER_DISK, KV_TIER_PEER, KV_TIER_KINDS };

/* What every tier is created with. */
struct kv_tier_options {
    struct kv_layout layout; /* the pool's */
    struct device *device;   /* the pool's; borrowed */
    void *pool;              /* its memory; borrowed */
    enum dtype slot_dtype;   /* the pool's, or one that values are rounded to on the way down */
    void (*wake)(void *arg); /* poll has something to report. Any thread; must return at once */
    void *arg;
    /* The tier has evicted a block for another one. Called within its put; NULL: nobody asks. */
    void (*forgot)(void *forgot_arg, enum kv_tier_kind kind, const struct hash128 *key);
    void *forgot_arg;
};

struct kv_tier_put {
    struct tier_block of;
    int32_t block;     /* of the pool; stays held until PUT */
    const void *slot;  /* instead: its bytes in another tier (pin), which stay until PUT; or NULL */
    uint64_t checksum; /* of `slot` */
    uint64_t tag;
};

struct kv_tier_get {
    const struct hash128 *keys; /* [n], `has` found all of them; copied */
    const int32_t *blocks;      /* [n] destinations in the pool; copied */
    uint32_t n;
    uint64_t tag; /* no other running get has it */
    /* Layer by layer instead, for tiers with KV_TIER_LAYERS: *n_layers counts those of which the
     * pieces of all n blocks are there, and `wake` is called with each. n_good is n or 0. Stays
     * until GET or cancel. NULL: block by block. */
    _Atomic uint32_t *n_layers;
};

struct kv_tier_done {
    enum { KV_TIER_PUT, KV_TIER_GET } kind;
    uint64_t tag;
    enum status status; /* GET: why it ended before its end: ERR_CHECKSUM, ERR_IO, ERR_NOT_FOUND.
                         * PUT: why the block was not stored */
    uint32_t n_good;    /* GET */
};

/* A slot that stays. */
struct kv_tier_pin {
    const void *bytes;
    uint64_t checksum;
    uint32_t slot; /* for the tier */
};

struct kv_tier_stats {
    uint32_t n_slots, n_stored; /* slots: that it has room for now */
    uint64_t slot_bytes;
    uint64_t n_puts, n_gets; /* blocks stored, blocks brought back */
    uint64_t n_evicted, n_bad_checksums, n_errors;
    bool is_off;     /* it takes and finds nothing: the log said why. It is tried again later */
    bool is_looking; /* for what it kept before this process began: it may find more soon */
};

enum {
    KV_TIER_PINS = 1,   /* pin and unpin work: its slots are host memory */
    KV_TIER_LAYERS = 2, /* blocks can be brought layer by layer, unless values are rounded */
};

struct kv_tier_ops {
    const char *name; /* as in metrics, traces and logs */
    unsigned caps;
    enum kv_tier_kind kind;
    /* Stops the threads first. Running puts and gets end without reports. */
    void (*free)(struct kv_tier *t);
    bool (*has)(struct kv_tier *t, const struct hash128 *key);
    /* ERR_BUSY: as many as it takes are running, or it is making room. ERR_CONFLICT: it has the
     * block, or is storing it. ERR_FULL: what it holds has to stay. ERR_UNAVAILABLE: it is off. */
    enum status (*put)(struct kv_tier *t, const struct kv_tier_put *p);
    /* ERR_NOT_FOUND: it has forgotten one of them. ERR_UNAVAILABLE: it is off. */
    enum status (*get)(struct kv_tier *t, const struct kv_tier_get *g);
    void (*cancel)(struct kv_tier *t, uint64_t tag);
    void (*drop)(struct kv_tier *t, const struct hash128 *key);
    /* The block was used at now_ns (clock_ns), wherever it lay. */
    void (*touch)(struct kv_tier *t, const struct hash128 *key, uint64_t now_ns);
    bool (*poll)(struct kv_tier *t, struct kv_tier_done *out);
    /* Now and then, at least every KV_TIER_TICK_MS while the engine runs. */
    void (*tick)(struct kv_tier *t, uint64_t now_ms);
    void (*stats)(const struct kv_tier *t, struct kv_tier_stats *out);
    /* Keeps a block's slot as it is until unpin, even if it is dropped. False: it has no such
     * block. */
    bool (*pin)(struct kv_tier *t, const struct hash128 *key, struct kv_tier_pin *out);
    void (*unpin)(struct kv_tier *t, const struct kv_tier_pin *pin);
};

enum { KV_TIER_TICK_MS = 1000 };

struct kv_tier {
    const struct kv_tier_ops *ops; /* first member of every implementation's struct */
    struct tier_rate rate;         /* of its gets */
};

/* Blocks of these keys that it has, from the first on. */
uint32_t kv_tier_find(struct kv_tier *t, const struct hash128 *keys, uint32_t n);

/* For tests: the definition, which copies at once, in memory of its own, n_slots blocks. */
enum status kv_tier_mem_create(const struct kv_tier_options *o, uint32_t n_slots,
                               struct kv_tier **out, struct err *err) MUST_CHECK;
/* Host memory; pinned for a GPU. ERR_NOMEM, ERR_CONFIG: no room for a block. */
enum status kv_tier_host_create(const struct kv_tier_options *o, uint64_t bytes,
                                struct kv_tier **out, struct err *err) MUST_CHECK;

#endif
