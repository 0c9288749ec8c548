/* test_kv_layout.c - sizes, offsets, segments, wire format and the errors of a mismatch. */
#include "shared/kv/kv_layout.h"

#include <string.h>

#include "tests/harness/test.h"

static struct kv_layout sample(void)
{
    return (struct kv_layout){
        .model_fingerprint = 0x1122334455667788ull,
        .dtype = DTYPE_F32,
        .block_tokens = 64,
        .n_layers = 30,
        .n_kv_heads = 3,
        .model_kv_heads = 3,
        .head_dim = 64,
        .tp_size = 1,
        .tp_rank = 0,
        .n_blocks = 10,
    };
}

TEST(sizes)
{
    struct kv_layout l = sample();
    CHECK_EQ_INT(kv_layout_token_bytes(&l), 3 * 2 * 64 * 4);
    CHECK_EQ_INT(kv_layout_piece_bytes(&l), 64 * 3 * 2 * 64 * 4);
    CHECK_EQ_INT(kv_layout_block_bytes(&l), 30 * 64 * 3 * 2 * 64 * 4);
    CHECK_EQ_INT(kv_layout_pool_bytes(&l), 10 * 30 * 64 * 3 * 2 * 64 * 4);
    l.dtype = DTYPE_BF16;
    CHECK_EQ_INT(kv_layout_token_bytes(&l), 3 * 2 * 64 * 2);
}

TEST(pieces_tile_the_pool)
{
    struct kv_layout l = sample();
    size_t at = 0;
    for (uint32_t layer = 0; layer < l.n_layers; layer++)
        for (uint32_t block = 0; block < l.n_blocks; block++, at += kv_layout_piece_bytes(&l))
            CHECK_EQ_INT(kv_layout_offset(&l, layer, block), at);
    CHECK_EQ_INT(at, kv_layout_pool_bytes(&l));
}

TEST(segments_of_a_full_block_are_the_piece)
{
    struct kv_layout l = sample();
    CHECK_EQ_INT(kv_layout_segment_stride(&l) * kv_layout_n_segments(&l),
                 kv_layout_piece_bytes(&l));
    CHECK_EQ_INT(kv_layout_segment_bytes(&l, 5), 5 * 64 * 4);
}

TEST(wire_format_round_trips_and_is_fixed)
{
    struct kv_layout l = sample(), back;
    l.tp_size = 4;
    l.tp_rank = 3;
    l.n_kv_heads = l.model_kv_heads = 1;
    l.head_dim = 576;
    l.latent = 1;
    l.n_draft_layers = 1;
    struct buf b = { 0 }, again = { 0 };
    kv_layout_encode(&l, &b);
    CHECK_EQ_INT(b.len, KV_LAYOUT_WIRE_BYTES);
    CHECK_EQ_INT((unsigned char)b.data[0], 0x88);
    CHECK_EQ_INT(b.data[12], 64);
    struct err err;
    CHECK_OK(kv_layout_decode(buf_str(&b), &back, &err));
    kv_layout_encode(&back, &again);
    CHECK(again.len == b.len && memcmp(again.data, b.data, b.len) == 0);
    CHECK(back.latent == 1 && back.n_draft_layers == 1 && back.head_dim == 576 &&
          back.n_blocks == 10 && back.tp_rank == 3 &&
          back.model_fingerprint == l.model_fingerprint);
    CHECK_STATUS(kv_layout_decode(str_sub(buf_str(&b), 0, 40), &back, &err), ERR_FORMAT);
    /* the wire format before first_head */
    CHECK_STATUS(kv_layout_decode(str_sub(buf_str(&b), 0, 44), &back, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "version 1 (44 bytes)") && strstr(err.text, "version 3 (56 bytes)"));
    CHECK_STATUS(kv_layout_decode(str_sub(buf_str(&b), 0, 52), &back, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "version 2 (52 bytes)"));
    b.data[40] = 2;
    CHECK_STATUS(kv_layout_decode(buf_str(&b), &back, &err), ERR_INVALID);
    CHECK_EQ_STR(err.field, "latent");
    b.data[40] = 0; /* heads of 576 elements */
    CHECK_STATUS(kv_layout_decode(buf_str(&b), &back, &err), ERR_INVALID);
    CHECK_EQ_STR(err.field, "head_dim");
    b.data[40] = 1;
    b.data[8] = 77;
    CHECK_STATUS(kv_layout_decode(buf_str(&b), &back, &err), ERR_UNSUPPORTED);
    buf_release(&b);
    buf_release(&again);
}

