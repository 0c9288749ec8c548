/* tool_json.c - reads the JSON of calls byte by byte: the arguments alone, or an object with the
 * tool's name and its arguments.
 * Thread: its owner's. */
#include "shared/text/output/tool_parser.h"

#include <string.h>

#include "shared/base/mem.h"

/* Which member of the call's object is being read. */
enum { KEY_NONE, KEY_NAME, KEY_ARGUMENTS, KEY_ARGUMENTS_TEXT, KEY_OTHER };

enum tool_step tool_read_arguments(struct tool_parser *p, int then)
{
    struct str rest = tool_rest(p);
    struct buf *out = &tool_call_current(p)->arguments;
    for (size_t i = 0; i < rest.n; i++) {
        enum json_scan_result r = json_scan_byte(&p->scan, rest.p[i]);
        if (r == JSON_SCAN_BAD) {
            tool_consume(p, i);
            return TOOL_BAD;
        }
        if (p->scan.mode != SCAN_ROOT) buf_add_char(out, rest.p[i]);
        if (r == JSON_SCAN_MORE) continue;
        tool_consume(p, i + 1);
        tool_call_end(p);
        p->state = then;
        return TOOL_CONTINUE;
    }
    tool_consume(p, rest.n);
    return TOOL_MORE;
}

/* ---- an object with name and arguments ---- */

static enum tool_step take_key(struct tool_parser *p, bool strict)
{
    struct str key = buf_str(&p->word);
    if (str_eq_c(key, "name")) p->key = KEY_NAME;
    else if (str_eq_c(key, "arguments") || str_eq_c(key, "parameters")) p->key = KEY_ARGUMENTS;
    else if (strict && !str_eq_c(key, "type") && !str_eq_c(key, "id")) return TOOL_BAD;
    else p->key = KEY_OTHER;
    return p->key == KEY_ARGUMENTS && tool_call_current(p)->arguments.len ? TOOL_BAD
                                                                          : TOOL_CONTINUE;
}

static enum tool_step begin_value(struct tool_parser *p, char c)
{
    buf_clear(&p->word);
    if (p->key == KEY_NAME && c != '"') return TOOL_BAD;
    if (p->key != KEY_ARGUMENTS) return TOOL_CONTINUE;
    if (c == '{') buf_add_char(&tool_call_current(p)->arguments, c);
    else if (c == '"') p->key = KEY_ARGUMENTS_TEXT;
    else if (c == 'n') p->key = KEY_OTHER; /* null: no arguments */
    else return TOOL_BAD;
    return TOOL_CONTINUE;
}

/* Takes arguments given as a string that holds JSON. */
static enum tool_step take_arguments_text(struct tool_parser *p, struct str text)
{
    cJSON *o = NULL;
    if (str_trim(text).n == 0) return TOOL_CONTINUE;
    bool good = json_parse(text, false, &o, NULL) == OK && cJSON_IsObject(o);
    cJSON_Delete(o);
    if (good) buf_add_str(&tool_call_current(p)->arguments, str_trim(text));
    return good ? TOOL_CONTINUE : TOOL_BAD;
}

/* A string has ended; p->word holds it without its quotes. */
static enum tool_step end_string(struct tool_parser *p)
{
    struct buf quoted = { 0 };
    cJSON *v = NULL;
    enum tool_step st = TOOL_BAD;
    buf_add_char(&quoted, '"');
    buf_add_str(&quoted, buf_str(&p->word));
    buf_add_char(&quoted, '"');
    if (json_parse(buf_str(&quoted), false, &v, NULL) == OK)
        st = p->key == KEY_NAME ? tool_call_name(p, str_of(v->valuestring))
                                : take_arguments_text(p, str_of(v->valuestring));
    cJSON_Delete(v);
    buf_release(&quoted);
    return st;
}

static bool in_string(enum json_scan_mode m)
{
    return m == SCAN_STRING || m == SCAN_ESCAPE || m == SCAN_HEX;
}

/* Handles byte c, which led the scanner from mode `was` at `depth` to its present state. */
static enum tool_step take_byte(struct tool_parser *p, char c, enum json_scan_mode was, int depth,
                                bool strict)
{
    enum json_scan_mode now = p->scan.mode;
    if (depth > 1) {
        if (p->key == KEY_ARGUMENTS) buf_add_char(&tool_call_current(p)->arguments, c);
        return TOOL_CONTINUE;
    }
    if (was == SCAN_VALUE && now != SCAN_VALUE) return begin_value(p, c);
    if (!in_string(was)) {
        if (now == SCAN_STRING) buf_clear(&p->word); /* a key begins */
        return TOOL_CONTINUE;
    }
    if (now == SCAN_COLON) return take_key(p, strict);
    if (now == SCAN_AFTER)
        return p->key == KEY_NAME || p->key == KEY_ARGUMENTS_TEXT ? end_string(p) : TOOL_CONTINUE;
    buf_add_char(&p->word, c);
    return TOOL_CONTINUE;
}

enum tool_step tool_read_call(struct tool_parser *p, bool strict, int then)
{
    struct str rest = tool_rest(p);
    for (size_t i = 0; i < rest.n; i++) {
        enum json_scan_mode was = p->scan.mode;
        int depth = p->scan.depth;
        enum json_scan_result r = json_scan_byte(&p->scan, rest.p[i]);
        if (r == JSON_SCAN_BAD) {
            tool_consume(p, i);
            return TOOL_BAD;
        }
        bool good = take_byte(p, rest.p[i], was, depth, strict) != TOOL_BAD;
        if (good && r == JSON_SCAN_MORE) continue;
        tool_consume(p, i + 1);
        if (!good || !tool_call_current(p)->named) return TOOL_BAD;
        tool_call_end(p);
        p->state = then;
        return TOOL_CONTINUE;
    }
    tool_consume(p, rest.n);
    return TOOL_MORE;
}

/* ---- the request's tools ---- */

const cJSON *tool_schema(const struct tool_parser *p, struct str name, struct str key)
{
    const cJSON *t, *v;
    cJSON_ArrayForEach (t, p->tools) {
        const cJSON *f = json_member(t, "function"), *known = json_member(f, "name");
        if (!cJSON_IsString(known) || !str_eq_c(name, known->valuestring)) continue;
        cJSON_ArrayForEach (v, json_member(json_member(f, "parameters"), "properties"))
            if (v->string && str_eq_c(key, v->string)) return v;
    }
    return NULL;
}
