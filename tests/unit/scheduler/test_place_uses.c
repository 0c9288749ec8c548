/* test_place_uses.c - nodes of which kinds may stand in for the choice, who may not in any case,
 * and what nodes say of themselves. */
#include <stdio.h>
#include <string.h>

#include "shared/base/mem.h"
#include "tests/harness/test.h"
#include "tests/unit/scheduler/place_nodes.h"

enum { NOT_NAMED = 99, ALONE = PREFIX_COMPUTES | PREFIX_ALONE };

static struct place_uses uses;

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

static unsigned flags_of(const struct node_record *n)
{
    const uint64_t kind = node_record_bid(n).kind;
    for (uint32_t i = 0; i < uses.n_uses; i++)
        if (uses.uses[i].kind == kind) return uses.uses[i].flags;
    return NOT_NAMED;
}

static void choose(const struct node_record *n, size_t n_nodes, const struct place_request *r,
                   size_t prefill, size_t decode)
{
    const struct place_result chosen = { .prefill = prefill < n_nodes ? &n[prefill] : NULL,
                                         .decode = &n[decode] };
    place_uses(n, n_nodes, r, &chosen, &uses);
}

enum { NONE = 100 };

TEST(nodes_like_the_two_of_the_choice_stand_in)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), cached(11, ROLE_DECODE),
                               cached(21, ROLE_MIXED), cached(22, ROLE_MIXED) };
    struct place_request r = request();
    choose(n, COUNT_OF(n), &r, 0, 1);
    CHECK_EQ_INT(flags_of(&n[0]), PREFIX_COMPUTES);
    CHECK_EQ_INT(flags_of(&n[1]), PREFIX_DECODE | PREFIX_TAKES | ALONE);
    CHECK_EQ_INT(flags_of(&n[2]), PREFIX_TAKES | ALONE);
    CHECK_EQ_INT(uses.block_tokens, BLOCK);
    CHECK_EQ_INT(uses.blocks, 1100 / BLOCK + 1);
    r.is_again = true; /* its nodes may be taken for keepers of what they never got */
    choose(n, COUNT_OF(n), &r, 0, 1);
    CHECK_EQ_INT(flags_of(&n[1]), PREFIX_DECODE | PREFIX_TAKES);
    choose(n, COUNT_OF(n), &r, 2, 3); /* of two mixed ones the first has the lower number */
    CHECK_EQ_INT(flags_of(&n[2]), ALONE);
    CHECK_EQ_INT(flags_of(&n[0]), NOT_NAMED);
}

TEST(who_keeps_nothing_or_is_of_another_kind_does_not)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), node(2, ROLE_PREFILL),
                               cached(11, ROLE_DECODE), cached(12, ROLE_DECODE) };
    struct place_request r = request();
    choose(n, COUNT_OF(n), &r, 1, 2); /* a choice that keeps nothing: nobody is asked for */
    CHECK_EQ_INT(uses.n_uses, 0);
    n[3].block_tokens = 2 * BLOCK;
    choose(n, COUNT_OF(n), &r, 0, 3); /* its decode node has other blocks: no node does it alone */
    CHECK(flags_of(&n[0]) == PREFIX_COMPUTES && flags_of(&n[2]) == NOT_NAMED);
    CHECK_EQ_INT(flags_of(&n[3]), NOT_NAMED);
    choose(n, COUNT_OF(n), &r, 0, 2);
    CHECK_EQ_INT(flags_of(&n[1]), NOT_NAMED);
    for (int i = 0; i < 8; i++) {
        struct node_record other = cached(12, ROLE_DECODE);
        if (i == 0) other.model = 8;
        if (i == 1) other.max_model_len = 1000;
        if (i == 2) snprintf(other.kv_type, sizeof other.kv_type, "bf16");
        if (i == 3) other.kv_lossy = true;
        if (i == 4) snprintf(other.kv_by, sizeof other.kv_by, "tcp");
        if (i == 5) other.kv_host = 5; /* it reaches no other */
        if (i == 6) other.draining = true;
        CHECK_EQ_INT(flags_of(&other) == NOT_NAMED, i < 7);
    }
    snprintf(n[2].kv_by, sizeof n[2].kv_by, "tcp");
    struct node_record far = n[2];
    far.kv_host = 5;
    choose(n, COUNT_OF(n), &r, 0, 2);
    CHECK(flags_of(&far) != NOT_NAMED);
}

TEST(without_a_prefill_node_those_like_the_choice_stand_in)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), cached(11, ROLE_DECODE),
                               cached(21, ROLE_MIXED) };
    struct place_request r = request();
    choose(n, COUNT_OF(n), &r, NONE, 1);
    CHECK_EQ_INT(flags_of(&n[1]), PREFIX_DECODE | ALONE);
    CHECK(flags_of(&n[2]) == ALONE && flags_of(&n[0]) == NOT_NAMED);
    choose(n, COUNT_OF(n), &r, NONE, 2);
    CHECK(flags_of(&n[2]) == ALONE && flags_of(&n[1]) == NOT_NAMED);
    r.unsplit = true;
    choose(n, COUNT_OF(n), &r, NONE, 0);
    CHECK(flags_of(&n[0]) == ALONE && flags_of(&n[2]) == ALONE);
    CHECK_EQ_INT(flags_of(&n[1]), PREFIX_DECODE | ALONE);
}

