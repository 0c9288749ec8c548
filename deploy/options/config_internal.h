/* config_internal.h - what the parser (config.c) and the texts (config_help.c) both ask of an
 * option row; those two only. */
#ifndef BATON_DEPLOY_OPTIONS_CONFIG_INTERNAL_H
#define BATON_DEPLOY_OPTIONS_CONFIG_INTERNAL_H

#include <stdbool.h>

#include "deploy/options/config.h"
#include "shared/base/str.h"

/* Next of the words in a space separated list (NULL is empty); *rest starts as str_of(list). False
 * at the end. */
bool option_next_word(struct str *rest, struct str *word);
/* Is `command` among those that take the row? A NULL command stands for all. */
bool option_applies_to(const struct option *option, const char *command);
bool option_has_range(const struct option *option);

#endif
