/* jinja_string_methods.c - methods of strings, as Python's str has them.
 *
 * split rsplit splitlines strip lstrip rstrip startswith endswith replace upper lower title
 * capitalize find rfind count join removeprefix removesuffix partition rpartition zfill isdigit
 * isalpha isalnum isspace isupper islower. Positions are code points; find and count take no
 * bounds.
 * Thread: the one that renders. */
#include "shared/text/jinja/jinja_value.h"

#include <string.h>
#include <utf8proc.h>

static enum status arg_string(const struct jinja_call *c, int i, struct str *out)
{
    if (c->arg[i]->kind != JV_STRING) return jinja_bad_arg(c, "a string", c->arg[i]);
    *out = c->arg[i]->s;
    return OK;
}

static enum status arg_count(const struct jinja_call *c, int i, int64_t *out)
{
    *out = -1;
    if (!c->arg[i]) return OK;
    if (!jv_is_whole(c->arg[i])) return jinja_bad_arg(c, "an integer", c->arg[i]);
    *out = jv_whole(c->arg[i]);
    return OK;
}

static enum status push(const struct jinja_call *c, struct jv *list, const char *p, size_t n)
{
    TRY(jinja_run_step(c->run));
    return jv_list_push(c->run, list->list, jv_str((struct str){ p, n }));
}

/* ---- splitting ---- */

/* End of the run of blanks (or of non-blanks) that starts at `at`. */
static size_t run_of(struct str s, size_t at, bool blank)
{
    int32_t cp;
    while (at < s.n) {
        size_t n = jinja_utf8_next(s, at, &cp);
        if (jinja_is_space(cp) != blank) break;
        at += n;
    }
    return at;
}

/* Splits at runs of white space, ignoring those at the ends; after max splits the remainder is kept
 * whole, with the white space at its end. */
static enum status split_space(const struct jinja_call *c, int64_t max, struct jv *out)
{
    struct str s = c->self.s;
    for (size_t at = run_of(s, 0, true); at < s.n; max--) {
        size_t end = max == 0 ? s.n : run_of(s, at, false);
        TRY(push(c, out, s.p + at, end - at));
        at = max == 0 ? s.n : run_of(s, end, true);
    }
    return OK;
}

static enum status split_args(const struct jinja_call *c, struct str *sep, int64_t *max)
{
    *sep = (struct str){ 0 };
    if (c->arg[0] && c->arg[0]->kind != JV_NONE) {
        TRY(arg_string(c, 0, sep));
        if (sep->n == 0)
            return jinja_fail(c->run, ERR_FORMAT, "%s: the separator is empty", c->name);
    }
    return arg_count(c, 1, max);
}

static enum status str_split_method(const struct jinja_call *c, struct jv *out)
{
    struct str sep = { 0 }, s = c->self.s;
    int64_t max = -1;
    TRY(split_args(c, &sep, &max));
    TRY(jv_list_new(c->run, JV_FORM_LIST, 0, out));
    if (!sep.p) return split_space(c, max, out);
    jinja_run_spend(c->run, s.n / 16);
    size_t at = 0;
    for (; max != 0; max--) {
        size_t gap = str_find(str_sub(s, at, SIZE_MAX), sep);
        if (gap == SIZE_MAX) break;
        TRY(push(c, out, s.p + at, gap));
        at += gap + sep.n;
    }
    return push(c, out, s.p + at, s.n - at);
}

/* Last position of `needle` that ends at or before `end`, or SIZE_MAX. */
static size_t find_last(struct str s, size_t end, struct str needle)
{
    for (size_t at = end < needle.n ? SIZE_MAX : end - needle.n; at != SIZE_MAX; at--)
        if (memcmp(s.p + at, needle.p, needle.n) == 0) return at;
    return SIZE_MAX;
}

static void reverse(struct jv_list *l)
{
    for (size_t i = 0; i < l->len / 2; i++) {
        struct jv v = l->items[i];
        l->items[i] = l->items[l->len - 1 - i];
        l->items[l->len - 1 - i] = v;
    }
}

/* The start of the run of non-blanks that ends at `end`. */
static size_t word_start(struct str s, size_t end)
{
    int32_t cp;
    while (end > 0) {
        size_t n = jinja_utf8_prev(s, end, &cp);
        if (jinja_is_space(cp)) break;
        end -= n;
    }
    return end;
}

