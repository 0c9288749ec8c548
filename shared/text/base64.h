/* base64.h - base64 decoding (RFC 4648, section 4) for vocabularies of bytes.
 * Thread: any. */
#ifndef BATON_TEXT_BASE64_H
#define BATON_TEXT_BASE64_H

#include "shared/base/buf.h"

/* Appends the decoded bytes. False, with some of them appended, unless `s` is whole groups of four
 * with padding at the end only. */
bool base64_decode(struct str s, struct buf *out);

#endif
