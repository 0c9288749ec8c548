/* attention_mla_decode.cuh - MLA's absorbed path on tensor cores: one segment of one query row,
 * PAIRS of its heads, all of which share the latents.
 *
 * Work items as in attention_decode.cuh. Softmax is online over the segment's tiles in f32; queries
 * are in shared memory. Bound by ldmatrix, then by the tensor cores; docs/kernels.md describes how
 * warps split a tile. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_MLA_DECODE_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_MLA_DECODE_CUH

#include "kernels/cuda/attention/attention_decode.cuh"
#include "kernels/cuda/attention/attention_prefill.cuh"

enum {
    MLA_LATENT = 576,
    MLA_VALUE = 512,
    MLA_KEYS = 32,
    MLA_PIECES = MLA_LATENT / CHUNK,
    MLA_BLOCKS = 2 /* per SM */
};
enum { MLA_WEIGHTS_STRIDE = MLA_KEYS + CHUNK }; /* so that ldmatrix meets no bank twice */

template <int PAIRS, int WARPS> struct attn_mla_shape {
    static constexpr int MI = PAIRS / 16, NI = WARPS / MI, THREADS = WARPS * WARP;
    static constexpr int SCORES = MLA_KEYS / NI / 8;  /* blocks of 8 keys of a warp */
    static constexpr int VALUES = MLA_VALUE / NI / 8; /* blocks of 8 elements of a warp */
    static_assert(SCORES == 1 || SCORES == 2, "what attn_mla_scores reads in one ldmatrix");
    static constexpr size_t BYTES =
        CUDA_ATTN_SEGMENT * sizeof(size_t) + 2 * NI * PAIRS * sizeof(float) +
        (PAIRS * MLA_LATENT + 2 * MLA_KEYS * MLA_LATENT + PAIRS * MLA_WEIGHTS_STRIDE) *
            sizeof(uint16_t);
};

struct attn_mla_shared {
    size_t *offsets; /* [CUDA_ATTN_SEGMENT] */
    uint16_t *q;     /* [PAIRS][MLA_LATENT] */
    uint16_t *k;     /* [2][MLA_KEYS][MLA_LATENT] */
    uint16_t *p;     /* [PAIRS][MLA_WEIGHTS_STRIDE] */
    float *top, *l;  /* [NI][PAIRS] */
};

/* A thread's place, and its share of a segment. */
template <class S> struct attn_mla_state {
    int lane, mi, ni;
    float o[S::VALUES][4], m[2], l[2];
};

template <class S> static __device__ __forceinline__ struct attn_mla_shared attn_mla_shared_of()
{
    struct attn_mla_shared s;
    s.offsets = (size_t *)shared_memory();
    s.q = (uint16_t *)(s.offsets + CUDA_ATTN_SEGMENT);
    s.k = s.q + S::MI * 16 * MLA_LATENT;
    s.p = s.k + 2 * MLA_KEYS * MLA_LATENT;
    s.top = (float *)(s.p + S::MI * 16 * MLA_WEIGHTS_STRIDE);
    s.l = s.top + S::NI * S::MI * 16;
    return s;
}

template <class S>
static __device__ __forceinline__ void attn_mla_prepare(const struct attn_decode_call &c,
                                                        const struct attn_decode_block &b,
                                                        const struct attn_mla_shared &s)
{
    const int32_t *table = c.list.tables + b.row.table;
    const float *q = c.q + ((size_t)b.row.row * (size_t)c.n_heads + (size_t)b.head) * MLA_LATENT;
    for (int j = (int)threadIdx.x; j < b.n_keys; j += S::THREADS)
        s.offsets[j] = kv_key_offset<DTYPE_BF16>(c.kv, table, b.first_key + j, 0);
    for (int i = (int)threadIdx.x; i < S::MI * 16 * MLA_PIECES; i += S::THREADS) {
        const int pair = i / MLA_PIECES, piece = i % MLA_PIECES;
        float4 x = make_float4(0, 0, 0, 0), y = x;
        if (pair < b.n_heads) {
            const float4 *from = (const float4 *)(q + (size_t)pair * MLA_LATENT +
                                                  (size_t)piece * CHUNK);
            x = from[0], y = from[1];
        }
        const uint4 bits = make_uint4(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w), pack_bf16(y.x, y.y),
                                      pack_bf16(y.z, y.w));
        *(uint4 *)piece_of<MLA_LATENT>(s.q, pair, piece) = bits;
    }
}

