/* decoder.h - the pre-norm decoder that every family here is:
 *
 *     x = E[token]
 *     per layer:  x += attention(norm(x))
 *                 x += ffn(norm(x))
 *     logits = Whead norm(x)
 *
 * Life cycle: decoder_plan checks the weights and says what all of it takes; decoder_pack makes it;
 * decoder_free. */
#ifndef BATON_MODEL_DECODER_H
#define BATON_MODEL_DECODER_H

#include "shared/model/model.h"

/* m->decoder from m->weights, nothing packed yet; fills m->weight_bytes, buffer_bytes and
 * rope_bytes. */
enum status decoder_plan(struct model *m, struct err *err) MUST_CHECK;
/* Are packed copies of these weights kept in o->weight_cache_folder? */
bool decoder_uses_weight_cache(const struct model *m, const struct model_options *o);
struct weight_cache_key;
/* Pack, or take from o->weight_cache_folder what `key` names, and allocate. */
enum status decoder_pack(struct model *m, const struct model_options *o,
                         const struct weight_cache_key *key, struct err *err) MUST_CHECK;
void decoder_free(struct model *m);
/* True: the device chooses the tokens, and may not be done yet. False: logits and KV are there. */
bool decoder_forward(struct model *m, const struct model_batch *b);
/* Memory for all steps, and recordings of the usual ones: model_prepare, of kernels that can. */
enum status decoder_prepare(struct model *m, const struct model_prepare_args *s,
                            struct err *err) MUST_CHECK;

#endif
