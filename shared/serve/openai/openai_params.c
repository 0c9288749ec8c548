/* openai_params.c - see openai_params.h. Thread: a worker. */
#include "shared/serve/openai/openai_params.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/hash/hash.h"

enum { COMPLETION_TOKENS = 16 /* OpenAI's default of max_tokens for completions */ };
/* Added to the logits of forbidden tokens. It is finite, so that a row in which all tokens are
 * forbidden still has a best one. */
static const float BIAS_FORBID = -1e9f;

/* ---- refused members ---- */

static const struct {
    const char *name, *why;
} REFUSED[] = {
    { "guided_json", "structured output is not supported by this server yet" },
    { "guided_regex", "structured output is not supported by this server yet" },
    { "guided_choice", "structured output is not supported by this server yet" },
    { "guided_grammar", "structured output is not supported by this server yet" },
    { "guided_whitespace_pattern", "structured output is not supported by this server yet" },
    { "structural_tag", "structured output is not supported by this server yet" },
    { "structured_outputs", "structured output is not supported by this server yet" },
    { "grammar", "structured output is not supported by this server yet" },
    { "functions", "it is the old form of tools; use tools and tool_choice" },
    { "chat_template",
      "a chat template is chosen by the operator of the server, not by a request" },
    { "bad_words", "it is not supported; bad_words_token_ids and logit_bias are" },
    { "allowed_token_ids", "it is not supported; logit_bias is" },
    { "logits_processors", "it is not supported" },
    { "logits_processors_args", "it is not supported" },
    { "use_beam_search", "beam search is not supported" },
    { "suffix", "it is not supported by this model" },
    { "temp_scaled_logprobs", "logprobs are those of the untouched logits" },
    { "top_p_normalized_logprobs", "logprobs are those of the untouched logits" },
    { "include_draft_logprobs", "it is not supported" },
    { "disable_chat_template", "it is not supported; send the text to /v1/completions" },
    { "reasoning_max_tokens", "it is not supported" },
    { "completion_token_ids",
      "it is not supported; append the ids to the prompt of /v1/completions" },
    { "audio", "this model takes and gives text only" },
    { "web_search_options", "it is not supported" },
    { "mm_processor_kwargs", "this model takes text only" },
    { "mm_hashes", "this model takes text only" },
};

/* Members that are null, false, "", [] or {} are accepted: they ask for nothing. */
static bool is_neutral(const cJSON *v)
{
    if (!v || cJSON_IsNull(v) || cJSON_IsFalse(v)) return true;
    if (cJSON_IsString(v)) return v->valuestring[0] == 0;
    return (cJSON_IsArray(v) || cJSON_IsObject(v)) && !v->child;
}

enum status openai_check_refused(const cJSON *o, struct err *err)
{
    for (size_t i = 0; i < COUNT_OF(REFUSED); i++)
        if (!is_neutral(json_member(o, REFUSED[i].name)))
            return err_field(err, ERR_UNSUPPORTED, REFUSED[i].name, "%s cannot be used here: %s",
                             REFUSED[i].name, REFUSED[i].why);
    return OK;
}

static enum status check_response_format(const cJSON *o, struct err *err)
{
    const cJSON *f = json_member(o, "response_format");
    if (!f) return OK;
    const cJSON *type = json_member(f, "type");
    if (!cJSON_IsString(type))
        return err_field(err, ERR_INVALID, "response_format",
                         "response_format must be an object with a member type");
    if (strcmp(type->valuestring, "text") == 0) return OK;
    return err_field(err, ERR_UNSUPPORTED, "response_format",
                     "response_format of type '%.40s' cannot be used here: structured output is "
                     "not supported by this server yet",
                     type->valuestring);
}

static enum status check_modalities(const cJSON *o, struct err *err)
{
    const cJSON *list = json_member(o, "modalities"), *m;
    cJSON_ArrayForEach (m, list)
        if (!cJSON_IsString(m) || strcmp(m->valuestring, "text") != 0)
            return err_field(err, ERR_UNSUPPORTED, "modalities",
                             "modalities may only be [\"text\"]: this model gives text only");
    return OK;
}