template <class S>
static __device__ __forceinline__ void attn_mla_load_tile(const struct attn_decode_call &c,
                                                          const struct attn_decode_block &b,
                                                          const struct attn_mla_shared &s,
                                                          int i_tile)
{
    for (int i = (int)threadIdx.x; i < MLA_KEYS * MLA_PIECES; i += S::THREADS) {
        const int row = i / MLA_PIECES, piece = i % MLA_PIECES, key = i_tile * MLA_KEYS + row;
        const bool is_key = key < b.n_keys;
        const char *from = (const char *)c.kv.data +
                           (is_key ? s.offsets[key] + (size_t)piece * 16 : 0);
        copy_async_16(piece_of<MLA_LATENT>(s.k + i_tile % 2 * MLA_KEYS * MLA_LATENT, row, piece),
                      from, is_key ? 16 : 0);
    }
}

/* The scores of the warp's heads and keys. A warp with one block of keys has two accumulators, for
 * even and odd steps, because a single one would wait for itself. */
template <class S>
static __device__ __forceinline__ void attn_mla_scores(const struct attn_mla_shared &s,
                                                       uint16_t *keys,
                                                       const struct attn_mla_state<S> &t,
                                                       float score[S::SCORES][4])
{
    const int key = t.ni * S::SCORES * 8;
    float odd[4] = { 0, 0, 0, 0 };
    UNROLL for (int b = 0; b < S::SCORES; b++) UNROLL for (int i = 0; i < 4; i++) score[b][i] = 0;
    UNROLL_BY(2) for (int step = 0; step < MLA_LATENT / 16; step += 2)
    {
        unsigned q[4], k[4];
        if constexpr (S::SCORES == 2) {
            UNROLL for (int i = 0; i < 2; i++)
            {
                load_matrix_x4(q, piece_of<MLA_LATENT>(s.q, t.mi * 16 + t.lane % 16,
                                                       (step + i) * 2 + t.lane / 16));
                load_matrix_x4(k, piece_of<MLA_LATENT>(keys, key + t.lane % 8 + t.lane / 16 * 8,
                                                       (step + i) * 2 + t.lane / 8 % 2));
                mma_bf16(score[0], q, k);
                mma_bf16(score[1], q, k + 2);
            }
        } else {
            load_matrix_x4(k, piece_of<MLA_LATENT>(keys, key + t.lane % 8, step * 2 + t.lane / 8));
            load_matrix_x4(
                q, piece_of<MLA_LATENT>(s.q, t.mi * 16 + t.lane % 16, step * 2 + t.lane / 16));
            mma_bf16(score[0], q, k);
            load_matrix_x4(
                q, piece_of<MLA_LATENT>(s.q, t.mi * 16 + t.lane % 16, step * 2 + 2 + t.lane / 16));
            mma_bf16(odd, q, k + 2);
        }
    }
    if constexpr (S::SCORES == 1) {
        UNROLL for (int i = 0; i < 4; i++) score[0][i] += odd[i];
    }
}

/* Masks the scores of keys past the tile's n_keys, and writes the warp's largest of each head to
 * s.top. */
