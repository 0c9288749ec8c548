/* gemm_f32_staged.cuh - f32 products of many rows by a matrix whose k warps split, through shared
 * memory: routers of prompts.
 *
 * A block has a tile of y and takes the steps of one k warp of the other kernels after the other,
 * through a ring of stages that cp.async fills. 8 lanes split a step's k as there; after the last
 * step of a k warp they exchange sums, so that each has the tree's sum of one row, and add it to
 * their totals. So the order is that of gemm_f32.cuh, and x is read once per tile instead of once
 * per 8 x 16 elements. Thread: device; f32_staged_run: engine. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_F32_STAGED_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_F32_STAGED_CUH

#include "kernels/cuda/gemm/gemm_f32.cuh"

enum {
    STAGED_PER_ROWS = 8 /* a thread's rows: as many as lanes split k, so that each ends with one */,
    STAGED_DOWN = 4,
    STAGED_ACROSS = 2 /* warps of a block */,
    STAGED_ROWS = STAGED_DOWN * 2 * STAGED_PER_ROWS /* groups of 8 lanes are 2 by 2 */,
    STAGED_THREADS = STAGED_DOWN * STAGED_ACROSS * WARP,
    STAGED_LOADS = STAGED_THREADS / F32_LANES /* rows of a step that are copied at a time */,
    STAGED_STEPS = 2 /* of a stage */,
    STAGED_STAGES = 3
};
static_assert((int)STAGED_PER_ROWS == F32_LANES, "each lane ends with a row");

/* PER_COLUMNS: a thread's. */
template <int PER_COLUMNS_> struct staged_tile {
    enum {
        PER_COLUMNS = PER_COLUMNS_,
        WARP_COLUMNS = 2 * PER_COLUMNS,
        COLUMNS = STAGED_ACROSS * WARP_COLUMNS,
        X_LOADS = STAGED_ROWS / STAGED_LOADS,
        W_LOADS = COLUMNS / STAGED_LOADS,
        BLOCKS_PER_SM = PER_COLUMNS > 8 ? 1 : 2
    };
    struct staged_step {
        float4 x[STAGED_ROWS][F32_LANES], w[COLUMNS][F32_LANES];
    };
    struct staged_steps {
        staged_step steps[STAGED_STEPS];
    };
};

/* What a thread copies into stages: a quad of each of some rows. */
template <class T> struct staged_source {
    const float *x[T::X_LOADS], *w[T::W_LOADS];
    int32_t k, n_in;
};

/* Rows and columns past the last repeat an existing one. */
template <class T>
static __device__ __forceinline__ staged_source<T> find_source(const gemm_call &c,
                                                               const gemm_rows &rows,
                                                               int32_t first_column)
{
    staged_source<T> s;
    const int32_t at = (int32_t)threadIdx.x / F32_LANES;
    s.k = (int32_t)threadIdx.x % F32_LANES * F32_QUAD;
    s.n_in = c.n_in;
    for (int i = 0; i < T::X_LOADS; i++)
        s.x[i] = (const float *)c.x + x_row(c, rows, min(at + i * STAGED_LOADS, rows.n - 1)) + s.k;
    for (int j = 0; j < T::W_LOADS; j++) {
        const int32_t column = min(first_column + at + j * STAGED_LOADS, c.n_out - 1);
        s.w[j] = (const float *)(const void *)(c.w + (size_t)rows.group * c.w_stride +
                                               (size_t)column * c.row_bytes) +
                 s.k;
    }
    return s;
}

/* Where x ends it continues with zeros, unless it has WHOLE steps; rows of W are padded with zeros
 * to a whole step. */
template <class T, bool WHOLE>
static __device__ __forceinline__ void copy_step(typename T::staged_step *to,
                                                 const staged_source<T> &s, int32_t step)
{
    const int32_t at = (int32_t)threadIdx.x / F32_LANES, lane = (int32_t)threadIdx.x % F32_LANES,
                  k = step * F32_STEP,
                  left = WHOLE ? F32_QUAD : min(s.n_in - k - s.k, (int32_t)F32_QUAD),
                  valid = max(left, 0) * (int32_t)sizeof(float);
#pragma unroll
    for (int i = 0; i < T::X_LOADS; i++)
        copy_async_16(&to->x[at + i * STAGED_LOADS][lane],
                      WHOLE || valid ? s.x[i] + k : s.x[i] - s.k, valid);
#pragma unroll
    for (int j = 0; j < T::W_LOADS; j++)
        copy_async_16(&to->w[at + j * STAGED_LOADS][lane], s.w[j] + k, 16);
}

