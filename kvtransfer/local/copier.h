/* copier.h - threads that copy parts of puts next to the transfer thread, and nothing else.
 *
 *   transfer thread ── copier_offer(job) ──▶ a worker's mailbox ── run ──▶ done box
 *   transfer thread ◀── wake ── copier_take ◀──────────────────────────────────┘
 *
 * A job is a range of one put's copies. The transfer thread hands out jobs while a worker has
 * little to do and copies the rest itself, so fast and slow threads share a put by what they
 * achieve. The copier does not know which connection a job belongs to; the caller does. Invariants:
 *  1 An offered job is taken exactly once, even if it was cut short (abandoned puts).
 *  2 A worker has at most COPIER_JOBS_MAX jobs in flight, so neither box can be full.
 * Thread: transfer, except copier_choose_threads and copier_done (any) and `run` (the workers). */
#ifndef BATON_KVTRANSFER_LOCAL_COPIER_H
#define BATON_KVTRANSFER_LOCAL_COPIER_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/err.h"

struct copier;

enum {
    COPIER_THREADS_MAX = 16,
    COPIER_CHUNK = 128 * 1024, /* bytes of a job: some 6 us of copying, against less than 1 us
                                * of handing over */
    COPIER_QUEUED_BYTES = 2 * COPIER_CHUNK, /* bytes before a worker: it never runs dry while the
                                             * transfer thread copies one chunk */
    COPIER_JOBS_MAX = 64,
    COPIER_EXTERNAL = COPIER_THREADS_MAX
};

struct copier_job {
    void *put;
    uint32_t i_copy; /* first copy of the put, from its byte `skip` on, `bytes` in all */
    uint32_t worker; /* the copier's */
    uint64_t skip, bytes;
};

/* How many threads shall copy, the transfer thread among them: `wanted`, or when 0 one for up to
 * two CPUs this process may use, half of them up to four. */
uint32_t copier_choose_threads(uint32_t wanted);
/* n_threads - 1 workers. `run` copies a job; `wake` is called on their threads when something is to
 * be taken; at most n_foreign jobs at a time come through copier_done from elsewhere. ERR_NOMEM: no
 * threads. */
enum status copier_create(uint32_t n_threads, uint32_t n_external,
                          void (*run)(const struct copier_job *j), void (*wake)(void *arg),
                          void *arg, struct copier **out, struct err *err) MUST_CHECK;
void copier_free(struct copier *c); /* nothing is on its way any more; joins */
/* False: every worker has enough; copy it yourself. */
bool copier_offer(struct copier *c, struct copier_job j) MUST_CHECK;
bool copier_take(struct copier *c, struct copier_job *out);
/* Sleep until there is something to take, at most timeout_ms. */
void copier_wait(struct copier *c, int timeout_ms);
/* A job that somebody else ran (a GPU's stream) has ended: copier_take gives it back. Its `worker`
 * is COPIER_EXTERNAL. */
void copier_done(struct copier *c, struct copier_job j);

#endif
