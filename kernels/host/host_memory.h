/* host_memory.h - how much memory this process may still take: the smaller of what the machine has
 * free and what its control group leaves. Thread: any. */
#ifndef BATON_KERNELS_HOST_HOST_MEMORY_H
#define BATON_KERNELS_HOST_HOST_MEMORY_H

#include <stdint.h>

/* Bytes; UINT64_MAX: not known. Page cache counts as available. */
uint64_t host_memory_available(void);

#endif
