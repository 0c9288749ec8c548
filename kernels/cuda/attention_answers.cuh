/* attention_answers.cuh - answer rows on tensor cores: a segment of a query row, the query heads of a kv head, 16 at a time, as rows of a product.
 *
 * Work as attention_rows.cuh's. Four warps share a segment: warp w has the tiles w, w + 4, .. of it, a softmax of its own over them (online, in
 * f32, weights rounded to bf16) and a ring of stages of its own, which cp.async fills through the block table; so nobody waits for a barrier
 * until the segment ends and the warps' sums become one, in ascending order. Which keys a warp has depends on their positions alone. Keys behind
 * the last are zeros that weigh 0. Rows of a product to spare take the heads of the list's next rows, where these have the same keys in the same
 * blocks (a prompt's beginning that many requests share): keys and values are read once for them all, and the bits do not know.
 *
 * Bound by reading K and V once: two tiles of 8 KiB in flight per warp, two blocks a processor where it has 200 KiB of shared memory.
 * Products, ldmatrix and the rest take less than a third of that time by count of instructions. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ANSWERS_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ANSWERS_CUH

#include "kernels/cuda/attention_rows.cuh"
#include "kernels/cuda/attention_tiles.cuh"

enum { ANSWER_WARPS = 4, ANSWER_THREADS = ANSWER_WARPS * WARP, ANSWER_STAGES = 3, ANSWER_HEADS = 16, ANSWER_BLOCKS = 2 /* per processor */ };
enum { ANSWER_HEADS_LEAST = 4 /* of a group: with fewer, attention_rows.cuh keeps up with the memory */ };

template <int DIM> struct answer_shape {
    static constexpr int KEYS = 2048 / DIM, BLOCKS = KEYS / 8; /* of a tile: 4 KiB of keys and as much of values */
    static constexpr int TILES = ATTENTION_SEGMENT / KEYS;
    static constexpr int STAGE = 2 * KEYS * DIM, RING = ANSWER_STAGES * STAGE; /* elements */
    static constexpr int SUMS_STRIDE = DIM + 8;                                /* floats; so that a fragment's rows meet no bank twice */
    static constexpr size_t BYTES = ANSWER_WARPS * RING * sizeof(uint16_t) + ATTENTION_SEGMENT * sizeof(uint32_t);
    static_assert(ANSWER_HEADS * (SUMS_STRIDE + 2) * sizeof(float) <= RING * sizeof(uint16_t), "a warp's sums take the place of its ring");
};

/* A warp's share of a segment. */
template <int DIM> struct answer_lane {
    unsigned q[DIM / 16][4];
    float    o[DIM / 8][4], m[2], l[2];
};

/* A warp's ring, later its sums: o [ANSWER_HEADS][SUMS_STRIDE], then m and l [ANSWER_HEADS]. */
template <int DIM> static __device__ __forceinline__ uint16_t *answer_ring(int warp)
{
    return (uint16_t *)shared_memory() + warp * answer_shape<DIM>::RING;
}
template <int DIM> static __device__ __forceinline__ float *answer_sums(int warp) { return (float *)answer_ring<DIM>(warp); }
template <int DIM> static __device__ __forceinline__ float *answer_tops(int warp)
{
    return answer_sums<DIM>(warp) + ANSWER_HEADS * answer_shape<DIM>::SUMS_STRIDE;
}

/* [ATTENTION_SEGMENT]: keys in rows of DIM elements from the pool's begin on. */
template <int DIM> static __device__ __forceinline__ uint32_t *answer_places() { return (uint32_t *)answer_ring<DIM>(ANSWER_WARPS); }

template <int DIM> static __device__ __forceinline__ void answer_locate(const struct rows_call &c, const struct rows_block &b)
{
    const int32_t *table = c.list.tables + c.list.seqs[b.row.seq].table;
    for (int j = (int)threadIdx.x; j < b.n_keys; j += ANSWER_THREADS)
        answer_places<DIM>()[j] = (uint32_t)(key_place<DTYPE_BF16>(c.kv, table, b.segment * ATTENTION_SEGMENT + j, b.kv_head) / (DIM * sizeof(uint16_t)));
}

