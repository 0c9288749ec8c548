/* test_plan.c - token ranges and block tables become copies: no byte missing, none twice, adjacent
 * copies joined. */
#include <stdlib.h>
#include <string.h>

#include "kvtransfer/convert.h"
#include "kvtransfer/plan.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "tests/fixtures/kvt_bytes.h"
#include "tests/harness/test.h"

static struct kv_layout layout(uint32_t n_blocks)
{
    return (struct kv_layout){
        .dtype = DTYPE_BF16,
        .block_tokens = 8,
        .n_layers = 3,
        .n_kv_heads = 2,
        .model_kv_heads = 2,
        .head_dim = 4,
        .tp_size = 1,
        .n_blocks = n_blocks,
    };
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
    struct kvt_head_slice from = head_slice_all(&src), to = head_slice_all(&dst);
    int32_t a[] = { 3, 4, 5, 9 }, b[] = { 11, 12, 2, 3 };
    struct kvt_copy out[1024];
    uint32_t n = kvt_plan_copies(&from, a, &to, b, 32, (struct kvt_block_range){ 1, 0, 4 }, out);
    uint64_t piece = kv_layout_piece_bytes(&src);
    CHECK_EQ_INT(n, 3);
    CHECK_EQ_INT(out[0].bytes, 2 * piece);
    CHECK_EQ_INT(out[0].local, (10 + 3) * piece);
    CHECK_EQ_INT(out[0].remote, (20 + 11) * piece);
    CHECK_EQ_INT(out[1].bytes, piece);
    CHECK_EQ_INT(out[2].local, (10 + 9) * piece);
    CHECK_EQ_INT(out[2].remote, (20 + 3) * piece);
}

TEST(plan_takes_only_valid_segments_of_the_last_block)
{
    struct kv_layout l = layout(4);
    struct kvt_head_slice v = head_slice_all(&l);
    int32_t a[] = { 1, 0 }, b[] = { 2, 3 };
    struct kvt_copy out[1024];
    uint32_t n = kvt_plan_copies(&v, a, &v, b, 11, (struct kvt_block_range){ 0, 0, 2 }, out);
    CHECK_EQ_INT(n, 1 + 4); /* a full piece, then 2 heads x (k, v) */
    for (uint32_t i = 1; i < n; i++) {
        CHECK_EQ_INT(out[i].bytes, 3 * 4 * 2);
        CHECK_EQ_INT(out[i].local, (i - 1) * kv_layout_segment_stride(&l));
    }
    CHECK_EQ_INT(kvt_plan_range_bytes(&v, 11, (struct kvt_block_range){ 0, 0, 2 }),
                 kv_layout_piece_bytes(&l) + 4 * 24);
    CHECK_EQ_INT(layout_total_bytes(&l, 11, 1), 3 * 4 * 24);
    CHECK_EQ_INT(layout_total_bytes(&l, 11, 2), 0);
}

/* kvt_plan_copies and kvt_plan_iov of the same block range name the same bytes in the same order,
 * from any offset and in parts of any size. */
static void copies_and_iov_agree(uint32_t dtype, uint32_t first_head, uint32_t n_heads)
{
    struct kv_layout l = layout(16);
    l.dtype = dtype;
    struct kvt_head_slice v = { &l, first_head, n_heads };
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
        uint32_t n_tokens = 1 + (uint32_t)rand() % 48, n_used = kvt_plan_n_blocks(&l, n_tokens),
                 first = (uint32_t)rand() % n_used;
        struct kvt_block_range s = { (uint32_t)rand() % 3, first,
                                     1 + (uint32_t)rand() % (n_used - first) };
        struct kvt_copy copies[1024];
        uint32_t n = kvt_plan_copies(&v, a, &v, b, n_tokens, s, copies);
        CHECK(n <= kvt_plan_max_copies(&l));
        char stream[4096];
        uint64_t len = 0, bytes = kvt_plan_range_bytes(&v, n_tokens, s);
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
            int parts = kvt_plan_iov(&v, by_iov, b, n_tokens, s, at, iov, 1 + rand() % 3);
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
        CHECK_EQ_INT(kvt_plan_iov(&v, by_iov, b, n_tokens, s, bytes, none, 1), 0);
    }
    free(src);
    free(by_copy);
    free(by_iov);
}

