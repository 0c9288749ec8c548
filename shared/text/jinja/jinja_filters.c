/* jinja_filters.c - filters of single values, and the tests of `is`.
 *
 *   filters   trim length count string upper lower capitalize title replace indent int float abs
 *             round default d tojson from_json safe (no effect: nothing is escaped); sequences are
 *             in jinja_filters_sequence.c
 *   tests     defined undefined none string number integer float boolean true false mapping
 *             iterable sequence callable sameas equalto eq == ne != lt lessthan < le <= gt
 *             greaterthan > ge >= in odd even divisibleby lower upper
 * Thread: the one that renders. */
#include "shared/text/jinja/jinja_value.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- filters ---- */

static enum status f_trim(const struct jinja_call *c, struct jv *out)
{
    struct str s;
    bool chars = c->arg[0] && c->arg[0]->kind != JV_NONE;
    if (chars && c->arg[0]->kind != JV_STRING) return jinja_bad_arg(c, "a string", c->arg[0]);
    TRY(jv_text(c->run, &c->self, &s));
    *out = jv_str(jinja_strip(s, chars ? &c->arg[0]->s : NULL, true, true));
    return OK;
}

static enum status f_length(const struct jinja_call *c, struct jv *out)
{
    *out = jv_int(0);
    switch (c->self.kind) {
    case JV_UNDEFINED: return OK;
    case JV_STRING:
        out->i = (int64_t)jinja_utf8_len(c->self.s);
        jinja_run_spend(c->run, c->self.s.n / 64);
        return OK;
    case JV_LIST:
        if (jv_is_iterator(&c->self))
            return jinja_fail(c->run, ERR_FORMAT,
                              "%s: a lazy sequence has no length; use list before it", c->name);
        out->i = (int64_t)c->self.list->len;
        return OK;
    case JV_DICT: out->i = (int64_t)c->self.dict->len; return OK;
    case JV_LOOP: out->i = (int64_t)c->self.loop->n; return OK;
    default: return jinja_bad_arg(c, "something that has a length", &c->self);
    }
}

static enum status f_string(const struct jinja_call *c, struct jv *out)
{
    *out = jv_str(STR(""));
    return jv_text(c->run, &c->self, &out->s);
}

static enum status recase(const struct jinja_call *c, enum jinja_case to, struct jv *out)
{
    struct str s;
    TRY(jv_text(c->run, &c->self, &s));
    return jv_recase(c->run, s, to, out);
}

static enum status f_upper(const struct jinja_call *c, struct jv *out)
{
    return recase(c, JINJA_UPPER, out);
}
static enum status f_lower(const struct jinja_call *c, struct jv *out)
{
    return recase(c, JINJA_LOWER, out);
}
static enum status f_capitalize(const struct jinja_call *c, struct jv *out)
{
    return recase(c, JINJA_CAPITALIZE, out);
}
static enum status f_title(const struct jinja_call *c, struct jv *out)
{
    return recase(c, JINJA_TITLE_FILTER, out);
}

static enum status f_replace(const struct jinja_call *c, struct jv *out)
{
    struct str s, from, to;
    int64_t count = -1;
    TRY(jv_text(c->run, &c->self, &s));
    TRY(jv_text(c->run, c->arg[0], &from));
    TRY(jv_text(c->run, c->arg[1], &to));
    if (c->arg[2] && c->arg[2]->kind != JV_NONE) {
        if (!jv_is_whole(c->arg[2])) return jinja_bad_arg(c, "an integer count", c->arg[2]);
        count = jv_whole(c->arg[2]);
    }
    return jv_replace(c->run, s, from, to, count, out);
}