/* ---- numbers ---- */

static const struct {
    const char *name;
    double min, max;
    size_t offset;
} FLOATS[] = {
    { "temperature", 0, 2, offsetof(struct sampling_params, temperature) },
    { "top_p", 0, 1, offsetof(struct sampling_params, top_p) },
    { "min_p", 0, 1, offsetof(struct sampling_params, min_p) },
    { "presence_penalty", -2, 2, offsetof(struct sampling_params, presence_penalty) },
    { "frequency_penalty", -2, 2, offsetof(struct sampling_params, frequency_penalty) },
    { "repetition_penalty", 0.01, 100, offsetof(struct sampling_params, repetition_penalty) },
};

static void set_defaults(const struct serve *s, bool chat, struct openai_params *p)
{
    const struct serve_defaults *d = &s->o.defaults;
    struct sampling_params *q = &p->sampling;
    q->temperature = isfinite(d->temperature) ? (float)d->temperature : 1;
    q->top_p = isfinite(d->top_p) ? (float)d->top_p : 1;
    q->min_p = isfinite(d->min_p) ? (float)d->min_p : 0;
    q->repetition_penalty = isfinite(d->repetition_penalty) && d->repetition_penalty > 0
                                ? (float)d->repetition_penalty
                                : 1;
    q->top_k = d->top_k > 0 && d->top_k <= INT32_MAX ? (int32_t)d->top_k : 0;
    q->max_tokens = chat ? UINT32_MAX : COMPLETION_TOKENS;
    p->n = 1;
    p->n_logprobs = p->n_prompt_logprobs = -1;
    p->truncate = -1;
    p->skip_special = true;
    p->add_special = !chat;
    p->include_reasoning = true;
}

static enum status parse_top_k(const cJSON *o, struct sampling_params *q, struct err *err)
{
    int64_t top_k = q->top_k;
    TRY(json_get_i64(o, "top_k", -1, INT32_MAX, &top_k, err));
    q->top_k = top_k > 0 ? (int32_t)top_k : 0;
    return OK;
}

static enum status parse_floats(const struct serve *s, const cJSON *o, struct sampling_params *q,
                                struct err *err)
{
    for (size_t i = 0; i < COUNT_OF(FLOATS); i++) {
        double v = NAN, max = FLOATS[i].max;
        if (FLOATS[i].offset == offsetof(struct sampling_params, temperature) &&
            s->o.any_temperature)
            max = OPENAI_TEMPERATURE_MAX;
        TRY(json_get_f64(o, FLOATS[i].name, FLOATS[i].min, max, &v, err));
        if (isnan(v)) continue;
        float f = (float)v;
        memcpy((char *)q + FLOATS[i].offset, &f, sizeof f);
    }
    return parse_top_k(o, q, err);
}

static enum status parse_seed(const cJSON *o, struct openai_params *p, struct err *err)
{
    int64_t seed = 0;
    p->seed_set = json_member(o, "seed") != NULL;
    TRY(json_get_i64(o, "seed", INT64_MIN, INT64_MAX, &seed, err));
    p->sampling.seed = (uint64_t)seed;
    return OK;
}

uint32_t openai_limit_answer(const struct serve *s, uint32_t n_tokens)
{
    return s->o.max_dec_len && n_tokens > s->o.max_dec_len ? s->o.max_dec_len : n_tokens;
}

enum status openai_check_answer_limit(const struct serve *s, const char *name, uint32_t n_tokens,
                                      struct err *err)
{
    if (openai_limit_answer(s, n_tokens) == n_tokens) return OK;
    return err_field(err, ERR_INVALID, name,
                     "%s is %u, but this server gives answers of at most %u tokens (MAX_DEC_LEN, "
                     "--max-dec-len)",
                     name, n_tokens, s->o.max_dec_len);
}

