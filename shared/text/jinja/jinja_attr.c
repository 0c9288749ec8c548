/* jinja_attr.c - members of values, methods of dicts, lists and loops, and global functions.
 *
 * x.name looks for a method or attribute first, then for the key; x['name'] the other way round.
 * Both give undefined when there is neither, and are an error on an undefined x.
 *   dict        items keys values get pop copy update setdefault
 *   list        append pop extend insert index count copy
 *   loop        index index0 revindex revindex0 first last length depth depth0 previtem nextitem
 *               cycle() changed()
 *   functions   range namespace dict raise_exception strftime_now
 * Thread: the one that renders. */
#include "shared/text/jinja/jinja_value.h"

#include "shared/base/list.h"

#include <string.h>
#include <time.h>

enum {
    RANGE_MAX = 100000, /* as in Jinja's sandbox, which Hugging Face uses */
    STRFTIME_MAX = 4096
};

/* ---- dict methods ---- */

/* Lists the keys, values or pairs of a dict, as `form` says. */
static enum status dict_view(struct jinja_run *run, const struct jv_dict *d, enum jv_form form,
                             struct jv *out)
{
    TRY(jv_list_new(run, form, d->len, out));
    for (size_t i = 0; i < d->len; i++) {
        struct jv v = form == JV_FORM_KEYS ? d->pairs[i].key : d->pairs[i].value;
        if (form == JV_FORM_ITEMS) TRY(jv_pair_new(run, d->pairs[i].key, d->pairs[i].value, &v));
        TRY(jv_list_push(run, out->list, v));
    }
    return OK;
}

static enum status dict_items(const struct jinja_call *c, struct jv *out)
{
    return dict_view(c->run, c->self.dict, JV_FORM_ITEMS, out);
}
static enum status dict_keys(const struct jinja_call *c, struct jv *out)
{
    return dict_view(c->run, c->self.dict, JV_FORM_KEYS, out);
}
static enum status dict_values(const struct jinja_call *c, struct jv *out)
{
    return dict_view(c->run, c->self.dict, JV_FORM_VALUES, out);
}

static enum status dict_get(const struct jinja_call *c, struct jv *out)
{
    struct jv *found;
    TRY(jv_check_hashable(c->run, c->arg[0]));
    TRY(jv_dict_find(c->run, c->self.dict, c->arg[0], &found));
    *out = found ? *found : c->arg[1] ? *c->arg[1] : jv_none();
    return OK;
}

static enum status dict_pop(const struct jinja_call *c, struct jv *out)
{
    struct jv_dict *d = c->self.dict;
    struct jv *found;
    TRY(jv_check_hashable(c->run, c->arg[0]));
    TRY(jv_dict_find(c->run, d, c->arg[0], &found));
    if (!found && !c->arg[1])
        return jinja_fail(c->run, ERR_FORMAT, "pop: the dict has no such key");
    *out = found ? *found : *c->arg[1];
    if (!found) return OK;
    size_t i = (size_t)(LIST_ENTRY(found, struct jv_pair, value) - d->pairs);
    memmove(&d->pairs[i], &d->pairs[i + 1], (d->len - i - 1) * sizeof *d->pairs);
    jinja_run_spend(c->run, d->len / 16);
    d->len--;
    return OK;
}

static enum status dict_put_all(struct jinja_run *run, struct jv_dict *to,
                                const struct jv_dict *from)
{
    for (size_t i = 0; i < from->len; i++) {
        TRY(jinja_run_step(run));
        TRY(jv_dict_put(run, to, from->pairs[i].key, from->pairs[i].value));
    }
    return OK;
}

static enum status dict_put_named(const struct jinja_call *c, struct jv_dict *to)
{
    for (size_t i = 0; i < c->n_named; i++)
        TRY(jv_dict_put(c->run, to, jv_str(c->names[i]), c->named[i]));
    return OK;
}

/* Fills `to` from the arguments of dict(), namespace() or update(): a dict or a list of pairs, then
 * named values. */
