/* test_tier_index.c - states of slots, which one is evicted, pins, and long random use against a
 * model. */
#include "shared/kv/tier/tier_index.h"

#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "tests/harness/test.h"

static struct hash128 key_of(uint32_t i) { return hash_128(&i, sizeof i); }

/* Block `depth` of chain number `chain`. */
static struct tier_block block(uint32_t chain, uint32_t depth)
{
    return (struct tier_block){ .key = key_of(chain * 1000 + depth),
                                .parent = key_of(chain * 1000 + depth - 1),
                                .depth = depth };
}

static int32_t store(struct tier_index *x, struct tier_block b, uint64_t now)
{
    const int32_t slot = tier_index_take(x, &b, true, now);
    if (slot >= 0) CHECK(tier_index_commit(x, (uint32_t)slot));
    tier_index_verify(x);
    return slot;
}

static bool has(const struct tier_index *x, struct tier_block b)
{
    return tier_index_find(x, b.key) >= 0;
}

static struct tier_index *index_of(uint32_t n_slots)
{
    struct tier_index *x = tier_index_create();
    CHECK_EQ_INT(tier_index_add_slots(x, n_slots), 0);
    return x;
}

TEST(a_block_is_found_between_commit_and_drop)
{
    struct tier_index *x = index_of(2);
    const struct tier_block b = block(1, 0);
    const int32_t slot = tier_index_take(x, &b, true, 1);
    CHECK(slot >= 0 && !has(x, b) && tier_index_has(x, b.key));
    CHECK_EQ_INT(tier_index_take(x, &b, true, 1), -1); /* being filled */
    CHECK(tier_index_commit(x, (uint32_t)slot));
    CHECK(has(x, b));
    CHECK(hash128_eq(tier_index_block(x, (uint32_t)slot)->key, b.key));
    CHECK_EQ_INT(tier_index_n_stored(x), 1);
    tier_index_drop(x, b.key);
    tier_index_drop(x, b.key);
    CHECK(!has(x, b) && !tier_index_has(x, b.key));
    const int32_t again = tier_index_take(x, &b, true, 1);
    tier_index_abandon(x, (uint32_t)again);
    tier_index_verify(x);
    CHECK(!tier_index_has(x, b.key));
    const int32_t unwanted = tier_index_take(x, &b, true, 1);
    tier_index_drop(x, b.key); /* while it is filled */
    CHECK(!tier_index_commit(x, (uint32_t)unwanted));
    CHECK(!tier_index_has(x, b.key));
    tier_index_verify(x);
    tier_index_free(x);
}

TEST(the_longest_unused_is_evicted)
{
    struct tier_index *x = index_of(3);
    for (uint32_t i = 0; i < 3; i++) store(x, block(i, 0), 100 + i);
    tier_index_touch(x, (uint32_t)tier_index_find(x, block(0, 0).key), 200);
    store(x, block(3, 0), 300);
    CHECK(has(x, block(0, 0)) && !has(x, block(1, 0)) && has(x, block(2, 0)));
    CHECK_EQ_INT(tier_index_n_evicted(x), 1);
    const struct tier_block b = block(9, 0);
    CHECK_EQ_INT(tier_index_take(x, &b, false, 300), -1); /* full, and none is to be evicted */
    tier_index_free(x);
}

/* Unused for about as long, the one that is cheap to make again goes first. */
TEST(what_costs_more_to_make_stays_longer)
{
    struct tier_index *x = index_of(2);
    store(x, block(1, 500), 1000);
    store(x, block(2, 1), 1010);
    store(x, block(3, 0), 2000);
    CHECK(has(x, block(1, 500)) && !has(x, block(2, 1)));
    store(x, block(4, 0), 10000); /* unused for about as long again: the other one */
    CHECK(has(x, block(1, 500)) && !has(x, block(3, 0)));
    store(x, block(5, 0), 10001); /* much longer: what it costs does not save it */
    CHECK(!has(x, block(1, 500)) && has(x, block(4, 0)));
    tier_index_free(x);
}

TEST(a_chain_shrinks_from_its_end)
{
    enum { N = 6 };
    struct tier_index *x = index_of(N);
    for (uint32_t i = 0; i < N; i++) store(x, block(1, i), 100);
    for (uint32_t i = 0; i < N; i++) {
        store(x, block(2 + i, 0), 200 + i);
        for (uint32_t k = 0; k < N; k++) CHECK_EQ_INT(has(x, block(1, k)), k + i + 1 < N);
    }
    tier_index_free(x);
}

/* A chain longer than the tier keeps its beginning: its end could not be used without it. */
TEST(a_chain_never_evicts_its_own_beginning)
{
    struct tier_index *x = index_of(4);
    for (uint32_t i = 0; i < 4; i++) CHECK(store(x, block(1, i), i) >= 0);
    CHECK_EQ_INT(store(x, block(1, 4), 9), -1);
    for (uint32_t i = 0; i < 4; i++) CHECK(has(x, block(1, i)));
    tier_index_free(x);
}

