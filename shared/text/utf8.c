/* utf8.c - see utf8.h. Thread: any. */
#include "shared/text/utf8.h"

/* Range of the second byte after `lead`; it excludes overlong forms, surrogates and code points
 * above U+10FFFF. */
static void second_range(unsigned char lead, unsigned char *low, unsigned char *high)
{
    *low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    *high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
}

static size_t char_len(unsigned char lead)
{
    if (lead < 0x80) return 1;
    if (lead < 0xC2 || lead > 0xF4) return 0;
    return lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

/* Number of bytes at `at` that start a valid character of `want` bytes; less than `want` when it is
 * cut off or invalid. */
static size_t good_bytes(struct str s, size_t at, size_t want)
{
    const unsigned char *p = (const unsigned char *)s.p + at;
    unsigned char low, high;
    second_range(p[0], &low, &high);
    size_t n = 1;
    while (n < want && at + n < s.n && p[n] >= low && p[n] <= high) {
        low = 0x80;
        high = 0xBF;
        n++;
    }
    return n;
}

size_t utf8_next(struct str s, size_t at, int32_t *cp)
{
    static const unsigned char lead_bits[] = { 0, 0x7F, 0x1F, 0x0F, 0x07 };
    const unsigned char *p = (const unsigned char *)s.p + at;
    size_t want = char_len(p[0]);
    size_t n = want ? good_bytes(s, at, want) : 1;
    *cp = -1;
    if (n != want) return n;
    int32_t v = p[0] & lead_bits[n];
    for (size_t i = 1; i < n; i++) v = v << 6 | (p[i] & 0x3F);
    *cp = v;
    return n;
}

bool utf8_is_valid(struct str s)
{
    int32_t cp;
    for (size_t at = 0; at < s.n;) {
        if ((unsigned char)s.p[at] < 0x80) {
            at++;
            continue;
        }
        at += utf8_next(s, at, &cp);
        if (cp < 0) return false;
    }
    return true;
}

size_t utf8_unfinished(struct str s)
{
    for (size_t back = 1; back < UTF8_CHAR_MAX && back <= s.n; back++) {
        unsigned char c = (unsigned char)s.p[s.n - back];
        if ((c & 0xC0) == 0x80) continue;
        size_t want = char_len(c);
        return want > back && good_bytes(s, s.n - back, want) == back ? back : 0;
    }
    return 0;
}

size_t utf8_put(int32_t cp, char out[UTF8_CHAR_MAX])
{
    static const unsigned char lead[] = { 0, 0, 0xC0, 0xE0, 0xF0 };
    size_t n = cp < 0x80 ? 1 : cp < 0x800 ? 2 : cp < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i > 0; i--, cp >>= 6) out[i] = (char)(0x80 | (cp & 0x3F));
    out[0] = (char)(lead[n] | cp);
    return n;
}

void utf8_add_valid(struct buf *out, struct str s)
{
    size_t good = 0; /* start of the valid bytes not added yet */
    int32_t cp;
    for (size_t at = 0; at < s.n;) {
        size_t n = utf8_next(s, at, &cp);
        if (cp < 0) {
            buf_add(out, s.p + good, at - good);
            buf_add_c(out, "\xEF\xBF\xBD");
            good = at + n;
        }
        at += n;
    }
    if (s.n > good) buf_add(out, s.p + good, s.n - good);
}
