/* hash.h - the hashes that peers must agree on: XXH3 (libxxhash), fixed by its specification.
 *
 * The chained block hash names a KV block by everything before it: hash(i) = XXH3_128(hash(i-1) ||
 * tokens of block i), with hash(-1) the seed. The engine finds blocks in the prefix cache by it;
 * the scheduler chooses the node that probably has them by the hash of a prompt's first block.
 * Thread: any. */
#ifndef BATON_BASE_HASH_HASH_H
#define BATON_BASE_HASH_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct hash128 {
    uint64_t lo, hi;
};

/* XXH3 64 bit, also the checksum of KV pieces; callers combine the values of several pieces. */
uint64_t hash_64(const void *p, size_t n, uint64_t seed);
/* The same with seed 0 for each of n_inputs inputs of n bytes, several at a time: from memory that
 * is not in the cache scattered ones are read faster side by side than one after the other. */
void hash_64_each(const void *const *inputs, size_t n_inputs, size_t n, uint64_t *out);
struct hash128 hash_128(const void *p, size_t n);
bool hash128_eq(struct hash128 a, struct hash128 b);
/* The parent of a first block. Blocks of another model or salt never match. */
struct hash128 hash_block_seed(uint64_t model_fingerprint, uint64_t cache_salt);
/* The hash of the block after `parent`; tokens[n_tokens] is a full block, int32 little endian. */
struct hash128 hash_block(struct hash128 parent, const int32_t *tokens, size_t n_tokens);

/* HMAC-SHA256 (OpenSSL) and a comparison whose time does not depend on the contents. */
void hmac_sha256(const void *key, size_t key_len, const void *msg, size_t msg_len, uint8_t out[32]);
void sha256(const void *msg, size_t msg_len, uint8_t out[32]);
bool equal_constant_time(const void *a, const void *b, size_t n);
/* Fills `out` with n bytes from the kernel's random generator. */
void random_bytes(void *out, size_t n);

#endif
