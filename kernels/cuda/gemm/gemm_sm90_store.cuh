/* gemm_sm90_store.cuh - how a warp's sums of a tile, 16 rows by COLUMNS in registers, become y.
 *
 * A thread's sums are of rows lane / 4 and 8 on, of columns 2 (lane % 4) and the next of every 8.
 * They leave through the warp's room in shared memory, 16 bytes at a time, while the tensor cores
 * of the SM wait: so SwiGLU is computed in registers, where gate and up are neighbours, and what
 * can be arranged so is written without a branch per number. Everything else goes the slow way,
 * store_pair. Thread: device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_SM90_STORE_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_SM90_STORE_CUH

#include "kernels/cuda/gemm/gemm_call.cuh"
#include "kernels/cuda/gemm/sm90.cuh"

enum {
    STORE_COLUMNS = 64,
    STORE_ROWS = 16,
    STORE_BYTES = STORE_ROWS * STORE_COLUMNS * 4 /* a warp's room */
};

#if SM90_CODE
/* A warp's part of a tile. */
struct sm90_result {
    gemm_rows rows; /* of the warp */
    int32_t column; /* the first one */
    unsigned char *room;
};

/* Column k of row r is at k ^ 8 (r % 4), so that lanes of 4 rows write to banks of their own and
 * reading along a row does too. */
static __device__ __forceinline__ float *staged(unsigned char *room, int row, int column)
{
    return (float *)room + row * STORE_COLUMNS + (column ^ row % 4 * 8);
}

template <int N>
static __device__ __forceinline__ void stage_columns(unsigned char *room, const float (&sums)[N],
                                                     int first)
{
    const int lane = not_before((int)threadIdx.x) % WARP;
#pragma unroll
    for (int i = 0; i < STORE_COLUMNS / 2; i += 2)
        *(float2 *)staged(room, lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2) = make_float2(
            sums[first / 2 + i], sums[first / 2 + i + 1]);
    __syncwarp();
}

/* ---- the slow way ---- */

template <enum gemm_weight_layout F>
static __device__ __forceinline__ void store_by_pairs(const gemm_call &c, const sm90_result &r,
                                                      int first)
{
    const int lane = not_before((int)threadIdx.x) % WARP;
    const int32_t column = r.column + first + 2 * lane;
    if (column >= c.n_columns) return;
    const float scale[2] = { column_scale<F>(c, r.rows.group, column),
                             column_scale<F>(c, r.rows.group, column + 1) };
#pragma unroll 1
    for (int32_t i = 0; i < r.rows.n; i++) {
        const float2 v = *(const float2 *)staged(r.room, i, 2 * lane);
        store_pair(c, r.rows, i, column, __fmul_rn(v.x, scale[0]), __fmul_rn(v.y, scale[1]));
    }
}

/* ---- y in f32, and STORE_BF16 ---- */

/* Can y be written 16 bytes at a time? */
static __device__ __forceinline__ bool y_is_aligned(const gemm_call &c, int per_16_bytes)
{
    return (uintptr_t)c.y % 16 == 0 && (c.y_stride | c.y_group) % (size_t)per_16_bytes == 0;
}

/* Four columns' sums with their scales; without, they are not read. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ float4 scaled_quad(const float4 &v, const float4 &by)
{
    if (F != GEMM_W8 && F != GEMM_W4) return v;
    return make_float4(__fmul_rn(v.x, by.x), __fmul_rn(v.y, by.y), __fmul_rn(v.z, by.z),
                       __fmul_rn(v.w, by.w));
}
static __device__ __forceinline__ float4 add_quads(const float4 &a, const float4 &b)
{
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z),
                       __fadd_rn(a.w, b.w));
}

/* STORE_COLUMNS columns of all rows, without bias; a lane has four columns of every other row. The
 * values are those of store_pair. */