TEST(pinned_slots_stay)
{
    struct tier_index *x = index_of(2);
    const uint32_t a = (uint32_t)store(x, block(1, 0), 1), b = (uint32_t)store(x, block(2, 0), 2);
    tier_index_pin(x, a);
    tier_index_pin(x, a);
    tier_index_pin(x, b);
    CHECK_EQ_INT(store(x, block(3, 0), 3), -1);
    tier_index_unpin(x, b);
    CHECK(store(x, block(3, 0), 3) >= 0);
    CHECK(has(x, block(1, 0)) && !has(x, block(2, 0)));
    tier_index_drop(x, block(1, 0).key); /* nobody finds it, and nobody takes it */
    CHECK(!has(x, block(1, 0)));
    const struct tier_block d = block(4, 0);
    CHECK_EQ_INT(tier_index_take(x, &d, false, 4), -1);
    tier_index_unpin(x, a);
    CHECK_EQ_INT(tier_index_take(x, &d, false, 4), -1);
    tier_index_unpin(x, a);
    CHECK_EQ_INT(tier_index_take(x, &d, false, 4), (int)a);
    CHECK(tier_index_commit(x, a));
    tier_index_verify(x);
    tier_index_free(x);
}

TEST(slots_come_and_go)
{
    struct tier_index *x = index_of(2);
    CHECK_EQ_INT(tier_index_add_slots(x, 3), 2);
    CHECK(tier_index_adopt(x, 3, &(struct tier_block){ .key = key_of(1) }, 5));
    CHECK(!tier_index_adopt(x, 4, &(struct tier_block){ .key = key_of(1) }, 5)); /* slot 3 has it */
    tier_index_verify(x);
    CHECK_EQ_INT(tier_index_find(x, key_of(1)), 3);
    tier_index_remove_slots(x, 2, 3);
    tier_index_verify(x);
    CHECK_EQ_INT(tier_index_find(x, key_of(1)), -1);
    CHECK_EQ_INT(tier_index_n_slots(x), 2);
    for (uint32_t i = 0; i < 10; i++) {
        const int32_t slot = store(x, block(i, 0), i);
        CHECK(slot == 0 || slot == 1);
    }
    tier_index_return_slots(x, 2, 3);
    tier_index_verify(x);
    CHECK_EQ_INT(tier_index_n_slots(x), 5);
    for (uint32_t i = 20; i < 23; i++) CHECK_EQ_INT(store(x, block(i, 0), i), (int)i - 18);
    CHECK_EQ_INT(tier_index_n_evicted(x), 8);
    tier_index_free(x);
}

/* Against an array: what is stored is found in its slot, and nothing else. */
TEST(random_use_agrees_with_a_model)
{
    enum { SLOTS = 40, KEYS = 120, STEPS = 20000 };
    struct tier_index *x = index_of(SLOTS);
    int32_t slot_of[KEYS], pinned = -1;
    for (uint32_t i = 0; i < KEYS; i++) slot_of[i] = -1;
    for (uint32_t k = 0; k < STEPS; k++) {
        const uint32_t i = (uint32_t)(rng_uniform(1, 1, k) * KEYS);
        const struct tier_block b = block(i / 12, i % 12);
        const double u = rng_uniform(1, 2, k);
        if (u < 0.6) {
            const int32_t slot = tier_index_take(x, &b, true, k);
            if (slot >= 0) {
                for (uint32_t o = 0; o < KEYS; o++)
                    if (slot_of[o] == slot) slot_of[o] = -1;
                CHECK_EQ_INT(slot_of[i], -1);
                CHECK(tier_index_commit(x, (uint32_t)slot));
                slot_of[i] = slot;
            }
        } else if (u < 0.8 && slot_of[i] >= 0) {
            tier_index_touch(x, (uint32_t)slot_of[i], k);
        } else if (u < 0.85 && slot_of[i] >= 0) {
            tier_index_drop(x, b.key);
            slot_of[i] = -1;
        } else if (u < 0.9 && pinned < 0 && slot_of[i] >= 0) {
            pinned = slot_of[i];
            tier_index_pin(x, (uint32_t)pinned);
        } else if (u < 0.95 && pinned >= 0) {
            tier_index_unpin(x, (uint32_t)pinned);
            pinned = -1;
        }
        CHECK_EQ_INT(tier_index_find(x, b.key), slot_of[i]);
        if (k % 100 == 0) tier_index_verify(x);
    }
    CHECK(tier_index_n_evicted(x) > 100);
    tier_index_free(x);
}

TEST_MAIN(CASE(a_block_is_found_between_commit_and_drop), CASE(the_longest_unused_is_evicted),
          CASE(what_costs_more_to_make_stays_longer), CASE(a_chain_shrinks_from_its_end),
          CASE(a_chain_never_evicts_its_own_beginning), CASE(pinned_slots_stay),
          CASE(slots_come_and_go), CASE(random_use_agrees_with_a_model))
