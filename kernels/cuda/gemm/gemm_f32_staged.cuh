/* gemm_f32_staged.cuh - f32 products of many rows by a matrix whose k warps split, through shared
 * memory: routers of prompts.
 *
 * A block has a tile of y and takes the steps of one k warp of the other kernels after the other,
 * each step through a ring of stages that cp.async fills. 8 lanes split a step's k as there; after
 * the last step of a k warp they exchange sums, so that each has the tree's sum of one row, and add
 * it to their totals. So the order is that of gemm_f32.cuh, and x is read once per tile instead of
 * once per 8 x 16 elements. Thread: device; f32_staged_run: engine. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_F32_STAGED_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_F32_STAGED_CUH

#include "kernels/cuda/gemm/gemm_f32.cuh"

enum {
    STAGED_PER = 8 /* a thread's rows and columns: rows are as many as lanes */,
    STAGED_WARP = 2 * STAGED_PER /* a warp's: groups of 8 lanes are 2 by 2 */,
    STAGED_DOWN = 4,
    STAGED_ACROSS = 2,
    STAGED_ROWS = STAGED_DOWN * STAGED_WARP,
    STAGED_COLUMNS = STAGED_ACROSS * STAGED_WARP,
    STAGED_THREADS = STAGED_DOWN * STAGED_ACROSS * WARP,
    STAGED_STAGES = 3,
    STAGED_LOADS = STAGED_THREADS / F32_LANES /* rows of a stage that are copied at a time */
};
static_assert((int)STAGED_PER == F32_LANES, "each lane ends with a row");

/* A step of 32 k. */
struct staged_step {
    float4 x[STAGED_ROWS][F32_LANES], w[STAGED_COLUMNS][F32_LANES];
};

/* What a thread copies into stages: a quad of each of some rows. */
struct staged_source {
    const float *x[STAGED_ROWS / STAGED_LOADS], *w[STAGED_COLUMNS / STAGED_LOADS];
    int32_t k, n_in;
};

/* Rows and columns past the last repeat an existing one. */
static __device__ __forceinline__ staged_source find_source(const gemm_call &c,
                                                            const gemm_rows &rows,
                                                            int32_t first_column)
{
    staged_source s;
    const int32_t at = (int32_t)threadIdx.x / F32_LANES;
    s.k = (int32_t)threadIdx.x % F32_LANES * F32_QUAD;
    s.n_in = c.n_in;
    for (int i = 0; i < STAGED_ROWS / STAGED_LOADS; i++)
        s.x[i] = (const float *)c.x + x_row(c, rows, min(at + i * STAGED_LOADS, rows.n - 1)) + s.k;
    for (int j = 0; j < STAGED_COLUMNS / STAGED_LOADS; j++) {
        const int32_t column = min(first_column + at + j * STAGED_LOADS, c.n_out - 1);
        s.w[j] = (const float *)(const void *)(c.w + (size_t)rows.group * c.w_stride +
                                               (size_t)column * c.row_bytes) +
                 s.k;
    }
    return s;
}

/* Where x ends it continues with zeros; rows of W are padded with zeros to a whole step. */
static __device__ __forceinline__ void copy_step(staged_step *to, const staged_source &s,
                                                 int32_t step)
{
    const int32_t at = (int32_t)threadIdx.x / F32_LANES, lane = (int32_t)threadIdx.x % F32_LANES,
                  k = step * F32_STEP,
                  valid = max(min(s.n_in - k - s.k, (int32_t)F32_QUAD), 0) * (int32_t)sizeof(float);
#pragma unroll
    for (int i = 0; i < STAGED_ROWS / STAGED_LOADS; i++)
        copy_async_16(&to->x[at + i * STAGED_LOADS][lane], valid ? s.x[i] + k : s.x[i] - s.k,
                      valid);
#pragma unroll
    for (int j = 0; j < STAGED_COLUMNS / STAGED_LOADS; j++)
        copy_async_16(&to->w[at + j * STAGED_LOADS][lane], s.w[j] + k, 16);
}

/* Steps in the order of their k warps: 0, 16, 32, .. 1, 17, .. */
static __device__ __forceinline__ int32_t step_after(int32_t step, int32_t n_steps)
{
    return step + F32_SPLIT_K_WARPS < n_steps ? step + F32_SPLIT_K_WARPS
                                              : step % F32_SPLIT_K_WARPS + 1;
}

/* Row i of a thread's sums is row i ^ lane of its group's rows. */
struct staged_sums {
    float v[STAGED_PER][STAGED_PER];
};

