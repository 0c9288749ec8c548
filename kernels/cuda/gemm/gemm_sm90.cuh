/* gemm_sm90.cuh - tiles of y on the tensor cores of compute capability 9.0, shared by its kernels:
 * bf16 by bf16, f16 by f16, e4m3 by e4m3.
 *
 * A block has three warpgroups: a producer loads stages into a ring in shared memory by cp.async,
 * two consumers multiply 64 rows of x each by wgmma. Stage s uses slot s % STAGES and two barriers:
 * empty (consumers have read it) and full (its copies are complete and fenced). Blocks are
 * persistent. Every sum runs over k in ascending order, whatever the tile. docs/kernels.md has the
 * pipeline in detail.
 * Thread: device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_SM90_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_SM90_CUH

#include "kernels/cuda/gemm/gemm_call.cuh"
#include "kernels/cuda/gemm/sm90.cuh"

enum {
    SM90_TILE_ROWS = 128,
    SM90_THREADS = 3 * WARPGROUP,
    SM90_CONSUMER_WARPS = 8 /* warps */,
    K_BYTES = 128, /* of a row, in a stage */
    PIECES = K_BYTES / 16,
    ROWS_AT_ONCE = WARPGROUP / PIECES,
    /* of a warp's results, on their way out */
    STORE_COLUMNS = 64,
    STORE_BYTES = 16 * STORE_COLUMNS * 4,
    PRODUCER_REGISTERS = 72,
    CONSUMER_REGISTERS = 216 /* of a thread: 128 * 72 + 256 * 216 are
                              * within an SM's 65,536 */
};

template <int N, int N_STAGES, int BEHIND> struct sm90_tile {
    enum {
        COLUMNS = N,
        STAGES = N_STAGES,
        LAG = BEHIND,
        SUMS = N / 2 /* of a thread: 64 rows by N columns over 128 threads */,
        X_BYTES = SM90_TILE_ROWS * K_BYTES,
        STAGE_BYTES = X_BYTES + N * K_BYTES,
        /* of 16 bytes, by a thread for a stage */
        X_COPIES = SM90_TILE_ROWS / ROWS_AT_ONCE,
        W_COPIES = N / ROWS_AT_ONCE,
        STORE_AT = STAGES * STAGE_BYTES,
        BARRIERS_AT = STORE_AT + SM90_CONSUMER_WARPS * STORE_BYTES,
        SHARED = BARRIERS_AT + 2 * STAGES * 8
    };
    static_assert(LAG >= 1 && LAG < STAGES - 1, "above");
    static_assert(STAGE_BYTES % 1024 == 0 && N % STORE_COLUMNS == 0,
                  "atoms of the swizzle; columns on their way out");
    static_assert(SHARED <= 227 * 1024, "what a block can have");
};

