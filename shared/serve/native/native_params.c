/* native_params.c - the members of a native request, with their ranges and defaults, into the
 * parameters that all requests have. Thread: a worker. */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "shared/base/hash/hash.h"
#include "shared/serve/completion_request.h"
#include "shared/serve/native/native.h"

enum {
    PENALTY_MAX = 100, /* as nodes tell each other */
    EOS_IDS_MAX = 1,
    CONTEXT_WITHOUT_MAX = 800 /* tokens left for an answer without max_dec_len (truncation) */
};
static const double PENALTY_SCORE_MIN = 0.01, TOPP = 0.7, TEMPERATURE = 0.95;

/* Members of OpenAI's API that would change the answer, which a client may take for native ones. */
static const struct {
    const char *name, *instead; /* instead NULL: there is nothing like it */
    int neutral;                /* the number that asks for nothing; -1: none does */
} OPENAI_ONLY[] = {
    { "prompt", "text", -1 },
    { "max_completion_tokens", "max_dec_len", -1 },
    { "min_tokens", "min_dec_len", 0 },
    { "frequency_penalty", "frequency_score", 0 },
    { "presence_penalty", "presence_score", 0 },
    { "repetition_penalty", "penalty_score", 1 },
    { "stop", "stop_sequences", -1 },
    { "stop_token_ids", "eos_token_ids", -1 },
    { "n", NULL, 1 },
    { "best_of", NULL, 1 },
    { "logprobs", NULL, -1 },
    { "prompt_logprobs", NULL, -1 },
    { "tools", NULL, -1 },
    { "logit_bias", NULL, -1 },
    { "response_format", NULL, -1 },
    { "echo", NULL, -1 },
};

/* What asks for nothing: null, false, "", [], {} and that number. */
static bool is_neutral(const cJSON *v, int neutral)
{
    if (!v || cJSON_IsFalse(v)) return true;
    if (cJSON_IsNumber(v)) return v->valuedouble == neutral;
    if (cJSON_IsString(v)) return v->valuestring[0] == 0;
    return (cJSON_IsArray(v) || cJSON_IsObject(v)) && !v->child;
}

static enum status check_openai_only(const cJSON *o, struct err *err)
{
    for (size_t i = 0; i < COUNT_OF(OPENAI_ONLY); i++) {
        const char *name = OPENAI_ONLY[i].name, *instead = OPENAI_ONLY[i].instead;
        if (is_neutral(json_member(o, name), OPENAI_ONLY[i].neutral)) continue;
        if (instead)
            return err_field(err, ERR_UNSUPPORTED, name,
                             "%s is of OpenAI's API; a request in FastDeploy's native form has %s "
                             "for it",
                             name, instead);
        return err_field(err, ERR_UNSUPPORTED, name,
                         "%s is of OpenAI's API, and a request in FastDeploy's native form has "
                         "nothing like it; with \"response_type\": \"openai\" the request is one "
                         "of OpenAI's",
                         name);
    }
    return OK;
}

/* Two names of one member. ERR_INVALID: both are there. */
static enum status pick(const cJSON *o, const char *a, const char *b, const char **name,
                        struct err *err)
{
    *name = json_member(o, b) ? b : a;
    if (!json_member(o, a) || !json_member(o, b)) return OK;
    return err_field(err, ERR_INVALID, a, "%s and %s are the same; give only one of them", a, b);
}

static enum status parse_response_type(const cJSON *o, struct err *err)
{
    const char *type = NULL;
    TRY(json_get_str(o, "response_type", &type, err));
    if (!type || strcasecmp(type, "fastdeploy") == 0) return OK;
    return err_field(err, ERR_INVALID, "response_type",
                     "response_type is '%.40s', but must be fastdeploy or openai", type);
}

static enum status parse_float(const cJSON *o, const char *name, double min, double max, double def,
                               float *out, struct err *err)
{
    double v = def;
    TRY(json_get_f64(o, name, min, max, &v, err));
    *out = (float)v;
    return OK;
}

