/* route.cu - which experts each token goes to, and the rows sorted by expert.
 *
 * Routing: a warp has a row; its scores lie in shared memory, and the best is found n_used times over. Exponentials are made in f64 and rounded
 * once, as on the processor: near-ties between experts are decided as exactly as f32 logits allow. A few hundred numbers per token: what it
 * costs is the launch. Thread: device. */
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/rows.h"

enum { ROUTE_WARPS = 4, SORT_THREADS = 256 };

/* A value and where it is. NaN counts as smallest; of equals the first. */
struct best {
    float value;
    int   at;
};

static __device__ bool beats(best a, best b)
{
    const bool a_nan = isnan(a.value), b_nan = isnan(b.value);
    if (a_nan || b_nan) return a_nan && b_nan ? a.at < b.at : b_nan;
    return a.value > b.value || (a.value == b.value && a.at < b.at);
}

/* Of v [n], over the warp; every lane gets it. */
static __device__ int warp_best(const float *v, int n)
{
    best b = { NAN, n };
    for (int i = (int)(threadIdx.x % WARP); i < n; i += WARP) {
        const best here = { v[i], i };
        if (beats(here, b)) b = here;
    }
    for (int step = WARP / 2; step > 0; step /= 2) {
        const best other = { __shfl_xor_sync(0xffffffffu, b.value, step), __shfl_xor_sync(0xffffffffu, b.at, step) };
        if (beats(other, b)) b = other;
    }
    return b.at;
}

static __device__ double warp_sum_f64(double x)
{
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

/* p [n] from logits. */
static __device__ void score(const route_args &a, const float *logits, float *p)
{
    const int lane = (int)(threadIdx.x % WARP), n = a.n_experts;
    float     top = -INFINITY;
    double    sum = 0;
    for (int e = lane; e < n; e += WARP) top = fmaxf(top, logits[e]);
    top = warp_max(top);
    if (a.score == route_args::ROUTE_SOFTMAX)
        for (int e = lane; e < n; e += WARP) sum += exp((double)logits[e] - (double)top);
    sum = warp_sum_f64(sum);
    for (int e = lane; e < n; e += WARP)
        p[e] = a.score == route_args::ROUTE_SOFTMAX ? (float)(exp((double)logits[e] - (double)top) / sum) : (float)(1.0 / (1.0 + exp(-(double)logits[e])));
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

/* Experts of groups that are not among the best can no longer be chosen. groups, kept [n_groups]. */
static __device__ void drop_groups(const route_args &a, float *choice, float *groups, float *kept)
{
    const int lane = (int)(threadIdx.x % WARP), size = a.n_experts / a.n_groups;
    for (int g = lane; g < a.n_groups; g += WARP) {
        groups[g] = group_score(a, choice + g * size, size);
        kept[g] = 0;
    }
    __syncwarp();
    for (int i = 0; i < a.topk_groups; i++) {
        const int g = warp_best(groups, a.n_groups);
        __syncwarp();
        if (lane == 0) {
            kept[g] = 1;
            groups[g] = NAN;
        }
        __syncwarp();
    }
    for (int e = lane; e < a.n_experts; e += WARP)
        if (kept[e / size] == 0) choice[e] = NAN;
    __syncwarp();
}

static __device__ void normalise(const route_args &a, float *weights)
{
    float sum = 0;
    for (int j = 0; j < a.n_used; j++) sum += weights[j];
    const float by = a.norm == route_args::NORM_MAX ? fmaxf(sum, a.norm_min) : a.norm == route_args::NORM_SUM ? sum + a.norm_min : 1.0f;
    for (int j = 0; j < a.n_used; j++) weights[j] = weights[j] / by * a.scale;
}

/* Shared memory: per warp p [n_experts], choice [n_experts], groups [n_groups], kept [n_groups]. */
static __global__ void route_kernel(route_args a)
{
    const int    lane = (int)(threadIdx.x % WARP), warp = (int)(threadIdx.x / WARP);
    const size_t row = (size_t)blockIdx.x * ROUTE_WARPS + warp;
    if (row >= a.n_rows) return;
    float *p = (float *)(void *)shared_memory() + (size_t)warp * 2 * (a.n_experts + a.n_groups);
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

cudaError_t rows_route(cudaStream_t s, const struct route_args *a)
{
    if (a->n_rows == 0) return cudaSuccess;
    const size_t shared = sizeof(float) * ROUTE_WARPS * 2 * ((size_t)a->n_experts + (size_t)a->n_groups);
    return launch(s, route_kernel, dim3(blocks_for(a->n_rows, ROUTE_WARPS)), dim3(ROUTE_WARPS * WARP), shared, *a);
}

/* ---- sorting ----------------------------------------------------------------------------------------------------- */

struct sort_rows {
    const int32_t *experts;
    int32_t       *rows, *index, *begin;
    int32_t        n_experts, n_used, n; /* n: rows times used */
    const int32_t *n_live;
};

/* Choices of rows that get slots. */
static __device__ __forceinline__ int live_choices(const sort_rows &a) { return a.n_live ? min(a.n, *a.n_live * a.n_used) : a.n; }

/* count[1 .. n] become sums of all up to there, by one warp. */
static __device__ __forceinline__ void sum_up(int *count, int n)
{
    const int lane = (int)threadIdx.x;
    int       before = 0;
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

/* One block: how many slots each expert has, and where they begin. */
static __global__ void __launch_bounds__(SORT_THREADS) begin_kernel(sort_rows a)
{
    int *count = (int *)(void *)shared_memory(); /* [n_experts + 1] */
    for (int e = (int)threadIdx.x; e <= a.n_experts; e += SORT_THREADS) count[e] = 0;
    __syncthreads();
    const int n = live_choices(a);
    for (int i = (int)threadIdx.x; i < n; i += SORT_THREADS) atomicAdd(&count[a.experts[i] + 1], 1);
    for (int i = n + (int)threadIdx.x; i < a.n; i += SORT_THREADS) a.index[i] = 0; /* what is read there is nobody's */
    __syncthreads();
    if (threadIdx.x < WARP) sum_up(count, a.n_experts);
    __syncthreads();
    for (int e = (int)threadIdx.x; e <= a.n_experts; e += SORT_THREADS) a.begin[e] = count[e];
}

/* A block has an expert and looks for it in all choices, SORT_THREADS at a time. */
static __global__ void __launch_bounds__(SORT_THREADS) slots_kernel(sort_rows a)
{
    __shared__ int found[SORT_THREADS / WARP];
    const int lane = (int)(threadIdx.x % WARP), warp = (int)(threadIdx.x / WARP), end = a.begin[blockIdx.x + 1], n = live_choices(a);
    int       slot = a.begin[blockIdx.x];
    for (int at = 0; at < n && slot < end; at += SORT_THREADS) {
        const int      i = at + (int)threadIdx.x;
        const bool     mine = i < n && a.experts[i] == (int)blockIdx.x;
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

cudaError_t rows_sort(cudaStream_t s, const struct experts_args *a, const int32_t *n_live)
{
    const sort_rows sort = { a->experts, a->rows, a->index, a->begin, a->n_experts, a->n_used, (int32_t)(a->n_rows * (size_t)a->n_used), n_live };
    cudaError_t e = launch(s, begin_kernel, dim3(1), dim3(SORT_THREADS), sizeof(int) * ((size_t)a->n_experts + 1), sort);
    return e == cudaSuccess ? launch(s, slots_kernel, dim3((unsigned)a->n_experts), dim3(SORT_THREADS), 0, sort) : e;
}
