/* ep_shm_meet.c - meetings of the ranks of a host: who has come, how the others wait, and what
 * happens when one does not come. Thread: as ep_shm.h.
 *
 * Truth is the word `arrived` of each rank's sign, which only that rank writes. The bell only
 * wakes: a word that all sleep on. Whoever comes last finds everybody there and rings once for all:
 *
 *   come: arrived += 1; look at all; all there and one asleep: bell += 1, wake
 *   wait: spin or  { asleep = 1; b = bell; look at all; sleep while bell == b } .. asleep = 0
 *
 * These words are accessed sequentially consistent: of two ranks that come at the same time one
 * sees the other; and either the last one sees that a rank sleeps, or that rank's last look sees
 * all. Faults travel the same way: a rank writes `fault` and rings; whoever waits or begins a call
 * adopts the first that it finds. But a meeting to which all have come succeeds. */
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernels/ep/ep_shm.h"
#include "shared/base/clock.h"

enum {
    SPIN_NS = 400000,
    SPINS_PER_LOOK = 32,
    SLICE_NS = 50000000,
    NS_PER_MS = 1000000,
    NS_PER_S = 1000000000
};

static void spin_pause(void) { __builtin_ia32_pause(); }

/* The bell is another process's word too, so the futex is not a private one. */
static void sleep_on(_Atomic uint32_t *word, uint32_t seen, uint64_t ns)
{
    const struct timespec t = { (time_t)(ns / NS_PER_S), (long)(ns % NS_PER_S) };
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

static void ring(struct ep_shm *s)
{
    atomic_fetch_add(&s->bell->rung, 1);
    syscall(SYS_futex, &s->bell->rung, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void ep_shm_init_meetings(struct ep_shm *s)
{
    cpu_set_t set;
    const int n_cpus = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    s->may_spin = s->base.config.size <= n_cpus;
}

/* ---- faults ---- */

static enum status describe(const struct ep_shm *s, uint32_t word, struct err *err)
{
    const struct ep_config *c = &s->base.config;
    const int32_t r = (int32_t)(word & 0xffff) - 1, n = c->size;
    if (word == 0) return OK;
    switch (word >> 16) {
    case EP_SHM_ABORTED:
        if (r == c->rank) return err_set(err, ERR_CANCELED, "ep: rank %d of %d was aborted", r, n);
        return err_set(err, ERR_PEER_LOST, "ep: rank %d of %d was aborted", r, n);
    case EP_SHM_LEFT: return err_set(err, ERR_PEER_LOST, "ep: rank %d of %d has left", r, n);
    case EP_SHM_ENDED:
        return err_set(err, ERR_PEER_LOST, "ep: the process of rank %d of %d has ended", r, n);
    case EP_SHM_SILENT:
        if (r == c->rank)
            return err_set(err, ERR_PEER_LOST,
                           "ep: the others gave up rank %d of %d: it gave no sign for %d ms", r, n,
                           c->timeout_ms);
        return err_set(err, ERR_PEER_LOST, "ep: rank %d of %d gave no sign for %d ms", r, n,
                       c->timeout_ms);
    case EP_SHM_EXPERT:
        return err_set(err, ERR_INVALID, "ep: a row of rank %d chose an expert that there is not",
                       r);
    default:
        return err_set(err, ERR_INTERNAL,
                       "ep: the memory of rank %d of %d holds impossible numbers", r, n);
    }
}

static enum status raise_word(struct ep_shm *s, uint32_t word, struct err *err)
{
    _Atomic uint32_t *own = &ep_shm_sign(s, s->base.config.rank)->fault;
    uint32_t none = 0;
    if (atomic_compare_exchange_strong(own, &none, word)) {
        atomic_fetch_add(&s->bell->n_faults, 1);
        ring(s);
    }
    return describe(s, atomic_load(own), err);
}

enum status ep_shm_raise(struct ep_shm *s, enum ep_shm_fault fault, int32_t rank, struct err *err)
{
    return raise_word(s, (uint32_t)fault << 16 | (uint32_t)(rank + 1), err);
}

void ep_shm_abort(struct ep *e)
{
    const enum status st = ep_shm_raise(ep_shm_of(e), EP_SHM_ABORTED, e->config.rank, NULL);
    (void)st; /* this fault, or an earlier one: either ends the calls */
}

/* The first fault that stands in any sign, this rank's included; 0: none. */
static uint32_t find_fault(const struct ep_shm *s)
{
    for (int32_t r = 0; r < s->base.config.size; r++) {
        const uint32_t word = atomic_load(&ep_shm_sign(s, r)->fault);
        if (word) return word;
    }
    return 0;
}

enum status ep_shm_check(struct ep_shm *s, struct err *err)
{
    const uint32_t word = atomic_load(&s->bell->n_faults) ? find_fault(s) : 0;
    return word ? raise_word(s, word, err) : OK;
}

enum status ep_shm_fault_of(const struct ep_shm *s, struct err *err)
{
    return describe(s, atomic_load(&ep_shm_sign(s, s->base.config.rank)->fault), err);
}

/* ---- who has come ---- */

static bool has_come(const struct ep_shm *s, int32_t rank)
{
    return (int32_t)(atomic_load(&ep_shm_sign(s, rank)->arrived) - s->n_meetings) >= 0;
}

static bool all_have_come(struct ep_shm *s)
{
    while (s->n_seen < s->base.config.size && has_come(s, s->n_seen)) s->n_seen++;
    return s->n_seen == s->base.config.size;
}

static bool one_sleeps(const struct ep_shm *s)
{
    for (int32_t r = 0; r < s->base.config.size; r++)
        if (atomic_load(&ep_shm_sign(s, r)->asleep)) return true;
    return false;
}

void ep_shm_arrive(struct ep_shm *s)
{
    atomic_store(&ep_shm_sign(s, s->base.config.rank)->arrived, ++s->n_meetings);
    s->n_seen = 0;
    if (all_have_come(s) && one_sleeps(s)) ring(s);
}

/* ---- waiting ---- */

static bool is_busy(struct ep_shm *s, uint64_t now)
{
    if (run_delay_is_long(&s->delay, now)) s->busy_until_ns = now + RUN_DELAY_BUSY_NS;
    return now < s->busy_until_ns;
}

/* Looks for faults while this rank waits. One that is seen after all came is of later: a rank may
 * have left at once. */
static enum status check_waiting(struct ep_shm *s, uint32_t fault, struct err *err)
{
    return fault && !all_have_come(s) ? raise_word(s, fault, err) : OK;
}

/* True if all came, or a fault was seen, within SPIN_NS. Only where the host has a CPU for each
 * rank and this thread did not wait for one lately: otherwise it would take time from the
 * others. */
static bool spin(struct ep_shm *s, enum status *st, struct err *err)
{
    uint64_t now = clock_ns();
    const uint64_t end = now + SPIN_NS;
    if (is_busy(s, now)) return false;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (all_have_come(s)) return true;
            spin_pause();
        }
        if (atomic_load(&s->bell->n_faults)) *st = check_waiting(s, find_fault(s), err);
        now = clock_ns();
    } while (*st == OK && now < end);
    return *st != OK;
}

/* Reports a rank that has not come and whose process has ended. */
static enum status check_processes(struct ep_shm *s, struct err *err)
{
    for (int32_t r = 0; r < s->base.config.size; r++) {
        struct pollfd p = { .fd = s->pidfds[r], .events = POLLIN };
        if (p.fd < 0 || has_come(s, r) || poll(&p, 1, 0) <= 0) continue;
        if (!has_come(s, r)) return ep_shm_raise(s, EP_SHM_ENDED, r, err);
    }
    return OK;
}

/* Sleeps in slices and asks between them whether processes have ended. The deadline counts slices,
 * not time: if this rank itself was stopped, the others get the time that they need to come. */
static enum status sleep_until_all_came(struct ep_shm *s, struct err *err)
{
    const uint64_t limit = (uint64_t)s->base.config.timeout_ms * NS_PER_MS;
    uint64_t waited = 0;
    for (;;) {
        const uint32_t seen = atomic_load(&s->bell->rung);
        if (all_have_come(s)) return OK;
        TRY(check_waiting(s, find_fault(s), err));
        if (waited >= limit) return ep_shm_raise(s, EP_SHM_SILENT, s->n_seen, err);
        const uint64_t slice = limit - waited < SLICE_NS ? limit - waited : SLICE_NS,
                       begin = clock_ns();
        sleep_on(&s->bell->rung, seen, slice);
        if (s->base.config.progress)
            __atomic_fetch_add(s->base.config.progress, 1, __ATOMIC_RELAXED);
        const uint64_t slept = clock_ns() - begin;
        waited += slept < 2 * (uint64_t)SLICE_NS ? slept : 2 * (uint64_t)SLICE_NS;
        if (slept >= slice) TRY(check_processes(s, err));
    }
}

static enum status wait_for_others(struct ep_shm *s, struct err *err)
{
    enum status st = OK;
    if (s->may_spin && spin(s, &st, err)) return st;
    _Atomic uint32_t *asleep = &ep_shm_sign(s, s->base.config.rank)->asleep;
    atomic_store(asleep, 1);
    st = sleep_until_all_came(s, err);
    atomic_store(asleep, 0);
    return st;
}

enum status ep_shm_wait(struct ep_shm *s, struct err *err)
{
    if (all_have_come(s)) return OK;
    const uint64_t begin = clock_ns();
    const enum status st = wait_for_others(s, err);
    s->base.traffic.waited_ns += clock_ns() - begin;
    return st;
}

enum status ep_shm_meet(struct ep_shm *s, struct err *err)
{
    ep_shm_arrive(s);
    return ep_shm_wait(s, err);
}
