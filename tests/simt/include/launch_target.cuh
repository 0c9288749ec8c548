/* launch_target.cuh - launches and instructions on the emulated GPU: what
 * kernels/cuda/nvcc/launch_target.cuh, which has the comments, is for real ones. Included by
 * kernels/cuda/launch.cuh alone. Thread: as there. */
#ifndef BATON_TESTS_SIMT_LAUNCH_TARGET_CUH
#define BATON_TESTS_SIMT_LAUNCH_TARGET_CUH

#include <unistd.h>

#include "tests/simt/include/simt.h"

#define UNROLL
#define UNROLL_BY(n)
#define PREFETCHES_L2 1
static inline void prefetch_l2(const void *p, unsigned n)
{
    if (n > 0) simt_prefetch(p, n);
}
static inline void grid_dependency_sync() { simt_grid_dependency_sync(); }
template <class... P, class... A>
static cudaError_t launch(cudaStream_t stream, void (*kernel)(P...), dim3 grid, dim3 block,
                          size_t shared, A... args)
{
    if (!device_query_supports_pdl())
        return simt_launch(stream, kernel, grid, block, shared, args...);
    return simt_launch_overlapping(stream, kernel, grid, block, shared, args...);
}
template <class... P, class... A>
static cudaError_t launch_clusters(cudaStream_t stream, void (*kernel)(P...), dim3 grid, dim3 block,
                                   size_t shared, unsigned cluster, A... args)
{
    return simt_launch_clusters(stream, kernel, grid, block, shared, cluster,
                                device_query_supports_pdl(), args...);
}
static inline unsigned char *shared_memory()
{
    return static_cast<unsigned char *>(simt_dynamic_shared());
}
static inline void copy_async_16(void *shared, const void *global, int n_valid)
{
    simt_cp_async(shared, global, 16, n_valid);
}
static inline void copy_async_4(void *shared, const void *global, int n_valid)
{
    simt_cp_async(shared, global, 4, n_valid);
}
static inline void copy_async_16_of_256(void *shared, const void *global, int n_valid)
{
    simt_cp_async(shared, global, 16, n_valid);
}
static inline void copy_async_commit() { simt_cp_async_commit(); }
template <int N> static inline void copy_async_wait() { simt_cp_async_wait(N); }
static inline void load_matrix_x4(unsigned r[4], const void *row) { simt_ldmatrix_x4(r, row); }
static inline void load_matrix_x4_transposed(unsigned r[4], const void *row)
{
    simt_ldmatrix_x4_trans(r, row);
}
static inline void mma_bf16(float d[4], const unsigned a[4], const unsigned b[2])
{
    simt_mma_bf16_m16n8k16(d, a, b, d);
}
static inline void mma_f16(float d[4], const unsigned a[4], const unsigned b[2])
{
    simt_mma_f16_m16n8k16(d, a, b, d);
}
static inline unsigned round_f16x2(float low, float high)
{
    return simt_float_to_f16(low) | (unsigned)simt_float_to_f16(high) << 16;
}
#define ROUNDS_E4M3 1
static inline unsigned round_e4m3x2(float low, float high)
{
    return simt_float_to_e4m3(low) | (unsigned)simt_float_to_e4m3(high) << 8;
}
static inline float f16_to_float(uint16_t bits) { return simt_f16_to_float(bits); }
static inline unsigned round_bf16x2(float low, float high)
{
    const unsigned l = isnan(low) ? 0x7fff : simt_float_to_bf16(low),
                   h = isnan(high) ? 0x7fff : simt_float_to_bf16(high);
    return l | h << 16;
}
static inline float exp2_fast(float x)
{
    const float y = exp2f(x);
    return fabsf(y) < 0x1p-126f ? 0.0f : y;
}
static inline unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c)
{
    unsigned d = 0;
    for (int at = 0; at < 32; at += 16) {
        float x = simt_bf16_to_float((uint16_t)(a >> at)),
              y = simt_bf16_to_float((uint16_t)(b >> at)),
              z = simt_bf16_to_float((uint16_t)(c >> at));
        d |= (unsigned)simt_float_to_bf16(fmaf(x, y, z)) << at;
    }
    return d;
}
static inline unsigned and_or(unsigned a, unsigned b, unsigned c) { return (a & b) | c; }
template <unsigned SELECTOR> static inline unsigned permute_bytes(unsigned a, unsigned b)
{
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned d = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned s = SELECTOR >> (4 * i), byte = (unsigned)(both >> (8 * (s & 7))) & 0xff;
        d |= (s & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << (8 * i);
    }
    return d;
}
static inline void compute_here(unsigned *) {}
static inline unsigned atomic_inc_acq_rel(unsigned *p, unsigned last) { return atomicInc(p, last); }
static inline unsigned load_acquire_system(const unsigned *p)
{
    return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
static inline void store_release_system(unsigned *p, unsigned v)
{
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
}
static inline unsigned long long timer_ns() { return __globaltimer(); }
/* The other GPU is another process, which needs CPU time. */
static inline void poll_backoff()
{
    usleep(100);
    __nanosleep(100);
}

#endif
