/* format_name.h - names of reasoning and tool call formats, as peers spell them. Thread: any. */
#ifndef BATON_TEXT_OUTPUT_FORMAT_NAME_H
#define BATON_TEXT_OUTPUT_FORMAT_NAME_H

#include "shared/base/str.h"

/* Whether `given` is `name` or one of `aliases` (separated by spaces), where '-', '_' and '.' do
 * not count. */
bool format_is_named(struct str given, const char *name, const char *aliases);

#endif
