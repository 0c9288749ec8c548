/* attention_tiles.cuh - prompts on tensor cores: up to 64 (query row, head) pairs of a kv head against tiles of 64 keys, all in bf16.
 *
 * A tile of pairs is TILE_PAIRS / group rows of one sequence, from its first row in the call on; four warps have 16 pairs each. Queries stay in
 * registers as fragments. K and V come through the block table into shared memory by cp.async, the next tile while this one is worked on; the
 * 16-byte pieces of a row lie permuted by the row's number, so that ldmatrix meets no bank twice. Softmax is online over the tiles of a
 * segment in f32; weights are rounded to bf16. A pair's bits depend on its own query and keys alone: a product on tensor cores has
 * the same order for every row of a fragment, and keys that it does not see weigh +0.
 * LIMIT: +0 times a value that is not finite is NaN: rows less than 64 positions before such a value of their own sequence get it as well.
 *
 * Segments are merged into `out` as they end (whole), or left in `parts` for attention_merge.cuh where there are too few tiles for the card.
 * Bound by the tensor cores from some hundred keys on. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_TILES_CUH
#define BATON_KERNELS_CUDA_ATTENTION_TILES_CUH

#include "kernels/cuda/attention_pool.cuh"

enum { TILE_KEYS = 64, TILE_PAIRS = 64, TILE_WARPS = 4, TILE_THREADS = TILE_WARPS * WARP, TILE_STAGES = 2 };
enum { TILES_SPREAD = 4, TILES_WHOLE = 16 /* blocks per processor: whole rows are unequal, and level out */ };
enum { TILES_PER_SEGMENT = ATTENTION_SEGMENT / TILE_KEYS, SCORE_BLOCKS = TILE_KEYS / 8 };

struct tiles_call {
    struct kv_layer        kv;
    struct listed          list;                /* LISTED_PROMPT */
    const float           *q;
    float                 *out, *parts;
    int32_t                n_heads;
    int32_t                rows_per_tile;       /* TILE_PAIRS / group */
    int32_t                segment_begin, n_at_once; /* n_at_once > 0: this many segments from that on, each a block and a part; 0: all, whole */
    float                  scale;
};

/* What a block works on, the same in all threads. */
struct tile {
    int            list_row;              /* the tile's first row is this one of its prompts' */
    int            row, pos, n_rows;      /* of q and out, its position; rows of the tile */
    int            kv_head, group, n_keys;
    const int32_t *table;
};

/* A lane's two rows of a fragment: pairs lane / 4 and that + 8 of the warp's. */
struct pair {
    bool is_valid;
    int  row, head, pos; /* row: of the tile */
};

struct tile_shared {
    uint16_t *stages; /* [TILE_STAGES][k, v][TILE_KEYS][DIM] */
    size_t   *places; /* [2][ATTENTION_SEGMENT]: of this segment and the next */
};

template <int DIM> static __host__ __device__ __forceinline__ size_t tile_shared_bytes()
{
    return (size_t)TILE_STAGES * 2 * TILE_KEYS * DIM * sizeof(uint16_t) + 2 * ATTENTION_SEGMENT * sizeof(size_t);
}

template <int DIM> static __device__ __forceinline__ struct tile_shared tile_shared_of()
{
    struct tile_shared s;
    s.stages = (uint16_t *)shared_memory();
    s.places = (size_t *)(s.stages + 2 * TILE_STAGES * TILE_KEYS * DIM);
    return s;
}

template <int DIM> static __device__ __forceinline__ uint16_t *tile_keys(const struct tile_shared &s, int i_tile)
{
    return s.stages + 2 * (i_tile % TILE_STAGES) * TILE_KEYS * DIM;
}
template <int DIM> static __device__ __forceinline__ uint16_t *tile_values(const struct tile_shared &s, int i_tile)
{
    return tile_keys<DIM>(s, i_tile) + TILE_KEYS * DIM;
}

/* Where piece `piece` (8 elements) of a row lies. */
template <int DIM> static __device__ __forceinline__ uint16_t *piece_of(uint16_t *rows, int row, int piece)
{
    return rows + row * DIM + (piece ^ (row & 7)) * CHUNK;
}

