/* native_prompt.c - the prompt of a native request: text, messages or input_ids. Thread: a
 * worker. */
#include <stdio.h>
#include <string.h>

#include "shared/serve/completion_request.h"
#include "shared/serve/native/native.h"

/* ---- lengths ---- */

static enum status too_long(const struct completion_request *c, const char *param, const char *more,
                            size_t n, struct err *err)
{
    return err_field(err, ERR_TOO_LONG, param,
                     "%s has %s%zu tokens, but this server takes at most %u (MAX_SEQ_LEN, "
                     "--max-model-len), of prompt and answer together; give a shorter one",
                     param, more, n, c->serve->o.max_model_len);
}

enum status native_ids_too_long(const struct completion_request *c, struct err *err)
{
    return too_long(c, "input_ids", "more than ", openai_tokens_max(c), err);
}

static enum status check_lengths(const struct completion_request *c,
                                 const struct completion_prompt *q, const char *param,
                                 struct err *err)
{
    const struct sampling_params *s = &c->p.sampling;
    const size_t max = c->serve->o.max_model_len, n = q->n_tokens;
    if (n == 0) return err_field(err, ERR_INVALID, param, "%s must not be empty", param);
    if (n >= max) return too_long(c, param, "", n, err);
    if (c->p.max_tokens_set && s->max_tokens > max - n)
        return err_field(err, ERR_TOO_LONG, "max_dec_len",
                         "max_dec_len is %u, but after the %zu tokens of %s only %zu more fit "
                         "into the context of %zu (MAX_SEQ_LEN, --max-model-len)",
                         s->max_tokens, n, param, max - n, max);
    if (s->min_tokens > max - n)
        return err_field(err, ERR_INVALID, "min_dec_len",
                         "min_dec_len is %u, but after the %zu tokens of %s only %zu more fit "
                         "into the context of %zu (MAX_SEQ_LEN, --max-model-len)",
                         s->min_tokens, n, param, max - n, max);
    return OK;
}

/* ---- messages ---- */

static enum status out_of_memory(struct err *err)
{
    return err_set(err, ERR_NOMEM, "not enough memory for the messages");
}

static cJSON *make_message(const char *role, const char *content)
{
    cJSON *m = cJSON_CreateObject();
    if (m && cJSON_AddStringToObject(m, "role", role) &&
        cJSON_AddStringToObject(m, "content", content))
        return m;
    cJSON_Delete(m);
    return NULL;
}

/* Makes the messages of a text. */
static enum status add_text(cJSON *doc, const char *text, struct err *err)
{
    cJSON *m = make_message("user", text),
          *list = m ? cJSON_AddArrayToObject(doc, "messages") : NULL;
    if (list && cJSON_AddItemToArray(list, m)) return OK;
    cJSON_Delete(m);
    return out_of_memory(err);
}

/* Member system is the first message. */
static enum status add_system(cJSON *doc, const char *system, struct err *err)
{
    cJSON *list = cJSON_GetObjectItemCaseSensitive(doc, "messages");
    const cJSON *role = json_member(cJSON_IsArray(list) ? list->child : NULL, "role");
    if (cJSON_IsString(role) && strcmp(role->valuestring, "system") == 0)
        return err_field(err, ERR_INVALID, "system",
                         "the request has a system and messages that begin with one; give only "
                         "one of them");
    cJSON *m = cJSON_IsArray(list) ? make_message("system", system) : NULL;
    if (!cJSON_IsArray(list)) return OK; /* which rendering refuses */
    if (m && cJSON_InsertItemInArray(list, 0, m)) return OK;
    cJSON_Delete(m);
    return out_of_memory(err);
}

static bool has_role(const cJSON *m, const char *name)
{
    const cJSON *role = json_member(m, "role");
    return cJSON_IsString(role) && strcmp(role->valuestring, name) == 0;
}

/* FastDeploy's server goes by the places of messages: what stands between two of the user is the
 * assistant's turn, and its document calls one of them "system". Templates that take no such
 * message get it as what it is. Returns whether there was one. */
static bool name_turns(cJSON *messages)
{
    bool found = false;
    for (cJSON *m = messages->child; m && m->next && m->next->next; m = m->next) {
        cJSON *role = cJSON_GetObjectItemCaseSensitive(m->next, "role");
        if (!has_role(m, "user") || !has_role(m->next, "system") ||
            !has_role(m->next->next, "user"))
            continue;
        found = cJSON_SetValuestring(role, "assistant") || found;
    }
    return found;
}

