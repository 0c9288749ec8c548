/* gemm_sm90.cuh - tiles of y on the tensor cores of compute capability 9.0, shared by its kernels:
 * bf16 by bf16, f16 by f16, e4m3 by e4m3.
 *
 * A block has a producer warpgroup, which loads stages into a ring in shared memory by cp.async,
 * and two consumers, which multiply 64 or twice 64 rows of x each by wgmma. Stage s uses slot s %
 * STAGES and two barriers: empty (consumers have read it) and full (its copies are complete).
 * Blocks are persistent; the producer finds the tiles and tells the consumers. Every sum runs over
 * k in ascending order, whatever the tile. docs/kernels.md has the pipeline in detail.
 * Thread: device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_SM90_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_SM90_CUH

#include "kernels/cuda/gemm/gemm_call.cuh"
#include "kernels/cuda/gemm/gemm_sm90_store.cuh"
#include "kernels/cuda/gemm/sm90.cuh"

enum {
    K_BYTES = 128, /* of a row, in a stage */
    PIECES = K_BYTES / 16,
    ROWS_AT_ONCE = WARPGROUP / PIECES,
    CONSUMERS = 2, /* warpgroups */
    CONSUMER_WARPS = CONSUMERS * WARPGROUP / WARP,
    SM90_THREADS = (CONSUMERS + 1) * WARPGROUP,
    BLOCK_ROWS = 64,                                      /* of an instruction */
    SM90_LAUNCH_REGISTERS = 65536 / SM90_THREADS / 8 * 8, /* of a thread, by the launch bounds */
    POSITIONS = 8 /* of tiles that the producer is ahead by, and two more */
};

/* A tile's rows and columns: of the y that a block computes at a time. */
struct sm90_position {
    int32_t group, begin, n; /* rows, as in gemm_rows; n < 0: there are no more tiles */
    int32_t column;
};

/* A consumer has HALVES blocks of rows, every other one from its own on. The registers of all
 * threads are within what the block was launched with. BLOCKS: of a cluster, whose producers write
 * into each other's stages (gemm_sm90_multicast.cuh). */
template <int N_HALVES, int N, int N_STAGES, int N_BLOCKS = 1> struct sm90_tile {
    enum {
        BLOCKS = N_BLOCKS,
        HALVES = N_HALVES,
        ROWS = HALVES * CONSUMERS * BLOCK_ROWS,
        COLUMNS = N,
        STAGES = N_STAGES,
        PRODUCER_REGISTERS = HALVES == 2 ? 40 : 88,
        CONSUMER_REGISTERS = HALVES == 2 ? 232 : 208,
        SUMS = N / 2 /* of a thread and half: 64 rows by N columns over 128 threads */,
        X_BYTES = ROWS * K_BYTES,
        STAGE_BYTES = X_BYTES + N * K_BYTES,
        /* of 16 bytes, by a thread for a stage */
        X_COPIES = ROWS / ROWS_AT_ONCE,
        W_COPIES = N / ROWS_AT_ONCE,
        STORE_AT = STAGES * STAGE_BYTES,
        POSITIONS_AT = STORE_AT + CONSUMER_WARPS * STORE_BYTES,
        BARRIERS_AT = POSITIONS_AT + POSITIONS * (int)sizeof(sm90_position),
        SHARED = BARRIERS_AT + 2 * STAGES * 8
    };
    static_assert(
        PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
            (CONSUMERS + 1) * SM90_LAUNCH_REGISTERS,
        "setmaxnreg.inc waits forever for registers that the block was not launched with");
    static_assert(STAGES + 2 <= POSITIONS, "a position is read until its tile is stored");
    static_assert(STAGE_BYTES % 1024 == 0 && N % STORE_COLUMNS == 0,
                  "atoms of the swizzle; columns on their way out");
    static_assert(SHARED <= 227 * 1024, "what a block can have");
};

#if SM90_CODE
template <class T> struct sm90_ring {
    unsigned char *at;
    uint64_t *full, *empty;
    sm90_position *positions;
};

/* Where a block stands in its ring. */
template <class T> struct sm90_pipeline_state {
    int index;
    unsigned parity; /* of this use of the place */
};
template <class T> static __device__ __forceinline__ void advance(sm90_pipeline_state<T> *t)
{
    if (++t->index < T::STAGES) return;
    t->index = 0;
    t->parity ^= 1;
}

