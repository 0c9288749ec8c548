/* gemm_f32.cu - GEMM of f32 by f32: routers in every step, and the exact path, in plain fma.
 *
 * k is split over 8 lanes, and for narrow matrices with long rows also over 16 warps. Which of the
 * two depends only on the matrix, and all tile shapes add in the same order, so a row's bits do not
 * depend on how many rows are computed together. docs/kernels.md has the order and the bounds.
 * Thread: device; gemm_f32: engine. */
#include "kernels/cuda/gemm/gemm_f32_staged.cuh"

/* A thread has PER_ROWS by PER_COLUMNS of y for its k's. The 4 groups of 8 lanes of a warp are
 * arranged ACROSS side by side, the others below each other; K_WARPS of a block's warps split k,
 * the others are WARPS_ACROSS side by side. AHEAD steps are loaded before they are multiplied. */
template <int K_WARPS_, int WARPS_DOWN, int WARPS_ACROSS_, int PER_ROWS_, int PER_COLUMNS_,
          int ACROSS_, int AHEAD_>
struct f32_tile {
    enum {
        K_WARPS = K_WARPS_,
        WARPS_ACROSS = WARPS_ACROSS_,
        PER_ROWS = PER_ROWS_,
        PER_COLUMNS = PER_COLUMNS_,
        ACROSS = ACROSS_,
        AHEAD = AHEAD_,
        DOWN = WARP / F32_LANES / ACROSS,
        THREADS = K_WARPS * WARPS_DOWN * WARPS_ACROSS * WARP,
        WARP_ROWS = DOWN * PER_ROWS,
        WARP_COLUMNS = ACROSS * PER_COLUMNS,
        ROWS = WARPS_DOWN * WARP_ROWS,
        COLUMNS = WARPS_ACROSS * WARP_COLUMNS
    };
    static_assert(COLUMNS % 2 == 0, "pairs of columns");
    static_assert(sizeof(float) * K_WARPS * ROWS * (COLUMNS + 1) <= SHARED_USUAL,
                  "sums meet in shared memory");
};

/* A thread's operands; past the last row or column it repeats an existing one, and its sums are
 * dropped at the end. */
template <class T> struct f32_operands {
    const float *x;
    unsigned x_stride; /* floats */
    unsigned x_rows[T::PER_ROWS];
    const unsigned char *w; /* the thread's column 0 */
    unsigned w_columns;     /* existing columns from it on */
    unsigned row_bytes;
    int32_t n_in, lane_k; /* lane_k: the thread's first k in a step */
    bool aligned;         /* rows of x are, to 16 bytes */
};

struct f32_position {
    int32_t k_warp, row, column; /* the thread's first in the block's tile */
};

template <class T> static __device__ __forceinline__ f32_position position_in_tile()
{
    const int32_t warp = (int32_t)threadIdx.x / WARP,
                  eighth = (int32_t)threadIdx.x % WARP / F32_LANES, of_tile = warp / T::K_WARPS;
    return f32_position{
        warp % T::K_WARPS,
        of_tile / T::WARPS_ACROSS * T::WARP_ROWS + eighth / T::ACROSS * T::PER_ROWS,
        of_tile % T::WARPS_ACROSS * T::WARP_COLUMNS + eighth % T::ACROSS * T::PER_COLUMNS
    };
}

template <class T>
static __device__ __forceinline__ f32_operands<T> find_operands(const gemm_call &c,
                                                                const gemm_rows &rows,
                                                                const f32_position &at,
                                                                int32_t first_column)
{
    f32_operands<T> p;
    const int32_t column = min(first_column + at.column, c.n_out - 1);
    p.x = (const float *)c.x + (size_t)rows.group * c.x_group;
    p.x_stride = (unsigned)c.x_stride;
    p.aligned = ((uintptr_t)p.x | (uintptr_t)p.x_stride * sizeof(float)) % sizeof(float4) == 0;
    for (int i = 0; i < T::PER_ROWS; i++) {
        const int32_t row = rows.begin + min(at.row + i, rows.n - 1);
        p.x_rows[i] = (unsigned)(c.x_rows ? c.x_rows[row] : row);
    }
    p.row_bytes = (unsigned)c.row_bytes;
    p.w = c.w + (size_t)rows.group * c.w_stride + (size_t)(unsigned)column * p.row_bytes;
    p.w_columns = (unsigned)(c.n_out - 1 - column);
    p.n_in = c.n_in;
    p.lane_k = (int32_t)threadIdx.x % F32_LANES * F32_QUAD;
    return p;
}

