/* sampler_batch.h - the sampler (sampler.h) for all rows of a step: each row on one compute thread,
 * several side by side.
 *
 * A row's result depends on nothing but the row, so it is the same as from sampler_sample and
 * sampler_logprobs called one by one. Life cycle: one per engine, create .. free. Thread: engine;
 * fans out over the context's pool. */
#ifndef BATON_ENGINE_SAMPLER_BATCH_H
#define BATON_ENGINE_SAMPLER_BATCH_H

#include "shared/engine/sampler.h"

struct sampler_row {
    struct sampler_input in; /* of a row to be scored only logits, lse and params->n_logprobs
                              * count */
    int32_t score;           /* the token whose logprobs are asked for; -1: choose one */
    struct token_logprobs out;
};

struct sampler_batch;

/* `kernels` is borrowed until sampler_batch_free. */
enum status sampler_batch_create(uint32_t n_vocab, struct kernel_ctx *kernels,
                                 struct sampler_batch **out, struct err *err) MUST_CHECK;
void sampler_batch_free(struct sampler_batch *b);
/* Fills `out` of every row. */
void sampler_batch_run(struct sampler_batch *b, struct sampler_row *rows, size_t n);

#endif
