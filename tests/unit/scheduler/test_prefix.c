/* test_prefix.c - the ladder of a prompt's keys, the table of their keepers, and both as text. */
#include <string.h>

#include "scheduler/prefix/prefix_ladder.h"
#include "scheduler/prefix/prefix_table.h"
#include "scheduler/prefix/prefix_text.h"
#include "shared/base/hash/hash.h"
#include "shared/base/mem.h"
#include "shared/base/rng.h"
#include "tests/harness/test.h"

enum { TOKENS = 1 << 19, MODEL = 7 };

static int32_t tokens[TOKENS];

static void fill_tokens(uint64_t seed)
{
    for (uint32_t i = 0; i < TOKENS; i += 4) {
        uint32_t r[4];
        rng_philox(seed, 0, i, r);
        for (uint32_t k = 0; k < 4; k++) tokens[i + k] = (int32_t)(r[k] % 50000);
    }
}

/* ---- the ladder ---- */

TEST(rungs_are_about_a_third_apart_and_fit_every_block_size)
{
    static const uint32_t sizes[] = { 1, 16, 32, 48, 64, 100, 128, 256, 512, 1024, 4096 };
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        const uint32_t b = sizes[i];
        uint32_t n = prefix_ladder_next(0, b);
        CHECK_EQ_INT(n, 1);
        for (int k = 0; k < 40; k++) {
            const uint32_t next = prefix_ladder_next(n, b);
            CHECK(next > n && next <= 2 * n);
            if (n * b >= 2048 && n >= 8 * 8) CHECK(5 * next <= 7 * n);
            n = next;
        }
    }
    uint32_t n = 0;
    static const uint32_t want[] = { 1, 2, 4, 8, 16, 24, 32, 48, 64, 88, 120, 160, 216, 288 };
    for (size_t i = 0; i < COUNT_OF(want); i++) {
        n = prefix_ladder_next(n, 64);
        CHECK_EQ_INT(n, want[i]);
    }
}

/* The keys are those of the engine's blocks. */
TEST(keys_are_the_hashes_of_whole_blocks)
{
    struct prefix_ladder l;
    struct hash128 key = hash_block_seed(MODEL, 5);
    fill_tokens(1);
    prefix_ladder_make(&l, MODEL, 5, tokens, 64 * 9 + 63, 64);
    CHECK_EQ_INT(l.n, 4);
    for (uint32_t i = 0, rung = 0; i < 8; i++) {
        key = hash_block(key, tokens + 64 * i, 64);
        if (i + 1 != 1u << rung) continue;
        CHECK_EQ_INT(l.rungs[rung].tokens, 64 * (i + 1));
        CHECK_EQ_INT(l.rungs[rung].slot, (uint16_t)key.lo);
        CHECK_EQ_INT(l.rungs[rung].tag, (uint32_t)key.hi);
        rung++;
    }
    prefix_ladder_make(&l, MODEL, 5, tokens, 63, 64);
    CHECK_EQ_INT(l.n, 0);
    prefix_ladder_make(&l, MODEL, 5, tokens, 64, 64);
    CHECK_EQ_INT(l.n, 1);
    prefix_ladder_make(&l, MODEL, 5, tokens, 64, 0);
    CHECK_EQ_INT(l.n, 0);
}

static bool have_a_key_in_common(const struct prefix_ladder *a, const struct prefix_ladder *b)
{
    for (uint32_t i = 0; i < a->n && i < b->n; i++)
        if (a->rungs[i].slot == b->rungs[i].slot && a->rungs[i].tag == b->rungs[i].tag) return true;
    return false;
}

