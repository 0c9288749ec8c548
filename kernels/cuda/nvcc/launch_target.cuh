/* launch_target.cuh - launches and PTX instructions as nvcc compiles them: launch.cuh's half for
 * GPUs. Included by launch.cuh alone. tests/simt/include has the file of the same name and the same
 * functions for the emulated GPU. Thread: device, but for launches: host, one per stream. */
#ifndef BATON_KERNELS_CUDA_NVCC_LAUNCH_TARGET_CUH
#define BATON_KERNELS_CUDA_NVCC_LAUNCH_TARGET_CUH

#define UNROLL            _Pragma("unroll")
#define UNROLL_TEXT(text) _Pragma(#text)
#define UNROLL_BY(n)      UNROLL_TEXT(unroll n)
template <class... P>
static cudaError_t launch_as(cudaStream_t stream, void (*kernel)(P...), dim3 grid, dim3 block,
                             size_t shared, unsigned cluster, P... args)
{
    void *all[] = { (void *)&args... };
    cudaLaunchAttribute attributes[2] = {};
    unsigned n = 0;
    if (device_query_supports_pdl()) {
        attributes[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[n].id = cudaLaunchAttributeClusterDimension;
        attributes[n].val.clusterDim.x = cluster;
        attributes[n].val.clusterDim.y = attributes[n].val.clusterDim.z = 1;
        n++;
    }
    if (n == 0) return cudaLaunchKernel((const void *)kernel, grid, block, all, shared, stream);
    cudaLaunchConfig_t how = {};
    how.gridDim = grid, how.blockDim = block, how.dynamicSmemBytes = shared, how.stream = stream,
    how.attrs = attributes, how.numAttrs = n;
    return cudaLaunchKernelExC(&how, (const void *)kernel, all);
}

/* Prefetches n bytes that no kernel of a step writes (weights) into L2; p and n are multiples of
 * 16. A block does this before it waits in grid_dependency_sync, when memory would otherwise be
 * idle. PREFETCHES_L2: the GPU supports it; otherwise this does nothing. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define PREFETCHES_L2 1
static __device__ __forceinline__ void prefetch_l2(const void *p, unsigned n)
{
    if (n > 0)
        asm volatile(
            "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(p)),
            "r"(n));
}
#else
#define PREFETCHES_L2 0
static __device__ __forceinline__ void prefetch_l2(const void *, unsigned) {}
#endif

/* Every kernel calls this before anything except prefetch_l2 and reads of what was there before the
 * step (append_rows, attn_mma_kernel: the list, and keys of earlier steps). Launches overlap
 * (device_query.h), so a kernel's blocks may start while the previous kernel in the stream still
 * runs. This waits until that kernel has completed and its writes are visible; afterwards the next
 * kernel's blocks may start. A kernel that returned without waiting would let that one start too
 * early. Memory that a previous kernel may have written is never read by __ldg: PTX allows
 * ld.global.nc only for data that does not change during the kernel, which now begins earlier;
 * __ldca is as fast. */
static __device__ __forceinline__ void grid_dependency_sync()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Launches a kernel, in clusters of so many blocks (compute capability 9.0), of which the grid's x
 * is a multiple. Returns the result of this launch, not an older error of the thread. */
template <class... P, class... A>
static cudaError_t launch_clusters(cudaStream_t stream, void (*kernel)(P...), dim3 grid, dim3 block,
                                   size_t shared, unsigned cluster, A... args)
{
    if (shared > SHARED_USUAL) {
        cudaError_t e = cudaFuncSetAttribute(
            (const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (e != cudaSuccess) return e;
    }
    return launch_as<P...>(stream, kernel, grid, block, shared, cluster, static_cast<P>(args)...);
}
/* The same without clusters. */
template <class... P, class... A>
static cudaError_t launch(cudaStream_t stream, void (*kernel)(P...), dim3 grid, dim3 block,
                          size_t shared, A... args)
{
    return launch_clusters(stream, kernel, grid, block, shared, 1, args...);
}

/* The block's dynamic shared memory. */
static __device__ __forceinline__ unsigned char *shared_memory()
{
    extern __shared__ __align__(1024) unsigned char shared_dynamic[];
    return shared_dynamic;
}

static __device__ __forceinline__ unsigned shared_address(const void *p)
{
    return (unsigned)__cvta_generic_to_shared(p);
}

/* cp.async of 16 bytes to shared memory; bytes from n_valid (0 to 16) on are zero; with 0 nothing
 * is read. */
static __device__ __forceinline__ void copy_async_16(void *shared, const void *global, int n_valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(n_valid)
                 : "memory");
}
/* The same of 4 bytes, or zero if not valid. */
static __device__ __forceinline__ void copy_async_4(void *shared, const void *global, int n_valid)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)),
                 "l"(global), "r"(n_valid)
                 : "memory");
}
/* copy_async_16, while the aligned 256 bytes around it come into the second cache: of what is read
 * on in rows, so that half of the reads find it there. */
