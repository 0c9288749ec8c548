/* jinja.h - the template language of chat templates, as Hugging Face configures it.
 *
 * trim_blocks and lstrip_blocks on, one trailing newline of the template removed, no autoescape,
 * undefined prints as "" and is false. A template is parsed once (read-only afterwards, shared by
 * threads) and rendered with variables given as JSON. Hostile templates and data are bounded:
 * nesting, steps, output size and call depth have limits (ERR_TOO_LONG). The grammar, filters,
 * tests and methods covered are listed at the top of jinja_parse.c and jinja_eval.c. Thread: parse
 * on one, render on any. */
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

/* ERR_FORMAT names the line and what was expected; ERR_UNSUPPORTED names the construct. `source` is
 * copied. */
enum status jinja_parse(struct str source, struct jinja **out, struct err *err) MUST_CHECK;
void jinja_free(struct jinja *t);
/* Append the rendered text. `vars` is a JSON object whose members become global variables
 * (borrowed). `now` is the Unix time for strftime_now (UTC). raise_exception(msg) gives ERR_INVALID
 * with msg; other errors of the template ERR_FORMAT with the line. Output is undefined after an
 * error. */
enum status jinja_render(const struct jinja *t, const cJSON *vars, int64_t now, struct buf *out,
                         struct err *err) MUST_CHECK;

#endif