static enum status dict_fill(const struct jinja_call *c, struct jv_dict *to)
{
    const struct jv *items;
    size_t n;
    if (c->n_pos > 1)
        return jinja_fail(c->run, ERR_FORMAT, "%s takes at most 1 positional argument", c->name);
    if (c->n_pos && c->pos[0].kind == JV_DICT) {
        TRY(dict_put_all(c->run, to, c->pos[0].dict));
    } else if (c->n_pos) {
        TRY(jv_elements(c->run, &c->pos[0], &items, &n));
        for (size_t i = 0; i < n; i++) {
            if (items[i].kind != JV_LIST || items[i].list->len != 2)
                return jinja_bad_arg(c, "pairs", &items[i]);
            TRY(jv_dict_put(c->run, to, items[i].list->items[0], items[i].list->items[1]));
        }
    }
    return dict_put_named(c, to);
}

static enum status dict_copy(const struct jinja_call *c, struct jv *out)
{
    TRY(jv_dict_new(c->run, JV_DICT, c->self.dict->len, out));
    return dict_put_all(c->run, out->dict, c->self.dict);
}

static enum status dict_update(const struct jinja_call *c, struct jv *out)
{
    *out = jv_none();
    return dict_fill(c, c->self.dict);
}

static enum status dict_setdefault(const struct jinja_call *c, struct jv *out)
{
    struct jv *found;
    TRY(jv_check_hashable(c->run, c->arg[0]));
    TRY(jv_dict_find(c->run, c->self.dict, c->arg[0], &found));
    *out = found ? *found : c->arg[1] ? *c->arg[1] : jv_none();
    return found ? OK : jv_dict_put(c->run, c->self.dict, *c->arg[0], *out);
}

static const struct jinja_fn dict_methods[] = {
    { .name = "items", .call = dict_items },
    { .name = "keys", .call = dict_keys },
    { .name = "values", .call = dict_values },
    { .name = "get", .call = dict_get, .n_min = 1, .params = { "key", "default" } },
    { .name = "pop", .call = dict_pop, .n_min = 1, .params = { "key", "default" } },
    { .name = "copy", .call = dict_copy },
    { .name = "update", .call = dict_update, .open = true },
    { .name = "setdefault", .call = dict_setdefault, .n_min = 1, .params = { "key", "default" } },
};

/* ---- list methods ---- */

static enum status list_append(const struct jinja_call *c, struct jv *out)
{
    *out = jv_none();
    return jv_list_push(c->run, c->self.list, *c->arg[0]);
}

static enum status list_extend(const struct jinja_call *c, struct jv *out)
{
    const struct jv *items;
    size_t n;
    *out = jv_none();
    TRY(jv_elements(c->run, c->arg[0], &items, &n));
    for (size_t i = 0; i < n; i++) TRY(jv_list_push(c->run, c->self.list, items[i]));
    return OK;
}

/* Reads a position; a negative one counts from the end. */
static enum status list_position(const struct jinja_call *c, const struct jv *v, int64_t absent,
                                 int64_t *out)
{
    *out = absent;
    if (!v) return OK;
    if (!jv_is_whole(v)) return jinja_bad_arg(c, "an integer", v);
    *out = jv_whole(v) < 0 ? jv_whole(v) + (int64_t)c->self.list->len : jv_whole(v);
    return OK;
}

static enum status list_insert(const struct jinja_call *c, struct jv *out)
{
    struct jv_list *l = c->self.list;
    int64_t at;
    *out = jv_none();
    TRY(list_position(c, c->arg[0], 0, &at));
    size_t i = at < 0 ? 0 : at > (int64_t)l->len ? l->len : (size_t)at;
    TRY(jv_list_push(c->run, l, *c->arg[1]));
    memmove(&l->items[i + 1], &l->items[i], (l->len - 1 - i) * sizeof *l->items);
    jinja_run_spend(c->run, l->len / 16);
    l->items[i] = *c->arg[1];
    return OK;
}