static enum status parse_lengths(const struct serve *s, const cJSON *o, bool chat,
                                 struct openai_params *p, struct err *err)
{
    /* max_dec_len is FastDeploy's older name. */
    static const char *const names[] = { "max_tokens", "max_completion_tokens",
                                         "response_max_tokens", "max_dec_len" };
    struct sampling_params *q = &p->sampling;
    /* max_tokens 0 is valid only when there is something else to return. */
    bool zero = (!chat && p->echo) || p->n_prompt_logprobs >= 0;
    int64_t max = -1, min = 0, response = -1;
    const char *name = names[0];
    TRY(json_get_i64(o, names[3], zero ? 0 : 1, UINT32_MAX - 1, &max, err));
    TRY(json_get_i64(o, names[0], zero ? 0 : 1, UINT32_MAX - 1, &max, err));
    if (json_member(o, names[1])) name = names[1];
    TRY(json_get_i64(o, names[1], zero ? 0 : 1, UINT32_MAX - 1, &max, err));
    TRY(json_get_i64(o, names[2], 1, UINT32_MAX - 1, &response, err));
    p->max_tokens_set = max >= 0;
    if (max >= 0) q->max_tokens = (uint32_t)max;
    if (p->max_tokens_set) TRY(openai_check_answer_limit(s, name, q->max_tokens, err));
    q->max_tokens = openai_limit_answer(s, q->max_tokens);
    if (response >= 0 && response < q->max_tokens) q->max_tokens = (uint32_t)response;
    TRY(json_get_i64(o, "min_tokens", 0, s->o.max_model_len, &min, err));
    q->min_tokens = (uint32_t)min;
    TRY(openai_check_answer_limit(s, "min_tokens", q->min_tokens, err));
    if (q->min_tokens > q->max_tokens)
        return err_field(err, ERR_INVALID, "min_tokens",
                         "min_tokens is %u, but must be from 0 to %s, which is %u", q->min_tokens,
                         name, q->max_tokens);
    return OK;
}

static enum status parse_n(const struct serve *s, const cJSON *o, struct openai_params *p,
                           struct err *err)
{
    int64_t n = 1, best_of = -1;
    TRY(json_get_i64(o, "n", 1, s->max_n, &n, err));
    TRY(json_get_i64(o, "best_of", 1, s->max_n, &best_of, err));
    if (best_of >= 0 && best_of != n)
        return err_field(err, ERR_UNSUPPORTED, "best_of",
                         "best_of is %d, but must be equal to n, which is %d", (int)best_of,
                         (int)n);
    p->n = (uint32_t)n;
    return OK;
}

/* ---- logprobs ---- */

static enum status parse_logprobs(const struct serve *s, const cJSON *o, bool chat,
                                  struct openai_params *p, struct err *err)
{
    int64_t top = 0, n = -1, prompt = -1;
    bool on = false;
    if (chat) {
        TRY(json_get_bool(o, "logprobs", &on, err));
        TRY(json_get_i64(o, "top_logprobs", 0, s->max_logprobs, &top, err));
        if (top > 0 && !on)
            return err_field(err, ERR_INVALID, "top_logprobs",
                             "top_logprobs can only be used when logprobs is true");
        p->n_logprobs = on ? (int32_t)top : -1;
    } else {
        TRY(json_get_i64(o, "logprobs", 0, s->max_logprobs, &n, err));
        p->n_logprobs = (int32_t)n;
    }
    TRY(json_get_i64(o, "prompt_logprobs", 0, s->max_logprobs, &prompt, err));
    if (prompt >= 0 && p->stream)
        return err_field(err, ERR_INVALID, "prompt_logprobs",
                         "prompt_logprobs is not available when stream is true");
    p->n_prompt_logprobs = (int32_t)prompt;
    p->sampling.n_logprobs = p->n_logprobs > p->n_prompt_logprobs ? p->n_logprobs
                                                                  : p->n_prompt_logprobs;
    return OK;
}

/* ---- stops and biases ---- */