static enum status check_contents(const cJSON *messages, struct err *err)
{
    const cJSON *m;
    int i = 0;
    cJSON_ArrayForEach (m, messages) {
        if (cJSON_IsObject(m) && !json_member(m, "content"))
            return err_field(err, ERR_INVALID, "messages",
                             "messages[%d] has no content; each message must have a role and a "
                             "content",
                             i);
        i++;
    }
    return OK;
}

static enum status render(const struct completion_request *c, cJSON *doc, struct buf *out,
                          struct err *err)
{
    const struct openai_tools no_tools = { .choice = TOOL_CHOICE_NONE };
    struct openai_answer_start opening = { .now = c->created };
    struct err ignored = { 0 };
    cJSON *messages = cJSON_GetObjectItemCaseSensitive(doc, "messages");
    TRY(check_contents(messages, err));
    const enum status st = openai_render_chat(c->serve, doc, &no_tools, &opening, out, err);
    if (st == OK || !cJSON_IsArray(messages) || !name_turns(messages)) return st;
    buf_clear(out);
    return openai_render_chat(c->serve, doc, &no_tools, &opening, out, &ignored) == OK ? OK : st;
}

/* ---- the prompt ---- */

/* Which of the three members is there. ERR_INVALID: none, or more than one. */
static enum status find_source(const cJSON *doc, const char **param, struct err *err)
{
    static const char *const names[] = { "text", "messages", "input_ids" };
    *param = NULL;
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        if (!json_member(doc, names[i])) continue;
        if (*param)
            return err_field(err, ERR_INVALID, names[i],
                             "the request has %s and %s; it must have one of text, messages and "
                             "input_ids",
                             *param, names[i]);
        *param = names[i];
    }
    if (*param) return OK;
    return err_field(err, ERR_INVALID, "text",
                     "the request has neither text nor messages nor input_ids; it must have one "
                     "of them");
}

/* Fills in `input`, whose text may be in `text`. */
static enum status find_prompt(struct completion_request *c, cJSON *doc, bool is_chat,
                               struct buf *text, struct openai_prompt_input *input, struct err *err)
{
    const char *plain = NULL, *system = NULL;
    TRY(find_source(doc, &input->param, err));
    input->place = input->param;
    TRY(json_get_str(doc, "text", &plain, err));
    TRY(json_get_str(doc, "system", &system, err));
    if (plain && !plain[0]) return err_field(err, ERR_INVALID, "text", "text must not be empty");
    const bool is_messages = strcmp(input->param, "messages") == 0 ||
                             (plain && is_chat && c->serve->o.chat);
    if (system && !is_messages)
        return err_field(err, ERR_INVALID, "system",
                         "system can only be used with messages, or with a text at "
                         "/v1/chat/completions of a model that has a chat template");
    c->p.add_special = !is_messages;
    if (!plain && !is_messages) {
        input->ids = json_member(doc, "input_ids");
        return OK;
    }
    if (!is_messages) {
        input->text = str_of(plain);
        return OK;
    }
    if (plain) TRY(add_text(doc, plain, err));
    if (system) TRY(add_system(doc, system, err));
    TRY(render(c, doc, text, err));
    input->text = buf_str(text);
    return OK;
}

/* Keeps the beginning, as FastDeploy does. */
static void truncate_prompt(struct completion_request *c)
{
    struct completion_prompt *q = &c->prompts[0];
    if (c->p.truncate < 0 || q->n_tokens <= (size_t)c->p.truncate) return;
    q->n_tokens = (size_t)c->p.truncate;
    q->tokens = mem_realloc(q->tokens, q->n_tokens, sizeof *q->tokens); /* the rest may be much */
}

enum status native_prompt_parse(struct completion_request *c, cJSON *doc, bool is_chat,
                                struct err *err)
{
    struct openai_prompt_input input = { 0 };
    struct buf text = { 0 };
    enum status st = find_prompt(c, doc, is_chat, &text, &input, err);
    if (st == OK) {
        openai_alloc_prompts(c, 1);
        st = openai_read_prompt(c, 0, &input, err);
        if (st == ERR_TOO_LONG)
            st = too_long(c, input.param, "more than ", openai_tokens_max(c), err);
    }
    buf_release(&text);
    if (st != OK) return st;
    truncate_prompt(c);
    TRY(check_lengths(c, &c->prompts[0], input.param, err));
    openai_name_prompt(&c->prompts[0]);
    return OK;
}
