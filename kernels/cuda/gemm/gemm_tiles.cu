/* gemm_tiles.cu - GEMM with many rows of x (prompts, large batches): tiles of y on the tensor
 * cores.
 *
 * x's rows are the M of mma m16n8k16, W's rows its N. Both go through shared memory as they are
 * stored, TILE_K elements per stage, by cp.async several stages ahead; stored numbers become bf16
 * in registers. Every sum runs over k in ascending order in all tile shapes (F8: per 128 elements,
 * times the scale, then added; split-k: per slice), so the shape changes no bit. The shape table is
 * at the end; docs/kernels.md has the reasoning, registers and cycles. Thread: device; gemm_tiles:
 * engine. */
#include "kernels/cuda/gemm/gemm_device.cuh"
#include "kernels/cuda/gemm/gemm_split_k.cuh"
#include "kernels/cuda/gemm/gemm_upconvert.cuh"

enum { TILE_K = GEMM_STEP, X_ROW_BYTES = TILE_K * 2, F8_STAGES = GEMM_F8_BLOCK / TILE_K };

/* A block computes M by N of y with WARPS_M by WARPS_N warps; N_BLOCKS blocks fit on an SM by their
 * registers. SPLITS_K: the call splits k (gemm_split_k.cuh). */
template <enum gemm_weight_layout F, int M, int N, int WARPS_M, int WARPS_N, int N_STAGES,
          int N_BLOCKS, bool SPLITS_K_ = false>
struct gemm_tile {
    enum {
        SPLITS_K = SPLITS_K_,
        PART = M * N,
        ROWS = M,
        COLUMNS = N,
        STAGES = N_STAGES,
        BLOCKS = N_BLOCKS,
        THREADS = WARPS_M * WARPS_N * WARP,
        WARP_ROWS = M / WARPS_M,
        WARP_COLUMNS = N / WARPS_N,
        WARPS_ACROSS = WARPS_N,
        M_TILES = WARP_ROWS / 16,
        N_TILES = WARP_COLUMNS / 8,
        W_ROW_BYTES = TILE_K / gemm_stored<F>::PER_16_BYTES * 16,
        X_BYTES = M * X_ROW_BYTES,
        W_BYTES = N * W_ROW_BYTES,
        STAGE_BYTES = X_BYTES + W_BYTES,
        SHARED = STAGES * STAGE_BYTES,
        Y_PITCH = N + 8, /* floats; so that the rows of 4 lanes use different banks */
        X_COPIES = X_BYTES / 16 / THREADS, /* of 16 bytes, by a thread for a
                                            * stage */
        W_PIECES = W_ROW_BYTES / 16,
        W_COPIES = (W_BYTES / 16 + THREADS - 1) / THREADS,
        /* of a row of W, that a thread holds of a stage */
        PER_HALF = gemm_stored<F>::WORDS_PER_8,
        W_WORDS = 2 * PER_HALF,
        /* of y: a thread stores a pair of columns in every ROWS_STEP-th row, ROWS_TOGETHER at a
         * time */
        ROWS_STEP = THREADS / (N / 2),
        ROWS_TOGETHER = M / ROWS_STEP < 8 ? M / ROWS_STEP : 8
    };
    static_assert(M % (ROWS_STEP * ROWS_TOGETHER) == 0, "a tile has whole sets of rows");
    static_assert(X_BYTES / 16 % THREADS == 0 && (W_COPIES == 1 || W_BYTES / 16 % THREADS == 0),
                  "all threads copy as many pieces");
    static_assert(M * Y_PITCH * 4 <= SHARED && THREADS % (N / 2) == 0,
                  "the results' turn in shared memory; a thread has one pair of columns");
    static_assert(THREADS / 8 % 2 == 0, "all rows of x that a thread copies are odd or none is");
};

/* The slot of piece i (16 bytes) of a row. 16-bit layouts: a thread has pieces t and t + 4 of both
 * operands; others: 2t and 2t + 1 of x. */
template <enum gemm_weight_layout F> static __device__ __forceinline__ int piece_at(int row, int i)
{
    return gemm_stored<F>::IS_16 ? i ^ (row & 1) << 2 : i ^ (row & 1);
}

/* What a thread copies: piece tid % 8 of rows tid / 8, .. of x, and its share of W's pieces.
 * Pointers are at the next stage. */
template <class T> struct tile_source {
    const unsigned char *x[T::X_COPIES];
    const unsigned char *w; /* its first piece */
    unsigned x_rows;        /* bit i: copy i has a row; otherwise zeros */
    int32_t w_rows;         /* existing rows from the first piece's on */
    int x_to, w_to;         /* offsets of the first pieces in a stage; the other rows have the
                             * same parity */
};

