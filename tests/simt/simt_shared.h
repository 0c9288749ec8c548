/* simt_shared.h - the dynamic shared memory of the running block. Thread: as simt_block.h. */
#ifndef BATON_TESTS_SIMT_SIMT_SHARED_H
#define BATON_TESTS_SIMT_SIMT_SHARED_H

#include <stddef.h>

/* The maximum that a GPU gives one block: 227 KiB. */
#define SIMT_SHARED_MAX ((size_t)227 << 10)

/* Blocks of a cluster have theirs so far apart. */
#define SIMT_SHARED_STRIDE (SIMT_SHARED_MAX + 1024)

/* The offset of these bytes from the shared memory of the cluster's first block, or
 * SIMT_NOT_SHARED. */
#define SIMT_NOT_SHARED ((size_t)-1)
size_t simt_shared_offset(const void *shared, size_t bytes);
/* The bytes at an address from simt_shared_address. Ends the process if they are not the current
 * block's. */
void *simt_shared_at(unsigned address, size_t bytes);
/* Where another block of the cluster has what the current one has at `own`. */
void *simt_shared_of(const void *own, unsigned rank, const char *what);

/* A cluster begins whose launch asked for `bytes` a block. */
void simt_shared_begin(size_t bytes, unsigned n_blocks);
/* A cluster ends. Ends the process if something was written behind a block's shared memory. */
void simt_shared_end(void);

#endif
