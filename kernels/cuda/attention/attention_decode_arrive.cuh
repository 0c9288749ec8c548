/* attention_decode_arrive.cuh - the warp that computes the last segment of a group, of some heads,
 * merges the group, and the one that merges a row's last group finishes the row: no launch of its
 * own, no wait for the slowest block of the GPU, and none for the block's other warps.
 *
 * Who is last is counted in memory. Counters are zero between calls: the last arrival wraps them.
 * The order of sums is that of attention_merge_parts.cuh, so that of arrival changes no bit. Bound
 * by latency: parts written, atomic, parts read. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_ARRIVE_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_ARRIVE_CUH

#include "kernels/cuda/attention/attention_decode.cuh"
#include "kernels/cuda/attention/attention_merge_parts.cuh"

enum {
    MERGED_AT = 2 /* of the part of a group's first segment: (m, l) of the group */
};

/* Which of a block's heads a warp finishes, of every row: it writes their parts, counts, and merges
 * them. A lane has four elements of one head of each round: the block's heads lane_head(),
 * lane_head() + STEP and so on; a warp's first one is warp_head(). */
template <int WARPS, int DIM> struct attn_heads {
    static constexpr int QUADS = DIM / 4, SIDE = WARP / QUADS, STEP = WARPS * SIDE;
    static constexpr int TOGETHER = 2, ROUNDS = TOGETHER / SIDE; /* heads that a warp merges */
    static_assert(SIDE == 1 || SIDE == 2, "a lane of a merging warp has a head of each round");
    static __device__ __forceinline__ int warp_head() { return (int)threadIdx.x / WARP * SIDE; }
    static __device__ __forceinline__ int lane_head() { return (int)threadIdx.x / QUADS; }
    static __device__ __forceinline__ int lane_element() { return (int)threadIdx.x % QUADS * 4; }
};

/* Where a warp's heads of a row of the list count groups (i = 0), and segments of a group (1 + its
 * number). A row's groups are at most its segments / MERGE_GROUP and one more. */
template <int WARPS>
static __device__ __forceinline__ unsigned *attn_counter(const struct attn_decode_call &c,
                                                         const struct attn_decode_block &b,
                                                         int list_row, int segment, int i)
{
    const unsigned n = (unsigned)segment / MERGE_GROUP + 2 * (unsigned)list_row + (unsigned)i,
                   at = n * (unsigned)(c.kv.n_heads * c.n_runs) + (unsigned)b.of_item;
    return c.arrivals + at * WARPS + threadIdx.x / WARP;
}

/* A row's segments, and those of the group of the block's. */
struct attn_group {
    int first, n, n_segments;
};
static __device__ __forceinline__ struct attn_group attn_group_of(const struct attn_decode_block &b,
                                                                  int pos, int per_segment)
{
    struct attn_group g;
    /* per_segment is a power of two */
    g.n_segments = (int)((unsigned)pos >> (__ffs(per_segment) - 1)) + 1;
    g.first = b.segment & -(int)MERGE_GROUP;
    g.n = min((int)MERGE_GROUP, g.n_segments - g.first);
    return g;
}

/* What a warp merges: n parts of each of its heads, the first head's at `at` of c.parts and every
 * `stride` floats from there on, the other of TOGETHER heads `second` floats behind it. */
struct attn_merge {
    unsigned at, stride, second;
    int n, ml;
};

/* Of a row whose first segment is the list's `segment`-th: its n parts from `first` on, every
 * step-th. Computed here: an atomic is waited for before it is used. */
template <int WARPS, int DIM>
static __device__ __forceinline__ struct attn_merge attn_merge_of(const struct attn_decode_call &c,
                                                                  const struct attn_decode_block &b,
                                                                  int segment, int first, int step,
                                                                  int n)
{
    const unsigned floats = (unsigned)part_floats(DIM), n_heads = (unsigned)c.n_heads,
                   head = (unsigned)(b.head + attn_heads<WARPS, DIM>::warp_head());
    struct attn_merge m = { ((unsigned)(segment + first - c.item_begin) * n_heads + head) * floats,
                            (unsigned)step * n_heads * floats, 0, n, step > 1 ? MERGED_AT : 0 };
    compute_here(&m.at);
    compute_here(&m.stride);
    return m;
}

/* A lane's four elements of up to MERGE_GROUP parts of a head. */
static __device__ __forceinline__ void attn_merge_load(const float *parts, unsigned at,
                                                       unsigned stride, int n,
                                                       float4 o[MERGE_GROUP])
{
    UNROLL for (int j = 0; j < MERGE_GROUP; j++)
        o[j] = __ldcg((const float4 *)(parts + (at + (unsigned)min(j, n - 1) * stride)));
}