template <enum gemm_weight_layout F, class T>
static __device__ __forceinline__ void find_source(tile_source<T> *s, const gemm_call &c,
                                                   const gemm_rows &rows, int32_t first_column)
{
    const int tid = (int)threadIdx.x, x_row_0 = tid / 8, w_row_0 = tid / T::W_PIECES,
              w_piece = tid % T::W_PIECES;
    s->x_rows = 0;
    for (int i = 0; i < T::X_COPIES; i++) {
        const int32_t row = x_row_0 + i * (T::THREADS / 8);
        s->x[i] = (const unsigned char *)c.x + tid % 8 * 16;
        if (row >= rows.n) continue;
        s->x[i] += 2 * x_row(c, rows, row);
        s->x_rows |= 1u << i;
    }
    s->w = c.w + (size_t)rows.group * c.w_stride + (size_t)(first_column + w_row_0) * c.row_bytes +
           w_piece * 16;
    s->w_rows = w_row_0 < T::COLUMNS ? c.n_out - first_column - w_row_0 : 0;
    s->x_to = x_row_0 * X_ROW_BYTES + piece_at<F>(x_row_0, tid % 8) * 16;
    s->w_to = T::X_BYTES + w_row_0 * T::W_ROW_BYTES +
              (gemm_stored<F>::IS_16 ? piece_at<F>(w_row_0, w_piece) : w_piece) * 16;
}

template <class T> static __device__ __forceinline__ void skip_stages(tile_source<T> *s, int32_t n)
{
    for (int i = 0; i < T::X_COPIES; i++) s->x[i] += (size_t)n * X_ROW_BYTES;
    s->w += (size_t)n * T::W_ROW_BYTES;
}

/* Issues the copies of the next stage. */
template <class T>
static __device__ __forceinline__ void load_stage_async(tile_source<T> *s, const gemm_call &c,
                                                        unsigned char *to)
{
#pragma unroll
    for (int i = 0; i < T::X_COPIES; i++) {
        copy_async_16(to + s->x_to + i * (T::THREADS / 8 * X_ROW_BYTES), s->x[i],
                      s->x_rows >> i & 1u ? 16 : 0);
        s->x[i] += X_ROW_BYTES;
    }
    const unsigned char *w = s->w;
#pragma unroll
    for (int i = 0; i < T::W_COPIES; i++) {
        const int skip = i * (T::THREADS / T::W_PIECES);
        /* fewer pieces than threads */
        if (T::W_BYTES / 16 % T::THREADS && (int)threadIdx.x >= T::W_BYTES / 16) break;
        copy_async_16(to + s->w_to + skip * T::W_ROW_BYTES, w, skip < s->w_rows ? 16 : 0);
        w += T::THREADS / T::W_PIECES * c.row_bytes;
    }
    s->w += T::W_ROW_BYTES;
}

/* ---- one stage ---- */

static __device__ __forceinline__ void read_16(unsigned to[4], const unsigned char *from)
{
    const uint4 v = *(const uint4 *)from;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

/* A thread's words of its row of W: with 8 and 4 bits all of the stage, in one load; with 16 bits
 * those of half `half`. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void read_w(unsigned *to, const unsigned char *row,
                                              int row_number, int t, int half)
{
    if (gemm_stored<F>::IS_16) {
        read_16(to, row + piece_at<F>(row_number, 4 * half + t) * 16);
    } else if (F == GEMM_W4) {
        const uint2 v = *(const uint2 *)(row + 8 * t);
        to[0] = v.x, to[1] = v.y;
    } else {
        read_16(to, row + 16 * t);
    }
}

template <enum gemm_weight_layout F, class T> struct tile_fragments {
    unsigned w[T::N_TILES][gemm_stored<F>::IS_16 ? 4 : (int)T::W_WORDS];
};

/* Multiplies half a stage: 32 elements of k, two steps of mma. */
template <enum gemm_weight_layout F, class T>
static __device__ __forceinline__ void multiply_half(float sums[T::M_TILES][T::N_TILES][4],
                                                     const tile_fragments<F, T> &f,
                                                     const unsigned char *x, int g, int t, int half)
{
    unsigned b[T::N_TILES][4];
#pragma unroll
    for (int n = 0; n < T::N_TILES; n++)
        upconvert_8<F>(b[n], f.w[n] + (gemm_stored<F>::IS_16 ? 0 : half * T::PER_HALF));
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++) {
        /* rows 8 and 16 further have the parity of g */
        const int piece = piece_at<F>(g, gemm_stored<F>::IS_16 ? 4 * half + t : 2 * t + half);
        unsigned low[4], high[4];
        read_16(low, x + (16 * m + g) * X_ROW_BYTES + piece * 16);
        read_16(high, x + (16 * m + 8 + g) * X_ROW_BYTES + piece * 16);
        const unsigned first[4] = { low[0], high[0], low[1], high[1] },
                       second[4] = { low[2], high[2], low[3], high[3] };
#pragma unroll
        for (int n = 0; n < T::N_TILES; n++) mma_of<F>(sums[m][n], first, b[n]);
#pragma unroll
        for (int n = 0; n < T::N_TILES; n++) mma_of<F>(sums[m][n], second, b[n] + 2);
    }
}

template <enum gemm_weight_layout F, class T>
static __device__ __forceinline__ void multiply_stage(float sums[T::M_TILES][T::N_TILES][4],
                                                      const unsigned char *x)
{
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, g = lane / 4,
              t = lane % 4;
    const unsigned char *w = x + T::X_BYTES +
                             warp % T::WARPS_ACROSS * T::WARP_COLUMNS * T::W_ROW_BYTES;
    x += warp / T::WARPS_ACROSS * T::WARP_ROWS * X_ROW_BYTES;
    tile_fragments<F, T> f;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (half == 0 || gemm_stored<F>::IS_16) {
#pragma unroll
            for (int n = 0; n < T::N_TILES; n++)
                read_w<F>(f.w[n], w + (8 * n + g) * T::W_ROW_BYTES, g, t, half);
        }
        multiply_half<F, T>(sums, f, x, g, t, half);
    }
}

