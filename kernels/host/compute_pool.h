/* compute_pool.h - the compute threads: one parallel-for at a time, no allocation, the caller takes
 * part.
 *
 * compute_pool_run calls `fn` for every index 0..n-1, each exactly once, on any of the threads, and
 * returns when all are done. Work must not depend on the thread. Idle threads spin briefly, then
 * sleep, so an idle node uses no CPU. n_threads counts the caller (1: no extra thread). On a NUMA
 * host the threads are bound to the nodes' CPUs, and each node has a share of the indices of every
 * run, the first node the first ones: weights that are written and read by index stay in the node's
 * memory. Thread: engine; a pool of one thread runs everything on its caller and may have several
 * callers at once (shared/engine/sampler_batch.c). */
#ifndef BATON_KERNELS_HOST_COMPUTE_POOL_H
#define BATON_KERNELS_HOST_COMPUTE_POOL_H

#include <stdint.h>

#include "kernels/host/numa.h"
#include "shared/base/err.h"

struct compute_pool;

enum status compute_pool_create(int n_threads, struct compute_pool **out,
                                struct err *err) MUST_CHECK;
/* The same with these NUMA nodes, which are copied. */
enum status compute_pool_create_on(const struct numa_nodes *nodes, int n_threads,
                                   struct compute_pool **out, struct err *err) MUST_CHECK;
void compute_pool_free(struct compute_pool *p);
int compute_pool_threads(const struct compute_pool *p);
/* The number of groups, and the first of n indices in the share of `group` (n past the last
 * group). */
int compute_pool_groups(const struct compute_pool *p);
int compute_pool_share(const struct compute_pool *p, int n, int group);
/* Binds the calling thread, which will call compute_pool_run from now on, like the others. Whether
 * the machine is busy is then judged by how long this thread waits for CPUs. */
void compute_pool_bind_caller(struct compute_pool *p);
/* A number that changes whenever an index is taken: if it stands still during a run, the compute
 * threads are stuck. Any thread. */
uint64_t compute_pool_progress(const struct compute_pool *p);
/* `thread` is 0..n_threads-1, for per-thread scratch. */
void compute_pool_run(struct compute_pool *p, int n, void (*fn)(void *arg, int index, int thread),
                      void *arg);

#endif
