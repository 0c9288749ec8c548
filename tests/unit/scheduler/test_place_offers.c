/* test_place_offers.c - which nodes are offered beside the choice, and at which cost. */
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"
#include "tests/unit/scheduler/place_nodes.h"

static struct place_offers offers;

static struct node_record cached(uint64_t id, enum node_role role)
{
    struct node_record n = node(id, role);
    n.prefix_cache = true;
    return n;
}

static struct place_request request(void)
{
    return (struct place_request){ .n_tokens = 1000, .n_total = 1100, .model = 7, .random = 77 };
}

static const struct prefix_offer *find(const struct prefix_offer *list, uint32_t n, uint64_t node)
{
    for (uint32_t i = 0; i < n; i++)
        if (list[i].node == node) return &list[i];
    return NULL;
}

static const struct prefix_offer *compute_of(uint64_t node)
{
    return find(offers.compute, offers.n_compute, node);
}

static const struct prefix_offer *decode_of(uint64_t node)
{
    return find(offers.decode, offers.n_decode, node);
}

static void offer(const struct node_record *n, size_t n_nodes, const struct place_request *r,
                  size_t prefill, size_t decode)
{
    const struct place_result chosen = { .prefill = prefill < n_nodes ? &n[prefill] : NULL,
                                         .decode = &n[decode] };
    place_offers(n, n_nodes, r, &chosen, &offers);
}

enum { NONE = 100 };

TEST(the_choice_is_the_first_and_all_that_fit_are_offered)
{
    const struct node_record n[] = { cached(1, ROLE_PREFILL), cached(2, ROLE_PREFILL),
                                     cached(3, ROLE_PREFILL), cached(11, ROLE_DECODE),
                                     cached(12, ROLE_DECODE), cached(21, ROLE_MIXED) };
    struct place_request r = request();
    offer(n, COUNT_OF(n), &r, 1, 4);
    CHECK_EQ_INT(offers.n_compute, 6);
    CHECK_EQ_INT(offers.compute[0].node, 2);
    CHECK_EQ_INT(offers.n_decode, 3);
    CHECK_EQ_INT(offers.decode[0].node, 12);
    CHECK_EQ_INT(offers.block_tokens, BLOCK);
    CHECK(!compute_of(1)->alone && !compute_of(1)->decodes);
    CHECK(compute_of(11)->alone && compute_of(11)->decodes);
    CHECK(compute_of(21)->alone && !compute_of(21)->decodes);
    struct node_record busy[COUNT_OF(n)];
    memcpy(busy, n, sizeof n);
    busy[3].n_running = 16;
    offer(busy, COUNT_OF(n), &r, 1, 4);
    CHECK(!compute_of(11) && compute_of(12) && decode_of(11));
    r.is_again = true; /* its nodes may be taken for keepers of what they never got */
    offer(n, COUNT_OF(n), &r, 1, 4);
    CHECK(!compute_of(11) && !compute_of(12) && compute_of(21));
}

TEST(who_keeps_nothing_or_has_other_blocks_is_not_offered)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), node(2, ROLE_PREFILL),
                               cached(3, ROLE_PREFILL), cached(11, ROLE_DECODE),
                               cached(12, ROLE_DECODE) };
    struct place_request r = request();
    n[2].block_tokens = n[4].block_tokens = 2 * BLOCK;
    offer(n, COUNT_OF(n), &r, 0, 3);
    CHECK_EQ_INT(offers.n_compute, 2);
    CHECK(compute_of(1) && compute_of(11));
    CHECK_EQ_INT(offers.n_decode, 1);
    offer(n, COUNT_OF(n), &r, 2,
          3); /* the choice's decode node has others: no node does it alone */
    CHECK_EQ_INT(offers.n_compute, 1);
    CHECK(decode_of(11) && decode_of(12));
    offer(n, COUNT_OF(n), &r, 1, 3); /* a choice that keeps nothing: nobody is asked for */
    CHECK_EQ_INT(offers.n_compute, 0);
}

TEST(unfit_nodes_are_not_offered)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), cached(2, ROLE_PREFILL),
                               cached(3, ROLE_PREFILL), cached(4, ROLE_PREFILL),
                               cached(5, ROLE_PREFILL), cached(11, ROLE_DECODE),
                               cached(12, ROLE_DECODE), cached(13, ROLE_DECODE) };
    const uint64_t avoid[] = { 5 };
    struct place_request r = request();
    n[1].draining = true;
    n[2].is_lost = true;
    n[3].model = 8;
    r.avoid = avoid;
    r.n_avoid = 1;
    n[6].placed_seqs = n[6].max_seqs;
    n[7].max_model_len = 1000;
    offer(n, COUNT_OF(n), &r, 0, 5);
    CHECK_EQ_INT(offers.n_compute, 2); /* 1 and 11 */
    CHECK_EQ_INT(offers.n_decode, 1);
    const uint64_t filled[] = { 1, 5 }; /* waiting may be sooner than computing */
    r.n_avoid = 0;
    r.filled = filled;
    r.n_filled = 2;
    offer(n, COUNT_OF(n), &r, 0, 5);
    CHECK(compute_of(5));
}

