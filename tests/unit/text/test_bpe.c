/* test_bpe.c - merging: short and long pieces against the definition, and run time. */
#include "shared/text/tokenizer/bpe.h"

#include <string.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { N_BASE = 4, N_MERGES = 60, N_IDS = N_BASE + N_MERGES };

/* The definition: look at all pairs, merge the leftmost one of the lowest rank, start again. */
struct plain {
    uint32_t rank[N_IDS][N_IDS]; /* 0: none, else rank + 1 */
    int32_t merged[N_IDS][N_IDS];
};

static size_t merge_plain(const struct plain *p, int32_t *ids, size_t n)
{
    for (;;) {
        uint32_t best = UINT32_MAX;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            uint32_t rank = p->rank[ids[i]][ids[i + 1]];
            if (rank == 0 || rank >= best) continue;
            best = rank;
            at = i;
        }
        if (best == UINT32_MAX) return n;
        ids[at] = p->merged[ids[at]][ids[at + 1]];
        memmove(&ids[at + 1], &ids[at + 2], (n - at - 2) * sizeof *ids);
        n--;
    }
}

static uint32_t below(uint64_t *state, uint32_t n)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33) % n;
}

TEST(bpe_merges_as_defined)
{
    uint64_t seed = 7;
    for (int round = 0; round < 60; round++) {
        struct plain p;
        struct bpe b;
        struct bpe_work w = { 0 };
        memset(&p, 0, sizeof p);
        bpe_init(&b, N_MERGES);
        for (int32_t m = 0; m < N_MERGES; m++) {
            int32_t id = N_BASE + m, left = (int32_t)below(&seed, (uint32_t)id),
                    right = (int32_t)below(&seed, (uint32_t)id);
            if (p.rank[left][right]) continue;
            p.rank[left][right] = (uint32_t)m + 1;
            p.merged[left][right] = id;
            bpe_put(&b, left, right, (uint32_t)m * 70001u, id); /* ranks of several digits */
        }
        for (int text = 0; text < 40; text++) {
            int32_t want[400], got[400];
            size_t n = below(&seed, text < 20 ? 48 : 400);
            for (size_t i = 0; i < n; i++) want[i] = got[i] = (int32_t)below(&seed, N_BASE);
            size_t n_want = merge_plain(&p, want, n), n_got = bpe_merge(&b, got, n, &w);
            CHECK_EQ_INT(n_got, n_want);
            CHECK(memcmp(got, want, n_want * sizeof *want) == 0);
        }
        bpe_work_release(&w);
        bpe_release(&b);
    }
}

TEST(bpe_equal_rank_takes_the_leftmost)
{
    struct bpe b;
    struct bpe_work w = { 0 };
    bpe_init(&b, 2);
    bpe_put(&b, 0, 0, 0, 1);
    bpe_put(&b, 1, 0, 1, 2);
    int32_t ids[101] = { 0 };
    CHECK_EQ_INT(bpe_merge(&b, ids, 3, &w), 1);
    CHECK_EQ_INT(ids[0], 2);
    memset(ids, 0, sizeof ids);
    CHECK_EQ_INT(bpe_merge(&b, ids, 101, &w), 50);
    CHECK_EQ_INT(ids[48], 1);
    CHECK_EQ_INT(ids[49], 2);
    bpe_work_release(&w);
    bpe_release(&b);
}

TEST(bpe_a_pair_put_again_gets_the_later_rank)
{
    struct bpe b;
    struct bpe_work w = { 0 };
    int32_t ids[] = { 0, 1, 2 };
    bpe_init(&b, 3);
    bpe_put(&b, 0, 1, 0, 3);
    bpe_put(&b, 1, 2, 1, 4);
    bpe_put(&b, 0, 1, 2, 3);
    CHECK_EQ_INT(bpe_merge(&b, ids, 3, &w), 2);
    CHECK_EQ_INT(ids[1], 4);
    bpe_work_release(&w);
    bpe_release(&b);
}

/* bpe_origin returns the pair that was looked up last, in short and long pieces alike. */
TEST(bpe_watched_tokens_remember_their_pair)
{
    enum { A, B, C, AB, BC, ABC };
    struct bpe b;
    bpe_init(&b, 4);
    bpe_put(&b, A, B, 0, AB);
    bpe_put(&b, B, C, 1, BC);
    bpe_put(&b, AB, C, 2, ABC | BPE_WATCHED);
    bpe_put(&b, A, BC, 3, ABC | BPE_WATCHED);
    for (size_t n_before = 0; n_before <= 90; n_before += 90) {
        struct bpe_work w = { 0 };
        int32_t ids[93], left, right;
        for (size_t i = 0; i < n_before; i++) ids[i] = -7; /* merges with nothing */
        memcpy(ids + n_before, (int32_t[]){ A, B, C }, 3 * sizeof *ids);
        CHECK_EQ_INT(bpe_merge(&b, ids, n_before + 3, &w), n_before + 1);
        CHECK_EQ_INT(ids[n_before], ABC);
        bpe_origin(&w, ABC, &left, &right);
        CHECK(left == AB && right == C);
        bpe_work_release(&w);
    }
    bpe_release(&b);
}

TEST(bpe_nothing_to_merge)
{
    struct bpe b;
    struct bpe_work w = { 0 };
    int32_t ids[] = { 5, 6 };
    bpe_init(&b, 0);
    CHECK_EQ_INT(bpe_merge(&b, ids, 0, &w), 0);
    CHECK_EQ_INT(bpe_merge(&b, ids, 2, &w), 2);
    bpe_work_release(&w);
    bpe_release(&b);
}

TEST(bpe_a_million_tokens_merge_in_one_piece)
{
    enum { N = 1 << 20 };
    struct bpe b;
    struct bpe_work w = { 0 };
    int32_t *ids = MEM_ARRAY(int32_t, N);
    bpe_init(&b, 16);
    for (int32_t i = 0; i < 16; i++) bpe_put(&b, i, i, (uint32_t)i, i + 1);
    /* Quadratic work would exceed the time limit of the case. */
    CHECK_EQ_INT(bpe_merge(&b, ids, N, &w), N >> 16);
    bpe_work_release(&w);
    bpe_release(&b);
    mem_free(ids);
}

TEST_MAIN(CASE(bpe_merges_as_defined), CASE(bpe_equal_rank_takes_the_leftmost),
          CASE(bpe_a_pair_put_again_gets_the_later_rank),
          CASE(bpe_watched_tokens_remember_their_pair), CASE(bpe_nothing_to_merge),
          CASE(bpe_a_million_tokens_merge_in_one_piece))