/* ---- a tile ---- */

/* F8: adds the sums of up to 128 k, times gate's (or the only) and up's scale, to the total. */
template <class T>
static __device__ __forceinline__ void add_scaled(float sums[T::M_TILES][T::N_TILES][4],
                                                  float part[T::M_TILES][T::N_TILES][4],
                                                  const float scale[2])
{
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++)
#pragma unroll
        for (int n = 0; n < T::N_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[m][n][i] = __fmaf_rn(part[m][n][i], scale[i % 2], sums[m][n][i]);
                part[m][n][i] = 0;
            }
}

/* Stores results through shared memory, in which no copy is in flight any more: a thread then has
 * one pair of columns, and a warp's results are contiguous. */
template <class T>
static __device__ __forceinline__ void collect_tile(float *to,
                                                    const float sums[T::M_TILES][T::N_TILES][4])
{
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    const int row = warp / T::WARPS_ACROSS * T::WARP_ROWS + lane / 4,
              column = warp % T::WARPS_ACROSS * T::WARP_COLUMNS + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < T::M_TILES; m++)
#pragma unroll
        for (int n = 0; n < T::N_TILES; n++)
#pragma unroll
            for (int i = 0; i < 4; i += 2)
                *(float2 *)(to + (row + 16 * m + 4 * i) * T::Y_PITCH + column +
                            8 * n) = make_float2(sums[m][n][i], sums[m][n][i + 1]);
}

/* Stores the slice's sums as its part of the tile. */
template <class T>
static __device__ __forceinline__ void store_partial(float *to, const float *sums, int32_t n_rows)
{
    for (int i = (int)threadIdx.x; i < n_rows * T::COLUMNS / 4; i += T::THREADS) {
        const int row = i / (T::COLUMNS / 4), column = i % (T::COLUMNS / 4) * 4;
        __stcg((float4 *)(to + row * T::COLUMNS + column),
               *(const float4 *)(sums + row * T::Y_PITCH + column));
    }
}

enum { SPLITS_TOGETHER = 4 };

/* Adds the parts of a tile, in ascending order of the splits, into shared memory: a thread the
 * pairs that it stores. Loads of several rows and splits are on their way together: one after the
 * other, they would take longer than the products. */
template <class T>
static __device__ __forceinline__ void reduce_parts(const gemm_call &c, int32_t n_rows, float *sums)
{
    const int pair = (int)threadIdx.x % (T::COLUMNS / 2);
#pragma unroll 1
    for (int row = (int)threadIdx.x / (T::COLUMNS / 2); row < n_rows;
         row += T::ROWS_TOGETHER * T::ROWS_STEP) {
        float2 sum[T::ROWS_TOGETHER] = {};
#pragma unroll 1
        for (int32_t first = 0; first < c.n_splits; first += SPLITS_TOGETHER) {
            const float *part = split_partial(c, (int32_t)blockIdx.x, first, T::PART) +
                                row * T::COLUMNS + 2 * pair;
            float2 v[SPLITS_TOGETHER][T::ROWS_TOGETHER];
#pragma unroll
            for (int s = 0; s < SPLITS_TOGETHER; s++)
#pragma unroll
                for (int i = 0; i < T::ROWS_TOGETHER; i++) {
                    v[s][i] = make_float2(-0.0f, -0.0f); /* changes no sum */
                    if (first + s < c.n_splits && row + i * T::ROWS_STEP < n_rows)
                        v[s][i] = __ldcg(
                            (const float2 *)(part + s * T::PART + i * T::ROWS_STEP * T::COLUMNS));
                }
#pragma unroll
            for (int s = 0; s < SPLITS_TOGETHER; s++)
#pragma unroll
                for (int i = 0; i < T::ROWS_TOGETHER; i++)
                    sum[i] = make_float2(__fadd_rn(sum[i].x, v[s][i].x),
                                         __fadd_rn(sum[i].y, v[s][i].y));
        }
#pragma unroll
        for (int i = 0; i < T::ROWS_TOGETHER; i++)
            *(float2 *)(sums + (row + i * T::ROWS_STEP) * T::Y_PITCH + 2 * pair) = sum[i];
    }
}

/* Rows of a thread's pair of columns, from `row` on, without SiLU. What GEMM_ADD adds to is loaded
 * for all of them before any is stored. */