static __device__ __forceinline__ void multiply_staged(staged_sums *sums, const staged_step &s,
                                                       int32_t row, int32_t column)
{
    const int32_t lane = (int32_t)threadIdx.x % F32_LANES;
    float4 w[STAGED_PER];
#pragma unroll
    for (int j = 0; j < STAGED_PER; j++) w[j] = s.w[column + j][lane];
#pragma unroll
    for (int i = 0; i < STAGED_PER; i++) {
        const float4 x = s.x[row + (i ^ lane)][lane];
#pragma unroll
        for (int j = 0; j < STAGED_PER; j++) sums->v[i][j] = multiply_quad(sums->v[i][j], w[j], x);
    }
}

/* Adds lanes 4, 2 and 1 apart as add_lanes does, each lane only for the rows that it keeps, and the
 * sums of row `lane` to the totals. */
static __device__ __forceinline__ void add_k_warp(float *totals, staged_sums *sums)
{
#pragma unroll
    for (int apart = F32_LANES / 2; apart > 0; apart /= 2)
#pragma unroll
        for (int i = 0; i < apart; i++)
#pragma unroll
            for (int j = 0; j < STAGED_PER; j++)
                sums->v[i][j] = __fadd_rn(
                    sums->v[i][j], __shfl_xor_sync(0xffffffffu, sums->v[i + apart][j], apart));
#pragma unroll
    for (int j = 0; j < STAGED_PER; j++) totals[j] = __fadd_rn(totals[j], sums->v[0][j]);
    *sums = {};
}

/* Totals of row `lane` of the group's rows. */
static __device__ __forceinline__ void multiply_steps(float *totals, staged_step *ring,
                                                      const staged_source &source, int32_t n_in,
                                                      int32_t row, int32_t column)
{
    const int32_t n_steps = (n_in + F32_STEP - 1) / F32_STEP;
    int32_t next = 0, step = 0;
    staged_sums sums = {};
    for (int i = 0; i < STAGED_STAGES - 1; i++, next = step_after(next, n_steps)) {
        copy_step(&ring[i], source, next);
        copy_async_commit();
    }
    for (int32_t i = 0; i < n_steps; i++) {
        copy_async_wait<STAGED_STAGES - 2>();
        __syncthreads();
        if (i + STAGED_STAGES - 1 < n_steps)
            copy_step(&ring[(i + STAGED_STAGES - 1) % STAGED_STAGES], source, next);
        copy_async_commit();
        next = step_after(next, n_steps);
        multiply_staged(&sums, ring[i % STAGED_STAGES], row, column);
        if (step + F32_SPLIT_K_WARPS >= n_steps) add_k_warp(totals, &sums);
        step = step_after(step, n_steps);
    }
}

static __global__ void __launch_bounds__(STAGED_THREADS, 2) f32_staged_kernel(const gemm_call c)
{
    grid_dependency_sync();
    __shared__ staged_step ring[STAGED_STAGES];
    const gemm_rows rows = rows_of_tile(c, (int32_t)blockIdx.y, STAGED_ROWS);
    if (rows.n == 0) return;
    const int32_t first_column = (int32_t)blockIdx.x * STAGED_COLUMNS,
                  warp = (int32_t)threadIdx.x / WARP,
                  group = (int32_t)threadIdx.x % WARP / F32_LANES;
    const int32_t row = warp / STAGED_ACROSS * STAGED_WARP + group / 2 * STAGED_PER,
                  column = warp % STAGED_ACROSS * STAGED_WARP + group % 2 * STAGED_PER;
    float totals[STAGED_PER];
    for (float &t : totals) t = -0.0f; /* what adds nothing, not even a sign */
    multiply_steps(totals, ring, find_source(c, rows, first_column), c.n_in, row, column);
    const int32_t mine = row + (int32_t)threadIdx.x % F32_LANES;
#pragma unroll
    for (int j = 0; j < STAGED_PER; j += 2)
        if (mine < rows.n && first_column + column + j < c.n_columns)
            store_pair(c, rows, mine, first_column + column + j, totals[j], totals[j + 1]);
}

/* Fewer blocks take longer than the smaller tiles of the other kernels; affects only speed. */
enum { STAGED_BLOCKS_ENOUGH = 40 };

static inline dim3 staged_grid(const gemm_call &c)
{
    return dim3(blocks_for((size_t)c.n_columns, STAGED_COLUMNS), n_tiles_at_most(c, STAGED_ROWS));
}

static inline bool f32_staged_supports(const gemm_call &c)
{
    const dim3 grid = staged_grid(c);
    const size_t group = c.n_groups > 1 ? c.x_group : 0;
    const uintptr_t quads = (uintptr_t)c.x | (c.x_stride | group) * sizeof(float);
    return f32_splits_k((size_t)c.n_out, (size_t)c.n_in) && grid.y <= UINT16_MAX &&
           (size_t)grid.x * grid.y >= STAGED_BLOCKS_ENOUGH && quads % sizeof(float4) == 0;
}

static inline cudaError_t f32_staged_run(cudaStream_t stream, const gemm_call &c)
{
    return launch(stream, f32_staged_kernel, staged_grid(c), dim3(STAGED_THREADS), 0, c);
}

#endif
