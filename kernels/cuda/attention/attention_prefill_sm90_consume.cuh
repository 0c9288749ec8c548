/* attention_prefill_sm90_consume.cuh - a consumer of attention_prefill_sm90.cuh: scores, weights
 * and sums of 64 pairs. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_PREFILL_SM90_CONSUME_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_PREFILL_SM90_CONSUME_CUH

#include "kernels/cuda/attention/attention_prefill_sm90.cuh"

#if SM90_CODE
/* Numbered barriers: whose turn it is, and a consumer's own. */
enum { SM90_TURN_BARRIER = 1, SM90_QUERY_BARRIER = 3 };

static __device__ __forceinline__ void sm90_attn_take_turn(int consumer)
{
    named_barrier_sync(SM90_TURN_BARRIER + consumer, 2 * WARPGROUP);
}
static __device__ __forceinline__ void sm90_attn_give_turn(int consumer)
{
    named_barrier_arrive(SM90_TURN_BARRIER + 1 - consumer, 2 * WARPGROUP);
}

/* What a thread has of its consumer's pairs lane / 4 and that + 8 of the warp's 16: as wgmma has
 * it, scores and sums x[4 b + 2 half + i] of columns 8 b + 2 (lane % 4) + i. */
template <int DIM> struct sm90_attn_state {
    float o[DIM / 2], score[SM90_SCORES];
    unsigned p[SM90_SCORES / 2];  /* weights, as fragments of A for 16 keys each */
    float m[2], l[2], M[2], L[2]; /* of the segment, and of those before it */
    bool adds;                    /* o has values of the segment */
};

/* The thread's pair of the tile, in a half. */
static __device__ __forceinline__ int sm90_attn_pair(int consumer, int half)
{
    const int tid = (int)threadIdx.x % WARPGROUP;
    return consumer * 64 + tid / WARP * 16 + tid % WARP / 4 + 8 * half;
}

/* The piece-th eight elements of a head, in bf16, as they may be already. Without branches, at
 * which ptxas would wait for products. */
static __device__ __forceinline__ uint4 sm90_attn_query(const float *head, int piece, bool is_bf16)
{
    const int by = is_bf16 ? 1 : 2;
    const uint4 *from = (const uint4 *)(const void *)head + piece * by, x = from[0],
                y = from[by - 1];
    uint4 q = make_uint4(pack_bf16(__uint_as_float(x.x), __uint_as_float(x.y)),
                         pack_bf16(__uint_as_float(x.z), __uint_as_float(x.w)),
                         pack_bf16(__uint_as_float(y.x), __uint_as_float(y.y)),
                         pack_bf16(__uint_as_float(y.z), __uint_as_float(y.w)));
    q.x = is_bf16 ? x.x : q.x, q.y = is_bf16 ? x.y : q.y;
    q.z = is_bf16 ? x.z : q.z, q.w = is_bf16 ? x.w : q.w;
    return q;
}

/* A consumer's queries to shared memory. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_load_queries(const struct attn_prefill_call &c,
                                                              const struct attn_prefill_tile &t,
                                                              int consumer)
{
    constexpr int ROW_PIECES = DIM / CHUNK, ROWS = WARPGROUP / ROW_PIECES;
    const int tid = (int)threadIdx.x % WARPGROUP, row = tid / ROW_PIECES, piece = tid % ROW_PIECES;
    unsigned char *to = shared_memory() + consumer * sm90_attn_layout<DIM>::Q_BYTES +
                        piece / 8 * 64 * SM90_ROW_BYTES + row * SM90_ROW_BYTES +
                        (piece % 8 ^ row % 8) * 16;
    named_barrier_sync(SM90_QUERY_BARRIER + consumer, WARPGROUP); /* the ones before are read */
    UNROLL for (int i = 0; i < 64 / ROWS; i++)
    {
        struct attn_prefill_pair p = pair_at(t, consumer * 64 + row + i * ROWS);
        const bool is_valid = p.is_valid;
        if (!is_valid) p = pair_at(t, 0);
        uint4 q = sm90_attn_query(query_of(c, t, p, DIM), piece, c.q_is_bf16);
        q.x = is_valid ? q.x : 0, q.y = is_valid ? q.y : 0;
        q.z = is_valid ? q.z : 0, q.w = is_valid ? q.w : 0;
        *(uint4 *)(to + i * ROWS * SM90_ROW_BYTES) = q;
    }
    fence_async_proxy();
}

