/* elementwise.cu - norms, rotation, copies, sums of rows and embedding. All are bound by memory:
 * each element is read and written once, and neighbouring threads take neighbouring elements.
 * Thread: device. */
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/rms_norm.cuh"
#include "kernels/cuda/rope.cuh"

enum { THREADS = 256 };

/* ---- norm ---- */

struct norm_rows {
    float *y;
    const float *x, *weight;
    size_t y_stride, x_stride, n;
    float eps;
    uint16_t *rounded; /* by a warp only; NULL: not */
};

template <bool ALIGNED>
static __device__ __forceinline__ void store_quad(float *y, unsigned k, unsigned n, const float4 &v)
{
    if (ALIGNED) {
        if (k < n) *(float4 *)(void *)(y + k) = v;
        return;
    }
    if (k < n) y[k] = v.x;
    if (k + 1 < n) y[k + 1] = v.y;
    if (k + 2 < n) y[k + 2] = v.z;
    if (k + 3 < n) y[k + 3] = v.w;
}

/* The weights, which no kernel writes, are loaded while the kernel before ends; of long rows, the
 * first ones. */
template <bool ALIGNED>
static __global__ void __launch_bounds__(RMS_THREADS) norm_kernel(norm_rows a)
{
    __shared__ float warps[RMS_WARPS];
    const float *x = a.x + blockIdx.x * a.x_stride;
    float *y = a.y + blockIdx.x * a.y_stride;
    const unsigned n = (unsigned)a.n, first = threadIdx.x * RMS_QUAD, step = RMS_AHEAD * RMS_STEP;
    float4 v[RMS_AHEAD] = {}, weight[RMS_AHEAD];
    float squares = 0;
    rms_load<ALIGNED>(weight, a.weight, first, n);
    grid_dependency_sync();
#pragma unroll 1
    for (unsigned k = first; k < n; k += step) {
        rms_load<ALIGNED>(v, x, k, n);
        squares = rms_squares(squares, v);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = squares;
    __syncthreads();
    const float factor = rms_factor(warps, n, a.eps);
#pragma unroll 1
    for (unsigned k = first; k < n; k += step) {
        if (n > step) rms_load<ALIGNED>(v, x, k, n);
        if (k > first) rms_load<ALIGNED>(weight, a.weight, k, n);
#pragma unroll
        for (int i = 0; i < RMS_AHEAD; i++)
            store_quad<ALIGNED>(y, k + i * RMS_STEP, n, rms_apply(v[i], weight[i], factor));
    }
}

/* Rows of QUADS quads a thread of the above, a warp each. */
template <int QUADS>
static __global__ void __launch_bounds__(RMS_ROWS_THREADS)
    norm_kernel_by_warp(const norm_rows a, size_t n_rows)
{
    grid_dependency_sync();
    const size_t row = (size_t)blockIdx.x * RMS_ROWS_WARPS + threadIdx.x / WARP;
    const unsigned n = (unsigned)a.n;
    rms_row<QUADS> r;
    if (row >= n_rows) return;
    rms_row_load<QUADS>(&r, a.x + row * a.x_stride, n);
    const float factor = rms_row_factor<QUADS>(r, n, a.eps);
#pragma unroll
    for (int w = 0; w < RMS_WARPS; w++)
#pragma unroll
        for (int i = 0; i < QUADS; i++) {
            const unsigned k = rms_row_at(w, i);
            if (k >= n) continue;
            const float4 v = rms_apply(r.v[w][i],
                                       __ldg((const float4 *)(const void *)(a.weight + k)), factor);
            *(float4 *)(void *)(a.y + row * a.y_stride + k) = v;
            if (a.rounded)
                *(uint2 *)(void *)(a.rounded + row * n + k) = make_uint2(pack_bf16(v.x, v.y),
                                                                         pack_bf16(v.z, v.w));
        }
}

static cudaError_t norm_by_warp(cudaStream_t s, const norm_rows &a, size_t n_rows, int quads)
{
    const dim3 grid(blocks_for(n_rows, RMS_ROWS_WARPS)), block(RMS_ROWS_THREADS);
    return launch(s,
                  quads <= 2   ? norm_kernel_by_warp<2>
                  : quads == 3 ? norm_kernel_by_warp<3>
                               : norm_kernel_by_warp<RMS_ROWS_QUADS>,
                  grid, block, 0, a, n_rows);
}

cudaError_t elementwise_rms_norm(cudaStream_t s, float *y, size_t y_stride, const float *x,
                                 size_t x_stride, const float *weight, size_t n_rows, size_t n,
                                 float eps, uint16_t **rounded)
{
    norm_rows a = { y, x, weight, y_stride, x_stride, n, eps, NULL };
    const uintptr_t all = (uintptr_t)y | (uintptr_t)x | (uintptr_t)weight |
                          (n_rows > 1 ? y_stride | x_stride : 0) * sizeof(float) |
                          n * sizeof(float);
    const dim3 grid((unsigned)n_rows), block(RMS_THREADS);
    const int quads = all % sizeof(float4) == 0 ? rms_row_quads(n_rows, n) : 0;
    if (rounded && quads == 0) *rounded = NULL;
    if (n_rows == 0) return cudaSuccess;
    if (rounded) a.rounded = *rounded;
    if (quads > 0) return norm_by_warp(s, a, n_rows, quads);
    return all % sizeof(float4) == 0 ? launch(s, norm_kernel<true>, grid, block, 0, a)
                                     : launch(s, norm_kernel<false>, grid, block, 0, a);
}

/* ---- element by element ---- */

static __global__ void add_kernel(float *x, const float *y, size_t n)
{
    grid_dependency_sync();
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n) x[i] += y[i];
}