template <class T>
static __device__ __forceinline__ void store_rows(const gemm_call &c, const gemm_rows &rows,
                                                  int row, int32_t column, const float *sums,
                                                  const float scale[2])
{
    const size_t step = (size_t)T::ROWS_STEP * c.y_stride;
    const bool adds = c.epilogue == GEMM_ADD, both = column + 1 < c.n_out;
    const int n = (rows.n - row + T::ROWS_STEP - 1) / T::ROWS_STEP;
    const float bias[2] = { bias_of(c, column), both ? bias_of(c, column + 1) : 0.0f };
    float *y = (float *)c.y + (size_t)(rows.begin + row) * c.y_stride +
               (size_t)rows.group * c.y_group + column;
    float old[T::ROWS_TOGETHER][2] = {};
#pragma unroll
    for (int i = 0; i < T::ROWS_TOGETHER; i++) {
        if (adds && i < n) old[i][0] = y[(size_t)i * step];
        if (adds && i < n && both) old[i][1] = y[(size_t)i * step + 1];
    }
#pragma unroll
    for (int i = 0; i < T::ROWS_TOGETHER; i++) {
        const float2 v = *(const float2 *)(sums + i * T::ROWS_STEP * T::Y_PITCH);
        const float first = __fadd_rn(__fmul_rn(v.x, scale[0]), bias[0]),
                    second = __fadd_rn(__fmul_rn(v.y, scale[1]), bias[1]);
        if (i < n) y[(size_t)i * step] = adds ? __fadd_rn(old[i][0], first) : first;
        if (i < n && both) y[(size_t)i * step + 1] = adds ? __fadd_rn(old[i][1], second) : second;
    }
}

template <enum gemm_weight_layout F, class T>
static __device__ __forceinline__ void store_tile(const gemm_call &c, const gemm_rows &rows,
                                                  int32_t first_column, const float *sums)
{
    const int pair = (int)threadIdx.x % (T::COLUMNS / 2);
    const int32_t column = first_column + 2 * pair;
    if (column >= c.n_columns) return;
    const float scale[2] = { column_scale<F>(c, rows.group, column),
                             column_scale<F>(c, rows.group, column + 1) };
    sums += 2 * pair;
    int row = (int)threadIdx.x / (T::COLUMNS / 2);
    if (c.epilogue == GEMM_STORE || c.epilogue == GEMM_ADD) {
#pragma unroll 1
        for (; row < rows.n; row += T::ROWS_TOGETHER * T::ROWS_STEP)
            store_rows<T>(c, rows, row, column, sums + row * T::Y_PITCH, scale);
        return;
    }
#pragma unroll 1
    for (; row < rows.n; row += T::ROWS_STEP) {
        const float2 v = *(const float2 *)(sums + row * T::Y_PITCH);
        store_pair(c, rows, row, column, __fmul_rn(v.x, scale[0]), __fmul_rn(v.y, scale[1]));
    }
}

/* The order of tiles: TILES_TOGETHER row tiles by all columns, one column of tiles after the
 * other, so that concurrent blocks share W, and x of the row tiles stays in L2 until the last
 * column. */
enum { TILES_TOGETHER = 16 };
struct tile_at {
    int32_t row, column;
};
static __device__ __forceinline__ tile_at tile_in_order(int32_t tile, int32_t n_tiles,
                                                        int32_t n_columns)
{
    const int32_t n_rows = n_tiles / n_columns;
    const int32_t first = tile / (TILES_TOGETHER * n_columns) * TILES_TOGETHER,
                  in = tile - first * n_columns;
    const int32_t together = min(n_rows - first, (int32_t)TILES_TOGETHER);
    return tile_at{ first + in % together, in / together };
}

/* The stages of k that the block multiplies, one split's if k is split. */
struct stage_range {
    int32_t begin, end;
};
template <class T> static __device__ __forceinline__ stage_range stages_of_block(const gemm_call &c)
{
    stage_range stages = { 0, c.n_in_padded / TILE_K };
    if (T::SPLITS_K && c.n_splits > 1) {
        const int32_t per_split = ((stages.end + c.n_splits - 1) / c.n_splits + F8_STAGES - 1) /
                                  F8_STAGES * F8_STAGES;
        stages.begin = (int32_t)blockIdx.y * per_split;
        stages.end = min(stages.end, stages.begin + per_split);
    }
    return stages;
}

/* Fills all slots of shared memory but one. */
template <class T>
static __device__ __forceinline__ void load_first_stages(tile_source<T> *source, const gemm_call &c,
                                                         const stage_range &stages)
{
    /* code that runs once takes as long as fetching it */
#pragma unroll 1
    for (int i = 0; i < T::STAGES - 1; i++) {
        if (stages.begin + i < stages.end)
            load_stage_async<T>(source, c, shared_memory() + i * T::STAGE_BYTES);
        copy_async_commit(); /* an empty group keeps the count */
    }
}

/* Adds the products of all stages to the sums, loading later ones meanwhile. */
template <enum gemm_weight_layout F, class T>
static __device__ __forceinline__ void multiply_stages(tile_source<T> *source, const gemm_call &c,
                                                       int32_t group, int32_t first_column,
                                                       const stage_range &stages,
                                                       float sums[T::M_TILES][T::N_TILES][4])
{
    float part[T::M_TILES][T::N_TILES][4] = {}; /* F8 */
    const float *scales[2] = { nullptr, nullptr };
    if (F == GEMM_F8)
        for (int i = 0; i < 2; i++)
            scales[i] = f8_scales(c, group, min(first_column, c.n_out - 1) + (c.paired ? i : 0));
    int now = 0, next = (T::STAGES - 1) * T::STAGE_BYTES; /* offsets in shared memory */
    for (int32_t stage = stages.begin; stage < stages.end; stage++) {
        copy_async_wait<T::STAGES - 2>();
        __syncthreads(); /* all copies are complete, and nobody reads the next slot any more */
        if (stage + T::STAGES - 1 < stages.end)
            load_stage_async<T>(source, c, shared_memory() + next);
        copy_async_commit();
        multiply_stage<F, T>(F == GEMM_F8 ? part : sums, shared_memory() + now);
        next = now;
        now = now + T::STAGE_BYTES == T::SHARED ? 0 : now + T::STAGE_BYTES;
        if (F != GEMM_F8 || (stage % F8_STAGES != F8_STAGES - 1 && stage + 1 != stages.end))
            continue;
        const float scale[2] = { __ldg(scales[0] + stage / F8_STAGES),
                                 __ldg(scales[1] + stage / F8_STAGES) };
        add_scaled<T>(sums, part, scale);
    }
}

