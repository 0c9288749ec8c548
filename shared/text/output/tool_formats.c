/* tool_formats.c - the table of tool call formats, and the parsers of those with JSON in tags.
 *
 *     hermes       <tool_call>{"name": N, "arguments": A}</tool_call> ...  (Qwen2.5, Qwen3)
 *     ernie        the same; reasoning.h parses the answer around it (ERNIE-4.5 Thinking)
 *     qwen3_coder  <tool_call><function=N><parameter=K>V</parameter>...  (tool_format_xml.c)
 *     deepseek_v3  calls-begin (call-begin "function" sep N \n ```json \n A \n ``` call-end)*
 *                  calls-end
 *     deepseek_v31 calls-begin (call-begin N sep A call-end)* calls-end
 *     llama3_json  {"name": N, "parameters": A}, also after <|python_tag|>; separated by ; or lines
 *     mistral      [TOOL_CALLS][{"name": N, "arguments": A}, ...]
 *     mistral_v11  [TOOL_CALLS]N[ARGS]A ...
 *
 * The DeepSeek formats accept each other's calls, and so do Mistral's. Closing tags may be missing:
 * models end their answer instead.
 * Thread: any (constant). */
#include <string.h>

#include "shared/base/mem.h"
#include "shared/text/output/format_name.h"
#include "shared/text/output/tag_match.h"
#include "shared/text/output/tool_format_xml.h"

/* clang-format off */
#define TEXT(literal) { (literal), sizeof(literal) - 1 } /* a constant struct str */

#define DS_CALLS_BEGIN "<\xEF\xBD\x9Ctool\xE2\x96\x81" "calls\xE2\x96\x81" "begin\xEF\xBD\x9C>"
#define DS_CALLS_END   "<\xEF\xBD\x9Ctool\xE2\x96\x81" "calls\xE2\x96\x81" "end\xEF\xBD\x9C>"
#define DS_CALL_BEGIN  "<\xEF\xBD\x9Ctool\xE2\x96\x81" "call\xE2\x96\x81" "begin\xEF\xBD\x9C>"
#define DS_CALL_END    "<\xEF\xBD\x9Ctool\xE2\x96\x81" "call\xE2\x96\x81" "end\xEF\xBD\x9C>"
#define DS_SEP         "<\xEF\xBD\x9Ctool\xE2\x96\x81" "sep\xEF\xBD\x9C>"
/* clang-format on */

static bool has(struct str text, const char *what)
{
    return str_find(text, str_of(what)) != SIZE_MAX;
}

/* Begins a call, unless max_calls is reached. */
static enum tool_step begin_call(struct tool_parser *p, int then)
{
    if (!tool_call_begin(p)) return TOOL_MORE;
    p->state = then;
    return TOOL_CONTINUE;
}

/* ---- hermes, ernie ---- */

enum hermes_state { HERMES_OBJECT = TOOL_STATE_BEGIN + 1, HERMES_END };

static enum tool_step hermes_step(struct tool_parser *p, bool last)
{
    (void)last;
    switch (p->state) {
    case TOOL_STATE_BEGIN: return begin_call(p, HERMES_OBJECT);
    case HERMES_OBJECT: return tool_read_call(p, false, HERMES_END);
    default: return tool_expect(p, STR("</tool_call>"), TOOL_STATE_TEXT, TOOL_STATE_TEXT);
    }
}

/* Appends {"name": "N", "arguments": up to the colon: the blank after it is part of the next
 * token. */
static void begin_object(struct str name, const char *arguments, struct buf *out)
{
    buf_add_c(out, "{\"name\": \"");
    if (!name.p) return;
    out->len--;
    json_add_string(out, name);
    buf_printf(out, ", \"%s\":", arguments);
}

static void hermes_begin(struct str name, struct buf *out)
{
    buf_add_c(out, "<tool_call>\n");
    begin_object(name, "arguments", out);
}

static bool hermes_matches_template(struct str t)
{
    return has(t, "<tool_call>") && !has(t, "<function=") && !has(t, "<arg_key>");
}
static bool ernie_matches_template(struct str t)
{
    return hermes_matches_template(t) && (has(t, "<response>") || has(t, "think_mode="));
}

/* ---- deepseek ---- */

enum deepseek_state {
    DEEPSEEK_CALL = TOOL_STATE_BEGIN + 1,
    DEEPSEEK_NAME_OR_TYPE,
    DEEPSEEK_AFTER_SEP,
    DEEPSEEK_NAME, /* after a type and the separator */
    DEEPSEEK_FENCE,
    DEEPSEEK_ARGUMENTS,
    DEEPSEEK_FENCE_END,
    DEEPSEEK_CALL_END,
    DEEPSEEK_NEXT,
    DEEPSEEK_CALLS_END
};

