/* ep_cuda.h - a backend of ep.h on a GPU: its object, and what such backends share (ep_cuda.c).
 * Thread: as ep.h. */
#ifndef BATON_KERNELS_EP_EP_CUDA_H
#define BATON_KERNELS_EP_EP_CUDA_H

#include "kernels/cuda/device_cuda.h"
#include "kernels/ep/ep_backend.h"
#include "kernels/ep/ep_kernels.h"

struct ep_cuda {
    struct ep base; /* first */
    struct cuda_device *device;
    struct dev_mem window; /* zeroed; other ranks write into it */
    struct dev_mem work;
    struct dev_mem
        columns;          /* not direct: one rank's part of ep_gather_columns, then those of all */
    unsigned *fault;      /* pinned: [0] is written by kernels, [1] by ep_abort */
    int32_t *host_counts; /* [2 n_physical + 1]: of struct ep_counts, and their source */
    size_t back_slots;    /* results that fit the window; 0: those of one rank's rows.
                           * Set it and call.direct before ep_cuda_init */
    struct ep_call call;
};

static inline struct ep_cuda *ep_cuda_of(struct ep *e) { return (struct ep_cuda *)e; }

/* Initialises everything except the handshake; `packed` as in ep_call. On failure ep_cuda_release
 * frees what was allocated. `cuda` is zeroed, from MEM_NEW or the first member of a larger
 * struct. */
enum status ep_cuda_init(struct ep_cuda *cuda, const struct ep_ops *ops, const struct ep_config *c,
                         bool packed, struct err *err) MUST_CHECK;
/* Frees the object too. None of its work may be running. */
void ep_cuda_release(struct ep_cuda *cuda);

/* The result of a launch as a status; the device keeps the first failure. */
enum status ep_cuda_check(struct ep_cuda *cuda, cudaError_t e, const char *what,
                          struct err *err) MUST_CHECK;
/* The fault that kernels have reported of other ranks so far. */
enum status ep_cuda_fault(const struct ep_cuda *cuda, struct err *err) MUST_CHECK;
/* Of struct ep_ops, not direct. */
enum status ep_cuda_gather_columns(struct ep *e, const struct ep_columns *a,
                                   struct err *err) MUST_CHECK;
/* Makes kernels that wait for other ranks end. */
void ep_cuda_abort(struct ep *e);
struct ep_batch ep_cuda_batch(const struct ep_cuda *cuda, size_t n_slots);

#endif