/* Rows of the list, from b's on, that share its segment and are computed with it; 0: it is computed with one before it. By a whole warp. */
static __device__ __forceinline__ int answer_together(const struct rows_call &c, const struct rows_block &b)
{
    const struct cuda_row *rows = c.list.rows;
    const int room = ANSWER_HEADS / b.n_heads, lane = (int)(threadIdx.x % WARP), next = b.list_row + 1 + lane;
    int       before = 0, n = WARP;
    if (room < 2 || c.n_runs > 1 || !c.is_all) return 1;
    for (; n == WARP; before += n) { /* the first row shares nothing with any before it */
        const int at = b.list_row - before - lane;
        n = __ffs(~(int)__ballot_sync(0xffffffffu, at > 0 && rows[at].shared > b.segment)) - 1;
        if (n < 0) n = WARP;
    }
    if (before % room != 0) return 0;
    const unsigned follow = __ballot_sync(0xffffffffu, lane < room - 1 && next < listed_n(c.list) && rows[next].shared > b.segment);
    return __ffs(~(int)follow);
}

/* Fragments of A: the heads of b's row, then those of n_rows - 1 after it, zeros behind the last. */
template <int DIM>
static __device__ __forceinline__ void answer_queries(const struct rows_call &c, const struct rows_block &b, int n_rows, unsigned q[DIM / 16][4])
{
    UNROLL for (int half = 0; half < 2; half++) {
        const int    pair = (int)(threadIdx.x % WARP) / 4 + 8 * half, head = pair % b.n_heads;
        const bool   is_one = pair < n_rows * b.n_heads;
        const int    row = is_one ? c.list.rows[b.list_row + pair / b.n_heads].row : 0;
        const float *from = c.q + ((size_t)row * (size_t)c.n_heads + (size_t)(b.head + head)) * DIM + 2 * (threadIdx.x % 4);
        UNROLL for (int k = 0; k < DIM / 16; k++) {
            float2 x = make_float2(0, 0), y = x;
            if (is_one) x = *(const float2 *)(from + k * 16), y = *(const float2 *)(from + k * 16 + 8);
            q[k][half] = pack_bf16(x.x, x.y);
            q[k][half + 2] = pack_bf16(y.x, y.y);
        }
    }
}

/* Order the warp's tile number i_turn, if it has one. Always a group of copies, so that turns can be counted by groups. */
template <int DIM> static __device__ __forceinline__ void answer_fetch(const struct rows_call &c, const struct rows_block &b, int i_turn)
{
    constexpr int PIECES = DIM / CHUNK, ROWS = WARP / PIECES, KEYS = answer_shape<DIM>::KEYS;
    const int     warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, piece = lane % PIECES;
    const int     first = (i_turn * ANSWER_WARPS + warp) * KEYS + lane / PIECES;
    const char   *pool = (const char *)c.kv.data + piece * 16;
    uint16_t     *keys = answer_ring<DIM>(warp) + i_turn % ANSWER_STAGES * answer_shape<DIM>::STAGE, *values = keys + KEYS * DIM;
    const size_t  part = value_part<DTYPE_BF16>(c.kv);
    if (first - lane / PIECES < b.n_keys) {
        UNROLL for (int i = 0; i < KEYS / ROWS; i++) {
            const int   row = lane / PIECES + i * ROWS;
            const bool  is_key = first + i * ROWS < b.n_keys;
            const char *key = pool + (is_key ? (size_t)answer_places<DIM>()[first + i * ROWS] * (DIM * sizeof(uint16_t)) : 0);
            copy_async_16(piece_of<DIM>(keys, row, piece), key, is_key ? 16 : 0);
            copy_async_16(piece_of<DIM>(values, row, piece), key + (is_key ? part : 0), is_key ? 16 : 0);
        }
    }
    copy_async_commit();
}

template <int DIM>
static __device__ __forceinline__ void answer_scores(const unsigned q[DIM / 16][4], uint16_t *keys, float score[answer_shape<DIM>::BLOCKS][4])
{
    const int lane = (int)(threadIdx.x % WARP), row = lane % 8 + lane / 16 * 8, piece = lane / 8 % 2;
    UNROLL for (int b = 0; b < answer_shape<DIM>::BLOCKS; b++)
        UNROLL for (int i = 0; i < 4; i++) score[b][i] = 0;
    UNROLL for (int step = 0; step < DIM / 16; step++)
        UNROLL for (int b = 0; b < answer_shape<DIM>::BLOCKS; b += 2) {
            unsigned k[4];
            load_matrix_x4(k, piece_of<DIM>(keys, b * 8 + row, step * 2 + piece));
            mma_bf16(score[b], q[step], k);
            mma_bf16(score[b + 1], q[step], k + 2);
        }
}

