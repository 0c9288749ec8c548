/* simt_device.cc - the properties of the emulated GPU, and the functions that return them.
 *
 * Environment: BATON_SIMT_DEVICES (0 or 1), BATON_SIMT_MEMORY (bytes), BATON_SIMT_CC (compute
 * capability as in 90). Thread: any. */
#include "tests/simt/simt_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/simt/simt_machine.h"
#include "tests/simt/simt_memory.h"
#include "tests/simt/simt_shared.h"
#include "tests/simt/simt_stream.h"

enum {
    N_MULTIPROCESSORS = 4,
    THREADS_PER_SM = 2048,
    REGISTERS = 65536,
    LEAST_CC = 80,
    LATEST_CC = 90
};

static size_t from_environment(const char *name, size_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? (size_t)strtoull(text, nullptr, 0) : otherwise;
}

size_t simt_memory_total(void) { return from_environment("BATON_SIMT_MEMORY", (size_t)4 << 30); }
static int n_devices(void) { return from_environment("BATON_SIMT_DEVICES", 1) != 0; }
static int capability(void) { return (int)from_environment("BATON_SIMT_CC", LATEST_CC); }

cudaError_t cudaGetDeviceCount(int *count)
{
    SIMT_ENTER();
    *count = n_devices();
    return simt_leave(*count ? cudaSuccess : cudaErrorNoDevice);
}

static cudaError_t check(int device)
{
    return !n_devices() ? cudaErrorNoDevice : device ? cudaErrorInvalidDevice : cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    SIMT_ENTER();
    return simt_leave(check(device));
}

cudaError_t cudaGetDevice(int *device)
{
    SIMT_ENTER();
    *device = 0;
    return simt_leave(check(0));
}

cudaError_t cudaSetDeviceFlags(unsigned)
{
    SIMT_ENTER();
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    SIMT_ENTER();
    if (!p || check(device) != cudaSuccess)
        return simt_leave(p ? check(device) : cudaErrorInvalidValue);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Baton SIMT on the CPU");
    memcpy(p->uuid, "baton-simt-gpu\0", 16);
    p->totalGlobalMem = simt_memory_total();
    p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = SIMT_SHARED_MAX;
    p->sharedMemPerMultiprocessor = 228 << 10, p->reservedSharedMemPerBlock = 1024;
    p->totalConstMem = 64 << 10, p->memPitch = 0x7fffffff;
    p->regsPerBlock = p->regsPerMultiprocessor = REGISTERS;
    p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = THREADS_PER_SM,
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = capability() / 10, p->minor = capability() % 10,
    p->multiProcessorCount = (int)from_environment("BATON_SIMT_SMS", N_MULTIPROCESSORS);
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing =
        p->streamPrioritiesSupported = p->hostRegisterSupported = 1;
    p->asyncEngineCount = 2, p->memoryBusWidth = 4096, p->l2CacheSize = 8 << 20, p->pciBusID = 1;
    return cudaSuccess;
}

static int attribute(const struct cudaDeviceProp *p, enum cudaDeviceAttr attr)
{
    switch (attr) {
    case cudaDevAttrMaxThreadsPerBlock: return p->maxThreadsPerBlock;
    case cudaDevAttrMaxSharedMemoryPerBlock: return (int)p->sharedMemPerBlock;
    case cudaDevAttrWarpSize: return p->warpSize;
    case cudaDevAttrMaxRegistersPerBlock: return p->regsPerBlock;
    case cudaDevAttrClockRate: return 1000000;
    case cudaDevAttrMultiProcessorCount: return p->multiProcessorCount;
    case cudaDevAttrCanMapHostMemory: return p->canMapHostMemory;
    case cudaDevAttrConcurrentKernels: return p->concurrentKernels;
    case cudaDevAttrMemoryClockRate: return 1000000;
    case cudaDevAttrGlobalMemoryBusWidth: return p->memoryBusWidth;
    case cudaDevAttrL2CacheSize: return p->l2CacheSize;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return p->maxThreadsPerMultiProcessor;
    case cudaDevAttrAsyncEngineCount: return p->asyncEngineCount;
    case cudaDevAttrUnifiedAddressing: return p->unifiedAddressing;
    case cudaDevAttrComputeCapabilityMajor: return p->major;
    case cudaDevAttrComputeCapabilityMinor: return p->minor;
    case cudaDevAttrStreamPrioritiesSupported: return p->streamPrioritiesSupported;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return (int)p->sharedMemPerMultiprocessor;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return p->regsPerMultiprocessor;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return (int)p->sharedMemPerBlockOptin;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return p->maxBlocksPerMultiProcessor;
    case cudaDevAttrReservedSharedMemoryPerBlock: return (int)p->reservedSharedMemPerBlock;
    case cudaDevAttrIntegrated:
    case cudaDevAttrPageableMemoryAccess:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported: return 0;
    }
    return -1;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attr, int device)
{
    SIMT_ENTER();
    struct cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e != cudaSuccess) return e;
    int v = attribute(&p, attr);
    if (!value || v < 0) return simt_leave(cudaErrorInvalidValue);
    *value = v;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int len, int device)
{
    SIMT_ENTER();
    if (!id || len < 13 || check(device) != cudaSuccess) return simt_leave(cudaErrorInvalidValue);
    snprintf(id, (size_t)len, "0000:01:00.0");
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    SIMT_ENTER();
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    SIMT_ENTER();
    if (check(device) != cudaSuccess || check(peer) != cudaSuccess)
        return simt_leave(cudaErrorInvalidDevice);
    *can = 0;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned)
{
    SIMT_ENTER();
    return simt_leave(cudaErrorInvalidDevice);
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = n_devices() ? CUDART_VERSION : 0;
    return cudaSuccess;
}

/* Nothing else clears a sticky error. */
cudaError_t cudaDeviceReset(void)
{
    simt_set_sticky(cudaSuccess);
    SIMT_ENTER();
    simt_execution execution;
    simt_streams_reset();
    simt_memory_reset();
    (void)cudaGetLastError();
    return cudaSuccess;
}

/* Kernels need a GPU of compute capability 8.0 or later. For older ones drivers return one of two
 * errors; here the compute capability decides which. */
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function)
{
    SIMT_ENTER();
    if (!function || !attributes) return simt_leave(cudaErrorInvalidDeviceFunction);
    if (capability() < LEAST_CC)
        return simt_leave(capability() < 70 ? cudaErrorInvalidDeviceFunction
                                            : cudaErrorNoKernelImageForDevice);
    *attributes = { 1024, capability() };
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attr, int value)
{
    SIMT_ENTER();
    if (!function) return simt_leave(cudaErrorInvalidDeviceFunction);
    bool good = attr == cudaFuncAttributeMaxDynamicSharedMemorySize
                    ? value >= 0 && (size_t)value <= SIMT_SHARED_MAX
                    : value >= -1 && value <= 100;
    return simt_leave(good ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n_blocks, const void *function,
                                                          int block_size, size_t dynamic_shared)
{
    SIMT_ENTER();
    if (!function || !n_blocks || block_size <= 0) return simt_leave(cudaErrorInvalidValue);
    int by_threads = THREADS_PER_SM / block_size,
        by_shared = (int)(((size_t)228 << 10) / (dynamic_shared + 1024));
    *n_blocks = by_threads < by_shared ? by_threads : by_shared;
    return cudaSuccess;
}
