/* gemm_decode_one.cu - GEMM of a step of one row, as most steps of one sequence are: dense
 * matrices, or the experts that the row has chosen. The bits are gemm_decode.cu's, whose calls come
 * here first. Thread: device; gemm_decode_one: engine. */
#include "kernels/cuda/gemm/gemm_one_row.cuh"

/* Several fused GEMMs, one after the other; their jobs, tiles of 16 columns, are numbered through.
 * Of experts every group's tiles follow those of the group before. */
struct one_calls {
    gemm_call of[GEMM_FUSED_MAX];
    int32_t first_job[GEMM_FUSED_MAX + 1]; /* unused entries hold the total */
    int32_t n_tiles;                       /* of a group */
    uint32_t by_tiles;                     /* 2^24 / n_tiles, rounded up: saves a division */
    int32_t per_block;                     /* jobs, if all groups have rows, rounded down */
};

enum { ONE_TILES_MAX = 1023, ONE_SHIFT = 24 };
static_assert(ONE_USED_MAX * (ONE_TILES_MAX + 1) * (ONE_TILES_MAX + 1) <= 1 << ONE_SHIFT,
              "then the product's error changes no quotient");

struct one_job {
    int call, tile;
    gemm_rows rows;
};

/* A block's jobs, every gridDim.x-th. */
template <enum gemm_weight_layout F> struct one_jobs {
    const one_calls *all;
    const one_groups *groups; /* NULL: dense */
    int end;
    __device__ __forceinline__ one_job of(int i) const
    {
        const int job = (int)blockIdx.x + i * (int)gridDim.x;
        if (groups) {
            const int at = (int)((unsigned)job * all->by_tiles >> ONE_SHIFT);
            return one_job{ 0, job - at * all->n_tiles, groups->of[at] };
        }
        int call = 0;
#pragma unroll
        for (int j = 1; j < GEMM_FUSED_MAX; j++) call += job >= all->first_job[j];
        return one_job{ call, job - all->first_job[call], { 0, 0, 1 } };
    }
    __device__ __forceinline__ int n_spans() const /* of the warp */
    {
        const int left = all->of[0].n_in / SKINNY_SPAN - (int)threadIdx.x / WARP;
        return (max(left, 0) + RING_WARPS - 1) / RING_WARPS;
    }
    __device__ __forceinline__ ring_run run_of(int i) const
    {
        const one_job j = of(i);
        return ring_run_of<F>(all->of[j.call], j.rows.group, j.tile, (int)threadIdx.x / WARP,
                              n_spans());
    }
};

struct one_shared {
    one_groups groups[RING_WARPS];
    float parts[2][RING_WARPS][SKINNY_W_ROWS];
};

template <enum gemm_weight_layout F>
static __device__ __forceinline__ one_jobs<F> one_jobs_of(const one_calls &all, one_shared *s)
{
    one_jobs<F> jobs = { &all, NULL, 0 };
    int n = all.first_job[GEMM_FUSED_MAX];
    if (all.of[0].begin) {
        one_groups *mine = &s->groups[threadIdx.x / WARP];
        one_find_groups(all.of[0], mine, &n);
        jobs.groups = mine, n *= all.n_tiles;
    }
    jobs.end = one_share(n, all.per_block);
    return jobs;
}

/* What the ring has not taken of the block's first two jobs. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void one_prefetch_rest(const one_jobs<F> &jobs)
{
    enum {
        SPANS = (one_ring<F>::DEPTH - 1) / ring_shape<F>::PER_SPAN,
        AHEAD = SPANS * RING_WARPS * ring_shape<F>::SPAN_BYTES
    };
#pragma unroll 1
    for (int i = 0; i < min(jobs.end, 2); i++) {
        const one_job j = jobs.of(i);
        one_prefetch(jobs.all->of[j.call], jobs.all->of[j.call].w, j.tile, i == 0 ? AHEAD : 0);
    }
}

/* The lane's two columns of a tile, in the warp that finishes it. */
static __device__ __forceinline__ int one_column(const one_job &j)
{
    return j.tile * SKINNY_W_ROWS + (int)threadIdx.x % WARP * 2;
}
template <enum gemm_weight_layout F>
static __device__ __forceinline__ float2 one_scales(const gemm_call &c, const one_job &j)
{
    if ((F != GEMM_W8 && F != GEMM_W4) || threadIdx.x % WARP >= SKINNY_W_ROWS / 2)
        return make_float2(1, 1);
    const int column = one_column(j);
    return make_float2(column_scale<F>(c, j.rows.group, column),
                       column_scale<F>(c, j.rows.group, column + 1));
}

/* Adds the warps' sums, by the warp whose turn it is. Two buffers in turn need one barrier per
 * job. */
static __device__ __forceinline__ void one_finish(const gemm_call &c, const one_job &j,
                                                  const ring_sums &sums, float2 scales,
                                                  float (*part)[SKINNY_W_ROWS], bool is_turn)
{
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP,
              column = one_column(j);
    if (lane % 4 == 0) part[warp][lane / 4] = sums.v[0], part[warp][lane / 4 + 8] = sums.v[2];
    __syncthreads();
    if (!is_turn || lane >= SKINNY_W_ROWS / 2 || column >= c.n_columns) return;
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < RING_WARPS; i++)
        sum = make_float2(__fadd_rn(sum.x, part[i][2 * lane]),
                          __fadd_rn(sum.y, part[i][2 * lane + 1]));
    for (int i = 0; i < j.rows.n; i++) /* all have the same x */
        store_pair(c, j.rows, i, column, __fmul_rn(sum.x, scales.x), __fmul_rn(sum.y, scales.y));
}

