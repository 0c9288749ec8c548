/* moe_route.cu - routes tokens to experts, and sorts the rows by expert.
 *
 * Routing: a warp has a row; its scores are in shared memory, and the best is found n_used times.
 * Exponentials are computed in f64 and rounded once, as on the CPU, so near-ties between experts
 * are decided as exactly as f32 logits allow. The cost is the launch: one block does everything for
 * the few rows of a decode step; with more rows there is a launch for routing and one or two for
 * sorting.
 * Thread: device. */
#include "kernels/cuda/moe_route.h"

#include "kernels/cuda/dtype_convert.cuh"

enum { ROUTE_WARPS = 4, SORT_THREADS = 256 };
enum {
    ONE_BLOCK_WARPS_MIN = 8,
    ONE_BLOCK_WARPS = 32 /* a row each, if one block does everything */,
    ONE_BLOCK_CHOICES = 1024 /* the most that one block sorts */
};
enum {
    ONE_BLOCK_SHARED =
        96 * 1024 /* bytes: available to a block on every GPU from 8.0 on, including 8.6 and 8.9 */
};

/* A value and its index. NaN counts as the smallest; of equal values the first wins. */
struct moe_best {
    float value;
    int at;
};

static __device__ bool beats(moe_best a, moe_best b)
{
    const bool a_nan = isnan(a.value), b_nan = isnan(b.value);
    if (a_nan || b_nan) return a_nan && b_nan ? a.at < b.at : b_nan;
    return a.value > b.value || (a.value == b.value && a.at < b.at);
}

/* The index of the best of v [n], over the warp, in every lane. */
static __device__ int warp_best(const float *v, int n)
{
    moe_best b = { NAN, n };
    for (int i = (int)(threadIdx.x % WARP); i < n; i += WARP) {
        const moe_best here = { v[i], i };
        if (beats(here, b)) b = here;
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        const moe_best other = { __shfl_xor_sync(0xffffffffu, b.value, step),
                                 __shfl_xor_sync(0xffffffffu, b.at, step) };
        if (beats(other, b)) b = other;
    }
    return b.at;
}

static __device__ double warp_sum_f64(double x)
{
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* Computes p [n] from logits. */
static __device__ void score(const route_args &a, const float *logits, float *p)
{
    const int lane = (int)(threadIdx.x % WARP), n = a.n_experts;
    float top = -INFINITY;
    double sum = 0;
    for (int e = lane; e < n; e += WARP) top = fmaxf(top, logits[e]);
    top = warp_max(top);
    if (a.score == route_args::ROUTE_SOFTMAX)
        for (int e = lane; e < n; e += WARP) sum += exp((double)logits[e] - (double)top);
    sum = warp_sum_f64(sum);
    for (int e = lane; e < n; e += WARP)
        p[e] = a.score == route_args::ROUTE_SOFTMAX
                   ? (float)(exp((double)logits[e] - (double)top) / sum)
                   : (float)(1.0 / (1.0 + exp(-(double)logits[e])));
}

static __device__ float group_score(const route_args &a, const float *choice, int n)
{
    float first = -INFINITY, second = -INFINITY;
    for (int i = 0; i < n; i++) {
        if (choice[i] > first) {
            second = first;
            first = choice[i];
        } else if (choice[i] > second) {
            second = choice[i];
        }
    }
    return a.group_score == route_args::GROUP_TOP2_SUM && n > 1 ? first + second : first;
}

/* Excludes experts of groups that are not among the best. groups, kept [n_groups]. */
static __device__ void drop_groups(const route_args &a, float *choice, float *groups,
                                   float *is_kept)
{
    const int lane = (int)(threadIdx.x % WARP), size = a.n_experts / a.n_groups;
    for (int g = lane; g < a.n_groups; g += WARP) {
        groups[g] = group_score(a, choice + g * size, size);
        is_kept[g] = 0;
    }
    __syncwarp();
    for (int i = 0; i < a.topk_groups; i++) {
        const int g = warp_best(groups, a.n_groups);
        __syncwarp();
        if (lane == 0) {
            is_kept[g] = 1;
            groups[g] = NAN;
        }
        __syncwarp();
    }
    for (int e = lane; e < a.n_experts; e += WARP)
        if (is_kept[e / size] == 0) choice[e] = NAN;
    __syncwarp();
}

static __device__ void normalise(const route_args &a, float *weights)
{
    float sum = 0;
    for (int j = 0; j < a.n_used; j++) sum += weights[j];
    const float by = a.norm == route_args::NORM_MAX   ? fmaxf(sum, a.norm_min)
                     : a.norm == route_args::NORM_SUM ? sum + a.norm_min
                                                      : 1.0f;
    for (int j = 0; j < a.n_used; j++) weights[j] = weights[j] / by * a.scale;
}

/* Floats of a warp's shared memory. */
static __host__ __device__ __forceinline__ size_t route_floats(const route_args &a)
{
    return 2 * ((size_t)a.n_experts + (size_t)a.n_groups);
}

/* Routes a row, by a warp. p: its memory: p [n_experts], choice [n_experts], groups [n_groups],
 * kept [n_groups]. */
static __device__ void route_row(const route_args &a, size_t row, float *p)
{
    const int lane = (int)(threadIdx.x % WARP);
    float *choice = p + a.n_experts, *groups = choice + a.n_experts;
    score(a, a.logits + row * a.n_experts, p);
    for (int e = lane; e < a.n_experts; e += WARP) choice[e] = a.bias ? p[e] + a.bias[e] : p[e];
    __syncwarp();
    if (a.n_groups > 1) drop_groups(a, choice, groups, groups + a.n_groups);
    for (int j = 0; j < a.n_used; j++) {
        const int e = warp_best(choice, a.n_experts);
        __syncwarp();
        if (lane == 0) {
            a.experts[row * a.n_used + j] = e;
            a.weights[row * a.n_used + j] = p[e];
            choice[e] = NAN;
        }
        __syncwarp();
    }
    if (lane == 0) normalise(a, a.weights + row * a.n_used);
}

static __global__ void __launch_bounds__(ROUTE_WARPS *WARP) route_kernel(route_args a)
{
    grid_dependency_sync();
    const size_t warp = threadIdx.x / WARP, row = (size_t)blockIdx.x * ROUTE_WARPS + warp;
    if (row < a.n_rows)
        route_row(a, row, (float *)(void *)shared_memory() + warp * route_floats(a));
}

/* ---- sorting ---- */

struct moe_sort_args {
    const int32_t *experts;
    int32_t *rows, *index, *begin;
    int32_t n_experts, n_used, n; /* n: rows times used */
    const int32_t *n_real_rows;
};

/* The number of choices of real rows. */
static __device__ __forceinline__ int real_choices(const moe_sort_args &a)
{
    return a.n_real_rows ? min(a.n, *a.n_real_rows * a.n_used) : a.n;
}

/* Turns count[1 .. n] into prefix sums, by the first warp. */
static __device__ __forceinline__ void sum_up(int *count, int n)
{
    const int lane = (int)threadIdx.x;
    int before = 0;
    for (int first = 1; first <= n; first += WARP) {
        int sum = first + lane <= n ? count[first + lane] : 0;
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, (unsigned)step);
            if (lane >= step) sum += other;
        }
        if (first + lane <= n) count[first + lane] = before + sum;
        before += __shfl_sync(0xffffffffu, sum, WARP - 1);
    }
}

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

