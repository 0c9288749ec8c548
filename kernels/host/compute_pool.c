/* compute_pool.c - the compute threads.
 *
 * The threads of one NUMA node (numa.h) are a group, and each group has a share of the indices of
 * every run, the same in every run of equal size, so that a node reads what it wrote. A group that
 * is done helps the next. Most machines have one group. How an index is taken without a lock stands
 * above struct compute_group.
 *
 * Idle threads poll the tickets for SPIN_NS, which bridges the gaps between the kernels of a layer,
 * then sleep on a futex. `n_asleep` and the tickets are accessed sequentially consistent: either
 * the caller sees the sleeper or the sleeper sees the new run. Likewise the caller polls n_done and
 * then sleeps on it (`caller_asleep`). On a busy machine nobody polls, since a thread that does
 * takes time from the one it waits for; threads notice it by how long they wait for a CPU.
 * Thread: compute_pool_run: engine, one run at a time; create and free: the pool's owner. */
#include "kernels/host/compute_pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernels/host/run_delay.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

enum {
    SPIN_NS = 40000,
    CALLER_SPIN_NS = 400000, /* the caller has nothing else to do than to wait for the others */
    SPINS_PER_LOOK = 32,
    THREADS_MAX = 1024
};

typedef void pool_fn(void *arg, int index, int thread);

struct compute_worker {
    struct compute_pool *pool;
    pthread_t thread;
    int i_thread;
    struct run_delay delay;
};

/* `ticket` holds the number of the current run (high half) and the indices of the group's share
 * that are not taken yet (low half). A thread takes an index by lowering it with a
 * compare-and-swap, so an index can only be taken within its run. Before the swap the thread reads
 * fn, arg and n of the run: a later run overwrites them only after every index of this one is done,
 * and while our index is free it is not, so a successful swap proves that the values were the right
 * ones. The caller never waits for a thread that took nothing: a descheduled thread costs no
 * time. */
struct compute_group {
    _Alignas(64) _Atomic uint64_t ticket; /* run number << 32 | indices not yet taken */
};

struct compute_pool {
    struct compute_group groups[NUMA_NODES_MAX];
    _Alignas(64) _Atomic int n_done;        /* indices finished in this run */
    _Alignas(64) _Atomic uint64_t n_inline; /* indices that the caller ran alone */
    _Alignas(64) _Atomic uint32_t wake;     /* futex word: changes with every wake-up */
    _Atomic int n_asleep;
    _Atomic bool caller_asleep; /* on n_done */
    _Atomic bool stop;
    _Atomic uint64_t busy_until_ns;   /* clock_ns; until then nobody polls */
    _Alignas(64) pool_fn *_Atomic fn; /* of the current run; see above */
    void *_Atomic arg;
    _Atomic int n;
    int n_threads, n_groups;
    /* of each group; all of them at the end */
    int first_thread[NUMA_NODES_MAX + 1];
    struct numa_nodes nodes;
    uint32_t run;                   /* the caller's */
    struct run_delay delay;         /* the caller's */
    struct compute_worker *workers; /* [n_threads - 1] */
};

static void spin_pause(void) { __builtin_ia32_pause(); }

