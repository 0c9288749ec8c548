/* moe_router.cu - a router of few rows in one launch: norm, product, choice of experts, sort.
 *
 * Every block normalises all rows into shared memory and computes some columns of the product; the
 * last one to arrive routes and sorts. Norm and product have the order of rms_norm.cuh and
 * gemm_f32.cuh, so the bits are those of the separate kernels. W does not depend on the kernel
 * before: its first elements are loaded while that one ends. Thread: device; moe_router:
 * engine. */
#include "kernels/cuda/gemm/gemm_f32.cuh"
#include "kernels/cuda/moe_route.h"
#include "kernels/cuda/moe_route_row.cuh"
#include "kernels/cuda/moe_sort.cuh"
#include "kernels/cuda/rms_norm.cuh"

enum {
    ROUTER_THREADS = 512,
    ROUTER_WARPS = ROUTER_THREADS / WARP,
    ROUTER_ROWS = 8,
    ROUTER_ACROSS = WARP / F32_LANES, /* a warp's columns */
    ROUTER_AHEAD = 4                  /* steps of W that are loaded at a time */
};

struct router_call {
    route_args route;
    moe_sort_args sort; /* rows NULL: not to be sorted */
    const unsigned char *w;
    size_t row_bytes;
    const float *x, *norm;
    float *h;
    float eps;
    int32_t n_in;
    unsigned *arrived; /* zero between calls */
};

static __host__ __device__ __forceinline__ int32_t router_steps(int32_t n_in)
{
    return (n_in + F32_STEP - 1) / F32_STEP;
}

/* A thread's quads of a row of W: of steps first, first + K_WARPS, .. */
template <int K_WARPS>
static __device__ __forceinline__ void load_w(float4 w[ROUTER_AHEAD], const float4 *row,
                                              int32_t first, int32_t n_steps)
{
#pragma unroll
    for (int a = 0; a < ROUTER_AHEAD; a++) {
        const int32_t step = first + a * K_WARPS;
        w[a] = step < n_steps ? __ldg(row + step * F32_LANES) : make_float4(0, 0, 0, 0);
    }
}

/* Normalises all rows into h [n_rows][n_steps 32], zeros from n_in on. Half of the threads have
 * every second row. norm: c.norm in shared memory. */
static __device__ __forceinline__ void normalise_rows(const router_call &c, const float *norm,
                                                      float *h, int32_t stride)
{
    __shared__ float warps[ROUTER_ROWS][RMS_WARPS];
    const int32_t n_rows = (int32_t)c.route.n_rows, thread = (int32_t)threadIdx.x % RMS_THREADS,
                  half = (int32_t)threadIdx.x / RMS_THREADS;
    for (int32_t r = half; r < n_rows; r += ROUTER_THREADS / RMS_THREADS) {
        const float squares = rms_warp_squares(c.x + (size_t)r * (size_t)c.n_in, (size_t)c.n_in,
                                               (unsigned)thread);
        if (thread % WARP == 0) warps[r][thread / WARP] = squares;
    }
    __syncthreads();
    for (int32_t r = half; r < n_rows; r += ROUTER_THREADS / RMS_THREADS) {
        const float factor = rms_factor(warps[r], (size_t)c.n_in, c.eps);
        const float *x = c.x + (size_t)r * (size_t)c.n_in;
#pragma unroll 4
        for (int32_t i = thread; i < stride; i += RMS_THREADS)
            h[r * stride + i] = i < c.n_in ? rms_element(x[i], norm[i], factor) : 0;
    }
    __syncthreads();
}

/* Each block stores a part of h for the experts. */
static __device__ __forceinline__ void store_h(const router_call &c, const float *h, int32_t stride)
{
    const int32_t step = (int32_t)gridDim.x * ROUTER_THREADS;
    for (int32_t r = 0; r < (int32_t)c.route.n_rows; r++)
        for (int32_t i = (int32_t)(blockIdx.x * ROUTER_THREADS + threadIdx.x); i < c.n_in;
             i += step)
            c.h[(size_t)r * (size_t)c.n_in + (size_t)i] = h[r * stride + i];
}

