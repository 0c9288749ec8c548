/* test_ep_shm.c - backend `shm` of ep.h when ranks fail: each is an error on all others in time
 * that names it, and no descriptor or mapping stays. test_ep.c has its results. */
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "tests/conformance/ep_steps.h"

static const char WHY[] = "the CPU is always there";

enum {
    BAD = 1,         /* the rank that fails */
    LONG_MS = 20000, /* a deadline that no case waits for */
    SHORT_MS = 1000, /* one that it does wait for */
    SOON_MS = 2000   /* what is noticed without a deadline is noticed before */
};

/* What ranks tell each other and the case, in memory of all processes. */
struct board {
    atomic_int pids[RANKS], done;
};
static struct board *the_board;

static struct board *new_board(void)
{
    void *p = mmap(NULL, sizeof *the_board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                   0);
    CHECK(p != MAP_FAILED);
    return p;
}

/* ---- what stays ---- */

struct holdings {
    int fds, maps;
};

static struct holdings holdings_now(void)
{
    struct holdings h = { 0 };
    char line[512];
    DIR *d = opendir("/proc/self/fd");
    CHECK(d != NULL);
    while (readdir(d)) h.fds++;
    closedir(d);
    FILE *f = fopen("/proc/self/maps", "r");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f)) h.maps += strstr(line, "baton-ep") != NULL;
    fclose(f);
    return h;
}

static void check_nothing_stays(const struct holdings *before)
{
    const struct holdings now = holdings_now();
    CHECK_EQ_INT(now.fds, before->fds);
    CHECK_EQ_INT(now.maps, before->maps);
}

/* ---- a rank fails somewhere in a call ---- */

enum point { AT_PLAN, AT_DISPATCH, BETWEEN_HALVES, AT_COMBINE, POINTS };
static enum point the_point;
static enum ep_mode the_mode;
static void (*the_failure)(struct world *w, struct ep *e);

/* A whole call, in which BAD fails at the_point. The status of the first part that failed. */
static enum status call_until_fault(const struct shape *s, struct world *w, struct device *d,
                                    struct ep *e, struct err *err)
{
    struct inputs in;
    struct ep_batch b;
#define FAIL_AT(point)                                                                             \
    if (w->rank == BAD && the_point == (point)) the_failure(w, e)
    make_inputs(s, w, d, &in);
    FAIL_AT(AT_PLAN);
    enum status st = ep_plan(e, map_of(s), in.d_experts.ptr, in.n, NULL, err);
    FAIL_AT(AT_DISPATCH);
    if (st == OK) st = ep_dispatch_begin(e, in.d_x.ptr, in.stride, err);
    FAIL_AT(BETWEEN_HALVES);
    if (st == OK) st = ep_dispatch_end(e, &b, err);
    if (st == OK) run_experts(s, w, d, &b, ep_places(e).results, NULL);
    FAIL_AT(AT_COMBINE);
    const struct ep_combine_args a = { .out = ep_places(e).results,
                                       .weights = in.d_weights.ptr,
                                       .y = in.d_y.ptr };
    if (st == OK) st = ep_combine(e, &a, err);
    release_inputs(d, &in);
    return st;
}

static void check_names_bad(const struct err *err, const char *says)
{
    if (!strstr(err->text, "rank 1 of 3") || !strstr(err->text, says))
        test_fail(__FILE__, __LINE__, "\"%s\" does not say \"rank 1 of 3\" and \"%s\"", err->text,
                  says);
}

/* The others run into their deadline, and the last of them lets it go on: its calls fail too. */
static void stop(struct world *w, struct ep *e)
{
    (void)w, (void)e;
    kill(getpid(), SIGSTOP);
}

static const char *the_words;
static int the_timeout_ms, the_limit_ms;

