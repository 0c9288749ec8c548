/* moe_logits.cu - the logits of a prompt's rows on tensor cores, to the precision of f32.
 *
 * An f32 is the sum of three bf16 (8 bits each), so a product is one of parts: of the nine pairs
 * the six largest are multiplied, which leaves 2^-26 of it, and three where W is of bf16. Sums of
 * 32 k are f32 in a tensor core, which does not round them to nearest; those are added by fadd.
 * So the bits are not those of gemm_f32.cuh, and do not depend on other rows.
 *
 * A block has 64 rows and all columns of a tile. Its threads load the next chunks of x and W into
 * registers, split them and leave the parts in one of two buffers in shared memory while the other
 * is multiplied. Bound by L2 and tensor cores alike. docs/kernels.md. Thread: device; moe_logits:
 * engine. */
#include "kernels/cuda/dtype_convert.cuh"
#include "kernels/cuda/gemm/gemm.h"
#include "kernels/cuda/moe/moe_route.h"

enum {
    LOGITS_THREADS = 256,
    LOGITS_DOWN = 2,
    LOGITS_ACROSS = LOGITS_THREADS / WARP / LOGITS_DOWN /* warps */,
    LOGITS_ROWS = 64,
    LOGITS_WIDE = 128 /* columns of the wider tile */,
    LOGITS_M = LOGITS_ROWS / LOGITS_DOWN / 16 /* tiles of 16 rows of a warp */,
    LOGITS_K = 32 /* of a chunk */,
    LOGITS_QUADS = LOGITS_K / 4,
    LOGITS_LOADS = LOGITS_THREADS / LOGITS_QUADS /* rows that are loaded at a time */,
    LOGITS_PARTS = 3,
    LOGITS_BUFFERS = 2,
    LOGITS_LEAST_ROWS = 1024 /* fewer leave most SMs without a block */
};

struct logits_call {
    const float *x;
    const unsigned char *w;
    size_t row_bytes;
    float *y;
    int32_t n_rows, n_in, n_columns;
};

/* The k's that a lane has of two steps of 16 are 8 consecutive ones, the same in both operands. Of
 * x it reads what an operand of mma is, four words of two rows; of W 8 elements. */
template <int COLUMNS_> struct logits_tile {
    enum {
        COLUMNS = COLUMNS_,
        N = COLUMNS / LOGITS_ACROSS / 8 /* tiles of 8 columns of a warp */,
        LOADS = COLUMNS / LOGITS_LOADS
    };
    struct logits_part {
        uint4 x[LOGITS_ROWS / 16][2][WARP], w[COLUMNS][LOGITS_K / 8];
    };
    struct logits_parts {
        logits_part part[LOGITS_PARTS];
    };
};

/* A thread's quads of a chunk, and where they come from: the first chunk's. Those of x are of a row
 * and the eighth after it. */
template <class T> struct logits_quads {
    float4 x[2], w[T::LOADS];
};
template <class T> struct logits_source {
    const float *x[2], *w[T::LOADS];
};

/* Rows and columns past the last repeat it. */
template <class T>
static __device__ __forceinline__ logits_source<T> find_source(const logits_call &c)
{
    logits_source<T> s;
    const int32_t at = (int32_t)threadIdx.x / LOGITS_QUADS,
                  k = (int32_t)threadIdx.x % LOGITS_QUADS * 4,
                  row = (int32_t)blockIdx.y * LOGITS_ROWS + at / 8 * 16 + at % 8,
                  column = (int32_t)blockIdx.x * T::COLUMNS + at;
#pragma unroll
    for (int i = 0; i < 2; i++)
        s.x[i] = c.x + (size_t)min(row + i * 8, c.n_rows - 1) * (size_t)c.n_in + k;
#pragma unroll
    for (int i = 0; i < T::LOADS; i++)
        s.w[i] = (const float *)(const void *)(c.w + (size_t)min(column + i * LOGITS_LOADS,
                                                                 c.n_columns - 1) *
                                                         c.row_bytes) +
                 k;
    return s;
}

template <class T>
static __device__ __forceinline__ void load_w(logits_quads<T> *q, const logits_source<T> &s,
                                              int32_t chunk)
{
#pragma unroll
    for (int i = 0; i < T::LOADS; i++)
        q->w[i] = __ldg((const float4 *)(const void *)(s.w[i] + chunk * LOGITS_K));
}
template <class T>
static __device__ __forceinline__ void load_x(logits_quads<T> *q, const logits_source<T> &s,
                                              int32_t chunk)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
        q->x[i] = __ldcg((const float4 *)(const void *)(s.x[i] + chunk * LOGITS_K));
}

