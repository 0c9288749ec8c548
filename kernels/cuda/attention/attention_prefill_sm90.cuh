/* attention_prefill_sm90.cuh - prefill attention on the tensor cores of compute capability 9.0, in
 * the form of FlashAttention-3: 128 (query row, head) pairs of a KV head against tiles of 128 keys,
 * in bf16.
 *
 * A block has three warpgroups: a producer copies keys and values into two rings of two tiles in
 * shared memory, two consumers have 64 pairs each. A consumer computes the scores of tile j + 1
 * while it multiplies the weights of tile j by its values, and takes turns with the other one, so
 * that one's softmax runs beside the other's products. Segments and bits as in
 * attention_prefill.cuh, but for tiles of 128 keys: the LIMIT there is of 128 positions here.
 * Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_PREFILL_SM90_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_PREFILL_SM90_CUH

#include "kernels/cuda/attention/attention_prefill.cuh"
#include "kernels/cuda/gemm/sm90.cuh"

enum {
    SM90_PAIRS = 128, /* of a tile; half of them a consumer's */
    SM90_KEYS = 128,
    SM90_BLOCK_TOKENS = 64, /* blocks of a multiple of them */
    SM90_STAGES = 2,
    SM90_ATTN_THREADS = 3 * WARPGROUP,
    SM90_PRODUCER_REGISTERS = 40,
    SM90_CONSUMER_REGISTERS = 232,
    SM90_TILES_PER_SEGMENT = CUDA_ATTN_SEGMENT / SM90_KEYS,
    SM90_COLUMNS = 64, /* of a row of 128 bytes in shared memory */
    SM90_ROW_BYTES = 128,
    SM90_SCORES = SM90_KEYS / 2 /* of a thread: 64 pairs by SM90_KEYS over 128 threads */
};

/* Bytes of shared memory. Tiles of q, k and v are [DIM / 64][rows][128 bytes], swizzled. */
template <int DIM> struct sm90_attn_layout {
    enum {
        Q_BYTES = 64 * DIM * 2, /* of a consumer */
        TILE_BYTES = SM90_KEYS * DIM * 2,
        HALF_BYTES = SM90_KEYS * SM90_ROW_BYTES, /* from 64 columns of a tile to the next */
        K_AT = 2 * Q_BYTES,
        V_AT = K_AT + SM90_STAGES * TILE_BYTES,
        SUMS_AT = V_AT + SM90_STAGES * TILE_BYTES,
        BARRIERS_AT = SUMS_AT + SM90_PAIRS * DIM * 4,
        SHARED = BARRIERS_AT + 4 * SM90_STAGES * 8
    };
    static_assert(SHARED <= 227 * 1024, "what a block can have");
};

#if SM90_CODE
/* A ring of tiles: which one is next, and whether its place is full or empty. */
struct sm90_attn_ring {
    unsigned at;
    uint64_t *full, *empty;
    int n;
    __device__ __forceinline__ int place() const { return n % SM90_STAGES; }
    __device__ __forceinline__ unsigned parity() const { return n / SM90_STAGES & 1; }
    __device__ __forceinline__ void wait_full() const { barrier_wait(full + place(), parity()); }
    __device__ __forceinline__ void wait_empty() const
    {
        barrier_wait(empty + place(), parity() ^ 1);
    }
    /* By all threads of a consumer's warp, once they have read the tile. */
    __device__ __forceinline__ void release()
    {
        __syncwarp();
        if (threadIdx.x % WARP == 0) barrier_arrive(empty + place());
        n++;
    }
};

template <int DIM> static __device__ __forceinline__ sm90_attn_ring sm90_attn_ring_of(bool values)
{
    typedef sm90_attn_layout<DIM> L;
    unsigned char *shared = shared_memory();
    uint64_t *barriers = (uint64_t *)(shared + L::BARRIERS_AT) + (values ? 2 * SM90_STAGES : 0);
    return sm90_attn_ring{ shared_address(shared) + (values ? L::V_AT : L::K_AT), barriers,
                           barriers + SM90_STAGES, 0 };
}

template <int DIM> static __device__ __forceinline__ void sm90_attn_init_barriers()
{
    uint64_t *barriers = (uint64_t *)(shared_memory() + sm90_attn_layout<DIM>::BARRIERS_AT);
    if (threadIdx.x == 0) {
        if (shared_address(shared_memory()) % 1024) __trap(); /* the swizzle goes by addresses */
        for (int i = 0; i < 4 * SM90_STAGES; i++)
            barrier_init(barriers + i, i / SM90_STAGES % 2 ? 2 * WARPGROUP / WARP : WARPGROUP);
    }
    __syncthreads();
}