static enum tool_step deepseek_name(struct tool_parser *p, struct str name, int then)
{
    enum tool_step st = tool_call_name(p, name);
    if (st != TOOL_BAD) p->state = then;
    return st;
}

/* After a separator come either the arguments (the word before it was the name) or the name. */
static enum tool_step deepseek_after_sep(struct tool_parser *p)
{
    tool_consume(p, tag_leading_blanks(tool_rest(p)));
    if (tool_rest(p).n == 0) return TOOL_MORE;
    if (tool_rest(p).p[0] == '{') return deepseek_name(p, buf_str(&p->word), DEEPSEEK_ARGUMENTS);
    p->state = DEEPSEEK_NAME;
    return TOOL_CONTINUE;
}

static enum tool_step deepseek_step(struct tool_parser *p, bool last)
{
    struct str text = { 0 };
    enum tool_step st;
    (void)last;
    switch (p->state) {
    case TOOL_STATE_BEGIN:
        if (p->i_open_tag == 0)
            return tool_expect(p, STR(DS_CALL_BEGIN), DEEPSEEK_CALL, TOOL_STATE_BAD);
        p->state = DEEPSEEK_CALL;
        return TOOL_CONTINUE;
    case DEEPSEEK_CALL: return begin_call(p, DEEPSEEK_NAME_OR_TYPE);
    case DEEPSEEK_NAME_OR_TYPE:
        st = tool_read_until(p, STR(DS_SEP), &text, DEEPSEEK_AFTER_SEP);
        buf_add_str(&p->word, text);
        return st;
    case DEEPSEEK_AFTER_SEP: return deepseek_after_sep(p);
    case DEEPSEEK_NAME:
        st = tool_read_until(p, STR("\n"), &text, DEEPSEEK_FENCE);
        return st == TOOL_CONTINUE ? deepseek_name(p, text, DEEPSEEK_FENCE) : st;
    case DEEPSEEK_FENCE:
        return tool_expect(p, STR("```json"), DEEPSEEK_ARGUMENTS, DEEPSEEK_ARGUMENTS);
    case DEEPSEEK_ARGUMENTS: return tool_read_arguments(p, DEEPSEEK_FENCE_END);
    case DEEPSEEK_FENCE_END:
        return tool_expect(p, STR("```"), DEEPSEEK_CALL_END, DEEPSEEK_CALL_END);
    case DEEPSEEK_CALL_END: return tool_expect(p, STR(DS_CALL_END), DEEPSEEK_NEXT, DEEPSEEK_NEXT);
    case DEEPSEEK_NEXT:
        return tool_expect(p, STR(DS_CALL_BEGIN), DEEPSEEK_CALL, DEEPSEEK_CALLS_END);
    default: return tool_expect(p, STR(DS_CALLS_END), TOOL_STATE_TEXT, TOOL_STATE_TEXT);
    }
}

static void deepseek_v3_begin(struct str name, struct buf *out)
{
    buf_add_c(out, DS_CALLS_BEGIN DS_CALL_BEGIN "function" DS_SEP);
    if (!name.p) return;
    buf_add_str(out, name);
    buf_add_c(out, "\n```json\n");
}

static void deepseek_v31_begin(struct str name, struct buf *out)
{
    buf_add_c(out, DS_CALLS_BEGIN DS_CALL_BEGIN);
    if (!name.p) return;
    buf_add_str(out, name);
    buf_add_c(out, DS_SEP);
}

static bool deepseek_v3_matches_template(struct str t)
{
    return has(t, DS_SEP) && has(t, "```json");
}
static bool deepseek_v31_matches_template(struct str t)
{
    return has(t, DS_SEP) && !has(t, "```json");
}

/* ---- llama ---- */

enum llama_state { LLAMA_OBJECT = TOOL_STATE_BEGIN + 1, LLAMA_SEPARATOR, LLAMA_NEXT };

static enum tool_step llama_next(struct tool_parser *p)
{
    tool_consume(p, tag_leading_blanks(tool_rest(p)));
    if (tool_rest(p).n == 0) return TOOL_MORE;
    p->state = tool_rest(p).p[0] == '{' ? TOOL_STATE_BEGIN : TOOL_STATE_TEXT;
    return TOOL_CONTINUE;
}

