/* tier_index.h - which block lies in which slot of a tier, and which slot is used again next.
 *
 *   FREE ─ take ─▶ FILLING ─ commit ─▶ STORED ─ drop, or evicted by a take ─▶ FREE
 *                     └─ abandon, or commit after a drop ────────────────────▶ FREE
 *
 * Only STORED blocks are found. A block that others of the tier follow in their chain is not
 * evicted before them, since they could not be used without it. Of some blocks that nothing
 * follows, taken at random, the one goes that was unused for longest for what it costs: the time to
 * make it again, which grows with the tokens before it, that attention has to read. (All blocks of
 * a tier have as many bytes.) So a take looks at a fixed number of slots however many there are.
 * A pinned slot is being read, or has to stay: it is not evicted, and a drop frees it when the last
 * pin has gone. Thread: its owner's. */
#ifndef BATON_KV_TIER_TIER_INDEX_H
#define BATON_KV_TIER_TIER_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/hash/hash.h"

/* A block as tiers know it: its key and that of the block before it (kv_prefix.h); `depth` blocks
 * are before it. */
struct tier_block {
    struct hash128 key, parent;
    uint32_t depth;
};

struct tier_index;

struct tier_index *tier_index_create(void);
/* Calls fn(arg, key) for each block that a take evicts, before the take returns. */
void tier_index_on_evicted(struct tier_index *x, void (*fn)(void *arg, const struct hash128 *key),
                           void *arg);
void tier_index_free(struct tier_index *x);
/* Adds n FREE slots behind those that there are; returns the first. */
uint32_t tier_index_add_slots(struct tier_index *x, uint32_t n);
/* Takes the slots [first, first + n) out: none is pinned or FILLING. What they hold is
 * forgotten. */
void tier_index_remove_slots(struct tier_index *x, uint32_t first, uint32_t n);
/* Adds slots again that were taken out, as FREE ones. */
void tier_index_return_slots(struct tier_index *x, uint32_t first, uint32_t n);
/* May they be removed? */
bool tier_index_are_idle(const struct tier_index *x, uint32_t first, uint32_t n);
uint32_t tier_index_n_slots(const struct tier_index *x); /* without those taken out */
uint32_t tier_index_n_stored(const struct tier_index *x);

/* The slot of a STORED block, -1: it has none. */
int32_t tier_index_find(const struct tier_index *x, struct hash128 key);
/* Is the block STORED, or FILLING a slot? */
bool tier_index_has(const struct tier_index *x, struct hash128 key);
/* It is used at now_ns (clock_ns). */
void tier_index_touch(struct tier_index *x, uint32_t slot, uint64_t now_ns);
/* Takes a FREE slot for a block that no slot has, or else (with `evict`) that of a STORED one.
 * Returns it, FILLING; -1: none, or the block is being filled already. */
int32_t tier_index_take(struct tier_index *x, const struct tier_block *b, bool evict,
                        uint64_t now_ns);
/* False: it was dropped meanwhile, and is FREE. */
bool tier_index_commit(struct tier_index *x, uint32_t slot);
void tier_index_abandon(struct tier_index *x, uint32_t slot);
/* Puts a block that lies in a FREE slot already, unused since `used_ns`. False: another has it. */
bool tier_index_adopt(struct tier_index *x, uint32_t slot, const struct tier_block *b,
                      uint64_t used_ns);
/* Forgets a block, also one that is being filled. */
void tier_index_drop(struct tier_index *x, struct hash128 key);
void tier_index_pin(struct tier_index *x, uint32_t slot);
void tier_index_unpin(struct tier_index *x, uint32_t slot);
/* For tests: what a STORED or FILLING slot holds. */
const struct tier_block *tier_index_block(const struct tier_index *x, uint32_t slot);
uint64_t tier_index_n_evicted(const struct tier_index *x);
/* For tests: asserts that states, lists and chains agree. */
void tier_index_verify(const struct tier_index *x);

#endif
