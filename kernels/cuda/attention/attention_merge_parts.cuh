/* attention_merge_parts.cuh - how (m, l, o) of segments become those of a row, by the formulas of
 * kernels/cpu/attention/cpu_attention.c, with loads ahead of the sums.
 *
 * A prompt row's segments are merged in ascending order. A decode row's are merged in groups of
 * MERGE_GROUP, each in ascending order, then the groups: so that whoever computes the last segment
 * of a group can merge it while other blocks still read keys. A segment's weight does not depend on
 * the sums, so a warp's lanes compute those of as many segments at a time. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_MERGE_PARTS_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_MERGE_PARTS_CUH

#include "kernels/cuda/attention/attention_paged_kv.cuh"

enum { MERGE_GROUP = 8 };

/* What lanes know of up to as many segments in a row: each of one, by the formulas of
 * merge_weights. */
struct merge_fragment {
    float a, b, M; /* M: the largest of all up to the lane's */
};

/* M: of what came before. N: of up to so many segments, by so many neighbouring lanes. */
template <int N>
static __device__ __forceinline__ struct merge_fragment merge_weigh(float m, float M)
{
    struct merge_fragment x;
    x.M = m > M ? m : M;
    UNROLL for (int step = 1; step < N; step *= 2)
    {
        const float before = __shfl_up_sync(0xffffffffu, x.M, (unsigned)step, N);
        x.M = x.M > before ? x.M : before;
    }
    const float last = __shfl_up_sync(0xffffffffu, x.M, 1, N);
    x.a = expf((threadIdx.x % N > 0 ? last : M) - x.M);
    x.b = expf(m - x.M);
    return x;
}

/* Of all segments so far; O: of the lane's N elements. */
template <int N> struct merge_sum {
    float M, L, O[N];
};

/* Loads of up to AHEAD segments: (m, l) of the lane's, and the lane's elements of each. */
template <int N, int AHEAD> struct merge_loads {
    float m, l, o[AHEAD][N];
};

/* n segments, the first at `part`; (m, l) lie at `ml` of a part, d is the lane's first element.
 * Not by L1, which may have older parts of the same launch. */
template <int N, int AHEAD>
static __device__ __forceinline__ void merge_load(const float *part, size_t stride, int ml, int d,
                                                  int n, bool is_one,
                                                  struct merge_loads<N, AHEAD> *to)
{
    const int lane = (int)(threadIdx.x % WARP);
    to->m = lane < n ? __ldcg(part + (size_t)lane * stride + ml) : -INFINITY;
    to->l = lane < n ? __ldcg(part + (size_t)lane * stride + ml + 1) : 0;
    UNROLL for (int j = 0; j < AHEAD; j++)
    {
        const float *from = part + (size_t)j * stride + PART_HEAD + d;
        UNROLL for (int e = 0; e < N; e++) to->o[j][e] = 0;
        if (!is_one || j >= n) continue;
        if constexpr (N == 4) {
            const float4 x = __ldcg((const float4 *)from);
            to->o[j][0] = x.x, to->o[j][1] = x.y, to->o[j][2] = x.z, to->o[j][3] = x.w;
        } else {
            UNROLL for (int e = 0; e < N; e++) to->o[j][e] = __ldcg(from + e);
        }
    }
}

/* The first of the segments begins a sum. */
template <int N, int AHEAD>
static __device__ __forceinline__ void merge_begin(const struct merge_loads<N, AHEAD> &in,
                                                   struct merge_sum<N> *s)
{
    s->M = __shfl_sync(0xffffffffu, in.m, 0);
    s->L = __shfl_sync(0xffffffffu, in.l, 0);
    UNROLL for (int e = 0; e < N; e++) s->O[e] = in.o[0][e];
}

/* Segments [begin, n) of `in` into s, one after the other: the sums depend on each other. */
template <int N, int AHEAD>
static __device__ __forceinline__ void merge_add(const struct merge_loads<N, AHEAD> &in, int begin,
                                                 int n, struct merge_sum<N> *s)
{
    const struct merge_fragment x = merge_weigh<AHEAD>(in.m, s->M);
    UNROLL for (int j = 0; j < AHEAD; j++)
    {
        const float a = __shfl_sync(0xffffffffu, x.a, j), b = __shfl_sync(0xffffffffu, x.b, j),
                    l = __shfl_sync(0xffffffffu, in.l, j);
        if (j < begin) continue;
        if (j >= n) break;
        s->L = fmaf(l, b, __fmul_rn(s->L, a));
        UNROLL for (int e = 0; e < N; e++) s->O[e] = merged(s->O[e], in.o[j][e], a, b);
    }
    s->M = __shfl_sync(0xffffffffu, x.M, n - 1);
}

/* n segments whose parts begin at `part`, into s; is_begun: s has some already. The next ones are
 * on their way while AHEAD are summed up. */
template <int N, int AHEAD>
static __device__ __forceinline__ void merge_all(const float *part, size_t stride, int ml, int d,
                                                 int n, bool is_one, bool is_begun,
                                                 struct merge_sum<N> *s)
{
    struct merge_loads<N, AHEAD> next;
    merge_load(part, stride, ml, d, min(AHEAD, n), is_one, &next);
    if (!is_begun) merge_begin(next, s);
    for (int k = 0; k < n; k += AHEAD) {
        const struct merge_loads<N, AHEAD> now = next;
        const int left = n - k - AHEAD;
        if (left > 0)
            merge_load(part + (size_t)(k + AHEAD) * stride, stride, ml, d, min(AHEAD, left), is_one,
                       &next);
        merge_add(now, k == 0 && !is_begun ? 1 : 0, min(AHEAD, n - k), s);
    }
}

#endif