/* sums [ROWS] of a thread's column over its k's; w: the first quads. */
template <int K_WARPS, int ROWS>
static __device__ __forceinline__ void multiply_column(float *sums, const router_call &c,
                                                       float4 w[ROUTER_AHEAD], const float4 *row,
                                                       const float *h, int32_t n_steps)
{
    const int32_t lane = (int32_t)threadIdx.x % F32_LANES;
    const float4 *x = (const float4 *)(const void *)h + lane;
    for (int32_t first = (int32_t)threadIdx.x / WARP % K_WARPS; first < n_steps;) {
#pragma unroll
        for (int a = 0; a < ROUTER_AHEAD; a++) {
            const int32_t step = first + a * K_WARPS;
            if (step >= n_steps) break;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (ROWS == 1 || r < (int)c.route.n_rows)
                    sums[r] = multiply_quad(sums[r], w[a], x[(r * n_steps + step) * F32_LANES]);
        }
        first += ROUTER_AHEAD * K_WARPS;
        load_w<K_WARPS>(w, row, first, n_steps);
    }
}

/* Adds lanes, then warps, and stores the block's columns of logits. */
template <int K_WARPS, int ROWS>
static __device__ __forceinline__ void store_logits(const router_call &c, const float *sums)
{
    enum { COLUMNS = ROUTER_WARPS / K_WARPS * ROUTER_ACROSS };
    __shared__ float part[ROUTER_WARPS][ROWS][ROUTER_ACROSS];
    const int warp = (int)threadIdx.x / WARP, eighth = (int)threadIdx.x % WARP / F32_LANES;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const float sum = add_lanes(sums[r]);
        if (threadIdx.x % F32_LANES == 0) part[warp][r][eighth] = sum;
    }
    __syncthreads();
    static_assert((int)COLUMNS * ROWS <= ROUTER_THREADS, "a thread each");
    const int r = (int)threadIdx.x / COLUMNS, at = (int)threadIdx.x % COLUMNS,
              column = (int)blockIdx.x * COLUMNS + at;
    if (r >= (int)c.route.n_rows || column >= c.route.n_experts) return;
    const int first = at / ROUTER_ACROSS * K_WARPS, j = at % ROUTER_ACROSS;
    float sum = part[first][r][j];
    for (int k = 1; k < K_WARPS; k++) sum = __fadd_rn(sum, part[first + k][r][j]);
    /* as a product without bias adds 0 */
    c.route.logits[(size_t)r * (size_t)c.route.n_experts + (size_t)column] = __fadd_rn(sum, 0.0f);
}

/* Whether all other blocks have stored their logits. */
static __device__ __forceinline__ bool is_last_block(const router_call &c)
{
    __shared__ unsigned before;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        before = atomicInc(c.arrived, gridDim.x - 1);
        __threadfence();
    }
    __syncthreads();
    return before == gridDim.x - 1;
}

static __device__ __forceinline__ void route_and_sort(const router_call &c, float *rooms)
{
    __shared__ int32_t chosen[ROUTER_ROWS * KERNEL_EXPERTS_USED_MAX];
    const size_t warp = threadIdx.x / WARP;
    if (warp < c.route.n_rows)
        route_row(c.route, warp, rooms + warp * route_floats(c.route),
                  chosen + warp * (size_t)c.route.n_used);
    __syncthreads();
    if (c.sort.rows) sort_few(c.sort, chosen);
}

/* What does not depend on the kernel before, while that one ends: the norm's weights, and, for the
 * last block, those of the choice. */