/* ---- tiles of a block: the same in all its threads ---- */

struct sm90_attn_walk {
    int round, i, end, kv_head, segment; /* rows [i, end) of the prompts' are left of the unit */
};

/* In every other round blocks take units in the other direction: units become shorter, and so no
 * block gets the longer one of every round. */
static __device__ __forceinline__ bool sm90_attn_next_unit(const struct attn_prefill_call &c,
                                                           sm90_attn_walk *w)
{
    const int n = (int)gridDim.x, me = (int)blockIdx.x,
              unit = w->round * n + (w->round % 2 ? n - 1 - me : me);
    const struct attn_prefill_unit u = attn_prefill_unit_of(c, unit);
    w->round++;
    w->i = u.first, w->end = u.end, w->kv_head = u.kv_head, w->segment = u.segment;
    return u.end > 0;
}

/* The next tile, and its tiles of keys [begin, end). */
static __device__ __forceinline__ bool sm90_attn_next(const struct attn_prefill_call &c,
                                                      sm90_attn_walk *w,
                                                      struct attn_prefill_tile *t, int *begin,
                                                      int *end)
{
    for (;;) {
        if (w->i >= w->end) {
            if (!sm90_attn_next_unit(c, w)) return false;
            continue;
        }
        if (!attn_prefill_tile_at(c, w->i, w->kv_head, t)) {
            w->i += attn_prefill_rows_left(c, w->i);
            continue;
        }
        const int n_tiles = (t->n_keys + SM90_KEYS - 1) / SM90_KEYS;
        w->i += t->n_rows;
        *begin = c.n_at_once > 0 ? w->segment * SM90_TILES_PER_SEGMENT : 0;
        *end = c.n_at_once > 0 ? min(n_tiles, *begin + SM90_TILES_PER_SEGMENT) : n_tiles;
        if (*begin < *end) return true;
    }
}

/* ---- bringing keys and values ---- */

/* Starts the cp.async of the keys or values of a tile; zeros behind the last. A thread copies a
 * piece of 16 bytes of every so many rows; 64 rows lie in one block. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_copy(const struct attn_prefill_call &c,
                                                      const struct attn_prefill_tile &t,
                                                      unsigned char *to, int i_tile, bool values)
{
    constexpr int ROW_PIECES = DIM / CHUNK, ROWS = WARPGROUP / ROW_PIECES;
    const int row = (int)threadIdx.x / ROW_PIECES, piece = (int)threadIdx.x % ROW_PIECES;
    to += piece / 8 * sm90_attn_layout<DIM>::HALF_BYTES + row * SM90_ROW_BYTES +
          (piece % 8 ^ row % 8) * 16;
    UNROLL for (int part = 0; part < SM90_KEYS / SM90_BLOCK_TOKENS; part++)
    {
        const int first = i_tile * SM90_KEYS + part * SM90_BLOCK_TOKENS, n = t.n_keys - first - row;
        const char *from = (const char *)c.kv.data;
        if (first < t.n_keys)
            from += kv_key_offset<DTYPE_BF16>(c.kv, t.table, first, t.kv_head) +
                    (values ? kv_value_offset<DTYPE_BF16>(c.kv) : 0) +
                    (size_t)(row * DIM * 2 + piece * 16);
        UNROLL for (int i = 0; i < SM90_BLOCK_TOKENS / ROWS; i++)
            copy_async_16(to + (part * SM90_BLOCK_TOKENS + i * ROWS) * SM90_ROW_BYTES,
                          i * ROWS < n ? from + i * ROWS * DIM * 2 : (const char *)c.kv.data,
                          i * ROWS < n ? 16 : 0);
    }
}

/* A tile's copies have been started; the ones before it are complete then, and are announced. */
static __device__ __forceinline__ void sm90_attn_announce(uint64_t **pending, uint64_t *full)
{
    copy_async_commit();
    if (*pending) {
        copy_async_wait<1>();
        fence_async_proxy();
        barrier_arrive(*pending);
    }
    *pending = full;
}

template <int DIM>
static __device__ __forceinline__ void sm90_attn_bring(const struct attn_prefill_call &c,
                                                       const struct attn_prefill_tile &t,
                                                       sm90_attn_ring *ring, uint64_t **pending,
                                                       int i_tile, bool values)
{
    typedef sm90_attn_layout<DIM> L;
    unsigned char *to = shared_memory() + (values ? L::V_AT : L::K_AT) +
                        ring->place() * L::TILE_BYTES;
    ring->wait_empty();
    sm90_attn_copy<DIM>(c, t, to, i_tile, values);
    sm90_attn_announce(pending, ring->full + ring->place());
    ring->n++;
}

