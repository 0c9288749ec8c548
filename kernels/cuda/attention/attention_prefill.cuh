/* attention_prefill.cuh - prefill attention on tensor cores: up to 64 or 128 (query row, head)
 * pairs of a KV head against tiles of 64 keys, in bf16 or f16.
 *
 * A pair's bits depend only on its own query and keys. LIMIT: rows less than 64 positions before a
 * value of their sequence that is not finite become NaN. Segments are merged into `out` as they end
 * (whole), or stay in `parts` for attention_merge.cuh if there are too few tiles for the GPU. Bound
 * by the tensor cores from some hundred keys on; docs/kernels.md has the pipeline. Thread: device.
 */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_PREFILL_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_PREFILL_CUH

#include "kernels/cuda/attention/attention_paged_kv.cuh"

enum { PREFILL_PAIRS = 64 /* of a set in each warp */, PREFILL_SETS_MAX = 2 };
enum {
    PREFILL_KEYS = 64,
    PREFILL_WARPS = 4,
    PREFILL_THREADS = PREFILL_WARPS * WARP,
    PREFILL_STAGES = 2
};
enum {
    PREFILL_BLOCKS_SPLIT = 4,
    PREFILL_BLOCKS_WHOLE = 16 /* per SM: whole rows are unequal, and balance out */
};
enum {
    PREFILL_TILES_PER_SEGMENT = CUDA_ATTN_SEGMENT / PREFILL_KEYS,
    SCORE_BLOCKS = PREFILL_KEYS / 8
};

struct attn_prefill_call {
    struct kv_layer kv;
    struct attn_row_set list; /* ATTN_ROWS_PREFILL */
    const float *q;
    float *out, *parts;
    int32_t n_heads;
    int32_t n_sets, rows_per_tile;    /* n_sets PREFILL_PAIRS / group */
    int32_t segment_begin, n_at_once; /* n_at_once > 0: this many segments from that
                                       * on, each a block and a part; 0: all,
                                       * whole */
    float scale;
    uint16_t *out_bf16; /* as in struct attention; by the kernel of compute capability
                         * 9.0 alone */
    bool q_is_bf16;     /* from where each head of q begins; the same kernel alone */
};

/* What a block works on, the same in all threads. */
struct attn_prefill_tile {
    int list_row;         /* the tile's first row is this one of its prompts' */
    int row, pos, n_rows; /* of q and out, its position; rows of the tile */
    int kv_head, group, n_keys;
    const int32_t *table;
};

/* A lane's two rows of a fragment: pairs lane / 4 and that + 8 of the warp's. */
struct attn_prefill_pair {
    bool is_valid;
    int row, head, pos; /* row: of the tile */
};

struct attn_prefill_shared {
    uint16_t *stages; /* [PREFILL_STAGES][k, v][PREFILL_KEYS][DIM]; of types with scales one, and
                       * behind it as many of bytes as they lie in the pool */
    uint16_t *q;      /* [2 PREFILL_PAIRS][DIM], of two sets */
    size_t *offsets;  /* [2][CUDA_ATTN_SEGMENT]: of this segment and the next; of types with scales
                       * struct kv_paged_row instead */
    float2 *before;   /* [SETS PREFILL_PAIRS]: (M, L) of a pair's segments so far, where it is
                       * whole */
    float *scales;    /* [PREFILL_STAGES][k, v][PREFILL_KEYS], of types that have them */
    struct attn_prefill_tile *tile; /* the block's own, where a segment's end finds it: registers
                                     * are full */
};

/* A lane's share of a tile: queries where they stay in registers, and what its pairs have of a
 * segment. */
template <int DIM, int SETS> struct attn_prefill_state {
    unsigned q[SETS == 1 ? DIM / 16 : 1][4];
    float o[SETS][DIM / 8][4], m[SETS][2], l[SETS][2];
};

/* Elements of shared memory that queries take. */
template <int DIM, int SETS> struct attn_prefill_queries_shared {
    static constexpr size_t N = SETS == 1 ? 0 : (size_t)SETS * PREFILL_PAIRS * DIM;
};