static enum tool_step llama_step(struct tool_parser *p, bool last)
{
    (void)last;
    switch (p->state) {
    case TOOL_STATE_BEGIN: return begin_call(p, LLAMA_OBJECT);
    case LLAMA_OBJECT: return tool_read_call(p, true, LLAMA_SEPARATOR);
    case LLAMA_SEPARATOR: return tool_expect(p, STR(";"), TOOL_STATE_BEGIN, LLAMA_NEXT);
    default: return llama_next(p);
    }
}

static void llama_begin(struct str name, struct buf *out) { begin_object(name, "parameters", out); }
/* Other models with Llama's headers have other formats; only Llama's template has "parameters". */
static bool llama_matches_template(struct str t)
{
    return has(t, "<|start_header_id|>") && has(t, "tools") && has(t, "\"parameters\"");
}

/* ---- mistral ---- */

enum mistral_state {
    MISTRAL_LIST_CALL = TOOL_STATE_BEGIN + 1, /* a call in a JSON list */
    MISTRAL_LIST_OBJECT,
    MISTRAL_LIST_NEXT,
    MISTRAL_CALL, /* a call with [ARGS] */
    MISTRAL_NAME,
    MISTRAL_ID_TAG,
    MISTRAL_ID,
    MISTRAL_ARGS_TAG,
    MISTRAL_ARGUMENTS,
    MISTRAL_LIST_END
};

static enum tool_step mistral_first(struct tool_parser *p)
{
    tool_consume(p, tag_leading_blanks(tool_rest(p)));
    if (tool_rest(p).n == 0) return TOOL_MORE;
    char c = tool_rest(p).p[0];
    if (c == '[') tool_consume(p, 1);
    p->state = c == '[' || c == '{' ? MISTRAL_LIST_CALL : MISTRAL_CALL;
    return TOOL_CONTINUE;
}

/* Reads a word up to the next tag or object. */
static enum tool_step mistral_word(struct tool_parser *p, struct str *out)
{
    struct str rest = tool_rest(p);
    size_t n = 0;
    while (n < rest.n && rest.p[n] != '[' && rest.p[n] != '{') n++;
    if (n > TOOL_NAME_MAX) return TOOL_BAD;
    if (n == rest.n) return TOOL_MORE;
    *out = str_sub(rest, 0, n);
    tool_consume(p, n);
    return TOOL_CONTINUE;
}

static enum tool_step mistral_step(struct tool_parser *p, bool last)
{
    struct str word = { 0 };
    enum tool_step st;
    (void)last;
    switch (p->state) {
    case TOOL_STATE_BEGIN: return mistral_first(p);
    case MISTRAL_LIST_CALL: return begin_call(p, MISTRAL_LIST_OBJECT);
    case MISTRAL_LIST_OBJECT: return tool_read_call(p, false, MISTRAL_LIST_NEXT);
    case MISTRAL_LIST_NEXT: return tool_expect(p, STR(","), MISTRAL_LIST_CALL, MISTRAL_LIST_END);
    case MISTRAL_CALL: return begin_call(p, MISTRAL_NAME);
    case MISTRAL_NAME:
        st = mistral_word(p, &word);
        if (st == TOOL_CONTINUE) st = tool_call_name(p, word);
        if (st == TOOL_CONTINUE) p->state = MISTRAL_ID_TAG;
        return st;
    case MISTRAL_ID_TAG: return tool_expect(p, STR("[CALL_ID]"), MISTRAL_ID, MISTRAL_ARGS_TAG);
    case MISTRAL_ID:
        st = mistral_word(p, &word);
        if (st == TOOL_CONTINUE) p->state = MISTRAL_ARGS_TAG;
        return st;
    case MISTRAL_ARGS_TAG:
        return tool_expect(p, STR("[ARGS]"), MISTRAL_ARGUMENTS, MISTRAL_ARGUMENTS);
    case MISTRAL_ARGUMENTS: return tool_read_arguments(p, TOOL_STATE_TEXT);
    default: return tool_expect(p, STR("]"), TOOL_STATE_TEXT, TOOL_STATE_TEXT);
    }
}

static void mistral_begin(struct str name, struct buf *out)
{
    buf_add_c(out, "[TOOL_CALLS][");
    begin_object(name, "arguments", out);
}

static void mistral_v11_begin(struct str name, struct buf *out)
{
    buf_add_c(out, "[TOOL_CALLS]");
    if (!name.p) return;
    buf_add_str(out, name);
    buf_add_c(out, "[ARGS]");
}

