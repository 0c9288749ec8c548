/* test_kv_pool.c - block states, order of eviction, published blocks, quarantine, and long random
 * use checked against a model. */
#include "shared/kv/kv_pool.h"

#include <string.h>

#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "shared/kv/kv_prefix.h"
#include "tests/harness/test.h"

enum { BT = 4 };

static struct kv_pool_stats stats(const struct kv_pool *p)
{
    struct kv_pool_stats s;
    kv_pool_verify(p);
    kv_pool_get_stats(p, &s);
    CHECK_EQ_INT(s.n_free + s.n_held + s.n_cached + s.n_quarantine, s.n_blocks);
    return s;
}

static struct hash128 hash_of(uint32_t i) { return hash_128(&i, sizeof i); }

/* Takes one block, publishes it under hash i and returns it. */
static int32_t cache_one(struct kv_pool *p, uint32_t i)
{
    int32_t b;
    CHECK_OK(kv_pool_alloc(p, 1, &b));
    kv_pool_publish(p, b, hash_of(i));
    kv_pool_unref(p, b);
    return b;
}

TEST(alloc_is_all_or_nothing)
{
    struct kv_pool *p = kv_pool_create(4, BT, true);
    int32_t b[8];
    CHECK_STATUS(kv_pool_alloc(p, 5, b), ERR_BUSY);
    CHECK_EQ_INT(stats(p).n_free, 4);
    CHECK_OK(kv_pool_alloc(p, 4, b));
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++) CHECK(b[i] != b[j]);
    CHECK_STATUS(kv_pool_alloc(p, 1, b + 4), ERR_BUSY);
    CHECK_OK(kv_pool_alloc(p, 0, b));
    CHECK_EQ_INT(kv_pool_available(p), 0);
    kv_pool_unref(p, b[2]);
    CHECK_EQ_INT(stats(p).n_free, 1);
    kv_pool_destroy(p);
}

TEST(last_reference_frees_an_unpublished_block)
{
    struct kv_pool *p = kv_pool_create(1, BT, true);
    int32_t b;
    CHECK_OK(kv_pool_alloc(p, 1, &b));
    CHECK_EQ_INT(stats(p).n_held, 1);
    kv_pool_unref(p, b);
    CHECK_EQ_INT(stats(p).n_free, 1);
    kv_pool_destroy(p);
}

TEST(published_block_is_found_again)
{
    struct kv_pool *p = kv_pool_create(3, BT, true);
    struct hash128 h[3] = { hash_of(0), hash_of(1), hash_of(2) };
    int32_t b0 = cache_one(p, 0), b1 = cache_one(p, 1), got[3];
    uint32_t n_idle = 9;
    CHECK_EQ_INT(stats(p).n_cached, 2);
    CHECK_EQ_INT(kv_pool_peek(p, h, 3, &n_idle), 2);
    CHECK_EQ_INT(n_idle, 2);
    CHECK_EQ_INT(stats(p).prefix_queries, 0);
    CHECK_EQ_INT(kv_pool_match(p, h, 3, got), 2);
    CHECK_EQ_INT(got[0], b0);
    CHECK_EQ_INT(got[1], b1);
    CHECK_EQ_INT(stats(p).n_held, 2);
    CHECK_EQ_INT(stats(p).prefix_queries, 3 * BT);
    CHECK_EQ_INT(stats(p).prefix_hits, 2 * BT);
    CHECK_EQ_INT(kv_pool_match(p, h, 1, got), 1); /* a second reference */
    kv_pool_unref(p, b0);
    CHECK_EQ_INT(stats(p).n_held, 2);
    kv_pool_unref(p, b0);
    CHECK_EQ_INT(stats(p).n_held, 1);
    CHECK_EQ_INT(kv_pool_peek(p, h, 3, &n_idle), 2);
    CHECK_EQ_INT(n_idle, 1); /* b1 is held */
    kv_pool_destroy(p);
}