template <enum dtype T, int DIM, int SETS>
static __host__ __device__ __forceinline__ size_t attn_prefill_shared_bytes()
{
    return ((size_t)PREFILL_STAGES * 2 * PREFILL_KEYS * DIM +
            attn_prefill_queries_shared<DIM, SETS>::N) *
               sizeof(uint16_t) +
           2 * CUDA_ATTN_SEGMENT * sizeof(size_t) + SETS * PREFILL_PAIRS * sizeof(float2) +
           (kv_traits<T>::SCALED ? 2 * PREFILL_STAGES * PREFILL_KEYS * sizeof(float) : 0) +
           sizeof(struct attn_prefill_tile);
}

template <enum dtype T, int DIM, int SETS>
static __device__ __forceinline__ struct attn_prefill_shared attn_prefill_shared_of()
{
    struct attn_prefill_shared s;
    s.stages = (uint16_t *)shared_memory();
    s.q = s.stages + 2 * PREFILL_STAGES * PREFILL_KEYS * DIM;
    s.offsets = (size_t *)(s.q + attn_prefill_queries_shared<DIM, SETS>::N);
    s.before = (float2 *)(s.offsets + 2 * CUDA_ATTN_SEGMENT);
    s.scales = (float *)(s.before + SETS * PREFILL_PAIRS);
    s.tile = (struct attn_prefill_tile *)(s.scales + (kv_traits<T>::SCALED
                                                          ? 2 * PREFILL_STAGES * PREFILL_KEYS
                                                          : 0));
    return s;
}

template <enum dtype T, int DIM>
static __device__ __forceinline__ uint16_t *attn_prefill_keys(const struct attn_prefill_shared &s,
                                                              int i_tile)
{
    return s.stages +
           (kv_traits<T>::SCALED ? 0 : 2 * (i_tile % PREFILL_STAGES) * PREFILL_KEYS * DIM);
}
template <enum dtype T, int DIM>
static __device__ __forceinline__ uint16_t *attn_prefill_values(const struct attn_prefill_shared &s,
                                                                int i_tile)
{
    return attn_prefill_keys<T, DIM>(s, i_tile) + PREFILL_KEYS * DIM;
}

/* Of types with scales: a tile's bytes [k, v][PREFILL_KEYS][DIM], and its scales [k,
 * v][PREFILL_KEYS]. */
template <int DIM>
static __device__ __forceinline__ unsigned char *attn_prefill_bytes(
    const struct attn_prefill_shared &s, int i_tile)
{
    return (unsigned char *)(s.stages + 2 * PREFILL_KEYS * DIM) +
           2 * (i_tile % PREFILL_STAGES) * PREFILL_KEYS * DIM;
}
static __device__ __forceinline__ float *attn_prefill_scales(const struct attn_prefill_shared &s,
                                                             int i_tile)
{
    return s.scales + 2 * (i_tile % PREFILL_STAGES) * PREFILL_KEYS;
}

/* Where piece `piece` (8 elements) of a row lies. */
template <int DIM>
static __device__ __forceinline__ uint16_t *piece_of(uint16_t *rows, int row, int piece)
{
    return rows + row * DIM + (piece ^ (row & 7)) * CHUNK;
}

/* The at-th pair of a tile. */
static __device__ __forceinline__ struct attn_prefill_pair pair_at(
    const struct attn_prefill_tile &t, int at)
{
    struct attn_prefill_pair p;
    p.row = at / t.group;
    p.head = t.kv_head * t.group + at % t.group;
    p.pos = t.pos + p.row;
    p.is_valid = p.row < t.n_rows;
    return p;
}

/* The lane's pair in a half of a set of its warp. */
template <int SETS> static __device__ __forceinline__ int pair_number(int set, int half)
{
    return ((int)(threadIdx.x / WARP) * SETS + set) * 16 + (int)(threadIdx.x % WARP) / 4 + 8 * half;
}
template <int SETS>
static __device__ __forceinline__ struct attn_prefill_pair pair_of(
    const struct attn_prefill_tile &t, int set, int half)
{
    return pair_at(t, pair_number<SETS>(set, half));
}

static __device__ __forceinline__ const float *query_of(const struct attn_prefill_call &c,
                                                        const struct attn_prefill_tile &t,
                                                        const struct attn_prefill_pair &p, int dim)
{
    return c.q + ((size_t)(t.row + p.row) * (size_t)c.n_heads + (size_t)p.head) * (size_t)dim;
}

