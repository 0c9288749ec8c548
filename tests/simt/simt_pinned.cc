/* simt_pinned.cc - pinned host memory, and what kind of memory a pointer refers to. Thread: any. */
#include <stdlib.h>
#include <string.h>

#include "tests/simt/simt_machine.h"
#include "tests/simt/simt_memory.h"
#include "tests/simt/simt_stream.h"
#include "tests/simt/simt_table.h"

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
{
    SIMT_ENTER();
    if (!p || flags > (cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined))
        return simt_leave(cudaErrorInvalidValue);
    cudaError_t e = simt_unsafe_in_capture();
    if (e != cudaSuccess) return simt_leave(e);
    *p = nullptr;
    if (!bytes) return cudaSuccess;
    void *made = nullptr;
    if (posix_memalign(&made, simt_page_bytes(), bytes) != 0)
        return simt_leave(cudaErrorMemoryAllocation);
    memset(made, SIMT_FRESH, bytes);
    SIMT_STATE;
    simt_tables_of().pinned[(const char *)made] = bytes;
    *p = made;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **p, size_t bytes)
{
    SIMT_ENTER();
    return cudaHostAlloc(p, bytes, cudaHostAllocDefault);
}

static bool forget_pinned(std::map<const char *, size_t> simt_tables::*table, const void *p)
{
    SIMT_STATE;
    return (simt_tables_of().*table).erase((const char *)p) != 0;
}

cudaError_t cudaFreeHost(void *p)
{
    SIMT_ENTER();
    if (!p) return cudaSuccess;
    cudaError_t e = simt_unsafe_in_capture();
    if (e != cudaSuccess) return simt_leave(e);
    simt_execution execution;
    simt_drain_all(execution);
    if (!forget_pinned(&simt_tables::pinned, p)) return simt_leave(cudaErrorInvalidValue);
    free(p);
    return simt_leave(simt_sticky());
}

cudaError_t cudaHostRegister(void *p, size_t bytes, unsigned flags)
{
    SIMT_ENTER();
    if (!p || !bytes || flags > 0x0f) return simt_leave(cudaErrorInvalidValue);
    SIMT_STATE;
    if (simt_pinned_from(p)) return simt_leave(cudaErrorHostMemoryAlreadyRegistered);
    simt_tables_of().registered[(const char *)p] = bytes;
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *p)
{
    SIMT_ENTER();
    simt_execution execution;
    simt_drain_all(execution);
    return simt_leave(forget_pinned(&simt_tables::registered, p)
                          ? simt_sticky()
                          : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    SIMT_ENTER();
    SIMT_STATE;
    if (!device || flags || !simt_pinned_from(host)) return simt_leave(cudaErrorInvalidValue);
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *p)
{
    SIMT_ENTER();
    if (!attributes) return simt_leave(cudaErrorInvalidValue);
    simt_place place = simt_memory_place(p, 1);
    attributes->type = place == SIMT_DEVICE   ? cudaMemoryTypeDevice
                       : place == SIMT_PINNED ? cudaMemoryTypeHost
                                              : cudaMemoryTypeUnregistered;
    attributes->device = place == SIMT_PAGEABLE ? -2 : 0;
    attributes->devicePointer = place == SIMT_PAGEABLE ? nullptr : const_cast<void *>(p);
    attributes->hostPointer = place == SIMT_DEVICE ? nullptr : const_cast<void *>(p);
    return cudaSuccess;
}