static enum status add_stop(const cJSON *v, const char *name, struct arena *arena,
                            struct openai_params *p, struct err *err)
{
    if (!cJSON_IsString(v)) return json_refuse(v, name, "a string or an array of strings", err);
    size_t n = strlen(v->valuestring);
    if (n == 0)
        return err_field(err, ERR_INVALID, name, "%s must not contain an empty string", name);
    if (n > STOP_STRING_MAX)
        return err_field(err, ERR_INVALID, name,
                         "a stop string has %zu bytes, but at most %d are possible", n,
                         STOP_STRING_MAX);
    if (p->n_stops == DETOKENIZER_STOPS_MAX)
        return err_field(err, ERR_INVALID, name, "%s has more than %d strings", name,
                         DETOKENIZER_STOPS_MAX);
    p->stops[p->n_stops++] = (struct str){ arena_strndup(arena, v->valuestring, n), n };
    return OK;
}

enum status openai_parse_stop_strings(const cJSON *o, const char *name, struct arena *arena,
                                      struct openai_params *p, struct err *err)
{
    const cJSON *stop = json_member(o, name), *v;
    if (!stop) return OK;
    if (!cJSON_IsArray(stop)) return add_stop(stop, name, arena, p, err);
    cJSON_ArrayForEach (v, stop) TRY(add_stop(v, name, arena, p, err));
    return OK;
}

static enum status parse_stops(const struct serve *s, const cJSON *o, struct arena *arena,
                               struct openai_params *p, struct err *err)
{
    const cJSON *ids = json_member(o, "stop_token_ids");
    struct sampling_params *q = &p->sampling;
    TRY(openai_parse_stop_strings(o, "stop", arena, p, err));
    if (ids) {
        int32_t *list = NULL;
        size_t n = 0;
        TRY(openai_parse_ids(s, ids, "stop_token_ids", NULL, &list, &n, err));
        bool fits = n <= SAMPLER_STOP_IDS_MAX;
        for (size_t i = 0; fits && i < n; i++) q->stop_ids[q->n_stop_ids++] = list[i];
        mem_free(list);
        if (!fits)
            return err_field(err, ERR_INVALID, "stop_token_ids",
                             "stop_token_ids has %zu ids, but at most %d are possible", n,
                             SAMPLER_STOP_IDS_MAX);
    }
    TRY(json_get_bool(o, "include_stop_str_in_output", &p->include_stop, err));
    return json_get_bool(o, "ignore_eos", &q->ignore_eos, err);
}

static enum status parse_bias_entry(const struct serve *s, const cJSON *v, struct logit_bias *out,
                                    struct err *err)
{
    int64_t id;
    char shown[JSON_SHOWN_MAX];
    if (str_to_i64(str_of(v->string), &id) != OK || id < 0 || id >= s->o.n_vocab)
        return err_field(err, ERR_INVALID, "logit_bias",
                         "logit_bias has the key '%.32s', but keys must be token ids from 0 to %u",
                         v->string, s->o.n_vocab - 1);
    if (!cJSON_IsNumber(v) || !(v->valuedouble >= -100 && v->valuedouble <= 100))
        return err_field(err, ERR_INVALID, "logit_bias",
                         "logit_bias of token %d is %s, but must be a number from -100 to 100",
                         (int)id, json_show(v, shown));
    *out = (struct logit_bias){ (int32_t)id, (float)v->valuedouble };
    return OK;
}

