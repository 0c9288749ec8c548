/* sm90.cuh - features of compute capability 9.0 that CUDA C has no name for: barriers in shared
 * memory, warpgroup products (wgmma).
 *
 * sm90_target.cuh, which the include path chooses as in launch.cuh, has the instructions and two
 * macros. SM90_CODE: this compilation may use them, for sm_90a or for the emulated GPU. Other
 * passes of nvcc see no function of theirs; a kernel has a body that traps there, and SM90_BOUND in
 * its __launch_bounds__ lets the host find out that the GPU would run that body (has_sm90_code).
 * Source: the PTX ISA on mbarrier, wgmma and proxies. Thread: device, except has_sm90_code. */
#ifndef BATON_KERNELS_CUDA_GEMM_SM90_CUH
#define BATON_KERNELS_CUDA_GEMM_SM90_CUH

#include "kernels/cuda/launch.cuh"

enum { WARPGROUP = 128 };

/* An operand of wgmma in shared memory: rows of 128 bytes, close to each other, from a multiple of
 * 1,024 on, 16-byte pieces i of row r at piece i ^ r % 8: the 128-byte swizzle (bits 62-63: 1).
 * Eight rows are an atom, atoms are 1,024 bytes apart (bits 32-45, in units of 16); the leading
 * offset (bits 16-29) means nothing with this swizzle, and is 1 as is usual. Steps of 32 bytes of k
 * add 2 to the address (bits 0-13). */
enum { WGMMA_K_STEP = 2 /* of a descriptor, from 32 bytes of k to the next */ };
static __device__ __forceinline__ uint64_t wgmma_descriptor(unsigned address)
{
    return (uint64_t)((address & 0x3ffffu) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* B of a product with k in rows: row k of 64 columns (128 bytes, swizzled the same way) is the k-th
 * one; eight rows are an atom, atoms of the same columns follow each other, and the next 64 columns
 * are `next` bytes on (bits 16-29). Steps of 16 k add WGMMA_ROWS_STEP. */
enum { WGMMA_ROWS_STEP = 2048 / 16 };
static __device__ __forceinline__ uint64_t wgmma_rows_descriptor(unsigned address, unsigned next)
{
    return (uint64_t)((address & 0x3ffffu) >> 4) | (uint64_t)(next >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

/* A tensor map's strides are below, in bytes. */
static const size_t TENSOR_MAP_STRIDE_END = (size_t)1 << 40;

#include <sm90_target.cuh>

#endif
