/* simt_sm90.h - what the block's scheduler and cp.async report to the emulation of compute
 * capability 9.0. Thread: as simt_block.h. */
#ifndef BATON_TESTS_SIMT_SIMT_SM90_H
#define BATON_TESTS_SIMT_SIMT_SM90_H

#include <stddef.h>

/* simt_mbarrier.cc, simt_proxy.cc, simt_wgmma.cc: a block begins; it ends. */
void simt_mbarrier_begin(void);
void simt_proxy_begin(void);
void simt_wgmma_begin(void);
void simt_wgmma_end(void);
/* The current thread returns: ends the process if it has not waited for its products. */
void simt_wgmma_leave(void);

/* A cp.async of the current thread to shared memory was issued; it has completed. */
void simt_proxy_ordered(const void *shared, size_t bytes);
void simt_proxy_completed(const void *shared, size_t bytes);
/* Ends the process unless wgmma may read these bytes. */
void simt_proxy_check_read(const void *shared, size_t bytes);

#endif