static enum status parse_bias(const struct serve *s, const cJSON *o, struct arena *arena,
                              struct sampling_params *q, struct err *err)
{
    const cJSON *map = json_member(o, "logit_bias"), *bad = json_member(o, "bad_words_token_ids"),
                *v;
    int32_t *ids = NULL;
    size_t n_ids = 0, n = 0;
    if (map && !cJSON_IsObject(map))
        return json_refuse(map, "logit_bias", "an object from token ids to numbers", err);
    int n_map = map ? cJSON_GetArraySize(map) : 0;
    if (n_map > SAMPLER_BIAS_MAX)
        return err_field(err, ERR_INVALID, "logit_bias",
                         "logit_bias has %d entries, but at most %d are possible", n_map,
                         SAMPLER_BIAS_MAX);
    struct logit_bias *bias = ARENA_ARRAY(arena, struct logit_bias, SAMPLER_BIAS_MAX);
    cJSON_ArrayForEach (v, map) TRY(parse_bias_entry(s, v, &bias[n++], err));
    if (bad) TRY(openai_parse_ids(s, bad, "bad_words_token_ids", NULL, &ids, &n_ids, err));
    bool fits = n + n_ids <= SAMPLER_BIAS_MAX;
    for (size_t i = 0; fits && i < n_ids; i++)
        bias[n++] = (struct logit_bias){ ids[i], BIAS_FORBID };
    mem_free(ids);
    if (!fits)
        return err_field(err, ERR_INVALID, "bad_words_token_ids",
                         "together with logit_bias more than %d tokens are biased",
                         SAMPLER_BIAS_MAX);
    q->bias = bias;
    q->n_bias = (uint32_t)n;
    return OK;
}

/* ---- other members ---- */

static enum status parse_stream(const cJSON *o, struct openai_params *p, struct err *err)
{
    const cJSON *options = json_member(o, "stream_options");
    TRY(json_get_bool(o, "stream", &p->stream, err));
    if (!options) return OK;
    if (!cJSON_IsObject(options)) return json_refuse(options, "stream_options", "an object", err);
    if (!p->stream)
        return err_field(err, ERR_INVALID, "stream_options",
                         "stream_options can only be used when stream is true");
    TRY(json_get_bool(options, "include_usage", &p->include_usage, err));
    TRY(json_get_bool(options, "continuous_usage_stats", &p->continuous_usage, err));
    p->continuous_usage = p->continuous_usage && p->include_usage;
    return OK;
}

static enum status parse_switches(const struct serve *s, const cJSON *o, bool chat,
                                  struct openai_params *p, struct err *err)
{
    TRY(json_get_bool(o, "echo", &p->echo, err));
    if (chat && p->echo)
        return err_field(err, ERR_UNSUPPORTED, "echo",
                         "echo can only be used with /v1/completions");
    TRY(json_get_bool(o, "skip_special_tokens", &p->skip_special, err));
    TRY(json_get_bool(o, "include_reasoning", &p->include_reasoning, err));
    TRY(json_get_bool(o, "return_token_ids", &p->return_token_ids, err));
    TRY(json_get_bool(o, "return_tokens_as_token_ids", &p->tokens_as_ids, err));
    TRY(json_get_bool(o, "add_special_tokens", &p->add_special, err));
    TRY(json_get_bool(o, "return_trace", &p->trace, err));
    TRY(json_get_i64(o, "truncate_prompt_tokens", -1, s->o.max_model_len, &p->truncate, err));
    if (p->truncate == 0)
        return err_field(err, ERR_INVALID, "truncate_prompt_tokens",
                         "truncate_prompt_tokens is 0, but must be from 1 to %u",
                         s->o.max_model_len);
    if (p->truncate < 0 && json_member(o, "truncate_prompt_tokens"))
        p->truncate = s->o.max_model_len;
    return OK;
}

static enum status parse_priority(const cJSON *o, struct openai_params *p, struct err *err)
{
    int64_t priority = 0;
    TRY(json_get_i64(o, "priority", INT32_MIN, INT32_MAX, &priority, err));
    p->priority = (int32_t)priority;
    return OK;
}

static enum status parse_name(const cJSON *o, struct openai_params *p, struct err *err)
{
    const char *name = NULL;
    TRY(json_get_str(o, "request_id", &name, err));
    if (name && serve_name_is_good(str_of(name))) snprintf(p->name, sizeof p->name, "%s", name);
    return OK;
}

static enum status parse_salt(const cJSON *o, struct openai_params *p, struct err *err)
{
    const char *salt = NULL;
    TRY(json_get_str(o, "cache_salt", &salt, err));
    if (!salt) return OK;
    if (!salt[0]) return err_field(err, ERR_INVALID, "cache_salt", "cache_salt must not be empty");
    p->cache_salt = hash_64(salt, strlen(salt), 0);
    if (p->cache_salt == 0) p->cache_salt = 1; /* 0 means no salt */
    return OK;
}

