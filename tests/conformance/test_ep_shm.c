/* test_ep_shm.c - backend `shm` of ep.h when ranks fail (ep_faults.h), and its windows. test_ep.c
 * has its results. */
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "kernels/ep/ep_shm.h"
#include "tests/conformance/ep_faults.h"

static const char *the_backend = "shm";

/* ---- ranks that cannot open each other's windows ---- */

static int the_spare;

/* BAD may open the_spare descriptors: with fewer than it needs all ranks refuse, and BAD's error is
 * its own. */
static void rank_short_of_descriptors(struct world *w)
{
    const struct holdings before = holdings_now();
    struct device *d = rank_device("cpu", w);
    const struct shape s = shape_of("shm", EP_LOW_LATENCY, w->size);
    const struct ep_config c = config_of(&s, w, d);
    struct ep *e = NULL;
    struct err err = { 0 };
    struct rlimit all, few;
    CHECK(getrlimit(RLIMIT_NOFILE, &all) == 0);
    const int next = dup(0);
    CHECK(next >= 0);
    close(next);
    few = (struct rlimit){ (rlim_t)(next + the_spare), all.rlim_max };
    if (w->rank == BAD) CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    const enum status st = ep_create(&c, &e, &err);
    CHECK(setrlimit(RLIMIT_NOFILE, &all) == 0);
    CHECK(e == NULL);
    CHECK_STATUS(st, w->rank != BAD  ? ERR_PEER_REFUSED
                     : the_spare < 1 ? ERR_NOMEM
                                     : ERR_UNSUPPORTED);
    CHECK(strstr(err.text, w->rank == BAD ? "Too many open files" : "rank 1 failed") != NULL);
    device_close(d);
    check_nothing_stays(&before);
}
TEST(all_ranks_learn_that_one_cannot_open_the_others)
{
    /* its window; this host's name; rank 0's process; that one's window */
    for (the_spare = 0; the_spare < 3; the_spare++) run_ranks(3, rank_short_of_descriptors, 0, WHY);
}

/* A process of another rank that has ended since it said where its window is. */
static enum status die_after_the_first_exchange(void *arg, const void *mine, size_t bytes,
                                                void *all, struct err *err)
{
    struct world *w = arg;
    if (w->round == 1) { /* the second: those that live come */
        const long long until = now_ms() + MEET_MS;
        atomic_fetch_add(&the_board->done, 1);
        while (atomic_load(&the_board->done) < w->size - 1 && now_ms() < until) usleep(200);
        return err_set(err, ERR_PEER_LOST, "not all ranks came");
    }
    const enum status st = world_exchange(arg, mine, bytes, all, err);
    if (w->rank == BAD) kill(getpid(), SIGKILL);
    const int pid = atomic_load(&the_board->pids[BAD]),
              pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    struct pollfd p = { .fd = pidfd, .events = POLLIN };
    CHECK(pidfd >= 0 && poll(&p, 1, MEET_MS) == 1);
    close(pidfd);
    return st;
}

static void rank_whose_peer_dies_while_opening(struct world *w)
{
    const struct holdings before = holdings_now();
    struct device *d = rank_device("cpu", w);
    const struct shape s = shape_of("shm", EP_LOW_LATENCY, w->size);
    struct ep_config c = config_of(&s, w, d);
    struct ep *e = NULL;
    struct err err = { 0 };
    atomic_store(&the_board->pids[w->rank], getpid());
    c.exchange = die_after_the_first_exchange;
    CHECK_STATUS(ep_create(&c, &e, &err), ERR_PEER_LOST);
    CHECK(e == NULL && strstr(err.text, "rank 1") != NULL);
    device_close(d);
    check_nothing_stays(&before);
}
TEST(a_rank_that_dies_while_windows_are_opened_is_named)
{
    the_board = new_board();
    run_ranks(3, rank_whose_peer_dies_while_opening, 1u << BAD, WHY);
}

