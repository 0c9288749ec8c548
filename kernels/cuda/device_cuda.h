/* device_cuda.h - a GPU as a device: memory, one stream on which all work of a context runs in
 * order, events in that stream, and the first fault.
 *
 * A call that fails on the GPU leaves its context broken (CUDA calls such errors sticky). So the
 * first failure is kept with what was being done, later ones are ignored, and device_fault tells
 * the engine, which ends the rank. Life cycle: struct device. Events form a ring: the engine
 * records them, copy streams of other threads wait for them. A reused event stands for a later
 * point of the same stream, so waiting for an old one waits longer, never too short. Thread:
 * loading, then engine; memory and waiting for events: any (CUDA runtime calls may be mixed). */
#ifndef BATON_KERNELS_CUDA_DEVICE_CUDA_H
#define BATON_KERNELS_CUDA_DEVICE_CUDA_H

#include <cuda_runtime_api.h>
#include <stdatomic.h>

#include "kernels/device.h"

struct cuda_device {
    struct device base;
    cudaStream_t stream;
    struct err fault; /* the first; code OK: none */
    int n_multiprocessors;
    atomic_size_t allocated; /* bytes of GPU memory in use */
    /* the driver's function; NULL: not needed. Set at start (device_gpudirect.c) */
    int (*flush_rdma_writes)(int target, int scope);
    cudaEvent_t events[DEVICE_EVENTS_MAX]; /* created at open */
    uint64_t n_events; /* the engine's: event m is events[m % DEVICE_EVENTS_MAX], m from 1 on */
};

extern const struct device_ops device_cuda_ops;

/* The number of GPUs that this process may use; 0 also without a driver. */
int cuda_device_count(void);
/* Keeps the first error, with what was being done ("attention"). True: there was none. */
bool cuda_check(struct cuda_device *d, cudaError_t e, const char *what);

/* device_gpudirect.c */
enum status cuda_dmabuf(struct device *d, const struct dev_mem *m, int *fd,
                        struct err *err) MUST_CHECK;
enum status cuda_flush_rdma(struct device *d) MUST_CHECK;

/* copy_stream_cuda.c */
enum status copy_stream_cuda_open(struct device *d, struct copy_stream **out,
                                  struct err *err) MUST_CHECK;

static inline struct cuda_device *cuda_device_of(struct device *d)
{
    return (struct cuda_device *)d;
}

#endif
