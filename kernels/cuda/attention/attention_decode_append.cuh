/* attention_decode_append.cuh - a step's own queries, keys and values in decode attention, as the
 * products left them: their norm and rotation, with the bits of rotate_head, and the pool's rows,
 * with those of attention_kv_append.cu.
 *
 * A lane has DIM / 32 elements of a head side by side; the sum for a norm reads every 32nd, because
 * rotate_head adds them so. All that a head needs is loaded before anything is computed: the time
 * of a kernel that waits for the previous one is that of its instructions. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_APPEND_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_APPEND_CUH

#include "kernels/cuda/attention/attention_decode.cuh"
#include "kernels/cuda/attention/attention_kv_quantise.cuh"
#include "kernels/cuda/rope.cuh"

/* N floats that are aligned to as many. */
template <int N> static __device__ __forceinline__ void load_floats(float to[N], const float *from)
{
    static_assert(N % 4 == 0 || N == 2, "float2 and float4");
    if constexpr (N == 2) {
        const float2 x = *(const float2 *)from;
        to[0] = x.x, to[1] = x.y;
    } else {
        UNROLL for (int i = 0; i < N; i += 4)
        {
            const float4 x = *(const float4 *)(from + i);
            to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
        }
    }
}

/* ---- heads ---- */

enum { ATTN_NEW_QUERIES = 2 /* of a warp at a time */ };

/* A head, or weights of its norm: the lane's elements, and those DIM / 2 away, which make pairs
 * with them unless pairs are neighbours. */
template <int DIM> struct attn_lane_pairs {
    static constexpr int N = DIM / WARP;
    float x[N], other[N];
};
template <int DIM> struct attn_new_head {
    static constexpr int N = DIM / WARP;
    struct attn_lane_pairs<DIM> of;
    float every_32nd[N]; /* for the norm */
};

template <int DIM>
static __device__ __forceinline__ void attn_load_pairs(const float *from, bool interleaved,
                                                       struct attn_lane_pairs<DIM> *p)
{
    constexpr int N = DIM / WARP;
    const int first = N * (int)(threadIdx.x % WARP);
    load_floats<N>(p->x, from + first);
    if (!interleaved) load_floats<N>(p->other, from + (first ^ DIM / 2));
}

/* (cos, sin) of the lane's pairs. */
template <int DIM>
static __device__ __forceinline__ void attn_load_turns(const struct attn_decode_append &a, int pos,
                                                       float turn[2 * DIM / WARP])
{
    constexpr int N = DIM / WARP;
    const float *turns = a.cos_sin + (size_t)pos * DIM;
    const int first = N * (int)(threadIdx.x % WARP);
    if (a.interleaved) load_floats<N>(turn, turns + first);
    else load_floats<2 * N>(turn, turns + 2 * (first % (DIM / 2)));
}

template <int DIM>
static __device__ __forceinline__ void attn_load_head(const float *from, bool interleaved,
                                                      bool has_norm, struct attn_new_head<DIM> *h)
{
    attn_load_pairs<DIM>(from, interleaved, &h->of);
    UNROLL for (int e = 0; has_norm && e < DIM / WARP; e++)
        h->every_32nd[e] = from[(int)(threadIdx.x % WARP) + e * WARP];
}

/* The norm of COUNT heads, whose sums do not wait for each other: queries, the third one a key. */
template <int DIM, int COUNT>
static __device__ __forceinline__ void attn_norm_heads(const struct attn_decode_append &a,
                                                       const struct attn_lane_pairs<DIM> &q_norm,
                                                       const struct attn_lane_pairs<DIM> &k_norm,
                                                       struct attn_new_head<DIM> h[COUNT])
{
    constexpr int N = DIM / WARP;
    float squares[COUNT] = {};
    UNROLL for (int i = 0; i < COUNT; i++) UNROLL for (int e = 0; e < N; e++)
        squares[i] = fmaf(h[i].every_32nd[e], h[i].every_32nd[e], squares[i]);
    UNROLL for (int step = WARP / 2; step > 0; step /= 2) /* as warp_sum */
        UNROLL for (int i = 0; i < COUNT; i++)
            squares[i] += __shfl_xor_sync(0xffffffffu, squares[i], step);
    UNROLL for (int i = 0; i < COUNT; i++) squares[i] = head_factor(squares[i], DIM, a.norm_eps);
    UNROLL for (int i = 0; i < COUNT; i++)
    {
        const struct attn_lane_pairs<DIM> &by = i < ATTN_NEW_QUERIES ? q_norm : k_norm;
        UNROLL for (int e = 0; e < N; e++)
        {
            h[i].of.x[e] = by.x[e] * (h[i].of.x[e] * squares[i]);
            if (!a.interleaved) h[i].of.other[e] = by.other[e] * (h[i].of.other[e] * squares[i]);
        }
    }
}

