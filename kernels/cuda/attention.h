/* attention.h - appending to the KV pool, and attention, on the card.
 *
 * `stage` (cuda_stage.c) turns each struct attn_list into a struct cuda_list once per step. Layouts of the pool, of q and of out are those of
 * kernels.h. Every sum runs over keys in an order that is fixed by positions alone: keys in segments of ATTENTION_SEGMENT from position 0,
 * each an online softmax of its own over tiles from its beginning, merged in ascending order (kernels/cpu/cpu_attention.c has the formulas).
 * Which of two kernels a row goes through - attention_rows.cuh has many blocks for one row, attention_tiles.cuh one block for many rows -
 * depends on the model and on whether its token is an answer's, and they do not give the same bits.
 * So a row's result depends on neither the other rows nor how a prompt was chunked nor how many segments ran at a time.
 * Calls put work on the stream and return; they do not wait and do not allocate. Thread: engine. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_H
#define BATON_KERNELS_CUDA_ATTENTION_H

#include <cuda_runtime_api.h>

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ATTENTION_SEGMENT = 512 };

struct cuda_seq {
    int32_t q_begin, n_q, pos_begin; /* as in struct attn_seq */
    int32_t table;                   /* where its block table begins in struct cuda_list's tables */
};

/* What the list's row i is: row `row` of q and out, at position `pos` of sequence `seq`; `segment`: segments of the list's rows before it,
 * where position p has p / ATTENTION_SEGMENT + 1. The rows of answer tokens come first, and a sequence's rows follow each other. */
struct cuda_row {
    int32_t row, pos, seq, segment;
};

/* Pointers are to device memory; counts are the host's. */
struct cuda_list {
    int32_t                n_seqs, n_rows;    /* n_rows: over all its sequences */
    int32_t                n_q_max, n_keys_max; /* the longest sequence's query rows and keys */
    int32_t                n_generated;         /* rows of answer tokens */
    int32_t                n_segments, n_segments_generated; /* of all rows, of those */
    const struct cuda_seq *seqs;              /* [n_seqs] */
    const struct cuda_row *rows;              /* [n_rows] */
    const int32_t         *tables;
};

/* Latent pools: the absorbed form alone. */
struct attention {
    struct kv_layer         kv;
    const struct cuda_list *on;
    const float            *q;       /* as in struct attn_args */
    float                  *out;
    int32_t                 n_heads, v_dim;
    float                   scale;
    bool                    exact;   /* F32: all in f32. Otherwise queries, keys, weights and values may be bf16 and sums are f32 */
    float                  *scratch; /* attention_scratch_floats() of them */
    int32_t                 n_at_once; /* 0: as many segments at a time as suits the card; for tests of what else gives the same bits */
};

/* Number the rows of a list: fill `rows`, which has room for those of all sequences, and the counts of `list`, whose pointers stay. Host memory. */
void        attention_list_rows(struct cuda_list *list, const struct attn_seq *seqs, int32_t n_seqs, struct cuda_row *rows);
/* Enough for any call over at most n_rows rows, n_heads heads of v_dim and contexts of at most n_keys. */
size_t      attention_scratch_floats(size_t n_rows, size_t n_heads, size_t v_dim, size_t n_keys);
cudaError_t attention_append(cudaStream_t stream, const struct kv_layer *kv, const struct cuda_list *on, const float *k, const float *v);
cudaError_t attention_run(cudaStream_t stream, const struct attention *a);

#ifdef __cplusplus
}
#endif
#endif
