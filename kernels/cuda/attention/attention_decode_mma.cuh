/* attention_decode_mma.cuh - decode attention on tensor cores: a segment of a query row, with the
 * query heads of a KV head, 16 at a time, as rows of a product.
 *
 * Work items as in attention_decode.cuh. Which keys a warp takes depends only on their positions.
 * Free rows of a product take the heads of the list's next rows that share its segment, without
 * changing bits. A key's scale multiplies its scores, a value's its weights after they were summed.
 * Bound by reading K and V once; docs/kernels.md has the pipeline and its sizes. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_MMA_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_MMA_CUH

#include "kernels/cuda/attention/attention_decode_append.cuh"
#include "kernels/cuda/attention/attention_decode_arrive.cuh"
#include "kernels/cuda/attention/attention_prefill.cuh"

enum {
    ATTN_MMA_WARPS = 4,
    ATTN_MMA_THREADS = ATTN_MMA_WARPS * WARP,
    ATTN_MMA_HEADS = 16,
    ATTN_MMA_BLOCKS = 2 /* per SM */
};
enum {
    ATTN_MMA_SHARED =
        99 * 1024 /* bytes: available to a block on every GPU from 8.0 on; no more on 8.6 and 8.9 */
};
enum {
    ATTN_MMA_HEADS_MIN = 4,
    ATTN_MMA_HEADS_MIN_BYTES = 2 /* of a group, for a model's answers to come here */
};

/* The warps' m and l of each of the product's rows, side by side; the stages that their sums are
 * in. */
struct attn_mma_totals {
    float m[ATTN_MMA_HEADS][ATTN_MMA_WARPS], l[ATTN_MMA_HEADS][ATTN_MMA_WARPS];
    int stage[ATTN_MMA_WARPS];
};

template <enum dtype T, int DIM> struct attn_mma_shape {
    /* of a tile: 4 KiB of keys and as much of values */
    static constexpr int KEYS = 4096 / DIM / kv_traits<T>::BYTES, BLOCKS = KEYS / 8;
    static constexpr int STAGE = 2 * KEYS * DIM * kv_traits<T>::BYTES,
                         SCALES = kv_traits<T>::SCALED ? 2 * KEYS : 0;
    /* with scales three are more than ATTN_MMA_SHARED */
    static constexpr int STAGES = kv_traits<T>::SCALED ? 2 : 3;
    static constexpr int RING = STAGES * (STAGE + SCALES * (int)sizeof(float));
    static constexpr size_t BYTES = ATTN_MMA_WARPS * RING + sizeof(struct attn_mma_totals);
    static_assert(BYTES <= ATTN_MMA_SHARED, "otherwise no launch succeeds on some GPUs");
    static_assert(ATTN_MMA_HEADS * DIM * sizeof(float) <= STAGE,
                  "a warp's sums take the place of a stage");
};

/* A warp's share of a segment. */
template <int DIM> struct attn_mma_state {
    unsigned q[DIM / 16][4];
    float o[DIM / 8][4], m[2], l[2];
};

/* A warp's ring: stages of keys and values, then their scales [k, v][KEYS]. The stage of the tile
 * that was multiplied last takes the warp's sums, while tiles of the next unit come into others. */
template <enum dtype T, int DIM> static __device__ __forceinline__ char *attn_mma_ring(int warp)
{
    return (char *)shared_memory() + warp * attn_mma_shape<T, DIM>::RING;
}
template <enum dtype T, int DIM>
static __device__ __forceinline__ char *attn_mma_stage(int warp, int stage)
{
    return attn_mma_ring<T, DIM>(warp) + stage * attn_mma_shape<T, DIM>::STAGE;
}
template <enum dtype T, int DIM>
static __device__ __forceinline__ float *attn_mma_scales(int warp, int stage)
{
    using S = attn_mma_shape<T, DIM>;
    return (float *)(attn_mma_ring<T, DIM>(warp) + S::STAGES * S::STAGE) + stage * S::SCALES;
}
template <enum dtype T, int DIM>
static __device__ __forceinline__ struct attn_mma_totals *attn_mma_totals_of()
{
    return (struct attn_mma_totals *)attn_mma_ring<T, DIM>(ATTN_MMA_WARPS);
}

/* The sums of a product's row `pair`, from element d on, a multiple of the number that is read or
 * written at a time, lie at d ^ attn_mma_swizzle(pair) of the row: so a fragment's rows meet no
 * bank twice. */
static __device__ __forceinline__ int attn_mma_swizzle(int pair)
{
    return (pair & 1) << 4 | (pair & 2) << 2;
}

/* Rows of the list, from b's on, that share its segment and are computed with it; 0: it is computed
 * with one before it. By a whole warp. */
static __device__ __forceinline__ int attn_mma_rows_sharing(const struct attn_decode_call &c,
                                                            const struct attn_decode_block &b)
{
    const struct cuda_attn_row *rows = c.list.rows;
    const int room = ATTN_MMA_HEADS / b.n_heads, lane = (int)(threadIdx.x % WARP),
              next = b.list_row + 1 + lane;
    int before = 0, n = WARP;
    if (room < 2 || c.n_runs > 1 || !c.is_all) return 1;
    for (; n == WARP; before += n) { /* the first row shares nothing with any before it */
        const int at = b.list_row - before - lane;
        n = __ffs(~(int)__ballot_sync(0xffffffffu, at > 0 && rows[at].shared > b.segment)) - 1;
        if (n < 0) n = WARP;
    }
    if (before % room != 0) return 0;
    const unsigned follow = __ballot_sync(0xffffffffu, lane < room - 1 &&
                                                           next < attn_row_set_n(c.list) &&
                                                           rows[next].shared > b.segment);
    return __ffs(~(int)follow);
}

