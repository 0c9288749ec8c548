/* encoder.c - see encoder.h. Thread: the caller's. */
#include "shared/text/tokenizer/encoder.h"

#include <string.h>

static enum status too_long(const struct encoder *e)
{
    return err_set(e->err, ERR_TOO_LONG, "the text is longer than the limit of tokens");
}

enum status encoder_expect(const struct encoder *e, struct str text)
{
    const struct tokenizer *t = e->t;
    size_t n_left = e->n_max - e->n, n = text.n;
    if (t->piece_max == 0 || n / t->piece_max <= n_left) return OK;
    if (!t->drops_nothing && !t->byte_level) return OK;
    /* Vocabularies may lack a few bytes, which are left out. */
    for (size_t i = 0; i < text.n && !t->drops_nothing; i++)
        n -= t->byte_ids[(unsigned char)text.p[i]] < 0;
    return n / t->piece_max > n_left ? too_long(e) : OK;
}

enum status encoder_push(struct encoder *e, const int32_t *ids, size_t n)
{
    if (n > e->n_max - e->n) return too_long(e);
    if (n > e->cap - e->n) {
        size_t cap = e->cap < 64 ? 64 : e->cap;
        while (cap - e->n < n) cap *= 2;
        e->ids = mem_realloc(e->ids, cap, sizeof *e->ids);
        e->cap = cap;
    }
    if (n) memcpy(e->ids + e->n, ids, n * sizeof *ids);
    e->n += n;
    return OK;
}

void encoder_reserve(struct encoder *e, size_t n)
{
    if (n <= e->cap_symbols) return;
    e->cap_symbols = n < 256 ? 256 : n;
    e->symbols = mem_realloc(e->symbols, e->cap_symbols, sizeof *e->symbols);
}

bool encoder_has_bytes(const struct tokenizer *t, struct str c)
{
    for (size_t i = 0; i < c.n; i++)
        if (t->byte_ids[(unsigned char)c.p[i]] < 0) return false;
    return t->byte_fallback;
}