static enum status parse_sampling(const cJSON *o, struct openai_params *p, struct err *err)
{
    struct sampling_params *q = &p->sampling;
    const char *topp;
    TRY(pick(o, "topp", "top_p", &topp, err));
    TRY(parse_float(o, topp, 0, 1, TOPP, &q->top_p, err));
    TRY(parse_float(o, "temperature", 0, OPENAI_TEMPERATURE_MAX, TEMPERATURE, &q->temperature,
                    err));
    TRY(parse_float(o, "penalty_score", PENALTY_SCORE_MIN, PENALTY_MAX, 1, &q->repetition_penalty,
                    err));
    TRY(parse_float(o, "frequency_score", -PENALTY_MAX, PENALTY_MAX, 0, &q->frequency_penalty,
                    err));
    return parse_float(o, "presence_score", -PENALTY_MAX, PENALTY_MAX, 0, &q->presence_penalty,
                       err);
}

static enum status parse_seed(const cJSON *o, struct openai_params *p, struct err *err)
{
    const char *name;
    int64_t seed = 0;
    TRY(pick(o, "infer_seed", "seed", &name, err));
    p->seed_set = json_member(o, name) != NULL;
    TRY(json_get_i64(o, name, INT64_MIN, INT64_MAX, &seed, err));
    p->sampling.seed = (uint64_t)seed;
    return OK;
}

/* max_dec_len has two more names, which give way to it. */
static enum status parse_lengths(const struct serve *s, const cJSON *o, struct openai_params *p,
                                 struct err *err)
{
    static const char *const names[] = { "max_dec_len", "seq_len", "max_tokens" };
    struct sampling_params *q = &p->sampling;
    int64_t max = -1, min = 1;
    const char *name = names[0];
    for (size_t i = COUNT_OF(names); i-- > 0;) {
        if (json_member(o, names[i])) name = names[i];
        TRY(json_get_i64(o, names[i], 1, UINT32_MAX - 1, &max, err));
    }
    TRY(json_get_i64(o, "min_dec_len", 1, UINT32_MAX - 1, &min, err));
    p->max_tokens_set = max >= 0;
    q->max_tokens = max >= 0 ? (uint32_t)max : UINT32_MAX;
    q->min_tokens = (uint32_t)min; /* of which the last may be the end of a stop sequence */
    p->stops_within_min = true;
    if (p->max_tokens_set) TRY(openai_check_answer_limit(s, name, q->max_tokens, err));
    TRY(openai_check_answer_limit(s, "min_dec_len", q->min_tokens, err));
    q->max_tokens = openai_limit_answer(s, q->max_tokens);
    if (q->min_tokens <= q->max_tokens) return OK;
    return err_field(err, ERR_INVALID, "min_dec_len",
                     "min_dec_len is %u, but must be from 1 to %s, which is %u", q->min_tokens,
                     name, q->max_tokens);
}

/* One id, alone or in an array; [null] is as none. */
static enum status parse_eos(const struct serve *s, const cJSON *o, struct openai_params *p,
                             struct err *err)
{
    const cJSON *v = json_member(o, "eos_token_ids");
    struct sampling_params *q = &p->sampling;
    if (cJSON_IsArray(v) && v->child && !v->child->next && cJSON_IsNull(v->child)) return OK;
    const cJSON *id = cJSON_IsArray(v) ? v->child : v;
    if (!id) return OK;
    if (cJSON_IsArray(v) && cJSON_GetArraySize(v) > EOS_IDS_MAX)
        return err_field(err, ERR_INVALID, "eos_token_ids",
                         "eos_token_ids has %d ids, but at most %d is possible; stop_sequences "
                         "takes more, as texts",
                         cJSON_GetArraySize(v), EOS_IDS_MAX);
    const double d = cJSON_IsNumber(id) ? id->valuedouble : -1;
    char shown[JSON_SHOWN_MAX];
    if (!(d >= 0 && d < s->o.n_vocab && d == (double)(int32_t)d))
        return err_field(err, ERR_INVALID, "eos_token_ids",
                         "eos_token_ids has %s, but must be a token id from 0 to %u, or an array "
                         "of one",
                         json_show(id, shown), s->o.n_vocab - 1);
    q->stop_ids[q->n_stop_ids++] = (int32_t)d;
    return OK;
}