/* Fragments of A: the heads of b's row, then those of n_rows - 1 after it, zeros behind the last.
 * Keys of 16 bits come in order. Keys of one byte come four side by side for each lane, so the
 * lane loads the matching four elements of a query, both its pairs of a step, together. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_load_queries(const struct attn_decode_call &c,
                                                             const struct attn_decode_block &b,
                                                             int n_rows, unsigned q[DIM / 16][4])
{
    constexpr int FIRST = kv_traits<T>::SCALED ? 4 : 2, SECOND = kv_traits<T>::SCALED ? 2 : 8;
    UNROLL for (int half = 0; half < 2; half++)
    {
        const int pair = (int)(threadIdx.x % WARP) / 4 + 8 * half, head = pair % b.n_heads;
        const bool is_one = pair < n_rows * b.n_heads;
        const int row = is_one ? c.list.rows[b.list_row + pair / b.n_heads].row : 0;
        const float *from = c.q +
                            ((size_t)row * (size_t)c.n_heads + (size_t)(b.head + head)) * DIM +
                            FIRST * (threadIdx.x % 4);
        UNROLL for (int k = 0; k < DIM / 16; k++)
        {
            float2 x = make_float2(0, 0), y = x;
            if (is_one)
                x = *(const float2 *)(from + k * 16), y = *(const float2 *)(from + k * 16 + SECOND);
            q[k][half] = pack_query<T>(x.x, x.y);
            q[k][half + 2] = pack_query<T>(y.x, y.y);
        }
    }
}

template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_scores(
    const unsigned q[DIM / 16][4], uint16_t *keys, float score[attn_mma_shape<T, DIM>::BLOCKS][4])
{
    const int lane = (int)(threadIdx.x % WARP), row = lane % 8 + lane / 16 * 8,
              piece = lane / 8 % 2;
    UNROLL for (int b = 0; b < attn_mma_shape<T, DIM>::BLOCKS; b++)
        UNROLL for (int i = 0; i < 4; i++) score[b][i] = 0;
    UNROLL for (int step = 0; step < DIM / 16; step++)
        UNROLL for (int b = 0; b < attn_mma_shape<T, DIM>::BLOCKS; b += 2)
    {
        unsigned k[4];
        load_matrix_x4(k, piece_of<DIM>(keys, b * 8 + row, step * 2 + piece));
        mma_kv<T>(score[b], q[step], k);
        mma_kv<T>(score[b + 1], q[step], k + 2);
    }
}

/* Scores become weights; m and l (of the lane's own keys) go on, o is scaled to the new m. n_keys:
 * of the tile. is_half: of the product's first eight rows only. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_softmax(
    float scale, int n_keys, bool is_half, float score[attn_mma_shape<T, DIM>::BLOCKS][4],
    struct attn_mma_state<DIM> *t)
{
    const int last = n_keys - 1 - 2 * (int)(threadIdx.x % 4); /* from the lane's first key on */
    UNROLL for (int half = 0; half < 2; half++)
    {
        if (half == 1 && is_half) return;
        float top = -INFINITY, sum = 0;
        UNROLL for (int b = 0; b < attn_mma_shape<T, DIM>::BLOCKS; b++)
            UNROLL for (int i = 0; i < 2; i++)
        {
            float *x = &score[b][2 * half + i];
            if (b * 8 + i > last) *x = -INFINITY;
            top = fmaxf(top, *x);
        }
        top = fmaxf(t->m[half], quad_max(top) * scale);
        const float shrink = exp2_fast((t->m[half] - top) * LOG2_E), factor = scale * LOG2_E;
        float base = top * LOG2_E;
        if constexpr (weight_lift<T>() > 0) base -= weight_lift<T>();
        UNROLL for (int b = 0; b < attn_mma_shape<T, DIM>::BLOCKS; b++)
            UNROLL for (int i = 0; i < 2; i++)
        {
            float *x = &score[b][2 * half + i];
            *x = exp2_fast(fmaf(*x, factor, -base));
            sum += *x;
        }
        t->l[half] = fmaf(t->l[half], shrink, sum);
        t->m[half] = top;
        UNROLL for (int b = 0; b < DIM / 8; b++)
        {
            t->o[b][2 * half] *= shrink;
            t->o[b][2 * half + 1] *= shrink;
        }
    }
}

template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_accumulate_v(
    const float p[attn_mma_shape<T, DIM>::BLOCKS][4], uint16_t *values, float o[DIM / 8][4])
{
    const int lane = (int)(threadIdx.x % WARP), row = lane % 16, piece = lane / 16;
    UNROLL for (int step = 0; step < attn_mma_shape<T, DIM>::KEYS / 16; step++)
    {
        const float *low = p[2 * step], *high = p[2 * step + 1];
        const unsigned a[4] = { pack_weight<T>(low[0], low[1]), pack_weight<T>(low[2], low[3]),
                                pack_weight<T>(high[0], high[1]),
                                pack_weight<T>(high[2], high[3]) };
        UNROLL for (int b = 0; b < DIM / 8; b += 2)
        {
            unsigned v[4];
            load_matrix_x4_transposed(v, piece_of<DIM>(values, step * 16 + row, b + piece));
            mma_kv<T>(o[b], a, v);
            mma_kv<T>(o[b + 1], a, v + 2);
        }
    }
}

/* ---- tiles of bytes ---- */

