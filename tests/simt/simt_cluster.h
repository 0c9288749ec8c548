/* simt_cluster.h - what the emulation of clusters and of bulk copies asks of its other parts. Thread:
 * as simt_block.h. */
#ifndef BATON_TESTS_SIMT_SIMT_CLUSTER_H
#define BATON_TESTS_SIMT_SIMT_CLUSTER_H

#include <stddef.h>
#include <stdint.h>

/* simt_mbarrier.cc: an arrival of a thread of any block; bytes that have come. */
void simt_mbarrier_complete(void *barrier, unsigned bytes);
/* Ends the process unless there is a barrier of which other blocks may know. */
void simt_mbarrier_check_visible(void *barrier, const char *what);

/* simt_bulk.cc: somebody waits at a barrier: its copies take place. A cluster ends: there must be
 * none left. */
void simt_bulk_arrive(void *barrier);
void simt_bulk_end(void);

/* simt_proxy.cc: a bulk copy to shared memory was issued; it has come. The current thread has waited
 * at a barrier; how many copies had come when it last did. */
void simt_proxy_bulk_ordered(const void *shared, size_t bytes);
void simt_proxy_bulk_arrived(const void *shared, size_t bytes);
void simt_proxy_wait(void);
uint32_t simt_proxy_waited(void);

#endif
