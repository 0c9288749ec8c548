/* test_place.c - which pair of nodes a request gets: candidates, capacity, load, spread. */
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"
#include "tests/unit/scheduler/place_nodes.h"

static struct place_request request(uint32_t n_tokens)
{
    return (struct place_request){
        .n_tokens = n_tokens, .n_total = n_tokens + 100, .model = 7, .random = 0x123456789abcdef0u
    };
}

TEST(no_nodes_is_unavailable)
{
    struct place_request r = request(10);
    struct place_result out;
    struct node_record n = node(1, ROLE_PREFILL);
    CHECK_STATUS(place_choose(NULL, 0, &r, &out), ERR_UNAVAILABLE);
    CHECK_STATUS(place_choose(&n, 1, &r, &out), ERR_UNAVAILABLE); /* no node decodes */
}

TEST(a_pair_is_split)
{
    struct node_record n[] = { node(1, ROLE_PREFILL), node(2, ROLE_DECODE) };
    struct place_request r = request(2 * BLOCK);
    struct place_result out;
    CHECK_OK(place_choose(n, 2, &r, &out));
    CHECK(out.prefill == &n[0]);
    CHECK(out.decode == &n[1]);
    CHECK_EQ_INT(out.blocks, 3); /* the prompt and the first token after it */
}

static struct node_record kv_node(uint64_t id, enum node_role role, const char *type)
{
    struct node_record n = node(id, role);
    snprintf(n.kv_type, sizeof n.kv_type, "%s", type);
    return n;
}

TEST(nodes_that_cannot_exchange_kv_are_not_paired)
{
    static const struct {
        const char *prefill, *decode;
        bool pair;
    } rows[] = { { "bf16", "bf16", true }, { "bf16", "f32", true },   { "int8", "f32", true },
                 { "f32", "bf16", false }, { "bf16", "int8", false }, { "", "int8", true },
                 { "int8", "", true } };
    struct place_request r = request(2 * BLOCK);
    struct place_result out;
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        struct node_record n[] = { kv_node(1, ROLE_PREFILL, rows[i].prefill),
                                   kv_node(2, ROLE_DECODE, rows[i].decode) };
        CHECK_OK(place_choose(n, 2, &r, &out));
        CHECK(out.prefill == (rows[i].pair ? &n[0] : NULL));
        CHECK(out.decode == &n[1]);
        n[i % 2].kv_lossy = true; /* either node may allow it */
        CHECK_OK(place_choose(n, 2, &r, &out));
        CHECK(out.prefill == &n[0]);
    }
    /* Among several the ones that fit meet, whatever the draw. */
    struct node_record n[] = { kv_node(1, ROLE_PREFILL, "bf16"), kv_node(2, ROLE_PREFILL, "int8"),
                               kv_node(3, ROLE_DECODE, "bf16"), kv_node(4, ROLE_DECODE, "int8"),
                               kv_node(5, ROLE_PREFILL, "f32") };
    for (uint64_t i = 0; i < 200; i++) {
        r.random = random_bits(i);
        CHECK_OK(place_choose(n, COUNT_OF(n), &r, &out));
        CHECK(out.prefill && out.prefill != &n[4]);
        CHECK_EQ_STR(out.prefill->kv_type, out.decode->kv_type);
    }
}

/* With more decode nodes than the sample holds, one of each kind speaks for the others. */
TEST(one_pair_apart_leaves_the_other_decode_nodes_to_the_prefill_node)
{
    enum { D = 20 };
    struct node_record n[1 + D];
    struct place_request r = request(2 * BLOCK);
    struct place_result out;
    n[0] = kv_node(1, ROLE_PREFILL, "bf16");
    for (uint64_t i = 1; i <= D; i++) {
        n[i] = kv_node(1 + i, ROLE_DECODE, "bf16");
        snprintf(n[i].kv_by, sizeof n[i].kv_by, "rdma,tcp");
    }
    for (size_t broken = 1; broken <= D; broken++) {
        struct place_pair apart = { 1, n[broken].node };
        r.apart = &apart;
        r.n_apart = 1;
        for (uint64_t i = 0; i < 20; i++) {
            r.random = random_bits(100 * broken + i);
            CHECK_OK(place_choose(n, COUNT_OF(n), &r, &out));
            CHECK(out.prefill == &n[0]);
            CHECK(out.decode != &n[broken]);
        }
    }
    struct place_pair all[D];
    for (size_t i = 0; i < D; i++) all[i] = (struct place_pair){ 1, n[1 + i].node };
    r.apart = all;
    r.n_apart = D;
    CHECK_OK(place_choose(n, COUNT_OF(n), &r, &out));
    CHECK(out.prefill == NULL); /* the decode node does both */
}