/* Adds a part to a head's sum; w: its (a, b, l). */
static __device__ __forceinline__ void attn_merge_add(const float4 &w, const float4 &o, float *L,
                                                      float4 *O)
{
    *L = fmaf(w.z, w.y, __fmul_rn(*L, w.x));
    *O = make_float4(merged(O->x, o.x, w.x, w.y), merged(O->y, o.y, w.x, w.y),
                     merged(O->z, o.z, w.x, w.y), merged(O->w, o.w, w.x, w.y));
}

/* Up to MERGE_GROUP parts more. Eight lanes compute the weights of a head, side by side with those
 * of the other; all get them from `weights`. M: of the head whose weights the lane computes. */
template <class H>
static __device__ __forceinline__ void attn_merge_some(const float *parts,
                                                       const struct attn_merge &m, int begin,
                                                       float4 (*weights)[MERGE_GROUP], float *M,
                                                       float L[H::ROUNDS], float4 O[H::ROUNDS])
{
    const int lane = (int)threadIdx.x % WARP, j = lane % MERGE_GROUP,
              slot = lane / MERGE_GROUP % H::TOGETHER, side = lane / H::QUADS,
              n = min((int)MERGE_GROUP, m.n - begin);
    const unsigned at = m.at + (unsigned)begin * m.stride,
                   d = PART_HEAD + (unsigned)H::lane_element();
    const float2 ml = __ldcg((const float2 *)(parts + (at + (unsigned)min(j, n - 1) * m.stride +
                                                       (slot ? m.second : 0) + (unsigned)m.ml)));
    float4 o[H::ROUNDS][MERGE_GROUP];
    UNROLL for (int i = 0; i < H::ROUNDS; i++)
        attn_merge_load(parts, at + (i + side ? m.second : 0) + d, m.stride, n, o[i]);
    const struct merge_fragment x = merge_weigh<MERGE_GROUP>(ml.x, begin > 0 ? *M : ml.x);
    *M = __shfl_sync(0xffffffffu, x.M, MERGE_GROUP - 1, MERGE_GROUP);
    __syncwarp(); /* the weights before are read */
    if (lane < H::TOGETHER * MERGE_GROUP) weights[slot][j] = make_float4(x.a, x.b, ml.y, 0);
    __syncwarp();
    UNROLL for (int k = 0; k < MERGE_GROUP; k++)
    {
        if (k > 0 && k >= n) break;
        UNROLL for (int i = 0; i < H::ROUNDS; i++)
        {
            const float4 w = weights[i * H::SIDE + side][k];
            attn_merge_add(w, o[i][k], &L[i], &O[i]);
        }
    }
}

/* The sums into a row of `out`, or, as those of a group, into the first of the parts (NULL). */
template <class H>
static __device__ __forceinline__ void attn_merge_store(float *parts, const struct attn_merge &m,
                                                        float *out, float M,
                                                        const float L[H::ROUNDS],
                                                        const float4 O[H::ROUNDS])
{
    const int side = (int)threadIdx.x % WARP / H::QUADS, d = H::lane_element();
    UNROLL for (int i = 0; i < H::ROUNDS; i++)
    {
        const float top = __shfl_sync(0xffffffffu, M, (i * H::SIDE + side) * MERGE_GROUP);
        if (i + side > 0 && m.second == 0) continue;
        if (out) {
            const float by = 1.0f / L[i];
            *(float4 *)(out + (i * H::STEP + side) * H::QUADS * 4 +
                        d) = make_float4(__fmul_rn(O[i].x, by), __fmul_rn(O[i].y, by),
                                         __fmul_rn(O[i].z, by), __fmul_rn(O[i].w, by));
        } else {
            float *part = parts + (m.at + (i + side ? m.second : 0));
            *(float4 *)(part + PART_HEAD + d) = O[i];
            if (d == 0) *(float2 *)(part + MERGED_AT) = make_float2(top, L[i]);
        }
    }
}

