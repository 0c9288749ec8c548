/* simt.h - what tests/simt offers beyond CUDA's own names: the launch of a kernel, the instructions
 * that nvcc has only as PTX, hooks for tests.
 *
 * launch_target.cuh and sm90_target.cuh offer these to the kernels under the names that nvcc's files
 * use. "In a kernel" means: on a thread of a running block, which is a fiber of the host thread that
 * drains the stream (tests/simt/README.md). Misuse in a kernel ends the process with a sentence.
 * Thread: any for hooks and launches. */
#ifndef BATON_TESTS_SIMT_SIMT_H
#define BATON_TESTS_SIMT_SIMT_H

#include "tests/simt/include/cuda_runtime_api.h"
#include "tests/simt/include/simt_bulk.h"
#include "tests/simt/include/simt_sm90.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the named function (such as "cudaMalloc") return the error once, after `after` more calls
 * that succeed as usual. Errors that destroy a context on a GPU (cudaErrorIllegalAddress,
 * cudaErrorLaunchFailure, ...) are then returned by every function until cudaDeviceReset. Two names
 * are not functions: "launch" is the call that launches a kernel, and "kernel" is a running kernel,
 * whose error is returned by a later call. after < 0 cancels the injection. Only one is active at a
 * time. */
void simt_fail_next(cudaError_t error, const char *function, int after);

/* The number of operations in streams that have not run yet. */
size_t simt_n_pending(void);

/* The number of kernels that ran since the process began, and the bytes of allocated device
 * memory. */
size_t simt_n_kernels(void);
size_t simt_device_bytes(void);

/* How launches overlap, which the environment variable BATON_SIMT_OVERLAP says otherwise: "off",
 * "on", where what is wrong ends the process, or "count". simt_n_early: the accesses that were wrong
 * so far. */
void simt_set_overlap(const char *how);
size_t simt_n_early(void);
/* In a kernel: griddepcontrol.wait. What threads do before must not depend on what the kernel before
 * writes, and they must not write. */
void simt_grid_dependency_sync(void);

/* In a kernel: the launch's dynamic shared memory, aligned to 1,024. It holds garbage when the
 * block begins. */
void *simt_dynamic_shared(void);

/* In a kernel: bar.sync and bar.arrive with a number (0 to 15) and a number of threads, a multiple
 * of 32. */
void simt_barrier_sync(int id, int n_threads);
void simt_barrier_arrive(int id, int n_threads);

/* In a kernel: cp.async of 4, 8 or 16 bytes to shared memory, of which src_bytes come from `global`
 * and the rest becomes zero. The target holds garbage until the thread has waited for the group.
 * simt_cp_async_wait(n) waits for all of the thread's groups but the n latest. A thread must have
 * waited for all groups before it returns. */
void simt_cp_async(void *shared, const void *global, int bytes, int src_bytes);
/* Prefetches n bytes, all of which must be readable. */
void simt_prefetch(const void *global, unsigned n);
void simt_cp_async_commit(void);
void simt_cp_async_wait(int n_groups_left);
void simt_cp_async_wait_all(void);

/* In a kernel, called by all 32 lanes of a warp: ldmatrix .b16 8x8. Lane 8i+r gives the address of
 * row r (16 bytes, aligned to 16) of matrix i. Lane t receives in r[i] the elements (row t/4,
 * columns 2(t%4) and one on) of matrix i, the first in the low half; with trans those of its
 * transpose: (rows 2(t%4) and one on, column t/4). x1 reads the addresses of lanes 0-7, x2 of
 * 0-15. */
void simt_ldmatrix_x1(unsigned r[1], const void *row);
void simt_ldmatrix_x2(unsigned r[2], const void *row);
void simt_ldmatrix_x4(unsigned r[4], const void *row);
void simt_ldmatrix_x1_trans(unsigned r[1], const void *row);
void simt_ldmatrix_x2_trans(unsigned r[2], const void *row);
void simt_ldmatrix_x4_trans(unsigned r[4], const void *row);

/* In a kernel, called by all 32 lanes: D = A B + C as PTX's mma.sync.aligned.row.col, D and C in
 * f32. With g = lane / 4 and t = lane % 4:
 *   C, D  [16][8]   c[0] (g, 2t)  c[1] (g, 2t+1)  c[2] (g+8, 2t)  c[3] (g+8, 2t+1)
 *   16-bit elements, m16n8k16, two per register, the lower column (A) or row (B) in the low half:
 *     A  [16][16]   a[0] (g, 2t..)  a[1] (g+8, 2t..)  a[2] (g, 2t+8..)  a[3] (g+8, 2t+8..)
 *     B  [16][8]    b[0] (2t.., g)  b[1] (2t+8.., g)
 *   tf32, m16n8k8, one per register, of which the low 13 bits are ignored:
 *     A  [16][8]    a[0] (g, t)  a[1] (g+8, t)  a[2] (g, t+4)  a[3] (g+8, t+4)
 *     B  [8][8]     b[0] (t, g)  b[1] (t+4, g)
 *   8-bit elements, m16n8k32, four per register, the lowest first:
 *     A  [16][32]   a[0] (g, 4t..)  a[1] (g+8, 4t..)  a[2] (g, 4t+16..)  a[3] (g+8, 4t+16..)
 *     B  [32][8]    b[0] (4t.., g)  b[1] (4t+16.., g)
 * Sums are exact and rounded once; a GPU's differ in the last bits. d may be c. The integer product
 * wraps as without .satfinite. */
