/* tokenizer_build.c - builds a tokenizer from tokens and merges.
 *
 * A byte-level vocabulary writes every byte as one printable character: bytes that are printable in
 * Latin-1 as themselves, the other 68 as U+0100 and following, in order.
 * Thread: the builder's. */
#include <stdlib.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/text/tokenizer/tokenizer_internal.h"
#include "shared/text/utf8.h"

static bool is_printable(int byte)
{
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

int32_t byte_level_encode(unsigned char byte)
{
    if (is_printable(byte)) return byte;
    if (byte <= 32) return 0x100 + byte;                       /* 0 .. 32 */
    return byte <= 160 ? 0x100 + 33 + byte - 127 : 0x100 + 67; /* 127 .. 160, and 173 */
}

/* Returns the byte of a character of the byte-level alphabet, -1 for another. */
static int byte_level_decode(int32_t cp)
{
    if (cp >= 0x100 && cp <= 0x120) return cp - 0x100;
    if (cp > 0x120 && cp <= 0x142) return cp - 0x121 + 127;
    if (cp == 0x143) return 173;
    return cp >= 0 && cp <= 255 && is_printable(cp) ? cp : -1;
}

struct tokenizer *tokenizer_new(void)
{
    struct tokenizer *t = MEM_NEW(struct tokenizer);
    arena_init(&t->arena);
    added_tokens_init(&t->added_raw);
    added_tokens_init(&t->added_normalized);
    spm_init(&t->spm);
    t->unk = t->bos = t->eos = -1;
    for (int i = 0; i < 256; i++) t->byte_ids[i] = -1;
    return t;
}

void tokenizer_free(struct tokenizer *t)
{
    if (!t) return;
    map_release(&t->by_piece);
    added_tokens_release(&t->added_raw);
    added_tokens_release(&t->added_normalized);
    normalizer_release(&t->normalizer);
    normalizer_release(&t->decoder);
    pre_tokenizer_release(&t->pre_tokenizer);
    spm_release(&t->spm);
    codepoint_map_release(&t->chars);
    bpe_release(&t->bpe);
    arena_release(&t->arena);
    mem_free(t->tokens);
    mem_free(t);
}

static struct str keep(struct tokenizer *t, struct str s)
{
    return (struct str){ arena_strndup(&t->arena, s.p, s.n), s.n };
}

static void grow_tokens(struct tokenizer *t, size_t n)
{
    if (n > t->cap_tokens) {
        size_t cap = t->cap_tokens ? t->cap_tokens : 1024;
        while (cap < n) cap *= 2;
        t->tokens = mem_realloc(t->tokens, cap, sizeof *t->tokens);
        t->cap_tokens = cap;
    }
    for (; t->n_tokens < n; t->n_tokens++)
        t->tokens[t->n_tokens] =
            (struct vocab_token){ .piece = STR(""), .bytes = STR(""), .kind = TOKEN_UNUSED };
}

void tokenizer_put_token(struct tokenizer *t, int32_t id, struct str piece, enum token_kind kind)
{
    ASSERT(id >= 0 && id < TOKENIZER_IDS_MAX);
    grow_tokens(t, (size_t)id + 1);
    struct vocab_token *k = &t->tokens[id];
    if (piece.n > t->piece_max) t->piece_max = piece.n;
    *k = (struct vocab_token){
        .piece = keep(t, piece), .bytes = STR(""), .kind = kind, .used = true, .in_model = true
    };
    map_put(&t->by_piece, piece, (void *)(uintptr_t)(id + 1));
}

enum status tokenizer_put_added(struct tokenizer *t, int32_t id, struct str content, bool special,
                                bool normalized, int flags, struct err *err)
{
    if (content.n == 0 || !utf8_is_valid(content))
        return err_set(err, ERR_FORMAT, "added token %d is empty or not UTF-8", (int)id);
    bool in_model = (size_t)id < t->n_tokens && t->tokens[id].in_model &&
                    str_eq(t->tokens[id].piece, content);
    tokenizer_put_token(t, id, content, special ? TOKEN_CONTROL : TOKEN_USER);
    t->tokens[id].in_model = in_model;
    t->tokens[id].is_added = true;
    t->tokens[id].normalized = normalized;
    t->tokens[id].flags = (unsigned char)flags;
    return OK;
}

enum status tokenizer_split_merge(struct str line, struct str *left, struct str *right,
                                  struct err *err)
{
    size_t at = str_find_char(line, ' ');
    if (at == SIZE_MAX || at == 0 || at + 1 == line.n)
        return err_set(err, ERR_FORMAT, "the merge \"%.*s\" is not of the form \"left right\"",
                       STR_ARG(str_sub(line, 0, 64)));
    *left = str_sub(line, 0, at);
    *right = str_sub(line, at + 1, line.n);
    return OK;
}

enum status tokenizer_put_merge(struct tokenizer *t, struct str left, struct str right,
                                uint32_t rank, struct buf *scratch, struct err *err)
{
    buf_clear(scratch);
    buf_add_str(scratch, left);
    buf_add_str(scratch, right);
    int32_t l = tokenizer_find(t, left), r = tokenizer_find(t, right),
            whole = tokenizer_find(t, buf_str(scratch));
    if (l < 0 || r < 0 || whole < 0)
        return err_set(
            err, ERR_FORMAT,
            "merge %u (\"%.*s\" and \"%.*s\") names a token that is not in the vocabulary", rank,
            STR_ARG(str_sub(left, 0, 64)), STR_ARG(str_sub(right, 0, 64)));
    bpe_put(&t->bpe, l, r, rank, whole);
    return OK;
}

/* ---- bytes of tokens ---- */

/* The byte that a piece such as "<0x0A>" stands for; -1 for other pieces. */
static int byte_of_piece(struct str piece)
{
    static const char digits[] = "0123456789ABCDEF";
    if (piece.n != 6 || memcmp(piece.p, "<0x", 3) != 0 || piece.p[5] != '>' || !piece.p[3] ||
        !piece.p[4])
        return -1;
    const char *high = strchr(digits, piece.p[3]), *low = strchr(digits, piece.p[4]);
    return high && low ? (int)((high - digits) * 16 + (low - digits)) : -1;
}

/* Appends the bytes of a byte-level piece; false when a character is not in the alphabet. */
static bool spell_bytes(struct str piece, struct buf *out)
{
    int32_t cp;
    buf_clear(out);
    for (size_t at = 0; at < piece.n;) {
        at += utf8_next(piece, at, &cp);
        int byte = byte_level_decode(cp);
        if (byte < 0) return false;
        buf_add_char(out, (char)byte);
    }
    return true;
}

static enum status token_text(struct tokenizer *t, struct vocab_token *k, struct buf *text,
                              struct buf *scratch)
{
    int byte = t->decode_bytes ? byte_of_piece(k->piece) : -1;
    k->bytes = k->piece;
    if (k->is_added && (t->byte_level || t->spm.enabled)) return OK;
    if (t->byte_level) {
        if (spell_bytes(k->piece, text)) k->bytes = keep(t, buf_str(text));
        return OK;
    }
    if (byte >= 0 && !k->is_added && (!t->spm.enabled || k->kind == TOKEN_BYTE)) {
        char c = (char)byte;
        k->kind = TOKEN_BYTE;
        k->bytes = keep(t, (struct str){ &c, 1 });
        return OK;
    }
    if (t->decoder.n == 0) return OK;
    buf_clear(text);
    buf_add_str(text, k->piece);
    /* it is searched in its normalised form */
    if (k->is_added && k->normalized) TRY(normalizer_run(&t->normalizer, text, scratch));
    TRY(normalizer_run(&t->decoder, text, scratch));
    k->bytes = keep(t, buf_str(text));
    return OK;
}

static void find_byte_tokens(struct tokenizer *t)
{
    char piece[8];
    t->drops_nothing = true;
    for (int i = 0; i < 256; i++) {
        size_t n = 6;
        if (t->byte_level) n = utf8_put(byte_level_encode((unsigned char)i), piece);
        else
            memcpy(piece,
                   (char[]){ '<', '0', 'x', "0123456789ABCDEF"[i >> 4], "0123456789ABCDEF"[i & 15],
                             '>' },
                   6);
        t->byte_ids[i] = tokenizer_find(t, (struct str){ piece, n });
        /* Texts are valid UTF-8, in which some bytes never occur. */
        bool occurs = i < 0xC0 || (i > 0xC1 && i < 0xF5);
        t->drops_nothing = t->drops_nothing && (!occurs || t->byte_ids[i] >= 0);
    }
}

/* Index a token of one character: merging starts from those. */
static void index_char(struct tokenizer *t, int32_t id)
{
    struct str piece = t->tokens[id].piece;
    int32_t cp = -1;
    if (t->tokens[id].in_model && piece.n > 0 && utf8_next(piece, 0, &cp) == piece.n && cp >= 0)
        codepoint_map_put(&t->chars, cp, id);
}

static enum status index_added(struct tokenizer *t, int32_t id, struct buf *text,
                               struct buf *scratch)
{
    const struct vocab_token *k = &t->tokens[id];
    if (!k->normalized) {
        added_tokens_put(&t->added_raw, k->piece, id, k->flags);
        return OK;
    }
    buf_clear(text);
    buf_add_str(text, k->piece);
    TRY(normalizer_run(&t->normalizer, text, scratch));
    if (text->len) added_tokens_put(&t->added_normalized, buf_str(text), id, k->flags);
    return OK;
}

enum status tokenizer_finish(struct tokenizer *t, struct err *err)
{
    struct buf text = { 0 }, scratch = { 0 };
    enum status st = OK;
    for (size_t i = 0; i < t->n_tokens && st == OK; i++) {
        if (!t->tokens[i].used) continue;
        st = token_text(t, &t->tokens[i], &text, &scratch);
        if (!t->byte_level && !t->spm.enabled) index_char(t, (int32_t)i);
        if (st == OK && t->tokens[i].is_added) st = index_added(t, (int32_t)i, &text, &scratch);
        if (st != OK) err_set(err, st, "the text of token %zu is too long", i);
    }
    if (t->byte_level || t->byte_fallback) find_byte_tokens(t);
    buf_release(&text);
    buf_release(&scratch);
    return st;
}
