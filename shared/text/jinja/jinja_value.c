/* jinja_value.c - limits of a rendering, containers, truth, equality and order of values.
 *
 * Dicts are searched linearly: those of chat templates are small, and a large one runs into the
 * limit of steps. Recursion over nested values counts as depth, so cyclic values end in
 * ERR_TOO_LONG.
 * LIMIT: JSON numbers without a fraction are integers here (1.0 prints as 1), because cJSON keeps
 * only the double.
 * Thread: the one that renders. */
#include "shared/text/jinja/jinja_value.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Levels of nested evaluation. More than the source can nest: a macro call takes several. */
enum { EVAL_DEPTH_MAX = 6 * JINJA_DEPTH_MAX };

enum status jinja_fail(struct jinja_run *run, enum status code, const char *fmt, ...)
{
    char text[ERR_TEXT_MAX];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    return err_set(run->err, code, "chat template line %d: %s", run->line, text);
}

enum status jinja_run_step(struct jinja_run *run)
{
    if (++run->steps > JINJA_STEPS_MAX)
        return jinja_fail(run, ERR_TOO_LONG, "the template takes more than %d steps",
                          JINJA_STEPS_MAX);
    return OK;
}

enum status jinja_run_enter(struct jinja_run *run)
{
    if (run->depth >= EVAL_DEPTH_MAX)
        return jinja_fail(run, ERR_TOO_LONG, "evaluation is nested more than %d levels",
                          EVAL_DEPTH_MAX);
    run->depth++;
    return jinja_run_step(run);
}

void jinja_run_leave(struct jinja_run *run) { run->depth--; }

enum status jinja_run_alloc(struct jinja_run *run, size_t n, size_t size, void *out)
{
    size_t left = run->arena.used < JINJA_MEMORY_MAX ? JINJA_MEMORY_MAX - run->arena.used : 0;
    if (size && n > left / size)
        return jinja_fail(run, ERR_TOO_LONG, "rendering takes more than %d MiB",
                          JINJA_MEMORY_MAX >> 20);
    void *p = arena_alloc(&run->arena, n * size > 0 ? n * size : 1);
    memcpy(out, &p, sizeof p);
    jinja_run_spend(run, n * size / 64);
    return OK;
}

enum status jinja_run_write(struct jinja_run *run, struct str s)
{
    if (s.n > (size_t)JINJA_OUTPUT_MAX - run->written)
        return jinja_fail(run, ERR_TOO_LONG, "the rendered text has more than %d MiB",
                          JINJA_OUTPUT_MAX >> 20);
    run->written += s.n;
    buf_add_str(run->out, s);
    jinja_run_spend(run, s.n / 64);
    return OK;
}

enum status jv_concat(struct jinja_run *run, struct str a, struct str b, struct jv *out)
{
    char *p = NULL;
    TRY(jinja_run_alloc(run, a.n + b.n, 1, &p));
    if (a.n) memcpy(p, a.p, a.n);
    if (b.n) memcpy(p + a.n, b.p, b.n);
    *out = jv_str((struct str){ p, a.n + b.n });
    return OK;
}

enum status jv_copy(struct jinja_run *run, struct str s, struct jv *out)
{
    return jv_concat(run, s, STR(""), out);
}

enum status jv_take(struct jinja_run *run, struct buf *b, struct jv *out)
{
    enum status st = jv_copy(run, buf_str(b), out);
    buf_release(b);
    return st;
}

/* ---- containers ---- */

enum status jv_list_new(struct jinja_run *run, enum jv_form form, size_t cap, struct jv *out)
{
    struct jv_list *l = NULL;
    TRY(jinja_run_alloc(run, 1, sizeof *l, &l));
    TRY(jinja_run_alloc(run, cap, sizeof *l->items, &l->items));
    l->cap = cap;
    l->form = form;
    *out = (struct jv){ .kind = JV_LIST, .list = l };
    return OK;
}

enum status jv_list_push(struct jinja_run *run, struct jv_list *l, struct jv v)
{
    if (l->len == l->cap) {
        struct jv *items = NULL;
        size_t cap = l->cap ? l->cap * 2 : 4;
        TRY(jinja_run_alloc(run, cap, sizeof *items, &items));
        if (l->len) memcpy(items, l->items, l->len * sizeof *items);
        l->items = items;
        l->cap = cap;
    }
    l->items[l->len++] = v;
    return OK;
}

