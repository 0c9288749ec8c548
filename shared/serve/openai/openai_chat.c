/* openai_chat.c - /v1/chat/completions. Thread: see openai.h. */
#include <stdio.h>
#include <string.h>

#include "shared/base/clock.h"
#include "shared/serve/completion_request.h"
#include "shared/serve/native/native.h"
#include "shared/serve/output_parser.h"

/* ---- messages ---- */

static enum status check_parts(const cJSON *parts, int i, struct err *err)
{
    const cJSON *p;
    cJSON_ArrayForEach (p, parts) {
        const cJSON *type = json_member(p, "type"), *text = json_member(p, "text");
        if (cJSON_IsString(p)) continue;
        if (!cJSON_IsObject(p) || !cJSON_IsString(type))
            return err_field(err, ERR_INVALID, "messages",
                             "messages[%d] has a content part that is not an object with a type",
                             i);
        if (strcmp(type->valuestring, "text") != 0)
            return err_field(
                err, ERR_UNSUPPORTED, "messages",
                "messages[%d] has a content part of type '%.40s', but this model takes text only",
                i, type->valuestring);
        if (!cJSON_IsString(text))
            return err_field(err, ERR_INVALID, "messages",
                             "messages[%d] has a content part of type text without a text", i);
    }
    return OK;
}

/* A missing content is the same as null; chat.c adapts it to the template. */
static enum status add_null_content(cJSON *m, struct err *err)
{
    if (cJSON_GetObjectItemCaseSensitive(m, "content") || cJSON_AddNullToObject(m, "content"))
        return OK;
    return err_set(err, ERR_NOMEM, "not enough memory for the messages");
}

static enum status check_calls(const cJSON *calls, int i, struct err *err)
{
    const cJSON *call;
    if (!cJSON_IsArray(calls))
        return err_field(err, ERR_INVALID, "messages",
                         "messages[%d] has tool_calls that are not an array", i);
    cJSON_ArrayForEach (call, calls) {
        const cJSON *function = json_member(call, "function");
        if (!cJSON_IsString(json_member(function, "name")))
            return err_field(err, ERR_INVALID, "messages",
                             "messages[%d] has a tool call without a function that has a name", i);
    }
    return OK;
}

/* Newer clients send back an assistant's reasoning as `reasoning`; templates expect
 * reasoning_content. */
static enum status name_reasoning(cJSON *m, struct err *err)
{
    const cJSON *r = json_member(m, "reasoning");
    if (!cJSON_IsString(r) || json_member(m, "reasoning_content")) return OK;
    cJSON_DeleteItemFromObjectCaseSensitive(m, "reasoning_content");
    return cJSON_AddStringToObject(m, "reasoning_content", r->valuestring)
               ? OK
               : err_set(err, ERR_NOMEM, "not enough memory for the messages");
}

static enum status check_message(cJSON *m, int i, struct err *err)
{
    static const char *const roles[] = { "system", "developer", "user", "assistant", "tool" };
    size_t r = 0;
    if (!cJSON_IsObject(m))
        return err_field(err, ERR_INVALID, "messages",
                         "messages[%d] must be an object with role and content", i);
    cJSON *role = cJSON_GetObjectItemCaseSensitive(m, "role");
    if (!cJSON_IsString(role))
        return err_field(err, ERR_INVALID, "messages", "messages[%d] has no role", i);
    while (r < COUNT_OF(roles) && strcmp(role->valuestring, roles[r]) != 0) r++;
    if (r == COUNT_OF(roles))
        return err_field(err, ERR_INVALID, "messages",
                         "messages[%d] has the role '%.40s', but roles are system, developer, "
                         "user, assistant and tool",
                         i, role->valuestring);
    /* Templates know this role only by its older name. */
    if (r == 1 && !cJSON_SetValuestring(role, "system"))
        return err_set(err, ERR_NOMEM, "not enough memory for the messages");
    const cJSON *content = json_member(m, "content"), *calls = json_member(m, "tool_calls");
    if (calls) TRY(check_calls(calls, i, err));
    TRY(name_reasoning(m, err));
    if (!content) return add_null_content(m, err);
    if (cJSON_IsString(content)) return OK;
    if (cJSON_IsArray(content)) return check_parts(content, i, err);
    return err_field(
        err, ERR_INVALID, "messages",
        "messages[%d] has a content that is neither a string nor an array of parts nor null", i);
}

