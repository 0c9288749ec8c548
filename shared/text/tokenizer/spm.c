/* spm.c - see spm.h.
 *
 * The table of replacements is a double array (Aoe 1989) in the layout of the Darts library: 32-bit
 * units, each with the label of the edge to it and an offset to its children; a leaf holds the
 * offset of its replacement in the texts that follow. The file is untrusted: every index is
 * checked.
 * Thread: use on any. */
#include "shared/text/tokenizer/spm.h"

#include <string.h>

#include "shared/base/mem.h"
#include "shared/text/tokenizer/normalizer.h"
#include "shared/text/utf8.h"

enum { PAIRS_MIN = 1024 };

void spm_init(struct spm *s)
{
    *s = (struct spm){ 0 };
    added_tokens_init(&s->user_defined);
}

void spm_release(struct spm *s)
{
    added_tokens_release(&s->user_defined);
    codepoint_map_release(&s->symbols);
    buf_release(&s->charsmap);
    mem_free(s->extra_chars);
    mem_free(s->pairs);
    *s = (struct spm){ 0 };
}

int32_t spm_symbol(struct spm *s, int32_t cp)
{
    int32_t id = codepoint_map_get(&s->symbols, cp);
    if (id >= 0) return id;
    if (s->n_extra_chars == s->cap_extra_chars) {
        s->cap_extra_chars = s->cap_extra_chars ? s->cap_extra_chars * 2 : 64;
        s->extra_chars = mem_realloc(s->extra_chars, s->cap_extra_chars, sizeof *s->extra_chars);
    }
    id = (int32_t)(s->n_pieces + s->n_extra_chars);
    s->extra_chars[s->n_extra_chars++] = cp;
    codepoint_map_put(&s->symbols, cp, id);
    return id;
}

/* ---- adjacent characters ---- */

/* The key is never 0, which marks a free entry. */
static uint64_t pair_key(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right | (uint64_t)1 << 63;
}

static uint64_t *pair_slot(const struct spm *s, uint64_t key)
{
    size_t at = (size_t)((key * 0x9E3779B97F4A7C15u) >> 32) & (s->cap_pairs - 1);
    while (s->pairs[at] && s->pairs[at] != key) at = (at + 1) & (s->cap_pairs - 1);
    return &s->pairs[at];
}

static void grow_pairs(struct spm *s)
{
    uint64_t *old = s->pairs;
    size_t n_old = s->cap_pairs;
    s->cap_pairs = n_old ? n_old * 2 : PAIRS_MIN;
    s->pairs = MEM_ARRAY(uint64_t, s->cap_pairs);
    for (size_t i = 0; i < n_old; i++)
        if (old[i]) *pair_slot(s, old[i]) = old[i];
    mem_free(old);
}

void spm_put_pair(struct spm *s, int32_t left, int32_t right)
{
    if ((s->n_pairs + 1) * 2 > s->cap_pairs) grow_pairs(s);
    uint64_t key = pair_key(left, right), *slot = pair_slot(s, key);
    s->n_pairs += *slot == 0;
    *slot = key;
}

bool spm_has_pair(const struct spm *s, int32_t left, int32_t right)
{
    return s->n_pairs > 0 && *pair_slot(s, pair_key(left, right)) != 0;
}

/* ---- the table of replacements ---- */

