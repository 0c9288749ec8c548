/* decoder_state.h - what a loaded decoder holds. decoder_load.c fills it in and frees it, decoder.c
 * computes with it; nobody else includes this.
 *
 * Thread: the loading thread until model_load returns, then the engine thread. */
#ifndef BATON_MODEL_DECODER_STATE_H
#define BATON_MODEL_DECODER_STATE_H

#include "shared/model/attention.h"
#include "shared/model/ffn.h"

enum { FFN_KINDS = 2 };

struct decoder_layer {
    float *attn_norm, *ffn_norm; /* [H] */
    struct attention_layer *attention;
    struct ffn_layer *ffn;
    struct ffn_work *ffn_work; /* of the layer's kind */
};

/* Bytes that the first pass counted. */
struct decoder_totals {
    size_t weights /* but routed experts */, experts, vectors, buffers, host;
};

/* The draft layer, besides the layer itself, which is the last of decoder.layers
 * (decoder_draft.c). */
struct decoder_draft {
    float *norm_embed, *norm_hidden, *norm_out; /* [H]; norm_out NULL: the model's */
    struct weight projection;                   /* [H, 2H], or the rank's outputs */
    struct share_cut projection_cut;
    struct weight embed, head; /* no data: the model's */
    float *x, *both;           /* [max_draft_rows, H] and [max_draft_rows, 2H] */
    int32_t *from_rows;        /* [max_draft_rows] of the pass */
};

struct decoder {
    struct weight embed; /* [V, H] */
    struct weight head;  /* [V, H], or the rank's outputs; no data: the embedding is used */
    struct share_cut head_cut;
    float *final_norm;            /* [H] */
    struct decoder_layer *layers; /* the draft layer is the last */
    struct decoder_draft draft;   /* of a model that has one */
    float *cos_sin;               /* rope_table */
    /* Activations of one step. */
    float *x; /* [max_rows, H] */
    struct attention_work *attention_work;
    struct ffn_work *ffn_works[FFN_KINDS]; /* NULL for a kind that no layer has */
    struct attn_list
        *lists;    /* of the step: all its sequences, then attention's own (attention.h) */
    float *logits; /* [max_logits, V]; NULL: the batch's host memory is used */
    /* Memory that all of these point into. */
    struct dev_mem buffers, vectors, cos_sin_mem;
    struct weight_arena weight_arena;
    void *host;
    struct decoder_totals totals;
    /* By decoder_prepare, for capturing steps again. */
    struct model_prepare_args prepared;
    uint32_t max_graph_rows; /* of a captured step; 0: none is */
    /* From plan to pack, in packing order: the weights, and where their matrices are in files. */
    struct weight *plan; /* [n_plan] */
    size_t n_plan;
    struct read_ahead_range *sources; /* [n_sources] */
    size_t n_sources;
};

/* ---- decoder_load.c ---- */

/* Binds the layer whose tensors' names begin with `layer`. */
enum status decoder_bind_layer(struct binder *b, struct decoder_layer *l,
                               const char *layer) MUST_CHECK;

/* ---- decoder.c: parts of a step ---- */

/* What its layers see of an uploaded step, whose rows are x. */
struct decoder_step decoder_step_of(struct model *m, const struct model_batch *b,
                                    const struct kernel_step *step, float *x);
void decoder_layer_forward(const struct decoder_step *s, struct decoder *d, uint32_t i);
/* logits [n_logits, V] of the step's rows of logits; head: [V, H] or the rank's outputs. */
void decoder_head_forward(const struct decoder_step *s, const struct decoder *d,
                          const struct kernel_step *step, const struct weight *head,
                          const float *norm, float *logits);
/* Begins an upload of the batch: what all steps have alike. */
struct kernel_step decoder_begin(struct model *m, const struct model_batch *b);
/* All ops were called: as decoder_forward from there on. */
bool decoder_end(struct model *m, const struct model_batch *b, const struct kernel_step *step);

/* ---- decoder_draft.c; without a draft layer they do nothing ---- */

enum status decoder_draft_bind(struct binder *b, struct decoder *d) MUST_CHECK;
void decoder_draft_bind_work(struct binder *b, struct decoder_draft *d);
void decoder_draft_release(struct kernel_ctx *k, struct decoder_draft *d);
/* Calls all ops of a pass that is captured. */
void decoder_draft_capture(struct model *m, const struct model_batch *b,
                           const struct kernel_step *step);

#endif