template <enum gemm_weight_layout F>
static __device__ __forceinline__ void one_sums(const one_jobs<F> &jobs, one_shared *s,
                                                ring_feed *feed, unsigned char *ring,
                                                const uint16_t *x)
{
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP,
              n_units = jobs.n_spans() * ring_shape<F>::PER_SPAN;
    int slot = 0;
    x += warp * SKINNY_SPAN + lane % 4 * ring_shape<F>::ELEMENTS;
#pragma unroll 1
    for (int i = 0; i < jobs.end; i++) {
        const one_job j = jobs.of(i);
        const gemm_call &c = jobs.all->of[j.call];
        const float2 scales = one_scales<F>(c, j);
        ring_sums sums = ring_sum<F, RING_WARPS, one_ring<F>::DEPTH>(feed, &slot, jobs, n_units,
                                                                     ring, x);
        if (F == GEMM_F8) ring_restore_nan<F, RING_WARPS>(&sums, jobs.run_of(i));
        one_finish(c, j, sums, scales, s->parts[i % 2], warp == i % RING_WARPS);
    }
}

/* STEPS: of a row in f32; 0: x is in 16 bits. */
template <enum gemm_weight_layout F, int STEPS>
static __global__ void __launch_bounds__(RING_THREADS, 2)
    decode_one_kernel(const __grid_constant__ one_calls all)
{
    enum { QUADS = STEPS > 0 ? STEPS : 1 };
    __shared__ one_shared s;
    unsigned char *ring = shared_memory();
    uint16_t *x = (uint16_t *)(void *)(ring + one_ring<F>::BYTES);
    const gemm_call &c = all.of[0];
    const bool early = !c.begin || c.begin_is_read;
    float4 v[QUADS], weights[QUADS];
    if (!early) {
        grid_dependency_sync();
        if (STEPS > 0) one_load(v, (const float *)c.x, c.n_in);
    }
    const one_jobs<F> jobs = one_jobs_of<F>(all, &s);
    ring_feed feed = ring_fill<F, RING_WARPS, one_ring<F>::DEPTH>(jobs, ring);
    if (early) {
        if (!c.begin) one_prefetch_rest(jobs);
        if (STEPS > 0 && c.norm) one_load(weights, c.norm, c.n_in);
        grid_dependency_sync();
        if (STEPS > 0) one_load(v, (const float *)c.x, c.n_in);
    } else if (STEPS > 0 && c.norm) one_load(weights, c.norm, c.n_in);
    if (jobs.end == 0) return;
    if (STEPS > 0) one_round<F>(c, v, weights, x);
    else
        for (int i = (int)threadIdx.x; i < c.n_in / 8; i += RING_THREADS)
            ((uint4 *)(void *)x)[i] = ((const uint4 *)c.x)[i];
    __syncthreads();
    one_sums<F>(jobs, &s, &feed, ring, x);
}

/* ---- the host ---- */

enum { ONE_STATIC_SHARED = 4 * 1024 /* with the system's KiB */ };

static size_t shared_bytes(enum gemm_weight_layout layout, const gemm_call &c)
{
    return one_ring_bytes(layout) + (size_t)c.n_in * sizeof(uint16_t);
}

bool gemm_decode_one_supports(enum gemm_weight_layout layout, const struct gemm_call *c)
{
    const int32_t n_tiles = (int32_t)blocks_for((size_t)c->n_columns, SKINNY_W_ROWS);
    if ((c->begin ? c->n_x_rows : c->n_rows) != 1 || c->n_splits > 1) return false;
    if (c->begin && (c->n_groups > ONE_GROUPS_MAX || c->n_rows > ONE_USED_MAX ||
                     n_tiles > ONE_TILES_MAX || c->rows_above > 0))
        return false;
    if (c->x_f32 && c->n_in > ONE_ROUNDED_MAX) return false;
    return shared_bytes(layout, *c) + ONE_STATIC_SHARED <= gemm_this_device().shared_max;
}

template <enum gemm_weight_layout F>
static cudaError_t run(cudaStream_t stream, one_calls all, size_t n_jobs)
{
    const gemm_call &c = all.of[0];
    const size_t shared = shared_bytes(F, c);
    const unsigned grid = ring_grid(n_jobs, shared + ONE_STATIC_SHARED);
    all.per_block = (int32_t)(n_jobs / grid);
    const int steps = c.x_f32 ? (c.n_in + ONE_STEP - 1) / ONE_STEP : 0;
    return launch(stream,
                  steps == 0   ? decode_one_kernel<F, 0>
                  : steps <= 2 ? decode_one_kernel<F, 2>
                               : decode_one_kernel<F, ONE_STEPS_MAX>,
                  dim3(grid), dim3(RING_THREADS), shared, all);
}

cudaError_t gemm_decode_one(cudaStream_t stream, enum gemm_weight_layout layout,
                            const struct gemm_call *calls, int n)
{
    one_calls all = {};
    size_t n_jobs = 0;
    for (int i = 0; i <= GEMM_FUSED_MAX; i++) {
        all.first_job[i] = (int32_t)n_jobs;
        if (i >= n) continue;
        all.of[i] = calls[i];
        all.n_tiles = (int32_t)blocks_for((size_t)calls[i].n_columns, SKINNY_W_ROWS);
        n_jobs += (size_t)all.n_tiles * (size_t)(calls[i].begin ? calls[i].n_rows : 1);
    }
    if (n_jobs > INT32_MAX || all.n_tiles == 0) return cudaErrorInvalidValue;
    all.by_tiles = ((1u << ONE_SHIFT) + (uint32_t)all.n_tiles - 1) / (uint32_t)all.n_tiles;
    return ring_run_layout(layout,
                           [&](auto f) { return run<decltype(f)::value>(stream, all, n_jobs); });
}
