/* str.h - a borrowed piece of text: pointer and length, not terminated, never owned.
 * Thread: any. */
#ifndef BATON_BASE_STR_H
#define BATON_BASE_STR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shared/base/status.h"

struct str {
    const char *p;
    size_t n;
};

#define STR(literal) ((struct str){ (literal), sizeof(literal) - 1 })
/* For printf's "%.*s". */
#define STR_ARG(s) (int)(s).n, (s).p

struct str str_of(const char *c); /* NULL becomes the empty string */
bool str_eq(struct str a, struct str b);
bool str_eq_c(struct str a, const char *b);
bool str_starts(struct str s, const char *prefix);
bool str_ends(struct str s, const char *suffix);
/* Position of the first `c` or `needle` in `s`, or SIZE_MAX. */
size_t str_find_char(struct str s, char c);
size_t str_find(struct str s, struct str needle);
struct str str_sub(struct str s, size_t from, size_t n); /* clamped to s */
struct str str_trim(struct str s);                       /* ASCII white space */
/* Takes the part before `sep` off the front of *rest (all of it when there is no `sep`); false when
 * *rest was already used up (p == NULL). Loop: while (str_split(&rest, ',', &item)). */
bool str_split(struct str *rest, char sep, struct str *item);
/* Takes n bytes off the front of *in and copies them to `out`; false, and nothing done, when *in
 * has fewer. */
bool str_take(struct str *in, void *out, size_t n);
/* Parses a number that fills the whole string. ERR_FORMAT for anything else and for values out of
 * range; *out is written only on success. */
enum status str_to_i64(struct str s, int64_t *out) MUST_CHECK;
enum status str_to_f64(struct str s, double *out) MUST_CHECK;
/* The same of 1 to 16 hexadecimal digits, in lower case. */
enum status str_to_hex(struct str s, uint64_t *out) MUST_CHECK;

#endif