/* Where 16 bytes number `piece` of a row lie, so that no eight rows that are next to each other
 * meet in a bank. */
template <int DIM> static __device__ __forceinline__ char *bytes_of(char *rows, int row, int piece)
{
    return rows + row * DIM + (piece ^ row * DIM / 128) % (DIM / 16) * 16;
}

/* ldmatrix gives a lane four bytes of a key side by side, where it would two elements: they are its
 * elements of k, in the order of attn_mma_load_queries. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_scores_bytes(
    const unsigned q[DIM / 16][4], char *keys, float score[attn_mma_shape<T, DIM>::BLOCKS][4])
{
    const int lane = (int)(threadIdx.x % WARP);
    UNROLL for (int b = 0; b < attn_mma_shape<T, DIM>::BLOCKS; b++)
    {
        UNROLL for (int i = 0; i < 4; i++) score[b][i] = 0;
        UNROLL for (int step = 0; step < DIM / 16; step += 4)
        {
            unsigned k[4];
            load_matrix_x4(k, bytes_of<DIM>(keys, b * 8 + lane % 8, step + lane / 8));
            UNROLL for (int i = 0; i < 4; i++)
            {
                const unsigned wide[2] = { pair_of_bytes<T, 0, 1>(k[i]),
                                           pair_of_bytes<T, 2, 3>(k[i]) };
                mma_bf16(score[b], q[step + i], wide);
            }
        }
    }
}

/* The scales of the lane's keys into its scores or weights. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_apply_scales(
    const float *scales, float x[attn_mma_shape<T, DIM>::BLOCKS][4])
{
    UNROLL for (int b = 0; b < attn_mma_shape<T, DIM>::BLOCKS; b++)
    {
        const float2 by = *(const float2 *)(scales + b * 8 + 2 * (threadIdx.x % 4));
        UNROLL for (int i = 0; i < 4; i++) x[b][i] *= i % 2 ? by.y : by.x;
    }
}

/* Transposed, a register holds dims 2g and 2g + 1 of two keys: of each 16 dims o[even] has the even
 * ones, o[odd] the odd ones. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_accumulate_v_bytes(
    const float p[attn_mma_shape<T, DIM>::BLOCKS][4], char *values, float o[DIM / 8][4])
{
    const int lane = (int)(threadIdx.x % WARP), row = lane % 16, piece = lane / 16;
    UNROLL for (int step = 0; step < attn_mma_shape<T, DIM>::KEYS / 16; step++)
    {
        const float *low = p[2 * step], *high = p[2 * step + 1];
        const unsigned a[4] = { pack_bf16(low[0], low[1]), pack_bf16(low[2], low[3]),
                                pack_bf16(high[0], high[1]), pack_bf16(high[2], high[3]) };
        UNROLL for (int b = 0; b < DIM / 16; b += 2)
        {
            unsigned v[4];
            load_matrix_x4_transposed(v, bytes_of<DIM>(values, step * 16 + row, b + piece));
            UNROLL for (int i = 0; i < 2; i++)
            {
                const unsigned even[2] = { pair_of_bytes<T, 0, 2>(v[2 * i]),
                                           pair_of_bytes<T, 0, 2>(v[2 * i + 1]) };
                const unsigned odd[2] = { pair_of_bytes<T, 1, 3>(v[2 * i]),
                                          pair_of_bytes<T, 1, 3>(v[2 * i + 1]) };
                mma_bf16(o[2 * (b + i)], a, even);
                mma_bf16(o[2 * (b + i) + 1], a, odd);
            }
        }
    }
}

/* ---- reading ahead ---- */

/* A block's work, the same in all threads: a segment of n_rows rows of the list, from b's on; 0:
 * there is none. */
struct attn_mma_unit {
    struct attn_decode_block b;
    int number, n_rows;
};

/* Are the product's last eight rows nobody's? Then nobody looks at what becomes of them. */
static __device__ __forceinline__ bool attn_mma_is_half(const struct attn_mma_unit &u)
{
    return u.n_rows * u.b.n_heads <= ATTN_MMA_HEADS / 2;
}

/* The block's first unit from `number` on that is not computed with another one. */
static __device__ __forceinline__ struct attn_mma_unit attn_mma_unit_from(
    const struct attn_decode_call &c, int n_units, int number)
{
    struct attn_mma_unit u = {};
    for (u.number = number; u.number < n_units; u.number += (int)gridDim.x) {
        u.b = attn_decode_block_of(c, ATTN_MMA_HEADS, u.number);
        u.n_rows = attn_mma_rows_sharing(c, u.b);
        if (u.n_rows > 0) return u;
    }
    return u;
}

/* A lane's row of the list. */
static __device__ __forceinline__ struct cuda_attn_row attn_mma_lane_row(
    const struct attn_decode_call &c)
{
    const int at = min((int)(threadIdx.x % WARP), c.n_rows - 1);
    const uint4 *from = (const uint4 *)(const void *)(c.list.rows + at), a = from[0], b = from[1];
    const struct cuda_attn_row row = { (int)a.x, (int)a.y, (int)a.z, (int)a.w,
                                       (int)b.x, (int)b.y, (int)b.z, (int)b.w };
    return row;
}

/* The block's first unit, found among rows that were read while their number still came; `mine`:
 * the lane's. */
