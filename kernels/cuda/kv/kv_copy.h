/* kv_copy.h - many copies within and between GPUs' memory by one launch. Thread: one per stream,
 * any. */
#ifndef BATON_KERNELS_CUDA_KV_KV_COPY_H
#define BATON_KERNELS_CUDA_KV_KV_COPY_H

#include <cuda_runtime_api.h>

#include "kernels/copy_stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies ranges that do not overlap, in any order, with as many blocks as the GPU's multiprocessors
 * hold. Reads `copies`, in host memory, before it returns. Enqueues work on the stream. */
cudaError_t kv_copy_run(cudaStream_t stream, const struct copy_stream_pair *copies, uint32_t n,
                        int n_multiprocessors);

#ifdef __cplusplus
}
#endif
#endif