static void rank_with_a_failing_peer(struct world *w)
{
    const struct holdings before = holdings_now();
    struct device *d = rank_device("cpu", w);
    struct shape s = shape_of("shm", the_mode, w->size);
    struct err err = { 0 };
    float x = 1;
    s.c.placement = placement(w->size, BY_LAYER);
    s.c.timeout_ms = the_timeout_ms;
    atomic_store(&the_board->pids[w->rank], getpid());
    struct ep *e = open_ep(&s, w, d);
    step(&s, w, d, e);
    s.call = 1;
    const long long begin = now_ms();
    const enum status st = call_until_fault(&s, w, d, e, &err);
    CHECK_STATUS(st, ERR_PEER_LOST);
    check_names_bad(&err, w->rank == BAD ? "the others gave up" : the_words);
    CHECK(now_ms() - begin < the_limit_ms);
    CHECK_STATUS(ep_wait(e, NULL), ERR_PEER_LOST); /* and remains lost */
    CHECK_STATUS(ep_all_reduce(e, &x, 1, DTYPE_F32, NULL), ERR_PEER_LOST);
    ep_free(e);
    device_close(d);
    check_nothing_stays(&before);
    if (the_failure == stop && w->rank != BAD &&
        atomic_fetch_add(&the_board->done, 1) + 1 == w->size - 1)
        CHECK(kill(atomic_load(&the_board->pids[BAD]), SIGCONT) == 0);
}

/* At every point, in both modes. */
static void each_point(void (*failure)(struct world *w, struct ep *e), const char *words,
                       int timeout_ms, int limit_ms, unsigned may_die)
{
    the_failure = failure;
    the_words = words;
    the_timeout_ms = timeout_ms;
    the_limit_ms = limit_ms;
    for (int mode = 0; mode < 2; mode++)
        for (int p = 0; p < POINTS; p++) {
            the_mode = mode ? EP_LOW_LATENCY : EP_THROUGHPUT;
            the_point = p;
            the_board = new_board();
            run_ranks(3, rank_with_a_failing_peer, may_die, WHY);
            munmap(the_board, sizeof *the_board);
        }
}

static void die(struct world *w, struct ep *e)
{
    (void)w, (void)e;
    kill(getpid(), SIGKILL);
}
TEST(a_killed_rank_is_an_error_at_once)
{
    each_point(die, "has ended", LONG_MS, SOON_MS, 1u << BAD);
}

TEST(a_stopped_rank_is_an_error_after_the_deadline)
{
    each_point(stop, "gave no sign for 1000 ms", SHORT_MS, SHORT_MS + SOON_MS, 0);
}

/* A rank that ends its object while the others need it. */
static void leave(struct world *w, struct ep *e)
{
    (void)w;
    ep_free(e);
    exit(0);
}
TEST(a_rank_that_leaves_is_an_error_at_once) { each_point(leave, "has left", LONG_MS, SOON_MS, 0); }

/* ep_abort on the rank's own thread; it then goes on as if it did not know. */
static void abort_here(struct world *w, struct ep *e)
{
    struct err err = { 0 };
    float x = 1;
    (void)w;
    ep_abort(e);
    CHECK_STATUS(ep_all_reduce(e, &x, 1, DTYPE_F32, &err), ERR_CANCELED);
    check_names_bad(&err, "aborted");
    usleep(SOON_MS / 4 * 1000); /* the others know although this rank does nothing */
    ep_free(e);
    exit(0);
}
TEST(an_aborted_rank_is_an_error_at_once)
{
    each_point(abort_here, "was aborted", LONG_MS, SOON_MS / 4, 0);
}

/* ---- no loss where there is none ---- */

static void signal_all(int size, int number)
{
    for (int r = 0; r < size; r++) (void)kill(atomic_load(&the_board->pids[r]), number);
}

/* The last rank comes late, and meanwhile all are stopped for longer than the deadline: whoever
 * goes on first must not blame it. */
