/* test_prefix_pick.c - which of the offered nodes a placement takes, and who becomes a keeper. */
#include <string.h>

#include "scheduler/prefix/prefix_pick.h"
#include "tests/harness/test.h"

enum { P1 = 1, P2, P3, D1 = 11, D2, M1 = 21, N = 32, NOW = 2000, NS = 100, PROMPT = 1000 };

/* Rungs at 100, 200, .. 900 tokens of a prompt of 1,000. */
enum { RUNGS = 9 };

struct rig {
    struct prefix_table *table;
    struct prefix_node nodes[N];
    struct prefix_rung rungs[RUNGS];
    struct prefix_offer compute[8], decode[8];
    struct prefix_query q;
    struct prefix_picked got;
};

static void look(void *arg, uint64_t node, struct prefix_node *out)
{
    CHECK(node < N);
    *out = ((struct rig *)arg)->nodes[node];
}

static void offer_compute(struct rig *r, uint64_t node, bool alone, bool decodes)
{
    r->compute[r->q.n_compute++] = (struct prefix_offer){
        .node = node, .per_load = NS, .per_token = NS, .alone = alone, .decodes = decodes
    };
}

static void offer_decode(struct rig *r, uint64_t node)
{
    r->decode[r->q.n_decode++] =
        (struct prefix_offer){ .node = node, .per_load = 256, .per_token = 1 };
}

static void rig_open(struct rig *r)
{
    *r = (struct rig){ .table = prefix_table_create() };
    for (uint32_t i = 0; i < RUNGS; i++)
        r->rungs[i] = (struct prefix_rung){ (uint16_t)(50 + i), 900 + i, 100 * (i + 1) };
    for (size_t i = 0; i < N; i++)
        r->nodes[i] = (struct prefix_node){
            .lives = true, .wait_us = 1000000, .max_seqs = 8, .n_blocks = 100
        };
    r->q = (struct prefix_query){ .n_tokens = PROMPT,
                                  .rungs = r->rungs,
                                  .n_rungs = RUNGS,
                                  .compute = r->compute,
                                  .decode = r->decode };
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
    CHECK_EQ_INT(r->got.compute->node, compute);
    CHECK_EQ_INT(r->got.decode ? r->got.decode->node : 0, decode);
}

static void offer_pairs(struct rig *r)
{
    rig_open(r);
    offer_compute(r, P1, false, false);
    offer_compute(r, P2, false, false);
    offer_compute(r, P3, false, false);
    offer_decode(r, D1);
    offer_decode(r, D2);
}

TEST(without_keepers_the_choice_stays)
{
    struct rig r;
    offer_pairs(&r);
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
    offer_pairs(&r);
    keep(&r, P2, false, 6, 900);
    check_nodes(&r, P2, D1);
    CHECK_EQ_INT(r.got.expected.compute.tokens, 600);
    CHECK_EQ_INT(r.got.expected.compute.at_s, 900);
    CHECK_EQ_INT(r.got.n_compute, 400);
    r.nodes[P2].tokens = 599; /* what the directory counts */
    check_nodes(&r, P2, D1);
    r.nodes[P2].tokens = 600;
    check_nodes(&r, P1, D1);
    CHECK(r.got.expected.keeper == P2 && r.got.expected.keeper_tokens == 600);
    r.nodes[P1].tokens = 1;
    check_nodes(&r, P2, D1);
    r.compute[1].load = 1; /* what the entry node knows beside */
    check_nodes(&r, P1, D1);
    r.nodes[P2].wait_us = 59; /* 590 of the 600 should be left */
    check_nodes(&r, P2, D1);
    CHECK_EQ_INT(r.got.busy_us, 59 + 40);
    r.compute[1].load = 11;
    check_nodes(&r, P1, D1);
    r.compute[1].load = 0;
    r.compute[1].per_token = r.compute[1].per_load = 2 * NS; /* a slower one: 2,000 for 400 */
    check_nodes(&r, P1, D1);
    rig_close(&r);
}

TEST(those_that_keep_most_are_compared)
{
    struct rig r;
    offer_pairs(&r);
    keep(&r, P1, false, 5, 700); /* the choice keeps less, which does not count */
    keep(&r, P3, false, 9, 700);
    keep(&r, P2, false, 9, 800);
    check_nodes(&r, P2, D1); /* the newest of equals */
    CHECK_EQ_INT(r.got.expected.compute.tokens, 900);
    r.nodes[P2].tokens = 1;
    check_nodes(&r, P3, D1);
    CHECK_EQ_INT(r.got.expected.compute.tokens, 900);
    CHECK_EQ_INT(r.got.expected.compute.at_s, 700);
    r.nodes[P2].tokens = r.nodes[P3].tokens = 900;
    check_nodes(&r, P1, D1);
    CHECK_EQ_INT(r.got.expected.compute.tokens, 0);
    CHECK(r.got.expected.keeper == P2 && r.got.expected.keeper_tokens == 900);
    keep(&r, P1, false, 9, 900); /* now it is one of the two */
    check_nodes(&r, P1, D1);
    CHECK_EQ_INT(r.got.expected.compute.tokens, 900);
    rig_close(&r);
}

