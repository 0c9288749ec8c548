/* compute_pool.h - the compute threads: one parallel-for at a time, no allocation, the caller takes
 * part.
 *
 * compute_pool_run is called by the engine thread only, but for a pool of one thread, which runs
 * all on its caller and may have several callers at once (shared/engine/sampler_batch.c); `fn` is
 * run for every index 0..n-1, each exactly once, on any of the threads, and the call returns when
 * all are done. Work must not depend on which thread runs it. Idle threads spin briefly, then
 * sleep, so that an idle node uses no CPU. n_threads counts the caller (1: no extra thread).
 *
 * On a host with several memory nodes the threads are bound to the nodes' processors, and each node
 * has a share of the indices of every run: the first ones the first node. Who writes weights by
 * index and reads them by index reads its own node's memory. */
#ifndef BATON_KERNELS_HOST_COMPUTE_POOL_H
#define BATON_KERNELS_HOST_COMPUTE_POOL_H

#include <stdint.h>

#include "kernels/host/numa.h"
#include "shared/base/err.h"

struct compute_pool;

enum status compute_pool_create(int n_threads, struct compute_pool **out,
                                struct err *err) MUST_CHECK;
/* As if these were the host's memory nodes; copied. */
enum status compute_pool_create_on(const struct numa_nodes *nodes, int n_threads,
                                   struct compute_pool **out, struct err *err) MUST_CHECK;
void compute_pool_free(struct compute_pool *p);
int compute_pool_threads(const struct compute_pool *p);
/* Memory nodes, and the first index of n that belongs to the share of `group` (n for the one behind
 * the last). */
int compute_pool_groups(const struct compute_pool *p);
int compute_pool_share(const struct compute_pool *p, int n, int group);
/* Bind the calling thread, which is to call compute_pool_run from now on, as the others are. */
void compute_pool_bind_caller(const struct compute_pool *p);
/* A number that changes whenever an index is taken: while a run goes on and this stands still, the
 * compute threads are stuck. Any thread. */
uint64_t compute_pool_progress(const struct compute_pool *p);
/* `thread` is 0..n_threads-1, for per-thread scratch. */
void compute_pool_run(struct compute_pool *p, int n, void (*fn)(void *arg, int index, int thread),
                      void *arg);

#endif
