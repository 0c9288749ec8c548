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
        WORK_AT = BARRIERS_AT + 5 * SM90_STAGES * 8,
        SHARED = WORK_AT + SM90_STAGES * 48
    };
    static_assert(SHARED <= 227 * 1024, "what a block can have");
};

#if SM90_CODE
/* A tile of pairs, and its tiles of keys [begin, end); an empty one says that there are no more. */
struct sm90_attn_work {
    struct attn_prefill_tile tile;
    int begin, end;
};
static_assert(sizeof(sm90_attn_work) == 48, "as sm90_attn_layout has it");

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
        for (int i = 4 * SM90_STAGES; i < 5 * SM90_STAGES; i++) barrier_init(barriers + i, 1);
    }
    __syncthreads();
}

/* Work number i, of which the producer announces two at a time. */
template <int DIM> static __device__ __forceinline__ sm90_attn_work *sm90_attn_work_at(int i)
{
    return (sm90_attn_work *)(shared_memory() + sm90_attn_layout<DIM>::WORK_AT) + i % SM90_STAGES;
}
template <int DIM> static __device__ __forceinline__ uint64_t *sm90_attn_work_barrier(int i)
{
    return (uint64_t *)(shared_memory() + sm90_attn_layout<DIM>::BARRIERS_AT) + 4 * SM90_STAGES +
           i % SM90_STAGES;
}

/* ---- tiles of a block: the same in all threads of the producer ---- */

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

/* The next tile; behind the last one that again, with no keys. */
static __device__ __forceinline__ sm90_attn_work sm90_attn_next(const struct attn_prefill_call &c,
                                                                sm90_attn_walk *w,
                                                                sm90_attn_work next)
{
    for (;;) {
        if (w->i >= w->end) {
            if (!sm90_attn_next_unit(c, w)) break;
            continue;
        }
        if (!attn_prefill_tile_at(c, w->i, w->kv_head, &next.tile)) {
            w->i += attn_prefill_rows_left(c, w->i);
            continue;
        }
        const int n_tiles = (next.tile.n_keys + SM90_KEYS - 1) / SM90_KEYS;
        w->i += next.tile.n_rows;
        next.begin = c.n_at_once > 0 ? w->segment * SM90_TILES_PER_SEGMENT : 0;
        next.end = c.n_at_once > 0 ? min(n_tiles, next.begin + SM90_TILES_PER_SEGMENT) : n_tiles;
        if (next.begin < next.end) return next;
    }
    next.begin = next.end = 0;
    return next;
}

/* ---- bringing keys and values ---- */

/* Where a thread copies its pieces of a tile from, 64 rows of one block at a time: of every so many
 * rows one of 16 bytes. */
struct sm90_attn_source {
    const char *from[SM90_KEYS / SM90_BLOCK_TOKENS];
    int n_left; /* keys from the thread's first row on */
};

template <int DIM>
static __device__ __forceinline__ sm90_attn_source sm90_attn_find(const struct attn_prefill_call &c,
                                                                  const struct attn_prefill_tile &t,
                                                                  int i_tile, bool values)
{
    constexpr int ROW_PIECES = DIM / CHUNK;
    const int row = (int)threadIdx.x / ROW_PIECES, piece = (int)threadIdx.x % ROW_PIECES;
    sm90_attn_source s;
    s.n_left = t.n_keys - i_tile * SM90_KEYS - row;
    UNROLL for (int part = 0; part < SM90_KEYS / SM90_BLOCK_TOKENS; part++)
    {
        const int first = i_tile * SM90_KEYS + part * SM90_BLOCK_TOKENS;
        s.from[part] = (const char *)c.kv.data + (row * DIM * 2 + piece * 16);
        if (first < t.n_keys)
            s.from[part] += kv_key_offset<DTYPE_BF16>(c.kv, t.table, first, t.kv_head) +
                            (values ? kv_value_offset<DTYPE_BF16>(c.kv) : 0);
    }
    return s;
}

/* Starts the cp.async of the keys or values of a tile; zeros behind the last. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_copy(const struct attn_prefill_call &c,
                                                      const sm90_attn_source &s, unsigned char *to)
{
    constexpr int ROW_PIECES = DIM / CHUNK, ROWS = WARPGROUP / ROW_PIECES;
    const int row = (int)threadIdx.x / ROW_PIECES, piece = (int)threadIdx.x % ROW_PIECES;
    to += piece / 8 * sm90_attn_layout<DIM>::HALF_BYTES + row * SM90_ROW_BYTES +
          (piece % 8 ^ row % 8) * 16;
    UNROLL for (int i = 0; i < SM90_KEYS / ROWS; i++)
    {
        constexpr int PER_PART = SM90_BLOCK_TOKENS / ROWS;
        const bool is_key = i * ROWS < s.n_left;
        copy_async_16(to + i * ROWS * SM90_ROW_BYTES,
                      is_key ? s.from[i / PER_PART] + i % PER_PART * ROWS * DIM * 2
                             : (const char *)c.kv.data,
                      is_key ? 16 : 0);
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
    const sm90_attn_source source = sm90_attn_find<DIM>(c, t, i_tile, values);
    ring->wait_empty();
    sm90_attn_copy<DIM>(c, source, to);
    sm90_attn_announce(pending, ring->full + ring->place());
    ring->n++;
}

/* Announces work number i. Where a tile of keys would have room all of the tile before the one that
 * they are brought for has been multiplied, and the work before the last been taken. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_post(const struct attn_prefill_call &c,
                                                      const sm90_attn_work &w, int i,
                                                      const sm90_attn_ring &keys)
{
    const struct attn_prefill_tile &t = w.tile;
    keys.wait_empty();
    if (threadIdx.x == 0) {
        *sm90_attn_work_at<DIM>(i) = w;
        barrier_arrive(sm90_attn_work_barrier<DIM>(i));
    }
    /* its queries, for which consumers ask when they have finished the tile before */
    if (w.begin < w.end && (int)threadIdx.x < t.n_rows)
        prefetch_l2(query_of(c, t, pair_at(t, (int)threadIdx.x * t.group), DIM),
                    (unsigned)(t.group * DIM) * (unsigned)sizeof(float));
}

/* Keys and values in the order in which consumers take them. */
template <int DIM>
static __device__ __forceinline__ void sm90_attn_produce(const struct attn_prefill_call &c)
{
    sm90_attn_ring keys = sm90_attn_ring_of<DIM>(false), values = sm90_attn_ring_of<DIM>(true);
    sm90_attn_walk walk = {};
    uint64_t *pending = NULL;
    sm90_attn_work next = sm90_attn_next(c, &walk, sm90_attn_work());
    sm90_attn_post<DIM>(c, next, 0, keys);
    for (int i = 1; next.begin < next.end; i++) {
        const sm90_attn_work w = next;
        sm90_attn_bring<DIM>(c, w.tile, &keys, &pending, w.begin, false);
#pragma unroll 1
        for (int j = w.begin; j < w.end; j++) {
            if (j + 1 < w.end) sm90_attn_bring<DIM>(c, w.tile, &keys, &pending, j + 1, false);
            sm90_attn_bring<DIM>(c, w.tile, &values, &pending, j, true);
            if (j > w.begin) continue;
            next = sm90_attn_next(c, &walk, w);
            sm90_attn_post<DIM>(c, next, i, keys);
        }
    }
    copy_async_wait<0>();
    fence_async_proxy();
    if (pending) barrier_arrive(pending);
}
#endif

#endif
