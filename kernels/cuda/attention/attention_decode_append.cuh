/* attention_decode_append.cuh - a step's own queries, keys and values in decode attention, as the
 * products left them: their norm and rotation, with the bits of rotate_head, and the pool's rows,
 * with those of attention_kv_append.cu.
 *
 * A step of one row per sequence then needs no launch that appends: every warp rotates the queries
 * that it multiplies, and the warp whose tile has the row's key writes it and its value to the pool
 * and into that tile, so that nobody waits until the pool has them. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_APPEND_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_DECODE_APPEND_CUH

#include "kernels/cuda/attention/attention_decode.cuh"
#include "kernels/cuda/attention/attention_kv_quantise.cuh"
#include "kernels/cuda/rope.cuh"

/* ---- queries ---- */

/* A lane of four has, of each 16 elements of a query, the pairs that begin at at<>(i), i even and
 * odd: as tensor cores take them. Keys of 16 bits come in order. Keys of one byte come four side by
 * side for each lane, so the lane has the matching four elements of a query. */
template <enum dtype T> static __device__ __forceinline__ int attn_query_at(int i)
{
    const int quarter = (int)(threadIdx.x % 4);
    return i / 2 * 16 + (kv_traits<T>::SCALED ? 4 * quarter + i % 2 * 2 : 2 * quarter + i % 2 * 8);
}

/* Pairs are (i, i + DIM / 2), of elements in one lane, or neighbours. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_query_load_turns(const struct attn_decode_append &a,
                                                             int pos, float2 turn[DIM / 8])
{
    const float *from = a.cos_sin + (size_t)pos * DIM;
    UNROLL for (int i = 0; i < DIM / 8; i++)
    {
        if (a.interleaved) turn[i] = *(const float2 *)(from + attn_query_at<T>(i));
        else if (i % 2 == 0) {
            const float4 x = *(const float4 *)(from + 2 * attn_query_at<T>(i / 2));
            turn[i] = make_float2(x.x, x.y), turn[i + 1] = make_float2(x.z, x.w);
        }
    }
}

/* head_factor of the head that four lanes have together: the same additions in the same order, of
 * which a lane makes those of eight of its 32 lanes. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ float attn_query_factor(const float2 x[DIM / 8], float eps)
{
    float sum[2][4] = {};
    UNROLL for (int i = 0; i < DIM / 8; i++)
    {
        float *of = sum[i / 2 % 2] + i % 2 * 2;
        of[0] = fmaf(x[i].x, x[i].x, of[0]), of[1] = fmaf(x[i].y, x[i].y, of[1]);
    }
    float *s = sum[0];
    UNROLL for (int e = 0; e < 4; e++) s[e] += sum[1][e]; /* 16 lanes apart */
    if constexpr (!kv_traits<T>::SCALED) s[0] += s[2], s[1] += s[3];
    UNROLL for (int step = 2; step > 0; step /= 2)
        UNROLL for (int e = 0; e < 4; e++) if (kv_traits<T>::SCALED || e < 2)
            s[e] += __shfl_xor_sync(0xffffffffu, s[e], step);
    if constexpr (kv_traits<T>::SCALED) s[0] += s[2], s[1] += s[3];
    return head_factor(s[0] + s[1], DIM, eps);
}

template <int DIM>
static __device__ __forceinline__ void attn_query_rotate(bool interleaved,
                                                         const float2 turn[DIM / 8],
                                                         float2 x[DIM / 8])
{
    UNROLL for (int i = 0; i < DIM / 8; i++)
    {
        const float2 a = x[i], by = turn[i];
        if (interleaved) {
            x[i] = make_float2(rotated(a.x, a.y, by.x, -by.y), rotated(a.y, a.x, by.x, by.y));
        } else if (i < DIM / 16) {
            const float2 b = x[i + DIM / 16], t0 = turn[2 * i], t1 = turn[2 * i + 1];
            x[i] = make_float2(rotated(a.x, b.x, t0.x, -t0.y), rotated(a.y, b.y, t1.x, -t1.y));
            x[i + DIM / 16] = make_float2(rotated(b.x, a.x, t0.x, t0.y),
                                          rotated(b.y, a.y, t1.x, t1.y));
        }
    }
}

/* The lane's elements of a query of position pos. What they are multiplied by is on its way with
 * them. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_query_finish(const struct attn_decode_append &a,
                                                         int pos, float2 x[DIM / 8])
{
    float2 turn[DIM / 8], norm[DIM / 8];
    attn_query_load_turns<T, DIM>(a, pos, turn);
    if (a.q_norm) {
        UNROLL for (int i = 0; i < DIM / 8; i++)
            norm[i] = *(const float2 *)(a.q_norm + attn_query_at<T>(i));
        const float factor = attn_query_factor<T, DIM>(x, a.norm_eps);
        UNROLL for (int i = 0; i < DIM / 8; i++)
            x[i] = make_float2(norm[i].x * (x[i].x * factor), norm[i].y * (x[i].y * factor));
    }
    attn_query_rotate<DIM>(a.interleaved, turn, x);
}

/* ---- a row's key and value ---- */

