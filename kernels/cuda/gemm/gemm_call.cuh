/* gemm_call.cuh - what the GEMM kernels share: a call as they take it, the rows of a block, and the
 * epilogue.
 *
 * gemm.cu turns a struct gemm into a gemm_call and chooses the kernel. Columns are rows of W; they
 * come in pairs (c even and c + 1), which are gate and up in a paired matrix. Thread: engine up to
 * the launch, then device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_CALL_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_CALL_CUH

#include "kernels/cuda/dtype_convert.cuh"
#include "kernels/cuda/gemm/gemm.h"

enum { GEMM_F8_BLOCK = 128 };      /* elements of a row, and rows, that share a scale */
enum { GEMM_SKINNY_ROWS = 16 };    /* rows of a group that the skinny kernel takes */
enum { GEMM_SKINNY_K_STEP = 128 }; /* it is faster if n_in is a multiple */

struct gemm_call {
    const unsigned char *w;
    size_t w_stride, row_bytes, scales_at;
    const int32_t *begin;
    int32_t n_groups;
    size_t x_group, y_group; /* 0 with `begin` */
    int32_t n_rows;          /* or an upper bound */
    int32_t rows_above;      /* this kernel handles groups with rows_above < rows */
    int32_t rows_at_most;    /* <= rows_at_most */
    int32_t n_out, n_in;
    int32_t n_in_padded; /* to a multiple of GEMM_STEP */
    int32_t n_columns;   /* n_out, and padding columns that become zeros of y */
    const void *x;
    size_t x_stride;
    const int32_t *x_rows;
    const float *x_scales; /* x is e4m3; NULL: the layout's type, or with x_f32 */
    int32_t x_scales_stride;
    bool x_f32; /* f32, rounded by the kernel, after `norm` if not NULL */
    const float *norm;
    float eps;
    int32_t n_x_rows;   /* with `begin`: rows of x */
    bool begin_is_read; /* `begin` may be read before the previous kernel has ended */
    const float *bias;
    void *y;
    size_t y_stride;
    enum gemm_epilogue epilogue;
    bool paired;
    unsigned char *scratch; /* gemm_split_k.cuh; NULL: none */
    int32_t n_splits;       /* of k; usually 1 */
    int32_t fused_index;    /* its index among the fused GEMMs of a launch, whose slices are
                             * separate */
};

/* The kernels. Only the last takes layout F32. */
cudaError_t gemm_skinny(cudaStream_t stream, enum gemm_weight_layout layout,
                        const struct gemm_call *c);
/* Fused: n GEMMs of one group and the same rows, n_in a multiple of GEMM_SKINNY_K_STEP. */
cudaError_t gemm_skinny_fused(cudaStream_t stream, enum gemm_weight_layout layout,
                              const struct gemm_call *calls, int n);
/* The same for decode steps, without groups or one GEMM with `begin`. The bits are gemm_skinny's.
 * gemm_decode_supports: it is faster, for each of the calls. The only kernel with x_f32. */
bool gemm_decode_supports(enum gemm_weight_layout layout, const struct gemm_call *c);
cudaError_t gemm_decode(cudaStream_t stream, enum gemm_weight_layout layout,
                        const struct gemm_call *calls, int n);
/* Of these, calls of one row of x, with n_splits set: gemm_decode chooses. */
bool gemm_decode_one_supports(enum gemm_weight_layout layout, const struct gemm_call *c);
cudaError_t gemm_decode_one(cudaStream_t stream, enum gemm_weight_layout layout,
                            const struct gemm_call *calls, int n);
/* With the sums over the choices; gemm_combine_supports: it is possible and faster. */
bool gemm_combine_supports(enum gemm_weight_layout layout, const struct gemm_call *c,
                           const struct gemm_choices *to);
cudaError_t gemm_combine(cudaStream_t stream, enum gemm_weight_layout layout,
                         const struct gemm_call *c, const struct gemm_choices *to);
