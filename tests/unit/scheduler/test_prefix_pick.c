/* test_prefix_pick.c - which nodes a placement takes, and who becomes a keeper. */
#include <string.h>

#include "scheduler/prefix/prefix_pick.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { P1 = 1, P2, P3, D1 = 11, D2, M1 = 21, N = 32, NOW = 2000, NS = 100, PROMPT = 1000 };

/* Kinds of nodes: those that prefill, those that decode, mixed ones, and others. */
enum { KIND_P = 1, KIND_D, KIND_M, KIND_OTHER };

/* Rungs at 100, 200, .. 900 tokens of a prompt of 1,000. */
enum { RUNGS = 9 };

struct rig {
    struct prefix_table *table;
    struct prefix_node nodes[N];
    struct prefix_rung rungs[RUNGS];
    struct prefix_use uses[KIND_M];
    struct prefix_query q;
    struct prefix_picked got;
};

static void look(void *arg, uint64_t node, struct prefix_node *out)
{
    CHECK(node < N);
    *out = ((struct rig *)arg)->nodes[node];
}

static void rig_open(struct rig *r)
{
    *r = (struct rig){ .table = prefix_table_create() };
    for (uint32_t i = 0; i < RUNGS; i++)
        r->rungs[i] = (struct prefix_rung){ (uint16_t)(50 + i), 900 + i, 100 * (i + 1) };
    for (size_t i = 0; i < N; i++)
        r->nodes[i] = (struct prefix_node){ .lives = true,
                                            .wait_us = 1000000,
                                            .max_seqs = 8,
                                            .n_blocks = 100,
                                            .bid = { .kind = i < D1   ? KIND_P
                                                             : i < M1 ? KIND_D
                                                             : i < 30 ? KIND_M
                                                                      : KIND_OTHER } };
    r->uses[0] = (struct prefix_use){ KIND_P, PREFIX_COMPUTES };
    r->uses[1] = (struct prefix_use){ KIND_D, PREFIX_TAKES | PREFIX_DECODE };
    r->uses[2] = (struct prefix_use){ KIND_M, PREFIX_COMPUTES | PREFIX_ALONE };
    r->q = (struct prefix_query){ .n_tokens = PROMPT,
                                  .rungs = r->rungs,
                                  .n_rungs = RUNGS,
                                  .compute = P1,
                                  .decode = D1,
                                  .uses = r->uses,
                                  .n_uses = COUNT_OF(r->uses),
                                  .ns = NS,
                                  .blocks = 50 };
}

static void rig_close(struct rig *r) { prefix_table_free(r->table); }

/* The node was chosen for a prompt with so many rungs of this one. */
static void keep(struct rig *r, uint64_t node, bool decodes, uint32_t n_rungs, uint32_t at_s)
{
    uint64_t nodes[PREFIX_KINDS] = { 0 };
    nodes[decodes] = node;
    prefix_table_note(r->table, r->rungs, n_rungs, nodes, at_s);
}

static enum status pick(struct rig *r)
{
    const struct prefix_lookup l = {
        .query = &r->q, .table = r->table, .now_s = NOW, .blocks = 10, .look = look, .arg = r
    };
    return prefix_pick(&l, &r->got);
}

static void check_nodes(struct rig *r, uint64_t compute, uint64_t decode)
{
    CHECK_OK(pick(r));
    CHECK_EQ_INT(r->got.compute, compute);
    CHECK_EQ_INT(r->got.decode, decode);
}

/* Decode nodes may compute a prompt. */
static void let_decode_compute(struct rig *r)
{
    r->uses[1].flags |= PREFIX_COMPUTES | PREFIX_ALONE;
}

static void choose_alone(struct rig *r, uint64_t node)
{
    r->q.compute = node;
    r->q.decode = 0;
}

TEST(without_keepers_the_choice_stays)
{
    struct rig r;
    rig_open(&r);
    check_nodes(&r, P1, D1);
    CHECK(r.got.expected.known && r.got.expected.compute.tokens == 0 && !r.got.expected.keeper);
    CHECK_EQ_INT(r.got.n_compute, PROMPT);
    r.q.n_rungs = 0; /* a prompt shorter than a block */
    check_nodes(&r, P1, D1);
    rig_close(&r);
}

