/* kv_checksum.h - XXH3 (64 bit, no seed) of pieces of device memory, bit for bit as hash_64.
 * Thread: one per stream, any. */
#ifndef BATON_KERNELS_CUDA_KV_KV_CHECKSUM_H
#define BATON_KERNELS_CUDA_KV_KV_CHECKSUM_H

#include <cuda_runtime_api.h>

#include "kernels/copy_stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Computes sums[i] of pieces[i] and copies those that say where to; the GPU can access both arrays.
 * Takes at most so many multiprocessors. Enqueues work on the stream and returns. */
cudaError_t kv_checksum_run(cudaStream_t stream, const struct copy_stream_checksum_range *pieces,
                            uint32_t n, uint64_t *sums, int n_multiprocessors);

#ifdef __cplusplus
}
#endif
#endif