enum status jv_pair_new(struct jinja_run *run, struct jv a, struct jv b, struct jv *out)
{
    TRY(jv_list_new(run, JV_FORM_TUPLE, 2, out));
    TRY(jv_list_push(run, out->list, a));
    return jv_list_push(run, out->list, b);
}

enum status jv_dict_new(struct jinja_run *run, enum jv_kind kind, size_t cap, struct jv *out)
{
    struct jv_dict *d = NULL;
    TRY(jinja_run_alloc(run, 1, sizeof *d, &d));
    TRY(jinja_run_alloc(run, cap, sizeof *d->pairs, &d->pairs));
    d->cap = cap;
    *out = (struct jv){ .kind = kind, .dict = d };
    return OK;
}

static enum status dict_append(struct jinja_run *run, struct jv_dict *d, struct jv key,
                               struct jv value)
{
    if (d->len == d->cap) {
        struct jv_pair *pairs = NULL;
        size_t cap = d->cap ? d->cap * 2 : 4;
        TRY(jinja_run_alloc(run, cap, sizeof *pairs, &pairs));
        if (d->len) memcpy(pairs, d->pairs, d->len * sizeof *pairs);
        d->pairs = pairs;
        d->cap = cap;
    }
    d->pairs[d->len++] = (struct jv_pair){ key, value };
    return OK;
}

enum status jv_dict_put(struct jinja_run *run, struct jv_dict *d, struct jv key, struct jv value)
{
    struct jv *old;
    if (key.kind > JV_LIST)
        return jinja_fail(run, ERR_FORMAT, "a %s cannot be the key of a dict", jv_type_name(&key));
    TRY(jv_check_hashable(run, &key));
    TRY(jv_dict_find(run, d, &key, &old));
    if (!old) return dict_append(run, d, key, value);
    *old = value;
    return OK;
}

/* Searches from the end: of equal keys in the caller's JSON the last one counts, as in Python. */
struct jv *jv_dict_get(struct jinja_run *run, const struct jv_dict *d, struct str key)
{
    jinja_run_spend(run, d->len / 16);
    for (size_t i = d->len; i-- > 0;)
        if (d->pairs[i].key.kind == JV_STRING && str_eq(d->pairs[i].key.s, key))
            return &d->pairs[i].value;
    return NULL;
}

enum status jv_dict_find(struct jinja_run *run, const struct jv_dict *d, const struct jv *key,
                         struct jv **out)
{
    *out = NULL;
    if (key->kind == JV_STRING) {
        *out = jv_dict_get(run, d, key->s);
        return OK;
    }
    for (size_t i = d->len; i-- > 0;) {
        bool same;
        TRY(jv_equal(run, &d->pairs[i].key, key, &same));
        if (same) {
            *out = &d->pairs[i].value;
            return OK;
        }
    }
    return OK;
}

static enum status json_string(struct jinja_run *run, const char *s, bool copy, struct jv *out)
{
    struct str text = str_of(s);
    *out = jv_str(text);
    return copy ? jv_copy(run, text, out) : OK;
}

static enum status json_children(struct jinja_run *run, const cJSON *j, bool copy, struct jv *out)
{
    size_t n = 0;
    for (const cJSON *c = j->child; c; c = c->next) n++;
    if (cJSON_IsArray(j)) TRY(jv_list_new(run, JV_FORM_LIST, n, out));
    else TRY(jv_dict_new(run, JV_DICT, n, out));
    for (const cJSON *c = j->child; c; c = c->next) {
        struct jv key, value;
        TRY(jv_of_json(run, c, copy, &value));
        if (out->kind == JV_LIST) {
            TRY(jv_list_push(run, out->list, value));
        } else {
            TRY(json_string(run, c->string, copy, &key));
            TRY(dict_append(run, out->dict, key, value));
        }
    }
    return OK;
}

enum status jv_of_json(struct jinja_run *run, const cJSON *j, bool copy, struct jv *out)
{
    TRY(jinja_run_enter(run));
    enum status st = OK;
    if (cJSON_IsString(j)) st = json_string(run, j->valuestring, copy, out);
    else if (cJSON_IsArray(j) || cJSON_IsObject(j)) st = json_children(run, j, copy, out);
    else if (cJSON_IsBool(j)) *out = jv_bool(cJSON_IsTrue(j));
    else if (!cJSON_IsNumber(j)) *out = jv_none();
    else if (j->valuedouble == floor(j->valuedouble) && fabs(j->valuedouble) < 9e15)
        *out = jv_int((int64_t)j->valuedouble);
    else *out = jv_float(j->valuedouble);
    jinja_run_leave(run);
    return st;
}

