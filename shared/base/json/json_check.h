/* json_check.h - the strict syntax check that json_parse runs before cJSON builds the tree; for
 * json.c only. Thread: any. */
#ifndef BATON_BASE_JSON_JSON_CHECK_H
#define BATON_BASE_JSON_JSON_CHECK_H

#include <stdbool.h>

#include "shared/base/err.h"
#include "shared/base/str.h"

/* OK when `text` is one JSON value with at most JSON_DEPTH_MAX levels, else ERR_FORMAT with the
 * byte offset. */
enum status json_check(struct str text, bool unique_keys, struct err *err) MUST_CHECK;

/* Length of the well-formed UTF-8 character at the front of s (no surrogates, no overlong forms); 0
 * when there is none. */
size_t json_utf8_len(struct str s);

#endif
