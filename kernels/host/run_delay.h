/* run_delay.h - how long a thread that could run has waited for a CPU lately: on a busy machine
 * nobody should poll, since a thread that does takes time from the one it waits for. Thread: the
 * one that is judged; each has its own struct. */
#ifndef BATON_KERNELS_HOST_RUN_DELAY_H
#define BATON_KERNELS_HOST_RUN_DELAY_H

#include <stdbool.h>
#include <stdint.h>

/* Judged in windows. Zeroed at first. */
struct run_delay {
    uint64_t t_window_ns, before_ns;
    int fd; /* of its schedstat; 0: not opened yet, -1: the kernel has none */
};

enum {
    RUN_DELAY_BUSY_NS = 100000000 /* how long the machine counts as busy after it was found so */
};

/* Whether the calling thread waited long for CPUs in the window that ends now (clock_ns). False
 * within a window, and where the kernel does not tell. */
bool run_delay_is_long(struct run_delay *own, uint64_t now);
void run_delay_release(struct run_delay *own);

#endif