/* The lines are joined by "\n", whatever ended them before. */
static enum status indent_into(const struct jinja_call *c, struct str pad, struct buf *b)
{
    bool first = c->arg[1] && jv_truth(c->arg[1]), blank = c->arg[2] && jv_truth(c->arg[2]);
    struct str rest = c->self.s, line = STR("");
    size_t n_end = 1;
    if (first) buf_add_str(b, pad);
    for (size_t i = 0; n_end > 0; i++) {
        TRY(jinja_run_step(c->run));
        /* the text is empty or ends with a line end */
        if (!jinja_next_line(&rest, &line, &n_end)) line.n = n_end = 0;
        if (i) buf_add_char(b, '\n');
        if (i && (blank || line.n)) buf_add_str(b, pad);
        buf_add(b, line.p, line.n);
        if (b->len > JINJA_OUTPUT_MAX)
            return jinja_fail(c->run, ERR_TOO_LONG, "indent makes a text of more than %d MiB",
                              JINJA_OUTPUT_MAX >> 20);
    }
    return OK;
}

static enum status f_indent(const struct jinja_call *c, struct jv *out)
{
    static const char blanks[] = "                                                                ";
    struct str pad = { blanks, 4 };
    struct buf b = { 0 };
    if (c->arg[0] && c->arg[0]->kind == JV_STRING) pad = c->arg[0]->s;
    else if (c->arg[0] && jv_is_whole(c->arg[0]) &&
             jv_whole(c->arg[0]) <= (int64_t)sizeof blanks - 1)
        pad.n = jv_whole(c->arg[0]) > 0 ? (size_t)jv_whole(c->arg[0]) : 0;
    else if (c->arg[0]) return jinja_bad_arg(c, "a width of at most 64 or a string", c->arg[0]);
    if (c->self.kind != JV_STRING) return jinja_bad_arg(c, "a string", &c->self);
    enum status st = indent_into(c, pad, &b);
    if (st == OK) return jv_take(c->run, &b, out);
    buf_release(&b);
    return st;
}

/* Parses the number in a string, with blanks around it, in `base` (0: a float); false when it is
 * not a number. */
static bool read_number(struct str s, int base, struct jv *out)
{
    char text[128], *end;
    s = str_trim(s);
    if (s.n == 0 || s.n >= sizeof text) return false;
    memcpy(text, s.p, s.n);
    text[s.n] = 0;
    errno = 0;
    if (base) *out = jv_int(strtoll(text, &end, base));
    else *out = jv_float(strtod(text, &end));
    /* strtod also reads hexadecimal floats, which Python does not. */
    return *end == 0 && (base ? errno == 0 : !strpbrk(text, "xX("));
}

static bool float_to_int(double f, struct jv *out)
{
    if (!(fabs(f) < 9.2e18)) return false;
    *out = jv_int((int64_t)f);
    return true;
}

static enum status f_int(const struct jinja_call *c, struct jv *out)
{
    struct jv f;
    int64_t base = c->arg[1] && jv_is_whole(c->arg[1]) ? jv_whole(c->arg[1]) : 10;
    if (base < 2 || base > 36)
        return jinja_fail(c->run, ERR_FORMAT, "int: the base must be between 2 and 36");
    if (c->self.kind == JV_UNDEFINED)
        return jinja_fail(c->run, ERR_FORMAT, "'%.*s' is undefined", STR_ARG(c->self.s));
    if (jv_is_whole(&c->self)) {
        *out = jv_int(jv_whole(&c->self));
        return OK;
    }
    if (c->self.kind == JV_FLOAT && float_to_int(c->self.f, out)) return OK;
    if (c->self.kind == JV_STRING && read_number(c->self.s, (int)base, out)) return OK;
    if (c->self.kind == JV_STRING && read_number(c->self.s, 0, &f) && float_to_int(f.f, out))
        return OK;
    *out = c->arg[0] ? *c->arg[0] : jv_int(0);
    return OK;
}

static enum status f_float(const struct jinja_call *c, struct jv *out)
{
    if (c->self.kind == JV_UNDEFINED)
        return jinja_fail(c->run, ERR_FORMAT, "'%.*s' is undefined", STR_ARG(c->self.s));
    if (jv_is_number(&c->self)) *out = jv_float(jv_number(&c->self));
    else if (c->self.kind != JV_STRING || !read_number(c->self.s, 0, out))
        *out = c->arg[0] ? *c->arg[0] : jv_float(0);
    return OK;
}