TEST(another_salt_model_or_block_size_has_other_keys)
{
    struct prefix_ladder a, b;
    fill_tokens(2);
    prefix_ladder_make(&a, MODEL, 0, tokens, 10000, 64);
    prefix_ladder_make(&b, MODEL, 0, tokens, 10000, 64);
    CHECK(have_a_key_in_common(&a, &b));
    prefix_ladder_make(&b, MODEL, 1, tokens, 10000, 64);
    CHECK(!have_a_key_in_common(&a, &b));
    prefix_ladder_make(&b, MODEL + 1, 0, tokens, 10000, 64);
    CHECK(!have_a_key_in_common(&a, &b));
    prefix_ladder_make(&b, MODEL, 0, tokens, 10000, 128);
    CHECK(!have_a_key_in_common(&a, &b));
}

TEST(equal_beginnings_share_the_rungs_they_reach)
{
    struct prefix_ladder a, b;
    fill_tokens(3);
    prefix_ladder_make(&a, MODEL, 0, tokens, 20000, 64);
    tokens[5000]++;
    prefix_ladder_make(&b, MODEL, 0, tokens, 30000, 64);
    for (uint32_t i = 0; i < a.n; i++)
        CHECK((a.rungs[i].tag == b.rungs[i].tag) == (a.rungs[i].tokens <= 5000));
    CHECK(b.n > a.n);
}

TEST(a_very_long_prompt_has_keys_up_to_a_limit)
{
    struct prefix_ladder l;
    fill_tokens(4);
    prefix_ladder_make(&l, MODEL, 0, tokens, TOKENS, 64);
    CHECK(l.n <= PREFIX_RUNGS_MAX);
    CHECK(l.rungs[l.n - 1].tokens <= PREFIX_LADDER_TOKENS_MAX);
    CHECK(l.rungs[l.n - 1].tokens > PREFIX_LADDER_TOKENS_MAX / 4 * 3);
    prefix_ladder_make(&l, MODEL, 0, tokens, TOKENS, 1);
    CHECK(l.n <= PREFIX_RUNGS_MAX);
    CHECK(l.rungs[l.n - 1].tokens <= PREFIX_LADDER_BLOCKS_MAX);
}

TEST(less_than_a_quarter_is_not_asked_for)
{
    struct prefix_ladder l;
    struct prefix_rung out[PREFIX_RUNGS_MAX];
    fill_tokens(5);
    prefix_ladder_make(&l, MODEL, 0, tokens, 8192, 64);
    const uint32_t n = prefix_ladder_ask(&l, 8192, out);
    CHECK_EQ_INT(out[0].tokens, 2048);
    CHECK_EQ_INT(out[n - 1].tokens, 7680);
    CHECK_EQ_INT(prefix_ladder_ask(&l, 8193, out), n - 1); /* a token longer */
    CHECK_EQ_INT(out[0].tokens, 3072);
    CHECK_EQ_INT(prefix_ladder_ask(&l, 7680, out), n);
    CHECK_EQ_INT(out[n - 1].tokens, 7680 - 64); /* its last token is computed, with its block */
    CHECK(out[n - 1].tag == l.rungs[l.n - 1].tag);
    prefix_ladder_make(&l, MODEL, 0, tokens, 63, 64);
    CHECK_EQ_INT(prefix_ladder_ask(&l, 63, out), 0);
}

/* ---- the table ---- */

static void note(struct prefix_table *t, const struct prefix_rung *r, uint64_t computes,
                 uint64_t decodes, uint32_t now_s)
{
    const uint64_t nodes[PREFIX_KINDS] = { computes, decodes };
    prefix_table_note(t, r, 1, nodes, now_s);
}

/* Slots that have a keeper. */
static uint32_t n_used(const struct prefix_table *t)
{
    uint32_t n = 0;
    for (size_t i = 0; i < PREFIX_SLOTS; i++)
        n += t->slots[i].keepers[0][0].node || t->slots[i].keepers[1][0].node;
    return n;
}

