/* attention_paged_kv.cuh - addresses of keys and values in the paged pool, rows of a list, and
 * parts of results. Thread: device. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_PAGED_KV_CUH
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_PAGED_KV_CUH

#include "kernels/cuda/attention/attention.h"
#include "kernels/cuda/attention/attention_kv_types.cuh"

/* The rows of a list that a launch handles. Only the GPU knows their number, so blocks stride over
 * the work, whatever the grid. */
enum attn_row_kind { ATTN_ROWS_ALL, ATTN_ROWS_DECODE, ATTN_ROWS_PREFILL };

struct attn_row_set {
    const struct cuda_attn_counts *counts;
    const struct cuda_attn_seq *seqs;
    const struct cuda_attn_row *rows;
    const int32_t *tables;
    enum attn_row_kind which;
};

static inline struct attn_row_set attn_row_set_of(const struct cuda_attn_list *on,
                                                  enum attn_row_kind which)
{
    const struct attn_row_set l = { on->counts, on->seqs, on->rows, on->tables, which };
    return l;
}

static __device__ __forceinline__ const struct cuda_attn_row *attn_row_set_rows(
    const struct attn_row_set &l)
{
    return l.rows + (l.which == ATTN_ROWS_PREFILL ? l.counts->n_decode : 0);
}
static __device__ __forceinline__ int attn_row_set_n(const struct attn_row_set &l)
{
    return l.which == ATTN_ROWS_ALL      ? l.counts->n_rows
           : l.which == ATTN_ROWS_DECODE ? l.counts->n_decode
                                         : l.counts->n_prefill;
}
/* Of ATTN_ROWS_ALL and ATTN_ROWS_DECODE, which are numbered from 0. */
static __device__ __forceinline__ int attn_row_set_segments(const struct attn_row_set &l)
{
    return l.which == ATTN_ROWS_ALL ? l.counts->n_segments : l.counts->n_segments_decode;
}

/* Bytes of an element, for types without scales. Computed at run time: with a constant, nvcc 13
 * gives attn_decode_kernel for bf16 so many registers that an SM of compute capability 9.0 has room
 * for three blocks instead of four. */
static __host__ __device__ __forceinline__ size_t element_bytes(enum dtype t)
{
    return t == DTYPE_F32 ? 4 : 2;
}

/* Bytes of a position's key or value. */
template <enum dtype T>
static __host__ __device__ __forceinline__ size_t kv_row_bytes(const struct kv_layer &kv)
{
    return (size_t)kv.head_dim * kv_traits<T>::BYTES;
}

/* Bytes from a position's key to its value. */
template <enum dtype T>
static __host__ __device__ __forceinline__ size_t kv_value_offset(const struct kv_layer &kv)
{
    return kv.latent ? 0
                     : (size_t)kv.block_tokens * (size_t)kv.head_dim *
                           (kv_traits<T>::SCALED ? 1 : element_bytes(kv.dtype));
}

/* Where a position's key is: in the pool's block, the row-th of its keys and values; a value is
 * block_tokens rows further. */
struct kv_paged_row {
    unsigned block, row;
};

static __device__ __forceinline__ struct kv_paged_row kv_key_row(const struct kv_layer &kv,
                                                                 const int32_t *table, int pos,
                                                                 int head)
{
    const unsigned n = (unsigned)kv.block_tokens;
    const struct kv_paged_row r = { (unsigned)table[(unsigned)pos / n],
                                    (unsigned)head * (kv.latent ? 1 : 2) * n + (unsigned)pos % n };
    return r;
}

/* Bytes from the pool's begin to a row, and to its scale. Of types with scales these are behind the
 * rows of each block. */
static __host__ __device__ __forceinline__ size_t kv_block_rows(const struct kv_layer &kv)
{
    return (size_t)kv.n_heads * (kv.latent ? 1 : 2) * (size_t)kv.block_tokens;
}
template <enum dtype T>
static __host__ __device__ __forceinline__ size_t kv_block_bytes(const struct kv_layer &kv)
{
    return kv_block_rows(kv) * (kv_row_bytes<T>(kv) + (kv_traits<T>::SCALED ? sizeof(float) : 0));
}
template <enum dtype T>
static __device__ __forceinline__ size_t kv_row_offset(const struct kv_layer &kv,
                                                       const struct kv_paged_row &r)
{
    return r.block * kv_block_bytes<T>(kv) + r.row * kv_row_bytes<T>(kv);
}
template <enum dtype T>
static __device__ __forceinline__ size_t kv_scale_offset(const struct kv_layer &kv,
                                                         const struct kv_paged_row &r)
{
    return r.block * kv_block_bytes<T>(kv) + kv_block_rows(kv) * kv_row_bytes<T>(kv) +
           r.row * sizeof(float);
}

/* Bytes from the pool's begin to the key of position pos of a head. */
template <enum dtype T>
static __device__ __forceinline__ size_t kv_key_offset(const struct kv_layer &kv,
                                                       const int32_t *table, int pos, int head)
{
    if constexpr (kv_traits<T>::SCALED)
        return kv_row_offset<T>(kv, kv_key_row(kv, table, pos, head));
    const unsigned block = (unsigned)pos / (unsigned)kv.block_tokens,
                   slot = (unsigned)pos % (unsigned)kv.block_tokens;
    const size_t per_head = (kv.latent ? 1 : 2) * (size_t)kv.block_tokens,
                 heads = (size_t)table[block] * (size_t)kv.n_heads + (size_t)head;
    return (heads * per_head + slot) * (size_t)kv.head_dim * element_bytes(kv.dtype);
}

/* Partial results: (m, l) and the sums of one segment of one row and head, or of what has been
 * merged. Sums begin at [PART_HEAD]. */
enum { PART_HEAD = 4 };
static __host__ __device__ __forceinline__ size_t part_floats(int v_dim)
{
    return PART_HEAD + ((size_t)v_dim + 3) / 4 * 4;
}

/* (M, L) takes (m, l) in; O becomes fmaf(o, *b, O * *a). */
static __device__ __forceinline__ void merge_weights(float *M, float *L, float m, float l, float *a,
                                                     float *b)
{
    const float top = m > *M ? m : *M;
    *a = expf(*M - top);
    *b = expf(m - top);
    *L = fmaf(l, *b, __fmul_rn(*L, *a));
    *M = top;
}
static __device__ __forceinline__ float merged(float O, float o, float a, float b)
{
    return fmaf(o, b, __fmul_rn(O, a));
}

#endif
