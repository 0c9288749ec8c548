/* decoder_step.h - what the two halves of a layer, attention and FFN, see of a step.
 *
 * Shapes in comments of this folder: R rows of the step, H hidden, D head_dim, Q = n_heads * D,
 * KV = n_kv_heads * D, I intermediate, E experts, V vocabulary. Of a rank of a tensor-parallel
 * node, heads, and so Q and KV, are the rank's own; "of all ranks" says where they are not.
 *
 * Thread: engine. */
#ifndef BATON_MODEL_DECODER_STEP_H
#define BATON_MODEL_DECODER_STEP_H

#include "shared/model/model.h"

struct decoder_step {
    const struct model *m;
    const struct model_batch *b;
    const int32_t *pos;         /* [R], uploaded */
    struct attn_list all;       /* the step's sequences, uploaded */
    const float *cos_sin;       /* rope_table */
    float *x;                   /* [R, H] */
    size_t n_rows;              /* R */
    const int32_t *n_real;      /* of a step that is captured, in the device's memory: how many of
                                 * its rows the replayed step has; NULL: all */
    struct err *exchange_fault; /* of the model */
    struct err *gather_fault;   /* of the model */
};

/* The KV pool of one layer. */
struct kv_layer decoder_kv_layer(const struct decoder_step *s, uint32_t i_layer);
/* Is the model cut between ranks, so that outputs have to be gathered? */
static inline bool decoder_is_cut(const struct decoder_step *s) { return s->m->share.tp_size > 1; }
/* Do the step's results still mean something? Once they do not, nothing is computed any more, and
 * only what keeps the node's ranks in line is done: the gathers that all of them make. */
static inline bool decoder_goes_on(const struct decoder_step *s)
{
    return s->exchange_fault->code == OK && s->gather_fault->code == OK;
}
/* y [n_rows, cut->n], rows y_stride floats apart, gets the columns of all ranks; `mine` are this
 * rank's (struct model_gather). Does nothing when the model is not cut. */
void decoder_gather(const struct decoder_step *s, float *y, size_t y_stride, const float *mine,
                    size_t mine_stride, size_t n_rows, const struct share_cut *cut);
/* s->x [R, H] += the product, of whose matrix this rank has the outputs cut->mine; says everything
 * but y, n_rows and the epilogue. */
void decoder_add_product(const struct decoder_step *s, struct matmul_args product,
                         const struct share_cut *cut);
/* Attention calls this once it has queued the write of the layer's K and V of all rows: it calls
 * the batch's on_layer. */
void decoder_kv_written(const struct decoder_step *s, uint32_t i_layer);

#endif
