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

/* ---- an object that is not wanted any more ---- */

static int n_exchanges_left;      /* the last tells how connecting went */
static long long t_not_wanted_ms; /* it is wanted until then */

static bool is_wanted_for_a_while(void *arg)
{
    (void)arg;
    return now_ms() < t_not_wanted_ms;
}

/* BAD stops when all have its address, so the others wait for a sign of it until nobody wants the
 * object any more. Then nothing is exchanged any more, either. */
static enum status exchange_of_a_stop(void *arg, const void *mine, size_t bytes, void *all,
                                      struct err *err)
{
    const struct world *w = arg;
    const bool is_last = --n_exchanges_left == 0;
    if (is_last) return err_set(err, ERR_PEER_LOST, "the epoch was given up");
    const enum status st = world_exchange(arg, mine, bytes, all, err);
    if (n_exchanges_left == 1 && w->rank == BAD) CHECK(kill(getpid(), SIGSTOP) == 0);
    return st;
}

static void rank_that_is_not_wanted(struct world *w)
{
    const struct holdings before = holdings_now();
    struct device *d = rank_device("cpu", w);
    struct shape s = shape_of(the_backend, EP_LOW_LATENCY, w->size);
    struct err err = { 0 };
    struct ep *e = open_ep(&s, w, d);
    n_exchanges_left = w->round;
    ep_free(e);
    atomic_store(&the_board->pids[w->rank], getpid());
    struct ep_config c = config_of(&s, w, d);
    t_not_wanted_ms = now_ms() + SHORT_MS / 2;
    c.exchange = exchange_of_a_stop;
    c.is_wanted = w->rank == BAD ? NULL : is_wanted_for_a_while;
    const enum status st = ep_create(&c, &e, &err);
    if (w->rank == BAD) {
        CHECK_STATUS(st, ERR_PEER_LOST);
    } else {
        CHECK(st == ERR_CANCELED || st == ERR_PEER_LOST); /* the other was the first */
        CHECK(now_ms() >= t_not_wanted_ms && now_ms() < t_not_wanted_ms + SOON_MS);
        if (atomic_fetch_add(&the_board->done, 1) + 1 == w->size - 1)
            CHECK(kill(atomic_load(&the_board->pids[BAD]), SIGCONT) == 0);
    }
    device_close(d);
    check_nothing_stays(&before);
}
TEST(an_object_that_is_not_wanted_is_given_up)
{
    the_board = new_board();
    run_ranks(3, rank_that_is_not_wanted, 0, WHY);
}

TEST_MAIN(CASE(a_killed_near_rank_is_an_error_at_once), CASE(near_ranks_leave_in_any_order),
          CASE(a_killed_rank_is_an_error_at_once),
          CASE(a_stopped_rank_is_an_error_after_the_deadline),
          CASE(a_rank_that_leaves_is_an_error_at_once), CASE(an_aborted_rank_is_an_error_at_once),
          CASE(a_pause_of_all_ranks_is_no_loss), CASE(who_waits_says_so),
          CASE(an_object_that_is_not_wanted_is_given_up), CASE(ranks_leave_in_any_order),
          CASE_T(ranks_under_a_long_load_lose_nobody, 1800))
