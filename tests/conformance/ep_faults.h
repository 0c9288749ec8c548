/* ep_faults.h - cases for the backends of ep.h on CPUs whose ranks fail: each is an error on all
 * others in time that names it, nothing of an object stays, and there is no loss where there is
 * none. The program that includes it defines the_backend. Thread: one per rank. */
#ifndef BATON_TESTS_CONFORMANCE_EP_FAULTS_H
#define BATON_TESTS_CONFORMANCE_EP_FAULTS_H

#include <dirent.h>
#include <signal.h>

#include "tests/conformance/ep_steps.h"

static const char *the_backend;

static const char WHY[] = "this build has no such backend";

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
    enum status st = ep_plan(
        e, &(struct ep_rows){ .map = map_of(s), .experts = in.d_experts.ptr, .n = in.n }, NULL,
        err);
    FAIL_AT(AT_DISPATCH);
    if (st == OK) st = ep_dispatch_begin(e, in.d_x.ptr, in.stride, err);
    FAIL_AT(BETWEEN_HALVES);
    if (st == OK) st = ep_dispatch_end(e, &b, err);
    float *out = ep_places(e).results;
    if (st == OK) out = run_experts(s, w, d, &b, out, &in.d_out);
    FAIL_AT(AT_COMBINE);
    const struct ep_combine_args a = { .out = out, .weights = in.d_weights.ptr, .y = in.d_y.ptr };
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
    struct shape s = shape_of(the_backend, the_mode, w->size);
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
    struct shape s = shape_of(the_backend, EP_LOW_LATENCY, w->size);
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

/* The last rank comes late: the others say meanwhile that they are not stuck. */
static void rank_that_waits(struct world *w)
{
    struct device *d = rank_device("cpu", w);
    struct shape s = shape_of(the_backend, EP_LOW_LATENCY, w->size);
    uint64_t progress = 0;
    float x = 1;
    s.c.progress = &progress;
    struct ep *e = open_ep(&s, w, d);
    const uint64_t before = __atomic_load_n(&progress, __ATOMIC_RELAXED);
    if (w->rank == w->size - 1) usleep(8 * EP_PROGRESS_MS * 1000);
    CHECK_OK(ep_all_reduce(e, &x, 1, DTYPE_F32, NULL));
    const uint64_t n = __atomic_load_n(&progress, __ATOMIC_RELAXED) - before;
    CHECK(w->rank == w->size - 1 || (n >= 4 && n <= 40));
    ep_free(e);
    device_close(d);
}
TEST(who_waits_says_so) { run_ranks(3, rank_that_waits, 0, WHY); }

/* Ranks free their objects in any order, while others still read the last results. */
static void rank_of_many_objects(struct world *w)
{
    const struct holdings before = holdings_now();
    struct device *d = rank_device("cpu", w);
    struct shape s = shape_of(the_backend, EP_LOW_LATENCY, w->size);
    s.c.placement = placement(w->size, BY_LAYER);
    for (s.call = 0; s.call < ROUNDS / 4; s.call++) { /* at most four rounds of the meeting each */
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
    struct shape s = shape_of(the_backend, EP_LOW_LATENCY, w->size);
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
#endif
