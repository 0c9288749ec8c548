/* jinja_string.c - strings as sequences of Unicode code points: strip, slice, case, replace, join.
 *
 * Case is Unicode's (utf8proc), as in Python, but maps one code point to one (LIMIT: the sharp s
 * has no upper case). Invalid bytes are copied unchanged.
 * Thread: the one that renders. */
#include "shared/text/jinja/jinja_value.h"

#include <string.h>
#include <utf8proc.h>

#include "shared/text/utf8.h"

static bool strips(int32_t cp, const struct str *chars)
{
    if (!chars) return jinja_is_space(cp);
    int32_t other;
    for (size_t at = 0; at < chars->n;) {
        at += jinja_utf8_next(*chars, at, &other);
        if (other == cp) return true;
    }
    return false;
}

struct str jinja_strip(struct str s, const struct str *chars, bool left, bool right)
{
    int32_t cp;
    size_t from = 0, end = s.n;
    while (left && from < end) {
        size_t n = jinja_utf8_next(s, from, &cp);
        if (!strips(cp, chars)) break;
        from += n;
    }
    while (right && end > from) {
        size_t n = jinja_utf8_prev(s, end, &cp);
        if (!strips(cp, chars)) break;
        end -= n;
    }
    return (struct str){ s.p + from, end - from };
}

static bool is_line_end(int32_t cp)
{
    return (cp >= 10 && cp <= 13) || (cp >= 0x1C && cp <= 0x1E) || cp == 0x85 || cp == 0x2028 ||
           cp == 0x2029;
}

bool jinja_next_line(struct str *rest, struct str *line, size_t *n_end)
{
    int32_t cp;
    size_t at = 0, n = 0;
    if (rest->n == 0) return false;
    for (; at < rest->n; at += n) {
        n = jinja_utf8_next(*rest, at, &cp);
        if (is_line_end(cp)) break;
    }
    *line = str_sub(*rest, 0, at);
    *n_end = at == rest->n ? 0 : n;
    if (at + 1 < rest->n && rest->p[at] == '\r' && rest->p[at + 1] == '\n') *n_end = 2;
    *rest = str_sub(*rest, at + *n_end, SIZE_MAX);
    return true;
}

static enum status check_len(struct jinja_run *run, const struct buf *b)
{
    if (b->len > JINJA_OUTPUT_MAX)
        return jinja_fail(run, ERR_TOO_LONG, "a string grows over %d MiB", JINJA_OUTPUT_MAX >> 20);
    return OK;
}

/* An empty `from` matches between all characters, as in Python. */
static enum status replace_into(struct jinja_run *run, struct str s, struct str from, struct str to,
                                int64_t count, struct buf *b)
{
    size_t at = 0;
    int32_t cp;
    for (; count != 0; count--) {
        size_t gap = str_find(str_sub(s, at, SIZE_MAX), from);
        if (gap == SIZE_MAX) break;
        TRY(jinja_run_step(run));
        buf_add(b, s.p + at, gap);
        buf_add_str(b, to);
        TRY(check_len(run, b));
        at += gap + from.n;
        if (from.n) continue;
        if (at == s.n) return OK;
        size_t n = jinja_utf8_next(s, at, &cp);
        buf_add(b, s.p + at, n);
        at += n;
    }
    buf_add_str(b, str_sub(s, at, SIZE_MAX));
    return OK;
}

enum status jv_replace(struct jinja_run *run, struct str s, struct str from, struct str to,
                       int64_t count, struct jv *out)
{
    struct buf b = { 0 };
    enum status st = replace_into(run, s, from, to, count, &b);
    if (st == OK) return jv_take(run, &b, out);
    buf_release(&b);
    return st;
}

/* Is the code point part of a word? For str.title letters are, for the title filter everything but
 * - ( { [ < and blanks. */
static bool in_word(int32_t cp, enum jinja_case to)
{
    if (to == JINJA_TITLE_FILTER)
        return !jinja_is_space(cp) && !(cp > 0 && cp < 0x80 && strchr("-({[<", cp));
    return utf8proc_category(cp) >= UTF8PROC_CATEGORY_LU &&
           utf8proc_category(cp) <= UTF8PROC_CATEGORY_LT;
}

enum status jv_recase(struct jinja_run *run, struct str s, enum jinja_case to, struct jv *out)
{
    struct buf b = { 0 };
    int32_t cp;
    bool inside = false;
    for (size_t at = 0, n; at < s.n; at += n) {
        n = jinja_utf8_next(s, at, &cp);
        bool upper = to == JINJA_UPPER ||
                     (to == JINJA_CAPITALIZE ? at == 0 : to != JINJA_LOWER && !inside);
        inside = in_word(cp, to);
        int32_t other = upper ? utf8proc_toupper(cp) : utf8proc_tolower(cp);
        if (other == cp) {
            buf_add(&b, s.p + at, n);
        } else {
            char bytes[UTF8_CHAR_MAX];
            buf_add(&b, bytes, utf8_put(other, bytes));
        }
    }
    return jv_take(run, &b, out);
}

