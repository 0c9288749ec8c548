/* jinja_eval.c - the evaluator of expressions, and scopes.
 *
 * Recursion follows the nesting of the source and the calls of macros; jinja_run_enter bounds it
 * and counts every step. A name that was never set is undefined.
 * Thread: the one that renders. */
#include "shared/text/jinja/jinja_eval.h"

#include <string.h>

/* ---- scopes ---- */

enum status jinja_scope_new(struct jinja_run *run, struct jinja_scope *parent,
                            struct jinja_scope **out)
{
    TRY(jinja_run_alloc(run, 1, sizeof **out, out));
    (*out)->parent = parent;
    return OK;
}

enum status jinja_scope_set(struct jinja_run *run, struct jinja_scope *s, struct str name,
                            struct jv value)
{
    struct jinja_binding *b = s->first;
    while (b && !str_eq(b->name, name)) b = b->next;
    if (!b) {
        TRY(jinja_run_alloc(run, 1, sizeof *b, &b));
        b->name = name;
        b->next = s->first;
        s->first = b;
    }
    b->value = value;
    return OK;
}

static void lookup(struct jinja_run *run, const struct jinja_scope *s, struct str name,
                   struct jv *out)
{
    for (; s; s = s->parent)
        for (const struct jinja_binding *b = s->first; b; b = b->next) {
            run->steps++;
            if (!str_eq(b->name, name)) continue;
            *out = b->value;
            return;
        }
    const struct jinja_fn *fn = jinja_global_find(name);
    *out = fn ? (struct jv){ .kind = JV_FUNC, .fn = fn } : jv_undefined(name);
}

/* ---- calls ---- */

static enum status eval_args(struct jinja_run *run, struct jinja_scope *s,
                             const struct jinja_args *args, struct jinja_call *c)
{
    struct jv *values;
    struct str *names;
    size_t i_pos = 0, i_named = 0;
    *c = (struct jinja_call){ .run = run, .n_pos = args->n_pos, .n_named = args->n_named };
    if (!args->first) return OK;
    TRY(jinja_run_alloc(run, args->n_pos + args->n_named, sizeof *values, &values));
    TRY(jinja_run_alloc(run, args->n_named, sizeof *names, &names));
    for (const struct jinja_arg *a = args->first; a; a = a->next) {
        TRY(jinja_eval(run, s, a->expr,
                       a->name.p ? &values[args->n_pos + i_named] : &values[i_pos]));
        if (a->name.p) names[i_named++] = a->name;
        else i_pos++;
    }
    c->pos = values;
    c->named = values + args->n_pos;
    c->names = names;
    return OK;
}

static enum status call_value(struct jinja_call *c, const struct jv *callee, struct jv *out)
{
    switch (callee->kind) {
    case JV_METHOD: c->self = callee->method->self; return jinja_invoke(c, callee->method->fn, out);
    case JV_FUNC: return jinja_invoke(c, callee->fn, out);
    case JV_MACRO: return jinja_call_macro(c, callee->macro, out);
    case JV_UNDEFINED:
        return jinja_fail(c->run, ERR_FORMAT, "'%.*s' is undefined and cannot be called",
                          STR_ARG(callee->s));
    default: return jinja_fail(c->run, ERR_FORMAT, "a %s cannot be called", jv_type_name(callee));
    }
}

static enum status eval_call(struct jinja_run *run, struct jinja_scope *s,
                             const struct jinja_link *l, struct jv *v)
{
    struct jinja_call c;
    struct jv callee = *v;
    TRY(eval_args(run, s, &l->args, &c));
    run->line = l->line;
    if (l->kind == JINJA_LINK_CALL) return call_value(&c, &callee, v);
    c.self = callee;
    TRY(jinja_invoke(&c, l->fn, v));
    if (l->kind == JINJA_LINK_TEST && l->negated) *v = jv_bool(!jv_truth(v));
    return OK;
}

static enum status eval_slice(struct jinja_run *run, struct jinja_scope *s,
                              const struct jinja_link *l, struct jv *v)
{
    struct jv values[3], whole = *v;
    const struct jv *bound[3] = { NULL, NULL, NULL };
    for (int i = 0; i < 3; i++) {
        if (!l->arg[i]) continue;
        TRY(jinja_eval(run, s, l->arg[i], &values[i]));
        bound[i] = &values[i];
    }
    return jv_slice(run, &whole, bound, v);
}

static enum status eval_link(struct jinja_run *run, struct jinja_scope *s,
                             const struct jinja_link *l, struct jv *v)
{
    struct jv key, container = *v;
    run->line = l->line;
    switch (l->kind) {
    case JINJA_LINK_ATTR: return jv_attr(run, &container, l->name, v);
    case JINJA_LINK_ITEM:
        TRY(jinja_eval(run, s, l->arg[0], &key));
        return jv_item(run, &container, &key, v);
    case JINJA_LINK_SLICE: return eval_slice(run, s, l, v);
    default: return eval_call(run, s, l, v);
    }
}

enum status jinja_eval_filters(struct jinja_run *run, struct jinja_scope *s,
                               const struct jinja_link *l, struct jv *v)
{
    for (; l; l = l->next) {
        TRY(jinja_run_step(run));
        TRY(eval_link(run, s, l, v));
    }
    return OK;
}

/* ---- expressions ---- */

