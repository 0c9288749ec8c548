/* jinja_eval.h - scopes, and the calls between expressions and statements (internal to
 * shared/text/jinja).
 *
 * A scope holds the variables set in it and points to the one around it. The template's body, each
 * iteration of a for loop, each macro call and each captured block open a scope; `if` does not.
 * `set` writes to the innermost scope only: a variable set in a loop is gone after the iteration. A
 * macro runs inside the scope that defined it.
 * Thread: the one that renders. */
#ifndef BATON_TEXT_JINJA_JINJA_EVAL_H
#define BATON_TEXT_JINJA_JINJA_EVAL_H

#include "shared/text/jinja/jinja_ast.h"

struct jinja_binding {
    struct str name;
    struct jv value;
    struct jinja_binding *next;
};

struct jinja_scope {
    struct jinja_scope *parent;
    struct jinja_binding *first;
};

struct jinja_macro {
    const struct jinja_stmt *def;
    struct jinja_scope *scope;
};

enum status jinja_scope_new(struct jinja_run *run, struct jinja_scope *parent,
                            struct jinja_scope **out) MUST_CHECK;
enum status jinja_scope_set(struct jinja_run *run, struct jinja_scope *s, struct str name,
                            struct jv value) MUST_CHECK;

/* Evaluates an expression; jinja_eval.c. */
enum status jinja_eval(struct jinja_run *run, struct jinja_scope *s, const struct jinja_expr *e,
                       struct jv *out) MUST_CHECK;
/* Applies filters to *v, in place. */
enum status jinja_eval_filters(struct jinja_run *run, struct jinja_scope *s,
                               const struct jinja_link *l, struct jv *v) MUST_CHECK;
/* Arithmetic, comparison and `in`, and unary operators; jinja_ops.c. */
enum status jinja_arith(struct jinja_run *run, enum jinja_tok op, const struct jv *a,
                        const struct jv *b, struct jv *out) MUST_CHECK;
enum status jinja_relate(struct jinja_run *run, enum jinja_tok op, const struct jv *a,
                         const struct jv *b, bool *out) MUST_CHECK;
enum status jinja_negate(struct jinja_run *run, enum jinja_expr_kind kind, const struct jv *v,
                         struct jv *out) MUST_CHECK;
/* Runs a macro and returns its text; jinja_render.c. */
enum status jinja_call_macro(const struct jinja_call *c, struct jinja_macro *m,
                             struct jv *out) MUST_CHECK;

#endif