/* n_arrivals: at `full`, for a stage. */
template <class T> static __device__ __forceinline__ sm90_ring<T> make_ring(unsigned n_arrivals)
{
    sm90_ring<T> r;
    r.at = shared_memory();
    r.positions = (sm90_position *)(r.at + T::POSITIONS_AT);
    r.full = (uint64_t *)(r.at + T::BARRIERS_AT), r.empty = r.full + T::STAGES;
    if (threadIdx.x == 0) {
        if (shared_address(r.at) % 1024) __trap(); /* the swizzle goes by addresses */
        for (int i = 0; i < T::STAGES; i++)
            barrier_init(r.full + i, n_arrivals),
                barrier_init(r.empty + i, T::BLOCKS * CONSUMER_WARPS);
        if (T::BLOCKS > 1) barrier_init_fence();
    }
    if (T::BLOCKS > 1) cluster_sync();
    else __syncthreads();
    return r;
}

/* ---- tiles ---- */

/* TILES_TOGETHER row tiles by all columns, a column of tiles after the other: blocks that run at
 * the same time share x and W in the second cache. */
enum { SM90_TILES_TOGETHER = 16 };
template <class T>
static __device__ __forceinline__ sm90_position tile_at(const gemm_call &c, int32_t tile,
                                                        int32_t n_row_tiles, int32_t n_column_tiles)
{
    const int32_t first = tile / (SM90_TILES_TOGETHER * n_column_tiles) * SM90_TILES_TOGETHER,
                  in = tile - first * n_column_tiles;
    const int32_t together = min(n_row_tiles - first, (int32_t)SM90_TILES_TOGETHER);
    const gemm_rows rows = rows_of_tile(c, first + in % together, T::ROWS);
    return sm90_position{ rows.group, rows.begin, rows.n, in / together * T::COLUMNS };
}

/* ---- bringing ---- */

static __device__ __forceinline__ int piece_in_stage(int row, int piece)
{
    return row * K_BYTES + (piece ^ row % 8) * 16;
}

/* A thread brings piece tid % 8 of rows tid / 8, + 16, .. of x. The eight threads of a row share
 * the places of their rows, because a thread has too few registers for all of them. */
enum : unsigned { NO_ROW = ~0u };
template <class T> struct sm90_x_source {
    const unsigned char *x;             /* the thread's piece of the stage, of row 0 */
    unsigned at[(T::X_COPIES + 7) / 8]; /* 16-byte pieces from row 0 to copy tid % 8 (+ 8)'s row */
    int n_copies;                       /* of rows that a consumer reads */
};

template <class T>
static __device__ __forceinline__ void find_x(sm90_x_source<T> *s, const gemm_call &c,
                                              const sm90_position &at, int x_element)
{
    const int tid = (int)threadIdx.x % WARPGROUP, row = tid / PIECES, piece = tid % PIECES;
    const gemm_rows rows = { at.group, at.begin, at.n };
    s->x = (const unsigned char *)c.x + piece * 16;
    s->n_copies = (at.n + BLOCK_ROWS - 1) / BLOCK_ROWS * (BLOCK_ROWS / ROWS_AT_ONCE);
#pragma unroll
    for (int i = 0; i < (T::X_COPIES + 7) / 8; i++) {
        const int32_t of = row + (piece + 8 * i) * ROWS_AT_ONCE;
        s->at[i] = of < at.n ? (unsigned)(x_row(c, rows, of) * (size_t)x_element / 16) : NO_ROW;
    }
}

/* Rows of x reach a multiple of K_BYTES. */
template <class T>
static __device__ __forceinline__ void load_x_async(sm90_x_source<T> *s, unsigned char *to)
{
    const int tid = (int)threadIdx.x % WARPGROUP;
    to += piece_in_stage(tid / PIECES, tid % PIECES);
#pragma unroll
    for (int i = 0; i < T::X_COPIES; i++) {
        if (i % 4 == 0 && i >= s->n_copies) break; /* whole blocks */
        const unsigned at = __shfl_sync(0xffffffffu, s->at[i / 8], tid % WARP / 8 * 8 + i % 8);
        /* 16 rows on: as deep in an atom */
        copy_async_16(to + i * ROWS_AT_ONCE * K_BYTES, s->x + (size_t)at * 16,
                      at == NO_ROW ? 0 : 16);
    }
    s->x += K_BYTES;
}

