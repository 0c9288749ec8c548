/* json_scan.h - finds where the values in a JSON text begin and end without parsing them: what is
 * read on the loop must not cost as much as a parse, which a worker does later. Of the grammar only
 * strings, brackets and separators are looked at. Thread: the caller's. */
#ifndef BATON_SERVE_GRPC_JSON_SCAN_H
#define BATON_SERVE_GRPC_JSON_SCAN_H

#include "shared/base/err.h"
#include "shared/base/str.h"

/* Splits a list: its first item, and how many it has. ERR_FORMAT: the text is no list. */
enum status json_scan_list(struct str text, struct str *first, size_t *n,
                           struct err *err) MUST_CHECK;

/* The members of an object's text, in order. Loop: for (at = 0; json_scan_member(o, &at, &key,
 * &value);). The key is as written, without its quotes. False at the end, and where the text is no
 * object any more. */
bool json_scan_member(struct str object, size_t *at, struct str *key, struct str *value);

/* The value of a member; { NULL, 0 }: there is none. */
struct str json_scan_find(struct str object, const char *key);

#endif
