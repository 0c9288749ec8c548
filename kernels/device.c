/* device.c - the kinds of device, and the calls that go through their tables. Thread: loop at
 * start. */
#include "kernels/device.h"

#include <string.h>

#include "kernels/copy_stream.h"
#include "kernels/cpu/device_cpu.h"
#ifdef BATON_HAVE_CUDA_KERNELS
#include "kernels/cuda/device_cuda.h"
#endif
#include "shared/base/mem.h"

static const struct device_ops *const DEVICES[] = {
    &device_cpu_ops,
#ifdef BATON_HAVE_CUDA_KERNELS
    &device_cuda_ops,
#endif
};

enum status device_open(const char *name, struct device **out, struct err *err)
{
    for (size_t i = 0; i < COUNT_OF(DEVICES); i++)
        if (strcmp(DEVICES[i]->name, name) == 0) return DEVICES[i]->open(out, err);
    return err_set(err, ERR_UNSUPPORTED, "this build has no device \"%s\"; it has: cpu%s", name,
                   COUNT_OF(DEVICES) > 1
                       ? ", cuda"
                       : " (-DBATON_CUDA=on builds kernels for GPUs, docs/gpu.md)");
}

int device_count(const char *name)
{
    for (size_t i = 0; i < COUNT_OF(DEVICES); i++)
        if (strcmp(DEVICES[i]->name, name) == 0) return DEVICES[i]->count();
    return 0;
}

void device_close(struct device *d)
{
    if (d) d->ops->close(d);
}

enum status device_mem_alloc(struct device *d, size_t bytes, unsigned flags, struct dev_mem *out,
                             struct err *err)
{
    return d->ops->alloc(d, bytes, flags, out, err);
}

void device_mem_free(struct device *d, struct dev_mem *m)
{
    if (!m || !m->ptr) return;
    d->ops->release(d, m);
    *m = (struct dev_mem){ .fd = -1 };
}

void device_upload(struct device *d, void *to, const void *from, size_t bytes)
{
    d->ops->upload(d, to, from, bytes);
}

void device_download(struct device *d, void *to, const void *from, size_t bytes)
{
    d->ops->download(d, to, from, bytes);
}

void device_wait(struct device *d) { d->ops->download(d, NULL, NULL, 0); }

enum status device_fault(struct device *d, struct err *err) { return d->ops->fault(d, err); }

size_t device_available(struct device *d) { return d->ops->available(d); }

size_t device_total(struct device *d) { return d->ops->total(d); }

size_t device_allocated(struct device *d) { return d->ops->allocated(d); }

void device_describe(struct device *d, char *out, size_t cap) { d->ops->describe(d, out, cap); }

enum status device_mem_export(struct device *d, const struct dev_mem *m,
                              uint8_t handle[DEVICE_HANDLE_BYTES], struct err *err)
{
    return d->ops->sharing->export_mem(d, m, handle, err);
}

enum status device_mem_import(struct device *d, const uint8_t handle[DEVICE_HANDLE_BYTES],
                              void **out, struct err *err)
{
    return d->ops->sharing->import_mem(d, handle, out, err);
}

void device_mem_unimport(struct device *d, void *p) { d->ops->sharing->unimport_mem(d, p); }

enum status device_mem_dmabuf(struct device *d, const struct dev_mem *m, int *fd, struct err *err)
{
    return d->ops->sharing->dmabuf(d, m, fd, err);
}

enum status device_flush_rdma_writes(struct device *d)
{
    return d->ops->sharing->flush_rdma_writes(d);
}

uint64_t device_record_event(struct device *d) { return d->ops->record_event(d); }

enum status device_copy_stream(struct device *d, struct copy_stream **out, struct err *err)
{
    return d->ops->copy_stream(d, out, err);
}

/* ---- copy streams ---- */

void copy_stream_close(struct copy_stream *s)
{
    if (s) s->ops->close(s);
}

enum status copy_stream_wait_event(struct copy_stream *s, uint64_t event)
{
    return event ? s->ops->wait_event(s, event) : OK;
}

enum status copy_stream_copy(struct copy_stream *s, const struct copy_stream_strided *c)
{
    return s->ops->copy(s, c);
}

enum status copy_stream_gather(struct copy_stream *s, const struct copy_stream_pair *pairs,
                               uint32_t n)
{
    return s->ops->gather(s, pairs, n);
}

enum status copy_stream_convert(struct copy_stream *s, const struct copy_stream_conversion *c)
{
    return s->ops->convert(s, c);
}

enum status copy_stream_checksum(struct copy_stream *s,
                                 const struct copy_stream_checksum_range *pieces, uint32_t n,
                                 uint64_t *out)
{
    return s->ops->checksum(s, pieces, n, out);
}

enum status copy_stream_launch_host_fn(struct copy_stream *s, void (*fn)(void *arg), void *arg)
{
    return s->ops->launch_host_fn(s, fn, arg);
}

enum status copy_stream_synchronize(struct copy_stream *s) { return s->ops->synchronize(s); }
