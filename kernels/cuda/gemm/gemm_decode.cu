/* gemm_decode.cu - GEMM of decode steps: up to 8 rows of x, or groups of rows (experts) whose x
 * fits into shared memory. It has gemm_skinny.cu's tiles and its order of sums, and takes x in f32
 * too.
 *
 * What a step of one sequence loses are the gaps between kernels and the latency of each block's
 * first loads, so blocks stay for several tiles, keep a ring of loads full (gemm_ring.cuh), start
 * it before the previous kernel has ended, and normalise and round x themselves. Thread: device;
 * gemm_decode: engine. */
#include "kernels/cuda/gemm/gemm_ring_x.cuh"

/* Several fused GEMMs, one after the other; their jobs are numbered through. */
struct decode_calls {
    gemm_call of[GEMM_FUSED_MAX];
    int32_t first_job[GEMM_FUSED_MAX + 1]; /* unused entries hold the total */
};

/* What blocks keep of them, in shared memory, where they can be indexed. */
struct decode_shared {
    decode_calls calls;
    ring_tiles tiles; /* with `begin` */
};

/* A part of a tile of y, of all splits or of one. */
struct decode_job {
    const gemm_call *c;
    int32_t tile, split;
    gemm_rows rows;
};

static __device__ __forceinline__ decode_job decode_job_of(const decode_shared &s, int32_t job)
{
    int i = 0;
    while (i + 1 < GEMM_FUSED_MAX && job >= s.calls.first_job[i + 1]) i++;
    const gemm_call &c = s.calls.of[i];
    job -= s.calls.first_job[i];
    if (!c.begin)
        return decode_job{ &c, job / c.n_splits, job % c.n_splits, gemm_rows{ 0, 0, c.n_rows } };
    const int32_t n_tiles = (c.n_columns + SKINNY_W_ROWS - 1) / SKINNY_W_ROWS;
    return decode_job{ &c, job % n_tiles, 0, s.tiles.of[job / n_tiles] };
}

/* The spans of a job that the warp takes: `first`, first + RING_WARPS, .. */
struct decode_spans {
    int32_t first, n;
};

static __device__ __forceinline__ decode_spans decode_spans_of(const decode_job &j)
{
    const int32_t n_spans = j.c->n_in / SKINNY_SPAN,
                  per_split = (n_spans + j.c->n_splits - 1) / j.c->n_splits,
                  end = min(n_spans, (j.split + 1) * per_split),
                  first = j.split * per_split + (int32_t)threadIdx.x / WARP;
    return decode_spans{ first, first < end ? (end - first + RING_WARPS - 1) / RING_WARPS : 0 };
}

template <enum gemm_weight_layout F> struct decode_jobs {
    const decode_shared *s;
    int32_t first, step, end;
    __device__ __forceinline__ ring_run run_of(int32_t job) const
    {
        const decode_job j = decode_job_of(*s, job);
        const decode_spans spans = decode_spans_of(j);
        return ring_run_of<F>(*j.c, j.rows.group, j.tile, spans.first, spans.n);
    }
};

template <enum gemm_weight_layout F>
static __device__ __forceinline__ decode_jobs<F> decode_jobs_of(const decode_shared &s)
{
    const gemm_call &c = s.calls.of[0];
    const int32_t n_tiles = (c.n_columns + SKINNY_W_ROWS - 1) / SKINNY_W_ROWS;
    return decode_jobs<F>{ &s, (int32_t)blockIdx.x, (int32_t)gridDim.x,
                           c.begin ? s.tiles.n * n_tiles : s.calls.first_job[GEMM_FUSED_MAX] };
}

