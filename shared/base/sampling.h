/* sampling.h - how a client wants tokens chosen, and what is known about a chosen token.
 *
 * Plain values: the API server fills them, cluster messages carry them, the engine's sampler
 * applies them. They live here because those three layers must not include each other.
 * Thread: any (values). */
#ifndef BATON_BASE_SAMPLING_H
#define BATON_BASE_SAMPLING_H

#include <stdbool.h>
#include <stdint.h>

enum { SAMPLER_LOGPROBS_MAX = 20, SAMPLER_STOP_IDS_MAX = 64, SAMPLER_BIAS_MAX = 1024 };

struct logit_bias {
    int32_t id;
    float bias;
};

struct sampling_params {
    float temperature, top_p, min_p;
    int32_t top_k; /* <= 0: off */
    float presence_penalty, frequency_penalty, repetition_penalty;
    uint64_t seed;                   /* always set: a missing one is made from the request's name */
    uint32_t max_tokens, min_tokens; /* output tokens */
    bool ignore_eos;
    int32_t n_logprobs; /* -1: none; 0: the chosen token; n: also the best n */
    uint32_t n_stop_ids;
    int32_t stop_ids[SAMPLER_STOP_IDS_MAX]; /* the request's; the engine adds the model's eos */
    uint32_t n_bias;
    const struct logit_bias *bias; /* [n_bias], owned with the request */
    const uint64_t *allowed;       /* structured output: a bit per vocabulary id; or NULL */
};

/* Does the choice depend on earlier tokens? */
static inline bool sampling_has_penalties(const struct sampling_params *p)
{
    return p->presence_penalty != 0 || p->frequency_penalty != 0 ||
           (p->repetition_penalty != 1 && p->repetition_penalty > 0);
}

enum finish_reason {
    FINISH_NONE,
    FINISH_STOP, /* end token, stop id or stop string */
    FINISH_LENGTH,
    FINISH_PREFILLED,
    FINISH_ERROR
};

struct token_logprobs {
    int32_t id;              /* the token */
    float logprob;           /* of the untouched logits */
    int32_t rank;            /* 1-based */
    enum finish_reason ends; /* on the last token: why it ended; else FINISH_NONE */
    uint32_t n_top;
    struct {
        int32_t id;
        float logprob;
    } top[SAMPLER_LOGPROBS_MAX]; /* best first */
};

#endif