TEST(a_keeper_is_taken_while_its_load_costs_less_than_it_saves)
{
    struct rig r;
    rig_open(&r);
    keep(&r, P2, false, 6, 900);
    check_nodes(&r, P2, D1);
    CHECK_EQ_INT(r.got.expected.compute.tokens, 600);
    CHECK_EQ_INT(r.got.expected.compute.at_s, 900);
    CHECK_EQ_INT(r.got.n_compute, 400);
    r.nodes[P2].tokens = 719; /* what the directory counts; a token kept is worth 1.2 of them */
    check_nodes(&r, P2, D1);
    r.nodes[P2].tokens = 720;
    check_nodes(&r, P1, D1);
    CHECK(r.got.expected.keeper == P2 && r.got.expected.keeper_tokens == 600);
    r.nodes[P1].tokens = 1;
    check_nodes(&r, P2, D1);
    r.nodes[P1].tokens = 0;
    r.nodes[P2].wait_us = 71; /* 710 of the 720 should be left */
    check_nodes(&r, P2, D1);
    CHECK_EQ_INT(r.got.busy_us, 71 + 40);
    r.nodes[P2].tokens = 0;
    r.nodes[P2].bid.ns = 2 * NS; /* a slower one: 240 for each of 400 */
    check_nodes(&r, P2, D1);
    r.nodes[P2].bid.ns = 5 * NS / 2;
    check_nodes(&r, P1, D1);
    r.nodes[P2].bid.grouped = true; /* all wait for the fullest, but it has less to compute */
    check_nodes(&r, P2, D1);
    rig_close(&r);
}

TEST(what_a_node_says_counts_where_the_directory_has_counted_nothing)
{
    struct rig r;
    rig_open(&r);
    keep(&r, P2, false, 6, 900);
    r.nodes[P2].bid.waiting = 719;
    check_nodes(&r, P2, D1);
    r.nodes[P2].bid.waiting = 720;
    check_nodes(&r, P1, D1);
    r.nodes[P2].tokens = 1;
    check_nodes(&r, P2, D1);
    r.nodes[P2].tokens = 0;
    r.nodes[P2].bid.waiting = 0;
    r.nodes[P2].bid.seqs = 22; /* 32 tokens each */
    check_nodes(&r, P2, D1);
    r.nodes[P2].seqs = 23;
    check_nodes(&r, P1, D1);
    r.nodes[P2] = (struct prefix_node){ .lives = true,
                                        .bid = { KIND_P, UINT32_MAX, UINT32_MAX, UINT32_MAX, 0 } };
    check_nodes(&r, P1, D1); /* whatever is in a table */
    rig_close(&r);
}

TEST(those_that_keep_most_are_compared)
{
    struct rig r;
    rig_open(&r);
    keep(&r, P1, false, 5, 700); /* the choice keeps less, which does not count */
    keep(&r, P3, false, 9, 700);
    keep(&r, P2, false, 9, 800);
    check_nodes(&r, P2, D1); /* the newest of equals */
    CHECK_EQ_INT(r.got.expected.compute.tokens, 900);
    r.nodes[P2].tokens = 1;
    check_nodes(&r, P3, D1);
    CHECK_EQ_INT(r.got.expected.compute.tokens, 900);
    CHECK_EQ_INT(r.got.expected.compute.at_s, 700);
    r.nodes[P2].tokens = r.nodes[P3].tokens = 1080;
    check_nodes(&r, P1, D1);
    CHECK_EQ_INT(r.got.expected.compute.tokens, 0);
    CHECK(r.got.expected.keeper == P2 && r.got.expected.keeper_tokens == 900);
    keep(&r, P1, false, 9, 900); /* now it is one of the two */
    check_nodes(&r, P1, D1);
    CHECK_EQ_INT(r.got.expected.compute.tokens, 900);
    rig_close(&r);
}

TEST(who_is_dead_old_avoided_or_has_dropped_it_is_passed_over)
{
    struct rig r;
    rig_open(&r);
    keep(&r, P2, false, 6, 900);
    r.nodes[P2].lives = false;
    check_nodes(&r, P1, D1);
    r.nodes[P2].lives = true;
    r.nodes[P2].dropped_s = 900;
    check_nodes(&r, P1, D1);
    r.nodes[P2].dropped_s = 899;
    check_nodes(&r, P2, D1);
    keep(&r, 30, false, 9, 950); /* of another kind */
    check_nodes(&r, P2, D1);
    r.nodes[30].bid.kind = 0; /* of an earlier version */
    check_nodes(&r, P2, D1);
    const uint64_t avoid[] = { 5, P2 };
    r.q.avoid = avoid;
    r.q.n_avoid = COUNT_OF(avoid);
    check_nodes(&r, P1, D1);
    CHECK(!r.got.expected.keeper);
    r.q.compute = P2; /* the choice is not taken instead */
    check_nodes(&r, P2, D1);
    CHECK_EQ_INT(r.got.expected.compute.tokens, 600);
    rig_close(&r);
    rig_open(&r);
    keep(&r, P2, false, 6, NOW - PREFIX_TTL_S);
    check_nodes(&r, P1, D1);
    keep(&r, P3, false, 6, NOW - PREFIX_TTL_S + 1);
    check_nodes(&r, P3, D1);
    rig_close(&r);
}

