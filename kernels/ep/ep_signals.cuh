/* ep_signals.cuh - how kernels of several ranks wait for each other: epochs, flags, a deadline, and
 * a fault that reaches all ranks. Thread: device.
 *
 * No block waits for another block of its grid: the last block to finish does what comes after all
 * of them. Blocks wait only for other ranks. */
#ifndef BATON_KERNELS_EP_EP_SIGNALS_CUH
#define BATON_KERNELS_EP_EP_SIGNALS_CUH

#include "kernels/cuda/dtype_convert.cuh"
#include "kernels/ep/ep_kernels.h"

static __device__ __forceinline__ unsigned *fault_word(const ep_call &c, int rank)
{
    return (unsigned *)(void *)(c.window[rank] + c.at.fault);
}

/* Returns the flag in the window of rank `to` that rank `from` writes. */
static __device__ __forceinline__ unsigned *flag_word(const ep_call &c, int kind, int to, int from)
{
    return (unsigned *)(void *)(c.window[to] + c.at.flags +
                                ((size_t)kind * c.size + from) * EP_FLAG_BYTES);
}

/* Reports the first fault of this rank to all ranks. */
static __device__ inline void raise_fault(const ep_call &c, int fault, int rank)
{
    const unsigned word = (unsigned)fault << 16 | (unsigned)(rank + 1);
    unsigned *own = (unsigned *)(void *)(c.own + c.at.fault);
    if (atomicCAS(own, 0u, word) != 0) return;
    *(volatile unsigned *)c.host_fault = word;
    for (int r = 0; c.direct && r < c.size; r++)
        if (r != c.rank) store_release_system(fault_word(c, r), word);
}

/* Returns whether this or another rank reported a fault, and tells the host. */
static __device__ __forceinline__ bool has_fault(const ep_call &c)
{
    const unsigned word = load_acquire_system((const unsigned *)(void *)(c.own + c.at.fault));
    if (word) *(volatile unsigned *)c.host_fault = word;
    return word != 0;
}

/* Returns whether a fault was reported, with one result for the whole block, and tells the host:
 * the block leaves something out, and it may be the last of a step. The read is relaxed and orders
 * nothing. */
static __device__ __forceinline__ bool block_has_fault(const ep_call &c)
{
    unsigned word = 0;
    if (threadIdx.x == 0) {
        word = *(const volatile unsigned *)(const void *)(c.own + c.at.fault);
        if (word) *(volatile unsigned *)c.host_fault = word;
    }
    return __syncthreads_or(word != 0) != 0;
}

/* The word lies in the host's memory, which a GPU reads much more slowly than its own. */
enum { POLLS_PER_ABORT = 64 };

static __device__ inline bool wait_for_flag(const ep_call &c, int kind, int from)
{
    const unsigned *flag = flag_word(c, kind, c.rank, from), epoch = c.epochs[kind];
    const unsigned long long until = timer_ns() + c.timeout_ns;
    for (unsigned polls = 1; (int)(load_acquire_system(flag) - epoch) < 0; polls++) {
        if (has_fault(c)) return false;
        if (polls % POLLS_PER_ABORT == 0 && *(const volatile unsigned *)c.host_abort) {
            raise_fault(c, EP_FAULT_ABORTED, c.rank);
            return false;
        }
        if (timer_ns() > until) {
            raise_fault(c, EP_FAULT_LOST, from);
            return false;
        }
        poll_backoff();
    }
    return true;
}

/* Waits until all ranks have set the flag; called by the whole block. Returns false after a fault:
 * the data that they should have written is missing. */
static __device__ inline bool wait_for_all(const ep_call &c, int kind)
{
    int good = threadIdx.x != 0 || !has_fault(c);
    for (int r = (int)threadIdx.x; good && r < c.size; r += (int)blockDim.x)
        good = wait_for_flag(c, kind, r);
    return __syncthreads_and(good) != 0;
}

enum { WAITING_BLOCKS_MAX = 256 /* two per SM, a fourth of its threads */ };

/* Direct: whether a kernel of so many blocks waits for the ranks by itself, which saves a launch.
 * Of more blocks those that come first would keep the SMs, so one block waits in a launch before
 * (ep_run_wait). */
static inline bool waits_itself(const ep_call &c, size_t n_blocks)
{
    return c.direct && n_blocks <= WAITING_BLOCKS_MAX;
}

/* Whether all ranks have signalled, for which a block that `waits` waits here, and none has found a
 * fault. Called by the whole block. */
static __device__ inline bool have_all_come(const ep_call &c, int kind, bool waits)
{
    return waits ? wait_for_all(c, kind) : !block_has_fault(c);
}

/* Called by the whole block after its writes: returns whether it is the last of the grid, so that
 * all writes of the grid are complete. */
static __device__ inline bool is_last_block(const ep_call &c)
{
    int last = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        last = atomicAdd(c.done, 1u) == gridDim.x * gridDim.y - 1;
        if (last) *c.done = 0;
        __threadfence_system();
    }
    return __syncthreads_or(last) != 0;
}

/* Sets this rank's flag on all ranks; called by the whole last block. */
static __device__ inline void signal_all(const ep_call &c, int kind)
{
    const unsigned epoch = c.epochs[kind] + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence_system();
        c.epochs[kind] = epoch;
    }
    for (int r = (int)threadIdx.x; r < c.size; r += (int)blockDim.x)
        store_release_system(flag_word(c, kind, r, c.rank), epoch);
}

#endif
