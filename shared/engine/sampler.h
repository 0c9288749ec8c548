/* sampler.h - logits to a token: penalties, temperature, min_p, top_k, top_p, seeded draw,
 * logprobs.
 *
 * The order of operations is vLLM V1's: logprobs of the unchanged logits; allowed-token mask;
 * min_tokens (eos and stop ids excluded); logit_bias; repetition, frequency, presence penalty;
 * temperature (under 1e-5: first maximum); min_p; top_k; top_p; draw. The draw for output token i
 * of a request is a function of (seed, i) alone (base/rng.h).
 *
 * Thread: engine, or one compute thread when the context's pool is of one thread
 * (sampler_batch.h). A sampler's scratch is for one call at a time. */
#ifndef BATON_ENGINE_SAMPLER_H
#define BATON_ENGINE_SAMPLER_H

#include "kernels/backend.h"
#include "shared/base/sampling.h"
#include "shared/base/status.h"

struct sampler;

/* `kernels` is borrowed until sampler_free. */
struct sampler *sampler_create(uint32_t n_vocab, struct kernel_ctx *kernels);
void sampler_free(struct sampler *s);

struct sampler_input {
    const float *logits; /* [n_vocab], not changed */
    float lse;           /* log-sum-exp of logits */
    const struct sampling_params *params;
    const int32_t *tokens; /* prompt then output so far */
    uint32_t n_tokens, n_prompt;
    const int32_t *eos; /* the model's end tokens */
    uint32_t n_eos;
};

/* Chooses the next token; out->id is always set, the rest when params ask for logprobs (else 0). */
int32_t sampler_sample(struct sampler *s, const struct sampler_input *in,
                       struct token_logprobs *out);
/* Logprob entry of a given token (prompt logprobs). */
void sampler_logprobs(struct sampler *s, const float *logits, float lse, int32_t id, int32_t n_top,
                      struct token_logprobs *out);

#endif