static void futex_wait(void *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(void *word, int n)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

int compute_pool_share(const struct compute_pool *p, int n, int group)
{
    return (int)((int64_t)n * p->first_thread[group] / p->n_threads);
}

static int group_of(const struct compute_pool *p, int i_thread)
{
    int g = 0;
    while (p->first_thread[g + 1] <= i_thread) g++;
    return g;
}

static bool is_work(const struct compute_pool *p)
{
    for (int g = 0; g < p->n_groups; g++)
        if ((uint32_t)atomic_load(&p->groups[g].ticket) != 0) return true;
    return false;
}

/* Takes indices of a group's share and runs them until none is left. */
static void work_share(struct compute_pool *p, int group, int i_thread)
{
    _Atomic uint64_t *from = &p->groups[group].ticket;
    uint64_t ticket = atomic_load(from);
    while ((uint32_t)ticket != 0) {
        pool_fn *fn = atomic_load_explicit(&p->fn, memory_order_relaxed);
        void *arg = atomic_load_explicit(&p->arg, memory_order_relaxed);
        int n = atomic_load_explicit(&p->n, memory_order_relaxed);
        if (!atomic_compare_exchange_weak(from, &ticket, ticket - 1)) continue;
        fn(arg, compute_pool_share(p, n, group + 1) - (int)(uint32_t)ticket, i_thread);
        /* pairs with the caller's acquire; the last one wakes it */
        if (atomic_fetch_add(&p->n_done, 1) + 1 == n && atomic_load(&p->caller_asleep))
            futex_wake(&p->n_done, 1);
        ticket = atomic_load(from);
    }
}

static bool same_run(const struct compute_pool *p, int a, int b)
{
    return (atomic_load(&p->groups[a].ticket) ^ atomic_load(&p->groups[b].ticket)) >> 32 == 0;
}

/* Works on the thread's own group first. Shares are published one after the other: a thread touches
 * another group's only after its own. */
static void work(struct compute_pool *p, int i_thread)
{
    int own = group_of(p, i_thread);
    work_share(p, own, i_thread);
    for (int i = 1; i < p->n_groups; i++) {
        const int other = (own + i) % p->n_groups;
        for (bool published = false; !published;) {
            published = same_run(p, own, other);
            work_share(p, own, i_thread);
        }
        work_share(p, other, i_thread);
    }
}

/* Looks how long the calling thread has waited for CPUs, and tells all threads when it was long. */
static bool is_busy(struct compute_pool *p, struct run_delay *own, uint64_t now)
{
    if (run_delay_is_long(own, now))
        atomic_store_explicit(&p->busy_until_ns, now + RUN_DELAY_BUSY_NS, memory_order_relaxed);
    return now < atomic_load_explicit(&p->busy_until_ns, memory_order_relaxed);
}

/* True if there is work or the pool stops within SPIN_NS. */
static bool spin_for_work(struct compute_pool *p, struct run_delay *own)
{
    uint64_t now = clock_ns(), t_end = now + SPIN_NS;
    if (is_busy(p, own, now)) return is_work(p);
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (is_work(p)) return true;
            spin_pause();
        }
    } while (clock_ns() < t_end && !atomic_load_explicit(&p->stop, memory_order_relaxed));
    return false;
}

static void sleep_until_woken(struct compute_pool *p)
{
    uint32_t seen = atomic_load(&p->wake);
    atomic_fetch_add(&p->n_asleep, 1);
    if (!is_work(p) && !atomic_load(&p->stop)) futex_wait(&p->wake, seen);
    atomic_fetch_sub(&p->n_asleep, 1);
}

/* Binds a thread; one that cannot be bound still works, only slower. */
static void bind_thread(const struct compute_pool *p, int i_thread)
{
    if (p->n_groups == 1) return;
    if (pthread_setaffinity_np(pthread_self(), sizeof(cpu_set_t),
                               &p->nodes.cpus[group_of(p, i_thread)]) != 0)
        log_warn("compute thread not bound", "thread=%d group=%d", i_thread, group_of(p, i_thread));
}

void compute_pool_bind_caller(struct compute_pool *p)
{
    bind_thread(p, 0);
    run_delay_release(&p->delay); /* of the thread that called before, as one that loads weights */
    p->delay = (struct run_delay){ 0 };
}

static void *worker_main(void *arg)
{
    struct compute_worker *w = arg;
    struct compute_pool *p = w->pool;
    char name[16];
    snprintf(name, sizeof name, "compute %d", w->i_thread);
    thread_become(THREAD_COMPUTE, name);
    bind_thread(p, w->i_thread);
    while (!atomic_load(&p->stop)) {
        if (!spin_for_work(p, &w->delay)) sleep_until_woken(p);
        work(p, w->i_thread);
    }
    run_delay_release(&w->delay);
    return NULL;
}

static void stop_workers(struct compute_pool *p, int n_started)
{
    atomic_store(&p->stop, true);
    atomic_fetch_add(&p->wake, 1);
    futex_wake(&p->wake, THREADS_MAX);
    for (int i = 0; i < n_started; i++) pthread_join(p->workers[i].thread, NULL);
}

enum status compute_pool_create(int n_threads, struct compute_pool **out, struct err *err)
{
    struct numa_nodes nodes;
    numa_nodes_read(NULL, &nodes);
    return compute_pool_create_on(&nodes, n_threads, out, err);
}

