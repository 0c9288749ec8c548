/* sm90.cuh - features of compute capability 9.0 that CUDA C has no name for: barriers in shared
 * memory, warpgroup products (wgmma).
 *
 * SM90_CODE: this compilation may use them, for sm_90a or for tests/simt. Other passes of nvcc see
 * no function of this file; a kernel has a body that traps there, and SM90_BOUND in its
 * __launch_bounds__ lets the host find out that the GPU would run that body (has_sm90_code).
 * Source: the PTX ISA on mbarrier, wgmma and proxies. Thread: device, except has_sm90_code. */
#ifndef BATON_KERNELS_CUDA_GEMM_SM90_CUH
#define BATON_KERNELS_CUDA_GEMM_SM90_CUH

#include "kernels/cuda/launch.cuh"

enum { WARPGROUP = 128 };

#if !defined(__CUDACC__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SM90_CODE             1
#define SM90_BOUND(n_threads) n_threads
#else
#define SM90_CODE             0
#define SM90_BOUND(n_threads) WARP
#endif

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

#ifdef __CUDACC__
static inline bool has_sm90_code(const void *kernel, int n_threads)
{
    cudaFuncAttributes a;
    if (cudaFuncGetAttributes(&a, kernel) == cudaSuccess) return a.maxThreadsPerBlock >= n_threads;
    (void)cudaGetLastError(); /* no code for this GPU: the same as none for Hopper */
    return false;
}

#if SM90_CODE
/* ---- barriers: 8 bytes; a phase ends when n have arrived ---- */

static __device__ __forceinline__ void barrier_init(uint64_t *b, unsigned n)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(n)
                 : "memory");
}
/* Releases what the thread did before. */
static __device__ __forceinline__ void barrier_arrive(uint64_t *b)
{
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(b))
                 : "memory");
}
/* Until the phase of this parity has ended: the first is 0, and of a new barrier the one before, 1,
 * has. Acquires. */
static __device__ __forceinline__ void barrier_wait(uint64_t *b, unsigned parity)
{
    const unsigned address = shared_address(b);
    unsigned over;
    do {
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(over)
                     : "r"(address), "r"(parity)
                     : "memory");
    } while (!over);
}

/* What the thread wrote to shared memory before, its own cp.async that it waited for too, wgmma
 * sees once others know of it. */
static __device__ __forceinline__ void fence_async_proxy()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Registers of the threads of a warpgroup, all of which call. The block's threads have what the
 * launch bounds leave each. */
template <int N> static __device__ __forceinline__ void warpgroup_reg_dealloc()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void warpgroup_reg_alloc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- products of a warpgroup: D [64][N] += A [64][32 bytes] B [N][32 bytes] ---- */

/* Before the first of a series: what the thread did with its accumulators is over. */
static __device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* All of the warp's groups but the N latest are over. */
template <int N> static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps the compiler from moving accumulators past this place. */
template <int N> static __device__ __forceinline__ void wgmma_fence_operand(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

/* v, which the compiler cannot know before this place: what is computed from it takes no registers
 * until then. */
static __device__ __forceinline__ int not_before(int v)
{
    asm volatile("" : "+r"(v)::"memory");
    return v;
}

#define WGMMA_8(i)                                                                                 \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_32(i) WGMMA_8(i), WGMMA_8(i + 8), WGMMA_8(i + 16), WGMMA_8(i + 24)
#define WGMMA_64_NAMES                                                                             \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define WGMMA_128_NAMES                                                                            \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "   \
    "%127}, "

/* add: D += A B, otherwise D = A B. What stands behind the predicate: A and B as they are, not
 * negated; k contiguous in both. */
#define WGMMA_16_BITS(type)                                                                        \
    static __device__ __forceinline__ void wgmma_##type(float(&d)[64], uint64_t a, uint64_t b,     \
                                                        bool add)                                  \
    {                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                  \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." #type "." #type                \
                     " " WGMMA_64_NAMES "%64, %65, p, 1, 1, 0, 0;\n}"                              \
                     : WGMMA_32(0), WGMMA_32(32)                                                   \
                     : "l"(a), "l"(b), "r"((int)add));                                             \
    }                                                                                              \
    static __device__ __forceinline__ void wgmma_##type(float(&d)[128], uint64_t a, uint64_t b,    \
                                                        bool add)                                  \
    {                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                 \
                     "wgmma.mma_async.sync.aligned.m64n256k16.f32." #type "." #type                \
                     " " WGMMA_128_NAMES "%128, %129, p, 1, 1, 0, 0;\n}"                           \
                     : WGMMA_32(0), WGMMA_32(32), WGMMA_32(64), WGMMA_32(96)                       \
                     : "l"(a), "l"(b), "r"((int)add));                                             \
    }
WGMMA_16_BITS(bf16)
WGMMA_16_BITS(f16)
static __device__ __forceinline__ void wgmma_e4m3(float (&d)[64], uint64_t a, uint64_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " WGMMA_64_NAMES
                 "%64, %65, p, 1, 1;\n}"
                 : WGMMA_32(0), WGMMA_32(32)
                 : "l"(a), "l"(b), "r"((int)add));
}
#endif
#else
static inline bool has_sm90_code(const void *, int) { return true; }
static inline unsigned shared_address(const void *p) { return simt_shared_address(p); }
static inline void barrier_init(uint64_t *b, unsigned n) { simt_mbarrier_init(b, n); }
static inline void barrier_arrive(uint64_t *b) { simt_mbarrier_arrive(b); }
static inline void barrier_wait(uint64_t *b, unsigned parity)
{
    while (!simt_mbarrier_try_wait_parity(b, parity))
        ;
}
static inline void fence_async_proxy() { simt_fence_proxy_async(); }
template <int N> static inline void warpgroup_reg_dealloc()
{
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "as setmaxnreg takes them");
}
template <int N> static inline void warpgroup_reg_alloc()
{
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "as setmaxnreg takes them");
}
static inline void wgmma_fence() { simt_wgmma_fence(); }
static inline void wgmma_commit() { simt_wgmma_commit(); }
template <int N> static inline void wgmma_wait() { simt_wgmma_wait(N); }
template <int N> static inline void wgmma_fence_operand(float (&)[N]) {}
static inline int not_before(int v) { return v; }
template <int N> static inline void wgmma_bf16(float (&d)[N], uint64_t a, uint64_t b, bool add)
{
    simt_wgmma_bf16(d, 2 * N, a, b, add);
}
template <int N> static inline void wgmma_f16(float (&d)[N], uint64_t a, uint64_t b, bool add)
{
    simt_wgmma_f16(d, 2 * N, a, b, add);
}
template <int N> static inline void wgmma_e4m3(float (&d)[N], uint64_t a, uint64_t b, bool add)
{
    simt_wgmma_e4m3(d, 2 * N, a, b, add);
}
#endif

#endif
