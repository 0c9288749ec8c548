/* kv_prefix.h - keys of KV blocks in the prefix cache: a chain of hashes over the tokens, seeded by
 * model and salt.
 *
 * A model with two attention paths (struct model.two_attention_paths) computes generated tokens
 * differently from prompt tokens, so equal tokens do not mean equal bits. There the key of a block
 * with generated tokens includes where they begin in it, and the chain carries that on. Only a
 * sequence that continues or repeats the same output finds such a block, not a prompt with the same
 * text.
 *
 * The seed is hash_block_seed. The scheduler computes the key of a prompt's first block alike, and
 * chooses a node by it (rendezvous hashing), so that equal prefixes meet their cached blocks.
 *
 * Thread: any. */
#ifndef BATON_KV_KV_PREFIX_H
#define BATON_KV_KV_PREFIX_H

#include "shared/base/hash/hash.h"

/* Hashes the full blocks [first, end) of `tokens` into out[first..end). Needs out[first - 1] when
 * first > 0. */
void kv_prefix_hashes(struct hash128 seed, const int32_t *tokens, uint32_t block_tokens,
                      uint32_t first, uint32_t end, struct hash128 *out);
/* The same for a model with two attention paths that generated the tokens from n_prompt on. */
void kv_prefix_hashes_generated(struct hash128 seed, const int32_t *tokens, uint32_t block_tokens,
                                uint32_t n_prompt, uint32_t first, uint32_t end,
                                struct hash128 *out);

#endif
