/* sample_argmax.cuh - the sampler's first phase: mask and edits, the largest logit; it completes
 * greedy rows. Bound by memory: a logit is read once, and written once if edits or a mask change
 * the row. Thread: device. */
#ifndef BATON_KERNELS_CUDA_SAMPLING_SAMPLE_ARGMAX_CUH
#define BATON_KERNELS_CUDA_SAMPLING_SAMPLE_ARGMAX_CUH

#include "kernels/cuda/sampling/sample_row.cuh"

/* How many of e [n], sorted by id, are below id. Called by a whole warp, which tests 32 at a
 * time. */
static __device__ int count_edits_below(const sample_edit *e, int n, int id)
{
    const int lane = (int)(threadIdx.x % WARP);
    int low = 0, high = n;
    while (low < high) {
        const int step = (high - low + WARP - 1) / WARP, at = low + (lane + 1) * step - 1;
        const int n_below = __popc(__ballot_sync(0xffffffffu, at < high && e[at].id < id));
        const int end = low + (n_below + 1) * step - 1;
        low += n_below * step;
        high = end < high ? end : high;
        if (high < low) high = low;
    }
    return low;
}

static __device__ float penalised(const sample_row_params &a, unsigned count, float x)
{
    x = x > 0 ? __fdiv_rn(x, a.repetition) : __fmul_rn(x, a.repetition);
    x = __fsub_rn(x, __fmul_rn(a.frequency, (float)count));
    return count ? __fsub_rn(x, a.presence) : x;
}

/* The edited logit; n_more: occurrences of the token besides those of the edit. */
static __device__ float edited(const sample_row_params &a, const sample_edit &e, unsigned n_more,
                               float x)
{
    if (e.forbid && a.index < a.min_tokens) x = -INFINITY;
    x = __fadd_rn(x, e.bias);
    return e.penalise || n_more ? penalised(a, (e.penalise ? e.count : 0) + n_more, x) : x;
}

/* How often a token is among the first n of the future ones. */
static __device__ unsigned count_future(const sample_row &r, int id, int n)
{
    unsigned count = 0;
    for (int i = 0; i < n; i++) count += r.state->future[i] == id;
    return count;
}

/* Are there edits of the token in e [n], which are sorted? */
static __device__ bool has_edits(const sample_edit *e, int n, int id)
{
    int low = 0;
    while (n > 0) {
        const int half = n / 2;
        if (e[low + half].id < id) low += half + 1, n -= half + 1;
        else if (e[low + half].id == id) return true;
        else n = half;
    }
    return false;
}

/* Penalises future tokens of the piece [begin, end) that have no edits. */
static __device__ void penalise_future(const sample_row &r, const sample_edit *e, int n, int begin,
                                       int end, int n_future)
{
    if ((int)threadIdx.x >= n_future) return;
    const int id = r.state->future[threadIdx.x];
    if (id < begin || id >= end || count_future(r, id, (int)threadIdx.x) > 0 || has_edits(e, n, id))
        return; /* of equal ones the first thread's does all */
    r.x[id] = penalised(*r.params, count_future(r, id, n_future), r.x[id]);
}

/* Applies the row's edits e [n] that fall in the block's piece of r.x, and counts its future tokens
 * that do. */
static __device__ void edit_piece(const sample_row &r, const sample_edit *e, int n, int n_future)
{
    __shared__ int bounds[2]; /* edits below the piece, below its end */
    const int begin = (int)blockIdx.x * SAMPLE_PIECE,
              end = begin + SAMPLE_PIECE < r.n_vocab ? begin + SAMPLE_PIECE : r.n_vocab;
    if (threadIdx.x < 2 * WARP) {
        const int which = (int)threadIdx.x / WARP,
                  at = count_edits_below(e, n, which == 0 ? begin : end);
        if (threadIdx.x % WARP == 0) bounds[which] = at;
    }
    __syncthreads();
    for (int i = bounds[0] + (int)threadIdx.x; i < bounds[1]; i += SAMPLE_THREADS) {
        const int id = e[i].id;
        if (i > bounds[0] && e[i - 1].id == id)
            continue; /* the first edit's thread applies all of an id */
        float x = r.x[id];
        for (int j = i; j < bounds[1] && e[j].id == id; j++) {
            const bool is_last = j + 1 == n || e[j + 1].id != id;
            x = edited(*r.params, e[j], is_last ? count_future(r, id, n_future) : 0, x);
        }
        r.x[id] = x;
    }
    penalise_future(r, e, n, begin, end, n_future);
    __syncthreads();
}

