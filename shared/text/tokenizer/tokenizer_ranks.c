/* tokenizer_ranks.c - vocabularies of byte strings ordered by rank, as in tiktoken.
 *
 * There is no list of merges, but a rule: of all adjacent tokens whose joined bytes are a token,
 * the pair with the lowest rank merges; a piece that is a token stays whole. The rule becomes
 * bpe.h's table of merges: every way to make a token of two others, at the token's rank.
 * Thread: the builder's. */
#include <string.h>

#include "shared/text/tokenizer/tokenizer_internal.h"
#include "shared/text/utf8.h"

struct rank_pair {
    int32_t left, right, whole;
    uint32_t rank;
};

struct rank_pairs {
    struct rank_pair *all;
    size_t n, cap;
};

static void add_pair(struct rank_pairs *p, struct rank_pair pair)
{
    if (p->n == p->cap) {
        p->cap = p->cap ? p->cap * 2 : 4096;
        p->all = mem_realloc(p->all, p->cap, sizeof *p->all);
    }
    p->all[p->n++] = pair;
}

static int32_t find(const struct map *by_bytes, struct str bytes)
{
    return (int32_t)(uintptr_t)map_get(by_bytes, bytes) - 1;
}

static void add_pairs_of(struct rank_pairs *p, const struct map *by_bytes, struct str whole,
                         int32_t id, uint32_t rank)
{
    for (size_t cut = 1; cut < whole.n; cut++) {
        int32_t left = find(by_bytes, str_sub(whole, 0, cut));
        int32_t right = left < 0 ? -1 : find(by_bytes, str_sub(whole, cut, SIZE_MAX));
        if (right >= 0) add_pair(p, (struct rank_pair){ left, right, id, rank });
    }
}

static enum status put_tokens(struct tokenizer *t, const struct str *bytes, size_t n,
                              int32_t first_id, struct map *by_bytes, struct err *err)
{
    struct buf piece = { 0 };
    char c[UTF8_CHAR_MAX];
    enum status st = OK;
    for (size_t i = 0; i < n && st == OK; i++) {
        int32_t id = first_id + (int32_t)i;
        buf_clear(&piece);
        for (size_t k = 0; k < bytes[i].n; k++)
            buf_add(&piece, c, utf8_put(byte_level_encode((unsigned char)bytes[i].p[k]), c));
        if (bytes[i].n == 0 || bytes[i].n > TOKENIZER_PIECE_MAX ||
            map_put(by_bytes, bytes[i], (void *)(uintptr_t)(id + 1)))
            st = err_set(err, ERR_FORMAT,
                         "the token of rank %zu is empty, too long, or a duplicate", i);
        tokenizer_put_token(t, id, buf_str(&piece), TOKEN_NORMAL);
    }
    buf_release(&piece);
    return st;
}

static enum status check_bytes(const struct map *by_bytes, struct err *err)
{
    for (int i = 0; i < 256; i++) {
        char c = (char)i;
        if (find(by_bytes, (struct str){ &c, 1 }) < 0)
            return err_set(err, ERR_FORMAT, "byte 0x%02X has no token", (unsigned)i);
    }
    return OK;
}

enum status tokenizer_fill_ranks(struct tokenizer *t, const struct str *bytes, size_t n,
                                 int32_t first_id, struct err *err)
{
    struct map by_bytes = { 0 };
    struct rank_pairs pairs = { 0 };
    if (n > (size_t)(TOKENIZER_IDS_MAX - first_id))
        return err_set(err, ERR_FORMAT, "a vocabulary of %zu tokens is not possible", n);
    enum status st = put_tokens(t, bytes, n, first_id, &by_bytes, err);
    if (st == OK) st = check_bytes(&by_bytes, err);
    for (size_t i = 0; i < n && st == OK; i++)
        add_pairs_of(&pairs, &by_bytes, bytes[i], first_id + (int32_t)i, (uint32_t)i);
    bpe_init(&t->bpe, pairs.n);
    for (size_t i = 0; i < pairs.n; i++)
        bpe_put(&t->bpe, pairs.all[i].left, pairs.all[i].right, pairs.all[i].rank,
                pairs.all[i].whole);
    t->byte_level = t->ignore_merges = true;
    map_release(&by_bytes);
    mem_free(pairs.all);
    return st;
}
