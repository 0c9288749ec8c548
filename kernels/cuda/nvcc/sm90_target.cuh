/* sm90_target.cuh - instructions of compute capability 9.0 as nvcc compiles them: sm90.cuh's half
 * for GPUs. Included by sm90.cuh alone. tests/simt/include has the file of the same name and the
 * same functions for the emulated GPU. Thread: device, except has_sm90_code. */
#ifndef BATON_KERNELS_CUDA_NVCC_SM90_TARGET_CUH
#define BATON_KERNELS_CUDA_NVCC_SM90_TARGET_CUH

#include <cuda.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define SM90_CODE             1
#define SM90_BOUND(n_threads) n_threads
#else
#define SM90_CODE             0
#define SM90_BOUND(n_threads) WARP
#endif

static inline bool has_sm90_code(const void *kernel, int n_threads)
{
    cudaFuncAttributes a;
    if (cudaFuncGetAttributes(&a, kernel) == cudaSuccess) return a.maxThreadsPerBlock >= n_threads;
    (void)cudaGetLastError(); /* no code for this GPU: the same as none for Hopper */
    return false;
}

/* ---- tensor maps ---- */

/* Bytes [n_groups][n_rows][row_bytes], of which boxes of 128 bytes of some rows of a group are
 * copied (bulk_copy). A kernel's parameter, const __grid_constant__. */
typedef CUtensorMap tensor_map;

typedef CUresult (*encode_tiled_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
/* The driver's cuTensorMapEncodeTiled, which is not linked; NULL: it has none. */
static inline encode_tiled_fn find_encode_tiled()
{
    void *fn = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000,
                                                           cudaEnableDefault, &found);
#else
    const cudaError_t e = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &fn, cudaEnableDefault,
                                                  &found);
#endif
    if (e == cudaSuccess && found == cudaDriverEntryPointSuccess) return (encode_tiled_fn)fn;
    (void)cudaGetLastError(); /* an older driver: kernels without tensor maps run */
    return NULL;
}
static inline bool has_tensor_maps() { return find_encode_tiled() != NULL; }
/* Host, any thread. base, row_bytes and group_stride (bytes from a group to the next) are multiples
 * of 16, group_stride below TENSOR_MAP_STRIDE_END, box_rows at most 256. */
static inline cudaError_t tensor_map_rows(tensor_map *map, const void *base, size_t row_bytes,
                                          int n_rows, size_t group_stride, int n_groups,
                                          int box_rows)
{
    static const encode_tiled_fn encode = find_encode_tiled();
    const cuuint64_t sizes[3] = { row_bytes, (cuuint64_t)n_rows, (cuuint64_t)n_groups },
                     strides[2] = { row_bytes, group_stride };
    const cuuint32_t box[3] = { 128, (cuuint32_t)box_rows, 1 }, steps[3] = { 1, 1, 1 };
    if (!encode) return cudaErrorNotSupported;
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, (void *)base, sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
               ? cudaSuccess
               : cudaErrorInvalidValue;
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
/* Arrives, for a thread that init has counted, when its cp.async so far have completed; the thread
 * goes on. It releases nothing else, and who waits must fence_async_proxy before wgmma. */
static __device__ __forceinline__ void barrier_arrive_copies(uint64_t *b)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b))
                 : "memory");
}
/* Waits until the phase of this parity has ended, and acquires. The first phase is 0; on a new
 * barrier parity 1 returns at once. */
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

/* ---- clusters: blocks that run at the same time and reach each other's shared memory ---- */

static __device__ __forceinline__ unsigned cluster_rank()
{
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* Waits for all threads of the cluster; releases and acquires. */
static __device__ __forceinline__ void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}
/* After barrier_init, before cluster_sync: other blocks may use the thread's barriers. */
static __device__ __forceinline__ void barrier_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Arrives at the barrier that block `rank` has where this one has b, which tells that block that
 * what wgmma read here has been read, and hands over nothing that was written: a release at the
 * scope of the cluster would cost a MEMBAR of the whole GPU each time (SASS of sm_90a). */
