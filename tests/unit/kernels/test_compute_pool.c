/* test_compute_pool.c - the compute threads: every index once, results visible, idle threads
 * asleep. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernels/host/compute_pool.h"
#include "shared/base/clock.h"
#include "tests/harness/test.h"
#include "tests/harness/two_nodes.h"

enum { N_MAX = 1000 };

struct tally {
    int plain[N_MAX]; /* written without atomics: visible to the caller when run returns */
    atomic_int n_threads_seen, total;
    int limit;
};

static void count_index(void *arg, int index, int thread)
{
    struct tally *t = arg;
    t->plain[index]++;
    atomic_fetch_add(&t->total, 1);
    if (thread < 0 || thread >= t->limit) atomic_fetch_add(&t->n_threads_seen, 1000);
}

static void check_runs_on(const struct numa_nodes *nodes, int n_threads, int n_runs)
{
    struct compute_pool *p;
    struct err err;
    CHECK_OK(compute_pool_create_on(nodes, n_threads, &p, &err));
    CHECK_EQ_INT(compute_pool_threads(p), n_threads);
    for (int run = 0; run < n_runs; run++) {
        static struct tally t;
        memset(&t, 0, sizeof t);
        t.limit = n_threads;
        int n = run % 7 == 0 ? run % N_MAX : run % 5;
        compute_pool_run(p, n, count_index, &t);
        CHECK_EQ_INT(t.total, n);
        for (int i = 0; i < N_MAX; i++) CHECK_EQ_INT(t.plain[i], i < n ? 1 : 0);
        CHECK_EQ_INT(t.n_threads_seen, 0);
    }
    compute_pool_free(p);
}

static void check_runs(int n_threads, int n_runs)
{
    check_runs_on(&(struct numa_nodes){ .n = 1 }, n_threads, n_runs);
}

TEST(every_index_runs_once_on_one_thread) { check_runs(1, 200); }
TEST(every_index_runs_once_on_two_threads) { check_runs(2, 3000); }
TEST(every_index_runs_once_on_more_threads_than_cores) { check_runs(9, 1000); }

TEST(every_index_runs_once_on_two_nodes)
{
    struct numa_nodes nodes = two_nodes();
    for (int n_threads = 1; n_threads <= 5; n_threads++) check_runs_on(&nodes, n_threads, 700);
}

struct meeting {
    atomic_int n;
    int thread[2];
    cpu_set_t cpus[2];
};

static void meet(void *arg, int index, int thread)
{
    struct meeting *m = arg;
    m->thread[index] = thread;
    sched_getaffinity(0, sizeof m->cpus[index], &m->cpus[index]);
    atomic_fetch_add(&m->n, 1);
    while (atomic_load(&m->n) < 2) usleep(100);
}

/* Two indices that wait for each other: each can only be taken by the thread whose share it is,
 * bound to its node. */
TEST(a_node_takes_its_own_share_first)
{
    struct numa_nodes nodes = two_nodes();
    struct compute_pool *p;
    struct err err;
    cpu_set_t mine;
    sched_getaffinity(0, sizeof mine, &mine);
    CHECK_OK(compute_pool_create_on(&nodes, 2, &p, &err));
    CHECK_EQ_INT(compute_pool_groups(p), 2);
    CHECK_EQ_INT(compute_pool_share(p, 9, 0), 0);
    CHECK_EQ_INT(compute_pool_share(p, 9, 1), 4);
    CHECK_EQ_INT(compute_pool_share(p, 9, 2), 9);
    compute_pool_bind_caller(p);
    for (int run = 0; run < 100; run++) {
        struct meeting m = { 0 };
        if (run % 10 == 0) usleep(1000);
        compute_pool_run(p, 2, meet, &m);
        for (int i = 0; i < 2; i++) {
            CHECK_EQ_INT(m.thread[i], i);
            CHECK(CPU_EQUAL(&m.cpus[i], &nodes.cpus[i]));
        }
    }
    compute_pool_free(p);
    sched_setaffinity(0, sizeof mine, &mine);
}

TEST(threads_wake_up_after_sleeping)
{
    struct compute_pool *p;
    struct err err;
    static struct tally t;
    CHECK_OK(compute_pool_create(3, &p, &err));
    t.limit = 3;
    for (int i = 0; i < 30; i++) {
        usleep(i % 3 * 1000); /* past the spinning time: the threads are asleep */
        compute_pool_run(p, 50, count_index, &t);
    }
    CHECK_EQ_INT(t.total, 30 * 50);
    compute_pool_free(p);
}

static void wait_for_both(void *arg, int index, int thread)
{
    (void)index;
    (void)thread;
    atomic_int *n = arg;
    atomic_fetch_add(n, 1);
    while (atomic_load(n) < 2) usleep(100);
}

TEST(two_indices_run_at_the_same_time)
{
    struct compute_pool *p;
    struct err err;
    atomic_int n = 0;
    CHECK_OK(compute_pool_create(2, &p, &err));
    usleep(5000);
    compute_pool_run(p, 2, wait_for_both, &n); /* hangs unless the other thread wakes up and takes
                                                * one */
    compute_pool_free(p);
}

