/* gemm_sm90_multicast.cuh - tiles of experts by clusters of two blocks that share W: the pipeline
 * of gemm_sm90.cuh, with another producer.
 *
 * The blocks multiply neighbouring row tiles of a group by the same columns. Each loads half of a
 * stage's rows of W by a tensor map, for both; its own rows of x by cp.async, as they may be
 * gathered. So a stage's slot is free once the consumers of both blocks have read it, and full when
 * both halves of W have come. Both blocks take the same stages in the same order, also where one
 * has no rows to multiply. A row tile that has no neighbour in its group is multiplied by two
 * columns of tiles, and each block loads its own W. Bits are those of gemm_sm90.cuh: every sum runs
 * over the same k in the same order. Thread: device; launch_multicast: engine. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_SM90_MULTICAST_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_SM90_MULTICAST_CUH

#include "kernels/cuda/gemm/gemm_sm90.cuh"

enum { SHARERS = 2 /* blocks of a cluster */ };

template <class T> struct sm90_share {
    enum { ROWS = T::COLUMNS / SHARERS /* of W, of a box */, BYTES = ROWS * K_BYTES };
    static_assert((int)T::BLOCKS == (int)SHARERS && BYTES % 1024 == 0 && ROWS <= 256,
                  "a box is whole atoms of the swizzle, and 256 rows at most");
};

#if SM90_CODE
/* What a cluster computes at a time. */
struct sm90_pair {
    sm90_position at; /* of this block; n is 0 where it has nothing to do */
    bool is_any;      /* one of the blocks has */
    bool is_shared;   /* both multiply the same columns */
};

/* Pairs of row tiles, SM90_TILES_TOGETHER tiles by all columns, a column after the other. Where a
 * pair has one tile, half as many columns of pairs have work. */
template <class T>
static __device__ __forceinline__ sm90_pair pair_at(const gemm_call &c, int32_t index,
                                                    int32_t n_pairs, int32_t n_column_tiles)
{
    enum { TOGETHER = SM90_TILES_TOGETHER / SHARERS };
    const int32_t rank = (int32_t)cluster_rank(),
                  first = index / (TOGETHER * n_column_tiles) * TOGETHER,
                  in = index - first * n_column_tiles;
    const int32_t together = min(n_pairs - first, (int32_t)TOGETHER);
    const gemm_rows rows = rows_of_tile(c, first + in % together, SHARERS * T::ROWS);
    const int32_t column = in / together;
    sm90_pair p = { { rows.group, rows.begin, rows.n, column * T::COLUMNS },
                    rows.n > 0,
                    rows.n > T::ROWS };
    if (p.is_shared) {
        p.at.begin += rank * T::ROWS;
        p.at.n = min(rows.n - rank * T::ROWS, (int32_t)T::ROWS);
    } else {
        p.at.column = (column * SHARERS + rank) * T::COLUMNS;
        if (column * SHARERS >= n_column_tiles) p.is_any = false;
        if (p.at.column >= n_column_tiles * T::COLUMNS) p.at.n = 0;
    }
    return p;
}

/* Stages of x as sm90_source brings them, and of W as boxes. */
template <class T> struct sm90_multicast_source {
    enum { ARRIVALS = WARPGROUP + 1 /* the first thread comes for W and the position, too */ };
    sm90_x_source<T> x;
    sm90_pair pair;
    int32_t byte; /* of a row of W */

    __device__ __forceinline__ void find_tile(const gemm_call &c, const sm90_pair &p, int x_element)
    {
        find_x<T>(&x, c, p.at, x_element);
        pair = p;
        byte = 0;
    }

    /* By one thread. */
    __device__ __forceinline__ void load_w(const tensor_map *map, unsigned char *to,
                                           uint64_t *full) const
    {
        typedef sm90_share<T> share;
        if (pair.at.n == 0) {
            barrier_arrive(full);
            return;
        }
        barrier_expect(full, SHARERS * share::BYTES);
        if (pair.is_shared) {
            const int rank = (int)cluster_rank();
            bulk_copy_to((1 << SHARERS) - 1, map, to + rank * share::BYTES, full, byte,
                         pair.at.column + rank * share::ROWS, pair.at.group);
            return;
        }
#pragma unroll
        for (int i = 0; i < SHARERS; i++)
            bulk_copy(map, to + i * share::BYTES, full, byte, pair.at.column + i * share::ROWS,
                      pair.at.group);
    }

    __device__ __forceinline__ void load_stage(const tensor_map *map, unsigned char *to,
                                               uint64_t *full)
    {
        if (threadIdx.x == 0) load_w(map, to + T::X_BYTES, full);
        __syncwarp();
        load_x_async<T>(&x, to);
        byte += K_BYTES;
        barrier_arrive_copies(full);
    }
};

