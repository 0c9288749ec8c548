/* attention_decode_mma.cuh - decode attention on tensor cores: a segment of a query row, with the
 * query heads of a KV head, 16 at a time, as rows of a product.
 *
 * Work items as in attention_decode.cuh. Which keys a warp takes depends only on their positions.
 * Free rows of a product take the heads of the list's next rows that share its segment, without
 * changing bits. A key's scale multiplies its scores, a value's its weights after they were summed.
 * Bound by reading K and V once; docs/kernels.md has the pipeline and its sizes. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_MMA_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_MMA_CUH

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

template <enum dtype T, int DIM> struct attn_mma_shape {
    /* of a tile: 4 KiB of keys and as much of values */
    static constexpr int KEYS = 4096 / DIM / kv_traits<T>::BYTES, BLOCKS = KEYS / 8;
    static constexpr int TILES = CUDA_ATTN_SEGMENT / KEYS;
    static constexpr int STAGE = 2 * KEYS * DIM * kv_traits<T>::BYTES,
                         SCALES = kv_traits<T>::SCALED ? 2 * KEYS : 0;
    /* with scales and their offsets three are more than ATTN_MMA_SHARED */
    static constexpr int STAGES = kv_traits<T>::SCALED ? 2 : 3;
    static constexpr int RING = STAGES * (STAGE + SCALES * (int)sizeof(float));
    /* floats; so that a fragment's rows meet no bank twice */
    static constexpr int SUMS_STRIDE = DIM + (kv_traits<T>::SCALED ? 16 : 8);
    static constexpr size_t PLACE = kv_traits<T>::SCALED ? sizeof(struct kv_paged_row)
                                                         : sizeof(uint32_t);
    static constexpr size_t BYTES = ATTN_MMA_WARPS * RING + CUDA_ATTN_SEGMENT * PLACE;
    static_assert(BYTES <= ATTN_MMA_SHARED, "otherwise no launch succeeds on some GPUs");
    static_assert(ATTN_MMA_HEADS * (SUMS_STRIDE + 2) * sizeof(float) <= RING,
                  "a warp's sums take the place of its ring");
};

/* A warp's share of a segment. */
template <int DIM> struct attn_mma_state {
    unsigned q[DIM / 16][4];
    float o[DIM / 8][4], m[2], l[2];
};

/* A warp's ring, later its sums: o [ATTN_MMA_HEADS][SUMS_STRIDE], then m and l [ATTN_MMA_HEADS]. */
template <enum dtype T, int DIM> static __device__ __forceinline__ char *attn_mma_ring(int warp)
{
    return (char *)shared_memory() + warp * attn_mma_shape<T, DIM>::RING;
}
/* Of its tile number i_tile: keys and values, and their scales [k, v][KEYS] behind all stages. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ char *attn_mma_stage(int warp, int i_tile)
{
    return attn_mma_ring<T, DIM>(warp) +
           i_tile % attn_mma_shape<T, DIM>::STAGES * attn_mma_shape<T, DIM>::STAGE;
}
template <enum dtype T, int DIM>
static __device__ __forceinline__ float *attn_mma_scales(int warp, int i_tile)
{
    using S = attn_mma_shape<T, DIM>;
    return (float *)(attn_mma_ring<T, DIM>(warp) + S::STAGES * S::STAGE) +
           i_tile % S::STAGES * S::SCALES;
}
template <enum dtype T, int DIM> static __device__ __forceinline__ float *attn_mma_sums(int warp)
{
    return (float *)attn_mma_ring<T, DIM>(warp);
}
template <enum dtype T, int DIM> static __device__ __forceinline__ float *attn_mma_max_sum(int warp)
{
    return attn_mma_sums<T, DIM>(warp) + ATTN_MMA_HEADS * attn_mma_shape<T, DIM>::SUMS_STRIDE;
}

/* [CUDA_ATTN_SEGMENT]: keys in rows of DIM elements from the pool's begin on; where there are
 * scales, in blocks. */
