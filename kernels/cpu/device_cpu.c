/* device_cpu.c - host memory as a device: private pages, or a memfd that another process may map.
 *
 * A memfd has no name in any file system, so nothing is left however the process ends; its pages
 * are allocated when they are first touched. Its size is sealed: a peer with the descriptor cannot
 * shrink it. Thread: loop at start. */
#include "kernels/cpu/device_cpu.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/host/host_memory.h"
#include "kernels/host/pages.h"
#include "shared/base/mem.h"

static enum status cpu_open(struct device **out, struct err *err)
{
    struct device *d = mem_try_calloc(1, sizeof *d);
    if (!d) return err_set(err, ERR_NOMEM, "no memory for the cpu device");
    d->ops = &device_cpu_ops;
    d->is_host = true;
    *out = d;
    return OK;
}

static void cpu_close(struct device *d) { mem_free(d); }

static enum status no_memory(size_t bytes, int code, struct err *err)
{
    return err_set(
        err, ERR_NOMEM,
        "cannot get %zu MiB of memory (%s); a lower --num-gpu-blocks-override needs less",
        bytes >> 20, strerror(code));
}

static enum status alloc_shared(size_t bytes, struct dev_mem *out, struct err *err)
{
    int fd = memfd_create("baton", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return no_memory(bytes, errno, err);
    void *p = MAP_FAILED;
    if (ftruncate(fd, (off_t)bytes) == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
        int code = errno;
        close(fd);
        return no_memory(bytes, code, err);
    }
    (void)madvise(p, bytes, MADV_HUGEPAGE); /* if allowed for shared memory: scattered blocks
                                             * miss the TLB less */
    *out = (struct dev_mem){ .ptr = p, .bytes = bytes, .fd = fd };
    return OK;
}

static enum status cpu_alloc(struct device *d, size_t bytes, unsigned flags, struct dev_mem *out,
                             struct err *err)
{
    (void)d;
    size_t rounded = pages_round(bytes);
    if (bytes == 0) return err_set(err, ERR_INVALID, "an allocation of 0 bytes was asked for");
    if (rounded == 0 || rounded > PTRDIFF_MAX) return no_memory(bytes, ENOMEM, err);
    if (flags & DEVICE_MEM_SHARED) return alloc_shared(rounded, out, err);
    void *p = pages_map(rounded);
    if (!p) return no_memory(rounded, errno, err);
    *out = (struct dev_mem){ .ptr = p, .bytes = rounded, .fd = -1 };
    return OK;
}

static void cpu_release(struct device *d, struct dev_mem *m)
{
    (void)d;
    if (m->ptr) munmap(m->ptr, m->bytes);
    if (m->fd >= 0) close(m->fd);
}

static void cpu_copy(struct device *d, void *to, const void *from, size_t bytes)
{
    (void)d;
    if (to != from && bytes > 0) memcpy(to, from, bytes);
}

static enum status cpu_fault(struct device *d, struct err *err)
{
    (void)d, (void)err;
    return OK;
}

static size_t cpu_available(struct device *d)
{
    (void)d;
    return (size_t)host_memory_available();
}

static size_t cpu_total(struct device *d)
{
    (void)d;
    return (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

static int cpu_count(void) { return 1; }

static enum status cpu_export(struct device *d, const struct dev_mem *m,
                              uint8_t handle[DEVICE_HANDLE_BYTES], struct err *err)
{
    (void)d, (void)m, (void)handle;
    return err_set(err, ERR_UNSUPPORTED, "CPU memory is shared by its descriptor, not by a handle");
}

static enum status cpu_import(struct device *d, const uint8_t handle[DEVICE_HANDLE_BYTES],
                              void **out, struct err *err)
{
    (void)d, (void)handle, (void)out;
    return err_set(err, ERR_UNSUPPORTED, "CPU memory is shared by its descriptor, not by a handle");
}

static void cpu_unimport(struct device *d, void *p) { (void)d, (void)p; }

static enum status cpu_dmabuf(struct device *d, const struct dev_mem *m, int *fd, struct err *err)
{
    (void)d, (void)m, (void)fd;
    return err_set(err, ERR_UNSUPPORTED, "NICs reach CPU memory by its address");
}

static enum status cpu_flush_rdma_writes(struct device *d)
{
    (void)d;
    return OK;
}

static uint64_t cpu_record_event(struct device *d)
{
    (void)d;
    return 0;
}

static size_t cpu_allocated(struct device *d)
{
    (void)d;
    return 0;
}

static void cpu_describe(struct device *d, char *out, size_t cap)
{
    (void)d;
    snprintf(out, cap, "the CPU");
}

static const struct device_sharing_ops SHARING = {
    .export_mem = cpu_export,
    .import_mem = cpu_import,
    .unimport_mem = cpu_unimport,
    .dmabuf = cpu_dmabuf,
    .flush_rdma_writes = cpu_flush_rdma_writes,
};

const struct device_ops device_cpu_ops = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .alloc = cpu_alloc,
    .release = cpu_release,
    .upload = cpu_copy,
    .download = cpu_copy,
    .fault = cpu_fault,
    .available = cpu_available,
    .total = cpu_total,
    .allocated = cpu_allocated,
    .count = cpu_count,
    .describe = cpu_describe,
    .record_event = cpu_record_event,
    .copy_stream = copy_stream_cpu_open,
    .sharing = &SHARING,
};