/* ---- truth, equality, order ---- */

bool jv_truth(const struct jv *v)
{
    switch (v->kind) {
    case JV_UNDEFINED:
    case JV_NONE: return false;
    case JV_BOOL: return v->b;
    case JV_INT: return v->i != 0;
    case JV_FLOAT: return v->f != 0;
    case JV_STRING: return v->s.n > 0;
    case JV_LIST: return v->list->len > 0 || v->list->form == JV_FORM_ITERATOR;
    case JV_DICT: return v->dict->len > 0;
    default: return true;
    }
}

const char *jv_type_name(const struct jv *v)
{
    static const char *const names[] = { "undefined value", "none",   "bool",  "int",
                                         "float",           "string", "list",  "dict",
                                         "namespace",       "loop",   "macro", "function",
                                         "method" };
    return v->kind == JV_LIST && v->list->form == JV_FORM_TUPLE ? "tuple" : names[v->kind];
}

static enum status lists_equal(struct jinja_run *run, const struct jv_list *a,
                               const struct jv_list *b, bool *out)
{
    *out = a->form == b->form && a->len == b->len;
    for (size_t i = 0; *out && i < a->len; i++) TRY(jv_equal(run, &a->items[i], &b->items[i], out));
    return OK;
}

static enum status dicts_equal(struct jinja_run *run, const struct jv_dict *a,
                               const struct jv_dict *b, bool *out)
{
    *out = a->len == b->len;
    for (size_t i = 0; *out && i < a->len; i++) {
        struct jv *other;
        TRY(jv_dict_find(run, b, &a->pairs[i].key, &other));
        if (!other) *out = false;
        else TRY(jv_equal(run, &a->pairs[i].value, other, out));
    }
    return OK;
}

static enum status equal_at(struct jinja_run *run, const struct jv *a, const struct jv *b,
                            bool *out)
{
    if (jv_is_number(a) && jv_is_number(b)) {
        *out = jv_is_whole(a) && jv_is_whole(b) ? jv_whole(a) == jv_whole(b)
                                                : jv_number(a) == jv_number(b);
        return OK;
    }
    *out = false;
    if (a->kind != b->kind) return OK;
    switch (a->kind) {
    case JV_UNDEFINED:
    case JV_NONE: *out = true; return OK;
    case JV_STRING:
        *out = str_eq(a->s, b->s);
        jinja_run_spend(run, a->s.n == b->s.n ? a->s.n / 64 : 0);
        return OK;
    case JV_LIST:
        *out = a->list == b->list;
        return *out ? OK : lists_equal(run, a->list, b->list, out);
    case JV_DICT:
        *out = a->dict == b->dict;
        return *out ? OK : dicts_equal(run, a->dict, b->dict, out);
    case JV_FUNC: *out = a->fn == b->fn; return OK;
    case JV_NAMESPACE: *out = a->dict == b->dict; return OK;
    case JV_LOOP: *out = a->loop == b->loop; return OK;
    case JV_MACRO: *out = a->macro == b->macro; return OK;
    default: return OK;
    }
}

enum status jv_equal(struct jinja_run *run, const struct jv *a, const struct jv *b, bool *out)
{
    TRY(jinja_run_enter(run));
    enum status st = equal_at(run, a, b, out);
    jinja_run_leave(run);
    return st;
}

static int order_of(double a, double b) { return isnan(a) || isnan(b) ? 2 : a < b ? -1 : a > b; }

static enum status compare_lists(struct jinja_run *run, const struct jv_list *a,
                                 const struct jv_list *b, int *out)
{
    for (size_t i = 0; i < a->len && i < b->len; i++) {
        bool same;
        TRY(jv_equal(run, &a->items[i], &b->items[i], &same));
        if (!same) return jv_compare(run, &a->items[i], &b->items[i], out);
    }
    *out = a->len < b->len ? -1 : a->len > b->len;
    return OK;
}

enum status jv_compare(struct jinja_run *run, const struct jv *a, const struct jv *b, int *out)
{
    if (jv_is_number(a) && jv_is_number(b)) {
        if (jv_is_whole(a) && jv_is_whole(b))
            *out = jv_whole(a) < jv_whole(b) ? -1 : jv_whole(a) > jv_whole(b);
        else *out = order_of(jv_number(a), jv_number(b));
        return OK;
    }
    if (a->kind == JV_STRING && b->kind == JV_STRING) {
        size_t n = a->s.n < b->s.n ? a->s.n : b->s.n;
        int c = n ? memcmp(a->s.p, b->s.p, n) : 0;
        *out = c ? (c < 0 ? -1 : 1) : a->s.n < b->s.n ? -1 : a->s.n > b->s.n;
        jinja_run_spend(run, n / 64);
        return OK;
    }
    if (a->kind != JV_LIST || b->kind != JV_LIST || a->list->form != b->list->form)
        return jinja_fail(run, ERR_FORMAT, "%s and %s have no order", jv_type_name(a),
                          jv_type_name(b));
    TRY(jinja_run_enter(run));
    enum status st = compare_lists(run, a->list, b->list, out);
    jinja_run_leave(run);
    return st;
}

