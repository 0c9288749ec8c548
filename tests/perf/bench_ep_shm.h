/* bench_ep_shm.h - the part of bench_ep about backend `shm`. Figures are rank 0's, the least of
 * REPEATS runs, each next to its limit in the same run.
 *
 * A layer is plan, dispatch and combine; rows and results lie in their places and experts compute
 * nothing. Its limit is memcpy, by all ranks at the same time, of what a backend with buffers of
 * its own copies: one row out and one result back for every choice. A meeting is an all-gather of
 * 24 bytes, as a step of a group begins with; its limit is a barrier that does nothing else: a
 * counter and a futex in shared memory. Thread: one per rank. */
#ifndef BATON_TESTS_PERF_BENCH_EP_SHM_H
#define BATON_TESTS_PERF_BENCH_EP_SHM_H

#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>

#include "kernels/ep/ep_backend.h"
#include "tests/conformance/ep_fixture.h"

enum { REPEATS = 5, SHM_LAYERS = 50, SHM_MEETINGS = 400 };

static struct ep_config the_config; /* what all of bench_ep measures */

static inline double now_us(void) { return (double)now_ns() * 1e-3; }

/* ---- the bare barrier ---- */

struct barrier {
    _Atomic uint32_t n_here, turn;
    double us, rate; /* what rank 0 measured */
};
static struct barrier *the_barrier; /* in memory shared by all ranks */