template <class S>
static __device__ __forceinline__ void attn_mla_mask(const struct attn_mla_shared &s, int n_keys,
                                                     const struct attn_mla_state<S> *t, int pair,
                                                     int key, float score[S::SCORES][4])
{
    UNROLL for (int half = 0; half < 2; half++)
    {
        float top = -INFINITY;
        UNROLL for (int b = 0; b < S::SCORES; b++) UNROLL for (int i = 0; i < 2; i++)
        {
            if (key + b * 8 + i >= n_keys) score[b][2 * half + i] = -INFINITY;
            top = fmaxf(top, score[b][2 * half + i]);
        }
        top = quad_max(top);
        if (t->lane % 4 == 0) s.top[t->ni * S::MI * 16 + pair + 8 * half] = top;
    }
}

/* Scores become weights in s.p, with what all warps of the same heads agree on. n_keys: of the
 * tile. */
template <class S>
static __device__ __forceinline__ void attn_mla_softmax(const struct attn_mla_shared &s,
                                                        float scale, int n_keys,
                                                        struct attn_mla_state<S> *t,
                                                        float score[S::SCORES][4])
{
    const int pair = t->mi * 16 + t->lane / 4, key = t->ni * S::SCORES * 8 + 2 * (t->lane % 4);
    attn_mla_mask<S>(s, n_keys, t, pair, key, score);
    __syncthreads();
    UNROLL for (int half = 0; half < 2; half++)
    {
        float top = -INFINITY, sum = 0;
        UNROLL for (int n = 0; n < S::NI; n++)
            top = fmaxf(top, s.top[n * S::MI * 16 + pair + 8 * half]);
        top = fmaxf(t->m[half], top * scale);
        const float shrink = exp2_fast((t->m[half] - top) * LOG2_E), factor = scale * LOG2_E,
                    base = top * LOG2_E;
        UNROLL for (int b = 0; b < S::SCORES; b++)
        {
            const float x = exp2_fast(fmaf(score[b][2 * half], factor, -base)),
                        y = exp2_fast(fmaf(score[b][2 * half + 1], factor, -base));
            *(unsigned *)(s.p + (pair + 8 * half) * MLA_WEIGHTS_STRIDE + key +
                          b * 8) = pack_bf16(x, y);
            sum += x;
            sum += y;
        }
        t->l[half] = fmaf(t->l[half], shrink, sum);
        t->m[half] = top;
        UNROLL for (int b = 0; b < S::VALUES; b++)
        {
            t->o[b][2 * half] *= shrink;
            t->o[b][2 * half + 1] *= shrink;
        }
    }
    __syncthreads();
}

template <class S>
static __device__ __forceinline__ void attn_mla_accumulate_v(const struct attn_mla_shared &s,
                                                             uint16_t *values,
                                                             struct attn_mla_state<S> *t)
{
    const int row = t->lane % 16, piece = t->lane / 16;
    UNROLL for (int step = 0; step < MLA_KEYS / 16; step++)
    {
        unsigned p[4];
        load_matrix_x4(p,
                       s.p + (t->mi * 16 + row) * MLA_WEIGHTS_STRIDE + (step * 2 + piece) * CHUNK);
        UNROLL for (int b = 0; b < S::VALUES; b += 2)
        {
            unsigned v[4];
            load_matrix_x4_transposed(
                v, piece_of<MLA_LATENT>(values, step * 16 + row, t->ni * S::VALUES + b + piece));
            mma_bf16(t->o[b], p, v);
            mma_bf16(t->o[b + 1], p, v + 2);
        }
    }
}

