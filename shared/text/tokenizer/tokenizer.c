/* tokenizer.c - encoding and decoding with a finished tokenizer (tokenizer.h).
 *
 * Text is cut at added tokens twice: before and after it is normalised. The text between them goes
 * through the pre-tokenizer, and each of its pieces becomes bytes or characters that merge (bpe.h).
 * Thread: any; all scratch memory belongs to the call. */
#include "shared/text/tokenizer/tokenizer.h"

#include <string.h>

#include "shared/base/assert.h"
#include "shared/text/tokenizer/encoder.h"
#include "shared/text/utf8.h"

/* Byte-level: make one symbol per byte. A byte without a token is left out or becomes <unk>. */
static size_t byte_symbols(const struct tokenizer *t, struct str piece, int32_t *out)
{
    size_t n = 0;
    for (size_t i = 0; i < piece.n; i++) {
        int32_t id = t->byte_ids[(unsigned char)piece.p[i]];
        if (id < 0) id = t->unk;
        if (id >= 0) out[n++] = id;
    }
    return n;
}

/* Makes one symbol per character; a character without a token becomes its bytes or <unk>. Never
 * makes more symbols than the piece has bytes. */
static size_t char_symbols(const struct tokenizer *t, struct str piece, int32_t *out)
{
    size_t n = 0, len;
    bool after_unk = false;
    int32_t cp;
    for (size_t at = 0; at < piece.n; at += len) {
        len = utf8_next(piece, at, &cp);
        struct str c = str_sub(piece, at, len);
        int32_t id = codepoint_map_get(&t->chars, cp);
        bool is_unk = false;
        if (id >= 0) {
            out[n++] = id;
        } else if (encoder_has_bytes(t, c)) {
            for (size_t i = 0; i < len; i++) out[n++] = t->byte_ids[(unsigned char)c.p[i]];
        } else if (t->unk >= 0) {
            is_unk = true;
            if (!(after_unk && t->fuse_unk)) out[n++] = t->unk;
        }
        after_unk = is_unk;
    }
    return n;
}

/* Id of the token that equals the whole piece, or -1. */
static int32_t whole_piece(struct encoder *e, struct str piece)
{
    if (!e->t->byte_level) return tokenizer_find(e->t, piece);
    char c[UTF8_CHAR_MAX];
    buf_clear(&e->scratch);
    for (size_t i = 0; i < piece.n; i++)
        buf_add(&e->scratch, c, utf8_put(byte_level_encode((unsigned char)piece.p[i]), c));
    return tokenizer_find(e->t, buf_str(&e->scratch));
}

static enum status encode_piece(struct encoder *e, struct str piece)
{
    const struct tokenizer *t = e->t;
    int32_t whole = t->ignore_merges ? whole_piece(e, piece) : -1;
    if (whole >= 0 && t->tokens[whole].in_model) return encoder_push(e, &whole, 1);
    TRY(encoder_expect(e, piece));
    if (piece.n > TOKENIZER_WORD_MAX)
        return err_set(e->err, ERR_INVALID,
                       "the text has a word of %zu bytes, but words have at most %d: break it up",
                       piece.n, TOKENIZER_WORD_MAX);
    encoder_reserve(e, piece.n);
    size_t n = t->byte_level ? byte_symbols(t, piece, e->symbols)
                             : char_symbols(t, piece, e->symbols);
    return encoder_push(e, e->symbols, bpe_merge(&t->bpe, e->symbols, n, &e->work));
}

/* Encodes normalised text without added tokens. */
static enum status encode_plain(struct encoder *e, struct str text, bool is_start)
{
    if (text.n == 0) return OK;
    /* Before it is split, which takes memory for each byte of a long word. */
    if (pre_tokenizer_keeps_all(&e->t->pre_tokenizer)) TRY(encoder_expect(e, text));
    buf_clear(&e->pieces.text);
    buf_add_str(&e->pieces.text, text);
    TRY(pre_tokenizer_run(&e->t->pre_tokenizer, is_start, &e->pieces, e->err));
    for (size_t i = 0; i < e->pieces.n; i++)
        TRY(encode_piece(
            e, (struct str){ e->pieces.text.data + e->pieces.spans[i].at, e->pieces.spans[i].n }));
    return OK;
}

/* The text between two tokens; empty when they share white space. */
static struct str between(struct str text, size_t stop, size_t start)
{
    return str_sub(text, stop, start > stop ? start - stop : 0);
}