/* Starts score = q k of the ring's tile. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_start_scores(sm90_attn_state<DIM> &mine,
                                                              const sm90_attn_ring &keys,
                                                              uint64_t q)
{
    typedef sm90_attn_layout<DIM> L;
    const uint64_t k = wgmma_descriptor(keys.at + (unsigned)(keys.place() * L::TILE_BYTES));
    wgmma_fence_operand(mine.score);
    wgmma_fence();
    UNROLL for (int i = 0; i < DIM / 16; i++) wgmma_bf16(
        mine.score, q + (uint64_t)(i / 4 * 64 * SM90_ROW_BYTES / 16 + i % 4 * WGMMA_K_STEP),
        k + (uint64_t)(i / 4 * L::HALF_BYTES / 16 + i % 4 * WGMMA_K_STEP), i > 0);
    wgmma_commit();
    wgmma_fence_operand(mine.score);
}

/* Starts o += p v, or o = p v, of the ring's tile. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_start_values(sm90_attn_state<DIM> &mine,
                                                              const sm90_attn_ring &values,
                                                              bool add)
{
    typedef sm90_attn_layout<DIM> L;
    const uint64_t v = wgmma_rows_descriptor(values.at + (unsigned)(values.place() * L::TILE_BYTES),
                                             L::HALF_BYTES);
    wgmma_fence_operand(mine.o);
    wgmma_fence_operand(mine.p);
    wgmma_fence();
    UNROLL for (int i = 0; i < SM90_KEYS / 16; i++)
        wgmma_rows_bf16(mine.o, mine.p + 4 * i, v + (uint64_t)(i * WGMMA_ROWS_STEP), add || i > 0);
    wgmma_commit();
    wgmma_fence_operand(mine.o);
}

/* Masks keys after a pair's own position; only a prompt's last tiles have such. */
static __device__ __forceinline__ void sm90_attn_causal_mask(const struct attn_prefill_tile &t,
                                                             int key_begin, int consumer,
                                                             float (&score)[SM90_SCORES])
{
    UNROLL for (int half = 0; half < 2; half++)
    {
        /* seen, from the thread's first key on */
        const int last = pair_at(t, sm90_attn_pair(consumer, half)).pos - key_begin -
                         2 * (int)(threadIdx.x % 4);
        UNROLL for (int b = 0; b < SM90_KEYS / 8; b++)
            UNROLL for (int i = 0; i < 2; i++) if (b * 8 + i > last)
                score[4 * b + 2 * half + i] = -INFINITY;
    }
}

/* Scores become weights in f32; m and l (of the thread's own keys) go on, and `shrink` is what o
 * has to be multiplied by. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_softmax(const struct attn_prefill_call &c,
                                                         sm90_attn_state<DIM> &mine,
                                                         float shrink[2])
{
    const float factor = c.scale * LOG2_E;
    UNROLL for (int half = 0; half < 2; half++)
    {
        float top = -INFINITY, sum = 0;
        UNROLL for (int b = 0; b < SM90_KEYS / 8; b++)
            top = fmaxf(top, fmaxf(mine.score[4 * b + 2 * half], mine.score[4 * b + 2 * half + 1]));
        top = fmaxf(mine.m[half], quad_max(top) * c.scale);
        shrink[half] = exp2_fast((mine.m[half] - top) * LOG2_E);
        const float base = top * LOG2_E;
        UNROLL for (int b = 0; b < SM90_KEYS / 8; b++) UNROLL for (int i = 0; i < 2; i++)
        {
            float *x = &mine.score[4 * b + 2 * half + i];
            *x = exp2_fast(fmaf(*x, factor, -base));
            sum += *x;
        }
        mine.l[half] = fmaf(mine.l[half], shrink[half], sum);
        mine.m[half] = top;
    }
}

template <int DIM>
static __device__ __forceinline__ void sm90_attn_round_weights(sm90_attn_state<DIM> &mine)
{
    UNROLL for (int i = 0; i < SM90_SCORES / 2; i++)
        mine.p[i] = pack_bf16(mine.score[2 * i], mine.score[2 * i + 1]);
}

/* The thread's sums of the segments before: four of each 8 columns. */
template <int DIM> static __device__ __forceinline__ float4 *sm90_attn_sums(int consumer)
{
    return (float4 *)(shared_memory() + sm90_attn_layout<DIM>::SUMS_AT) + consumer * WARPGROUP +
           threadIdx.x % WARPGROUP;
}

