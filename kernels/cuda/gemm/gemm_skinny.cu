/* gemm_skinny.cu - GEMM with 1 to 16 rows of x per group (a decode step): reads W once, 16 bytes
 * per load, for all rows of a group. Meant for n_in of 1,024 and more.
 *
 * A block has 16 rows of W; its 8 warps take spans of 128 k in turn, whatever the number of rows,
 * and the tensor cores multiply. A warp's sum runs over its spans in ascending order; the warps'
 * sums are added in ascending order. Bound by reading W; docs/kernels.md has the reasoning and the
 * instruction counts. Thread: device; gemm_skinny: engine. */
#include "kernels/cuda/gemm/gemm_skinny.cuh"

enum { SKINNY_LOADS = 8 /* loads of 16 bytes of W at a time */ };

/* Per layout: loads per span of a row, elements per load, spans at a time. A thread has two
 * rows. */
template <enum gemm_weight_layout F> struct skinny_shape {
    enum {
        ELEMENTS = gemm_stored<F>::PER_16_BYTES,
        LOADS = SKINNY_SPAN / (4 * ELEMENTS),
        SPANS = SKINNY_LOADS / (2 * LOADS),
        SPAN_BYTES = LOADS * 64
    };
};

/* A thread's operands: rows lane / 4 and lane / 4 + 8 of W, row lane / 4 (and + 8) of x, the k's of
 * lane % 4. Past the last row it repeats an existing row, in the same instruction as the lane that
 * owns it, and its sums are dropped at the end. */
template <int N_TILES> struct skinny_operands {
    const unsigned char *w[2];  /* its 16 bytes of the row's first 64 */
    const uint16_t *x[N_TILES]; /* the same elements of x */
    int32_t n_in;               /* elements of a row from w on */
    int32_t n_spans;            /* end of the spans to take */
    const float *scales;        /* F8: of the group, the same for all threads */
    unsigned scale;             /* of span 0, from there on: less than a pointer of its own */
};

struct skinny_weights {
    uint4 v[SKINNY_LOADS];
};

/* seen: F8, both rows' bytes so far; more than 0x7f if one was NaN. */
template <int N_TILES> struct skinny_sums {
    float v[N_TILES][4];
    unsigned seen;
};

/* First element of the thread's load i of a span, relative to its load 0. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ int32_t skinny_k(int32_t span, int i)
{
    return span * SKINNY_SPAN + i * 4 * skinny_shape<F>::ELEMENTS;
}

/* Whether the row has this load: known for whole spans; other rows end in the middle of one. */
template <enum gemm_weight_layout F, int N_TILES, bool WHOLE>
static __device__ __forceinline__ bool skinny_has(const skinny_operands<N_TILES> &p, int32_t span,
                                                  int i)
{
    return span < p.n_spans && (WHOLE || skinny_k<F>(span, i) < p.n_in);
}

/* Spans `span`, span + SKINNY_WARPS, ... */
template <enum gemm_weight_layout F, int N_TILES, bool WHOLE>
static __device__ __forceinline__ void skinny_load(skinny_weights *to,
                                                   const skinny_operands<N_TILES> &p, int32_t span)
{
    typedef skinny_shape<F> shape;
#pragma unroll
    for (int i = 0; i < SKINNY_LOADS; i++) {
        const int s = i / (2 * shape::LOADS), load = i / 2 % shape::LOADS, row = i % 2;
        to->v[i] = make_uint4(0, 0, 0, 0);
        if (skinny_has<F, N_TILES, WHOLE>(p, span + s * SKINNY_WARPS, load))
            to->v[i] = __ldcs((const uint4 *)(p.w[row] + (size_t)span * shape::SPAN_BYTES +
                                              s * SKINNY_WARPS * shape::SPAN_BYTES + load * 64));
    }
}

