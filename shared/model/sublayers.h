/* sublayers.h - the two halves of a decoder layer, each of two kinds; every kind's file opens with
 * its formulas.
 *
 *     attention   attention_gqa.c (grouped queries)   attention_mla.c (latent keys and values)
 *     FFN         ffn_dense.c (one SwiGLU)            ffn_moe.c (routed and shared experts)
 *
 * A block reads the rows x, normalised by `norm`, and adds its result to them. Its `*_work` holds
 * the activations of one step and is shared by all layers. Shapes beside the calls: R rows of the
 * step, H hidden, D head_dim, Q = n_heads * D, KV = n_kv_heads * D, I intermediate. Life cycle:
 * *_bind in both passes of bind.h, *_forward on the engine thread, *_release. */
#ifndef BATON_MODEL_SUBLAYERS_H
#define BATON_MODEL_SUBLAYERS_H

#include "shared/model/load/bind.h"

/* What a block works on in a step. */
struct decoder_step {
    const struct model *m;
    const struct model_batch *b;
    const int32_t *pos;   /* [R], staged */
    struct attn_list all; /* the step's sequences, staged */
    const float *cos_sin; /* rope_table */
    float *x;             /* [R, H] */
    size_t n_rows;        /* R */
};

/* ---- grouped-query attention ---- */

struct attention_gqa {
    struct weight q, k, v, o;
    float *q_bias, *k_bias, *v_bias, *o_bias; /* NULL: none */
    float *q_norm, *k_norm;                   /* [D]; NULL: none */
};
struct attention_gqa_work {
    float *q, *k, *v, *out; /* [R, Q], [R, KV], [R, KV], [R, Q] */
};
enum status attention_gqa_bind(struct binder *b, const char *layer,
                               struct attention_gqa *a) MUST_CHECK;
void attention_gqa_bind_work(struct binder *b, struct attention_gqa_work *w);
void attention_gqa_forward(const struct decoder_step *s, const struct attention_gqa *a,
                           const struct attention_gqa_work *w, const float *norm, uint32_t i_layer);
void attention_gqa_release(struct kernel_ctx *k, struct attention_gqa *a);

/* ---- latent attention ---- */

struct attention_mla {
    struct weight q; /* without q_lora; otherwise: */
    struct weight q_a, q_b;
    float *q_a_norm;                /* [q_lora] */
    struct weight kv_a;             /* [kv_lora + rope, H] */
    float *kv_a_norm;               /* [kv_lora] */
    struct weight *k_up, *v_up;     /* [n_heads]: [nope, kv_lora], [v, kv_lora] */
    struct weight *k_up_transposed; /* [n_heads]: [kv_lora, nope] */
    struct weight o;
    uint32_t n_heads;
};
/* Rows [begin, begin + n) of the step, all of them generated. */
struct mla_range {
    size_t begin, n;
};
struct attention_mla_work {
    float *q_a, *q, *latent, *out;    /* [R, q_lora], [R, n_heads (nope + rope)], [R,
                                       * kv_lora + rope], [R, n_heads v] */
    float *q_absorbed, *out_absorbed; /* of a run: [.., n_heads (kv_lora + rope)],
                                       * [.., n_heads kv_lora] */
    struct attn_seq *seqs;            /* the step's sequences by form: prompts, then
                                       * ranges, whose rows count from the run's
                                       * first */
    struct mla_range *ranges;         /* [n_ranges] */
    struct attn_list *lists;          /* [1 + n_ranges], staged: prompts, then each
                                       * run */
    struct matmul_args *jobs;         /* [n_heads] */
    int32_t n_ranges;
};
enum status attention_mla_bind(struct binder *b, const char *layer,
                               struct attention_mla *a) MUST_CHECK;
void attention_mla_bind_work(struct binder *b, struct attention_mla_work *w);
/* Sorts a step's sequences by form; `lists` has room for one more than the step has rows. Returns
 * how many it wrote, which `stage` must see. */
int32_t attention_mla_lists(const struct model *m, const struct model_batch *b,
                            struct attention_mla_work *w, struct attn_list *lists);
/* The lists of a step that is not there yet, all of whose rows are one run; as
 * attention_mla_lists. */
int32_t attention_mla_capture_lists(struct attention_mla_work *w, struct attn_list *lists);
/* Rows of a run at most. */
size_t attention_mla_range_rows(const struct model *m);
void attention_mla_forward(const struct decoder_step *s, const struct attention_mla *a,
                           const struct attention_mla_work *w, const float *norm, uint32_t i_layer);
void attention_mla_release(struct kernel_ctx *k, struct attention_mla *a);

/* ---- dense feed-forward ---- */

struct ffn {
    struct weight gate_up, down; /* paired [2 I, H], [H, I] */
    float *gate_up_bias, *down_bias;
};
struct ffn_work {
    float *act; /* [R, I], ready for down */
};
/* `prefix` up to the matrices' own names; the intermediate size may differ from the configuration's
 * (shared experts). */
enum status ffn_bind(struct binder *b, const char *prefix, size_t intermediate,
                     struct ffn *f) MUST_CHECK;
void ffn_bind_work(struct binder *b, struct ffn_work *w);
void ffn_forward(const struct decoder_step *s, const struct ffn *f, const struct ffn_work *w,
                 const float *norm);
void ffn_release(struct kernel_ctx *k, struct ffn *f);

/* ---- mixture of experts ---- */

struct moe {
    struct weight router;          /* [E, H], f32 */
    float *selection_bias;         /* [E]; NULL: none */
    struct weight *gate_up, *down; /* [E] */
    struct ffn shared;             /* with shared_intermediate > 0 */
    uint32_t n_experts;
};
struct moe_work {
    uint32_t max_rows;        /* of the step that are routed at a time */
    float *logits;            /* [rows, E] */
    int32_t *experts;         /* [rows, used] */
    float *weights;           /* [rows, used] */
    int32_t *rows, *index;    /* [rows used]: which row of h is in slot i; in which slot is
                               * (row, j) */
    int32_t *begin;           /* [E + 1]: slots of each expert */
    float *h;                 /* [rows, H], normalised */
    float *act, *out;         /* [rows used, I], ready for down; [rows used, H]; by slot */
    float *shared_act;        /* [rows, shared I], ready for down */
    struct matmul_args *jobs; /* [E + 1] */
};
enum status moe_bind(struct binder *b, const char *layer, struct moe *e) MUST_CHECK;
void moe_bind_work(struct binder *b, struct moe_work *w);
void moe_forward(const struct decoder_step *s, const struct moe *e, const struct moe_work *w,
                 const float *norm);
void moe_release(struct kernel_ctx *k, struct moe *e);

/* ---- shared by the attention kinds ---- */

/* The pool of a layer in this step's batch. */
struct kv_layer decoder_kv_layer(const struct decoder_step *s, uint32_t i_layer);
/* K and V of all rows of the layer are on their way into the pool: tells the batch's owner. */
void decoder_kv_written(const struct decoder_step *s, uint32_t i_layer);

#endif
