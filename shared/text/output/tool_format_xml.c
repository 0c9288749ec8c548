/* tool_format_xml.c - calls in tags: <function=N>, then <parameter=K> VALUE </parameter> for each
 * argument, which become a JSON object on the way.
 *
 * The tool's schema gives the type of a value. A parameter that may be a string is one: it is
 * streamed as written, without one line end next to each tag. Other values are read whole, and are
 * strings when they do not match the schema.
 * Thread: its owner's. */
#include "shared/text/output/tool_format_xml.h"

#include <string.h>

#include "shared/text/output/tag_match.h"

static const char FUNCTION[] = "<function=", PARAMETER[] = "<parameter=",
                  PARAMETER_END[] = "</parameter>";

enum {
    AT_START = 1,
    AT_FUNCTION,
    AT_NAME,
    AT_PARAMETER,
    AT_KEY,
    AT_LINE_END,
    IN_STRING,
    IN_VALUE,
    AT_FUNCTION_END,
    AT_END
};

bool tool_xml_matches_template(struct str source)
{
    return str_find(source, str_of(FUNCTION)) != SIZE_MAX &&
           str_find(source, str_of(PARAMETER)) != SIZE_MAX;
}

void tool_xml_begin(struct str name, struct buf *out)
{
    buf_printf(out, "<tool_call>\n%s", FUNCTION);
    if (!name.p) return;
    buf_add_str(out, name);
    buf_add_c(out, ">\n");
}

/* ---- values ---- */

static bool is_type(const cJSON *type, const char *name)
{
    return cJSON_IsString(type) && strcmp(type->valuestring, name) == 0;
}

/* May a value of this schema be a string? Yes unless its type excludes strings. */
static bool may_be_string(const cJSON *schema)
{
    const cJSON *type = json_member(schema, "type"), *any = json_member(schema, "anyOf"), *v;
    if (!type && !any) return true;
    if (is_type(type, "string")) return true;
    cJSON_ArrayForEach (v, type)
        if (is_type(v, "string")) return true;
    cJSON_ArrayForEach (v, any)
        if (may_be_string(v)) return true;
    return false;
}

/* Appends `s` escaped for a JSON string. Non-ASCII bytes are not checked: a piece may end within a
 * character. */
static void add_escaped(struct buf *out, struct str s)
{
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    for (size_t i = 0; i < s.n; i++) {
        unsigned char c = (unsigned char)s.p[i];
        const char *at = c ? strchr(from, c) : NULL;
        if (at) buf_printf(out, "\\%c", to[at - from]);
        else if (c < ' ') buf_printf(out, "\\u%04x", c);
        else buf_add_char(out, s.p[i]);
    }
}

static void add_value(struct buf *out, struct str text)
{
    cJSON *v = NULL;
    struct str s = str_trim(text);
    if (str_eq_c(s, "True") || str_eq_c(s, "False")) {
        buf_add_c(out, s.p[0] == 'T' ? "true" : "false");
    } else if (str_eq_c(s, "None")) {
        buf_add_c(out, "null");
    } else if (s.n && json_parse(s, false, &v, NULL) == OK) {
        buf_add_str(out, s);
    } else {
        buf_add_char(out, '"');
        add_escaped(out, text);
        buf_add_char(out, '"');
    }
    cJSON_Delete(v);
}

/* ---- steps ---- */

static enum tool_step set_state(struct tool_parser *p, int state)
{
    p->state = state;
    return TOOL_CONTINUE;
}

static enum tool_step read_name(struct tool_parser *p)
{
    struct str name = { 0 };
    enum tool_step st = tool_read_until(p, STR(">"), &name, AT_PARAMETER);
    if (st == TOOL_CONTINUE) st = tool_call_name(p, name);
    if (st == TOOL_CONTINUE) buf_add_char(&tool_call_current(p)->arguments, '{');
    return st;
}

