/* jinja_ops.c - operators of two values, with Python's rules.
 *
 * Integers are 64 bit: overflow is an error. / always gives a float, // and % round towards minus
 * infinity. + joins strings and lists, * repeats them. Formatting with "text" % value is not
 * covered (ERR_UNSUPPORTED).
 * Thread: the one that renders. */
#include "shared/text/jinja/jinja_eval.h"

#include <math.h>
#include <string.h>

static const char *op_name(enum jinja_tok op) { return jinja_tok_name(op); }

static enum status bad_operands(struct jinja_run *run, enum jinja_tok op, const struct jv *a,
                                const struct jv *b)
{
    const struct jv *undefined = a->kind == JV_UNDEFINED ? a : b->kind == JV_UNDEFINED ? b : NULL;
    if (undefined) return jinja_fail(run, ERR_FORMAT, "'%.*s' is undefined", STR_ARG(undefined->s));
    return jinja_fail(run, ERR_FORMAT, "%s cannot take a %s and a %s", op_name(op), jv_type_name(a),
                      jv_type_name(b));
}

static enum status power(struct jinja_run *run, int64_t base, int64_t exp, struct jv *out)
{
    int64_t result = 1;
    if (exp < 0) {
        if (base == 0) return jinja_fail(run, ERR_FORMAT, "division by zero");
        *out = jv_float(pow((double)base, (double)exp));
        return OK;
    }
    for (; exp > 0; exp >>= 1) {
        if ((exp & 1) && __builtin_mul_overflow(result, base, &result))
            return jinja_fail(run, ERR_FORMAT, "'**' gives a number that is too large");
        if (exp > 1 && __builtin_mul_overflow(base, base, &base))
            return jinja_fail(run, ERR_FORMAT, "'**' gives a number that is too large");
    }
    *out = jv_int(result);
    return OK;
}

static enum status whole_arith(struct jinja_run *run, enum jinja_tok op, int64_t a, int64_t b,
                               struct jv *out)
{
    int64_t r = 0;
    bool over = false;
    switch (op) {
    case TOK_ADD: over = __builtin_add_overflow(a, b, &r); break;
    case TOK_SUB: over = __builtin_sub_overflow(a, b, &r); break;
    case TOK_MUL: over = __builtin_mul_overflow(a, b, &r); break;
    case TOK_POW: return power(run, a, b, out);
    default:
        if (b == 0) return jinja_fail(run, ERR_FORMAT, "division by zero");
        if (op == TOK_DIV) {
            *out = jv_float((double)a / (double)b);
            return OK;
        }
        if (b == -1) {
            over = op == TOK_FLOORDIV && __builtin_sub_overflow(0, a, &r);
            break;
        }
        bool down = a % b != 0 && (a < 0) != (b < 0);
        r = op == TOK_FLOORDIV ? a / b - down : a % b + (down ? b : 0);
    }
    if (over)
        return jinja_fail(run, ERR_FORMAT, "%s gives a number that is too large", op_name(op));
    *out = jv_int(r);
    return OK;
}

static enum status float_arith(struct jinja_run *run, enum jinja_tok op, double a, double b,
                               struct jv *out)
{
    double r;
    switch (op) {
    case TOK_ADD: r = a + b; break;
    case TOK_SUB: r = a - b; break;
    case TOK_MUL: r = a * b; break;
    case TOK_POW:
        r = pow(a, b);
        if (isnan(r) && !isnan(a) && !isnan(b))
            return jinja_fail(run, ERR_FORMAT, "'**' gives a complex number");
        break;
    default:
        if (b == 0) return jinja_fail(run, ERR_FORMAT, "division by zero");
        r = fmod(a, b);
        if (r == 0) r = copysign(0, b);
        else if ((r < 0) != (b < 0)) r += b;
        if (op == TOK_FLOORDIV) r = round((a - r) / b);
        if (op == TOK_DIV) r = a / b;
    }
    *out = jv_float(r);
    return OK;
}

