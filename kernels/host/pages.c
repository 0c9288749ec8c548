/* pages.c - anonymous mappings for weights and private device memory.
 *
 * Packed weights are read once per token from end to end; 2 MiB pages save most of the address
 * translations. They are used only where they fit, from the first byte on, so small allocations
 * cost no more than they hold. Thread: any. */
#include "kernels/host/pages.h"

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "shared/base/assert.h"

static const size_t HUGE_PAGE = (size_t)2 << 20;

size_t pages_round(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return bytes > SIZE_MAX - page ? 0 : (bytes + page - 1) / page * page;
}

size_t pages_common(size_t bytes)
{
    size_t unit = pages_round(1);
    while (unit % bytes) unit += pages_round(1);
    return unit;
}

void *pages_map(size_t bytes)
{
    ASSERT(bytes > 0 && bytes == pages_round(bytes)); /* memory after them is unmapped, and must
                                                       * begin on a page */
    /* aligns the begin to huge pages */
    const size_t spare = bytes >= HUGE_PAGE && bytes <= SIZE_MAX - HUGE_PAGE ? HUGE_PAGE : 0;
    char *p = mmap(NULL, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    if (!spare) return p;
    const size_t before = (HUGE_PAGE - (uintptr_t)p % HUGE_PAGE) % HUGE_PAGE;
    pages_unmap(p, before);
    pages_unmap(p + before + bytes, spare - before);
    (void)madvise(p + before, bytes, MADV_HUGEPAGE); /* a hint, which kernels may refuse */
    return p + before;
}

void pages_unmap(void *p, size_t bytes)
{
    if (p && bytes > 0) munmap(p, bytes);
}