/* Fragments of A: 16 pairs, DIM elements in steps of 16. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_prefill_load_queries(const struct attn_prefill_call &c,
                                                                 const struct attn_prefill_tile &t,
                                                                 unsigned q[DIM / 16][4])
{
    UNROLL for (int half = 0; half < 2; half++)
    {
        const struct attn_prefill_pair p = pair_of<1>(t, 0, half);
        const float *from = query_of(c, t, p, DIM) + 2 * (threadIdx.x % 4);
        UNROLL for (int k = 0; k < DIM / 16; k++)
        {
            float2 a = make_float2(0, 0), b = make_float2(0, 0);
            if (p.is_valid)
                a = *(const float2 *)(from + k * 16), b = *(const float2 *)(from + k * 16 + 8);
            q[k][half] = pack_query<T>(a.x, a.y);
            q[k][half + 2] = pack_query<T>(b.x, b.y);
        }
    }
}

/* All pairs' queries to shared memory, pieces permuted as those of keys. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_prefill_share_queries(const struct attn_prefill_call &c,
                                                                  const struct attn_prefill_tile &t,
                                                                  uint16_t *q, int n_pairs)
{
    for (int i = (int)threadIdx.x; i < n_pairs * (DIM / CHUNK); i += PREFILL_THREADS) {
        const int at = i / (DIM / CHUNK), piece = i % (DIM / CHUNK);
        const struct attn_prefill_pair p = pair_at(t, at);
        float4 x = make_float4(0, 0, 0, 0), y = x;
        if (p.is_valid) {
            const float4 *from = (const float4 *)(query_of(c, t, p, DIM) + piece * CHUNK);
            x = from[0], y = from[1];
        }
        *(uint4 *)piece_of<DIM>(q, at, piece) = make_uint4(
            pack_query<T>(x.x, x.y), pack_query<T>(x.z, x.w), pack_query<T>(y.x, y.y),
            pack_query<T>(y.z, y.w));
    }
}

/* Places of a segment's keys, in the half that is its own. */
template <enum dtype T>
static __device__ __forceinline__ void attn_prefill_key_offsets(const struct attn_prefill_call &c,
                                                                const struct attn_prefill_tile &t,
                                                                size_t *offsets, int segment)
{
    size_t *to = offsets + segment % 2 * CUDA_ATTN_SEGMENT;
    const int begin = segment * CUDA_ATTN_SEGMENT,
              n = min((int)CUDA_ATTN_SEGMENT, t.n_keys - begin);
    for (int j = (int)threadIdx.x; j < n; j += PREFILL_THREADS) {
        if constexpr (kv_traits<T>::SCALED)
            ((struct kv_paged_row *)to)[j] = kv_key_row(c.kv, t.table, begin + j, t.kv_head);
        else to[j] = kv_key_offset<T>(c.kv, t.table, begin + j, t.kv_head);
    }
}