/* Applies mask and edits to v, the thread's logits, and to r.x. */
static __device__ void change_piece(const sample_call &call, const sample_row &r,
                                    float v[SAMPLE_EACH])
{
    const sample_row_params &params = *r.params;
    if (params.allowed >= 0) {
        const uint64_t *allowed = call.allowed + params.allowed;
        UNROLL
        for (int k = 0; k < SAMPLE_EACH; k++) {
            const int i = element_of(k);
            if (i < r.n_vocab && !(allowed[i / 64] >> (i % 64) & 1)) v[k] = -INFINITY;
        }
    }
    store_elements(r.x, v, r.n_vocab);
    if (params.n_edits <= 0 && !has_future(params)) return;
    __syncthreads();
    edit_piece(r, call.edits + params.edits, params.n_edits,
               has_future(params) ? r.state->n_future : 0);
    load_elements(v, r.x, r.n_vocab);
}

/* The best of the thread's elements above -inf. */
static __device__ sample_key best_key(const float v[SAMPLE_EACH])
{
    sample_key best = 0;
    UNROLL
    for (int k = 0; k < SAMPLE_EACH; k++) {
        const sample_key key = v[k] > -INFINITY ? key_of(v[k], element_of(k)) : 0;
        best = key > best ? key : best;
    }
    return best;
}

static __device__ unsigned best_bits(const float v[SAMPLE_EACH])
{
    unsigned best = 0;
    UNROLL
    for (int k = 0; k < SAMPLE_EACH; k++) {
        const unsigned bits = isnan(v[k]) ? 0 : ordered_bits(v[k]);
        best = bits > best ? bits : best;
    }
    return best;
}

/* The first allowed token, or 0, for a row without any usable logit. All threads get it. */
static __device__ int32_t first_allowed(const sample_call &call, const sample_row &r)
{
    __shared__ int first;
    if (threadIdx.x == 0) first = r.n_vocab;
    __syncthreads();
    const int n_words = r.params->allowed >= 0 ? (r.n_vocab + 63) / 64 : 0;
    for (int i = (int)threadIdx.x; i < n_words; i += SAMPLE_THREADS) {
        const uint64_t word = call.allowed[r.params->allowed + i];
        if (word) atomicMin(&first, i * 64 + __ffsll((long long)word) - 1);
    }
    __syncthreads();
    return first < r.n_vocab ? first : 0;
}

/* Writes the row's token and its result without logprobs. One thread. */
static __device__ void choose(const sample_call &call, const sample_row &r, int32_t id)
{
    r.state->id = id;
    call.kept[r.params->kept_at] = id;
}

/* Writes a result of which only the id is known. Last block. */
static __device__ void write_plain(const sample_call &call, int32_t id)
{
    struct token_logprobs &to = call.results[blockIdx.y];
    if (threadIdx.x == 0)
        to.id = id, to.logprob = 0, to.rank = 0, to.ends = FINISH_NONE, to.n_top = 0;
    if (threadIdx.x < SAMPLER_LOGPROBS_MAX)
        to.top[threadIdx.x].id = 0, to.top[threadIdx.x].logprob = 0;
}