/* 20 decode nodes of two kinds, of which the prefill node reaches one. */
TEST(kinds_of_kv_exchange_are_told_apart_among_many_decode_nodes)
{
    enum { D = 20 };
    struct node_record n[2 + D];
    struct place_request r = request(2 * BLOCK);
    struct place_result out;
    n[0] = kv_node(1, ROLE_PREFILL, "bf16");
    n[1] = kv_node(2, ROLE_PREFILL, "f32"); /* fits into no decode node's pool */
    for (uint64_t i = 0; i < D; i++)
        n[2 + i] = kv_node(10 + i, ROLE_DECODE, i % 2 ? "bf16" : "int8");
    struct place_pair apart = { 1, n[3].node };
    for (uint64_t i = 0; i < 200; i++) {
        r.random = random_bits(i);
        r.apart = &apart;
        r.n_apart = i % 2;
        CHECK_OK(place_choose(n, COUNT_OF(n), &r, &out));
        CHECK(out.prefill == &n[0]);
        CHECK_EQ_STR(out.decode->kv_type, "bf16");
        CHECK(r.n_apart == 0 || out.decode != &n[3]);
    }
}

TEST(decode_nodes_alone_do_both)
{
    struct node_record n = node(2, ROLE_DECODE);
    struct place_request r = request(10);
    struct place_result out;
    CHECK_OK(place_choose(&n, 1, &r, &out));
    CHECK(out.prefill == NULL);
    CHECK(out.decode == &n);
    CHECK_EQ_INT(out.blocks, 1);
}

TEST(a_mixed_node_keeps_its_own_prompts)
{
    struct node_record n = node(3, ROLE_MIXED);
    struct place_request r = request(10);
    struct place_result out;
    CHECK_OK(place_choose(&n, 1, &r, &out));
    CHECK(out.prefill == NULL);
    CHECK(out.decode == &n);
}

/* --scheduler-name global */
TEST(what_is_not_split_goes_to_any_role)
{
    struct node_record n[] = { node(1, ROLE_PREFILL), node(2, ROLE_DECODE), node(3, ROLE_MIXED) };
    struct place_result res;
    for (size_t i = 0; i < 3; i++) {
        for (size_t k = 0; k < 3; k++) n[k].placed_tokens = i == k ? 0 : 1000;
        struct place_request r = { .n_tokens = 10, .n_total = 20, .model = 7, .unsplit = true };
        CHECK_OK(place_choose(n, 3, &r, &res));
        CHECK(res.prefill == NULL && res.decode == &n[i]);
        CHECK_EQ_INT(res.blocks, 1);
    }
    struct place_request prefill_alone = { .n_tokens = 10, .n_total = 20, .model = 7 };
    CHECK_STATUS(place_choose(n, 1, &prefill_alone, &res), ERR_UNAVAILABLE);
    prefill_alone.unsplit = true;
    CHECK_OK(place_choose(n, 1, &prefill_alone, &res));
    n[0].placed_seqs = n[0].max_seqs;
    CHECK_STATUS(place_choose(n, 1, &prefill_alone, &res), ERR_BUSY);
}

/* Two requests cannot wait for each other's blocks. */
TEST(a_full_mixed_node_takes_no_prompt_for_another)
{
    struct node_record n[] = { node(3, ROLE_MIXED), node(4, ROLE_MIXED) };
    const struct place_request r = { .n_tokens = 10, .n_total = 20, .model = 7 };
    struct place_result res;
    for (size_t full = 0; full < 2; full++) {
        n[full].placed_seqs = n[full].max_seqs; /* so the other one decodes */
        n[full].placed_tokens = 0;
        n[1 - full].placed_seqs = 0;
        n[1 - full].placed_tokens = 10000;
        CHECK_OK(place_choose(n, 2, &r, &res));
        CHECK(res.decode == &n[1 - full]);
        CHECK(res.prefill == NULL); /* the full one has no place for its prompt either */
    }
}