/* As produce_tiles. */
template <class T>
static __device__ __forceinline__ void produce_pairs(const gemm_call &c, const tensor_map *map,
                                                     const sm90_ring<T> &ring, int32_t n_pairs,
                                                     int32_t n_stages, int x_element)
{
    const int32_t n_column_tiles = (c.n_columns + T::COLUMNS - 1) / T::COLUMNS;
    sm90_pipeline_state<T> state = { 0, 0 };
    int n_tiles = 0;
    for (int32_t index = (int32_t)(blockIdx.x / SHARERS); index < n_pairs * n_column_tiles;
         index += (int32_t)(gridDim.x / SHARERS)) {
        const sm90_pair pair = pair_at<T>(c, index, n_pairs, n_column_tiles);
        if (!pair.is_any) continue;
        sm90_multicast_source<T> source;
        source.find_tile(c, pair, x_element);
        if (threadIdx.x == 0) ring.positions[n_tiles % POSITIONS] = pair.at;
        n_tiles++;
#pragma unroll 1
        for (int32_t stage = 0; stage < n_stages; stage++) {
            barrier_wait(ring.empty + state.index, state.parity ^ 1);
            __syncwarp();
            source.load_stage(map, ring.at + state.index * T::STAGE_BYTES, ring.full + state.index);
            advance<T>(&state);
        }
    }
    if (threadIdx.x == 0) ring.positions[n_tiles % POSITIONS].n = -1;
    barrier_wait(ring.empty + state.index, state.parity ^ 1);
    sm90_source<T>::announce(ring.full + state.index);
}

/* A kernel's body. No block ends before the other's last arrival at its barriers. */
template <class T, class M>
static __device__ __forceinline__ void sm90_multicast_body(const gemm_call &c,
                                                           const tensor_map *map, int32_t n_pairs,
                                                           int32_t n_stages, int x_element)
{
    const sm90_ring<T> ring = make_ring<T>(sm90_multicast_source<T>::ARRIVALS);
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<T::PRODUCER_REGISTERS>();
        produce_pairs<T>(c, map, ring, n_pairs, n_stages, x_element);
    } else {
        warpgroup_reg_alloc<T::CONSUMER_REGISTERS>();
        consume_tiles<T, M>(c, ring, n_stages, warpgroup - 1);
    }
    cluster_sync();
}
#endif

/* ---- the host ---- */

template <class T>
static inline cudaError_t launch_multicast(cudaStream_t stream,
                                           void (*kernel)(const gemm_call, const tensor_map,
                                                          int32_t),
                                           const gemm_call &c)
{
    const size_t n = sm90_tiles(c, SHARERS * T::ROWS, T::COLUMNS),
                 n_clusters = (size_t)sm90_this_device().n_sms / SHARERS;
    if (n == 0) return cudaSuccess;
    if (n > INT32_MAX || n_clusters == 0) return cudaErrorInvalidValue;
    if (!sm90_this_device().multicasts) return cudaErrorNotSupported;
    tensor_map map;
    const size_t stride = c.n_groups > 1 ? c.w_stride : (size_t)c.n_out * c.row_bytes;
    const cudaError_t e = tensor_map_rows(&map, c.w, c.row_bytes, c.n_out, stride, c.n_groups,
                                          sm90_share<T>::ROWS);
    if (e != cudaSuccess) return e;
    const dim3 grid((unsigned)(n < n_clusters ? n : n_clusters) * SHARERS);
    return launch_clusters(stream, kernel, grid, dim3(SM90_THREADS), (size_t)T::SHARED,
                           (unsigned)SHARERS, c, map,
                           (int32_t)n_tiles_at_most(c, SHARERS * T::ROWS));
}

#endif