TEST(plan_copies_and_iov_agree)
{
    copies_and_iov_agree(DTYPE_BF16, 0, 2);
    copies_and_iov_agree(DTYPE_BF16, 1, 1);
    copies_and_iov_agree(DTYPE_I8, 0, 2);
    copies_and_iov_agree(DTYPE_I8, 1, 1);
}

/* A head's slice has the same bytes whatever the head's index within the rank. */
TEST(plan_slices_heads)
{
    struct kv_layout whole = layout(4), half = layout(9);
    struct kvt_head_slice from, to;
    half.n_kv_heads = 1;
    half.tp_size = 2;
    half.tp_rank = half.first_head = 1;
    CHECK_STATUS(kvt_head_slice_of(&half, 0, 1, &to), ERR_INVALID);
    CHECK_STATUS(kvt_head_slice_of(&half, 1, 2, &to), ERR_INVALID);
    CHECK_STATUS(kvt_head_slice_of(&half, 1, UINT32_MAX, &to), ERR_INVALID);
    CHECK_OK(kvt_head_slice_of(&half, 1, 1, &to));
    CHECK_OK(kvt_head_slice_of(&whole, 1, 1, &from));
    int32_t a[] = { 2, 3 }, b[] = { 7, 0 };
    struct kvt_copy out[1024];
    uint64_t head = kv_layout_piece_bytes(&half);
    CHECK_EQ_INT(kvt_plan_copies(&from, a, &to, b, 16, (struct kvt_block_range){ 1, 0, 2 }, out),
                 2);
    CHECK_EQ_INT(out[0].local, kv_layout_offset(&whole, 1, 2) + head);
    CHECK_EQ_INT(out[0].remote, kv_layout_offset(&half, 1, 7));
    CHECK_EQ_INT(out[0].bytes, head);
    CHECK_EQ_INT(out[1].local, kv_layout_offset(&whole, 1, 3) + head);
    CHECK_EQ_INT(head_slice_total_bytes(&from, 16, 0), 3 * 2 * head);
    CHECK_EQ_INT(layout_total_bytes(&half, 16, 0), 3 * 2 * head);
}

static enum status check_pair(struct kv_layout mine, struct kv_layout theirs, bool i_send,
                              bool lossy, struct err *err)
{
    return kvt_plan_check(&mine, &theirs, i_send, lossy, 1 << 20, err);
}

TEST(plan_check_says_what_does_not_fit)
{
    struct kv_layout a = layout(4), b = layout(9);
    struct err err = { 0 };
    CHECK_OK(check_pair(a, b, true, false, &err));
    b.block_tokens = 64;
    CHECK_OK(check_pair(a, b, true, false, &err));
    b.dtype = DTYPE_F32;
    CHECK_OK(check_pair(a, b, true, false, &err));
    CHECK_STATUS(check_pair(a, b, false, false, &err), ERR_PEER_MISMATCH); /* f32 into bf16 */
    CHECK(strstr(err.text, "f32") && strstr(err.text, "bf16") &&
          strstr(err.text, "BATON_KV_LOSSY=1"));
    CHECK_OK(check_pair(a, b, false, true, &err));
    b.dtype = DTYPE_F16;
    CHECK_STATUS(check_pair(a, b, true, false, &err), ERR_PEER_MISMATCH);
    b.dtype = DTYPE_I8;
    CHECK_STATUS(check_pair(a, b, true, false, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "int8"));
    CHECK_OK(check_pair(a, b, true, true, &err));
    b = layout(9);
    b.tp_size = a.tp_size = 2;
    b.n_kv_heads = a.n_kv_heads = 1;
    b.tp_rank = b.first_head = 1;
    CHECK_STATUS(check_pair(a, b, true, true, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "no KV head in common") && strstr(err.text, "rank 0 of 2 here") &&
          strstr(err.text, "rank 1 of 2 at the peer"));
    a = b = layout(4);
    a.block_tokens = 256;
    a.head_dim = b.head_dim = 256;
    a.n_kv_heads = b.n_kv_heads = a.model_kv_heads = b.model_kv_heads = 16; /* pieces of 4 MiB */
    CHECK_STATUS(check_pair(a, b, false, false, &err), ERR_UNSUPPORTED);
    CHECK(strstr(err.text, "--block-size"));
    CHECK_OK(check_pair(a, a, true, false, &err)); /* nothing to convert */
}

