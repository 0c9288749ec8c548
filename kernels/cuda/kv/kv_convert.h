/* kv_convert.h - converts rows of KV from one type to another, many groups per launch.
 * Thread: one per stream, any. */
#ifndef BATON_KERNELS_CUDA_KV_KV_CONVERT_H
#define BATON_KERNELS_CUDA_KV_KV_CONVERT_H

#include <cuda_runtime_api.h>

#include "kernels/copy_stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Implements copy_stream_convert (copy_stream.h). Reads `c`, in host memory, before it returns.
 * Enqueues work on the stream. */
cudaError_t kv_convert_run(cudaStream_t stream, const struct copy_stream_conversion *c);

#ifdef __cplusplus
}
#endif
#endif