static enum status check_messages(const cJSON *doc, struct err *err)
{
    cJSON *messages = cJSON_GetObjectItemCaseSensitive(doc, "messages");
    int i = 0;
    if (!messages && json_member(doc, "text"))
        return err_field(err, ERR_INVALID, "messages",
                         "the request has no messages; text is of FastDeploy's native form, in "
                         "which this request is not, as its response_type is openai");
    if (!messages) return err_field(err, ERR_INVALID, "messages", "the request has no messages");
    if (!cJSON_IsArray(messages))
        return json_refuse(messages, "messages", "an array of at least one message", err);
    if (!messages->child)
        return err_field(err, ERR_INVALID, "messages",
                         "messages is empty, but must be an array of at least one message");
    for (cJSON *m = messages->child; m; m = m->next) TRY(check_message(m, i++, err));
    return OK;
}

/* Collects the template's variables: members of the request, and chat_template_kwargs. */
static enum status make_kwargs(cJSON *doc, cJSON **out, struct err *err)
{
    static const char *const names[] = { "reasoning_effort", "documents", "enable_thinking" };
    cJSON *kwargs = cJSON_GetObjectItemCaseSensitive(doc, "chat_template_kwargs");
    if (kwargs && !cJSON_IsNull(kwargs) && !cJSON_IsObject(kwargs))
        return json_refuse(kwargs, "chat_template_kwargs", "an object", err);
    if (!kwargs || cJSON_IsNull(kwargs)) {
        cJSON_DeleteItemFromObjectCaseSensitive(doc, "chat_template_kwargs");
        kwargs = cJSON_AddObjectToObject(doc, "chat_template_kwargs");
    }
    for (size_t i = 0; kwargs && i < COUNT_OF(names); i++) {
        cJSON *v = cJSON_GetObjectItemCaseSensitive(doc, names[i]);
        if (v && !cJSON_IsNull(v) && !cJSON_GetObjectItemCaseSensitive(kwargs, names[i]) &&
            !cJSON_AddItemReferenceToObject(kwargs, names[i], v))
            kwargs = NULL;
    }
    if (!kwargs) return err_set(err, ERR_NOMEM, "not enough memory for the template's variables");
    *out = kwargs;
    return OK;
}

/* Returns the reasoning state in which an answer after `prompt` begins. */
static enum reasoning_state reasoning_from(const struct serve *s, const cJSON *doc,
                                           const struct chat_input *in, struct str prompt)
{
    const struct reasoning_format *f = s->o.reasoning;
    if (!f) return REASONING_REST;
    if (in->add_generation_prompt) return reasoning_state_after(f, prompt);
    if (!in->continue_final_message) return REASONING_START;
    const cJSON *messages = json_member(doc, "messages"),
                *last = cJSON_GetArrayItem(messages, cJSON_GetArraySize(messages) - 1);
    const cJSON *content = json_member(last, "content");
    return cJSON_IsString(content) ? reasoning_state_within(f, str_of(content->valuestring))
                                   : REASONING_START;
}

/* Appends the beginning of a tool call that the client demands; the model continues it. */
static enum status write_tool_call_prefix(const struct serve *s, const struct openai_tools *t,
                                          const struct chat_input *in,
                                          struct openai_answer_start *o, struct buf *out,
                                          struct err *err)
{
    struct buf begin = { 0 };
    if (!in->add_generation_prompt)
        return err_field(
            err, ERR_INVALID, "tool_choice",
            "a tool_choice that demands a call needs add_generation_prompt to be true");
    if (o->reasoning == REASONING_LEAD) {
        buf_add_str(out, s->o.reasoning->close);
        buf_add_c(out, "\n\n");
    }
    s->o.tools->begin(t->name, &begin);
    buf_add_str(out, buf_str(&begin));
    if (o->tool_call_prefix) buf_add_str(o->tool_call_prefix, buf_str(&begin));
    buf_release(&begin);
    o->reasoning = REASONING_REST;
    return OK;
}

