/* config.h - options from a table: one entry per option makes the parser, --help and
 * docs/configuration.md.
 *
 * An entry names the option, its aliases, environment variables, type, range, default and help.
 * Precedence: command line, environment, default; config remembers which one gave the value. The
 * table (option_table.h) also has options of the systems that our users come from; `effect` says
 * what happens when one is given.
 *
 * Life cycle: config_create from a table, config_load_env, config_load_args, read with config_*,
 * config_free.
 * Thread: loop, at start; read-only afterwards. */
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
    EFFECT_ACCEPTED, /* changes no answer: when given, `note` is printed once at start */
    EFFECT_REFUSED   /* not possible: any value but `neutral` stops the start with `note` */
};

struct option {
    const char *name;        /* with dashes, without the leading "--"; NULL ends the table */
    const char *aliases;     /* separated by spaces, without dashes ("m" is "-m"); may be NULL */
    const char *env;         /* variables, separated by spaces, the first wins; may be NULL */
    const char *service_env; /* read after those by what start_server starts, and by nothing else:
                              * other programs have variables of these names; may be NULL */
    enum option_type type;
    double min, max;         /* numbers only; both 0: no range */
    const char *choices;     /* OPT_ENUM: separated by '|' */
    const char *def;         /* default as text; NULL: not set */
    const char *service_def; /* default of what start_server starts; NULL: `def` */
    bool secret;             /* its value is not printed */
    enum option_effect effect;
    const char *neutral;  /* REFUSED: values that ask for nothing, separated by '|'; may be NULL */
    const char *group;    /* heading in --help */
    const char *commands; /* subcommands that take it, separated by spaces; NULL: all */
    const char *help;     /* one sentence */
    const char *note;     /* ACCEPTED / REFUSED / works_with: one sentence */
    const char *works_with; /* WORKS: an option without which it has no effect, and `note` is
                             * printed; NULL: none */
};

enum option_source { SOURCE_DEFAULT, SOURCE_ENV, SOURCE_ARGS };

struct config;

/* A table is a list of arrays: an entry without a name ends an array, NULL the list. Returns option
 * i of all arrays; NULL past the last. */
const struct option *option_at(const struct option *const *table, size_t i);

/* `table` is kept until config_free. `command` selects the options that apply. */
struct config *config_create(const struct option *const *table, const char *command);
void config_free(struct config *c);
/* For what start_server starts: takes each service_def, and config_load_env reads service_env too.
 * Call it first. */
void config_as_service(struct config *c);
bool config_is_service(const struct config *c);
/* Errors name the variable or flag, the value and what would be right; for an unknown flag they
 * suggest the nearest name. argv holds the argc words after the command. `positional` receives at
 * most *n words that are not options (borrowed from argv); *n becomes their number. */
enum status config_load_env(struct config *c, struct err *err) MUST_CHECK;
enum status config_load_args(struct config *c, int argc, char **argv, const char **positional,
                             int *n, struct err *err) MUST_CHECK;
/* Sets a value from code (the launcher) as if it were given on the command line. */
enum status config_set(struct config *c, const char *name, const char *value,
                       struct err *err) MUST_CHECK;
/* The same, and sentences call it by `from`, the variable that it was made of. */
enum status config_set_from(struct config *c, const char *name, const char *value, const char *from,
                            struct err *err) MUST_CHECK;
/* Takes back what was given: the option has its default again. */
void config_forget(struct config *c, const char *name);
/* Unsets all variables of an option, for processes that would inherit them. */
void config_unset_env(const struct config *c, const char *name);

/* ---- values by primary name; an unknown name or another type is our own bug (ASSERT) ---- */

/* true when the environment or the command line gave it */
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

/* Notes at start: emit one sentence per option that was given and has no effect. */
void config_notes(const struct config *c, void (*emit)(void *arg, const char *sentence), void *arg);
/* Appends lines of the start page: which option each variable of another system has given, and its
 * value, but for secrets. */
void config_print_variables(const struct config *c, struct buf *out);
struct config_help_options {
    const char *command;
    const char *intro; /* the lines before the options; may be NULL */
    bool all;          /* also options without effect */
    const char *word;  /* only options with this in their names or help, those of this name first
                        * ("-c", "--port": only that one); NULL: any */
};
/* Appends the --help of a command (config_help) or the table of docs/configuration.md. */
void config_help(const struct option *const *table, const struct config_help_options *o,
                 struct buf *out);
/* The name that somebody may have meant whose word no option is about; n 0: none. */
struct str config_help_near(const struct option *const *table, const char *command,
                            const char *typed);
void config_markdown(const struct option *const *table, struct buf *out);

#endif
