/* sample.cu - the sampler's phases after the first two, and the call.
 *
 *   future        tokens that only the GPU knows                    rows whose penalties count them
 *   argmax        mask, edits, largest logit (sample_argmax.cuh)        all rows; ends greedy ones
 *   terms         p = exp((x - max) / T); masses of chunks              rows that draw
 *   gather        candidates for the last entry of top_k and top_p      rows that are cut
 *   mass          masses of chunks of the kept entries; the draw        rows that are cut
 *   count         log-sum-exp, rank, the best few                       rows with logprobs
 *
 * A phase reads the row once, spread over blocks of SAMPLE_PIECE logits; the block that ends last
 * does the rest (sample_row.cuh). Candidates are few for a model's logits: for top_k those above
 * the k-th largest of the warps' maxima, for top_p those that may matter for 1 - top_p. LIMIT: if
 * they do not fit the list (flat rows, top_k beyond n_vocab / 256), one block reads the whole row,
 * three times for each of top_k and top_p. Thread: device; sample_run: engine. */
#include "kernels/cuda/sampling/sample_argmax.cuh"
#include "kernels/cuda/sampling/sample_draw.cuh"
#include "kernels/cuda/sampling/sample_radix_select.cuh"

/* Shared memory, for one of these at a time, with a barrier in between. */
union sample_smem {
    float tile[SUM_TILE];
    sample_select_smem select;
    sample_draw_smem draw;
};

/* ---- terms ---- */

/* Draws the token; run by the last block of the row. */
static __device__ void draw_end(sample_smem *room, const sample_call &call, const sample_row &r,
                                const sample_cutoff &keep)
{
    const int32_t id = draw_entry(&room->draw, r, keep);
    if (threadIdx.x == 0) choose(call, r, id);
    if (!wants_logprobs(*r.params)) write_plain(call, id);
}

/* A lower bound of everything that top_k keeps, as high as is cheap to find; 0: none. */
static __device__ float above_top(sample_smem *room, const sample_row &r)
{
    const select_from from = { r.maxima, (int)gridDim.x * SAMPLE_WARPS, 0, 0x1p-126f };
    const select_for want = { true, (double)r.params->top_k, false };
    const select_border border = select_head(&room->select, from, want);
    return border.reached ? __uint_as_float(__float_as_uint(border.p) - 1) : 0;
}

/* Either draws, or sets the bound for candidates. */
static __device__ void terms_end(sample_smem *room, const sample_call &call, const sample_row &r)
{
    __shared__ unsigned n_kept;
    if (threadIdx.x == 0) n_kept = atomicExch(&r.state->n_kept, 0u);
    __syncthreads();
    const bool by_count = counts_top(*r.params, r.n_vocab) && (unsigned)r.params->top_k <= n_kept,
               by_mass = r.params->top_p < 1;
    if (!by_count && !by_mass) {
        draw_end(room, call, r, first_cutoff(*r.params));
        return;
    }
    const double total = sum_upto(r, room->draw.upto),
                 top_p = r.params->top_p > 0 ? (double)r.params->top_p : 0;
    /* All entries of at most (1 - top_p) / n of the mass have together at most 1 - top_p: none of
     * them is needed. */
    const float above = by_count ? above_top(room, r)
                                 : (float)((1 - top_p) * total / (double)n_kept * 0.999);
    if (threadIdx.x > 0) return;
    r.state->total = total;
    r.state->above = above;
    r.state->by_count = by_count;
    r.state->cuts = true;
}

static __global__ void __launch_bounds__(SAMPLE_THREADS) terms_kernel(const sample_call call)
{
    grid_dependency_sync();
    __shared__ sample_smem room;
    sample_row r;
    if (!open_row(call, &r) || !r.state->draws) return;
    const sample_cutoff keep = first_cutoff(*r.params);
    const float max = r.state->max,
                by = __fdiv_rn(1.0f, r.params->temperature < 1e-2f ? 1e-2f : r.params->temperature);
    float v[SAMPLE_EACH], largest = 0;
    unsigned n_kept = 0;
    load_elements(v, r.changed ? r.x : r.logits, r.n_vocab);
    UNROLL
    for (int k = 0; k < SAMPLE_EACH; k++) {
        v[k] = isnan(v[k])
                   ? 0
                   : exp_as_host(__fmul_rn(__fsub_rn(fminf(v[k], 3.402823466e+38f), max), by));
        largest = fmaxf(largest, v[k]);
        n_kept += is_kept(keep, v[k], 0);
    }
    store_elements(r.x, v, r.n_vocab);
    const unsigned bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    n_kept = __reduce_add_sync(0xffffffffu, n_kept);
    if (threadIdx.x % WARP == 0) {
        r.maxima[blockIdx.x * SAMPLE_WARPS + threadIdx.x / WARP] = __uint_as_float(bits);
        if (n_kept) atomicAdd(&r.state->n_kept, n_kept);
    }
    sum_chunks(r, room.tile, v, keep);
    if (is_last_of_row(r)) terms_end(&room, call, r);
}

