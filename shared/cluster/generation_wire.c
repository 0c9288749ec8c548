/* generation_wire.c - see generation_wire.h. Tokens are byte strings of little-endian int32, the
 * byte order of x86 and Arm (checked at compile time), so that a long prompt is one copy. */
#include "shared/cluster/generation_wire.h"

#include <math.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "token ids are copied as little-endian int32");

_Static_assert(sizeof(struct hash128) == RESUME_KEY_BYTES, "a resume key is copied as it is");

bool generation_wire_read_key(ProtobufCBinaryData bytes, struct hash128 *out)
{
    if (bytes.len != RESUME_KEY_BYTES) return false;
    memcpy(out, bytes.data, RESUME_KEY_BYTES);
    return true;
}

ProtobufCBinaryData generation_wire_key_bytes(const struct hash128 *key)
{
    return (ProtobufCBinaryData){ RESUME_KEY_BYTES, (uint8_t *)key }; /* only read */
}

static Baton__Sampling *encode_sampling(const struct sampling_params *p, struct arena *arena)
{
    Baton__Sampling *s = ARENA_NEW(arena, Baton__Sampling);
    baton__sampling__init(s);
    s->temperature = p->temperature;
    s->top_p = p->top_p;
    s->min_p = p->min_p;
    s->top_k = p->top_k;
    s->presence_penalty = p->presence_penalty;
    s->frequency_penalty = p->frequency_penalty;
    s->repetition_penalty = p->repetition_penalty;
    s->seed = p->seed;
    s->max_tokens = p->max_tokens;
    s->min_tokens = p->min_tokens;
    s->ignore_eos = p->ignore_eos;
    s->n_logprobs = p->n_logprobs;
    s->n_stop_ids = p->n_stop_ids;
    s->stop_ids = (int32_t *)p->stop_ids;
    s->n_bias = p->n_bias;
    s->bias = ARENA_ARRAY(arena, Baton__LogitBias *, p->n_bias + 1);
    for (uint32_t i = 0; i < p->n_bias; i++) {
        s->bias[i] = ARENA_NEW(arena, Baton__LogitBias);
        baton__logit_bias__init(s->bias[i]);
        s->bias[i]->id = p->bias[i].id;
        s->bias[i]->bias = p->bias[i].bias;
    }
    return s;
}

Baton__Generation *generation_wire_encode(const struct generation_wire *g, struct arena *arena)
{
    Baton__Generation *m = ARENA_NEW(arena, Baton__Generation);
    baton__generation__init(m);
    m->tokens.data = (uint8_t *)g->tokens;
    m->tokens.len = g->n_tokens * sizeof *g->tokens;
    m->n_prompt = g->n_prompt;
    m->sampling = encode_sampling(&g->sampling, arena);
    m->cache_salt = g->cache_salt;
    m->prompt_logprobs = g->prompt_logprobs;
    m->hears_preempted = g->hears_preempted;
    if (g->has_resume_key) {
        struct hash128 *key = ARENA_NEW(arena, struct hash128);
        *key = g->resume_key;
        m->resume_key = generation_wire_key_bytes(key);
    }
    return m;
}

static enum status check_numbers(const Baton__Sampling *s, struct err *err)
{
    const struct {
        const char *name;
        float value, min, max;
    } fields[] = {
        { "temperature", s->temperature, 0, 1e6f },
        { "top_p", s->top_p, 0, 1 },
        { "min_p", s->min_p, 0, 1 },
        { "presence_penalty", s->presence_penalty, -100, 100 },
        { "frequency_penalty", s->frequency_penalty, -100, 100 },
        { "repetition_penalty", s->repetition_penalty, 1e-6f, 1e6f },
    };
    for (size_t i = 0; i < COUNT_OF(fields); i++)
        if (!(fields[i].value >= fields[i].min &&
              fields[i].value <= fields[i].max)) /* NaN fails too */
            return err_field(err, ERR_FORMAT, fields[i].name, "%s is %g, outside %g to %g",
                             fields[i].name, (double)fields[i].value, (double)fields[i].min,
                             (double)fields[i].max);
    if (s->n_logprobs < -1 || s->n_logprobs > SAMPLER_LOGPROBS_MAX)
        return err_field(err, ERR_FORMAT, "n_logprobs", "n_logprobs is %d, outside -1 to %d",
                         s->n_logprobs, SAMPLER_LOGPROBS_MAX);
    if (s->n_stop_ids > SAMPLER_STOP_IDS_MAX)
        return err_field(err, ERR_FORMAT, "stop_ids", "%zu stop ids, at most %d", s->n_stop_ids,
                         SAMPLER_STOP_IDS_MAX);
    if (s->n_bias > SAMPLER_BIAS_MAX)
        return err_field(err, ERR_FORMAT, "bias", "%zu logit biases, at most %d", s->n_bias,
                         SAMPLER_BIAS_MAX);
    if (s->allowed.len)
        return err_field(err, ERR_UNSUPPORTED, "allowed",
                         "token masks are not supported by this node");
    return OK;
}

