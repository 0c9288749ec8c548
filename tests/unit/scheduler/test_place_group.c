/* test_place_group.c - placement where ranks share experts: groups that are not whole are passed
 * over as long as there is another choice, and load is levelled within a group. */
#include <stdio.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"
#include "tests/unit/scheduler/place_nodes.h"

enum { DRAWS = 200, BUSY = 2048 };

/* Of a group of four. */
static struct node_record rank(uint64_t id, enum node_role role, const char *group, bool is_whole)
{
    struct node_record n = node(id, role);
    snprintf(n.group.name, sizeof n.group.name, "%s", group);
    n.group.rank = (uint32_t)(id % 4);
    n.group.size = 4;
    n.group.epoch = 1;
    n.group.is_whole = is_whole;
    return n;
}

static struct place_request request(uint32_t n_tokens, uint64_t draw)
{
    return (struct place_request){
        .n_tokens = n_tokens, .n_total = n_tokens + 100, .model = 7, .random = random_bits(draw)
    };
}

/* How often each of the nodes was chosen to decode. */
static void count_decodes(const struct node_record *n, size_t n_nodes, int *count)
{
    struct place_result out;
    for (size_t i = 0; i < n_nodes; i++) count[i] = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        struct place_request r = request(2 * BLOCK, i);
        CHECK_OK(place_choose(n, n_nodes, &r, &out));
        count[out.decode - n]++;
    }
}

TEST(a_group_that_is_not_whole_is_passed_over)
{
    int count[4];
    struct node_record n[] = { rank(4, ROLE_MIXED, "a:1", false), rank(5, ROLE_MIXED, "a:1", false),
                               rank(6, ROLE_MIXED, "b:1", true), node(7, ROLE_MIXED) };
    n[2].n_running = n[3].n_running = 3; /* it is not a matter of load */
    count_decodes(n, COUNT_OF(n), count);
    CHECK(count[0] == 0 && count[1] == 0);
    CHECK_EQ_INT(count[2] + count[3], DRAWS);
    n[0].group.is_whole = n[1].group.is_whole = true;
    count_decodes(n, COUNT_OF(n), count);
    CHECK(count[0] > 0 && count[1] > 0);
}

TEST(without_another_node_a_group_that_is_not_whole_serves)
{
    int count[3];
    struct node_record n[] = { rank(4, ROLE_PREFILL, "a:1", false),
                               rank(8, ROLE_DECODE, "b:1", false),
                               rank(9, ROLE_DECODE, "b:1", false) };
    struct place_request r = request(2 * BLOCK, 1);
    struct place_result out;
    count_decodes(n, COUNT_OF(n), count);
    CHECK(count[1] > 0 && count[2] > 0);
    CHECK_OK(place_choose(n, COUNT_OF(n), &r, &out));
    CHECK(out.prefill == &n[0]); /* and the request is still split */
}

/* The whole nodes are full: better a smaller group than a request that waits. */
TEST(a_group_that_is_not_whole_takes_what_the_others_have_no_room_for)
{
    struct node_record n[] = { rank(4, ROLE_PREFILL, "a:1", false), node(5, ROLE_PREFILL),
                               rank(8, ROLE_DECODE, "b:1", false), node(9, ROLE_DECODE) };
    struct place_request r = request(2 * BLOCK, 1);
    struct place_result out;
    CHECK_OK(place_choose(n, COUNT_OF(n), &r, &out));
    CHECK(out.prefill == &n[1] && out.decode == &n[3]);
    n[3].placed_seqs = n[3].max_seqs;
    n[1].placed_tokens = BUSY - 1;
    CHECK_OK(place_choose(n, COUNT_OF(n), &r, &out));
    CHECK(out.prefill == &n[1] && out.decode == &n[2]);
    n[1].placed_tokens = BUSY;
    CHECK_OK(place_choose(n, COUNT_OF(n), &r, &out));
    CHECK(out.prefill == &n[0]);
}

