/* openai_prompt.c - turns a prompt (text or ids) into the tokens of a sequence. Thread: a
 * worker. */
#include "shared/serve/completion_request.h"

#include <string.h>

enum {
    /* A text is tokenised up to so many context lengths, so that the error can say how long it
     * is. */
    ENCODE_LIMIT_CONTEXTS = 4,
    /* Tokens in one answer of /tokenize and /detokenize, and of a text of which the end is kept. */
    TOKENIZE_MAX = 4 << 20
};

void openai_alloc_prompts(struct completion_request *c, uint32_t n)
{
    c->prompts = ARENA_ARRAY(&c->arena, struct completion_prompt, n);
    c->n_prompts = n;
}

size_t openai_tokens_max(const struct completion_request *c)
{
    return c->generates ? (size_t)c->serve->o.max_model_len * ENCODE_LIMIT_CONTEXTS : TOKENIZE_MAX;
}

static enum status too_long(const struct completion_request *c, const char *param,
                            const char *place, const char *more, size_t n, struct err *err)
{
    return err_field(err, ERR_TOO_LONG, param,
                     "This model's maximum context length is %u tokens. However, you requested "
                     "%s%zu tokens in the %s. "
                     "Please reduce the length of the %s.",
                     c->serve->o.max_model_len, more, n, place, place);
}

enum status openai_ids_too_long(const struct completion_request *c, const char *param,
                                struct err *err)
{
    return too_long(c, param, "prompt", "more than ", openai_tokens_max(c), err);
}

static enum status check_length(const struct completion_request *c,
                                const struct completion_prompt *q,
                                const struct openai_prompt_input *input, struct err *err)
{
    const struct sampling_params *s = &c->p.sampling;
    size_t max = c->serve->o.max_model_len, n = q->n_tokens;
    if (n == 0)
        return err_field(err, ERR_INVALID, input->param, "the %s must not be empty", input->place);
    if (c->p.max_tokens_set && n <= max && n + s->max_tokens > max)
        return err_field(err, ERR_TOO_LONG, input->param,
                         "This model's maximum context length is %zu tokens. However, you "
                         "requested %zu tokens (%zu in the %s, %u in the "
                         "completion). Please reduce the length of the %s or completion.",
                         max, n + s->max_tokens, n, input->place, s->max_tokens, input->place);
    if (n > max || (n == max && s->max_tokens > 0))
        return too_long(c, input->param, input->place, "", n, err);
    if (s->min_tokens > max - n)
        return err_field(err, ERR_INVALID, "min_tokens",
                         "min_tokens is %u, but after the %s only %zu tokens fit into the context",
                         s->min_tokens, input->place, max - n);
    return OK;
}

static enum status encode(const struct completion_request *c, struct completion_prompt *q,
                          const struct openai_prompt_input *input, struct err *err)
{
    size_t limit = openai_tokens_max(c);
    if (c->p.truncate >= 0) limit = TOKENIZE_MAX; /* truncation keeps the end of the text */
    enum status st = tokenizer_encode(c->serve->o.tokenizer, input->text, c->p.add_special, limit,
                                      &q->tokens, &q->n_tokens, err);
    return st == ERR_TOO_LONG ? too_long(c, input->param, input->place, "more than ", limit, err)
                              : st;
}

/* A tokenizer may have tokens (added ones, mostly) that the model's embedding lacks. */
static enum status check_known(const struct completion_request *c,
                               const struct completion_prompt *q,
                               const struct openai_prompt_input *input, struct err *err)
{
    const struct serve *s = c->serve;
    for (size_t i = 0; i < q->n_tokens; i++) {
        if (q->tokens[i] >= 0 && (uint32_t)q->tokens[i] < s->o.n_vocab) continue;
        struct str piece = tokenizer_piece(s->o.tokenizer, q->tokens[i]);
        return err_field(err, ERR_INVALID, input->param,
                         "token %d ('%.*s') in the %s is known to the tokenizer, but the model has "
                         "tokens 0 to %u only",
                         q->tokens[i], (int)(piece.n < 40 ? piece.n : 40), piece.p, input->place,
                         s->o.n_vocab - 1);
    }
    return OK;
}

static void keep_last(struct completion_prompt *q, size_t n)
{
    if (q->n_tokens <= n) return;
    memmove(q->tokens, q->tokens + (q->n_tokens - n), n * sizeof *q->tokens);
    q->n_tokens = n;
    q->tokens = mem_realloc(q->tokens, n ? n : 1, sizeof *q->tokens); /* the rest may be much */
}

enum status openai_read_prompt(struct completion_request *c, uint32_t i,
                               const struct openai_prompt_input *input, struct err *err)
{
    struct completion_prompt *q = &c->prompts[i];
    if (input->ids)
        TRY(openai_parse_ids(c->serve, input->ids, input->param, &c->packed, &q->tokens,
                             &q->n_tokens, err));
    else TRY(encode(c, q, input, err));
    return check_known(c, q, input, err);
}

void openai_name_prompt(struct completion_prompt *q)
{
    q->hash = hash_128(q->tokens, q->n_tokens * sizeof *q->tokens);
}

enum status openai_add_prompt(struct completion_request *c, uint32_t i,
                              const struct openai_prompt_input *input, struct err *err)
{
    struct completion_prompt *q = &c->prompts[i];
    TRY(openai_read_prompt(c, i, input, err));
    size_t n_all = q->n_tokens;
    if (c->p.truncate >= 0) keep_last(q, (size_t)c->p.truncate);
    TRY(check_length(c, q, input, err));
    openai_name_prompt(q);
    if (!c->p.echo) return OK;
    if (input->ids || q->n_tokens < n_all || !c->p.skip_special)
        tokenizer_decode(c->serve->o.tokenizer, q->tokens, q->n_tokens, c->p.skip_special,
                         &q->text);
    else buf_add_str(&q->text, input->text);
    q->n_chars = openai_text_chars(buf_str(&q->text));
    return OK;
}
