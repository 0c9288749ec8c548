/* kv_copy.h - many copies between places in the memory of cards by one launch. Thread: one per
 * stream, any. */
#ifndef BATON_KERNELS_CUDA_KV_KV_COPY_H
#define BATON_KERNELS_CUDA_KV_KV_COPY_H

#include <cuda_runtime_api.h>

#include "kernels/copy_stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies that do not overlap each other, in no order among themselves. `copies` is the host's and
 * read before this returns. Puts work on the stream. */
cudaError_t kv_copy_run(cudaStream_t stream, const struct copy_stream_pair *copies, uint32_t n);

#ifdef __cplusplus
}
#endif
#endif
