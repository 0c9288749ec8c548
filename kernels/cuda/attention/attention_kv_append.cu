/* attention_kv_append.cu - appends a step's keys and values to the pool, after rotating its heads.
 *
 * A warp has a head's query, key or value of one row: it rotates it in place, then writes it in the
 * pool's type. Bound by the launch for few rows, by writing for many.
 * Thread: device; attention_kv_append: engine. */
#include "kernels/cuda/attention/attention_kv_quantise.cuh"
#include "kernels/cuda/attention/attention_launch.cuh"
#include "kernels/cuda/rope.cuh"
#include "kernels/kv_rows.h"

enum {
    APPEND_THREADS = 128,
    APPEND_WARPS = APPEND_THREADS / WARP,
    APPEND_BLOCKS = 8 /* per SM */,
    SIDE = 4
};

struct append_call {
    struct kv_layer kv;
    struct attn_row_set list;
    const float *k, *v;
    struct rope_args rope;
    int32_t n_queries; /* heads of a row that are only rotated; 0 without a rotation */
    bool rotates;
    bool rounds_queries; /* attention_append_leaving_bf16 */
};

bool attention_supports_kv(const struct kv_layer *kv)
{
    return kv->latent ? kv->dtype == DTYPE_F32 || kv->dtype == DTYPE_BF16
                      : kv_rows_known(kv->dtype);
}

/* ---- without scales ---- */

template <enum dtype T> static __device__ __forceinline__ void store_4(char *to, float4 x)
{
    if constexpr (T == DTYPE_F32) *(float4 *)(void *)to = x;
    else if constexpr (T == DTYPE_F16)
        *(uint2 *)(void *)to = make_uint2(round_f16x2(x.x, x.y), round_f16x2(x.z, x.w));
    else *(uint2 *)(void *)to = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}
template <enum dtype T> static __device__ __forceinline__ void store_1(char *to, float x)
{
    if constexpr (T == DTYPE_F32) *(float *)(void *)to = x;
    else if constexpr (T == DTYPE_F16) *(uint16_t *)(void *)to = (uint16_t)round_f16x2(x, 0.0f);
    else *(uint16_t *)(void *)to = float_to_bf16(x);
}

/* One row by a warp. */
template <enum dtype T, int N>
static __device__ __forceinline__ void append_plain_row(const float *from, char *to, int dim)
{
    for (int i = (int)(threadIdx.x % WARP) * N; i < dim; i += WARP * N) {
        if constexpr (N == SIDE)
            store_4<T>(to + i * kv_traits<T>::BYTES, *(const float4 *)(from + i));
        else store_1<T>(to + i * kv_traits<T>::BYTES, from[i]);
    }
}

/* ---- with scales ---- */

/* One row by a warp, whose lanes have N elements side by side at a time. */
template <enum dtype T, int N>
static __device__ __forceinline__ void append_scaled_row(const float *from, char *to,
                                                         char *scale_to, int dim)
{
    constexpr int TURNS = KERNEL_HEAD_DIM_MAX / WARP / N;
    const int lane = (int)(threadIdx.x % WARP), first = lane * N;
    float x[TURNS][N];
    unsigned top = 0;
    UNROLL for (int i = 0; i < TURNS; i++)
    {
        const int at = first + i * (WARP * N);
        UNROLL for (int e = 0; e < N; e++) x[i][e] = 0;
        if (at < dim) {
            if constexpr (N == SIDE) {
                const float4 four = *(const float4 *)(from + at);
                x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
            } else x[i][0] = from[at];
        }
        UNROLL for (int e = 0; e < N; e++) top = max(top, __float_as_uint(x[i][e]) & 0x7fffffffu);
    }
    const float scale = scale_for<T>(warp_top(top));
    if (lane == 0) store_scale(scale_to, scale);
    UNROLL for (int i = 0; i < TURNS; i++)
    {
        const int at = first + i * (WARP * N);
        unsigned bytes = 0;
        if (at >= dim) continue;
        UNROLL for (int e = 0; e < N; e++)
            bytes |= scale > 0 ? quantised<T>(x[i][e], scale) << 8 * e : 0;
        if constexpr (N == SIDE) *(unsigned *)(void *)(to + at) = bytes;
        else to[at] = (char)bytes;
    }
}

