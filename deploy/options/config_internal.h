/* config_internal.h - helpers on one table entry that config.c and config_help.c share; nobody else
 * includes it. Thread: main. */
#ifndef BATON_DEPLOY_OPTIONS_CONFIG_INTERNAL_H
#define BATON_DEPLOY_OPTIONS_CONFIG_INTERNAL_H

#include <stdbool.h>

#include "deploy/options/config.h"
#include "shared/base/str.h"

/* Takes the next word of a space-separated list; false at the end. *rest starts as str_of(list),
 * where a NULL list is empty. */
bool option_next_word(struct str *rest, struct str *word);
/* Does `command` take this option? A NULL command stands for all. */
bool option_applies_to(const struct option *option, const char *command);
bool option_has_range(const struct option *option);

#endif
