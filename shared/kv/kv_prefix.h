/* kv_prefix.h - the names of KV blocks: a chain of hashes over the tokens, begun by model and salt.
 *
 * Engine and scheduler both call this, so that a scheduler can ask a node for a prefix in the node's own names.
 * Thread: any. */
#ifndef BATON_KV_KV_PREFIX_H
#define BATON_KV_KV_PREFIX_H

#include "shared/base/hash.h"

/* hash(-1): what the first block's hash is chained to. Blocks of another model or another salt never match. */
struct hash128 kv_prefix_seed(uint64_t model_fingerprint, uint64_t cache_salt);
/* Hashes of full blocks [first, end) of `tokens` into out[first..end); out[first - 1] must be there when first > 0. */
void           kv_prefix_hashes(struct hash128 seed, const int32_t *tokens, uint32_t block_tokens, uint32_t first, uint32_t end,
                                struct hash128 *out);

#endif
