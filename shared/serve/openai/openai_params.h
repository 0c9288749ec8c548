/* openai_params.h - parses the members that chat and completions requests share, with defaults.
 *
 * Every value is checked against its range here, so that later code need not check it. A member
 * that would change the answer and is not supported is refused by name; unknown members are
 * ignored, as OpenAI's server does. Thread: a worker; reads only what is constant in `struct
 * serve`. */
#ifndef BATON_SERVE_OPENAI_OPENAI_PARAMS_H
#define BATON_SERVE_OPENAI_OPENAI_PARAMS_H

#include "shared/base/json/json_packed.h"
#include "shared/base/mem.h"
#include "shared/base/sampling.h"
#include "shared/serve/openai/openai_tools.h"
#include "shared/serve/serve_state.h"
#include "shared/text/output/detokenizer.h"

enum {
    STOP_STRING_MAX = 4096,      /* bytes */
    OPENAI_TEMPERATURE_MAX = 100 /* where any is allowed */
};

struct openai_params {
    /* max_tokens: when max_tokens_set; bias: in the arena; seed: without seed_set, once the request
     * has its name */
    struct sampling_params sampling;
    bool max_tokens_set, seed_set;
    uint32_t n;
    bool stream, include_usage, continuous_usage;
    struct str stops[DETOKENIZER_STOPS_MAX]; /* in the arena */
    size_t n_stops;
    bool include_stop, skip_special;
    bool stops_within_min; /* a stop string may end in token min_tokens, not only behind it */
    bool echo;
    bool include_reasoning;
    struct openai_tools tools;
    int32_t n_logprobs;        /* of output tokens: -1 none, 0 only the chosen one */
    int32_t n_prompt_logprobs; /* member prompt_logprobs: likewise */
    bool return_token_ids, tokens_as_ids;
    bool add_special;
    int64_t truncate; /* keep the last so many prompt tokens; -1: all */
    uint64_t cache_salt;
    bool trace;
    int32_t priority;
    char name[REQUEST_NAME_MAX + 1]; /* member request_id, "" when none */
};

enum status openai_params_parse(const struct serve *s, const cJSON *o, bool chat,
                                struct arena *arena, struct openai_params *out,
                                struct err *err) MUST_CHECK;
/* The parts of it that the native form shares. Members that would change the answer and are not
 * supported are refused. */
enum status openai_check_refused(const cJSON *o, struct err *err) MUST_CHECK;
/* Members that no form has by itself: min_p, top_k, ignore_eos, return_trace, priority,
 * cache_salt. */
enum status openai_parse_extensions(const cJSON *o, struct openai_params *p,
                                    struct err *err) MUST_CHECK;
/* Member `name`: a stop string, or an array of them. */
enum status openai_parse_stop_strings(const cJSON *o, const char *name, struct arena *arena,
                                      struct openai_params *p, struct err *err) MUST_CHECK;
/* ERR_INVALID: member `name` asks for more tokens than serve_options.max_dec_len. */
enum status openai_check_answer_limit(const struct serve *s, const char *name, uint32_t n_tokens,
                                      struct err *err) MUST_CHECK;
/* The smaller of n_tokens and that limit. */
uint32_t openai_limit_answer(const struct serve *s, uint32_t n_tokens);
/* Checks member `model`. ERR_NOT_FOUND: this node does not serve it. */
enum status openai_check_model(const struct serve *s, const cJSON *o, struct err *err) MUST_CHECK;
/* Parses an array of token ids of the vocabulary into a new array (mem_free). `name` is for errors;
 * `packed` (or NULL) may hold the ids of `list`. */
enum status openai_parse_ids(const struct serve *s, const cJSON *list, const char *name,
                             struct json_packed *packed, int32_t **ids, size_t *n,
                             struct err *err) MUST_CHECK;

#endif
