/* hash.c - XXH3 for identity and checksums, SHA-256 and HMAC for authentication, random bytes from
 * the kernel. Thread: any. */
#include "shared/base/hash/hash.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>
#include <sys/random.h>

#define XXH_STATIC_LINKING_ONLY /* for the size of the state, which lives on the stack */
#include <xxhash.h>

#include "shared/base/assert.h"
#include "shared/base/hash/hash_isa.h"

/* Machines exchange hashes, and these are computed over the bytes in memory. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens and hashes are little endian");
_Static_assert(sizeof(struct hash128) == 16, "no padding");

enum { LONG_INPUT = 1024 }; /* bytes; below this XXH3 hardly uses vectors */

uint64_t hash_64(const void *p, size_t n, uint64_t seed)
{
#if HASH_ISA
    if (n >= LONG_INPUT && __builtin_cpu_supports("avx512f")) return hash_64_avx512(p, n, seed);
    if (n >= LONG_INPUT && __builtin_cpu_supports("avx2")) return hash_64_avx2(p, n, seed);
#endif
    return XXH3_64bits_withSeed(p, n, seed);
}

void hash_64_each(const void *const *inputs, size_t n_inputs, size_t n, uint64_t *out)
{
#if HASH_ISA
    if (n >= LONG_INPUT && __builtin_cpu_supports("avx512f")) {
        hash_64_each_avx512(inputs, n_inputs, n, out);
        return;
    }
    if (n >= LONG_INPUT && __builtin_cpu_supports("avx2")) {
        hash_64_each_avx2(inputs, n_inputs, n, out);
        return;
    }
#endif
    for (size_t i = 0; i < n_inputs; i++) out[i] = XXH3_64bits(inputs[i], n);
}

struct hash128 hash_128(const void *p, size_t n)
{
    XXH128_hash_t h = XXH3_128bits(p, n);
    return (struct hash128){ .lo = h.low64, .hi = h.high64 };
}

bool hash128_eq(struct hash128 a, struct hash128 b) { return a.lo == b.lo && a.hi == b.hi; }

struct hash128 hash_block_seed(uint64_t model_fingerprint, uint64_t cache_salt)
{
    const uint64_t words[2] = { model_fingerprint, cache_salt };
    return hash_128(words, sizeof words);
}

struct hash128 hash_block(struct hash128 parent, const int32_t *tokens, size_t n_tokens)
{
    XXH3_state_t state;
    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, &parent, sizeof parent);
    XXH3_128bits_update(&state, tokens, n_tokens * sizeof *tokens);
    XXH128_hash_t h = XXH3_128bits_digest(&state);
    return (struct hash128){ .lo = h.low64, .hi = h.high64 };
}

void hmac_sha256(const void *key, size_t key_len, const void *msg, size_t msg_len, uint8_t out[32])
{
    ASSERT(key_len <= INT32_MAX);
    unsigned int n = 32;
    /* To OpenSSL a NULL key means "reuse the previous key", not an empty one. */
    const void *mac = HMAC(EVP_sha256(), key_len ? key : "", (int)key_len, msg, msg_len, out, &n);
    ASSERT(mac && n == 32);
}

void sha256(const void *msg, size_t msg_len, uint8_t out[32]) { SHA256(msg, msg_len, out); }

bool equal_constant_time(const void *a, const void *b, size_t n)
{
    return n == 0 || CRYPTO_memcmp(a, b, n) == 0;
}

void random_bytes(void *out, size_t n)
{
    uint8_t *p = out;
    while (n > 0) {
        ssize_t got = getrandom(p, n, 0);
        if (got < 0 && errno == EINTR) continue;
        /* getrandom without flags fails only for wrong arguments. */
        ASSERT(got > 0);
        p += got;
        n -= (size_t)got;
    }
}