/* Starts the cp.async of keys and values of a tile; zeros behind the last. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_prefill_load_tile(const struct attn_prefill_call &c,
                                                              const struct attn_prefill_tile &t,
                                                              const struct attn_prefill_shared &s,
                                                              int i_tile)
{
    constexpr int PIECES = DIM / CHUNK, ROWS = PREFILL_THREADS / PIECES;
    const int piece = (int)threadIdx.x % PIECES;
    const char *pool = (const char *)c.kv.data + piece * 16;
    const size_t *offsets = s.offsets + i_tile * PREFILL_KEYS % (2 * CUDA_ATTN_SEGMENT),
                 part = kv_value_offset<T>(c.kv);
    UNROLL for (int i = 0; i < PREFILL_KEYS / ROWS; i++)
    {
        const int row = (int)threadIdx.x / PIECES + i * ROWS;
        const bool is_key = i_tile * PREFILL_KEYS + row < t.n_keys;
        const size_t place = is_key ? offsets[row] : 0;
        copy_async_16(piece_of<DIM>(attn_prefill_keys<T, DIM>(s, i_tile), row, piece), pool + place,
                      is_key ? 16 : 0);
        copy_async_16(piece_of<DIM>(attn_prefill_values<T, DIM>(s, i_tile), row, piece),
                      pool + place + (is_key ? part : 0), is_key ? 16 : 0);
    }
}

/* The same of types with scales: bytes as they are, and a scale by each thread. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_prefill_load_tile_bytes(
    const struct attn_prefill_call &c, const struct attn_prefill_tile &t,
    const struct attn_prefill_shared &s, int i_tile)
{
    constexpr int PIECES = DIM / 16, ROWS = PREFILL_THREADS / PIECES;
    const int piece = (int)threadIdx.x % PIECES, n = t.n_keys - i_tile * PREFILL_KEYS,
              lone = (int)threadIdx.x % PREFILL_KEYS;
    const char *pool = (const char *)c.kv.data;
    const struct kv_paged_row *rows = (const struct kv_paged_row *)s.offsets +
                                      i_tile * PREFILL_KEYS % (2 * CUDA_ATTN_SEGMENT);
    unsigned char *keys = attn_prefill_bytes<DIM>(s, i_tile), *values = keys + PREFILL_KEYS * DIM;
    UNROLL for (int i = 0; i < PREFILL_KEYS / ROWS; i++)
    {
        const int row = (int)threadIdx.x / PIECES + i * ROWS, valid = row < n ? 16 : 0;
        const size_t place = valid ? kv_row_offset<T>(c.kv, rows[row]) + (size_t)piece * 16 : 0;
        copy_async_16(keys + row * DIM + piece * 16, pool + place, valid);
        copy_async_16(values + row * DIM + piece * 16,
                      pool + place + (valid ? kv_value_offset<T>(c.kv) : 0), valid);
    }
    struct kv_paged_row r = { 0, 0 };
    if (lone < n) r = rows[lone];
    if (threadIdx.x >= PREFILL_KEYS) r.row += (unsigned)c.kv.block_tokens;
    copy_async_4(attn_prefill_scales(s, i_tile) + threadIdx.x,
                 pool + (lone < n ? kv_scale_offset<T>(c.kv, r) : 0), lone < n ? 4 : 0);
}

/* A tile's bytes to the stage of bf16, eight elements at a time. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_prefill_upconvert(const struct attn_prefill_shared &s,
                                                              int i_tile)
{
    constexpr int PIECES = DIM / CHUNK, ROWS = PREFILL_THREADS / PIECES;
    const int piece = (int)threadIdx.x % PIECES;
    UNROLL_BY(4) for (int i = 0; i < 2 * PREFILL_KEYS / ROWS; i++)
    {
        const int row = (int)threadIdx.x / PIECES + i * ROWS; /* keys', then values' */
        const uint2 v = *(const uint2 *)(attn_prefill_bytes<DIM>(s, i_tile) + row * DIM +
                                         piece * CHUNK);
        *(uint4 *)piece_of<DIM>(s.stages, row, piece) = make_uint4(
            pair_of_bytes<T, 0, 1>(v.x), pair_of_bytes<T, 2, 3>(v.x), pair_of_bytes<T, 0, 1>(v.y),
            pair_of_bytes<T, 2, 3>(v.y));
    }
}

/* The scales of the lane's keys into its scores or weights. */
template <int SETS>
static __device__ __forceinline__ void attn_prefill_apply_scales(const float *scales,
                                                                 float x[SETS][SCORE_BLOCKS][4])
{
    UNROLL for (int b = 0; b < SCORE_BLOCKS; b++)
    {
        const float2 by = *(const float2 *)(scales + b * 8 + 2 * (threadIdx.x % 4));
        UNROLL for (int set = 0; set < SETS; set++) UNROLL for (int i = 0; i < 4; i++)
            x[set][b][i] *= i % 2 ? by.y : by.x;
    }
}