/* ---- all ---- */

/* A warp's work: head i of a row, first those that are only rotated. Of the others the key (even)
 * or the value (odd) of a head, one part of latents; `to` is its place in the pool. */
struct append_item {
    int i, row, pos;
    struct kv_paged_row to;
};

/* Reads only the list. */
static __device__ __forceinline__ struct append_item append_item_of(const struct append_call &c,
                                                                    int of_row, int at)
{
    const struct cuda_attn_row row = c.list.rows[at / of_row];
    const int i = at % of_row - c.n_queries, parts = c.kv.latent ? 1 : 2;
    struct append_item x = { i, row.row, row.pos, { 0, 0 } };
    if (i < 0) return x;
    x.to = kv_key_row(c.kv, c.list.tables + row.table, row.pos, i / parts);
    if (i % parts) x.to.row += (unsigned)c.kv.block_tokens;
    return x;
}

template <enum dtype T, int N>
static __device__ __forceinline__ void append_head(const struct append_call &c,
                                                   const struct append_item &x)
{
    const int parts = c.kv.latent ? 1 : 2, head = x.i / parts, part = x.i % parts,
              dim = c.kv.head_dim;
    const size_t at = (size_t)x.row * (size_t)c.kv.n_heads + (size_t)head;
    const struct kv_paged_row r = x.to;
    const float *from = (part ? c.v : c.k) + at * (size_t)dim;
    char *pool = (char *)c.kv.data;
    if (c.rotates && !part) {
        rotate_head(c.rope, c.rope.heads[1], c.rope.heads[1].x + at * (size_t)dim, x.pos);
        __syncwarp();
    }
    if constexpr (kv_traits<T>::SCALED)
        append_scaled_row<T, N>(from, pool + kv_row_offset<T>(c.kv, r),
                                pool + kv_scale_offset<T>(c.kv, r), dim);
    else append_plain_row<T, N>(from, pool + kv_row_offset<T>(c.kv, r), dim);
}

template <enum dtype T, int N>
static __global__ void __launch_bounds__(APPEND_THREADS, 8) append_rows(const struct append_call c)
{
    const struct rope_heads &queries = c.rope.heads[0];
    const int of_row = c.n_queries + c.kv.n_heads * (c.kv.latent ? 1 : 2),
              n = attn_row_set_n(c.list) * of_row;
    int at = (int)blockIdx.x * APPEND_WARPS + (int)threadIdx.x / WARP;
    struct append_item x = {};
    /* two reads that depend on each other, of what was there before the step */
    if (at < n) x = append_item_of(c, of_row, at);
    grid_dependency_sync();
    while (at < n) {
        if (x.i >= 0) append_head<T, N>(c, x);
        else
            rotate_head(c.rope, queries,
                        queries.x + (size_t)x.row * queries.x_stride +
                            (size_t)(x.i + c.n_queries) * queries.head_dim,
                        x.pos);
        at += (int)gridDim.x * APPEND_WARPS;
        if (at < n) x = append_item_of(c, of_row, at);
    }
}

/* ---- many rows, heads of 128 ---- */

/* A warp has four heads of a row, all of whose loads are on their way together: four queries, or
 * two keys and their values. Where a row's keys go and its rotations are looked up once for them.
 * A lane has the pairs lane and lane + 32 of a head. */