TEST(of_two_mixed_nodes_the_lower_one_prefills)
{
    const struct place_request r = { .n_tokens = 10, .n_total = 200, .model = 7 };
    struct place_result res;
    for (size_t small = 0; small < 2; small++) { /* it does not hold the answer, only the prompt */
        struct node_record n[] = { node(3, ROLE_MIXED), node(4, ROLE_MIXED) };
        n[small].max_model_len = 100;
        n[1 - small].placed_tokens = 10000;
        CHECK_OK(place_choose(n, 2, &r, &res));
        CHECK(res.decode == &n[1 - small]);
        CHECK(res.prefill == (small == 0 ? &n[0] : NULL));
    }
}

TEST(a_full_mixed_node_does_not_prefill)
{
    struct node_record n[] = { node(3, ROLE_MIXED), node(4, ROLE_DECODE), node(5, ROLE_PREFILL) };
    struct place_request r = request(10);
    struct place_result out;
    n[0].placed_seqs = n[0].max_seqs;
    n[2].placed_tokens = 100000;
    CHECK_OK(place_choose(n, 3, &r, &out));
    CHECK(out.prefill == &n[2]);
    CHECK(out.decode == &n[1]);
    CHECK_OK(place_choose(n, 2, &r, &out));
    CHECK(out.prefill == NULL);
    CHECK(out.decode == &n[1]);
    n[0].placed_seqs = 0;
    n[0].placed_blocks = n[0].n_blocks;
    CHECK_OK(place_choose(n, 2, &r, &out));
    CHECK(out.prefill == NULL);
}

TEST(a_node_that_is_saved_has_no_room)
{
    struct node_record n[] = { node(3, ROLE_DECODE), node(4, ROLE_MIXED) };
    struct place_request r = request(10);
    struct place_result out;
    n[1].placed_blocks = 3;
    CHECK_EQ_INT(place_roomiest(n, 2, &r), 3);
    r.saved = 3;
    for (uint64_t i = 0; i < 20; i++) {
        r.random = random_bits(i);
        CHECK_OK(place_choose(n, 2, &r, &out));
        CHECK(out.decode == &n[1] && !out.prefill);
    }
    n[1].placed_blocks = n[1].n_blocks;
    CHECK_STATUS(place_choose(n, 2, &r, &out), ERR_BUSY);
    n[0].placed_blocks = n[0].n_blocks; /* both are full: one of those that fit */
    CHECK(place_roomiest(n, 2, &r) != 0);
    r.n_total = 1 << 30;
    CHECK_EQ_INT(place_roomiest(n, 2, &r), 0);
}

TEST(unfit_nodes_are_passed_over)
{
    struct node_record n[] = { node(1, ROLE_DECODE), node(2, ROLE_DECODE), node(3, ROLE_DECODE),
                               node(4, ROLE_DECODE), node(5, ROLE_DECODE) };
    uint64_t avoid[] = { 3, 99 };
    struct place_request r = request(65);
    struct place_result out;
    n[0].draining = true;
    n[1].model = 8;
    r.avoid = avoid; /* 3 */
    r.n_avoid = 2;
    n[3].n_blocks = 1; /* could never hold it */
    for (uint64_t i = 0; i < 50; i++) {
        r.random = random_bits(i);
        CHECK_OK(place_choose(n, 5, &r, &out));
        CHECK(out.decode == &n[4]);
    }
    n[4].max_model_len = 65; /* too short by one token */
    CHECK_STATUS(place_choose(n, 5, &r, &out), ERR_UNAVAILABLE);
    r.model = 0; /* any model will do */
    CHECK_OK(place_choose(n, 5, &r, &out));
    CHECK(out.decode == &n[1]);
}