bool jv_is_iterator(const struct jv *v)
{
    return v->kind == JV_LIST && v->list->form == JV_FORM_ITERATOR;
}

enum status jv_check_hashable(struct jinja_run *run, const struct jv *v)
{
    enum status st = OK;
    if (v->kind == JV_DICT ||
        (v->kind == JV_LIST && v->list->form != JV_FORM_TUPLE && v->list->form != JV_FORM_ITERATOR))
        return jinja_fail(run, ERR_FORMAT,
                          "a %s cannot be the key of a dict, or be looked up in one",
                          jv_type_name(v));
    if (v->kind != JV_LIST || v->list->form != JV_FORM_TUPLE) return OK;
    TRY(jinja_run_enter(run));
    for (size_t i = 0; i < v->list->len && st == OK; i++)
        st = jv_check_hashable(run, &v->list->items[i]);
    jinja_run_leave(run);
    return st;
}

/* As Python's `in`: the items compared are used up. */
static enum status iterator_contains(struct jinja_run *run, struct jv_list *l,
                                     const struct jv *item, bool *out)
{
    while (l->len > 0 && !*out) {
        TRY(jv_equal(run, l->items, item, out));
        l->items++;
        l->len--;
        l->cap--;
    }
    return OK;
}

enum status jv_contains(struct jinja_run *run, const struct jv *container, const struct jv *item,
                        bool *out)
{
    *out = false;
    if (container->kind == JV_UNDEFINED) return OK;
    if (container->kind == JV_STRING) {
        if (item->kind != JV_STRING)
            return jinja_fail(run, ERR_FORMAT, "'in' a string needs a string, not a %s",
                              jv_type_name(item));
        jinja_run_spend(run, container->s.n / 16);
        *out = str_find(container->s, item->s) != SIZE_MAX;
        return OK;
    }
    if (container->kind == JV_DICT) {
        struct jv *found;
        TRY(jv_check_hashable(run, item));
        TRY(jv_dict_find(run, container->dict, item, &found));
        *out = found != NULL;
        return OK;
    }
    if (container->kind != JV_LIST)
        return jinja_fail(run, ERR_FORMAT, "'in' cannot look into a %s", jv_type_name(container));
    if (jv_is_iterator(container)) return iterator_contains(run, container->list, item, out);
    for (size_t i = 0; i < container->list->len && !*out; i++)
        TRY(jv_equal(run, &container->list->items[i], item, out));
    return OK;
}

static enum status characters(struct jinja_run *run, struct str s, const struct jv **items,
                              size_t *n)
{
    struct jv *chars;
    int32_t cp;
    size_t k = 0;
    TRY(jinja_run_alloc(run, jinja_utf8_len(s), sizeof *chars, &chars));
    for (size_t at = 0, len; at < s.n; at += len) {
        len = jinja_utf8_next(s, at, &cp);
        chars[k++] = jv_str((struct str){ s.p + at, len });
    }
    *items = chars;
    *n = k;
    return OK;
}

enum status jv_elements(struct jinja_run *run, const struct jv *v, const struct jv **items,
                        size_t *n)
{
    struct jv *keys;
    *items = NULL;
    *n = 0;
    switch (v->kind) {
    case JV_UNDEFINED: return OK;
    case JV_STRING: return characters(run, v->s, items, n);
    case JV_LIST:
        *items = v->list->items;
        *n = v->list->len;
        if (jv_is_iterator(v)) *v->list = (struct jv_list){ .form = JV_FORM_ITERATOR };
        return OK;
    case JV_DICT:
        TRY(jinja_run_alloc(run, v->dict->len, sizeof *keys, &keys));
        for (size_t i = 0; i < v->dict->len; i++) keys[i] = v->dict->pairs[i].key;
        *items = keys;
        *n = v->dict->len;
        return OK;
    default: return jinja_fail(run, ERR_FORMAT, "a %s cannot be iterated", jv_type_name(v));
    }
}
