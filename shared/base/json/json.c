/* json.c - parses JSON with checks before cJSON, reads typed members, writes JSON text.
 * Thread: the caller's. */
#include "shared/base/json/json.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "shared/base/json/json_check.h"

/* Replaces a log probability of minus infinity: clients of the OpenAI API expect a number. */
static const float LOGPROB_MIN = -9999.0f;

/* Of a string in an error; a byte takes up to six as an escape. */
enum { SHOWN_BYTES = 20 };
_Static_assert(6 * SHOWN_BYTES + sizeof "\"\"..." <= JSON_SHOWN_MAX, "a string is shown whole");

enum status json_parse(struct str text, bool unique_keys, cJSON **out, struct err *err)
{
    TRY(json_check(text, unique_keys, NULL, err));
    cJSON *doc = cJSON_ParseWithLength(text.p, text.n);
    /* The text is well formed, so cJSON can only have run out of memory. */
    if (!doc)
        return err_set(err, ERR_NOMEM, "not enough memory for a JSON document of %zu bytes",
                       text.n);
    *out = doc;
    return OK;
}

const cJSON *json_member(const cJSON *o, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);
    return v && !cJSON_IsNull(v) ? v : NULL;
}

/* Whole characters of it, escaped; "..." where there are more. */
static void show_string(const char *s, char out[JSON_SHOWN_MAX])
{
    struct buf b = { 0 };
    size_t n = 0, next;
    const struct str all = str_of(s);
    while (n < all.n && (next = json_utf8_len(str_sub(all, n, SIZE_MAX))) > 0 &&
           n + next <= SHOWN_BYTES)
        n += next;
    json_add_string(&b, str_sub(all, 0, n));
    snprintf(out, JSON_SHOWN_MAX, "%s%s", b.data, n < all.n ? "..." : "");
    buf_release(&b);
}

const char *json_show(const cJSON *v, char out[JSON_SHOWN_MAX])
{
    snprintf(out, JSON_SHOWN_MAX, "%s",
             cJSON_IsArray(v)    ? "a list"
             : cJSON_IsObject(v) ? "an object"
             : cJSON_IsTrue(v)   ? "true"
             : cJSON_IsFalse(v)  ? "false"
                                 : "null");
    if (cJSON_IsNumber(v)) snprintf(out, JSON_SHOWN_MAX, "%.17g", v->valuedouble);
    if (cJSON_IsString(v)) show_string(v->valuestring, out);
    return out;
}

enum status json_refuse(const cJSON *v, const char *name, const char *right, struct err *err)
{
    char shown[JSON_SHOWN_MAX];
    return err_field(err, ERR_INVALID, name, "%s is %s, but must be %s", name, json_show(v, shown),
                     right);
}

enum status json_get_i64(const cJSON *o, const char *name, int64_t min, int64_t max, int64_t *out,
                         struct err *err)
{
    const cJSON *v = json_member(o, name);
    if (!v) return OK;
    if (!cJSON_IsNumber(v) || !isfinite(v->valuedouble) || v->valuedouble != floor(v->valuedouble))
        return json_refuse(v, name, "a whole number", err);
    /* Doubles in [-2^63, 2^63) convert; all others are out of any range. */
    bool fits = v->valuedouble >= -0x1p63 && v->valuedouble < 0x1p63;
    int64_t n = fits ? (int64_t)v->valuedouble : 0;
    if (fits && n >= min && n <= max) {
        *out = n;
        return OK;
    }
    if (max == INT64_MAX && min > INT64_MIN)
        return err_field(err, ERR_INVALID, name, "%s is %.17g, but must be at least %" PRId64, name,
                         v->valuedouble, min);
    return err_field(err, ERR_INVALID, name,
                     "%s is %.17g, but must be from %" PRId64 " to %" PRId64, name, v->valuedouble,
                     min, max);
}

enum status json_get_f64(const cJSON *o, const char *name, double min, double max, double *out,
                         struct err *err)
{
    const cJSON *v = json_member(o, name);
    if (!v) return OK;
    if (!cJSON_IsNumber(v) || !isfinite(v->valuedouble))
        return json_refuse(v, name, "a number", err);
    if (v->valuedouble < min || v->valuedouble > max)
        return err_field(err, ERR_INVALID, name, "%s is %.9g, but must be from %.9g to %.9g", name,
                         v->valuedouble, min, max);
    *out = v->valuedouble;
    return OK;
}

enum status json_get_bool(const cJSON *o, const char *name, bool *out, struct err *err)
{
    const cJSON *v = json_member(o, name);
    if (!v) return OK;
    if (!cJSON_IsBool(v)) return json_refuse(v, name, "true or false", err);
    *out = cJSON_IsTrue(v);
    return OK;
}

enum status json_get_str(const cJSON *o, const char *name, const char **out, struct err *err)
{
    const cJSON *v = json_member(o, name);
    if (!v) return OK;
    if (!cJSON_IsString(v)) return json_refuse(v, name, "a string", err);
    *out = v->valuestring;
    return OK;
}

static void add_escaped(struct buf *b, unsigned char c)
{
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const char *at = c ? strchr(from, c) : NULL;
    if (at) {
        buf_add_char(b, '\\');
        buf_add_char(b, to[at - from]);
    } else {
        buf_printf(b, "\\u%04x", c);
    }
}

void json_add_string(struct buf *b, struct str s)
{
    buf_add_char(b, '"');
    size_t plain = 0; /* start of the bytes that need no escape and are not added yet */
    for (size_t i = 0; i < s.n;) {
        unsigned char c = (unsigned char)s.p[i];
        size_t n = json_utf8_len(str_sub(s, i, SIZE_MAX));
        if (n > 0 && c >= ' ' && c != '"' && c != '\\' && c != 0x7f) {
            i += n;
            continue;
        }
        buf_add(b, s.p + plain, i - plain);
        if (n == 0) buf_add_c(b, "\xEF\xBF\xBD");
        else add_escaped(b, c);
        plain = ++i;
    }
    buf_add(b, s.p ? s.p + plain : "", s.n - plain);
    buf_add_char(b, '"');
}

void json_add_f64(struct buf *b, double v)
{
    char text[32];
    if (!isfinite(v)) {
        buf_add_c(b, "null");
        return;
    }
    /* A double always keeps 15 digits and never needs more than 17; %g drops trailing zeros. */
    for (int digits = DBL_DIG; digits <= DBL_DECIMAL_DIG; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        if (strtod(text, NULL) == v) break;
    }
    buf_add_c(b, text);
}

void json_add_f32(struct buf *b, float v)
{
    char text[32];
    if (isnan(v) || v == INFINITY) {
        buf_add_c(b, "null");
        return;
    }
    if (v < LOGPROB_MIN) v = LOGPROB_MIN;
    for (int digits = FLT_DIG; digits <= FLT_DECIMAL_DIG; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)v);
        if (strtof(text, NULL) == v) break;
    }
    buf_add_c(b, text);
}