static __device__ __forceinline__ struct pair pair_of(const struct tile &t, int half)
{
    const int   at = (int)(threadIdx.x / WARP) * 16 + (int)(threadIdx.x % WARP) / 4 + 8 * half;
    struct pair p;
    p.row = at / t.group;
    p.head = t.kv_head * t.group + at % t.group;
    p.pos = t.pos + p.row;
    p.is_valid = p.row < t.n_rows;
    return p;
}

/* Fragments of A: 16 pairs, DIM elements in steps of 16. */
template <int DIM> static __device__ __forceinline__ void tile_queries(const struct tiles_call &c, const struct tile &t, unsigned q[DIM / 16][4])
{
    UNROLL for (int half = 0; half < 2; half++) {
        const struct pair p = pair_of(t, half);
        const float      *from = c.q + ((size_t)(t.row + p.row) * (size_t)c.n_heads + (size_t)p.head) * DIM + 2 * (threadIdx.x % 4);
        UNROLL for (int k = 0; k < DIM / 16; k++) {
            float2 a = make_float2(0, 0), b = make_float2(0, 0);
            if (p.is_valid) a = *(const float2 *)(from + k * 16), b = *(const float2 *)(from + k * 16 + 8);
            q[k][half] = pack_bf16(a.x, a.y);
            q[k][half + 2] = pack_bf16(b.x, b.y);
        }
    }
}

/* Places of a segment's keys, in the half that is its own. */
static __device__ __forceinline__ void tile_places(const struct tiles_call &c, const struct tile &t, size_t *places, int segment)
{
    size_t   *to = places + segment % 2 * ATTENTION_SEGMENT;
    const int begin = segment * ATTENTION_SEGMENT, n = min((int)ATTENTION_SEGMENT, t.n_keys - begin);
    for (int j = (int)threadIdx.x; j < n; j += TILE_THREADS) to[j] = key_place(c.kv, t.table, begin + j, t.kv_head);
}

/* Order keys and values of a tile; zeros behind the last. */
template <int DIM>
static __device__ __forceinline__ void tile_fetch(const struct tiles_call &c, const struct tile &t, const struct tile_shared &s, int i_tile)
{
    constexpr int PIECES = DIM / CHUNK, ROWS = TILE_THREADS / PIECES;
    const int     piece = (int)threadIdx.x % PIECES;
    const char   *pool = (const char *)c.kv.data + piece * 16;
    const size_t *places = s.places + i_tile * TILE_KEYS % (2 * ATTENTION_SEGMENT), part = value_part(c.kv);
    UNROLL for (int i = 0; i < TILE_KEYS / ROWS; i++) {
        const int    row = (int)threadIdx.x / PIECES + i * ROWS;
        const bool   is_key = i_tile * TILE_KEYS + row < t.n_keys;
        const size_t place = is_key ? places[row] : 0;
        copy_async_16(piece_of<DIM>(tile_keys<DIM>(s, i_tile), row, piece), pool + place, is_key ? 16 : 0);
        copy_async_16(piece_of<DIM>(tile_values<DIM>(s, i_tile), row, piece), pool + place + (is_key ? part : 0), is_key ? 16 : 0);
    }
}

/* s = q k: score[b] is of keys 8b .. 8b + 8 of the tile. */
template <int DIM> static __device__ __forceinline__ void tile_scores(const unsigned q[DIM / 16][4], uint16_t *k, float score[SCORE_BLOCKS][4])
{
    const int lane = (int)(threadIdx.x % WARP), row = lane % 8 + lane / 16 * 8, piece = lane / 8 % 2;
    UNROLL for (int b = 0; b < SCORE_BLOCKS; b++)
        UNROLL for (int i = 0; i < 4; i++) score[b][i] = 0;
    UNROLL for (int step = 0; step < DIM / 16; step++)
        UNROLL for (int b = 0; b < SCORE_BLOCKS; b += 2) {
            unsigned keys[4];
            load_matrix_x4(keys, piece_of<DIM>(k, b * 8 + row, step * 2 + piece));
            mma_bf16(score[b], q[step], keys);
            mma_bf16(score[b + 1], q[step], keys + 2);
        }
}

