/* attention.h - appending to the KV pool, and attention, on the card.
 *
 * `stage` (cuda_upload_step.c) turns each struct attn_list into a struct cuda_attn_list once per
 * step. Layouts of the pool, of q and of out are those of kernels.h. Every sum runs over keys in an
 * order that is fixed by positions alone: keys in segments of ATTENTION_SEGMENT from position 0,
 * each an online softmax of its own over tiles from its beginning, merged in ascending order
 * (kernels/cpu/attention/cpu_attention.c has the formulas). Which kernel a row goes through -
 * attention_decode.cuh has many blocks for one row, attention_decode_mma.cuh and
 * attention_mla_decode.cuh too and on tensor cores, attention_prefill.cuh one block for many rows -
 * depends on the model and on whether its token is an answer's, and they do not give the same bits.
 * So a row's result depends on neither the other rows nor how a prompt was chunked nor how many
 * segments ran at a time. Pools of heads are of any of kv_rows.h's types, whose rows appending
 * makes bit for bit (but for which NaN a bf16 or f16 is), latents are f32 or bf16. Scales of keys
 * multiply scores, those of values the weights, once the weights' own sum has been taken. Calls put
 * work on the stream and return; they do not wait and do not allocate. Thread: engine. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_H
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_H

#include <cuda_runtime_api.h>

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ATTENTION_SEGMENT = 512 };

struct cuda_attn_seq {
    int32_t q_begin, n_q, pos_begin; /* as in struct attn_seq */
    int32_t table;                   /* where its block table begins in struct cuda_attn_list's
                                      * tables */
};

/* What the list's row i is: row `row` of q and out, at position `pos` of sequence `seq`; `segment`:
 * segments of the list's rows before it, where position p has p / ATTENTION_SEGMENT + 1. The rows
 * of answer tokens come first, and a sequence's rows follow each other. `shared`: as many of its
 * first segments lie in the same blocks as those of the answer row before it, complete for both. */
struct cuda_attn_row {
    int32_t row, pos, seq, segment, shared;
};

struct cuda_attn_counts {
    int32_t n_rows, n_decode, n_prefill;   /* rows: all, of answer tokens, of prompts */
    int32_t n_segments, n_segments_decode; /* of all rows, of those of answer tokens */
    int32_t n_keys_max, n_keys_prefill;    /* the most that a row, that a prompt's row
                                            * sees */
};

/* How many launches a call makes, their grids and arguments depend on `bounds` and on pointers;
 * kernels work on as much as `counts` says. So the launches of one call, recorded, compute every
 * list within its bounds that is put where its pointers point. A call that is not recorded is made
 * with the exact bounds, from which attention_list_rows may have made them. Pointers are to device
 * memory. */
struct cuda_attn_list {
    struct cuda_attn_counts bounds;
    const struct cuda_attn_counts *counts; /* none above its bound */
    const struct cuda_attn_seq *seqs;      /* those of the rows */
    const struct cuda_attn_row *rows;      /* [counts->n_rows] */
    const int32_t *tables;
};

/* Latent pools: the absorbed form alone. */
struct attention {
    struct kv_layer kv;
    const struct cuda_attn_list *on;
    const float *q; /* as in struct attn_args */
    float *out;
    int32_t n_heads, v_dim;
    float scale;
    bool exact;                    /* F32: all in f32. Otherwise queries and weights may be bf16,
                                    * or f16 where the pool is (queries beyond its largest are
                                    * that), keys and values are as they are held, and sums are
                                    * f32 */
    float *scratch;                /* attention_scratch_floats() of them */
    int32_t n_at_once, max_blocks; /* segments at a time, blocks; 0: as suits the
                                    * card. For tests of what else gives the same
                                    * bits */
};

/* Number the rows of a list: fill `rows`, which has room for those of all sequences (NULL: they are
 * only counted), and `counts`. Host memory. block_tokens: the pool's. */
void attention_list_rows(struct cuda_attn_counts *counts, const struct attn_seq *seqs,
                         int32_t n_seqs, int32_t block_tokens, struct cuda_attn_row *rows);
/* Enough for any call whose bounds have at most n_rows rows and n_keys keys, with n_heads heads of
 * v_dim; grows with each of them. */
size_t attention_scratch_floats(size_t n_rows, size_t n_heads, size_t v_dim, size_t n_keys);
/* Bounds for recording: at most n_rows rows, of which at most n_decode are of answer tokens and
 * n_prefill of prompts, and as many keys up to n_keys as one pass over the scratch has room for. Of
 * `shape` the model's shape is read: no list, no pointers. */
void attention_capture_bounds(const struct attention *shape, int32_t n_rows, int32_t n_decode,
                              int32_t n_prefill, int32_t n_keys, struct cuda_attn_counts *bounds);
/* Do launches that were recorded with these bounds compute a list of these counts? */
bool attention_fits_capture(const struct cuda_attn_counts *bounds,
                            const struct cuda_attn_counts *counts);
/* Both: cudaErrorInvalidValue for a type that such a pool does not have. */
/* `rope`, or NULL, is done first: its first heads are the list's rows' queries, its second k, of a
 * pool of heads. */
cudaError_t attention_kv_append(cudaStream_t stream, const struct kv_layer *kv,
                                const struct cuda_attn_list *on, const float *k, const float *v,
                                const struct rope_args *rope);
cudaError_t attention_run(cudaStream_t stream, const struct attention *a);

#ifdef __cplusplus
}
#endif
#endif