static enum tool_step read_key(struct tool_parser *p)
{
    struct str key = { 0 };
    struct buf *out = &tool_call_current(p)->arguments;
    enum tool_step st = tool_read_until(p, STR(">"), &key, AT_LINE_END);
    if (st != TOOL_CONTINUE) return st;
    key = str_trim(key);
    if (key.n == 0) return TOOL_BAD;
    p->key = may_be_string(tool_schema(p, buf_str(&tool_call_current(p)->name), key)) ? IN_STRING
                                                                                      : IN_VALUE;
    buf_add_c(out, out->len > 1 ? ", \"" : "\"");
    add_escaped(out, key);
    buf_add_c(out, p->key == IN_STRING ? "\": \"" : "\": ");
    return TOOL_CONTINUE;
}

static enum tool_step skip_line_end(struct tool_parser *p)
{
    if (tool_rest(p).n == 0) return TOOL_MORE;
    if (tool_rest(p).p[0] == '\n') tool_consume(p, 1);
    return set_state(p, p->key);
}

static struct str without_line_end(struct str s)
{
    return str_sub(s, 0, s.n && s.p[s.n - 1] == '\n' ? s.n - 1 : s.n);
}

static enum tool_step read_string(struct tool_parser *p)
{
    struct buf *out = &tool_call_current(p)->arguments;
    struct str rest = tool_rest(p);
    size_t at = str_find(rest, str_of(PARAMETER_END));
    if (at == SIZE_MAX) {
        size_t hold = tag_match_partial(rest, str_of(PARAMETER_END)),
               line = tag_match_partial(rest, STR("\n</parameter>"));
        size_t n = rest.n - (line > hold ? line : hold);
        add_escaped(out, str_sub(rest, 0, n));
        tool_consume(p, n);
        return TOOL_MORE;
    }
    add_escaped(out, without_line_end(str_sub(rest, 0, at)));
    buf_add_char(out, '"');
    tool_consume(p, at + sizeof PARAMETER_END - 1);
    return set_state(p, AT_PARAMETER);
}

static enum tool_step read_value(struct tool_parser *p)
{
    struct str rest = tool_rest(p);
    size_t at = str_find(rest, str_of(PARAMETER_END));
    if (at == SIZE_MAX) return TOOL_MORE;
    add_value(&tool_call_current(p)->arguments, without_line_end(str_sub(rest, 0, at)));
    tool_consume(p, at + sizeof PARAMETER_END - 1);
    return set_state(p, AT_PARAMETER);
}

static enum tool_step end_call(struct tool_parser *p, bool last)
{
    enum tool_step st = tool_expect(p, STR("</function>"), AT_END, TOOL_STATE_BAD);
    /* All parameters are complete: an answer that ends here is a call. */
    if (st == TOOL_MORE && last && tool_rest(p).n == 0) st = set_state(p, AT_END);
    if (st != TOOL_CONTINUE) return st;
    buf_add_char(&tool_call_current(p)->arguments, '}');
    tool_call_end(p);
    return TOOL_CONTINUE;
}

static enum tool_step begin_call(struct tool_parser *p)
{
    if (!tool_call_begin(p)) return TOOL_MORE;
    return set_state(p, AT_NAME);
}

enum tool_step tool_xml_step(struct tool_parser *p, bool last)
{
    switch (p->state) {
    case AT_START:
        return p->i_open_tag == 0 ? tool_expect(p, str_of(FUNCTION), AT_FUNCTION, TOOL_STATE_BAD)
                                  : set_state(p, AT_FUNCTION);
    case AT_FUNCTION: return begin_call(p);
    case AT_NAME: return read_name(p);
    case AT_PARAMETER:
        tool_consume(p, tag_leading_blanks(tool_rest(p)));
        if (last && tool_rest(p).n == 0) return set_state(p, AT_FUNCTION_END);
        return tool_expect(p, str_of(PARAMETER), AT_KEY, AT_FUNCTION_END);
    case AT_KEY: return read_key(p);
    case AT_LINE_END: return skip_line_end(p);
    case IN_STRING: return read_string(p);
    case IN_VALUE: return read_value(p);
    case AT_FUNCTION_END: return end_call(p, last);
    default: return tool_expect(p, STR("</tool_call>"), 0, 0);
    }
}