/* The lane's row of x, at its elements of the warp's first unit. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ const uint16_t *decode_x(const decode_job &j, const uint16_t *x,
                                                           int32_t span)
{
    const int32_t lane = (int32_t)threadIdx.x % WARP,
                  y_row = j.rows.begin + min(lane / 4, j.rows.n - 1);
    const int32_t row = j.c->begin && j.c->x_rows ? j.c->x_rows[y_row] : y_row;
    return x + (size_t)row * ring_x_stride(j.c->n_in) + span * SKINNY_SPAN +
           lane % 4 * ring_shape<F>::ELEMENTS;
}

/* Adds the warps' sums, and the slices' if there are any, and passes pairs of columns on. `turn`
 * counts the block's jobs: two buffers in turn need one barrier per job, and the warps take turns
 * with the last part. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void decode_finish(const decode_job &j, const ring_sums &sums,
                                                     int32_t turn)
{
    __shared__ float parts[2][RING_WARPS][SKINNY_W_ROWS][RING_ROWS + 1];
    const gemm_call &c = *j.c;
    float(*part)[SKINNY_W_ROWS][RING_ROWS + 1] = parts[turn % 2];
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    for (int i = 0; i < 4; i++) part[warp][lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = sums.v[i];
    __syncthreads();
    const int at_turn = ((int)threadIdx.x + RING_THREADS - turn % RING_WARPS * WARP) % RING_THREADS,
              pair = at_turn % (SKINNY_W_ROWS / 2), row = at_turn / (SKINNY_W_ROWS / 2);
    const int32_t column = j.tile * SKINNY_W_ROWS + 2 * pair, at = row * SKINNY_W_ROWS + 2 * pair;
    const bool has = row < j.rows.n && column < c.n_columns;
    float2 sum = make_float2(0, 0);
    for (int i = 0; has && i < RING_WARPS; i++)
        sum = make_float2(__fadd_rn(sum.x, part[i][2 * pair][row]),
                          __fadd_rn(sum.y, part[i][2 * pair + 1][row]));
    if (c.n_splits > 1) {
        if (has) __stcg((float2 *)(split_partial(c, j.tile, j.split, SKINNY_PARTIAL) + at), sum);
        if (!is_last_split(c, j.tile)) return;
        if (has) sum = reduce_splits(c, j.tile, SKINNY_PARTIAL, at);
    }
    if (!has) return;
    store_pair(c, j.rows, row, column, __fmul_rn(sum.x, column_scale<F>(c, j.rows.group, column)),
               __fmul_rn(sum.y, column_scale<F>(c, j.rows.group, column + 1)));
}

template <enum gemm_weight_layout F>
static __device__ __forceinline__ void decode_sums(const decode_shared &s, ring_feed *feed,
                                                   const decode_jobs<F> &jobs, unsigned char *ring,
                                                   const uint16_t *x)
{
    int slot = 0;
    int32_t turn = 0;
#pragma unroll 1
    for (int32_t job = jobs.first; job < jobs.end; job += jobs.step, turn++) {
        const decode_job j = decode_job_of(s, job);
        const decode_spans spans = decode_spans_of(j);
        ring_sums sums = ring_sum<F, RING_WARPS>(feed, &slot, jobs,
                                                 spans.n * ring_shape<F>::PER_SPAN, ring,
                                                 decode_x<F>(j, x, spans.first));
        if (F == GEMM_F8) ring_restore_nan<F, RING_WARPS>(&sums, jobs.run_of(job));
        decode_finish<F>(j, sums, turn);
    }
}

/* Finds the rows of groups, by one warp; a barrier makes them known. */
static __device__ __forceinline__ void decode_find(decode_shared *s)
{
    if (s->calls.of[0].begin && threadIdx.x < WARP) ring_find_tiles(s->calls.of[0], &s->tiles);
    __syncthreads();
}

template <enum gemm_weight_layout F>
static __global__ void __launch_bounds__(RING_THREADS, 2)
    decode_kernel(const __grid_constant__ decode_calls all)
{
    __shared__ decode_shared s;
    unsigned char *ring = shared_memory();
    uint16_t *x = (uint16_t *)(void *)(ring + ring_shape<F>::ALL_BYTES);
    ring_feed feed;
    for (unsigned i = threadIdx.x; i < sizeof all / sizeof(unsigned); i += RING_THREADS)
        ((unsigned *)&s.calls)[i] = ((const unsigned *)&all)[i];
    __syncthreads();
    const bool early = !s.calls.of[0].begin || s.calls.of[0].begin_is_read;
    if (early) {
        decode_find(&s);
        feed = ring_fill<F, RING_WARPS>(decode_jobs_of<F>(s), ring);
    }
    grid_dependency_sync();
    if (!early) {
        decode_find(&s);
        feed = ring_fill<F, RING_WARPS>(decode_jobs_of<F>(s), ring);
    }
    ring_x_prepare<F>(s.calls.of[0], x);
    __syncthreads();
    decode_sums<F>(s, &feed, decode_jobs_of<F>(s), ring, x);
}