static enum status eval_list(struct jinja_run *run, struct jinja_scope *s,
                             const struct jinja_expr *e, struct jv *out)
{
    TRY(jv_list_new(run, e->kind == JX_TUPLE ? JV_FORM_TUPLE : JV_FORM_LIST, e->n_terms, out));
    for (const struct jinja_term *t = e->terms; t; t = t->next) {
        struct jv v;
        TRY(jinja_eval(run, s, t->expr, &v));
        TRY(jv_list_push(run, out->list, v));
    }
    return OK;
}

static enum status eval_dict(struct jinja_run *run, struct jinja_scope *s,
                             const struct jinja_expr *e, struct jv *out)
{
    TRY(jv_dict_new(run, JV_DICT, e->n_terms, out));
    for (const struct jinja_term *t = e->terms; t; t = t->next) {
        struct jv key, value;
        TRY(jinja_eval(run, s, t->key, &key));
        TRY(jinja_eval(run, s, t->expr, &value));
        TRY(jv_dict_put(run, out->dict, key, value));
    }
    return OK;
}

static enum status eval_arith(struct jinja_run *run, struct jinja_scope *s,
                              const struct jinja_expr *e, struct jv *out)
{
    TRY(jinja_eval(run, s, e->base, out));
    for (const struct jinja_term *t = e->terms; t; t = t->next) {
        struct jv left = *out, right;
        TRY(jinja_eval(run, s, t->expr, &right));
        run->line = e->line;
        TRY(jinja_arith(run, t->op, &left, &right, out));
    }
    return OK;
}

/* a ~ b ~ c: joins the texts of all operands at once. */
static enum status eval_concat(struct jinja_run *run, struct jinja_scope *s,
                               const struct jinja_expr *e, struct jv *out)
{
    struct jv *parts;
    size_t n = 0;
    TRY(jinja_run_alloc(run, e->n_terms + 1, sizeof *parts, &parts));
    TRY(jinja_eval(run, s, e->base, &parts[n++]));
    for (const struct jinja_term *t = e->terms; t; t = t->next)
        TRY(jinja_eval(run, s, t->expr, &parts[n++]));
    return jv_join(run, STR(""), parts, n, false, out);
}

/* a < b < c: compares neighbours and stops at the first comparison that is false. */
static enum status eval_compare(struct jinja_run *run, struct jinja_scope *s,
                                const struct jinja_expr *e, struct jv *out)
{
    struct jv left, right;
    TRY(jinja_eval(run, s, e->base, &left));
    *out = jv_bool(true);
    for (const struct jinja_term *t = e->terms; t && out->b; t = t->next, left = right) {
        TRY(jinja_eval(run, s, t->expr, &right));
        run->line = e->line;
        TRY(jinja_relate(run, t->op, &left, &right, &out->b));
    }
    return OK;
}

/* `and` and `or` give the operand that decided, not its truth. */
static enum status eval_logic(struct jinja_run *run, struct jinja_scope *s,
                              const struct jinja_expr *e, struct jv *out)
{
    TRY(jinja_eval(run, s, e->base, out));
    for (const struct jinja_term *t = e->terms; t && jv_truth(out) == (e->kind == JX_AND);
         t = t->next)
        TRY(jinja_eval(run, s, t->expr, out));
    return OK;
}

static enum status eval_cond(struct jinja_run *run, struct jinja_scope *s,
                             const struct jinja_expr *e, struct jv *out)
{
    struct jv test;
    TRY(jinja_eval(run, s, e->terms->expr, &test));
    if (jv_truth(&test)) return jinja_eval(run, s, e->base, out);
    if (e->terms->next) return jinja_eval(run, s, e->terms->next->expr, out);
    *out = jv_undefined(STR("the value of an if without else"));
    return OK;
}

static enum status eval_unary(struct jinja_run *run, struct jinja_scope *s,
                              const struct jinja_expr *e, struct jv *out)
{
    struct jv v;
    TRY(jinja_eval(run, s, e->base, &v));
    run->line = e->line;
    if (e->kind != JX_NOT) return jinja_negate(run, e->kind, &v, out);
    *out = jv_bool(!jv_truth(&v));
    return OK;
}

static enum status eval_at(struct jinja_run *run, struct jinja_scope *s, const struct jinja_expr *e,
                           struct jv *out)
{
    switch (e->kind) {
    case JX_CONST: *out = e->value; return OK;
    case JX_NAME: lookup(run, s, e->name, out); return OK;
    case JX_LIST:
    case JX_TUPLE: return eval_list(run, s, e, out);
    case JX_DICT: return eval_dict(run, s, e, out);
    case JX_CHAIN:
        TRY(jinja_eval(run, s, e->base, out));
        return jinja_eval_filters(run, s, e->links, out);
    case JX_NEG:
    case JX_POS:
    case JX_NOT: return eval_unary(run, s, e, out);
    case JX_ARITH: return eval_arith(run, s, e, out);
    case JX_CONCAT: return eval_concat(run, s, e, out);
    case JX_COMPARE: return eval_compare(run, s, e, out);
    case JX_AND:
    case JX_OR: return eval_logic(run, s, e, out);
    case JX_COND: return eval_cond(run, s, e, out);
    }
    return jinja_fail(run, ERR_INTERNAL, "an expression of unknown kind");
}

enum status jinja_eval(struct jinja_run *run, struct jinja_scope *s, const struct jinja_expr *e,
                       struct jv *out)
{
    TRY(jinja_run_enter(run));
    run->line = e->line;
    enum status st = eval_at(run, s, e, out);
    jinja_run_leave(run);
    return st;
}
