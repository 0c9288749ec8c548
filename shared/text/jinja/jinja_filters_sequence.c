/* jinja_filters_sequence.c - filters of sequences.
 *
 * first last list join items dictsort sort unique reverse sum min max attr map select reject
 * selectattr rejectattr. Attributes may be dotted paths with numbers ("function.name", "0.id").
 * Where Python returns a generator, this returns a list of JV_FORM_ITERATOR, true even when empty.
 * Thread: the one that renders. */
#include "shared/text/jinja/jinja_value.h"

#include <stdlib.h>
#include <string.h>

/* Follows a dotted path, or uses a number as an index. */
static enum status path_of(struct jinja_run *run, const struct jv *v, const struct jv *path,
                           struct jv *out)
{
    struct str rest, part;
    *out = *v;
    if (path->kind != JV_STRING) return jv_item(run, v, path, out);
    rest = path->s;
    while (str_split(&rest, '.', &part)) {
        struct jv next, key = jv_str(part);
        int64_t index;
        if (str_to_i64(part, &index) == OK) key = jv_int(index);
        TRY(jv_item(run, out, &key, &next));
        *out = next;
    }
    return OK;
}

/* Gets the key that sort, unique, min and max compare: the value at `path`, in lower case when
 * `fold`. */
static enum status key_of(struct jinja_run *run, const struct jv *v, const struct jv *path,
                          bool fold, struct jv *out)
{
    *out = *v;
    if (path && path->kind != JV_NONE) TRY(path_of(run, v, path, out));
    return fold && out->kind == JV_STRING ? jv_recase(run, out->s, JINJA_LOWER, out) : OK;
}

static enum status f_first(const struct jinja_call *c, struct jv *out)
{
    const struct jv *items;
    size_t n;
    if (jv_is_iterator(&c->self) && c->self.list->len > 0) { /* takes one item only */
        *out = *c->self.list->items++;
        c->self.list->len--;
        c->self.list->cap--;
        return OK;
    }
    TRY(jv_elements(c->run, &c->self, &items, &n));
    *out = n ? items[0] : jv_undefined(STR("the first item of an empty sequence"));
    return OK;
}

static enum status f_last(const struct jinja_call *c, struct jv *out)
{
    const struct jv *items;
    size_t n;
    if (jv_is_iterator(&c->self))
        return jinja_fail(c->run, ERR_FORMAT,
                          "last: a lazy sequence has no last item; use list before it");
    TRY(jv_elements(c->run, &c->self, &items, &n));
    *out = n ? items[n - 1] : jv_undefined(STR("the last item of an empty sequence"));
    return OK;
}

static enum status list_of(const struct jinja_call *c, enum jv_form form, struct jv *out)
{
    const struct jv *items;
    size_t n;
    TRY(jv_elements(c->run, &c->self, &items, &n));
    TRY(jv_list_new(c->run, form, n, out));
    if (n) memcpy(out->list->items, items, n * sizeof *items);
    out->list->len = n;
    return OK;
}

static enum status f_list(const struct jinja_call *c, struct jv *out)
{
    return list_of(c, JV_FORM_LIST, out);
}

static enum status f_reverse(const struct jinja_call *c, struct jv *out)
{
    const struct jv minus = jv_int(-1), *const bound[3] = { NULL, NULL, &minus };
    if (c->self.kind == JV_STRING) return jv_slice(c->run, &c->self, bound, out);
    struct jv forward;
    TRY(list_of(c, JV_FORM_LIST, &forward));
    TRY(jv_slice(c->run, &forward, bound, out));
    out->list->form = JV_FORM_ITERATOR;
    return OK;
}

static enum status f_join(const struct jinja_call *c, struct jv *out)
{
    struct jv list;
    struct str glue = STR("");
    if (c->arg[0]) TRY(jv_text(c->run, c->arg[0], &glue));
    TRY(list_of(c, JV_FORM_LIST, &list));
    for (size_t i = 0; c->arg[1] && i < list.list->len; i++) {
        struct jv v;
        TRY(path_of(c->run, &list.list->items[i], c->arg[1], &v));
        list.list->items[i] = v;
    }
    return jv_join(c->run, glue, list.list->items, list.list->len, false, out);
}

