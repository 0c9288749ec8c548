/* gpu_kernels.h - kernels for measuring only. Calls launch on the stream and return. Thread: main.
 */
#ifndef BATON_TESTS_GPU_BENCH_GPU_KERNELS_H
#define BATON_TESTS_GPU_BENCH_GPU_KERNELS_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Reads `bytes`, a multiple of 16, once. Something is stored to sink only for one value in 2^64. */
cudaError_t gpu_read(cudaStream_t stream, const void *from, size_t bytes, unsigned long long *sink);
/* Fills memory with n random numbers between -1 and 1, in bf16 or in f32. Never measure with zeros,
 * for which a GPU draws less power and clocks higher. */
cudaError_t gpu_fill_bf16(cudaStream_t stream, void *to, size_t n, uint32_t seed);
cudaError_t gpu_fill_f32(cudaStream_t stream, float *to, size_t n, uint32_t seed);
/* Keeps the stream busy for that many cycles of a multiprocessor's clock. */
cudaError_t gpu_hold(cudaStream_t stream, int64_t cycles);
/* Launches an empty kernel. */
cudaError_t gpu_nothing(cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
