/* device_cuda.c - one GPU: memory by cudaMalloc, its sharing by CUDA IPC, a stream, events, faults.
 *
 * CUDA_VISIBLE_DEVICES chooses the GPU: a rank uses the first one it sees. Source: CUDA Runtime
 * API.
 * Thread: see device_cuda.h. */
#include "kernels/cuda/device_cuda.h"

#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cuda/device_query.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

int cuda_device_count(void)
{
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}

bool cuda_check(struct cuda_device *d, cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return true;
    if (d->fault.code != OK) return false;
    err_set(&d->fault, ERR_NODEV, "the GPU failed in %s: %s (%s)", what, cudaGetErrorString(e),
            cudaGetErrorName(e));
    log_error("the GPU failed", "what=%s error=%s", what, cudaGetErrorName(e));
    return false;
}

static enum status cuda_fault(struct device *device, struct err *err)
{
    const struct cuda_device *d = cuda_device_of(device);
    if (d->fault.code != OK && err) *err = d->fault;
    return d->fault.code;
}

/* ---- life ---- */

static enum status no_device(cudaError_t e, struct err *err)
{
    return err_set(err, ERR_NODEV,
                   "there is no CUDA device to use: %s; nvidia-smi says what the driver sees, "
                   "CUDA_VISIBLE_DEVICES may hide a GPU, and a container needs --gpus",
                   e == cudaErrorInsufficientDriver
                       ? "NVIDIA's driver is not there, or too old for the CUDA of this build"
                       : cudaGetErrorString(e));
}

static void free_device(struct cuda_device *d)
{
    for (size_t i = 0; i < DEVICE_EVENTS_MAX; i++)
        if (d->events[i]) (void)cudaEventDestroy(d->events[i]);
    if (d->stream) (void)cudaStreamDestroy(d->stream);
    mem_free(d);
}

static void cuda_describe(struct device *device, char *out, size_t cap)
{
    struct cudaDeviceProp p;
    int driver = 0;
    (void)device;
    if (cudaGetDeviceProperties(&p, 0) != cudaSuccess ||
        cudaDriverGetVersion(&driver) != cudaSuccess) {
        (void)cudaGetLastError();
        snprintf(out, cap, "a CUDA device that does not tell what it is");
        return;
    }
    snprintf(out, cap, "%s (compute capability %d.%d, %d multiprocessors, driver for CUDA %d.%d)",
             p.name, p.major, p.minor, p.multiProcessorCount, driver / 1000, driver % 1000 / 10);
}

enum { MIN_MAJOR = 8 }; /* compute capability: bf16 on tensor cores, cp.async */

/* Refuses a GPU for which this build has no code: older than all targets, or newer and not
 * compatible. */
static enum status check_kernels(struct err *err)
{
    struct cudaDeviceProp p;
    cudaError_t e = device_query_has_kernels();
    if (e == cudaSuccess) return OK;
    if (e != cudaErrorNoKernelImageForDevice || cudaGetDeviceProperties(&p, 0) != cudaSuccess)
        return no_device(e, err);
    if (p.major < MIN_MAJOR)
        return err_set(err, ERR_UNSUPPORTED,
                       "%s has compute capability %d.%d, and the kernels need %d.0", p.name,
                       p.major, p.minor, MIN_MAJOR);
    return err_set(err, ERR_UNSUPPORTED,
                   "%s has compute capability %d.%d, and this build has kernels for %s alone; "
                   "build with -DCMAKE_CUDA_ARCHITECTURES=%d%d",
                   p.name, p.major, p.minor, BATON_CUDA_ARCHITECTURES, p.major, p.minor);
}

static enum status cuda_open(struct device **out, struct err *err)
{
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0) return no_device(e != cudaSuccess ? e : cudaErrorNoDevice, err);
    TRY(check_kernels(err));
    struct cuda_device *d = mem_try_calloc(1, sizeof *d);
    if (!d) return err_set(err, ERR_NOMEM, "no memory for the cuda device");
    d->base.ops = &device_cuda_ops;
    e = cudaSetDevice(0);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&d->n_multiprocessors, cudaDevAttrMultiProcessorCount, 0);
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking);
    for (size_t i = 0; i < DEVICE_EVENTS_MAX && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&d->events[i], cudaEventDisableTiming);
    if (e != cudaSuccess) {
        free_device(d);
        return no_device(e, err);
    }
    *out = &d->base;
    return OK;
}

