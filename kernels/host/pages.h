/* pages.h - large private memory from the system: zeroed on first touch, huge pages if possible.
 * Thread: any. */
#ifndef BATON_KERNELS_HOST_PAGES_H
#define BATON_KERNELS_HOST_PAGES_H

#include <stddef.h>

/* Rounds up to whole pages; 0 if that overflows. */
size_t pages_round(size_t bytes);
/* The least number of bytes, not 0, that is both whole pages and a multiple of `bytes`. */
size_t pages_common(size_t bytes);
/* Maps `bytes` (whole pages, not 0) of zeroed memory, or returns NULL. pages_unmap unmaps it as a
 * whole or by parts of whole pages. */
void *pages_map(size_t bytes);
void pages_unmap(void *p, size_t bytes);

#endif