static enum status pairs_of(const struct jinja_call *c, enum jv_form form, struct jv *out)
{
    size_t n = c->self.kind == JV_DICT ? c->self.dict->len : 0;
    if (c->self.kind != JV_DICT && c->self.kind != JV_UNDEFINED)
        return jinja_bad_arg(c, "a dict", &c->self);
    TRY(jv_list_new(c->run, form, n, out));
    for (size_t i = 0; i < n; i++) {
        struct jv pair;
        TRY(jv_pair_new(c->run, c->self.dict->pairs[i].key, c->self.dict->pairs[i].value, &pair));
        TRY(jv_list_push(c->run, out->list, pair));
    }
    return OK;
}

static enum status f_items(const struct jinja_call *c, struct jv *out)
{
    return pairs_of(c, JV_FORM_ITERATOR, out);
}

/* ---- order ---- */

struct keyed {
    struct jv key, value;
};

/* Merges two sorted halves. Equal keys keep their order, even with `reverse`. */
static enum status merge(struct jinja_run *run, struct keyed *a, size_t n, size_t half,
                         bool reverse, struct keyed *tmp)
{
    size_t i = 0, j = half, k = 0;
    while (i < half && j < n) {
        int order;
        TRY(jinja_run_step(run));
        TRY(jv_compare(run, &a[j].key, &a[i].key, &order));
        tmp[k++] = order == (reverse ? 1 : -1) ? a[j++] : a[i++];
    }
    while (i < half) tmp[k++] = a[i++];
    memcpy(a, tmp, k * sizeof *a);
    return OK;
}

/* Sorts by bottom-up merging: stable, and a comparison may fail. */
static enum status sort_keyed(struct jinja_run *run, struct keyed *a, size_t n, bool reverse)
{
    struct keyed *tmp;
    TRY(jinja_run_alloc(run, n, sizeof *tmp, &tmp));
    for (size_t width = 1; width < n; width *= 2)
        for (size_t at = 0; at + width < n; at += 2 * width)
            TRY(merge(run, a + at, n - at < 2 * width ? n - at : 2 * width, width, reverse, tmp));
    return OK;
}

static enum status sort_list(const struct jinja_call *c, struct jv_list *l, const struct jv *path,
                             bool fold, bool reverse)
{
    struct keyed *a;
    TRY(jinja_run_alloc(c->run, l->len, sizeof *a, &a));
    for (size_t i = 0; i < l->len; i++) {
        a[i].value = l->items[i];
        TRY(key_of(c->run, &l->items[i], path, fold, &a[i].key));
    }
    TRY(sort_keyed(c->run, a, l->len, reverse));
    for (size_t i = 0; i < l->len; i++) l->items[i] = a[i].value;
    return OK;
}

static bool flag(const struct jv *v) { return v && jv_truth(v); }

static enum status f_sort(const struct jinja_call *c, struct jv *out)
{
    TRY(list_of(c, JV_FORM_LIST, out));
    return sort_list(c, out->list, c->arg[2], !flag(c->arg[1]), flag(c->arg[0]));
}

static enum status f_dictsort(const struct jinja_call *c, struct jv *out)
{
    struct jv by = jv_int(0);
    if (c->arg[1] && c->arg[1]->kind == JV_STRING && str_eq_c(c->arg[1]->s, "value"))
        by = jv_int(1);
    if (c->self.kind == JV_UNDEFINED) return jinja_bad_arg(c, "a dict", &c->self);
    TRY(pairs_of(c, JV_FORM_LIST, out));
    return sort_list(c, out->list, &by, !flag(c->arg[0]), flag(c->arg[2]));
}

static enum status f_unique(const struct jinja_call *c, struct jv *out)
{
    struct jv seen, key;
    const struct jv *items;
    size_t n;
    TRY(jv_elements(c->run, &c->self, &items, &n));
    TRY(jv_list_new(c->run, JV_FORM_LIST, n, &seen));
    TRY(jv_list_new(c->run, JV_FORM_ITERATOR, n, out));
    for (size_t i = 0; i < n; i++) {
        bool known = false;
        TRY(key_of(c->run, &items[i], c->arg[1], !flag(c->arg[0]), &key));
        TRY(jv_check_hashable(c->run, &key));
        TRY(jv_contains(c->run, &seen, &key, &known));
        if (known) continue;
        TRY(jv_list_push(c->run, seen.list, key));
        TRY(jv_list_push(c->run, out->list, items[i]));
    }
    return OK;
}

