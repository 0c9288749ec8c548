/* tag_match.c - see tag_match.h. Thread: any. */
#include "shared/text/output/tag_match.h"

#include <string.h>

enum tag_match tag_at(struct str text, struct str tag)
{
    size_t n = text.n < tag.n ? text.n : tag.n;
    if (n > 0 && memcmp(text.p, tag.p, n) != 0) return TAG_NO;
    return n == tag.n ? TAG_WHOLE : TAG_PARTIAL;
}

size_t tag_partial(struct str text, struct str tag)
{
    size_t n = tag.n > 0 ? tag.n - 1 : 0;
    if (n > text.n) n = text.n;
    while (n > 0 && memcmp(text.p + text.n - n, tag.p, n) != 0) n--;
    return n;
}

static bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

size_t tag_blanks(struct str text)
{
    size_t n = 0;
    while (n < text.n && is_blank(text.p[n])) n++;
    return n;
}

size_t tag_blanks_at_end(struct str text)
{
    size_t n = 0;
    while (n < text.n && is_blank(text.p[text.n - 1 - n])) n++;
    return n;
}