static __device__ __forceinline__ struct attn_mma_unit attn_mma_first_unit(
    const struct attn_decode_call &c, int n_units, const struct cuda_attn_row &mine)
{
    struct attn_mma_unit u = {};
    u.number = (int)blockIdx.x;
    if (c.n_rows <= WARP && u.number < n_units) {
        const int item = attn_decode_item(c, u.number), lane = (int)(threadIdx.x % WARP),
                  at = __popc(__ballot_sync(0xffffffffu, lane < attn_row_set_n(c.list) &&
                                                             mine.segment <= item)) -
                       1;
        const struct cuda_attn_row row = { __shfl_sync(0xffffffffu, mine.row, at),
                                           __shfl_sync(0xffffffffu, mine.pos, at),
                                           __shfl_sync(0xffffffffu, mine.seq, at),
                                           __shfl_sync(0xffffffffu, mine.segment, at),
                                           __shfl_sync(0xffffffffu, mine.shared, at),
                                           __shfl_sync(0xffffffffu, mine.per_segment, at),
                                           __shfl_sync(0xffffffffu, mine.n_old, at),
                                           __shfl_sync(0xffffffffu, mine.table, at) };
        u.b = attn_decode_block_in(c, ATTN_MMA_HEADS, u.number, at, row);
        u.n_rows = attn_mma_rows_sharing(c, u.b);
        if (u.n_rows > 0) return u;
        u.number += (int)gridDim.x;
    }
    return attn_mma_unit_from(c, n_units, u.number);
}

/* Is the key of the row's own position in the segment? */
static __device__ __forceinline__ bool attn_mma_has_own_key(const struct attn_decode_block &b)
{
    return b.first_key + b.n_keys > b.row.pos;
}

/* A warp's ring, into which tiles of one unit come after those of another. `stage`: of the tile
 * that is multiplied next; n_ahead: tiles from that one on that are there or on their way. Then
 * where the next tile is read: from key `next` of a segment of n_keys on. */
struct attn_mma_feed {
    int stage, n_ahead;
    bool is_next_unit;
    const int32_t *table;
    int kv_head, first_key, n_keys, next;
    int n_there; /* keys that the pool has: all, or all but the row's own */
};

template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_feed_from(const struct attn_decode_call &c,
                                                          const struct attn_mma_unit &u,
                                                          struct attn_mma_feed *f)
{
    f->n_keys = u.n_rows > 0 ? u.b.n_keys : 0;
    f->next = (int)(threadIdx.x / WARP) * attn_mma_shape<T, DIM>::KEYS;
    if (u.n_rows == 0) return;
    f->table = c.list.tables + u.b.row.table;
    f->kv_head = u.b.kv_head;
    f->first_key = u.b.first_key;
    f->n_there = u.b.n_keys - (c.append.k && attn_mma_has_own_key(u.b));
}

/* Where a piece of a row of a tile is. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void *attn_mma_piece(char *tile, int row, int piece)
{
    if constexpr (kv_traits<T>::SCALED) return bytes_of<DIM>(tile, row, piece);
    else return piece_of<DIM>((uint16_t *)tile, row, piece);
}

/* Starts the cp.async of the warp's next tile, as one group. A lane looks up where some keys are,
 * and others get it from there. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_load_tile(const struct attn_decode_call &c,
                                                          const struct attn_mma_feed &f, int stage)
{
    using S = attn_mma_shape<T, DIM>;
    constexpr int PIECES = DIM * kv_traits<T>::BYTES / 16, ROWS = WARP / PIECES, KEYS = S::KEYS;
    const int warp = (int)(threadIdx.x / WARP), lane = (int)(threadIdx.x % WARP),
              piece = lane % PIECES, n = f.n_there - f.next;
    const char *pool = (const char *)c.kv.data;
    char *keys = attn_mma_stage<T, DIM>(warp, stage), *values = keys + S::STAGE / 2;
    uint32_t place[(KEYS + WARP - 1) / WARP]; /* in 16 bytes */
    UNROLL for (int i = 0; i < (KEYS + WARP - 1) / WARP; i++)
    {
        /* pos: of some key that has a place */
        const int row = lane + i * WARP,
                  pos = f.first_key + f.next + min(row, f.n_keys - f.next - 1);
        if constexpr (kv_traits<T>::SCALED) {
            const struct kv_paged_row r = kv_key_row(c.kv, f.table, pos, f.kv_head);
            const char *scale = pool + kv_scale_offset<T>(c.kv, r),
                       *of_value = scale + (size_t)c.kv.block_tokens * sizeof(float);
            float *to = attn_mma_scales<T, DIM>(warp, stage) + row;
            place[i] = (uint32_t)(kv_row_offset<T>(c.kv, r) / 16);
            copy_async_4(to, scale, row < n ? 4 : 0);
            copy_async_4(to + KEYS, of_value, row < n ? 4 : 0);
        } else place[i] = (uint32_t)(kv_key_offset<T>(c.kv, f.table, pos, f.kv_head) / 16);
    }
    UNROLL for (int i = 0; i < KEYS / ROWS; i++)
    {
        const int row = lane / PIECES + i * ROWS, valid = row < n ? 16 : 0;
        const char *key = pool + 16 * (size_t)(__shfl_sync(0xffffffffu, place[i * ROWS / WARP],
                                                           row % WARP) +
                                               (unsigned)piece);
        copy_async_16(attn_mma_piece<T, DIM>(keys, row, piece), key, valid);
        copy_async_16(attn_mma_piece<T, DIM>(values, row, piece), key + kv_value_offset<T>(c.kv),
                      valid);
    }
    copy_async_commit();
}

