/* prefix_ladder.h - the lengths at which the beginning of a prompt has a key, and the keys.
 *
 * A key is the engine's own: the hash of the block that ends there, which depends on everything
 * before it, the model and the cache salt (shared/kv/kv_prefix.h), so that tenants with salts of
 * their own find nothing of each other, and no prompt can be read from it. Blocks of another size
 * have other keys; a node's record says its size. Keys of all blocks would be too many: the ladder
 * has 1, 2, 4, .. blocks up to about 512 tokens, then 1, 2, 3, 4, 6, 8, 11, 15, 20, 27, .. times as
 * many, about a third more each time. What two prompts have in common is seen that much too short.
 * Thread: any (pure functions). */
#ifndef BATON_SCHEDULER_PREFIX_PREFIX_LADDER_H
#define BATON_SCHEDULER_PREFIX_PREFIX_LADDER_H

#include "scheduler/prefix/prefix.h"

/* LIMIT: beginnings of more tokens, or of more blocks, have no keys: hashing is done on the loop,
 * and takes less than half a millisecond. */
enum { PREFIX_LADDER_TOKENS_MAX = 1 << 18, PREFIX_LADDER_BLOCKS_MAX = 1 << 13 };

struct prefix_ladder {
    uint32_t block_tokens; /* of this size, ... */
    uint64_t model;        /* ... of this model; 0 and 0: none was made */
    uint32_t n;
    struct prefix_rung rungs[PREFIX_RUNGS_MAX]; /* [n], shortest first */
};

/* The next number of blocks after n_blocks; from 0 the first. block_tokens is not 0. */
uint32_t prefix_ladder_next(uint32_t n_blocks, uint32_t block_tokens);
/* Copies the rungs that are asked for: of at least a quarter of the prompt, since less is not worth
 * a look, and none with the last token, which is always computed. Returns how many. */
uint32_t prefix_ladder_ask(const struct prefix_ladder *l, uint32_t n_tokens,
                           struct prefix_rung out[PREFIX_RUNGS_MAX]);
/* Makes the ladder of tokens[n_tokens]. */
void prefix_ladder_make(struct prefix_ladder *l, uint64_t model, uint64_t cache_salt,
                        const int32_t *tokens, uint32_t n_tokens, uint32_t block_tokens);

#endif
