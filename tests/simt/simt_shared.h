/* simt_shared.h - the dynamic shared memory of the running block. Thread: as simt_block.h. */
#ifndef BATON_TESTS_SIMT_SIMT_SHARED_H
#define BATON_TESTS_SIMT_SIMT_SHARED_H

#include <stddef.h>

/* The maximum that a GPU gives one block: 227 KiB. */
#define SIMT_SHARED_MAX ((size_t)227 << 10)

/* The offset of these bytes in shared memory, or SIMT_NOT_SHARED. */
#define SIMT_NOT_SHARED ((size_t)-1)
size_t simt_shared_offset(const void *shared, size_t bytes);
/* The bytes at an address from simt_shared_address. Ends the process if they are not the
 * block's. */
void *simt_shared_at(unsigned address, size_t bytes);

/* A block begins whose launch asked for `bytes`. */
void simt_shared_begin(size_t bytes);
/* A block ends. Ends the process if something was written behind its shared memory. */
void simt_shared_end(void);

#endif