/* Multiplies one load of k: both rows of W by the rows of x. */
template <enum gemm_weight_layout F, int N_TILES, bool WHOLE>
static __device__ __forceinline__ void skinny_multiply(float sums[N_TILES][4], unsigned *seen,
                                                       const skinny_operands<N_TILES> &p,
                                                       const uint4 w[2], int32_t span, int load)
{
    const int32_t k = skinny_k<F>(span, load);
    const unsigned low[4] = { w[0].x, w[0].y, w[0].z, w[0].w },
                   high[4] = { w[1].x, w[1].y, w[1].z, w[1].w };
#pragma unroll
    for (int e = 0; e < skinny_shape<F>::ELEMENTS / 8; e++) {
        unsigned a[2][4];
        skinny_upconvert<F>(a[0], low + e * gemm_stored<F>::WORDS_PER_8, seen);
        skinny_upconvert<F>(a[1], high + e * gemm_stored<F>::WORDS_PER_8, seen);
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            uint4 x = make_uint4(0, 0, 0, 0);
            if (WHOLE || k < p.n_in) x = __ldca((const uint4 *)(p.x[n] + k + 8 * e));
            const unsigned first[4] = { a[0][0], a[1][0], a[0][1], a[1][1] },
                           second[4] = { a[0][2], a[1][2], a[0][3], a[1][3] };
            const unsigned b_first[2] = { x.x, x.y }, b_second[2] = { x.z, x.w };
            mma_of<F>(sums[n], first, b_first);
            mma_of<F>(sums[n], second, b_second);
        }
    }
}

template <enum gemm_weight_layout F, int N_TILES, bool WHOLE>
static __device__ __forceinline__ void skinny_spans(skinny_sums<N_TILES> *sums,
                                                    const skinny_operands<N_TILES> &p,
                                                    const skinny_weights &w, int32_t span)
{
    typedef skinny_shape<F> shape;
#pragma unroll
    for (int s = 0; s < shape::SPANS; s++) {
        const int32_t at = span + s * SKINNY_WARPS;
        float of_span[N_TILES][4] = {};
        if (at >= p.n_spans) return;
#pragma unroll
        for (int load = 0; load < shape::LOADS; load++)
            skinny_multiply<F, N_TILES, WHOLE>(F == GEMM_F8 ? of_span : sums->v, &sums->seen, p,
                                               &w.v[(s * shape::LOADS + load) * 2], at, load);
        if (F != GEMM_F8) continue;
        const float scale = __ldg(p.scales + (p.scale + (unsigned)at));
        for (int n = 0; n < N_TILES; n++)
            for (int i = 0; i < 4; i++)
                sums->v[n][i] = __fmaf_rn(of_span[n][i], scale, sums->v[n][i]);
    }
}

/* Accumulates the warp's spans in order. */
template <enum gemm_weight_layout F, int N_TILES, bool WHOLE>
static __device__ __forceinline__ void skinny_sum(skinny_sums<N_TILES> *sums,
                                                  const skinny_operands<N_TILES> &p, int32_t span)
{
    const int32_t step = SKINNY_WARPS * skinny_shape<F>::SPANS;
    skinny_weights now, next;
    skinny_load<F, N_TILES, WHOLE>(&now, p, span);
    for (; span < p.n_spans; span += step) {
        skinny_load<F, N_TILES, WHOLE>(&next, p, span + step);
        skinny_spans<F, N_TILES, WHOLE>(sums, p, now, span);
        now = next;
    }
}

/* F8: one NaN weight makes every sum of its row NaN. `seen` says only that the warp met one; rescan
 * to find the row, since valid weights hold none. */
template <int N_TILES, bool WHOLE>
static __device__ __forceinline__ void skinny_restore_nan(skinny_sums<N_TILES> *sums,
                                                          const skinny_operands<N_TILES> &p,
                                                          int32_t span)
{
    if (!__any_sync(0xffffffffu, (sums->seen & 0x80808080u) != 0)) return;
    unsigned nan[2] = { 0, 0 };
#pragma unroll 1
    for (; span < p.n_spans; span += SKINNY_WARPS)
#pragma unroll 1
        for (int load = 0; load < skinny_shape<GEMM_F8>::LOADS; load++) {
            if (!skinny_has<GEMM_F8, N_TILES, WHOLE>(p, span, load)) continue;
            for (int i = 0; i < 2; i++) {
                const uint4 w = *(const uint4 *)(p.w[i] +
                                                 (size_t)span * skinny_shape<GEMM_F8>::SPAN_BYTES +
                                                 load * 64);
                nan[i] |= nan_e4m3(w.x) | nan_e4m3(w.y) | nan_e4m3(w.z) | nan_e4m3(w.w);
            }
        }
    for (int i = 0; i < 2; i++) {
        nan[i] |= __shfl_xor_sync(0xffffffffu, nan[i], 1);
        nan[i] |= __shfl_xor_sync(0xffffffffu, nan[i], 2);
        for (int n = 0; nan[i] && n < N_TILES; n++)
            sums->v[n][2 * i] = sums->v[n][2 * i + 1] = __uint_as_float(0x7fc00000u);
    }
}

