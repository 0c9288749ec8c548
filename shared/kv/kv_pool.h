/* kv_pool.h - who owns each KV block: reference counts, the prefix cache's idle blocks, quarantine.
 *
 * Every block is in exactly one state:
 *   FREE        in the free list
 *   HELD        ref > 0 by sequences (a shared prefix block has several)
 *   CACHED      ref == 0, published in the prefix cache; the least recently used is evicted first
 *   QUARANTINE  given up by its owner while a peer may still write to it, until
 *               kv_pool_free_quarantined
 * Invariant: a block that a peer may still write to is never FREE, CACHED or handed out.
 * Thread: engine. The device owns the pool's memory; kv_pool only counts blocks. */
#ifndef BATON_KV_KV_POOL_H
#define BATON_KV_KV_POOL_H

#include "shared/base/hash/hash.h"
#include "shared/kv/kv_layout.h"

struct kv_pool;

struct kv_pool_stats {
    uint32_t n_blocks, n_free, n_held, n_cached, n_quarantine;
    uint64_t prefix_queries, prefix_hits; /* tokens asked for, tokens found */
    uint64_t evictions;
};

struct kv_pool *kv_pool_create(uint32_t n_blocks, uint32_t block_tokens, bool prefix_cache);
void kv_pool_destroy(struct kv_pool *p);

/* Number of blocks that kv_pool_alloc could hand out now: free and cached ones. */
uint32_t kv_pool_available(const struct kv_pool *p);
/* Takes n blocks (ref 1 each), evicting cached ones as needed; all or ERR_BUSY. */
enum status kv_pool_alloc(struct kv_pool *p, uint32_t n, int32_t *out) MUST_CHECK;
/* Drops one reference. Without references the block is CACHED if it was published, else FREE. */
void kv_pool_unref(struct kv_pool *p, int32_t block);
/* Moves a block with one reference to QUARANTINE (a block that a peer may write to is never
 * shared). The caller calls kv_pool_free_quarantined once no write can arrive any more. */
void kv_pool_quarantine(struct kv_pool *p, int32_t block);
void kv_pool_free_quarantined(struct kv_pool *p, int32_t block);

/* Finds the longest run of cached full blocks for these chained hashes and takes a reference on
 * each. Returns the number found. */
uint32_t kv_pool_match(struct kv_pool *p, const struct hash128 *hashes, uint32_t n, int32_t *out);
/* Number of blocks that kv_pool_match would find, without references or statistics. *n_idle (may be
 * NULL): how many of them no sequence holds; kv_pool_available counts those too. */
uint32_t kv_pool_peek(const struct kv_pool *p, const struct hash128 *hashes, uint32_t n,
                      uint32_t *n_idle);
/* One more reference on a HELD block. */
void kv_pool_ref(struct kv_pool *p, int32_t block);
/* Takes a reference on the block that is published under this hash; -1: there is none. */
int32_t kv_pool_hold(struct kv_pool *p, struct hash128 hash);
/* Publishes a full, HELD block in the prefix cache under its hash. Does nothing when another block
 * has that hash. */
void kv_pool_publish(struct kv_pool *p, int32_t block, struct hash128 hash);
void kv_pool_get_stats(const struct kv_pool *p, struct kv_pool_stats *out);
/* Asserts that every block is in exactly one state and that counts and lists agree. For tests. */
void kv_pool_verify(const struct kv_pool *p);

#endif