/* Starts the next tile, of this unit or of the next one, into the stage behind those ahead. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_read_ahead(const struct attn_decode_call &c,
                                                           const struct attn_mma_unit &next,
                                                           struct attn_mma_feed *f)
{
    using S = attn_mma_shape<T, DIM>;
    if (f->next >= f->n_keys && !f->is_next_unit) {
        attn_mma_feed_from<T, DIM>(c, next, f);
        f->is_next_unit = true;
    }
    if (f->next >= f->n_keys) return;
    attn_mma_load_tile<T, DIM>(c, *f, (f->stage + f->n_ahead) % S::STAGES);
    f->next += ATTN_MMA_WARPS * S::KEYS;
    f->n_ahead++;
}

/* Fills all stages but the one that the sums are in, with tiles of positions below `end`. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_fill_ring(const struct attn_decode_call &c, int end,
                                                          struct attn_mma_feed *f)
{
    using S = attn_mma_shape<T, DIM>;
    UNROLL for (int i = 0; i + 1 < S::STAGES; i++)
    {
        const int behind = f->first_key + min(f->n_keys, f->next + S::KEYS);
        if (f->n_ahead + 1 == S::STAGES || f->next >= f->n_keys || behind > end) continue;
        attn_mma_load_tile<T, DIM>(c, *f, (f->stage + f->n_ahead) % S::STAGES);
        f->next += ATTN_MMA_WARPS * S::KEYS;
        f->n_ahead++;
    }
}

/* ---- a segment ---- */

/* A tile that is there. n_keys: from its first key on. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_step(const struct attn_decode_call &c, int stage,
                                                     int n_keys, bool is_half,
                                                     struct attn_mma_state<DIM> *t)
{
    using S = attn_mma_shape<T, DIM>;
    const int warp = (int)(threadIdx.x / WARP);
    char *keys = attn_mma_stage<T, DIM>(warp, stage), *values = keys + S::STAGE / 2;
    float score[S::BLOCKS][4];
    if constexpr (kv_traits<T>::SCALED) {
        const float *scales = attn_mma_scales<T, DIM>(warp, stage);
        attn_mma_scores_bytes<T, DIM>(t->q, keys, score);
        attn_mma_apply_scales<T, DIM>(scales, score);
        attn_mma_softmax<T, DIM>(c.scale, n_keys, is_half, score, t);
        attn_mma_apply_scales<T, DIM>(scales + S::KEYS, score);
        attn_mma_accumulate_v_bytes<T, DIM>(score, values, t->o);
    } else {
        attn_mma_scores<T, DIM>(t->q, (uint16_t *)keys, score);
        attn_mma_softmax<T, DIM>(c.scale, n_keys, is_half, score, t);
        attn_mma_accumulate_v<T, DIM>(score, (uint16_t *)values, t->o);
    }
}

/* ---- queries, keys and values of the step ---- */

/* Of a unit whose queries, keys and values are as the products left them: what does not depend on
 * those. turn: of the first row's position; q: the warp's first queries. */
template <enum dtype T, int DIM> struct attn_mma_own {
    float turn[2 * DIM / WARP];
    struct attn_lane_pairs<DIM> q_norm, k_norm;
    const float *q[ATTN_NEW_QUERIES];
    struct attn_new_row<T, DIM> row;
};

/* The query of a product's row, the last one's behind that; *list_row: whose it is. */
template <int DIM>
static __device__ __forceinline__ const float *attn_mma_query(const struct attn_decode_call &c,
                                                              const struct attn_mma_unit &u,
                                                              int pair, int *list_row)
{
    int head = min(pair, u.n_rows * u.b.n_heads - 1), row = u.b.row.row;
    *list_row = u.b.list_row;
    if (u.n_rows > 1) {
        *list_row += head / u.b.n_heads;
        head %= u.b.n_heads;
        row = c.list.rows[*list_row].row;
    }
    return c.q + ((size_t)row * (size_t)c.n_heads + (size_t)(u.b.head + head)) * DIM;
}

/* Reads what was there before the step. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_prepare(const struct attn_decode_call &c,
                                                        const struct attn_mma_unit &u,
                                                        const struct attn_mma_feed &f,
                                                        struct attn_mma_own<T, DIM> *o)
{
    using S = attn_mma_shape<T, DIM>;
    const struct attn_decode_append &a = c.append;
    const int warp = (int)(threadIdx.x / WARP);
    int unused;
    *o = {}; /* nothing stays in registers from the unit before */
    if (u.n_rows == 0) return;
    o->row.is_mine = attn_mma_has_own_key(u.b) &&
                     (u.b.n_keys - 1) / S::KEYS % ATTN_MMA_WARPS == warp;
    attn_load_turns<DIM>(a, u.b.row.pos, o->turn);
    if (a.q_norm) attn_load_pairs<DIM>(a.q_norm, a.interleaved, &o->q_norm);
    UNROLL for (int i = 0; i < ATTN_NEW_QUERIES; i++)
        o->q[i] = attn_mma_query<DIM>(c, u, warp + i * ATTN_MMA_WARPS, &unused);
    if (!o->row.is_mine) return;
    o->row.to = kv_key_row(c.kv, f.table, u.b.row.pos, u.b.kv_head);
    if (a.q_norm) attn_load_pairs<DIM>(a.k_norm, a.interleaved, &o->k_norm);
}

