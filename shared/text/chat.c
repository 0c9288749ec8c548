/* chat.c - adapts messages to what templates expect (copying only what changes) and renders them:
 * - Content parts of type text become one string, joined by newlines, unless the template loops
 *   over parts; then, if it never tests for strings, a string becomes one part.
 * - Null content (an assistant message with tool calls only) becomes "", unless the template tests
 *   for none.
 * - The arguments of tool calls, which clients send as JSON text, become the object they describe.
 *   Some templates paste the text and fail on an object: then rendering is repeated with the text.
 * - A message that is to be left open ends in a sentinel; the rendered text is cut there.
 * Variables: messages, tools and documents (none when absent), add_generation_prompt, the special
 * tokens, and the members of kwargs, which may replace any but messages and tools.
 * Thread: any; read-only after chat_create. */
#include "shared/text/chat.h"

#include "shared/base/mem.h"
#include "shared/text/jinja/jinja_ast.h"

#include <string.h>

struct chat {
    struct jinja *template, *tool_template; /* tool_template NULL: use template */
    char *bos, *eos, *pad, *unk;
};

/* A blank follows it in the message. If the output lacks the blank, the template trims contents, so
 * the text before the sentinel is trimmed too. */
#define OPEN_END_SENTINEL "<|baton-open-end|>"

enum status chat_create(const struct chat_source *s, struct chat **out, struct err *err)
{
    struct jinja *template, *tool_template = NULL;
    TRY(jinja_parse(s->template, &template, err));
    enum status st = s->tool_template.n > 0 ? jinja_parse(s->tool_template, &tool_template, err)
                                            : OK;
    if (st != OK) {
        jinja_free(template);
        err_prefix(err, "the template for tools: ");
        return st;
    }
    struct chat *c = MEM_NEW(struct chat);
    c->template = template;
    c->tool_template = tool_template;
    c->bos = s->bos ? mem_strdup(s->bos) : NULL;
    c->eos = s->eos ? mem_strdup(s->eos) : NULL;
    c->pad = s->pad ? mem_strdup(s->pad) : NULL;
    c->unk = s->unk ? mem_strdup(s->unk) : NULL;
    *out = c;
    return OK;
}

void chat_free(struct chat *c)
{
    if (!c) return;
    jinja_free(c->template);
    jinja_free(c->tool_template);
    mem_free(c->bos);
    mem_free(c->eos);
    mem_free(c->pad);
    mem_free(c->unk);
    mem_free(c);
}

/* ---- JSON trees that borrow from others ---- */

/* Cast away const: cJSON does not write to an item that it only refers to. */
static cJSON *borrowed(const cJSON *j)
{
    union {
        const cJSON *in;
        cJSON *out;
    } u = { .in = j };
    return u.out;
}

static enum status put(cJSON *object, const char *name, cJSON *value)
{
    if (!value) return ERR_NOMEM;
    if (cJSON_AddItemToObject(object, name, value)) return OK;
    cJSON_Delete(value);
    return ERR_NOMEM;
}

static enum status put_ref(cJSON *object, const char *name, const cJSON *value)
{
    return cJSON_AddItemReferenceToObject(object, name, borrowed(value)) ? OK : ERR_NOMEM;
}

struct member_swap {
    const char *name;
    cJSON *value; /* NULL: the member stays */
};

/* Makes an object with the members of `from` in their order (templates may print it whole): the
 * swapped ones replaced, the others borrowed. Takes the values of the swaps, even when it fails and
 * returns NULL. */
static cJSON *copy_with(const cJSON *from, struct member_swap *swaps, size_t n)
{
    cJSON *o = cJSON_CreateObject();
    enum status st = o ? OK : ERR_NOMEM;
    for (const cJSON *c = from->child; c && st == OK; c = c->next) {
        struct member_swap *s = swaps;
        while (s < swaps + n && (!s->value || strcmp(s->name, c->string) != 0)) s++;
        if (s == swaps + n) {
            st = put_ref(o, c->string, c);
            continue;
        }
        st = put(o, c->string, s->value);
        s->value = NULL;
    }
    for (size_t i = 0; i < n; i++) cJSON_Delete(swaps[i].value);
    if (st == OK) return o;
    cJSON_Delete(o);
    return NULL;
}

/* ---- contents ---- */

static cJSON *text_node(const struct buf *b) { return cJSON_CreateString(b->data ? b->data : ""); }

/* Joins the texts of all parts; ERR_UNSUPPORTED for a part that is not text. */
static enum status join_parts(const cJSON *parts, int i_message, struct buf *out, struct err *err)
{
    for (const cJSON *p = parts->child; p; p = p->next) {
        const cJSON *type = json_member(p, "type"), *text = json_member(p, "text");
        if (cJSON_IsString(p)) text = p;
        else if (cJSON_IsString(type) && strcmp(type->valuestring, "text") != 0)
            return err_field(
                err, ERR_UNSUPPORTED, "messages",
                "messages[%d] has a content part of type '%.40s', but this model takes text only",
                i_message, type->valuestring);
        if (!cJSON_IsString(text))
            return err_field(err, ERR_INVALID, "messages",
                             "messages[%d] has a content part without text", i_message);
        if (p != parts->child) buf_add_char(out, '\n');
        buf_add_c(out, text->valuestring);
    }
    return OK;
}

