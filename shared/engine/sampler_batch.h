/* sampler_batch.h - samples all rows of a step in parallel, each row on one compute thread.
 *
 * A row's result depends on that row alone, so it equals that of sampler_sample or sampler_logprobs
 * called row by row. Life cycle: one per engine, create .. free.
 * Thread: engine; fans out over the context's compute pool. */
#ifndef BATON_ENGINE_SAMPLER_BATCH_H
#define BATON_ENGINE_SAMPLER_BATCH_H

#include "shared/engine/sampler.h"

struct sampler_row {
    struct sampler_input in; /* scoring uses only logits, lse and params->n_logprobs */
    int32_t score;           /* the token to score; -1: sample one */
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