/* Sorts by one block: a warp handles every n-th expert and searches all choices for it. */
static __device__ __forceinline__ void sort_one_block(const moe_sort_args &a, int *count)
{
    const int lane = (int)(threadIdx.x % WARP), n = real_choices(a);
    begin_slots(a, count);
    for (int e = (int)(threadIdx.x / WARP); e < a.n_experts; e += (int)(blockDim.x / WARP)) {
        int slot = count[e];
        for (int at = 0; at < n && slot < count[e + 1]; at += WARP) {
            const bool mine = at + lane < n && a.experts[at + lane] == e;
            const unsigned who = __ballot_sync(0xffffffffu, mine);
            const int mine_at = slot + __popc(who & ((1u << lane) - 1));
            if (mine) a.index[at + lane] = mine_at, a.rows[mine_at] = (at + lane) / a.n_used;
            slot += __popc(who);
        }
    }
}

static __global__ void __launch_bounds__(ONE_BLOCK_WARPS *WARP) sort_kernel(moe_sort_args a)
{
    grid_dependency_sync();
    sort_one_block(a, (int *)(void *)shared_memory());
}

/* A warp per row. Shared memory: the warps' memory, then counts. */
static __global__ void __launch_bounds__(ONE_BLOCK_WARPS *WARP)
    route_one_block_kernel(route_args a, moe_sort_args sort)
{
    grid_dependency_sync();
    float *rooms = (float *)(void *)shared_memory();
    const size_t warp = threadIdx.x / WARP;
    if (warp < a.n_rows) route_row(a, warp, rooms + warp * route_floats(a));
    __syncthreads();
    sort_one_block(sort, (int *)(void *)(rooms + blockDim.x / WARP * route_floats(a)));
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

static cudaError_t run_sort(cudaStream_t s, const moe_sort_args &a)
{
    const size_t counts = sizeof(int) * ((size_t)a.n_experts + 1);
    if (a.n <= ONE_BLOCK_CHOICES)
        return launch(s, sort_kernel, dim3(1), dim3(ONE_BLOCK_WARPS * WARP), counts, a);
    cudaError_t e = launch(s, expert_begins_kernel, dim3(1), dim3(SORT_THREADS), counts, a);
    return e == cudaSuccess
               ? launch(s, slots_kernel, dim3((unsigned)a.n_experts), dim3(SORT_THREADS), 0, a)
               : e;
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
                                 n_real_rows };
    return run_sort(s, sort);
}

cudaError_t moe_route(cudaStream_t s, const struct route_args *a, const int32_t *n_real_rows)
{
    if (a->n_rows == 0) return cudaSuccess;
    const moe_sort_args sort = { a->experts,
                                 a->rows,
                                 a->index,
                                 a->begin,
                                 a->n_experts,
                                 a->n_used,
                                 (int32_t)(a->n_rows * (size_t)a->n_used),
                                 n_real_rows };
    const size_t warps = a->n_rows > ONE_BLOCK_WARPS_MIN ? a->n_rows : (size_t)ONE_BLOCK_WARPS_MIN,
                 room = sizeof(float) * route_floats(*a);
    const size_t alone = warps * room + sizeof(int) * ((size_t)a->n_experts + 1);
    if (a->rows && a->n_rows <= ONE_BLOCK_WARPS && alone <= ONE_BLOCK_SHARED)
        return launch(s, route_one_block_kernel, dim3(1), dim3((unsigned)(warps * WARP)), alone, *a,
                      sort);
    cudaError_t e = launch(s, route_kernel, dim3(blocks_for(a->n_rows, ROUTE_WARPS)),
                           dim3(ROUTE_WARPS * WARP), ROUTE_WARPS * room, *a);
    return e == cudaSuccess && a->rows ? run_sort(s, sort) : e;
}
