/* pages.h - large private memory straight from the system: zeroed on first touch, huge pages where
 * possible. Thread: any. */
#ifndef BATON_KERNELS_HOST_PAGES_H
#define BATON_KERNELS_HOST_PAGES_H

#include <stddef.h>

/* Round up to whole pages; 0 when that overflows. */
size_t pages_round(size_t bytes);
/* `bytes` (whole pages, not 0) of zeroed memory, or NULL; unmapped with pages_unmap, as a whole or
 * by parts of whole pages. */
void *pages_map(size_t bytes);
void pages_unmap(void *p, size_t bytes);

#endif