/* ---- gather ---- */

/* Finds the last kept entry, in the order of larger p, then smaller id. */
static __device__ void gather_end(sample_smem *room, const sample_row &r)
{
    __shared__ unsigned n_listed;
    if (threadIdx.x == 0) n_listed = atomicExch(&r.state->n_listed, 0u);
    __syncthreads();
    const sample_row_state &s = *r.state;
    const bool fits = n_listed <= SAMPLE_LIST;
    select_from from = { fits ? r.list : r.x, fits ? (int)n_listed : r.n_vocab, s.above,
                         first_cutoff(*r.params).p };
    sample_cutoff keep = { from.least, INT32_MAX };
    if (s.by_count) {
        const select_for want = { true, (double)r.params->top_k, false };
        /* values equal to the k-th are kept */
        keep.p = from.least = select_head(&room->select, from, want).p;
    }
    if (r.params->top_p < 1) {
        const double top_p = r.params->top_p > 0 ? (double)r.params->top_p : 0;
        const select_for want = { false, s.by_count ? top_p : top_p * s.total, s.by_count };
        const select_border border = select_head(&room->select, from, want);
        keep.p = border.p;
        if (border.n_take < border.n_equal)
            keep.id = select_nth(&room->select, r.x, r.n_vocab, border.p, border.n_take);
    }
    if (threadIdx.x == 0) r.state->cut_p = keep.p, r.state->cut_id = keep.id;
}

static __global__ void __launch_bounds__(SAMPLE_THREADS) gather_kernel(const sample_call call)
{
    grid_dependency_sync();
    __shared__ sample_smem room;
    sample_row r;
    if (!open_row(call, &r) || !r.state->cuts) return;
    const float above = r.state->above, least = first_cutoff(*r.params).p;
    const int lane = (int)(threadIdx.x % WARP);
    float v[SAMPLE_EACH];
    load_elements(v, r.x, r.n_vocab);
    for (int k = 0; k < SAMPLE_EACH; k++) {
        /* NaN, past the end, is not a candidate */
        const bool is_candidate = v[k] > above && v[k] >= least;
        const unsigned who = __ballot_sync(0xffffffffu, is_candidate);
        if (who == 0) continue;
        unsigned at = 0;
        if (lane == 0) at = atomicAdd(&r.state->n_listed, (unsigned)__popc(who));
        at = __shfl_sync(0xffffffffu, at, 0) + (unsigned)__popc(who & ((1u << lane) - 1));
        if (is_candidate && at < SAMPLE_LIST) r.list[at] = v[k];
    }
    if (is_last_of_row(r)) gather_end(&room, r);
}

/* ---- mass ---- */

static __global__ void __launch_bounds__(SAMPLE_THREADS) mass_kernel(const sample_call call)
{
    grid_dependency_sync();
    __shared__ sample_smem room;
    sample_row r;
    if (!open_row(call, &r) || !r.state->cuts) return;
    const sample_cutoff keep = { r.state->cut_p, r.state->cut_id };
    float v[SAMPLE_EACH];
    load_elements(v, r.x, r.n_vocab);
    sum_chunks(r, room.tile, v, keep);
    if (is_last_of_row(r)) draw_end(&room, call, r, keep);
}

/* ---- count ---- */

/* Writes a warp's n largest keys, of SAMPLE_EACH or more per lane, in order to `to`; zeros if there
 * are fewer. */
template <int EACH>
static __device__ void warp_top(const sample_key key[EACH], int n, sample_key *to)
{
    sample_key below = ~0ull;
    for (int i = 0; i < n; i++) {
        sample_key best = 0;
        UNROLL
        for (int k = 0; k < EACH; k++)
            if (key[k] < below && key[k] > best) best = key[k];
        below = warp_best_key(best);
        if (threadIdx.x % WARP == 0) to[i] = below;
    }
}