/* ---- the host ---- */

static size_t shared_bytes(enum gemm_weight_layout layout, const gemm_call &c)
{
    return ring_bytes(layout) + ring_x_bytes(c.n_in, c.begin ? c.n_x_rows : c.n_rows);
}

/* What every block reads of x, from L2, while its first loads of W are under way. */
enum { DECODE_X_MAX = 16384 };
enum { DECODE_STATIC_SHARED = 13 * 1024 /* with the system's KiB */ };

static bool is_aligned_16(const void *p) { return (uintptr_t)p % 16 == 0; }

bool gemm_decode_supports(enum gemm_weight_layout layout, const struct gemm_call *c)
{
    const int32_t n_x_rows = c->begin ? c->n_x_rows : c->n_rows;
    if (layout == GEMM_F32 || c->x_scales || (c->n_groups > 1 && !c->begin)) return false;
    if (c->n_in % SKINNY_SPAN != 0 || n_x_rows < 1 || n_x_rows > DECODE_X_MAX / c->n_in)
        return false;
    if (c->n_rows > (c->begin ? (int32_t)RING_TILES_MAX : (int32_t)RING_ROWS)) return false;
    if (c->x_f32 && c->n_in > RING_X_ROUNDED_MAX) return false;
    if (c->x_stride % 8 != 0 || !is_aligned_16(c->x) || !is_aligned_16(c->norm)) return false;
    return shared_bytes(layout, *c) + DECODE_STATIC_SHARED <= ring_this_device().shared_max;
}

template <enum gemm_weight_layout F>
static cudaError_t run(cudaStream_t stream, const decode_calls &all, size_t n_jobs)
{
    const size_t shared = shared_bytes(F, all.of[0]);
    return launch(stream, decode_kernel<F>, dim3(ring_grid(n_jobs, shared + DECODE_STATIC_SHARED)),
                  dim3(RING_THREADS), shared, all);
}

static cudaError_t run_layout(cudaStream_t stream, enum gemm_weight_layout layout,
                              const decode_calls &all, size_t n_jobs)
{
    switch (layout) {
    case GEMM_BF16: return run<GEMM_BF16>(stream, all, n_jobs);
    case GEMM_F16: return run<GEMM_F16>(stream, all, n_jobs);
    case GEMM_W8: return run<GEMM_W8>(stream, all, n_jobs);
    case GEMM_W4: return run<GEMM_W4>(stream, all, n_jobs);
    case GEMM_F8: return run<GEMM_F8>(stream, all, n_jobs);
    default: return cudaErrorInvalidValue;
    }
}

cudaError_t gemm_decode(cudaStream_t stream, enum gemm_weight_layout layout,
                        const struct gemm_call *calls, int n)
{
    decode_calls all = {};
    size_t n_jobs = 0;
    for (int i = 0; i <= GEMM_FUSED_MAX; i++) {
        all.first_job[i] = (int32_t)n_jobs;
        if (i >= n) continue;
        gemm_call &c = all.of[i];
        c = calls[i];
        c.n_splits = choose_n_splits(c, SKINNY_W_ROWS, SKINNY_BLOCKS_WANTED, SKINNY_SPLIT_LEAST);
        n_jobs += (size_t)blocks_for((size_t)c.n_columns, SKINNY_W_ROWS) * (size_t)c.n_splits *
                  (size_t)(c.begin ? c.n_rows : 1);
    }
    if (n_jobs > INT32_MAX) return cudaErrorInvalidValue;
    return run_layout(stream, layout, all, n_jobs);
}