/* Of these, calls with one row of choices: gemm_combine chooses. */
bool gemm_combine_one_supports(enum gemm_weight_layout layout, const struct gemm_call *c,
                               const struct gemm_choices *to);
cudaError_t gemm_combine_one(cudaStream_t stream, enum gemm_weight_layout layout,
                             const struct gemm_call *c, const struct gemm_choices *to);
cudaError_t gemm_tiles(cudaStream_t stream, enum gemm_weight_layout layout,
                       const struct gemm_call *c);
/* Groups with `begin` of dozens of rows at most, in one launch: whether it takes them. */
bool gemm_experts_supports(enum gemm_weight_layout layout, const struct gemm_call *c);
cudaError_t gemm_experts(cudaStream_t stream, enum gemm_weight_layout layout,
                         const struct gemm_call *c);
cudaError_t gemm_f32(cudaStream_t stream, const struct gemm_call *c);
/* Whether this GPU has the kernels of compute capability 9.0 and they are faster for the call. Not
 * for `deterministic` calls. Not F32, nor F8 without x in e4m3. */
bool gemm_sm90_supports(enum gemm_weight_layout layout, const struct gemm_call *c);
cudaError_t gemm_sm90(cudaStream_t stream, enum gemm_weight_layout layout,
                      const struct gemm_call *c);
bool gemm_sm90_available(void);
/* BF16 and F16. */
cudaError_t gemm_sm90_16(cudaStream_t stream, enum gemm_weight_layout layout,
                         const struct gemm_call *c, enum gemm_sm90_tile tile);
/* W8 and W4. */
cudaError_t gemm_sm90_upconvert(cudaStream_t stream, enum gemm_weight_layout layout,
                                const struct gemm_call *c, enum gemm_sm90_tile tile);
cudaError_t gemm_sm90_f8(cudaStream_t stream, const struct gemm_call *c, enum gemm_sm90_tile tile);
/* The tiles exist for the call. */
bool gemm_sm90_has_tile(enum gemm_weight_layout layout, const struct gemm_call *c,
                        enum gemm_sm90_tile tile);
/* The one that should be fastest. */
enum gemm_sm90_tile gemm_sm90_choose(enum gemm_weight_layout layout, const struct gemm_call *c);

/* ---- rows ---- */

struct gemm_rows {
    int32_t group, begin, n; /* rows begin .. begin + n of x and y; none: n is 0 */
};

/* All rows of a group, begin .. end, if they are this kernel's. EARLY, in all of these: called
 * before grid_dependency_sync(), so `begin` may still have old values; the result is a guess with
 * an existing group. It is read past L1, which must not keep it. */
template <bool EARLY>
static __device__ __forceinline__ gemm_rows rows_between(const gemm_call &c, int32_t group,
                                                         int32_t begin, int32_t end)
{
    gemm_rows r = { group, begin, (int32_t)((unsigned)end - (unsigned)begin) };
    if (EARLY && (unsigned)r.n > (unsigned)c.n_rows) r.n = 0; /* sums of these stay small */
    if (r.n <= c.rows_above || r.n > c.rows_at_most) r.n = 0;
    return r;
}

enum { GROUPS_PER_LANE = 4 };

/* Where GROUPS_PER_LANE groups from `group` on begin, and where the last ends. All are loaded
 * before any is used, so that they take one latency; groups past the last are empty. */
struct gemm_begins {
    int32_t of[GROUPS_PER_LANE + 1];
};
template <bool EARLY>
static __device__ __forceinline__ gemm_begins begins_of_lane(const gemm_call &c, int32_t group)
{
    gemm_begins b;
#pragma unroll
    for (int i = 0; i <= GROUPS_PER_LANE; i++) {
        const int32_t *at = c.begin + min(group + i, c.n_groups);
        b.of[i] = EARLY ? __ldcg(at) : *at;
    }
    return b;
}

