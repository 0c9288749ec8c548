/* test_group_waits.c - whom ranks that wait for others say they wait for. */
#include "tests/unit/cluster/group_rig.h"

/* The rank that leads knows who is missing, and what it said before is no longer so. */
TEST(ranks_that_wait_hear_whom_the_leader_waits_for)
{
    struct scene s;
    open_scene(&s, RANKS);
    start(&s, 0, 100);
    start(&s, 1, 101);
    group_ready(s.ranks[1].group, "tiny, f32");
    RIG_WAIT(&s.rig, strcmp(why_of(&s.ranks[1]), "rank 0 is still loading") == 0);
    group_ready(s.ranks[0].group, "tiny, f32");
    RIG_WAIT(&s.rig, strcmp(why_of(&s.ranks[1]), "ranks 2, 3 and 4 of 5 are not there") == 0);
    CHECK_EQ_STR(why_of(&s.ranks[0]), "ranks 2, 3 and 4 of 5 are not there");
    start(&s, 3, 103);
    group_ready(s.ranks[3].group, "tiny, f32");
    RIG_WAIT(&s.rig, strcmp(why_of(&s.ranks[1]), "ranks 2 and 4 of 5 are not there") == 0);
    RIG_WAIT(&s.rig, strcmp(why_of(&s.ranks[3]), "ranks 2 and 4 of 5 are not there") == 0);
    start(&s, 2, 102);
    start(&s, 4, 104);
    group_ready(s.ranks[2].group, "tiny, f32");
    group_ready(s.ranks[4].group, "tiny, f32");
    RIG_WAIT(&s.rig, together(&s, 1));
    CHECK_EQ_STR(why_of(&s.ranks[1]), "");
    close_scene(&s);
}

/* A large group would fill the line. */
TEST(a_sentence_names_some_of_many_missing_ranks)
{
    struct scene s;
    struct rank alone;
    open_scene(&s, 1);
    open_rank(&s.rig, &alone, 0, 30, 1, 300, s.port, NULL);
    group_ready(alone.group, "tiny, f32");
    RIG_WAIT(&s.rig, strcmp(why_of(&alone), "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 21 more of 30 are "
                                            "not there") == 0);
    close_rank(&alone);
    close_scene(&s);
}

TEST_MAIN(CASE_T(ranks_that_wait_hear_whom_the_leader_waits_for, 60),
          CASE_T(a_sentence_names_some_of_many_missing_ranks, 60))