/* Stages of x and W as they are stored. */
template <class T> struct sm90_source {
    enum { ARRIVALS = WARPGROUP + 1 /* the first thread comes for the position, too */ };
    sm90_x_source<T> x;
    const unsigned char *w;
    int32_t w_rows;  /* there are, from the first one's on */
    int32_t w_bytes; /* of a row, from the piece on */

    __device__ __forceinline__ void find_tile(const gemm_call &c, const sm90_position &at,
                                              int x_element)
    {
        const int tid = (int)threadIdx.x % WARPGROUP, row = tid / PIECES, piece = tid % PIECES;
        find_x<T>(&x, c, at, x_element);
        w = c.w + (size_t)at.group * c.w_stride + (size_t)(at.column + row) * c.row_bytes +
            piece * 16;
        w_rows = c.n_out - at.column - row;
        w_bytes = (int32_t)c.row_bytes - piece * 16;
    }

    /* Rows of W may end before x's. */
    __device__ __forceinline__ void load_stage(const gemm_call &c, unsigned char *to,
                                               uint64_t *full)
    {
        const int tid = (int)threadIdx.x % WARPGROUP;
        unsigned char *w_to = to + T::X_BYTES + piece_in_stage(tid / PIECES, tid % PIECES);
        load_x_async<T>(&x, to);
        const int32_t n_rows = w_bytes > 0 ? w_rows : 0;
        const unsigned char *from = w;
#pragma unroll
        for (int i = 0; i < T::W_COPIES; i++) {
            copy_async_16_of_256(w_to + i * ROWS_AT_ONCE * K_BYTES, from,
                                 i * ROWS_AT_ONCE < n_rows ? 16 : 0);
            from += ROWS_AT_ONCE * c.row_bytes;
        }
        w += K_BYTES;
        w_bytes -= K_BYTES;
        announce(full);
    }

    static __device__ __forceinline__ void announce(uint64_t *full)
    {
        barrier_arrive_copies(full);
        if (threadIdx.x == 0) barrier_arrive(full);
    }
};

/* S brings the stages. The position of a tile, and at the end that there are no more, is announced
 * with the first of its stages. */
template <class T, class S>
static __device__ __forceinline__ void produce_tiles(const gemm_call &c, const sm90_ring<T> &ring,
                                                     int32_t n_row_tiles, int32_t n_stages,
                                                     int x_element)
{
    const int32_t n_column_tiles = (c.n_columns + T::COLUMNS - 1) / T::COLUMNS;
    sm90_pipeline_state<T> state = { 0, 0 };
    int n_tiles = 0;
    for (int32_t tile = (int32_t)blockIdx.x; tile < n_row_tiles * n_column_tiles;
         tile += (int32_t)gridDim.x) {
        const sm90_position at = tile_at<T>(c, tile, n_row_tiles, n_column_tiles);
        if (at.n == 0) continue;
        S source;
        source.find_tile(c, at, x_element);
        if (threadIdx.x == 0) ring.positions[n_tiles % POSITIONS] = at;
        n_tiles++;
#pragma unroll 1
        for (int32_t stage = 0; stage < n_stages; stage++) {
            barrier_wait(ring.empty + state.index, state.parity ^ 1);
            __syncwarp();
            source.load_stage(c, ring.at + state.index * T::STAGE_BYTES, ring.full + state.index);
            advance<T>(&state);
        }
    }
    if (threadIdx.x == 0) ring.positions[n_tiles % POSITIONS].n = -1;
    barrier_wait(ring.empty + state.index, state.parity ^ 1);
    S::announce(ring.full + state.index);
}

/* ---- multiplying ---- */

/* All lanes of the warp have read the place, which all blocks of the cluster hear of. */
template <class T>
static __device__ __forceinline__ void release_stage(const sm90_ring<T> &ring, int place)
{
    const unsigned lane = threadIdx.x % WARP;
    __syncwarp();
    if (T::BLOCKS > 1) {
        if (lane < T::BLOCKS) barrier_arrive_at(ring.empty + place, lane);
    } else if (lane == 0) barrier_arrive(ring.empty + place);
}