#if SM90_CODE
template <class T> struct sm90_ring {
    unsigned char *at;
    uint64_t *full, *empty;
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

template <class T> static __device__ __forceinline__ sm90_ring<T> make_ring()
{
    sm90_ring<T> r;
    r.at = shared_memory();
    r.full = (uint64_t *)(r.at + T::BARRIERS_AT), r.empty = r.full + T::STAGES;
    if (threadIdx.x == 0) {
        if (shared_address(r.at) % 1024) __trap(); /* the swizzle goes by addresses */
        for (int i = 0; i < T::STAGES; i++)
            barrier_init(r.full + i, WARPGROUP), barrier_init(r.empty + i, SM90_CONSUMER_WARPS);
    }
    __syncthreads();
    return r;
}

/* ---- tiles ---- */

/* TILES_TOGETHER row tiles by all columns, a column of tiles after the other: blocks that run at
 * the same time share x and W in the second cache. */
enum { SM90_TILES_TOGETHER = 16 };
struct sm90_tile_position {
    gemm_rows rows;
    int32_t column;
};
template <class T>
static __device__ __forceinline__ sm90_tile_position tile_at(const gemm_call &c, int32_t tile,
                                                             int32_t n_row_tiles,
                                                             int32_t n_column_tiles)
{
    const int32_t first = tile / (SM90_TILES_TOGETHER * n_column_tiles) * SM90_TILES_TOGETHER,
                  in = tile - first * n_column_tiles;
    const int32_t together = min(n_row_tiles - first, (int32_t)SM90_TILES_TOGETHER);
    return sm90_tile_position{ rows_of_tile(c, first + in % together, SM90_TILE_ROWS),
                               in / together * T::COLUMNS };
}

/* ---- bringing ---- */

static __device__ __forceinline__ int piece_in_stage(int row, int piece)
{
    return row * K_BYTES + (piece ^ row % 8) * 16;
}

/* A thread brings piece tid % 8 of rows tid / 8, + 16, ... */
template <class T> struct sm90_source {
    const unsigned char *x[T::X_COPIES];
    const unsigned char *w;
    unsigned x_rows; /* bit i: there is a row for copy i; otherwise zeros */
    int32_t w_rows;  /* there are, from the first one's on */
    int32_t w_bytes; /* of a row, from the piece on */
};

template <class T>
static __device__ __forceinline__ void find_tile(sm90_source<T> *s, const gemm_call &c,
                                                 const sm90_tile_position &at, int x_element)
{
    const int tid = (int)threadIdx.x % WARPGROUP, row = tid / PIECES, piece = tid % PIECES;
    s->x_rows = 0;
#pragma unroll
    for (int i = 0; i < T::X_COPIES; i++) {
        s->x[i] = (const unsigned char *)c.x + piece * 16;
        if (row + i * ROWS_AT_ONCE >= at.rows.n) continue;
        s->x[i] += x_row(c, at.rows, row + i * ROWS_AT_ONCE) * (size_t)x_element;
        s->x_rows |= 1u << i;
    }
    s->w = c.w + (size_t)at.rows.group * c.w_stride + (size_t)(at.column + row) * c.row_bytes +
           piece * 16;
    s->w_rows = c.n_out - at.column - row;
    s->w_bytes = (int32_t)c.row_bytes - piece * 16;
}

/* Rows of x reach a multiple of K_BYTES; rows of W may end before. */
template <class T>
static __device__ __forceinline__ void load_stage_async(sm90_source<T> *s, const gemm_call &c,
                                                        unsigned char *to)
{
    const int tid = (int)threadIdx.x % WARPGROUP, row = tid / PIECES, piece = tid % PIECES;
    unsigned char *x_to = to + piece_in_stage(row, piece), *w_to = x_to + T::X_BYTES;
#pragma unroll
    for (int i = 0; i < T::X_COPIES; i++) {
        /* 16 rows on: as deep in an atom */
        copy_async_16(x_to + i * ROWS_AT_ONCE * K_BYTES, s->x[i], s->x_rows >> i & 1u ? 16 : 0);
        s->x[i] += K_BYTES;
    }
    const int32_t n_rows = s->w_bytes > 0 ? s->w_rows : 0;
    const unsigned char *w = s->w;
#pragma unroll
    for (int i = 0; i < T::W_COPIES; i++) {
        copy_async_16(w_to + i * ROWS_AT_ONCE * K_BYTES, w, i * ROWS_AT_ONCE < n_rows ? 16 : 0);
        w += ROWS_AT_ONCE * c.row_bytes;
    }
    s->w += K_BYTES;
    s->w_bytes -= K_BYTES;
}

/* Announces this thread's part of the oldest complete stage. */
template <class T>
static __device__ __forceinline__ void commit_stage(const sm90_ring<T> &ring, int *place)
{
    fence_async_proxy();
    barrier_arrive(ring.full + *place);
    if (++*place == T::STAGES) *place = 0;
}

template <class T>
static __device__ __forceinline__ void produce_tiles(const gemm_call &c, const sm90_ring<T> &ring,
                                                     int32_t n_row_tiles, int32_t n_stages,
                                                     int x_element)
{
    const int32_t n_column_tiles = (c.n_columns + T::COLUMNS - 1) / T::COLUMNS;
    sm90_pipeline_state<T> state = { 0, 0 };
    int n_waiting = 0, to_commit = 0;
    for (int32_t tile = (int32_t)blockIdx.x; tile < n_row_tiles * n_column_tiles;
         tile += (int32_t)gridDim.x) {
        const sm90_tile_position at = tile_at<T>(c, tile, n_row_tiles, n_column_tiles);
        if (at.rows.n == 0) continue;
        sm90_source<T> source;
        find_tile<T>(&source, c, at, x_element);
#pragma unroll 1
        for (int32_t stage = 0; stage < n_stages; stage++) {
            barrier_wait(ring.empty + state.index, state.parity ^ 1);
            load_stage_async<T>(&source, c, ring.at + state.index * T::STAGE_BYTES);
            copy_async_commit();
            advance<T>(&state);
            if (n_waiting < T::LAG) {
                n_waiting++;
                continue;
            }
            copy_async_wait<T::LAG>();
            commit_stage<T>(ring, &to_commit);
        }
    }
    copy_async_wait<0>();
    for (; n_waiting; n_waiting--) commit_stage<T>(ring, &to_commit);
}

/* ---- multiplying ---- */

/* All lanes of the warp have read the place. */
template <class T>
static __device__ __forceinline__ void release_stage(const sm90_ring<T> &ring, int place)
{
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(ring.empty + place);
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

/* A place's operands, as descriptors: this warpgroup's rows of x, and W. */
struct sm90_operands {
    uint64_t x, w;
};
template <class T>
static __device__ __forceinline__ sm90_operands first_operands(const sm90_ring<T> &ring,
                                                               int warpgroup)
{
    const unsigned at = shared_address(ring.at);
    return sm90_operands{ wgmma_descriptor(at + (unsigned)warpgroup * 64 * K_BYTES),
                          wgmma_descriptor(at + T::X_BYTES) };
}
template <class T>
static __device__ __forceinline__ sm90_operands operands_at(const sm90_operands &first, int place)
{
    const uint64_t on = (uint64_t)((unsigned)place * (T::STAGE_BYTES >> 4));
    return sm90_operands{ first.x + on, first.w + on };
}

/* ---- results ---- */

/* A warp's room: column k of row r at k ^ 8 (r % 4), so that lanes of 4 rows write to banks of
 * their own and reading along a row does too. */
static __device__ __forceinline__ float2 *staged_pair(unsigned char *room, int row, int column)
{
    return (float2 *)((float *)room + row * STORE_COLUMNS + (column ^ row % 4 * 8));
}

/* Can pairs of y's columns be written 8 bytes at a time? */
static __device__ __forceinline__ bool y_by_pairs(const gemm_call &c)
{
    return (c.epilogue == GEMM_STORE || c.epilogue == GEMM_ADD) && (uintptr_t)c.y % 8 == 0 &&
           (c.y_stride | c.y_group) % 2 == 0;
}

enum { STORE_ROWS = 16 };

/* A pair of columns of STORE_ROWS rows, of which there are n_rows. What y holds is read for all of
 * them before anything is written, as the way to memory is long. The values are those of
 * store_pair. */
static __device__ __forceinline__ void store_whole_pairs(const gemm_call &c, const gemm_rows &rows,
                                                         int32_t row, int32_t n_rows,
                                                         int32_t column, int lane,
                                                         unsigned char *room)
{
    float *y = (float *)c.y + (size_t)(rows.begin + row) * c.y_stride +
               (size_t)rows.group * c.y_group + column;
    const float2 bias = make_float2(bias_of(c, column), bias_of(c, column + 1));
    float2 on[STORE_ROWS];
#pragma unroll
    for (int i = 0; i < STORE_ROWS; i++)
        if (c.epilogue == GEMM_ADD && i < n_rows)
            on[i] = *(const float2 *)(y + (size_t)i * c.y_stride);
#pragma unroll
    for (int i = 0; i < STORE_ROWS; i++) {
        if (i >= n_rows) break;
        float2 v = *staged_pair(room, i, 2 * lane);
        v.x = __fadd_rn(v.x, bias.x), v.y = __fadd_rn(v.y, bias.y);
        if (c.epilogue == GEMM_ADD) v.x = __fadd_rn(on[i].x, v.x), v.y = __fadd_rn(on[i].y, v.y);
        *(float2 *)(y + (size_t)i * c.y_stride) = v;
    }
}

/* 16 rows of y from `row` on; lanes have a pair of columns each. */
static __device__ __forceinline__ void store_staged(const gemm_call &c, const gemm_rows &rows,
                                                    int32_t row, int32_t n_rows, int32_t column,
                                                    int lane, unsigned char *room, bool by_pairs)
{
    column += 2 * lane;
    if (column >= c.n_columns) return;
    if (by_pairs && column + 1 < c.n_out) {
        store_whole_pairs(c, rows, row, n_rows, column, lane, room);
        return;
    }
#pragma unroll 2
    for (int32_t i = 0; i < n_rows; i++) {
        const float2 v = *staged_pair(room, i, 2 * lane);
        store_pair(c, rows, row + i, column, v.x, v.y);
    }
}

/* A thread's sums are of rows lane / 4 and 8 on of its warp's 16, of columns 2 (lane % 4) and the
 * next of every 8. */
template <class T>
static __device__ __forceinline__ void store_sums(const gemm_call &c, const sm90_ring<T> &ring,
                                                  const sm90_tile_position &at, int warpgroup,
                                                  const float (&sums)[T::SUMS], bool by_pairs)
{
    const int warp = (int)threadIdx.x / WARP % 4;
    const int32_t row = warpgroup * 64 + warp * STORE_ROWS,
                  n_rows = min(at.rows.n - row, (int32_t)STORE_ROWS);
    unsigned char *room = ring.at + T::STORE_AT + (warpgroup * 4 + warp) * STORE_BYTES;
#pragma unroll
    for (int first = 0; first < T::COLUMNS; first += STORE_COLUMNS) {
        const int lane = not_before((int)threadIdx.x) % WARP;
#pragma unroll
        for (int i = 0; i < STORE_COLUMNS / 2; i += 2) {
            const int at_sum = first / 2 + i;
            *staged_pair(room, lane / 4 + i / 2 % 2 * 8,
                         i / 4 * 8 + lane % 4 * 2) = make_float2(sums[at_sum], sums[at_sum + 1]);
        }
        __syncwarp();
        store_staged(c, at.rows, row, n_rows, at.column + first, lane, room, by_pairs);
        __syncwarp(); /* before the room is written again */
    }
}

/* All tiles of a block; M::multiply makes a tile's sums. */
template <class T, class M>
static __device__ __forceinline__ void consume_tiles(const gemm_call &c, const sm90_ring<T> &ring,
                                                     int32_t n_row_tiles, int32_t n_stages,
                                                     int warpgroup)
{
    const int32_t n_column_tiles = (c.n_columns + T::COLUMNS - 1) / T::COLUMNS;
    const bool by_pairs = y_by_pairs(c);
    const sm90_operands first = first_operands<T>(ring, warpgroup);
    sm90_pipeline_state<T> state = { 0, 0 };
    for (int32_t tile = (int32_t)blockIdx.x; tile < n_row_tiles * n_column_tiles;
         tile += (int32_t)gridDim.x) {
        const sm90_tile_position at = tile_at<T>(c, tile, n_row_tiles, n_column_tiles);
        if (at.rows.n == 0) continue;
        if (at.rows.n <= warpgroup * 64) {
            skip_tile<T>(ring, &state, n_stages);
            continue;
        }
        float sums[T::SUMS];
        M::multiply(sums, c, at, ring, &state, first, n_stages, warpgroup);
        store_sums<T>(c, ring, at, warpgroup, sums, by_pairs);
    }
}

/* A kernel's body. */
template <class T, class M>
static __device__ __forceinline__ void sm90_body(const gemm_call &c, int32_t n_row_tiles,
                                                 int32_t n_stages, int x_element)
{
    const sm90_ring<T> ring = make_ring<T>();
    const int warpgroup = __shfl_sync(0xffffffffu, (int)threadIdx.x / WARPGROUP, 0);
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        produce_tiles<T>(c, ring, n_row_tiles, n_stages, x_element);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume_tiles<T, M>(c, ring, n_row_tiles, n_stages, warpgroup - 1);
    }
}
#endif

/* ---- the host ---- */

struct sm90_device {
    bool supported; /* it is of compute capability 9.0 and this program has code for it */
    int32_t n_sms;
};
/* Of the device that is current when it is first asked: a process computes on one. */
const sm90_device &sm90_this_device();

static inline size_t sm90_tiles(const gemm_call &c, int32_t columns)
{
    return (size_t)n_tiles_at_most(c, SM90_TILE_ROWS) *
           blocks_for((size_t)c.n_columns, (size_t)columns);
}

template <class T>
static inline cudaError_t launch_sm90(cudaStream_t stream, void (*kernel)(const gemm_call, int32_t),
                                      const gemm_call &c)
{
    const size_t n = sm90_tiles(c, T::COLUMNS), n_sms = (size_t)sm90_this_device().n_sms;
    if (n == 0) return cudaSuccess; /* fewer rows than a group of this kernel has */
    if (n > INT32_MAX) return cudaErrorInvalidValue;
    const dim3 grid((unsigned)(n < n_sms ? n : n_sms));
    return launch(stream, kernel, grid, dim3(SM90_THREADS), (size_t)T::SHARED, c,
                  (int32_t)n_tiles_at_most(c, SM90_TILE_ROWS));
}

#endif