/* o += p v. The scores' fragments of C, rounded, are those of A. */
template <int DIM> static __device__ __forceinline__ void tile_weigh(const float p[SCORE_BLOCKS][4], uint16_t *v, float o[DIM / 8][4])
{
    const int lane = (int)(threadIdx.x % WARP), row = lane % 16, piece = lane / 16;
    UNROLL for (int step = 0; step < TILE_KEYS / 16; step++) {
        const float   *low = p[2 * step], *high = p[2 * step + 1];
        const unsigned a[4] = { pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]), pack_bf16(high[2], high[3]) };
        UNROLL for (int b = 0; b < DIM / 8; b += 2) {
            unsigned values[4];
            load_matrix_x4_transposed(values, piece_of<DIM>(v, step * 16 + row, b + piece));
            mma_bf16(o[b], a, values);
            mma_bf16(o[b + 1], a, values + 2);
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

/* Scores become weights; m and l (of the lane's own keys) go on, o is scaled to the new m. */
template <int DIM>
static __device__ __forceinline__ void tile_soften(const struct tiles_call &c, const struct tile &t, int key_begin, float score[SCORE_BLOCKS][4],
                                                   float m[2], float l[2], float o[DIM / 8][4])
{
    UNROLL for (int half = 0; half < 2; half++) {
        const int last = pair_of(t, half).pos - key_begin - 2 * (int)(threadIdx.x % 4); /* the last key that is seen, from the lane's first */
        float     top = -INFINITY, sum = 0;
        UNROLL for (int b = 0; b < SCORE_BLOCKS; b++)
            UNROLL for (int i = 0; i < 2; i++) {
                float *x = &score[b][2 * half + i];
                if (b * 8 + i > last) *x = -INFINITY;
                top = fmaxf(top, *x);
            }
        top = fmaxf(m[half], quad_max(top) * c.scale);
        const float shrink = exp2_fast((m[half] - top) * LOG2_E), factor = c.scale * LOG2_E, base = top * LOG2_E;
        UNROLL for (int b = 0; b < SCORE_BLOCKS; b++)
            UNROLL for (int i = 0; i < 2; i++) {
                float *x = &score[b][2 * half + i];
                *x = exp2_fast(fmaf(*x, factor, -base));
                sum += *x;
            }
        l[half] = fmaf(l[half], shrink, sum);
        m[half] = top;
        UNROLL for (int b = 0; b < DIM / 8; b++) {
            o[b][2 * half] *= shrink;
            o[b][2 * half + 1] *= shrink;
        }
    }
}

/* A pair's segment is done: into out, or to its part. M, L: of its segments so far. */
template <int DIM>
static __device__ __forceinline__ void tile_finish(const struct tiles_call &c, const struct tile &t, int segment, int half, const float o[DIM / 8][4],
                                                   float m, float l, float *M, float *L)
{
    const struct pair p = pair_of(t, half);
    const int         column = 2 * (int)(threadIdx.x % 4), last = p.pos / ATTENTION_SEGMENT;
    const bool        is_part = c.n_at_once > 0 && last > 0;
    float            *to = c.out + ((size_t)(t.row + p.row) * (size_t)c.n_heads + (size_t)p.head) * DIM;
    float             a = 0, b = 1;
    if (!p.is_valid || segment > last) return;
    if (is_part) {
        const size_t at = (size_t)(t.list_row + p.row) * (size_t)c.n_at_once + (size_t)(segment - c.segment_begin);
        float       *part = c.parts + (at * (size_t)c.n_heads + (size_t)p.head) * part_floats(DIM);
        if (column == 0) part[0] = m, part[1] = l;
        to = part + PART_HEAD;
    } else if (segment == 0) *M = m, *L = l;
    else merge_weights(M, L, m, l, &a, &b);
    const bool  is_first = is_part || segment == 0, is_last = !is_part && segment == last;
    const float by = is_last ? 1.0f / *L : 1.0f;
    UNROLL for (int d = 0; d < DIM / 8; d++) {
        float2 *at = (float2 *)(to + d * 8 + column), x = make_float2(o[d][2 * half], o[d][2 * half + 1]);
        if (!is_first) {
            const float2 before = *at;
            x = make_float2(merged(before.x, x.x, a, b), merged(before.y, x.y, a, b));
        }
        *at = is_last ? make_float2(__fmul_rn(x.x, by), __fmul_rn(x.y, by)) : x;
    }
}

/* Tiles of keys [begin, end). */
template <int DIM>
static __device__ __forceinline__ void tile_walk(const struct tiles_call &c, const struct tile &t, const struct tile_shared &s, int begin, int end)
{
    unsigned q[DIM / 16][4];
    float    o[DIM / 8][4], m[2], l[2], M[2] = { 0, 0 }, L[2] = { 0, 0 };
    tile_places(c, t, s.places, begin / TILES_PER_SEGMENT);
    tile_queries<DIM>(c, t, q);
    __syncthreads();
    tile_fetch<DIM>(c, t, s, begin);
    copy_async_commit();
    for (int i = begin; i < end; i++) {
        const int segment = i / TILES_PER_SEGMENT;
        float     score[SCORE_BLOCKS][4];
        if (i % TILES_PER_SEGMENT == 0) {
            UNROLL for (int b = 0; b < DIM / 8; b++)
                UNROLL for (int e = 0; e < 4; e++) o[b][e] = 0;
            m[0] = m[1] = -INFINITY, l[0] = l[1] = 0;
            if ((segment + 1) * TILES_PER_SEGMENT < end) tile_places(c, t, s.places, segment + 1);
        }
        if (i + 1 < end) tile_fetch<DIM>(c, t, s, i + 1);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        tile_scores<DIM>(q, tile_keys<DIM>(s, i), score);
        tile_soften<DIM>(c, t, i * TILE_KEYS, score, m, l, o);
        tile_weigh<DIM>(score, tile_values<DIM>(s, i), o);
        if (i + 1 == end || (i + 1) % TILES_PER_SEGMENT == 0)
            UNROLL for (int half = 0; half < 2; half++) tile_finish<DIM>(c, t, segment, half, o, m[half], quad_sum(l[half]), &M[half], &L[half]);
        __syncthreads(); /* the stage and, in the last tile of a segment, its places are taken again */
    }
    copy_async_wait<0>();
}

/* The tile that begins at the i-th of the prompts' rows, if one does. */
static __device__ __forceinline__ bool tile_at(const struct tiles_call &c, int i, int kv_head, struct tile *t)
{
    const struct cuda_row first = listed_rows(c.list)[i];
    const struct cuda_seq seq = c.list.seqs[first.seq];
    const int             at = first.pos - seq.pos_begin;
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

/* The tiles that begin in a window of rows_per_tile of the prompts' rows: one where a prompt is long. */
template <int DIM>
static __device__ __forceinline__ void tile_window(const struct tiles_call &c, const struct tile_shared &s, int window, int kv_head, int segment)
{
    const int n_rows = listed_n(c.list);
    for (int i = window * c.rows_per_tile; i < min(n_rows, (window + 1) * c.rows_per_tile); i++) {
        struct tile t;
        if (!tile_at(c, i, kv_head, &t)) continue;
        const int n_tiles = (t.n_keys + TILE_KEYS - 1) / TILE_KEYS, begin = c.n_at_once > 0 ? segment * TILES_PER_SEGMENT : 0;
        const int end = c.n_at_once > 0 ? min(n_tiles, begin + TILES_PER_SEGMENT) : n_tiles;
        if (begin < end) tile_walk<DIM>(c, t, s, begin, end);
        __syncthreads();
    }
}

/* Late windows, which see most, come first. */
template <int DIM> static __global__ void __launch_bounds__(TILE_THREADS, 2) attend_tiles(const struct tiles_call c)
{
    const struct tile_shared s = tile_shared_of<DIM>();
    const int n_windows = (listed_n(c.list) + c.rows_per_tile - 1) / c.rows_per_tile, per_segment = n_windows * c.kv.n_heads;
    const int n_left = (c.list.counts->n_keys_prompt + ATTENTION_SEGMENT - 1) / ATTENTION_SEGMENT - c.segment_begin;
    const int n_units = per_segment * (c.n_at_once > 0 ? min(c.n_at_once, n_left) : 1);
    for (int unit = (int)blockIdx.x; unit < n_units; unit += (int)gridDim.x)
        tile_window<DIM>(c, s, n_windows - 1 - unit / c.kv.n_heads % n_windows, unit % c.kv.n_heads, c.segment_begin + unit / per_segment);
}

#endif