/* Steps in the order of their k warps: 0, 16, 32, .. 1, 17, .. */
static __device__ __forceinline__ int32_t step_after(int32_t step, int32_t n_steps)
{
    return step + F32_SPLIT_K_WARPS < n_steps ? step + F32_SPLIT_K_WARPS
                                              : step % F32_SPLIT_K_WARPS + 1;
}

/* Copies the i-th stage, if there is one, and moves *step on. */
template <class T, bool WHOLE>
static __device__ __forceinline__ void copy_stage(typename T::staged_steps *ring,
                                                  const staged_source<T> &s, int32_t i,
                                                  int32_t n_steps, int32_t *step)
{
#pragma unroll
    for (int j = 0; j < STAGED_STEPS; j++) {
        if (i * STAGED_STEPS + j >= n_steps) break;
        copy_step<T, WHOLE>(&ring[i % STAGED_STAGES].steps[j], s, *step);
        *step = step_after(*step, n_steps);
    }
    copy_async_commit();
}

/* Row i of a thread's sums is row i ^ lane of its group's rows. */
template <class T> struct staged_sums {
    float v[STAGED_PER_ROWS][T::PER_COLUMNS];
};

/* Where a thread's operands are in a step, in quads. */
struct staged_place {
    int32_t x[STAGED_PER_ROWS], w;
};

static __device__ __forceinline__ staged_place find_place(int32_t row, int32_t column)
{
    staged_place p;
    const int32_t lane = (int32_t)threadIdx.x % F32_LANES;
#pragma unroll
    for (int i = 0; i < STAGED_PER_ROWS; i++) p.x[i] = (row + (i ^ lane)) * F32_LANES + lane;
    p.w = column * F32_LANES + lane;
    return p;
}

template <class T>
static __device__ __forceinline__ void multiply_staged(staged_sums<T> *sums,
                                                       const typename T::staged_step &s,
                                                       const staged_place &at)
{
    const float4 *all_x = (const float4 *)(const void *)s.x,
                 *all_w = (const float4 *)(const void *)s.w + at.w;
    float4 x[STAGED_PER_ROWS];
#pragma unroll
    for (int i = 0; i < STAGED_PER_ROWS; i++) x[i] = all_x[at.x[i]];
#pragma unroll
    for (int j = 0; j < T::PER_COLUMNS; j++) {
        const float4 w = all_w[j * F32_LANES];
#pragma unroll
        for (int i = 0; i < STAGED_PER_ROWS; i++)
            sums->v[i][j] = multiply_quad(sums->v[i][j], w, x[i]);
    }
}

/* Adds lanes APART apart, each for the rows that it keeps. */
template <class T, int APART> static __device__ __forceinline__ void add_apart(staged_sums<T> *sums)
{
#pragma unroll
    for (int i = 0; i < APART; i++)
#pragma unroll
        for (int j = 0; j < T::PER_COLUMNS; j++)
            sums->v[i][j] = __fadd_rn(sums->v[i][j],
                                      __shfl_xor_sync(0xffffffffu, sums->v[i + APART][j], APART));
}

/* Adds lanes as add_lanes does, and the sums of row `lane` to the totals. */
template <class T>
static __device__ __forceinline__ void add_k_warp(float *totals, staged_sums<T> *sums)
{
    add_apart<T, 4>(sums);
    add_apart<T, 2>(sums);
    add_apart<T, 1>(sums);
#pragma unroll
    for (int j = 0; j < T::PER_COLUMNS; j++) totals[j] = __fadd_rn(totals[j], sums->v[0][j]);
#pragma unroll
    for (int i = 0; i < STAGED_PER_ROWS; i++)
#pragma unroll
        for (int j = 0; j < T::PER_COLUMNS; j++) sums->v[i][j] = 0;
}

/* Totals of row `lane` of the group's rows. */
template <class T, bool WHOLE>
static __device__ __forceinline__ void multiply_stages(float *totals,
                                                       typename T::staged_steps *ring,
                                                       const staged_source<T> &source,
                                                       const staged_place &at)
{
    const int32_t n_steps = (source.n_in + F32_STEP - 1) / F32_STEP,
                  n_stages = (n_steps + STAGED_STEPS - 1) / STAGED_STEPS;
    int32_t next = 0, step = 0;
    staged_sums<T> sums = {};
    for (int32_t i = 0; i < STAGED_STAGES - 1; i++)
        copy_stage<T, WHOLE>(ring, source, i, n_steps, &next);
    for (int32_t i = 0; i < n_stages; i++) {
        copy_async_wait<STAGED_STAGES - 2>();
        __syncthreads();
        copy_stage<T, WHOLE>(ring, source, i + STAGED_STAGES - 1, n_steps, &next);
#pragma unroll 1
        for (int j = 0; j < STAGED_STEPS && i * STAGED_STEPS + j < n_steps; j++) {
            multiply_staged<T>(&sums, ring[i % STAGED_STAGES].steps[j], at);
            if (step + F32_SPLIT_K_WARPS >= n_steps) add_k_warp<T>(totals, &sums);
            step = step_after(step, n_steps);
        }
    }
}