static enum status f_abs(const struct jinja_call *c, struct jv *out)
{
    if (!jv_is_number(&c->self)) return jinja_bad_arg(c, "a number", &c->self);
    if (c->self.kind == JV_FLOAT) {
        *out = jv_float(fabs(c->self.f));
        return OK;
    }
    int64_t i = jv_whole(&c->self);
    if (i == INT64_MIN) return jinja_fail(c->run, ERR_FORMAT, "abs: the number is too large");
    *out = jv_int(i < 0 ? -i : i);
    return OK;
}

static enum status f_round(const struct jinja_call *c, struct jv *out)
{
    struct str method = c->arg[1] && c->arg[1]->kind == JV_STRING ? c->arg[1]->s : STR("common");
    int64_t digits = c->arg[0] && jv_is_whole(c->arg[0]) ? jv_whole(c->arg[0]) : 0;
    if (!jv_is_number(&c->self)) return jinja_bad_arg(c, "a number", &c->self);
    if (digits < -300 || digits > 300)
        return jinja_fail(c->run, ERR_FORMAT, "round: the precision must be between -300 and 300");
    double f = jv_number(&c->self), scale = pow(10, (double)digits);
    if (str_eq_c(method, "ceil")) *out = jv_float(ceil(f * scale) / scale);
    else if (str_eq_c(method, "floor")) *out = jv_float(floor(f * scale) / scale);
    else if (!str_eq_c(method, "common"))
        return jinja_fail(c->run, ERR_FORMAT, "round: the method must be common, ceil or floor");
    else if (digits < 0) *out = jv_float(nearbyint(f * scale) / scale);
    else {
        /* Rounds by printing, as Python does: scaling would round twice. */
        struct buf b = { 0 };
        buf_printf(&b, "%.*f", (int)digits, f);
        *out = jv_float(strtod(b.data, NULL));
        buf_release(&b);
    }
    /* Python rounds a whole number to a whole number. */
    if (jv_is_whole(&c->self) && str_eq_c(method, "common"))
        return float_to_int(out->f, out) ? OK : jinja_bad_arg(c, "a smaller number", &c->self);
    return OK;
}

static enum status f_default(const struct jinja_call *c, struct jv *out)
{
    bool use = c->self.kind == JV_UNDEFINED ||
               (c->arg[1] && jv_truth(c->arg[1]) && !jv_truth(&c->self));
    *out = !use ? c->self : c->arg[0] ? *c->arg[0] : jv_str(STR(""));
    return OK;
}

static enum status f_safe(const struct jinja_call *c, struct jv *out) { return f_string(c, out); }

static enum status f_from_json(const struct jinja_call *c, struct jv *out)
{
    cJSON *doc = NULL;
    struct err why;
    if (c->self.kind != JV_STRING) return jinja_bad_arg(c, "a string", &c->self);
    if (json_parse(c->self.s, false, &doc, &why) != OK)
        return jinja_fail(c->run, ERR_FORMAT, "from_json: %s", why.text);
    enum status st = jv_of_json(c->run, doc, true, out);
    cJSON_Delete(doc);
    return st;
}

const struct jinja_fn *jinja_filter_find(struct str name)
{
    static const struct jinja_fn table[] = {
        { .name = "trim", .call = f_trim, .params = { "chars" } },
        {
            .name = "tojson",
            .call = jinja_tojson,
            .params = { "ensure_ascii", "indent", "separators", "sort_keys" },
        },
        { .name = "length", .call = f_length },
        { .name = "count", .call = f_length },
        { .name = "string", .call = f_string },
        { .name = "upper", .call = f_upper },
        { .name = "lower", .call = f_lower },
        { .name = "capitalize", .call = f_capitalize },
        { .name = "title", .call = f_title },
        { .name = "replace", .call = f_replace, .n_min = 2, .params = { "old", "new", "count" } },
        { .name = "indent", .call = f_indent, .params = { "width", "first", "blank" } },
        { .name = "int", .call = f_int, .params = { "default", "base" } },
        { .name = "float", .call = f_float, .params = { "default" } },
        { .name = "abs", .call = f_abs },
        { .name = "round", .call = f_round, .params = { "precision", "method" } },
        { .name = "default", .call = f_default, .params = { "default_value", "boolean" } },
        { .name = "d", .call = f_default, .params = { "default_value", "boolean" } },
        { .name = "safe", .call = f_safe },
        { .name = "from_json", .call = f_from_json },
    };
    const struct jinja_fn *fn = jinja_fn_find(table, COUNT_OF(table), name);
    return fn ? fn : jinja_filter_sequence_find(name);
}

