/* simt_block.h - runs the blocks of a launch, and what a thread of a block asks of its scheduler.
 *
 * Thread: all functions on the host thread that holds the machine's execution lock, or on a fiber
 * of it.
 */
#ifndef BATON_TESTS_SIMT_SIMT_BLOCK_H
#define BATON_TESTS_SIMT_SIMT_BLOCK_H

#include <stddef.h>

#ifdef __cplusplus
#include <functional>
#include <vector>

#include "tests/simt/include/simt.h"
#include "tests/simt/include/simt_vectors.h"

/* One lane's part of a warp collective, on the lane's own stack; each collective derives from it.
 * The lane that arrives last performs it for all. */
struct simt_warp_call {
    const char *what; /* __shfl_sync, ...: must be the same for all lanes that meet */
    unsigned mask;
    int variant; /* must be the same too */
    bool orders_memory = false;
    /* lanes[i] is set for the bits of mask. */
    void (*perform)(simt_warp_call *const lanes[32], unsigned mask);
};

/* The cp.async copies of one thread. */
struct simt_copy {
    char *to;
    const char *from;
    int bytes, source_bytes;
};
struct simt_copies {
    std::vector<simt_copy> queue; /* oldest first */
    std::vector<size_t> groups;   /* copies in each committed group */
};

/* Blocks of a cluster at most, which have 1,024 threads together. */
enum { SIMT_CLUSTER_MAX = 8, SIMT_CLUSTER_THREADS = 1024 };

/* Runs every cluster, one after the other. */
void simt_run_grid(const simt_launch_shape &shape, const std::function<void()> &body);
/* Does the caller run on a fiber? */
bool simt_in_kernel(void);

/* "thread ... of block ..." into text; false outside a kernel. */
bool simt_describe_thread(char *text, size_t text_bytes);

/* The functions below are called only in a kernel. */
int simt_lane(void);
unsigned simt_thread_number(void); /* in the cluster: all of a block's before the next one's */
unsigned simt_block_rank(void);    /* in the cluster */
unsigned simt_n_blocks(void);      /* of the cluster */
bool simt_block_has_ended(unsigned rank);
void simt_warp_collect(simt_warp_call *call);
simt_copies &simt_thread_copies(void);

/* Ends the process with "simt: ..." and where in the grid. */
[[noreturn]] void simt_die(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
#endif
#endif