TEST(match_stops_at_the_first_gap)
{
    struct kv_pool *p = kv_pool_create(3, BT, true);
    struct hash128 h[3] = { hash_of(0), hash_of(7), hash_of(2) };
    int32_t got[3];
    cache_one(p, 0);
    cache_one(p, 2);
    CHECK_EQ_INT(kv_pool_match(p, h, 3, got), 1);
    CHECK_EQ_INT(kv_pool_match(p, h, 0, got), 0);
    kv_pool_destroy(p);
}

TEST(least_recently_given_back_is_evicted_first)
{
    struct kv_pool *p = kv_pool_create(3, BT, true);
    int32_t got;
    struct hash128 h[3] = { hash_of(0), hash_of(1), hash_of(2) };
    for (uint32_t i = 0; i < 3; i++) cache_one(p, i);
    CHECK_EQ_INT(kv_pool_match(p, &h[0], 1, &got), 1); /* use 0 again: 1 is the oldest now */
    kv_pool_unref(p, got);
    CHECK_OK(kv_pool_alloc(p, 1, &got));
    CHECK_EQ_INT(stats(p).evictions, 1);
    CHECK_EQ_INT(kv_pool_peek(p, &h[0], 1, NULL), 1);
    CHECK_EQ_INT(kv_pool_peek(p, &h[1], 1, NULL), 0);
    CHECK_EQ_INT(kv_pool_peek(p, &h[2], 1, NULL), 1);
    kv_pool_destroy(p);
}

TEST(free_blocks_go_before_cached_ones)
{
    struct kv_pool *p = kv_pool_create(3, BT, true);
    int32_t b[2];
    cache_one(p, 0);
    CHECK_OK(kv_pool_alloc(p, 2, b));
    CHECK_EQ_INT(stats(p).evictions, 0);
    CHECK_EQ_INT(stats(p).n_cached, 1);
    kv_pool_destroy(p);
}

TEST(second_block_of_a_hash_stays_unpublished)
{
    struct kv_pool *p = kv_pool_create(2, BT, true);
    int32_t b[2];
    CHECK_OK(kv_pool_alloc(p, 2, b));
    kv_pool_publish(p, b[0], hash_of(0));
    kv_pool_publish(p, b[0], hash_of(0));
    kv_pool_publish(p, b[1], hash_of(0));
    kv_pool_unref(p, b[0]);
    kv_pool_unref(p, b[1]);
    CHECK_EQ_INT(stats(p).n_cached, 1);
    CHECK_EQ_INT(stats(p).n_free, 1);
    kv_pool_destroy(p);
}

TEST(quarantined_block_is_out_of_reach_until_fenced)
{
    struct kv_pool *p = kv_pool_create(2, BT, true);
    int32_t b[2], other;
    struct hash128 h = hash_of(0);
    CHECK_OK(kv_pool_alloc(p, 2, b));
    kv_pool_publish(p, b[0], h);
    kv_pool_quarantine(p, b[0]);
    CHECK_EQ_INT(stats(p).n_quarantine, 1);
    CHECK_EQ_INT(kv_pool_available(p), 0);
    CHECK_STATUS(kv_pool_alloc(p, 1, &other), ERR_BUSY);
    CHECK_EQ_INT(kv_pool_peek(p, &h, 1, NULL), 0); /* its contents cannot be trusted */
    kv_pool_free_quarantined(p, b[0]);
    CHECK_EQ_INT(stats(p).n_free, 1);
    kv_pool_destroy(p);
}

TEST(without_prefix_cache_nothing_is_kept)
{
    struct kv_pool *p = kv_pool_create(1, BT, false);
    struct hash128 h = hash_of(0);
    int32_t got;
    cache_one(p, 0);
    CHECK_EQ_INT(stats(p).n_free, 1);
    CHECK_EQ_INT(kv_pool_match(p, &h, 1, &got), 0);
    CHECK_EQ_INT(stats(p).prefix_queries, 0);
    kv_pool_destroy(p);
}

