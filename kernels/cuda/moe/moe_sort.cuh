/* moe_sort.cuh - sorts (row, choice) pairs by expert, and within an expert by row: what one block
 * does. Thread: device; moe_sort_run: engine. */
#ifndef BATON_KERNELS_CUDA_MOE_SORT_CUH
#define BATON_KERNELS_CUDA_MOE_SORT_CUH

#include "kernels/cuda/launch.cuh"
#include "kernels/kernels.h"

struct moe_sort_args {
    const int32_t *experts;
    int32_t *rows, *index, *begin;
    int32_t n_experts, n_used, n; /* n: rows times used */
    const int32_t *n_real_rows;
    int32_t first_row; /* of these rows among those that n_real_rows counts */
    int32_t *scratch;  /* of the route kernel's blocks; NULL: they count nothing */
};

enum {
    SORT_ROWS = 16,          /* rows of a block that counts */
    ONE_BLOCK_CHOICES = 1024 /* the most that one block sorts */
};

/* Where block i of the route kernel counts each expert, and after the first block's the totals: in
 * the logits of its rows, which it has read. */
static __device__ __forceinline__ int32_t *counts_of(const moe_sort_args &a, int i)
{
    return a.scratch + (size_t)i * SORT_ROWS * (size_t)a.n_experts;
}
static __device__ __forceinline__ int32_t *totals_of(const moe_sort_args &a)
{
    return a.scratch + a.n_experts;
}

/* The number of choices of real rows. */
static __device__ __forceinline__ int real_choices(const moe_sort_args &a)
{
    return a.n_real_rows ? min(a.n, max(0, *a.n_real_rows - a.first_row) * a.n_used) : a.n;
}

static __device__ __forceinline__ int warp_prefix_sum(int x)
{
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, x, (unsigned)step);
        if ((int)(threadIdx.x % WARP) >= step) x += other;
    }
    return x;
}

/* Turns count[1 .. n] into prefix sums, by the first warp. */
static __device__ __forceinline__ void sum_up(int *count, int n)
{
    const int lane = (int)threadIdx.x;
    int before = 0;
    for (int first = 1; first <= n; first += WARP) {
        const int sum = warp_prefix_sum(first + lane <= n ? count[first + lane] : 0);
        if (first + lane <= n) count[first + lane] = before + sum;
        before += __shfl_sync(0xffffffffu, sum, WARP - 1);
    }
}

/* Sorts few choices, which are in shared memory, too: each counts those before it. */
static __device__ __forceinline__ void sort_few(const moe_sort_args &a, const int32_t *chosen)
{
    const int step = (int)blockDim.x, n = real_choices(a);
    for (int i = (int)threadIdx.x; i < a.n; i += step) {
        int slot = 0;
#pragma unroll 2
        for (int j = 0; j < n; j++)
            slot += chosen[j] < chosen[i] || (chosen[j] == chosen[i] && j < i);
        a.index[i] = i < n ? slot : 0; /* padding rows: their results are not used */
        if (i < n) a.rows[slot] = i / a.n_used;
    }
    for (int e = (int)threadIdx.x; e <= a.n_experts; e += step) {
        int before = 0;
#pragma unroll 2
        for (int j = 0; j < n; j++) before += chosen[j] < e;
        a.begin[e] = before;
    }
}

/* Sorts ONE_BLOCK_CHOICES, one a thread, whose expert is e, or -1 of padding: a warp counts those
 * of each expert, the counts of the warps before are summed, then experts. Shared memory: begins
 * [n_experts + 1], counts [n_experts] of as many warps as there are. */
static __device__ __forceinline__ void sort_one_block(const moe_sort_args &a, int e)
{
    int32_t *begin = (int32_t *)(void *)shared_memory();
    uint16_t *counts = (uint16_t *)(void *)(begin + a.n_experts + 1);
    const int i = (int)threadIdx.x, lane = i % WARP, n_warps = (int)blockDim.x / WARP;
    uint16_t *mine = counts + i / WARP * a.n_experts;
#pragma unroll 1
    for (int at = i; at < n_warps * a.n_experts; at += (int)blockDim.x) counts[at] = 0;
    __syncthreads();
    const unsigned same = __match_any_sync(0xffffffffu, e);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (e >= 0 && rank == 0) mine[e] = (uint16_t)__popc(same);
    __syncthreads();
#pragma unroll 1
    for (int x = i; x < a.n_experts; x += (int)blockDim.x) {
        int before = 0;
#pragma unroll 4
        for (int w = 0; w < n_warps; w++) {
            const int here = counts[w * a.n_experts + x];
            counts[w * a.n_experts + x] = (uint16_t)before;
            before += here;
        }
        begin[x + 1] = before;
    }
    if (i == 0) begin[0] = 0;
    __syncthreads();
    if (i < WARP) sum_up(begin, a.n_experts);
    __syncthreads();
#pragma unroll 1
    for (int x = i; x <= a.n_experts; x += (int)blockDim.x) a.begin[x] = begin[x];
    const int slot = e >= 0 ? begin[e] + mine[e] + rank : 0;
    if (i < a.n) a.index[i] = slot; /* padding rows: their results are not used */
    if (e >= 0) a.rows[slot] = i / a.n_used;
}

/* The threads and shared memory of that. A rank without rows still needs its begins. */
static inline unsigned sort_one_block_threads(const moe_sort_args &a)
{
    return (a.n > 0 ? blocks_for((size_t)a.n, WARP) : 1) * WARP;
}
static inline size_t sort_one_block_shared(const moe_sort_args &a)
{
    return sizeof(int) * ((size_t)a.n_experts + 1) +
           sizeof(uint16_t) * (sort_one_block_threads(a) / WARP) * (size_t)a.n_experts;
}

enum { /* bytes: available to a block on every GPU from 8.0 on, including 8.6 and 8.9 */
       ROUTE_SHARED_MAX = 96 * 1024
};

/* Counts the choices of a block's rows, in shared memory, by expert. count [n_experts]: scratch. */
static __device__ __forceinline__ void count_choices(const moe_sort_args &a, const int32_t *chosen,
                                                     int32_t *count)
{
    const int step = (int)blockDim.x, first = (int)blockIdx.x * SORT_ROWS * a.n_used,
              all = min(SORT_ROWS * a.n_used, a.n - first), n = real_choices(a) - first;
    for (int e = (int)threadIdx.x; e < a.n_experts; e += step) count[e] = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < all; i += step) {
        if (i < n) atomicAdd(&count[chosen[i]], 1);
        else a.index[first + i] = 0; /* padding rows: their results are not used */
    }
    __syncthreads();
    for (int e = (int)threadIdx.x; e < a.n_experts; e += step)
        counts_of(a, (int)blockIdx.x)[e] = count[e];
}

/* The sort that a call of route asks for, if it does. */
static inline moe_sort_args sort_of_route(const route_args &a, const int32_t *n_real_rows)
{
    const size_t n = a.n_rows * (size_t)a.n_used;
    const bool counts = a.rows && n > ONE_BLOCK_CHOICES;
    return moe_sort_args{
        a.experts, a.rows,     a.index,     a.begin, a.n_experts,
        a.n_used,  (int32_t)n, n_real_rows, 0,       counts ? (int32_t *)(void *)a.logits : NULL
    };
}

/* Sorts in one or two launches. */
cudaError_t moe_sort_run(cudaStream_t s, const moe_sort_args &a);

#endif
