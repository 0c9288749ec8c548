/* gemm_sm90_upconvert.cu - GEMM of W8 and W4 with many rows of x on compute capability 9.0: W
 * becomes bf16 on its way into the ring of gemm_sm90.cuh, whose consumers then multiply as for
 * BF16; the scale of a column multiplies its sums.
 *
 * A producer thread holds the stored elements of its part of the next stage in registers, loaded
 * while it waits for a slot, and converts them (gemm_upconvert.cuh), which takes it a third of the
 * time that the stage is multiplied in. When it comes to a tile it prefetches the tile's W into L2.
 * Thread: device; gemm_sm90_upconvert: engine. */
#include "kernels/cuda/gemm/gemm_sm90.cuh"
#include "kernels/cuda/gemm/gemm_upconvert.cuh"

typedef sm90_tile<1, 128, 6> narrow_tile;
typedef sm90_tile<1, 256, 4> wide_tile;

#if SM90_CODE
template <enum gemm_weight_layout F, class T> struct upconvert_source {
    enum {
        ARRIVALS = 2 * WARPGROUP, /* the copies of x, and what the thread stored of W */
        UNIT = gemm_stored<F>::PER_16_BYTES,
        UNITS_OF_ROW = GEMM_STEP / UNIT,
        ROWS_TOGETHER = WARPGROUP / UNITS_OF_ROW,
        UNITS = T::COLUMNS / ROWS_TOGETHER, /* of 16 bytes, of a thread for a stage */
        STAGE_STEP = UNITS_OF_ROW * 16      /* bytes of a row of W */
    };
    sm90_x_source<T> x;
    uint4 units[UNITS]; /* of the next stage */
    const unsigned char *w;
    int32_t w_rows, w_bytes; /* there are, from the thread's on */

    __device__ __forceinline__ void fetch(const gemm_call &c)
    {
        if (w_bytes <= 0) return;
#pragma unroll
        for (int i = 0; i < UNITS; i++)
            units[i] = i * ROWS_TOGETHER < w_rows
                           ? __ldg((const uint4 *)(w + (size_t)(i * ROWS_TOGETHER) * c.row_bytes))
                           : make_uint4(0, 0, 0, 0);
        w += STAGE_STEP;
        w_bytes -= STAGE_STEP;
    }

    __device__ __forceinline__ void find_tile(const gemm_call &c, const sm90_position &at,
                                              int x_element)
    {
        const int tid = (int)threadIdx.x % WARPGROUP;
        w = c.w + (size_t)at.group * c.w_stride + (size_t)at.column * c.row_bytes;
#pragma unroll 1
        for (int32_t row = tid; row < min((int32_t)T::COLUMNS, c.n_out - at.column);
             row += WARPGROUP)
            prefetch_l2(w + (size_t)row * c.row_bytes, (unsigned)c.row_bytes);
        w += (size_t)(tid / UNITS_OF_ROW) * c.row_bytes + tid % UNITS_OF_ROW * 16;
        w_rows = c.n_out - at.column - tid / UNITS_OF_ROW;
        w_bytes = (int32_t)c.row_bytes - tid % UNITS_OF_ROW * 16;
        fetch(c);
        find_x<T>(&x, c, at, x_element);
    }

    __device__ __forceinline__ void store_unit(unsigned char *w_to, int row, const uint4 &unit)
    {
        enum { PIECES_OF_UNIT = UNIT / 8, WORDS = gemm_stored<F>::WORDS_PER_8 };
        const unsigned words[4] = { unit.x, unit.y, unit.z, unit.w };
        const int piece = (int)threadIdx.x % UNITS_OF_ROW * PIECES_OF_UNIT;
#pragma unroll
        for (int i = 0; i < PIECES_OF_UNIT; i++) {
            unsigned out[4];
            upconvert_8<F>(out, words + i * WORDS);
            *(uint4 *)(w_to + piece_in_stage(row, piece + i)) = make_uint4(out[0], out[1], out[2],
                                                                           out[3]);
        }
    }

    __device__ __forceinline__ void load_stage(const gemm_call &c, unsigned char *to,
                                               uint64_t *full)
    {
        const int row = (int)threadIdx.x % WARPGROUP / UNITS_OF_ROW;
        load_x_async<T>(&x, to);
        barrier_arrive_copies(full);
#pragma unroll
        for (int i = 0; i < UNITS; i++)
            store_unit(to + T::X_BYTES, row + i * ROWS_TOGETHER, units[i]);
        fence_async_proxy();
        barrier_arrive(full);
        fetch(c);
    }

    static __device__ __forceinline__ void announce(uint64_t *full)
    {
        barrier_arrive_copies(full);
        barrier_arrive(full);
    }
};
#endif

template <enum gemm_weight_layout F, class T>
static __global__ void __launch_bounds__(SM90_BOUND(SM90_THREADS), 1)
    sm90_upconvert_kernel(const gemm_call c, int32_t n_row_tiles)
{
    grid_dependency_sync();
#if SM90_CODE
    sm90_body<T, upconvert_source<F, T>, multiplier<F, T>>(c, n_row_tiles,
                                                           c.n_in_padded * 2 / K_BYTES, 2);
#else
    (void)c, (void)n_row_tiles;
    __trap();
#endif
}

template <enum gemm_weight_layout F>
static cudaError_t run(cudaStream_t stream, const gemm_call &c, enum gemm_sm90_tile tile)
{
    if (tile == GEMM_SM90_NARROW)
        return launch_sm90<narrow_tile>(stream, sm90_upconvert_kernel<F, narrow_tile>, c);
    return launch_sm90<wide_tile>(stream, sm90_upconvert_kernel<F, wide_tile>, c);
}

cudaError_t gemm_sm90_upconvert(cudaStream_t stream, enum gemm_weight_layout layout,
                                const struct gemm_call *c, enum gemm_sm90_tile tile)
{
    return layout == GEMM_W4 ? run<GEMM_W4>(stream, *c, tile) : run<GEMM_W8>(stream, *c, tile);
}