/* Scores become weights; m and l (of the lane's own keys) go on, o is scaled to the new m. n_keys: of the tile. */
template <int DIM>
static __device__ __forceinline__ void answer_soften(float scale, int n_keys, float score[answer_shape<DIM>::BLOCKS][4], struct answer_lane<DIM> *t)
{
    const int last = n_keys - 1 - 2 * (int)(threadIdx.x % 4); /* from the lane's first key on */
    UNROLL for (int half = 0; half < 2; half++) {
        float top = -INFINITY, sum = 0;
        UNROLL for (int b = 0; b < answer_shape<DIM>::BLOCKS; b++)
            UNROLL for (int i = 0; i < 2; i++) {
                float *x = &score[b][2 * half + i];
                if (b * 8 + i > last) *x = -INFINITY;
                top = fmaxf(top, *x);
            }
        top = fmaxf(t->m[half], quad_max(top) * scale);
        const float shrink = exp2_fast((t->m[half] - top) * LOG2_E), factor = scale * LOG2_E, base = top * LOG2_E;
        UNROLL for (int b = 0; b < answer_shape<DIM>::BLOCKS; b++)
            UNROLL for (int i = 0; i < 2; i++) {
                float *x = &score[b][2 * half + i];
                *x = exp2_fast(fmaf(*x, factor, -base));
                sum += *x;
            }
        t->l[half] = fmaf(t->l[half], shrink, sum);
        t->m[half] = top;
        UNROLL for (int b = 0; b < DIM / 8; b++) {
            t->o[b][2 * half] *= shrink;
            t->o[b][2 * half + 1] *= shrink;
        }
    }
}

template <int DIM>
static __device__ __forceinline__ void answer_weigh(const float p[answer_shape<DIM>::BLOCKS][4], uint16_t *values, float o[DIM / 8][4])
{
    const int lane = (int)(threadIdx.x % WARP), row = lane % 16, piece = lane / 16;
    UNROLL for (int step = 0; step < answer_shape<DIM>::KEYS / 16; step++) {
        const float   *low = p[2 * step], *high = p[2 * step + 1];
        const unsigned a[4] = { pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]), pack_bf16(high[0], high[1]), pack_bf16(high[2], high[3]) };
        UNROLL for (int b = 0; b < DIM / 8; b += 2) {
            unsigned v[4];
            load_matrix_x4_transposed(v, piece_of<DIM>(values, step * 16 + row, b + piece));
            mma_bf16(o[b], a, v);
            mma_bf16(o[b + 1], a, v + 2);
        }
    }
}

/* The warp's tiles, turn by turn. */
template <int DIM>
static __device__ __forceinline__ void answer_walk(const struct rows_call &c, const struct rows_block &b, int n_rows, struct answer_lane<DIM> *t)
{
    constexpr int KEYS = answer_shape<DIM>::KEYS;
    const int     warp = (int)threadIdx.x / WARP;
    t->m[0] = t->m[1] = -INFINITY, t->l[0] = t->l[1] = 0;
    UNROLL for (int d = 0; d < DIM / 8; d++)
        UNROLL for (int i = 0; i < 4; i++) t->o[d][i] = 0;
    UNROLL for (int i = 0; i + 1 < ANSWER_STAGES; i++) answer_fetch<DIM>(c, b, i);
    answer_queries<DIM>(c, b, n_rows, t->q);
    for (int i = 0; (i * ANSWER_WARPS + warp) * KEYS < b.n_keys; i++) {
        uint16_t *keys = answer_ring<DIM>(warp) + i % ANSWER_STAGES * answer_shape<DIM>::STAGE;
        float     score[answer_shape<DIM>::BLOCKS][4];
        copy_async_wait<ANSWER_STAGES - 2>();
        __syncwarp(); /* the tile is there for all lanes, and none reads the one before it */
        answer_fetch<DIM>(c, b, i + ANSWER_STAGES - 1);
        answer_scores<DIM>(t->q, keys, score);
        answer_soften<DIM>(c.scale, b.n_keys - (i * ANSWER_WARPS + warp) * KEYS, score, t);
        answer_weigh<DIM>(score, keys + KEYS * DIM, t->o);
    }
    copy_async_wait<0>();
    __syncwarp();
}

