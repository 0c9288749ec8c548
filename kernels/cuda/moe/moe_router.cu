/* moe_router.cu - a router of few rows in one launch: norm, product, choice of experts, sort.
 *
 * blockIdx.y has ROWS rows; each of its blocks normalises them into shared memory and computes some
 * columns of the product, and the last one to arrive routes them. One block row also sorts; with
 * more, a second launch does. Norm and product have the order of rms_norm.cuh and gemm_f32.cuh, and
 * scores that of moe_route_row.cuh, so the bits are those of the separate kernels. W and the norm's
 * weights do not depend on the kernel before: they are loaded while that one ends.
 * Thread: device; moe_router: engine. */
#include "kernels/cuda/moe/moe_route.h"
#include "kernels/cuda/moe/moe_router_few.cuh"
#include "kernels/cuda/moe/moe_router_one.cuh"

enum {
    ROUTER_ROWS_MAX = 64,
    ROUTER_AHEAD = 4 /* steps of W that are loaded at a time */
};

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

static __device__ __forceinline__ void load_norm(const router_call &c, float4 *norm)
{
#pragma unroll 1
    for (int32_t q = (int32_t)threadIdx.x; q < c.n_in / RMS_QUAD; q += ROUTER_THREADS)
        norm[q] = __ldg((const float4 *)(const void *)c.norm + q);
}

/* Normalises the rows into h [rows][stride], zeros from n_in on. Half of the threads have every
 * second row. Quads everywhere. */
static __device__ __forceinline__ void normalise_rows(const router_call &c, const router_rows &rows,
                                                      const float4 *norm, float4 *h, int32_t stride)
{
    __shared__ float warps[ROUTER_ROWS][RMS_WARPS];
    const int32_t thread = (int32_t)(threadIdx.x % RMS_THREADS),
                  half = (int32_t)(threadIdx.x / RMS_THREADS);
    const unsigned n = (unsigned)c.n_in;
#pragma unroll 1
    for (int32_t r = half; r < rows.n; r += ROUTER_THREADS / RMS_THREADS) {
        const float *x = c.x + (rows.first + (size_t)r) * n;
        float squares = 0;
#pragma unroll 1
        for (unsigned k = (unsigned)thread * RMS_QUAD; k < n; k += RMS_AHEAD * RMS_STEP) {
            float4 v[RMS_AHEAD];
            rms_load<true>(v, x, k, n);
            squares = rms_squares(squares, v);
        }
        squares = warp_sum(squares);
        if (thread % WARP == 0) warps[r][thread / WARP] = squares;
    }
    __syncthreads();
#pragma unroll 1
    for (int32_t r = half; r < rows.n; r += ROUTER_THREADS / RMS_THREADS) {
        const float factor = rms_factor(warps[r], n, c.eps);
        const float *x = c.x + (rows.first + (size_t)r) * n;
#pragma unroll 2
        for (int32_t q = thread; q < stride; q += RMS_THREADS)
            h[r * stride + q] = q * RMS_QUAD < c.n_in
                                    ? rms_apply(rms_quad<true>(x, (unsigned)q * RMS_QUAD, n),
                                                norm[q], factor)
                                    : make_float4(0, 0, 0, 0);
    }
    __syncthreads();
}

/* Each block stores a part of h for the experts. */
static __device__ __forceinline__ void store_h(const router_call &c, const router_rows &rows,
                                               const float4 *h, int32_t stride)
{
    const int32_t n = c.n_in / RMS_QUAD;
    float4 *to = (float4 *)(void *)c.h + rows.first * (size_t)n;
#pragma unroll 1
    for (int32_t r = 0; r < rows.n; r++)
#pragma unroll 1
        for (int32_t q = (int32_t)(blockIdx.x * ROUTER_THREADS + threadIdx.x); q < n;
             q += (int32_t)gridDim.x * ROUTER_THREADS)
            to[r * n + q] = h[r * stride + q];
}