static uint32_t unit_at(const struct spm *s, size_t i)
{
    const unsigned char *p = (const unsigned char *)s->charsmap.data + i * 4;
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static size_t unit_offset(uint32_t unit) { return (size_t)(unit >> 10) << ((unit & 1u << 9) >> 6); }
static bool unit_has_leaf(uint32_t unit) { return unit >> 8 & 1; }
static bool unit_is(uint32_t unit, unsigned char label)
{
    return (unit & (1u << 31 | 0xFF)) == label;
}

static struct str map_texts(const struct spm *s)
{
    return str_sub(buf_str(&s->charsmap), s->n_units * 4, SIZE_MAX);
}

enum status spm_set_charsmap(struct spm *s, struct str table, struct err *err)
{
    unsigned char head[4];
    if (table.n == 0) return OK;
    bool has_head = str_take(&table, head, sizeof head);
    size_t n = has_head ? (size_t)head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16 |
                              (size_t)head[3] << 24
                        : 0;
    /* The last byte is 0, so every text ends inside the table. */
    if (n < 4 || n % 4 != 0 || n >= table.n || table.p[table.n - 1] != 0)
        return err_set(err, ERR_FORMAT,
                       "the table of the normalizer (precompiled_charsmap) is damaged");
    buf_add_str(&s->charsmap, table);
    s->n_units = n / 4;
    return OK;
}

/* Length of the longest entry at the front of `text`, with its replacement in *to; 0: none. */
static size_t find_replacement(const struct spm *s, struct str text, struct str *to)
{
    size_t found = 0;
    struct str texts = map_texts(s);
    size_t at = unit_offset(unit_at(s, 0));
    for (size_t i = 0; i < text.n; i++) {
        at ^= (unsigned char)text.p[i];
        if (at >= s->n_units) break;
        uint32_t unit = unit_at(s, at);
        if (!unit_is(unit, (unsigned char)text.p[i])) break;
        at ^= unit_offset(unit);
        if (!unit_has_leaf(unit) || at >= s->n_units) continue;
        size_t begin = unit_at(s, at) & 0x7FFFFFFF;
        if (begin >= texts.n) continue;
        found = i + 1;
        *to = str_of(texts.p + begin);
    }
    return found;
}

/* ---- the normal form ---- */

/* Normalises the front of `text` into *to; returns the number of bytes used. */
static size_t next_part(const struct spm *s, struct str text, struct str *to)
{
    int32_t id, cp;
    size_t n = added_tokens_match(&s->user_defined, text, 0, &id);
    if (n == 0 && s->n_units > 0) {
        n = find_replacement(s, text, to);
        if (n > 0) return n;
    }
    if (n == 0) n = utf8_next(text, 0, &cp);
    *to = str_sub(text, 0, n);
    return n;
}

static void put_space(const struct spm *s, struct buf *out)
{
    buf_add_c(out, s->escape ? SPM_SPACE : " ");
}

static void put_part(const struct spm *s, struct str part, struct buf *out)
{
    for (size_t i = 0; i < part.n; i++)
        if (part.p[i] == ' ') put_space(s, out);
        else buf_add_char(out, part.p[i]);
}

static void drop_spaces_behind(const struct spm *s, size_t from, struct buf *out)
{
    const char *space = s->escape ? SPM_SPACE : " ";
    while (str_ends(str_sub(buf_str(out), from, SIZE_MAX), space)) out->len -= strlen(space);
    if (out->data) out->data[out->len] = 0;
}

enum status spm_normalize(const struct spm *s, struct str text, bool is_start, struct buf *out)
{
    size_t from = out->len, len_max = (text.n + NORMALIZER_INSERT_MAX) * NORMALIZER_GROWTH_MAX, n;
    bool prefix = s->dummy_prefix && (is_start || !s->prefix_first_only);
    struct str part;
    while (s->remove_extra && text.n > 0) {
        n = next_part(s, text, &part);
        if (!str_eq(part, STR(" "))) break;
        text = str_sub(text, n, SIZE_MAX);
    }
    if (text.n == 0) return OK;
    if (prefix && !s->as_suffix) put_space(s, out);
    bool after_space = s->remove_extra;
    for (; text.n > 0; text = str_sub(text, n, SIZE_MAX)) {
        n = next_part(s, text, &part);
        while (after_space && str_starts(part, " ")) part = str_sub(part, 1, SIZE_MAX);
        put_part(s, part, out);
        if (part.n > 0) after_space = s->remove_extra && str_ends(part, " ");
        if (out->len - from > len_max) return ERR_TOO_LONG;
    }
    if (s->remove_extra) drop_spaces_behind(s, from, out);
    if (prefix && s->as_suffix) put_space(s, out);
    return OK;
}