TEST(groups_that_are_not_whole_stand_in_only_for_their_like)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), cached(2, ROLE_PREFILL),
                               cached(11, ROLE_DECODE), cached(12, ROLE_DECODE) };
    struct place_request r = request();
    snprintf(n[1].group.name, sizeof n[1].group.name, "a:1");
    snprintf(n[3].group.name, sizeof n[3].group.name, "b:1");
    choose(n, COUNT_OF(n), &r, 0, 2);
    CHECK(flags_of(&n[1]) == NOT_NAMED && flags_of(&n[3]) == NOT_NAMED);
    choose(n, COUNT_OF(n), &r, 1, 2);
    CHECK(flags_of(&n[0]) == PREFIX_COMPUTES && flags_of(&n[1]) == PREFIX_COMPUTES);
    CHECK_EQ_INT(flags_of(&n[3]), PREFIX_DECODE | ALONE);
    n[1].group.is_whole = true;
    choose(n, COUNT_OF(n), &r, 0, 3);
    CHECK(flags_of(&n[1]) == PREFIX_COMPUTES && flags_of(&n[2]) != NOT_NAMED);
    CHECK_EQ_INT(flags_of(&n[3]), PREFIX_DECODE | PREFIX_TAKES);
    CHECK(uses.n_uses <= PREFIX_USES_MAX);
    snprintf(n[2].group.name, sizeof n[2].group.name, "c:1");
    n[1].group.is_whole = false;
    r.unsplit = true; /* that names the most */
    choose(n, COUNT_OF(n), &r, NONE, 2);
    CHECK(uses.n_uses <= PREFIX_USES_MAX && flags_of(&n[1]) == ALONE);
    r.unsplit = false;
    struct node_record mixed[] = { cached(1, ROLE_MIXED), cached(2, ROLE_MIXED) };
    snprintf(mixed[1].group.name, sizeof mixed[1].group.name, "d:1");
    choose(mixed, 2, &r, 0, 1); /* its own kind stands in for nobody, and keeps what it gets */
    CHECK(flags_of(&mixed[0]) == ALONE && flags_of(&mixed[1]) == 0);
}

static bool is_avoided(uint64_t id) { return nodes_have(uses.avoid, uses.n_avoid, id); }

TEST(who_failed_is_lost_or_apart_is_avoided)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), cached(2, ROLE_PREFILL),
                               cached(11, ROLE_DECODE), cached(12, ROLE_DECODE) };
    const uint64_t failed[] = { 5, 6, 5 };
    const struct place_pair apart[] = { { 2, 11 }, { 2, 12 } };
    struct place_request r = request();
    r.avoid = failed;
    r.n_avoid = COUNT_OF(failed);
    r.saved = 7;
    n[1].is_lost = true;
    choose(n, COUNT_OF(n), &r, 0, 2);
    CHECK(is_avoided(5) && is_avoided(6) && is_avoided(7) && is_avoided(2));
    CHECK_EQ_INT(uses.n_avoid, 4);
    n[1].is_lost = false;
    r.apart = apart;
    r.n_apart = 1; /* with the choice: instead of the other one of it */
    choose(n, COUNT_OF(n), &r, 0, 2);
    CHECK(is_avoided(2) && !is_avoided(11));
    r.n_apart = 2; /* with another one: that is not taken for any */
    choose(n, COUNT_OF(n), &r, 0, 2);
    CHECK(is_avoided(12));
    uint64_t many[PREFIX_AVOID_MAX + 1];
    for (uint64_t i = 0; i < COUNT_OF(many); i++) many[i] = 100 + i;
    r = request();
    r.avoid = many;
    r.n_avoid = PREFIX_AVOID_MAX;
    choose(n, COUNT_OF(n), &r, 0, 2);
    CHECK(flags_of(&n[0]) == PREFIX_COMPUTES && uses.n_avoid == PREFIX_AVOID_MAX);
    r.n_avoid++; /* nobody stands in, but the choice becomes a keeper all the same */
    choose(n, COUNT_OF(n), &r, 0, 2);
    CHECK(flags_of(&n[0]) == 0 && flags_of(&n[2]) == PREFIX_DECODE);
}

TEST(a_bid_says_what_a_node_costs)
{
    struct node_record n[] = { cached(1, ROLE_PREFILL), cached(11, ROLE_DECODE) };
    struct place_request r = request();
    choose(n, COUNT_OF(n), &r, 0, 1);
    CHECK(uses.ns > 0); /* nobody's speed is known */
    n[0].prefill_tokens_per_s = 50000;
    n[1].prefill_tokens_per_s = 2000000000;
    n[0].waiting_tokens = UINT64_MAX / 2; /* whatever a record says */
    n[0].n_running = n[1].n_running = 3;
    n[1].n_waiting = 2;
    struct prefix_bid c = node_record_bid(&n[0]);
    CHECK(c.ns == 20000 && c.seqs == 0 && c.waiting == PREFIX_LOAD_MAX && !c.grouped);
    c = node_record_bid(&n[1]);
    CHECK(c.ns == 1 && c.seqs == 5 && c.waiting == 0);
    n[1].prefill_tokens_per_s = 1;
    n[1].n_running = n[1].n_waiting = UINT32_MAX;
    snprintf(n[1].group.name, sizeof n[1].group.name, "a:1");
    c = node_record_bid(&n[1]);
    CHECK(c.ns == PREFIX_COST_MAX && c.seqs == PREFIX_LOAD_MAX && c.grouped);
    n[1].prefill_tokens_per_s = 0;
    CHECK_EQ_INT(node_record_bid(&n[1]).ns, 0);
    choose(n, COUNT_OF(n), &r, 0, 1);
    CHECK_EQ_INT(uses.ns, 20000); /* of those that are known */
}

TEST_MAIN(CASE(nodes_like_the_two_of_the_choice_stand_in),
          CASE(who_keeps_nothing_or_is_of_another_kind_does_not),
          CASE(without_a_prefill_node_those_like_the_choice_stand_in),
          CASE(groups_that_are_not_whole_stand_in_only_for_their_like),
          CASE(who_failed_is_lost_or_apart_is_avoided), CASE(a_bid_says_what_a_node_costs))