/* What a block computes: a tile of columns, and which split of its k. */
struct skinny_job {
    int32_t tile, split;
};

/* Adds the warps' sums, and the slices' if there are any, and passes pairs of columns on. The job
 * may be in shared memory until it is read. */
template <enum gemm_weight_layout F, int N_TILES>
static __device__ __forceinline__ void skinny_finish(const gemm_call &c, const gemm_rows &kept,
                                                     const skinny_job &job,
                                                     const skinny_sums<N_TILES> &sums)
{
    /* at most two lanes share a bank */
    __shared__ float part[SKINNY_WARPS][SKINNY_W_ROWS][8 * N_TILES + 3];
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    for (int n = 0; n < N_TILES; n++)
        for (int i = 0; i < 4; i++)
            part[warp][lane / 4 + i / 2 * 8][n * 8 + lane % 4 * 2 + i % 2] = sums.v[n][i];
    __syncthreads();
    const gemm_rows rows = kept;
    const int pair = (int)threadIdx.x % (SKINNY_W_ROWS / 2),
              row = (int)threadIdx.x / (SKINNY_W_ROWS / 2);
    const int32_t tile = job.tile, column = tile * SKINNY_W_ROWS + 2 * pair,
                  at = row * SKINNY_W_ROWS + 2 * pair;
    const bool has = row < rows.n && column < c.n_columns;
    float2 sum = make_float2(0, 0);
    for (int i = 0; has && i < SKINNY_WARPS; i++)
        sum = make_float2(__fadd_rn(sum.x, part[i][2 * pair][row]),
                          __fadd_rn(sum.y, part[i][2 * pair + 1][row]));
    if (c.n_splits > 1) {
        if (has) __stcg((float2 *)(split_partial(c, tile, job.split, SKINNY_PARTIAL) + at), sum);
        if (!is_last_split(c, tile)) return;
        if (has) sum = reduce_splits(c, tile, SKINNY_PARTIAL, at);
    }
    if (!has) return;
    store_pair(c, rows, row, column, __fmul_rn(sum.x, column_scale<F>(c, rows.group, column)),
               __fmul_rn(sum.y, column_scale<F>(c, rows.group, column + 1)));
}

template <enum gemm_weight_layout F, int N_TILES, bool WHOLE>
static __device__ __forceinline__ void skinny_rows(const gemm_call &c, const gemm_rows &rows,
                                                   const skinny_job &job)
{
    __shared__ gemm_rows kept; /* for the end, to save registers */
    if (threadIdx.x == 0) kept = rows;
    /* What is computed from it is computed here, and not before the branch that leads to one of two
     * numbers of rows: it would be kept for both, and spilled. */
    unsigned tid = threadIdx.x;
    compute_here(&tid);
    const int32_t lane = (int32_t)tid % WARP, quarter = lane % 4,
                  first_column = job.tile * SKINNY_W_ROWS;
    const int32_t n_spans = (c.n_in_padded + SKINNY_SPAN - 1) / SKINNY_SPAN,
                  per_split = (n_spans + c.n_splits - 1) / c.n_splits;
    const int32_t first_span = job.split * per_split;
    skinny_operands<N_TILES> p;
    p.n_in = c.n_in_padded - quarter * skinny_shape<F>::ELEMENTS;
    p.n_spans = min(n_spans, first_span + per_split);
    for (int i = 0; i < 2; i++) {
        const int32_t row = min(first_column + lane / 4 + 8 * i, c.n_out - 1);
        p.w[i] = c.w + (size_t)rows.group * c.w_stride + (size_t)row * c.row_bytes + quarter * 16;
    }
    for (int n = 0; n < N_TILES; n++) {
        p.x[n] = (const uint16_t *)c.x + x_row(c, rows, min(lane / 4 + 8 * n, rows.n - 1)) +
                 quarter * skinny_shape<F>::ELEMENTS;
    }
    /* Both rows of W have one block of scales: they are 8 apart, from a multiple of 16 on, and both
     * belong to gate or to up. */
    p.scales = scales_of(c, rows.group);
    p.scale = 0;
    if (F == GEMM_F8)
        p.scale = (unsigned)(f8_scales(c, rows.group, min(first_column + lane / 4, c.n_out - 1)) -
                             p.scales);
    skinny_sums<N_TILES> sums = {};
    skinny_sum<F, N_TILES, WHOLE>(&sums, p, first_span + (int32_t)tid / WARP);
    if (F == GEMM_F8)
        skinny_restore_nan<N_TILES, WHOLE>(&sums, p, first_span + (int32_t)tid / WARP);
    skinny_finish<F, N_TILES>(c, kept, job, sums);
}