/* A warp's sums to where all warps see them. */
template <int DIM> static __device__ __forceinline__ void answer_leave(const struct answer_lane<DIM> &t)
{
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    UNROLL for (int half = 0; half < 2; half++) {
        const int   pair = lane / 4 + 8 * half;
        const float l = quad_sum(t.l[half]);
        float      *to = answer_sums<DIM>(warp) + pair * answer_shape<DIM>::SUMS_STRIDE + 2 * (lane % 4);
        UNROLL for (int d = 0; d < DIM / 8; d++) *(float2 *)(to + d * 8) = make_float2(t.o[d][2 * half], t.o[d][2 * half + 1]);
        if (lane % 4 == 0) answer_tops<DIM>(warp)[pair] = t.m[half], answer_tops<DIM>(warp)[ANSWER_HEADS + pair] = l;
    }
}

/* The warps' sums become the segment's. A warp without keys has a top of -INFINITY and weighs 0; the first always has some. */
template <int DIM> static __device__ __forceinline__ void answer_finish(const struct rows_call &c, const struct rows_block &b, int n_rows)
{
    for (int i = (int)threadIdx.x; i < n_rows * b.n_heads * (DIM / 4); i += ANSWER_THREADS) {
        const int             pair = i / (DIM / 4), d = i % (DIM / 4) * 4;
        const struct cuda_row row = c.list.rows[b.list_row + pair / b.n_heads];
        const bool            whole = row.pos < ATTENTION_SEGMENT;
        const size_t          n_heads = (size_t)c.n_heads, head = (size_t)(b.head + pair % b.n_heads);
        float                 top = -INFINITY, l = 0;
        float4                o = make_float4(0, 0, 0, 0);
        UNROLL for (int w = 0; w < ANSWER_WARPS; w++) top = fmaxf(top, answer_tops<DIM>(w)[pair]);
        UNROLL for (int w = 0; w < ANSWER_WARPS; w++) {
            const float  by = exp2_fast((answer_tops<DIM>(w)[pair] - top) * LOG2_E);
            const float4 x = *(const float4 *)(answer_sums<DIM>(w) + pair * answer_shape<DIM>::SUMS_STRIDE + d);
            l = fmaf(answer_tops<DIM>(w)[ANSWER_HEADS + pair], by, l);
            o = make_float4(fmaf(x.x, by, o.x), fmaf(x.y, by, o.y), fmaf(x.z, by, o.z), fmaf(x.w, by, o.w));
        }
        float *part = c.parts + ((size_t)(row.segment + b.segment - c.item_begin) * n_heads + head) * part_floats(DIM);
        if (!whole && d == 0) part[0] = top, part[1] = l;
        const float by = 1.0f / l;
        if (whole) o = make_float4(__fmul_rn(o.x, by), __fmul_rn(o.y, by), __fmul_rn(o.z, by), __fmul_rn(o.w, by));
        *(float4 *)(whole ? c.out + ((size_t)row.row * n_heads + head) * DIM + d : part + PART_HEAD + d) = o;
    }
}

template <int DIM> static __global__ void __launch_bounds__(ANSWER_THREADS, 2) attend_answers(const struct rows_call c)
{
    const int n_units = rows_n_units(c);
    for (int unit = (int)blockIdx.x; unit < n_units; unit += (int)gridDim.x) {
        const struct rows_block b = rows_block_of(c, ANSWER_HEADS, unit);
        const int               n_rows = answer_together(c, b);
        struct answer_lane<DIM> t;
        if (n_rows == 0) continue;
        answer_locate<DIM>(c, b);
        __syncthreads();
        answer_walk<DIM>(c, b, n_rows, &t);
        answer_leave<DIM>(t);
        __syncthreads();
        answer_finish<DIM>(c, b, n_rows);
        __syncthreads(); /* what is shared is taken again */
    }
}

#endif
