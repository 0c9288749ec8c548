/* jinja_print.c - values as text: Python's str() and repr(), and tojson as Hugging Face defines it.
 *
 * tojson is json.dumps(ensure_ascii=False): separators ", " and ": " (with indent, "," and a
 * newline), nothing is escaped for HTML, keys keep their order unless sort_keys is given.
 * Thread: the one that renders. */
#include "shared/text/jinja/jinja_value.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

static enum status repr(struct jinja_run *run, const struct jv *v, struct buf *b);

/* As Python: the fewest digits that read back equal; an exponent below 1e-4 and from 1e16. */
static void print_float(double f, struct buf *b)
{
    char text[40], digits[24];
    int n_digits = 0, exponent = 0, precision = 0;
    if (isnan(f)) return buf_add_c(b, "nan");
    if (isinf(f)) return buf_add_c(b, f < 0 ? "-inf" : "inf");
    do snprintf(text, sizeof text, "%.*e", precision, f);
    while (strtod(text, NULL) != f && ++precision < 17);
    const char *p = text;
    if (*p == '-') buf_add_char(b, *p++);
    for (; *p && *p != 'e'; p++)
        if (*p != '.') digits[n_digits++] = *p;
    exponent = atoi(p + 1);
    if (exponent < -4 || exponent >= 16) {
        buf_add(b, digits, 1);
        if (n_digits > 1) buf_add_char(b, '.');
        buf_add(b, digits + 1, (size_t)n_digits - 1);
        buf_printf(b, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
    } else if (exponent < 0) {
        buf_add_c(b, "0.");
        for (int i = -1; i > exponent; i--) buf_add_char(b, '0');
        buf_add(b, digits, (size_t)n_digits);
    } else {
        for (int i = 0; i <= exponent; i++) buf_add_char(b, i < n_digits ? digits[i] : '0');
        buf_add_char(b, '.');
        if (n_digits > exponent + 1)
            buf_add(b, digits + exponent + 1, (size_t)(n_digits - exponent - 1));
        else buf_add_char(b, '0');
    }
}

static bool printable(int32_t cp)
{
    if (cp == ' ') return true;
    switch (utf8proc_category(cp)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS: return false;
    default: return true;
    }
}

/* Appends a Python string literal: in single quotes, unless the text has those and no double
 * quotes. */
static void repr_string(struct str s, struct buf *b)
{
    char quote = str_find_char(s, '\'') != SIZE_MAX && str_find_char(s, '"') == SIZE_MAX ? '"'
                                                                                         : '\'';
    int32_t cp;
    buf_add_char(b, quote);
    for (size_t at = 0, n; at < s.n && b->len <= JINJA_OUTPUT_MAX; at += n) {
        n = jinja_utf8_next(s, at, &cp);
        if (cp == quote || cp == '\\') buf_add_char(b, '\\');
        if (cp == '\n') buf_add_c(b, "\\n");
        else if (cp == '\r') buf_add_c(b, "\\r");
        else if (cp == '\t') buf_add_c(b, "\\t");
        else if (printable(cp)) buf_add(b, s.p + at, n);
        else if (cp < 0x100) buf_printf(b, "\\x%02x", (unsigned)cp);
        else if (cp < 0x10000) buf_printf(b, "\\u%04x", (unsigned)cp);
        else buf_printf(b, "\\U%08x", (unsigned)cp);
    }
    buf_add_char(b, quote);
}

static enum status repr_list(struct jinja_run *run, const struct jv_list *l, struct buf *b)
{
    static const struct {
        const char *open, *close;
    } marks[] = {
        [JV_FORM_LIST] = { "[", "]" },
        [JV_FORM_TUPLE] = { "(", ")" },
        [JV_FORM_ITERATOR] = { "[", "]" },
        [JV_FORM_ITEMS] = { "dict_items([", "])" },
        [JV_FORM_KEYS] = { "dict_keys([", "])" },
        [JV_FORM_VALUES] = { "dict_values([", "])" },
    };
    buf_add_c(b, marks[l->form].open);
    for (size_t i = 0; i < l->len; i++) {
        if (i) buf_add_c(b, ", ");
        TRY(repr(run, &l->items[i], b));
    }
    if (l->form == JV_FORM_TUPLE && l->len == 1) buf_add_char(b, ',');
    buf_add_c(b, marks[l->form].close);
    return OK;
}

static enum status repr_dict(struct jinja_run *run, const struct jv_dict *d, struct buf *b)
{
    buf_add_char(b, '{');
    for (size_t i = 0; i < d->len; i++) {
        if (i) buf_add_c(b, ", ");
        TRY(repr(run, &d->pairs[i].key, b));
        buf_add_c(b, ": ");
        TRY(repr(run, &d->pairs[i].value, b));
    }
    buf_add_char(b, '}');
    return OK;
}

static enum status repr_at(struct jinja_run *run, const struct jv *v, struct buf *b)
{
    switch (v->kind) {
    case JV_UNDEFINED: buf_add_c(b, "Undefined"); return OK;
    case JV_NONE: buf_add_c(b, "None"); return OK;
    case JV_BOOL: buf_add_c(b, v->b ? "True" : "False"); return OK;
    case JV_INT: buf_printf(b, "%lld", (long long)v->i); return OK;
    case JV_FLOAT: print_float(v->f, b); return OK;
    case JV_STRING: repr_string(v->s, b); return OK;
    case JV_LIST: return repr_list(run, v->list, b);
    case JV_DICT: return repr_dict(run, v->dict, b);
    case JV_NAMESPACE:
        buf_add_c(b, "<Namespace ");
        TRY(repr_dict(run, v->dict, b));
        buf_add_char(b, '>');
        return OK;
    default: buf_printf(b, "<%s>", jv_type_name(v)); return OK;
    }
}

/* Bounds the length of `b`, and counts the work for what came after `before`. */
static enum status check_size(struct jinja_run *run, const struct buf *b, size_t before)
{
    jinja_run_spend(run, (b->len - before) / 64);
    if (b->len > JINJA_OUTPUT_MAX)
        return jinja_fail(run, ERR_TOO_LONG, "a value prints as more than %d MiB",
                          JINJA_OUTPUT_MAX >> 20);
    return OK;
}

static enum status repr(struct jinja_run *run, const struct jv *v, struct buf *b)
{
    size_t before = b->len;
    TRY(jinja_run_enter(run));
    enum status st = repr_at(run, v, b);
    jinja_run_leave(run);
    return st == OK ? check_size(run, b, before) : st;
}

enum status jv_print(struct jinja_run *run, const struct jv *v, struct buf *b)
{
    if (v->kind == JV_UNDEFINED) return OK;
    if (v->kind != JV_STRING) return repr(run, v, b);
    buf_add_str(b, v->s);
    return OK;
}

enum status jv_text(struct jinja_run *run, const struct jv *v, struct str *out)
{
    *out = STR("");
    if (v->kind == JV_STRING) *out = v->s;
    if (v->kind == JV_STRING || v->kind == JV_UNDEFINED) return OK;
    struct buf b = { 0 };
    struct jv text;
    enum status st = repr(run, v, &b);
    if (st != OK) {
        buf_release(&b);
        return st;
    }
    TRY(jv_take(run, &b, &text));
    *out = text.s;
    return OK;
}

/* ---- tojson ---- */

struct json_style {
    struct str item_sep, key_sep, indent;
    bool pretty, ascii, sort;
};

static void json_string(const struct json_style *style, struct str s, struct buf *b)
{
    static const char from[] = "\"\\\n\r\t\b\f", to[] = "\"\\nrtbf";
    int32_t cp;
    buf_add_char(b, '"');
    for (size_t at = 0, n; at < s.n && b->len <= JINJA_OUTPUT_MAX; at += n) {
        n = jinja_utf8_next(s, at, &cp);
        const char *special = cp > 0 && cp < 0x80 ? strchr(from, cp) : NULL;
        if (special) buf_printf(b, "\\%c", to[special - from]);
        else if (cp < 0x20 || (style->ascii && cp >= 0x7F && cp < 0x10000))
            buf_printf(b, "\\u%04x", (unsigned)cp);
        else if (style->ascii && cp >= 0x10000)
            buf_printf(b, "\\u%04x\\u%04x", 0xD800 + (unsigned)((cp - 0x10000) >> 10),
                       0xDC00 + (unsigned)((cp - 0x10000) & 0x3FF));
        else buf_add(b, s.p + at, n);
    }
    buf_add_char(b, '"');
}

static void json_line(const struct json_style *style, int level, struct buf *b)
{
    if (!style->pretty) return;
    buf_add_char(b, '\n');
    for (int i = 0; i < level; i++) buf_add_str(b, style->indent);
}

static void json_float(double f, struct buf *b)
{
    if (isnan(f)) buf_add_c(b, "NaN");
    else if (isinf(f)) buf_add_c(b, f < 0 ? "-Infinity" : "Infinity");
    else print_float(f, b);
}

static enum status json_value(struct jinja_run *run, const struct json_style *style,
                              const struct jv *v, int level, struct buf *b);

static enum status json_list(struct jinja_run *run, const struct json_style *style,
                             const struct jv_list *l, int level, struct buf *b)
{
    buf_add_char(b, '[');
    for (size_t i = 0; i < l->len; i++) {
        if (i) buf_add_str(b, style->item_sep);
        json_line(style, level + 1, b);
        TRY(json_value(run, style, &l->items[i], level + 1, b));
    }
    if (l->len) json_line(style, level, b);
    buf_add_char(b, ']');
    return OK;
}

static enum status json_key(struct jinja_run *run, const struct json_style *style,
                            const struct jv *key, struct buf *b)
{
    if (key->kind == JV_STRING) {
        json_string(style, key->s, b);
        return OK;
    }
    if (key->kind > JV_FLOAT || key->kind == JV_UNDEFINED)
        return jinja_fail(run, ERR_FORMAT, "tojson: a %s cannot be a key", jv_type_name(key));
    buf_add_char(b, '"');
    TRY(json_value(run, style, key, 0, b));
    buf_add_char(b, '"');
    return OK;
}

/* Lists the pairs in the order of their keys. Insertion sort is quadratic; the work is counted. */
static enum status sorted_pairs(struct jinja_run *run, const struct jv_dict *d,
                                const struct jv_pair ***out)
{
    const struct jv_pair **order;
    TRY(jinja_run_alloc(run, d->len, sizeof *order, &order));
    for (size_t i = 0; i < d->len; i++) {
        size_t at = i;
        for (int c = 1; at > 0; at--) {
            TRY(jinja_run_step(run));
            TRY(jv_compare(run, &order[at - 1]->key, &d->pairs[i].key, &c));
            if (c <= 0) break;
            order[at] = order[at - 1];
        }
        order[at] = &d->pairs[i];
    }
    *out = order;
    return OK;
}

static enum status json_dict(struct jinja_run *run, const struct json_style *style,
                             const struct jv_dict *d, int level, struct buf *b)
{
    const struct jv_pair **order = NULL;
    if (style->sort) TRY(sorted_pairs(run, d, &order));
    buf_add_char(b, '{');
    for (size_t i = 0; i < d->len; i++) {
        const struct jv_pair *pair = order ? order[i] : &d->pairs[i];
        if (i) buf_add_str(b, style->item_sep);
        json_line(style, level + 1, b);
        TRY(json_key(run, style, &pair->key, b));
        buf_add_str(b, style->key_sep);
        TRY(json_value(run, style, &pair->value, level + 1, b));
    }
    if (d->len) json_line(style, level, b);
    buf_add_char(b, '}');
    return OK;
}

static enum status json_at(struct jinja_run *run, const struct json_style *style,
                           const struct jv *v, int level, struct buf *b)
{
    switch (v->kind) {
    case JV_NONE: buf_add_c(b, "null"); return OK;
    case JV_BOOL: buf_add_c(b, v->b ? "true" : "false"); return OK;
    case JV_INT: buf_printf(b, "%lld", (long long)v->i); return OK;
    case JV_FLOAT: json_float(v->f, b); return OK;
    case JV_STRING: json_string(style, v->s, b); return OK;
    case JV_LIST:
        if (v->list->form > JV_FORM_TUPLE)
            return jinja_fail(
                run, ERR_FORMAT,
                "tojson: a lazy sequence or a view cannot be written as JSON; use list before it");
        return json_list(run, style, v->list, level, b);
    case JV_DICT: return json_dict(run, style, v->dict, level, b);
    default:
        return jinja_fail(run, ERR_FORMAT, "tojson: a%s %s is not a JSON value",
                          v->kind == JV_UNDEFINED ? "n" : "", jv_type_name(v));
    }
}

static enum status json_value(struct jinja_run *run, const struct json_style *style,
                              const struct jv *v, int level, struct buf *b)
{
    size_t before = b->len;
    TRY(jinja_run_enter(run));
    enum status st = json_at(run, style, v, level, b);
    jinja_run_leave(run);
    return st == OK ? check_size(run, b, before) : st;
}

/* Reads the arguments: indent is a number of blanks or a string, separators a pair of strings. */
static enum status json_style_of(const struct jinja_call *c, struct json_style *style)
{
    static const char blanks[] = "                                ";
    const struct jv *indent = c->arg[1], *seps = c->arg[2];
    *style = (struct json_style){ .item_sep = STR(", "), .key_sep = STR(": ") };
    style->ascii = c->arg[0] && jv_truth(c->arg[0]);
    style->sort = c->arg[3] && jv_truth(c->arg[3]);
    if (indent && indent->kind != JV_NONE) {
        style->pretty = true;
        style->item_sep = STR(",");
        if (indent->kind == JV_STRING && indent->s.n < sizeof blanks) style->indent = indent->s;
        else if (jv_is_whole(indent) && jv_whole(indent) <= (int64_t)sizeof blanks - 1)
            style->indent = (struct str){ blanks,
                                          jv_whole(indent) > 0 ? (size_t)jv_whole(indent) : 0 };
        else return jinja_bad_arg(c, "an indent of at most 32 characters", indent);
    }
    if (!seps || seps->kind == JV_NONE) return OK;
    if (seps->kind != JV_LIST || seps->list->len != 2 || seps->list->items[0].kind != JV_STRING ||
        seps->list->items[1].kind != JV_STRING)
        return jinja_bad_arg(c, "separators as a pair of strings", seps);
    style->item_sep = seps->list->items[0].s;
    style->key_sep = seps->list->items[1].s;
    return OK;
}

enum status jinja_tojson(const struct jinja_call *c, struct jv *out)
{
    struct json_style style;
    struct buf b = { 0 };
    TRY(json_style_of(c, &style));
    enum status st = json_value(c->run, &style, &c->self, 0, &b);
    if (st == OK) return jv_take(c->run, &b, out);
    buf_release(&b);
    return st;
}
