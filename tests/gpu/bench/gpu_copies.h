/* gpu_copies.h - the kernel that copies KV in other shapes (kernels/cuda/kv/kv_copy.cuh). Thread:
 * main. */
#ifndef BATON_TESTS_GPU_BENCH_GPU_COPIES_H
#define BATON_TESTS_GPU_BENCH_GPU_COPIES_H

#include <cuda_runtime_api.h>
#include <stdio.h>

#include "kernels/copy_stream.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { GPU_COPIES_MAX = 1024 };

int gpu_copies_n_shapes(void);
/* At most GPU_COPIES_MAX copies by one launch. */
cudaError_t gpu_copies_run(int shape, cudaStream_t stream, const struct copy_stream_pair *copies,
                           uint32_t n, int n_multiprocessors);
void gpu_copies_name(int shape, char *out, size_t cap);

#ifdef __cplusplus
}
#endif
#endif
