/* tokenizer_spm.c - builds a tokenizer from the pieces of a SentencePiece BPE model.
 *
 * The model has scores instead of merges: of all adjacent symbols whose joined text is a piece, the
 * pair with the highest score merges. This becomes bpe.h's table: every way to make a piece of two
 * symbols, ranked by the piece's score; a symbol is a piece or a single character of pieces.
 * Only normal and unused pieces merge; user-defined ones are cut out before (spm.h), control pieces
 * are searched like added tokens.
 * Thread: the builder's. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "shared/text/tokenizer/tokenizer_internal.h"
#include "shared/text/utf8.h"

struct spm_pair {
    int32_t left, right, whole;
};

struct spm_build {
    struct tokenizer *t;
    const struct spm_piece *pieces;
    size_t n;
    uint32_t *ranks;    /* [n] by score; equal scores have equal ranks */
    struct map merging; /* pieces that merge; the value is id + 1 */
    struct spm_pair *pairs;
    size_t n_pairs, cap_pairs;
    bool ambiguous; /* an unused piece can be made in several ways */
    struct err *err;
};

static bool merges(const struct spm_piece *p)
{
    return p->kind == SPM_NORMAL || p->kind == SPM_UNUSED;
}

static bool is_one_char(struct str s, int32_t *cp)
{
    return s.n > 0 && utf8_next(s, 0, cp) == s.n && *cp >= 0;
}

/* ---- tokens ---- */

static enum status put_piece(struct spm_build *b, int32_t id)
{
    const struct spm_piece *p = &b->pieces[id];
    struct tokenizer *t = b->t;
    if (p->text.n == 0 || p->text.n > TOKENIZER_PIECE_MAX || !utf8_is_valid(p->text) ||
        isnan(p->score))
        return err_set(b->err, ERR_FORMAT,
                       "piece %d is empty, too long, not UTF-8, or has no score", (int)id);
    switch (p->kind) {
    case SPM_UNKNOWN:
        t->unk = id;
        return tokenizer_put_added(t, id, p->text, true, false, 0, b->err);
    case SPM_CONTROL: return tokenizer_put_added(t, id, p->text, true, false, 0, b->err);
    case SPM_BYTE: tokenizer_put_token(t, id, p->text, TOKEN_BYTE); return OK;
    case SPM_USER_DEFINED:
        tokenizer_put_token(t, id, p->text, TOKEN_USER);
        added_tokens_put(&t->spm.user_defined, p->text, id, 0);
        return OK;
    case SPM_NORMAL:
    case SPM_UNUSED:
        if (map_put(&b->merging, p->text, (void *)(uintptr_t)(id + 1)))
            return err_set(b->err, ERR_FORMAT, "piece %d is a duplicate", (int)id);
        tokenizer_put_token(t, id, p->text, p->kind == SPM_UNUSED ? TOKEN_UNUSED : TOKEN_NORMAL);
        return OK;
    default:
        return err_set(b->err, ERR_FORMAT, "piece %d is of the unknown kind %d", (int)id,
                       (int)p->kind);
    }
}

static enum status put_pieces(struct spm_build *b)
{
    for (size_t i = 0; i < b->n; i++) TRY(put_piece(b, (int32_t)i));
    for (size_t i = 0; i < b->n; i++) {
        int32_t cp;
        if (merges(&b->pieces[i]) && is_one_char(b->pieces[i].text, &cp))
            codepoint_map_put(&b->t->spm.symbols, cp, (int32_t)i);
    }
    b->t->spm.n_pieces = b->n;
    return OK;
}

/* ---- ranks ---- */

struct scored {
    float score;
    int32_t id;
};

