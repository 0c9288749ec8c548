/* moe_route.h - which experts each row goes to, and rows sorted by expert, on the GPU; kernels.h
 * defines the results.
 *
 * All pointers are to device memory. A call enqueues work on the stream and returns. Thread:
 * engine. */
#ifndef BATON_KERNELS_CUDA_MOE_ROUTE_H
#define BATON_KERNELS_CUDA_MOE_ROUTE_H

#include <cuda_runtime_api.h>

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* With rows, index and begin it also does the work of moe_sort_rows. */
cudaError_t moe_route(cudaStream_t s, const struct route_args *a, const int32_t *n_real_rows);
/* Sorts slots by expert, and within an expert by row: fills rows, index and begin of an experts
 * call. `n_real_rows`, in device memory: later rows get no slots; NULL: all rows are real. */
cudaError_t moe_sort_rows(cudaStream_t s, const struct experts_args *a, const int32_t *n_real_rows);

/* The product of a router with many rows of h by tensor cores, to the precision of f32 and with
 * bits of its own. moe_logits_fits: it is faster. */
bool moe_logits_fits(const struct router_args *a);
cudaError_t moe_logits(cudaStream_t s, const struct router_args *a);

/* Whether moe_router takes a call: few rows. */
bool moe_router_fits(const struct router_args *a);
enum { MOE_ROUTER_SCRATCH = 256 /* bytes; zeroed once, calls leave them so */ };
cudaError_t moe_router(cudaStream_t s, const struct router_args *a, const int32_t *n_real_rows,
                       void *scratch);

#ifdef __cplusplus
}
#endif
#endif