static void cuda_close(struct device *device)
{
    struct cuda_device *d = cuda_device_of(device);
    (void)cudaStreamSynchronize(d->stream); /* closing waits for running work; a fault was reported
                                             * before */
    free_device(d);
}

/* ---- memory ---- */

static enum status no_memory(size_t bytes, cudaError_t e, struct err *err)
{
    size_t available = 0, total = 0;
    if (cudaMemGetInfo(&available, &total) != cudaSuccess) available = total = 0;
    return err_set(err, ERR_NOMEM,
                   "cannot get %zu MiB of GPU memory (%s; %zu of %zu MiB are free); a lower "
                   "--num-gpu-blocks-override or "
                   "--max-num-batched-tokens needs less",
                   bytes >> 20, cudaGetErrorString(e), available >> 20, total >> 20);
}

static enum status alloc_host(struct cuda_device *d, size_t bytes, struct dev_mem *out,
                              struct err *err)
{
    void *p = NULL;
    cudaError_t e = bytes > PTRDIFF_MAX ? cudaErrorMemoryAllocation
                                        : cudaHostAlloc(&p, bytes, cudaHostAllocDefault);
    if (e == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return err_set(err, ERR_NOMEM,
                       "cannot get %zu MiB of host memory for copies to and from the GPU; a lower "
                       "--num-gpu-blocks-override needs less memory",
                       bytes >> 20);
    }
    if (!cuda_check(d, e, "getting pinned memory")) return cuda_fault(&d->base, err);
    memset(p, 0, bytes);
    *out = (struct dev_mem){ .ptr = p, .bytes = bytes, .fd = -1, .kind = DEV_MEM_HOST };
    return OK;
}

/* Any allocation can be shared by cudaIpcGetMemHandle; by dma-buf only whole pages can. */
enum { SHARED_PAGE = 64 * 1024 };

static enum status cuda_alloc(struct device *device, size_t bytes, unsigned flags,
                              struct dev_mem *out, struct err *err)
{
    struct cuda_device *d = cuda_device_of(device);
    void *p = NULL;
    if (bytes == 0) return err_set(err, ERR_INVALID, "an allocation of 0 bytes was asked for");
    if (flags & DEVICE_MEM_HOST) return alloc_host(d, bytes, out, err);
    if ((flags & DEVICE_MEM_SHARED) && bytes < PTRDIFF_MAX)
        bytes = (bytes + SHARED_PAGE - 1) / SHARED_PAGE * SHARED_PAGE;
    cudaError_t e = bytes > PTRDIFF_MAX ? cudaErrorMemoryAllocation : cudaMalloc(&p, bytes);
    if (e == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); /* too little memory is not a fault of the GPU */
        return no_memory(bytes, e, err);
    }
    if (!cuda_check(d, e, "getting memory")) return cuda_fault(device, err);
    if (!cuda_check(d, cudaMemsetAsync(p, 0, bytes, d->stream), "clearing memory") ||
        !cuda_check(d, cudaStreamSynchronize(d->stream), "clearing memory")) {
        (void)cudaFree(p);
        return cuda_fault(device, err);
    }
    *out = (struct dev_mem){ .ptr = p, .bytes = bytes, .fd = -1, .kind = DEV_MEM_CUDA };
    atomic_fetch_add(&d->allocated, bytes);
    return OK;
}

static void cuda_release(struct device *device, struct dev_mem *m)
{
    if (m->kind == DEV_MEM_CUDA) atomic_fetch_sub(&cuda_device_of(device)->allocated, m->bytes);
    cudaError_t e = m->kind == DEV_MEM_HOST ? cudaFreeHost(m->ptr) : cudaFree(m->ptr);
    (void)cuda_check(cuda_device_of(device), e, "freeing memory");
}