static enum status repeat(struct jinja_run *run, const struct jv *v, int64_t times, struct jv *out)
{
    size_t n = times > 0 ? (size_t)times : 0;
    if (v->kind == JV_LIST) {
        if (v->list->len && n > JINJA_STEPS_MAX / v->list->len)
            return jinja_fail(run, ERR_TOO_LONG, "'*' makes a list that is too long");
        TRY(jv_list_new(run, v->list->form, n * v->list->len, out));
        for (size_t i = 0; i < n * v->list->len; i++)
            out->list->items[out->list->len++] = v->list->items[i % v->list->len];
        jinja_run_spend(run, out->list->len);
        return OK;
    }
    char *p;
    if (v->s.n && n > JINJA_OUTPUT_MAX / v->s.n)
        return jinja_fail(run, ERR_TOO_LONG, "'*' makes a string of more than %d MiB",
                          JINJA_OUTPUT_MAX >> 20);
    if (v->s.n == 0) n = 0;
    TRY(jinja_run_alloc(run, n * v->s.n, 1, &p));
    for (size_t i = 0; i < n; i++) memcpy(p + i * v->s.n, v->s.p, v->s.n);
    *out = jv_str((struct str){ p, n * v->s.n });
    return OK;
}

static enum status join_lists(struct jinja_run *run, const struct jv_list *a,
                              const struct jv_list *b, struct jv *out)
{
    TRY(jv_list_new(run, a->form, a->len + b->len, out));
    if (a->len) memcpy(out->list->items, a->items, a->len * sizeof *a->items);
    if (b->len) memcpy(out->list->items + a->len, b->items, b->len * sizeof *b->items);
    out->list->len = a->len + b->len;
    return OK;
}

static bool is_repeatable(const struct jv *v)
{
    return v->kind == JV_STRING || (v->kind == JV_LIST && v->list->form <= JV_FORM_TUPLE);
}

enum status jinja_arith(struct jinja_run *run, enum jinja_tok op, const struct jv *a,
                        const struct jv *b, struct jv *out)
{
    if (jv_is_number(a) && jv_is_number(b)) {
        if (jv_is_whole(a) && jv_is_whole(b))
            return whole_arith(run, op, jv_whole(a), jv_whole(b), out);
        return float_arith(run, op, jv_number(a), jv_number(b), out);
    }
    if (op == TOK_ADD && a->kind == JV_STRING && b->kind == JV_STRING)
        return jv_concat(run, a->s, b->s, out);
    if (op == TOK_ADD && a->kind == JV_LIST && b->kind == JV_LIST &&
        a->list->form == b->list->form && is_repeatable(a))
        return join_lists(run, a->list, b->list, out);
    if (op == TOK_MUL && is_repeatable(a) && jv_is_whole(b))
        return repeat(run, a, jv_whole(b), out);
    if (op == TOK_MUL && jv_is_whole(a) && is_repeatable(b))
        return repeat(run, b, jv_whole(a), out);
    if (op == TOK_MOD && a->kind == JV_STRING)
        return jinja_fail(run, ERR_UNSUPPORTED, "formatting a string with '%%' is not supported");
    return bad_operands(run, op, a, b);
}

enum status jinja_relate(struct jinja_run *run, enum jinja_tok op, const struct jv *a,
                         const struct jv *b, bool *out)
{
    int order;
    switch (op) {
    case TOK_EQ: return jv_equal(run, a, b, out);
    case TOK_NE:
        TRY(jv_equal(run, a, b, out));
        *out = !*out;
        return OK;
    case TOK_IN: return jv_contains(run, b, a, out);
    case TOK_NOT_IN:
        TRY(jv_contains(run, b, a, out));
        *out = !*out;
        return OK;
    default:
        if (a->kind == JV_UNDEFINED || b->kind == JV_UNDEFINED) return bad_operands(run, op, a, b);
        TRY(jv_compare(run, a, b, &order));
        *out = op == TOK_LT   ? order == -1
               : op == TOK_LE ? order == -1 || order == 0
               : op == TOK_GT ? order == 1
                              : order == 1 || order == 0;
        return OK;
    }
}

enum status jinja_negate(struct jinja_run *run, enum jinja_expr_kind kind, const struct jv *v,
                         struct jv *out)
{
    if (v->kind == JV_UNDEFINED)
        return jinja_fail(run, ERR_FORMAT, "'%.*s' is undefined", STR_ARG(v->s));
    if (!jv_is_number(v)) return jinja_fail(run, ERR_FORMAT, "a %s has no sign", jv_type_name(v));
    if (v->kind == JV_FLOAT) {
        *out = jv_float(kind == JX_NEG ? -v->f : v->f);
        return OK;
    }
    return whole_arith(run, TOK_MUL, jv_whole(v), kind == JX_NEG ? -1 : 1, out);
}
