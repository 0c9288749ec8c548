/* jinja_utf8.c - code points and white space of strings that need not be UTF-8.
 *
 * An invalid byte counts as one U+FFFD. White space is Unicode's (utf8proc), as in Python.
 * Thread: any. */
#include "shared/text/jinja/jinja_value.h"

#include <utf8proc.h>

#include "shared/text/utf8.h"

size_t jinja_utf8_next(struct str s, size_t at, int32_t *cp)
{
    size_t n = utf8_next(s, at, cp);
    if (*cp >= 0) return n;
    *cp = UTF8_REPLACEMENT;
    return 1;
}

size_t jinja_utf8_prev(struct str s, size_t end, int32_t *cp)
{
    for (size_t n = 1; n <= 4 && n <= end; n++) {
        if (((unsigned char)s.p[end - n] & 0xC0) == 0x80) continue;
        if (jinja_utf8_next((struct str){ s.p, end }, end - n, cp) == n) return n;
        break;
    }
    *cp = UTF8_REPLACEMENT;
    return 1;
}

size_t jinja_utf8_len(struct str s)
{
    size_t n = 0;
    int32_t cp;
    for (size_t at = 0; at < s.n; n++) at += jinja_utf8_next(s, at, &cp);
    return n;
}

size_t jinja_utf8_offset(struct str s, size_t index)
{
    size_t at = 0;
    int32_t cp;
    for (; index > 0 && at < s.n; index--) at += jinja_utf8_next(s, at, &cp);
    return at;
}

bool jinja_is_space(int32_t cp)
{
    if (cp < 0x80) return cp == ' ' || (cp >= 9 && cp <= 13) || (cp >= 0x1C && cp <= 0x1F);
    if (cp == 0x85) return true;
    utf8proc_category_t c = utf8proc_category(cp);
    return c == UTF8PROC_CATEGORY_ZS || c == UTF8PROC_CATEGORY_ZL || c == UTF8PROC_CATEGORY_ZP;
}