TEST(full_is_busy_and_too_small_is_unavailable)
{
    struct node_record n[] = { node(1, ROLE_PREFILL), node(2, ROLE_DECODE) };
    struct place_request r = request(BLOCK);
    struct place_result out;
    n[1].placed_seqs = 8;
    CHECK_STATUS(place_choose(n, 2, &r, &out), ERR_BUSY);
    n[1].placed_seqs = 7;
    CHECK_OK(place_choose(n, 2, &r, &out));
    n[1].placed_blocks = 99; /* one block is free, the prompt needs two */
    CHECK_STATUS(place_choose(n, 2, &r, &out), ERR_BUSY);
    n[1].placed_blocks = 98;
    CHECK_OK(place_choose(n, 2, &r, &out));
    r.n_tokens = r.n_total = 4097;
    CHECK_STATUS(place_choose(n, 2, &r, &out), ERR_UNAVAILABLE);
}

/* A node that could not hold the whole answer is not chosen. A prompt that fills the context fits
 * when no output is wanted. */
TEST(the_whole_answer_must_fit)
{
    struct node_record n = node(2, ROLE_DECODE);
    struct place_request r = { .n_tokens = 4000, .n_total = 4096, .model = 7, .random = 1 };
    struct place_result out;
    n.n_blocks = 64;
    CHECK_OK(place_choose(&n, 1, &r, &out));
    CHECK_EQ_INT(out.blocks, 63);
    r.n_total = 4097;
    CHECK_STATUS(place_choose(&n, 1, &r, &out), ERR_UNAVAILABLE);
    r.n_tokens = r.n_total = 4096;
    CHECK_OK(place_choose(&n, 1, &r, &out));
    CHECK_EQ_INT(out.blocks, 64);
}

TEST(the_least_loaded_decode_node_wins)
{
    struct node_record n[] = { node(1, ROLE_PREFILL), node(2, ROLE_DECODE), node(3, ROLE_DECODE),
                               node(4, ROLE_DECODE) };
    struct place_request r = request(10);
    struct place_result out;
    n[1].placed_seqs = 3;
    n[2].n_running = 2; /* reported by the node, not placed through this directory */
    n[2].n_waiting = 2;
    n[3].placed_seqs = 2;
    for (uint64_t i = 0; i < 50; i++) {
        r.random = random_bits(i);
        CHECK_OK(place_choose(n, 4, &r, &out));
        CHECK(out.decode == &n[3]);
    }
}

TEST(prefill_load_counts_beyond_the_slack)
{
    struct node_record n[] = { node(1, ROLE_PREFILL), node(2, ROLE_PREFILL), node(3, ROLE_DECODE) };
    struct place_request r = request(400); /* slack 100 */
    struct place_result out;
    int n_first = 0;
    n[0].placed_tokens = 101;
    for (uint64_t i = 0; i < 50; i++) {
        r.random = random_bits(i);
        CHECK_OK(place_choose(n, 3, &r, &out));
        CHECK(out.prefill == &n[1]);
    }
    n[0].placed_tokens = 0;
    n[0].unplaced_tokens = 100; /* within the slack */
    for (uint64_t i = 0; i < 200; i++) {
        r.random = random_bits(i);
        CHECK_OK(place_choose(n, 3, &r, &out));
        n_first += out.prefill == &n[0];
    }
    CHECK(n_first > 50 && n_first < 150);
}

TEST(a_thousand_placements_are_balanced)
{
    enum { P = 4, D = 40, PLACEMENTS = 1000 };
    struct node_record n[P + D];
    for (uint64_t i = 0; i < P; i++) n[i] = node(1 + i, ROLE_PREFILL);
    for (uint64_t i = P; i < P + D; i++) {
        n[i] = node(1 + i, ROLE_DECODE);
        n[i].max_seqs = 1000;
        n[i].n_blocks = 100000;
    }
    for (uint64_t i = 0; i < PLACEMENTS; i++) {
        struct place_request r = request(100 + (uint32_t)(random_bits(i) % 900));
        struct place_result out;
        r.random = random_bits(100000 + i);
        CHECK_OK(place_choose(n, P + D, &r, &out));
        CHECK(out.prefill);
        n[out.prefill - n].placed_tokens += r.n_tokens;
        n[out.decode - n].placed_seqs++;
        n[out.decode - n].placed_blocks += out.blocks;
    }
    uint64_t most = 0, least = UINT64_MAX;
    for (size_t i = 0; i < P; i++) {
        if (n[i].placed_tokens > most) most = n[i].placed_tokens;
        if (n[i].placed_tokens < least) least = n[i].placed_tokens;
    }
    CHECK(most - least < 2000);        /* of about 137,000 each */
    for (size_t i = P; i < P + D; i++) /* 25 each; sampled 16 of 40 */
        if (n[i].placed_seqs < 20 || n[i].placed_seqs > 30)
            test_fail(__FILE__, __LINE__, "node %zu has %u", i, n[i].placed_seqs);
}