TEST(idle_threads_use_no_cpu)
{
    struct compute_pool *p;
    struct err err;
    struct timespec before, after;
    CHECK_OK(compute_pool_create(4, &p, &err));
    usleep(50000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    usleep(300000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    long long ns = (after.tv_sec - before.tv_sec) * 1000000000ll + after.tv_nsec - before.tv_nsec;
    CHECK(ns < 20000000);
    compute_pool_free(p);
}

/* ---- who waits for CPUs ---- */

/* One index keeps the other thread for ms, so that the caller waits for it. */
struct wait_for_other {
    int us;
    atomic_int n_begun;
};

static void keep_other_thread(void *arg, int index, int thread)
{
    struct wait_for_other *w = arg;
    (void)index;
    atomic_fetch_add(&w->n_begun, 1);
    while (thread == 0 && atomic_load(&w->n_begun) < 2) usleep(50);
    if (thread != 0) usleep((useconds_t)w->us);
}

static void run_and_wait(struct compute_pool *p, int us)
{
    struct wait_for_other w = { .us = us };
    compute_pool_run(p, 2, keep_other_thread, &w);
}

static void *run_as_loader(void *pool)
{
    run_and_wait(pool, 2000);
    return NULL;
}

/* Returns how many open files are the schedstat of thread `tid`. */
static int n_schedstats_of(pid_t tid)
{
    char want[64], path[64], target[256];
    int n_found = 0;
    snprintf(want, sizeof want, "/task/%d/schedstat", (int)tid);
    for (int fd = 0; fd < 256; fd++) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(path, target, sizeof target - 1);
        if (n <= 0) continue;
        target[n] = 0;
        n_found += strstr(target, want) != NULL;
    }
    return n_found;
}

/* The weights are loaded by one thread, and the engine's computes afterwards. */
TEST(the_callers_clock_is_of_the_thread_that_calls)
{
    struct compute_pool *p;
    struct err err;
    pthread_t loader;
    if (access("/proc/thread-self/schedstat", R_OK) != 0) SKIP("the kernel has no schedstat");
    CHECK_OK(compute_pool_create_on(&(struct numa_nodes){ .n = 1 }, 2, &p, &err));
    CHECK(pthread_create(&loader, NULL, run_as_loader, p) == 0);
    CHECK(pthread_join(loader, NULL) == 0);
    CHECK_EQ_INT(n_schedstats_of(gettid()), 0);
    compute_pool_bind_caller(p);
    /* It looks at its clock while it waits, which it need not when the other thread is quicker. */
    for (int i = 0; i < 200 && n_schedstats_of(gettid()) == 0; i++) run_and_wait(p, 2000);
    CHECK_EQ_INT(n_schedstats_of(gettid()), 1);
    compute_pool_free(p);
    CHECK_EQ_INT(n_schedstats_of(gettid()), 0);
}

enum { COUNTERS = 2, BUSY_TEST_MS = 1500, SHORT_WAIT_US = 300 };

static pid_t start_counter(void)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    for (volatile uint64_t n = 0; pid == 0; n++) continue;
    return pid;
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void bind_to(const cpu_set_t *all, int nth)
{
    cpu_set_t one;
    int cpu = 0;
    CPU_ZERO(&one);
    for (int n = 0; n <= nth; cpu++) n += CPU_ISSET(cpu, all) != 0;
    CPU_SET(cpu - 1, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
}

/* Other processes count on the caller's CPU while the other thread, on another CPU, has an index. A
 * caller that polled would take its share of the CPU, a third; it sleeps. */
TEST(a_caller_does_not_poll_on_a_busy_machine)
{
    struct compute_pool *p;
    struct err err;
    pid_t counters[COUNTERS];
    cpu_set_t mine;
    sched_getaffinity(0, sizeof mine, &mine);
    if (access("/proc/thread-self/schedstat", R_OK) != 0) SKIP("the kernel has no schedstat");
    if (CPU_COUNT(&mine) < 2) SKIP("there is one CPU");
    bind_to(&mine, 1);
    CHECK_OK(compute_pool_create_on(&(struct numa_nodes){ .n = 1 }, 2, &p, &err));
    bind_to(&mine, 0);
    for (int i = 0; i < COUNTERS; i++) counters[i] = start_counter();
    double cpu_begin = cpu_seconds();
    uint64_t begin = clock_ms();
    while (clock_ms() - begin < BUSY_TEST_MS) run_and_wait(p, SHORT_WAIT_US);
    double used = cpu_seconds() - cpu_begin, wall = (double)(clock_ms() - begin) * 1e-3;
    for (int i = 0; i < COUNTERS; i++) {
        kill(counters[i], SIGKILL);
        waitpid(counters[i], NULL, 0);
    }
    compute_pool_free(p);
    sched_setaffinity(0, sizeof mine, &mine);
    printf("busy machine: %.3f of a CPU\n", used / wall);
    CHECK(used < wall / 4);
}

TEST(thread_counts_are_checked)
{
    struct compute_pool *p;
    struct err err = { 0 };
    CHECK_STATUS(compute_pool_create(0, &p, &err), ERR_INVALID);
    CHECK_STATUS(compute_pool_create(100000, &p, &err), ERR_INVALID);
    CHECK(err.text[0] != 0);
    compute_pool_free(NULL);
}

TEST_MAIN(CASE(every_index_runs_once_on_one_thread), CASE(every_index_runs_once_on_two_threads),
          CASE(every_index_runs_once_on_two_nodes), CASE(a_node_takes_its_own_share_first),
          CASE(every_index_runs_once_on_more_threads_than_cores),
          CASE(threads_wake_up_after_sleeping), CASE(two_indices_run_at_the_same_time),
          CASE(idle_threads_use_no_cpu), CASE(the_callers_clock_is_of_the_thread_that_calls),
          CASE(a_caller_does_not_poll_on_a_busy_machine), CASE(thread_counts_are_checked))