static bool mistral_v11_matches_template(struct str t)
{
    return has(t, "[TOOL_CALLS]") && has(t, "[ARGS]");
}
static bool mistral_matches_template(struct str t)
{
    return has(t, "[TOOL_CALLS]") || has(t, "[AVAILABLE_TOOLS]");
}

/* ---- the table: the first format that matches a template is used ---- */

static const struct tool_format TOOL_FORMATS[] = {
    {
        .name = "qwen3_coder",
        .aliases = "qwen3_xml",
        .open = { TEXT("<tool_call>"), TEXT("<function=") },
        .markers = { TEXT("<tool_call>"), TEXT("</tool_call>") },
        .matches_template = tool_xml_matches_template,
        .step = tool_xml_step,
        .begin = tool_xml_begin,
    },
    {
        .name = "ernie",
        .aliases = "ernie-x1 ernie45 ernie-45-vl-thinking",
        .open = { TEXT("<tool_call>") },
        .markers = { TEXT("<tool_call>"), TEXT("</tool_call>") },
        .matches_template = ernie_matches_template,
        .step = hermes_step,
        .begin = hermes_begin,
    },
    {
        .name = "hermes",
        .aliases = "qwen qwen25 qwen3",
        .open = { TEXT("<tool_call>") },
        .markers = { TEXT("<tool_call>"), TEXT("</tool_call>") },
        .matches_template = hermes_matches_template,
        .step = hermes_step,
        .begin = hermes_begin,
    },
    {
        .name = "deepseek_v3",
        .aliases = "deepseek deepseek-r1 deepseek-v3-0324",
        .open = { TEXT(DS_CALLS_BEGIN), TEXT(DS_CALL_BEGIN) },
        .markers = { TEXT(DS_CALLS_BEGIN), TEXT(DS_CALLS_END), TEXT(DS_CALL_BEGIN),
                     TEXT(DS_CALL_END), TEXT(DS_SEP) },
        .matches_template = deepseek_v3_matches_template,
        .step = deepseek_step,
        .begin = deepseek_v3_begin,
    },
    {
        .name = "deepseek_v31",
        .aliases = "",
        .open = { TEXT(DS_CALLS_BEGIN), TEXT(DS_CALL_BEGIN) },
        .markers = { TEXT(DS_CALLS_BEGIN), TEXT(DS_CALLS_END), TEXT(DS_CALL_BEGIN),
                     TEXT(DS_CALL_END), TEXT(DS_SEP) },
        .matches_template = deepseek_v31_matches_template,
        .step = deepseek_step,
        .begin = deepseek_v31_begin,
    },
    {
        .name = "llama3_json",
        .aliases = "llama3 llama4_json",
        .open = { TEXT("<|python_tag|>") },
        .markers = { TEXT("<|python_tag|>") },
        .bare = true,
        .matches_template = llama_matches_template,
        .step = llama_step,
        .begin = llama_begin,
    },
    {
        .name = "mistral_v11",
        .aliases = "",
        .open = { TEXT("[TOOL_CALLS]") },
        .markers = { TEXT("[TOOL_CALLS]"), TEXT("[CALL_ID]"), TEXT("[ARGS]") },
        .short_ids = true,
        .matches_template = mistral_v11_matches_template,
        .step = mistral_step,
        .begin = mistral_v11_begin,
    },
    {
        .name = "mistral",
        .aliases = "",
        .open = { TEXT("[TOOL_CALLS]") },
        .markers = { TEXT("[TOOL_CALLS]"), TEXT("[CALL_ID]"), TEXT("[ARGS]") },
        .short_ids = true,
        .matches_template = mistral_matches_template,
        .step = mistral_step,
        .begin = mistral_begin,
    },
};

const struct tool_format *tool_format_at(size_t i)
{
    return i < COUNT_OF(TOOL_FORMATS) ? &TOOL_FORMATS[i] : NULL;
}

const struct tool_format *tool_format_find(struct str name)
{
    for (size_t i = 0; i < COUNT_OF(TOOL_FORMATS); i++)
        if (format_is_named(name, TOOL_FORMATS[i].name, TOOL_FORMATS[i].aliases))
            return &TOOL_FORMATS[i];
    return NULL;
}

bool tool_parser_is_known(struct str name)
{
    return format_is_auto_or_none(name) || tool_format_find(name);
}

const struct tool_format *tool_format_of_template(struct str source)
{
    for (size_t i = 0; i < COUNT_OF(TOOL_FORMATS); i++)
        if (TOOL_FORMATS[i].matches_template(source)) return &TOOL_FORMATS[i];
    return NULL;
}