static enum status rsplit_space(const struct jinja_call *c, int64_t max, struct jv *out)
{
    struct str s = jinja_strip(c->self.s, NULL, false, true);
    for (; s.n > 0; max--) {
        size_t from = max == 0 ? 0 : word_start(s, s.n);
        TRY(push(c, out, s.p + from, s.n - from));
        s.n = max == 0 ? 0 : from;
        s = jinja_strip(s, NULL, false, true);
    }
    return OK;
}

static enum status str_rsplit(const struct jinja_call *c, struct jv *out)
{
    struct str sep = { 0 }, s = c->self.s;
    int64_t max = -1;
    TRY(split_args(c, &sep, &max));
    TRY(jv_list_new(c->run, JV_FORM_LIST, 0, out));
    jinja_run_spend(c->run, s.n / 16);
    if (!sep.p) {
        TRY(rsplit_space(c, max, out));
        reverse(out->list);
        return OK;
    }
    size_t end = s.n;
    for (; max != 0; max--) {
        size_t at = find_last(s, end, sep);
        if (at == SIZE_MAX) break;
        TRY(push(c, out, s.p + at + sep.n, end - at - sep.n));
        end = at;
    }
    TRY(push(c, out, s.p, end));
    reverse(out->list);
    return OK;
}

static enum status str_splitlines(const struct jinja_call *c, struct jv *out)
{
    struct str rest = c->self.s, line;
    size_t n_end;
    bool keep = c->arg[0] && jv_truth(c->arg[0]);
    TRY(jv_list_new(c->run, JV_FORM_LIST, 0, out));
    while (jinja_next_line(&rest, &line, &n_end))
        TRY(push(c, out, line.p, line.n + (keep ? n_end : 0)));
    return OK;
}

/* Makes (before, sep, after); without the separator (s, '', '') or, from the right, ('', '', s). */
static enum status partition_at(const struct jinja_call *c, size_t at, size_t n_sep, bool right,
                                struct jv *out)
{
    struct str s = c->self.s;
    TRY(jv_list_new(c->run, JV_FORM_TUPLE, 3, out));
    if (at == SIZE_MAX) at = right ? 0 : s.n, n_sep = 0;
    TRY(push(c, out, s.p, at));
    TRY(push(c, out, s.p + at, n_sep));
    return push(c, out, s.p + at + n_sep, s.n - at - n_sep);
}

static enum status str_partition(const struct jinja_call *c, struct jv *out)
{
    struct str sep = { 0 };
    TRY(arg_string(c, 0, &sep));
    if (!sep.n) return jinja_fail(c->run, ERR_FORMAT, "partition: the separator is empty");
    return partition_at(c, str_find(c->self.s, sep), sep.n, false, out);
}

static enum status str_rpartition(const struct jinja_call *c, struct jv *out)
{
    struct str sep = { 0 };
    TRY(arg_string(c, 0, &sep));
    if (!sep.n) return jinja_fail(c->run, ERR_FORMAT, "rpartition: the separator is empty");
    return partition_at(c, find_last(c->self.s, c->self.s.n, sep), sep.n, true, out);
}

/* ---- stripping ---- */

static enum status strip_sides(const struct jinja_call *c, bool left, bool right, struct jv *out)
{
    struct str chars = { 0 };
    bool given = c->arg[0] && c->arg[0]->kind != JV_NONE;
    if (given) TRY(arg_string(c, 0, &chars));
    *out = jv_str(jinja_strip(c->self.s, given ? &chars : NULL, left, right));
    return OK;
}

static enum status str_strip(const struct jinja_call *c, struct jv *out)
{
    return strip_sides(c, true, true, out);
}
static enum status str_lstrip(const struct jinja_call *c, struct jv *out)
{
    return strip_sides(c, true, false, out);
}
static enum status str_rstrip(const struct jinja_call *c, struct jv *out)
{
    return strip_sides(c, false, true, out);
}

static bool starts(struct str s, struct str with)
{
    return with.n <= s.n && (with.n == 0 || memcmp(s.p, with.p, with.n) == 0);
}
static bool ends(struct str s, struct str with)
{
    return with.n <= s.n && starts(str_sub(s, s.n - with.n, SIZE_MAX), with);
}

static enum status str_removeprefix(const struct jinja_call *c, struct jv *out)
{
    struct str fix = { 0 };
    TRY(arg_string(c, 0, &fix));
    *out = jv_str(starts(c->self.s, fix) ? str_sub(c->self.s, fix.n, SIZE_MAX) : c->self.s);
    return OK;
}

static enum status str_removesuffix(const struct jinja_call *c, struct jv *out)
{
    struct str fix = { 0 };
    TRY(arg_string(c, 0, &fix));
    *out = jv_str(ends(c->self.s, fix) ? str_sub(c->self.s, 0, c->self.s.n - fix.n) : c->self.s);
    return OK;
}

