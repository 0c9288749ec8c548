/* detokenizer.c - see detokenizer.h.
 *
 * `pending` is valid text that may be the beginning of a stop string, followed by at most 3 bytes
 * of an incomplete character. Stop strings are searched in the text only; which one wins does not
 * depend on how the text is cut into tokens. A leading space that the model's decoder would strip
 * from a whole text stays, because an answer continues its prompt.
 * Thread: its owner's. */
#include "shared/text/output/detokenizer.h"

#include <string.h>

#include "shared/base/assert.h"
#include "shared/text/utf8.h"

void detokenizer_init(struct detokenizer *d, const struct tokenizer *tok, bool skip_special,
                      const struct str *stops, size_t n_stops, bool include_stop)
{
    ASSERT(n_stops <= DETOKENIZER_STOPS_MAX);
    *d = (struct detokenizer){
        .tok = tok,
        .n_stops = n_stops,
        .stop_index = -1,
        .skip_special = skip_special,
        .include_stop = include_stop,
    };
    for (size_t i = 0; i < n_stops; i++) {
        d->stops[i] = stops[i];
        if (stops[i].n > d->stop_max) d->stop_max = stops[i].n;
    }
}

/* Makes everything from `from` on valid UTF-8, except for an incomplete character at the end.
 * Returns the length of the valid text. */
static size_t replace_invalid(struct buf *pending, size_t from)
{
    struct str raw = str_sub(buf_str(pending), from, SIZE_MAX);
    size_t n_unfinished = utf8_unfinished(raw);
    struct str whole = str_sub(raw, 0, raw.n - n_unfinished);
    if (!utf8_is_valid(whole)) {
        struct buf valid = { 0 };
        utf8_add_valid(&valid, whole);
        buf_add(&valid, raw.p + whole.n, n_unfinished);
        pending->len = from;
        buf_add_str(pending, buf_str(&valid));
        buf_release(&valid);
    }
    return pending->len - n_unfinished;
}

/* Returns the index of the stop string that ends first, which is text *start .. *end; -1: none. */
static int find_stop(const struct detokenizer *d, struct str text, size_t *start, size_t *end)
{
    int found = -1;
    for (size_t i = 0; i < d->n_stops; i++) {
        if (d->stops[i].n == 0) continue;
        size_t at = str_find(text, d->stops[i]);
        if (at == SIZE_MAX) continue;
        size_t after = at + d->stops[i].n;
        if (found >= 0 && (after > *end || (after == *end && at >= *start))) continue;
        found = (int)i;
        *start = at;
        *end = after;
    }
    return found;
}

/* Length of the longest suffix of `text` that is a prefix of a stop string. */
static size_t stop_prefix(const struct detokenizer *d, struct str text)
{
    size_t k = d->stop_max > 0 ? d->stop_max - 1 : 0;
    if (k > text.n) k = text.n;
    for (; k > 0; k--)
        for (size_t i = 0; i < d->n_stops; i++)
            if (d->stops[i].n > k && memcmp(d->stops[i].p, text.p + text.n - k, k) == 0) return k;
    return 0;
}

/* Emits what is certain of the first n_text pending bytes. Returns whether they contain a stop
 * string. */
static bool emit_text(struct detokenizer *d, size_t n_text, bool is_last, struct buf *out)
{
    struct str text = str_sub(buf_str(&d->pending), 0, n_text);
    size_t start = 0, end = 0;
    d->stop_index = find_stop(d, text, &start, &end);
    if (d->stop_index >= 0) {
        buf_add_str(out, str_sub(text, 0, d->include_stop ? end : start));
        buf_clear(&d->pending);
        return true;
    }
    size_t n = is_last ? n_text : n_text - stop_prefix(d, text);
    buf_add_str(out, str_sub(text, 0, n));
    buf_consume(&d->pending, n);
    return false;
}

bool detokenizer_push(struct detokenizer *d, int32_t id, struct buf *out)
{
    if (d->stop_index >= 0) return false;
    size_t n_text = d->pending.len - utf8_unfinished(buf_str(&d->pending));
    tokenizer_token_bytes(d->tok, id, d->skip_special, &d->pending);
    return emit_text(d, replace_invalid(&d->pending, n_text), false, out);
}

void detokenizer_finish(struct detokenizer *d, struct buf *out)
{
    if (d->stop_index >= 0) return;
    size_t n_unfinished = utf8_unfinished(buf_str(&d->pending));
    if (n_unfinished > 0) {
        d->pending.len -= n_unfinished;
        buf_add_c(&d->pending, "\xEF\xBF\xBD");
    }
    (void)emit_text(d, d->pending.len, true, out);
}

void detokenizer_release(struct detokenizer *d) { buf_release(&d->pending); }
