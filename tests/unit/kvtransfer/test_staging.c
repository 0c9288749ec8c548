/* test_staging.c - each chunk is handed out once and returned, and no peer takes all of them. */
#include <stdlib.h>

#include "kvtransfer/staging.h"
#include "tests/fixtures/kvt_bytes.h"
#include "tests/harness/test.h"

enum { N = 64, CHUNK = KVT_STAGING_CHUNK };

static struct kvt_staging *make(void)
{
    struct kvt_staging *s = NULL;
    struct err err;
    CHECK_OK(kvt_staging_create(NULL, (uint64_t)N * CHUNK - 5, &s, &err));
    CHECK_EQ_INT(staging_n_free(s), N);
    CHECK(kvt_staging_mem(s)->bytes >= (size_t)N * CHUNK);
    return s;
}

TEST(staging_gives_neighbouring_chunks_once)
{
    struct kvt_staging *s = make();
    bool taken[N] = { 0 };
    uint32_t held[40] = { 0 };
    struct kvt_stage stages[40] = { { 0 } };
    srand(5);
    for (int round = 0; round < 20000; round++) {
        int i = rand() % 40;
        if (stages[i].n) {
            for (uint32_t c = 0; c < stages[i].n; c++) {
                CHECK(taken[stages[i].first + c]);
                taken[stages[i].first + c] = false;
            }
            kvt_staging_release(s, &held[i], &stages[i]);
            CHECK_EQ_INT(held[i], 0);
            continue;
        }
        uint64_t bytes = 1 + (uint64_t)rand() % (4 * CHUNK);
        if (!kvt_staging_acquire(s, bytes, true, &held[i], &stages[i])) continue;
        CHECK_EQ_INT(stages[i].n, (bytes + CHUNK - 1) / CHUNK);
        CHECK(stages[i].first + stages[i].n <= N);
        CHECK(kvt_staging_at(s, stages[i]) ==
              (char *)kvt_staging_mem(s)->ptr + kvt_staging_offset(stages[i]));
        for (uint32_t c = 0; c < stages[i].n; c++) {
            CHECK(!taken[stages[i].first + c]);
            taken[stages[i].first + c] = true;
        }
    }
    for (int i = 0; i < 40; i++) kvt_staging_release(s, &held[i], &stages[i]);
    CHECK_EQ_INT(staging_n_free(s), N);
    kvt_staging_free(s);
}

/* Each greedy peer gets half of what is left; a later one still gets its minimum. */
TEST(staging_leaves_something_for_the_next)
{
    struct kvt_staging *s = make();
    uint32_t held[4] = { 0 };
    struct kvt_stage stage;
    for (int i = 0; i < 4; i++) {
        uint32_t before = staging_n_free(s);
        while (kvt_staging_acquire(s, CHUNK, false, &held[i], &stage)) {}
        CHECK_EQ_INT(held[i], before / 2);
        CHECK(!kvt_staging_acquire(s, CHUNK, true, &held[i], &stage));
    }
    uint32_t late = 0;
    CHECK_EQ_INT(staging_n_free(s), 4);
    CHECK(!kvt_staging_acquire(s, 4 * CHUNK, false, &late, &stage));
    CHECK(kvt_staging_acquire(s, 4 * CHUNK, true, &late, &stage));
    CHECK(!kvt_staging_acquire(s, 1, true, &(uint32_t){ 0 }, &stage));
    kvt_staging_free(s);
}

TEST_MAIN(CASE(staging_gives_neighbouring_chunks_once), CASE(staging_leaves_something_for_the_next))
