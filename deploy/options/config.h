/* config.h - the option table: one row per option makes the parser, --help and
 * docs/configuration.md.
 *
 * A row names the option, its aliases, environment variables, type, range, default and help. Values
 * come from, in falling order, command line, environment, default; config remembers which. Rows
 * also cover options of the systems our users come from: `effect` says what happens when one is
 * given. The table itself is deploy/options/option_table.c. Life cycle: config_create from a table,
 * config_load_env, config_load_args, read with config_*; free. Thread: loop, at start; read-only
 * afterwards. */
#ifndef BATON_DEPLOY_OPTIONS_CONFIG_H
#define BATON_DEPLOY_OPTIONS_CONFIG_H

#include <stdbool.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum option_type {
    OPT_BOOL,
    OPT_INT,
    OPT_FLOAT,
    OPT_STRING,
    OPT_ENUM,
    OPT_LIST /* commas or repeated */,
    OPT_JSON
};

enum option_effect {
    EFFECT_WORKS,    /* does what it says */
    EFFECT_ACCEPTED, /* changes no answer: accepted, `note` is said once at start when it was
                      * given */
    EFFECT_REFUSED   /* cannot be honoured: given (with a value other than `neutral`), start stops
                      * with `note` */
};

struct option {
    const char *name;    /* with dashes, without the leading "--"; NULL ends the table */
    const char *aliases; /* separated by spaces, each without dashes; may be NULL. "m" is
                          * "-m" */
    const char *env;     /* environment variables, separated by spaces, first wins; may be
                          * NULL */
    enum option_type type;
    double min, max;     /* numbers only; both 0: no range */
    const char *choices; /* OPT_ENUM: separated by '|' */
    const char *def;     /* default as text; NULL: not set */
    enum option_effect effect;
    const char *neutral;  /* REFUSED: the value that asks for nothing; may be NULL */
    const char *group;    /* heading in --help */
    const char *commands; /* subcommands that take it, separated by spaces; NULL: all */
    const char *help;     /* one sentence */
    const char *note;     /* ACCEPTED / REFUSED: one sentence */
};

enum option_source { SOURCE_DEFAULT, SOURCE_ENV, SOURCE_ARGS };

struct config;

/* `table` is kept until config_free. `command` selects the rows. */
struct config *config_create(const struct option *table, const char *command);
void config_free(struct config *c);
/* Errors name the variable or flag, the value and what would be right; an unknown flag gets the
 * nearest name. argv holds the words after the command (no program name), argc of them.
 * `positional` receives those that are not options (borrowed from argv), at most *n; *n becomes
 * their number. */
enum status config_load_env(struct config *c, struct err *err) MUST_CHECK;
enum status config_load_args(struct config *c, int argc, char **argv, const char **positional,
                             int *n, struct err *err) MUST_CHECK;
/* Set from code (the launcher), as if given on the command line. */
enum status config_set(struct config *c, const char *name, const char *value,
                       struct err *err) MUST_CHECK;

/* Values by primary name; asking for a row that is not in the table or of another type is our own
 * bug (ASSERT). */
/* env or args gave it */
bool config_is_set(const struct config *c, const char *name);
enum option_source config_source(const struct config *c, const char *name);
/* "--port", "BATON_PORT", "default" */
const char *config_source_text(const struct config *c, const char *name);
bool config_bool(const struct config *c, const char *name);
int64_t config_int(const struct config *c, const char *name);
double config_float(const struct config *c, const char *name);
/* NULL when not set; enum and JSON too */
const char *config_string(const struct config *c, const char *name);
/* i-th item of a list, NULL past the end; *n (may be NULL) gets the count. */
const char *config_list(const struct config *c, const char *name, size_t i, size_t *n);

/* What must be said at start: one sentence per ACCEPTED option that was given. */
void config_notes(const struct config *c, void (*emit)(void *arg, const char *sentence), void *arg);
/* --help of the command; the table of docs/configuration.md. */
void config_help(const struct option *table, const char *command, const char *intro, bool all,
                 struct buf *out);
void config_markdown(const struct option *table, struct buf *out);

#endif
