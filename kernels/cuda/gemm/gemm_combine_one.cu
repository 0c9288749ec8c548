/* gemm_combine_one.cu - the last GEMM of the experts of one row together with the weighted sum of
 * their results. The bits are gemm_combine.cu's, whose calls come here first.
 *
 * A warp has one of the row's slots, reads its x and its expert's rows of W, and leaves 16 results;
 * then a thread adds a column's. One block per SM: two would come to those SMs that are free first,
 * and leave others without work. Thread: device; gemm_combine_one: engine. */
#include "kernels/cuda/gemm/gemm_one_row.cuh"

struct combine_one_call {
    gemm_call c;
    gemm_choices to;
    int32_t n_tiles, per_block; /* tiles of columns; of a block, rounded down */
};

/* The warp's slots' tiles: of its group, one of each of the block's tiles of columns. */
template <enum gemm_weight_layout F> struct combine_one_jobs {
    const gemm_call *c;
    gemm_rows rows;
    int end;
    static __device__ __forceinline__ int tile_of(int i)
    {
        return (int)blockIdx.x + i * (int)gridDim.x;
    }
    __device__ __forceinline__ ring_run run_of(int i) const
    {
        return ring_run_of<F>(*c, rows.group, tile_of(i), 0, c->n_in / SKINNY_SPAN);
    }
};

struct combine_one_shared {
    one_groups groups[RING_WARPS];
    float results[2][RING_WARPS][SKINNY_W_ROWS]; /* by slot */
};

template <enum gemm_weight_layout F>
static __device__ __forceinline__ combine_one_jobs<F> combine_one_jobs_of(
    const combine_one_call &all, combine_one_shared *s)
{
    const int warp = (int)threadIdx.x / WARP;
    combine_one_jobs<F> jobs = { &all.c, { 0, 0, 0 }, 0 };
    int n;
    one_find_groups(all.c, &s->groups[warp], &n);
    /* the group of the warp's slot: groups may have several rows */
#pragma unroll 1
    for (int i = 0, slot = 0; i < n; i++) {
        const gemm_rows of = s->groups[warp].of[i];
        if (warp < slot + of.n) {
            jobs.rows = gemm_rows{ of.group, of.begin + warp - slot, 1 };
            break;
        }
        slot += of.n;
    }
    if (jobs.rows.n > 0) jobs.end = one_share(all.n_tiles, all.per_block);
    return jobs;
}

