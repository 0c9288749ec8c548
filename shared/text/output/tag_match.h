/* tag_match.h - matches tags in streamed text, where the end of the text may be part of a tag.
 * Thread: any. */
#ifndef BATON_TEXT_OUTPUT_TAG_MATCH_H
#define BATON_TEXT_OUTPUT_TAG_MATCH_H

#include "shared/base/str.h"

enum tag_match { TAG_MATCH_NO, TAG_MATCH_PARTIAL, TAG_MATCH_WHOLE };

/* Does `text` begin with `tag`? TAG_MATCH_PARTIAL: all of `text` is a prefix of `tag`. */
enum tag_match tag_match_at(struct str text, struct str tag);
/* Length of the longest suffix of `text` that is a proper prefix of `tag`. */
size_t tag_match_partial(struct str text, struct str tag);
/* Number of ASCII white space bytes at the beginning, and at the end. */
size_t tag_leading_blanks(struct str text);
size_t tag_trailing_blanks(struct str text);

#endif