/* Makes [{"type": "text", "text": TEXT}]; NULL: out of memory. */
static cJSON *one_part(const char *text)
{
    cJSON *list = cJSON_CreateArray(), *part = cJSON_CreateObject();
    if (list && part && cJSON_AddStringToObject(part, "type", "text") &&
        cJSON_AddStringToObject(part, "text", text) && cJSON_AddItemToArray(list, part))
        return list;
    cJSON_Delete(part);
    cJSON_Delete(list);
    return NULL;
}

/* Makes the content that this template expects, with the sentinel at its end if asked for. *out is
 * NULL when the content needs no change. */
static enum status make_content(const struct jinja *t, const cJSON *content, int i_message,
                                bool sentinel, cJSON **out, struct err *err)
{
    struct buf b = { 0 };
    enum status st = OK;
    *out = NULL;
    bool is_parts = content && cJSON_IsArray(content),
         want_parts = t->reads_parts && (is_parts || !t->tests_string);
    if (cJSON_IsNull(content) && !t->tests_none && !sentinel) {
        *out = text_node(&b);
        return *out ? OK : ERR_NOMEM;
    }
    if (is_parts && want_parts && !sentinel) return OK;
    if (!is_parts && (!want_parts || !cJSON_IsString(content)) && !sentinel) return OK;
    if (sentinel && !is_parts && !cJSON_IsString(content))
        return err_field(err, ERR_INVALID, "continue_final_message",
                         "the last message has no content that could be continued");
    if (is_parts) st = join_parts(content, i_message, &b, err);
    else buf_add_c(&b, content->valuestring);
    if (sentinel) buf_add_c(&b, OPEN_END_SENTINEL " ");
    if (st == OK) {
        *out = want_parts ? one_part(b.data ? b.data : "") : text_node(&b);
        if (!*out) st = ERR_NOMEM;
    }
    buf_release(&b);
    return st;
}

/* ---- tool calls ---- */

/* Parses the arguments of `call`; false unless they are text and valid JSON. Empty text is {}. */
static bool arguments_of(const cJSON *call, cJSON **args)
{
    const cJSON *function = json_member(call, "function"),
                *text = function ? json_member(function, "arguments") : NULL;
    struct err why;
    *args = NULL;
    if (!cJSON_IsString(text)) return false;
    struct str s = str_trim(str_of(text->valuestring));
    /* Text that is not JSON stays as it is: an earlier answer may have held it. */
    return json_parse(s.n ? s : STR("{}"), false, args, &why) == OK;
}

/* *out is NULL when the call needs no change. */
static enum status make_call(const cJSON *call, cJSON **out)
{
    cJSON *args;
    *out = NULL;
    if (!arguments_of(call, &args)) return OK;
    struct member_swap function = { "function",
                                    copy_with(json_member(call, "function"),
                                              &(struct member_swap){ "arguments", args }, 1) };
    if (!function.value) return ERR_NOMEM;
    *out = copy_with(call, &function, 1);
    return *out ? OK : ERR_NOMEM;
}

static enum status make_calls(const cJSON *calls, cJSON **out)
{
    *out = cJSON_CreateArray();
    enum status st = *out ? OK : ERR_NOMEM;
    for (const cJSON *call = calls->child; call && st == OK; call = call->next) {
        cJSON *made;
        st = make_call(call, &made);
        if (st != OK) break;
        if (!(made ? cJSON_AddItemToArray(*out, made)
                   : cJSON_AddItemReferenceToArray(*out, borrowed(call))))
            st = ERR_NOMEM;
    }
    if (st == OK) return OK;
    cJSON_Delete(*out);
    *out = NULL;
    return st;
}

/* ---- messages ---- */

struct message_format {
    const struct jinja *template;
    bool objects;  /* arguments of tool calls as objects */
    bool sentinel; /* leave the last message open */
    bool calls;    /* out: there were arguments to turn into objects */
};

/* *out is NULL when the message needs no change. */
static enum status make_message(const cJSON *m, int i, struct message_format *format, cJSON **out,
                                struct err *err)
{
    const cJSON *calls = json_member(m, "tool_calls");
    struct member_swap swaps[2] = { { "content", NULL }, { "tool_calls", NULL } };
    *out = NULL;
    TRY(make_content(format->template, cJSON_GetObjectItemCaseSensitive(m, "content"), i,
                     format->sentinel && !m->next, &swaps[0].value, err));
    if (cJSON_IsArray(calls) && format->objects) {
        enum status st = make_calls(calls, &swaps[1].value);
        format->calls = true;
        if (st != OK) {
            cJSON_Delete(swaps[0].value);
            return st;
        }
    }
    if (!swaps[0].value && !swaps[1].value) return OK;
    *out = copy_with(m, swaps, COUNT_OF(swaps));
    return *out ? OK : ERR_NOMEM;
}

