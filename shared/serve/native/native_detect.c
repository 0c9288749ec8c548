/* native_detect.c - tells bodies of the native form from OpenAI's by the names of their members.
 *
 * A body that fails before it is parsed (its key, its headers, a full server) must hear of it in
 * its own form, and one that is not JSON as well, so a second reader looks at the text itself: it
 * passes over values without reading them, and stops where the text is no JSON. Thread: any. */
#include <string.h>
#include <strings.h>

#include "shared/base/mem.h"
#include "shared/serve/native/native.h"
#include "shared/serve/serve.h"

/* What the members seen so far say. */
struct signs {
    bool is_native;    /* one that only the native form has */
    bool has_own_text; /* text or input_ids */
    bool has_prompt;   /* OpenAI's */
    bool asks_openai;  /* response_type */
};

static bool one_of(struct str name, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (str_eq_c(name, list[i])) return true;
    return false;
}

/* value: of a string, without its quotes; else n 0. */
static void note(struct signs *s, struct str name, struct str value)
{
    static const char *const texts[] = { "text", "input_ids" };
    static const char *const others[] = { "req_id",         "max_dec_len",   "min_dec_len",
                                          "topp",           "penalty_score", "frequency_score",
                                          "presence_score", "return_usage",  "return_all_tokens" };
    if (one_of(name, texts, COUNT_OF(texts))) s->is_native = s->has_own_text = true;
    else if (one_of(name, others, COUNT_OF(others))) s->is_native = true;
    else if (str_eq_c(name, "prompt")) s->has_prompt = true;
    else if (str_eq_c(name, "response_type") && value.n == 10 &&
             strncasecmp(value.p, "fastdeploy", 10) == 0)
        s->is_native = true;
    else if (str_eq_c(name, "response_type") && value.n == 6 &&
             strncasecmp(value.p, "openai", 6) == 0)
        s->asks_openai = true;
}

static bool decide(const struct signs *s)
{
    return s->is_native && !s->asks_openai && (s->has_own_text || !s->has_prompt);
}

bool native_is(const cJSON *doc)
{
    struct signs s = { 0 };
    for (const cJSON *v = doc->child; v; v = v->next)
        if (!cJSON_IsNull(v)) note(&s, str_of(v->string), str_of(cJSON_GetStringValue(v)));
    return decide(&s);
}

/* ---- the text ---- */

static void skip_blanks(struct str *s)
{
    while (s->n && strchr(" \t\r\n", s->p[0]) && s->p[0]) *s = str_sub(*s, 1, SIZE_MAX);
}

static bool take(struct str *s, char c)
{
    skip_blanks(s);
    if (s->n == 0 || s->p[0] != c) return false;
    *s = str_sub(*s, 1, SIZE_MAX);
    return true;
}

/* Takes a string; *out is what is between its quotes, as it stands there. */
static bool take_string(struct str *s, struct str *out)
{
    size_t i = 0;
    if (!take(s, '"')) return false;
    while (i < s->n && s->p[i] != '"') i += s->p[i] == '\\' ? 2 : 1;
    if (i >= s->n) return false;
    *out = str_sub(*s, 0, i);
    *s = str_sub(*s, i + 1, SIZE_MAX);
    return true;
}

/* Takes an array or an object, whatever is in it. */
static bool take_nested(struct str *s)
{
    size_t depth = 0, i = 0;
    bool in_string = false;
    for (; i < s->n; i++) {
        const char c = s->p[i];
        if (in_string) {
            if (c == '\\') i++;
            else in_string = c != '"';
            continue;
        }
        in_string = c == '"';
        depth += c == '{' || c == '[';
        depth -= c == '}' || c == ']';
        if (depth == 0) break;
    }
    const bool is_whole = i < s->n;
    *s = str_sub(*s, i + 1, SIZE_MAX);
    return is_whole;
}

/* Takes any value; *string as in note. */
static bool take_value(struct str *s, struct str *string, bool *is_null)
{
    size_t i = 0;
    *string = (struct str){ 0 };
    *is_null = false;
    skip_blanks(s);
    if (s->n == 0) return false;
    if (s->p[0] == '"') return take_string(s, string);
    if (s->p[0] == '{' || s->p[0] == '[') return take_nested(s);
    while (i < s->n && !strchr(",}] \t\r\n", s->p[i])) i++;
    *is_null = str_eq_c(str_sub(*s, 0, i), "null");
    *s = str_sub(*s, i, SIZE_MAX);
    return i > 0;
}

/* One that needs no reading: it can stand in an answer as it is. */
static bool is_plain(struct str s)
{
    for (size_t i = 0; i < s.n; i++)
        if (s.p[i] == '\\' || (unsigned char)s.p[i] < ' ') return false;
    return s.n <= NATIVE_REQ_ID_MAX;
}

bool native_seems(struct str body, struct str *req_id)
{
    struct str rest = str_sub(body, 0, NATIVE_LOOK_BYTES), name, value;
    struct signs s = { 0 };
    bool is_null;
    *req_id = (struct str){ 0 };
    if (!take(&rest, '{')) return false;
    do {
        if (!take_string(&rest, &name) || !take(&rest, ':')) break;
        const bool is_whole = take_value(&rest, &value, &is_null);
        if (is_null) continue;
        note(&s, name, value);
        if (str_eq_c(name, "req_id") && is_plain(value)) *req_id = value;
        if (!is_whole) break;
    } while (take(&rest, ','));
    return decide(&s);
}

bool serve_seems_native(struct str path, struct str body)
{
    struct str ignored;
    return serve_generating_path(path) && native_seems(body, &ignored);
}
