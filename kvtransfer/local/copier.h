/* copier.h - threads that copy parts of puts in parallel with the transfer thread.
 *
 *   transfer thread ── copier_offer(job) ──▶ a worker's mailbox ── run ──▶ mailbox `done`
 *   transfer thread ◀── wake ── copier_take ◀──────────────────────────────────┘
 *
 * A job is a range of one put's copies. The transfer thread hands out jobs while a worker has
 * little to do and copies the rest itself, so each thread's share of a put follows its speed. The
 * copier does not know which connection a job belongs to; the caller does. Invariants:
 *  1 An offered job is taken exactly once, even if it was cut short (abandoned puts).
 *  2 A worker has at most COPIER_JOBS_MAX jobs in flight, so no mailbox can be full.
 * Thread: transfer, except copier_choose_threads and copier_done (any) and `run` (the workers). */
#ifndef BATON_KVTRANSFER_LOCAL_COPIER_H
#define BATON_KVTRANSFER_LOCAL_COPIER_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/err.h"

struct copier;

enum {
    COPIER_THREADS_MAX = 16,
    /* Bytes of a job: about 6 us of copying, handing over takes < 1 us. A piece that is hashed on
     * the way may be a job of up to COPIER_QUEUED_BYTES. */
    COPIER_CHUNK = 128 * 1024,
    /* Of a worker, so that it does not run dry while the transfer thread copies one chunk. */
    COPIER_QUEUED_BYTES = 2 * COPIER_CHUNK,
    COPIER_JOBS_MAX = 64,
    COPIER_EXTERNAL = COPIER_THREADS_MAX
};

struct copier_job {
    void *put;
    uint32_t i_copy; /* first copy of the put, from its byte `skip` on; `bytes` in total */
    uint32_t worker; /* the copier's */
    uint64_t skip, bytes;
    uint64_t at; /* bytes of the put before it */
};

/* The number of threads that copy, including the transfer thread: `wanted`; if 0, one on up to two
 * CPUs, otherwise half as many as CPUs and at most four. */
uint32_t copier_choose_threads(uint32_t wanted);
/* Starts n_threads - 1 workers. `run` copies a job; `wake` is called on their threads when a job
 * can be taken; at most n_external jobs at a time come through copier_done. ERR_NOMEM: no
 * threads. */
enum status copier_create(uint32_t n_threads, uint32_t n_external,
                          void (*run)(const struct copier_job *j), void (*wake)(void *arg),
                          void *arg, struct copier **out, struct err *err) MUST_CHECK;
void copier_free(struct copier *c); /* no job is in flight; joins the workers */
/* False: every worker is busy; the caller copies. */
bool copier_offer(struct copier *c, struct copier_job j) MUST_CHECK;
bool copier_alone(const struct copier *c); /* without workers: every offer is refused */
bool copier_take(struct copier *c, struct copier_job *out);
/* Waits until a job can be taken, at most timeout_ms. */
void copier_wait(struct copier *c, int timeout_ms);
/* Reports the end of a job that a GPU's stream ran, with `worker` COPIER_EXTERNAL; copier_take
 * returns it. */
void copier_done(struct copier *c, struct copier_job j);

#endif
