/* decoder.h - the pre-norm decoder that all families share:
 *
 *     x = E[token]
 *     per layer:  x += attention(norm(x))
 *                 x += ffn(norm(x))
 *     logits = Whead norm(x)
 *
 * decoder.c computes steps, decoder_load.c makes and frees what they need.
 * Life cycle: decoder_plan, decoder_pack, decoder_prepare, decoder_forward ..., decoder_free.
 * Thread: the engine thread for forward, the loading thread for the rest. */
#ifndef BATON_MODEL_DECODER_H
#define BATON_MODEL_DECODER_H

#include "shared/model/model.h"

/* Creates m->decoder, checks that m->weights has all tensors, and fills in m->weight_bytes,
 * buffer_bytes and rope_bytes. Packs nothing. */
enum status decoder_plan(struct model *m, struct err *err) MUST_CHECK;
/* Is the weight cache in o->weight_cache_folder used for this model? */
bool decoder_uses_weight_cache(const struct model *m, const struct model_options *o);
struct weight_cache_key;
/* Allocates, and packs the weights or maps them from the weight cache, where `key` names them. */
enum status decoder_pack(struct model *m, const struct model_options *o,
                         const struct weight_cache_key *key, struct err *err) MUST_CHECK;
void decoder_free(struct model *m);
/* As model_submit. */
bool decoder_forward(struct model *m, const struct model_batch *b);
/* Does the model have the tensors of a draft layer, in files of its own or in the model's? */
bool decoder_draft_is_there(const struct model *m);
/* As model_submit_draft. */
bool decoder_draft_forward(struct model *m, const struct model_draft *d);
/* As model_get_hidden. */
void decoder_get_hidden(struct model *m, uint32_t row, float *out);
/* Passes of the draft layer behind a step, at most; 0 without one. */
static inline uint32_t decoder_n_passes(const struct model *m)
{
    return m->max_draft_rows > 0 ? MODEL_DRAFT_PASSES_MAX : 0;
}
/* As model_fetch and model_fetch_drafts. */
void decoder_fetch(struct model *m, int parity, struct token_logprobs *out, uint32_t n);
const int32_t *decoder_fetch_drafts(struct model *m, int parity);
/* m->ep and m->experts, or m->gather, have changed: drops the steps that were captured with those
 * before, and captures them anew. Waits until the device has nothing to do. */
void decoder_capture_again(struct model *m);
/* As model_prepare. */
enum status decoder_prepare(struct model *m, const struct model_prepare_args *s,
                            struct err *err) MUST_CHECK;

#endif
