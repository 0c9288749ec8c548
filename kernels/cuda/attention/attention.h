/* attention.h - appending to the KV pool, and attention, on the GPU. docs/kernels.md, "Attention on
 * GPUs", describes the kernels and which one a row takes.
 *
 * Upload (cuda_upload_step.c) turns each struct attn_list into a struct cuda_attn_list once per
 * step. kernels.h has the layouts of the pool, of q and of out. Every sum runs over keys in an
 * order that depends only on positions: segments of keys from position 0, each an online softmax
 * over tiles, merged in ascending order or in groups of such (attention_merge_parts.cuh; formulas:
 * kernels/cpu/attention/cpu_attention.c). Pools of heads may have any type of kv_rows.h, whose rows
 * appending produces bit for bit (except which NaN a bf16 or f16 is); latents are f32 or bf16.
 * Thread: engine. Calls enqueue work on the stream; they neither wait nor allocate. */
#ifndef BATON_KERNELS_CUDA_ATTENTION_ATTENTION_H
#define BATON_KERNELS_CUDA_ATTENTION_ATTENTION_H

#include <cuda_runtime_api.h>

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Keys of a segment: of prompt rows CUDA_ATTN_SEGMENT. Decode rows have CUDA_ATTN_SEGMENTS_MANY
 * segments or fewer as long as segments of CUDA_ATTN_SEGMENT_LEAST keys, or twice as many, allow
 * it: one row of a short context then still runs on many SMs. */
enum { CUDA_ATTN_SEGMENT = 512, CUDA_ATTN_SEGMENT_LEAST = 128, CUDA_ATTN_SEGMENTS_MANY = 64 };

struct cuda_attn_seq {
    int32_t q_begin, n_q, pos_begin; /* as in struct attn_seq */
    int32_t table;                   /* offset of its block table in cuda_attn_list.tables */
};

/* Row i of the list is row `row` of q and out, at position `pos` of sequence `seq`, and has
 * pos / per_segment + 1 segments. `segment`: those of the list's earlier rows. Decode rows come
 * first, and a sequence's rows are adjacent. `shared`: how many of its first segments lie in the
 * same blocks as those of the decode row before it, complete for both and of as many keys. `n_old`:
 * of its first keys, none of which the step of the list writes; 0: unknown. `table`: of its
 * sequence, here too, so that reading a key waits for one read less. 32 bytes, aligned to 16. */
struct cuda_attn_row {
    int32_t row, pos, seq, segment, shared, per_segment, n_old, table;
};

struct cuda_attn_counts {
    int32_t n_rows, n_decode, n_prefill;   /* rows: all, decode, prompts */
    int32_t n_segments, n_segments_decode; /* of all rows, of decode rows */
    int32_t n_keys_max, n_keys_prefill;    /* the most that a row, or a prompt's row, attends to */
    int32_t n_rows_seq;                    /* the most rows of a sequence */
};

/* The number of launches of a call, their grids and arguments depend only on `bounds` and on
 * pointers; kernels process what `counts` says. So the captured launches of one call compute every
 * list within its bounds that is uploaded to its pointers. A call that is not captured uses the
 * bounds that attention_list_rows counts, which are exact where no row moves. Pointers are device
 * memory. */
struct cuda_attn_list {
    struct cuda_attn_counts bounds;
    const struct cuda_attn_counts *counts; /* none is above its bound */
    const struct cuda_attn_seq *seqs;      /* the rows' sequences */
    const struct cuda_attn_row *rows;      /* [counts->n_rows]; room for bounds.n_rows */
    const int32_t *tables;
};

/* What attention_kv_append takes besides the pool and the list. */
struct attention_append {
    const float *k, *v;
    const struct rope_args *rope;
};