TEST(plan_checksum_ignores_what_is_not_valid)
{
    struct kv_layout l = layout(2);
    struct kvt_head_slice v = head_slice_all(&l);
    char *pool = calloc(1, kv_layout_pool_bytes(&l)), *scratch = malloc(kv_layout_piece_bytes(&l)),
         joined[4 * 24];
    char *piece = pool + kv_layout_offset(&l, 1, 1);
    for (size_t i = 0; i < kv_layout_piece_bytes(&l); i++) piece[i] = (char)(i * 7);
    for (int run = 0; run < 4; run++)
        memcpy(joined + run * 24, piece + (size_t)run * kv_layout_segment_stride(&l), 24);
    uint64_t sum = kvt_plan_checksum(&v, pool, 1, 1, 3, scratch);
    CHECK(sum == hash_64(joined, sizeof joined, 0));
    piece[24] ^= 1; /* the fourth token */
    CHECK(kvt_plan_checksum(&v, pool, 1, 1, 3, scratch) == sum);
    piece[23] ^= 1; /* the third */
    CHECK(kvt_plan_checksum(&v, pool, 1, 1, 3, scratch) != sum);
    CHECK(kvt_plan_checksum(&v, pool, 1, 1, 8, scratch) ==
          hash_64(piece, kv_layout_piece_bytes(&l), 0));
    free(pool);
    free(scratch);
}

/* The checksums of a range are those of its pieces, with and without a partly filled block, for all
 * heads and for one, with and without scales. */
TEST(plan_checksums_of_a_range)
{
    const uint32_t types[] = { DTYPE_BF16, DTYPE_I8 };
    const int32_t blocks[] = { 5, 0, 3, 6, 1, 4, 2 };
    for (size_t t = 0; t < COUNT_OF(types); t++)
        for (uint32_t n_heads = 1; n_heads <= 2; n_heads++) {
            struct kv_layout l = layout(COUNT_OF(blocks));
            l.dtype = types[t];
            struct kvt_head_slice v = { &l, 0, n_heads };
            size_t n = kv_layout_pool_bytes(&l);
            uint8_t *pool = malloc(n);
            void *scratch = malloc(kv_layout_piece_bytes(&l));
            uint64_t sums[KVT_BATCH_PIECES];
            for (size_t i = 0; i < n; i++) pool[i] = (uint8_t)(i * 2654435761u >> 9);
            for (uint32_t n_tokens = l.block_tokens * 6 + 1; n_tokens <= l.block_tokens * 7;
                 n_tokens++) {
                struct kvt_block_range range = { 1, 1, 6 };
                kvt_plan_checksums(&v, pool, blocks, n_tokens, range, scratch, sums);
                for (uint32_t i = 0; i < range.n; i++)
                    CHECK(sums[i] == kvt_plan_checksum(&v, pool, 1, blocks[i + 1],
                                                       kvt_plan_tokens(&l, n_tokens, i + 1),
                                                       scratch));
            }
            free(pool);
            free(scratch);
        }
}

/* The checksum of a piece is that of its segments in order, and moving KV rows one by one gives the
 * bytes of converting whole pieces: for slices of all heads and of one, full and partly filled
 * blocks. */