/* The tile-th tile of at most n_tile rows among the lane's groups, from `group` on. *n_tiles: how
 * many tiles these have. */
template <bool EARLY>
static __device__ __forceinline__ gemm_rows rows_of_lane(const gemm_call &c, const gemm_begins &b,
                                                         int32_t group, int32_t tile,
                                                         int32_t n_tile, int32_t *n_tiles)
{
    gemm_rows found = { 0, 0, 0 };
    int32_t before = 0;
#pragma unroll
    for (int i = 0; i < GROUPS_PER_LANE; i++) {
        const gemm_rows r = rows_between<EARLY>(c, group + i, b.of[i], b.of[i + 1]);
        const int32_t skip = tile - before, n = (r.n + n_tile - 1) / n_tile;
        if (skip >= 0 && skip < n)
            found = gemm_rows{ r.group, r.begin + skip * n_tile, min(r.n - skip * n_tile, n_tile) };
        before += n;
    }
    *n_tiles = before;
    return found;
}

/* The same if every group has all rows. */
static __device__ __forceinline__ gemm_rows rows_of_each(const gemm_call &c, int32_t tile,
                                                         int32_t n_tile)
{
    gemm_rows r = { 0, 0, 0 };
    if (c.n_groups > 1) {
        const int32_t per_group = (c.n_rows + n_tile - 1) / n_tile;
        r.group = tile / per_group;
        tile -= r.group * per_group;
    }
    r.begin = tile * n_tile;
    r.n = min(max(c.n_rows - r.begin, 0), n_tile);
    return r;
}

/* The tile-th tile of at most n_tile rows, counted through all groups. Every warp searches
 * separately, so no barrier is needed: lanes count the tiles of their groups, then the lane that
 * has the tile computes it. */
template <bool EARLY = false>
static __device__ __forceinline__ gemm_rows rows_of_tile(const gemm_call &c, int32_t tile,
                                                         int32_t n_tile)
{
    if (!c.begin) return rows_of_each(c, tile, n_tile);
    const int32_t lane = (int32_t)(threadIdx.x % WARP);
    for (int32_t first = 0; first < c.n_groups; first += WARP * GROUPS_PER_LANE) {
        const int32_t group = first + lane * GROUPS_PER_LANE;
        const gemm_begins begins = begins_of_lane<EARLY>(c, group);
        int32_t n_tiles;
        rows_of_lane<EARLY>(c, begins, group, -1, n_tile, &n_tiles);
        int32_t up_to = n_tiles; /* of groups up to this lane's */
        for (int step = 1; step < WARP; step *= 2) {
            const int32_t before = __shfl_up_sync(0xffffffffu, up_to, (unsigned)step);
            if (lane >= step) up_to += before;
        }
        const unsigned has = __ballot_sync(0xffffffffu, tile < up_to);
        if (has) {
            const int from = __ffs((int)has) - 1;
            const gemm_rows r = rows_of_lane<EARLY>(c, begins, group, tile - (up_to - n_tiles),
                                                    n_tile, &n_tiles);
            return gemm_rows{ __shfl_sync(0xffffffffu, r.group, from),
                              __shfl_sync(0xffffffffu, r.begin, from),
                              __shfl_sync(0xffffffffu, r.n, from) };
        }
        tile -= __shfl_sync(0xffffffffu, up_to, WARP - 1);
    }
    return gemm_rows{ 0, 0, 0 };
}

/* An upper bound of the tiles of n_tile rows: every group of this kernel may end in a partial
 * one. */
static inline unsigned n_tiles_at_most(const gemm_call &c, int32_t n_tile)
{
    if (!c.begin) return (unsigned)c.n_groups * blocks_for((size_t)c.n_rows, (size_t)n_tile);
    const int32_t n_groups = c.n_rows / (c.rows_above + 1);
    return (unsigned)(c.n_rows / n_tile + (n_groups < c.n_groups ? n_groups : c.n_groups));
}

