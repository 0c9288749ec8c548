/* simt_shared.h - the dynamic shared memory of the block that runs. Thread: as simt_block.h. */
#ifndef BATON_TESTS_SIMT_SIMT_SHARED_H
#define BATON_TESTS_SIMT_SIMT_SHARED_H

#include <stddef.h>

/* What a card gives one block at most: 227 KiB. */
#define SIMT_SHARED_MAX ((size_t)227 << 10)

/* How far into it these bytes lie; SIMT_NOT_SHARED of others. */
#define SIMT_NOT_SHARED ((size_t)-1)
size_t simt_shared_offset(const void *shared, size_t bytes);
/* The bytes at an address of simt_shared_address; ends the process if they are not the block's. */
void *simt_shared_at(unsigned address, size_t bytes);

/* A block begins, whose launch asked for `bytes`. */
void simt_shared_begin(size_t bytes);
/* Ends the process if something was written behind. */
void simt_shared_end(void);

#endif
