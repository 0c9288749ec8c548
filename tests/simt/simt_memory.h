/* simt_memory.h - device memory and pinned memory: which allocation an address belongs to, and who
 * may access it.
 *
 * Thread: any. Functions marked "execution" need that lock, and none may be called with the state
 * lock held.
 */
#ifndef BATON_TESTS_SIMT_SIMT_MEMORY_H
#define BATON_TESTS_SIMT_SIMT_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
enum simt_place {
    SIMT_PAGEABLE,
    SIMT_PINNED,
    SIMT_DEVICE,
    SIMT_BEYOND /* a range that begins in an allocation and ends outside */
};

simt_place simt_memory_place(const void *p, size_t bytes);
bool simt_memory_is_device(const void *p);
/* Device or pinned: what a kernel may read. */
bool simt_memory_is_visible(const void *p);

/* Execution. Between open and close ordinary loads and stores reach device memory. A second open
 * does nothing. */
void simt_memory_open(void);
void simt_memory_close(void);
/* Execution, while memory is open. cudaMemset, of device memory or pinned memory. */
void simt_memory_set(void *p, int value, size_t bytes);
/* Execution. cudaDeviceReset. */
void simt_memory_reset(void);
#endif
#endif