void simt_mma_bf16_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], const float c[4]);
void simt_mma_f16_m16n8k16(float d[4], const unsigned a[4], const unsigned b[2], const float c[4]);
void simt_mma_tf32_m16n8k8(float d[4], const unsigned a[4], const unsigned b[2], const float c[4]);
void simt_mma_e4m3_m16n8k32(float d[4], const unsigned a[4], const unsigned b[2], const float c[4]);
void simt_mma_e5m2_m16n8k32(float d[4], const unsigned a[4], const unsigned b[2], const float c[4]);
void simt_mma_s8_m16n8k32(int d[4], const unsigned a[4], const unsigned b[2], const int c[4]);

/* Conversions to and from smaller types, as by the cvt instructions: to nearest even; e4m3 and e5m2
 * saturate (.satfinite), tf32 rounds half away from zero (cvt.rna). A NaN stays a NaN. */
float simt_bf16_to_float(uint16_t bits);
uint16_t simt_float_to_bf16(float x);
float simt_f16_to_float(uint16_t bits);
uint16_t simt_float_to_f16(float x);
float simt_e4m3_to_float(uint8_t bits);
uint8_t simt_float_to_e4m3(float x);
float simt_e5m2_to_float(uint8_t bits);
uint8_t simt_float_to_e5m2(float x);
uint32_t simt_float_to_tf32(float x);

#ifdef __cplusplus
}

#include <functional>
#include <tuple>
#include <type_traits>

#include "tests/simt/include/simt_vectors.h"

struct simt_launch_shape {
    dim3 grid, block;
    size_t dynamic_shared;
    const void *kernel = nullptr; /* for messages */
    bool overlaps = false;        /* programmatic dependent launch */
    unsigned cluster = 1;         /* blocks of a cluster, in x */
};

/* Queues a launch in which every thread of every block calls body. */
cudaError_t simt_launch_body(cudaStream_t stream, const simt_launch_shape &shape,
                             std::function<void()> body);

/* The arguments are converted to the kernel's parameters and copied at the call. */
template <class... P, class... A>
static cudaError_t simt_launch_as(cudaStream_t stream, simt_launch_shape shape,
                                  void (*kernel)(P...), A &&...arguments)
{
    static_assert(sizeof...(P) == sizeof...(A),
                  "a kernel is launched with as many arguments as it has parameters");
    static_assert((std::is_trivially_copyable_v<P> && ...),
                  "parameters of kernels are copied byte by byte");
    static_assert((sizeof(P) + ... + 0) <= 32764, "parameters of a kernel: since CUDA 12.1");
    static_assert((!std::is_reference_v<P> && ...), "a reference would name host memory");
    if (!kernel) return simt_launch_body(stream, shape, nullptr);
    shape.kernel = (const void *)kernel;
    std::tuple<P...> copies(static_cast<P>(arguments)...);
    return simt_launch_body(stream, shape, [kernel, copies] { std::apply(kernel, copies); });
}
template <class... P, class... A>
static cudaError_t simt_launch(cudaStream_t stream, void (*kernel)(P...), dim3 grid, dim3 block,
                               size_t dynamic_shared, A &&...arguments)
{
    return simt_launch_as(stream, { grid, block, dynamic_shared }, kernel, arguments...);
}
/* The same in clusters of so many blocks, which may overlap as below. */
template <class... P, class... A>
static cudaError_t simt_launch_clusters(cudaStream_t stream, void (*kernel)(P...), dim3 grid,
                                        dim3 block, size_t dynamic_shared, unsigned cluster,
                                        bool overlaps, A &&...arguments)
{
    return simt_launch_as(stream, { grid, block, dynamic_shared, nullptr, overlaps, cluster },
                          kernel, arguments...);
}
/* May overlap the kernel before it in the stream, until it has waited by
 * simt_grid_dependency_sync. */
template <class... P, class... A>
static cudaError_t simt_launch_overlapping(cudaStream_t stream, void (*kernel)(P...), dim3 grid,
                                           dim3 block, size_t dynamic_shared, A &&...arguments)
{
    return simt_launch_as(stream, { grid, block, dynamic_shared, nullptr, true }, kernel,
                          arguments...);
}
#endif
#endif
