/* base64.c - see base64.h. Thread: any. */
#include "shared/text/base64.h"

static int value_of(char c)
{
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    return c == '+' ? 62 : c == '/' ? 63 : -1;
}

bool base64_decode(struct str s, struct buf *out)
{
    if (s.n % 4 != 0) return false;
    for (size_t i = 0; i < s.n; i += 4) {
        size_t n_pad = i + 4 < s.n
                           ? 0
                           : (size_t)(s.p[i + 3] == '=') + (s.p[i + 2] == '=' && s.p[i + 3] == '=');
        uint32_t v = 0;
        for (size_t k = 0; k < 4; k++) {
            int six = k + n_pad < 4 ? value_of(s.p[i + k]) : 0;
            if (six < 0) return false;
            v = v << 6 | (uint32_t)six;
        }
        const char bytes[3] = { (char)(v >> 16), (char)(v >> 8), (char)v };
        buf_add(out, bytes, 3 - n_pad);
    }
    return true;
}