enum status openai_render_chat(const struct serve *s, cJSON *doc, const struct openai_tools *tools,
                               struct openai_answer_start *o, struct buf *out, struct err *err)
{
    struct chat_input in = { .add_generation_prompt = true };
    cJSON *kwargs = NULL;
    in.messages = cJSON_GetObjectItemCaseSensitive(doc, "messages");
    TRY(check_messages(doc, err));
    TRY(make_kwargs(doc, &kwargs, err));
    TRY(json_get_bool(doc, "add_generation_prompt", &in.add_generation_prompt, err));
    /* Read here too what the template sees. */
    TRY(json_get_bool(kwargs, "add_generation_prompt", &in.add_generation_prompt, err));
    TRY(json_get_bool(doc, "continue_final_message", &in.continue_final_message, err));
    if (in.continue_final_message && in.add_generation_prompt)
        return err_field(err, ERR_INVALID, "continue_final_message",
                         "continue_final_message needs add_generation_prompt to be false");
    in.kwargs = kwargs;
    in.tools = tools->choice != TOOL_CHOICE_NONE ? json_member(doc, "tools") : NULL;
    if (!s->o.chat)
        return err_field(err, ERR_UNSUPPORTED, "messages",
                         "this model has no chat template; use /v1/completions");
    enum status st = chat_render(s->o.chat, &in, o->now, out, err);
    if (st == OK) {
        o->reasoning = reasoning_from(s, doc, &in, buf_str(out));
        return tools->choice >= TOOL_CHOICE_REQUIRED
                   ? write_tool_call_prefix(s, tools, &in, o, out, err)
                   : OK;
    }
    if (!err) return st;
    if (!err->field[0]) snprintf(err->field, sizeof err->field, "messages");
    return st == ERR_FORMAT || st == ERR_TOO_LONG ? ERR_INVALID : st;
}

/* As reasoning_from, for a prompt given as ids: looks at the text of its last tokens. */
static enum reasoning_state reasoning_after_ids(const struct completion_request *c)
{
    enum { TAIL = 16 };
    const struct completion_prompt *q = &c->prompts[0];
    size_t n = q->n_tokens < TAIL ? q->n_tokens : TAIL;
    struct buf text = { 0 };
    if (!c->serve->o.reasoning) return REASONING_REST;
    tokenizer_decode(c->serve->o.tokenizer, q->tokens + (q->n_tokens - n), n, false, &text);
    enum reasoning_state state = reasoning_state_after(c->serve->o.reasoning, buf_str(&text));
    buf_release(&text);
    return state;
}

static enum status chat_prepare(struct completion_request *c, cJSON *doc, struct err *err)
{
    struct openai_prompt_input input = { .param = "messages", .place = "messages" };
    struct openai_answer_start opening = { .now = c->created,
                                           .tool_call_prefix = &c->tool_call_prefix };
    struct buf text = { 0 };
    TRY(openai_params_parse(c->serve, doc, true, &c->arena, &c->p, err));
    input.ids = json_member(doc, "prompt_token_ids");
    if (input.ids) input.param = "prompt_token_ids";
    if (input.ids && c->p.tools.choice >= TOOL_CHOICE_REQUIRED)
        return err_field(err, ERR_UNSUPPORTED, "tool_choice",
                         "a tool_choice that demands a call needs messages: the rendered prompt "
                         "must end with the beginning of the call, but this prompt came as ids");
    enum status st = input.ids
                         ? OK
                         : openai_render_chat(c->serve, doc, &c->p.tools, &opening, &text, err);
    if (st == OK) {
        input.text = buf_str(&text);
        openai_alloc_prompts(c, 1);
        st = openai_add_prompt(c, 0, &input, err);
    }
    if (st == OK) c->reasoning = input.ids ? reasoning_after_ids(c) : opening.reasoning;
    if (st == OK && c->p.tools.choice != TOOL_CHOICE_NONE)
        c->tools = cJSON_DetachItemFromObjectCaseSensitive(doc, "tools");
    buf_release(&text);
    return st;
}