/* Chooses the token, unless it is drawn later. Last block. */
static __device__ void argmax_end(const sample_call &call, const sample_row &r)
{
    __shared__ sample_key best;
    if (threadIdx.x == 0) {
        const unsigned raw = atomicExch(&r.state->raw_max, 0u);
        r.state->max_raw = raw ? of_ordered_bits(raw) : -INFINITY;
        best = atomicExch(&r.state->best, 0ull);
        r.state->draws = r.state->cuts = false;
    }
    __syncthreads();
    if (r.params->score >= 0) {
        if (threadIdx.x == 0) r.state->id = r.params->score;
        return;
    }
    const int32_t id = best ? id_of(best) : first_allowed(call, r);
    const bool draws = best && !is_greedy(*r.params);
    if (threadIdx.x == 0) {
        choose(call, r, id);
        r.state->draws = draws;
        r.state->max = fminf(best ? value_of(best) : 0.0f, 3.402823466e+38f);
    }
    if (!wants_logprobs(*r.params)) write_plain(call, id);
}

/* Traps if a row needs phases that the call does not launch, or names a token outside the
 * vocabulary. */
static __device__ void check_params(const sample_call &call, const sample_row &r)
{
    const sample_row_params &a = *r.params;
    const bool draws = a.score < 0 && !is_greedy(a);
    if (a.score >= r.n_vocab) __trap();
    if (draws && !(call.work & SAMPLE_DRAW)) __trap();
    if (draws && (counts_top(a, r.n_vocab) || a.top_p < 1) && !(call.work & SAMPLE_CUT)) __trap();
    if (wants_logprobs(a) && !(call.work & SAMPLE_LOGPROBS)) __trap();
    if (has_future(a) && !(call.work & SAMPLE_FUTURE)) __trap();
    if (a.n_chosen + a.n_drafts > SAMPLE_FUTURE_MAX) __trap();
}

/* A separate launch, because kept tokens are overwritten as soon as a row's token is known. */
static __global__ void __launch_bounds__(WARP) future_kernel(const sample_call call)
{
    grid_dependency_sync();
    sample_row r;
    if (!open_row(call, &r) || !has_future(*r.params)) return;
    const sample_row_params &a = *r.params;
    const int i = (int)threadIdx.x, i_draft = i - (int)a.n_chosen;
    if (i == 0) r.state->n_future = (int32_t)(a.n_chosen + a.n_drafts);
    if (i_draft >= (int)a.n_drafts) return;
    r.state->future[i] = i_draft < 0 ? call.kept[a.first_chosen + i]
                                     : call.kept[a.first_draft + i_draft * a.draft_stride];
}

static __global__ void __launch_bounds__(SAMPLE_THREADS) argmax_kernel(const sample_call call)
{
    grid_dependency_sync();
    __shared__ sample_key keys[SAMPLE_WARPS];
    __shared__ unsigned raws[SAMPLE_WARPS];
    sample_row r;
    if (!open_row(call, &r)) return;
    const int warp = (int)(threadIdx.x / WARP), lane = (int)(threadIdx.x % WARP);
    if (blockIdx.x == 0 && threadIdx.x == 0) check_params(call, r);
    float v[SAMPLE_EACH];
    load_elements(v, r.logits, r.n_vocab);
    const unsigned raw = wants_logprobs(*r.params) ? __reduce_max_sync(0xffffffffu, best_bits(v))
                                                   : 0;
    if (r.changed) change_piece(call, r, v);
    const sample_key key = r.params->score < 0 ? warp_best_key(best_key(v)) : 0;
    if (lane == 0) keys[warp] = key, raws[warp] = raw;
    __syncthreads();
    if (warp == 0) {
        const sample_key best = warp_best_key(lane < SAMPLE_WARPS ? keys[lane] : 0);
        const unsigned best_raw = __reduce_max_sync(0xffffffffu,
                                                    lane < SAMPLE_WARPS ? raws[lane] : 0u);
        if (lane == 0 && best) atomicMax(&r.state->best, best);
        if (lane == 0 && best_raw) atomicMax(&r.state->raw_max, best_raw);
    }
    if (is_last_of_row(r)) argmax_end(call, r);
}

#endif
