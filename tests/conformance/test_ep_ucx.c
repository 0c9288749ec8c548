/* test_ep_ucx.c - backend `ucx` of ep.h when ranks fail (ep_faults.h). test_ep.c has its
 * results. */
#include "tests/conformance/ep_faults.h"

static const char *the_backend = "ucx";

/* Once, on a busy machine, a rank was lost here that had failed at nothing. */
TEST(ranks_under_a_long_load_lose_nobody)
{
    if (!getenv("BATON_TEST_EP_SOAK_S")) SKIP("BATON_TEST_EP_SOAK_S=seconds runs the long load");
    run_ranks(16, rank_under_load, 0, WHY);
}

/* Ranks of one host, which read each other's rows and results. */
TEST(a_killed_near_rank_is_an_error_at_once)
{
    the_hosts = 1;
    test_a_killed_rank_is_an_error_at_once();
}
TEST(near_ranks_leave_in_any_order)
{
    the_hosts = 2;
    test_ranks_leave_in_any_order();
}

TEST_MAIN(CASE(a_killed_near_rank_is_an_error_at_once), CASE(near_ranks_leave_in_any_order),
          CASE(a_killed_rank_is_an_error_at_once),
          CASE(a_stopped_rank_is_an_error_after_the_deadline),
          CASE(a_rank_that_leaves_is_an_error_at_once), CASE(an_aborted_rank_is_an_error_at_once),
          CASE(a_pause_of_all_ranks_is_no_loss), CASE(ranks_leave_in_any_order),
          CASE_T(ranks_under_a_long_load_lose_nobody, 1800))