/* How a segment is taken into those before it: a pair's sums become o b + before a. Pairs that
 * ended in an earlier segment see no key of this one, and keep what was before. */
struct sm90_attn_merge {
    float a[2], b[2];
    bool sees[2];
    __device__ __forceinline__ float4 operator()(const float4 &before, const float *o) const
    {
        float4 to;
        to.x = sees[0] ? merged(before.x, o[0], a[0], b[0]) : before.x;
        to.y = sees[0] ? merged(before.y, o[1], a[0], b[0]) : before.y;
        to.z = sees[1] ? merged(before.z, o[2], a[1], b[1]) : before.z;
        to.w = sees[1] ? merged(before.w, o[3], a[1], b[1]) : before.w;
        return to;
    }
};

/* (M, L) takes (m, l) of a segment in, for the pairs that see some of it. */
template <int DIM>
static __device__ __forceinline__ sm90_attn_merge sm90_attn_merge_of(int segment,
                                                                     sm90_attn_state<DIM> &mine,
                                                                     const float m[2],
                                                                     const float l[2], bool first,
                                                                     bool second)
{
    sm90_attn_merge by = { {}, {}, { first, second } };
    UNROLL for (int half = 0; half < 2; half++)
    {
        const float sum = quad_sum(l[half]);
        if (segment == 0) mine.M[half] = m[half], mine.L[half] = sum;
        else if (by.sees[half])
            merge_weights(&mine.M[half], &mine.L[half], m[half], sum, &by.a[half], &by.b[half]);
    }
    return by;
}

