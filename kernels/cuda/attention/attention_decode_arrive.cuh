/* attention_decode_arrive.cuh - the block that computes the last segment of a group merges the
 * group, and the one that merges a row's last group finishes the row, of its query heads: no launch
 * of its own, and no wait for the slowest block of the GPU.
 *
 * Who is last is counted in memory. Counters are zero between calls: the last arrival wraps them.
 * The order of sums is fixed (attention_merge_parts.cuh), so the order of arrival changes no bit.
 * Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_ARRIVE_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_ARRIVE_CUH

#include "kernels/cuda/attention/attention_decode.cuh"
#include "kernels/cuda/attention/attention_merge_parts.cuh"

enum {
    ARRIVE_ROWS_MAX = 16, /* that share a block's segment */
    MERGED_AT = 2         /* of the part of a group's first segment: (m, l) of the group */
};

/* By one thread after a barrier behind the block's writes: are all others of n there? */
static __device__ __forceinline__ bool attn_arrive(unsigned *counter, int n)
{
    __threadfence();
    return atomicInc(counter, (unsigned)n - 1) == (unsigned)n - 1;
}

/* Where the block's heads of a row of the list count groups, and where segments of a group. */
static __device__ __forceinline__ unsigned *attn_row_counter(const struct attn_decode_call &c,
                                                             const struct attn_decode_block &b,
                                                             int list_row)
{
    return c.arrivals + (size_t)list_row * (size_t)(c.kv.n_heads * c.n_runs) + b.of_item;
}
static __device__ __forceinline__ unsigned *attn_group_counter(const struct attn_decode_call &c,
                                                               const struct attn_decode_block &b,
                                                               int list_row, int segment)
{
    /* a row's groups are at most its segments / MERGE_GROUP and one more */
    return attn_row_counter(
        c, b, attn_row_set_n(c.list) + segment / MERGE_GROUP + list_row + b.segment / MERGE_GROUP);
}

/* A lane's four elements from d on, of n parts, into out or into the first of the parts. */
static __device__ __forceinline__ void attn_merge_store(const struct merge_sum<4> &s, int d,
                                                        float *part, float *out)
{
    const float by = out ? 1.0f / s.L : 1.0f;
    const float4 o = make_float4(__fmul_rn(s.O[0], by), __fmul_rn(s.O[1], by),
                                 __fmul_rn(s.O[2], by), __fmul_rn(s.O[3], by));
    if (!out) {
        *(float4 *)(part + PART_HEAD + d) = o;
        if (d == 0) part[MERGED_AT] = s.M, part[MERGED_AT + 1] = s.L;
    } else *(float4 *)(out + d) = o;
}

/* The block's heads of a row: n parts, from segment `first` on every step-th, become the row
 * (is_row), or the part of the first. Warps take 128 elements of a head at a time. AHEAD: parts
 * that are read at a time, as many as the registers of a kernel have room for. */
template <int THREADS, int AHEAD>
static __device__ __forceinline__ void attn_merge_heads(const struct attn_decode_call &c,
                                                        const struct attn_decode_block &b,
                                                        const struct cuda_attn_row &row, int first,
                                                        int step, int n, bool is_row)
{
    const int n_chunks = (c.v_dim + 4 * WARP - 1) / (4 * WARP);
    const size_t floats = part_floats(c.v_dim), n_heads = (size_t)c.n_heads;
    __threadfence(); /* what all others wrote before they arrived */
    for (int i = (int)threadIdx.x / WARP; i < b.n_heads * n_chunks; i += THREADS / WARP) {
        const int d = (i % n_chunks * WARP + (int)(threadIdx.x % WARP)) * 4;
        const size_t head = (size_t)(b.head + i / n_chunks);
        float *part = c.parts +
                      ((size_t)(row.segment + first - c.item_begin) * n_heads + head) * floats;
        float *out = c.out + ((size_t)row.row * n_heads + head) * (size_t)c.v_dim;
        struct merge_sum<4> s;
        merge_all<4, AHEAD>(part, (size_t)step * n_heads * floats, step > 1 ? MERGED_AT : 0, d, n,
                            d < c.v_dim, false, &s);
        if (d < c.v_dim) attn_merge_store(s, d, part, is_row ? out : NULL);
    }
}

/* The block's segment was the last of its group. */
template <int THREADS, int AHEAD>
static __device__ __forceinline__ void attn_merge_group(const struct attn_decode_call &c,
                                                        const struct attn_decode_block &b,
                                                        int list_row)
{
    __shared__ bool is_last;
    const struct cuda_attn_row row = c.list.rows[list_row];
    const int n = row.pos / row.per_segment + 1, n_groups = (n + MERGE_GROUP - 1) / MERGE_GROUP,
              first = b.segment / MERGE_GROUP * MERGE_GROUP;
    attn_merge_heads<THREADS, AHEAD>(c, b, row, first, 1, min((int)MERGE_GROUP, n - first),
                                     n_groups == 1);
    if (n_groups == 1) return;
    __syncthreads();
    if (threadIdx.x == 0) is_last = attn_arrive(attn_row_counter(c, b, list_row), n_groups);
    __syncthreads();
    if (is_last) attn_merge_heads<THREADS, AHEAD>(c, b, row, 0, MERGE_GROUP, n_groups, true);
}

/* The block's parts, of n_rows rows of the list, are written. Called by all threads; begins with a
 * barrier, so that what the block shares may be taken again. */
template <int THREADS, int AHEAD>
static __device__ __forceinline__ void attn_decode_arrive(const struct attn_decode_call &c,
                                                          const struct attn_decode_block &b,
                                                          int n_rows)
{
    __shared__ bool is_last[ARRIVE_ROWS_MAX];
    const int i = (int)threadIdx.x;
    __syncthreads();
    if (!c.arrivals || (n_rows == 1 && b.row.pos < b.row.per_segment)) return;
    if (i < n_rows) {
        const struct cuda_attn_row row = c.list.rows[b.list_row + i];
        const int left = row.pos / row.per_segment + 1 - b.segment / MERGE_GROUP * MERGE_GROUP;
        is_last[i] = row.pos >= row.per_segment &&
                     attn_arrive(attn_group_counter(c, b, b.list_row + i, row.segment),
                                 min((int)MERGE_GROUP, left));
    }
    __syncthreads();
    for (int r = 0; r < n_rows; r++)
        if (is_last[r]) attn_merge_group<THREADS, AHEAD>(c, b, b.list_row + r);
}

#endif
