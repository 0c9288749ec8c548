/* ep_cuda.h - a row of ep.h on a card: its object, and what such rows share (ep_cuda.c). Thread: as
 * ep.h. */
#ifndef BATON_KERNELS_EP_EP_CUDA_H
#define BATON_KERNELS_EP_EP_CUDA_H

#include "kernels/cuda/device_cuda.h"
#include "kernels/ep/ep_backend.h"
#include "kernels/ep/ep_kernels.h"

struct ep_cuda {
    struct ep base; /* first */
    struct cuda_device *device;
    struct dev_mem window; /* zeroed; others write into it */
    struct dev_mem work;
    unsigned *fault;      /* pinned, written by kernels */
    int32_t *host_counts; /* [2 n_physical + 1]: of struct ep_counts, and what they are
                           * made from */
    size_t back_slots;    /* results that the window takes; 0: those of one rank's rows.
                           * It and call.direct are set before ep_cuda_init */
    struct ep_call call;
};

static inline struct ep_cuda *ep_cuda_of(struct ep *e) { return (struct ep_cuda *)e; }

/* Everything but the other ranks; `packed` as in ep_call. On failure ep_cuda_release frees what
 * there is. cuda is zeroed, from MEM_NEW or within a larger struct as its first member. */
enum status ep_cuda_init(struct ep_cuda *cuda, const struct ep_ops *ops, const struct ep_config *c,
                         bool packed, struct err *err) MUST_CHECK;
/* Frees the object too. No work of it is running. */
void ep_cuda_release(struct ep_cuda *cuda);

/* What a launch returned, as a status; the device keeps the first failure. */
enum status ep_cuda_check(struct ep_cuda *cuda, cudaError_t e, const char *what,
                          struct err *err) MUST_CHECK;
/* What kernels have told of the other ranks so far. */
enum status ep_cuda_fault(const struct ep_cuda *cuda, struct err *err) MUST_CHECK;
struct ep_batch ep_cuda_batch(const struct ep_cuda *cuda, size_t n_slots);

#endif
