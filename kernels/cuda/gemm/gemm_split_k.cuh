/* gemm_split_k.cuh - split-k: how blocks that share a tile of y hand their partial sums to the
 * block that finishes it.
 *
 * A matrix with few columns gives fewer tiles than a GPU has SMs, which would waste memory
 * bandwidth. Its k is then split into slices, one block each (blockIdx.z or y), depending only on
 * the matrix's shape. Every block stores its part in scratch memory; the last one to arrive adds
 * all of them in ascending order, so the order of arrival changes no bit. Counters are zero between
 * calls: the last block's arrival wraps them. Thread: engine for choose_n_splits, then device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_SPLIT_K_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_SPLIT_K_CUH

#include "kernels/cuda/gemm/gemm_call.cuh"

enum {
    SPLIT_K_MAX = 8,
    SPLIT_K_TILES_MAX = 256 /* per GEMM of a launch */,
    SPLIT_K_COUNTER_BYTES = (int)GEMM_FUSED_MAX * SPLIT_K_TILES_MAX * 4
};
/* the kernels assert that their parts fit */
enum { SPLIT_K_SCRATCH_FLOATS = 2 << 20, SPLIT_K_FUSED_FLOATS = SPLIT_K_SCRATCH_FLOATS / 4 };

/* Enough slices for blocks_wanted blocks (less than twice as many run), each of at least k_least
 * elements of k. */
static inline int32_t choose_n_splits(const gemm_call &c, int32_t tile_columns,
                                      int32_t blocks_wanted, int32_t k_least)
{
    const int32_t n_tiles = (int32_t)blocks_for((size_t)c.n_columns, (size_t)tile_columns),
                  by_k = c.n_in_padded / k_least;
    int32_t n = (blocks_wanted + n_tiles - 1) / n_tiles;
    if (!c.scratch || c.begin || c.n_groups > 1 || n_tiles >= blocks_wanted) return 1;
    if (n > by_k) n = by_k;
    if (n > SPLIT_K_MAX) n = SPLIT_K_MAX;
    return n < 1 ? 1 : n;
}

/* A slice's part of a tile, `floats` floats. */
static __device__ __forceinline__ float *split_partial(const gemm_call &c, int32_t tile,
                                                       int32_t split, int32_t floats)
{
    return (float *)(c.scratch + SPLIT_K_COUNTER_BYTES) +
           (size_t)c.fused_index * SPLIT_K_FUSED_FLOATS +
           ((size_t)tile * (size_t)c.n_splits + (size_t)split) * (size_t)floats;
}

/* After the block's part is written: whether all other parts of the tile are too, so that this
 * block finishes it. Called by all threads. The barriers order the other threads' parts before and
 * after the one atomic, which publishes and acquires for the block: a fence by every thread would
 * cost as much as the tile's last loads. */
static __device__ __forceinline__ bool is_last_split(const gemm_call &c, int32_t tile)
{
    __shared__ unsigned before;
    __syncthreads();
    if (threadIdx.x == 0)
        before = atomic_inc_acq_rel((unsigned *)c.scratch + c.fused_index * SPLIT_K_TILES_MAX +
                                        tile,
                                    (unsigned)c.n_splits - 1);
    __syncthreads();
    return before == (unsigned)c.n_splits - 1;
}

/* Adds two neighbouring sums at `at` over all slices, in ascending order. */
static __device__ __forceinline__ float2 reduce_splits(const gemm_call &c, int32_t tile,
                                                       int32_t floats, int32_t at)
{
    float2 sum = __ldcg((const float2 *)(split_partial(c, tile, 0, floats) + at));
    for (int32_t split = 1; split < c.n_splits; split++) {
        const float2 v = __ldcg((const float2 *)(split_partial(c, tile, split, floats) + at));
        sum = make_float2(__fadd_rn(sum.x, v.x), __fadd_rn(sum.y, v.y));
    }
    return sum;
}

#endif
