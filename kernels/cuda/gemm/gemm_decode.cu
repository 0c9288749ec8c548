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

/* A part of a tile of y, of all splits or of one: what warps need of it. Finding it out takes
 * divisions, so each thread does it for one item, once. */
struct decode_item {
    const unsigned char *w; /* the tile's first row of W, at the item's first span */
    int32_t last_row;       /* of the tile's rows of W, the last that exists */
    int32_t first_span, n_spans;
    int32_t call, tile, split;
    gemm_rows rows;
};

enum { DECODE_ITEMS = 64 /* of a block */ };

/* What blocks keep in shared memory, where it can be indexed. */
struct decode_shared {
    decode_calls calls;
    ring_tiles tiles;               /* with `begin` */
    int32_t x_rows[RING_TILES_MAX]; /* likewise: rows of x */
    decode_item items[DECODE_ITEMS];
};

static __device__ __forceinline__ decode_item decode_item_of(const decode_shared &s, int32_t job)
{
    int i = 0;
    while (i + 1 < GEMM_FUSED_MAX && job >= s.calls.first_job[i + 1]) i++;
    const gemm_call &c = s.calls.of[i];
    job -= s.calls.first_job[i];
    decode_item item = {};
    const int32_t n_tiles = (c.n_columns + SKINNY_W_ROWS - 1) / SKINNY_W_ROWS,
                  n_spans = c.n_in / SKINNY_SPAN,
                  per_split = (n_spans + c.n_splits - 1) / c.n_splits;
    item.call = i;
    item.tile = c.begin ? job % n_tiles : job / c.n_splits;
    item.split = c.begin ? 0 : job % c.n_splits;
    item.rows = c.begin ? s.tiles.of[job / n_tiles] : gemm_rows{ 0, 0, c.n_rows };
    item.first_span = item.split * per_split;
    item.n_spans = max(min(n_spans - item.first_span, per_split), 0);
    /* of padding columns the last row of W stands in */
    const int32_t row = min(item.tile * (int32_t)SKINNY_W_ROWS, c.n_out - 1);
    item.last_row = c.n_out - 1 - row;
    item.w = c.w + (size_t)item.rows.group * c.w_stride + (size_t)row * c.row_bytes;
    return item;
}

/* The items of a block. */
template <enum gemm_weight_layout F> struct decode_items {
    const decode_shared *s;
    size_t row_bytes; /* of all calls: they have one layout and one n_in */
    int32_t end;
    __device__ __forceinline__ ring_run run_of(int32_t i) const
    {
        const decode_item &item = s->items[i];
        const int32_t warp = (int32_t)threadIdx.x / WARP, lane = (int32_t)threadIdx.x % WARP,
                      span = item.first_span + warp;
        ring_run r = {};
        ring_set_rows<F>(&r, item.w + (size_t)span * ring_shape<F>::SPAN_BYTES, 0, item.last_row,
                         row_bytes);
        r.n_units = units_of(item);
        if (F == GEMM_F8) {
            const gemm_call &c = s->calls.of[item.call];
            r.f8_scale = f8_scales(
                             c, item.rows.group,
                             min(item.tile * (int32_t)SKINNY_W_ROWS + lane / 4, c.n_out - 1)) +
                         span;
        }
        return r;
    }
    /* The warp takes every RING_WARPS-th span. */
    static __device__ __forceinline__ int32_t units_of(const decode_item &item)
    {
        const int32_t left = item.n_spans - (int32_t)threadIdx.x / WARP;
        return (max(left, 0) + RING_WARPS - 1) / RING_WARPS * ring_shape<F>::PER_SPAN;
    }
};

