/* json.h - checked access over cJSON: bounded depth, typed getters whose errors name the member.
 *
 * A parsed document is a cJSON tree that the caller owns (cJSON_Delete). Numbers above 2^53 lose
 * precision, since cJSON stores doubles. Getters treat a missing member and null alike.
 * Thread: the caller's. */
#ifndef BATON_BASE_JSON_JSON_H
#define BATON_BASE_JSON_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum {
    JSON_DEPTH_MAX = 64,
    JSON_INTEGER_BITS = 53 /* every whole number of so many bits is read back as it was written */
};

/* Parses all of `text`. ERR_FORMAT with the byte offset for malformed JSON, trailing bytes other
 * than white space, depth over JSON_DEPTH_MAX, invalid UTF-8, and, with `unique_keys`, duplicate
 * keys in one object. */
enum status json_parse(struct str text, bool unique_keys, cJSON **out, struct err *err) MUST_CHECK;

/* Gets a typed member of object `o`. Absent or null: OK, *out unchanged. ERR_INVALID with
 * err->field set for another type or a value outside [min, max]. Integers must be whole numbers. */
enum status json_get_i64(const cJSON *o, const char *name, int64_t min, int64_t max, int64_t *out,
                         struct err *err) MUST_CHECK;
enum status json_get_f64(const cJSON *o, const char *name, double min, double max, double *out,
                         struct err *err) MUST_CHECK;
enum status json_get_bool(const cJSON *o, const char *name, bool *out, struct err *err) MUST_CHECK;
/* Borrowed until the document is deleted. */
enum status json_get_str(const cJSON *o, const char *name, const char **out,
                         struct err *err) MUST_CHECK;
/* The value of a member for an error: JSON text, of a long string its beginning, of a list or an
 * object what it is. Returns out. */
enum { JSON_SHOWN_MAX = 128 };
const char *json_show(const cJSON *v, char out[JSON_SHOWN_MAX]);
/* Returns ERR_INVALID: the value of member `name` is not what would be `right`. */
enum status json_refuse(const cJSON *v, const char *name, const char *right, struct err *err);
/* The member; NULL when it is absent or null. */
const cJSON *json_member(const cJSON *o, const char *name);

/* Appends JSON text to a buffer. Strings are escaped; invalid UTF-8 becomes U+FFFD. Doubles print
 * with the fewest digits that read back equal; NaN and infinities become null. */
void json_add_string(struct buf *b, struct str s);
void json_add_f64(struct buf *b, double v);
/* Appends a float logprob: as json_add_f64, but -inf becomes -9999.0. Equal floats give equal
 * text. */
void json_add_f32(struct buf *b, float v);

#endif
