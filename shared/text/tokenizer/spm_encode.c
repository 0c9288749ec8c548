/* spm_encode.c - encodes as SentencePiece does (spm.h).
 *
 * A run of characters between user-defined pieces becomes symbols:
 *   0 .. n_pieces - 1    the character is a piece
 *   n_pieces and up      the character occurs in pieces but is none (spm.extra_chars)
 *   -2 - code point      the character occurs in no piece
 * The symbols merge and are emitted. Unused pieces are split into the pair they were made of,
 * unknown characters become bytes or <unk>.
 * Thread: the caller's. */
#include "shared/text/tokenizer/encoder.h"

#include "shared/text/utf8.h"

/* Emits a character without a piece. Several unknown ones in a row give one <unk>. */
static enum status put_unknown_char(struct encoder *e, int32_t cp)
{
    const struct tokenizer *t = e->t;
    char c[UTF8_CHAR_MAX];
    struct str s = { c, utf8_put(cp, c) };
    bool has_bytes = encoder_has_bytes(t, s), again = e->after_unk;
    e->after_unk = !has_bytes;
    for (size_t i = 0; has_bytes && i < s.n; i++)
        TRY(encoder_push(e, &t->byte_ids[(unsigned char)c[i]], 1));
    return has_bytes || again || t->unk < 0 ? OK : encoder_push(e, &t->unk, 1);
}

static void push_resegment(struct encoder *e, int32_t id)
{
    if (e->n_resegment == e->cap_resegment) {
        e->cap_resegment = e->cap_resegment ? e->cap_resegment * 2 : 64;
        e->resegment = mem_realloc(e->resegment, e->cap_resegment, sizeof *e->resegment);
    }
    e->resegment[e->n_resegment++] = id;
}

static int32_t code_point(const struct spm *s, int32_t symbol)
{
    return symbol < 0 ? -2 - symbol : s->extra_chars[(size_t)symbol - s->n_pieces];
}

/* Emits a symbol, splitting unused pieces: a merge made them, so their pair is known. Ends because
 * each part is shorter than the whole. */
static enum status put_symbol(struct encoder *e, int32_t id)
{
    const struct spm *s = &e->t->spm;
    int32_t left, right;
    push_resegment(e, id);
    while (e->n_resegment > 0) {
        id = e->resegment[--e->n_resegment];
        if (id < 0 || (size_t)id >= s->n_pieces) {
            TRY(put_unknown_char(e, code_point(s, id)));
            continue;
        }
        e->after_unk = false;
        if (e->t->tokens[id].resegment) {
            bpe_origin(&e->work, id, &left, &right);
            push_resegment(e, right);
            push_resegment(e, left);
        } else {
            TRY(encoder_push(e, &id, 1));
        }
    }
    return OK;
}

static enum status put_run(struct encoder *e, size_t n_symbols)
{
    size_t n = bpe_merge(&e->t->bpe, e->symbols, n_symbols, &e->work);
    for (size_t i = 0; i < n; i++) TRY(put_symbol(e, e->symbols[i]));
    return OK;
}

/* Encodes normalised text. A run ends before a user-defined piece, and between two characters that
 * are adjacent in no piece. */
static enum status encode_normal(struct encoder *e, struct str text)
{
    const struct spm *s = &e->t->spm;
    size_t n = 0, len;
    int32_t before = 0, cp, id;
    for (size_t at = 0; at < text.n; at += len) {
        len = added_tokens_match(&s->user_defined, text, at, &id);
        bool defined = len > 0;
        if (!defined) len = utf8_next(text, at, &cp);
        if (!defined && cp < 0)
            cp = UTF8_REPLACEMENT; /* pieces and replacements may end inside a character */
        if (n > 0 && (defined || (s->can_split && !spm_has_pair(s, before, cp)))) {
            TRY(put_run(e, n));
            n = 0;
        }
        if (defined) {
            e->after_unk = false;
            TRY(encoder_push(e, &id, 1));
            continue;
        }
        int32_t symbol = codepoint_map_get(&s->symbols, cp);
        e->symbols[n++] = symbol >= 0 ? symbol : -2 - cp;
        before = cp;
    }
    return put_run(e, n);
}

enum status spm_encode(struct encoder *e, struct str text, bool is_start)
{
    buf_clear(&e->section);
    enum status st = spm_normalize(&e->t->spm, text, is_start, &e->section);
    if (st == OK && e->section.len > INT32_MAX) st = ERR_TOO_LONG;
    if (st != OK) return err_set(e->err, st, "the text grows too much when it is normalised");
    TRY(encoder_expect(e, buf_str(&e->section)));
    encoder_reserve(e, e->section.len);
    e->after_unk = false;
    return encode_normal(e, buf_str(&e->section));
}