/* ---- tests ---- */

static enum status kind_is(struct jv *out, bool yes)
{
    *out = jv_bool(yes);
    return OK;
}

static enum status t_defined(const struct jinja_call *c, struct jv *out)
{
    return kind_is(out, c->self.kind != JV_UNDEFINED);
}
static enum status t_undefined(const struct jinja_call *c, struct jv *out)
{
    return kind_is(out, c->self.kind == JV_UNDEFINED);
}
static enum status t_none(const struct jinja_call *c, struct jv *out)
{
    return kind_is(out, c->self.kind == JV_NONE);
}
static enum status t_string(const struct jinja_call *c, struct jv *out)
{
    return kind_is(out, c->self.kind == JV_STRING);
}
static enum status t_number(const struct jinja_call *c, struct jv *out)
{
    return kind_is(out, jv_is_number(&c->self));
}
static enum status t_integer(const struct jinja_call *c, struct jv *out)
{
    return kind_is(out, c->self.kind == JV_INT);
}
static enum status t_float(const struct jinja_call *c, struct jv *out)
{
    return kind_is(out, c->self.kind == JV_FLOAT);
}
static enum status t_boolean(const struct jinja_call *c, struct jv *out)
{
    return kind_is(out, c->self.kind == JV_BOOL);
}
static enum status t_true(const struct jinja_call *c, struct jv *out)
{
    return kind_is(out, c->self.kind == JV_BOOL && c->self.b);
}
static enum status t_false(const struct jinja_call *c, struct jv *out)
{
    return kind_is(out, c->self.kind == JV_BOOL && !c->self.b);
}
static enum status t_mapping(const struct jinja_call *c, struct jv *out)
{
    return kind_is(out, c->self.kind == JV_DICT);
}

static enum status t_iterable(const struct jinja_call *c, struct jv *out)
{
    enum jv_kind k = c->self.kind;
    return kind_is(out, k == JV_UNDEFINED || k == JV_STRING || k == JV_LIST || k == JV_DICT ||
                            k == JV_LOOP);
}

static enum status t_sequence(const struct jinja_call *c, struct jv *out)
{
    enum jv_kind k = c->self.kind;
    return kind_is(out, k == JV_UNDEFINED || k == JV_STRING || k == JV_DICT ||
                            (k == JV_LIST && c->self.list->form <= JV_FORM_TUPLE));
}

static enum status t_callable(const struct jinja_call *c, struct jv *out)
{
    enum jv_kind k = c->self.kind;
    return kind_is(out, k == JV_UNDEFINED || k == JV_MACRO || k == JV_FUNC || k == JV_METHOD);
}

static enum status t_sameas(const struct jinja_call *c, struct jv *out)
{
    bool same = false;
    if (c->self.kind == c->arg[0]->kind) TRY(jv_equal(c->run, &c->self, c->arg[0], &same));
    if (c->self.kind == JV_LIST) same = same && c->self.list == c->arg[0]->list;
    if (c->self.kind == JV_DICT) same = same && c->self.dict == c->arg[0]->dict;
    return kind_is(out, same);
}

static enum status t_eq(const struct jinja_call *c, struct jv *out)
{
    *out = jv_bool(false);
    return jv_equal(c->run, &c->self, c->arg[0], &out->b);
}

static enum status t_ne(const struct jinja_call *c, struct jv *out)
{
    TRY(t_eq(c, out));
    out->b = !out->b;
    return OK;
}

static enum status order_is(const struct jinja_call *c, int a, int b, struct jv *out)
{
    int order;
    TRY(jv_compare(c->run, &c->self, c->arg[0], &order));
    return kind_is(out, order == a || order == b);
}