static int by_score(const void *a, const void *b)
{
    const struct scored *x = a, *y = b;
    if (x->score != y->score) return x->score > y->score ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static void rank_pieces(struct spm_build *b)
{
    struct scored *all = MEM_ARRAY(struct scored, b->n);
    uint32_t rank = 0;
    for (size_t i = 0; i < b->n; i++) all[i] = (struct scored){ b->pieces[i].score, (int32_t)i };
    qsort(all, b->n, sizeof *all, by_score);
    for (size_t i = 0; i < b->n; i++) {
        rank += i > 0 && all[i].score != all[i - 1].score;
        b->ranks[all[i].id] = rank;
    }
    mem_free(all);
}

/* ---- pairs ---- */

/* Symbol of a part of a piece, or -1. */
static int32_t symbol_of(struct spm_build *b, struct str s)
{
    int32_t cp;
    return is_one_char(s, &cp) ? codepoint_map_get(&b->t->spm.symbols, cp)
                               : (int32_t)(uintptr_t)map_get(&b->merging, s) - 1;
}

static void add_pair(struct spm_build *b, struct spm_pair pair)
{
    if (b->n_pairs == b->cap_pairs) {
        b->cap_pairs = b->cap_pairs ? b->cap_pairs * 2 : 4096;
        b->pairs = mem_realloc(b->pairs, b->cap_pairs, sizeof *b->pairs);
    }
    b->pairs[b->n_pairs++] = pair;
}

/* Notes the characters of a piece and which are adjacent. */
static void note_chars(struct spm_build *b, struct str piece)
{
    struct spm *s = &b->t->spm;
    int32_t cp, before = -1;
    for (size_t at = 0; at < piece.n; before = cp) {
        at += utf8_next(piece, at, &cp);
        (void)spm_symbol(s, cp);
        if (before >= 0) spm_put_pair(s, before, cp);
    }
}

static void add_pairs_of(struct spm_build *b, int32_t id)
{
    struct str piece = b->pieces[id].text;
    size_t n_before = b->n_pairs;
    int32_t cp;
    for (size_t cut = utf8_next(piece, 0, &cp); cut < piece.n; cut += utf8_next(piece, cut, &cp)) {
        int32_t left = symbol_of(b, str_sub(piece, 0, cut)),
                right = left < 0 ? -1 : symbol_of(b, str_sub(piece, cut, SIZE_MAX));
        if (right >= 0) add_pair(b, (struct spm_pair){ left, right, id });
    }
    bool unused = b->pieces[id].kind == SPM_UNUSED;
    if (unused && b->n_pairs > n_before) b->t->tokens[id].resegment = true;
    if (unused && b->n_pairs > n_before + 1) b->ambiguous = true;
}

static void put_pairs(struct spm_build *b)
{
    struct tokenizer *t = b->t;
    for (size_t i = 0; i < b->n; i++)
        if (merges(&b->pieces[i])) note_chars(b, b->pieces[i].text);
    for (size_t i = 0; i < b->n; i++)
        if (merges(&b->pieces[i])) add_pairs_of(b, (int32_t)i);
    bpe_init(&t->bpe, b->n_pairs);
    for (size_t i = 0; i < b->n_pairs; i++) {
        const struct spm_pair *p = &b->pairs[i];
        bpe_put(&t->bpe, p->left, p->right, b->ranks[p->whole],
                p->whole | (t->tokens[p->whole].resegment ? BPE_WATCHED : 0));
    }
    /* If several pairs make an unused piece, its split depends on the last pair seen in the whole
     * text, which must not be cut then. */
    t->spm.can_split = !b->ambiguous;
}

/* ---- the whole ---- */

static enum status set_fallback(struct spm_build *b, bool byte_fallback)
{
    char name[8];
    for (int i = 0; byte_fallback && i < 256; i++) {
        static const char digits[] = "0123456789ABCDEF";
        memcpy(name, (char[]){ '<', '0', 'x', digits[i >> 4], digits[i & 15], '>' }, 6);
        int32_t id = tokenizer_find(b->t, (struct str){ name, 6 });
        if (id < 0 || (size_t)id >= b->n || b->pieces[id].kind != SPM_BYTE)
            return err_set(b->err, ERR_FORMAT,
                           "the model has byte fallback, but no piece for byte 0x%02X",
                           (unsigned)i);
    }
    b->t->byte_fallback = byte_fallback;
    return OK;
}

enum status tokenizer_fill_spm(struct tokenizer *t, const struct spm_piece *pieces, size_t n,
                               bool byte_fallback, struct err *err)
{
    struct spm_build b = { .t = t, .pieces = pieces, .n = n, .err = err };
    if (n == 0 || n > TOKENIZER_IDS_MAX)
        return err_set(err, ERR_FORMAT, "a vocabulary of %zu pieces is not possible", n);
    b.ranks = MEM_ARRAY(uint32_t, n);
    enum status st = put_pieces(&b);
    if (st == OK) st = set_fallback(&b, byte_fallback);
    if (st == OK) {
        rank_pieces(&b);
        put_pairs(&b);
        t->spm.enabled = t->decode_bytes = true;
        t->strip_start = t->spm.dummy_prefix || t->spm.remove_extra;
        t->strip_each = t->spm.remove_extra;
        if (t->spm.escape)
            st = normalizer_add(&t->decoder, NORMALIZER_REPLACE, STR(SPM_SPACE), STR(" "));
    }
    map_release(&b.merging);
    mem_free(b.ranks);
    mem_free(b.pairs);
    return st;
}
