/* jinja.h - the template language of chat templates, as Hugging Face configures it.
 *
 * trim_blocks and lstrip_blocks are on, one trailing newline of the template is removed, nothing is
 * autoescaped, undefined prints as "" and is false.
 * A template is parsed once and rendered with variables given as JSON. Nesting, steps, memory and
 * output size are limited (ERR_TOO_LONG), so hostile templates and data do no harm.
 * What is covered: statements in jinja_parse.c, expressions in jinja_expr.c, filters and tests in
 * jinja_filters*.c, methods and functions in jinja_attr.c and jinja_string_methods.c.
 * Thread: parse on one; then read-only, render on any. */
#ifndef BATON_TEXT_JINJA_JINJA_H
#define BATON_TEXT_JINJA_JINJA_H

#include "shared/base/buf.h"
#include "shared/base/err.h"
#include "shared/base/json/json.h"

struct jinja;

enum {
    JINJA_SOURCE_MAX = 1 << 20,
    JINJA_OUTPUT_MAX = 64 << 20,
    JINJA_STEPS_MAX = 20 * 1000 * 1000,
    JINJA_DEPTH_MAX = 128
};

/* Parses `source` (copied). ERR_FORMAT names the line and what was expected, ERR_UNSUPPORTED the
 * construct. */
enum status jinja_parse(struct str source, struct jinja **out, struct err *err) MUST_CHECK;
void jinja_free(struct jinja *t);
/* Appends the rendered text. The members of the JSON object `vars` (borrowed) are the global
 * variables; `now` is the Unix time for strftime_now (UTC). raise_exception(msg) gives ERR_INVALID
 * with msg, other errors of the template give ERR_FORMAT with the line. The output is undefined
 * after an error. */
enum status jinja_render(const struct jinja *t, const cJSON *vars, int64_t now, struct buf *out,
                         struct err *err) MUST_CHECK;

#endif
