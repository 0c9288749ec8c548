/* thread.h - the kinds of threads in a node, and checks that code runs on the right one.
 *
 * A thread declares its kind once with thread_become. Functions that belong to one kind open with
 * ASSERT_THREAD(kind). A thread that declared nothing (a unit test) passes every check.
 * Thread: any. */
#ifndef BATON_BASE_THREAD_H
#define BATON_BASE_THREAD_H

#include <pthread.h>
#include <stdbool.h>

#include "shared/base/assert.h"
#include "shared/base/status.h"

enum thread_kind { THREAD_ANY, THREAD_LOOP, THREAD_ENGINE, THREAD_TRANSFER, THREAD_COMPUTE };

/* Sets the kind of the calling thread, and its name as ps shows it (15 characters). The main thread
 * keeps the program's name. */
void thread_become(enum thread_kind kind, const char *name);
bool thread_is(enum thread_kind kind);
#define ASSERT_THREAD(kind) ASSERT(thread_is(kind))

/* Starts `fn(arg)` on a new joinable thread that blocks all signals but those of its own faults. */
enum status thread_start(pthread_t *out, void *(*fn)(void *), void *arg) MUST_CHECK;
/* The calling thread from now on takes only what others leave of the CPUs. */
void thread_lower_priority(void);
/* Runs fn(arg) on a thread of low priority and waits for it: long work then takes only what others
 * leave of the CPUs. On this thread when none can be started. */
void thread_run_low(void (*fn)(void *), void *arg);

#endif
