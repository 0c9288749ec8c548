/* test_kv_parts.c - parts between nodes of every pair of tensor-parallel sizes: each head of each
 * receiving rank is written once, by a rank that holds it, and no sender does more than its share. */
#include "shared/kv/kv_parts.h"

#include <string.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { TP_MAX = 8, HEADS_MAX = 8 };

/* As shared/model/share.h cuts them; n_heads 0: latents. */
static void layouts_of(uint32_t n_heads, uint32_t tp, struct kv_layout out[TP_MAX])
{
    for (uint32_t r = 0; r < tp; r++) {
        struct err err;
        out[r] = (struct kv_layout){
            .dtype = DTYPE_BF16,
            .block_tokens = 64,
            .n_layers = 2,
            .n_kv_heads = n_heads > tp ? n_heads / tp : 1,
            .first_head = r * n_heads / tp,
            .model_kv_heads = n_heads ? n_heads : 1,
            .head_dim = 32,
            .tp_size = tp,
            .tp_rank = r,
            .n_blocks = 10,
            .latent = n_heads == 0,
        };
        CHECK_OK(kv_layout_check(&out[r], &err));
    }
}

struct plan {
    struct kv_layout from[TP_MAX], to[TP_MAX];
    uint32_t p, d;
    struct kv_parts parts;
};

static void plan_of(struct plan *x, uint32_t n_heads, uint32_t p, uint32_t d, uint64_t spread)
{
    struct err err;
    layouts_of(n_heads, p, x->from);
    layouts_of(n_heads, d, x->to);
    x->p = p;
    x->d = d;
    if (kv_parts_plan(x->from, p, x->to, d, spread, &x->parts, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
}

/* Every (receiving rank, head) once; the bytes are the layouts'. */
static void check_complete(const struct plan *x)
{
    uint32_t n[TP_MAX][HEADS_MAX] = { { 0 } };
    uint64_t bytes = 0, want = 0;
    for (uint32_t i = 0; i < x->parts.n; i++) {
        const struct kv_part *part = &x->parts.part[i];
        const struct kv_layout *from = &x->from[part->sender], *to = &x->to[part->receiver];
        uint32_t first, n_common = kv_layout_common_heads(from, to, &first);
        CHECK(part->sender < x->p && part->receiver < x->d && part->n_heads > 0);
        CHECK(part->first_head >= first &&
              part->first_head + part->n_heads <= first + n_common); /* both hold them */
        for (uint32_t h = 0; h < part->n_heads; h++) n[part->receiver][part->first_head + h]++;
        bytes += kv_layout_token_bytes(to) / to->n_kv_heads * part->n_heads;
    }
    for (uint32_t r = 0; r < x->d; r++) {
        const struct kv_layout *l = &x->to[r];
        want += kv_layout_token_bytes(l);
        for (uint32_t h = 0; h < HEADS_MAX; h++)
            CHECK_EQ_INT(n[r][h], h >= l->first_head && h < l->first_head + l->n_kv_heads);
    }
    CHECK_EQ_INT(bytes, want);
}

static void heads_by_sender(const struct plan *x, uint32_t n[TP_MAX])
{
    for (uint32_t i = 0; i < x->parts.n; i++)
        n[x->parts.part[i].sender] += x->parts.part[i].n_heads;
}

static const uint32_t SIZES[] = { 1, 2, 4, 8 };

TEST(every_head_of_every_receiver_is_written_once)
{
    const uint32_t heads[] = { 0, 1, 2, 4, 8 };
    struct plan x;
    for (size_t h = 0; h < COUNT_OF(heads); h++)
        for (size_t p = 0; p < COUNT_OF(SIZES); p++)
            for (size_t d = 0; d < COUNT_OF(SIZES); d++)
                for (uint64_t spread = 0; spread < 9; spread++) {
                    plan_of(&x, heads[h], SIZES[p], SIZES[d], spread);
                    check_complete(&x);
                }
}

/* Within one request no sender has more than one head above another. */
TEST(heads_are_spread_evenly_within_a_request)
{
    struct plan x;
    for (uint32_t heads = 1; heads <= 8; heads *= 2)
        for (size_t p = 0; p < COUNT_OF(SIZES); p++)
            for (size_t d = 0; d < COUNT_OF(SIZES); d++) {
                uint32_t n[TP_MAX] = { 0 }, least = UINT32_MAX, most = 0;
                plan_of(&x, heads, SIZES[p], SIZES[d], 5);
                heads_by_sender(&x, n);
                for (uint32_t s = 0; s < x.p; s++) {
                    if (n[s] < least) least = n[s];
                    if (n[s] > most) most = n[s];
                }
                CHECK(most - least <= 1);
            }
}

/* Over requests all senders do the same: `spread` decides what one request cannot divide. */
TEST(requests_are_spread_evenly)
{
    const uint32_t heads[] = { 0, 1, 2, 4 };
    struct plan x;
    for (size_t h = 0; h < COUNT_OF(heads); h++)
        for (size_t p = 0; p < COUNT_OF(SIZES); p++)
            for (size_t d = 0; d < COUNT_OF(SIZES); d++) {
                uint32_t n[TP_MAX] = { 0 };
                for (uint64_t spread = 0; spread < 8; spread++) {
                    plan_of(&x, heads[h], SIZES[p], SIZES[d], spread);
                    heads_by_sender(&x, n);
                }
                for (uint32_t s = 1; s < x.p; s++) CHECK_EQ_INT(n[s], n[0]);
            }
}

TEST(a_latent_comes_from_one_sender)
{
    struct plan x;
    for (uint64_t spread = 0; spread < 4; spread++) {
        plan_of(&x, 0, 4, 8, spread);
        CHECK_EQ_INT(x.parts.n, 8);
        for (uint32_t i = 0; i < x.parts.n; i++) CHECK_EQ_INT(x.parts.part[i].sender, spread);
    }
}

TEST(equal_sizes_send_rank_to_rank)
{
    struct plan x;
    for (uint32_t heads = 1; heads <= 8; heads *= 2) {
        plan_of(&x, heads, 4, 4, 0);
        CHECK_EQ_INT(x.parts.n, 4);
        for (uint32_t i = 0; i < 4; i++) CHECK_EQ_INT(x.parts.part[i].sender, i);
    }
}

TEST(what_nobody_holds_and_too_many_ranks_are_refused)
{
    struct plan x;
    struct err err;
    plan_of(&x, 4, 4, 2, 0);
    CHECK_STATUS(kv_parts_plan(x.from, 3, x.to, 2, 0, &x.parts, &err), ERR_PEER_MISMATCH);
    CHECK(strstr(err.text, "no rank of the sender holds KV head 3 of 4"));
    CHECK_STATUS(kv_parts_plan(x.from, 0, x.to, 2, 0, &x.parts, &err), ERR_INVALID);
    CHECK_STATUS(kv_parts_plan(x.from, KV_RANKS_MAX + 1, x.to, 2, 0, &x.parts, &err), ERR_INVALID);
    CHECK(strstr(err.text, "between 17 and 2 ranks"));
}

TEST_MAIN(CASE(every_head_of_every_receiver_is_written_once),
          CASE(heads_are_spread_evenly_within_a_request), CASE(requests_are_spread_evenly),
          CASE(a_latent_comes_from_one_sender), CASE(equal_sizes_send_rank_to_rank),
          CASE(what_nobody_holds_and_too_many_ranks_are_refused))
