/* json_scan.c - see json_scan.h. Thread: the caller's. */
#include "shared/serve/grpc/json_scan.h"

#include <string.h>

enum { DEPTH_MAX = 64 };

static bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

static size_t skip_space(struct str t, size_t at)
{
    while (at < t.n && is_space(t.p[at])) at++;
    return at;
}

/* The end of the string whose quote is at `at`; SIZE_MAX: it has none. */
static size_t end_of_string(struct str t, size_t at)
{
    for (at++; at < t.n; at++) {
        if (t.p[at] == '"') return at + 1;
        if (t.p[at] == '\\') at++;
    }
    return SIZE_MAX;
}

/* The end of what stands between brackets; a bit of `kinds` for each that is open: 1 for '{'. */
static size_t end_of_brackets(struct str t, size_t at)
{
    uint64_t kinds = 0;
    uint32_t depth = 0;
    while (at < t.n) {
        const char c = t.p[at];
        if (c == '"') {
            at = end_of_string(t, at);
            continue; /* SIZE_MAX ends the loop */
        }
        if (c == '{' || c == '[') {
            if (depth++ == DEPTH_MAX) return SIZE_MAX;
            kinds = kinds << 1 | (c == '{');
        } else if (c == '}' || c == ']') {
            if ((kinds & 1) != (c == '}')) return SIZE_MAX;
            kinds >>= 1;
            if (--depth == 0) return at + 1;
        }
        at++;
    }
    return SIZE_MAX;
}

/* The end of the value that begins at `at`. */
static size_t end_of_value(struct str t, size_t at)
{
    if (at >= t.n) return SIZE_MAX;
    if (t.p[at] == '"') return end_of_string(t, at);
    if (t.p[at] == '{' || t.p[at] == '[') return end_of_brackets(t, at);
    const size_t begin = at;
    while (at < t.n && !is_space(t.p[at]) && !strchr(",]}:\"[{", t.p[at])) at++;
    return at > begin ? at : SIZE_MAX;
}

/* Goes over one item and what follows it. True: another one follows; *at is where it begins. */
static bool next_item(struct str t, size_t *at, char close, bool *is_good)
{
    const size_t end = end_of_value(t, *at);
    const size_t then = end == SIZE_MAX ? t.n : skip_space(t, end);
    *is_good = then < t.n && (t.p[then] == ',' || t.p[then] == close);
    *at = *is_good ? skip_space(t, then + 1) : t.n;
    return *is_good && t.p[then] == ',';
}

enum status json_scan_list(struct str text, struct str *first, size_t *n, struct err *err)
{
    const struct str t = str_trim(text);
    size_t at = t.n > 0 && t.p[0] == '[' ? skip_space(t, 1) : t.n;
    *first = (struct str){ NULL, 0 };
    *n = 0;
    if (at < t.n && t.p[at] == ']' && at + 1 == t.n) return OK;
    bool more = at < t.n, is_good = more;
    while (more) {
        const size_t begin = at;
        if ((*n)++ == 0 && end_of_value(t, at) != SIZE_MAX)
            *first = str_sub(t, begin, end_of_value(t, at) - begin);
        more = next_item(t, &at, ']', &is_good);
    }
    if (is_good && at == t.n) return OK;
    return err_set(err, ERR_FORMAT, "it is not a JSON list");
}

bool json_scan_member(struct str object, size_t *at, struct str *key, struct str *value)
{
    const struct str t = object;
    size_t p = *at;
    if (p == 0) {
        p = skip_space(t, 0);
        if (p >= t.n || t.p[p] != '{') return false;
        p++;
    }
    p = skip_space(t, p);
    if (p >= t.n || t.p[p] != '"') return false;
    const size_t end = end_of_string(t, p);
    if (end == SIZE_MAX) return false;
    *key = str_sub(t, p + 1, end - p - 2);
    p = skip_space(t, end);
    if (p >= t.n || t.p[p] != ':') return false;
    p = skip_space(t, p + 1);
    const size_t value_end = end_of_value(t, p);
    if (value_end == SIZE_MAX) return false;
    *value = str_sub(t, p, value_end - p);
    p = skip_space(t, value_end);
    *at = p < t.n && t.p[p] == ',' ? p + 1 : t.n;
    return true;
}

struct str json_scan_find(struct str object, const char *key)
{
    struct str k, v;
    for (size_t at = 0; json_scan_member(object, &at, &k, &v);)
        if (str_eq_c(k, key)) return v;
    return (struct str){ NULL, 0 };
}