enum status jv_join(struct jinja_run *run, struct str glue, const struct jv *items, size_t n,
                    bool strings_only, struct jv *out)
{
    struct buf b = { 0 };
    enum status st = OK;
    for (size_t i = 0; i < n && st == OK; i++) {
        if (i) buf_add_str(&b, glue);
        if (strings_only && items[i].kind != JV_STRING)
            st = jinja_fail(run, ERR_FORMAT, "join: item %zu is a %s, not a string", i,
                            jv_type_name(&items[i]));
        else st = jinja_run_step(run);
        if (st == OK) st = jv_print(run, &items[i], &b);
        if (st == OK) st = check_len(run, &b);
    }
    if (st == OK) return jv_take(run, &b, out);
    buf_release(&b);
    return st;
}

/* ---- slices ---- */

struct slice {
    int64_t start, stop, step;
};

/* Reads a bound: a negative one counts from the end; clamped to [low, high]. */
static enum status slice_bound(struct jinja_run *run, const struct jv *v, int64_t absent,
                               int64_t len, int64_t low, int64_t high, int64_t *out)
{
    *out = absent;
    if (!v || v->kind == JV_NONE) return OK;
    if (!jv_is_whole(v))
        return jinja_fail(run, ERR_FORMAT, "a slice bound is a %s, not an integer",
                          jv_type_name(v));
    int64_t i = jv_whole(v);
    if (i < 0) i = i < -len ? low : i + len;
    *out = i < low ? low : i > high ? high : i;
    return OK;
}

static enum status slice_of(struct jinja_run *run, const struct jv *const bound[3], int64_t len,
                            struct slice *s)
{
    s->step = 1;
    if (bound[2] && bound[2]->kind != JV_NONE) {
        if (!jv_is_whole(bound[2]) || jv_whole(bound[2]) == 0)
            return jinja_fail(run, ERR_FORMAT, "a slice step must be an integer other than 0");
        s->step = jv_whole(bound[2]);
    }
    if (s->step > len + 1) s->step = len + 1; /* same elements; the additions cannot overflow */
    if (s->step < -len - 1) s->step = -len - 1;
    bool up = s->step > 0;
    TRY(slice_bound(run, bound[0], up ? 0 : len - 1, len, up ? 0 : -1, up ? len : len - 1,
                    &s->start));
    return slice_bound(run, bound[1], up ? len : -1, len, up ? 0 : -1, up ? len : len - 1,
                       &s->stop);
}

static bool slice_more(const struct slice *s, int64_t i)
{
    return s->step > 0 ? i < s->stop : i > s->stop;
}

static enum status slice_string(struct jinja_run *run, struct str text,
                                const struct jv *const bound[3], struct jv *out)
{
    struct slice s;
    const struct jv *chars;
    size_t n;
    TRY(slice_of(run, bound, (int64_t)jinja_utf8_len(text), &s));
    jinja_run_spend(run, text.n / 16);
    if (s.step == 1) {
        size_t from = jinja_utf8_offset(text, (size_t)s.start),
               to = jinja_utf8_offset(text, (size_t)s.stop);
        *out = jv_str((struct str){ text.p + from, to > from ? to - from : 0 });
        return OK;
    }
    const struct jv whole = jv_str(text);
    struct buf b = { 0 };
    TRY(jv_elements(run, &whole, &chars, &n));
    for (int64_t i = s.start; slice_more(&s, i); i += s.step) buf_add_str(&b, chars[i].s);
    return jv_take(run, &b, out);
}

enum status jv_slice(struct jinja_run *run, const struct jv *v, const struct jv *const bound[3],
                     struct jv *out)
{
    struct slice s;
    if (v->kind == JV_STRING) return slice_string(run, v->s, bound, out);
    if (v->kind == JV_UNDEFINED)
        return jinja_fail(run, ERR_FORMAT, "'%.*s' is undefined and cannot be sliced",
                          STR_ARG(v->s));
    if (v->kind != JV_LIST) {
        *out = jv_undefined(STR("a slice of something that has no parts"));
        return OK;
    }
    if (jv_is_iterator(v))
        return jinja_fail(run, ERR_FORMAT, "a lazy sequence cannot be sliced; use list before it");
    TRY(slice_of(run, bound, (int64_t)v->list->len, &s));
    TRY(jv_list_new(run, v->list->form, 0, out));
    for (int64_t i = s.start; slice_more(&s, i); i += s.step)
        TRY(jv_list_push(run, out->list, v->list->items[i]));
    return OK;
}