static void rank_of_a_pause(struct world *w)
{
    struct device *d = rank_device("cpu", w);
    struct shape s = shape_of("shm", EP_LOW_LATENCY, w->size);
    s.c.timeout_ms = SHORT_MS;
    atomic_store(&the_board->pids[w->rank], getpid());
    struct ep *e = open_ep(&s, w, d);
    step(&s, w, d, e);
    if (w->rank == w->size - 1) {
        const pid_t stopper = fork();
        CHECK(stopper >= 0);
        if (stopper == 0) {
            usleep(100000);
            signal_all(w->size, SIGSTOP);
            usleep(2 * SHORT_MS * 1000);
            signal_all(w->size, SIGCONT);
            _exit(0);
        }
        CHECK(waitpid(stopper, NULL, 0) == stopper);
        usleep(200000);
    }
    s.call = 1;
    step(&s, w, d, e);
    ep_free(e);
    device_close(d);
}
TEST(a_pause_of_all_ranks_is_no_loss)
{
    the_board = new_board();
    run_ranks(3, rank_of_a_pause, 0, WHY);
}

/* Ranks free their objects in any order, while others still read the last results. */
static void rank_of_many_objects(struct world *w)
{
    const struct holdings before = holdings_now();
    struct device *d = rank_device("cpu", w);
    struct shape s = shape_of("shm", EP_LOW_LATENCY, w->size);
    s.c.placement = placement(w->size, BY_LAYER);
    for (s.call = 0; s.call < ROUNDS / 2; s.call++) { /* two rounds of the meeting each */
        struct ep *e = open_ep(&s, w, d);
        step(&s, w, d, e);
        if (w->rank == s.call % w->size) usleep(3000);
        ep_free(e);
    }
    device_close(d);
    check_nothing_stays(&before);
}
TEST(ranks_leave_in_any_order) { run_ranks(8, rank_of_many_objects, 0, WHY); }

/* Many more ranks than CPUs, each a little late at random; BATON_TEST_EP_SOAK_S seconds. */
static void rank_under_load(struct world *w)
{
    const char *seconds = getenv("BATON_TEST_EP_SOAK_S");
    struct device *d = rank_device("cpu", w);
    struct shape s = shape_of("shm", EP_LOW_LATENCY, w->size);
    s.c.placement = placement(w->size, BY_LAYER);
    s.c.timeout_ms = SHORT_MS * 5;
    struct ep *e = open_ep(&s, w, d);
    uint64_t end = (uint64_t)now_ms() + 1000 * (uint64_t)(seconds ? atoi(seconds) : 5), last;
    for (bool goes_on = true; goes_on; s.call++) {
        uint64_t all[RANKS], now = (uint64_t)now_ms();
        step(&s, w, d, e);
        for (int i = 0; i < 20; i++) {
            last = draw(11, (uint64_t)w->rank, (uint64_t)s.call, (uint64_t)i) % 100000;
            for (volatile uint64_t k = 0; k < last; k++) {}
            CHECK_OK(ep_all_gather(e, all, &now, sizeof now, NULL));
        }
        goes_on = all[0] < end;
    }
    ep_free(e);
    device_close(d);
}
TEST(ranks_under_full_load_lose_nobody) { run_ranks(16, rank_under_load, 0, WHY); }

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

TEST_MAIN(CASE(a_killed_rank_is_an_error_at_once),
          CASE(a_stopped_rank_is_an_error_after_the_deadline),
          CASE(a_rank_that_leaves_is_an_error_at_once), CASE(an_aborted_rank_is_an_error_at_once),
          CASE(a_pause_of_all_ranks_is_no_loss), CASE(ranks_leave_in_any_order),
          CASE_T(ranks_under_full_load_lose_nobody, 1800),
          CASE_T(all_ranks_learn_that_one_cannot_open_the_others, 120),
          CASE(a_rank_that_dies_while_windows_are_opened_is_named),
          CASE(a_window_cannot_be_written_by_another_rank))