/* s = q k: score[set][b] is of keys 8b .. 8b + 8 of the tile. */
template <enum dtype T, int DIM, int SETS>
static __device__ __forceinline__ void attn_prefill_scores(
    const struct attn_prefill_state<DIM, SETS> &t, uint16_t *q, uint16_t *k,
    float score[SETS][SCORE_BLOCKS][4])
{
    const int lane = (int)(threadIdx.x % WARP), row = lane % 8 + lane / 16 * 8,
              piece = lane / 8 % 2;
    const int pair = (int)(threadIdx.x / WARP) * SETS * 16 + lane % 16;
    UNROLL for (int set = 0; set < SETS; set++) UNROLL for (int b = 0; b < SCORE_BLOCKS; b++)
        UNROLL for (int i = 0; i < 4; i++) score[set][b][i] = 0;
    UNROLL_BY(SETS == 1 ? DIM / 16 : 2) for (int step = 0; step < DIM / 16; step++)
    {
        unsigned queries[SETS][4];
        UNROLL for (int set = 0; set < SETS; set++)
        {
            if constexpr (SETS > 1)
                load_matrix_x4(queries[set],
                               piece_of<DIM>(q, pair + set * 16, step * 2 + lane / 16));
            else {
                UNROLL for (int i = 0; i < 4; i++) queries[set][i] = t.q[step][i];
            }
        }
        UNROLL for (int b = 0; b < SCORE_BLOCKS; b += 2)
        {
            unsigned keys[4];
            load_matrix_x4(keys, piece_of<DIM>(k, b * 8 + row, step * 2 + piece));
            UNROLL for (int set = 0; set < SETS; set++)
            {
                mma_kv<T>(score[set][b], queries[set], keys);
                mma_kv<T>(score[set][b + 1], queries[set], keys + 2);
            }
        }
    }
}

/* o += p v. The scores' fragments of C, rounded, are those of A. */
template <enum dtype T, int DIM, int SETS>
static __device__ __forceinline__ void attn_prefill_accumulate_v(
    const float p[SETS][SCORE_BLOCKS][4], uint16_t *v, float o[SETS][DIM / 8][4])
{
    const int lane = (int)(threadIdx.x % WARP), row = lane % 16, piece = lane / 16;
    UNROLL for (int step = 0; step < PREFILL_KEYS / 16; step++)
    {
        unsigned a[SETS][4];
        UNROLL for (int set = 0; set < SETS; set++) UNROLL for (int i = 0; i < 4; i++)
        {
            const float *at = p[set][2 * step + i / 2] + i % 2 * 2;
            a[set][i] = pack_weight<T>(at[0], at[1]);
        }
        UNROLL for (int b = 0; b < DIM / 8; b += 2)
        {
            unsigned values[4];
            load_matrix_x4_transposed(values, piece_of<DIM>(v, step * 16 + row, b + piece));
            UNROLL for (int set = 0; set < SETS; set++)
            {
                mma_kv<T>(o[set][b], a[set], values);
                mma_kv<T>(o[set][b + 1], a[set], values + 2);
            }
        }
    }
}

static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

#define LOG2_E 1.4426950408889634f

/* Masks keys after a pair's own position; only a prompt's last tiles have such. */
template <int SETS>
static __device__ __forceinline__ void attn_prefill_causal_mask(const struct attn_prefill_tile &t,
                                                                int key_begin, int set,
                                                                float score[SCORE_BLOCKS][4])
{
    UNROLL for (int half = 0; half < 2; half++)
    {
        /* seen, from the lane's first key on */
        const int last = pair_of<SETS>(t, set, half).pos - key_begin - 2 * (int)(threadIdx.x % 4);
        UNROLL for (int b = 0; b < SCORE_BLOCKS; b++)
            UNROLL for (int i = 0; i < 2; i++) if (b * 8 + i > last)
                score[b][2 * half + i] = -INFINITY;
    }
}

/* Scores become weights; m and l (of the lane's own keys) go on, o is scaled to the new m. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_prefill_softmax(const struct attn_prefill_call &c,
                                                            float score[SCORE_BLOCKS][4],
                                                            float m[2], float l[2],
                                                            float o[DIM / 8][4])
{
    UNROLL for (int half = 0; half < 2; half++)
    {
        float top = -INFINITY, sum = 0;
        UNROLL for (int b = 0; b < SCORE_BLOCKS; b++)
            top = fmaxf(top, fmaxf(score[b][2 * half], score[b][2 * half + 1]));
        top = fmaxf(m[half], quad_max(top) * c.scale);
        const float shrink = exp2_fast((m[half] - top) * LOG2_E), factor = c.scale * LOG2_E;
        float base = top * LOG2_E;
        if constexpr (weight_lift<T>() > 0) base -= weight_lift<T>();
        UNROLL for (int b = 0; b < SCORE_BLOCKS; b++) UNROLL for (int i = 0; i < 2; i++)
        {
            float *x = &score[b][2 * half + i];
            *x = exp2_fast(fmaf(*x, factor, -base));
            sum += *x;
        }
        l[half] = fmaf(l[half], shrink, sum);
        m[half] = top;
        UNROLL for (int b = 0; b < DIM / 8; b++)
        {
            o[b][2 * half] *= shrink;
            o[b][2 * half + 1] *= shrink;
        }
    }
}

/* Where a pair's part of a segment lies. */
template <int DIM>
static __device__ __forceinline__ float *attn_prefill_part(const struct attn_prefill_call &c,
                                                           const struct attn_prefill_tile &t,
                                                           int segment,
                                                           const struct attn_prefill_pair &p)
{
    const size_t at = (size_t)(t.list_row + p.row) * (size_t)c.n_at_once +
                      (size_t)(segment - c.segment_begin);
    return c.parts + (at * (size_t)c.n_heads + (size_t)p.head) * part_floats(DIM);
}