/* sums [ROWS] of a thread's column over its k's; w: the first quads. */
template <int K_WARPS, int ROWS>
static __device__ __forceinline__ void multiply_column(float *sums, float4 w[ROUTER_AHEAD],
                                                       const float4 *row, const float4 *h,
                                                       int32_t n_rows, int32_t n_steps)
{
    const float4 *x = h + threadIdx.x % F32_LANES;
#pragma unroll 1
    for (int32_t first = (int32_t)(threadIdx.x / WARP % K_WARPS); first < n_steps;) {
#pragma unroll
        for (int a = 0; a < ROUTER_AHEAD; a++) {
            const int32_t step = first + a * K_WARPS;
            if (step >= n_steps) break;
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (ROWS == 1 || r < n_rows)
                    sums[r] = multiply_quad(sums[r], w[a], x[(r * n_steps + step) * F32_LANES]);
        }
        first += ROUTER_AHEAD * K_WARPS;
        if (first < n_steps) load_w<K_WARPS>(w, row, first, n_steps);
    }
}

/* Shared memory: h and the norm's weights; later the rows' memory for routing. */
template <int K_WARPS, int ROWS>
static __global__ void __launch_bounds__(ROUTER_THREADS)
    router_kernel(const __grid_constant__ router_call c)
{
    enum { COLUMNS = ROUTER_WARPS / K_WARPS * ROUTER_ACROSS };
    const int32_t n_steps = router_steps(c.n_in), k_warp = (int32_t)(threadIdx.x / WARP % K_WARPS),
                  at = (int32_t)(threadIdx.x / WARP / K_WARPS * ROUTER_ACROSS +
                                 threadIdx.x % WARP / F32_LANES),
                  column = min((int32_t)blockIdx.x * COLUMNS + at, c.route.n_experts - 1);
    router_rows rows = { (size_t)blockIdx.y * ROUTER_ROWS, 1 };
    if (ROWS > 1) rows.n = (int32_t)min(c.route.n_rows - rows.first, (size_t)ROUTER_ROWS);
    const float4 *row = (const float4 *)(const void *)(c.w + (size_t)column * c.row_bytes) +
                        threadIdx.x % F32_LANES;
    float4 *h = (float4 *)(void *)shared_memory(), *norm = h + ROWS * n_steps * F32_LANES;
    float4 w[ROUTER_AHEAD];
    float sums[ROWS] = {};
    load_w<K_WARPS>(w, row, k_warp, n_steps);
    prefetch_bias(c);
    load_norm(c, norm);
    grid_dependency_sync();
    normalise_rows(c, rows, norm, h, n_steps * F32_LANES);
    store_h(c, rows, h, n_steps * F32_LANES);
    multiply_column<K_WARPS, ROWS>(sums, w, row, h, rows.n, n_steps);
    store_logits<K_WARPS, ROWS>(c, rows, sums);
    if (is_last_block(c)) route_rows(c.route, c.sort, rows, (float *)(void *)h);
}

/* Rows of a block. */
static size_t router_block_rows(const struct router_args *a)
{
    return a->route.n_rows > 1 ? ROUTER_ROWS : 1;
}

static size_t router_shared(const struct router_args *a)
{
    const size_t h = (size_t)router_steps((int32_t)a->w->n_in) * F32_STEP,
                 rows = router_block_rows(a), first = (rows + 1) * h,
                 then = rows * router_room_words(a->route);
    return (first > then ? first : then) * sizeof(float);
}

bool moe_router_fits(const struct router_args *a)
{
    const uintptr_t quads = (uintptr_t)a->x | (uintptr_t)a->norm | (uintptr_t)a->h |
                            a->w->n_in * sizeof(float);
    return a->route.n_rows >= 1 && a->route.n_rows <= ROUTER_ROWS_MAX &&
           a->route.n_used <= KERNEL_EXPERTS_USED_MAX && quads % sizeof(float4) == 0 &&
           router_shared(a) <= ROUTE_SHARED_MAX;
}