/* Fills in the items. A barrier must follow. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ decode_items<F> decode_items_of(decode_shared *s)
{
    const gemm_call &c = s->calls.of[0];
    const int32_t n_tiles = (c.n_columns + SKINNY_W_ROWS - 1) / SKINNY_W_ROWS,
                  n_jobs = c.begin ? s->tiles.n * n_tiles : s->calls.first_job[GEMM_FUSED_MAX],
                  step = (int32_t)gridDim.x, first = (int32_t)blockIdx.x;
    const int32_t job = first + (int32_t)threadIdx.x * step;
    if (threadIdx.x < DECODE_ITEMS && job < n_jobs) s->items[threadIdx.x] = decode_item_of(*s, job);
    return decode_items<F>{ s, c.row_bytes,
                            first < n_jobs ? (n_jobs - first + step - 1) / step : 0 };
}

/* The lane's row of x, at its elements of the warp's first unit. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ const uint16_t *decode_x(const decode_shared &s,
                                                           const decode_item &item,
                                                           const uint16_t *x)
{
    const gemm_call &c = s.calls.of[0];
    const int32_t lane = (int32_t)threadIdx.x % WARP,
                  y_row = item.rows.begin + min(lane / 4, item.rows.n - 1),
                  span = item.first_span + (int32_t)threadIdx.x / WARP;
    const int32_t row = c.begin && c.x_rows ? s.x_rows[y_row - s.tiles.of[0].begin] : y_row;
    return x + (size_t)row * ring_x_stride(c.n_in) + span * SKINNY_SPAN +
           lane % 4 * ring_shape<F>::ELEMENTS;
}

/* What the warp multiplies its next finished sums by. They are read many jobs ahead, as every warp
 * finishes one job in RING_WARPS: their latency would be a job's. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ float2 decode_scales(const decode_items<F> &items, int32_t i)
{
    if (!(F == GEMM_W8 || F == GEMM_W4) || i >= items.end) return make_float2(1, 1);
    const decode_item &item = items.s->items[i];
    const gemm_call &c = items.s->calls.of[item.call];
    const int32_t column = item.tile * SKINNY_W_ROWS + (int32_t)threadIdx.x % 8 * 2;
    return make_float2(column_scale<F>(c, item.rows.group, column),
                       column_scale<F>(c, item.rows.group, column + 1));
}

typedef float decode_part[RING_WARPS][SKINNY_W_ROWS][RING_ROWS + 1];

/* Adds two columns' sums of the warps for row `row`. */
static __device__ __forceinline__ float2 decode_add(const decode_part &part, int pair, int row)
{
    float2 sum = make_float2(0, 0);
#pragma unroll
    for (int i = 0; i < RING_WARPS; i++)
        sum = make_float2(__fadd_rn(sum.x, part[i][2 * pair][row]),
                          __fadd_rn(sum.y, part[i][2 * pair + 1][row]));
    return sum;
}

/* Adds the warps' sums, and the slices' if there are any, and passes pairs of columns on. The last
 * part is one warp's: the warps take turns. Two buffers in turn need one barrier per job. */
static __device__ __forceinline__ void decode_finish(const gemm_call &c, const decode_item &j,
                                                     const ring_sums &sums, float2 scales,
                                                     int32_t turn)
{
    __shared__ decode_part parts[2];
    decode_part &part = parts[turn % 2];
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, pair = lane % 8;
    for (int i = 0; i < 4; i++) part[warp][lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2] = sums.v[i];
    __syncthreads();
    const int32_t column = j.tile * SKINNY_W_ROWS + 2 * pair;
    const int n_rows = warp == turn % RING_WARPS && column < c.n_columns ? j.rows.n : 0;
    if (c.n_splits > 1) {
        for (int row = lane / 8; row < n_rows; row += WARP / 8)
            __stcg((float2 *)(split_partial(c, j.tile, j.split, SKINNY_PARTIAL) +
                              row * SKINNY_W_ROWS + 2 * pair),
                   decode_add(part, pair, row));
        if (!is_last_split(c, j.tile)) return;
    }
    for (int row = lane / 8; row < n_rows; row += WARP / 8) {
        const float2 sum = c.n_splits > 1 ? reduce_splits(c, j.tile, SKINNY_PARTIAL,
                                                          row * SKINNY_W_ROWS + 2 * pair)
                                          : decode_add(part, pair, row);
        store_pair(c, j.rows, row, column, __fmul_rn(sum.x, scales.x), __fmul_rn(sum.y, scales.y));
    }
}

