/* jinja_render.c - the evaluator of statements: output, if, for, set, macros.
 *
 * Output goes to run->out, which macros and captured blocks replace for their duration. break and
 * continue set run->flow: the statements that follow are skipped until the loop clears it.
 * Thread: the one that renders. */
#include "shared/text/jinja/jinja_eval.h"

#include <string.h>

static enum status exec_body(struct jinja_run *run, struct jinja_scope *s,
                             const struct jinja_stmt *body);

/* Assigns to a name, ns.attr, or the parts of a tuple. Recursion follows the nesting of the target,
 * which the parser bounds. */
static enum status assign(struct jinja_run *run, struct jinja_scope *s,
                          const struct jinja_target *t, const struct jv *v)
{
    const struct jv *items;
    size_t n;
    if (!t->parts && !t->attr.p) return jinja_scope_set(run, s, t->name, *v);
    if (!t->parts) {
        const struct jinja_expr name = { .kind = JX_NAME, .name = t->name, .line = run->line };
        struct jv ns;
        TRY(jinja_eval(run, s, &name, &ns));
        if (ns.kind != JV_NAMESPACE)
            return jinja_fail(run, ERR_FORMAT,
                              "'%.*s' is not a namespace: its members cannot be set",
                              STR_ARG(t->name));
        return jv_dict_put(run, ns.dict, jv_str(t->attr), *v);
    }
    TRY(jv_elements(run, v, &items, &n));
    if (n != t->n_parts)
        return jinja_fail(run, ERR_FORMAT, "%zu values cannot be assigned to %zu names", n,
                          t->n_parts);
    const struct jinja_target *part = t->parts;
    for (size_t i = 0; i < n; i++, part = part->next) TRY(assign(run, s, part, &items[i]));
    return OK;
}

/* Runs `body` in scope s and returns its output. */
static enum status capture(struct jinja_run *run, struct jinja_scope *s,
                           const struct jinja_stmt *body, struct jv *out)
{
    struct buf b = { 0 }, *outer = run->out;
    size_t written = run->written;
    run->out = &b;
    enum status st = exec_body(run, s, body);
    run->out = outer;
    if (st != OK) {
        buf_release(&b);
        return st;
    }
    run->written = written; /* counted when the value is printed; the copy counts as memory */
    return jv_take(run, &b, out);
}

/* ---- macros ---- */

static const struct jv *macro_arg(const struct jinja_call *c, struct str name, size_t i,
                                  size_t *used)
{
    const struct jv *v = i < c->n_pos ? &c->pos[i] : NULL;
    for (size_t k = 0; k < c->n_named; k++) {
        if (!str_eq(c->names[k], name)) continue;
        (*used)++;
        if (!v) v = &c->named[k];
    }
    return v;
}

/* Binds the parameters in order; a default may use those before it. */
static enum status bind_params(const struct jinja_call *c, const struct jinja_stmt *def,
                               struct jinja_scope *s)
{
    size_t i = 0, used = 0;
    for (const struct jinja_arg *p = def->params; p; p = p->next, i++) {
        const struct jv *given = macro_arg(c, p->name, i, &used);
        struct jv v = given ? *given : jv_undefined(p->name);
        if (!given && p->expr) TRY(jinja_eval(c->run, s, p->expr, &v));
        TRY(jinja_scope_set(c->run, s, p->name, v));
    }
    if (c->n_pos > i)
        return jinja_fail(c->run, ERR_FORMAT, "the macro %.*s takes at most %zu arguments, not %zu",
                          STR_ARG(def->text), i, c->n_pos);
    if (used < c->n_named)
        return jinja_fail(c->run, ERR_FORMAT,
                          "the macro %.*s got a named argument that it does not have",
                          STR_ARG(def->text));
    return OK;
}

enum status jinja_call_macro(const struct jinja_call *c, struct jinja_macro *m, struct jv *out)
{
    struct jinja_run *run = c->run;
    struct jinja_scope *s;
    if (run->calls >= JINJA_DEPTH_MAX)
        return jinja_fail(run, ERR_TOO_LONG, "macros call each other more than %d deep",
                          JINJA_DEPTH_MAX);
    TRY(jinja_scope_new(run, m->scope, &s));
    TRY(bind_params(c, m->def, s));
    run->calls++;
    enum status st = capture(run, s, m->def->body, out);
    run->calls--;
    return st;
}

static enum status exec_macro(struct jinja_run *run, struct jinja_scope *s,
                              const struct jinja_stmt *st)
{
    struct jinja_macro *m;
    TRY(jinja_run_alloc(run, 1, sizeof *m, &m));
    *m = (struct jinja_macro){ st, s };
    return jinja_scope_set(run, s, st->text, (struct jv){ .kind = JV_MACRO, .macro = m });
}

/* ---- loops ---- */

/* for ... if: keep the items for which the test is true, with the target bound to each. */
static enum status filter_items(struct jinja_run *run, struct jinja_scope *s,
                                const struct jinja_stmt *st, const struct jv **items, size_t *n)
{
    struct jv kept;
    struct jinja_scope *inner;
    TRY(jv_list_new(run, JV_FORM_LIST, *n, &kept));
    for (size_t i = 0; i < *n; i++) {
        struct jv yes;
        TRY(jinja_scope_new(run, s, &inner));
        TRY(assign(run, inner, st->target, &(*items)[i]));
        TRY(jinja_eval(run, inner, st->test, &yes));
        if (jv_truth(&yes)) TRY(jv_list_push(run, kept.list, (*items)[i]));
    }
    *items = kept.list->items;
    *n = kept.list->len;
    return OK;
}