/* The warp's heads of a row: parts become the row of `out` (is_row), or the first of them. */
template <int WARPS, int DIM>
static __device__ __forceinline__ void attn_merge_heads(const struct attn_decode_call &c,
                                                        const struct attn_decode_block &b,
                                                        struct attn_merge m, int row, bool is_row)
{
    using H = attn_heads<WARPS, DIM>;
    __shared__ float4 weights[WARPS][H::TOGETHER][MERGE_GROUP];
    constexpr int APART = H::SIDE == 2 ? 1 : H::STEP, MORE = H::ROUNDS * H::STEP;
    const unsigned floats = (unsigned)part_floats(DIM);
    for (int h = H::warp_head(); h < b.n_heads; h += MORE, m.at += MORE * floats) {
        float *out = c.out + (size_t)((unsigned)(row * c.n_heads + b.head + h)) * DIM, M = 0,
              L[H::ROUNDS] = {};
        float4 O[H::ROUNDS];
        m.second = h + APART < b.n_heads ? APART * floats : 0;
        /* the only number to which any other, -0 too, is added without a change */
        UNROLL for (int i = 0; i < H::ROUNDS; i++) O[i] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
        UNROLL_BY(1)
        for (int k = 0; k < m.n; k += MERGE_GROUP)
            attn_merge_some<H>(c.parts, m, k, weights[threadIdx.x / WARP], &M, L, O);
        attn_merge_store<H>(c.parts, m, is_row ? out : NULL, M, L, O);
    }
}

/* The warp's segment was the last of its group: merges it by `m`, and the groups if it was their
 * last. */
template <int WARPS, int DIM>
static __device__ __forceinline__ void attn_merge_row(const struct attn_decode_call &c,
                                                      const struct attn_decode_block &b,
                                                      int list_row, const struct cuda_attn_row &row,
                                                      int n_segments, struct attn_merge m)
{
    const unsigned n_groups = (unsigned)(n_segments + MERGE_GROUP - 1) / MERGE_GROUP;
    UNROLL_BY(1)
    for (bool is_row = n_groups == 1;; is_row = true) {
        /* a segment that is a group by itself is its part already */
        if (m.n > 1) attn_merge_heads<WARPS, DIM>(c, b, m, row.row, is_row);
        if (is_row) return;
        unsigned before = 0;
        m = attn_merge_of<WARPS, DIM>(c, b, row.segment, 0, MERGE_GROUP, (int)n_groups);
        __syncwarp(); /* all lanes' are written */
        if (threadIdx.x % WARP == 0)
            before = atomic_inc_acq_rel(attn_counter<WARPS>(c, b, list_row, row.segment, 0),
                                        n_groups - 1);
        __syncwarp(); /* all lanes see the others' */
        if (__shfl_sync(0xffffffffu, before, 0) != n_groups - 1) return;
    }
}

/* The warp has written its heads' parts, of n_rows rows of the list. Called by all threads; what
 * the block shares may be taken again afterwards. A block that counts has no segment after it, so
 * that none of its warps waits here. */
template <int WARPS, int DIM>
static __device__ __forceinline__ void attn_decode_arrive(const struct attn_decode_call &c,
                                                          const struct attn_decode_block &b,
                                                          int n_rows)
{
    const int lane = (int)threadIdx.x % WARP;
    if (!c.arrivals) {
        __syncthreads();
        return;
    }
    if (attn_heads<WARPS, DIM>::warp_head() >= b.n_heads) return;
    if (n_rows == 1 && b.row.pos < b.row.per_segment) return;
    struct cuda_attn_row row = b.row;
    if (lane > 0 && lane < n_rows) row = c.list.rows[b.list_row + lane];
    struct attn_group g = attn_group_of(b, row.pos, row.per_segment);
    struct attn_merge m = attn_merge_of<WARPS, DIM>(c, b, row.segment, g.first, 1, g.n);
    bool is_last = lane < n_rows && g.n_segments > 1;
    __syncwarp(); /* all lanes' parts are written */
    if (is_last && g.n > 1) {
        unsigned *counter = attn_counter<WARPS>(c, b, b.list_row + lane, row.segment,
                                                1 + g.first / MERGE_GROUP);
        is_last = atomic_inc_acq_rel(counter, (unsigned)g.n - 1) == (unsigned)g.n - 1;
    }
    __syncwarp(); /* all lanes see the others' */
    for (unsigned left = __ballot_sync(0xffffffffu, is_last); left; left &= left - 1) {
        const int i = __ffs((int)left) - 1;
        if (n_rows > 1) {
            row = c.list.rows[b.list_row + i];
            g = attn_group_of(b, row.pos, row.per_segment);
            m = attn_merge_of<WARPS, DIM>(c, b, row.segment, g.first, 1, g.n);
        }
        attn_merge_row<WARPS, DIM>(c, b, b.list_row + i, row, g.n_segments, m);
    }
}

#endif