/* A query's place among the product's rows, in the order of attn_mma_load_queries. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_put_query(const float x[DIM / WARP], int pair,
                                                          char *rows)
{
    constexpr int N = DIM / WARP;
    UNROLL for (int e = 0; e < N; e += 2)
    {
        const int d = N * (int)(threadIdx.x % WARP) + e,
                  at = kv_traits<T>::SCALED ? d / 16 * 16 + d % 16 / 4 * 2 + d % 4 / 2 * 8 : d;
        *(unsigned *)(piece_of<DIM>((uint16_t *)rows, pair, at / CHUNK) +
                      at % CHUNK) = pack_query<T>(x[e], x[e + 1]);
    }
}

/* Rotates and stores the warp's queries of eight of the product's rows, from `base` on. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_rotate_queries(const struct attn_decode_call &c,
                                                               const struct attn_mma_unit &u,
                                                               const struct attn_mma_own<T, DIM> &o,
                                                               struct attn_new_head<DIM> *heads,
                                                               int base, char *rows)
{
    UNROLL for (int i = 0; i < ATTN_NEW_QUERIES; i++)
    {
        const int pair = base + (int)(threadIdx.x / WARP) + i * ATTN_MMA_WARPS;
        if (u.n_rows > 1) {
            float turn[2 * DIM / WARP];
            int list_row;
            (void)attn_mma_query<DIM>(c, u, pair, &list_row);
            attn_load_turns<DIM>(c.append, c.list.rows[list_row].pos, turn);
            attn_rotate_head<DIM>(c.append.interleaved, turn, &heads[i].of);
        } else attn_rotate_head<DIM>(c.append.interleaved, o.turn, &heads[i].of);
        attn_mma_put_query<T, DIM>(heads[i].of.x, pair, rows);
    }
}

/* The warp's queries of the product's last eight rows. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_more_queries(const struct attn_decode_call &c,
                                                             const struct attn_mma_unit &u,
                                                             const struct attn_mma_own<T, DIM> &o,
                                                             struct attn_new_head<DIM> *heads,
                                                             char *rows)
{
    const struct attn_decode_append &a = c.append;
    const int base = ATTN_MMA_HEADS / 2;
    UNROLL for (int i = 0; i < ATTN_NEW_QUERIES; i++)
    {
        const int pair = base + (int)(threadIdx.x / WARP) + i * ATTN_MMA_WARPS;
        int unused;
        attn_load_head<DIM>(attn_mma_query<DIM>(c, u, pair, &unused), a.interleaved,
                            a.q_norm != NULL, &heads[i]);
    }
    if (a.q_norm) attn_norm_heads<DIM, ATTN_NEW_QUERIES>(a, o.q_norm, o.k_norm, heads);
    attn_mma_rotate_queries<T, DIM>(c, u, o, heads, base, rows);
}

/* The queries, which the block's warps share to rotate, as fragments of A; the row's key and value
 * to the pool. stage: of the first warp's ring, which is free. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_append(const struct attn_decode_call &c,
                                                       const struct attn_mma_unit &u, int stage,
                                                       struct attn_mma_own<T, DIM> *o,
                                                       unsigned q[DIM / 16][4])
{
    const struct attn_decode_append &a = c.append;
    const int lane = (int)(threadIdx.x % WARP);
    const bool has_norm = a.q_norm != NULL, is_half = attn_mma_is_half(u);
    char *rows = attn_mma_stage<T, DIM>(0, stage);
    struct attn_new_head<DIM> heads[ATTN_NEW_QUERIES + 1]; /* the last one is the key */
    float value[DIM / WARP];
    UNROLL for (int i = 0; i < ATTN_NEW_QUERIES; i++)
        attn_load_head<DIM>(o->q[i], a.interleaved, has_norm, &heads[i]);
    if (o->row.is_mine) {
        const size_t at = ((size_t)u.b.row.row * (size_t)c.kv.n_heads + (size_t)u.b.kv_head) * DIM;
        attn_load_head<DIM>(a.k + at, a.interleaved, has_norm, &heads[ATTN_NEW_QUERIES]);
        load_floats<DIM / WARP>(value, a.v + at + DIM / WARP * lane);
        if (has_norm) attn_norm_heads<DIM, ATTN_NEW_QUERIES + 1>(a, o->q_norm, o->k_norm, heads);
        attn_rotate_head<DIM>(a.interleaved, o->turn, &heads[ATTN_NEW_QUERIES].of);
    } else if (has_norm) attn_norm_heads<DIM, ATTN_NEW_QUERIES>(a, o->q_norm, o->k_norm, heads);
    attn_mma_rotate_queries<T, DIM>(c, u, *o, heads, 0, rows);
    if (o->row.is_mine) attn_append_row<T, DIM>(c, heads[ATTN_NEW_QUERIES].of.x, value, &o->row);
    if (!is_half) attn_mma_more_queries<T, DIM>(c, u, *o, heads, rows);
    __syncthreads();
    UNROLL for (int k = 0; k < DIM / 16; k++)
    {
        const int row = is_half ? lane % 8 : lane % 16;
        load_matrix_x4(q[k], piece_of<DIM>((uint16_t *)rows, row, k * 2 + lane / 16));
    }
    __syncthreads(); /* the first warp's next tile may come into the stage */
}

/* The row's key and value into the tile that has their places. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_put_row(const struct attn_new_row<T, DIM> &n,
                                                        int stage, int row)
{
    using S = attn_mma_shape<T, DIM>;
    constexpr int BYTES = DIM / WARP * kv_traits<T>::BYTES; /* of a lane */
    const int warp = (int)(threadIdx.x / WARP), lane = (int)(threadIdx.x % WARP),
              piece = lane * BYTES / 16, at = lane * BYTES % 16;
    char *keys = attn_mma_stage<T, DIM>(warp, stage), *values = keys + S::STAGE / 2;
    attn_put_part(n.k, (char *)attn_mma_piece<T, DIM>(keys, row, piece) + at);
    attn_put_part(n.v, (char *)attn_mma_piece<T, DIM>(values, row, piece) + at);
    if (kv_traits<T>::SCALED && lane == 0) {
        float *scales = attn_mma_scales<T, DIM>(warp, stage);
        scales[row] = n.k.scale, scales[S::KEYS + row] = n.v.scale;
    }
    __syncwarp();
}

