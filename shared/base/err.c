/* err.c - fills struct err. Text is formatted into a local buffer first, so arguments may point
 * into the struct. Thread: the caller's. */
#include "shared/base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Copies `s` into out[cap]; cuts text that does not fit before the UTF-8 character that would be
 * split. */
static void copy_cut(char *out, size_t cap, const char *s)
{
    size_t n = strlen(s);
    if (n >= cap) {
        n = cap - 1;
        /* At most three bytes can follow the first one; more are not UTF-8 and are cut anywhere. */
        for (size_t back = 0; back < 3 && ((unsigned char)s[n] & 0xC0) == 0x80; back++) n--;
    }
    memcpy(out, s, n);
    out[n] = 0;
}

static void err_fill(struct err *e, enum status code, const char *field, const char *fmt,
                     va_list ap)
{
    /* Longer than the text, so that copy_cut cuts at a character boundary, not vsnprintf. */
    char text[ERR_TEXT_MAX + 64], name[ERR_FIELD_MAX];
    if (vsnprintf(text, sizeof text, fmt, ap) < 0) text[0] = 0;
    copy_cut(name, sizeof name, field);
    e->code = code;
    copy_cut(e->field, sizeof e->field, name);
    copy_cut(e->text, sizeof e->text, text);
}

enum status err_set(struct err *e, enum status code, const char *fmt, ...)
{
    if (!e) return code;
    va_list ap;
    va_start(ap, fmt);
    err_fill(e, code, "", fmt, ap);
    va_end(ap);
    return code;
}

enum status err_field(struct err *e, enum status code, const char *field, const char *fmt, ...)
{
    if (!e) return code;
    va_list ap;
    va_start(ap, fmt);
    err_fill(e, code, field, fmt, ap);
    va_end(ap);
    return code;
}

enum status err_prefix(struct err *e, const char *fmt, ...)
{
    /* Without a struct the code is unknown here; callers that pass NULL keep their own status. */
    if (!e) return ERR_INTERNAL;
    char text[2 * ERR_TEXT_MAX];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, ERR_TEXT_MAX, fmt, ap);
    va_end(ap);
    if (n < 0) return e->code;
    size_t at = (size_t)n < ERR_TEXT_MAX ? (size_t)n : ERR_TEXT_MAX - 1;
    memcpy(text + at, e->text, strlen(e->text) + 1);
    copy_cut(e->text, sizeof e->text, text);
    return e->code;
}