static enum status min_or_max(const struct jinja_call *c, int want, struct jv *out)
{
    const struct jv *items;
    size_t n;
    struct jv best = { 0 }, key;
    TRY(jv_elements(c->run, &c->self, &items, &n));
    *out = jv_undefined(STR("an item of an empty sequence"));
    for (size_t i = 0; i < n; i++) {
        int order = want;
        TRY(key_of(c->run, &items[i], c->arg[1], !flag(c->arg[0]), &key));
        if (i) TRY(jv_compare(c->run, &key, &best, &order));
        if (order != want) continue;
        best = key;
        *out = items[i];
    }
    return OK;
}

static enum status f_min(const struct jinja_call *c, struct jv *out)
{
    return min_or_max(c, -1, out);
}
static enum status f_max(const struct jinja_call *c, struct jv *out)
{
    return min_or_max(c, 1, out);
}

static enum status f_sum(const struct jinja_call *c, struct jv *out)
{
    const struct jv *items;
    size_t n;
    TRY(jv_elements(c->run, &c->self, &items, &n));
    *out = c->arg[1] ? *c->arg[1] : jv_int(0);
    for (size_t i = 0; i < n; i++) {
        struct jv v = items[i];
        if (c->arg[0] && c->arg[0]->kind != JV_NONE) TRY(path_of(c->run, &items[i], c->arg[0], &v));
        if (!jv_is_number(&v) || !jv_is_number(out)) return jinja_bad_arg(c, "numbers", &v);
        if (v.kind == JV_FLOAT || out->kind == JV_FLOAT) {
            *out = jv_float(jv_number(out) + jv_number(&v));
            continue;
        }
        int64_t sum;
        if (__builtin_add_overflow(jv_whole(out), jv_whole(&v), &sum))
            return jinja_fail(c->run, ERR_FORMAT, "sum: the number is too large");
        *out = jv_int(sum);
    }
    return OK;
}

static enum status f_attr(const struct jinja_call *c, struct jv *out)
{
    if (c->arg[0]->kind != JV_STRING) return jinja_bad_arg(c, "a name", c->arg[0]);
    if (c->self.kind == JV_DICT) { /* this filter finds attributes only, not keys */
        *out = jv_undefined(c->arg[0]->s);
        return OK;
    }
    return jv_attr(c->run, &c->self, c->arg[0]->s, out);
}

/* ---- map, select, reject ---- */

/* map('filter', args...): applies the filter to one item. Counted as depth, since filters may apply
 * filters. */
static enum status map_filter(const struct jinja_call *c, const struct jv *v, struct jv *out)
{
    const struct jinja_fn *fn = c->n_pos && c->pos[0].kind == JV_STRING
                                    ? jinja_filter_find(c->pos[0].s)
                                    : NULL;
    if (!fn)
        return jinja_fail(c->run, ERR_UNSUPPORTED,
                          "map needs the name of a filter, or attribute='name'");
    struct jinja_call inner = {
        .run = c->run,
        .self = *v,
        .pos = c->pos + 1,
        .n_pos = c->n_pos - 1,
        .named = c->named,
        .names = c->names,
        .n_named = c->n_named,
    };
    TRY(jinja_run_enter(c->run));
    enum status st = jinja_invoke(&inner, fn, out);
    jinja_run_leave(c->run);
    return st;
}

static const struct jv *named_arg(const struct jinja_call *c, const char *name)
{
    for (size_t i = 0; i < c->n_named; i++)
        if (str_eq_c(c->names[i], name)) return &c->named[i];
    return NULL;
}

/* Lists the elements of `self`; for these filters every false value is an empty sequence. */
static enum status any_elements(const struct jinja_call *c, const struct jv **items, size_t *n)
{
    *items = NULL;
    *n = 0;
    return jv_truth(&c->self) ? jv_elements(c->run, &c->self, items, n) : OK;
}

