/* test_node_placement.c - placements of experts as ranks of a group send and believe them. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "deploy/node/node_placement.h"
#include "shared/base/mem.h"
#include "tests/harness/test.h"

enum { RANKS_MAX = 64 };

/* A roster of the first n ranks; a node has the number of its rank, and more. */
static struct group_roster roster(struct group_member *members, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) members[i] = (struct group_member){ .rank = i, .node = 1 + i };
    return (struct group_roster){ .epoch = 1, .n = n, .members = members };
}

static void read_back(const struct group_roster *r, int32_t n_experts, struct balance_out *b)
{
    struct err err = { 0 };
    if (node_placement_read(r, n_experts, b, &err) != OK)
        test_fail(__FILE__, __LINE__, "%s", err.text);
}

/* ---- read ---- */

/* Three ranks, six places of four experts. */
static enum status read_words(const int32_t *first, const int32_t *logical, int32_t n_physical)
{
    struct group_member members[3];
    struct group_roster r = roster(members, 3);
    struct balance_out b;
    struct err err;
    buf_add_u32le(&r.placement, (uint32_t)n_physical);
    buf_add_u32le(&r.placement, 1);
    for (int i = 0; i < 4; i++) buf_add_u32le(&r.placement, (uint32_t)first[i]);
    for (int i = 0; i < n_physical; i++) buf_add_u32le(&r.placement, (uint32_t)logical[i]);
    const enum status st = node_placement_read(&r, 4, &b, &err);
    if (st == OK) balance_release(&b);
    buf_release(&r.placement);
    return st;
}

/* Who reads them makes arrays of a rank's places, also before ep_create has looked at them. */
TEST(ranks_whose_places_do_not_follow_each_other_are_refused)
{
    static const int32_t logical[] = { 0, 1, 2, 3, 0, 1 }, no_expert[] = { 0, 1, 2, 4, 0, 1 };
    CHECK_OK(read_words((const int32_t[]){ 0, 2, 4, 6 }, logical, 6));
    CHECK_OK(read_words((const int32_t[]){ 0, 0, 6, 6 }, logical, 6));
    CHECK_STATUS(read_words((const int32_t[]){ 0, 5, 3, 6 }, logical, 6), ERR_FORMAT);
    CHECK_STATUS(read_words((const int32_t[]){ 0, 6, 0, 6 }, logical, 6), ERR_FORMAT);
    CHECK_STATUS(read_words((const int32_t[]){ 1, 2, 4, 6 }, logical, 6), ERR_FORMAT);
    CHECK_STATUS(read_words((const int32_t[]){ 0, 2, 4, 5 }, logical, 6), ERR_FORMAT);
    CHECK_STATUS(read_words((const int32_t[]){ 0, 2, 4, 7 }, logical, 6), ERR_FORMAT);
    CHECK_STATUS(read_words((const int32_t[]){ 0, 2, 4, 6 }, no_expert, 6), ERR_FORMAT);
}

/* ---- choose ---- */

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Of DeepSeek-V3's size, and so skewed that EPLB computes for a second. */
enum { LAYERS = 58, EXPERTS = 256 };

static uint64_t *skewed_load(void)
{
    uint64_t *load = MEM_ARRAY(uint64_t, (size_t)LAYERS * EXPERTS), seed = 19;
    for (int i = 0; i < LAYERS * EXPERTS; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        load[i] = (uint64_t)1 << (seed >> 60);
        load[i] += (seed >> 33) % (1 + load[i]);
    }
    return load;
}

/* The loop chooses: nobody may take the rank that leads for a frozen one meanwhile. */
TEST(no_choice_takes_long)
{
    struct group_member was[RANKS_MAX], members[RANKS_MAX];
    struct group_roster before = roster(was, RANKS_MAX - 1), next = roster(members, RANKS_MAX - 1);
    uint64_t *load = skewed_load();
    const struct node_placement_want want = {
        .size = RANKS_MAX, .n_experts = EXPERTS, .n_redundant = 32, .load = load
    };
    struct balance_out b;
    node_placement_choose(&before, &(struct group_roster){ 0 }, &want);
    members[5].node = 1000; /* one has been started again while another is lost */
    const double begin = cpu_seconds();
    node_placement_choose(&next, &before, &want);
    CHECK(cpu_seconds() - begin < 0.05);
    read_back(&next, EXPERTS, &b);
    CHECK_EQ_INT(b.n_physical, EXPERTS + 32);
    for (int32_t r = 0; r < b.n_ranks; r++) CHECK(b.first[r + 1] - b.first[r] >= 4);
    balance_release(&b);
    buf_release(&next.placement);
    buf_release(&before.placement);
    mem_free(load);
}

/* When ranks are lost the others keep what they hold. */
TEST(ranks_that_are_left_keep_their_experts)
{
    struct group_member was[4], members[4];
    struct group_roster before = roster(was, 4), next = roster(members, 3);
    const struct node_placement_want want = { .size = 4, .n_experts = 8, .n_redundant = 4 };
    struct balance_out old, b;
    node_placement_choose(&before, &(struct group_roster){ 0 }, &want);
    node_placement_choose(&next, &before, &want);
    read_back(&before, 8, &old);
    read_back(&next, 8, &b);
    for (int32_t r = 0; r < 3; r++)
        CHECK(memcmp(b.logical + b.first[r], old.logical + old.first[r],
                     sizeof(int32_t) * (size_t)(old.first[r + 1] - old.first[r])) == 0);
    balance_release(&old);
    balance_release(&b);
    buf_release(&before.placement);
    buf_release(&next.placement);
}

TEST_MAIN(CASE(ranks_whose_places_do_not_follow_each_other_are_refused), CASE(no_choice_takes_long),
          CASE(ranks_that_are_left_keep_their_experts))
