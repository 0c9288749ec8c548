/* openai_tools.c - see openai_tools.h. Thread: a worker. */
#include "shared/serve/openai/openai_tools.h"

#include <string.h>

static enum status bad_choice(struct err *err)
{
    return err_field(err, ERR_INVALID, "tool_choice",
                     "tool_choice must be \"none\", \"auto\", \"required\" or {\"type\": "
                     "\"function\", \"function\": {\"name\": ...}}");
}

static struct str copy_name(const cJSON *name, struct arena *arena)
{
    size_t n = strlen(name->valuestring);
    return (struct str){ arena_strndup(arena, name->valuestring, n), n };
}

static enum status parse_choice(const cJSON *v, struct arena *arena, struct openai_tools *out,
                                struct err *err)
{
    static const char *const words[] = { "none", "auto", "required" };
    out->choice = TOOL_CHOICE_AUTO;
    if (!v) return OK;
    if (cJSON_IsObject(v)) {
        const cJSON *name = json_member(json_member(v, "function"), "name");
        if (!cJSON_IsString(name) || !name->valuestring[0]) return bad_choice(err);
        out->choice = TOOL_CHOICE_NAMED;
        out->name = copy_name(name, arena);
        return OK;
    }
    if (!cJSON_IsString(v)) return bad_choice(err);
    for (size_t i = 0; i < COUNT_OF(words); i++) {
        if (strcmp(v->valuestring, words[i]) != 0) continue;
        out->choice = (enum tool_choice)i;
        return OK;
    }
    return bad_choice(err);
}

/* Tool-call formats write a name without escaping, between blanks, brackets or quotes. A name that
 * contains one of these could never be called. */
static bool can_be_called(const char *name)
{
    size_t n = strlen(name);
    bool good = n > 0 && n <= TOOL_NAME_MAX;
    for (size_t i = 0; i < n; i++)
        good = good && (unsigned char)name[i] > ' ' && name[i] != 0x7F &&
               !strchr("<>[]{}\"\\", name[i]);
    return good;
}

/* *known: the tool that tool_choice names is in the list. */
static enum status check_tools(const cJSON *tools, struct str named, bool *known, struct err *err)
{
    const cJSON *t;
    int i = 0;
    if (!cJSON_IsArray(tools)) return json_refuse(tools, "tools", "an array", err);
    cJSON_ArrayForEach (t, tools) {
        const cJSON *type = json_member(t, "type"), *function = json_member(t, "function"),
                    *name = json_member(function, "name");
        if (!cJSON_IsObject(t) || (type && !cJSON_IsString(type)))
            return err_field(err, ERR_INVALID, "tools",
                             "tools[%d] is not an object with a type and a function", i);
        if (type && strcmp(type->valuestring, "function") != 0)
            return err_field(err, ERR_UNSUPPORTED, "tools",
                             "tools[%d] has the type '%.40s', but tools can only be functions", i,
                             type->valuestring);
        if (!cJSON_IsString(name) || !can_be_called(name->valuestring))
            return err_field(err, ERR_INVALID, "tools",
                             "tools[%d] has no function with a name of 1 to %d bytes without "
                             "blanks, brackets and quotes",
                             i, TOOL_NAME_MAX);
        if (named.p && str_eq_c(named, name->valuestring)) *known = true;
        i++;
    }
    return OK;
}

enum status openai_tools_parse(const struct serve *s, const cJSON *o, bool chat,
                               struct arena *arena, struct openai_tools *out, struct err *err)
{
    const cJSON *tools = json_member(o, "tools");
    bool given = tools && !(cJSON_IsArray(tools) && !tools->child), known = false;
    *out = (struct openai_tools){ .parallel = true };
    TRY(json_get_bool(o, "parallel_tool_calls", &out->parallel, err));
    TRY(parse_choice(json_member(o, "tool_choice"), arena, out, err));
    if (!given && out->choice >= TOOL_CHOICE_REQUIRED)
        return err_field(err, ERR_INVALID, "tool_choice",
                         "tool_choice demands a call, but the request has no tools");
    if (!given || out->choice == TOOL_CHOICE_NONE) {
        out->choice = TOOL_CHOICE_NONE;
        return OK;
    }
    if (!chat)
        return err_field(err, ERR_UNSUPPORTED, "tools",
                         "tools can only be used with /v1/chat/completions");
    TRY(check_tools(tools, out->name, &known, err));
    if (out->choice == TOOL_CHOICE_NAMED && !known)
        return err_field(err, ERR_INVALID, "tool_choice",
                         "tool_choice names '%.*s', but the request has no such tool",
                         STR_ARG(out->name));
    if (out->choice == TOOL_CHOICE_REQUIRED && !tools->child->next)
        out->name = copy_name(json_member(json_member(tools->child, "function"), "name"), arena);
    if (!s->o.tools)
        return err_field(err, ERR_UNSUPPORTED, "tools",
                         "this model's chat template has no form of tool calls that is known here; "
                         "set tool_choice to \"none\" to have the tools "
                         "ignored, or start the node with --tool-call-parser");
    return OK;
}
