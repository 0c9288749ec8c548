/* tier_worker.h - a thread of a tier: runs jobs in the order in which they were given.
 *
 *   give ─▶ run (on the worker's thread) ─▶ take (on the engine's)
 *
 * Every job that was given is taken again exactly once, in order of completion, or returned by
 * tier_worker_stop. A job that writes to blocks of the pool does so between enter and leave; after
 * tier_worker_cancel enter refuses it, and no write of it is running. The copy of one block is all
 * that cancel may have to wait for.
 * Thread: engine, except enter, leave and tier_worker_is_stopping, which `run` calls. */
#ifndef BATON_KV_TIER_TIER_WORKER_H
#define BATON_KV_TIER_TIER_WORKER_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/err.h"

struct tier_worker;

/* First member of a job's struct; owned by whoever gave it. */
struct tier_job {
    void (*run)(struct tier_job *j, struct tier_worker *w, void *arg); /* arg: of the options */
    bool canceled;                                                     /* under the worker's lock */
};

struct tier_worker_options {
    const char *name;             /* of its thread, 15 characters */
    bool is_low;                  /* it takes only the CPU time that others leave */
    uint32_t max_jobs;            /* more are ERR_BUSY */
    void (*wake)(void *wake_arg); /* there is something to take. Any thread */
    void *wake_arg;
    void *arg;
};

enum status tier_worker_create(const struct tier_worker_options *o, struct tier_worker **out,
                               struct err *err) MUST_CHECK;
enum status tier_worker_give(struct tier_worker *w, struct tier_job *j) MUST_CHECK;
bool tier_worker_has_room(const struct tier_worker *w);
/* A job that has run; NULL: none. */
struct tier_job *tier_worker_take(struct tier_worker *w);
void tier_worker_cancel(struct tier_worker *w, struct tier_job *j);
/* Ends the thread after the job that it runs, which tier_worker_is_stopping tells to hurry. Then
 * take returns those that have run, and after them the others, until NULL. */
void tier_worker_stop(struct tier_worker *w);
void tier_worker_free(struct tier_worker *w); /* all jobs were taken */

/* May the job write to the pool now? If so leave must follow. */
bool tier_worker_enter(struct tier_worker *w, struct tier_job *j);
void tier_worker_leave(struct tier_worker *w, struct tier_job *j);
bool tier_worker_is_stopping(struct tier_worker *w);

#endif