TEST(who_is_dead_old_not_offered_or_has_dropped_it_is_passed_over)
{
    struct rig r;
    offer_pairs(&r);
    keep(&r, P2, false, 6, 900);
    r.nodes[P2].lives = false;
    check_nodes(&r, P1, D1);
    r.nodes[P2].lives = true;
    r.nodes[P2].dropped_s = 900;
    check_nodes(&r, P1, D1);
    r.nodes[P2].dropped_s = 899;
    check_nodes(&r, P2, D1);
    keep(&r, 30, false, 9, 950); /* avoided, or of another model */
    check_nodes(&r, P2, D1);
    rig_close(&r);
    offer_pairs(&r);
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
    offer_pairs(&r);
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
        offer_pairs(&r);
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
    offer_pairs(&r);
    keep(&r, D2, true, 6, 900);
    r.compute[0].load = 0;
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
    offer_pairs(&r);
    offer_compute(&r, D2, true, true);
    keep(&r, D2, true, 9, 900);
    check_nodes(&r, D2, 0);
    CHECK_EQ_INT(r.got.n_compute, 100);
    r.compute[3].per_token = 10 * NS; /* nine sequences that run there wait */
    check_nodes(&r, P1, D2);
    r.compute[3].per_token = NS;
    r.nodes[D2].seqs = 8; /* it is full */
    check_nodes(&r, P1, D1);
    r.nodes[D2].seqs = 0;
    rig_close(&r);
    offer_pairs(&r);
    offer_compute(&r, D2, true, true);
    keep(&r, D2, true, 4, 900); /* a long rest is a prefill node's work, ... */
    check_nodes(&r, P1, D2);
    rig_close(&r);
    rig_open(&r);
    offer_compute(&r, D1, true, true);
    offer_compute(&r, D2, true, true);
    keep(&r, D2, true, 4, 900); /* ... if there is one */
    check_nodes(&r, D2, 0);
    CHECK_EQ_INT(r.got.n_compute, 600);
    rig_close(&r);
}

TEST(who_has_no_place_is_passed_over)
{
    struct rig r;
    rig_open(&r);
    offer_compute(&r, M1, true, false);
    offer_compute(&r, M1 + 1, true, false);
    keep(&r, M1 + 1, false, 9, 900);
    check_nodes(&r, M1 + 1, 0);
    r.nodes[M1 + 1].blocks = 91;
    check_nodes(&r, M1, 0);
    r.nodes[M1].seqs = 8;
    CHECK_STATUS(pick(&r), ERR_BUSY);
    r.nodes[M1 + 1].blocks = 90;
    check_nodes(&r, M1 + 1, 0);
    rig_close(&r);
    offer_pairs(&r);
    r.nodes[D1].seqs = 8;
    CHECK_STATUS(pick(&r), ERR_BUSY);
    keep(&r, D2, true, 1, 900);
    check_nodes(&r, P1, D2);
    rig_close(&r);
}

TEST(the_nodes_that_were_taken_become_keepers)
{
    struct rig r;
    offer_pairs(&r);
    check_nodes(&r, P1, D1);
    prefix_note_picked(r.table, &r.q, &r.got, NOW);
    for (size_t i = 0; i < RUNGS; i++) {
        const struct prefix_slot *s = prefix_table_find(r.table, &r.rungs[i], NOW);
        CHECK(s && s->keepers[0][0].node == P1 && s->keepers[1][0].node == D1);
    }
    rig_close(&r);
    rig_open(&r);
    offer_compute(&r, D1, true, true);
    check_nodes(&r, D1, 0);
    prefix_note_picked(r.table, &r.q, &r.got, NOW);
    const struct prefix_slot *s = prefix_table_find(r.table, &r.rungs[0], NOW);
    CHECK(s && !s->keepers[0][0].node && s->keepers[1][0].node == D1);
    rig_close(&r);
}

TEST(who_has_no_such_cache_is_no_keeper)
{
    struct rig r;
    offer_pairs(&r);
    r.compute[0].forgets = r.decode[0].forgets = true;
    check_nodes(&r, P1, D1);
    prefix_note_picked(r.table, &r.q, &r.got, NOW);
    CHECK(!prefix_table_find(r.table, &r.rungs[0], NOW));
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
    offer_pairs(&r);
    for (int i = 0; i < 300; i++) {
        uint64_t least = P1;
        for (uint64_t p = P2; p <= P3; p++)
            if (r.nodes[p].tokens < r.nodes[least].tokens) least = p;
        r.compute[0].node = least; /* the entry node's choice is the least loaded */
        for (uint32_t k = 1, p = P1; p <= P3; p++)
            if (p != least) r.compute[k++].node = p;
        CHECK_OK(pick(&r));
        prefix_note_picked(r.table, &r.q, &r.got, NOW);
        n_taken[r.got.compute->node]++;
        r.nodes[r.got.compute->node].tokens += r.got.n_compute;
        for (uint64_t p = P1; p <= P3; p++) /* each computes 60 tokens meanwhile */
            r.nodes[p].tokens -= r.nodes[p].tokens < 60 ? r.nodes[p].tokens : 60;
    }
    CHECK(n_taken[P1] > 30 && n_taken[P2] > 30);
    rig_close(&r);
}

TEST_MAIN(CASE(without_keepers_the_choice_stays),
          CASE(a_keeper_is_taken_while_its_load_costs_less_than_it_saves),
          CASE(those_that_keep_most_are_compared),
          CASE(who_is_dead_old_not_offered_or_has_dropped_it_is_passed_over),
          CASE(a_shorter_beginning_is_newer_than_what_was_dropped),
          CASE(nothing_is_concluded_from_a_young_keeper),
          CASE(a_decode_node_that_keeps_it_is_sent_less),
          CASE(a_decode_node_computes_a_short_rest_itself), CASE(who_has_no_place_is_passed_over),
          CASE(the_nodes_that_were_taken_become_keepers), CASE(who_has_no_such_cache_is_no_keeper),
          CASE(a_hot_prefix_spreads))
