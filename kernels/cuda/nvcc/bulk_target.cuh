/* bulk_target.cuh - bulk copies of compute capability 9.0 (cp.async.bulk) as nvcc compiles them.
 * tests/simt/include has the file of the same name and the same functions for the emulated GPU.
 * Addresses and sizes are multiples of 16. Source: PTX ISA, cp.async.bulk, mbarrier. Thread:
 * device, except has_bulk_code. */
#ifndef BATON_KERNELS_CUDA_NVCC_BULK_TARGET_CUH
#define BATON_KERNELS_CUDA_NVCC_BULK_TARGET_CUH

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BULK_CODE 1
#else
#define BULK_CODE 0
#endif

/* Whether this build has code with bulk copies for the GPU. */
static inline bool has_bulk_code(const void *kernel)
{
    cudaFuncAttributes a;
    if (cudaFuncGetAttributes(&a, kernel) == cudaSuccess) return a.binaryVersion >= 90;
    (void)cudaGetLastError();
    return false;
}

#if BULK_CODE
/* A barrier, 8 bytes of shared memory, whose phase ends when the bytes of one load have come. */
static __device__ __forceinline__ void bulk_barrier_init(uint64_t *b)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\t"
                 "fence.proxy.async.shared::cta;" ::"r"(shared_address(b))
                 : "memory");
}
/* Waits until the phase of this parity has ended; the first one is 0. */
static __device__ __forceinline__ void bulk_barrier_wait(uint64_t *b, unsigned parity)
{
    unsigned over;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(over)
                     : "r"(shared_address(b)), "r"(parity)
                     : "memory");
    } while (!over);
}

/* Reads n bytes; the barrier's phase ends with them. */
static __device__ __forceinline__ void bulk_load(void *shared, const void *global, unsigned n,
                                                 uint64_t *b)
{
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%3], %2;\n\t"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(n), "r"(shared_address(b))
                 : "memory");
}
/* Writes n bytes, a group of its own. */
static __device__ __forceinline__ void bulk_store(void *global, const void *shared, unsigned n)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\t"
                 "cp.async.bulk.commit_group;" ::"l"(__cvta_generic_to_global(global)),
                 "r"(shared_address(shared)), "r"(n)
                 : "memory");
}
/* Waits until all groups but the latest N have read shared memory; until all have written. */
template <int N> static __device__ __forceinline__ void bulk_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
static __device__ __forceinline__ void bulk_wait_written()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
#endif

#endif