static enum status f_map(const struct jinja_call *c, struct jv *out)
{
    const struct jv *items, *path = named_arg(c, "attribute"), *fallback = named_arg(c, "default");
    size_t n;
    if (c->n_pos) path = NULL;
    TRY(any_elements(c, &items, &n));
    TRY(jv_list_new(c->run, JV_FORM_ITERATOR, n, out));
    for (size_t i = 0; i < n; i++) {
        struct jv v;
        TRY(jinja_run_step(c->run));
        TRY(path ? path_of(c->run, &items[i], path, &v) : map_filter(c, &items[i], &v));
        if (path && fallback && v.kind == JV_UNDEFINED) v = *fallback;
        TRY(jv_list_push(c->run, out->list, v));
    }
    return OK;
}

/* Applies the test named by pos[skip], with the arguments after it, to v; without a name, v's
 * truth. */
static enum status passes(const struct jinja_call *c, size_t skip, const struct jv *v, bool *yes)
{
    struct jv result = *v;
    if (c->n_pos > skip) {
        const struct jinja_fn *fn = c->pos[skip].kind == JV_STRING ? jinja_test_find(c->pos[skip].s)
                                                                   : NULL;
        if (!fn)
            return jinja_fail(c->run, ERR_UNSUPPORTED,
                              "%s needs the name of a test that is supported", c->name);
        struct jinja_call inner = {
            .run = c->run,
            .self = *v,
            .pos = c->pos + skip + 1,
            .n_pos = c->n_pos - skip - 1,
            .named = c->named,
            .names = c->names,
            .n_named = c->n_named,
        };
        TRY(jinja_invoke(&inner, fn, &result));
    }
    *yes = jv_truth(&result);
    return OK;
}

static enum status select_or_reject(const struct jinja_call *c, bool by_attr, bool want,
                                    struct jv *out)
{
    const struct jv *items;
    size_t n;
    if (by_attr && !c->n_pos)
        return jinja_fail(c->run, ERR_FORMAT, "%s needs the name of an attribute", c->name);
    TRY(any_elements(c, &items, &n));
    TRY(jv_list_new(c->run, JV_FORM_ITERATOR, n, out));
    for (size_t i = 0; i < n; i++) {
        struct jv v = items[i];
        bool yes = false;
        TRY(jinja_run_step(c->run));
        if (by_attr) TRY(path_of(c->run, &items[i], &c->pos[0], &v));
        TRY(passes(c, by_attr, &v, &yes));
        if (yes == want) TRY(jv_list_push(c->run, out->list, items[i]));
    }
    return OK;
}

static enum status f_select(const struct jinja_call *c, struct jv *out)
{
    return select_or_reject(c, false, true, out);
}
static enum status f_reject(const struct jinja_call *c, struct jv *out)
{
    return select_or_reject(c, false, false, out);
}
static enum status f_selectattr(const struct jinja_call *c, struct jv *out)
{
    return select_or_reject(c, true, true, out);
}
static enum status f_rejectattr(const struct jinja_call *c, struct jv *out)
{
    return select_or_reject(c, true, false, out);
}

const struct jinja_fn *jinja_filter_sequence_find(struct str name)
{
    static const struct jinja_fn table[] = {
        { .name = "first", .call = f_first },
        { .name = "last", .call = f_last },
        { .name = "list", .call = f_list },
        { .name = "join", .call = f_join, .params = { "d", "attribute" } },
        { .name = "items", .call = f_items },
        { .name = "dictsort", .call = f_dictsort, .params = { "case_sensitive", "by", "reverse" } },
        { .name = "sort", .call = f_sort, .params = { "reverse", "case_sensitive", "attribute" } },
        { .name = "unique", .call = f_unique, .params = { "case_sensitive", "attribute" } },
        { .name = "reverse", .call = f_reverse },
        { .name = "sum", .call = f_sum, .params = { "attribute", "start" } },
        { .name = "min", .call = f_min, .params = { "case_sensitive", "attribute" } },
        { .name = "max", .call = f_max, .params = { "case_sensitive", "attribute" } },
        { .name = "attr", .call = f_attr, .n_min = 1, .params = { "name" } },
        { .name = "map", .call = f_map, .open = true },
        { .name = "select", .call = f_select, .open = true },
        { .name = "reject", .call = f_reject, .open = true },
        { .name = "selectattr", .call = f_selectattr, .open = true },
        { .name = "rejectattr", .call = f_rejectattr, .open = true },
    };
    return jinja_fn_find(table, COUNT_OF(table), name);
}