TEST(plan_strides_and_rows_cover_a_piece)
{
    const uint32_t types[] = { DTYPE_BF16, DTYPE_I8, DTYPE_F8_E4M3 };
    for (size_t t = 0; t < COUNT_OF(types); t++)
        for (uint32_t n_heads = 1; n_heads <= 2; n_heads++) {
            struct kv_layout a = layout(9), b = layout(9);
            a.dtype = b.dtype = types[t];
            a.block_tokens = 5;
            struct kvt_head_slice src = { &a, 2 - n_heads, n_heads }, dst = { &b, 0, n_heads };
            const int32_t table[] = { 7, 2, 4, 0, 5 };
            char *pool = malloc(kv_layout_pool_bytes(&a)),
                 *scratch = malloc(kv_layout_piece_bytes(&a));
            char *made = malloc(kv_layout_piece_bytes(&b)),
                 *want = malloc(kv_layout_piece_bytes(&b));
            for (size_t i = 0; i < kv_layout_pool_bytes(&a); i++) pool[i] = (char)(i * 7 + i / 251);
            for (uint32_t n_valid = 1; n_valid <= a.block_tokens; n_valid++) {
                struct kvt_strides s[2];
                uint32_t kinds = kvt_plan_strides(&src, 1, 4, n_valid, s);
                size_t n = 0;
                for (uint32_t k = 0; k < kinds; k++)
                    for (uint32_t r = 0; r < s[k].n_segments; r++, n += s[k].segment_bytes)
                        memcpy(made + n, pool + s[k].at + r * s[k].stride, s[k].segment_bytes);
                CHECK_EQ_INT(n, kvt_head_slice_bytes(&src, n_valid));
                CHECK(hash_64(made, n, 0) == kvt_plan_checksum(&src, pool, 1, 4, n_valid, scratch));
                CHECK_EQ_INT(kinds, kv_layout_scale_bytes(&a) &&
                                            !(n_valid == a.block_tokens && n_heads == 2)
                                        ? 2
                                        : 1);
            }
            uint32_t n_tokens = 21; /* positions 0, 1: full; 2: 5 tokens */
            for (uint32_t position = 0; position < 3; position++) {
                uint32_t n_valid = kvt_plan_tokens(&b, n_tokens, position);
                size_t from_row = a.head_dim * kv_layout_element_bytes(&a),
                       scale = kv_layout_scale_bytes(&a);
                memset(made, 0, kv_layout_piece_bytes(&b));
                for (uint32_t done = 0; done < n_valid;) {
                    struct kvt_rows r = kvt_plan_rows(&src, table, &dst, n_tokens, 1, position,
                                                      done);
                    for (uint32_t g = 0; g < r.n_groups; g++) {
                        memcpy(made + r.to + g * r.to_stride * from_row,
                               pool + r.from + g * r.from_stride * from_row, r.n * from_row);
                        if (scale)
                            memcpy(made + r.to_scales + g * r.to_stride * scale,
                                   pool + r.from_scales + g * r.from_stride * scale, r.n * scale);
                    }
                    done += r.n;
                }
                kvt_convert_piece(&src, pool, table, &dst, n_tokens, 1, position, want);
                CHECK(memcmp(made, want, kvt_head_slice_bytes(&dst, n_valid)) == 0);
            }
            free(pool);
            free(scratch);
            free(made);
            free(want);
        }
}

TEST(plan_batches_by_bytes)
{
    struct kv_layout l = layout(1000);
    struct kvt_head_slice v = head_slice_all(&l);
    CHECK_EQ_INT(kvt_plan_batch(&v, 90, 1, KVT_BATCH_PIECES), 1);
    CHECK_EQ_INT(kvt_plan_batch(&v, 90, 3 * kv_layout_piece_bytes(&l), KVT_BATCH_PIECES), 3);
    CHECK_EQ_INT(kvt_plan_batch(&v, 2, 3 * kv_layout_piece_bytes(&l), KVT_BATCH_PIECES), 2);
    CHECK_EQ_INT(kvt_plan_batch(&v, 900, UINT64_MAX, KVT_BATCH_PIECES), KVT_BATCH_PIECES);
    CHECK_EQ_INT(kvt_plan_batch(&v, 900, UINT64_MAX, KVT_PUT_PIECES), 900);
}

TEST_MAIN(CASE(plan_counts_blocks_and_valid_tokens),
          CASE(plan_sends_a_partly_filled_block_with_the_last_token),
          CASE(plan_joins_adjacent_pieces), CASE(plan_takes_only_valid_segments_of_the_last_block),
          CASE(plan_copies_and_iov_agree), CASE(plan_slices_heads),
          CASE(plan_check_says_what_does_not_fit), CASE(plan_checksum_ignores_what_is_not_valid),
          CASE(plan_checksums_of_a_range), CASE(plan_strides_and_rows_cover_a_piece),
          CASE(plan_batches_by_bytes))