template <enum gemm_weight_layout F, class T>
static __device__ __forceinline__ void compute_tile(const gemm_call &c, const gemm_rows &rows,
                                                    int32_t first_column)
{
    tile_source<T> source;
    find_source<F, T>(&source, c, rows, first_column);
    const stage_range stages = stages_of_block<T>(c);
    if (T::SPLITS_K && c.n_splits > 1) skip_stages<T>(&source, stages.begin);
    load_first_stages<T>(&source, c, stages);
    float sums[T::M_TILES][T::N_TILES][4] = {};
    multiply_stages<F, T>(&source, c, rows.group, first_column, stages, sums);
    copy_async_wait<0>();
    __syncthreads();
    float *collected = (float *)shared_memory();
    collect_tile<T>(collected, sums);
    __syncthreads();
    if (T::SPLITS_K && c.n_splits > 1) {
        store_partial<T>(split_partial(c, (int32_t)blockIdx.x, (int32_t)blockIdx.y, T::PART),
                         collected, rows.n);
        if (!is_last_split(c, (int32_t)blockIdx.x)) return;
        reduce_parts<T>(c, rows.n, collected);
    }
    store_tile<F, T>(c, rows, first_column, collected);
}

/* n_tiles: of the call, with those that groups of experts may turn out not to have. There may be
 * fewer blocks, which then take several; not if k is split. */
template <enum gemm_weight_layout F, class T>
static __global__ void __launch_bounds__(T::THREADS, T::BLOCKS)
    tiles_kernel(const gemm_call c, const int32_t n_tiles)
{
    grid_dependency_sync();
    const int32_t n_across = (c.n_columns + T::COLUMNS - 1) / T::COLUMNS;
#pragma unroll 1
    for (int32_t tile = (int32_t)blockIdx.x; tile < n_tiles; tile += (int32_t)gridDim.x) {
        const tile_at at = tile_in_order(tile, n_tiles, n_across);
        /* experts do not split k */
        const gemm_rows rows = T::SPLITS_K ? rows_of_each(c, at.row, T::ROWS)
                                           : rows_of_tile(c, at.row, T::ROWS);
        if (rows.n > 0) compute_tile<F, T>(c, rows, at.column * T::COLUMNS);
        if (T::SPLITS_K) return;
        __syncthreads(); /* before the next tile's copies come where results were collected */
    }
}

/* ---- experts of few rows ---- */

/* Blocks stay for many tiles, and copies are ahead across them, so that the ring of stages never
 * drains: a block for each tile would spend as long on its first loads and its last sums as on
 * reading W. */
enum { EXPERT_TILES_MAX = 512 };

/* Tiles of rows of all groups, from `begin`, in shared memory. */
struct expert_tiles {
    int32_t begin[EXPERT_TILES_MAX];
    uint16_t group[EXPERT_TILES_MAX], n[EXPERT_TILES_MAX];
    int32_t n_tiles;
};

/* By one warp. The host has made sure that there is room. */
template <class T>
static __device__ __forceinline__ void find_expert_tiles(const gemm_call &c, expert_tiles *to)
{
    const int32_t lane = (int32_t)threadIdx.x % WARP;
    int32_t n = 0;
#pragma unroll 1
    for (int32_t first = 0; first < c.n_groups; first += WARP) {
        const int32_t group = first + lane;
        gemm_rows r = { group, 0, 0 };
        if (group < c.n_groups)
            r = rows_between<false>(c, group, c.begin[group], c.begin[group + 1]);
        r.begin = group < c.n_groups ? c.begin[group] : 0;
        const int32_t mine = (r.n + T::ROWS - 1) / T::ROWS;
        int32_t up_to = mine;
        for (int step = 1; step < WARP; step *= 2) {
            const int32_t before = __shfl_up_sync(0xffffffffu, up_to, (unsigned)step);
            if (lane >= step) up_to += before;
        }
#pragma unroll 1
        for (int32_t i = 0, at = n + up_to - mine; i < mine && at < EXPERT_TILES_MAX; i++, at++) {
            to->begin[at] = r.begin + i * T::ROWS;
            to->group[at] = (uint16_t)group;
            to->n[at] = (uint16_t)min(r.n - i * T::ROWS, (int32_t)T::ROWS);
        }
        n += __shfl_sync(0xffffffffu, up_to, WARP - 1);
    }
    if (lane == 0) to->n_tiles = min(n, (int32_t)EXPERT_TILES_MAX);
}

/* A tile of y: all columns of a tile of rows follow each other. */
struct expert_job {
    gemm_rows rows;
    int32_t first_column;
};
template <class T>
static __device__ __forceinline__ expert_job expert_job_of(const gemm_call &c,
                                                           const expert_tiles &tiles, int32_t job)
{
    const int32_t n_across = (c.n_columns + T::COLUMNS - 1) / T::COLUMNS, at = job / n_across;
    return expert_job{ gemm_rows{ tiles.group[at], tiles.begin[at], tiles.n[at] },
                       (job - at * n_across) * T::COLUMNS };
}