/* Of a thread's sums in a tile: the first row and the first column. */
struct staged_corner {
    int32_t row, column;
};
template <class T> static __device__ __forceinline__ staged_corner corner_of(int32_t thread)
{
    const int32_t warp = thread / WARP, group = thread % WARP / F32_LANES;
    return staged_corner{ (warp / STAGED_ACROSS * 2 + group / 2) * STAGED_PER_ROWS,
                          (warp % STAGED_ACROSS * 2 + group % 2) * T::PER_COLUMNS };
}

template <class T, bool WHOLE>
static __global__ void __launch_bounds__(STAGED_THREADS, T::BLOCKS_PER_SM)
    f32_staged_kernel(const __grid_constant__ gemm_call c)
{
    __shared__ gemm_rows kept; /* for the end, to save registers */
    grid_dependency_sync();
    typename T::staged_steps *ring = (typename T::staged_steps *)(void *)shared_memory();
    const gemm_rows rows = rows_of_tile(c, (int32_t)blockIdx.y, STAGED_ROWS);
    if (rows.n == 0) return;
    if (threadIdx.x == 0) kept = rows;
    const int32_t first_column = (int32_t)blockIdx.x * T::COLUMNS;
    const staged_corner at = corner_of<T>((int32_t)threadIdx.x);
    float totals[T::PER_COLUMNS];
    for (float &t : totals) t = -0.0f; /* what adds nothing, not even a sign */
    multiply_stages<T, WHOLE>(totals, ring, find_source<T>(c, rows, first_column),
                              find_place(at.row, at.column));
    unsigned thread = threadIdx.x;
    compute_here(&thread); /* and its corner again */
    const staged_corner of = corner_of<T>((int32_t)thread);
    const gemm_rows stored = kept;
    const int32_t mine = of.row + (int32_t)thread % F32_LANES,
                  column = (int32_t)blockIdx.x * T::COLUMNS + of.column;
#pragma unroll
    for (int j = 0; j < T::PER_COLUMNS; j += 2)
        if (mine < stored.n && column + j < c.n_columns)
            store_pair(c, stored, mine, column + j, totals[j], totals[j + 1]);
}

/* Affect only speed: with fewer blocks the smaller tiles of the other kernels are faster; with as
 * many, and columns that fill them, a block has wide tiles. */
enum { STAGED_BLOCKS_ENOUGH = 40, STAGED_BLOCKS_WIDE = 96 };

template <class T> static inline dim3 staged_grid(const gemm_call &c)
{
    return dim3(blocks_for((size_t)c.n_columns, T::COLUMNS), n_tiles_at_most(c, STAGED_ROWS));
}

static inline bool f32_staged_supports(const gemm_call &c)
{
    const dim3 grid = staged_grid<staged_tile<8>>(c);
    const size_t group = c.n_groups > 1 ? c.x_group : 0;
    const uintptr_t quads = (uintptr_t)c.x | (c.x_stride | group) * sizeof(float);
    return f32_splits_k((size_t)c.n_out, (size_t)c.n_in) && grid.y <= UINT16_MAX &&
           (size_t)grid.x * grid.y >= STAGED_BLOCKS_ENOUGH && quads % sizeof(float4) == 0;
}

template <class T> static inline cudaError_t run_staged(cudaStream_t stream, const gemm_call &c)
{
    const size_t shared = STAGED_STAGES * sizeof(typename T::staged_steps);
    return c.n_in % F32_STEP == 0 ? launch(stream, f32_staged_kernel<T, true>, staged_grid<T>(c),
                                           dim3(STAGED_THREADS), shared, c)
                                  : launch(stream, f32_staged_kernel<T, false>, staged_grid<T>(c),
                                           dim3(STAGED_THREADS), shared, c);
}

static inline cudaError_t f32_staged_run(cudaStream_t stream, const gemm_call &c)
{
    typedef staged_tile<16> wide;
    const dim3 grid = staged_grid<wide>(c);
    const bool fills = blocks_for((size_t)c.n_columns, wide::COLUMNS / 2) % 2 == 0;
    return fills && (size_t)grid.x * grid.y >= STAGED_BLOCKS_WIDE
               ? run_staged<wide>(stream, c)
               : run_staged<staged_tile<8>>(stream, c);
}

#endif
