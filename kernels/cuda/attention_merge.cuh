/* attention_merge.cuh - results of segments into rows: (m, l, o) in ascending order, by the formulas of kernels/cpu/cpu_attention.c.
 *
 * A call merges one wave of segments. What rows have after it and need in the next one is O in `out` and (M, L) in a state.
 * One warp per row and head; bound by reading the parts, a few percent of the keys and values that they stand for. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_MERGE_CUH
#define BATON_KERNELS_CUDA_ATTENTION_MERGE_CUH

#include "kernels/cuda/attention_pool.cuh"

enum { MERGE_WARPS = 4, MERGE_SIDE = 4 /* elements of a lane at a time */ };

struct merge_call {
    struct listed          list;
    float                 *out;
    const float           *parts;
    const float           *before; /* (M, L) per head, state_stride floats further for each row */
    float                 *after;
    size_t                 state_stride;
    int32_t                n_heads, v_dim;
    /* The wave: each prompt row's segments [begin, end); of other rows parts [begin, end) of the numbering by struct cuda_row.segment. */
    int32_t                begin, end;
};

/* A row's segments in the wave: [first, end) of its n; that of `first` is number `part` of the wave's. */
struct merge_span {
    int    first, end, n;
    size_t part;
};

static __device__ __forceinline__ struct merge_span span_of(const struct merge_call &c, const struct cuda_row &row, int i)
{
    const bool        by_item = c.list.which != LISTED_PROMPT;
    const int         before = by_item ? row.segment : 0;
    struct merge_span s;
    s.n = row.pos / ATTENTION_SEGMENT + 1;
    s.first = max(0, c.begin - before);
    s.end = min(s.n, c.end - before);
    s.part = by_item ? (size_t)(before + s.first - c.begin) : (size_t)i * (size_t)(c.end - c.begin) + (size_t)(s.first - c.begin);
    return s;
}

/* One head of the i-th row, by a warp. */
static __device__ __forceinline__ void merge_head(const struct merge_call &c, int i, int head)
{
    const struct cuda_row   row = listed_rows(c.list)[i];
    const struct merge_span s = span_of(c, row, i);
    const int               lane = (int)(threadIdx.x % WARP);
    if (s.n == 1 || s.first >= s.end) return; /* one segment: its kernel has finished the row */
    const size_t at = (size_t)i * c.state_stride + 2 * (size_t)head, stride = (size_t)c.n_heads * part_floats(c.v_dim);
    const float *part = c.parts + s.part * stride + (size_t)head * part_floats(c.v_dim);
    float       *out = c.out + ((size_t)row.row * (size_t)c.n_heads + (size_t)head) * (size_t)c.v_dim;
    float        M = 0, L = 0;
    for (int base = lane; base < c.v_dim + lane; base += WARP * MERGE_SIDE) {
        float O[MERGE_SIDE] = { 0 };
        M = s.first ? c.before[at] : part[0];
        L = s.first ? c.before[at + 1] : part[1];
        UNROLL for (int k = 0; k < MERGE_SIDE; k++)
            if (base + k * WARP < c.v_dim) O[k] = s.first ? out[base + k * WARP] : part[PART_HEAD + base + k * WARP];
        for (int n = s.first ? 0 : 1; n < s.end - s.first; n++) {
            const float *p = part + (size_t)n * stride;
            float        a, b;
            merge_weights(&M, &L, p[0], p[1], &a, &b);
            UNROLL for (int k = 0; k < MERGE_SIDE; k++)
                if (base + k * WARP < c.v_dim) O[k] = merged(O[k], p[PART_HEAD + base + k * WARP], a, b);
        }
        UNROLL for (int k = 0; k < MERGE_SIDE; k++)
            if (base + k * WARP < c.v_dim) out[base + k * WARP] = s.end == s.n ? __fmul_rn(O[k], 1.0f / L) : O[k];
    }
    __syncwarp(); /* `before` may be `after` */
    if (lane == 0 && s.end < s.n) c.after[at] = M, c.after[at + 1] = L; /* of all rows of a numbered wave the one that goes on */
}

static __global__ void __launch_bounds__(MERGE_WARPS * WARP) merge_segments(const struct merge_call c)
{
    const int per_row = (c.n_heads + MERGE_WARPS - 1) / MERGE_WARPS, n_units = listed_n(c.list) * per_row;
    for (int unit = (int)blockIdx.x; unit < n_units; unit += (int)gridDim.x) {
        const int head = unit % per_row * MERGE_WARPS + (int)(threadIdx.x / WARP);
        if (head < c.n_heads) merge_head(c, unit / per_row, head);
    }
}

#endif