/* Loads four elements of row i of x; zeros from n_in on, where the row may end. */
template <bool WHOLE, class T>
static __device__ __forceinline__ float4 read_x(const f32_operands<T> &p, int i, int32_t k)
{
    const float *x = p.x + (size_t)p.x_rows[i] * p.x_stride + k;
    if (WHOLE) return __ldca((const float4 *)x);
    float4 v = make_float4(0, 0, 0, 0);
    if (k < p.n_in) v.x = x[0];
    if (k + 1 < p.n_in) v.y = x[1];
    if (k + 2 < p.n_in) v.z = x[2];
    if (k + 3 < p.n_in) v.w = x[3];
    return v;
}

/* Loads from W, whose rows are padded with zeros beyond a step. */
template <class T>
static __device__ __forceinline__ float4 read_w(const f32_operands<T> &p, int j, int32_t k)
{
    const unsigned column = min((unsigned)j, p.w_columns);
    return __ldg((const float4 *)(p.w + (size_t)column * p.row_bytes) + k / F32_QUAD);
}

template <class T> struct f32_sums {
    float v[T::PER_ROWS][T::PER_COLUMNS];
};

/* Multiplies step `step` of 32 k. */
template <bool WHOLE, class T>
static __device__ __forceinline__ void multiply_step(f32_sums<T> *sums, const f32_operands<T> &p,
                                                     int32_t step)
{
    const int32_t k = step * F32_STEP + p.lane_k;
    float4 w[T::PER_COLUMNS];
#pragma unroll
    for (int j = 0; j < T::PER_COLUMNS; j++) w[j] = read_w<T>(p, j, k);
#pragma unroll
    for (int i = 0; i < T::PER_ROWS; i++) {
        const float4 x = read_x<WHOLE, T>(p, i, k);
#pragma unroll
        for (int j = 0; j < T::PER_COLUMNS; j++)
            sums->v[i][j] = multiply_quad(sums->v[i][j], w[j], x);
    }
}

/* AHEAD whole steps below n_whole: all loads first. */
template <class T>
static __device__ __forceinline__ void multiply_ahead(f32_sums<T> *sums, const f32_operands<T> &p,
                                                      int32_t step, int32_t n_whole)
{
    float4 w[T::AHEAD][T::PER_COLUMNS], x[T::AHEAD][T::PER_ROWS];
#pragma unroll
    for (int a = 0; a < T::AHEAD; a++) {
        const int32_t at = step + a * T::K_WARPS, k = at * F32_STEP + p.lane_k;
#pragma unroll
        for (int j = 0; j < T::PER_COLUMNS; j++)
            w[a][j] = at < n_whole ? read_w<T>(p, j, k) : make_float4(0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < T::PER_ROWS; i++)
            x[a][i] = at < n_whole ? read_x<true, T>(p, i, k) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int a = 0; a < T::AHEAD; a++) {
        if (step + a * T::K_WARPS >= n_whole) break;
#pragma unroll
        for (int i = 0; i < T::PER_ROWS; i++)
#pragma unroll
            for (int j = 0; j < T::PER_COLUMNS; j++)
                sums->v[i][j] = multiply_quad(sums->v[i][j], w[a][j], x[a][i]);
    }
}

/* The thread's sums: steps k_warp, k_warp + K_WARPS, .. */
template <class T>
static __device__ __forceinline__ void multiply_all(f32_sums<T> *sums, const f32_operands<T> &p,
                                                    int32_t step)
{
    const int32_t n_steps = (p.n_in + F32_STEP - 1) / F32_STEP,
                  n_whole = p.aligned ? p.n_in / F32_STEP : 0;
    if (T::AHEAD > 1) {
        for (; step < n_whole; step += T::AHEAD * T::K_WARPS)
            multiply_ahead<T>(sums, p, step, n_whole);
        /* the last round may have had fewer steps */
        while (step - T::K_WARPS >= n_whole) step -= T::K_WARPS;
    } else {
        for (; step < n_whole; step += T::K_WARPS) multiply_step<true, T>(sums, p, step);
    }
    for (; step < n_steps; step += T::K_WARPS) multiply_step<false, T>(sums, p, step);
}

enum {
    F32_SKINNY_ROWS = 8 /* rows up to which reading W is the bottleneck */,
    F32_PREFETCH = 16 * 1024 /* bytes of each of its rows of W */
};