/* Where copies are: `left` stages of a job, then those of the block's next one. */
template <class T> struct expert_feed {
    tile_source<T> source;
    int32_t job, left, to; /* offset of the next slot */
};

template <enum gemm_weight_layout F, class T>
static __device__ __forceinline__ void feed_stage(expert_feed<T> *f, const gemm_call &c,
                                                  const expert_tiles &tiles, int32_t n_jobs)
{
    if (f->left == 0 && f->job < n_jobs) {
        const expert_job j = expert_job_of<T>(c, tiles, f->job);
        find_source<F, T>(&f->source, c, j.rows, j.first_column);
        f->left = c.n_in_padded / TILE_K;
        f->job += (int32_t)gridDim.x;
    }
    if (f->left > 0) {
        load_stage_async<T>(&f->source, c, shared_memory() + f->to);
        f->left--;
    }
    copy_async_commit(); /* an empty group keeps the count */
    f->to = f->to + T::STAGE_BYTES == T::SHARED ? 0 : f->to + T::STAGE_BYTES;
}

/* Stores a thread's sums. Their array is indexed by a number that changes, so that there is one
 * copy of the code. */
template <enum gemm_weight_layout F, class T>
static __device__ __forceinline__ void store_expert_sums(const gemm_call &c, const expert_job &j,
                                                         const float *sums)
{
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    const int32_t first_column = j.first_column + warp * T::WARP_COLUMNS + lane % 4 * 2;
#pragma unroll 1
    for (int n = 0; n < T::N_TILES; n++) {
        const int32_t column = first_column + 8 * n;
        if (column >= c.n_columns) return;
        const float scale[2] = { column_scale<F>(c, j.rows.group, column),
                                 column_scale<F>(c, j.rows.group, column + 1) };
#pragma unroll 1
        for (int i = 0, row = lane / 4; row < j.rows.n; i++, row += 8) {
            const float *v = sums + ((i / 2 * T::N_TILES + n) * 4 + i % 2 * 2);
            store_pair(c, j.rows, row, column, __fmul_rn(v[0], scale[0]),
                       __fmul_rn(v[1], scale[1]));
        }
    }
}

template <enum gemm_weight_layout F, class T>
static __global__ void __launch_bounds__(T::THREADS, T::BLOCKS) experts_kernel(const gemm_call c)
{
    static_assert(T::WARPS_ACROSS * WARP == T::THREADS, "a warp has all rows of the tile");
    __shared__ expert_tiles tiles;
    grid_dependency_sync();
    if (threadIdx.x < WARP) find_expert_tiles<T>(c, &tiles);
    __syncthreads();
    const int32_t n_jobs = tiles.n_tiles * ((c.n_columns + T::COLUMNS - 1) / T::COLUMNS),
                  n_stages = c.n_in_padded / TILE_K;
    expert_feed<T> feed = {};
    feed.job = (int32_t)blockIdx.x;
#pragma unroll 1
    for (int i = 0; i < T::STAGES - 1; i++) feed_stage<F, T>(&feed, c, tiles, n_jobs);
    int now = 0;
#pragma unroll 1
    for (int32_t job = (int32_t)blockIdx.x; job < n_jobs; job += (int32_t)gridDim.x) {
        const expert_job j = expert_job_of<T>(c, tiles, job);
        float sums[T::M_TILES][T::N_TILES][4] = {}, part[T::M_TILES][T::N_TILES][4] = {};
        const int32_t column = min(j.first_column, c.n_out - 1);
        const float *scales[2] = { F == GEMM_F8 ? f8_scales(c, j.rows.group, column) : nullptr,
                                   F == GEMM_F8 ? f8_scales(c, j.rows.group, column + c.paired)
                                                : nullptr };
        float scale[2] = { 1, 1 };
#pragma unroll 1
        for (int32_t stage = 0; stage < n_stages; stage++) {
            copy_async_wait<T::STAGES - 2>();
            __syncthreads(); /* all copies are complete, and nobody reads the next slot any more */
            feed_stage<F, T>(&feed, c, tiles, n_jobs);
            if (F == GEMM_F8 && stage % F8_STAGES == 0)
                for (int i = 0; i < 2; i++) scale[i] = __ldg(scales[i] + stage / F8_STAGES);
            multiply_stage<F, T>(F == GEMM_F8 ? part : sums, shared_memory() + now);
            now = now + T::STAGE_BYTES == T::SHARED ? 0 : now + T::STAGE_BYTES;
            if (F == GEMM_F8 && (stage % F8_STAGES == F8_STAGES - 1 || stage + 1 == n_stages))
                add_scaled<T>(sums, part, scale);
        }
        store_expert_sums<F, T>(c, j, &sums[0][0][0]);
    }
}

/* ---- shapes ---- */

struct tile_shape {
    void (*kernel)(const gemm_call, const int32_t);
    int32_t rows, columns, threads, blocks; /* blocks: of an SM */
    size_t shared;
};

template <enum gemm_weight_layout F, class T> static tile_shape shape_for()
{
    return { tiles_kernel<F, T>, T::ROWS, T::COLUMNS, T::THREADS, T::BLOCKS, T::SHARED };
}

