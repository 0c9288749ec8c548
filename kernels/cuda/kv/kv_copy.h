/* kv_copy.h - many copies within and between GPUs' memory by one launch. Thread: one per stream,
 * any. */
#ifndef BATON_KERNELS_CUDA_KV_KV_COPY_H
#define BATON_KERNELS_CUDA_KV_KV_COPY_H

#include <cuda_runtime_api.h>

#include "kernels/copy_stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies ranges that do not overlap, in any order. Reads `copies`, in host memory, before it
 * returns. Enqueues work on the stream. */
cudaError_t kv_copy_run(cudaStream_t stream, const struct copy_stream_pair *copies, uint32_t n);

#ifdef __cplusplus
}
#endif
#endif
