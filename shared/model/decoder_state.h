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

struct decoder {
    struct weight embed; /* [V, H] */
    struct weight head;  /* [V, H], or the rank's outputs; no data: the embedding is used */
    struct share_cut head_cut;
    float *final_norm; /* [H] */
    struct decoder_layer *layers;
    float *cos_sin; /* rope_table */
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

#endif