static enum status decode_sampling(const Baton__Sampling *s, struct arena *arena,
                                   struct sampling_params *p, struct err *err)
{
    TRY(check_numbers(s, err));
    *p = (struct sampling_params){
        .temperature = s->temperature,
        .top_p = s->top_p,
        .min_p = s->min_p,
        .top_k = s->top_k,
        .presence_penalty = s->presence_penalty,
        .frequency_penalty = s->frequency_penalty,
        .repetition_penalty = s->repetition_penalty,
        .seed = s->seed,
        .max_tokens = s->max_tokens,
        .min_tokens = s->min_tokens,
        .ignore_eos = s->ignore_eos,
        .n_logprobs = s->n_logprobs,
        .n_stop_ids = (uint32_t)s->n_stop_ids,
        .n_bias = (uint32_t)s->n_bias,
    };
    if (s->n_stop_ids) memcpy(p->stop_ids, s->stop_ids, s->n_stop_ids * sizeof *s->stop_ids);
    if (s->n_bias == 0) return OK;
    struct logit_bias *bias = ARENA_ARRAY(arena, struct logit_bias, s->n_bias);
    for (size_t i = 0; i < s->n_bias; i++) {
        if (!isfinite(s->bias[i]->bias))
            return err_field(err, ERR_FORMAT, "bias", "a logit bias is not a finite number");
        bias[i] = (struct logit_bias){ s->bias[i]->id, s->bias[i]->bias };
    }
    p->bias = bias;
    return OK;
}

enum status generation_wire_decode(const Baton__Generation *m, struct arena *arena,
                                   struct generation_wire *out, struct err *err)
{
    size_t n = m->tokens.len / sizeof(int32_t);
    struct generation_wire g = {
        .cache_salt = m->cache_salt,
        .prompt_logprobs = m->prompt_logprobs,
        .hears_preempted = m->hears_preempted,
        .n_prompt = m->n_prompt,
    };
    if (m->tokens.len % sizeof(int32_t) || n == 0 || n > GENERATION_TOKENS_MAX)
        return err_field(err, ERR_FORMAT, "tokens", "%zu bytes of tokens", m->tokens.len);
    if (m->n_prompt == 0 || m->n_prompt > n)
        return err_field(err, ERR_FORMAT, "n_prompt", "%u of %zu tokens are the prompt",
                         m->n_prompt, n);
    if (!m->sampling)
        return err_field(err, ERR_FORMAT, "sampling", "the sampling parameters are missing");
    TRY(decode_sampling(m->sampling, arena, &g.sampling, err));
    g.has_resume_key = m->resume_key.len > 0;
    if (g.has_resume_key && !generation_wire_read_key(m->resume_key, &g.resume_key))
        return err_field(err, ERR_FORMAT, "resume_key", "a resume key of %zu bytes, not %d",
                         m->resume_key.len, RESUME_KEY_BYTES);
    int32_t *tokens = ARENA_ARRAY(arena, int32_t, n);
    memcpy(tokens, m->tokens.data, m->tokens.len);
    for (size_t i = 0; i < n; i++)
        if (tokens[i] < 0)
            return err_field(err, ERR_FORMAT, "tokens", "token %zu is %d", i, tokens[i]);
    g.tokens = tokens;
    g.n_tokens = (uint32_t)n;
    *out = g;
    return OK;
}