/* Prefetches a block's rows of W before it waits for its x. */
template <class T> static __device__ __forceinline__ void f32_prefetch(const gemm_call &c)
{
    const int32_t row = (int32_t)(blockIdx.y * T::COLUMNS + threadIdx.x);
    if (!PREFETCHES_L2 || c.n_rows > F32_SKINNY_ROWS || blockIdx.x > 0 || c.n_groups > 1 ||
        threadIdx.x >= (unsigned)T::COLUMNS || row >= c.n_out)
        return;
    prefetch_l2(c.w + (size_t)row * c.row_bytes,
                (unsigned)min(c.row_bytes, (size_t)F32_PREFETCH) / 16 * 16);
}

template <class T>
static __global__ void __launch_bounds__(T::THREADS, T::THREADS < 512 ? 2 : 1)
    f32_kernel(const gemm_call c)
{
    f32_prefetch<T>(c);
    grid_dependency_sync();
    __shared__ float part[T::K_WARPS][T::ROWS][T::COLUMNS + 1];
    const gemm_rows rows = rows_of_tile(c, (int32_t)blockIdx.x, T::ROWS);
    if (rows.n == 0) return;
    const int32_t first_column = (int32_t)blockIdx.y * T::COLUMNS;
    const f32_position at = position_in_tile<T>();
    f32_sums<T> sums = {};
    multiply_all<T>(&sums, find_operands<T>(c, rows, at, first_column), at.k_warp);
#pragma unroll
    for (int i = 0; i < T::PER_ROWS; i++)
#pragma unroll
        for (int j = 0; j < T::PER_COLUMNS; j++) {
            const float sum = add_lanes(sums.v[i][j]);
            if (threadIdx.x % F32_LANES == 0) part[at.k_warp][at.row + i][at.column + j] = sum;
        }
    __syncthreads();
    for (int32_t i = (int32_t)threadIdx.x; i < T::ROWS * T::COLUMNS / 2; i += T::THREADS) {
        const int32_t row = i / (T::COLUMNS / 2), column = i % (T::COLUMNS / 2) * 2;
        if (row >= rows.n || first_column + column >= c.n_columns) continue;
        float first = part[0][row][column], second = part[0][row][column + 1];
        for (int warp = 1; warp < T::K_WARPS; warp++) {
            first = __fadd_rn(first, part[warp][row][column]);
            second = __fadd_rn(second, part[warp][row][column + 1]);
        }
        store_pair(c, rows, row, first_column + column, first, second);
    }
}

/* ---- shapes: one row, some, and many ---- */

template <class T> static size_t n_blocks_of(const gemm_call &c)
{
    return (size_t)n_tiles_at_most(c, T::ROWS) * blocks_for((size_t)c.n_columns, T::COLUMNS);
}

template <class T> static cudaError_t run(cudaStream_t stream, const gemm_call &c)
{
    const dim3 grid(n_tiles_at_most(c, T::ROWS), blocks_for((size_t)c.n_columns, T::COLUMNS));
    return launch(stream, f32_kernel<T>, grid, dim3(T::THREADS), 0, c);
}

/* blocks of the largest tile: half the SMs of a GPU; affects only speed */
enum { F32_BLOCKS_ENOUGH = 64 };

template <class ONE, class SOME, class MANY>
static cudaError_t run_fitting(cudaStream_t stream, const gemm_call &c)
{
    const size_t rows = c.begin ? blocks_for((size_t)c.n_rows, (size_t)c.n_groups)
                                : (size_t)c.n_rows;
    if (rows == 1) return run<ONE>(stream, c);
    if (rows <= SOME::ROWS || n_blocks_of<MANY>(c) < F32_BLOCKS_ENOUGH) return run<SOME>(stream, c);
    return run<MANY>(stream, c);
}

cudaError_t gemm_f32(cudaStream_t stream, const struct gemm_call *c)
{
    enum { K = F32_SPLIT_K_WARPS };
    if (c->x_stride > UINT32_MAX || c->row_bytes > UINT32_MAX) return cudaErrorInvalidValue;
    if (f32_staged_supports(*c)) return f32_staged_run(stream, *c);
    if (f32_splits_k((size_t)c->n_out, (size_t)c->n_in))
        return run_fitting<f32_tile<K, 1, 1, 1, 1, 4, 4>, f32_tile<K, 1, 1, 8, 1, 4, 1>,
                           f32_tile<K, 1, 1, 4, 8, 2, 1>>(stream, *c);
    return run_fitting<f32_tile<1, 1, 4, 1, 1, 4, 8>, f32_tile<1, 1, 4, 8, 1, 4, 2>,
                       f32_tile<1, 2, 4, 8, 4, 2, 1>>(stream, *c);
}
