/* openai_completions.c - /v1/completions: one prompt or many, as text or as ids; echo. Thread: see
 * openai.h. */
#include <string.h>

#include "shared/serve/completion_request.h"
#include "shared/serve/native/native.h"

/* ---- prompts ---- */

static enum status count_prompts(const struct completion_request *c, size_t n, struct err *err)
{
    const struct serve *s = c->serve;
    size_t limit = s->max_prompts > s->max_n ? s->max_prompts : s->max_n;
    if (n == 0) return err_field(err, ERR_INVALID, "prompt", "prompt must not be empty");
    if (n > s->max_prompts)
        return err_field(err, ERR_INVALID, "prompt",
                         "prompt has %zu prompts, but at most %u are possible", n, s->max_prompts);
    if (n * c->p.n > limit)
        return err_field(err, ERR_INVALID, "n",
                         "%zu prompts with n = %u are %zu answers, but at most %zu are possible", n,
                         c->p.n, n * c->p.n, limit);
    return OK;
}

static enum status add_one(struct completion_request *c, uint32_t i, const cJSON *v,
                           struct err *err)
{
    struct openai_prompt_input input = { .param = "prompt", .place = "prompt" };
    if (cJSON_IsString(v)) input.text = str_of(v->valuestring);
    else input.ids = v;
    return openai_add_prompt(c, i, &input, err);
}

/* Member `prompt` is one string, one array of ids, or an array of either. */
static enum status completions_prepare(struct completion_request *c, cJSON *doc, struct err *err)
{
    TRY(openai_params_parse(c->serve, doc, false, &c->arena, &c->p, err));
    const cJSON *prompt = json_member(doc, "prompt"), *v;
    uint32_t i = 0;
    if (!prompt) prompt = json_member(doc, "prompt_token_ids");
    if (!prompt) return err_field(err, ERR_INVALID, "prompt", "the request has no prompt");
    if (!cJSON_IsString(prompt) && !cJSON_IsArray(prompt))
        return json_refuse(prompt, "prompt",
                           "a string, an array of strings, an array of token ids or an array of "
                           "such arrays",
                           err);
    bool one = cJSON_IsString(prompt) || cJSON_IsNumber(prompt->child) ||
               json_packed_has(&c->packed, prompt);
    size_t n = one ? 1 : (size_t)cJSON_GetArraySize(prompt);
    TRY(count_prompts(c, n, err));
    openai_alloc_prompts(c, (uint32_t)n);
    if (one) return add_one(c, 0, prompt, err);
    cJSON_ArrayForEach (v, prompt) {
        if (cJSON_IsString(v) != cJSON_IsString(prompt->child) ||
            (!cJSON_IsString(v) && !cJSON_IsArray(v)))
            return err_field(
                err, ERR_INVALID, "prompt",
                "prompt must hold only strings, only token ids or only arrays of token ids");
        TRY(add_one(c, i++, v, err));
    }
    return OK;
}

/* ---- answers ---- */

static void write_element(const struct choice *ch, bool chunk, bool finish, struct buf *out)
{
    const struct openai_params *p = &ch->request->p;
    bool first = !ch->sent,
         has_logprobs = p->n_logprobs >= 0 &&
                        (!finish || !chunk || ch->logprobs.len || (first && p->echo));
    struct str text = buf_str(&ch->text);
    buf_printf(out, "{\"index\":%u,\"text\":", ch->index);
    if (p->echo && first) {
        struct buf all = { 0 };
        buf_add_str(&all, buf_str(&ch->prompt->text));
        buf_add_str(&all, text);
        json_add_string(out, buf_str(&all));
        buf_release(&all);
    } else {
        json_add_string(out, text);
    }
    buf_add_c(out, ",\"logprobs\":");
    if (has_logprobs) openai_write_completion_logprobs(ch, p->echo && first, out);
    else buf_add_c(out, "null");
    openai_write_finish(ch, finish, out);
    if (p->return_token_ids) {
        openai_write_ids(out, "token_ids", (const int32_t *)(const void *)ch->ids.data,
                         ch->ids.len / sizeof(int32_t));
        if (first)
            openai_write_ids(out, "prompt_token_ids", ch->prompt->tokens, ch->prompt->n_tokens);
    }
    if (!chunk && p->n_prompt_logprobs >= 0) {
        buf_add_c(out, ",\"prompt_logprobs\":");
        openai_write_prompt_logprobs(ch, out);
    }
    buf_add_char(out, '}');
}

static void completions_write_choice(const struct choice *ch, struct buf *out)
{
    write_element(ch, false, true, out);
}

static void completions_write_chunk(const struct choice *ch, bool finish, struct buf *out)
{
    write_element(ch, true, finish, out);
}

/* Everything is in the choices. */
static void completions_write_top(const struct choice *ch, bool chunk, struct buf *out)
{
    (void)ch, (void)chunk, (void)out;
}

static const struct openai_form COMPLETIONS_FORM = {
    .id_prefix = "cmpl-",
    .chunk_object = "text_completion",
    .write_choice = completions_write_choice,
    .write_chunk = completions_write_chunk,
    .write_top = completions_write_top,
};

const struct endpoint OPENAI_COMPLETIONS = {
    .object = "text_completion",
    .answers = &OPENAI_ANSWERS,
    .native = &NATIVE_COMPLETIONS,
    .openai = &COMPLETIONS_FORM,
    .prepare = completions_prepare,
    .write_error = openai_write_error,
};