/* A node that dropped what it had long ago may have a shorter beginning again. */
TEST(a_shorter_beginning_is_newer_than_what_was_dropped)
{
    struct rig r;
    rig_open(&r);
    keep(&r, P2, false, 9, 500);
    keep(&r, P2, false, 4, 900);
    r.nodes[P2].dropped_s = 600;
    check_nodes(&r, P2, D1);
    CHECK_EQ_INT(r.got.expected.compute.tokens, 400);
    CHECK_EQ_INT(r.got.expected.compute.at_s, 900);
    rig_close(&r);
}

TEST(nothing_is_concluded_from_a_young_keeper)
{
    struct rig r;
    for (uint32_t young = 0; young < 2; young++) {
        rig_open(&r);
        keep(&r, P2, false, 6, NOW - PREFIX_YOUNG_S + young);
        check_nodes(&r, P2, D1);
        CHECK_EQ_INT(r.got.expected.compute.tokens, 600);
        CHECK_EQ_INT(r.got.expected.compute.at_s, young ? 0 : NOW - PREFIX_YOUNG_S);
        rig_close(&r);
    }
}

TEST(a_decode_node_that_keeps_it_is_sent_less)
{
    struct rig r;
    rig_open(&r);
    keep(&r, D2, true, 6, 900);
    r.nodes[D1].seqs = r.nodes[D2].seqs = 2;
    check_nodes(&r, P1, D2);
    CHECK_EQ_INT(r.got.expected.decode.tokens, 600);
    CHECK_EQ_INT(r.got.n_compute, PROMPT); /* all of it is computed all the same */
    r.nodes[D2].seqs = 4;                  /* two sequences more are worth 512 tokens of KV */
    check_nodes(&r, P1, D2);
    r.nodes[D2].seqs = 5;
    check_nodes(&r, P1, D1);
    rig_close(&r);
}

TEST(a_decode_node_computes_a_short_rest_itself)
{
    struct rig r;
    rig_open(&r);
    let_decode_compute(&r);
    keep(&r, D2, true, 9, 900);
    check_nodes(&r, D2, 0);
    CHECK_EQ_INT(r.got.n_compute, 100);
    r.nodes[D2].bid.ns = 10 * NS;
    check_nodes(&r, P1, D2);
    r.nodes[D2].bid.ns = 0;
    r.nodes[D2].bid.seqs = 3; /* that run there wait: 400 for each of 100 and of 96 */
    check_nodes(&r, D2, 0);
    r.nodes[D2].bid.seqs = 4;
    check_nodes(&r, P1, D1);
    r.nodes[P1].bid.waiting = 100000;
    r.nodes[D2].bid.seqs = PREFIX_ALONE_SEQS;
    check_nodes(&r, D2, 0);
    r.nodes[D2].bid.seqs++;
    check_nodes(&r, P1, D1);
    r.nodes[D2].bid.seqs = 0;
    r.nodes[D2].seqs = 8; /* it is full */
    check_nodes(&r, P1, D1);
    rig_close(&r);
    rig_open(&r);
    let_decode_compute(&r);
    keep(&r, D2, true, 4, 900); /* a long rest is a prefill node's work, ... */
    check_nodes(&r, P1, D2);
    choose_alone(&r, D1); /* ... if there is one */
    check_nodes(&r, D2, 0);
    CHECK_EQ_INT(r.got.n_compute, 600);
    CHECK(!r.got.keep[0] && r.got.keep[1] == D2);
    rig_close(&r);
}

TEST(who_has_no_place_is_passed_over)
{
    struct rig r;
    rig_open(&r);
    choose_alone(&r, M1);
    keep(&r, M1 + 1, false, 9, 900);
    check_nodes(&r, M1 + 1, 0);
    r.q.blocks = 101; /* for the whole answer its pool is too small */
    check_nodes(&r, M1, 0);
    r.q.blocks = 100;
    r.nodes[M1 + 1].blocks = 91;
    check_nodes(&r, M1, 0);
    r.nodes[M1].seqs = 8;
    CHECK_STATUS(pick(&r), ERR_BUSY);
    r.nodes[M1 + 1].blocks = 90;
    check_nodes(&r, M1 + 1, 0);
    rig_close(&r);
    rig_open(&r);
    r.nodes[D1].seqs = 8;
    CHECK_STATUS(pick(&r), ERR_BUSY);
    keep(&r, D2, true, 1, 900);
    check_nodes(&r, P1, D2);
    rig_close(&r);
}

