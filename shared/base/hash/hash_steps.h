/* hash_steps.h - XXH3 in steps, for code that does something else with the bytes on their way, such
 * as copying them or hashing others: begin, one step per block, end. The value is that of hash_64
 * with seed 0.
 *
 * Inputs of at most HASH_SHORT bytes have no steps: hash_short. The compiler's flags choose the
 * vector code, so a file that includes this is compiled for one instruction set and is called only
 * on CPUs that have it. XXH_INLINE_ALL keeps such code out of functions that other files share.
 * Thread: any. */
#ifndef BATON_BASE_HASH_HASH_STEPS_H
#define BATON_BASE_HASH_HASH_STEPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum {
    HASH_SHORT = XXH3_MIDSIZE_MAX,
    HASH_STRIPES = (XXH_SECRET_DEFAULT_SIZE - XXH_STRIPE_LEN) / XXH_SECRET_CONSUME_RATE,
    HASH_BLOCK = HASH_STRIPES * XXH_STRIPE_LEN /* bytes of a step */
};

#define HASH_INLINE static inline __attribute__((always_inline))

struct hash_steps {
    XXH_ALIGN(64) xxh_u64 acc[XXH_ACC_NB];
};

HASH_INLINE uint64_t hash_short(const void *p, size_t n) { return XXH3_64bits(p, n); }

HASH_INLINE struct hash_steps hash_steps_begin(void)
{
    return (struct hash_steps){ .acc = XXH3_INIT_ACC };
}

HASH_INLINE void hash_stripes(struct hash_steps *h, const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        XXH3_accumulate_512(h->acc, p + i * XXH_STRIPE_LEN,
                            XXH3_kSecret + i * XXH_SECRET_CONSUME_RATE);
}

/* One block, at least one byte before the end of the input. */
HASH_INLINE void hash_steps_block(struct hash_steps *h, const void *p)
{
    hash_stripes(h, p, HASH_STRIPES);
    XXH3_scrambleAcc(h->acc, XXH3_kSecret + XXH_SECRET_DEFAULT_SIZE - XXH_STRIPE_LEN);
}

/* The value of the `n` bytes at `p`, of which all blocks but the last, or all that are not full,
 * were steps: (n - 1) / HASH_BLOCK of them. */
HASH_INLINE uint64_t hash_steps_end(struct hash_steps *h, const void *p, size_t n)
{
    const unsigned char *bytes = p;
    size_t done = (n - 1) / HASH_BLOCK * HASH_BLOCK;
    hash_stripes(h, bytes + done, (n - 1 - done) / XXH_STRIPE_LEN);
    XXH3_accumulate_512(h->acc, bytes + n - XXH_STRIPE_LEN,
                        XXH3_kSecret + XXH_SECRET_DEFAULT_SIZE - XXH_STRIPE_LEN -
                            XXH_SECRET_LASTACC_START);
    return XXH3_mergeAccs(h->acc, XXH3_kSecret + XXH_SECRET_MERGEACCS_START,
                          (uint64_t)n * XXH_PRIME64_1);
}

enum {
    HASH_LINE = 64,
    HASH_TOGETHER = 4,   /* inputs side by side; two are slower, eight are not faster */
    HASH_FETCH_LINES = 4 /* of the next ones; after those the CPU itself reads ahead */
};

/* Fetches the beginning of an input that will be read soon. */
HASH_INLINE void hash_fetch(const char *p)
{
    for (size_t i = 0; i < HASH_FETCH_LINES; i++) __builtin_prefetch(p + i * HASH_LINE);
}

/* HASH_TOGETHER inputs, block by block in turns. `next`: as many that follow, or NULL. */
HASH_INLINE void hash_together(const void *const *inputs, const void *const *next, size_t n,
                               uint64_t *out)
{
    struct hash_steps h[HASH_TOGETHER];
    for (size_t i = 0; i < HASH_TOGETHER; i++) h[i] = hash_steps_begin();
    for (size_t i = 0; next && i < HASH_TOGETHER; i++) hash_fetch(next[i]);
    for (size_t at = 0; at + HASH_BLOCK < n; at += HASH_BLOCK)
        for (size_t i = 0; i < HASH_TOGETHER; i++)
            hash_steps_block(&h[i], (const char *)inputs[i] + at);
    for (size_t i = 0; i < HASH_TOGETHER; i++) out[i] = hash_steps_end(&h[i], inputs[i], n);
}

/* hash_64_each. */
HASH_INLINE void hash_each(const void *const *inputs, size_t n_inputs, size_t n, uint64_t *out)
{
    size_t i = 0;
    for (; n > HASH_SHORT && i + HASH_TOGETHER <= n_inputs; i += HASH_TOGETHER) {
        bool more = i + 2 * HASH_TOGETHER <= n_inputs;
        hash_together(inputs + i, more ? inputs + i + HASH_TOGETHER : NULL, n, out + i);
    }
    for (; i < n_inputs; i++) out[i] = XXH3_64bits(inputs[i], n);
}

#endif