/* A segment of a whole tile is done, and is not its last: a tile has fewer rows than a segment has
 * keys, so all of them see it. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_end_segment(int segment, int consumer,
                                                             sm90_attn_state<DIM> &mine,
                                                             const float m[2], const float l[2])
{
    float4 *sums = sm90_attn_sums<DIM>(consumer);
    const float *o = mine.o;
    const sm90_attn_merge by = sm90_attn_merge_of<DIM>(segment, mine, m, l, true, true);
    if (segment == 0) {
        UNROLL for (int i = 0; i < DIM / 8; i++) sums[i * 2 * WARPGROUP] = make_float4(
            o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
        return;
    }
    UNROLL for (int i = 0; i < DIM / 8; i++)
        sums[i * 2 * WARPGROUP] = by(sums[i * 2 * WARPGROUP], o + 4 * i);
}

/* The last segment of a whole tile, or one that is a part, is done. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_end_tile(const struct attn_prefill_call &c,
                                                          const struct attn_prefill_tile &t,
                                                          int segment, int consumer,
                                                          sm90_attn_state<DIM> &mine)
{
    const int column = 2 * (int)(threadIdx.x % 4);
    const int of = c.n_at_once > 0 ? 0 : segment;
    const float4 *sums = sm90_attn_sums<DIM>(consumer);
    const sm90_attn_merge merge = sm90_attn_merge_of<DIM>(
        of, mine, mine.m, mine.l,
        pair_at(t, sm90_attn_pair(consumer, 0)).pos / CUDA_ATTN_SEGMENT >= of,
        pair_at(t, sm90_attn_pair(consumer, 1)).pos / CUDA_ATTN_SEGMENT >= of);
    if (of > 0) UNROLL for (int i = 0; i < DIM / 8; i++)
        {
            const float4 x = merge(sums[i * 2 * WARPGROUP], mine.o + 4 * i);
            mine.o[4 * i] = x.x, mine.o[4 * i + 1] = x.y, mine.o[4 * i + 2] = x.z,
                       mine.o[4 * i + 3] = x.w;
        }
    UNROLL for (int half = 0; half < 2; half++)
    {
        const struct attn_prefill_pair p = pair_at(t, sm90_attn_pair(consumer, half));
        const int last = p.pos / CUDA_ATTN_SEGMENT;
        const bool is_part = c.n_at_once > 0 && last > 0;
        const size_t at = ((size_t)(t.row + p.row) * (size_t)c.n_heads + (size_t)p.head) * DIM;
        float *to = c.out + at, by = 1.0f / mine.L[half];
        if (!p.is_valid || (c.n_at_once > 0 && segment > last)) continue;
        if (is_part) {
            float *part = attn_prefill_part<DIM>(c, t, segment, p);
            if (column == 0) part[0] = mine.M[half], part[1] = mine.L[half];
            to = part + PART_HEAD, by = 1.0f;
        }
        UNROLL for (int d = 0; d < DIM / 8; d++) * (float2 *)(to + d * 8 + column) = make_float2(
            __fmul_rn(mine.o[4 * d + 2 * half], by), __fmul_rn(mine.o[4 * d + 2 * half + 1], by));
        if (c.out_bf16)
            UNROLL for (int d = 0; d < DIM / 8; d++) *
                (unsigned *)(void *)(c.out_bf16 + at + d * 8 + column) = pack_bf16(
                __fmul_rn(mine.o[4 * d + 2 * half], by),
                __fmul_rn(mine.o[4 * d + 2 * half + 1], by));
    }
}

/* The scores of tile j have been waited for: they become weights in f32. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_weigh(const struct attn_prefill_call &c,
                                                       const struct attn_prefill_tile &t, int j,
                                                       int consumer, sm90_attn_state<DIM> &mine,
                                                       float shrink[2])
{
    wgmma_fence_operand(mine.score);
    if ((j + 1) * SM90_KEYS - 1 > t.pos)
        sm90_attn_causal_mask(t, j * SM90_KEYS, consumer, mine.score);
    sm90_attn_softmax<DIM>(c, mine, shrink);
}

/* Starts the scores of a tile of pairs' first tile of keys, once all queries are there. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_start(sm90_attn_state<DIM> &mine, int consumer,
                                                       uint64_t q, const sm90_attn_ring &keys)
{
    named_barrier_sync(SM90_QUERY_BARRIER + consumer, WARPGROUP);
    keys.wait_full();
    __syncwarp();
    sm90_attn_start_scores<DIM>(mine, keys, q);
}

/* Their softmax. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_begin(const struct attn_prefill_call &c,
                                                       const sm90_attn_work &w, int consumer,
                                                       sm90_attn_ring *keys,
                                                       sm90_attn_state<DIM> &mine)
{
    float shrink[2];
    mine.adds = false;
    UNROLL for (int half = 0; half < 2; half++) mine.m[half] = -INFINITY, mine.l[half] = 0;
    wgmma_wait<0>();
    keys->release();
    sm90_attn_weigh<DIM>(c, w.tile, w.begin, consumer, mine, shrink);
    sm90_attn_round_weights<DIM>(mine);
    if (w.begin + 1 < w.end) keys->wait_full();
}

/* Tile j's values are multiplied while the softmax of tile j + 1, whose keys are there, is
 * computed. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_step(const struct attn_prefill_call &c,
                                                      const sm90_attn_work &w, int j, int consumer,
                                                      uint64_t q, sm90_attn_ring *keys,
                                                      sm90_attn_ring *values,
                                                      sm90_attn_state<DIM> &mine)
{
    const bool ends = (j + 1) % SM90_TILES_PER_SEGMENT == 0;
    const float m[2] = { mine.m[0], mine.m[1] }, l[2] = { mine.l[0], mine.l[1] };
    float shrink[2];
    sm90_attn_take_turn(consumer);
    sm90_attn_start_scores<DIM>(mine, *keys, q);
    values->wait_full();
    __syncwarp();
    sm90_attn_start_values<DIM>(mine, *values, mine.adds);
    sm90_attn_give_turn(consumer);
    wgmma_wait<1>();
    keys->release();
    UNROLL for (int half = 0; half < 2 && ends; half++) mine.m[half] = -INFINITY, mine.l[half] = 0;
    sm90_attn_weigh<DIM>(c, w.tile, j + 1, consumer, mine, shrink);
    wgmma_fence_operand(mine.score);
    /* This branch keeps ptxas from waiting for the values before the softmax. */
    if (j + 2 < w.end) keys->wait_full();
    wgmma_wait<0>();
    wgmma_fence_operand(mine.o);
    wgmma_fence_operand(mine.p);
    values->release();
    mine.adds = !ends;
    if (ends) sm90_attn_end_segment<DIM>(j / SM90_TILES_PER_SEGMENT, consumer, mine, m, l);
    else if (__any_sync(0xffffffffu, shrink[0] != 1 || shrink[1] != 1)) {
        UNROLL for (int i = 0; i < DIM / 2; i++) mine.o[i] *= shrink[i / 2 % 2];
    }
    sm90_attn_round_weights<DIM>(mine);
}

