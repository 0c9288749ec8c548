/* attention.h - attention in the CPU backends: the walk of one run of queries over a segment, and
 * its memory.
 *
 *   cpu_attention.c         the ops: work items, segments in parallel, merging
 *   attention_tile_loop.c   one run of queries over the tiles of one segment
 *   attention_*.c           the micro-kernels of each instruction set
 * Thread: engine, compute pool. */
#ifndef BATON_KERNELS_CPU_ATTENTION_ATTENTION_H
#define BATON_KERNELS_CPU_ATTENTION_ATTENTION_H

#include "kernels/cpu/cpu_backend.h"

enum {
    ATTN_PAIRS = 192,       /* (query row, head) pairs that use a cached tile of keys and values */
    ATTN_STEP = 24,         /* pairs whose scores, weights and sums fit the L1 cache */
    ATTN_LATENT_PAIRS = 96, /* for MLA: a tile and the pairs' sums fit the L2 cache */
    ATTN_LONG_KEY = KERNEL_HEAD_DIM_MAX,
    ATTN_SKINNY_PAIRS = 8,   /* up to so many pairs use keys and values straight from the pool */
    ATTN_HEADS_PER_ITEM = 8, /* heads with few pairs that one item takes through a tile in
                              * turn, so that it reads the pool in order */
    ATTN_NAIVE_ROWS = 512    /* query rows that share the keys and values of a latent tile, whose
                              * computation costs as much as about 400 rows of attention */
};

/* ---- the pool ---- */

/* Byte offsets in a layer's pool. Row i of a block is (head, K or V, token) in that order; its
 * values begin i * row from the block's begin, its scale, if the type has one, i * scale after all
 * values (kv_layout.h). */
struct kv_block_offsets {
    size_t row, scale, scales; /* of one row's values; of its scale; begin of a block's scales */
    size_t block;
};

struct kv_block_offsets attention_kv_block_offsets(const struct kv_layer *kv);

/* ---- loops ---- */

#define ATTENTION_DECLARE(isa)                                                                     \
    void isa##_load_keys(float *dst, const struct kv_row_ptrs *rows, enum dtype t, size_t n_keys,  \
                         size_t dim);                                                              \
    void isa##_load_values(float *dst, const struct kv_row_ptrs *rows, enum dtype t,               \
                           size_t n_keys, size_t dim);                                             \
    void isa##_fma_tile(float *acc, size_t acc_stride, const float *x, size_t x_stride,            \
                        size_t n_rows, const float *w, size_t w_stride, size_t n_panels,           \
                        size_t n_k, const float *rescale);                                         \
    void isa##_online_softmax(float *scores, size_t n_rows, size_t n_keys, float scale,            \
                              float *max, float *sum, float *rescale);                             \
    void isa##_scores_skinny(float *scores, const float *q, size_t q_stride, size_t n_rows,        \
                             const struct kv_row_ptrs *keys, const struct kv_row_ptrs *prefetch,   \
                             enum dtype t, size_t n_keys, size_t dim);                             \
    void isa##_accumulate_v_skinny(float *o, size_t o_stride, const float *p, size_t n_rows,       \
                                   const struct kv_row_ptrs *values,                               \
                                   const struct kv_row_ptrs *prefetch, enum dtype t,               \
                                   size_t n_keys, size_t dim, const float *rescale);
ATTENTION_DECLARE(attention_ref)
ATTENTION_DECLARE(avx2)
ATTENTION_DECLARE(avx512)

#define ATTENTION_MICROKERNELS(isa)                                                                \
    .load_keys = isa##_load_keys, .load_values = isa##_load_values, .fma_tile = isa##_fma_tile,    \
    .online_softmax = isa##_online_softmax, .scores_skinny = isa##_scores_skinny,                  \
    .accumulate_v_skinny = isa##_accumulate_v_skinny

/* ---- one run ---- */

/* Query rows of one sequence times the heads that share one KV head: pair i is row (pair_begin + i)
 * / group of the sequence, and head (pair_begin + i) % group of the KV head's group.
 * cpu_attention.c sets these members, attention_tile_loop_init the others. */
struct attn_tile_loop {
    const struct cpu_microkernels *kernels;
    const struct attn_args *a;
    const struct attn_seq *seq;
    int32_t head; /* KV head; naive MLA: query head (group is 1) */
    int32_t group, pair_begin, n_pairs;
    int32_t n_keys;       /* that the last pair attends to */
    bool use_bf16_scores; /* scores are bf16 products */

    const float *q;         /* [n_pairs], q_stride elements apart */
    const uint16_t *q_bf16; /* use_bf16_scores: instead of q */
    size_t q_stride, q_dim, v_stride;
    struct kv_block_offsets offsets; /* of the cache */
    size_t v_offset;                 /* from a key to its value */
    float *upconverted;              /* a tile's keys, then its values, as f32, if the
                                      * micro-kernels do not read the pool's type; or NULL */
    float *max, *sum, *rescale;      /* [n_pairs] */
    float *o;                        /* [n_pairs][v_stride], not yet divided by sum */
    void *keys;                      /* f32, or pairs of bf16 */
    float *values, *scores;
    float *latent, *rows, *w_panel; /* naive MLA: a tile of latents, of keys or values, a
                                     * panel of weights */
};

/* Most pairs that a run may have. */
int32_t attention_pairs_max(const struct attn_args *a);
/* Lays out a tile loop in the thread's scratch (attention_scratch_bytes suffices for one, or for
 * ATTN_HEADS_PER_ITEM of at most ATTN_SKINNY_PAIRS pairs) and gathers its queries. Loops of one
 * item may share `upconverted`: one that is set is kept. Returns the free scratch after it. */
void *attention_tile_loop_init(struct attn_tile_loop *w, void *scratch);
/* Computes max, sum and o of pairs first .. n_pairs, which attend to keys of the segment; returns
 * first. w [n_heads] differ only in `head`. */
int32_t attention_tile_loop_segment(struct attn_tile_loop *w, int32_t n_heads, int32_t segment);

static inline int32_t attention_pair_pos(const struct attn_tile_loop *w, int32_t i)
{
    return w->seq->pos_begin + (w->pair_begin + i) / w->group;
}

static inline int32_t attention_query_head(const struct attn_tile_loop *w, int32_t i)
{
    return w->head * w->group + (w->pair_begin + i) % w->group;
}

/* ---- memory ---- */

/* Bytes of one thread's scratch, for any call. */
size_t attention_scratch_bytes(void);
/* Bytes of cpu_ctx.attn, for a pool of n_threads: the work table, and results of segments to be
 * merged. */
size_t attention_workspace_bytes(int n_threads);

#endif
