/* jinja_call.c - calls of filters, tests, methods and functions: looks a name up in a table, binds
 * the arguments, reports one of the wrong type.
 * Thread: the one that renders. */
#include "shared/text/jinja/jinja_value.h"

#include <string.h>

const struct jinja_fn *jinja_fn_find(const struct jinja_fn *table, size_t n, struct str name)
{
    for (size_t i = 0; i < n; i++)
        if (str_eq_c(name, table[i].name)) return &table[i];
    return NULL;
}

enum status jinja_bad_arg(const struct jinja_call *c, const char *want, const struct jv *got)
{
    return jinja_fail(c->run, ERR_FORMAT, "%s needs %s, not a %s", c->name, want,
                      jv_type_name(got));
}

static enum status bind_named(struct jinja_call *c, const struct jinja_fn *fn, size_t i)
{
    for (size_t k = 0; k < JINJA_PARAMS_MAX && fn->params[k]; k++) {
        if (!str_eq_c(c->names[i], fn->params[k])) continue;
        if (c->arg[k])
            return jinja_fail(c->run, ERR_FORMAT, "%s got '%s' twice", fn->name, fn->params[k]);
        c->arg[k] = &c->named[i];
        return OK;
    }
    return jinja_fail(c->run, ERR_FORMAT, "%s takes no argument '%.*s'", fn->name,
                      STR_ARG(c->names[i]));
}

enum status jinja_invoke(struct jinja_call *c, const struct jinja_fn *fn, struct jv *out)
{
    size_t n_params = 0;
    c->name = fn->name;
    memset(c->arg, 0, sizeof c->arg);
    if (fn->open) return fn->call(c, out);
    while (n_params < JINJA_PARAMS_MAX && fn->params[n_params]) n_params++;
    if (c->n_pos > n_params)
        return jinja_fail(c->run, ERR_FORMAT, "%s takes at most %zu arguments, not %zu", fn->name,
                          n_params, c->n_pos);
    for (size_t i = 0; i < c->n_pos; i++) c->arg[i] = &c->pos[i];
    for (size_t i = 0; i < c->n_named; i++) TRY(bind_named(c, fn, i));
    for (int i = 0; i < fn->n_min; i++)
        if (!c->arg[i])
            return jinja_fail(c->run, ERR_FORMAT, "%s needs the argument '%s'", fn->name,
                              fn->params[i]);
    return fn->call(c, out);
}
