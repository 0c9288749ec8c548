/* attention_merge.cuh - merges results of segments into rows where the blocks that computed them do
 * not: prompts, and decode rows whose blocks do not all run at a time.
 *
 * A call merges one wave of segments. O of a row stays in `out`; what else the next wave needs, in
 * a state: of prompt rows (M, L), of the decode row that goes on (M, L) and the group that is not
 * complete. Bound by reading the parts, a few percent of the KV. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_MERGE_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_MERGE_CUH

#include "kernels/cuda/attention/attention_merge_parts.cuh"

enum {
    MERGE_THREADS = 128,
    MERGE_AHEAD = WARP /* a prompt row's segments that are read at a time */
};

struct merge_call {
    struct attn_row_set list;
    float *out;
    const float *parts;
    /* Per head: of prompts (M, L), state_stride floats further for each row; otherwise
     * [merge_state_floats], of the one row that goes on. */
    const float *before;
    float *after;
    size_t state_stride;
    int32_t n_heads, v_dim;
    /* The wave: each prompt row's segments [begin, end); of other rows parts [begin, end) of the
     * numbering by struct cuda_attn_row.segment. */
    int32_t begin, end;
};

/* A row's segments in the wave: [first, end) of its n; that of `first` is number `part` of the
 * wave's. */
struct merge_span {
    int first, end, n;
    size_t part;
};

static __device__ __forceinline__ struct merge_span span_of(const struct merge_call &c,
                                                            const struct cuda_attn_row &row, int i)
{
    const bool by_item = c.list.which != ATTN_ROWS_PREFILL;
    const int before = by_item ? row.segment : 0;
    struct merge_span s;
    s.n = row.pos / row.per_segment + 1;
    s.first = max(0, c.begin - before);
    s.end = min(s.n, c.end - before);
    s.part = by_item ? (size_t)(before + s.first - c.begin)
                     : (size_t)i * (size_t)(c.end - c.begin) + (size_t)(s.first - c.begin);
    return s;
}

/* (M, L) of the groups so far, (m, l) and o of the group that goes on. */
static inline __host__ __device__ size_t merge_state_floats(int v_dim)
{
    return part_floats(v_dim);
}

/* A lane's element d of a decode row's head, whose parts in the wave begin at `part`: the sum of
 * all groups and that of the last one. */
static __device__ __forceinline__ void merge_groups(const float *part, size_t stride, int d,
                                                    const struct merge_span &s, bool is_one,
                                                    struct merge_sum<1> *all,
                                                    struct merge_sum<1> *group)
{
    for (int k = s.first; k < s.end;) {
        const int begun = k % MERGE_GROUP, n = min(MERGE_GROUP - begun, s.end - k);
        float a, b;
        merge_all<1, MERGE_GROUP>(part + (size_t)(k - s.first) * stride, stride, 0, d, n, is_one,
                                  begun > 0, group);
        k += n;
        if (k % MERGE_GROUP != 0 && k < s.n) continue;
        if (k <= MERGE_GROUP) *all = *group;
        else {
            merge_weights(&all->M, &all->L, group->M, group->L, &a, &b);
            all->O[0] = merged(all->O[0], group->O[0], a, b);
        }
    }
}

/* One head of a decode row in the wave. */
static __device__ __forceinline__ void merge_decode_head(const struct merge_call &c,
                                                         const struct merge_span &s, int head,
                                                         const float *part, size_t stride,
                                                         float *out)
{
    const size_t at = (size_t)head * merge_state_floats(c.v_dim);
    const int lane = (int)(threadIdx.x % WARP);
    struct merge_sum<1> all = { 0, 0, { 0 } }, group = all;
    for (int begin = (int)threadIdx.x - lane; begin < c.v_dim; begin += MERGE_THREADS) {
        const int d = begin + lane;
        const bool is_one = d < c.v_dim;
        if (s.first > 0) {
            all.M = c.before[at], all.L = c.before[at + 1];
            group.M = c.before[at + 2], group.L = c.before[at + 3];
            if (is_one) all.O[0] = out[d], group.O[0] = c.before[at + PART_HEAD + (size_t)d];
        }
        merge_groups(part, stride, d, s, is_one, &all, &group);
        if (!is_one) continue;
        out[d] = s.end == s.n ? __fmul_rn(all.O[0], 1.0f / all.L) : all.O[0];
        if (s.end < s.n) c.after[at + PART_HEAD + (size_t)d] = group.O[0];
    }
    if (threadIdx.x == 0 && s.end < s.n) {
        c.after[at] = all.M, c.after[at + 1] = all.L;
        c.after[at + 2] = group.M, c.after[at + 3] = group.L;
    }
}

/* One head of a prompt row; the state is at `at`. */
static __device__ __forceinline__ void merge_prefill_head(const struct merge_call &c,
                                                          const struct merge_span &s, size_t at,
                                                          const float *part, size_t stride,
                                                          float *out)
{
    const int lane = (int)(threadIdx.x % WARP);
    struct merge_sum<1> sum = {
        0, 0, { 0 }
    };
    for (int begin = (int)threadIdx.x - lane; begin < c.v_dim; begin += MERGE_THREADS) {
        const int d = begin + lane;
        const bool is_one = d < c.v_dim;
        if (s.first > 0) {
            sum.M = c.before[at], sum.L = c.before[at + 1];
            sum.O[0] = is_one ? out[d] : 0.0f;
        }
        merge_all<1, MERGE_AHEAD>(part, stride, 0, d, s.end - s.first, is_one, s.first > 0, &sum);
        if (is_one) out[d] = s.end == s.n ? __fmul_rn(sum.O[0], 1.0f / sum.L) : sum.O[0];
    }
    __syncthreads(); /* `before` is `after` */
    if (threadIdx.x == 0 && s.end < s.n) c.after[at] = sum.M, c.after[at + 1] = sum.L;
}

/* One head of the i-th row, by a block: warps take 32 elements at a time. */
static __device__ __forceinline__ void merge_head(const struct merge_call &c, int i, int head)
{
    const struct cuda_attn_row row = attn_row_set_rows(c.list)[i];
    const struct merge_span s = span_of(c, row, i);
    if (s.n == 1 || s.first >= s.end) return; /* one segment: its kernel has finished the row */
    const size_t stride = (size_t)c.n_heads * part_floats(c.v_dim);
    const float *part = c.parts + s.part * stride + (size_t)head * part_floats(c.v_dim);
    float *out = c.out + ((size_t)row.row * (size_t)c.n_heads + (size_t)head) * (size_t)c.v_dim;
    if (c.list.which != ATTN_ROWS_PREFILL) merge_decode_head(c, s, head, part, stride, out);
    else merge_prefill_head(c, s, (size_t)i * c.state_stride + 2 * (size_t)head, part, stride, out);
}

static __global__ void __launch_bounds__(MERGE_THREADS, 4) merge_segments(const struct merge_call c)
{
    grid_dependency_sync();
    const int n_units = attn_row_set_n(c.list) * c.n_heads;
    for (int unit = (int)blockIdx.x; unit < n_units; unit += (int)gridDim.x)
        merge_head(c, unit / c.n_heads, unit % c.n_heads);
}

#endif