static __device__ __forceinline__ void copy_async_16_of_256(void *shared, const void *global,
                                                            int n_valid)
{
    asm volatile(
        "cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
        "l"(global), "r"(n_valid)
        : "memory");
}
static __device__ __forceinline__ void copy_async_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/* Waits for all of the thread's groups except the latest N. */
template <int N> static __device__ __forceinline__ void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ldmatrix: four 8x8 matrices of 16-bit elements; lane 8i + r gives row r of matrix i. simt.h draws
 * which lane gets what. */
static __device__ __forceinline__ void load_matrix_x4(unsigned r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
static __device__ __forceinline__ void load_matrix_x4_transposed(unsigned r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

/* d += a b of bf16, m16n8k16; a [16][16] by rows, b [16][8] by columns. */
static __device__ __forceinline__ void mma_bf16(float d[4], const unsigned a[4],
                                                const unsigned b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, "
                 "%6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* The same for f16. */
static __device__ __forceinline__ void mma_f16(float d[4], const unsigned a[4], const unsigned b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, "
                 "%7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Two f32 as bf16, to nearest even, the first in the low half; a NaN becomes 0x7fff. */
static __device__ __forceinline__ unsigned round_bf16x2(float low, float high)
{
    unsigned d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

/* Two f32 as f16 likewise; 65520 and more become infinite. */
static __device__ __forceinline__ unsigned round_f16x2(float low, float high)
{
    unsigned d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

/* Two f32 as e4m3, to nearest even, the first in the low byte; larger numbers become 448. From 8.9
 * on; ROUNDS_E4M3 says whether. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define ROUNDS_E4M3 1
static __device__ __forceinline__ unsigned round_e4m3x2(float low, float high)
{
    unsigned short d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
    return d;
}
#else
#define ROUNDS_E4M3 0
static __device__ __forceinline__ unsigned round_e4m3x2(float, float) { return 0; }
#endif

static __device__ __forceinline__ float f16_to_float(uint16_t bits)
{
    float d;
    asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(bits));
    return d;
}

/* 2^x within two units in the last place; subnormal results are 0. */
static __device__ __forceinline__ float exp2_fast(float x)
{
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}

/* a b + c of two bf16 in a register each, every one rounded once. */
static __device__ __forceinline__ unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c)
{
    unsigned d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
/* (a & b) | c, in one instruction, which the compiler does not find where b and c are constants. */
static __device__ __forceinline__ unsigned and_or(unsigned a, unsigned b, unsigned c)
{
    unsigned d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

/* prmt as the hardware has it: byte i of the result is the byte that the selector's nibble i names,
 * of a's four and b's four; bit 3 of a nibble repeats the byte's sign instead. __byte_perm takes
 * that bit away. */
template <unsigned SELECTOR>
static __device__ __forceinline__ unsigned permute_bytes(unsigned a, unsigned b)
{
    unsigned d;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "n"(SELECTOR));
    return d;
}

/* The compiler computes *x before this, not after a wait behind which alone it is used. */
static __device__ __forceinline__ void compute_here(unsigned *x) { asm volatile("" : "+r"(*x)); }

/* atomicInc that releases what the thread's block did before a barrier and acquires what earlier
 * callers released, at the scope of the GPU. */
static __device__ __forceinline__ unsigned atomic_inc_acq_rel(unsigned *p, unsigned last)
{
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(p), "r"(last)
                 : "memory");
    return before;
}

/* Words by which kernels of several GPUs synchronise: acquire load and release store at system
 * scope. */
static __device__ __forceinline__ unsigned load_acquire_system(const unsigned *p)
{
    unsigned v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ void store_release_system(unsigned *p, unsigned v)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/* Nanoseconds of a monotonic clock, and a short pause of a thread that waits for another GPU. */
static __device__ __forceinline__ unsigned long long timer_ns()
{
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}
static __device__ __forceinline__ void poll_backoff() { __nanosleep(100); }

#endif