template <enum dtype T, int DIM> static __device__ __forceinline__ uint32_t *attn_mma_key_offsets()
{
    return (uint32_t *)attn_mma_ring<T, DIM>(ATTN_MMA_WARPS);
}
template <enum dtype T, int DIM>
static __device__ __forceinline__ struct kv_paged_row *attn_mma_key_rows()
{
    return (struct kv_paged_row *)attn_mma_ring<T, DIM>(ATTN_MMA_WARPS);
}

template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_locate_keys(const struct attn_decode_call &c,
                                                            const struct attn_decode_block &b)
{
    const int32_t *table = c.list.tables + c.list.seqs[b.row.seq].table;
    for (int j = (int)threadIdx.x; j < b.n_keys; j += ATTN_MMA_THREADS) {
        const int pos = b.first_key + j;
        if constexpr (kv_traits<T>::SCALED)
            attn_mma_key_rows<T, DIM>()[j] = kv_key_row(c.kv, table, pos, b.kv_head);
        else
            attn_mma_key_offsets<T, DIM>()[j] = (uint32_t)(kv_key_offset<T>(c.kv, table, pos,
                                                                            b.kv_head) /
                                                           (DIM * sizeof(uint16_t)));
    }
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

/* Starts the cp.async of the warp's tile i_tile, if it has one. Always one group, so that
 * turns can be counted by groups. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_load_tile(const struct attn_decode_call &c,
                                                          const struct attn_decode_block &b,
                                                          int i_tile)
{
    constexpr int PIECES = DIM / CHUNK, ROWS = WARP / PIECES, KEYS = attn_mma_shape<T, DIM>::KEYS;
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, piece = lane % PIECES;
    const int first = (i_tile * ATTN_MMA_WARPS + warp) * KEYS + lane / PIECES;
    const char *pool = (const char *)c.kv.data + piece * 16;
    uint16_t *keys = (uint16_t *)attn_mma_stage<T, DIM>(warp, i_tile), *values = keys + KEYS * DIM;
    const size_t part = kv_value_offset<T>(c.kv);
    if (first - lane / PIECES < b.n_keys) {
        UNROLL for (int i = 0; i < KEYS / ROWS; i++)
        {
            const int row = lane / PIECES + i * ROWS;
            const bool is_key = first + i * ROWS < b.n_keys;
            const char *key = pool +
                              (is_key ? (size_t)attn_mma_key_offsets<T, DIM>()[first + i * ROWS] *
                                            (DIM * sizeof(uint16_t))
                                      : 0);
            copy_async_16(piece_of<DIM>(keys, row, piece), key, is_key ? 16 : 0);
            copy_async_16(piece_of<DIM>(values, row, piece), key + (is_key ? part : 0),
                          is_key ? 16 : 0);
        }
    }
    copy_async_commit();
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
 * of the tile. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_softmax(
    float scale, int n_keys, float score[attn_mma_shape<T, DIM>::BLOCKS][4],
    struct attn_mma_state<DIM> *t)
{
    const int last = n_keys - 1 - 2 * (int)(threadIdx.x % 4); /* from the lane's first key on */
    UNROLL for (int half = 0; half < 2; half++)
    {
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

template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_load_tile_bytes(const struct attn_decode_call &c,
                                                                const struct attn_decode_block &b,
                                                                int i_tile)
{
    constexpr int KEYS = attn_mma_shape<T, DIM>::KEYS, PIECES = DIM / 16, ROWS = WARP / PIECES;
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, piece = lane % PIECES;
    const int first = (i_tile * ATTN_MMA_WARPS + warp) * KEYS, n = b.n_keys - first;
    const char *pool = (const char *)c.kv.data;
    char *keys = attn_mma_stage<T, DIM>(warp, i_tile), *values = keys + KEYS * DIM;
    float *scales = attn_mma_scales<T, DIM>(warp, i_tile);
    const struct kv_paged_row *rows = attn_mma_key_rows<T, DIM>() + first;
    if (n > 0) {
        UNROLL for (int i = 0; i < KEYS / ROWS; i++)
        {
            const int row = lane / PIECES + i * ROWS, valid = row < n ? 16 : 0;
            const size_t place = valid ? kv_row_offset<T>(c.kv, rows[row]) + (size_t)piece * 16 : 0;
            copy_async_16(bytes_of<DIM>(keys, row, piece), pool + place, valid);
            copy_async_16(bytes_of<DIM>(values, row, piece),
                          pool + place + (valid ? kv_value_offset<T>(c.kv) : 0), valid);
        }
        UNROLL for (int i = 0; i < KEYS / WARP; i++)
        {
            const int row = lane + i * WARP, valid = row < n ? 4 : 0;
            const size_t place = valid ? kv_scale_offset<T>(c.kv, rows[row]) : 0;
            copy_async_4(scales + row, pool + place, valid);
            copy_async_4(scales + KEYS + row,
                         pool + place + (valid ? (size_t)c.kv.block_tokens * sizeof(float) : 0),
                         valid);
        }
    }
    copy_async_commit();
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

/* ---- a segment ---- */

template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_prefetch(const struct attn_decode_call &c,
                                                         const struct attn_decode_block &b,
                                                         int i_tile)
{
    if constexpr (kv_traits<T>::SCALED) attn_mma_load_tile_bytes<T, DIM>(c, b, i_tile);
    else attn_mma_load_tile<T, DIM>(c, b, i_tile);
}

/* The warp's tiles, turn by turn. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_tile_loop(const struct attn_decode_call &c,
                                                          const struct attn_decode_block &b,
                                                          int n_rows, struct attn_mma_state<DIM> *t)
{
    constexpr int KEYS = attn_mma_shape<T, DIM>::KEYS, STAGES = attn_mma_shape<T, DIM>::STAGES;
    const int warp = (int)threadIdx.x / WARP;
    t->m[0] = t->m[1] = -INFINITY, t->l[0] = t->l[1] = 0;
    UNROLL for (int d = 0; d < DIM / 8; d++) UNROLL for (int i = 0; i < 4; i++) t->o[d][i] = 0;
    UNROLL for (int i = 0; i + 1 < STAGES; i++) attn_mma_prefetch<T, DIM>(c, b, i);
    attn_mma_load_queries<T, DIM>(c, b, n_rows, t->q);
    for (int i = 0; (i * ATTN_MMA_WARPS + warp) * KEYS < b.n_keys; i++) {
        char *keys = attn_mma_stage<T, DIM>(warp, i),
             *values = keys + attn_mma_shape<T, DIM>::STAGE / 2;
        float score[attn_mma_shape<T, DIM>::BLOCKS][4];
        copy_async_wait<STAGES - 2>();
        __syncwarp(); /* the tile is there for all lanes, and none reads the one before it */
        attn_mma_prefetch<T, DIM>(c, b, i + STAGES - 1);
        if constexpr (kv_traits<T>::SCALED) {
            const float *scales = attn_mma_scales<T, DIM>(warp, i);
            attn_mma_scores_bytes<T, DIM>(t->q, keys, score);
            attn_mma_apply_scales<T, DIM>(scales, score);
            attn_mma_softmax<T, DIM>(c.scale, b.n_keys - (i * ATTN_MMA_WARPS + warp) * KEYS, score,
                                     t);
            attn_mma_apply_scales<T, DIM>(scales + KEYS, score);
            attn_mma_accumulate_v_bytes<T, DIM>(score, values, t->o);
        } else {
            attn_mma_scores<T, DIM>(t->q, (uint16_t *)keys, score);
            attn_mma_softmax<T, DIM>(c.scale, b.n_keys - (i * ATTN_MMA_WARPS + warp) * KEYS, score,
                                     t);
            attn_mma_accumulate_v<T, DIM>(score, (uint16_t *)values, t->o);
        }
    }
    copy_async_wait<0>();
    __syncwarp();
}

/* A warp's sums to where all warps see them. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_store_partial(const struct attn_mma_state<DIM> &t)
{
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    UNROLL for (int half = 0; half < 2; half++)
    {
        const int pair = lane / 4 + 8 * half;
        const float l = quad_sum(t.l[half]);
        float *to = attn_mma_sums<T, DIM>(warp) + pair * attn_mma_shape<T, DIM>::SUMS_STRIDE;
        if constexpr (kv_traits<T>::SCALED) {
            UNROLL for (int d = 0; d < DIM / 16; d++)
            {
                const float *even = t.o[2 * d] + 2 * half, *odd = t.o[2 * d + 1] + 2 * half;
                *(float4 *)(to + d * 16 + 4 * (lane % 4)) = make_float4(even[0], odd[0], even[1],
                                                                        odd[1]);
            }
        } else {
            UNROLL for (int d = 0; d < DIM / 8; d++) * (float2 *)(to + d * 8 + 2 * (lane % 4)) =
                make_float2(t.o[d][2 * half], t.o[d][2 * half + 1]);
        }
        if (lane % 4 == 0)
            attn_mma_max_sum<T, DIM>(warp)[pair] = t.m[half],
                                attn_mma_max_sum<T, DIM>(warp)[ATTN_MMA_HEADS + pair] = l;
    }
}

/* Merges the warps' sums into the segment's. A warp without keys has a maximum of -INFINITY and
 * hence weight 0; the first warp always has keys. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_mma_finish(const struct attn_decode_call &c,
                                                       const struct attn_decode_block &b,
                                                       int n_rows)
{
    for (int i = (int)threadIdx.x; i < n_rows * b.n_heads * (DIM / 4); i += ATTN_MMA_THREADS) {
        const int pair = i / (DIM / 4), d = i % (DIM / 4) * 4;
        const struct cuda_attn_row row = c.list.rows[b.list_row + pair / b.n_heads];
        const bool whole = row.pos < row.per_segment;
        const size_t n_heads = (size_t)c.n_heads, head = (size_t)(b.head + pair % b.n_heads);
        float top = -INFINITY, l = 0;
        float4 o = make_float4(0, 0, 0, 0);
        UNROLL for (int w = 0; w < ATTN_MMA_WARPS; w++)
            top = fmaxf(top, attn_mma_max_sum<T, DIM>(w)[pair]);
        UNROLL for (int w = 0; w < ATTN_MMA_WARPS; w++)
        {
            const float by = exp2_fast((attn_mma_max_sum<T, DIM>(w)[pair] - top) * LOG2_E);
            const float4 x = *(const float4 *)(attn_mma_sums<T, DIM>(w) +
                                               pair * attn_mma_shape<T, DIM>::SUMS_STRIDE + d);
            l = fmaf(attn_mma_max_sum<T, DIM>(w)[ATTN_MMA_HEADS + pair], by, l);
            o = make_float4(fmaf(x.x, by, o.x), fmaf(x.y, by, o.y), fmaf(x.z, by, o.z),
                            fmaf(x.w, by, o.w));
        }
        float *part = c.parts +
                      ((size_t)(row.segment + b.segment - c.item_begin) * n_heads + head) *
                          part_floats(DIM);
        if (!whole && d == 0) part[0] = top, part[1] = l;
        const float by = 1.0f / l;
        if (whole)
            o = make_float4(__fmul_rn(o.x, by), __fmul_rn(o.y, by), __fmul_rn(o.z, by),
                            __fmul_rn(o.w, by));
        *(float4 *)(whole ? c.out + ((size_t)row.row * n_heads + head) * DIM + d
                          : part + PART_HEAD + d) = o;
    }
}

template <enum dtype T, int DIM>
static __global__ void __launch_bounds__(ATTN_MMA_THREADS, 2)
    attn_mma_kernel(const struct attn_decode_call c)
{
    grid_dependency_sync();
    const int n_units = attn_decode_n_units(c);
    for (int unit = (int)blockIdx.x; unit < n_units; unit += (int)gridDim.x) {
        const struct attn_decode_block b = attn_decode_block_of(c, ATTN_MMA_HEADS, unit);
        const int n_rows = attn_mma_rows_sharing(c, b);
        struct attn_mma_state<DIM> t;
        if (n_rows == 0) continue;
        attn_mma_locate_keys<T, DIM>(c, b);
        __syncthreads();
        attn_mma_tile_loop<T, DIM>(c, b, n_rows, &t);
        attn_mma_store_partial<T, DIM>(t);
        __syncthreads();
        attn_mma_finish<T, DIM>(c, b, n_rows);
        attn_decode_arrive<ATTN_MMA_THREADS, MERGE_GROUP>(c, b, n_rows); /* begins with a barrier */
    }
}

#endif