static __device__ __forceinline__ void load_ahead(const router_call &c, float *norm)
{
    const int32_t n = c.route.n_experts * (int32_t)sizeof(float);
    if (c.route.bias && threadIdx.x == 0 && (uintptr_t)c.route.bias % 16 == 0)
        prefetch_l2(c.route.bias, (unsigned)n / 16 * 16);
#pragma unroll 4
    for (int32_t i = (int32_t)threadIdx.x; i < c.n_in; i += ROUTER_THREADS)
        norm[i] = __ldg(c.norm + i);
}

/* Shared memory: h and the norm's weights; later the rows' memory for routing. */
template <int K_WARPS, int ROWS>
static __global__ void __launch_bounds__(ROUTER_THREADS, 1)
    router_kernel(const __grid_constant__ router_call c)
{
    enum { COLUMNS = ROUTER_WARPS / K_WARPS * ROUTER_ACROSS };
    const int32_t n_steps = router_steps(c.n_in), warp = (int32_t)threadIdx.x / WARP,
                  at = warp / K_WARPS * ROUTER_ACROSS + (int32_t)threadIdx.x % WARP / F32_LANES,
                  column = min((int32_t)blockIdx.x * COLUMNS + at, c.route.n_experts - 1);
    const float4 *row = (const float4 *)(const void *)(c.w + (size_t)column * c.row_bytes) +
                        threadIdx.x % F32_LANES;
    float *h = (float *)(void *)shared_memory(),
          *norm = h + (int32_t)c.route.n_rows * n_steps * F32_STEP;
    float4 w[ROUTER_AHEAD];
    float sums[ROWS] = {};
    load_w<K_WARPS>(w, row, warp % K_WARPS, n_steps);
    load_ahead(c, norm);
    grid_dependency_sync();
    normalise_rows(c, norm, h, n_steps * F32_STEP);
    store_h(c, h, n_steps * F32_STEP);
    multiply_column<K_WARPS, ROWS>(sums, c, w, row, h, n_steps);
    store_logits<K_WARPS, ROWS>(c, sums);
    if (is_last_block(c)) route_and_sort(c, h);
}

static size_t router_shared(const struct router_args *a)
{
    const size_t h = (size_t)router_steps((int32_t)a->w->n_in) * F32_STEP,
                 room = route_floats(a->route);
    const size_t first = (a->route.n_rows + 1) * h, then = a->route.n_rows * room;
    return (first > then ? first : then) * sizeof(float);
}

bool moe_router_fits(const struct router_args *a)
{
    return a->route.n_rows >= 1 && a->route.n_rows <= ROUTER_ROWS &&
           a->route.n_used <= KERNEL_EXPERTS_USED_MAX && router_shared(a) <= ROUTE_SHARED_MAX;
}

template <int K_WARPS, int ROWS>
static cudaError_t run(cudaStream_t s, const router_call &c, size_t shared)
{
    enum { COLUMNS = ROUTER_WARPS / K_WARPS * ROUTER_ACROSS };
    return launch(s, router_kernel<K_WARPS, ROWS>,
                  dim3(blocks_for((size_t)c.route.n_experts, COLUMNS)), dim3(ROUTER_THREADS),
                  shared, c);
}

cudaError_t moe_router(cudaStream_t s, const struct router_args *a, const int32_t *n_real_rows,
                       void *scratch)
{
    const router_call c = { a->route,
                            sort_of_route(a->route, n_real_rows),
                            (const unsigned char *)a->w->data,
                            gemm_row_bytes(GEMM_F32, a->w->n_in),
                            a->x,
                            a->norm,
                            a->h,
                            a->eps,
                            (int32_t)a->w->n_in,
                            (unsigned *)scratch };
    const size_t shared = router_shared(a);
    const bool one = a->route.n_rows == 1;
    if (f32_splits_k(a->w->n_out, a->w->n_in))
        return one ? run<F32_SPLIT_K_WARPS, 1>(s, c, shared)
                   : run<F32_SPLIT_K_WARPS, ROUTER_ROWS>(s, c, shared);
    return one ? run<1, 1>(s, c, shared) : run<1, ROUTER_ROWS>(s, c, shared);
}
