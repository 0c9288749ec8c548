/* ffn_moe.h - what the two ways through a mixture of experts share; only their files include this.
 *
 *     ffn_moe.c      loading, and the way of a rank that has all experts
 *     ffn_moe_ep.c   the way of a rank that has some: rows travel to the others and back (ep.h)
 *
 * Both give the same bits. Thread: loading, then engine. */
#ifndef BATON_MODEL_FFN_MOE_H
#define BATON_MODEL_FFN_MOE_H

#include "shared/model/ffn.h"

struct ffn_moe {
    struct ffn_layer base;
    struct weight router;  /* [E, H], f32 */
    float *selection_bias; /* [E]; NULL: none */
    struct swiglu shared;  /* with shared_intermediate > 0 */
    uint32_t n_experts;    /* E, of all ranks */
    uint32_t i_sparse;     /* number of this layer among those with experts */
};

/* This layer's experts by slot, of the step's set. */
struct moe_slots {
    const struct weight *gate_up, *down; /* [n] */
    int32_t n;
};

struct ffn_moe_work {
    struct ffn_work base;
    uint32_t max_rows;        /* rows that are routed at a time */
    size_t max_slots;         /* (row, choice) pairs that are computed at a time */
    float *logits;            /* [rows, E] */
    int32_t *experts;         /* [rows, used] */
    float *weights;           /* [rows, used] */
    int32_t *rows;            /* [rows used]: the row of h at each place of the sorted order */
    int32_t *index;           /* [rows used]: the place of (row, j) */
    int32_t *begin;           /* [E + 1]: first place of each expert */
    float *h;                 /* [rows, H], normalised */
    float *arrived;           /* [slots, H] that travelled as another type; NULL: all are f32 */
    int32_t *arrived_rows;    /* [slots] */
    float *act;               /* [slots, I] by place, pre-quantised for down */
    float *out;               /* [slots, H] by place; NULL: the ep object has room for them */
    float *shared_act;        /* [rows, shared I], maybe pre-quantised for down */
    struct matmul_args *jobs; /* [E + 1], of a rank that has all experts */
};

struct expert;

/* Binds an expert into its place in the model's store (expert_store.h). */
enum status moe_bind_expert(struct binder *b, struct expert *x) MUST_CHECK;
struct moe_slots moe_slots_of(const struct decoder_step *s, const struct ffn_moe *e);

/* Of one step's rows, x [rows, H]: */

struct moe_rows {
    const float *x, *norm; /* [n, H]; weights of the norm */
    float *h;              /* [n, H], becomes the normalised rows */
    size_t n;
};

/* Fills h, w->experts and w->weights; sorted: also rows, index and begin, for the experts op. */
void moe_route_rows(const struct decoder_step *s, const struct ffn_moe *e,
                    const struct ffn_moe_work *w, const struct moe_rows *r, bool sorted);
/* The rank's part of the step's rows, piece by piece as the other ranks of s->m->ep do it; x of all
 * rows is whole afterwards. A failure is s->exchange_fault's. */
void moe_forward_ep(const struct decoder_step *s, const struct ffn_moe *e,
                    const struct ffn_moe_work *w, const float *norm);

#endif
