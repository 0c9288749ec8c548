/* str.c - comparing, searching and splitting borrowed text, and parsing numbers. Owns nothing.
 * Thread: any. */
#include "shared/base/str.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NUMBER_LEN_MAX = 255 };

struct str str_of(const char *c) { return c ? (struct str){ c, strlen(c) } : STR(""); }

bool str_eq(struct str a, struct str b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

bool str_eq_c(struct str a, const char *b) { return str_eq(a, str_of(b)); }

bool str_starts(struct str s, const char *prefix)
{
    size_t n = strlen(prefix);
    return s.n >= n && (n == 0 || memcmp(s.p, prefix, n) == 0);
}

bool str_ends(struct str s, const char *suffix)
{
    size_t n = strlen(suffix);
    return s.n >= n && (n == 0 || memcmp(s.p + s.n - n, suffix, n) == 0);
}

size_t str_find_char(struct str s, char c)
{
    const char *at = s.n ? memchr(s.p, c, s.n) : NULL;
    return at ? (size_t)(at - s.p) : SIZE_MAX;
}

size_t str_find(struct str s, struct str needle)
{
    if (needle.n == 0) return 0;
    if (needle.n > s.n) return SIZE_MAX;
    const char *at = memmem(s.p, s.n, needle.p, needle.n);
    return at ? (size_t)(at - s.p) : SIZE_MAX;
}

struct str str_sub(struct str s, size_t from, size_t n)
{
    if (from > s.n) from = s.n;
    if (n > s.n - from) n = s.n - from;
    return (struct str){ s.p ? s.p + from : "", n };
}

static bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

struct str str_trim(struct str s)
{
    while (s.n && is_blank(s.p[0])) {
        s.p++;
        s.n--;
    }
    while (s.n && is_blank(s.p[s.n - 1])) s.n--;
    return s;
}

bool str_take(struct str *in, void *out, size_t n)
{
    if (in->n < n) return false;
    memcpy(out, in->p, n);
    in->p += n;
    in->n -= n;
    return true;
}

bool str_split(struct str *rest, char sep, struct str *item)
{
    if (!rest->p) return false;
    size_t at = str_find_char(*rest, sep);
    if (at == SIZE_MAX) {
        *item = *rest;
        *rest = (struct str){ NULL, 0 };
    } else {
        *item = (struct str){ rest->p, at };
        *rest = (struct str){ rest->p + at + 1, rest->n - at - 1 };
    }
    return true;
}

enum status str_to_i64(struct str s, int64_t *out)
{
    size_t i = 0;
    bool negative = false;
    if (s.n && (s.p[0] == '-' || s.p[0] == '+')) negative = s.p[i++] == '-';
    if (i == s.n) return ERR_FORMAT;
    int64_t v = 0;
    for (; i < s.n; i++) {
        if (s.p[i] < '0' || s.p[i] > '9') return ERR_FORMAT;
        /* Accumulated as a negative number: the negative range is the larger one. */
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_sub_overflow(v, s.p[i] - '0', &v))
            return ERR_FORMAT;
    }
    if (!negative && __builtin_sub_overflow((int64_t)0, v, &v)) return ERR_FORMAT;
    *out = v;
    return OK;
}

enum status str_to_f64(struct str s, double *out)
{
    char text[NUMBER_LEN_MAX + 1];
    if (s.n == 0 || s.n > NUMBER_LEN_MAX) return ERR_FORMAT;
    /* Only the characters of decimal numbers: strtod would also take blanks, hexadecimal, "inf",
     * "nan". */
    for (size_t i = 0; i < s.n; i++)
        if (!s.p[i] || !strchr("0123456789+-.eE", s.p[i])) return ERR_FORMAT;
    memcpy(text, s.p, s.n);
    text[s.n] = 0;
    char *end;
    double v = strtod(text, &end);
    if (*end || !isfinite(v)) return ERR_FORMAT;
    *out = v;
    return OK;
}

enum status str_to_hex(struct str s, uint64_t *out)
{
    static const char digits[] = "0123456789abcdef";
    uint64_t v = 0;
    if (s.n == 0 || s.n > 2 * sizeof v) return ERR_FORMAT;
    for (size_t i = 0; i < s.n; i++) {
        const char *at = s.p[i] ? strchr(digits, s.p[i]) : NULL;
        if (!at) return ERR_FORMAT;
        v = v << 4 | (uint64_t)(at - digits);
    }
    *out = v;
    return OK;
}
