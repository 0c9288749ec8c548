/* gemm_ring_x.cuh - rows of x in shared memory, in the 16 bits that a kernel of decode steps
 * multiplies: copied, or gathered, normalised and rounded from f32 with the bits that
 * prepare_inputs.cu gives them, which saves its launch. Thread: device. */
#ifndef BATON_KERNELS_CUDA_GEMM_GEMM_RING_X_CUH
#define BATON_KERNELS_CUDA_GEMM_GEMM_RING_X_CUH

#include "kernels/cuda/gemm/gemm_ring.cuh"
#include "kernels/cuda/inputs/prepare_inputs_rows.cuh"
#include "kernels/cuda/rms_norm.cuh"

/* A thread holds 8 steps of 1,024 elements in registers: their loads take one latency. */
enum { RING_X_STEPS = 8, RING_X_STEP = (int)QUAD * RING_THREADS };
static_assert((int)RING_THREADS == (int)PREPARE_INPUTS_THREADS &&
                  (int)RING_THREADS == (int)RMS_THREADS,
              "sums of squares have one order");

enum { RING_X_ROUNDED_MAX = RING_X_STEPS * RING_X_STEP /* n_in of f32 rows */ };

/* Elements between rows: such that two rows do not begin in the same banks. */
static __host__ __device__ __forceinline__ size_t ring_x_stride(int32_t n_in)
{
    return (size_t)n_in + 32;
}
static inline size_t ring_x_bytes(int32_t n_in, int32_t n_rows)
{
    return ring_x_stride(n_in) * (size_t)n_rows * sizeof(uint16_t);
}

/* A call's rows of x, from row `first` on. */
struct ring_x_rows {
    int32_t first, n, per_row; /* per_row: steps */
};

/* Where step i of a thread is, counted through the rows. */
struct ring_x_at {
    int32_t row, step, k;
};
static __device__ __forceinline__ ring_x_at ring_x_first()
{
    return ring_x_at{ 0, 0, (int32_t)threadIdx.x * QUAD };
}
static __device__ __forceinline__ void ring_x_next(ring_x_at *at, const ring_x_rows &rows)
{
    at->step++, at->k += RING_X_STEP;
    if (at->step < rows.per_row) return;
    at->row++, at->step = 0, at->k = (int32_t)threadIdx.x * QUAD;
}

static __device__ __forceinline__ size_t ring_x_row(const gemm_call &c, int32_t i)
{
    return (size_t)(c.x_rows && !c.begin ? c.x_rows[i] : i) * c.x_stride;
}

/* As norm_factor has it: of each thread's elements, over the warp, then over the warps. */
static __device__ __forceinline__ void ring_x_squares(const gemm_call &c, const ring_x_rows &rows,
                                                      const float4 v[RING_X_STEPS],
                                                      float room[RING_X_STEPS][RING_WARPS])
{
    ring_x_at at = ring_x_first();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < RING_X_STEPS; i++) {
        if (at.row >= rows.n) break;
        if (at.step == 0) sum = 0;
        if (at.k < c.n_in) sum = add_squares(sum, v[i]);
        if (at.step == rows.per_row - 1) {
            const float of_warp = warp_sum(sum);
            if (threadIdx.x % WARP == 0) room[at.row][threadIdx.x / WARP] = of_warp;
        }
        ring_x_next(&at, rows);
    }
    __syncthreads();
}

template <enum gemm_weight_layout F>
static __device__ __forceinline__ void ring_x_store(const gemm_call &c, const ring_x_rows &rows,
                                                    const float4 v[RING_X_STEPS],
                                                    const float room[RING_X_STEPS][RING_WARPS],
                                                    uint16_t *to)
{
    ring_x_at at = ring_x_first();
    float factor = 1;
#pragma unroll
    for (int i = 0; i < RING_X_STEPS; i++) {
        if (at.row >= rows.n) break;
        if (c.norm && at.step == 0) factor = rms_factor(room[at.row], (unsigned)c.n_in, c.eps);
        if (at.k < c.n_in) {
            float4 x = v[i];
            if (c.norm)
                x = norm_quad(x, *(const float4 *)(c.norm + at.k), factor, (size_t)at.k,
                              (size_t)c.n_in);
            uint16_t *p = to + (size_t)(rows.first + at.row) * ring_x_stride(c.n_in) + at.k;
            store_rounded<F>(p, x);
        }
        ring_x_next(&at, rows);
    }
}

template <enum gemm_weight_layout F>
static __device__ __forceinline__ void ring_x_round(const gemm_call &c, int32_t n_rows,
                                                    uint16_t *to)
{
    __shared__ float room[RING_X_STEPS][RING_WARPS];
    const int32_t per_row = (c.n_in + RING_X_STEP - 1) / RING_X_STEP,
                  at_once = RING_X_STEPS / per_row;
#pragma unroll 1
    for (int32_t first = 0; first < n_rows; first += at_once) {
        const ring_x_rows rows = { first, min(at_once, n_rows - first), per_row };
        ring_x_at at = ring_x_first();
        float4 v[RING_X_STEPS];
#pragma unroll
        for (int i = 0; i < RING_X_STEPS; i++) {
            v[i] = make_float4(0, 0, 0, 0);
            if (at.row < rows.n && at.k < c.n_in)
                v[i] = *(const float4 *)((const float *)c.x + ring_x_row(c, first + at.row) + at.k);
            ring_x_next(&at, rows);
        }
        if (c.norm) ring_x_squares(c, rows, v, room);
        ring_x_store<F>(c, rows, v, room, to);
        if (c.norm) __syncthreads(); /* `room` is free again */
    }
}

static __device__ __forceinline__ void ring_x_copy(const gemm_call &c, int32_t n_rows, uint16_t *to)
{
    const int32_t per_row = c.n_in / 8;
    for (int32_t i = (int32_t)threadIdx.x; i < n_rows * per_row; i += RING_THREADS) {
        const int32_t row = i / per_row, k = i % per_row * 8;
        *(uint4 *)(void *)(to + (size_t)row * ring_x_stride(c.n_in) +
                           k) = *(const uint4 *)((const uint16_t *)c.x + ring_x_row(c, row) + k);
    }
}

/* The rows that a call's rows of y have, or with `begin` all rows of x. A barrier must follow. */
template <enum gemm_weight_layout F>
static __device__ __forceinline__ void ring_x_prepare(const gemm_call &c, uint16_t *to)
{
    const int32_t n_rows = c.begin ? c.n_x_rows : c.n_rows;
    if (c.x_f32) ring_x_round<F>(c, n_rows, to);
    else ring_x_copy(c, n_rows, to);
}

#endif
