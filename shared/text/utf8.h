/* utf8.h - code points of byte strings that need not be valid UTF-8.
 *
 * Invalid input is cut into maximal parts (Unicode, section 3.9): the longest start of a valid
 * character, or one byte. Each part becomes one U+FFFD, as in Python and Rust.
 * Thread: any. */
#ifndef BATON_TEXT_UTF8_H
#define BATON_TEXT_UTF8_H

#include "shared/base/buf.h"

enum { UTF8_REPLACEMENT = 0xFFFD, UTF8_CHAR_MAX = 4 };

/* Length in bytes of the character or invalid part at s.p[at] (at < s.n). *cp is its code point, -1
 * for an invalid part. */
size_t utf8_next(struct str s, size_t at, int32_t *cp);
bool utf8_is_valid(struct str s);
/* Number of bytes at the end of `s` (0 to 3) that are an incomplete character. */
size_t utf8_unfinished(struct str s);
/* Writes a code point (0 .. 0x10FFFF, no surrogate) to `out`; returns its length. */
size_t utf8_put(int32_t cp, char out[UTF8_CHAR_MAX]);
/* Appends `s` with U+FFFD for every invalid part. */
void utf8_add_valid(struct buf *out, struct str s);

#endif