/* ---- predicates ---- */

/* Does any of the given affixes match? The argument is a string or a tuple of strings. */
static enum status any_affix(const struct jinja_call *c, bool (*matches)(struct str, struct str),
                             struct jv *out)
{
    const struct jv *affix = c->arg[0];
    size_t n = 1;
    if (affix->kind == JV_LIST && affix->list->form == JV_FORM_TUPLE)
        n = affix->list->len, affix = affix->list->items;
    *out = jv_bool(false);
    for (size_t i = 0; i < n; i++) {
        if (affix[i].kind != JV_STRING)
            return jinja_bad_arg(c, "a string or a tuple of strings", &affix[i]);
        if (matches(c->self.s, affix[i].s)) *out = jv_bool(true);
    }
    return OK;
}

static enum status str_startswith(const struct jinja_call *c, struct jv *out)
{
    return any_affix(c, starts, out);
}
static enum status str_endswith(const struct jinja_call *c, struct jv *out)
{
    return any_affix(c, ends, out);
}

static enum status found_at(const struct jinja_call *c, size_t at, struct jv *out)
{
    jinja_run_spend(c->run, c->self.s.n / 16);
    *out = jv_int(at == SIZE_MAX ? -1 : (int64_t)jinja_utf8_len(str_sub(c->self.s, 0, at)));
    return OK;
}

static enum status str_find_method(const struct jinja_call *c, struct jv *out)
{
    struct str needle = { 0 };
    TRY(arg_string(c, 0, &needle));
    return found_at(c, str_find(c->self.s, needle), out);
}

static enum status str_rfind(const struct jinja_call *c, struct jv *out)
{
    struct str needle = { 0 };
    TRY(arg_string(c, 0, &needle));
    return found_at(c, find_last(c->self.s, c->self.s.n, needle), out);
}

static enum status str_count(const struct jinja_call *c, struct jv *out)
{
    struct str needle = { 0 }, rest = c->self.s;
    TRY(arg_string(c, 0, &needle));
    jinja_run_spend(c->run, rest.n / 16);
    *out = jv_int(needle.n ? 0 : (int64_t)jinja_utf8_len(rest) + 1);
    for (size_t at; needle.n && (at = str_find(rest, needle)) != SIZE_MAX; out->i++)
        rest = str_sub(rest, at + needle.n, SIZE_MAX);
    return OK;
}

enum { IS_DIGIT = 1, IS_ALPHA = 2, IS_SPACE = 4 };

static int class_of(int32_t cp)
{
    utf8proc_category_t k = utf8proc_category(cp);
    if (k == UTF8PROC_CATEGORY_ND) return IS_DIGIT;
    if (k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO) return IS_ALPHA;
    return jinja_is_space(cp) ? IS_SPACE : 0;
}

/* Is the string not empty and every character of one of the classes? */
static enum status all_of(const struct jinja_call *c, int classes, struct jv *out)
{
    int32_t cp;
    *out = jv_bool(c->self.s.n > 0);
    for (size_t at = 0; at < c->self.s.n && out->b;) {
        at += jinja_utf8_next(c->self.s, at, &cp);
        out->b = (class_of(cp) & classes) != 0;
    }
    return OK;
}

static enum status str_isdigit(const struct jinja_call *c, struct jv *out)
{
    return all_of(c, IS_DIGIT, out);
}
static enum status str_isalpha(const struct jinja_call *c, struct jv *out)
{
    return all_of(c, IS_ALPHA, out);
}
static enum status str_isalnum(const struct jinja_call *c, struct jv *out)
{
    return all_of(c, IS_DIGIT | IS_ALPHA, out);
}
static enum status str_isspace(const struct jinja_call *c, struct jv *out)
{
    return all_of(c, IS_SPACE, out);
}

/* Is there a letter of the wanted case and none of the other? */
static enum status one_case(const struct jinja_call *c, utf8proc_category_t want, struct jv *out)
{
    int32_t cp;
    bool any = false, other = false;
    for (size_t at = 0; at < c->self.s.n;) {
        at += jinja_utf8_next(c->self.s, at, &cp);
        utf8proc_category_t k = utf8proc_category(cp);
        if (k == want) any = true;
        else if (k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LT) other = true;
    }
    *out = jv_bool(any && !other);
    return OK;
}

static enum status str_isupper(const struct jinja_call *c, struct jv *out)
{
    return one_case(c, UTF8PROC_CATEGORY_LU, out);
}
static enum status str_islower(const struct jinja_call *c, struct jv *out)
{
    return one_case(c, UTF8PROC_CATEGORY_LL, out);
}