/* Whatever a query says of kinds. */
TEST(a_node_that_is_taken_for_both_does_both)
{
    struct rig r;
    rig_open(&r);
    r.uses[1].flags = PREFIX_COMPUTES | PREFIX_TAKES | PREFIX_DECODE;
    keep(&r, D2, true, 9, 900);
    check_nodes(&r, D2, 0);
    r.uses[1].flags = PREFIX_COMPUTES; /* where one node was chosen, any is alone */
    choose_alone(&r, P1);
    check_nodes(&r, D2, 0);
    rig_close(&r);
}

TEST(the_nodes_that_were_taken_become_keepers)
{
    struct rig r;
    rig_open(&r);
    check_nodes(&r, P1, D1);
    CHECK(r.got.keep[0] == P1 && r.got.keep[1] == D1);
    keep(&r, P2, false, 9, 900);
    check_nodes(&r, P2, D1);
    CHECK(r.got.keep[0] == P2 && r.got.keep[1] == D1);
    rig_close(&r);
    rig_open(&r);
    choose_alone(&r, D1); /* of a kind that decodes */
    check_nodes(&r, D1, 0);
    CHECK(!r.got.keep[0] && r.got.keep[1] == D1);
    choose_alone(&r, M1);
    check_nodes(&r, M1, 0);
    CHECK(r.got.keep[0] == M1 && !r.got.keep[1]);
    rig_close(&r);
}

TEST(who_has_no_such_cache_is_no_keeper)
{
    struct rig r;
    rig_open(&r);
    r.nodes[P1].bid.kind = r.nodes[D1].bid.kind = 0;
    check_nodes(&r, P1, D1);
    CHECK(!r.got.keep[0] && !r.got.keep[1]);
    keep(&r, P1, false, 9, 900); /* as if it had had one */
    keep(&r, D1, true, 9, 900);
    check_nodes(&r, P1, D1);
    CHECK_EQ_INT(r.got.expected.compute.tokens, 0);
    CHECK_EQ_INT(r.got.expected.decode.tokens, 0);
    rig_close(&r);
}

/* A prefix that everybody begins with is computed by a second node when the first is busy, and then
 * both have it. */
TEST(a_hot_prefix_spreads)
{
    struct rig r;
    int n_taken[N] = { 0 };
    rig_open(&r);
    for (int i = 0; i < 300; i++) {
        uint64_t least = P1;
        for (uint64_t p = P2; p <= P3; p++)
            if (r.nodes[p].tokens < r.nodes[least].tokens) least = p;
        r.q.compute = least; /* the entry node's choice is the least loaded */
        CHECK_OK(pick(&r));
        prefix_table_note(r.table, r.q.rungs, r.q.n_rungs, r.got.keep, NOW);
        n_taken[r.got.compute]++;
        r.nodes[r.got.compute].tokens += r.got.n_compute;
        for (uint64_t p = P1; p <= P3; p++) /* each computes 60 tokens meanwhile */
            r.nodes[p].tokens -= r.nodes[p].tokens < 60 ? r.nodes[p].tokens : 60;
    }
    CHECK(n_taken[P1] > 30 && n_taken[P2] > 30);
    rig_close(&r);
}

TEST_MAIN(CASE(without_keepers_the_choice_stays),
          CASE(a_keeper_is_taken_while_its_load_costs_less_than_it_saves),
          CASE(what_a_node_says_counts_where_the_directory_has_counted_nothing),
          CASE(a_node_that_is_taken_for_both_does_both), CASE(those_that_keep_most_are_compared),
          CASE(who_is_dead_old_avoided_or_has_dropped_it_is_passed_over),
          CASE(a_shorter_beginning_is_newer_than_what_was_dropped),
          CASE(nothing_is_concluded_from_a_young_keeper),
          CASE(a_decode_node_that_keeps_it_is_sent_less),
          CASE(a_decode_node_computes_a_short_rest_itself), CASE(who_has_no_place_is_passed_over),
          CASE(the_nodes_that_were_taken_become_keepers), CASE(who_has_no_such_cache_is_no_keeper),
          CASE(a_hot_prefix_spreads))
