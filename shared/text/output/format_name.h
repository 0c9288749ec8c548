/* format_name.h - compares names of reasoning and tool call formats as other servers spell them.
 * Thread: any. */
#ifndef BATON_TEXT_OUTPUT_FORMAT_NAME_H
#define BATON_TEXT_OUTPUT_FORMAT_NAME_H

#include "shared/base/str.h"

/* Is `given` `name` or one of `aliases` (separated by spaces), ignoring '-', '_' and '.'? */
bool format_is_named(struct str given, const char *name, const char *aliases);
/* What an option may say instead of a format: "auto" or "none". */
bool format_is_auto_or_none(struct str given);

#endif
