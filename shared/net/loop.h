/* loop.h - the loop thread: one loop of libuv with timers, posts from other threads, and slow work
 * on worker threads.
 *
 * loop_run blocks its thread (which becomes THREAD_LOOP) until loop_stop, then closes the handles
 * that the loop itself opened. Callbacks on the loop must be short (under a millisecond); long work
 * goes to loop_work. Thread: loop_post and loop_stop any; everything else the loop thread. */
#ifndef BATON_NET_LOOP_H
#define BATON_NET_LOOP_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "shared/base/err.h"

struct loop;
struct loop_timer;

enum status loop_create(struct loop **out, struct err *err) MUST_CHECK;
/* Calls it after loop_run has returned. The owners must have closed their handles. */
void loop_free(struct loop *l);
void loop_run(struct loop *l);
void loop_stop(struct loop *l);
uv_loop_t *loop_uv(struct loop *l);

/* Runs fn(arg) on the loop thread soon, in the order of one thread's posts. ERR_FULL: more than
 * 65,536 are waiting; ERR_CANCELED: the loop is stopping. */
enum status loop_post(struct loop *l, void (*fn)(void *arg), void *arg) MUST_CHECK;
/* Runs work(arg) on a worker thread, then done(arg) on the loop. ERR_BUSY: 1,024 are waiting. */
enum status loop_work(struct loop *l, void (*work)(void *arg), void (*done)(void *arg),
                      void *arg) MUST_CHECK;
/* Runs fn(arg) after delay_ms, then every repeat_ms (0: once). The caller frees the timer with
 * loop_timer_free, also inside fn. */
struct loop_timer *loop_timer_start(struct loop *l, uint64_t delay_ms, uint64_t repeat_ms,
                                    void (*fn)(void *arg), void *arg);
void loop_timer_free(struct loop_timer *t);
/* Runs fn(arg, signum) on the loop for SIGINT and SIGTERM. */
void loop_on_signal(struct loop *l, void (*fn)(void *arg, int signum), void *arg);
/* Returns the longest turn of the loop since the last call, in milliseconds (for a metric). */
double loop_take_max_delay_ms(struct loop *l);

#endif
