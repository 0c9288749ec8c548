/* json_check.h - the strict syntax check that runs before cJSON builds the tree; for json.c and
 * json_packed.c only. Thread: any. */
#ifndef BATON_BASE_JSON_JSON_CHECK_H
#define BATON_BASE_JSON_JSON_CHECK_H

#include <stdbool.h>

#include "shared/base/err.h"
#include "shared/base/str.h"

/* What is reported while a text is checked. Depth is the number of containers around a value: 0 for
 * the whole text, 1 for a member of the top level. */
struct json_events {
    /* A member's name, unescaped; valid during the call. `depth` is that of its value. */
    void (*name)(void *arg, size_t depth, struct str name);
    /* A scalar was read, or a container begins (then `text` is its bracket). Not OK ends the
     * check. */
    enum status (*value)(void *arg, size_t depth, struct str text);
    /* A container ends with the bracket at `end`; `depth` is that of its value. */
    void (*close)(void *arg, size_t depth, const char *end);
    void *arg;
};

/* OK when `text` is one JSON value with at most JSON_DEPTH_MAX levels, else ERR_FORMAT with the
 * byte offset, or what an event returned. events may be NULL. */
enum status json_check(struct str text, bool unique_keys, const struct json_events *events,
                       struct err *err) MUST_CHECK;

/* Length of the well-formed UTF-8 character at the front of s (no surrogates, no overlong forms); 0
 * when there is none. */
size_t json_utf8_len(struct str s);

#endif
