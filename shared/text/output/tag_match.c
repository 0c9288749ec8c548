/* tag_match.c - see tag_match.h. Thread: any. */
#include "shared/text/output/tag_match.h"

#include <string.h>

enum tag_match tag_match_at(struct str text, struct str tag)
{
    size_t n = text.n < tag.n ? text.n : tag.n;
    if (n > 0 && memcmp(text.p, tag.p, n) != 0) return TAG_MATCH_NO;
    return n == tag.n ? TAG_MATCH_WHOLE : TAG_MATCH_PARTIAL;
}

size_t tag_match_partial(struct str text, struct str tag)
{
    size_t n = tag.n > 0 ? tag.n - 1 : 0;
    if (n > text.n) n = text.n;
    while (n > 0 && memcmp(text.p + text.n - n, tag.p, n) != 0) n--;
    return n;
}

static bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

size_t tag_leading_blanks(struct str text)
{
    size_t n = 0;
    while (n < text.n && is_blank(text.p[n])) n++;
    return n;
}

size_t tag_trailing_blanks(struct str text)
{
    size_t n = 0;
    while (n < text.n && is_blank(text.p[text.n - 1 - n])) n++;
    return n;
}
