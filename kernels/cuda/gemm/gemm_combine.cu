/* gemm_combine.cu - the last GEMM of experts together with the weighted sum of their results, for
 * decode steps: no results in memory, and one launch less.
 *
 * A block has 16 columns of y. Its warps take the groups in turn, each with all of k in ascending
 * order, from rings of their own (gemm_ring.cuh), and leave the results of all slots in shared
 * memory. Then a thread adds the slots of a row, in the order of its choices and as
 * elementwise_combine does. Thread: device; gemm_combine: engine. */
#include "kernels/cuda/gemm/gemm_ring_x.cuh"

enum { COMBINE_STRIDE = SKINNY_W_ROWS + 1 /* of results: rows begin in different banks */ };
enum { COMBINE_ROWS = RING_THREADS / SKINNY_W_ROWS };

struct combine_call {
    gemm_call c;
    gemm_choices to;
};

/* The block's tiles of columns, and of each the warp's tiles of rows. */
template <enum gemm_weight_layout F> struct combine_jobs {
    const gemm_call *c;
    const ring_tiles *tiles;
    int32_t per_tile, end;
    __device__ __forceinline__ gemm_rows rows_of(int32_t job) const
    {
        return tiles
            ->of[(int32_t)threadIdx.x / WARP + (per_tile > 1 ? job % per_tile * RING_WARPS : 0)];
    }
    __device__ __forceinline__ int32_t tile_of(int32_t job) const
    {
        return (int32_t)blockIdx.x + (per_tile > 1 ? job / per_tile : job) * (int32_t)gridDim.x;
    }
    __device__ __forceinline__ ring_run run_of(int32_t job) const
    {
        return ring_run_of<F>(*c, rows_of(job).group, tile_of(job), 0, c->n_in / SKINNY_SPAN);
    }
};

static __device__ __forceinline__ int32_t combine_tiles(const gemm_call &c)
{
    return (c.n_out + SKINNY_W_ROWS - 1) / SKINNY_W_ROWS;
}

template <enum gemm_weight_layout F>
static __device__ __forceinline__ combine_jobs<F> combine_jobs_of(const gemm_call &c,
                                                                  const ring_tiles &tiles)
{
    const int32_t warp = (int32_t)threadIdx.x / WARP, step = (int32_t)gridDim.x,
                  n_tiles = (combine_tiles(c) - (int32_t)blockIdx.x + step - 1) / step,
                  per_tile = (tiles.n - warp + RING_WARPS - 1) / RING_WARPS;
    return combine_jobs<F>{ &c, &tiles, per_tile, tiles.n > warp ? n_tiles * per_tile : 0 };
}

/* What a job's sums are multiplied by, for the lane's two columns: read a job ahead. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ float2 combine_scales(const combine_jobs<F> &jobs, int32_t job)
{
    if (!(F == GEMM_W8 || F == GEMM_W4) || job >= jobs.end) return make_float2(1, 1);
    const int32_t group = jobs.rows_of(job).group,
                  column = jobs.tile_of(job) * SKINNY_W_ROWS + (int32_t)threadIdx.x % WARP / 4;
    return make_float2(column_scale<F>(*jobs.c, group, column),
                       column_scale<F>(*jobs.c, group, column + 8));
}

/* Leaves a job's results by slot: results [n_slots][COMBINE_STRIDE]. */
static __device__ __forceinline__ void combine_keep(const gemm_rows &rows, const ring_sums &sums,
                                                    float2 scales, float *results)
{
    const int32_t lane = (int32_t)threadIdx.x % WARP;
    for (int i = 0; i < 4; i++) {
        const int32_t at = lane / 4 + i / 2 * 8, row = lane % 4 * 2 + i % 2;
        if (row < rows.n)
            results[(rows.begin + row) * COMBINE_STRIDE + at] = __fmul_rn(
                sums.v[i], i / 2 ? scales.y : scales.x);
    }
}

/* What a thread adds to: an element of the tile. */
struct combine_element {
    float *y;
    float before;
    int32_t row, at;
};
static __device__ __forceinline__ combine_element combine_element_of(const combine_call &all,
                                                                     int32_t tile)
{
    combine_element e = { nullptr, 0, (int32_t)threadIdx.x / SKINNY_W_ROWS,
                          (int32_t)threadIdx.x % SKINNY_W_ROWS };
    const int32_t column = tile * SKINNY_W_ROWS + e.at;
    if (e.row >= all.to.n_rows || column >= all.c.n_out) return e;
    e.y = all.to.y + (size_t)e.row * all.to.y_stride + column;
    if (all.to.add) e.before = *e.y;
    return e;
}

struct combine_shared {
    ring_tiles tiles;
    int32_t index[RING_TILES_MAX];
    float weights[RING_TILES_MAX];
};

static __device__ __forceinline__ void combine_add(const combine_shared &s, const gemm_choices &to,
                                                   const combine_element &e, const float *results)
{
    if (!e.y) return;
    float sum = e.before;
    for (int32_t j = 0; j < to.n_used; j++) {
        const int32_t choice = e.row * to.n_used + j;
        sum = fmaf(s.weights[choice], results[s.index[choice] * COMBINE_STRIDE + e.at], sum);
    }
    *e.y = sum;
}