/* The end of a long prompt is cut only where that is asked for: the document promises an error. */
static enum status parse_truncate(const struct serve *s, const cJSON *o, struct openai_params *p,
                                  struct err *err)
{
    const cJSON *v = json_member(o, "enable_text_truncate");
    const uint32_t max = s->o.max_model_len;
    int64_t on = cJSON_IsTrue(v);
    if (v && !cJSON_IsBool(v)) TRY(json_get_i64(o, "enable_text_truncate", 0, 1, &on, err));
    if (!on) return OK;
    uint32_t answer = p->max_tokens_set           ? p->sampling.max_tokens
                      : max > CONTEXT_WITHOUT_MAX ? CONTEXT_WITHOUT_MAX
                                                  : max / 2;
    p->truncate = answer < max ? max - answer : 1;
    return OK;
}

static enum status parse_req_id(const cJSON *o, struct completion_request *c, struct err *err)
{
    const char *id = NULL;
    struct openai_params *p = &c->p;
    TRY(json_get_str(o, "req_id", &id, err));
    if (!id) return OK;
    const struct str s = str_of(id);
    if (s.n == 0 || s.n > NATIVE_REQ_ID_MAX)
        return err_field(err, ERR_INVALID, "req_id",
                         "req_id has %zu bytes, but must have 1 to %d; without one the server "
                         "makes one",
                         s.n, NATIVE_REQ_ID_MAX);
    c->native->req_id = (struct str){ arena_strndup(&c->arena, s.p, s.n), s.n };
    if (serve_name_is_good(s)) {
        snprintf(p->name, sizeof p->name, "%s", id);
    } else { /* a name for headers and logs, which is a function of it */
        const struct hash128 h = hash_128(s.p, s.n);
        snprintf(p->name, sizeof p->name, "req-%016llx%016llx", (unsigned long long)h.hi,
                 (unsigned long long)h.lo);
    }
    return OK;
}

static enum status parse_answer(const cJSON *o, struct completion_request *c, struct err *err)
{
    struct native_request *n = c->native;
    int64_t timeout = NATIVE_TIMEOUT_S;
    TRY(json_get_bool(o, "stream", &c->p.stream, err));
    TRY(json_get_bool(o, "return_all_tokens", &n->return_all, err));
    TRY(json_get_bool(o, "return_usage", &n->return_usage, err));
    TRY(json_get_bool(o, "benchmark", &n->benchmark, err));
    TRY(json_get_i64(o, "timeout", 1, NATIVE_TIMEOUT_MAX_S, &timeout, err));
    n->timeout_s = (uint32_t)timeout;
    return OK;
}

enum status native_params_parse(struct completion_request *c, const cJSON *o, struct err *err)
{
    const struct serve *s = c->serve;
    struct openai_params *p = &c->p;
    p->n = 1;
    p->n_logprobs = p->n_prompt_logprobs = p->sampling.n_logprobs = -1;
    p->truncate = -1;
    p->skip_special = true;
    c->native = ARENA_NEW(&c->arena, struct native_request);
    TRY(parse_req_id(o, c, err));
    TRY(parse_response_type(o, err));
    TRY(openai_check_refused(o, err));
    TRY(check_openai_only(o, err));
    TRY(parse_answer(o, c, err));
    TRY(parse_sampling(o, p, err));
    TRY(parse_seed(o, p, err));
    TRY(parse_lengths(s, o, p, err));
    TRY(parse_eos(s, o, p, err));
    TRY(parse_truncate(s, o, p, err));
    TRY(openai_parse_stop_strings(o, "stop_sequences", &c->arena, p, err));
    return openai_parse_extensions(o, p, err);
}