static void cuda_upload(struct device *device, void *to, const void *from, size_t bytes)
{
    struct cuda_device *d = cuda_device_of(device);
    if (bytes == 0) return;
    if (cuda_check(d, cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, d->stream),
                   "a copy to the GPU"))
        (void)cuda_check(d, cudaStreamSynchronize(d->stream), "a copy to the GPU");
}

static void cuda_download(struct device *device, void *to, const void *from, size_t bytes)
{
    struct cuda_device *d = cuda_device_of(device);
    if (bytes > 0 &&
        !cuda_check(d, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, d->stream),
                    "a copy from the GPU"))
        return;
    (void)cuda_check(d, cudaStreamSynchronize(d->stream), "a step");
}

static size_t cuda_available(struct device *device)
{
    size_t available = 0, total = 0;
    return cuda_check(cuda_device_of(device), cudaMemGetInfo(&available, &total),
                      "asking for its memory")
               ? available
               : 0;
}

static size_t cuda_allocated(struct device *device)
{
    return atomic_load(&cuda_device_of(device)->allocated);
}

static size_t cuda_total(struct device *device)
{
    size_t available = 0, total = 0;
    return cuda_check(cuda_device_of(device), cudaMemGetInfo(&available, &total),
                      "asking for its memory")
               ? total
               : 0;
}

/* ---- sharing and events: errors here are the call's own, the device continues ---- */

static_assert(sizeof(cudaIpcMemHandle_t) == DEVICE_HANDLE_BYTES, "a handle is CUDA's");

static enum status cuda_export(struct device *device, const struct dev_mem *m,
                               uint8_t handle[DEVICE_HANDLE_BYTES], struct err *err)
{
    (void)device;
    cudaIpcMemHandle_t h;
    cudaError_t e = m->kind == DEV_MEM_CUDA ? cudaIpcGetMemHandle(&h, m->ptr)
                                            : cudaErrorInvalidValue;
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return err_set(err, ERR_NODEV, "the GPU's memory cannot be shared: %s",
                       cudaGetErrorString(e));
    }
    memcpy(handle, &h, sizeof h);
    return OK;
}

static enum status cuda_import(struct device *device, const uint8_t handle[DEVICE_HANDLE_BYTES],
                               void **out, struct err *err)
{
    (void)device;
    cudaIpcMemHandle_t h;
    void *p = NULL;
    memcpy(&h, handle, sizeof h);
    cudaError_t e = cudaIpcOpenMemHandle(&p, h, cudaIpcMemLazyEnablePeerAccess);
    if (e != cudaSuccess) {
        (void)cudaGetLastError(); /* its owner may be gone */
        return err_set(err, ERR_PEER_LOST, "the peer's GPU memory cannot be opened: %s",
                       cudaGetErrorString(e));
    }
    *out = p;
    return OK;
}

static void cuda_unimport(struct device *device, void *p)
{
    (void)device;
    /* the engine reports a failed device */
    if (cudaIpcCloseMemHandle(p) != cudaSuccess) (void)cudaGetLastError();
}

static uint64_t cuda_record_event(struct device *device)
{
    struct cuda_device *d = cuda_device_of(device);
    d->n_events++;
    (void)cuda_check(d, cudaEventRecord(d->events[d->n_events % DEVICE_EVENTS_MAX], d->stream),
                     "recording an event");
    return d->n_events;
}

static const struct device_sharing_ops SHARING = {
    .export_mem = cuda_export,
    .import_mem = cuda_import,
    .unimport_mem = cuda_unimport,
    .dmabuf = cuda_dmabuf,
    .flush_rdma_writes = cuda_flush_rdma,
};

const struct device_ops device_cuda_ops = {
    .name = "cuda",
    .open = cuda_open,
    .close = cuda_close,
    .alloc = cuda_alloc,
    .release = cuda_release,
    .upload = cuda_upload,
    .download = cuda_download,
    .fault = cuda_fault,
    .available = cuda_available,
    .total = cuda_total,
    .allocated = cuda_allocated,
    .count = cuda_device_count,
    .describe = cuda_describe,
    .record_event = cuda_record_event,
    .copy_stream = copy_stream_cuda_open,
    .sharing = &SHARING,
};