/* ---- answers ---- */

static void write_logprobs(const struct choice *ch, struct buf *out)
{
    buf_add_c(out, ",\"logprobs\":");
    if (ch->request->p.n_logprobs >= 0) openai_write_chat_logprobs(ch, out);
    else buf_add_c(out, "null");
}

static void write_answer_ids(const struct choice *ch, bool with_prompt, struct buf *out)
{
    if (!ch->request->p.return_token_ids) return;
    openai_write_ids(out, "token_ids", (const int32_t *)(const void *)ch->ids.data,
                     ch->ids.len / sizeof(int32_t));
    if (with_prompt)
        openai_write_ids(out, "prompt_token_ids", ch->prompt->tokens, ch->prompt->n_tokens);
}

static void chat_write_choice(const struct choice *ch, struct buf *out)
{
    buf_printf(out, "{\"index\":%u,\"message\":{\"role\":\"assistant\",\"content\":", ch->index);
    if (ch->text.len || !output_parser_has_output(ch->parser))
        json_add_string(out, buf_str(&ch->text));
    else buf_add_c(out, "null");
    if (ch->parser) output_parser_write(ch->parser, ch->request->p.include_reasoning, out);
    buf_add_c(out, "}");
    write_logprobs(ch, out);
    openai_write_finish(ch, true, out);
    write_answer_ids(ch, true, out);
    buf_add_char(out, '}');
}

/* With a parser the first chunk may have content null: there may be no content yet, or none at
 * all. */
static void write_delta(const struct choice *ch, bool finish, struct buf *out)
{
    bool wanted = ch->parser ? ch->text.len || !ch->sent : !finish || !ch->sent || ch->text.len;
    if (!ch->sent) buf_add_c(out, "\"role\":\"assistant\",");
    if (wanted) buf_add_c(out, "\"content\":");
    if (wanted && ch->parser && !ch->text.len) buf_add_c(out, "null");
    else if (wanted) json_add_string(out, buf_str(&ch->text));
    if (ch->parser)
        output_parser_write_delta(ch->parser, ch->request->p.include_reasoning, !wanted, out);
}

static void chat_write_chunk(const struct choice *ch, bool finish, struct buf *out)
{
    buf_printf(out, "{\"index\":%u,\"delta\":{", ch->index);
    write_delta(ch, finish, out);
    buf_add_char(out, '}');
    if (finish && !ch->logprobs.len) buf_add_c(out, ",\"logprobs\":null");
    else write_logprobs(ch, out);
    openai_write_finish(ch, finish, out);
    write_answer_ids(ch, !ch->sent, out);
    buf_add_char(out, '}');
}

/* vLLM puts these members for chat next to the choices. */
static void chat_write_top(const struct choice *ch, bool chunk, struct buf *out)
{
    const struct openai_params *p = &ch->request->p;
    if (p->return_token_ids)
        openai_write_ids(out, "prompt_token_ids", ch->prompt->tokens, ch->prompt->n_tokens);
    if (chunk || p->n_prompt_logprobs < 0) return;
    buf_add_c(out, ",\"prompt_logprobs\":");
    openai_write_prompt_logprobs(ch, out);
}

static const struct openai_form CHAT_FORM = {
    .id_prefix = "chatcmpl-",
    .chunk_object = "chat.completion.chunk",
    .write_choice = chat_write_choice,
    .write_chunk = chat_write_chunk,
    .write_top = chat_write_top,
};

const struct endpoint OPENAI_CHAT = {
    .object = "chat.completion",
    .parses_output = true,
    .answers = &OPENAI_ANSWERS,
    .native = &NATIVE_CHAT,
    .openai = &CHAT_FORM,
    .prepare = chat_prepare,
    .write_error = openai_write_error,
};
