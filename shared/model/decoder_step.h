/* decoder_step.h - what the two halves of a layer, attention and FFN, see of a step.
 *
 * Shapes in comments of this folder: R rows of the step, H hidden, D head_dim, Q = n_heads * D,
 * KV = n_kv_heads * D, I intermediate, E experts, V vocabulary.
 *
 * Thread: engine. */
#ifndef BATON_MODEL_DECODER_STEP_H
#define BATON_MODEL_DECODER_STEP_H

#include "shared/model/model.h"

struct decoder_step {
    const struct model *m;
    const struct model_batch *b;
    const int32_t *pos;   /* [R], uploaded */
    struct attn_list all; /* the step's sequences, uploaded */
    const float *cos_sin; /* rope_table */
    float *x;             /* [R, H] */
    size_t n_rows;        /* R */
};

/* The KV pool of one layer. */
struct kv_layer decoder_kv_layer(const struct decoder_step *s, uint32_t i_layer);
/* Attention calls this once it has queued the write of the layer's K and V of all rows: it calls
 * the batch's on_layer. */
void decoder_kv_written(const struct decoder_step *s, uint32_t i_layer);

#endif
