/* ffn.h - the feed-forward half of a decoder layer: x += ffn(norm(x)).
 *
 *     ffn_dense_ops   ffn_dense.c   one SwiGLU
 *     ffn_moe_ops     ffn_moe.c     routed and shared experts
 *
 * A kind is chosen for each layer when the model is loaded. It allocates its own weights of a layer
 * and its own activations of a step, which all layers of the kind share, with struct ffn_layer and
 * struct ffn_work as first members. No op is NULL. Life cycle and threads as in attention.h. */
#ifndef BATON_MODEL_FFN_H
#define BATON_MODEL_FFN_H

#include "shared/model/decoder_step.h"
#include "shared/model/load/bind.h"

struct ffn_ops;

struct ffn_layer {
    const struct ffn_ops *ops;
};

struct ffn_work {
    const struct ffn_ops *ops;
};

struct ffn_ops {
    /* Empty objects, for bind and bind_work to fill in. */
    struct ffn_layer *(*create)(const struct model *m, uint32_t i_layer);
    struct ffn_work *(*create_work)(void);
    /* Binds the weights of the layer whose tensors' names begin with `layer`. */
    enum status (*bind)(struct binder *b, const char *layer, struct ffn_layer *f);
    void (*bind_work)(struct binder *b, struct ffn_work *w);
    /* Frees the weights and `f`; of `f` that was only created, too. */
    void (*release)(struct kernel_ctx *k, struct ffn_layer *f);
    /* Frees the object; what bind_work placed belongs to the decoder. */
    void (*release_work)(struct ffn_work *w);
    /* Rows of a step that are computed in one piece, as a captured step must be; SIZE_MAX: all. */
    size_t (*rows_at_once)(const struct model *m);
    /* s->x [R, H] += ffn(norm(s->x)). */
    void (*forward)(const struct decoder_step *s, const struct ffn_layer *f,
                    const struct ffn_work *w, const float *norm);
};

extern const struct ffn_ops ffn_dense_ops, ffn_moe_ops;

/* ---- one SwiGLU: Wdown (silu(Wgate h) * Wup h); the dense kind and the shared experts ---- */

struct swiglu {
    struct weight gate_up, down;            /* interleaved [2 I, H], [H, I] */
    float *gate_up_bias, *down_bias;        /* NULL: none */
    struct share_cut gate_up_cut, down_cut; /* of I, of H */
};

/* `prefix`: the tensors' names up to "gate_proj". `intermediate` is I. `share` cuts the outputs of
 * gate, up and down. */
enum status swiglu_bind(struct binder *b, const char *prefix, size_t intermediate,
                        const struct model_share *share, struct swiglu *f) MUST_CHECK;
void swiglu_release(struct kernel_ctx *k, struct swiglu *f);

#endif
