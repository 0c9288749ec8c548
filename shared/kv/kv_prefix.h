/* kv_prefix.h - keys of KV blocks in the prefix cache: a chain of hashes over the tokens, seeded by
 * model and salt.
 *
 * A model with two attention paths (struct model.two_attention_paths) computes generated tokens
 * differently from prompt tokens, so equal tokens do not mean equal bits. There the key of a block
 * with generated tokens includes where they begin in it, and the chain carries that on. Only a
 * sequence that continues or repeats the same output finds such a block, not a prompt with the same
 * text.
 *
 * Only the engine uses these keys. The scheduler hashes a prompt's first block with another seed,
 * to choose a node (rendezvous hashing); that hash is never the key of a block.
 *
 * Thread: any. */
#ifndef BATON_KV_KV_PREFIX_H
#define BATON_KV_KV_PREFIX_H

#include "shared/base/hash/hash.h"

/* The seed that the first block's hash is chained to. Blocks of another model or salt never
 * match. */
struct hash128 kv_prefix_seed(uint64_t model_fingerprint, uint64_t cache_salt);
/* Hashes the full blocks [first, end) of `tokens` into out[first..end). Needs out[first - 1] when
 * first > 0. */
void kv_prefix_hashes(struct hash128 seed, const int32_t *tokens, uint32_t block_tokens,
                      uint32_t first, uint32_t end, struct hash128 *out);
/* The same for a model with two attention paths that generated the tokens from n_prompt on. */
void kv_prefix_hashes_generated(struct hash128 seed, const int32_t *tokens, uint32_t block_tokens,
                                uint32_t n_prompt, uint32_t first, uint32_t end,
                                struct hash128 *out);

#endif