/* Any of those that compute may be paired with any that decodes. */
TEST(every_pair_of_the_offers_can_exchange_kv)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), cached(2, ROLE_PREFILL),
                               cached(3, ROLE_PREFILL), cached(11, ROLE_DECODE),
                               cached(12, ROLE_DECODE), cached(13, ROLE_DECODE) };
    struct place_request r = request();
    for (size_t i = 0; i < COUNT_OF(n); i++) snprintf(n[i].kv_type, sizeof n[i].kv_type, "bf16");
    snprintf(n[2].kv_type, sizeof n[2].kv_type, "f32"); /* does not fit into the decode nodes' */
    snprintf(n[4].kv_type, sizeof n[4].kv_type, "f32"); /* takes more, but is of another kind */
    offer(n, COUNT_OF(n), &r, 0, 3);
    CHECK(compute_of(2) && !compute_of(3));
    CHECK(!decode_of(12) && decode_of(13));
    const struct place_pair apart[] = { { 2, 13 } };
    r.apart = apart;
    r.n_apart = 1;
    offer(n, COUNT_OF(n), &r, 0, 3);
    CHECK(compute_of(2) && !decode_of(13));
    const struct place_pair with_choice[] = { { 2, 11 } };
    r.apart = with_choice;
    offer(n, COUNT_OF(n), &r, 0, 3);
    CHECK(!compute_of(2) && decode_of(13));
}

TEST(without_a_prefill_node_those_like_the_choice_are_offered)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), cached(11, ROLE_DECODE),
                               cached(12, ROLE_DECODE), cached(21, ROLE_MIXED),
                               cached(22, ROLE_MIXED) };
    struct place_request r = request();
    offer(n, COUNT_OF(n), &r, NONE, 1);
    CHECK_EQ_INT(offers.n_decode, 0);
    CHECK_EQ_INT(offers.n_compute, 4);
    CHECK(offers.compute[0].node == 11 && offers.compute[0].alone && offers.compute[0].decodes);
    offer(n, COUNT_OF(n), &r, NONE, 3);
    CHECK_EQ_INT(offers.n_compute, 2);
    CHECK(offers.compute[0].node == 21 && compute_of(22) && !compute_of(22)->decodes);
    r.unsplit = true;
    offer(n, COUNT_OF(n), &r, NONE, 0);
    CHECK_EQ_INT(offers.n_compute, 5);
    CHECK(offers.compute[0].node == 1 && offers.compute[0].alone && !offers.compute[0].decodes);
}

TEST(groups_that_are_not_whole_are_offered_only_with_their_like)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), cached(2, ROLE_PREFILL),
                               cached(11, ROLE_DECODE) };
    struct place_request r = request();
    snprintf(n[1].group.name, sizeof n[1].group.name, "a:1");
    offer(n, COUNT_OF(n), &r, 0, 2);
    CHECK(!compute_of(2));
    offer(n, COUNT_OF(n), &r, 1, 2);
    CHECK(compute_of(1) && compute_of(2));
}

TEST(costs_are_seconds_of_the_nodes_time)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), cached(2, ROLE_PREFILL),
                               cached(3, ROLE_PREFILL), cached(11, ROLE_DECODE),
                               cached(12, ROLE_DECODE) };
    struct place_request r = request();
    n[0].prefill_tokens_per_s = 50000; /* 20 us */
    n[1].prefill_tokens_per_s = 100000;
    n[1].placed_tokens = 500;              /* the directory knows of them, ... */
    n[1].unplaced_tokens = 300;            /* ... and not of these */
    n[2].unplaced_tokens = UINT64_MAX / 2; /* whatever a record says */
    n[3].placed_seqs = 3;
    n[4].n_running = 4;
    n[4].prefill_tokens_per_s = 1;
    offer(n, COUNT_OF(n), &r, 0, 3);
    CHECK_EQ_INT(compute_of(1)->per_token, 24000);
    CHECK_EQ_INT(compute_of(2)->per_token, 12000);
    CHECK_EQ_INT(compute_of(2)->per_load, 10000);
    CHECK_EQ_INT(compute_of(2)->load, 300);
    CHECK_EQ_INT(compute_of(3)->load, PREFIX_LOAD_MAX);
    CHECK_EQ_INT(decode_of(11)->load, 3);
    CHECK_EQ_INT(decode_of(12)->load, 4);
    /* Each of three sequences waits, too. */
    CHECK_EQ_INT(compute_of(11)->per_token / 4, compute_of(3)->per_token);
    CHECK_EQ_INT(compute_of(12)->per_token, PREFIX_COST_MAX);
    for (size_t i = 0; i < COUNT_OF(n); i++) n[i].prefill_tokens_per_s = 0;
    offer(n, COUNT_OF(n), &r, 0, 3); /* nobody's speed is known: all count alike */
    CHECK(compute_of(1)->per_token == compute_of(2)->per_token && compute_of(1)->per_token > 0);
}

TEST(of_too_many_nodes_a_part_is_offered)
{
    enum { N = 2 * PREFIX_OFFERS_MAX };
    static struct node_record n[N + 1];
    struct place_request r = request();
    for (uint64_t i = 0; i < N; i++) n[i] = cached(100 + i, ROLE_PREFILL);
    n[N] = cached(1, ROLE_DECODE);
    offer(n, N + 1, &r, 5, N);
    CHECK_EQ_INT(offers.n_compute, PREFIX_OFFERS_MAX);
    CHECK_EQ_INT(offers.compute[0].node, 105);
    const uint64_t second = offers.compute[1].node;
    r.random = (uint64_t)300 << 33;
    offer(n, N + 1, &r, 5, N);
    CHECK(offers.compute[1].node != second); /* another one each time */
}

TEST_MAIN(CASE(the_choice_is_the_first_and_all_that_fit_are_offered),
          CASE(who_keeps_nothing_or_has_other_blocks_is_not_offered),
          CASE(unfit_nodes_are_not_offered), CASE(every_pair_of_the_offers_can_exchange_kv),
          CASE(without_a_prefill_node_those_like_the_choice_are_offered),
          CASE(groups_that_are_not_whole_are_offered_only_with_their_like),
          CASE(costs_are_seconds_of_the_nodes_time), CASE(of_too_many_nodes_a_part_is_offered))