static inline void barrier_wait(int size)
{
    const uint32_t turn = atomic_load(&the_barrier->turn);
    if (atomic_fetch_add(&the_barrier->n_here, 1) + 1 == (uint32_t)size) {
        atomic_store(&the_barrier->n_here, 0);
        atomic_fetch_add(&the_barrier->turn, 1);
        syscall(SYS_futex, &the_barrier->turn, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        return;
    }
    while (atomic_load(&the_barrier->turn) == turn)
        syscall(SYS_futex, &the_barrier->turn, FUTEX_WAIT, turn, NULL, NULL, 0);
}

/* ---- measuring ---- */

struct shm_job {
    struct ep *e;
    int size, rank;
    size_t n_rows;
    const int32_t *experts;
    const float *x;
    struct ep_combine_args combine;
    char *to, *from;
    size_t bytes;
};

static inline void shm_layer(const struct shm_job *j)
{
    struct ep_batch b;
    CHECK_OK(ep_plan(j->e, &(struct ep_rows){ .experts = j->experts, .n = j->n_rows }, NULL, NULL));
    CHECK_OK(ep_dispatch(j->e, j->x, (size_t)the_config.hidden, &b, NULL));
    CHECK_OK(ep_combine(j->e, &j->combine, NULL));
}

static inline void shm_copy(const struct shm_job *j) { memcpy(j->to, j->from, j->bytes); }

static inline void shm_meeting(const struct shm_job *j)
{
    uint64_t mine[3] = { 1, 2, (uint64_t)j->rank }, all[RANKS][3];
    CHECK_OK(ep_all_gather(j->e, all, mine, sizeof mine, NULL));
}

static inline void shm_barrier(const struct shm_job *j) { barrier_wait(j->size); }

/* Microseconds of one run, the mean of n. */
static inline double shm_time(const struct shm_job *j, void (*run)(const struct shm_job *j), int n)
{
    barrier_wait(j->size);
    const double begin = now_us();
    for (int i = 0; i < n; i++) run(j);
    return (now_us() - begin) / n;
}

/* Both in turn, so that what else the machine does meets both. */
static inline void shm_compare(const struct shm_job *j, const char *what,
                               void (*run)(const struct shm_job *j), const char *limit_is,
                               void (*limit)(const struct shm_job *j), int n, double goal)
{
    double us = INFINITY, limit_us = INFINITY;
    for (int r = 0; r <= REPEATS; r++) { /* the first warms up */
        const double a = shm_time(j, run, n), b = shm_time(j, limit, n);
        if (r > 0) us = fmin(us, a), limit_us = fmin(limit_us, b);
    }
    if (j->rank == 0)
        printf("%-34s %9.1f us   %-26s %9.1f us   ratio %.2f (goal: at most %.1f)\n", what, us,
               limit_is, limit_us, us / limit_us, goal);
    fflush(stdout);
}

static inline struct ep *open_shm(struct world *w, struct device **d, struct ep_config c)
{
    struct ep *e = NULL;
    struct err err = { 0 };
    CHECK_OK(device_open("cpu", d, NULL));
    c.device = *d;
    c.rank = w->rank;
    c.size = w->size;
    c.domain = (uint64_t)w->rank; /* what `ucx` costs between hosts */
    c.exchange = world_exchange;
    c.exchange_arg = w;
    if (ep_create(&c, &e, &err) != OK) test_fail(__FILE__, __LINE__, "%s", err.text);
    return e;
}

/* ---- the two comparisons ---- */

static inline void shm_rank_of_layers(struct world *w)
{
    struct device *d;
    struct ep *e = open_shm(w, &d, the_config);
    const struct shape s = { .c = the_config };
    const size_t n = (size_t)the_config.max_rows, used = (size_t)the_config.n_used,
                 hidden = (size_t)the_config.hidden;
    const struct ep_row_layout f = ep_row_layout_of(&the_config);
    const struct ep_places p = ep_places(e);
    int32_t *experts = MEM_ARRAY(int32_t, n * used);
    float *x = p.rows ? p.rows : MEM_ARRAY(float, n *hidden), *y = MEM_ARRAY(float, n *hidden),
          *weights = MEM_ARRAY(float, n *used);
    for (size_t i = 0; i < n; i++) row_experts(&s, w->rank, i, experts + i * used);
    for (size_t i = 0; i < n * hidden; i++) x[i] = 1;
    struct shm_job j = { .e = e,
                         .size = w->size,
                         .rank = w->rank,
                         .n_rows = n,
                         .experts = experts,
                         .x = x,
                         .combine = { .out = p.results, .weights = weights, .y = y },
                         .bytes = n * used * (f.tail_at + f.back_bytes) };
    j.to = mem_calloc(j.bytes, 1);
    j.from = mem_calloc(j.bytes, 1);
    memset(j.from, 1, j.bytes);
    shm_compare(&j, "dispatch and combine", shm_layer, "memcpy of rows and results", shm_copy,
                SHM_LAYERS, 1.0);
    ep_free(e);
    if (!p.rows) mem_free(x);
    mem_free(experts);
    mem_free(y);
    mem_free(weights);
    mem_free(j.to);
    mem_free(j.from);
    device_close(d);
}

static inline void shm_rank_of_meetings(struct world *w)
{
    struct device *d;
    struct ep *e = open_shm(w, &d,
                            (struct ep_config){ .backend = "shm",
                                                .mode = EP_LOW_LATENCY,
                                                .collective_bytes = 64,
                                                .timeout_ms = LINK_MS });
    char what[40];
    const struct shm_job j = { .e = e, .size = w->size, .rank = w->rank };
    snprintf(what, sizeof what, "meeting of %d ranks", w->size);
    shm_compare(&j, what, shm_meeting, "bare futex barrier", shm_barrier, SHM_MEETINGS, 1.5);
    ep_free(e);
    device_close(d);
}

static inline void bench_shm(int size)
{
    static const int sizes[] = { 2, 8, 64 };
    the_barrier = mmap(NULL, sizeof *the_barrier, PROT_READ | PROT_WRITE,
                       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(the_barrier != MAP_FAILED);
    printf("shm, %d ranks, %d rows of %d, %d of %d experts, rows as %s, results as %s\n", size,
           the_config.max_rows, the_config.hidden, the_config.n_used,
           the_config.placement.n_logical, dtype_name(the_config.send),
           dtype_name(the_config.back));
    fflush(stdout);
    run_ranks(size, shm_rank_of_layers, 0, "the CPU is always there");
    for (size_t i = 0; i < COUNT_OF(sizes); i++)
        run_ranks(sizes[i], shm_rank_of_meetings, 0, "the CPU is always there");
}

#endif