/* scales: of the first item that the warp finishes. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void decode_sums(const decode_items<F> &items, ring_feed *feed,
                                                   float2 scales, unsigned char *ring,
                                                   const uint16_t *x)
{
    const int32_t warp = (int32_t)threadIdx.x / WARP;
    int slot = 0;
#pragma unroll 1
    for (int32_t i = 0; i < items.end; i++) {
        const decode_item &item = items.s->items[i];
        ring_sums sums = ring_sum<F, RING_WARPS>(feed, &slot, items, items.units_of(item), ring,
                                                 decode_x<F>(*items.s, item, x));
        if (F == GEMM_F8) ring_restore_nan<F, RING_WARPS>(&sums, items.run_of(i));
        decode_finish(items.s->calls.of[item.call], item, sums, scales, i);
        if (warp == i % RING_WARPS) scales = decode_scales(items, i + (int32_t)RING_WARPS);
    }
}

/* Once the previous kernel has ended: x, and which of its rows the rows of groups are. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void decode_prepare(decode_shared *s, uint16_t *x)
{
    const gemm_call &c = s->calls.of[0];
    if (c.begin && c.x_rows) {
        const gemm_rows &first = s->tiles.of[0], &last = s->tiles.of[s->tiles.n - 1];
        const int32_t n = min(last.begin + last.n - first.begin, (int32_t)RING_TILES_MAX);
        for (int32_t i = (int32_t)threadIdx.x; i < n; i += RING_THREADS)
            s->x_rows[i] = c.x_rows[first.begin + i];
    }
    ring_x_prepare<F>(c, x);
    __syncthreads();
}

template <enum gemm_weight_layout F>
static __global__ void __launch_bounds__(RING_THREADS, 2)
    decode_kernel(const __grid_constant__ decode_calls all)
{
    __shared__ decode_shared s;
    unsigned char *ring = shared_memory();
    uint16_t *x = (uint16_t *)(void *)(ring + ring_shape<F>::ALL_BYTES);
    const bool early = !all.of[0].begin || all.of[0].begin_is_read;
    for (unsigned i = threadIdx.x; i < sizeof all / sizeof(unsigned); i += RING_THREADS)
        ((unsigned *)&s.calls)[i] = ((const unsigned *)&all)[i];
    __syncthreads();
    if (!early) grid_dependency_sync();
    if (all.of[0].begin) {
        if (threadIdx.x < WARP) ring_find_tiles(s.calls.of[0], &s.tiles);
        __syncthreads();
    }
    const decode_items<F> items = decode_items_of<F>(&s);
    __syncthreads();
    ring_feed feed = ring_fill<F, RING_WARPS>(items, ring);
    const float2 scales = decode_scales(items, (int32_t)(threadIdx.x / WARP));
    if (early) grid_dependency_sync();
    if (items.end == 0) return;
    decode_prepare<F>(&s, x);
    decode_sums<F>(items, &feed, scales, ring, x);
}

/* ---- the host ---- */

static size_t shared_bytes(enum gemm_weight_layout layout, const gemm_call &c)
{
    return ring_bytes(layout) + ring_x_bytes(c.n_in, c.begin ? c.n_x_rows : c.n_rows);
}

/* What every block reads of x, from L2, while its first loads of W are in flight. */
enum { DECODE_X_MAX = 16384 };
enum { DECODE_STATIC_SHARED = 17 * 1024 /* with the system's KiB */ };

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
    return shared_bytes(layout, *c) + DECODE_STATIC_SHARED <= gemm_this_device().shared_max;
}

template <enum gemm_weight_layout F>
static cudaError_t run(cudaStream_t stream, const decode_calls &all, size_t n_jobs)
{
    const size_t shared = shared_bytes(F, all.of[0]);
    const unsigned grid = ring_grid(n_jobs, shared + DECODE_STATIC_SHARED),
                   least = blocks_for(n_jobs, DECODE_ITEMS);
    return launch(stream, decode_kernel<F>, dim3(grid > least ? grid : least), dim3(RING_THREADS),
                  shared, all);
}

cudaError_t gemm_decode(cudaStream_t stream, enum gemm_weight_layout layout,
                        const struct gemm_call *calls, int n)
{
    decode_calls all = {};
    size_t n_jobs = 0;
    bool one = true;
    for (int i = 0; i <= GEMM_FUSED_MAX; i++) {
        all.first_job[i] = (int32_t)n_jobs;
        if (i >= n) continue;
        gemm_call &c = all.of[i];
        c = calls[i];
        c.n_splits = choose_n_splits(c, SKINNY_W_ROWS, SKINNY_BLOCKS_WANTED, SKINNY_SPLIT_LEAST);
        one = one && gemm_decode_one_supports(layout, &c);
        n_jobs += (size_t)blocks_for((size_t)c.n_columns, SKINNY_W_ROWS) * (size_t)c.n_splits *
                  (size_t)(c.begin ? c.n_rows : 1);
    }
    if (n_jobs > INT32_MAX) return cudaErrorInvalidValue;
    if (one) return gemm_decode_one(stream, layout, all.of, n);
    return ring_run_layout(layout,
                           [&](auto f) { return run<decltype(f)::value>(stream, all, n_jobs); });
}