/* scales: of the first job. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void combine_sums(const combine_call &all,
                                                    const combine_shared &s,
                                                    const combine_jobs<F> &jobs, ring_feed *feed,
                                                    float2 scales, unsigned char *ring,
                                                    const uint16_t *x, float *results)
{
    const int32_t lane = (int32_t)threadIdx.x % WARP, n_units = all.c.n_in / ring_shape<F>::K;
    int slot = 0;
    int32_t job = 0;
#pragma unroll 1
    for (int32_t tile = (int32_t)blockIdx.x; tile < combine_tiles(all.c);
         tile += (int32_t)gridDim.x) {
        const combine_element e = combine_element_of(all, tile);
#pragma unroll 1
        for (int32_t i = 0; i < jobs.per_tile; i++, job++) {
            const gemm_rows rows = jobs.rows_of(job);
            const size_t row = (size_t)(rows.begin + min(lane / 4, rows.n - 1));
            const float2 next_scales = combine_scales(jobs, job + 1);
            ring_sums sums = ring_sum<F, 1>(feed, &slot, jobs, n_units, ring,
                                            x + row * ring_x_stride(all.c.n_in) +
                                                lane % 4 * ring_shape<F>::ELEMENTS);
            if (F == GEMM_F8) ring_restore_nan<F, 1>(&sums, jobs.run_of(job));
            combine_keep(rows, sums, scales, results);
            scales = next_scales;
        }
        __syncthreads();
        combine_add(s, all.to, e, results);
        __syncthreads();
    }
}

template <enum gemm_weight_layout F>
static __global__ void __launch_bounds__(RING_THREADS, 2)
    combine_kernel(const __grid_constant__ combine_call all)
{
    __shared__ combine_shared s;
    unsigned char *ring = shared_memory();
    float *results = (float *)(void *)(ring + ring_shape<F>::ALL_BYTES);
    uint16_t *x = (uint16_t *)(void *)(results + (all.c.n_rows + 3) / 4 * 4 * COMBINE_STRIDE);
    const bool early = all.c.begin_is_read;
    if (!early) grid_dependency_sync();
    if (threadIdx.x < WARP) ring_find_tiles(all.c, &s.tiles);
    __syncthreads();
    const combine_jobs<F> jobs = combine_jobs_of<F>(all.c, s.tiles);
    ring_feed feed = ring_fill<F, 1>(jobs, ring);
    const float2 scales = combine_scales(jobs, 0);
    if (early) grid_dependency_sync();
    const int32_t n_choices = all.to.n_rows * all.to.n_used;
    for (int32_t i = (int32_t)threadIdx.x; i < n_choices; i += RING_THREADS)
        s.index[i] = all.to.index[i], s.weights[i] = all.to.weights[i];
    ring_x_copy(all.c, all.c.n_rows, x);
    __syncthreads();
    combine_sums<F>(all, s, jobs, &feed, scales, ring, x, results);
}

/* ---- the host ---- */

enum { COMBINE_STATIC_SHARED = 4 * 1024 /* with the system's KiB */ };

static size_t shared_bytes(enum gemm_weight_layout layout, const gemm_call &c)
{
    return ring_bytes(layout) + ring_x_bytes(c.n_in, c.n_rows) +
           (size_t)((c.n_rows + 3) / 4 * 4 * COMBINE_STRIDE) * sizeof(float);
}

bool gemm_combine_supports(enum gemm_weight_layout layout, const struct gemm_call *c,
                           const struct gemm_choices *to)
{
    if (layout == GEMM_F32 || c->x_scales || c->x_f32 || c->bias || c->paired || !c->begin ||
        c->x_rows || c->epilogue != GEMM_STORE || c->n_in % SKINNY_SPAN != 0)
        return false;
    if (c->n_rows > RING_TILES_MAX || c->n_x_rows != c->n_rows || to->n_rows > COMBINE_ROWS ||
        to->n_rows * to->n_used > c->n_rows || c->x_stride % 8 != 0 || (uintptr_t)c->x % 16 != 0)
        return false;
    return shared_bytes(layout, *c) + COMBINE_STATIC_SHARED <= gemm_this_device().shared_max;
}

template <enum gemm_weight_layout F>
static cudaError_t run(cudaStream_t stream, const combine_call &all)
{
    const size_t shared = shared_bytes(F, all.c);
    return launch(stream, combine_kernel<F>,
                  dim3(ring_grid(blocks_for((size_t)all.c.n_out, SKINNY_W_ROWS),
                                 shared + COMBINE_STATIC_SHARED)),
                  dim3(RING_THREADS), shared, all);
}

cudaError_t gemm_combine(cudaStream_t stream, enum gemm_weight_layout layout,
                         const struct gemm_call *c, const struct gemm_choices *to)
{
    const combine_call all = { *c, *to };
    if (gemm_combine_one_supports(layout, c, to)) return gemm_combine_one(stream, layout, c, to);
    return ring_run_layout(layout, [&](auto f) { return run<decltype(f)::value>(stream, all); });
}
