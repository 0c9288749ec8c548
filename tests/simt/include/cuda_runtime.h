/* cuda_runtime.h - CUDA C++ for g++: qualifiers, the built-in variables, and the functions of
 * device code, on tests/simt.
 *
 * Kernels that include <cuda_runtime.h> compile with -I tests/simt/include and -I the root. For C
 * it is cuda_runtime_api.h. Atomics order memory here, which CUDA's do not. __expf and similar
 * functions have about the errors of a GPU's. */
#ifndef BATON_TESTS_SIMT_CUDA_RUNTIME_H
#define BATON_TESTS_SIMT_CUDA_RUNTIME_H

#include "tests/simt/include/cuda_runtime_api.h"

#ifdef __cplusplus
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tests/simt/include/simt.h"
#include "tests/simt/include/simt_vectors.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
/* The process runs one block at a time, so one copy is enough. For dynamic shared memory there is
 * simt_dynamic_shared. */
#define __shared__ static

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
static constexpr int warpSize = 32;

template <class T> static inline cudaError_t cudaMalloc(T **p, size_t bytes)
{
    return cudaMalloc((void **)p, bytes);
}
template <class T> static inline cudaError_t cudaMallocHost(T **p, size_t bytes, unsigned flags = 0)
{
    return cudaHostAlloc((void **)p, bytes, flags);
}
template <class T> static inline cudaError_t cudaHostAlloc(T **p, size_t bytes, unsigned flags)
{
    return cudaHostAlloc((void **)p, bytes, flags);
}
static inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event)
{
    return cudaStreamWaitEvent(stream, event, 0);
}
static inline cudaError_t cudaEventRecord(cudaEvent_t event)
{
    return cudaEventRecord(event, nullptr);
}
static inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph)
{
    return cudaGraphInstantiate(exec, graph, 0);
}
template <class... P>
static inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, void (*f)(P...))
{
    return cudaFuncGetAttributes(a, (const void *)f);
}
template <class... P>
static inline cudaError_t cudaFuncSetAttribute(void (*f)(P...), cudaFuncAttribute a, int v)
{
    return cudaFuncSetAttribute((const void *)f, a, v);
}
template <class... P>
static inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void (*f)(P...),
                                                                        int block, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(n, (const void *)f, block, shared);
}

#include "tests/simt/include/simt_atomics.h"
#include "tests/simt/include/simt_numbers.h"
#include "tests/simt/include/simt_warp.h"
#endif
#endif