template <int K_WARPS, int ROWS>
static cudaError_t run(cudaStream_t s, const router_call &c, size_t shared)
{
    enum { COLUMNS = ROUTER_WARPS / K_WARPS * ROUTER_ACROSS };
    const dim3 grid(blocks_for((size_t)c.route.n_experts, COLUMNS),
                    blocks_for(c.route.n_rows, ROUTER_ROWS));
    return launch(s, router_kernel<K_WARPS, ROWS>, grid, dim3(ROUTER_THREADS), shared, c);
}

template <int STRIDE> static cudaError_t run_few(cudaStream_t s, router_call c)
{
    const dim3 grid(blocks_for((size_t)c.route.n_experts, ROUTER_ACROSS),
                    blocks_for(c.route.n_rows, ROUTER_ROWS));
    c.h_steps = blocks_for((size_t)router_steps(c.n_in), grid.x);
    return launch(s, router_few_kernel<STRIDE>, grid, dim3(ROUTER_THREADS),
                  (ROUTER_ROWS + 1) * STRIDE * sizeof(float4), c);
}

template <int AHEAD> static cudaError_t run_one(cudaStream_t s, router_call c)
{
    const dim3 grid(blocks_for((size_t)c.route.n_experts, ROUTER_ACROSS));
    c.h_steps = blocks_for((size_t)router_steps(c.n_in), grid.x);
    if (is_route_of_few(c.route))
        return launch(s, router_one_kernel<AHEAD, true>, grid, dim3(ROUTER_THREADS), 0, c);
    return launch(s, router_one_kernel<AHEAD, false>, grid, dim3(ROUTER_THREADS),
                  router_room_words(c.route) * sizeof(float), c);
}

static cudaError_t run_fitting(cudaStream_t s, const struct router_args *a, const router_call &c)
{
    const size_t shared = router_shared(a), n_in = a->w->n_in,
                 per_ahead = (size_t)F32_SPLIT_K_WARPS * F32_STEP;
    const bool one = a->route.n_rows == 1;
    if (!f32_splits_k(a->w->n_out, n_in))
        return one ? run<1, 1>(s, c, shared) : run<1, ROUTER_ROWS>(s, c, shared);
    if (!one && is_route_of_few(a->route) && n_in <= 640 * RMS_QUAD)
        return n_in <= 512 * RMS_QUAD ? run_few<512>(s, c) : run_few<640>(s, c);
    if (!one) return run<F32_SPLIT_K_WARPS, ROUTER_ROWS>(s, c, shared);
    return n_in <= 4 * per_ahead   ? run_one<4>(s, c)
           : n_in <= 6 * per_ahead ? run_one<6>(s, c)
                                   : run<F32_SPLIT_K_WARPS, 1>(s, c, shared);
}

cudaError_t moe_router(cudaStream_t s, const struct router_args *a, const int32_t *n_real_rows,
                       void *scratch)
{
    router_call c = { a->route,
                      sort_of_route(a->route, n_real_rows),
                      (const unsigned char *)a->w->data,
                      gemm_row_bytes(GEMM_F32, a->w->n_in),
                      a->x,
                      a->norm,
                      a->h,
                      a->eps,
                      (int32_t)a->w->n_in,
                      (unsigned *)scratch,
                      0 };
    static_assert(ROUTER_ROWS_MAX / ROUTER_ROWS * sizeof(unsigned) <= MOE_ROUTER_SCRATCH,
                  "a counter for each row of blocks");
    if (a->route.n_rows <= ROUTER_ROWS || !c.sort.rows) return run_fitting(s, a, c);
    moe_sort_args sort = c.sort;
    sort.scratch = NULL; /* nobody has counted */
    c.sort.rows = NULL;
    cudaError_t e = run_fitting(s, a, c);
    return e == cudaSuccess ? moe_sort_run(s, sort) : e;
}