TEST(the_newest_nodes_of_each_kind_are_kept)
{
    struct prefix_table *t = prefix_table_create();
    const struct prefix_rung r = { 77, 0xabcdef01, 64 };
    CHECK(!prefix_table_find(t, &r, 10));
    note(t, &r, 1, 0, 10);
    note(t, &r, 2, 51, 11);
    const struct prefix_slot *s = prefix_table_find(t, &r, 12);
    CHECK(s && s->keepers[0][0].node == 2 && s->keepers[0][1].node == 1);
    CHECK(s->keepers[1][0].node == 51 && s->keepers[1][1].node == 0);
    CHECK(s->keepers[0][0].at_s == 11 && s->keepers[0][1].at_s == 10);
    note(t, &r, 1, 0, 13); /* again: it is the newest now */
    CHECK(s->keepers[0][0].node == 1 && s->keepers[0][1].node == 2);
    note(t, &r, 3, 0, 14);
    CHECK(s->keepers[0][0].node == 3 && s->keepers[0][1].node == 1);
    CHECK(s->keepers[1][0].node == 51);
    note(t, &r, 3, 0, 13 + PREFIX_FRESH_S); /* it is the newest: nothing is to be noted */
    CHECK(s->keepers[0][0].at_s == 14);
    note(t, &r, 3, 0, 14 + PREFIX_FRESH_S);
    CHECK(s->keepers[0][0].at_s == 14 + PREFIX_FRESH_S && s->keepers[0][1].node == 1);
    note(t, &r, 3, 52, 15 + PREFIX_FRESH_S); /* both or none */
    CHECK(s->keepers[0][0].at_s == 15 + PREFIX_FRESH_S && s->keepers[1][0].node == 52);
    CHECK_EQ_INT(n_used(t), 1);
    prefix_table_free(t);
}

TEST(another_key_takes_its_slot_and_age_ends_all)
{
    struct prefix_table *t = prefix_table_create();
    const struct prefix_rung a = { 5, 1, 64 }, b = { 5, 2, 64 };
    note(t, &a, 1, 2, 10);
    CHECK(prefix_table_find(t, &a, 9 + PREFIX_TTL_S));
    CHECK(prefix_table_is_used(t, 9 + PREFIX_TTL_S));
    CHECK(!prefix_table_find(t, &a, 10 + PREFIX_TTL_S));
    CHECK(!prefix_table_is_used(t, 10 + PREFIX_TTL_S));
    note(t, &b, 3, 0, 20);
    CHECK(!prefix_table_find(t, &a, 20));
    const struct prefix_slot *s = prefix_table_find(t, &b, 20);
    CHECK(s && s->keepers[0][0].node == 3 && !s->keepers[0][1].node && !s->keepers[1][0].node);
    prefix_table_free(t);
}

TEST(it_does_not_grow)
{
    struct prefix_table *t = prefix_table_create();
    for (uint32_t i = 1; i <= 1000000; i++) {
        const struct prefix_rung r = { (uint16_t)(i * 2654435761u >> 16), i, 64 };
        note(t, &r, i, i, 10 + i / 1000);
    }
    CHECK(n_used(t) <= PREFIX_SLOTS);
    CHECK(n_used(t) > PREFIX_SLOTS / 2);
    CHECK(sizeof *t <= 5 << 20);
    prefix_table_free(t);
}

/* ---- text ---- */

static const struct prefix_rung RUNGS[] = { { 0, 0, 64 }, { 0xffff, 0xfedcba98, PREFIX_LOAD_MAX } };
static const struct prefix_use USES[] = { { 1, 0 }, { UINT64_MAX, PREFIX_FLAGS } };
static const uint64_t AVOID[] = { 5, UINT64_MAX };
static const struct prefix_drop DROPS[] = { { UINT64_MAX, UINT32_MAX } };
static const struct prefix_query QUERY = { .n_tokens = 1000,
                                           .rungs = RUNGS,
                                           .n_rungs = 2,
                                           .uses = USES,
                                           .n_uses = 2,
                                           .avoid = AVOID,
                                           .n_avoid = 2,
                                           .drops = DROPS,
                                           .n_drops = 1 };