/* The same for a block, in order to `best`. Has a barrier. */
static __device__ void block_top(const sample_key key[SAMPLE_EACH], int n, sample_key *best)
{
    enum { ALL = SAMPLE_WARPS * SAMPLER_LOGPROBS_MAX, EACH = ALL / WARP };
    __shared__ sample_key of_warps[ALL];
    warp_top<SAMPLE_EACH>(key, n, of_warps + threadIdx.x / WARP * n);
    __syncthreads();
    if (threadIdx.x >= WARP) return;
    sample_key mine[EACH];
    UNROLL
    for (int k = 0; k < EACH; k++) {
        const int at = k * WARP + (int)threadIdx.x;
        mine[k] = at < n * SAMPLE_WARPS ? of_warps[at] : 0;
    }
    warp_top<EACH>(mine, n, best);
}

static __device__ __forceinline__ int n_top_of(const sample_row_params &a)
{
    return a.n_logprobs < SAMPLER_LOGPROBS_MAX ? a.n_logprobs : SAMPLER_LOGPROBS_MAX;
}

/* Sums exp(x - max) over the piece's chunks, in f32, with 16 partial sums each as in
 * kernels/cpu. */
static __device__ void sum_exp_chunks(const sample_row &r, float *tile, const float v[SAMPLE_EACH])
{
    enum { LANES = 16, CHUNKS = SAMPLE_PIECE / SAMPLE_CHUNK };
    const float max = r.state->max_raw;
    UNROLL
    for (int k = 0; k < SAMPLE_EACH; k++) {
        const int i = element_of(k), in_piece = i % SAMPLE_PIECE;
        tile[in_piece / SAMPLE_CHUNK * SUM_STRIDE + in_piece % SAMPLE_CHUNK] =
            i < r.n_vocab ? exp_as_host(__fsub_rn(v[k], max)) : 0;
    }
    __syncthreads();
    if (threadIdx.x >= CHUNKS * LANES) return;
    const int in_piece = (int)threadIdx.x / LANES, chunk = (int)blockIdx.x * CHUNKS + in_piece;
    const float *lane = tile + in_piece * SUM_STRIDE + threadIdx.x % LANES;
    float sum = 0;
    UNROLL_BY(16)
    for (int i = 0; i < SAMPLE_CHUNK; i += LANES) sum = __fadd_rn(sum, lane[i]);
    for (int half = LANES / 2; half > 0; half /= 2)
        sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, half));
    if (threadIdx.x % LANES == 0 && chunk < r.n_chunks) r.sums[chunk] = (double)sum;
}

static __device__ __forceinline__ float logprob_of(float logit, float lse)
{
    const float lp = __fsub_rn(logit, lse);
    return isnan(lp) ? -INFINITY : lp;
}

/* Writes the best of all pieces, in order, to `best`. */
static __device__ void count_top(const sample_row &r, int n, sample_key *best)
{
    sample_key key[SAMPLE_EACH];
    UNROLL
    for (int k = 0; k < SAMPLE_EACH; k++) {
        const int at = k * SAMPLE_THREADS + (int)threadIdx.x;
        key[k] = at < n * (int)gridDim.x ? __ldcg(r.tops + at) : 0;
    }
    block_top(key, n, best);
}

static __device__ void count_end(const sample_call &call, const sample_row &r)
{
    __shared__ double upto[SAMPLE_CHUNKS_MAX];
    __shared__ sample_key best[SAMPLER_LOGPROBS_MAX];
    struct token_logprobs &to = call.results[blockIdx.y];
    const float max = r.state->max_raw;
    const float lse = max == -INFINITY ? max : (float)((double)max + log(sum_upto(r, upto)));
    const int n_top = n_top_of(*r.params);
    const int32_t id = r.state->id;
    if (n_top > 0) count_top(r, n_top, best);
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned n_reach = atomicExch(&r.state->n_reach, 0u);
        to.id = id;
        to.logprob = logprob_of(r.logits[id], lse);
        to.rank = n_reach ? (int32_t)n_reach : r.n_vocab; /* 0: the token's own logit is NaN */
        to.ends = FINISH_NONE;
        to.n_top = 0;
        while ((int)to.n_top < n_top && best[to.n_top]) to.n_top++;
    }
    if (threadIdx.x < SAMPLER_LOGPROBS_MAX) {
        const bool is_there = (int)threadIdx.x < n_top && best[threadIdx.x];
        const int32_t top = is_there ? id_of(best[threadIdx.x]) : 0;
        to.top[threadIdx.x].id = top;
        to.top[threadIdx.x].logprob = is_there ? logprob_of(r.logits[top], lse) : 0;
    }
}