enum {
    SKINNY_PREFETCH = 4096 /* bytes of each of a block's 16 rows: its warps' first two buffers */
};

/* Prefetches the block's first rows of W before it waits for its x. Which expert they belong to is
 * known if routing is more than one kernel ago, otherwise a guess. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void skinny_prefetch(const gemm_call &c, const skinny_job &job)
{
    const int32_t row = job.tile * SKINNY_W_ROWS + (int32_t)threadIdx.x;
    if (!PREFETCHES_L2 || threadIdx.x >= WARP) return;
    const gemm_rows rows = rows_of_tile<true>(c, (int32_t)blockIdx.y, GEMM_SKINNY_ROWS);
    if (rows.n == 0 || threadIdx.x >= SKINNY_W_ROWS || row >= c.n_out) return;
    const size_t n_spans = (size_t)(c.n_in_padded + SKINNY_SPAN - 1) / SKINNY_SPAN,
                 per_split = (n_spans + (size_t)c.n_splits - 1) / (size_t)c.n_splits;
    const size_t from = (size_t)job.split * per_split * skinny_shape<F>::SPAN_BYTES,
                 left = from < c.row_bytes ? c.row_bytes - from : 0;
    const size_t n =
        min(min(left, per_split * skinny_shape<F>::SPAN_BYTES), (size_t)SKINNY_PREFETCH) / 16 * 16;
    prefetch_l2(c.w + (size_t)rows.group * c.w_stride + (size_t)row * c.row_bytes + from,
                (unsigned)n);
}

/* WHOLE: rows of W consist of whole spans. */
template <enum gemm_weight_layout F, bool WHOLE>
static __global__ void __launch_bounds__(SKINNY_THREADS, 2) skinny_kernel(const gemm_call c)
{
    const skinny_job job = { (int32_t)blockIdx.x, (int32_t)blockIdx.z };
    skinny_prefetch<F>(c, job);
    grid_dependency_sync();
    const gemm_rows rows = rows_of_tile(c, (int32_t)blockIdx.y, GEMM_SKINNY_ROWS);
    if (rows.n == 0) return;
    if (rows.n <= 8) skinny_rows<F, 1, WHOLE>(c, rows, job);
    else skinny_rows<F, 2, WHOLE>(c, rows, job);
}

/* Several fused GEMMs, one after the other; their jobs are numbered through, each has a block. */
struct skinny_fused_calls {
    gemm_call of[GEMM_FUSED_MAX];
    int32_t first_job[GEMM_FUSED_MAX + 1]; /* of each; unused entries hold the total */
};

/* Job `job` of the GEMM: all tiles of a split follow each other. There are a few splits at most,
 * and counting them takes less than a division. */
static __device__ __forceinline__ skinny_job fused_job(const gemm_call &c, int32_t job)
{
    const int32_t n_tiles = (c.n_columns + SKINNY_W_ROWS - 1) / SKINNY_W_ROWS;
    skinny_job found = { job, 0 };
    for (; found.tile >= n_tiles; found.split++) found.tile -= n_tiles;
    return found;
}

template <enum gemm_weight_layout F>
static __device__ __forceinline__ void fused_prefetch(const skinny_fused_calls &all)
{
    const int32_t block = (int32_t)blockIdx.x;
#pragma unroll
    for (int i = 0; i < GEMM_FUSED_MAX; i++)
        if (block >= all.first_job[i] && block < all.first_job[i + 1])
            skinny_prefetch<F>(all.of[i], fused_job(all.of[i], block - all.first_job[i]));
}

