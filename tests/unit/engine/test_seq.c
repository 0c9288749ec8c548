/* test_seq.c - a sequence that waits for blocks of the pool. */
#include "shared/engine/seq.h"

#include "tests/harness/test.h"

enum { BT = 4 };

static const struct seq_limits LIMITS = {
    .n_vocab = 100, .max_len = 64, .block_tokens = BT, .model_fingerprint = 1
};

static struct seq *sequence(int32_t first, uint32_t n)
{
    int32_t tokens[64];
    struct seq *s = NULL;
    for (uint32_t i = 0; i < n; i++) tokens[i] = first + (int32_t)i;
    const struct engine_request r = {
        .id = 1, .tokens = tokens, .n_tokens = n, .n_prompt = n, .sampling = { .max_tokens = 1 }
    };
    CHECK_OK(seq_create(&r, &LIMITS, &s));
    return s;
}

/* Its prefix is cached and idle, and the other blocks do not fit: however often it asks, no block
 * is touched and no query counted. */
TEST(waiting_for_blocks_changes_nothing)
{
    struct kv_pool *pool = kv_pool_create(6, BT, true);
    struct seq *cached = sequence(0, 3 * BT), *other = sequence(50, 3 * BT - 1),
               *waits = sequence(0, 5 * BT - 1);
    struct kv_pool_stats before, after;
    CHECK_OK(seq_take_blocks(cached, pool, BT, 3));
    cached->n_computed = 3 * BT;
    seq_publish_blocks(cached, pool, BT, cached->n_computed);
    seq_drop_blocks(cached, pool);
    CHECK_OK(seq_take_blocks(other, pool, BT, 3));
    kv_pool_get_stats(pool, &before);
    CHECK(before.n_cached == 3 && before.n_free == 0);
    for (int i = 0; i < 3; i++) CHECK_STATUS(seq_take_blocks(waits, pool, BT, 5), ERR_BUSY);
    kv_pool_get_stats(pool, &after);
    CHECK(after.prefix_queries == before.prefix_queries &&
          after.prefix_hits == before.prefix_hits && after.n_cached == 3);
    seq_drop_blocks(other, pool);
    CHECK_OK(seq_take_blocks(waits, pool, BT, 5));
    CHECK_EQ_INT(waits->n_computed, 3 * BT);
    seq_drop_blocks(waits, pool);
    kv_pool_verify(pool);
    seq_free(cached);
    seq_free(other);
    seq_free(waits);
    kv_pool_destroy(pool);
}

TEST_MAIN(CASE(waiting_for_blocks_changes_nothing))
