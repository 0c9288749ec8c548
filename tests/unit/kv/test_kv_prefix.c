/* test_kv_prefix.c - keys of KV blocks: what they depend on and what not. */
#include "shared/kv/kv_prefix.h"

#include "tests/harness/test.h"

enum { BLOCK = 4, N = 5 };

static const int32_t TOKENS[N * BLOCK] = { 1,  2,  3,  4,  5,  6,  7,  8,  9,  10,
                                           11, 12, 13, 14, 15, 16, 17, 18, 19, 20 };

static void hashes_of(uint64_t salt, uint32_t n_prompt, struct hash128 out[N])
{
    kv_prefix_hashes_generated(hash_block_seed(7, salt), TOKENS, BLOCK, n_prompt, 0, N, out);
}

/* The number of leading keys that are equal. */
static uint32_t common(const struct hash128 *a, const struct hash128 *b)
{
    uint32_t n = 0;
    while (n < N && hash128_eq(a[n], b[n])) n++;
    /* a chain: after a difference all keys differ */
    for (uint32_t i = n; i < N; i++) CHECK(!hash128_eq(a[i], b[i]));
    return n;
}

TEST(prefix_hashes_of_prompts_know_no_attention_path)
{
    struct hash128 plain[N], prompt[N], other[N];
    kv_prefix_hashes(hash_block_seed(7, 0), TOKENS, BLOCK, 0, N, plain);
    hashes_of(0, N * BLOCK, prompt); /* no generated tokens */
    CHECK_EQ_INT(common(plain, prompt), N);
    hashes_of(0, UINT32_MAX, prompt);
    CHECK_EQ_INT(common(plain, prompt), N);
    hashes_of(1, UINT32_MAX, other);
    CHECK_EQ_INT(common(plain, other), 0);
}

TEST(prefix_hashes_tell_where_generated_tokens_begin)
{
    struct hash128 prompt[N], a[N], b[N];
    hashes_of(0, UINT32_MAX, prompt);
    for (uint32_t n = 0; n < N * BLOCK; n++) {
        hashes_of(0, n, a);
        CHECK_EQ_INT(common(prompt, a), n / BLOCK); /* whole blocks of prompt tokens */
        for (uint32_t m = 0; m < n; m++) {
            hashes_of(0, m, b);
            CHECK_EQ_INT(common(a, b), m / BLOCK);
        }
    }
}

TEST(prefix_hashes_are_the_same_in_pieces)
{
    struct hash128 whole[N], pieces[N], seed = hash_block_seed(7, 0);
    for (uint32_t n = 0; n <= N * BLOCK; n += 3) {
        hashes_of(0, n, whole);
        kv_prefix_hashes_generated(seed, TOKENS, BLOCK, n, 0, 2, pieces);
        kv_prefix_hashes_generated(seed, TOKENS, BLOCK, n, 2, 3, pieces);
        kv_prefix_hashes_generated(seed, TOKENS, BLOCK, n, 3, N, pieces);
        CHECK_EQ_INT(common(whole, pieces), N);
    }
}

TEST_MAIN(CASE(prefix_hashes_of_prompts_know_no_attention_path),
          CASE(prefix_hashes_tell_where_generated_tokens_begin),
          CASE(prefix_hashes_are_the_same_in_pieces))