static enum status t_lt(const struct jinja_call *c, struct jv *out)
{
    return order_is(c, -1, -1, out);
}
static enum status t_le(const struct jinja_call *c, struct jv *out)
{
    return order_is(c, -1, 0, out);
}
static enum status t_gt(const struct jinja_call *c, struct jv *out)
{
    return order_is(c, 1, 1, out);
}
static enum status t_ge(const struct jinja_call *c, struct jv *out)
{
    return order_is(c, 1, 0, out);
}

static enum status t_in(const struct jinja_call *c, struct jv *out)
{
    *out = jv_bool(false);
    return jv_contains(c->run, c->arg[0], &c->self, &out->b);
}

static enum status remainder_is(const struct jinja_call *c, const struct jv *by, int64_t want,
                                struct jv *out)
{
    if (!jv_is_whole(&c->self) || !jv_is_whole(by))
        return jinja_bad_arg(c, "integers", jv_is_whole(by) ? &c->self : by);
    int64_t n = jv_whole(by);
    if (n == 0) return jinja_fail(c->run, ERR_FORMAT, "%s: division by zero", c->name);
    return kind_is(out, (n == -1 ? 0 : llabs(jv_whole(&c->self) % n)) == want);
}

static enum status t_odd(const struct jinja_call *c, struct jv *out)
{
    struct jv two = jv_int(2);
    return remainder_is(c, &two, 1, out);
}

static enum status t_even(const struct jinja_call *c, struct jv *out)
{
    struct jv two = jv_int(2);
    return remainder_is(c, &two, 0, out);
}

static enum status t_divisibleby(const struct jinja_call *c, struct jv *out)
{
    return remainder_is(c, c->arg[0], 0, out);
}

/* "is lower" is the method islower of the value's text. */
static enum status case_test(const struct jinja_call *c, struct str method, struct jv *out)
{
    struct jinja_call inner = { .run = c->run, .self = jv_str(STR("")) };
    TRY(jv_text(c->run, &c->self, &inner.self.s));
    return jinja_invoke(&inner, jinja_string_method_find(method), out);
}

static enum status t_lower(const struct jinja_call *c, struct jv *out)
{
    return case_test(c, STR("islower"), out);
}
static enum status t_upper(const struct jinja_call *c, struct jv *out)
{
    return case_test(c, STR("isupper"), out);
}

#define TEST_0(n, f)                                                                               \
    {                                                                                              \
        .name = n, .call = f                                                                       \
    }
#define TEST_1(n, f)                                                                               \
    {                                                                                              \
        .name = n, .call = f, .n_min = 1, .params = { "other" }                                    \
    }

static const struct jinja_fn TESTS[] = {
    TEST_0("defined", t_defined),
    TEST_0("undefined", t_undefined),
    TEST_0("none", t_none),
    TEST_0("string", t_string),
    TEST_0("number", t_number),
    TEST_0("integer", t_integer),
    TEST_0("float", t_float),
    TEST_0("boolean", t_boolean),
    TEST_0("true", t_true),
    TEST_0("false", t_false),
    TEST_0("mapping", t_mapping),
    TEST_0("iterable", t_iterable),
    TEST_0("sequence", t_sequence),
    TEST_0("callable", t_callable),
    TEST_1("sameas", t_sameas),
    TEST_1("equalto", t_eq),
    TEST_1("eq", t_eq),
    TEST_1("==", t_eq),
    TEST_1("ne", t_ne),
    TEST_1("!=", t_ne),
    TEST_1("lt", t_lt),
    TEST_1("lessthan", t_lt),
    TEST_1("<", t_lt),
    TEST_1("le", t_le),
    TEST_1("<=", t_le),
    TEST_1("gt", t_gt),
    TEST_1("greaterthan", t_gt),
    TEST_1(">", t_gt),
    TEST_1("ge", t_ge),
    TEST_1(">=", t_ge),
    TEST_1("in", t_in),
    TEST_0("odd", t_odd),
    TEST_0("even", t_even),
    TEST_1("divisibleby", t_divisibleby),
    TEST_0("lower", t_lower),
    TEST_0("upper", t_upper),
};

const struct jinja_fn *jinja_test_find(struct str name)
{
    return jinja_fn_find(TESTS, COUNT_OF(TESTS), name);
}