enum {
    FOUR_DIM = 128,
    FOUR = 4,
    FOUR_PAIRS = FOUR_DIM / 2 / WARP,
    FOUR_ROWS = 128 /* from so many rows on; fewer leave SMs without work */
};
enum append_way { APPEND_HALVES, APPEND_HALVES_NORM, APPEND_INTERLEAVED };

struct append_pairs {
    float2 v[FOUR_PAIRS];
};

/* Where a pair's first element is in its head; and the second, from there. */
template <enum append_way W> static __device__ __forceinline__ unsigned pair_at(int i)
{
    return (threadIdx.x % WARP + (unsigned)i * WARP) * (W == APPEND_INTERLEAVED ? 2 : 1);
}
template <enum append_way W>
static constexpr unsigned PAIR_APART = W == APPEND_INTERLEAVED ? 1 : FOUR_DIM / 2;

template <enum append_way W>
static __device__ __forceinline__ append_pairs load_pairs(const float *x)
{
    append_pairs p;
    UNROLL for (int i = 0; i < FOUR_PAIRS; i++)
    {
        const float *at = x + pair_at<W>(i);
        if constexpr (W == APPEND_INTERLEAVED) p.v[i] = *(const float2 *)(const void *)at;
        else p.v[i] = make_float2(at[0], at[PAIR_APART<W>]);
    }
    return p;
}

template <enum append_way W>
static __device__ __forceinline__ void store_pairs(float *x, const append_pairs &p)
{
    UNROLL for (int i = 0; i < FOUR_PAIRS; i++)
    {
        float *at = x + pair_at<W>(i);
        if constexpr (W == APPEND_INTERLEAVED) *(float2 *)(void *)at = p.v[i];
        else at[0] = p.v[i].x, at[PAIR_APART<W>] = p.v[i].y;
    }
}

/* In bf16, from where the head begins. */
template <enum append_way W>
static __device__ __forceinline__ void store_rounded(float *x, const append_pairs &p)
{
    UNROLL for (int i = 0; i < FOUR_PAIRS; i++)
    {
        uint16_t *at = (uint16_t *)(void *)x + pair_at<W>(i);
        const unsigned pair = pack_bf16(p.v[i].x, p.v[i].y);
        if constexpr (W == APPEND_INTERLEAVED) *(unsigned *)(void *)at = pair;
        else at[0] = (uint16_t)pair, at[PAIR_APART<W>] = (uint16_t)(pair >> 16);
    }
}

/* The sum of a head's squares in the order of head_squares. */
static __device__ __forceinline__ float pairs_squares(const append_pairs &p)
{
    static_assert(FOUR_PAIRS == 2, "the order of a lane's elements");
    float squares = fmaf(p.v[0].x, p.v[0].x, 0.0f);
    squares = fmaf(p.v[1].x, p.v[1].x, squares);
    squares = fmaf(p.v[0].y, p.v[0].y, squares);
    return warp_sum(fmaf(p.v[1].y, p.v[1].y, squares));
}

/* Normalises N heads: lane j % N computes the factor of head j. */
template <int N>
static __device__ __forceinline__ void normalise_pairs(append_pairs (&p)[N],
                                                       const append_pairs &norm, float eps)
{
    const int lane = (int)(threadIdx.x % WARP);
    float squares[N], mine = 0;
    UNROLL for (int j = 0; j < N; j++) squares[j] = pairs_squares(p[j]);
    UNROLL for (int j = 0; j < N; j++) mine = lane % N == j ? squares[j] : mine;
    mine = head_factor(mine, FOUR_DIM, eps);
    UNROLL for (int j = 0; j < N; j++)
    {
        const float factor = __shfl_sync(0xffffffffu, mine, j);
        UNROLL for (int i = 0; i < FOUR_PAIRS; i++)
        {
            p[j].v[i].x = norm.v[i].x * (p[j].v[i].x * factor);
            p[j].v[i].y = norm.v[i].y * (p[j].v[i].y * factor);
        }
    }
}