template <enum dtype T, int DIM, bool APPENDS>
static __device__ __forceinline__ void attn_mma_tile_loop(const struct attn_decode_call &c,
                                                          const struct attn_mma_unit &u,
                                                          const struct attn_mma_unit &next,
                                                          const struct attn_new_row<T, DIM> &row,
                                                          struct attn_mma_feed *f,
                                                          struct attn_mma_state<DIM> *t)
{
    using S = attn_mma_shape<T, DIM>;
    t->m[0] = t->m[1] = -INFINITY, t->l[0] = t->l[1] = 0;
    UNROLL for (int d = 0; d < DIM / 8; d++) UNROLL for (int i = 0; i < 4; i++) t->o[d][i] = 0;
    for (int i = (int)(threadIdx.x / WARP) * S::KEYS; i < u.b.n_keys;
         i += ATTN_MMA_WARPS * S::KEYS) {
        if (f->n_ahead + 1 == S::STAGES) copy_async_wait<S::STAGES - 2>();
        else copy_async_wait<0>();
        __syncwarp(); /* the tile is there for all lanes, and none reads the one before it */
        if (APPENDS && row.is_mine && i + S::KEYS >= u.b.n_keys)
            attn_mma_put_row(row, f->stage, u.b.n_keys - 1 - i);
        attn_mma_read_ahead<T, DIM>(c, next, f);
        attn_mma_step<T, DIM>(c, f->stage, u.b.n_keys - i, attn_mma_is_half(u), t);
        f->stage = (f->stage + 1) % S::STAGES;
        f->n_ahead--;
    }
    __syncwarp(); /* no lane reads the last tile: the sums take its place */
}

/* Half of a warp's sums: rows 8 * half and on of the product. `to`: the lane's elements of its row
 * of the first half. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_store_half(const struct attn_mma_state<DIM> &t,
                                                           int half, int swizzle, float *to)
{
    if constexpr (kv_traits<T>::SCALED) {
        UNROLL for (int i = 0; i < 2; i++) UNROLL for (int d = i; d < DIM / 16; d += 2)
        {
            const float *even = t.o[2 * d] + 2 * half, *odd = t.o[2 * d + 1] + 2 * half;
            *(float4 *)(to + (i * 16 ^ swizzle) + (d - i) * 16 +
                        half * 8 * DIM) = make_float4(even[0], odd[0], even[1], odd[1]);
        }
    } else {
        UNROLL for (int i = 0; i < 4; i++) UNROLL for (int d = i; d < DIM / 8; d += 4) *
            (float2 *)(to + (i * 8 ^ swizzle) + (d - i) * 8 +
                       half * 8 * DIM) = make_float2(t.o[d][2 * half], t.o[d][2 * half + 1]);
    }
}

/* A warp's sums to where all warps see them: the stage behind those that tiles come into. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_store_partial(const struct attn_mma_state<DIM> &t,
                                                              int n_pairs, int stage)
{
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP,
              swizzle = attn_mma_swizzle(lane / 4);
    struct attn_mma_totals *totals = attn_mma_totals_of<T, DIM>();
    float *to = (float *)attn_mma_stage<T, DIM>(warp, stage) + lane / 4 * DIM;
    if constexpr (kv_traits<T>::SCALED) to += 4 * (lane % 4) ^ (swizzle & 8);
    else to += 2 * (lane % 4);
    if (lane == 0) totals->stage[warp] = stage;
    UNROLL for (int half = 0; half < 2; half++)
    {
        if (8 * half >= n_pairs) break;
        const int pair = lane / 4 + 8 * half;
        const float l = quad_sum(t.l[half]);
        if (pair >= n_pairs) continue;
        attn_mma_store_half<T, DIM>(t, half, kv_traits<T>::SCALED ? swizzle & 16 : swizzle, to);
        if (lane % 4 == 0) totals->m[pair][warp] = t.m[half], totals->l[pair][warp] = l;
    }
}

/* Merges the warps' sums of a product's row, four elements from number `at` of their stages on. A
 * warp without keys has a maximum of -INFINITY and hence weight 0; the first warp always has keys.
 */
template <enum dtype T, int DIM>
static __device__ __forceinline__ float4
attn_mma_merge_warps(const float *const sums[ATTN_MMA_WARPS], int pair, int at, float *m, float *l)
{
    const struct attn_mma_totals *of = attn_mma_totals_of<T, DIM>();
    const float4 ms = *(const float4 *)of->m[pair], ls = *(const float4 *)of->l[pair];
    const float m_of[] = { ms.x, ms.y, ms.z, ms.w }, l_of[] = { ls.x, ls.y, ls.z, ls.w };
    float4 o = make_float4(0, 0, 0, 0);
    *m = fmaxf(fmaxf(m_of[0], m_of[1]), fmaxf(m_of[2], m_of[3])), *l = 0;
    UNROLL for (int w = 0; w < ATTN_MMA_WARPS; w++)
    {
        const float by = exp2_fast((m_of[w] - *m) * LOG2_E);
        const float4 x = *(const float4 *)(sums[w] + at);
        *l = fmaf(l_of[w], by, *l);
        o = make_float4(fmaf(x.x, by, o.x), fmaf(x.y, by, o.y), fmaf(x.z, by, o.z),
                        fmaf(x.w, by, o.w));
    }
    return o;
}