/* Largest first: for prompts; for batches of decode steps, which read W at memory bandwidth and x
 * again for every 128 columns (64 KiB or more of W are in flight per SM; with narrower tiles x
 * would take more L2 bandwidth than W); for experts with dozens of rows; and for matrices with too
 * few columns to give every SM a larger one. Those that split k have 64 columns: k is then split
 * into half as many parts, which one block adds up. A block on compute capability 8.6 has 99 KiB of
 * shared memory, which limits the stages of the first shapes. */
enum {
    SHAPE_PROMPT,
    SHAPE_64_ROWS,
    SHAPE_EXPERTS,
    SHAPE_32_ROWS,
    SHAPE_SMALL,
    N_SHAPES,
    SHAPE_64_ROWS_SPLIT = N_SHAPES,
    SHAPE_32_ROWS_SPLIT
};
template <enum gemm_weight_layout F> static tile_shape shape_of(int i)
{
    enum {
        BATCH_STAGES = gemm_stored<F>::IS_16 ? 4
                       : F == GEMM_W4        ? 8
                                             : 6,
        BATCH_BLOCKS = F == GEMM_F8 ? 1 : 2,
        /* of 16 bits there is shared memory for no more, and registers would spill */
        EXPERT_BLOCKS = F == GEMM_F8 || gemm_stored<F>::IS_16 ? 3 : 4,
        SPLIT_STAGES = gemm_stored<F>::IS_16 ? 6 : 8
    };
    if (i == SHAPE_PROMPT)
        return shape_for<F, gemm_tile<F, 128, 128, 2, 4, gemm_stored<F>::IS_16 ? 3 : 4, 1>>();
    if (i == SHAPE_64_ROWS)
        return shape_for<F, gemm_tile<F, 64, 128, 2, 4, BATCH_STAGES, BATCH_BLOCKS>>();
    if (i == SHAPE_64_ROWS_SPLIT)
        return shape_for<F, gemm_tile<F, 64, 64, 2, 2, SPLIT_STAGES, 2, true>>();
    if (i == SHAPE_32_ROWS_SPLIT)
        return shape_for<F, gemm_tile<F, 32, 64, 1, 4, SPLIT_STAGES, 2, true>>();
    if (i == SHAPE_EXPERTS) return shape_for<F, gemm_tile<F, 64, 64, 2, 2, 4, EXPERT_BLOCKS>>();
    if (i == SHAPE_32_ROWS)
        return shape_for<F, gemm_tile<F, 32, 128, 1, 4, BATCH_STAGES, BATCH_BLOCKS>>();
    return shape_for<F, gemm_tile<F, 32, 32, 2, 2, gemm_stored<F>::IS_16 ? 6 : 8, 4>>();
}

static tile_shape shape_of_layout(enum gemm_weight_layout layout, int i)
{
    static tile_shape (*const of[GEMM_WEIGHT_LAYOUTS])(
        int) = { nullptr,           shape_of<GEMM_BF16>, shape_of<GEMM_F16>,
                 shape_of<GEMM_W8>, shape_of<GEMM_W4>,   shape_of<GEMM_F8> };
    return of[layout](i);
}

enum { SMS_USUAL = 128 }; /* 108 of an A100 to 148 of a B200; affects only speed */

/* The largest tile that a group's usual rows fill to more than half and that gives every SM one. */
static tile_shape choose_shape(enum gemm_weight_layout layout, const gemm_call &c)
{
    const size_t rows = c.begin ? blocks_for((size_t)c.n_rows, (size_t)c.n_groups)
                                : (size_t)c.n_rows;
    for (int i = 0; i + 1 < N_SHAPES; i++) {
        const tile_shape t = shape_of_layout(layout, i);
        const size_t n_blocks = (size_t)blocks_for((size_t)c.n_rows, (size_t)t.rows) *
                                blocks_for((size_t)c.n_columns, (size_t)t.columns) *
                                (size_t)(c.begin ? 1 : c.n_groups);
        if (2 * rows > (size_t)t.rows && n_blocks >= SMS_USUAL) return t;
    }
    return shape_of_layout(layout, N_SHAPES - 1);
}

enum { BATCH_ROWS = 64, BATCH_COLUMNS = 128, SPLIT_COLUMNS = 64, SPLIT_LEAST = 4 * TILE_K };
static_assert(2 * SMS_USUAL * BATCH_ROWS * SPLIT_COLUMNS <= SPLIT_K_SCRATCH_FLOATS,
              "choose_n_splits gives fewer than twice the blocks wanted");

/* A batch of decode steps is one row of tiles, with split k for narrow matrices. Both depend on the
 * matrix alone. False: it is none. */
static bool choose_batch(enum gemm_weight_layout layout, gemm_call *c, tile_shape *t)
{
    if (!c->scratch || c->begin || c->n_groups > 1 || c->n_rows > BATCH_ROWS) return false;
    const bool few = c->n_rows <= 32,
               wide = blocks_for((size_t)c->n_columns, BATCH_COLUMNS) >= SMS_USUAL;
    *t = shape_of_layout(layout, wide  ? few ? SHAPE_32_ROWS : SHAPE_64_ROWS
                                 : few ? SHAPE_32_ROWS_SPLIT
                                       : SHAPE_64_ROWS_SPLIT);
    c->n_splits = wide ? 1 : choose_n_splits(*c, SPLIT_COLUMNS, SMS_USUAL, SPLIT_LEAST);
    return true;
}

