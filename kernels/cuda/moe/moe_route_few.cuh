/* moe_route_few.cuh - routes few rows, a warp each, in registers, and sorts them: what a decode
 * step waits for, so instructions and round trips are few. At most 128 experts, without groups.
 * Scores and choices are those of moe_route_row.cuh, bit for bit.
 *
 * A lane has experts lane, lane + 32, .. in scores, and in the bytes of a word where it counts
 * them; and the lane's number of the row's choices. Thread: device. */
#ifndef BATON_KERNELS_CUDA_MOE_ROUTE_FEW_CUH
#define BATON_KERNELS_CUDA_MOE_ROUTE_FEW_CUH

#include "kernels/cuda/moe/moe_route_block.cuh"

enum {
    FEW_PER_LANE = 4,
    FEW_EXPERTS = FEW_PER_LANE * WARP,
    FEW_USED = 16, /* of 8 rows: their number fits a byte */
    FEW_ALL = 0xff /* a byte of such a word */
};

static inline bool is_route_of_few(const route_args &a)
{
    return a.n_groups == 1 && a.n_experts <= FEW_EXPERTS && a.n_used <= FEW_USED;
}

/* What is known of a row's experts. */
struct few_experts {
    route_lane<FEW_PER_LANE> scores /* logits at first */, bias;
    int32_t n_real_rows; /* of the call's rows */
};

/* All that a row's choice depends on, loaded at once. */
static __device__ __forceinline__ void few_load(const route_args &a, const moe_sort_args &sort,
                                                size_t row, few_experts *f)
{
    const int lane = (int)(threadIdx.x % WARP);
    const float *logits = a.logits + row * (size_t)a.n_experts;
#pragma unroll
    for (int i = 0; i < FEW_PER_LANE; i++) {
        const int e = lane + i * WARP;
        f->scores.v[i] = e < a.n_experts ? __ldcg(logits + e) : 0;
        f->bias.v[i] = a.bias && e < a.n_experts ? __ldg(a.bias + e) : 0;
    }
    f->n_real_rows = sort.rows && sort.n_real_rows ? *sort.n_real_rows - sort.first_row : INT32_MAX;
}

/* Scores from logits. */
static __device__ __forceinline__ void few_scores(const route_args &a,
                                                  route_lane<FEW_PER_LANE> *scores)
{
    if (a.score == route_args::ROUTE_SOFTMAX) {
        softmax<FEW_PER_LANE>(a.n_experts, scores);
        return;
    }
#pragma unroll 1
    for (int i = 0; i < FEW_PER_LANE; i++) { /* in turns, so that the code is short */
        const float score = sigmoid_score(scores->v[0]);
#pragma unroll
        for (int k = 1; k < FEW_PER_LANE; k++) scores->v[k - 1] = scores->v[k];
        scores->v[FEW_PER_LANE - 1] = score;
    }
}

/* A lane's experts that are not chosen yet, the best first, of equal ones the lowest. */
struct few_best {
    unsigned key[FEW_PER_LANE]; /* 0: cannot be chosen */
    unsigned experts;           /* bytes */
};

static __device__ __forceinline__ few_best sort_lane(const route_args &a, const few_experts &f)
{
    few_best b;
    unsigned at[FEW_PER_LANE];
#pragma unroll
    for (int i = 0; i < FEW_PER_LANE; i++) {
        at[i] = threadIdx.x % WARP + i * WARP;
        const unsigned key = order_key(a.bias ? f.scores.v[i] + f.bias.v[i] : f.scores.v[i]);
        b.key[i] = (int)at[i] < a.n_experts ? key : 0;
    }
#pragma unroll
    for (int round = 0; round < FEW_PER_LANE; round++)
#pragma unroll
        for (int i = round % 2; i + 1 < FEW_PER_LANE; i += 2) {
            const bool swaps = b.key[i + 1] > b.key[i];
            const unsigned key = b.key[i], e = at[i];
            b.key[i] = swaps ? b.key[i + 1] : key, b.key[i + 1] = swaps ? key : b.key[i + 1];
            at[i] = swaps ? at[i + 1] : e, at[i + 1] = swaps ? e : at[i + 1];
        }
    b.experts = at[0] | at[1] << 8 | at[2] << 16 | at[3] << 24;
    return b;
}

/* Chooses the row's experts, of which the lane gets its one. Returns how many could be chosen; the
 * places that are left, if any, are expert 0's. */
static __device__ __forceinline__ int few_choose(const route_args &a, few_best *b, int *expert)
{
    int n = 0;
    *expert = 0;
#pragma unroll 1
    for (; n < a.n_used; n++) {
        const unsigned best = __reduce_max_sync(0xffffffffu, b->key[0]);
        if (best == 0) break;
        const int first = (int)(b->experts & FEW_ALL),
                  e = __reduce_min_sync(0xffffffffu, b->key[0] == best ? first : INT32_MAX);
        if ((int)(threadIdx.x % WARP) == n) *expert = e;
        if (first != e) continue;
        b->key[0] = b->key[1], b->key[1] = b->key[2], b->key[2] = b->key[3], b->key[3] = 0;
        b->experts >>= 8;
    }
    return n;
}