enum status compute_pool_create_on(const struct numa_nodes *nodes, int n_threads,
                                   struct compute_pool **out, struct err *err)
{
    if (n_threads < 1 || n_threads > THREADS_MAX)
        return err_set(err, ERR_INVALID, "%d compute threads were asked for; 1 to %d are possible",
                       n_threads, THREADS_MAX);
    struct compute_pool *p = mem_aligned(_Alignof(struct compute_pool), sizeof *p);
    p->n_threads = n_threads;
    p->nodes = *nodes;
    p->n_groups = nodes->n;
    for (int i = 0; i < n_threads; i++) /* of threads before each group, node by node */
        for (int g = numa_node_of_thread(nodes, i, n_threads) + 1; g <= p->n_groups; g++)
            p->first_thread[g]++;
    p->workers = MEM_ARRAY(struct compute_worker, (size_t)n_threads);
    for (int i = 0; i < n_threads - 1; i++) {
        p->workers[i] = (struct compute_worker){ .pool = p, .i_thread = i + 1 };
        enum status st = thread_start(&p->workers[i].thread, worker_main, &p->workers[i]);
        if (st != OK) {
            stop_workers(p, i);
            mem_free(p->workers);
            mem_free(p);
            return err_set(err, st, "compute thread %d of %d cannot be started", i + 1, n_threads);
        }
    }
    *out = p;
    return OK;
}

void compute_pool_free(struct compute_pool *p)
{
    if (!p) return;
    stop_workers(p, p->n_threads - 1);
    run_delay_release(&p->delay);
    mem_free(p->workers);
    mem_free(p);
}

int compute_pool_threads(const struct compute_pool *p) { return p->n_threads; }

int compute_pool_groups(const struct compute_pool *p) { return p->n_groups; }

uint64_t compute_pool_progress(const struct compute_pool *p)
{
    uint64_t sum = atomic_load_explicit(&p->n_inline, memory_order_relaxed);
    for (int g = 0; g < p->n_groups; g++)
        sum += atomic_load_explicit(&p->groups[g].ticket, memory_order_relaxed);
    return sum;
}

/* Waits until the other threads have finished what they took. */
static void wait_for_others(struct compute_pool *p, int n)
{
    uint64_t t_end = 0;
    for (int spins = 0; atomic_load_explicit(&p->n_done, memory_order_acquire) != n; spins++) {
        spin_pause();
        if ((spins + 1) % SPINS_PER_LOOK) continue;
        uint64_t now = clock_ns();
        if (!t_end) t_end = now + CALLER_SPIN_NS;
        if (now < t_end && !is_busy(p, &p->delay, now)) continue;
        atomic_store(&p->caller_asleep, true);
        int seen = atomic_load(&p->n_done);
        if (seen != n) futex_wait(&p->n_done, (uint32_t)seen);
        atomic_store_explicit(&p->caller_asleep, false, memory_order_relaxed);
    }
}

void compute_pool_run(struct compute_pool *p, int n, void (*fn)(void *arg, int index, int thread),
                      void *arg)
{
    if (n <= 1 || p->n_threads == 1) {
        for (int i = 0; i < n; i++) {
            fn(arg, i, 0);
            /* only for compute_pool_progress */
            atomic_fetch_add_explicit(&p->n_inline, 1, memory_order_relaxed);
        }
        return;
    }
    uint64_t run = ++p->run;
    atomic_store_explicit(&p->fn, fn, memory_order_relaxed);
    atomic_store_explicit(&p->arg, arg, memory_order_relaxed);
    atomic_store_explicit(&p->n, n, memory_order_relaxed);
    atomic_store_explicit(&p->n_done, 0, memory_order_relaxed);
    for (int g = 0; g < p->n_groups; g++) /* publishes the four above */
        atomic_store(&p->groups[g].ticket, run << 32 | (uint32_t)(compute_pool_share(p, n, g + 1) -
                                                                  compute_pool_share(p, n, g)));
    if (atomic_load(&p->n_asleep) > 0) {
        atomic_fetch_add(&p->wake, 1);
        futex_wake(&p->wake, n - 1);
    }
    work(p, 0);
    wait_for_others(p, n);
}