/* Takes two numbers' next bf16 off them. */
static __device__ __forceinline__ unsigned take_part(float *a, float *b)
{
    const unsigned part = round_bf16x2(*a, *b);
    *a = __fsub_rn(*a, bf16_low(part));
    *b = __fsub_rn(*b, bf16_high(part));
    return part;
}
static __device__ __forceinline__ uint2 take_parts(float4 *v)
{
    const unsigned first = take_part(&v->x, &v->y);
    return make_uint2(first, take_part(&v->z, &v->w));
}

/* The lane, as it is stored, that has a quad of x in step `step`: both steps of a row use other
 * banks. */
static __device__ __forceinline__ int32_t lane_of_x(int32_t lane, int32_t step)
{
    return lane ^ step * 4;
}

/* Splits a chunk into a buffer; whether W has more than one part. */
template <class T>
static __device__ __forceinline__ bool split_chunk(typename T::logits_parts *to, logits_quads<T> *q)
{
    const int32_t at = (int32_t)threadIdx.x / LOGITS_QUADS,
                  quad = (int32_t)threadIdx.x % LOGITS_QUADS, step = quad % 2,
                  lane = lane_of_x(at % 8 * 4 + quad / 2, step);
    unsigned more = 0;
#pragma unroll
    for (int part = 0; part < LOGITS_PARTS; part++) {
        const uint2 a = take_parts(&q->x[0]), b = take_parts(&q->x[1]);
        to->part[part].x[at / 8][step][lane] = make_uint4(a.x, b.x, a.y, b.y);
    }
#pragma unroll
    for (int i = 0; i < T::LOADS; i++)
#pragma unroll
        for (int part = 0; part < LOGITS_PARTS; part++) {
            const uint2 p = take_parts(&q->w[i]);
            ((uint2 *)(void *)to->part[part].w[at + i * LOGITS_LOADS])[quad] = p;
            if (part > 0) more |= p.x | p.y;
        }
    return more != 0;
}

template <class T> struct logits_sums {
    float v[LOGITS_M][T::N][4];
};

/* A warp's place: its first row and column. */
struct logits_place {
    int32_t row, column;
};
template <class T> static __device__ __forceinline__ logits_place find_place()
{
    const int32_t warp = (int32_t)threadIdx.x / WARP;
    return logits_place{ warp / LOGITS_ACROSS * LOGITS_M * 16, warp % LOGITS_ACROSS * T::N * 8 };
}

/* Adds a part of x times one of W. */
template <class T>
static __device__ __forceinline__ void multiply_parts(logits_sums<T> *sums,
                                                      const uint4 (&x)[LOGITS_M][2],
                                                      const uint4 (&w)[T::N])
{
#pragma unroll
    for (int step = 0; step < 2; step++)
#pragma unroll
        for (int i = 0; i < LOGITS_M; i++)
#pragma unroll
            for (int j = 0; j < T::N; j++) {
                const uint4 &v = x[i][step];
                const unsigned a[4] = { v.x, v.y, v.z, v.w },
                               b[2] = { step ? w[j].z : w[j].x, step ? w[j].w : w[j].y };
                mma_bf16(sums->v[i][j], a, b);
            }
}

/* Adds a chunk's sums. all: W has more than one part. Small products come first. */
template <class T>
static __device__ __forceinline__ void multiply_chunk(logits_sums<T> *totals,
                                                      const typename T::logits_parts &from,
                                                      const logits_place &at, bool all)
{
    const int32_t lane = (int32_t)threadIdx.x % WARP;
    uint4 x[LOGITS_PARTS][LOGITS_M][2], w[T::N];
    logits_sums<T> sums = {};
#pragma unroll
    for (int part = 0; part < LOGITS_PARTS; part++)
#pragma unroll
        for (int i = 0; i < LOGITS_M; i++)
#pragma unroll
            for (int step = 0; step < 2; step++)
                x[part][i][step] = from.part[part].x[at.row / 16 + i][step][lane_of_x(lane, step)];
#pragma unroll
    for (int part = LOGITS_PARTS - 1; part >= 0; part--) {
        if (part > 0 && !all) continue;
#pragma unroll
        for (int j = 0; j < T::N; j++)
            w[j] = from.part[part].w[at.column + j * 8 + lane / 4][lane % 4];
#pragma unroll
        for (int i = LOGITS_PARTS - 1 - part; i >= 0; i--) multiply_parts<T>(&sums, x[i], w);
    }
#pragma unroll
    for (int i = 0; i < LOGITS_M; i++)
#pragma unroll
        for (int j = 0; j < T::N; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                totals->v[i][j][e] = __fadd_rn(totals->v[i][j][e], sums.v[i][j][e]);
}

template <class T>
static __device__ __forceinline__ void store_logits(const logits_call &c,
                                                    const logits_sums<T> &sums,
                                                    const logits_place &at)
{
    const int32_t lane = (int32_t)threadIdx.x % WARP,
                  first = (int32_t)blockIdx.y * LOGITS_ROWS + at.row + lane / 4,
                  column = (int32_t)blockIdx.x * T::COLUMNS + at.column + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < LOGITS_M; i++)
#pragma unroll
        for (int j = 0; j < T::N; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int32_t row = first + i * 16 + e / 2 * 8, to = column + j * 8 + e % 2;
                if (row < c.n_rows && to < c.n_columns)
                    c.y[(size_t)row * (size_t)c.n_columns + (size_t)to] = sums.v[i][j][e];
            }
}