/* Waits for a stage, which cp.async wrote. */
template <class T>
static __device__ __forceinline__ void wait_for_stage(const sm90_ring<T> &ring,
                                                      const sm90_pipeline_state<T> &state)
{
    barrier_wait(ring.full + state.index, state.parity);
    fence_async_proxy();
    __syncwarp();
}

/* Stages of a tile in which this warpgroup has no rows. */
template <class T>
static __device__ __forceinline__ void skip_tile(const sm90_ring<T> &ring,
                                                 sm90_pipeline_state<T> *state, int32_t n_stages)
{
    for (int32_t stage = 0; stage < n_stages; stage++) {
        barrier_wait(ring.full + state->index, state->parity);
        release_stage<T>(ring, state->index);
        advance<T>(state);
    }
}

/* A place's operands, as descriptors: the first rows of x of this warpgroup, and W. */
struct sm90_operands {
    uint64_t x, w;
};
template <class T>
static __device__ __forceinline__ sm90_operands first_operands(const sm90_ring<T> &ring,
                                                               int warpgroup)
{
    const unsigned at = shared_address(ring.at);
    return sm90_operands{ wgmma_descriptor(at + (unsigned)warpgroup * BLOCK_ROWS * K_BYTES),
                          wgmma_descriptor(at + T::X_BYTES) };
}
template <class T>
static __device__ __forceinline__ sm90_operands operands_at(const sm90_operands &first, int place)
{
    const uint64_t on = (uint64_t)((unsigned)place * (T::STAGE_BYTES >> 4));
    return sm90_operands{ first.x + on, first.w + on };
}

enum { OTHER_HALF = CONSUMERS * BLOCK_ROWS * K_BYTES / 16 /* of a descriptor of x */ };

/* What this warp stores of a tile. */
template <class T>
static __device__ __forceinline__ sm90_result result_of(const sm90_ring<T> &ring,
                                                        const sm90_position *at, int warpgroup,
                                                        int half)
{
    const int warp = not_before((int)threadIdx.x) / WARP % 4;
    const int32_t row = (half * CONSUMERS + warpgroup) * BLOCK_ROWS + warp * STORE_ROWS;
    return sm90_result{ { at->group, at->begin + row, min(at->n - row, (int32_t)STORE_ROWS) },
                        at->column,
                        ring.at + T::STORE_AT + (warpgroup * 4 + warp) * STORE_BYTES };
}

/* What a multiplier of a tile has. multiply<H>(sums, state) makes the sums of the first H
 * halves. */
template <class T> struct sm90_multiplier {
    const gemm_call &c;
    const sm90_position *at;
    const sm90_ring<T> &ring;
    const sm90_operands &first;
    int32_t n_stages;
    int warpgroup;
};

/* All tiles of a block. */
template <class T, class M>
static __device__ __forceinline__ void consume_tiles(const gemm_call &c, const sm90_ring<T> &ring,
                                                     int32_t n_stages, int warpgroup)
{
    const sm90_operands first = first_operands<T>(ring, warpgroup);
    sm90_pipeline_state<T> state = { 0, 0 };
    for (int n_tiles = 0;; n_tiles++) {
        barrier_wait(ring.full + state.index, state.parity);
        const sm90_position *at = ring.positions + n_tiles % POSITIONS;
        const int32_t n = __shfl_sync(0xffffffffu, at->n, 0);
        if (n < 0) return;
        if (n <= warpgroup * BLOCK_ROWS) {
            skip_tile<T>(ring, &state, n_stages);
            continue;
        }
        const M m = { { c, at, ring, first, n_stages, warpgroup } };
        float sums[T::HALVES][T::SUMS];
        if (T::HALVES == 2 && n > (CONSUMERS + warpgroup) * BLOCK_ROWS)
            m.template multiply<T::HALVES>(sums, &state);
        else m.template multiply<1>(sums, &state);
#pragma unroll
        for (int half = 0; half < T::HALVES; half++)
            store_result<M::LAYOUT>(c, result_of<T>(ring, at, warpgroup, half), sums[half]);
    }
}

