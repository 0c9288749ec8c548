/* test_plan.c - token ranges and block tables to copies: nothing missing, nothing twice, neighbours joined. */
#include <stdlib.h>
#include <string.h>

#include "kvtransfer/plan.h"
#include "shared/base/hash.h"
#include "tests/harness/test.h"

static struct kv_layout layout(uint32_t n_blocks)
{
    return (struct kv_layout){ .dtype = DTYPE_BF16, .block_tokens = 8, .n_layers = 3, .n_kv_heads = 2, .head_dim = 4, .tp_size = 1, .n_blocks = n_blocks };
}

TEST(plan_counts_blocks_and_valid_tokens)
{
    struct kv_layout l = layout(4);
    CHECK_EQ_INT(kvt_plan_n_blocks(&l, 0), 0);
    CHECK_EQ_INT(kvt_plan_n_blocks(&l, 8), 1);
    CHECK_EQ_INT(kvt_plan_n_blocks(&l, 9), 2);
    CHECK_EQ_INT(kvt_plan_n_blocks(&l, UINT32_MAX), UINT32_MAX / 8 + 1);
    CHECK_EQ_INT(kvt_plan_tokens(&l, 9, 0), 8);
    CHECK_EQ_INT(kvt_plan_tokens(&l, 9, 1), 1);
    CHECK_EQ_INT(kvt_plan_tokens(&l, 9, 2), 0);
}

TEST(plan_sends_a_partly_filled_block_with_the_last_token)
{
    struct kv_layout l = layout(4);
    CHECK_EQ_INT(kvt_plan_complete(&l, 20, 7), 0);
    CHECK_EQ_INT(kvt_plan_complete(&l, 20, 8), 1);
    CHECK_EQ_INT(kvt_plan_complete(&l, 20, 19), 2);
    CHECK_EQ_INT(kvt_plan_complete(&l, 20, 20), 3);
}

TEST(plan_joins_adjacent_pieces)
{
    struct kv_layout src = layout(10), dst = layout(20);
    int32_t a[] = { 3, 4, 5, 9 }, b[] = { 11, 12, 2, 3 };
    struct kvt_copy out[128];
    uint32_t n = kvt_plan_copies(&src, a, &dst, b, 32, (struct kvt_span){ 1, 0, 4 }, out);
    uint64_t piece = kv_layout_piece_bytes(&src);
    CHECK_EQ_INT(n, 3);
    CHECK_EQ_INT(out[0].bytes, 2 * piece);
    CHECK_EQ_INT(out[0].local, (10 + 3) * piece);
    CHECK_EQ_INT(out[0].remote, (20 + 11) * piece);
    CHECK_EQ_INT(out[1].bytes, piece);
    CHECK_EQ_INT(out[2].local, (10 + 9) * piece);
    CHECK_EQ_INT(out[2].remote, (20 + 3) * piece);
}

TEST(plan_takes_only_valid_runs_of_the_last_block)
{
    struct kv_layout l = layout(4);
    int32_t a[] = { 1, 0 }, b[] = { 2, 3 };
    struct kvt_copy out[128];
    uint32_t n = kvt_plan_copies(&l, a, &l, b, 11, (struct kvt_span){ 0, 0, 2 }, out);
    CHECK_EQ_INT(n, 1 + 4); /* a full piece, then 2 heads x (k, v) */
    for (uint32_t i = 1; i < n; i++) {
        CHECK_EQ_INT(out[i].bytes, 3 * 4 * 2);
        CHECK_EQ_INT(out[i].local, (i - 1) * kv_layout_run_stride(&l));
    }
    CHECK_EQ_INT(kvt_plan_span_bytes(&l, 11, (struct kvt_span){ 0, 0, 2 }), kv_layout_piece_bytes(&l) + 4 * 24);
    CHECK_EQ_INT(kvt_plan_total_bytes(&l, 11, 1), 3 * 4 * 24);
    CHECK_EQ_INT(kvt_plan_total_bytes(&l, 11, 2), 0);
}