/* Offset of row i of the rows in x, in elements. */
static __device__ __forceinline__ size_t x_row(const gemm_call &c, const gemm_rows &rows, int32_t i)
{
    const int32_t y_row = rows.begin + i;
    return (size_t)(c.x_rows ? c.x_rows[y_row] : y_row) * c.x_stride +
           (size_t)rows.group * c.x_group;
}

/* ---- scales ---- */

static __device__ __forceinline__ const float *scales_of(const gemm_call &c, int32_t group)
{
    return (const float *)(c.w + (size_t)group * c.w_stride + c.scales_at);
}

/* F8: a column's scales, one per GEMM_F8_BLOCK elements of k. */
static __device__ __forceinline__ const float *f8_scales(const gemm_call &c, int32_t group,
                                                         int32_t column)
{
    const int32_t per_row = (c.n_in + GEMM_F8_BLOCK - 1) / GEMM_F8_BLOCK;
    int32_t block = column / GEMM_F8_BLOCK;
    if (c.paired)
        block = column / 2 / GEMM_F8_BLOCK +
                column % 2 * ((c.n_out / 2 + GEMM_F8_BLOCK - 1) / GEMM_F8_BLOCK);
    return scales_of(c, group) + (size_t)block * (size_t)per_row;
}

/* The factor of a finished sum. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ float column_scale(const gemm_call &c, int32_t group,
                                                     int32_t column)
{
    if (F != GEMM_W8 && F != GEMM_W4) return 1.0f;
    return column < c.n_out ? scales_of(c, group)[column] : 0.0f;
}

/* ---- results: no multiplication and addition that a compiler might make one of in one kernel and
 * not in another ---- */

static __device__ __forceinline__ float bias_of(const gemm_call &c, int32_t column)
{
    if (!c.bias) return 0.0f;
    return c.bias[c.paired ? column / 2 + column % 2 * (c.n_out / 2) : column];
}

static __device__ __forceinline__ void store_silu(const gemm_call &c, size_t at, int32_t column,
                                                  float gate, float up)
{
    float y = 0;
    if (column < c.n_out)
        y = __fmul_rn(silu(__fadd_rn(gate, bias_of(c, column))),
                      __fadd_rn(up, bias_of(c, column + 1)));
    if (c.epilogue == GEMM_SILU) ((float *)c.y)[at + column / 2] = y;
    else
        ((uint16_t *)c.y)[at + column / 2] = c.epilogue == GEMM_SILU_F16 ? float_to_f16(y)
                                                                         : float_to_bf16(y);
}

/* Stores the sums of columns `column` (even, below n_columns) and column + 1 of row i. */
static __device__ __forceinline__ void store_pair(const gemm_call &c, const gemm_rows &rows,
                                                  int32_t i, int32_t column, float first,
                                                  float second)
{
    const size_t at = (size_t)(rows.begin + i) * c.y_stride + (size_t)rows.group * c.y_group;
    if (c.epilogue == GEMM_STORE_BF16) {
        uint16_t *y = (uint16_t *)c.y + at + column;
        y[0] = float_to_bf16(__fadd_rn(first, bias_of(c, column)));
        if (column + 1 < c.n_out) y[1] = float_to_bf16(__fadd_rn(second, bias_of(c, column + 1)));
        return;
    }
    if (c.epilogue != GEMM_STORE && c.epilogue != GEMM_ADD) {
        store_silu(c, at, column, first, second);
        return;
    }
    float *y = (float *)c.y + at + column;
    first = __fadd_rn(first, bias_of(c, column));
    y[0] = c.epilogue == GEMM_ADD ? __fadd_rn(y[0], first) : first;
    if (column + 1 >= c.n_out) return;
    second = __fadd_rn(second, bias_of(c, column + 1));
    y[1] = c.epilogue == GEMM_ADD ? __fadd_rn(y[1], second) : second;
}

#endif