/* In the order in which consumers take them. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_produce(const struct attn_prefill_call &c)
{
    sm90_attn_ring keys = sm90_attn_ring_of<DIM>(false), values = sm90_attn_ring_of<DIM>(true);
    sm90_attn_walk walk = {};
    struct attn_prefill_tile t;
    uint64_t *pending = NULL;
    int begin, end;
    while (sm90_attn_next(c, &walk, &t, &begin, &end)) {
        /* its queries, for which consumers ask when they have finished the tile before */
        if ((int)threadIdx.x < t.n_rows)
            prefetch_l2(query_of(c, t, pair_at(t, (int)threadIdx.x * t.group), DIM),
                        (unsigned)(t.group * DIM) * (unsigned)sizeof(float));
        sm90_attn_bring<DIM>(c, t, &keys, &pending, begin, false);
        for (int j = begin; j < end; j++) {
            if (j + 1 < end) sm90_attn_bring<DIM>(c, t, &keys, &pending, j + 1, false);
            sm90_attn_bring<DIM>(c, t, &values, &pending, j, true);
        }
    }
    copy_async_wait<0>();
    fence_async_proxy();
    if (pending) barrier_arrive(pending);
}

/* ---- consuming ---- */

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
};

/* The thread's pair of the tile, in a half. */
static __device__ __forceinline__ int sm90_attn_pair(int consumer, int half)
{
    const int tid = (int)threadIdx.x % WARPGROUP;
    return consumer * 64 + tid / WARP * 16 + tid % WARP / 4 + 8 * half;
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
    UNROLL_BY(4) for (int i = 0; i < 64 / ROWS; i++)
    {
        struct attn_prefill_pair p = pair_at(t, consumer * 64 + row + i * ROWS);
        const bool is_valid = p.is_valid;
        if (!is_valid) p = pair_at(t, 0);
        const float4 *from = (const float4 *)(query_of(c, t, p, DIM) + piece * CHUNK);
        float4 x = from[0], y = from[1];
        if (!is_valid) x = y = make_float4(0, 0, 0, 0);
        *(uint4 *)(to + i * ROWS * SM90_ROW_BYTES) = make_uint4(
            pack_bf16(x.x, x.y), pack_bf16(x.z, x.w), pack_bf16(y.x, y.y), pack_bf16(y.z, y.w));
    }
    fence_async_proxy();
    named_barrier_sync(SM90_QUERY_BARRIER + consumer, WARPGROUP);
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

/* How a segment is taken into those before it: a pair's sums become o b + before a. Pairs that ended
 * in an earlier segment see no key of this one, and keep what was before. */
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

/* (M, L) takes (m, l) of a segment in. */
template <int DIM>
static __device__ __forceinline__ sm90_attn_merge
sm90_attn_merge_of(const struct attn_prefill_tile &t, int segment, int consumer,
                   sm90_attn_state<DIM> &mine, const float m[2], const float l[2])
{
    sm90_attn_merge by = {};
    UNROLL for (int half = 0; half < 2; half++)
    {
        const float sum = quad_sum(l[half]);
        by.sees[half] = pair_at(t, sm90_attn_pair(consumer, half)).pos / CUDA_ATTN_SEGMENT >=
                        segment;
        if (segment == 0) mine.M[half] = m[half], mine.L[half] = sum;
        else if (by.sees[half])
            merge_weights(&mine.M[half], &mine.L[half], m[half], sum, &by.a[half], &by.b[half]);
    }
    return by;
}

/* A segment of a whole tile is done, and is not its last. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_end_segment(const struct attn_prefill_tile &t,
                                                             int segment, int consumer,
                                                             sm90_attn_state<DIM> &mine,
                                                             const float m[2], const float l[2])
{
    float4 *sums = sm90_attn_sums<DIM>(consumer);
    const float *o = mine.o;
    const sm90_attn_merge by = sm90_attn_merge_of<DIM>(t, segment, consumer, mine, m, l);
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
    const sm90_attn_merge merge = sm90_attn_merge_of<DIM>(t, of, consumer, mine, mine.m, mine.l);
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
        float *to = c.out + ((size_t)(t.row + p.row) * (size_t)c.n_heads + (size_t)p.head) * DIM,
              by = 1.0f / mine.L[half];
        if (!p.is_valid || (c.n_at_once > 0 && segment > last)) continue;
        if (is_part) {
            float *part = attn_prefill_part<DIM>(c, t, segment, p);
            if (column == 0) part[0] = mine.M[half], part[1] = mine.L[half];
            to = part + PART_HEAD, by = 1.0f;
        }
        UNROLL for (int d = 0; d < DIM / 8; d++) * (float2 *)(to + d * 8 + column) = make_float2(
            __fmul_rn(mine.o[4 * d + 2 * half], by), __fmul_rn(mine.o[4 * d + 2 * half + 1], by));
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

/* A tile of pairs. Tile j's values are multiplied while tile j + 1 is weighed. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_tile(const struct attn_prefill_call &c,
                                                      const struct attn_prefill_tile &t, int begin,
                                                      int end, int consumer, uint64_t q,
                                                      sm90_attn_ring *keys, sm90_attn_ring *values)
{
    sm90_attn_state<DIM> mine;
    float shrink[2];
    bool add = false;
    UNROLL for (int half = 0; half < 2; half++) mine.m[half] = -INFINITY, mine.l[half] = 0;
    keys->wait_full();
    __syncwarp();
    sm90_attn_start_scores<DIM>(mine, *keys, q);
    wgmma_wait<0>();
    keys->release();
    sm90_attn_weigh<DIM>(c, t, begin, consumer, mine, shrink);
    sm90_attn_round_weights<DIM>(mine);
    if (begin + 1 < end) keys->wait_full();
#pragma unroll 1
    for (int j = begin; j + 1 < end; j++) {
        const bool ends = (j + 1) % SM90_TILES_PER_SEGMENT == 0;
        const float m[2] = { mine.m[0], mine.m[1] }, l[2] = { mine.l[0], mine.l[1] };
        sm90_attn_take_turn(consumer);
        sm90_attn_start_scores<DIM>(mine, *keys, q);
        values->wait_full();
        __syncwarp();
        sm90_attn_start_values<DIM>(mine, *values, add);
        sm90_attn_give_turn(consumer);
        wgmma_wait<1>();
        keys->release();
        if (ends)
            UNROLL for (int half = 0; half < 2; half++) mine.m[half] = -INFINITY, mine.l[half] = 0;
        sm90_attn_weigh<DIM>(c, t, j + 1, consumer, mine, shrink);
        wgmma_fence_operand(mine.score);
        /* This branch keeps ptxas from waiting for the values before the scores are weighed. */
        if (j + 2 < end) keys->wait_full();
        wgmma_wait<0>();
        wgmma_fence_operand(mine.o);
        wgmma_fence_operand(mine.p);
        values->release();
        add = !ends;
        if (ends) {
            sm90_attn_end_segment<DIM>(t, j / SM90_TILES_PER_SEGMENT, consumer, mine, m, l);
        } else UNROLL for (int i = 0; i < DIM / 2; i++) mine.o[i] *= shrink[i / 2 % 2];
        sm90_attn_round_weights<DIM>(mine);
    }
    values->wait_full();
    __syncwarp();
    sm90_attn_start_values<DIM>(mine, *values, add);
    wgmma_wait<0>();
    wgmma_fence_operand(mine.o);
    values->release();
    sm90_attn_end_tile<DIM>(c, t, (end - 1) / SM90_TILES_PER_SEGMENT, consumer, mine);
}