/* Norm and rotation of N heads of a row, with the bits of rotate_head. */
template <enum append_way W, int N>
static __device__ __forceinline__ void rotate_pairs(append_pairs (&p)[N], const struct rope_args &a,
                                                    const struct rope_heads &h, int pos)
{
    const float2 *from = (const float2 *)(const void *)a.cos_sin + (size_t)pos * (FOUR_DIM / 2) +
                         threadIdx.x % WARP;
    float2 rotation[FOUR_PAIRS];
    UNROLL for (int i = 0; i < FOUR_PAIRS; i++) rotation[i] = from[i * WARP];
    if (W == APPEND_HALVES_NORM) normalise_pairs<N>(p, load_pairs<W>(h.norm), a.norm_eps);
    UNROLL for (int j = 0; j < N; j++) UNROLL for (int i = 0; i < FOUR_PAIRS; i++) p[j].v[i] =
        rotate_pair(p[j].v[i].x, p[j].v[i].y, rotation[i]);
}

/* A head's part of the pool, with the bytes of append_plain_row and append_scaled_row. */
template <enum dtype T, enum append_way W>
static __device__ __forceinline__ void append_pairs_row(const struct kv_layer &kv,
                                                        const struct kv_paged_row &r,
                                                        const append_pairs &p)
{
    char *to = (char *)kv.data + kv_row_offset<T>(kv, r);
    if constexpr (kv_traits<T>::SCALED) {
        unsigned top = 0;
        UNROLL for (int i = 0; i < FOUR_PAIRS; i++)
            top = max(max(top, __float_as_uint(p.v[i].x) & 0x7fffffffu),
                      __float_as_uint(p.v[i].y) & 0x7fffffffu);
        const float scale = scale_for<T>(warp_top(top));
        if (threadIdx.x % WARP == 0)
            store_scale((char *)kv.data + kv_scale_offset<T>(kv, r), scale);
        UNROLL for (int i = 0; i < FOUR_PAIRS; i++)
        {
            char *at = to + pair_at<W>(i);
            at[0] = (char)(scale > 0 ? quantised<T>(p.v[i].x, scale) : 0);
            at[PAIR_APART<W>] = (char)(scale > 0 ? quantised<T>(p.v[i].y, scale) : 0);
        }
    } else {
        UNROLL for (int i = 0; i < FOUR_PAIRS; i++)
        {
            char *at = to + pair_at<W>(i) * kv_traits<T>::BYTES;
            store_1<T>(at, p.v[i].x);
            store_1<T>(at + PAIR_APART<W> * kv_traits<T>::BYTES, p.v[i].y);
        }
    }
}

/* Queries first .. first + 3 of a row. */
template <enum append_way W>
static __device__ __forceinline__ void rotate_four(const struct append_call &c,
                                                   const struct cuda_attn_row &row, int first)
{
    const struct rope_heads &h = c.rope.heads[0];
    float *x = h.x + (size_t)row.row * h.x_stride + (size_t)(first * FOUR_DIM);
    append_pairs p[FOUR];
    UNROLL for (int j = 0; j < FOUR; j++) p[j] = load_pairs<W>(x + j * FOUR_DIM);
    rotate_pairs<W, FOUR>(p, c.rope, h, row.pos);
    if (!c.rounds_queries) {
        UNROLL for (int j = 0; j < FOUR; j++) store_pairs<W>(x + j * FOUR_DIM, p[j]);
        return;
    }
    __syncwarp(); /* all lanes have read their elements */
    UNROLL for (int j = 0; j < FOUR; j++) store_rounded<W>(x + j * FOUR_DIM, p[j]);
}