TEST(a_query_is_read_as_it_was_written)
{
    struct prefix_query_room room;
    struct buf text = { 0 };
    struct prefix_query_text t;
    struct prefix_query q = { .n_tokens = 1000, .compute = 3, .decode = 4, .ns = 5, .blocks = 6 };
    struct err err;
    buf_add_c(&text, "before");
    prefix_query_write(&QUERY, &text, &t);
    CHECK_EQ_INT(t.rungs.n, 2 * PREFIX_RUNG_TEXT);
    CHECK_EQ_INT(t.uses.n, 2 * PREFIX_USE_TEXT);
    CHECK_EQ_INT(t.avoid.n, 2 * PREFIX_AVOID_TEXT);
    CHECK_EQ_INT(strlen(t.uses.p), t.uses.n);
    CHECK_OK(prefix_query_read(&t, &room, &q, &err));
    CHECK(q.n_tokens == 1000 && q.compute == 3 && q.decode == 4 && q.ns == 5 && q.blocks == 6);
    CHECK(q.n_rungs == 2 && q.n_uses == 2 && q.n_avoid == 2 && q.n_drops == 1);
    for (size_t i = 0; i < 2; i++) {
        CHECK(q.rungs[i].slot == RUNGS[i].slot && q.rungs[i].tag == RUNGS[i].tag &&
              q.rungs[i].tokens == RUNGS[i].tokens);
        CHECK(q.uses[i].kind == USES[i].kind && q.uses[i].flags == USES[i].flags);
        CHECK(q.avoid[i] == AVOID[i]);
    }
    CHECK(q.drops[0].node == UINT64_MAX && q.drops[0].at_s == UINT32_MAX);
    buf_release(&text);
}

#define ID "0000000000000001"

TEST(malformed_queries_are_refused)
{
    struct prefix_query_room room;
    static char uses[(PREFIX_USES_MAX + 1) * PREFIX_USE_TEXT + 1],
        avoid[(PREFIX_AVOID_MAX + 1) * PREFIX_AVOID_TEXT + 1];
    static const struct {
        const char *rungs, *uses, *avoid, *drops, *field;
    } rows[] = {
        { "0", "", "", "", "rungs" },
        { "g0000000000000000000", "", "", "", "rungs" },
        { "000A0000000000000000", "", "", "", "rungs" },
        { "", ID, "", "", "uses" },
        { "", ID "!", "", "", "uses" },
        { "", "00000000000000001", "", "", "uses" }, /* kind 0 is none */
        { "", uses, "", "", "uses" },
        { "", ID "f", "x", "", "avoid" },
        { "", ID "f", "000000000000000G", "", "avoid" },
        { "", ID "f", avoid, "", "avoid" },
        { "", ID "f", ID, "0123", "drops" },
    };
    struct prefix_query q = { .n_tokens = 10 };
    struct err err;
    for (size_t i = 0; i <= PREFIX_USES_MAX; i++)
        memcpy(uses + i * PREFIX_USE_TEXT, ID "f", PREFIX_USE_TEXT);
    for (size_t i = 0; i <= PREFIX_AVOID_MAX; i++)
        memcpy(avoid + i * PREFIX_AVOID_TEXT, ID, PREFIX_AVOID_TEXT);
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        const struct prefix_query_text t = { str_of(rows[i].rungs), str_of(rows[i].uses),
                                             str_of(rows[i].avoid), str_of(rows[i].drops) };
        CHECK_STATUS(prefix_query_read(&t, &room, &q, &err), ERR_INVALID);
        CHECK_EQ_STR(err.field, rows[i].field);
    }
    uses[PREFIX_USES_MAX * PREFIX_USE_TEXT] = avoid[PREFIX_AVOID_MAX * PREFIX_AVOID_TEXT] = 0;
    const struct prefix_query_text most = { STR(""), str_of(uses), str_of(avoid), STR("") };
    CHECK_OK(prefix_query_read(&most, &room, &q, &err));
    CHECK(q.n_uses == PREFIX_USES_MAX && q.n_avoid == PREFIX_AVOID_MAX);
}