static enum status list_pop(const struct jinja_call *c, struct jv *out)
{
    struct jv_list *l = c->self.list;
    int64_t at;
    TRY(list_position(c, c->arg[0], (int64_t)l->len - 1, &at));
    if (at < 0 || at >= (int64_t)l->len)
        return jinja_fail(c->run, ERR_FORMAT, "pop: the list has no such index");
    *out = l->items[at];
    memmove(&l->items[at], &l->items[at + 1], (l->len - (size_t)at - 1) * sizeof *l->items);
    jinja_run_spend(c->run, l->len / 16);
    l->len--;
    return OK;
}

static enum status list_index(const struct jinja_call *c, struct jv *out)
{
    for (size_t i = 0; i < c->self.list->len; i++) {
        bool same;
        TRY(jv_equal(c->run, &c->self.list->items[i], c->arg[0], &same));
        *out = jv_int((int64_t)i);
        if (same) return OK;
    }
    return jinja_fail(c->run, ERR_FORMAT, "index: the list has no such item");
}

static enum status list_count(const struct jinja_call *c, struct jv *out)
{
    *out = jv_int(0);
    for (size_t i = 0; i < c->self.list->len; i++) {
        bool same;
        TRY(jv_equal(c->run, &c->self.list->items[i], c->arg[0], &same));
        out->i += same;
    }
    return OK;
}

static enum status list_copy(const struct jinja_call *c, struct jv *out)
{
    TRY(jv_list_new(c->run, JV_FORM_LIST, c->self.list->len, out));
    for (size_t i = 0; i < c->self.list->len; i++)
        TRY(jv_list_push(c->run, out->list, c->self.list->items[i]));
    return OK;
}

/* Tuples have the first two only (method_of). */
static const struct jinja_fn list_methods[] = {
    { .name = "index", .call = list_index, .n_min = 1, .params = { "value" } },
    { .name = "count", .call = list_count, .n_min = 1, .params = { "value" } },
    { .name = "append", .call = list_append, .n_min = 1, .params = { "item" } },
    { .name = "pop", .call = list_pop, .params = { "index" } },
    { .name = "extend", .call = list_extend, .n_min = 1, .params = { "items" } },
    { .name = "insert", .call = list_insert, .n_min = 2, .params = { "index", "item" } },
    { .name = "copy", .call = list_copy },
};

/* ---- loop ---- */

static enum status loop_cycle(const struct jinja_call *c, struct jv *out)
{
    if (!c->n_pos) return jinja_fail(c->run, ERR_FORMAT, "cycle needs at least one item");
    *out = c->pos[c->self.loop->i % c->n_pos];
    return OK;
}

static enum status loop_changed(const struct jinja_call *c, struct jv *out)
{
    struct jv now;
    bool same;
    TRY(jv_list_new(c->run, JV_FORM_TUPLE, c->n_pos, &now));
    for (size_t i = 0; i < c->n_pos; i++) TRY(jv_list_push(c->run, now.list, c->pos[i]));
    TRY(jv_equal(c->run, &now, &c->self.loop->changed, &same));
    c->self.loop->changed = now;
    *out = jv_bool(!same);
    return OK;
}

static const struct jinja_fn loop_methods[] = {
    { .name = "cycle", .call = loop_cycle, .open = true },
    { .name = "changed", .call = loop_changed, .open = true },
};

static bool loop_attr(const struct jinja_loop *l, struct str name, struct jv *out)
{
    const struct {
        const char *name;
        struct jv value;
    } attrs[] = {
        { "index", jv_int((int64_t)l->i + 1) },
        { "index0", jv_int((int64_t)l->i) },
        { "revindex", jv_int((int64_t)(l->n - l->i)) },
        { "revindex0", jv_int((int64_t)(l->n - l->i) - 1) },
        { "first", jv_bool(l->i == 0) },
        { "last", jv_bool(l->i + 1 == l->n) },
        { "length", jv_int((int64_t)l->n) },
        { "depth", jv_int(1) },
        { "depth0", jv_int(0) }, /* loops are never recursive here */
        { "previtem", l->i ? l->items[l->i - 1] : jv_undefined(STR("there is no previous item")) },
        { "nextitem",
          l->i + 1 < l->n ? l->items[l->i + 1] : jv_undefined(STR("there is no next item")) },
    };
    for (size_t i = 0; i < COUNT_OF(attrs); i++) {
        if (!str_eq_c(name, attrs[i].name)) continue;
        *out = attrs[i].value;
        return true;
    }
    return false;
}