/* Copies and scattered memory of the same span name the same bytes in the same order, from any offset, in any pieces. */
TEST(plan_copies_and_iov_agree)
{
    struct kv_layout l = layout(16);
    size_t pool = kv_layout_pool_bytes(&l);
    char *src = malloc(pool), *by_copy = calloc(1, pool), *by_iov = calloc(1, pool);
    srand(3);
    for (size_t i = 0; i < pool; i++) src[i] = (char)rand();
    for (int round = 0; round < 300; round++) {
        int32_t a[6], b[6];
        for (int i = 0; i < 6; i++) {
            a[i] = rand() % 16;
            b[i] = (i + round) % 16; /* different blocks */
        }
        uint32_t n_tokens = 1 + (uint32_t)rand() % 48, n_used = kvt_plan_n_blocks(&l, n_tokens), first = (uint32_t)rand() % n_used;
        struct kvt_span s = { (uint32_t)rand() % 3, first, 1 + (uint32_t)rand() % (n_used - first) };
        struct kvt_copy copies[128];
        uint32_t n = kvt_plan_copies(&l, a, &l, b, n_tokens, s, copies);
        CHECK(n <= kvt_plan_max_copies(&l));
        char stream[4096];
        uint64_t len = 0, bytes = kvt_plan_span_bytes(&l, n_tokens, s);
        memset(by_copy, 0, pool);
        memset(by_iov, 0, pool);
        for (uint32_t i = 0; i < n; i++) {
            memcpy(by_copy + copies[i].remote, src + copies[i].local, copies[i].bytes);
            memcpy(stream + len, src + copies[i].local, copies[i].bytes);
            len += copies[i].bytes;
        }
        CHECK_EQ_INT(len, bytes);
        for (uint64_t at = 0; at < bytes;) {
            struct iovec iov[3];
            int parts = kvt_plan_iov(&l, by_iov, b, n_tokens, s, at, iov, 1 + rand() % 3);
            CHECK(parts > 0);
            uint64_t take = 1 + (uint64_t)rand() % 700; /* a short read */
            for (int i = 0; i < parts && take; i++) {
                uint64_t now = iov[i].iov_len < take ? iov[i].iov_len : take;
                memcpy(iov[i].iov_base, stream + at, now);
                at += now;
                take -= now;
            }
        }
        CHECK(memcmp(by_copy, by_iov, pool) == 0);
        struct iovec none[1];
        CHECK_EQ_INT(kvt_plan_iov(&l, by_iov, b, n_tokens, s, bytes, none, 1), 0);
    }
    free(src);
    free(by_copy);
    free(by_iov);
}

TEST(plan_checksum_ignores_what_is_not_valid)
{
    struct kv_layout l = layout(2);
    char *pool = calloc(1, kv_layout_pool_bytes(&l)), *scratch = malloc(kv_layout_piece_bytes(&l)), joined[4 * 24];
    char *piece = pool + kv_layout_offset(&l, 1, 1);
    for (size_t i = 0; i < kv_layout_piece_bytes(&l); i++) piece[i] = (char)(i * 7);
    for (int run = 0; run < 4; run++) memcpy(joined + run * 24, piece + (size_t)run * kv_layout_run_stride(&l), 24);
    uint64_t sum = kvt_plan_checksum(&l, pool, 1, 1, 3, scratch);
    CHECK(sum == hash_64(joined, sizeof joined, 0));
    piece[24] ^= 1; /* the fourth token */
    CHECK(kvt_plan_checksum(&l, pool, 1, 1, 3, scratch) == sum);
    piece[23] ^= 1; /* the third */
    CHECK(kvt_plan_checksum(&l, pool, 1, 1, 3, scratch) != sum);
    CHECK(kvt_plan_checksum(&l, pool, 1, 1, 8, scratch) == hash_64(piece, kv_layout_piece_bytes(&l), 0));
    free(pool);
    free(scratch);
}

TEST(plan_batches_by_bytes)
{
    struct kv_layout l = layout(100);
    CHECK_EQ_INT(kvt_plan_batch(&l, 90, 1), 1);
    CHECK_EQ_INT(kvt_plan_batch(&l, 90, 3 * kv_layout_piece_bytes(&l)), 3);
    CHECK_EQ_INT(kvt_plan_batch(&l, 2, 3 * kv_layout_piece_bytes(&l)), 2);
    CHECK_EQ_INT(kvt_plan_batch(&l, 90, UINT64_MAX), KVT_BATCH_PIECES);
}

TEST_MAIN(CASE(plan_counts_blocks_and_valid_tokens), CASE(plan_sends_a_partly_filled_block_with_the_last_token), CASE(plan_joins_adjacent_pieces),
          CASE(plan_takes_only_valid_runs_of_the_last_block), CASE(plan_copies_and_iov_agree), CASE(plan_checksum_ignores_what_is_not_valid),
          CASE(plan_batches_by_bytes))
