/* pool.c - the compute threads.
 *
 * One word, `ticket`, holds the number of the current run (high half) and the indices not yet taken (low half). A thread
 * takes an index by lowering it with a compare-and-swap, so an index can only be taken within the run it belongs to.
 * Before the swap it reads fn, arg and n of that run: a later run overwrites them only after every index of this one is
 * done, and while our index is free it is not, so a successful swap proves that the values read were the right ones.
 * The caller never waits for a thread that took nothing: a descheduled thread costs no time.
 *
 * Idle threads look at the ticket for SPIN_NS, which bridges the gaps between the kernels of a layer, then sleep on a
 * futex. `n_asleep` and `ticket` are both accessed sequentially consistent: either the caller sees the sleeper or the
 * sleeper sees the new run.
 *
 * Thread: compute_pool_run on the engine thread (one run at a time); create and free on the thread that owns the pool. */
#include "kernels/cpu/pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"
#include "shared/base/thread.h"

enum { SPIN_NS = 40000, SPINS_PER_LOOK = 32, SPINS_BEFORE_YIELD = 2000, THREADS_MAX = 1024 };

typedef void pool_fn(void *arg, int index, int thread);

struct worker {
    struct compute_pool *pool;
    pthread_t            thread;
    int                  i_thread;
};

struct compute_pool {
    _Alignas(64) _Atomic uint64_t ticket; /* run number << 32 | indices not yet taken */
    _Alignas(64) _Atomic int      n_done; /* indices finished in this run */
    _Alignas(64) _Atomic uint64_t n_alone; /* indices the caller ran without the others */
    _Alignas(64) _Atomic uint32_t wake;   /* futex word: changes with every wake-up */
    _Atomic int                   n_asleep;
    _Atomic bool                  stop;
    _Alignas(64) pool_fn *_Atomic fn;     /* of the current run; see above */
    void *_Atomic                 arg;
    _Atomic int                   n;
    int                           n_threads;
    struct worker                *workers; /* [n_threads - 1] */
};

static void spin_pause(void) { __builtin_ia32_pause(); }

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int n)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

/* Take indices and run them until none is left. */
static void work(struct compute_pool *p, int i_thread)
{
    uint64_t ticket = atomic_load(&p->ticket);
    while ((uint32_t)ticket != 0) {
        pool_fn *fn = atomic_load_explicit(&p->fn, memory_order_relaxed);
        void    *arg = atomic_load_explicit(&p->arg, memory_order_relaxed);
        int      n = atomic_load_explicit(&p->n, memory_order_relaxed);
        if (!atomic_compare_exchange_weak(&p->ticket, &ticket, ticket - 1)) continue;
        fn(arg, n - (int)(uint32_t)ticket, i_thread);
        atomic_fetch_add_explicit(&p->n_done, 1, memory_order_release); /* pairs with the caller's acquire */
        ticket = atomic_load(&p->ticket);
    }
}

/* True when there is work or the pool stops within SPIN_NS. */
static bool spin_for_work(struct compute_pool *p)
{
    uint64_t t_end = clock_ns() + SPIN_NS;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if ((uint32_t)atomic_load_explicit(&p->ticket, memory_order_relaxed) != 0) return true;
            spin_pause();
        }
    } while (clock_ns() < t_end && !atomic_load_explicit(&p->stop, memory_order_relaxed));
    return false;
}

static void sleep_until_woken(struct compute_pool *p)
{
    uint32_t seen = atomic_load(&p->wake);
    atomic_fetch_add(&p->n_asleep, 1);
    if ((uint32_t)atomic_load(&p->ticket) == 0 && !atomic_load(&p->stop)) futex_wait(&p->wake, seen);
    atomic_fetch_sub(&p->n_asleep, 1);
}

static void *worker_main(void *arg)
{
    struct worker       *w = arg;
    struct compute_pool *p = w->pool;
    char                 name[16];
    snprintf(name, sizeof name, "compute %d", w->i_thread);
    thread_become(THREAD_COMPUTE, name);
    while (!atomic_load(&p->stop)) {
        if (!spin_for_work(p)) sleep_until_woken(p);
        work(p, w->i_thread);
    }
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
    if (n_threads < 1 || n_threads > THREADS_MAX)
        return err_set(err, ERR_INVALID, "%d compute threads were asked for; 1 to %d are possible", n_threads, THREADS_MAX);
    struct compute_pool *p = mem_aligned(_Alignof(struct compute_pool), sizeof *p);
    p->n_threads = n_threads;
    p->workers = MEM_ARRAY(struct worker, (size_t)n_threads);
    for (int i = 0; i < n_threads - 1; i++) {
        p->workers[i] = (struct worker){ .pool = p, .i_thread = i + 1 };
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
    mem_free(p->workers);
    mem_free(p);
}

int compute_pool_threads(const struct compute_pool *p) { return p->n_threads; }

uint64_t compute_pool_progress(const struct compute_pool *p)
{
    return atomic_load_explicit(&p->ticket, memory_order_relaxed) + atomic_load_explicit(&p->n_alone, memory_order_relaxed);
}

void compute_pool_run(struct compute_pool *p, int n, void (*fn)(void *arg, int index, int thread), void *arg)
{
    if (n <= 1 || p->n_threads == 1) {
        for (int i = 0; i < n; i++) {
            fn(arg, i, 0);
            atomic_fetch_add_explicit(&p->n_alone, 1, memory_order_relaxed); /* a count for compute_pool_progress, nothing else */
        }
        return;
    }
    uint64_t run = (atomic_load(&p->ticket) >> 32) + 1;
    atomic_store_explicit(&p->fn, fn, memory_order_relaxed);
    atomic_store_explicit(&p->arg, arg, memory_order_relaxed);
    atomic_store_explicit(&p->n, n, memory_order_relaxed);
    atomic_store_explicit(&p->n_done, 0, memory_order_relaxed);
    atomic_store(&p->ticket, run << 32 | (uint32_t)n); /* publishes the four above */
    if (atomic_load(&p->n_asleep) > 0) {
        atomic_fetch_add(&p->wake, 1);
        futex_wake(&p->wake, n - 1);
    }
    work(p, 0);
    for (int spins = 0; atomic_load_explicit(&p->n_done, memory_order_acquire) != n; spins++) {
        spin_pause();
        if (spins > SPINS_BEFORE_YIELD) sched_yield(); /* more threads than cores: let the last one finish */
    }
}
