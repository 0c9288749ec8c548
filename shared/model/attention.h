/* attention.h - the attention half of a decoder layer: x += attention(norm(x)).
 *
 *     attention_gqa_ops   attention_gqa.c   grouped-query attention
 *     attention_mla_ops   attention_mla.c   latent attention (DeepSeek)
 *
 * A kind is chosen for each layer when the model is loaded. It allocates its own weights of a layer
 * and its own activations of a step, which all layers share, with struct attention_layer and
 * struct attention_work as first members. No op is NULL.
 * Life cycle: create, bind in both passes of bind.h, forward ..., release.
 * Thread: the engine thread for the ops of a step, the loading thread for the others. */
#ifndef BATON_MODEL_ATTENTION_H
#define BATON_MODEL_ATTENTION_H

#include "shared/model/decoder_step.h"
#include "shared/model/load/bind.h"

struct attention_ops;

struct attention_layer {
    const struct attention_ops *ops;
};

struct attention_work {
    const struct attention_ops *ops;
};

struct attention_ops {
    /* ---- load ---- */

    /* Empty objects, for bind and bind_work to fill in. */
    struct attention_layer *(*create)(const struct model *m);
    struct attention_work *(*create_work)(void);
    /* Binds the weights of the layer whose tensors' names begin with `layer`. */
    enum status (*bind)(struct binder *b, const char *layer, struct attention_layer *a);
    void (*bind_work)(struct binder *b, struct attention_work *w);
    /* Frees the weights and `a`; of `a` that was only created, too. */
    void (*release)(struct kernel_ctx *k, struct attention_layer *a);
    /* Frees the object; what bind_work placed belongs to the decoder. */
    void (*release_work)(struct attention_work *w);

    /* ---- before the first step ---- */

    /* Fills in what attention decides: the numbers of lists and the shape of the KV pool. */
    void (*limits)(const struct model *m, struct kernel_limits *l);
    /* Rows of a step that are computed in one piece, as a captured step must be; SIZE_MAX: all. */
    size_t (*rows_at_once)(const struct model *m);
    /* As `lists`, for a step that is captured. */
    int32_t (*capture_lists)(struct attention_work *w, struct attn_list *lists);
    /* The captured step has this many rows. */
    void (*capture_rows)(struct attention_work *w, size_t n_rows);

    /* ---- step ---- */

    /* Writes lists of its own for this step, which the step's upload must include, and keeps
     * `lists`, which has space for max_rows + 1. Returns how many; 0: the list of all sequences
     * is enough. */
    int32_t (*lists)(const struct model *m, const struct model_batch *b, struct attention_work *w,
                     struct attn_list *lists);
    /* s->x [R, H] += attention(norm(s->x)), after adding K and V of all rows to the pool. */
    void (*forward)(const struct decoder_step *s, const struct attention_layer *a,
                    const struct attention_work *w, const float *norm, uint32_t i_layer);
};

extern const struct attention_ops attention_gqa_ops, attention_mla_ops;

#endif