/* Keys and values first and first + 1 of a row. Rotated keys go to the pool only. */
template <enum dtype T, enum append_way W>
static __device__ __forceinline__ void append_two(const struct append_call &c,
                                                  const struct cuda_attn_row &row, int first)
{
    const size_t at = ((size_t)row.row * (size_t)c.kv.n_heads + (size_t)first) * FOUR_DIM;
    append_pairs k[FOUR / 2], v[FOUR / 2];
    UNROLL for (int j = 0; j < FOUR / 2; j++)
    {
        k[j] = load_pairs<W>(c.k + at + j * FOUR_DIM);
        v[j] = load_pairs<W>(c.v + at + j * FOUR_DIM);
    }
    struct kv_paged_row to = kv_key_row(c.kv, c.list.tables + c.list.seqs[row.seq].table, row.pos,
                                        first);
    rotate_pairs<W, FOUR / 2>(k, c.rope, c.rope.heads[1], row.pos);
    UNROLL for (int j = 0; j < FOUR / 2; j++)
    {
        append_pairs_row<T, W>(c.kv, to, k[j]);
        to.row += (unsigned)c.kv.block_tokens;
        append_pairs_row<T, W>(c.kv, to, v[j]);
        to.row += (unsigned)c.kv.block_tokens;
    }
}

static __host__ __device__ __forceinline__ int fours_of_row(const struct append_call &c)
{
    return c.n_queries / FOUR + c.kv.n_heads / (FOUR / 2);
}

template <enum dtype T, enum append_way W>
static __global__ void __launch_bounds__(APPEND_THREADS, 8)
    append_rows_by_four(const __grid_constant__ struct append_call c)
{
    const int queries = c.n_queries / FOUR, of_row = fours_of_row(c),
              n = attn_row_set_n(c.list) * of_row, step = (int)gridDim.x * APPEND_WARPS;
    int at = (int)blockIdx.x * APPEND_WARPS + (int)threadIdx.x / WARP;
    struct cuda_attn_row row = {};
    if (at < n) row = c.list.rows[at / of_row];
    grid_dependency_sync();
    while (at < n) {
        const int i = at % of_row;
        const struct cuda_attn_row here = row;
        at += step;
        if (at < n) row = c.list.rows[at / of_row];
        if (i < queries) rotate_four<W>(c, here, i * FOUR);
        else append_two<T, W>(c, here, (i - queries) * (FOUR / 2));
    }
}

static bool goes_by_four(const struct append_call &c, int32_t n_rows)
{
    const struct rope_heads &q = c.rope.heads[0], &k = c.rope.heads[1];
    const bool has_norm = q.norm != NULL;
    const uintptr_t pairs = (uintptr_t)q.x | (uintptr_t)c.k | (uintptr_t)c.v |
                            (uintptr_t)c.rope.cos_sin | q.x_stride * sizeof(float);
    return c.rotates && n_rows >= FOUR_ROWS && c.kv.head_dim == FOUR_DIM &&
           q.head_dim == FOUR_DIM && c.rope.rot_dim == FOUR_DIM && c.n_queries % FOUR == 0 &&
           c.kv.n_heads % (FOUR / 2) == 0 && pairs % sizeof(float2) == 0 &&
           has_norm == (k.norm != NULL) && !(has_norm && c.rope.interleaved);
}

template <enum dtype T>
static cudaError_t append_launch_by_four(cudaStream_t stream, const struct append_call &c,
                                         int32_t n_rows)
{
    dim3 grid;
    cudaError_t e = attention_grid(
        blocks_for((size_t)n_rows * (size_t)fours_of_row(c), APPEND_WARPS), APPEND_BLOCKS, 0,
        &grid);
    if (e != cudaSuccess) return e;
    return launch(stream,
                  c.rope.interleaved     ? append_rows_by_four<T, APPEND_INTERLEAVED>
                  : c.rope.heads[0].norm ? append_rows_by_four<T, APPEND_HALVES_NORM>
                                         : append_rows_by_four<T, APPEND_HALVES>,
                  grid, dim3(APPEND_THREADS), 0, c);
}