/* A block for each tile. How many tiles experts have is known on the device alone: then as many as
 * there are at least, if all rows are real, and enough for the GPU; the first of them take what is
 * more. */
static size_t n_tile_blocks(const gemm_call &c, const tile_shape &t, size_t n_tiles)
{
    if (!c.begin) return n_tiles;
    const size_t at_a_time = (size_t)gemm_this_device().n_sms * (size_t)t.blocks,
                 least = c.rows_above > 0 ? 0
                                          : (size_t)blocks_for((size_t)c.n_rows, (size_t)t.rows) *
                                                blocks_for((size_t)c.n_columns, (size_t)t.columns);
    const size_t enough = least > at_a_time ? least : at_a_time;
    return n_tiles < enough ? n_tiles : enough;
}

cudaError_t gemm_tiles(cudaStream_t stream, enum gemm_weight_layout layout,
                       const struct gemm_call *call)
{
    gemm_call c = *call;
    tile_shape t;
    if (!choose_batch(layout, &c, &t)) t = choose_shape(layout, c);
    const size_t n_tiles = (size_t)n_tiles_at_most(c, t.rows) *
                           blocks_for((size_t)c.n_columns, (size_t)t.columns);
    if (n_tiles == 0) return cudaSuccess;                      /* too few rows for this kernel */
    if (n_tiles > INT32_MAX / 2) return cudaErrorInvalidValue; /* sums of two stay small */
    return launch(stream, t.kernel,
                  dim3((unsigned)n_tile_blocks(c, t, n_tiles), (unsigned)c.n_splits),
                  dim3((unsigned)t.threads), t.shared, c, (int32_t)n_tiles);
}

/* ---- experts of few rows: the host ---- */

/* Groups have at most so many rows on average: with more, tiles of more rows read x less often. */
enum { EXPERT_ROWS_USUAL = 24, EXPERT_ROWS = 32, EXPERT_COLUMNS = 128 };

/* Of 4-bit weights a stage is so small that reading x from shared memory takes longer than W from
 * memory: half of the warps, with twice as many columns each, read it half as often. */
template <enum gemm_weight_layout F>
using expert_tile = gemm_tile<F, EXPERT_ROWS, EXPERT_COLUMNS, 1, F == GEMM_W4 ? 4 : 8,
                              gemm_stored<F>::IS_16 ? 4
                              : F == GEMM_W4        ? 8
                                                    : 7,
                              F == GEMM_W4 ? 3 : 2>;

/* Blocks that run at a time: as many as there is shared memory for. */
template <enum gemm_weight_layout F> static size_t n_expert_blocks()
{
    enum {
        EACH = (int)expert_tile<F>::SHARED + (int)sizeof(expert_tiles) + 1024 /* the system's */
    };
    const gemm_device &device = gemm_this_device();
    const size_t fit = device.shared_of_sm / EACH, wanted = expert_tile<F>::BLOCKS;
    return (size_t)device.n_sms * (fit < 1 ? 1 : fit < wanted ? fit : wanted);
}

static size_t n_expert_blocks_of(enum gemm_weight_layout layout)
{
    switch (layout) {
    case GEMM_W8: return n_expert_blocks<GEMM_W8>();
    case GEMM_W4: return n_expert_blocks<GEMM_W4>();
    case GEMM_F8: return n_expert_blocks<GEMM_F8>();
    default: return n_expert_blocks<GEMM_BF16>();
    }
}

static size_t n_expert_jobs(const gemm_call &c)
{
    return (size_t)n_tiles_at_most(c, EXPERT_ROWS) *
           blocks_for((size_t)c.n_columns, EXPERT_COLUMNS);
}

bool gemm_experts_supports(enum gemm_weight_layout layout, const struct gemm_call *c)
{
    return c->begin && layout != GEMM_F32 && !c->x_scales &&
           c->n_rows <= EXPERT_ROWS_USUAL * c->n_groups && c->n_groups <= UINT16_MAX &&
           n_tiles_at_most(*c, EXPERT_ROWS) <= (unsigned)EXPERT_TILES_MAX &&
           n_expert_jobs(*c) >= n_expert_blocks_of(layout);
}

template <enum gemm_weight_layout F>
static cudaError_t run_experts(cudaStream_t stream, const gemm_call &c)
{
    typedef expert_tile<F> tile;
    return launch(stream, experts_kernel<F, tile>, dim3((unsigned)n_expert_blocks<F>()),
                  dim3(tile::THREADS), tile::SHARED, c);
}

cudaError_t gemm_experts(cudaStream_t stream, enum gemm_weight_layout layout,
                         const struct gemm_call *c)
{
    switch (layout) {
    case GEMM_BF16: return run_experts<GEMM_BF16>(stream, *c);
    case GEMM_F16: return run_experts<GEMM_F16>(stream, *c);
    case GEMM_W8: return run_experts<GEMM_W8>(stream, *c);
    case GEMM_W4: return run_experts<GEMM_W4>(stream, *c);
    case GEMM_F8: return run_experts<GEMM_F8>(stream, *c);
    default: return cudaErrorInvalidValue;
    }
}