/* Runs all iterations. *finished: at least one ran to its end, so `else` does not run (as in
 * Jinja). */
static enum status run_passes(struct jinja_run *run, struct jinja_scope *s,
                              const struct jinja_stmt *st, struct jinja_loop *loop, bool *finished)
{
    for (; loop->i < loop->n; loop->i++) {
        struct jinja_scope *inner;
        TRY(jinja_scope_new(run, s, &inner));
        TRY(jinja_scope_set(run, inner, STR("loop"), (struct jv){ .kind = JV_LOOP, .loop = loop }));
        TRY(assign(run, inner, st->target, &loop->items[loop->i]));
        TRY(exec_body(run, inner, st->body));
        enum jinja_flow flow = run->flow;
        run->flow = JINJA_FLOW_NORMAL;
        if (flow == JINJA_FLOW_BREAK) break;
        if (flow == JINJA_FLOW_NORMAL) *finished = true;
    }
    return OK;
}

static enum status exec_for(struct jinja_run *run, struct jinja_scope *s,
                            const struct jinja_stmt *st)
{
    struct jinja_loop *loop;
    struct jinja_scope *inner;
    struct jv seq;
    bool finished = false;
    TRY(jinja_eval(run, s, st->expr, &seq));
    run->line = st->line;
    TRY(jinja_run_alloc(run, 1, sizeof *loop, &loop));
    TRY(jv_elements(run, &seq, &loop->items, &loop->n));
    if (st->test) TRY(filter_items(run, s, st, &loop->items, &loop->n));
    enum status result = run_passes(run, s, st, loop, &finished);
    if (result != OK || finished || !st->else_) return result;
    TRY(jinja_scope_new(run, s, &inner));
    return exec_body(run, inner, st->else_);
}

/* ---- statements, and the entry ---- */

static enum status exec_if(struct jinja_run *run, struct jinja_scope *s,
                           const struct jinja_stmt *st)
{
    for (; st; st = st->else_) {
        struct jv test = jv_bool(true);
        if (st->expr) TRY(jinja_eval(run, s, st->expr, &test));
        if (jv_truth(&test)) return exec_body(run, s, st->body);
    }
    return OK;
}

static enum status exec_print(struct jinja_run *run, struct jinja_scope *s,
                              const struct jinja_stmt *st)
{
    struct jv v;
    struct str text;
    TRY(jinja_eval(run, s, st->expr, &v));
    TRY(jv_text(run, &v, &text));
    return jinja_run_write(run, text);
}

static enum status exec_set(struct jinja_run *run, struct jinja_scope *s,
                            const struct jinja_stmt *st)
{
    struct jv v;
    TRY(jinja_eval(run, s, st->expr, &v));
    run->line = st->line;
    return assign(run, s, st->target, &v);
}

static enum status exec_set_block(struct jinja_run *run, struct jinja_scope *s,
                                  const struct jinja_stmt *st)
{
    struct jinja_scope *inner;
    struct jv v;
    TRY(jinja_scope_new(run, s, &inner));
    TRY(capture(run, inner, st->body, &v));
    TRY(jinja_eval_filters(run, inner, st->filters, &v));
    return assign(run, s, st->target, &v);
}

static enum status exec_scope(struct jinja_run *run, struct jinja_scope *s,
                              const struct jinja_stmt *st)
{
    struct jinja_scope *inner;
    TRY(jinja_scope_new(run, s, &inner));
    return exec_body(run, inner, st->body);
}

static enum status exec(struct jinja_run *run, struct jinja_scope *s, const struct jinja_stmt *st)
{
    switch (st->kind) {
    case JS_TEXT: return jinja_run_write(run, st->text);
    case JS_PRINT: return exec_print(run, s, st);
    case JS_IF: return exec_if(run, s, st);
    case JS_FOR: return exec_for(run, s, st);
    case JS_SET: return exec_set(run, s, st);
    case JS_SET_BLOCK: return exec_set_block(run, s, st);
    case JS_MACRO: return exec_macro(run, s, st);
    case JS_SCOPE: return exec_scope(run, s, st);
    case JS_BREAK: run->flow = JINJA_FLOW_BREAK; return OK;
    case JS_CONTINUE: run->flow = JINJA_FLOW_CONTINUE; return OK;
    }
    return jinja_fail(run, ERR_INTERNAL, "a statement of unknown kind");
}

static enum status exec_body(struct jinja_run *run, struct jinja_scope *s,
                             const struct jinja_stmt *body)
{
    enum status st = OK;
    TRY(jinja_run_enter(run));
    for (; body && st == OK && run->flow == JINJA_FLOW_NORMAL; body = body->next) {
        run->line = body->line;
        st = jinja_run_step(run);
        if (st == OK) st = exec(run, s, body);
    }
    jinja_run_leave(run);
    return st;
}

static enum status render(struct jinja_run *run, const struct jinja *t, const cJSON *vars)
{
    struct jinja_scope *root;
    TRY(jinja_scope_new(run, NULL, &root));
    for (const cJSON *c = vars ? vars->child : NULL; c; c = c->next) {
        struct jv v;
        TRY(jv_of_json(run, c, false, &v));
        TRY(jinja_scope_set(run, root, str_of(c->string), v));
    }
    return exec_body(run, root, t->body);
}

enum status jinja_render(const struct jinja *t, const cJSON *vars, int64_t now, struct buf *out,
                         struct err *err)
{
    struct jinja_run run = { .out = out, .now = now, .err = err, .line = 1 };
    arena_init(&run.arena);
    enum status st = render(&run, t, vars);
    arena_release(&run.arena);
    return st;
}