template <enum dtype T>
static cudaError_t append_launch(cudaStream_t stream, const struct append_call &c, int32_t n_rows)
{
    if (goes_by_four(c, n_rows)) return append_launch_by_four<T>(stream, c, n_rows);
    const size_t of_row = (size_t)c.n_queries + (size_t)c.kv.n_heads * (c.kv.latent ? 1 : 2);
    dim3 grid;
    cudaError_t e = attention_grid(blocks_for((size_t)n_rows * of_row, APPEND_WARPS), APPEND_BLOCKS,
                                   0, &grid);
    if (e != cudaSuccess) return e;
    return launch(stream, c.kv.head_dim % SIDE == 0 ? append_rows<T, SIDE> : append_rows<T, 1>,
                  grid, dim3(APPEND_THREADS), 0, c);
}

bool attention_rotates_keys(const struct rope_args *r, const struct kv_layer *kv, const float *k)
{
    return r->n_heads == 2 && r->heads[1].x == k && !kv->latent &&
           r->heads[1].n_heads == (size_t)kv->n_heads &&
           r->heads[1].head_dim == (size_t)kv->head_dim &&
           r->heads[1].x_stride == (size_t)kv->n_heads * (size_t)kv->head_dim;
}

static struct append_call append_call_of(const struct kv_layer *kv, const struct cuda_attn_list *on,
                                         const struct attention_append *a)
{
    struct append_call c = { *kv,  attn_row_set_of(on, ATTN_ROWS_ALL), a->k, a->v, {}, 0, false,
                             false };
    if (a->rope)
        c.rope = *a->rope, c.n_queries = (int32_t)a->rope->heads[0].n_heads, c.rotates = true;
    return c;
}

bool attention_append_leaves_bf16(const struct attention *a)
{
    const struct rope_args *r = a->append ? a->append->rope : NULL;
    return r && a->kv.dtype == DTYPE_BF16 && attention_rotates_keys(r, &a->kv, a->append->k) &&
           r->heads[0].x == a->q && r->heads[0].n_heads == (size_t)a->n_heads &&
           r->heads[0].x_stride == r->heads[0].n_heads * r->heads[0].head_dim &&
           (uintptr_t)a->q % 16 == 0 &&
           goes_by_four(append_call_of(&a->kv, a->on, a->append), a->on->bounds.n_rows);
}

cudaError_t attention_append_leaving_bf16(cudaStream_t stream, const struct attention *a)
{
    struct append_call c = append_call_of(&a->kv, a->on, a->append);
    if (!attention_append_leaves_bf16(a)) return cudaErrorInvalidValue;
    c.rounds_queries = true;
    return append_launch<DTYPE_BF16>(stream, c, a->on->bounds.n_rows);
}

extern "C" cudaError_t attention_kv_append(cudaStream_t stream, const struct kv_layer *kv,
                                           const struct cuda_attn_list *on, const float *k,
                                           const float *v, const struct rope_args *rope)
{
    const struct attention_append a = { k, v, rope };
    const struct append_call c = append_call_of(kv, on, &a);
    if (!attention_supports_kv(kv) || (rope && !attention_rotates_keys(rope, kv, k)))
        return cudaErrorInvalidValue;
    if (on->bounds.n_rows <= 0) return cudaSuccess;
    switch (kv->dtype) {
    case DTYPE_F32: return append_launch<DTYPE_F32>(stream, c, on->bounds.n_rows);
    case DTYPE_BF16: return append_launch<DTYPE_BF16>(stream, c, on->bounds.n_rows);
    case DTYPE_F16: return append_launch<DTYPE_F16>(stream, c, on->bounds.n_rows);
    case DTYPE_I8: return append_launch<DTYPE_I8>(stream, c, on->bounds.n_rows);
    case DTYPE_F8_E4M3: return append_launch<DTYPE_F8_E4M3>(stream, c, on->bounds.n_rows);
    default: return cudaErrorInvalidValue;
    }
}