static enum status make_messages(const cJSON *messages, struct message_format *format, cJSON *out,
                                 struct err *err)
{
    int i = 0;
    for (const cJSON *m = messages->child; m; m = m->next, i++) {
        cJSON *made;
        if (!cJSON_IsObject(m))
            return err_field(err, ERR_INVALID, "messages", "messages[%d] is not an object", i);
        TRY(make_message(m, i, format, &made, err));
        if (made ? cJSON_AddItemToArray(out, made)
                 : cJSON_AddItemReferenceToArray(out, borrowed(m)))
            continue;
        cJSON_Delete(made);
        return ERR_NOMEM;
    }
    return OK;
}

/* ---- rendering ---- */

static enum status put_text(cJSON *vars, const char *name, const char *text)
{
    return text ? put(vars, name, cJSON_CreateString(text)) : OK;
}

static enum status put_kwargs(cJSON *vars, const cJSON *kwargs, struct err *err)
{
    for (const cJSON *k = cJSON_IsObject(kwargs) ? kwargs->child : NULL; k; k = k->next) {
        if (strcmp(k->string, "messages") == 0 || strcmp(k->string, "tools") == 0)
            return err_field(err, ERR_INVALID, "chat_template_kwargs",
                             "chat_template_kwargs cannot set '%s'", k->string);
        cJSON_DeleteItemFromObjectCaseSensitive(vars, k->string);
        TRY(put_ref(vars, k->string, k));
    }
    return OK;
}

static bool has_tools(const struct chat_input *in) { return in->tools && !cJSON_IsNull(in->tools); }

static enum status make_vars(const struct chat *c, const struct chat_input *in,
                             struct message_format *format, cJSON *vars, struct err *err)
{
    cJSON *messages = cJSON_CreateArray();
    TRY(put(vars, "messages", messages));
    TRY(make_messages(in->messages, format, messages, err));
    if (has_tools(in)) TRY(put_ref(vars, "tools", in->tools));
    else TRY(put(vars, "tools", cJSON_CreateNull()));
    TRY(put(vars, "documents", cJSON_CreateNull()));
    TRY(put(vars, "add_generation_prompt", cJSON_CreateBool(in->add_generation_prompt)));
    TRY(put_text(vars, "bos_token", c->bos));
    TRY(put_text(vars, "eos_token", c->eos));
    TRY(put_text(vars, "pad_token", c->pad));
    TRY(put_text(vars, "unk_token", c->unk));
    return put_kwargs(vars, in->kwargs, err);
}

static enum status render_as(const struct chat *c, const struct chat_input *in,
                             struct message_format *format, int64_t now, struct buf *out,
                             struct err *err)
{
    cJSON *vars = cJSON_CreateObject();
    if (!vars) return err_set(err, ERR_NOMEM, "no memory for the messages");
    struct err why = { 0 };
    enum status st = make_vars(c, in, format, vars, &why);
    if (st == ERR_NOMEM) err_set(&why, ERR_NOMEM, "no memory for the messages");
    if (st == OK) st = jinja_render(format->template, vars, now, out, &why);
    if (st != OK && err) *err = why;
    cJSON_Delete(vars);
    return st;
}

/* Cuts the text rendered from `start` on at its last sentinel. */
static enum status cut_open_end(struct buf *out, size_t start, struct err *err)
{
    struct str text = { out->data, out->len }, sentinel = STR(OPEN_END_SENTINEL);
    for (size_t at = out->len; at >= start + sentinel.n; at--) {
        size_t from = at - sentinel.n;
        if (memcmp(text.p + from, sentinel.p, sentinel.n) != 0) continue;
        bool trimmed = at == text.n || text.p[at] != ' ';
        while (trimmed && from > start && strchr(" \t\r\n", text.p[from - 1])) from--;
        out->len = from;
        out->data[from] = 0;
        return OK;
    }
    return err_field(
        err, ERR_INVALID, "continue_final_message",
        "the chat template does not print the last message, so it cannot be continued");
}

enum status chat_render(const struct chat *c, const struct chat_input *in, int64_t now,
                        struct buf *out, struct err *err)
{
    const struct jinja *template = has_tools(in) && c->tool_template ? c->tool_template
                                                                     : c->template;
    struct message_format format = {
        .template = template,
        .objects = true,
        .sentinel = in->continue_final_message,
    };
    size_t start = out->len;
    if (in->continue_final_message && in->add_generation_prompt)
        return err_field(err, ERR_INVALID, "continue_final_message",
                         "continue_final_message and add_generation_prompt exclude each other");
    if (!cJSON_IsArray(in->messages) || !in->messages->child)
        return err_field(err, ERR_INVALID, "messages",
                         "messages must be a list with at least one message");
    struct err first = { 0 };
    enum status st = render_as(c, in, &format, now, out, &first);
    if (st == ERR_FORMAT && format.calls) {
        format.objects = false;
        if (out->data) out->data[out->len = start] = 0;
        /* No err: if this fails too, the first error is reported. */
        st = render_as(c, in, &format, now, out, NULL);
    }
    if (st == OK) return format.sentinel ? cut_open_end(out, start, err) : OK;
    if (err) *err = first;
    return first.code;
}