/* ---- members ---- */

static const struct jinja_fn *method_of(const struct jv *v, struct str name)
{
    if (v->kind == JV_STRING) return jinja_string_method_find(name);
    if (v->kind == JV_DICT) return jinja_fn_find(dict_methods, COUNT_OF(dict_methods), name);
    if (v->kind == JV_LOOP) return jinja_fn_find(loop_methods, COUNT_OF(loop_methods), name);
    if (v->kind != JV_LIST || v->list->form > JV_FORM_TUPLE) return NULL;
    return jinja_fn_find(list_methods, v->list->form == JV_FORM_TUPLE ? 2 : COUNT_OF(list_methods),
                         name);
}

/* Finds a method, bound to its object, or an attribute; *found false: there is none. */
static enum status attribute(struct jinja_run *run, const struct jv *v, struct str name,
                             bool *found, struct jv *out)
{
    const struct jinja_fn *fn = method_of(v, name);
    *found = true;
    if (fn) {
        struct jinja_method *m;
        TRY(jinja_run_alloc(run, 1, sizeof *m, &m));
        *m = (struct jinja_method){ *v, fn };
        *out = (struct jv){ .kind = JV_METHOD, .method = m };
        return OK;
    }
    struct jv *member = v->kind == JV_NAMESPACE ? jv_dict_get(run, v->dict, name) : NULL;
    if (member) *out = *member;
    *found = member || (v->kind == JV_LOOP && loop_attr(v->loop, name, out));
    return OK;
}

enum status jv_attr(struct jinja_run *run, const struct jv *v, struct str name, struct jv *out)
{
    bool found;
    if (v->kind == JV_UNDEFINED)
        return jinja_fail(run, ERR_FORMAT, "'%.*s' is undefined, it has no '%.*s'", STR_ARG(v->s),
                          STR_ARG(name));
    TRY(attribute(run, v, name, &found, out));
    if (found) return OK;
    struct jv *member = v->kind == JV_DICT ? jv_dict_get(run, v->dict, name) : NULL;
    *out = member ? *member : jv_undefined(name);
    return OK;
}

static enum status element(struct jinja_run *run, const struct jv *v, int64_t i, struct jv *out)
{
    bool is_list = v->kind == JV_LIST && v->list->form <= JV_FORM_TUPLE;
    int64_t len = is_list                ? (int64_t)v->list->len
                  : v->kind == JV_STRING ? (int64_t)jinja_utf8_len(v->s)
                                         : 0;
    *out = jv_undefined(STR("an index out of range"));
    if (i < 0) i += len;
    if (i < 0 || i >= len) return OK;
    if (is_list) {
        *out = v->list->items[i];
        return OK;
    }
    int32_t cp;
    size_t at = jinja_utf8_offset(v->s, (size_t)i);
    jinja_run_spend(run, v->s.n / 16);
    *out = jv_str((struct str){ v->s.p + at, jinja_utf8_next(v->s, at, &cp) });
    return OK;
}

enum status jv_item(struct jinja_run *run, const struct jv *v, const struct jv *key, struct jv *out)
{
    bool found;
    if (v->kind == JV_UNDEFINED)
        return jinja_fail(run, ERR_FORMAT, "'%.*s' is undefined, it has no members", STR_ARG(v->s));
    if (v->kind == JV_DICT) {
        struct jv *member;
        TRY(jv_dict_find(run, v->dict, key, &member));
        if (member) {
            *out = *member;
            return OK;
        }
    } else if (jv_is_whole(key) && !jv_is_iterator(v)) {
        return element(run, v, jv_whole(key), out);
    }
    *out = jv_undefined(key->kind == JV_STRING ? key->s : STR("a member"));
    if (key->kind != JV_STRING) return OK;
    TRY(attribute(run, v, key->s, &found, out));
    if (!found) *out = jv_undefined(key->s);
    return OK;
}

