/* sample_ask.h - a request's parameters and tokens, as the card's sampler (sample.h) takes them. On the host; calls nothing of CUDA.
 *
 * Masks, biases, min_tokens and penalties become edits, at most one for a token of the vocabulary and one more for each further bias of the same
 * token. What comes out says first how much there is of it, and lies in the maker's memory until the next row: the caller copies it to where the card
 * reads, or samples on the host if there is no room.
 *
 *     sample_maker_make(m, &wish, &made);
 *     made.ask.edits = where made.edits will lie among the call's; if (made.n_words) made.ask.allowed = where made.allowed will
 *
 * Life cycle: one for all rows, create .. free. Thread: engine, one row at a time. */
#ifndef BATON_KERNELS_CUDA_SAMPLE_ASK_H
#define BATON_KERNELS_CUDA_SAMPLE_ASK_H

#include "kernels/cuda/sample.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What sampler_sample would be asked; with a score, sampler_logprobs. Borrowed for the call but for params->allowed, which `allowed` points to. */
struct sample_wish {
    const struct sampling_params *params;  /* n_bias at most SAMPLER_BIAS_MAX */
    const int32_t                *tokens;  /* prompt, then output so far */
    uint32_t                      n_tokens, n_prompt;
    const int32_t                *eos;     /* the model's end tokens */
    uint32_t                      n_eos;
    int32_t                       score;   /* >= 0: only logprobs of this token, of which params->n_logprobs counts; -1: choose one */
};

struct sample_made {
    struct sample_ask         ask;   /* `edits` is 0; `allowed` is 0, or -1 without a mask */
    const struct sample_edit *edits; /* [ask.n_edits] */
    const uint64_t           *allowed;
    size_t                    n_words; /* of allowed; 0: no mask */
    unsigned                  work;  /* enum sample_work: what the call must be able to */
};

struct sample_maker;

struct sample_maker *sample_maker_create(uint32_t n_vocab);
void                 sample_maker_free(struct sample_maker *m);
void                 sample_maker_make(struct sample_maker *m, const struct sample_wish *wish, struct sample_made *out);

#ifdef __cplusplus
}
#endif
#endif
