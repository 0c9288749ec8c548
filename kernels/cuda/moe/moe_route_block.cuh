/* moe_route_block.cuh - routes a few rows by a whole block, for decode steps: each row's warps
 * share its experts, all that they exchange is in shared memory, and the choices are those of
 * moe_route_row.cuh, bit for bit. Thread: device. */
#ifndef BATON_KERNELS_CUDA_MOE_ROUTE_BLOCK_CUH
#define BATON_KERNELS_CUDA_MOE_ROUTE_BLOCK_CUH

#include "kernels/cuda/moe/moe_route_row.cuh"
#include "kernels/cuda/moe/moe_sort.cuh"

enum {
    ROUTE_BLOCK_THREADS = 512,
    ROUTE_BLOCK_WARPS = ROUTE_BLOCK_THREADS / WARP,
    ROUTE_BLOCK_ROWS = 8
};

/* The rows of a block. */
struct router_rows {
    size_t first;
    int32_t n;
};

static __device__ __forceinline__ int lane_number() { return (int)(threadIdx.x % WARP); }

/* A row's shared memory, in words; its threads are whole warps. */
struct router_room {
    double *value;
    float *p; /* logits, then scores */
    unsigned *key, *rank, *groups;
    int thread, n_threads; /* no threads: no row */
    size_t row;
};

static __host__ __device__ __forceinline__ size_t router_room_words(const route_args &a)
{
    return 5 * (size_t)a.n_experts + 2 * (size_t)a.n_groups + (size_t)a.n_experts % 2;
}

static __device__ __forceinline__ router_room find_room(const route_args &a,
                                                        const router_rows &rows, float *all)
{
    const int per_row = (int)(ROUTE_BLOCK_WARPS / (unsigned)rows.n) * WARP,
              r = (int)(threadIdx.x / (unsigned)per_row), n = a.n_experts;
    router_room w;
    w.value = (double *)(void *)(all + (size_t)min(r, rows.n - 1) * router_room_words(a));
    w.p = (float *)(w.value + n);
    w.key = (unsigned *)(void *)(w.p + n), w.rank = w.key + n, w.groups = w.rank + n;
    w.thread = (int)threadIdx.x - r * per_row;
    w.n_threads = r < rows.n ? per_row : 0;
    w.row = rows.first + (size_t)r;
    return w;
}

/* The values whose sum scores are divided by. */
static __device__ __forceinline__ void exponentials(const router_room &w, int n)
{
    unsigned top = 0;
#pragma unroll 1
    for (int e = lane_number(); e < n; e += WARP) top = max(top, order_key(w.p[e]));
    const double most = (double)key_value(__reduce_max_sync(0xffffffffu, top));
#pragma unroll 1
    for (int e = w.thread; e < n; e += w.n_threads) w.value[e] = exp_f64((double)w.p[e] - most);
}

/* Scores and keys from the values, or from logits. */
static __device__ __forceinline__ void scores(const route_args &a, const router_room &w)
{
    const bool is_softmax = a.score == route_args::ROUTE_SOFTMAX;
    double by = 0;
    if (is_softmax) {
        double sum = 0;
#pragma unroll 1
        for (int e = lane_number(); e < a.n_experts; e += WARP) sum += w.value[e];
        by = 1.0 / warp_sum_f64(sum);
    }
#pragma unroll 1
    for (int e = w.thread; e < a.n_experts; e += w.n_threads) {
        const float p = is_softmax ? (float)(w.value[e] * by) : sigmoid_score(w.p[e]);
        w.p[e] = p;
        w.key[e] = order_key(a.bias ? p + __ldg(a.bias + e) : p);
        w.rank[e] = 0;
    }
}

/* How many experts come before each: several threads share those of an expert. */
static __device__ __forceinline__ void count_better(const router_room &w, int n)
{
    const unsigned all = (unsigned)n, parts = max((unsigned)w.n_threads / all, 1u),
                   each = (all + parts - 1) / parts;
#pragma unroll 1
    for (unsigned i = (unsigned)w.thread; i < all * parts; i += (unsigned)w.n_threads) {
        const unsigned part = i / all, e = i - part * all, first = part * each,
                       end = min(first + each, all);
        const unsigned key = w.key[e];
        unsigned better = 0;
#pragma unroll 4
        for (unsigned j = first; j < end; j++)
            better += w.key[j] > key || (w.key[j] == key && j < e);
        if (better) atomicAdd(&w.rank[e], better);
    }
}

/* An expert that is NaN is not chosen; the places that are left, if any, are expert 0's. */
static __device__ __forceinline__ void choose(const route_args &a, const router_room &w,
                                              int32_t *chosen)
{
#pragma unroll 1
    for (int e = w.thread; e < a.n_experts; e += w.n_threads)
        if (w.rank[e] < (unsigned)a.n_used && w.key[e]) chosen[w.rank[e]] = e;
}

/* Experts and weights of a row, by its first warp. */
static __device__ __forceinline__ void store_choice(const route_args &a, const router_room &w,
                                                    const int32_t *chosen)
{
    float *weights = (float *)(void *)w.value;
#pragma unroll 1
    for (int j = w.thread; j < a.n_used; j += WARP) {
        weights[j] = w.p[chosen[j]];
        a.experts[w.row * (size_t)a.n_used + (size_t)j] = chosen[j];
    }
    __syncwarp();
    store_weights(a, w.row, weights);
}

/* all: the rows' shared memory. */
static __device__ __forceinline__ void route_rows(const route_args &a, const moe_sort_args &sort,
                                                  const router_rows &rows, float *all)
{
    __shared__ int32_t chosen[ROUTE_BLOCK_ROWS * KERNEL_EXPERTS_USED_MAX];
    const router_room w = find_room(a, rows, all);
    const int n = w.n_threads > 0 ? a.n_experts : 0;
    int32_t *mine = chosen + (size_t)(w.row - rows.first) * (size_t)a.n_used;
#pragma unroll 1
    for (int e = w.thread; e < n; e += w.n_threads)
        w.p[e] = __ldcg(a.logits + w.row * (size_t)a.n_experts + (size_t)e);
    if ((int)threadIdx.x < rows.n * a.n_used) chosen[threadIdx.x] = 0;
    __syncthreads();
    if (n && a.score == route_args::ROUTE_SOFTMAX) exponentials(w, n);
    __syncthreads();
    if (n) scores(a, w);
    __syncthreads();
    if (a.n_groups > 1) {
        if (n && w.thread < WARP) drop_groups(a, w.key, w.groups);
        __syncthreads();
    }
    if (n) count_better(w, n);
    __syncthreads();
    if (n) choose(a, w, mine);
    __syncthreads();
    if (n && w.thread < WARP) store_choice(a, w, mine);
    if (sort.rows) sort_few(sort, chosen);
}

#endif