/* The weight of the lane's choice. */
static __device__ __forceinline__ float few_weight(const route_args &a,
                                                   const route_lane<FEW_PER_LANE> &scores,
                                                   int expert)
{
    float of[FEW_PER_LANE], sum = 0;
#pragma unroll
    for (int i = 0; i < FEW_PER_LANE; i++)
        of[i] = __shfl_sync(0xffffffffu, scores.v[i], expert % WARP);
    float w = expert / WARP < 2 ? (expert / WARP == 0 ? of[0] : of[1])
                                : (expert / WARP == 2 ? of[2] : of[3]);
    w = (int)(threadIdx.x % WARP) < a.n_used ? w : 0;
#pragma unroll 1
    for (int first = 0; first < a.n_used; first += 8)
#pragma unroll
        for (int j = 0; j < 8; j++) sum += __shfl_sync(0xffffffffu, w, first + j);
    return w / weights_divisor(a, sum) * a.scale;
}

/* What a row adds to the sort, in bytes: how many of its choices are of lower experts, and of this
 * one. */
struct few_counts {
    unsigned before, here;
};

static __device__ __forceinline__ few_counts few_count(const route_args &a, int n, int expert)
{
    const unsigned lane = threadIdx.x % WARP, left = (unsigned)(a.n_used - n);
    few_counts c = { 0, lane == 0 ? left : 0 };
    unsigned before = 0;
#pragma unroll
    for (int i = 0; i < FEW_PER_LANE; i++) {
        const bool is_mine = (int)lane < n && expert / WARP == i;
        const unsigned who = __reduce_or_sync(0xffffffffu, is_mine ? 1u << (expert % WARP) : 0u);
        const unsigned lower = before + (unsigned)__popc(who & ((1u << lane) - 1));
        c.before |= (lane + i > 0 ? lower + left : 0) << (8 * i);
        c.here += (who >> lane & 1) << (8 * i);
        before += (unsigned)__popc(who);
    }
    return c;
}

/* Stores a row's choices. before: of all rows the choices of lower experts, and of earlier rows
 * those of the same; n: how many could be chosen. */
static __device__ __forceinline__ void few_store(const route_args &a, const moe_sort_args &sort,
                                                 size_t row, bool is_real, unsigned before, int n,
                                                 int expert, float weight)
{
    const int lane = (int)(threadIdx.x % WARP);
    const size_t at = row * (size_t)a.n_used + (size_t)lane;
    int slot = (int)(__shfl_sync(0xffffffffu, before, expert % WARP) >> (expert / WARP * 8) &
                     FEW_ALL);
    if (n < a.n_used) { /* some are NaN: the last places follow the row's choice of expert 0 */
        const bool is_chosen = __any_sync(0xffffffffu, lane < n && expert == 0);
        if (lane >= n) slot += (int)is_chosen + lane - n;
    }
    if (lane >= a.n_used) return;
    a.experts[at] = expert;
    a.weights[at] = weight;
    if (!sort.rows) return;
    sort.index[at] = is_real ? slot : 0; /* padding rows: their results are not used */
    if (is_real) sort.rows[slot] = (int32_t)row;
}

/* before: of all rows the choices of lower experts; n: all choices. */
static __device__ __forceinline__ void few_begins(const moe_sort_args &sort, unsigned before,
                                                  int32_t n)
{
    const int lane = (int)(threadIdx.x % WARP);
#pragma unroll
    for (int i = 0; i < FEW_PER_LANE; i++)
        if (lane + i * WARP < sort.n_experts)
            sort.begin[lane + i * WARP] = (int32_t)(before >> (8 * i) & FEW_ALL);
    if (lane == 0) sort.begin[sort.n_experts] = n;
}

/* Chooses a row's experts and their weights, by a warp. Returns how many could be chosen. */
static __device__ __forceinline__ int few_route(const route_args &a, few_experts *f, int *expert,
                                                float *weight)
{
    few_scores(a, &f->scores);
    few_best best = sort_lane(a, *f);
    const int n = few_choose(a, &best, expert);
    *weight = few_weight(a, f->scores, *expert);
    return n;
}

/* Routes the call's only row, by a warp. */
static __device__ __forceinline__ void few_route_one(const route_args &a, const moe_sort_args &sort)
{
    few_experts f;
    int expert;
    float weight;
    few_load(a, sort, 0, &f);
    const int n = few_route(a, &f, &expert, &weight);
    const few_counts counts = few_count(a, n, expert);
    const bool is_real = f.n_real_rows > 0;
    few_store(a, sort, 0, is_real, counts.before, n, expert, weight);
    if (sort.rows) few_begins(sort, is_real ? counts.before : 0, is_real ? a.n_used : 0);
}

/* Routes a block's rows, each by a warp, and sorts them if the call has no others. */
static __device__ __forceinline__ void few_route_rows(const route_args &a,
                                                      const moe_sort_args &sort,
                                                      const router_rows &rows)
{
    __shared__ few_counts all[ROUTE_BLOCK_ROWS][WARP];
    const int r = (int)(threadIdx.x / WARP), lane = lane_number();
    const size_t row = rows.first + (size_t)r;
    few_experts f;
    int n = 0, expert = 0;
    float weight = 0;
    if (r < rows.n) {
        few_load(a, sort, row, &f);
        n = few_route(a, &f, &expert, &weight);
        const few_counts none = { 0, 0 };
        all[r][lane] = (int64_t)row < f.n_real_rows ? few_count(a, n, expert) : none;
    }
    __syncthreads();
    if (r >= rows.n) return;
    unsigned before = 0;
#pragma unroll 1
    for (int k = 0; k < rows.n; k++)
        before += all[k][lane].before + (k < r ? all[k][lane].here : 0);
    few_store(a, sort, row, (int64_t)row < f.n_real_rows, before, n, expert, weight);
    if (sort.rows && r == 0)
        few_begins(sort, before, max(min(rows.n, f.n_real_rows), 0) * a.n_used);
}

#endif
