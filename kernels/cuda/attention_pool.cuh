/* attention_pool.cuh - where keys and values of a position lie in the paged pool, and loads of eight elements from there. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_POOL_CUH
#define BATON_KERNELS_CUDA_ATTENTION_POOL_CUH

#include "kernels/cuda/attention.h"
#include "kernels/cuda/numbers.cuh"

enum { CHUNK = 8 }; /* elements that a lane takes at a time: 16 bytes of bf16 */

/* Rows of a list that a launch is for. How many there are is known on the card alone: blocks stride over the work, and the grid says nothing. */
enum listed_rows { LISTED_ALL, LISTED_GENERATED, LISTED_PROMPT };

struct listed {
    const struct cuda_counts *counts;
    const struct cuda_seq    *seqs;
    const struct cuda_row    *rows;
    const int32_t            *tables;
    enum listed_rows          which;
};

static __device__ __forceinline__ const struct cuda_row *listed_rows(const struct listed &l)
{
    return l.rows + (l.which == LISTED_PROMPT ? l.counts->n_generated : 0);
}
static __device__ __forceinline__ int listed_n(const struct listed &l)
{
    return l.which == LISTED_ALL ? l.counts->n_rows : l.which == LISTED_GENERATED ? l.counts->n_generated : l.counts->n_prompt;
}
/* Of LISTED_ALL and LISTED_GENERATED, which are numbered from 0. */
static __device__ __forceinline__ int listed_segments(const struct listed &l)
{
    return l.which == LISTED_ALL ? l.counts->n_segments : l.counts->n_segments_generated;
}

static __host__ __device__ __forceinline__ size_t element_bytes(enum dtype t) { return t == DTYPE_F32 ? 4 : 2; }

/* Bytes from a position's key to its value. */
static __host__ __device__ __forceinline__ size_t value_part(const struct kv_layer &kv)
{
    return kv.latent ? 0 : (size_t)kv.block_tokens * (size_t)kv.head_dim * element_bytes(kv.dtype);
}

/* Bytes from the pool's begin to the key of position pos of a head. */
static __device__ __forceinline__ size_t key_place(const struct kv_layer &kv, const int32_t *table, int pos, int head)
{
    const unsigned block = (unsigned)pos / (unsigned)kv.block_tokens, slot = (unsigned)pos % (unsigned)kv.block_tokens;
    const size_t   per_head = (kv.latent ? 1 : 2) * (size_t)kv.block_tokens, heads = (size_t)table[block] * (size_t)kv.n_heads + (size_t)head;
    return (heads * per_head + slot) * (size_t)kv.head_dim * element_bytes(kv.dtype);
}

static __device__ __forceinline__ float to_float(uint16_t bits) { return bf16_to_float(bits); }
static __device__ __forceinline__ float to_float(float x) { return x; }

static __device__ __forceinline__ void load_8(float to[CHUNK], const uint16_t *from)
{
    const uint4    bits = *(const uint4 *)from;
    const unsigned pair[4] = { bits.x, bits.y, bits.z, bits.w };
    UNROLL for (int i = 0; i < 4; i++) {
        to[2 * i] = bf16_low(pair[i]);
        to[2 * i + 1] = bf16_high(pair[i]);
    }
}
static __device__ __forceinline__ void load_8(float to[CHUNK], const float *from)
{
    const float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w;
    to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

/* Elements CHUNK * chunk .. of a row of dim; those past its end are 0. WHOLE: rows are whole chunks, and so aligned. */
template <class T, bool WHOLE> static __device__ __forceinline__ void load_chunk(float to[CHUNK], const void *row, int chunk, int dim)
{
    const T *from = (const T *)row + chunk * CHUNK;
    if constexpr (WHOLE) load_8(to, from);
    else {
        UNROLL for (int i = 0; i < CHUNK; i++) to[i] = chunk * CHUNK + i < dim ? to_float(from[i]) : 0.0f;
    }
}

/* Partial results: (m, l) and the sums of one segment of one row and head, or of what has been merged. Sums begin at [PART_HEAD]. */
enum { PART_HEAD = 4 };
static __host__ __device__ __forceinline__ size_t part_floats(int v_dim) { return PART_HEAD + ((size_t)v_dim + 3) / 4 * 4; }

/* (M, L) takes (m, l) in; O becomes fmaf(o, *b, O * *a). */
static __device__ __forceinline__ void merge_weights(float *M, float *L, float m, float l, float *a, float *b)
{
    const float top = m > *M ? m : *M;
    *a = expf(*M - top);
    *b = expf(m - top);
    *L = fmaf(l, *b, __fmul_rn(*L, *a));
    *M = top;
}
static __device__ __forceinline__ float merged(float O, float o, float a, float b) { return fmaf(o, b, __fmul_rn(O, a)); }

#endif