template <class S>
static __device__ __forceinline__ void attn_mla_finish(const struct attn_decode_call &c,
                                                       const struct attn_decode_block &b,
                                                       const struct attn_mla_shared &s,
                                                       const struct attn_mla_state<S> &t)
{
    const bool whole = b.row.pos < b.row.per_segment;
    UNROLL for (int half = 0; half < 2; half++)
    {
        const float l = quad_sum(t.l[half]);
        if (t.lane % 4 == 0) s.l[t.ni * S::MI * 16 + t.mi * 16 + t.lane / 4 + 8 * half] = l;
    }
    __syncthreads();
    UNROLL for (int half = 0; half < 2; half++)
    {
        const int pair = t.mi * 16 + t.lane / 4 + 8 * half,
                  column = t.ni * S::VALUES * 8 + 2 * (t.lane % 4);
        const size_t n_heads = (size_t)c.n_heads, head = (size_t)(b.head + pair);
        if (pair >= b.n_heads) continue;
        float l = s.l[pair];
        UNROLL for (int n = 1; n < S::NI; n++) l += s.l[n * S::MI * 16 + pair];
        float *part = c.parts +
                      ((size_t)(b.item - c.item_begin) * n_heads + head) * part_floats(MLA_VALUE);
        float *to = (whole ? c.out + ((size_t)b.row.row * n_heads + head) * MLA_VALUE
                           : part + PART_HEAD) +
                    column;
        if (!whole && column == 0) part[0] = t.m[half], part[1] = l;
        const float by = 1.0f / l;
        UNROLL for (int d = 0; d < S::VALUES; d++)
        {
            const float x = t.o[d][2 * half], y = t.o[d][2 * half + 1];
            *(float2 *)(to + d * 8) = whole ? make_float2(__fmul_rn(x, by), __fmul_rn(y, by))
                                            : make_float2(x, y);
        }
    }
}

template <class S>
static __device__ __forceinline__ void attn_mla_tile_loop(const struct attn_decode_call &c,
                                                          const struct attn_decode_block &b,
                                                          const struct attn_mla_shared &s,
                                                          struct attn_mla_state<S> *t)
{
    const int n_tiles = (b.n_keys + MLA_KEYS - 1) / MLA_KEYS;
    t->m[0] = t->m[1] = -INFINITY, t->l[0] = t->l[1] = 0;
    UNROLL for (int d = 0; d < S::VALUES; d++) UNROLL for (int i = 0; i < 4; i++) t->o[d][i] = 0;
    attn_mla_prepare<S>(c, b, s);
    __syncthreads();
    attn_mla_load_tile<S>(c, b, s, 0);
    copy_async_commit();
    for (int i = 0; i < n_tiles; i++) {
        float score[S::SCORES][4];
        uint16_t *latents = s.k + i % 2 * MLA_KEYS * MLA_LATENT;
        copy_async_wait<0>();
        __syncthreads(); /* the tile is there, and nobody reads the one before it */
        if (i + 1 < n_tiles) attn_mla_load_tile<S>(c, b, s, i + 1);
        copy_async_commit();
        attn_mla_scores<S>(s, latents, *t, score);
        attn_mla_softmax<S>(s, c.scale, b.n_keys - i * MLA_KEYS, t, score);
        attn_mla_accumulate_v<S>(s, latents, t);
    }
    copy_async_wait<0>();
}

template <int PAIRS, int WARPS>
static __global__ void __launch_bounds__(WARPS *WARP, PAIRS == 16 ? 2 : 1)
    attn_mla_kernel(const struct attn_decode_call c)
{
    grid_dependency_sync();
    using S = attn_mla_shape<PAIRS, WARPS>;
    const struct attn_mla_shared s = attn_mla_shared_of<S>();
    const int warp = (int)threadIdx.x / WARP, n_units = attn_decode_n_units(c);
    struct attn_mla_state<S> t;
    t.lane = (int)threadIdx.x % WARP, t.mi = warp % S::MI, t.ni = warp / S::MI;
    for (int unit = (int)blockIdx.x; unit < n_units; unit += (int)gridDim.x) {
        const struct attn_decode_block b = attn_decode_block_of(c, PAIRS, unit);
        attn_mla_tile_loop<S>(c, b, s, &t);
        attn_mla_finish<S>(c, b, s, t);
        __syncthreads(); /* what the block shares may be taken again */
    }
}

#endif
