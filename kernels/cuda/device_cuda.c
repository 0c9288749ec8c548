/* device_cuda.c - one card: memory by cudaMalloc, a stream, faults.
 *
 * Which card it is says CUDA_VISIBLE_DEVICES: a rank has one, the first it sees. Source: CUDA Runtime API. */
#include "kernels/cuda/device_cuda.h"

#include <stdint.h>

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
    err_set(&d->fault, ERR_NODEV, "the GPU failed in %s: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
    log_error("the GPU failed", "what=%s error=%s", what, cudaGetErrorName(e));
    return false;
}

static enum status cuda_fault(struct device *device, struct err *err)
{
    const struct cuda_device *d = cuda_device_of(device);
    if (d->fault.code != OK && err) *err = d->fault;
    return d->fault.code;
}

/* ---- life -------------------------------------------------------------------------------------------------------- */

static enum status no_card(cudaError_t e, struct err *err)
{
    return err_set(err, ERR_NODEV, "there is no CUDA device to use: %s", cudaGetErrorString(e));
}

static enum status cuda_open(struct device **out, struct err *err)
{
    int         n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0) return no_card(e != cudaSuccess ? e : cudaErrorNoDevice, err);
    struct cuda_device *d = mem_try_calloc(1, sizeof *d);
    if (!d) return err_set(err, ERR_NOMEM, "no memory for the cuda device");
    d->base.ops = &device_cuda_ops;
    e = cudaSetDevice(0);
    if (e == cudaSuccess) e = cudaDeviceGetAttribute(&d->n_multiprocessors, cudaDevAttrMultiProcessorCount, 0);
    if (e == cudaSuccess) e = cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking);
    if (e != cudaSuccess) {
        mem_free(d);
        return no_card(e, err);
    }
    *out = &d->base;
    return OK;
}

static void cuda_close(struct device *device)
{
    struct cuda_device *d = cuda_device_of(device);
    (void)cudaStreamSynchronize(d->stream); /* whoever closes wants what was begun to be over; a fault was told before */
    (void)cudaStreamDestroy(d->stream);
    mem_free(d);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static enum status no_memory(size_t bytes, cudaError_t e, struct err *err)
{
    size_t available = 0, total = 0;
    if (cudaMemGetInfo(&available, &total) != cudaSuccess) available = total = 0;
    return err_set(err, ERR_NOMEM, "cannot get %zu MiB of GPU memory (%s; %zu of %zu MiB are free); a lower --num-gpu-blocks-override or "
                   "--max-num-batched-tokens needs less", bytes >> 20, cudaGetErrorString(e), available >> 20, total >> 20);
}

static enum status cuda_alloc(struct device *device, size_t bytes, unsigned flags, struct dev_mem *out, struct err *err)
{
    struct cuda_device *d = cuda_device_of(device);
    void               *p = NULL;
    (void)flags; /* any allocation can be exported: cudaIpcGetMemHandle */
    if (bytes == 0) return err_set(err, ERR_INVALID, "an allocation of 0 bytes was asked for");
    cudaError_t e = bytes > PTRDIFF_MAX ? cudaErrorMemoryAllocation : cudaMalloc(&p, bytes);
    if (e == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError(); /* too little memory is no fault of the card */
        return no_memory(bytes, e, err);
    }
    if (!cuda_check(d, e, "getting memory")) return cuda_fault(device, err);
    if (!cuda_check(d, cudaMemsetAsync(p, 0, bytes, d->stream), "clearing memory") ||
        !cuda_check(d, cudaStreamSynchronize(d->stream), "clearing memory")) {
        (void)cudaFree(p);
        return cuda_fault(device, err);
    }
    *out = (struct dev_mem){ .ptr = p, .bytes = bytes, .fd = -1, .kind = DEV_MEM_CUDA };
    return OK;
}

static void cuda_release(struct device *device, struct dev_mem *m) { (void)cuda_check(cuda_device_of(device), cudaFree(m->ptr), "freeing memory"); }

static void cuda_upload(struct device *device, void *to, const void *from, size_t bytes)
{
    struct cuda_device *d = cuda_device_of(device);
    if (bytes == 0) return;
    if (cuda_check(d, cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, d->stream), "a copy to the GPU"))
        (void)cuda_check(d, cudaStreamSynchronize(d->stream), "a copy to the GPU");
}

static void cuda_download(struct device *device, void *to, const void *from, size_t bytes)
{
    struct cuda_device *d = cuda_device_of(device);
    if (bytes > 0 && !cuda_check(d, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, d->stream), "a copy from the GPU")) return;
    (void)cuda_check(d, cudaStreamSynchronize(d->stream), "a step");
}

static size_t cuda_available(struct device *device)
{
    size_t available = 0, total = 0;
    return cuda_check(cuda_device_of(device), cudaMemGetInfo(&available, &total), "asking for its memory") ? available : 0;
}

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
    .count = cuda_device_count,
};