/* A lane's elements of a key or a value, every 32nd: first as floats, then as the pool's, in the
 * order of the floats. */
template <enum dtype T, int DIM> struct attn_new_part {
    static constexpr int N = DIM / WARP;
    float x[N];
    unsigned bits[kv_traits<T>::SCALED ? 1 : N / 2];
    float scale;
};

/* Of the warp whose tile has the key; of others is_mine is false. */
template <enum dtype T, int DIM> struct attn_new_row {
    bool is_mine;
    struct kv_paged_row to;
    struct attn_new_part<T, DIM> k, v;
};

template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_new_row_load(const struct attn_decode_call &c,
                                                         const struct attn_decode_block &b,
                                                         struct attn_new_row<T, DIM> *n)
{
    const size_t from = ((size_t)b.row.row * (size_t)c.kv.n_heads + (size_t)b.kv_head) * DIM +
                        threadIdx.x % WARP;
    UNROLL for (int e = 0; e < DIM / WARP; e++)
    {
        n->k.x[e] = c.append.k[from + (size_t)e * WARP];
        n->v.x[e] = c.append.v[from + (size_t)e * WARP];
    }
}

template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_new_key_rotate(const struct attn_decode_append &a,
                                                           int pos, float key[DIM / WARP])
{
    constexpr int N = DIM / WARP;
    const int lane = (int)(threadIdx.x % WARP);
    const float2 *turns = (const float2 *)(a.cos_sin + (size_t)pos * DIM);
    float2 turn[N];
    float x[N], squares = 0;
    UNROLL for (int e = 0; e < N; e++)
    {
        const int i = lane + e * WARP;
        turn[e] = turns[a.interleaved ? i / 2 : i % (DIM / 2)];
        x[e] = key[e];
    }
    if (a.k_norm) {
        UNROLL for (int e = 0; e < N; e++) squares = fmaf(x[e], x[e], squares);
        const float factor = head_factor(warp_sum(squares), DIM, a.norm_eps);
        UNROLL for (int e = 0; e < N; e++) x[e] = a.k_norm[lane + e * WARP] * (x[e] * factor);
    }
    UNROLL for (int e = 0; e < N; e++)
    {
        const float other = a.interleaved ? __shfl_xor_sync(0xffffffffu, x[e], 1) : x[e ^ N / 2];
        const bool is_second = a.interleaved ? lane % 2 != 0 : e >= N / 2;
        key[e] = rotated(x[e], other, turn[e].x, is_second ? turn[e].y : -turn[e].y);
    }
}

/* By a whole warp. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_new_part_round(struct attn_new_part<T, DIM> *p)
{
    constexpr int N = DIM / WARP;
    if constexpr (kv_traits<T>::SCALED) {
        unsigned top = 0;
        UNROLL for (int e = 0; e < N; e++) top = max(top, __float_as_uint(p->x[e]) & 0x7fffffffu);
        p->scale = scale_for<T>(warp_top(top));
        p->bits[0] = 0;
        UNROLL for (int e = 0; e < N; e++)
            p->bits[0] |= p->scale > 0 ? quantised<T>(p->x[e], p->scale) << 8 * e : 0;
    } else {
        UNROLL for (int e = 0; e < N; e += 2)
            p->bits[e / 2] = T == DTYPE_F16 ? round_f16x2(p->x[e], p->x[e + 1])
                                            : pack_bf16(p->x[e], p->x[e + 1]);
    }
}

/* The e-th of a lane's elements to where it belongs. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_new_part_put(const struct attn_new_part<T, DIM> &p,
                                                         int e, void *to)
{
    if constexpr (kv_traits<T>::SCALED) *(uint8_t *)to = (uint8_t)(p.bits[0] >> 8 * e);
    else *(uint16_t *)to = (uint16_t)(p.bits[e / 2] >> 16 * (e % 2));
}

template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_new_part_write(const struct kv_layer &kv,
                                                           const struct kv_paged_row &to,
                                                           const struct attn_new_part<T, DIM> &p)
{
    const int lane = (int)(threadIdx.x % WARP);
    char *pool = (char *)kv.data,
         *row = pool + kv_row_offset<T>(kv, to) + lane * kv_traits<T>::BYTES;
    UNROLL for (int e = 0; e < DIM / WARP; e++)
        attn_new_part_put(p, e, row + e * WARP * kv_traits<T>::BYTES);
    if (kv_traits<T>::SCALED && lane == 0) store_scale(pool + kv_scale_offset<T>(kv, to), p.scale);
}

/* Writes the row at position pos to the pool; its parts hold what is there. */
template <enum dtype T, int DIM>
static __device__ __forceinline__ void attn_new_row_append(const struct attn_decode_call &c,
                                                           int pos, struct attn_new_row<T, DIM> *n)
{
    struct kv_paged_row value = n->to;
    value.row += (unsigned)c.kv.block_tokens;
    attn_new_key_rotate<T, DIM>(c.append, pos, n->k.x);
    attn_new_part_round(&n->k);
    attn_new_part_round(&n->v);
    attn_new_part_write(c.kv, n->to, n->k);
    attn_new_part_write(c.kv, value, n->v);
}

#endif
