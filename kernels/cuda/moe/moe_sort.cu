/* moe_sort.cu - the launches that sort rows by expert. Thread: device; moe_sort_rows: engine. */
#include "kernels/cuda/moe/moe_sort.cuh"

#include "kernels/cuda/moe/moe_route.h"

enum {
    SORT_THREADS = 256,
    PLACE_THREADS = 128,
    PLACE_WARPS = PLACE_THREADS / WARP,
    SCAN_AHEAD = 16 /* blocks of a lane */
};

/* Counts each expert's slots and where they begin, also in count [n_experts + 1]. One block. */
static __device__ __forceinline__ void begin_slots(const moe_sort_args &a, int *count)
{
    const int step = (int)blockDim.x, n = real_choices(a);
    for (int e = (int)threadIdx.x; e <= a.n_experts; e += step) count[e] = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < n; i += step) atomicAdd(&count[a.experts[i] + 1], 1);
    /* padding rows: their results are not used */
    for (int i = n + (int)threadIdx.x; i < a.n; i += step) a.index[i] = 0;
    __syncthreads();
    if (threadIdx.x < WARP) sum_up(count, a.n_experts);
    __syncthreads();
    for (int e = (int)threadIdx.x; e <= a.n_experts; e += step) a.begin[e] = count[e];
}

static __global__ void __launch_bounds__(SORT_THREADS) expert_begins_kernel(moe_sort_args a)
{
    grid_dependency_sync();
    begin_slots(a, (int *)(void *)shared_memory());
}

static __global__ void __launch_bounds__(ONE_BLOCK_CHOICES) sort_kernel(moe_sort_args a)
{
    grid_dependency_sync();
    const int i = (int)threadIdx.x;
    sort_one_block(a, i < real_choices(a) ? a.experts[i] : -1);
}

/* A block searches all choices for one expert, SORT_THREADS at a time. */
static __global__ void __launch_bounds__(SORT_THREADS) slots_kernel(moe_sort_args a)
{
    grid_dependency_sync();
    __shared__ int found[SORT_THREADS / WARP];
    const int lane = (int)(threadIdx.x % WARP), warp = (int)(threadIdx.x / WARP),
              end = a.begin[blockIdx.x + 1], n = real_choices(a);
    int slot = a.begin[blockIdx.x];
    for (int at = 0; at < n && slot < end; at += SORT_THREADS) {
        const int i = at + (int)threadIdx.x;
        const bool mine = i < n && a.experts[i] == (int)blockIdx.x;
        const unsigned who = __ballot_sync(0xffffffffu, mine);
        if (lane == 0) found[warp] = __popc(who);
        __syncthreads();
        int before = 0, all = 0;
        for (int w = 0; w < SORT_THREADS / WARP; w++) {
            if (w < warp) before += found[w];
            all += found[w];
        }
        if (mine) {
            const int mine_at = slot + before + __popc(who & ((1u << lane) - 1));
            a.index[i] = mine_at;
            a.rows[mine_at] = i / a.n_used;
        }
        slot += all;
        __syncthreads();
    }
}

/* ---- what the route kernel's blocks have counted ---- */

/* A warp has an expert: turns its blocks' counts into sums of the blocks before. A lane has
 * SCAN_AHEAD blocks in a row, whose counts it loads at a time. */
static __global__ void __launch_bounds__(SORT_THREADS) scan_counts_kernel(moe_sort_args a)
{
    grid_dependency_sync();
    const int lane = (int)(threadIdx.x % WARP),
              e = (int)((blockIdx.x * SORT_THREADS + threadIdx.x) / WARP),
              per_block = SORT_ROWS * a.n_used, n_blocks = (a.n + per_block - 1) / per_block;
    int total = 0;
    if (e >= a.n_experts) return;
#pragma unroll 1
    for (int first = 0; first < n_blocks; first += SCAN_AHEAD * WARP) {
        const int mine = first + lane * SCAN_AHEAD;
        int32_t *counts = counts_of(a, mine) + e;
        const int step = SORT_ROWS * a.n_experts;
        int count[SCAN_AHEAD], sum = 0;
#pragma unroll
        for (int i = 0; i < SCAN_AHEAD; i++) count[i] = mine + i < n_blocks ? counts[i * step] : 0;
#pragma unroll
        for (int i = 0; i < SCAN_AHEAD; i++) sum += count[i];
        const int up_to = warp_prefix_sum(sum);
        int before = total + up_to - sum;
#pragma unroll
        for (int i = 0; i < SCAN_AHEAD; i++) {
            if (mine + i < n_blocks) counts[i * step] = before;
            before += count[i];
        }
        total += __shfl_sync(0xffffffffu, up_to, WARP - 1);
    }
    if (lane == 0) totals_of(a)[e] = total;
}