cudaError_t elementwise_add(cudaStream_t s, float *x, const float *y, size_t n)
{
    return n ? launch(s, add_kernel, dim3(blocks_for(n, THREADS)), dim3(THREADS), 0, x, y, n)
             : cudaSuccess;
}

struct copy_rows {
    float *to;
    const float *from;
    const int32_t *rows; /* NULL: 0, 1, 2 .. */
    size_t to_stride, from_stride, n, total;
};

static __global__ void copy_kernel(copy_rows a)
{
    grid_dependency_sync();
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x, row = i / a.n, at = i % a.n;
    if (i >= a.total) return;
    const size_t from = a.rows ? (size_t)a.rows[row] : row;
    a.to[row * a.to_stride + at] = a.from[from * a.from_stride + at];
}

cudaError_t elementwise_copy_rows(cudaStream_t s, float *to, size_t to_stride, const float *from,
                                  size_t from_stride, const int32_t *rows, size_t n_rows, size_t n)
{
    const copy_rows a = { to, from, rows, to_stride, from_stride, n, n_rows * n };
    return a.total ? launch(s, copy_kernel, dim3(blocks_for(a.total, THREADS)), dim3(THREADS), 0, a)
                   : cudaSuccess;
}

static __global__ void combine_kernel(combine_args a)
{
    grid_dependency_sync();
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x, row = i / a.n, at = i % a.n;
    if (row >= a.n_rows) return;
    float sum = a.add ? a.y[i] : 0;
    for (size_t j = 0; j < a.n_used; j++) {
        const size_t slot = row * a.n_used + j;
        sum = fmaf(a.weights[slot], a.rows[(size_t)a.index[slot] * a.n + at], sum);
    }
    a.y[i] = sum;
}

/* Four elements of a row that is summed. */
template <bool BF16>
static __device__ __forceinline__ float4 read_quad(const combine_args &a, size_t at)
{
    if (!BF16) return *(const float4 *)(a.rows + at);
    const uint2 v = *(const uint2 *)((const uint16_t *)a.rows + at);
    return make_float4(bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y));
}

/* The same sums, four elements by a thread. Rows are loaded several at a time, because the way to
 * memory is long. */
