/* thread.h - the four kinds of thread of a node, and the checks that code runs on the right one.
 *
 * A thread says once what it is (thread_become); functions that belong to one kind open with
 * ASSERT_THREAD(kind). A thread that never said (a unit test) passes every check. Thread: any. */
#ifndef BATON_BASE_THREAD_H
#define BATON_BASE_THREAD_H

#include <pthread.h>
#include <stdbool.h>

#include "shared/base/assert.h"
#include "shared/base/status.h"

enum thread_kind { THREAD_ANY, THREAD_LOOP, THREAD_ENGINE, THREAD_TRANSFER, THREAD_COMPUTE };

/* Set the kind and the name (15 characters, as ps shows it) of the calling thread; the main one
 * keeps the program's. */
void thread_become(enum thread_kind kind, const char *name);
bool thread_is(enum thread_kind kind);
#define ASSERT_THREAD(kind) ASSERT(thread_is(kind))

/* Start `fn(arg)` on a new joinable thread with all signals blocked. */
enum status thread_start(pthread_t *out, void *(*fn)(void *), void *arg) MUST_CHECK;

#endif