/* Encodes text between two raw added tokens: normalises it, then cuts out the normalised ones. */
static enum status encode_section(struct encoder *e, struct str text, bool is_start)
{
    if (text.n == 0) return OK;
    if (e->t->spm.enabled) return spm_encode(e, text, is_start);
    buf_clear(&e->section);
    buf_add_str(&e->section, text);
    if (normalizer_run(&e->t->normalizer, &e->section, &e->scratch) != OK)
        return err_set(e->err, ERR_TOO_LONG, "the text grows too much when it is normalised");
    struct added_tokens_hit hit = { 0 };
    size_t at = 0;
    for (; added_tokens_find(&e->t->added_normalized, buf_str(&e->section), &hit); at = hit.stop) {
        TRY(encode_plain(e, between(buf_str(&e->section), at, hit.start), is_start && at == 0));
        TRY(encoder_push(e, &hit.id, 1));
    }
    return encode_plain(e, str_sub(buf_str(&e->section), at, SIZE_MAX), is_start && at == 0);
}

static enum status encode_text(struct encoder *e, struct str text, bool add_special)
{
    if (add_special) TRY(encoder_push(e, e->t->prefix.ids, e->t->prefix.n));
    struct added_tokens_hit hit = { 0 };
    size_t at = 0;
    for (; added_tokens_find(&e->t->added_raw, text, &hit); at = hit.stop) {
        TRY(encode_section(e, between(text, at, hit.start), at == 0));
        TRY(encoder_push(e, &hit.id, 1));
    }
    TRY(encode_section(e, str_sub(text, at, SIZE_MAX), at == 0));
    return add_special ? encoder_push(e, e->t->suffix.ids, e->t->suffix.n) : OK;
}

enum status tokenizer_encode(const struct tokenizer *t, struct str text, bool add_special,
                             size_t limit, int32_t **ids, size_t *n, struct err *err)
{
    if (text.n > TOKENIZER_TEXT_MAX)
        return err_set(err, ERR_TOO_LONG, "a text of %zu bytes is over the limit of %d", text.n,
                       TOKENIZER_TEXT_MAX);
    struct encoder e = { .t = t, .ids = *ids, .n = *n, .cap = *n, .err = err };
    e.n_max = limit > SIZE_MAX - *n ? SIZE_MAX : *n + limit;
    struct buf valid = { 0 };
    if (!utf8_is_valid(text)) {
        utf8_add_valid(&valid, text);
        text = buf_str(&valid);
    }
    enum status st = encode_text(&e, text, add_special);
    *ids = e.ids; /* may have moved, even when the call fails */
    if (st == OK) *n = e.n;
    buf_release(&valid);
    buf_release(&e.section);
    buf_release(&e.scratch);
    pre_tokenizer_pieces_release(&e.pieces);
    bpe_work_release(&e.work);
    mem_free(e.symbols);
    mem_free(e.resegment);
    return st;
}

/* ---- decoding and queries ---- */

static const struct vocab_token *token_at(const struct tokenizer *t, int32_t id)
{
    return id >= 0 && (size_t)id < t->n_tokens ? &t->tokens[id] : NULL;
}

void tokenizer_token_bytes(const struct tokenizer *t, int32_t id, bool skip_special,
                           struct buf *out)
{
    const struct vocab_token *k = token_at(t, id);
    if (k && !(skip_special && k->kind == TOKEN_CONTROL)) buf_add_str(out, k->bytes);
}

void tokenizer_decode(const struct tokenizer *t, const int32_t *ids, size_t n, bool skip_special,
                      struct buf *out)
{
    struct buf bytes = { 0 };
    size_t n_left = t->strip_start; /* spaces still to be stripped */
    for (size_t i = 0; i < n; i++) {
        size_t from = bytes.len, skip = 0;
        tokenizer_token_bytes(t, ids[i], skip_special, &bytes);
        if (from > 0 || n_left == 0 || bytes.len == 0) continue;
        while (skip < n_left && skip < bytes.len && bytes.data[skip] == ' ') skip++;
        if (t->strip_first) n_left = 0;
        else if (!t->strip_each) n_left -= skip;
        buf_consume(&bytes, skip);
    }
    utf8_add_valid(out, buf_str(&bytes));
    buf_release(&bytes);
}

struct str tokenizer_piece(const struct tokenizer *t, int32_t id)
{
    const struct vocab_token *k = token_at(t, id);
    return k ? k->piece : STR("");
}

size_t tokenizer_n_vocab(const struct tokenizer *t) { return t->n_tokens; }
int32_t tokenizer_bos(const struct tokenizer *t) { return t->bos; }
int32_t tokenizer_eos(const struct tokenizer *t) { return t->eos; }

bool tokenizer_is_special(const struct tokenizer *t, int32_t id)
{
    const struct vocab_token *k = token_at(t, id);
    return k && k->kind == TOKEN_CONTROL;
}

int32_t tokenizer_find(const struct tokenizer *t, struct str piece)
{
    return (int32_t)(uintptr_t)map_get(&t->by_piece, piece) - 1;
}