TEST(numbers_of_queries_have_limits)
{
    const struct prefix_query_text t = { STR(""), STR(ID "f"), STR(""), STR("") };
    struct prefix_query_room room;
    struct prefix_query q = { .n_tokens = PREFIX_LOAD_MAX, .ns = PREFIX_COST_MAX };
    struct err err;
    CHECK_OK(prefix_query_read(&t, &room, &q, &err));
    q.n_tokens++;
    CHECK_STATUS(prefix_query_read(&t, &room, &q, &err), ERR_INVALID);
    CHECK_EQ_STR(err.field, "tokens");
    q.n_tokens = 10;
    q.ns++;
    CHECK_STATUS(prefix_query_read(&t, &room, &q, &err), ERR_INVALID);
    CHECK_EQ_STR(err.field, "ns");
}

TEST(what_was_placed_is_read_as_it_was_written)
{
    const struct prefix_placed want = {
        .prefill = UINT64_MAX,
        .decode = 2,
        .tokens = 3,
        .expected = { true, { 4, UINT32_MAX }, { 6, 7 }, 8, PREFIX_LOAD_MAX },
    };
    static const char *const malformed[] = {
        "",
        "0000000000000001 0000000000000002 3 4 00000005 6 00000007 0000000000000008",
        "0000000000000001 0000000000000002 3 4 00000005 6 00000007 0000000000000008 9 ",
        "0000000000000001 0000000000000002 3 4 00000005 6 00000007 0000000000000008 9 1",
        "0000000000000001 0000000000000002 -3 4 00000005 6 00000007 0000000000000008 9",
        "0000000000000001 0000000000000002 3 4 5 6 00000007 0000000000000008 9",
        "0000000000000001 0000000000000000 3 4 00000005 6 00000007 0000000000000008 9",
        "0000000000000002 0000000000000002 3 4 00000005 6 00000007 0000000000000008 9",
        "0000000000000001 0000000000000002 67108864 4 00000005 6 00000007 0000000000000008 9",
    };
    struct buf text = { 0 };
    struct prefix_placed got;
    prefix_placed_write(&want, &text);
    CHECK_OK(prefix_placed_read(buf_str(&text), &got));
    CHECK(got.prefill == want.prefill && got.decode == 2 && got.tokens == 3);
    CHECK(got.expected.known);
    CHECK(got.expected.compute.tokens == 4 && got.expected.compute.at_s == UINT32_MAX);
    CHECK(got.expected.decode.tokens == 6 && got.expected.decode.at_s == 7);
    CHECK(got.expected.keeper == 8 && got.expected.keeper_tokens == PREFIX_LOAD_MAX);
    for (size_t i = 0; i < COUNT_OF(malformed); i++)
        CHECK_STATUS(prefix_placed_read(str_of(malformed[i]), &got), ERR_FORMAT);
    buf_release(&text);
}

TEST_MAIN(CASE(rungs_are_about_a_third_apart_and_fit_every_block_size),
          CASE(keys_are_the_hashes_of_whole_blocks),
          CASE(another_salt_model_or_block_size_has_other_keys),
          CASE(equal_beginnings_share_the_rungs_they_reach),
          CASE(a_very_long_prompt_has_keys_up_to_a_limit),
          CASE(less_than_a_quarter_is_not_asked_for), CASE(the_newest_nodes_of_each_kind_are_kept),
          CASE(another_key_takes_its_slot_and_age_ends_all), CASE(it_does_not_grow),
          CASE(a_query_is_read_as_it_was_written), CASE(malformed_queries_are_refused),
          CASE(numbers_of_queries_have_limits), CASE(what_was_placed_is_read_as_it_was_written))