/* A pair's segment is done: into out, or to its part. */
template <int DIM>
static __device__ __forceinline__ void attn_prefill_finish(const struct attn_prefill_call &c,
                                                           const struct attn_prefill_tile &t,
                                                           int segment,
                                                           const struct attn_prefill_pair &p,
                                                           int half, const float o[DIM / 8][4],
                                                           float m, float l, float2 *before)
{
    const int column = 2 * (int)(threadIdx.x % 4), last = p.pos / CUDA_ATTN_SEGMENT;
    const bool is_part = c.n_at_once > 0 && last > 0;
    float *to = c.out + ((size_t)(t.row + p.row) * (size_t)c.n_heads + (size_t)p.head) * DIM;
    float M = m, L = l, a = 0, b = 1;
    if (!p.is_valid || segment > last) return;
    if (is_part) {
        float *part = attn_prefill_part<DIM>(c, t, segment, p);
        if (column == 0) part[0] = m, part[1] = l;
        to = part + PART_HEAD;
    } else if (segment > 0) {
        M = before->x, L = before->y;
        merge_weights(&M, &L, m, l, &a, &b);
    }
    const bool is_first = is_part || segment == 0, is_last = !is_part && segment == last;
    const float by = is_last ? 1.0f / L : 1.0f;
    UNROLL for (int d = 0; d < DIM / 8; d++)
    {
        float2 *at = (float2 *)(to + d * 8 + column),
               x = make_float2(o[d][2 * half], o[d][2 * half + 1]);
        if (!is_first) {
            const float2 was = *at;
            x = make_float2(merged(was.x, x.x, a, b), merged(was.y, x.y, a, b));
        }
        *at = is_last ? make_float2(__fmul_rn(x.x, by), __fmul_rn(x.y, by)) : x;
    }
    if (!is_last && !is_part) {
        __syncwarp(0xfu << (threadIdx.x % WARP / 4 * 4)); /* a pair's four lanes have read it */
        if (column == 0) *before = make_float2(M, L);
    }
}

template <int DIM, int SETS>
static __device__ __forceinline__ void attn_prefill_begin_segment(
    struct attn_prefill_state<DIM, SETS> *t)
{
    UNROLL for (int set = 0; set < SETS; set++)
    {
        UNROLL for (int b = 0; b < DIM / 8; b++) UNROLL for (int e = 0; e < 4; e++)
            t->o[set][b][e] = 0;
        UNROLL for (int half = 0; half < 2; half++) t->m[set][half] = -INFINITY,
                                                    t->l[set][half] = 0;
    }
}

template <int DIM, int SETS>
static __device__ __forceinline__ void attn_prefill_end_segment(
    const struct attn_prefill_call &c, const struct attn_prefill_shared &s, int segment,
    const struct attn_prefill_state<DIM, SETS> &mine)
{
    const struct attn_prefill_tile t = *s.tile;
    UNROLL for (int set = 0; set < SETS; set++) UNROLL for (int half = 0; half < 2; half++)
        attn_prefill_finish<DIM>(c, t, segment, pair_of<SETS>(t, set, half), half, mine.o[set],
                                 mine.m[set][half], quad_sum(mine.l[set][half]),
                                 s.before + pair_number<SETS>(set, half));
}

