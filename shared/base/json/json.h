/* json.h - checked access over cJSON: bounded depth and size, typed getters that say which member
 * is wrong.
 *
 * A parsed document is a cJSON tree owned by the caller (cJSON_Delete). Numbers above 2^53 lose
 * precision as in every JSON reader built on doubles. Getters treat a missing member and null
 * alike. Thread: the caller's. */
#ifndef BATON_BASE_JSON_JSON_H
#define BATON_BASE_JSON_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>

#include "shared/base/buf.h"
#include "shared/base/err.h"

enum { JSON_DEPTH_MAX = 64 };

/* Parse all of `text`; trailing bytes other than white space, depth over JSON_DEPTH_MAX, invalid
 * UTF-8 and duplicate keys at one level (only when `unique_keys`) are ERR_FORMAT with the byte
 * offset. */
enum status json_parse(struct str text, bool unique_keys, cJSON **out, struct err *err) MUST_CHECK;

/* Typed members of object `o`: *out is left alone when absent or null (OK), ERR_INVALID with
 * err->field when of another type or outside [min, max]. Integers must be whole numbers. */
enum status json_get_i64(const cJSON *o, const char *name, int64_t min, int64_t max, int64_t *out,
                         struct err *err) MUST_CHECK;
enum status json_get_f64(const cJSON *o, const char *name, double min, double max, double *out,
                         struct err *err) MUST_CHECK;
enum status json_get_bool(const cJSON *o, const char *name, bool *out, struct err *err) MUST_CHECK;
/* Borrowed until the document is deleted. */
enum status json_get_str(const cJSON *o, const char *name, const char **out,
                         struct err *err) MUST_CHECK;
/* Member that is neither absent nor null, or NULL. */
const cJSON *json_member(const cJSON *o, const char *name);

/* Writers: append to a buffer. Strings are escaped; invalid UTF-8 becomes U+FFFD. Doubles print
 * with the fewest digits that read back equal; NaN and infinities become null. */
void json_add_string(struct buf *b, struct str s);
void json_add_f64(struct buf *b, double v);
/* A float logprob: as json_add_f64 after clamping -inf to -9999.0. The same float always gives the
 * same text. */
void json_add_f32(struct buf *b, float v);

#endif
