/* launch.cuh - how kernels are launched, and the instructions that CUDA C has no name for.
 *
 * nvcc compiles the kernels for GPUs; a C++ compiler compiles the same files for the emulated GPU
 * of the tests. What differs between the two is in launch_target.cuh and, for features of compute
 * capability 9.0, in sm90_target.cuh. Both have one of each, and the include path chooses; those
 * for nvcc are in kernels/cuda/nvcc. Thread: host, one per stream. */
#ifndef BATON_KERNELS_CUDA_LAUNCH_CUH
#define BATON_KERNELS_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/device_query.h"

enum { WARP = 32 };
/* more dynamic shared memory must be requested: the default is 48 KiB with static memory */
enum { SHARED_USUAL = 40 * 1024 };

#include <launch_target.cuh>

static inline unsigned blocks_for(size_t n, size_t per_block)
{
    return (unsigned)((n + per_block - 1) / per_block);
}

#endif