/* Starts the cp.async of a tile's keys and values, always as one group, which may be empty. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_prefill_prefetch(const struct attn_prefill_call &c,
                                                             const struct attn_prefill_tile &t,
                                                             const struct attn_prefill_shared &s,
                                                             int i_tile, int end)
{
    if (i_tile < end) {
        if constexpr (kv_traits<T>::SCALED) attn_prefill_load_tile_bytes<T, DIM>(c, t, s, i_tile);
        else attn_prefill_load_tile<T, DIM>(c, t, s, i_tile);
    }
    copy_async_commit();
}

/* A tile that is there for all threads. */
template <enum dtype T, int DIM, int SETS>
static __device__ __forceinline__ void attn_prefill_step(const struct attn_prefill_call &c,
                                                         const struct attn_prefill_tile &t,
                                                         const struct attn_prefill_shared &s, int i,
                                                         struct attn_prefill_state<DIM, SETS> &mine)
{
    float score[SETS][SCORE_BLOCKS][4];
    if constexpr (kv_traits<T>::SCALED) {
        attn_prefill_upconvert<T, DIM>(s, i);
        __syncthreads();
    }
    attn_prefill_scores<T, DIM, SETS>(mine, s.q, attn_prefill_keys<T, DIM>(s, i), score);
    if constexpr (kv_traits<T>::SCALED)
        attn_prefill_apply_scales<SETS>(attn_prefill_scales(s, i), score);
    if ((i + 1) * PREFILL_KEYS - 1 > t.pos)
        UNROLL for (int set = 0; set < SETS; set++)
            attn_prefill_causal_mask<SETS>(t, i * PREFILL_KEYS, set, score[set]);
    UNROLL for (int set = 0; set < SETS; set++)
        attn_prefill_softmax<T, DIM>(c, score[set], mine.m[set], mine.l[set], mine.o[set]);
    if constexpr (kv_traits<T>::SCALED)
        attn_prefill_apply_scales<SETS>(attn_prefill_scales(s, i) + PREFILL_KEYS, score);
    attn_prefill_accumulate_v<T, DIM, SETS>(score, attn_prefill_values<T, DIM>(s, i), mine.o);
}

/* Tiles of keys [begin, end). */
template <enum dtype T, int DIM, int SETS>
static __device__ __forceinline__ void attn_prefill_tile_loop(const struct attn_prefill_call &c,
                                                              const struct attn_prefill_tile &t,
                                                              const struct attn_prefill_shared &s,
                                                              int begin, int end)
{
    struct attn_prefill_state<DIM, SETS> mine;
    if (threadIdx.x == 0) *s.tile = t;
    attn_prefill_key_offsets<T>(c, t, s.offsets, begin / PREFILL_TILES_PER_SEGMENT);
    if constexpr (SETS == 1) attn_prefill_load_queries<T, DIM>(c, t, mine.q);
    else attn_prefill_share_queries<T, DIM>(c, t, s.q, SETS * PREFILL_PAIRS);
    __syncthreads();
    attn_prefill_prefetch<T, DIM>(c, t, s, begin, end);
    for (int i = begin; i < end; i++) {
        const int segment = i / PREFILL_TILES_PER_SEGMENT;
        if (i % PREFILL_TILES_PER_SEGMENT == 0) {
            attn_prefill_begin_segment<DIM, SETS>(&mine);
            if ((segment + 1) * PREFILL_TILES_PER_SEGMENT < end)
                attn_prefill_key_offsets<T>(c, t, s.offsets, segment + 1);
        }
        attn_prefill_prefetch<T, DIM>(c, t, s, i + 1, end);
        copy_async_wait<1>();
        __syncthreads();
        attn_prefill_step<T, DIM, SETS>(c, t, s, i, mine);
        if (i + 1 == end || (i + 1) % PREFILL_TILES_PER_SEGMENT == 0)
            attn_prefill_end_segment<DIM, SETS>(c, s, segment, mine);
        __syncthreads(); /* the stage and, in the last tile of a segment, its offsets are taken
                          * again */
    }
    copy_async_wait<0>();
}