static __device__ __forceinline__ void barrier_arrive_at(uint64_t *b, unsigned rank)
{
    asm volatile(
        "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\n"
        "mbarrier.arrive.release.cta.shared::cluster.b64 _, [at];\n}" ::"r"(shared_address(b)),
        "r"(rank)
        : "memory");
}
/* Arrives; the phase also waits for so many bytes of bulk copies, which may have come before. */
static __device__ __forceinline__ void barrier_expect(uint64_t *b, unsigned bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(b)),
                 "r"(bytes)
                 : "memory");
}
/* Copies a box of the map, from byte `byte` of row `row` of a group on, to shared memory, where its
 * rows are in the order of wgmma_descriptor; what lies outside is zero. `b` gets the bytes, and who
 * has waited there may multiply them without a fence. */
static __device__ __forceinline__ void bulk_copy(const tensor_map *map, void *to, uint64_t *b,
                                                 int byte, int row, int group)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(b)), "r"(byte), "r"(row), "r"(group)
                 : "memory");
}
/* The same to all blocks of the cluster that `mask` has a bit of, in each to where this one has
 * `to` and b. */
static __device__ __forceinline__ void bulk_copy_to(unsigned short mask, const tensor_map *map,
                                                    void *to, uint64_t *b, int byte, int row,
                                                    int group)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(b)), "r"(byte), "r"(row), "r"(group), "h"(mask)
        : "memory");
}

/* Numbered barriers (1 to 15) of n threads: waits until n have come; comes without waiting. */
static __device__ __forceinline__ void named_barrier_sync(int id, int n)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}
static __device__ __forceinline__ void named_barrier_arrive(int id, int n)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
}

/* Makes the thread's earlier writes to shared memory visible to wgmma, those of its completed
 * cp.async too. */
static __device__ __forceinline__ void fence_async_proxy()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Sets the registers per thread of a warpgroup to N, here to fewer; all its threads must call. They
 * start with what the launch bounds leave each. */
template <int N> static __device__ __forceinline__ void warpgroup_reg_dealloc()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void warpgroup_reg_alloc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- products of a warpgroup: D [64][N] += A [64][32 bytes] B [N][32 bytes] ---- */

/* Orders earlier accesses to the accumulators before the wgmma that follow; called before the first
 * of a series. */
static __device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most N of the warp's groups are pending. */
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
#define WGMMA_32_NAMES                                                                             \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define WGMMA_64_NAMES                                                                             \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define WGMMA_96_NAMES                                                                             \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                      \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}, "
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

/* add: D += A B, otherwise D = A B. The constants after the predicate say that A and B are not
 * negated and are contiguous in k. */
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
    static __device__ __forceinline__ void wgmma_##type(float(&d)[96], uint64_t a, uint64_t b,     \
                                                        bool add)                                  \
    {                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\n"                                  \
                     "wgmma.mma_async.sync.aligned.m64n192k16.f32." #type "." #type                \
                     " " WGMMA_96_NAMES "%96, %97, p, 1, 1, 0, 0;\n}"                              \
                     : WGMMA_32(0), WGMMA_32(32), WGMMA_32(64)                                     \
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
/* A in registers, as mma.sync has it of the warp's 16 rows; B with k in rows
 * (wgmma_rows_descriptor). The registers may change once the product has been waited for. */
static __device__ __forceinline__ void wgmma_rows_bf16(float (&d)[32], const unsigned *a,
                                                       uint64_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " WGMMA_32_NAMES
                 "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
                 : WGMMA_32(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
static __device__ __forceinline__ void wgmma_rows_bf16(float (&d)[64], const unsigned *a,
                                                       uint64_t b, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " WGMMA_64_NAMES
                 "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
                 : WGMMA_32(0), WGMMA_32(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add));
}
/* As the one for accumulators. */
template <int N> static __device__ __forceinline__ void wgmma_fence_operand(unsigned (&a)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}
#endif

#endif