/* No rank can map another's window to write it, even if it knows the process and the descriptor. */
static enum status try_to_write(void *arg, const void *mine, size_t bytes, void *all,
                                struct err *err)
{
    struct world *w = arg;
    const int other = 1 - w->rank;
    char path[80], name[80];
    atomic_store(&the_board->pids[w->rank], getpid());
    const enum status st = world_exchange(arg, mine, bytes, all, err);
    int n_windows = 0;
    /* They look in turn: what one has open for its tries would be a window to the other. */
    while (w->round == 1 && atomic_load(&the_board->done) < w->rank) usleep(200);
    for (int fd = 0; fd < 64 && w->round == 1; fd++) {
        snprintf(path, sizeof path, "/proc/%d/fd/%d", atomic_load(&the_board->pids[other]), fd);
        const ssize_t n = readlink(path, name, sizeof name - 1);
        if (n <= 0) continue;
        name[n] = 0;
        if (strncmp(name, "/memfd:baton-ep ", 16) != 0) continue;
        const int theirs = open(path, O_RDWR | O_CLOEXEC);
        CHECK(theirs >= 0);
        n_windows++;
        CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, theirs, 0) == MAP_FAILED);
        CHECK(ftruncate(theirs, 0) != 0);
        CHECK(pwrite(theirs, "x", 1, 0) < 0);
        close(theirs);
    }
    /* Until both have looked neither opens the other's window, which would be a second one. */
    if (w->round == 1) {
        CHECK_EQ_INT(n_windows, 1);
        atomic_fetch_add(&the_board->done, 1);
        while (atomic_load(&the_board->done) < 2) usleep(200);
    }
    return st;
}

static void rank_that_is_curious(struct world *w)
{
    struct device *d = rank_device("cpu", w);
    const struct shape s = shape_of("shm", EP_LOW_LATENCY, w->size);
    struct ep_config c = config_of(&s, w, d);
    struct ep *e = NULL;
    c.exchange = try_to_write;
    CHECK_OK(ep_create(&c, &e, NULL));
    step(&s, w, d, e);
    ep_free(e);
    device_close(d);
}
TEST(a_window_cannot_be_written_by_another_rank)
{
    the_board = new_board();
    run_ranks(2, rank_that_is_curious, 0, WHY);
}

/* ---- words of faults ---- */

/* A word about nothing, as of a process whose memory is broken. */
static void rank_that_reads_a_word(struct world *w)
{
    struct device *d = rank_device("cpu", w);
    struct shape s = shape_of("shm", EP_LOW_LATENCY, w->size);
    struct err err = { 0 };
    float x = 1;
    s.c.timeout_ms = LONG_MS;
    struct ep *e = open_ep(&s, w, d);
    step(&s, w, d, e);
    if (w->rank == BAD) {
        struct ep_shm *shm = ep_shm_of(e);
        atomic_store(&ep_shm_sign(shm, BAD)->fault, 5);
        atomic_fetch_add(&shm->bell->n_faults, 1);
        while (!atomic_load(&the_board->done)) usleep(1000);
        _exit(0);
    }
    const long long begin = now_ms();
    CHECK_STATUS(ep_all_reduce(e, &x, 1, DTYPE_F32, &err), ERR_INTERNAL);
    CHECK(now_ms() - begin < SOON_MS);
    atomic_store(&the_board->done, 1);
    ep_free(e);
    device_close(d);
}
TEST(a_word_that_says_nothing_ends_the_call)
{
    the_board = new_board();
    run_ranks(2, rank_that_reads_a_word, 0, WHY);
}

TEST(ranks_under_full_load_lose_nobody) { run_ranks(16, rank_under_load, 0, WHY); }

TEST_MAIN(CASE(a_word_that_says_nothing_ends_the_call), CASE(a_killed_rank_is_an_error_at_once),
          CASE(a_stopped_rank_is_an_error_after_the_deadline),
          CASE(a_rank_that_leaves_is_an_error_at_once), CASE(an_aborted_rank_is_an_error_at_once),
          CASE(a_pause_of_all_ranks_is_no_loss), CASE(who_waits_says_so),
          CASE(ranks_leave_in_any_order), CASE_T(ranks_under_full_load_lose_nobody, 1800),
          CASE_T(all_ranks_learn_that_one_cannot_open_the_others, 120),
          CASE(a_rank_that_dies_while_windows_are_opened_is_named),
          CASE(a_window_cannot_be_written_by_another_rank))