template <enum gemm_weight_layout F, enum gemm_epilogue E>
static __device__ __forceinline__ void store_quads(const gemm_call &c, const sm90_result &r,
                                                   int first)
{
    enum { LANES = STORE_COLUMNS / 4, STEP = WARP / LANES, TOGETHER = 4 };
    const int lane = not_before((int)threadIdx.x) % WARP, row = lane / LANES,
              quad = lane % LANES * 4;
    const int32_t column = r.column + first + quad;
    float4 scale = make_float4(1, 1, 1, 1);
    if (F == GEMM_W8 || F == GEMM_W4)
        scale = *(const float4 *)(scales_of(c, r.rows.group) + column);
    const size_t y_at = (size_t)(r.rows.begin + row) * c.y_stride +
                        (size_t)r.rows.group * c.y_group + column;
#pragma unroll
    for (int i = 0; i < STORE_ROWS / STEP; i += TOGETHER) {
        float4 on[TOGETHER] = {};
#pragma unroll
        for (int j = 0; j < TOGETHER; j++)
            if (E == GEMM_ADD && row + (i + j) * STEP < r.rows.n)
                on[j] = *(const float4 *)((const float *)c.y + y_at +
                                          (size_t)((i + j) * STEP) * c.y_stride);
#pragma unroll
        for (int j = 0; j < TOGETHER; j++) {
            const int at = row + (i + j) * STEP;
            if (at >= r.rows.n) break;
            float4 v = scaled_quad<F>(*(const float4 *)staged(r.room, at, quad), scale);
            const size_t y_at_row = y_at + (size_t)((i + j) * STEP) * c.y_stride;
            if (E == GEMM_ADD) v = add_quads(on[j], v);
            if (E == GEMM_STORE_BF16)
                *(uint2 *)((uint16_t *)c.y + y_at_row) = make_uint2(round_bf16x2(v.x, v.y),
                                                                    round_bf16x2(v.z, v.w));
            else *(float4 *)((float *)c.y + y_at_row) = v;
        }
    }
}

/* E: quads of this epilogue; GEMM_SILU: the slow way, of any. */
template <enum gemm_weight_layout F, enum gemm_epilogue E, int N>
static __device__ __forceinline__ void store_columns(const gemm_call &c, const sm90_result &r,
                                                     const float (&sums)[N])
{
#pragma unroll
    for (int first = 0; first < 2 * N; first += STORE_COLUMNS) {
        stage_columns(r.room, sums, first);
        if (E == GEMM_SILU) store_by_pairs<F>(c, r, first);
        else store_quads<F, E>(c, r, first);
        __syncwarp(); /* before the room is written again */
    }
}

/* ---- SwiGLU in 16 bits ---- */

/* Within some units in the last place of silu; the result is rounded to 16 bits. */
static __device__ __forceinline__ float silu_approximate(float x)
{
    return __fdividef(x, 1.0f + exp2_fast(x * -1.4426950408889634f));
}

/* Gate's and up's sums of column and column + 1. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ float swiglu(const gemm_call &c, int32_t group, int32_t column,
                                               float gate, float up)
{
    if (F == GEMM_W8 || F == GEMM_W4) {
        const float2 scale = *(const float2 *)(scales_of(c, group) + column);
        gate *= scale.x, up *= scale.y;
    }
    return silu_approximate(gate) * up;
}

/* Word `word` of a row of results: 16-byte pieces are exchanged, so that lanes use many banks. */
static __device__ __forceinline__ unsigned *staged_word(unsigned char *room, int row, int word)
{
    return (unsigned *)room + row * STORE_COLUMNS + (word ^ row % 8 * 4);
}

/* A lane has a result of each of its two rows for every 8 columns; neighbours exchange one, so that
 * a lane has two of one row: the even one of the first row, the odd one of the other. */
template <enum gemm_weight_layout F, int N>
static __device__ __forceinline__ void stage_swiglu(const gemm_call &c, const sm90_result &r,
                                                    const float (&sums)[N])
{
    const int lane = not_before((int)threadIdx.x) % WARP, odd = lane & 1;
#pragma unroll
    for (int i = 0; i < N; i += 4) {
        const int32_t column = r.column + 2 * i + lane % 4 * 2;
        const float first = swiglu<F>(c, r.rows.group, column, sums[i], sums[i + 1]),
                    second = swiglu<F>(c, r.rows.group, column, sums[i + 2], sums[i + 3]);
        const unsigned both = F == GEMM_F16 ? pack_f16(first, second) : round_bf16x2(first, second);
        const unsigned other = __shfl_xor_sync(0xffffffffu, both, 1);
        *staged_word(r.room, lane / 4 + odd * 8, i / 2 + lane % 4 / 2) =
            odd ? __byte_perm(other, both, 0x7632) : __byte_perm(both, other, 0x5410);
    }
    __syncwarp();
}