template <bool BF16>
static __global__ void __launch_bounds__(THREADS, 3) /* with more blocks eight loads spill */
    combine_quads_kernel(combine_args a, unsigned blocks_of_row)
{
    enum { TOGETHER = 8 };
    grid_dependency_sync();
    const size_t row = blockIdx.x / blocks_of_row,
                 at = (blockIdx.x % blocks_of_row * THREADS + threadIdx.x) * 4;
    if (at >= a.n) return;
    float4 *y = (float4 *)(a.y + row * a.n + at), sum = make_float4(0, 0, 0, 0);
    if (a.add) sum = *y;
    for (size_t first = 0; first < a.n_used; first += TOGETHER) {
        const size_t slot = row * a.n_used + first, n = a.n_used - first;
        float4 v[TOGETHER];
#pragma unroll
        for (size_t j = 0; j < TOGETHER; j++)
            if (j < n) v[j] = read_quad<BF16>(a, (size_t)a.index[slot + j] * a.n + at);
#pragma unroll
        for (size_t j = 0; j < TOGETHER; j++) {
            if (j >= n) break;
            const float by = a.weights[slot + j];
            sum = make_float4(fmaf(by, v[j].x, sum.x), fmaf(by, v[j].y, sum.y),
                              fmaf(by, v[j].z, sum.z), fmaf(by, v[j].w, sum.w));
        }
    }
    *y = sum;
}

/* The same of N rows in bf16, eight elements by a thread. N is a constant because loads that
 * depend on it would be made one after the other; how many blocks share an SM is said because
 * without it registers for half of the loads are taken. */