/* A kernel's body. */
template <class T, class S, class M>
static __device__ __forceinline__ void sm90_body(const gemm_call &c, int32_t n_row_tiles,
                                                 int32_t n_stages, int x_element)
{
    const sm90_ring<T> ring = make_ring<T>(S::ARRIVALS);
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<T::PRODUCER_REGISTERS>();
        produce_tiles<T, S>(c, ring, n_row_tiles, n_stages, x_element);
    } else {
        warpgroup_reg_alloc<T::CONSUMER_REGISTERS>();
        consume_tiles<T, M>(c, ring, n_stages, warpgroup - 1);
    }
}
/* ---- 16 bits by 16 bits (F: the layout of W; f16 for F16, otherwise bf16) ---- */

template <enum gemm_weight_layout F, int N>
static __device__ __forceinline__ void wgmma_of(float (&sums)[N], uint64_t x, uint64_t w, bool add)
{
    if (F == GEMM_F16) wgmma_f16(sums, x, w, add);
    else wgmma_bf16(sums, x, w, add);
}

template <enum gemm_weight_layout F, class T> struct multiplier : sm90_multiplier<T> {
    static const enum gemm_weight_layout LAYOUT = F;

    /* One stage: four steps of 16 k. */
    template <int H>
    static __device__ __forceinline__ void begin_stage(float (&sums)[T::HALVES][T::SUMS],
                                                       const sm90_operands &o, bool first)
    {
#pragma unroll
        for (int half = 0; half < H; half++) wgmma_fence_operand(sums[half]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_BYTES / 32; k++)
#pragma unroll
            for (int half = 0; half < H; half++)
                wgmma_of<F>(sums[half], o.x + (uint64_t)(k * WGMMA_K_STEP + half * OTHER_HALF),
                            o.w + (uint64_t)(k * WGMMA_K_STEP), !first || k > 0);
        wgmma_commit();
#pragma unroll
        for (int half = 0; half < H; half++) wgmma_fence_operand(sums[half]);
    }

    /* The ring slot of a stage is released once the wgmma of that stage have completed, after those
     * of the next stage were issued. */
    template <int H>
    __device__ __forceinline__ void multiply(float (&sums)[T::HALVES][T::SUMS],
                                             sm90_pipeline_state<T> *state) const
    {
        int before = state->index;
#pragma unroll 1
        for (int32_t stage = 0; stage < this->n_stages; stage++) {
            wait_for_stage<T>(this->ring, *state);
            begin_stage<H>(sums, operands_at<T>(this->first, state->index), stage == 0);
            wgmma_wait<1>();
            if (stage > 0) release_stage<T>(this->ring, before);
            before = state->index;
            advance<T>(state);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int half = 0; half < H; half++) wgmma_fence_operand(sums[half]);
        release_stage<T>(this->ring, before);
    }
};
#endif

/* ---- the host ---- */

struct sm90_device {
    bool supported;  /* it is of compute capability 9.0 and this program has code for it */
    bool multicasts; /* gemm_sm90_multicast.cuh */
    bool shares;     /* and gemm_sm90_choose takes its tiles */
    int32_t n_sms;
};
/* Of the device that is current when it is first asked: a process computes on one. */
const sm90_device &sm90_this_device();

static inline size_t sm90_tiles(const gemm_call &c, int32_t rows, int32_t columns)
{
    return (size_t)n_tiles_at_most(c, rows) * blocks_for((size_t)c.n_columns, (size_t)columns);
}

template <class T>
static inline cudaError_t launch_sm90(cudaStream_t stream, void (*kernel)(const gemm_call, int32_t),
                                      const gemm_call &c)
{
    const size_t n = sm90_tiles(c, T::ROWS, T::COLUMNS), n_sms = (size_t)sm90_this_device().n_sms;
    if (n == 0) return cudaSuccess; /* fewer rows than a group of this kernel has */
    if (n > INT32_MAX) return cudaErrorInvalidValue;
    const dim3 grid((unsigned)(n < n_sms ? n : n_sms));
    return launch(stream, kernel, grid, dim3(SM90_THREADS), (size_t)T::SHARED, c,
                  (int32_t)n_tiles_at_most(c, T::ROWS));
}

#endif