/* What the warp's results of a tile are multiplied by: of the lane's two columns. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ float2 combine_one_scales(const combine_one_jobs<F> &jobs,
                                                            int tile)
{
    if (F != GEMM_W8 && F != GEMM_W4) return make_float2(1, 1);
    const int column = tile * SKINNY_W_ROWS + (int)threadIdx.x % WARP / 4;
    return make_float2(column_scale<F>(*jobs.c, jobs.rows.group, column),
                       column_scale<F>(*jobs.c, jobs.rows.group, column + 8));
}

/* The warp's row of x. */
static __device__ __forceinline__ void combine_one_x(const gemm_call &c, int row, uint16_t *to)
{
    enum { AHEAD = 4 };
    const uint4 *from = (const uint4 *)((const uint16_t *)c.x + (size_t)row * c.x_stride);
    const int lane = (int)threadIdx.x % WARP, n = c.n_in / 8;
#pragma unroll 1
    for (int k = lane; k < n; k += AHEAD * WARP) {
        uint4 v[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (k + i * WARP < n) v[i] = from[k + i * WARP];
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (k + i * WARP < n) ((uint4 *)(void *)to)[k + i * WARP] = v[i];
    }
    __syncwarp();
}

/* A choice of the row, in a lane of the first warp. */
struct combine_one_choice {
    int slot;
    float weight;
};

/* The first warp adds the choices' results of a column, in their order. */
static __device__ __forceinline__ void combine_one_add(const combine_one_call &all,
                                                       const combine_one_choice &mine, int tile,
                                                       float before,
                                                       const float (*results)[SKINNY_W_ROWS])
{
    const int lane = (int)threadIdx.x, column = tile * SKINNY_W_ROWS + lane;
    float sum = before;
#pragma unroll 1
    for (int j = 0; j < all.to.n_used; j++) {
        const int slot = __shfl_sync(0xffffffffu, mine.slot, j);
        const float weight = __shfl_sync(0xffffffffu, mine.weight, j);
        sum = fmaf(weight, results[slot][lane % SKINNY_W_ROWS], sum);
    }
    if (lane < SKINNY_W_ROWS && column < all.c.n_out) all.to.y[column] = sum;
}

template <enum gemm_weight_layout F>
static __device__ __forceinline__ void combine_one_sums(
    const combine_one_call &all, combine_one_shared *s, const combine_one_jobs<F> &jobs,
    const combine_one_choice &mine, ring_feed *feed, unsigned char *ring, const uint16_t *x)
{
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    int slot = 0, i = 0;
#pragma unroll 1
    for (int tile = (int)blockIdx.x; tile < all.n_tiles; tile += (int)gridDim.x, i++) {
        const int column = tile * SKINNY_W_ROWS + lane;
        float before = 0;
        if (all.to.add && warp == 0 && lane < SKINNY_W_ROWS && column < all.c.n_out)
            before = all.to.y[column];
        if (i < jobs.end) {
            const float2 scales = combine_one_scales(jobs, tile);
            ring_sums sums = ring_sum<F, 1, one_ring<F>::DEPTH>(
                feed, &slot, jobs, all.c.n_in / ring_shape<F>::K, ring,
                x + lane % 4 * ring_shape<F>::ELEMENTS);
            if (F == GEMM_F8) ring_restore_nan<F, 1>(&sums, jobs.run_of(i));
            if (lane % 4 == 0) {
                float *to = s->results[i % 2][jobs.rows.begin];
                to[lane / 4] = __fmul_rn(sums.v[0], scales.x);
                to[lane / 4 + 8] = __fmul_rn(sums.v[2], scales.y);
            }
        }
        __syncthreads();
        if (warp == 0) combine_one_add(all, mine, tile, before, s->results[i % 2]);
    }
}

template <enum gemm_weight_layout F>
static __global__ void __launch_bounds__(RING_THREADS, 1)
    combine_one_kernel(const __grid_constant__ combine_one_call all)
{
    __shared__ combine_one_shared s;
    unsigned char *ring = shared_memory();
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    uint16_t *x = (uint16_t *)(void *)(ring + one_ring<F>::BYTES) +
                  (size_t)warp * (size_t)all.c.n_in;
    if (!all.c.begin_is_read) grid_dependency_sync();
    const combine_one_jobs<F> jobs = combine_one_jobs_of<F>(all, &s);
    ring_feed feed = ring_fill<F, 1, one_ring<F>::DEPTH>(jobs, ring);
    if (all.c.begin_is_read) grid_dependency_sync();
    combine_one_choice mine = { 0, 0 };
    if (warp == 0 && lane < all.to.n_used)
        mine.slot = all.to.index[lane], mine.weight = all.to.weights[lane];
    if (jobs.end > 0) combine_one_x(all.c, jobs.rows.begin, x);
    combine_one_sums<F>(all, &s, jobs, mine, &feed, ring, x);
}

/* ---- the host ---- */

enum { COMBINE_ONE_ALONE = 116 * 1024 /* bytes of which an SM has no two */ };

static size_t shared_bytes(enum gemm_weight_layout layout, const gemm_call &c)
{
    const size_t n = one_ring_bytes(layout) + RING_WARPS * (size_t)c.n_in * sizeof(uint16_t);
    const gemm_device &d = gemm_this_device();
    return n < COMBINE_ONE_ALONE && 2 * COMBINE_ONE_ALONE > d.shared_of_sm &&
                   COMBINE_ONE_ALONE <= d.shared_max
               ? (size_t)COMBINE_ONE_ALONE
               : n;
}

bool gemm_combine_one_supports(enum gemm_weight_layout layout, const struct gemm_call *c,
                               const struct gemm_choices *to)
{
    return to->n_rows == 1 && c->n_rows <= RING_WARPS && c->n_groups <= ONE_GROUPS_MAX &&
           c->rows_above == 0 && shared_bytes(layout, *c) <= gemm_this_device().shared_max;
}

template <enum gemm_weight_layout F>
static cudaError_t run(cudaStream_t stream, combine_one_call all)
{
    const int32_t n_sms = gemm_this_device().n_sms,
                  grid = all.n_tiles < n_sms ? all.n_tiles : n_sms;
    all.per_block = all.n_tiles / grid;
    return launch(stream, combine_one_kernel<F>, dim3((unsigned)grid), dim3(RING_THREADS),
                  shared_bytes(F, all.c), all);
}

cudaError_t gemm_combine_one(cudaStream_t stream, enum gemm_weight_layout layout,
                             const struct gemm_call *c, const struct gemm_choices *to)
{
    const combine_one_call all = { *c, *to, (int32_t)blocks_for((size_t)c->n_out, SKINNY_W_ROWS),
                                   0 };
    return ring_run_layout(layout, [&](auto f) { return run<decltype(f)::value>(stream, all); });
}
