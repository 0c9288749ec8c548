/* utf8.h - code points of byte strings that may be anything.
 *
 * Invalid input is cut into maximal parts as the Unicode standard recommends (section 3.9), each of
 * which stands for one U+FFFD: the longest start of a valid character, or one byte. Decoders of the
 * model world agree on this. Thread: any. */
#ifndef BATON_TEXT_UTF8_H
#define BATON_TEXT_UTF8_H

#include "shared/base/buf.h"

enum { UTF8_REPLACEMENT = 0xFFFD, UTF8_CHAR_MAX = 4 };

/* Length of the character at s.p[at] (at < s.n), with its code point in *cp; for an invalid part
 * its length, with *cp -1. */
size_t utf8_next(struct str s, size_t at, int32_t *cp);
bool utf8_is_valid(struct str s);
/* Bytes at the end of `s` (0 to 3) that are the beginning of a character and may be completed by
 * more. */
size_t utf8_unfinished(struct str s);
/* Write a code point (0 .. 0x10FFFF, no surrogate) to `out`; returns its length. */
size_t utf8_put(int32_t cp, char out[UTF8_CHAR_MAX]);
/* Append `s` with every invalid part replaced. */
void utf8_add_valid(struct buf *out, struct str s);

#endif