/* A lane's four elements of a head's result to where they belong. A part's maximum and sum are
 * there twice: they are those of its group too, if it is alone in it. */
static __device__ __forceinline__ void attn_mma_store_head(float *to, bool whole, float top,
                                                           float l, float4 o, int d)
{
    if (whole) {
        const float by = 1.0f / l;
        *(float4 *)to = make_float4(__fmul_rn(o.x, by), __fmul_rn(o.y, by), __fmul_rn(o.z, by),
                                    __fmul_rn(o.w, by));
    } else {
        *(float4 *)(to + PART_HEAD) = o;
        if (d == 0) *(float4 *)to = make_float4(top, l, top, l);
    }
}

/* The segment's results to where they belong: each warp's of the heads that attn_decode_arrive
 * merges, two rounds at a time. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_finish(const struct attn_decode_call &c,
                                                       const struct attn_decode_block &b,
                                                       int n_rows)
{
    using H = attn_heads<ATTN_MMA_WARPS, DIM>;
    static_assert(H::STEP % 4 == 0, "rounds have the same permutation of elements");
    const int4 stages = *(const int4 *)attn_mma_totals_of<T, DIM>()->stage;
    const float *const sums[] = { (float *)attn_mma_stage<T, DIM>(0, stages.x),
                                  (float *)attn_mma_stage<T, DIM>(1, stages.y),
                                  (float *)attn_mma_stage<T, DIM>(2, stages.z),
                                  (float *)attn_mma_stage<T, DIM>(3, stages.w) };
    const int d = H::lane_element();
    struct cuda_attn_row row = b.row;
    UNROLL_BY(1)
    for (int r = 0; r < n_rows; r++) {
        if (r > 0) row = c.list.rows[b.list_row + r];
        const bool whole = row.pos < row.per_segment;
        const unsigned item = (unsigned)(whole ? row.row : row.segment + b.segment - c.item_begin),
                       floats = whole ? DIM : (unsigned)part_floats(DIM);
        UNROLL_BY(1)
        for (int h = H::lane_head(); h < b.n_heads; h += 2 * H::STEP) {
            const int more = h + H::STEP < b.n_heads ? H::STEP : 0, pair = r * b.n_heads + h,
                      at = pair * DIM + (d ^ attn_mma_swizzle(pair));
            const unsigned head = item * (unsigned)c.n_heads + (unsigned)(b.head + h);
            float *to = (whole ? c.out : c.parts) + (head * floats + (unsigned)d), m[2], l[2];
            const float4 x = attn_mma_merge_warps<T, DIM>(sums, pair, at, m, l),
                         y = attn_mma_merge_warps<T, DIM>(sums, pair + more, at + more * DIM, m + 1,
                                                          l + 1);
            attn_mma_store_head(to, whole, m[0], l[0], x, d);
            if (more) attn_mma_store_head(to + H::STEP * floats, whole, m[1], l[1], y, d);
        }
    }
}

/* What is read before grid_dependency_sync() was there before the step: the list, keys of earlier
 * steps, rotations. APPENDS: the rows' keys and values come from c.append. */
template <enum dtype T, int DIM, bool APPENDS>
static __global__ void __launch_bounds__(ATTN_MMA_THREADS, 2)
    attn_mma_kernel(const struct attn_decode_call c)
{
    using S = attn_mma_shape<T, DIM>;
    const struct cuda_attn_row mine = attn_mma_lane_row(c);
    const int n_units = attn_decode_n_units(c);
    struct attn_mma_unit now = attn_mma_first_unit(c, n_units, mine);
    struct attn_mma_feed f = {};
    struct attn_mma_own<T, DIM> own;
    int free_stage = S::STAGES - 1; /* of the first warp */
    attn_mma_feed_from<T, DIM>(c, now, &f);
    /* scales come by L1, where those beside them would still be old */
    attn_mma_fill_ring<T, DIM>(c, kv_traits<T>::SCALED ? 0 : now.b.row.n_old + APPENDS, &f);
    if (APPENDS) attn_mma_prepare(c, now, f, &own);
    grid_dependency_sync();
    while (now.n_rows > 0) {
        struct attn_mma_state<DIM> t;
        attn_mma_fill_ring<T, DIM>(c, now.b.row.pos + 1, &f);
        if (APPENDS) attn_mma_append(c, now, free_stage, &own, t.q);
        else attn_mma_load_queries<T, DIM>(c, now.b, now.n_rows, t.q);
        const struct attn_mma_unit next = attn_mma_unit_from(c, n_units,
                                                             now.number + (int)gridDim.x);
        attn_mma_tile_loop<T, DIM, APPENDS>(c, now, next, own.row, &f, &t);
        attn_mma_store_partial<T, DIM>(t, now.n_rows * now.b.n_heads,
                                       (f.stage + S::STAGES - 1) % S::STAGES);
        __syncthreads();
        if (APPENDS) free_stage = attn_mma_totals_of<T, DIM>()->stage[0];
        attn_mma_finish<T, DIM>(c, now.b, now.n_rows);
        attn_decode_arrive<ATTN_MMA_WARPS, DIM>(c, now.b, now.n_rows);
        if (!f.is_next_unit) attn_mma_feed_from<T, DIM>(c, next, &f);
        f.is_next_unit = false;
        now = next;
        if (APPENDS) attn_mma_prepare(c, now, f, &own);
    }
}

#endif
