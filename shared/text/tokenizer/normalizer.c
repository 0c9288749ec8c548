/* normalizer.c - see normalizer.h.
 *
 * utf8proc makes Unicode's normal forms. It sorts the marks on one letter in quadratic time, so it
 * gets text in parts with at most MARKS_MAX marks in a row. LIMIT: longer sequences of marks, which
 * no language has, are sorted within each part only.
 * Thread: any. */
#include "shared/text/tokenizer/normalizer.h"

#include <stdlib.h>
#include <utf8proc.h>

#include "shared/base/assert.h"
#include "shared/text/utf8.h"

enum { MARKS_MAX = 256 };

enum status normalizer_add(struct normalizer *z, enum normalizer_kind kind, struct str from,
                           struct str to)
{
    if (z->n == NORMALIZER_STEPS_MAX) return ERR_FULL;
    if (to.n > NORMALIZER_INSERT_MAX) return ERR_TOO_LONG;
    struct normalizer_step *s = &z->steps[z->n++];
    s->kind = kind;
    buf_add(&s->from, from.p, from.n);
    buf_add(&s->to, to.p, to.n);
    return OK;
}

void normalizer_release(struct normalizer *z)
{
    for (size_t i = 0; i < z->n; i++) {
        buf_release(&z->steps[i].from);
        buf_release(&z->steps[i].to);
    }
    *z = (struct normalizer){ 0 };
}

static bool is_ascii(struct str s)
{
    unsigned char any = 0;
    for (size_t i = 0; i < s.n; i++) any |= (unsigned char)s.p[i];
    return any < 0x80;
}

/* Length of the first part of `s` to give to utf8proc. */
static size_t part_len(struct str s)
{
    size_t n_marks = 0;
    int32_t cp;
    for (size_t at = 0; at < s.n;) {
        size_t n = utf8_next(s, at, &cp);
        n_marks = cp >= 0x80 && utf8proc_get_property(cp)->combining_class ? n_marks + 1 : 0;
        if (n_marks > MARKS_MAX) return at;
        at += n;
    }
    return s.n;
}

static void unicode_form(struct buf *out, struct str s, enum normalizer_kind kind)
{
    static const int options[] = {
        [NORMALIZER_NFC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE,
        [NORMALIZER_NFD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE,
        [NORMALIZER_NFKC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
        [NORMALIZER_NFKD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT,
    };
    if (is_ascii(s)) { /* the same in every form */
        buf_add_str(out, s);
        return;
    }
    while (s.n > 0) {
        struct str part = str_sub(s, 0, part_len(s));
        utf8proc_uint8_t *made = NULL;
        utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)part.p,
                                          (utf8proc_ssize_t)part.n, &made,
                                          (utf8proc_option_t)options[kind]);
        /* Valid text fails only for lack of memory: it stays unchanged then. */
        if (n >= 0) buf_add(out, made, (size_t)n);
        else buf_add_str(out, part);
        free(made);
        s = str_sub(s, part.n, s.n);
    }
}

/* Appends `s` with every `from` (not empty) replaced. */
static void replace_all(struct buf *out, struct str s, struct str from, struct str to)
{
    ASSERT(from.n > 0);
    for (size_t at; (at = str_find(s, from)) != SIZE_MAX; s = str_sub(s, at + from.n, s.n)) {
        buf_add(out, s.p, at);
        buf_add_str(out, to);
    }
    buf_add_str(out, s);
}

enum status normalizer_run(const struct normalizer *z, struct buf *text, struct buf *scratch)
{
    size_t len_max = (text->len + NORMALIZER_INSERT_MAX) * NORMALIZER_GROWTH_MAX;
    for (size_t i = 0; i < z->n && text->len > 0; i++) {
        const struct normalizer_step *s = &z->steps[i];
        bool is_form = s->kind <= NORMALIZER_NFKD;
        if (is_form && is_ascii(buf_str(text))) continue;
        buf_clear(scratch);
        if (is_form) {
            unicode_form(scratch, buf_str(text), s->kind);
        } else if (s->kind == NORMALIZER_PREPEND) {
            buf_add_str(scratch, buf_str(&s->to));
            buf_add_str(scratch, buf_str(text));
        } else {
            replace_all(scratch, buf_str(text), buf_str(&s->from), buf_str(&s->to));
        }
        struct buf swap = *text;
        *text = *scratch;
        *scratch = swap;
        if (text->len > len_max) return ERR_TOO_LONG;
    }
    return OK;
}