template <enum gemm_weight_layout F, int N>
static __device__ __forceinline__ void store_swiglu(const gemm_call &c, const sm90_result &r,
                                                    const float (&sums)[N])
{
    enum { PIECES_OF_ROW = N / 8 };
    static_assert(N / 2 <= STORE_COLUMNS && STORE_ROWS * PIECES_OF_ROW % WARP == 0,
                  "words of a row of the warp's room; pieces of a lane");
    stage_swiglu<F>(c, r, sums);
    const int lane = not_before((int)threadIdx.x) % WARP;
    uint16_t *y = (uint16_t *)c.y + (size_t)r.rows.begin * c.y_stride +
                  (size_t)r.rows.group * c.y_group + r.column / 2;
#pragma unroll
    for (int i = 0; i < STORE_ROWS * PIECES_OF_ROW; i += WARP) {
        const int row = (i + lane) / PIECES_OF_ROW, piece = (i + lane) % PIECES_OF_ROW;
        if (row >= r.rows.n) break;
        *(uint4 *)(y + (size_t)row * c.y_stride +
                   piece * 8) = *(const uint4 *)staged_word(r.room, row, piece * 4);
    }
    __syncwarp(); /* before the room is written again */
}

/* ---- bf16 ---- */

/* All columns' sums, rounded, PIECE of them at a time: a row's are the room's row. */
template <int N>
static __device__ __forceinline__ void store_bf16(const gemm_call &c, const sm90_result &r,
                                                  const float (&sums)[N])
{
    enum { PIECE = 2 * STORE_COLUMNS, ROWS_AT_ONCE = WARP * 8 / PIECE, TOGETHER = 4 };
    static_assert(2 * N % PIECE == 0, "whole rows of the room");
    const int lane = not_before((int)threadIdx.x) % WARP, row = lane / (WARP / ROWS_AT_ONCE),
              at = lane % (WARP / ROWS_AT_ONCE);
    uint16_t *y = (uint16_t *)c.y + (size_t)(r.rows.begin + row) * c.y_stride +
                  (size_t)r.rows.group * c.y_group + r.column + at * 8;
#pragma unroll
    for (int first = 0; first < N; first += PIECE / 2) {
#pragma unroll
        for (int i = 0; i < PIECE / 2; i += 2) {
            /* staged_word of row lane / 4 (+ 8), word i / 4 * 4 + lane % 4: pieces of eight words
             * share an address, as an exchange of pieces leaves bit 5 of a word alone */
            unsigned *const to = (unsigned *)r.room + lane / 4 * STORE_COLUMNS +
                                 (lane ^ i / 4 % 8 * 4);
            to[i / 32 * 32 + i / 2 % 2 * 8 * STORE_COLUMNS] = round_bf16x2(sums[first + i],
                                                                           sums[first + i + 1]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < STORE_ROWS; i += ROWS_AT_ONCE * TOGETHER) {
            uint4 v[TOGETHER];
#pragma unroll
            for (int j = 0; j < TOGETHER; j++)
                v[j] = *(const uint4 *)staged_word(r.room, row + i + j * ROWS_AT_ONCE, at * 4);
#pragma unroll
            for (int j = 0; j < TOGETHER; j++)
                if (row + i + j * ROWS_AT_ONCE < r.rows.n)
                    *(uint4 *)(y + (size_t)(i + j * ROWS_AT_ONCE) * c.y_stride + 2 * first) = v[j];
        }
        __syncwarp(); /* before the room is written again */
    }
}

/* ---- which way ---- */

template <enum gemm_weight_layout F, int N>
static __device__ __forceinline__ void store_result(const gemm_call &c, const sm90_result &r,
                                                    const float (&sums)[N])
{
    if (r.rows.n <= 0) return;
    const bool is_fast = r.column + 2 * N <= c.n_out && !c.bias && y_is_aligned(c, 8);
    const enum gemm_epilogue as = is_fast ? c.epilogue : GEMM_SILU;
    if (as == (F == GEMM_F16 ? GEMM_SILU_F16 : GEMM_SILU_BF16)) store_swiglu<F>(c, r, sums);
    else if (as == GEMM_STORE) store_columns<F, GEMM_STORE>(c, r, sums);
    else if (as == GEMM_STORE_BF16 && (F == GEMM_W8 || F == GEMM_W4))
        store_columns<F, GEMM_STORE_BF16>(c, r, sums); /* with scales */
    else if (as == GEMM_STORE_BF16) store_bf16(c, r, sums);
    else if (as == GEMM_ADD) store_columns<F, GEMM_ADD>(c, r, sums);
    else store_columns<F, GEMM_SILU>(c, r, sums);
}
#endif

#endif