static __global__ void __launch_bounds__(SAMPLE_THREADS) count_kernel(const sample_call call)
{
    grid_dependency_sync();
    __shared__ float tile[SUM_TILE];
    sample_row r;
    if (!open_row(call, &r) || !wants_logprobs(*r.params)) return;
    const float mark = r.logits[r.state->id];
    const int n_top = n_top_of(*r.params);
    unsigned n_reach = 0;
    float v[SAMPLE_EACH];
    load_elements(v, r.logits, r.n_vocab);
    UNROLL
    for (int k = 0; k < SAMPLE_EACH; k++) n_reach += v[k] >= mark;
    n_reach = __reduce_add_sync(0xffffffffu, n_reach);
    if (threadIdx.x % WARP == 0 && n_reach) atomicAdd(&r.state->n_reach, n_reach);
    sum_exp_chunks(r, tile, v);
    if (n_top > 0) {
        sample_key key[SAMPLE_EACH];
        UNROLL
        for (int k = 0; k < SAMPLE_EACH; k++) key[k] = key_of(v[k], element_of(k));
        block_top(key, n_top, r.tops + (size_t)blockIdx.x * n_top);
    }
    if (is_last_of_row(r)) count_end(call, r);
}

/* ---- the call ---- */

size_t sample_scratch_bytes(size_t n_rows, size_t n_vocab)
{
    return n_rows * sample_row_layout_of(n_vocab).bytes;
}

cudaError_t sample_run(cudaStream_t stream, const struct sample_call *call)
{
    if (call->n_vocab < 1 || call->n_vocab > SAMPLE_VOCAB_MAX || call->n_rows < 0 ||
        call->n_rows > SAMPLE_ROWS_MAX)
        return cudaErrorInvalidValue;
    if (call->n_rows == 0) return cudaSuccess;
    const bool draws = call->work & SAMPLE_DRAW, cuts = draws && call->work & SAMPLE_CUT;
    const dim3 grid(blocks_for((size_t)call->n_vocab, SAMPLE_PIECE), (unsigned)call->n_rows),
        block(SAMPLE_THREADS);
    cudaError_t e = cudaSuccess;
    if (call->work & SAMPLE_FUTURE)
        e = launch(stream, future_kernel, dim3(1, (unsigned)call->n_rows), dim3(WARP), 0, *call);
    if (e == cudaSuccess) e = launch(stream, argmax_kernel, grid, block, 0, *call);
    if (e == cudaSuccess && draws) e = launch(stream, terms_kernel, grid, block, 0, *call);
    if (e == cudaSuccess && cuts) e = launch(stream, gather_kernel, grid, block, 0, *call);
    if (e == cudaSuccess && cuts) e = launch(stream, mass_kernel, grid, block, 0, *call);
    if (e == cudaSuccess && call->work & SAMPLE_LOGPROBS)
        e = launch(stream, count_kernel, grid, block, 0, *call);
    return e;
}

/* ---- which drafts are right ---- */

static __global__ void __launch_bounds__(WARP) verify_kernel(const sample_verify_call call)
{
    grid_dependency_sync();
    const int row = (int)(blockIdx.x * WARP + threadIdx.x);
    if (row >= call.n_rows) return;
    const int n = call.row_params[row].n_verify;
    int n_right = 0;
    for (; n_right < n; n_right++) {
        const int32_t id = call.ids[call.logit_rows[row + n_right + 1]],
                      draft = id >= 0 ? id : call.kept[-1 - id];
        if (call.kept[row + n_right] != draft) break;
    }
    call.accepted[row] = n_right;
}

cudaError_t sample_verify(cudaStream_t stream, const struct sample_verify_call *call)
{
    return call->n_rows > 0
               ? launch(stream, verify_kernel, dim3(blocks_for((size_t)call->n_rows, WARP)),
                        dim3(WARP), 0, *call)
               : cudaSuccess;
}
