/* device_case.h - what tests of kernels share: the harness for C++, CUDA calls that must succeed,
 * and device memory. Empty for C. */
#ifndef BATON_TESTS_CUDA_DEVICE_CASE_H
#define BATON_TESTS_CUDA_DEVICE_CASE_H

#ifdef __cplusplus
#include <cuda_runtime.h>

#include <vector>

#define _Noreturn [[noreturn]]
extern "C" {
#include "tests/harness/test.h"
}

#define GOOD(call) CHECK_EQ_INT(call, cudaSuccess)

static const unsigned char GUARD = 0xa5;

/* Skips the case if there is no GPU, real or emulated. Called at its beginning. */
static inline void need_gpu()
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0)
        SKIP("no CUDA GPU, and no emulated one in this build: the kernels were NOT run");
}

/* Device memory that is freed at the end of the case. */
struct device_bytes {
    void *p = nullptr;
    device_bytes(const void *from, size_t n)
    {
        GOOD(cudaMalloc(&p, n ? n : 1));
        if (n) GOOD(cudaMemcpy(p, from, n, cudaMemcpyHostToDevice));
    }
    template <class T>
    explicit device_bytes(const std::vector<T> &v) : device_bytes(v.data(), v.size() * sizeof(T))
    {}
    ~device_bytes() { cudaFree(p); }
    device_bytes(const device_bytes &) = delete;
};
#endif
#endif
