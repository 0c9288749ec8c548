/* simt_sm90.h - what the block's scheduler and cp.async report to the emulation of compute
 * capability 9.0. Thread: as simt_block.h. */
#ifndef BATON_TESTS_SIMT_SIMT_SM90_H
#define BATON_TESTS_SIMT_SIMT_SM90_H

#include <stddef.h>
#include <stdint.h>

/* simt_mbarrier.cc, simt_proxy.cc, simt_registers.cc, simt_wgmma.cc: a block begins; it ends. */
void simt_mbarrier_begin(void);
void simt_proxy_begin(void);
void simt_wgmma_begin(void);
void simt_registers_begin(void);
void simt_registers_end(void);
void simt_wgmma_end(void);
/* simt_async.cc: somebody waits at a barrier: copies that arrive there take place. A block ends:
 * there must be none left. */
void simt_async_arrive(void *barrier);
void simt_async_end(void);
/* The current thread returns: ends the process if it has not waited for its products. */
void simt_wgmma_leave(void);

/* A cp.async of the current thread to shared memory was issued; it has completed. */
void simt_proxy_ordered(const void *shared, size_t bytes);
void simt_proxy_completed(const void *shared, size_t bytes);
/* The same of one that arrived at a barrier by itself: who reads it fences after the barrier. */
void simt_proxy_arrived(const void *shared, size_t bytes, unsigned thread);
/* How many had arrived when the current thread last fenced. */
uint32_t simt_proxy_fenced(void);
/* Ends the process unless wgmma that a thread issued after this fence, and after it had last waited
 * (simt_proxy_waited), may read these bytes. */
void simt_proxy_check_read(const void *shared, size_t bytes, uint32_t fenced, uint32_t waited);

#endif
