/* sm90_target.cuh - instructions of compute capability 9.0 on the emulated GPU: what
 * kernels/cuda/nvcc/sm90_target.cuh, which has the comments, is for real ones. Included by
 * kernels/cuda/gemm/sm90.cuh alone. Thread: as there. */
#ifndef BATON_TESTS_SIMT_SM90_TARGET_CUH
#define BATON_TESTS_SIMT_SM90_TARGET_CUH

#include "tests/simt/include/simt.h"

#define SM90_CODE             1
#define SM90_BOUND(n_threads) n_threads

static inline bool has_sm90_code(const void *, int) { return true; }
static inline unsigned shared_address(const void *p) { return simt_shared_address(p); }
static inline void barrier_init(uint64_t *b, unsigned n) { simt_mbarrier_init(b, n); }
static inline void barrier_arrive(uint64_t *b) { simt_mbarrier_arrive(b); }
static inline void barrier_arrive_copies(uint64_t *b) { simt_cp_async_mbarrier_arrive_noinc(b); }
static inline void barrier_wait(uint64_t *b, unsigned parity)
{
    while (!simt_mbarrier_try_wait_parity(b, parity))
        ;
}
#define __grid_constant__
typedef struct simt_tensor_map tensor_map;
static inline bool has_tensor_maps() { return true; }
static inline cudaError_t tensor_map_rows(tensor_map *map, const void *base, size_t row_bytes,
                                          int n_rows, size_t group_stride, int n_groups,
                                          int box_rows)
{
    return simt_tensor_map_rows(map, base, row_bytes, n_rows, group_stride, n_groups, box_rows)
               ? cudaSuccess
               : cudaErrorInvalidValue;
}
static inline unsigned cluster_rank() { return simt_cluster_rank(); }
static inline void cluster_sync() { simt_cluster_sync(); }
static inline void barrier_init_fence() { simt_fence_mbarrier_init(); }
static inline void barrier_arrive_at(uint64_t *b, unsigned rank)
{
    simt_mbarrier_arrive_at(b, rank);
}
static inline void barrier_expect(uint64_t *b, unsigned bytes) { simt_mbarrier_expect(b, bytes); }
static inline void bulk_copy(const tensor_map *map, void *to, uint64_t *b, int byte, int row,
                             int group)
{
    simt_bulk_copy(map, to, b, byte, row, group, 0);
}
static inline void bulk_copy_to(unsigned short mask, const tensor_map *map, void *to, uint64_t *b,
                                int byte, int row, int group)
{
    simt_bulk_copy(map, to, b, byte, row, group, mask);
}
static inline void named_barrier_sync(int id, int n) { simt_barrier_sync(id, n); }
static inline void named_barrier_arrive(int id, int n) { simt_barrier_arrive(id, n); }
static inline void fence_async_proxy() { simt_fence_proxy_async(); }
template <int N> static inline void warpgroup_reg_dealloc()
{
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "as setmaxnreg takes them");
    simt_set_registers(N);
}
template <int N> static inline void warpgroup_reg_alloc()
{
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "as setmaxnreg takes them");
    simt_set_registers(N);
}
static inline void wgmma_fence() { simt_wgmma_fence(); }
static inline void wgmma_commit() { simt_wgmma_commit(); }
template <int N> static inline void wgmma_wait() { simt_wgmma_wait(N); }
template <int N> static inline void wgmma_fence_operand(float (&)[N]) {}
template <int N> static inline void wgmma_fence_operand(unsigned (&)[N]) {}
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

template <int N>
static inline void wgmma_rows_bf16(float (&d)[N], const unsigned *a, uint64_t b, bool add)
{
    simt_wgmma_rows_bf16(d, 2 * N, a, b, add);
}

#endif