/* The tile that begins at the i-th of the prompts' rows, if one does. */
static __device__ __forceinline__ bool attn_prefill_tile_at(const struct attn_prefill_call &c,
                                                            int i, int kv_head,
                                                            struct attn_prefill_tile *t)
{
    const struct cuda_attn_row first = attn_row_set_rows(c.list)[i];
    const struct cuda_attn_seq seq = c.list.seqs[first.seq];
    const int at = first.pos - seq.pos_begin;
    if (at % c.rows_per_tile != 0) return false;
    t->list_row = i;
    t->row = first.row;
    t->pos = first.pos;
    t->n_rows = min(c.rows_per_tile, seq.n_q - at);
    t->kv_head = kv_head;
    t->group = c.n_heads / c.kv.n_heads;
    t->n_keys = first.pos + t->n_rows;
    t->table = c.list.tables + seq.table;
    return true;
}

/* Rows of the i-th of the prompts' rows' tile, or of its sequence, from itself on. */
static __device__ __forceinline__ int attn_prefill_rows_left(const struct attn_prefill_call &c,
                                                             int i)
{
    const struct cuda_attn_row row = attn_row_set_rows(c.list)[i];
    const struct cuda_attn_seq seq = c.list.seqs[row.seq];
    const int at = row.pos - seq.pos_begin;
    return min(c.rows_per_tile - at % c.rows_per_tile, seq.n_q - at);
}

/* A block's work: the tiles that begin in a window [first, end) of the prompts' rows (one where a
 * prompt is long), of a kv head, and whole or one segment of them. Late windows, which see most,
 * come first. end <= first: there is no such unit. */
struct attn_prefill_unit {
    int first, end, kv_head, segment;
};

static __device__ __forceinline__ struct attn_prefill_unit attn_prefill_unit_of(
    const struct attn_prefill_call &c, int unit)
{
    const int n_rows = attn_row_set_n(c.list),
              n_windows = (n_rows + c.rows_per_tile - 1) / c.rows_per_tile,
              per_segment = n_windows * c.kv.n_heads;
    const int n_left = (c.list.counts->n_keys_prefill + CUDA_ATTN_SEGMENT - 1) / CUDA_ATTN_SEGMENT -
                       c.segment_begin;
    const int n_units = per_segment * (c.n_at_once > 0 ? min(c.n_at_once, n_left) : 1);
    struct attn_prefill_unit u = { 0, 0, 0, 0 };
    if (unit >= n_units) return u;
    u.first = (n_windows - 1 - unit / c.kv.n_heads % n_windows) * c.rows_per_tile;
    u.end = min(n_rows, u.first + c.rows_per_tile);
    u.kv_head = unit % c.kv.n_heads;
    u.segment = c.segment_begin + unit / per_segment;
    return u;
}

/* Where it goes on, and what it is in, is worked out again after each tile: registers are full. */
template <enum dtype T, int DIM, int SETS>
static __device__ __forceinline__ void attn_prefill_window(const struct attn_prefill_call &c,
                                                           const struct attn_prefill_shared &s,
                                                           int unit)
{
    for (int i = attn_prefill_unit_of(c, unit).first; i < attn_prefill_unit_of(c, unit).end; i++) {
        const struct attn_prefill_unit u = attn_prefill_unit_of(c, unit);
        struct attn_prefill_tile t;
        if (!attn_prefill_tile_at(c, i, u.kv_head, &t)) continue;
        const int n_tiles = (t.n_keys + PREFILL_KEYS - 1) / PREFILL_KEYS,
                  begin = c.n_at_once > 0 ? u.segment * PREFILL_TILES_PER_SEGMENT : 0;
        const int end = c.n_at_once > 0 ? min(n_tiles, begin + PREFILL_TILES_PER_SEGMENT) : n_tiles;
        if (begin < end) {
            attn_prefill_tile_loop<T, DIM, SETS>(c, t, s, begin, end);
            i = s.tile->list_row;
        }
        __syncthreads();
    }
}

template <enum dtype T, int DIM, int SETS>
static __global__ void __launch_bounds__(PREFILL_THREADS, 2)
    attn_prefill_kernel(const struct attn_prefill_call c)
{
    grid_dependency_sync();
    const struct attn_prefill_shared s = attn_prefill_shared_of<T, DIM, SETS>();
    for (int unit = (int)blockIdx.x; attn_prefill_unit_of(c, unit).end > 0; unit += (int)gridDim.x)
        attn_prefill_window<T, DIM, SETS>(c, s, unit);
}

#endif