TEST(check_refuses_what_is_out_of_range)
{
    struct err err;
    struct kv_layout l = sample();
    CHECK_OK(kv_layout_check(&l, &err));
#define REFUSES(member, value)                                                                     \
    do {                                                                                           \
        l = sample();                                                                              \
        l.member = (value);                                                                        \
        CHECK(kv_layout_check(&l, &err) != OK);                                                    \
        CHECK_EQ_STR(err.field, #member);                                                          \
    } while (0)
    REFUSES(dtype, DTYPE_Q8_0);
    REFUSES(block_tokens, 0);
    REFUSES(block_tokens, 100000);
    REFUSES(n_layers, 0);
    REFUSES(n_draft_layers, 2);
    REFUSES(n_kv_heads, 1u << 31);
    REFUSES(n_kv_heads, 4); /* of 3 */
    REFUSES(first_head, 1); /* 3 heads from the second of 3 */
    REFUSES(first_head, UINT32_MAX);
    REFUSES(model_kv_heads, 0);
    REFUSES(model_kv_heads, 5000);
    REFUSES(head_dim, 0);
    REFUSES(tp_size, 0);
    REFUSES(tp_rank, 1);
    REFUSES(n_blocks, 0);
    REFUSES(latent, 2);
    REFUSES(head_dim, 257);
    l = sample();
    l.n_layers = l.n_draft_layers = 1; /* and no other */
    CHECK_STATUS(kv_layout_check(&l, &err), ERR_INVALID);
    CHECK_EQ_STR(err.field, "n_layers");
    l = sample();
    l.latent = 1;
    CHECK_STATUS(kv_layout_check(&l, &err), ERR_INVALID);
    CHECK_EQ_STR(err.field, "n_kv_heads");
    l.n_kv_heads = 1; /* and 3 in the model */
    CHECK_STATUS(kv_layout_check(&l, &err), ERR_INVALID);
    CHECK_EQ_STR(err.field, "model_kv_heads");
    l.model_kv_heads = 1;
    l.head_dim = 1025;
    CHECK_STATUS(kv_layout_check(&l, &err), ERR_INVALID);
    CHECK_EQ_STR(err.field, "head_dim");
    l = (struct kv_layout){
        .dtype = DTYPE_F32,
        .block_tokens = 256,
        .n_layers = 4096,
        .n_kv_heads = 4096,
        .model_kv_heads = 4096,
        .head_dim = 256,
        .tp_size = 1,
        .n_blocks = INT32_MAX,
    };
    CHECK_STATUS(kv_layout_check(&l, &err), ERR_INVALID);
}

TEST(int8_pieces_hold_values_then_scales)
{
    struct kv_layout l = sample();
    struct err err;
    l.dtype = DTYPE_I8;
    CHECK_OK(kv_layout_check(&l, &err));
    CHECK_EQ_INT(kv_layout_token_bytes(&l), 3 * 2 * (64 + 4));
    CHECK_EQ_INT(kv_layout_scale_offset(&l), 3 * 2 * 64 * 64);
    CHECK_EQ_INT(kv_layout_piece_bytes(&l) - kv_layout_scale_offset(&l), 3 * 2 * 64 * 4);
    CHECK_EQ_INT(kv_layout_segment_bytes(&l, 5), 5 * 64);
    CHECK_EQ_STR(kv_dtype_name(l.dtype), "int8");
    CHECK(l.dtype >= DTYPE_COUNT); /* a type of no file */
    struct kv_layout e4m3 = l;
    e4m3.dtype = DTYPE_F8_E4M3;
    CHECK_OK(kv_layout_check(&e4m3, &err));
    CHECK_EQ_INT(kv_layout_piece_bytes(&e4m3), kv_layout_piece_bytes(&l));
    CHECK_EQ_INT(kv_layout_scale_offset(&e4m3), kv_layout_scale_offset(&l));
    CHECK_EQ_STR(kv_dtype_name(e4m3.dtype), "f8_e4m3");
}

/* DeepSeek-V3 in bf16: 576 values per token and layer, 70,272 bytes per token. Source: its
 * configuration. */
TEST(latents_have_one_part)
{
    struct kv_layout l = { .dtype = DTYPE_BF16,
                           .block_tokens = 64,
                           .n_layers = 61,
                           .n_kv_heads = 1,
                           .model_kv_heads = 1,
                           .head_dim = 576,
                           .tp_size = 8,
                           .tp_rank = 5,
                           .n_blocks = 4,
                           .latent = 1, },
                     other = l;
    struct err err;
    uint32_t first;
    CHECK_OK(kv_layout_check(&l, &err));
    CHECK_EQ_INT(kv_layout_token_bytes(&l) * l.n_layers, 70272);
    CHECK_EQ_INT(kv_layout_n_parts(&l), 1);
    CHECK_EQ_INT(kv_layout_n_segments(&l), 1);
    CHECK_EQ_INT(kv_layout_segment_stride(&l), kv_layout_piece_bytes(&l));
    other.tp_size = 2;
    other.tp_rank = 0;
    CHECK_OK(kv_layout_same_model(&l, &other, &err));
    CHECK_EQ_INT(kv_layout_common_heads(&l, &other, &first), 1);
    CHECK_EQ_INT(first, 0);
    other.latent = 0;
    CHECK_STATUS(kv_layout_same_model(&l, &other, &err), ERR_PEER_MISMATCH);
    CHECK_EQ_STR(err.field, "latent");
    CHECK(strstr(err.text,
                 "one latent vector per token here and keys and values of heads at the peer"));
    l.dtype = DTYPE_I8;
    CHECK_EQ_INT(kv_layout_token_bytes(&l), 576 + 4);
}

TEST(difference_is_named_with_both_values)
{
    struct kv_layout a = sample(), b = sample();
    struct err err;
    b.n_blocks = 999;
    b.block_tokens = 16;
    b.dtype = DTYPE_BF16;
    CHECK_OK(kv_layout_same_model(&a, &b, &err));
    b.n_layers = 31;
    CHECK_STATUS(kv_layout_same_model(&a, &b, &err), ERR_PEER_MISMATCH);
    CHECK_EQ_STR(err.field, "n_layers");
    CHECK(strstr(err.text, "30") && strstr(err.text, "31"));
    b = sample();
    b.n_kv_heads = b.model_kv_heads = 4;
    CHECK_STATUS(kv_layout_same_model(&a, &b, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "model_kv_heads is 3 here and 4 at the peer"));
    b = sample();
    b.head_dim = 128;
    CHECK_STATUS(kv_layout_same_model(&a, &b, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "head_dim is 64 here and 128 at the peer"));
    b = sample();
    b.model_fingerprint = 7;
    CHECK_STATUS(kv_layout_same_model(&a, &b, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "1122334455667788") && strstr(err.text, "0000000000000007"));
}

TEST(heads_in_common)
{
    struct kv_layout a = sample(), b = sample();
    struct err err;
    uint32_t first;
    CHECK_EQ_INT(kv_layout_common_heads(&a, &b, &first), 3);
    a.model_kv_heads = b.model_kv_heads = 16;
    a.n_kv_heads = a.first_head = 4; /* heads 4..8 */
    a.tp_size = 4;
    a.tp_rank = 1;
    b.n_kv_heads = 8; /* heads 0..8 */
    b.tp_size = 2;
    CHECK_OK(kv_layout_same_model(&a, &b, &err));
    CHECK_EQ_INT(kv_layout_common_heads(&a, &b, &first), 4);
    CHECK_EQ_INT(first, 4);
    b.tp_rank = 1;
    b.first_head = 8;
    CHECK_EQ_INT(kv_layout_common_heads(&a, &b, &first), 0);
}

/* The draft layer is the last: what both have are the layers before it, or all. */
TEST(a_draft_layer_need_not_be_at_both)
{
    struct kv_layout with = sample(), without = sample();
    struct err err;
    with.n_layers++;
    with.n_draft_layers = 1;
    CHECK_OK(kv_layout_check(&with, &err));
    CHECK_OK(kv_layout_same_model(&with, &without, &err));
    CHECK_OK(kv_layout_same_model(&without, &with, &err));
    CHECK_EQ_INT(kv_layout_common_layers(&with, &without), 30);
    CHECK_EQ_INT(kv_layout_common_layers(&without, &with), 30);
    CHECK_EQ_INT(kv_layout_common_layers(&with, &with), 31);
    with.n_draft_layers = 0; /* 31 layers of a model */
    CHECK_STATUS(kv_layout_same_model(&with, &without, &err), ERR_PEER_MISMATCH);
    CHECK_EQ_STR(err.field, "n_layers");
}

/* 2 heads on 8 ranks: each is on four. */
TEST(ranks_that_hold_the_same_head)
{
    struct kv_layout many = sample(), few = sample();
    struct err err;
    uint32_t first;
    many.model_kv_heads = few.model_kv_heads = few.n_kv_heads = 2;
    many.n_kv_heads = 1;
    many.tp_size = 8;
    for (uint32_t rank = 0; rank < 8; rank++) {
        many.tp_rank = rank;
        many.first_head = rank / 4;
        CHECK_OK(kv_layout_check(&many, &err));
        CHECK_OK(kv_layout_same_model(&many, &few, &err));
        CHECK_EQ_INT(kv_layout_common_heads(&many, &few, &first), 1);
        CHECK_EQ_INT(first, rank / 4);
    }
}

TEST(f32_keeps_values_smaller_types_do_not)
{
    const uint32_t types[] = { DTYPE_F32, DTYPE_F16, DTYPE_BF16, DTYPE_I8, DTYPE_F8_E4M3 };
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 5; j++)
            CHECK_EQ_INT(kv_dtype_keeps(types[i], types[j]), i == j || j == 0);
}

TEST_MAIN(CASE(sizes), CASE(pieces_tile_the_pool), CASE(segments_of_a_full_block_are_the_piece),
          CASE(wire_format_round_trips_and_is_fixed), CASE(check_refuses_what_is_out_of_range),
          CASE(int8_pieces_hold_values_then_scales), CASE(latents_have_one_part),
          CASE(difference_is_named_with_both_values), CASE(heads_in_common),
          CASE(a_draft_layer_need_not_be_at_both), CASE(ranks_that_hold_the_same_head),
          CASE(f32_keeps_values_smaller_types_do_not))