template <int DIM> static __device__ __forceinline__ sm90_attn_work sm90_attn_take_work(int i)
{
    barrier_wait(sm90_attn_work_barrier<DIM>(i), (unsigned)(i / SM90_STAGES) & 1);
    return *sm90_attn_work_at<DIM>(i);
}

/* Tiles of pairs. The last values of one are multiplied while the next one's queries are loaded. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_consume(const struct attn_prefill_call &c,
                                                         int consumer)
{
    sm90_attn_ring keys = sm90_attn_ring_of<DIM>(false), values = sm90_attn_ring_of<DIM>(true);
    const uint64_t q = wgmma_descriptor(shared_address(shared_memory()) +
                                        (unsigned)(consumer * sm90_attn_layout<DIM>::Q_BYTES));
    if (consumer == 0) named_barrier_arrive(SM90_TURN_BARRIER, 2 * WARPGROUP); /* the first turn */
    sm90_attn_work next = sm90_attn_take_work<DIM>(0);
    if (next.begin >= next.end) return;
    sm90_attn_state<DIM> mine;
    sm90_attn_load_queries<DIM>(c, next.tile, consumer);
    sm90_attn_start<DIM>(mine, consumer, q, keys);
    for (int i = 1;; i++) {
        const sm90_attn_work w = next;
        const int segment = (w.end - 1) / SM90_TILES_PER_SEGMENT;
        sm90_attn_begin<DIM>(c, w, consumer, &keys, mine);
#pragma unroll 1
        for (int j = w.begin; j + 1 < w.end; j++)
            sm90_attn_step<DIM>(c, w, j, consumer, q, &keys, &values, mine);
        next = sm90_attn_take_work<DIM>(i);
        values.wait_full();
        __syncwarp();
        sm90_attn_start_values<DIM>(mine, values, mine.adds);
        sm90_attn_load_queries<DIM>(c, next.tile, consumer); /* behind the last: of that again */
        wgmma_wait<0>();
        wgmma_fence_operand(mine.o);
        values.release();
        if (next.begin >= next.end) {
            sm90_attn_end_tile<DIM>(c, w.tile, segment, consumer, mine);
            return;
        }
        sm90_attn_start<DIM>(mine, consumer, q, keys);
        sm90_attn_end_tile<DIM>(c, w.tile, segment, consumer, mine);
    }
}
#endif

#endif