/* The lane's elements become what rotate_head makes of them. */
template <int DIM>
static __device__ __forceinline__ void attn_rotate_head(bool interleaved,
                                                        const float turn[2 * DIM / WARP],
                                                        struct attn_lane_pairs<DIM> *h)
{
    constexpr int N = DIM / WARP;
    float *x = h->x;
    if (interleaved) {
        UNROLL for (int e = 0; e < N; e += 2)
        {
            const float first = x[e], cos = turn[e], sin = turn[e + 1];
            x[e] = rotated(first, x[e + 1], cos, -sin);
            x[e + 1] = rotated(x[e + 1], first, cos, sin);
        }
    } else {
        const bool is_second = threadIdx.x % WARP >= WARP / 2;
        UNROLL for (int e = 0; e < N; e++) x[e] = rotated(
            x[e], h->other[e], turn[2 * e], is_second ? turn[2 * e + 1] : -turn[2 * e + 1]);
    }
}

/* ---- a row's key and value ---- */

/* A lane's elements of a key or a value, as the pool's. */
template <enum dtype T, int DIM> struct attn_new_part {
    static constexpr int WORDS = kv_traits<T>::SCALED ? 1 : DIM / WARP / 2;
    unsigned bits[WORDS];
    float scale;
};

/* Of the warp whose tile has the key; of others is_mine is false. */
template <enum dtype T, int DIM> struct attn_new_row {
    bool is_mine;
    struct kv_paged_row to;
    struct attn_new_part<T, DIM> k, v;
};

/* By a whole warp. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_round_part(const float x[DIM / WARP],
                                                       struct attn_new_part<T, DIM> *p)
{
    constexpr int N = DIM / WARP;
    if constexpr (kv_traits<T>::SCALED) {
        unsigned top = 0;
        UNROLL for (int e = 0; e < N; e++) top = max(top, __float_as_uint(x[e]) & 0x7fffffffu);
        p->scale = scale_for<T>(warp_top(top));
        p->bits[0] = 0;
        UNROLL for (int e = 0; e < N; e++)
            p->bits[0] |= p->scale > 0 ? quantised<T>(x[e], p->scale) << 8 * e : 0;
    } else {
        UNROLL for (int e = 0; e < N; e += 2) p->bits[e / 2] = T == DTYPE_F16
                                                                   ? round_f16x2(x[e], x[e + 1])
                                                                   : pack_bf16(x[e], x[e + 1]);
    }
}

/* To where the lane's elements belong, which is aligned to their bytes. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_put_part(const struct attn_new_part<T, DIM> &p,
                                                     void *to)
{
    constexpr int BYTES = DIM / WARP * kv_traits<T>::BYTES;
    if constexpr (BYTES == 8) *(uint2 *)to = make_uint2(p.bits[0], p.bits[1]);
    else if constexpr (BYTES == 4) *(unsigned *)to = p.bits[0];
    else *(uint16_t *)to = (uint16_t)p.bits[0];
}

template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_write_part(const struct kv_layer &kv,
                                                       const struct kv_paged_row &to,
                                                       const struct attn_new_part<T, DIM> &p)
{
    constexpr int BYTES = DIM / WARP * kv_traits<T>::BYTES;
    const int lane = (int)(threadIdx.x % WARP);
    char *pool = (char *)kv.data;
    attn_put_part(p, pool + kv_row_offset<T>(kv, to) + lane * BYTES);
    if (kv_traits<T>::SCALED && lane == 0) store_scale(pool + kv_scale_offset<T>(kv, to), p.scale);
}

/* Writes the row to the pool; n holds what is there. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_append_row(const struct attn_decode_call &c,
                                                       const float key[DIM / WARP],
                                                       const float value[DIM / WARP],
                                                       struct attn_new_row<T, DIM> *n)
{
    struct kv_paged_row to = n->to;
    attn_round_part(key, &n->k);
    attn_round_part(value, &n->v);
    attn_write_part(c.kv, to, n->k);
    to.row += (unsigned)c.kv.block_tokens;
    attn_write_part(c.kv, to, n->v);
}

#endif