/* Latent pools: only the absorbed path. */
struct attention {
    struct kv_layer kv;
    const struct cuda_attn_list *on;
    const float *q; /* as in struct attn_args */
    float *out;
    int32_t n_heads, v_dim;
    float scale;
    bool exact;                    /* all in f32. Otherwise queries and weights may be bf16, or
                                    * f16 if the pool is (larger queries saturate); keys and
                                    * values keep the pool's type, and sums are f32 */
    float *scratch;                /* [attention_scratch_floats()], prepared */
    int32_t n_at_once, max_blocks; /* segments at a time, blocks; 0: choose. Tests set them,
                                    * because every choice must give the same bits */
    const struct attention_append *append; /* done first, or by the same launch; afterwards q and k
                                            * are not to be read. NULL: none */
    uint16_t *out_bf16;                    /* the rows of out rounded to bf16, too; NULL: not */
};

/* Numbers the rows of a list: fills `rows` except for `table`, which has room for those of all
 * sequences (NULL: only counts them), and `counts`. Host memory. block_tokens: the pool's;
 * is_large: decode rows have large segments, as small ones would cost more than they give. Of rows
 * that move, `counts` has the most that may be, and attention_move_rows numbers them. */
void attention_list_rows(struct cuda_attn_counts *counts, const struct attn_seq *seqs,
                         int32_t n_seqs, int32_t block_tokens, bool is_large,
                         struct cuda_attn_row *rows);
/* Moves rows of an uploaded list whose sequences move (attn_seq.move), and numbers all rows anew.
 * Pointers are device memory. */
struct attention_move_call {
    struct cuda_attn_row *rows; /* [n_rows] as attention_list_rows made them, but n_old: the move of
                                 * the row's sequence */
    struct cuda_attn_counts *counts;
    int32_t n_rows, n_decode;
    const struct kernel_move *moves;
    const int32_t *accepted; /* the numbers that moves name */
    bool is_large;           /* as attention_list_rows was told */
    bool is_alone;           /* all rows are decode rows, each the only one of its sequence */
};
/* Behind move_rows, whose numbers it reads as well. Fails only as a launch does. */
cudaError_t attention_move_rows(cudaStream_t stream, const struct attention_move_call *c);
/* Scratch that suffices for any call whose bounds have at most n_rows rows and n_keys keys, with
 * n_heads heads of v_dim; grows with each of them. */
size_t attention_scratch_floats(size_t n_rows, size_t n_heads, size_t v_dim, size_t n_keys);
/* Once, before its first use: enqueues what sets its counters to zero, which they are again after
 * every call. */
cudaError_t attention_scratch_prepare(cudaStream_t stream, float *scratch);
/* Bounds for capturing: at most n_rows rows, of which at most n_decode are decode rows and
 * n_prefill prompt rows, and as many keys up to n_keys as one pass over the scratch has room for.
 * Without prompts every row is the only one of its sequence, except of latents. Reads only the
 * model's shape from `shape`, no list and no pointers. */
void attention_capture_bounds(const struct attention *shape, int32_t n_rows, int32_t n_decode,
                              int32_t n_prefill, int32_t n_keys, struct cuda_attn_counts *bounds);
/* Whether launches that were captured with these bounds compute a list with these counts. */
bool attention_fits_capture(const struct cuda_attn_counts *bounds,
                            const struct cuda_attn_counts *counts);
/* Whether attention_run takes an out_bf16: prompts without decode rows, by the kernel of compute
 * capability 9.0. */
bool attention_leaves_bf16(const struct attention *a);
/* Both return cudaErrorInvalidValue for a type that such a pool does not have. */
/* Applies `rope` first, unless NULL: its first heads are the list's queries, its second k, of a
 * pool of heads. */
cudaError_t attention_kv_append(cudaStream_t stream, const struct kv_layer *kv,
                                const struct cuda_attn_list *on, const float *k, const float *v,
                                const struct rope_args *rope);
cudaError_t attention_run(cudaStream_t stream, const struct attention *a);

#ifdef __cplusplus
}
#endif
#endif
