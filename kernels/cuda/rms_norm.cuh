/* rms_norm.cuh - the arithmetic of an rms_norm of a row: every kernel that computes one gives the
 * same bits. RMS_THREADS threads sum the squares of a row, each of every RMS_THREADS-th quad in
 * ascending order; then a warp's lanes as warp_sum does, then warps in ascending order.
 * Thread: device. */
#ifndef BATON_KERNELS_CUDA_RMS_NORM_CUH
#define BATON_KERNELS_CUDA_RMS_NORM_CUH

#include "kernels/cuda/dtype_convert.cuh"

enum {
    RMS_THREADS = 256,
    RMS_WARPS = RMS_THREADS / WARP,
    RMS_QUAD = 4,
    RMS_STEP = RMS_THREADS * RMS_QUAD,
    RMS_AHEAD = 4 /* quads that a thread loads at a time */
};

/* Elements k .. k + 3, zeros from n on. ALIGNED: rows are, to 16 bytes, and n is a
 * multiple of 4. */
template <bool ALIGNED>
static __device__ __forceinline__ float4 rms_quad(const float *x, unsigned k, unsigned n)
{
    float4 v = make_float4(0, 0, 0, 0);
    if (ALIGNED) return k < n ? __ldca((const float4 *)(const void *)(x + k)) : v;
    if (k < n) v.x = x[k];
    if (k + 1 < n) v.y = x[k + 1];
    if (k + 2 < n) v.z = x[k + 2];
    if (k + 3 < n) v.w = x[k + 3];
    return v;
}

/* A thread's next quads, from k on. */
template <bool ALIGNED, int QUADS = RMS_AHEAD>
static __device__ __forceinline__ void rms_load(float4 v[QUADS], const float *x, unsigned k,
                                                unsigned n)
{
#pragma unroll
    for (int i = 0; i < QUADS; i++) v[i] = rms_quad<ALIGNED>(x, k + i * RMS_STEP, n);
}

template <int QUADS = RMS_AHEAD>
static __device__ __forceinline__ float rms_squares(float sum, const float4 v[QUADS])
{
#pragma unroll
    for (int i = 0; i < QUADS; i++) sum = add_squares(sum, v[i]);
    return sum;
}

/* What elements are multiplied by, before their weights. warps [RMS_WARPS]: their squares. */
static __device__ __forceinline__ float rms_factor(const float *warps, unsigned n, float eps)
{
    float squares = 0;
#pragma unroll
    for (int i = 0; i < RMS_WARPS; i++) squares += warps[i];
    return 1.0f / sqrtf(squares / (float)n + eps);
}

static __device__ __forceinline__ float4 rms_apply(const float4 &x, const float4 &weight,
                                                   float factor)
{
    return make_float4(weight.x * (x.x * factor), weight.y * (x.y * factor),
                       weight.z * (x.z * factor), weight.w * (x.w * factor));
}

/* ---- many rows: a warp has one, all of it in registers, so that it waits for memory once ---- */

enum {
    RMS_ROWS_MANY = 1024, /* fewer leave SMs without a row; affects only speed */
    RMS_ROWS_THREADS = 128,
    RMS_ROWS_WARPS = RMS_ROWS_THREADS / WARP,
    RMS_ROWS_QUADS = 4 /* of a thread above, at most */
};

/* QUADS of each of RMS_THREADS threads: a lane has those of threads lane, lane + 32, .. */
template <int QUADS> struct rms_row {
    float4 v[RMS_WARPS][QUADS];
};

/* Element of quad i of the warp-th of these threads. */
static __device__ __forceinline__ unsigned rms_row_at(int warp, int i)
{
    return ((unsigned)warp * WARP + threadIdx.x % WARP) * RMS_QUAD + (unsigned)i * RMS_STEP;
}

template <int QUADS>
static __device__ __forceinline__ void rms_row_load(rms_row<QUADS> *r, const float *x, unsigned n)
{
#pragma unroll
    for (int w = 0; w < RMS_WARPS; w++)
#pragma unroll
        for (int i = 0; i < QUADS; i++) r->v[w][i] = rms_quad<true>(x, rms_row_at(w, i), n);
}

template <int QUADS>
static __device__ __forceinline__ float rms_row_factor(const rms_row<QUADS> &r, unsigned n,
                                                       float eps)
{
    float warps[RMS_WARPS];
#pragma unroll
    for (int w = 0; w < RMS_WARPS; w++) warps[w] = warp_sum(rms_squares<QUADS>(0.0f, r.v[w]));
    return rms_factor(warps, n, eps);
}

/* Whether rows fit, and how many quads they have. */
static inline int rms_row_quads(size_t n_rows, size_t n)
{
    const size_t quads = (n + RMS_STEP - 1) / RMS_STEP;
    return n_rows >= RMS_ROWS_MANY && n_rows <= INT32_MAX && quads <= RMS_ROWS_QUADS ? (int)quads
                                                                                     : 0;
}

#endif