TEST(chain_depends_on_model_salt_and_all_tokens_before)
{
    int32_t tokens[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    struct hash128 a[2], b[2], c[2];
    kv_prefix_hashes(hash_block_seed(1, 0), tokens, BT, 0, 2, a);
    kv_prefix_hashes(hash_block_seed(1, 0), tokens, BT, 0, 1, b);
    kv_prefix_hashes(hash_block_seed(1, 0), tokens, BT, 1, 2, b);
    CHECK(hash128_eq(a[0], b[0]) && hash128_eq(a[1], b[1]));
    kv_prefix_hashes(hash_block_seed(2, 0), tokens, BT, 0, 2, b);
    kv_prefix_hashes(hash_block_seed(1, 9), tokens, BT, 0, 2, c);
    CHECK(!hash128_eq(a[0], b[0]) && !hash128_eq(a[0], c[0]) && !hash128_eq(b[0], c[0]));
    tokens[0] = 9;
    kv_prefix_hashes(hash_block_seed(1, 0), tokens, BT, 0, 2, b);
    CHECK(!hash128_eq(a[1], b[1]));
}

/* Random calls that a correct caller could make: kv_pool_verify and the counts here must agree. */
TEST(random_use_keeps_every_block_in_one_state)
{
    enum { BLOCKS = 37, HELD_MAX = 64, ROUNDS = 20000 };
    struct kv_pool *p = kv_pool_create(BLOCKS, BT, true);
    int32_t held[HELD_MAX], quarantined[BLOCKS]; /* one entry per reference */
    uint32_t refs[BLOCKS] = { 0 }, n_held = 0, n_quarantined = 0;
    bool named[BLOCKS] = { false };
    for (uint64_t round = 0; round < ROUNDS; round++) {
        uint32_t r[4], pick;
        rng_philox(7, 0, round, r);
        pick = n_held ? r[1] % n_held : 0;
        switch (r[0] % 5) {
        case 0: {
            uint32_t n = r[1] % 5;
            if (n_held + n > HELD_MAX || kv_pool_alloc(p, n, held + n_held) != OK) break;
            for (uint32_t i = 0; i < n; i++) {
                CHECK_EQ_INT(refs[held[n_held + i]]++, 0);
                named[held[n_held + i]] = false;
            }
            n_held += n;
            break;
        }
        case 1:
            if (n_held == 0) break;
            kv_pool_unref(p, held[pick]);
            refs[held[pick]]--;
            held[pick] = held[--n_held];
            break;
        case 2:
            if (n_held == 0 || named[held[pick]]) break;
            named[held[pick]] = true; /* once per use, so that no block gets two hashes */
            kv_pool_publish(p, held[pick], hash_of(r[2] % 50));
            break;
        case 3: {
            struct hash128 h = hash_of(r[2] % 50);
            if (n_held == HELD_MAX || kv_pool_match(p, &h, 1, held + n_held) != 1) break;
            refs[held[n_held]]++;
            named[held[n_held++]] = true;
            break;
        }
        case 4:
            if (n_quarantined && r[1] % 2) {
                kv_pool_free_quarantined(p, quarantined[--n_quarantined]);
            } else if (n_held && refs[held[pick]] == 1 && n_quarantined < 8) {
                kv_pool_quarantine(p, held[pick]);
                refs[held[pick]] = 0;
                quarantined[n_quarantined++] = held[pick];
                held[pick] = held[--n_held];
            }
            break;
        default: break;
        }
        struct kv_pool_stats s = stats(p);
        uint32_t n = 0;
        for (int i = 0; i < BLOCKS; i++) n += refs[i] > 0;
        CHECK_EQ_INT(s.n_held, n);
        CHECK_EQ_INT(s.n_quarantine, n_quarantined);
    }
    CHECK(stats(p).evictions > 0);
    kv_pool_destroy(p);
}

TEST_MAIN(CASE(alloc_is_all_or_nothing), CASE(last_reference_frees_an_unpublished_block),
          CASE(published_block_is_found_again), CASE(match_stops_at_the_first_gap),
          CASE(least_recently_given_back_is_evicted_first), CASE(free_blocks_go_before_cached_ones),
          CASE(second_block_of_a_hash_stays_unpublished),
          CASE(quarantined_block_is_out_of_reach_until_fenced),
          CASE(without_prefix_cache_nothing_is_kept),
          CASE(chain_depends_on_model_salt_and_all_tokens_before),
          CASE(random_use_keeps_every_block_in_one_state))
