/* gemm_device.cuh - how many SMs the current GPU has and how much shared memory, for the grids of
 * kernels whose blocks stay for several tiles. Thread: engine. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_DEVICE_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_DEVICE_CUH

#include "kernels/cuda/launch.cuh"

struct gemm_device {
    int n_sms;
    size_t shared_max, shared_of_sm; /* of a block; of an SM */
};

static inline gemm_device gemm_query_device()
{
    gemm_device d = { 1, 0, 0 };
    int ordinal, n_sms = 0, shared_max = 0, of_sm = 0;
    if (cudaGetDevice(&ordinal) == cudaSuccess &&
        cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, ordinal) == cudaSuccess &&
        cudaDeviceGetAttribute(&of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, ordinal) ==
            cudaSuccess &&
        cudaDeviceGetAttribute(&shared_max, cudaDevAttrMaxSharedMemoryPerBlockOptin, ordinal) ==
            cudaSuccess)
        d = gemm_device{ n_sms, (size_t)shared_max, (size_t)of_sm };
    return d;
}

static inline const gemm_device &gemm_this_device()
{
    static const gemm_device device = gemm_query_device();
    return device;
}

#endif
