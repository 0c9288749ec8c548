/* kv_convert.h - rows of KV of one type as rows of another, by one launch for many places. Thread:
 * one per stream, any. */
#ifndef BATON_KERNELS_CUDA_KV_KV_CONVERT_H
#define BATON_KERNELS_CUDA_KV_KV_CONVERT_H

#include <cuda_runtime_api.h>

#include "kernels/copy_stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* copy_stream_convert (copy_stream.h). `c` is the host's and read before this returns. Puts work on
 * the stream. */
cudaError_t kv_convert_run(cudaStream_t stream, const struct copy_stream_conversion *c);

#ifdef __cplusplus
}
#endif
#endif