/* Chunk i is in buffer i % 2 and in the registers i % 2 before that: chunk i + 1 is split while
 * chunks i + 2 and i + 3 are on their way. */
template <class T>
static __global__ void __launch_bounds__(LOGITS_THREADS, 1)
    logits_kernel(const __grid_constant__ logits_call c)
{
    typename T::logits_parts *buffers = (typename T::logits_parts *)(void *)shared_memory();
    const int32_t n = c.n_in / LOGITS_K;
    const logits_source<T> source = find_source<T>(c);
    const logits_place at = find_place<T>();
    logits_quads<T> quads[LOGITS_BUFFERS];
    logits_sums<T> totals = {};
#pragma unroll
    for (int b = 0; b < LOGITS_BUFFERS; b++) load_w<T>(&quads[b], source, b);
    grid_dependency_sync();
#pragma unroll
    for (int b = 0; b < LOGITS_BUFFERS; b++) load_x<T>(&quads[b], source, b);
    bool all = split_chunk<T>(&buffers[0], &quads[0]);
    if (n > 2) load_x<T>(&quads[0], source, 2), load_w<T>(&quads[0], source, 2);
    all = __syncthreads_or(all);
#pragma unroll 1
    for (int32_t first = 0; first < n; first += LOGITS_BUFFERS)
#pragma unroll
        for (int b = 0; b < LOGITS_BUFFERS; b++) {
            const int32_t chunk = first + b, other = 1 - b;
            /* after the last chunk of what is no longer used */
            const bool next = split_chunk<T>(&buffers[other], &quads[other]);
            if (chunk + 3 < n)
                load_x<T>(&quads[other], source, chunk + 3),
                    load_w<T>(&quads[other], source, chunk + 3);
            multiply_chunk<T>(&totals, buffers[b], at, all);
            all = __syncthreads_or(next);
        }
    store_logits<T>(c, totals, at);
}

bool moe_logits_fits(const struct router_args *a)
{
    const uintptr_t quads = (uintptr_t)a->h | (uintptr_t)a->w->data;
    static_assert(GEMM_STEP % (LOGITS_BUFFERS * LOGITS_K) == 0, "chunks come in pairs");
    return a->route.n_rows >= LOGITS_LEAST_ROWS &&
           a->route.n_rows <= (size_t)LOGITS_ROWS * UINT16_MAX && a->w->n_in > 0 &&
           a->w->n_in % GEMM_STEP == 0 && quads % sizeof(float4) == 0;
}

template <class T> static cudaError_t run(cudaStream_t s, const logits_call &c)
{
    const dim3 grid(blocks_for((size_t)c.n_columns, T::COLUMNS),
                    blocks_for((size_t)c.n_rows, LOGITS_ROWS));
    return launch(s, logits_kernel<T>, grid, dim3(LOGITS_THREADS),
                  LOGITS_BUFFERS * sizeof(typename T::logits_parts), c);
}

cudaError_t moe_logits(cudaStream_t s, const struct router_args *a)
{
    const logits_call c = { a->h,
                            (const unsigned char *)a->w->data,
                            gemm_row_bytes(GEMM_F32, a->w->n_in),
                            a->route.logits,
                            (int32_t)a->route.n_rows,
                            (int32_t)a->w->n_in,
                            a->route.n_experts };
    /* a tile is not half empty */
    return (c.n_columns - 1) % LOGITS_WIDE < LOGITS_WIDE / 2
               ? run<logits_tile<LOGITS_WIDE / 2>>(s, c)
               : run<logits_tile<LOGITS_WIDE>>(s, c);
}