/* Gives the choices of the route kernel's block their slots, PLACE_THREADS at a time. start
 * [n_experts]: the next slot of each expert. counts [PLACE_WARPS][n_experts], zero: of the warps
 * before. */
static __device__ __forceinline__ void place_choices(const moe_sort_args &a, int32_t *start,
                                                     int32_t *counts)
{
    const int lane = (int)(threadIdx.x % WARP), warp = (int)(threadIdx.x / WARP),
              first = (int)blockIdx.x * SORT_ROWS * a.n_used,
              end = min(real_choices(a), first + SORT_ROWS * a.n_used);
    for (int at = first; at < end; at += PLACE_THREADS) {
        const int i = at + (int)threadIdx.x, e = i < end ? a.experts[i] : -1;
        const unsigned same = __match_any_sync(0xffffffffu, e);
        const int rank = __popc(same & ((1u << lane) - 1)), n = __popc(same);
        const bool leads = e >= 0 && rank == 0;
        if (leads) counts[warp * a.n_experts + e] = n;
        __syncthreads();
        if (e >= 0) {
            int slot = start[e] + rank;
            for (int w = 0; w < warp; w++) slot += counts[w * a.n_experts + e];
            a.index[i] = slot;
            a.rows[slot] = i / a.n_used;
        }
        __syncthreads();
        if (leads) {
            atomicAdd(&start[e], n);
            counts[warp * a.n_experts + e] = 0;
        }
        __syncthreads();
    }
}

/* A block for each of the route kernel's. Shared memory: start [n_experts + 1], counts. */
static __global__ void __launch_bounds__(PLACE_THREADS) place_kernel(moe_sort_args a)
{
    grid_dependency_sync();
    int32_t *start = (int32_t *)(void *)shared_memory(), *counts = start + a.n_experts + 1;
    const int32_t *before = counts_of(a, (int)blockIdx.x);
    if (threadIdx.x == 0) start[0] = 0;
    for (int e = (int)threadIdx.x; e < a.n_experts; e += PLACE_THREADS)
        start[e + 1] = totals_of(a)[e];
    for (int i = (int)threadIdx.x; i < PLACE_WARPS * a.n_experts; i += PLACE_THREADS) counts[i] = 0;
    __syncthreads();
    if (threadIdx.x < WARP) sum_up(start, a.n_experts);
    __syncthreads();
    if (blockIdx.x == 0)
        for (int e = (int)threadIdx.x; e <= a.n_experts; e += PLACE_THREADS) a.begin[e] = start[e];
    __syncthreads();
    for (int e = (int)threadIdx.x; e < a.n_experts; e += PLACE_THREADS) start[e] += before[e];
    __syncthreads();
    place_choices(a, start, counts);
}

cudaError_t moe_sort_run(cudaStream_t s, const moe_sort_args &a)
{
    const size_t counts = sizeof(int) * ((size_t)a.n_experts + 1);
    if (a.n <= ONE_BLOCK_CHOICES)
        return launch(s, sort_kernel, dim3(1), dim3(sort_one_block_threads(a)),
                      sort_one_block_shared(a), a);
    if (!a.scratch) {
        cudaError_t e = launch(s, expert_begins_kernel, dim3(1), dim3(SORT_THREADS), counts, a);
        if (e != cudaSuccess) return e;
        return launch(s, slots_kernel, dim3((unsigned)a.n_experts), dim3(SORT_THREADS), 0, a);
    }
    cudaError_t e = launch(s, scan_counts_kernel,
                           dim3(blocks_for((size_t)a.n_experts, SORT_THREADS / WARP)),
                           dim3(SORT_THREADS), 0, a);
    if (e != cudaSuccess) return e;
    return launch(s, place_kernel, dim3(blocks_for((size_t)a.n, SORT_ROWS * (size_t)a.n_used)),
                  dim3(PLACE_THREADS), counts + sizeof(int) * PLACE_WARPS * (size_t)a.n_experts, a);
}

cudaError_t moe_sort_rows(cudaStream_t s, const struct experts_args *a, const int32_t *n_real_rows)
{
    const moe_sort_args sort = { a->experts,
                                 a->rows,
                                 a->index,
                                 a->begin,
                                 a->n_experts,
                                 a->n_used,
                                 (int32_t)(a->n_rows * (size_t)a->n_used),
                                 n_real_rows,
                                 0,
                                 NULL };
    return moe_sort_run(s, sort);
}