template <enum gemm_weight_layout F>
static __global__ void __launch_bounds__(SKINNY_THREADS, 2)
    skinny_fused_kernel(const __grid_constant__ skinny_fused_calls all)
{
    fused_prefetch<F>(all);
    grid_dependency_sync();
    __shared__ gemm_call c; /* the block's; indexing the arguments would copy them for each
                             * thread */
    __shared__ skinny_job job;
    int i = 0;
    while (i + 1 < GEMM_FUSED_MAX && (int32_t)blockIdx.x >= all.first_job[i + 1]) i++;
    for (unsigned word = threadIdx.x; word < sizeof c / sizeof(unsigned); word += SKINNY_THREADS)
        ((unsigned *)&c)[word] = ((const unsigned *)&all.of[i])[word];
    if (threadIdx.x == 0) job = fused_job(all.of[i], (int32_t)blockIdx.x - all.first_job[i]);
    __syncthreads();
    const gemm_rows rows = { 0, 0, c.n_rows };
    if (c.n_rows <= 8) skinny_rows<F, 1, true>(c, rows, job);
    else skinny_rows<F, 2, true>(c, rows, job);
}

template <bool WHOLE> static void (*kernel_of(enum gemm_weight_layout layout))(const gemm_call)
{
    static void (*const kernels[GEMM_WEIGHT_LAYOUTS])(
        const gemm_call) = { nullptr,
                             skinny_kernel<GEMM_BF16, WHOLE>,
                             skinny_kernel<GEMM_F16, WHOLE>,
                             skinny_kernel<GEMM_W8, WHOLE>,
                             skinny_kernel<GEMM_W4, WHOLE>,
                             skinny_kernel<GEMM_F8, WHOLE> };
    return kernels[layout];
}

static_assert(sizeof(gemm_call) % sizeof(unsigned) == 0, "it is copied by words");

cudaError_t gemm_skinny(cudaStream_t stream, enum gemm_weight_layout layout,
                        const struct gemm_call *call)
{
    gemm_call c = *call;
    c.n_splits = choose_n_splits(c, SKINNY_W_ROWS, SKINNY_BLOCKS_WANTED, SKINNY_SPLIT_LEAST);
    /* groups that can have rows at all */
    const unsigned n_groups = (unsigned)(c.begin && c.n_rows < c.n_groups ? c.n_rows : c.n_groups);
    return launch(
        stream,
        c.n_in_padded % SKINNY_SPAN == 0 ? kernel_of<true>(layout) : kernel_of<false>(layout),
        dim3(blocks_for((size_t)c.n_columns, SKINNY_W_ROWS), n_groups, (unsigned)c.n_splits),
        dim3(SKINNY_THREADS), 0, c);
}

cudaError_t gemm_skinny_fused(cudaStream_t stream, enum gemm_weight_layout layout,
                              const struct gemm_call *calls, int n)
{
    static void (*const kernels[GEMM_WEIGHT_LAYOUTS])(
        const skinny_fused_calls) = { nullptr,
                                      skinny_fused_kernel<GEMM_BF16>,
                                      skinny_fused_kernel<GEMM_F16>,
                                      skinny_fused_kernel<GEMM_W8>,
                                      skinny_fused_kernel<GEMM_W4>,
                                      skinny_fused_kernel<GEMM_F8> };
    skinny_fused_calls all = {};
    unsigned n_jobs = 0;
    for (int i = 0; i <= GEMM_FUSED_MAX; i++) {
        all.first_job[i] = (int32_t)n_jobs;
        if (i >= n) continue;
        gemm_call &c = all.of[i];
        c = calls[i];
        c.n_splits = choose_n_splits(c, SKINNY_W_ROWS, SKINNY_BLOCKS_WANTED, SKINNY_SPLIT_LEAST);
        n_jobs += blocks_for((size_t)c.n_columns, SKINNY_W_ROWS) * (unsigned)c.n_splits;
    }
    return launch(stream, kernels[layout], dim3(n_jobs), dim3(SKINNY_THREADS), 0, all);
}