/* KV goes before: a prompt that would be computed by a decode node alone is worse off. */
TEST(a_pair_that_can_exchange_kv_is_kept)
{
    struct node_record n[] = { node(5, ROLE_PREFILL), rank(8, ROLE_DECODE, "b:1", false),
                               node(9, ROLE_DECODE) };
    struct place_request r = request(2 * BLOCK, 1);
    struct place_result out;
    struct place_pair apart = { 5, 9 };
    CHECK_OK(place_choose(n, COUNT_OF(n), &r, &out));
    CHECK(out.prefill == &n[0] && out.decode == &n[2]);
    r.apart = &apart;
    r.n_apart = 1;
    CHECK_OK(place_choose(n, COUNT_OF(n), &r, &out));
    CHECK(out.prefill == &n[0] && out.decode == &n[1]);
}

/* More nodes than a sample holds, of which one is whole. */
TEST(one_whole_node_among_many_is_found)
{
    enum { N = 100 };
    struct node_record n[N];
    struct place_result out;
    for (uint64_t i = 0; i < N; i++) n[i] = rank(100 + i, ROLE_MIXED, "a:1", false);
    for (size_t whole = 0; whole < N; whole += 7) {
        struct place_request r = request(2 * BLOCK, whole);
        n[whole].group = (struct node_group){ 0 };
        CHECK_OK(place_choose(n, N, &r, &out));
        CHECK(out.decode == &n[whole]);
        n[whole] = rank(100 + whole, ROLE_MIXED, "a:1", false);
    }
}

/* All ranks wait for the fullest, so their loads may differ by less than those of nodes that step
 * by themselves. */
TEST(ranks_of_a_group_are_levelled_more_closely)
{
    struct node_record n[] = { rank(4, ROLE_PREFILL, "a:1", true),
                               rank(5, ROLE_PREFILL, "a:1", true), node(6, ROLE_DECODE) };
    struct place_result out;
    int n_first = 0;
    n[0].placed_tokens = 63; /* more than a quarter of the quarter of the prompt */
    for (uint64_t i = 0; i < DRAWS; i++) {
        struct place_request r = request(1000, i);
        CHECK_OK(place_choose(n, 3, &r, &out));
        CHECK(out.prefill == &n[1]);
    }
    n[0].placed_tokens = 62;
    for (uint64_t i = 0; i < DRAWS; i++) {
        struct place_request r = request(1000, i);
        CHECK_OK(place_choose(n, 3, &r, &out));
        n_first += out.prefill == &n[0];
    }
    CHECK(n_first > DRAWS / 4 && n_first < DRAWS * 3 / 4);
    n[0].placed_tokens = 250;
    snprintf(n[1].group.name, RECORD_GROUP_MAX, "b:1"); /* of two groups: as other nodes */
    n_first = 0;
    for (uint64_t i = 0; i < DRAWS; i++) {
        struct place_request r = request(1000, i);
        CHECK_OK(place_choose(n, 3, &r, &out));
        n_first += out.prefill == &n[0];
    }
    CHECK(n_first > DRAWS / 4 && n_first < DRAWS * 3 / 4);
}

/* Prompts that are short leave no tokens waiting, and yet their answers are rows of every step. */
TEST(answers_are_spread_over_the_mixed_ranks_of_a_group)
{
    enum { RANKS = 4, EACH = 6 };
    struct node_record n[RANKS];
    struct place_result out;
    uint32_t least = UINT32_MAX, most = 0;
    for (uint64_t i = 0; i < RANKS; i++) n[i] = rank(8 + i, ROLE_MIXED, "a:1", true);
    for (uint64_t i = 0; i < RANKS * EACH; i++) {
        struct place_request r = request(2 * BLOCK, i);
        CHECK_OK(place_choose(n, RANKS, &r, &out));
        n[out.decode - n].placed_seqs++;
    }
    for (size_t i = 0; i < RANKS; i++) {
        if (n[i].placed_seqs < least) least = n[i].placed_seqs;
        if (n[i].placed_seqs > most) most = n[i].placed_seqs;
    }
    CHECK(most - least <= 1);
}

TEST_MAIN(CASE(a_group_that_is_not_whole_is_passed_over),
          CASE(without_another_node_a_group_that_is_not_whole_serves),
          CASE(a_group_that_is_not_whole_takes_what_the_others_have_no_room_for),
          CASE(a_pair_that_can_exchange_kv_is_kept), CASE(one_whole_node_among_many_is_found),
          CASE(ranks_of_a_group_are_levelled_more_closely),
          CASE(answers_are_spread_over_the_mixed_ranks_of_a_group))