/* Entry nodes with the same old view must not all choose the same node. */
TEST(equal_views_do_not_herd)
{
    enum { D = 40, PLACEMENTS = 1000 };
    struct node_record n[D];
    int hits[D] = { 0 }, n_used = 0;
    for (uint64_t i = 0; i < D; i++) n[i] = node(1 + i, ROLE_DECODE);
    for (uint64_t i = 0; i < PLACEMENTS; i++) {
        struct place_request r = request(10);
        struct place_result out;
        r.random = random_bits(i);
        CHECK_OK(place_choose(n, D, &r, &out));
        hits[out.decode - n]++;
    }
    for (int i = 0; i < D; i++) {
        n_used += hits[i] > 0;
        CHECK(hits[i] < 3 * PLACEMENTS / D);
    }
    CHECK_EQ_INT(n_used, D); /* every node is sampled at some time */
}

/* Nodes that have prompts enough wait for nothing more, whoever computes the prompt. */
TEST(filled_nodes_get_no_prompt)
{
    struct node_record n[] = { node(1, ROLE_PREFILL), node(2, ROLE_PREFILL), node(3, ROLE_DECODE),
                               node(4, ROLE_DECODE) };
    const uint64_t filled[] = { 1, 2 }, decodes[] = { 3, 4 };
    struct place_request r = request(2 * BLOCK);
    struct place_result out;
    r.filled = filled;
    r.n_filled = 1;
    CHECK_OK(place_choose(n, 4, &r, &out));
    CHECK(out.prefill == &n[1]);
    r.n_filled = 2;
    CHECK_STATUS(place_choose(n, 4, &r, &out), ERR_BUSY); /* no decode node does it instead */
    r.filled = decodes;
    CHECK_OK(place_choose(n, 4, &r, &out)); /* they compute no prompts */
    CHECK(out.prefill && out.decode);
    r.n_filled = 1;
    CHECK_OK(place_choose(n + 2, 2, &r, &out)); /* now they do */
    CHECK(!out.prefill && out.decode == &n[3]);
    r.n_filled = 2;
    CHECK_STATUS(place_choose(n + 2, 2, &r, &out), ERR_BUSY);
    r.unsplit = true;
    CHECK_STATUS(place_choose(n + 2, 2, &r, &out), ERR_BUSY);
    r.n_filled = 1;
    CHECK_OK(place_choose(n + 2, 2, &r, &out));
    CHECK(out.decode == &n[3]);
}

TEST_MAIN(CASE(no_nodes_is_unavailable), CASE(a_pair_is_split), CASE(filled_nodes_get_no_prompt),
          CASE(nodes_that_cannot_exchange_kv_are_not_paired),
          CASE(one_pair_apart_leaves_the_other_decode_nodes_to_the_prefill_node),
          CASE(kinds_of_kv_exchange_are_told_apart_among_many_decode_nodes),
          CASE(decode_nodes_alone_do_both), CASE(a_mixed_node_keeps_its_own_prompts),
          CASE(what_is_not_split_goes_to_any_role),
          CASE(a_full_mixed_node_takes_no_prompt_for_another),
          CASE(of_two_mixed_nodes_the_lower_one_prefills), CASE(a_full_mixed_node_does_not_prefill),
          CASE(a_node_that_is_saved_has_no_room), CASE(unfit_nodes_are_passed_over),
          CASE(full_is_busy_and_too_small_is_unavailable), CASE(the_whole_answer_must_fit),
          CASE(the_least_loaded_decode_node_wins), CASE(prefill_load_counts_beyond_the_slack),

          CASE(a_thousand_placements_are_balanced), CASE(equal_views_do_not_herd))