/* ---- conversions ---- */

static enum status str_upper(const struct jinja_call *c, struct jv *out)
{
    return jv_recase(c->run, c->self.s, JINJA_UPPER, out);
}
static enum status str_lower(const struct jinja_call *c, struct jv *out)
{
    return jv_recase(c->run, c->self.s, JINJA_LOWER, out);
}
static enum status str_title(const struct jinja_call *c, struct jv *out)
{
    return jv_recase(c->run, c->self.s, JINJA_TITLE, out);
}
static enum status str_capitalize(const struct jinja_call *c, struct jv *out)
{
    return jv_recase(c->run, c->self.s, JINJA_CAPITALIZE, out);
}

static enum status str_replace(const struct jinja_call *c, struct jv *out)
{
    struct str from = { 0 }, to = { 0 };
    int64_t count;
    TRY(arg_string(c, 0, &from));
    TRY(arg_string(c, 1, &to));
    TRY(arg_count(c, 2, &count));
    return jv_replace(c->run, c->self.s, from, to, count, out);
}

static enum status str_join(const struct jinja_call *c, struct jv *out)
{
    const struct jv *items;
    size_t n;
    TRY(jv_elements(c->run, c->arg[0], &items, &n));
    return jv_join(c->run, c->self.s, items, n, true, out);
}

static enum status str_zfill(const struct jinja_call *c, struct jv *out)
{
    int64_t width = 0;
    size_t len = jinja_utf8_len(c->self.s),
           sign = c->self.s.n && strchr("+-", c->self.s.p[0]) ? 1 : 0;
    TRY(arg_count(c, 0, &width));
    *out = c->self;
    if (width <= (int64_t)len) return OK;
    char *p;
    size_t zeros = (size_t)width - len;
    TRY(jinja_run_alloc(c->run, zeros + c->self.s.n, 1, &p));
    memcpy(p, c->self.s.p, sign);
    memset(p + sign, '0', zeros);
    memcpy(p + sign + zeros, c->self.s.p + sign, c->self.s.n - sign);
    *out = jv_str((struct str){ p, zeros + c->self.s.n });
    return OK;
}

const struct jinja_fn *jinja_string_method_find(struct str name)
{
    static const struct jinja_fn table[] = {
        { .name = "split", .call = str_split_method, .params = { "sep", "maxsplit" } },
        { .name = "rsplit", .call = str_rsplit, .params = { "sep", "maxsplit" } },
        { .name = "splitlines", .call = str_splitlines, .params = { "keepends" } },
        { .name = "partition", .call = str_partition, .n_min = 1, .params = { "sep" } },
        { .name = "rpartition", .call = str_rpartition, .n_min = 1, .params = { "sep" } },
        { .name = "strip", .call = str_strip, .params = { "chars" } },
        { .name = "lstrip", .call = str_lstrip, .params = { "chars" } },
        { .name = "rstrip", .call = str_rstrip, .params = { "chars" } },
        { .name = "removeprefix", .call = str_removeprefix, .n_min = 1, .params = { "prefix" } },
        { .name = "removesuffix", .call = str_removesuffix, .n_min = 1, .params = { "suffix" } },
        { .name = "startswith", .call = str_startswith, .n_min = 1, .params = { "prefix" } },
        { .name = "endswith", .call = str_endswith, .n_min = 1, .params = { "suffix" } },
        { .name = "find", .call = str_find_method, .n_min = 1, .params = { "sub" } },
        { .name = "rfind", .call = str_rfind, .n_min = 1, .params = { "sub" } },
        { .name = "count", .call = str_count, .n_min = 1, .params = { "sub" } },
        { .name = "isdigit", .call = str_isdigit },
        { .name = "isalpha", .call = str_isalpha },
        { .name = "isalnum", .call = str_isalnum },
        { .name = "isspace", .call = str_isspace },
        { .name = "isupper", .call = str_isupper },
        { .name = "islower", .call = str_islower },
        { .name = "upper", .call = str_upper },
        { .name = "lower", .call = str_lower },
        { .name = "title", .call = str_title },
        { .name = "capitalize", .call = str_capitalize },
        { .name = "replace", .call = str_replace, .n_min = 2, .params = { "old", "new", "count" } },
        { .name = "join", .call = str_join, .n_min = 1, .params = { "items" } },
        { .name = "zfill", .call = str_zfill, .n_min = 1, .params = { "width" } },
    };
    return jinja_fn_find(table, COUNT_OF(table), name);
}
