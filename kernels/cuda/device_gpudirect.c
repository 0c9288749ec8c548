/* device_gpudirect.c - GPU memory for NICs (GPUDirect RDMA): dma-buf descriptors, and making a
 * NIC's writes visible.
 *
 * Both use the driver's own interface (libcuda.so.1), which the runtime does not offer; it is
 * opened when a descriptor is first requested, so that nothing else depends on it. Compiled and not
 * yet run on a GPU. Source: CUDA Driver API, cuMemGetHandleForAddressRange,
 * cuFlushGPUDirectRDMAWrites and CUdevice_attribute; GPUDirect RDMA guide. Thread: loop at start;
 * the flush: transfer. */
#include <dlfcn.h>
#include <unistd.h>

#include "kernels/cuda/device_cuda.h"

enum { /* of the driver's enums */
       ATTRIBUTE_FLUSH_OPTIONS = 117,
       ATTRIBUTE_WRITES_ORDERING = 118,
       ATTRIBUTE_DMA_BUF = 124,
       FLUSH_BY_HOST = 1,
       ORDERING_OWNER = 100,
       RANGE_DMA_BUF_FD = 1,
       FLUSH_CURRENT_DEVICE = 0,
       FLUSH_TO_OWNER = 100
};

/* Looks up a driver function; a function pointer is not an object pointer in C, hence the copy. */
static bool find(void *library, const char *name, void *function, size_t size)
{
    void *p = dlsym(library, name);
    if (p) __builtin_memcpy(function, &p, size);
    return p != NULL;
}

static enum status cannot(struct err *err, const char *why)
{
    return err_set(err, ERR_UNSUPPORTED, "NICs cannot write into this GPU's memory: %s", why);
}

/* Finds out what the GPU needs after a NIC's writes: nothing, or a flush by the host. */
static enum status choose_flush(struct cuda_device *d, void *driver, struct err *err)
{
    int (*attribute)(int *value, int attribute, int device);
    int dma_buf = 0, ordering = 0, options = 0;
    if (!find(driver, "cuDeviceGetAttribute", &attribute, sizeof attribute))
        return cannot(err, "the driver is too old");
    if (attribute(&dma_buf, ATTRIBUTE_DMA_BUF, 0) != 0 || !dma_buf)
        return cannot(
            err,
            "the driver gives no dma-buf (Linux 5.12 or later and the open kernel modules do)");
    if (attribute(&ordering, ATTRIBUTE_WRITES_ORDERING, 0) == 0 && ordering >= ORDERING_OWNER)
        return OK;
    if (attribute(&options, ATTRIBUTE_FLUSH_OPTIONS, 0) != 0 || !(options & FLUSH_BY_HOST) ||
        !find(driver, "cuFlushGPUDirectRDMAWrites", &d->flush_rdma_writes,
              sizeof d->flush_rdma_writes))
        return cannot(err, "what they wrote cannot be made visible to it");
    return OK;
}

enum status cuda_dmabuf(struct device *device, const struct dev_mem *m, int *fd, struct err *err)
{
    struct cuda_device *d = cuda_device_of(device);
    int (*get_handle)(void *handle, unsigned long long at, size_t bytes, int kind,
                      unsigned long long flags);
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    int made = -1;
    if (m->kind != DEV_MEM_CUDA || (uintptr_t)m->ptr % page || m->bytes % page)
        return cannot(err, "it is not whole pages of GPU memory");
    /* stays open: the runtime has it open too */
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) return cannot(err, "there is no libcuda.so.1");
    if (!find(driver, "cuMemGetHandleForAddressRange", &get_handle, sizeof get_handle))
        return cannot(err, "the driver is older than CUDA 11.7");
    enum status st = choose_flush(d, driver, err);
    if (st != OK) return st;
    if (get_handle(&made, (uintptr_t)m->ptr, m->bytes, RANGE_DMA_BUF_FD, 0) != 0)
        return cannot(err, "the driver makes no dma-buf of this memory");
    *fd = made;
    return OK;
}

enum status cuda_flush_rdma(struct device *device)
{
    const struct cuda_device *d = cuda_device_of(device);
    return !d->flush_rdma_writes || d->flush_rdma_writes(FLUSH_CURRENT_DEVICE, FLUSH_TO_OWNER) == 0
               ? OK
               : ERR_NODEV;
}
