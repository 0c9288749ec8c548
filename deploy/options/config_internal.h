/* config_internal.h - what the config*.c files share: helpers on one table entry, and the values.
 * Of other files only environment.c includes it. Thread: main. */
#ifndef BATON_DEPLOY_OPTIONS_CONFIG_INTERNAL_H
#define BATON_DEPLOY_OPTIONS_CONFIG_INTERNAL_H

#include <stdbool.h>

#include "deploy/options/config.h"
#include "shared/base/mem.h"
#include "shared/base/str.h"

/* Takes the next word of a space-separated list; false at the end. *rest starts as str_of(list),
 * where a NULL list is empty. */
bool option_next_word(struct str *rest, struct str *word);
/* Does `command` take this option? A NULL command stands for all. */
bool option_applies_to(const struct option *option, const char *command);
bool option_has_range(const struct option *option);

/* ---- config_value.c ---- */

bool option_parse_bool(struct str s, bool *out);
/* Is `word` the value of a switch? A switch of another system that has no effect here may have a
 * number or "auto" there ("-fa auto", "--ep 8"); a variable of the environment has a boolean. */
bool option_takes_word(const struct option *option, const char *word);
/* ERR_CONFIG: `value` is not of the option's type or range; `given_as` is how the user named it. */
enum status option_check_value(const struct option *option, const char *given_as, const char *value,
                               struct err *err) MUST_CHECK;
/* ERR_CONFIG, for an option that is refused: says what it may be, if anything. */
enum status option_refuse_value(const struct option *option, const char *given_as,
                                const char *value, struct err *err) MUST_CHECK;
/* Does the checked `value` of a refused option equal its neutral value? Numbers and booleans
 * compare by value: "1" equals "1.0" or "true". */
bool option_is_neutral(const struct option *option, const char *value);

/* ---- the values ---- */

struct option_value {
    enum option_source source;
    char *given_as; /* "--port" or "BATON_PORT"; NULL: the default */
    char *text;     /* NULL: not set; unused for lists */
    char **items;   /* OPT_LIST */
    size_t n_items;
};

struct config {
    const char *command;
    bool service; /* config_as_service */
    size_t n_options;
    const struct option **options; /* [n_options] */
    struct option_value *values;   /* [n_options] */
    struct arena words;            /* of the command line, where some had to be split */
};

/* ---- config_flag.c ---- */

/* Index of the option that `command` (NULL: any) calls `name`; SIZE_MAX when there is none. */
size_t config_find_flag(const struct config *c, struct str name, bool aliases_only,
                        const char *command);
/* Returns ERR_CONFIG for a flag that the command does not take: what was most likely meant.
 * `word`: as typed, `name`: without dashes. */
enum status config_unknown_flag(const struct config *c, struct str word, struct str name,
                                struct err *err) MUST_CHECK;

#endif
