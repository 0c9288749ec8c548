/* attention_merge.cuh - merges results of segments into rows: (m, l, o) in ascending order, by the
 * formulas of kernels/cpu/attention/cpu_attention.c.
 *
 * A call merges one wave of segments. O of a row stays in `out` and (M, L) in a state for the next
 * wave. A segment's weight does not depend on the sums, so a warp's lanes compute it for 32
 * segments at a time; the sums run in order. Bound by reading the parts, a few percent of the KV.
 * Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_MERGE_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_MERGE_CUH

#include "kernels/cuda/attention/attention_paged_kv.cuh"

enum {
    MERGE_THREADS = 128,
    MERGE_AHEAD = WARP /* segments that are read at a time */
};

struct merge_call {
    struct attn_row_set list;
    float *out;
    const float *parts;
    const float *before; /* (M, L) per head, state_stride floats further for each row */
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

/* What a warp knows of up to 32 segments in a row: lane j of the j-th, by the formulas of
 * merge_weights. */
struct merge_fragment {
    float a, b, l, M; /* M: the largest of all up to the lane's */
};

/* Loads of up to MERGE_AHEAD segments: (m, l) of the lane's, and the lane's element of each. They
 * are on their way while the ones before them are summed up. */
struct merge_loads {
    float m, l, o[MERGE_AHEAD];
};

/* d: the lane's element. n: of MERGE_AHEAD segments whose parts begin at `part`. */
static __device__ __forceinline__ void merge_load(const float *part, size_t stride, int d, int n,
                                                  bool is_one, struct merge_loads *to)
{
    const int lane = (int)(threadIdx.x % WARP);
    to->m = lane < n ? part[(size_t)lane * stride] : -INFINITY;
    to->l = lane < n ? part[(size_t)lane * stride + 1] : 0;
    UNROLL for (int j = 0; j < MERGE_AHEAD; j++)
        to->o[j] = is_one && j < n ? part[(size_t)j * stride + PART_HEAD + d] : 0.0f;
}

/* M: of what came before. */
static __device__ __forceinline__ struct merge_fragment merge_weigh(float m, float l, float M)
{
    const int lane = (int)(threadIdx.x % WARP);
    struct merge_fragment x;
    x.l = l;
    x.M = m > M ? m : M;
    UNROLL for (int step = 1; step < WARP; step *= 2)
    {
        const float before = __shfl_up_sync(0xffffffffu, x.M, (unsigned)step);
        if (lane >= step) x.M = x.M > before ? x.M : before;
    }
    const float last = __shfl_up_sync(0xffffffffu, x.M, 1);
    x.a = expf((lane > 0 ? last : M) - x.M);
    x.b = expf(m - x.M);
    return x;
}

/* Of all segments so far; O: of the lane's element. */
struct merge_sum {
    float M, L, O;
};

/* n segments into s, one after the other: the sums depend on each other. */
static __device__ __forceinline__ void merge_add(const struct merge_fragment &x,
                                                 const float o[MERGE_AHEAD], int n,
                                                 struct merge_sum *s)
{
    UNROLL for (int j = 0; j < MERGE_AHEAD; j++)
    {
        const float a = __shfl_sync(0xffffffffu, x.a, j), b = __shfl_sync(0xffffffffu, x.b, j),
                    l = __shfl_sync(0xffffffffu, x.l, j);
        if (j >= n) break;
        s->L = fmaf(l, b, __fmul_rn(s->L, a));
        s->O = merged(s->O, o[j], a, b);
    }
    s->M = __shfl_sync(0xffffffffu, x.M, n - 1);
}

/* n segments whose parts begin at `part`, into s. */
static __device__ __forceinline__ void merge_all(const float *part, size_t stride, int d, int n,
                                                 bool is_one, struct merge_sum *s)
{
    struct merge_loads next;
    merge_load(part, stride, d, min((int)MERGE_AHEAD, n), is_one, &next);
    for (int k = 0; k < n; k += MERGE_AHEAD) {
        const struct merge_loads now = next;
        const int left = n - k - MERGE_AHEAD;
        if (left > 0)
            merge_load(part + (size_t)(k + MERGE_AHEAD) * stride, stride, d,
                       min((int)MERGE_AHEAD, left), is_one, &next);
        merge_add(merge_weigh(now.m, now.l, s->M), now.o, min((int)MERGE_AHEAD, n - k), s);
    }
}

/* One head of the i-th row, by a block: warps take 32 elements at a time. */
static __device__ __forceinline__ void merge_head(const struct merge_call &c, int i, int head)
{
    const struct cuda_attn_row row = attn_row_set_rows(c.list)[i];
    const struct merge_span s = span_of(c, row, i);
    if (s.n == 1 || s.first >= s.end) return; /* one segment: its kernel has finished the row */
    const size_t at = (size_t)i * c.state_stride + 2 * (size_t)head,
                 stride = (size_t)c.n_heads * part_floats(c.v_dim);
    const float *part = c.parts + s.part * stride + (size_t)head * part_floats(c.v_dim);
    float *out = c.out + ((size_t)row.row * (size_t)c.n_heads + (size_t)head) * (size_t)c.v_dim;
    const int lane = (int)(threadIdx.x % WARP), n = s.end - s.first;
    struct merge_sum sum = { 0, 0, 0 };
    for (int begin = (int)threadIdx.x - lane; begin < c.v_dim; begin += MERGE_THREADS) {
        const int d = begin + lane;
        const bool is_one = d < c.v_dim;
        sum.M = s.first ? c.before[at] : part[0];
        sum.L = s.first ? c.before[at + 1] : part[1];
        sum.O = !is_one ? 0.0f : s.first ? out[d] : part[PART_HEAD + d];
        const int begun = s.first ? 0 : 1;
        merge_all(part + (size_t)begun * stride, stride, d, n - begun, is_one, &sum);
        if (is_one) out[d] = s.end == s.n ? __fmul_rn(sum.O, 1.0f / sum.L) : sum.O;
    }
    __syncthreads(); /* `before` may be `after` */
    /* of all rows of a numbered wave the one that goes on */
    if (threadIdx.x == 0 && s.end < s.n) c.after[at] = sum.M, c.after[at + 1] = sum.L;
}

static __global__ void __launch_bounds__(MERGE_THREADS, 4) merge_segments(const struct merge_call c)
{
    grid_dependency_sync();
    const int n_units = attn_row_set_n(c.list) * c.n_heads;
    for (int unit = (int)blockIdx.x; unit < n_units; unit += (int)gridDim.x)
        merge_head(c, unit / c.n_heads, unit % c.n_heads);
}

#endif