/* ---- global functions ---- */

static enum status fn_range(const struct jinja_call *c, struct jv *out)
{
    int64_t v[3] = { 0, 0, 1 };
    for (size_t i = 0; i < c->n_pos && i < 3; i++) {
        if (!jv_is_whole(&c->pos[i])) return jinja_bad_arg(c, "integers", &c->pos[i]);
        v[i] = jv_whole(&c->pos[i]);
    }
    if (c->n_pos < 1 || c->n_pos > 3 || c->n_named || v[2] == 0)
        return jinja_fail(c->run, ERR_FORMAT, "range needs 1 to 3 integers, the step not 0");
    if (c->n_pos == 1) v[1] = v[0], v[0] = 0;
    TRY(jv_list_new(c->run, JV_FORM_LIST, 0, out));
    for (int64_t i = v[0]; v[2] > 0 ? i < v[1] : i > v[1];) {
        if (out->list->len == RANGE_MAX)
            return jinja_fail(c->run, ERR_TOO_LONG, "range has more than %d numbers", RANGE_MAX);
        TRY(jinja_run_step(c->run));
        TRY(jv_list_push(c->run, out->list, jv_int(i)));
        if (__builtin_add_overflow(i, v[2], &i)) break;
    }
    return OK;
}

static enum status fn_namespace(const struct jinja_call *c, struct jv *out)
{
    TRY(jv_dict_new(c->run, JV_NAMESPACE, 0, out));
    return dict_fill(c, out->dict);
}

static enum status fn_dict(const struct jinja_call *c, struct jv *out)
{
    TRY(jv_dict_new(c->run, JV_DICT, 0, out));
    return dict_fill(c, out->dict);
}

/* raise_exception: the template refuses its input. Clients read its message, so it has no line. */
static enum status fn_raise(const struct jinja_call *c, struct jv *out)
{
    struct str text;
    *out = jv_none();
    TRY(jv_text(c->run, c->arg[0], &text));
    if (str_trim(text).n == 0)
        text = STR("the chat template refuses these messages and does not say why");
    return err_set(c->run->err, ERR_INVALID, "%.*s",
                   (int)(text.n < ERR_TEXT_MAX ? text.n : ERR_TEXT_MAX), text.p);
}

static enum status fn_strftime(const struct jinja_call *c, struct jv *out)
{
    if (c->arg[0]->kind != JV_STRING || c->arg[0]->s.n >= STRFTIME_MAX)
        return jinja_bad_arg(c, "a short format string", c->arg[0]);
    char format[STRFTIME_MAX + 1], text[STRFTIME_MAX];
    struct tm tm;
    time_t now = (time_t)c->run->now;
    if (!gmtime_r(&now, &tm))
        return jinja_fail(c->run, ERR_FORMAT, "strftime_now: the time is out of range");
    /* strftime returns 0 both for an empty result and for one that does not fit: the blank at the
     * end makes the former impossible. */
    memcpy(format, c->arg[0]->s.p, c->arg[0]->s.n);
    format[c->arg[0]->s.n] = ' ';
    format[c->arg[0]->s.n + 1] = 0;
    size_t n = strftime(text, sizeof text, format, &tm);
    if (n == 0)
        return jinja_fail(c->run, ERR_TOO_LONG, "strftime_now: the text has more than %d bytes",
                          STRFTIME_MAX);
    return jv_copy(c->run, (struct str){ text, n - 1 }, out);
}

const struct jinja_fn *jinja_global_find(struct str name)
{
    static const struct jinja_fn table[] = {
        { .name = "range", .call = fn_range, .open = true },
        { .name = "namespace", .call = fn_namespace, .open = true },
        { .name = "dict", .call = fn_dict, .open = true },
        { .name = "raise_exception", .call = fn_raise, .n_min = 1, .params = { "message" } },
        { .name = "strftime_now", .call = fn_strftime, .n_min = 1, .params = { "format" } },
    };
    return jinja_fn_find(table, COUNT_OF(table), name);
}