enum { OCT = 8 };
template <int N>
static __global__ void __launch_bounds__(THREADS, 4)
    combine_octs_kernel(combine_args a, unsigned octs)
{
    grid_dependency_sync();
    const unsigned i = blockIdx.x * THREADS + threadIdx.x, row = i / octs, at = i % octs * OCT;
    if (row >= a.n_rows) return;
    const int32_t *index = a.index + (size_t)row * N;
    float4 *y = (float4 *)(a.y + (size_t)row * a.n + at);
    float by[N], sum[OCT] = {};
    uint4 v[N];
#pragma unroll
    for (int j = 0; j < N; j++)
        v[j] = *(const uint4 *)((const uint16_t *)a.rows + (size_t)index[j] * a.n + at);
#pragma unroll
    for (int j = 0; j < N; j++) by[j] = a.weights[(size_t)row * N + j];
    if (a.add) {
        const float4 low = y[0], high = y[1];
        sum[0] = low.x, sum[1] = low.y, sum[2] = low.z, sum[3] = low.w;
        sum[4] = high.x, sum[5] = high.y, sum[6] = high.z, sum[7] = high.w;
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        const unsigned words[4] = { v[j].x, v[j].y, v[j].z, v[j].w };
#pragma unroll
        for (int k = 0; k < OCT; k++)
            sum[k] = fmaf(by[j], k % 2 ? bf16_high(words[k / 2]) : bf16_low(words[k / 2]), sum[k]);
    }
    y[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    y[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}

template <bool BF16> static cudaError_t combine_quads(cudaStream_t s, const struct combine_args *a)
{
    const unsigned blocks_of_row = blocks_for(a->n, THREADS * 4);
    return launch(s, combine_quads_kernel<BF16>, dim3((unsigned)a->n_rows * blocks_of_row),
                  dim3(THREADS), 0, *a, blocks_of_row);
}

static bool has_quads(const struct combine_args *a)
{
    return a->n % 4 == 0 && (uintptr_t)a->y % 16 == 0 && (uintptr_t)a->rows % 16 == 0;
}

cudaError_t elementwise_combine(cudaStream_t s, const struct combine_args *a)
{
    const size_t n = a->n_rows * a->n;
    if (n == 0) return cudaSuccess;
    if (has_quads(a)) return combine_quads<false>(s, a);
    return launch(s, combine_kernel, dim3(blocks_for(n, THREADS)), dim3(THREADS), 0, *a);
}

cudaError_t elementwise_combine_bf16(cudaStream_t s, const struct combine_args *a)
{
    const size_t octs = a->n_rows * (a->n / OCT);
    if (a->n_rows * a->n == 0) return cudaSuccess;
    if (!has_quads(a)) return cudaErrorInvalidValue;
    if (a->n % OCT != 0 || (a->n_used != 6 && a->n_used != 8) || octs > UINT32_MAX - THREADS)
        return combine_quads<true>(s, a);
    return launch(s, a->n_used == 6 ? combine_octs_kernel<6> : combine_octs_kernel<8>,
                  dim3(blocks_for(octs, THREADS)), dim3(THREADS), 0, *a, (unsigned)(a->n / OCT));
}

/* ---- rotation ---- */

/* Warps are numbered by rows, then by the heads of all lists. */
static __global__ void __launch_bounds__(THREADS) rope_kernel(const __grid_constant__ rope_args a)
{
    grid_dependency_sync();
    const size_t per_row = a.heads[0].n_heads + (a.n_heads > 1 ? a.heads[1].n_heads : 0);
    const size_t at = ((size_t)blockIdx.x * THREADS + threadIdx.x) / WARP, row = at / per_row,
                 i = at % per_row;
    if (row >= a.n_rows) return;
    const bool is_first = i < a.heads[0].n_heads;
    const rope_heads &h = a.heads[is_first ? 0 : 1];
    rotate_head(a, h, h.x + row * h.x_stride + (is_first ? i : i - a.heads[0].n_heads) * h.head_dim,
                a.pos[row]);
}

cudaError_t elementwise_rope(cudaStream_t s, const struct rope_args *a)
{
    size_t n = 0;
    for (size_t i = 0; i < a->n_heads; i++) n += a->n_rows * a->heads[i].n_heads;
    return n ? launch(s, rope_kernel, dim3(blocks_for(n * WARP, THREADS)), dim3(THREADS), 0, *a)
             : cudaSuccess;
}

/* ---- embedding ---- */

static __device__ float element(const embed_rows &e, const unsigned char *row, const float *scales,
                                size_t i_row, size_t k)
{
    const size_t f8_blocks = (e.n_in + 127) / 128;
    switch (e.layout) {
    case GEMM_F32: return ((const float *)(const void *)row)[k];
    case GEMM_BF16: return bf16_to_float(((const uint16_t *)(const void *)row)[k]);
    case GEMM_F16: return f16_to_float(((const uint16_t *)(const void *)row)[k]);
    case GEMM_W8: return (float)(int8_t)row[k] * scales[i_row];
    case GEMM_W4: return (float)((row[k / 2] >> (k % 2 * 4) & 15) - 8) * scales[i_row];
    case GEMM_F8: return e4m3_to_float(row[k]) * scales[i_row / 128 * f8_blocks + k / 128];
    default: return 0;
    }
}

static __global__ void embed_kernel(embed_rows e, size_t row_bytes, size_t scales_at)
{
    grid_dependency_sync();
    const int32_t id = e.ids[blockIdx.x];
    const size_t row = (size_t)(id >= 0 ? id : e.kept[-1 - id]);
    const unsigned char *w = (const unsigned char *)e.w;
    const float *scales = (const float *)(const void *)(w + scales_at);
    for (size_t k = threadIdx.x; k < e.n_in; k += THREADS)
        e.x[blockIdx.x * e.n_in + k] = element(e, w + row * row_bytes, scales, row, k);
}

cudaError_t elementwise_embed(cudaStream_t s, const struct embed_rows *e)
{
    if (e->n_rows == 0) return cudaSuccess;
    return launch(s, embed_kernel, dim3((unsigned)e->n_rows), dim3(THREADS), 0, *e,
                  gemm_row_bytes(e->layout, e->n_in), gemm_scales_at(e->layout, e->n_out, e->n_in));
}