enum status openai_parse_extensions(const cJSON *o, struct openai_params *p, struct err *err)
{
    struct sampling_params *q = &p->sampling;
    double min_p = (double)q->min_p;
    TRY(json_get_f64(o, "min_p", 0, 1, &min_p, err));
    q->min_p = (float)min_p;
    TRY(parse_top_k(o, q, err));
    TRY(json_get_bool(o, "ignore_eos", &q->ignore_eos, err));
    TRY(json_get_bool(o, "return_trace", &p->trace, err));
    TRY(parse_priority(o, p, err));
    return parse_salt(o, p, err);
}

enum status openai_params_parse(const struct serve *s, const cJSON *o, bool chat,
                                struct arena *arena, struct openai_params *p, struct err *err)
{
    TRY(openai_check_refused(o, err));
    TRY(check_response_format(o, err));
    TRY(check_modalities(o, err));
    set_defaults(s, chat, p);
    TRY(openai_tools_parse(s, o, chat, arena, &p->tools, err));
    TRY(parse_stream(o, p, err));
    TRY(parse_switches(s, o, chat, p, err));
    TRY(parse_floats(s, o, &p->sampling, err));
    TRY(parse_seed(o, p, err));
    TRY(parse_n(s, o, p, err));
    TRY(parse_logprobs(s, o, chat, p, err));
    TRY(parse_lengths(s, o, chat, p, err));
    TRY(parse_stops(s, o, arena, p, err));
    TRY(parse_bias(s, o, arena, &p->sampling, err));
    TRY(parse_priority(o, p, err));
    TRY(parse_name(o, p, err));
    return parse_salt(o, p, err);
}

enum status openai_check_model(const struct serve *s, const cJSON *o, struct err *err)
{
    const char *model = NULL;
    TRY(json_get_str(o, "model", &model, err));
    if (!model || serve_has_model(s, model)) return OK;
    return err_field(err, ERR_NOT_FOUND, "model",
                     "The model `%.200s` does not exist; this server has `%.200s`.", model,
                     s->names[0]);
}

static enum status not_an_id(const struct serve *s, const char *name, size_t i, double v,
                             struct err *err)
{
    return err_field(err, ERR_INVALID, name,
                     "%s[%zu] is %.17g, but token ids are whole numbers from 0 to %u", name, i, v,
                     s->o.n_vocab - 1);
}

static enum status check_ids(const struct serve *s, const int32_t *ids, size_t n, const char *name,
                             struct err *err)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= s->o.n_vocab)
            return not_an_id(s, name, i, ids[i], err);
    return OK;
}

enum status openai_parse_ids(const struct serve *s, const cJSON *list, const char *name,
                             struct json_packed *packed, int32_t **ids, size_t *n, struct err *err)
{
    const cJSON *v;
    if (!cJSON_IsArray(list)) return json_refuse(list, name, "an array of token ids", err);
    if (packed && json_packed_take(packed, list, ids, n)) {
        enum status st = check_ids(s, *ids, *n, name, err);
        if (st == OK) return OK;
        mem_free(*ids);
        *ids = NULL;
        return st;
    }
    size_t count = (size_t)cJSON_GetArraySize(list), i = 0;
    int32_t *out = mem_try_calloc(count ? count : 1, sizeof *out);
    if (!out) return err_field(err, ERR_NOMEM, name, "not enough memory for %zu token ids", count);
    cJSON_ArrayForEach (v, list) {
        double d = cJSON_IsNumber(v) ? v->valuedouble : -1;
        if (!(d >= 0 && d < (double)s->o.n_vocab && d == floor(d))) {
            mem_free(out);
            if (!cJSON_IsNumber(v))
                return err_field(err, ERR_INVALID, name, "%s[%zu] is not a token id", name, i);
            return not_an_id(s, name, i, v->valuedouble, err);
        }
        out[i++] = (int32_t)d;
    }
    *ids = out;
    *n = count;
    return OK;
}