template <int DIM>
static __device__ __forceinline__ void sm90_attn_consume(const struct attn_prefill_call &c,
                                                         int consumer)
{
    sm90_attn_ring keys = sm90_attn_ring_of<DIM>(false), values = sm90_attn_ring_of<DIM>(true);
    const uint64_t q = wgmma_descriptor(shared_address(shared_memory()) +
                                        (unsigned)(consumer * sm90_attn_layout<DIM>::Q_BYTES));
    sm90_attn_walk walk = {};
    struct attn_prefill_tile t;
    int begin, end;
    if (consumer == 0) named_barrier_arrive(SM90_TURN_BARRIER, 2 * WARPGROUP); /* the first turn */
    while (sm90_attn_next(c, &walk, &t, &begin, &end)) {
        sm90_attn_load_queries<DIM>(c, t, consumer);
        sm90_attn_tile<DIM>(c, t, begin, end, consumer, q, &keys, &values);
    }
}
#endif

template <int DIM>
static __global__ void __launch_bounds__(SM90_BOUND(SM90_ATTN_THREADS), 1)
    attn_prefill_sm90_kernel(const struct attn_prefill_call c)
{
    grid_dependency_sync();
#if SM90_CODE
    sm90_attn_init_barriers<DIM>();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<SM90_PRODUCER_REGISTERS>();
        sm90_attn_produce<DIM>(c);
    } else {
        warpgroup_reg_alloc<SM90_CONSUMER_REGISTERS>();
        sm90_attn_consume<DIM>(c, warpgroup - 1);
    }
#else
    (void)c;
    __trap();
#endif
}

#endif
