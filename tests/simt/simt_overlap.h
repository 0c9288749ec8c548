/* simt_overlap.h - launches that overlap the launch before them (programmatic dependent launch), if
 * BATON_SIMT_OVERLAP asks for it: what a block does before griddepcontrol.wait must not depend on
 * memory that the kernel before writes, and must write none.
 *
 * A kernel's blocks run when the kernel before has ended, as always. But pages that it wrote cannot
 * be read by threads that have not waited yet, and none can be written: an access faults, and is an
 * error if the bytes changed. __ldcg may read a guess, which is now the old value, now the new one.
 * Writes are found by faults too: a page that a kernel writes is copied first. Thread: the one that
 * holds the execution lock, or a fiber of it. */
#ifndef BATON_TESTS_SIMT_SIMT_OVERLAP_H
#define BATON_TESTS_SIMT_SIMT_OVERLAP_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
#include "tests/simt/include/simt.h"

/* An operation of the stream begins. Only kernels that follow a kernel can overlap. */
void simt_overlap_op(const void *stream, bool is_kernel);
/* A graph begins or ends, or memory is freed: nothing overlaps it. */
void simt_overlap_forget(void);
/* Device memory is inaccessible again. */
void simt_overlap_closed(void);

/* Around a kernel's blocks. */
void simt_overlap_begin(const simt_launch_shape &shape);
void simt_overlap_end(void);
/* Whether the threads of block i of n begin before the kernel before has ended. Not all blocks of
 * large grids are checked. */
bool simt_overlap_checks(size_t i, size_t n);
/* The thread that runs next has not waited yet, or has. */
void simt_overlap_set_early(bool is_early);
/* A thread has waited. */
void simt_overlap_waited(void);
/* A copy that is ordered by a thread that has not waited. */
void simt_overlap_check_read(const void *from, size_t bytes);

/* For the signal handler: whether the fault at `at` is one of these accesses, and is dealt with. */
bool simt_overlap_fault(void *at, void *context);
#endif
#endif
