/* added_tokens.c - see added_tokens.h. Thread: find on any. */
#include "shared/text/tokenizer/added_tokens.h"

#include <utf8proc.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/text/utf8.h"

struct added_tokens_node {
    int32_t id;             /* token that ends here, -1: none */
    int32_t child, sibling; /* nodes, 0: none */
    unsigned char byte, flags;
};

void added_tokens_init(struct added_tokens *a)
{
    *a = (struct added_tokens){ 0 };
    a->cap = 64;
    a->nodes = MEM_ARRAY(struct added_tokens_node, a->cap);
    a->n = 1; /* node 0 stands for "none" */
}

void added_tokens_release(struct added_tokens *a)
{
    mem_free(a->nodes);
    *a = (struct added_tokens){ 0 };
}

static int32_t new_node(struct added_tokens *a, unsigned char byte)
{
    if (a->n == a->cap) {
        a->cap *= 2;
        a->nodes = mem_realloc(a->nodes, a->cap, sizeof *a->nodes);
    }
    ASSERT(a->n < INT32_MAX);
    a->nodes[a->n] = (struct added_tokens_node){ .id = -1, .byte = byte };
    return (int32_t)a->n++;
}

static int32_t find_child(const struct added_tokens *a, int32_t at, unsigned char byte)
{
    int32_t c = a->nodes[at].child;
    while (c && a->nodes[c].byte != byte) c = a->nodes[c].sibling;
    return c;
}

static int32_t make_child(struct added_tokens *a, int32_t at, unsigned char byte)
{
    int32_t c = find_child(a, at, byte);
    if (c) return c;
    c = new_node(a, byte);
    a->nodes[c].sibling = a->nodes[at].child;
    a->nodes[at].child = c;
    return c;
}

void added_tokens_put(struct added_tokens *a, struct str content, int32_t id, int flags)
{
    ASSERT(content.n > 0);
    const unsigned char *p = (const unsigned char *)content.p;
    if (!a->first[p[0]]) a->first[p[0]] = new_node(a, p[0]);
    int32_t at = a->first[p[0]];
    for (size_t i = 1; i < content.n; i++) at = make_child(a, at, p[i]);
    a->nodes[at].id = id;
    a->nodes[at].flags = (unsigned char)flags;
}

/* Finds the longest token at `at`; returns its node (0: none), with the length in *len. */
static int32_t longest_at(const struct added_tokens *a, struct str text, size_t at, size_t *len)
{
    const unsigned char *p = (const unsigned char *)text.p;
    int32_t node = a->first[p[at]], found = 0;
    for (size_t i = at; node;) {
        i++;
        if (a->nodes[node].id >= 0) {
            found = node;
            *len = i - at;
        }
        node = i < text.n ? find_child(a, node, p[i]) : 0;
    }
    return found;
}

size_t added_tokens_match(const struct added_tokens *a, struct str text, size_t at, int32_t *id)
{
    size_t len = 0;
    int32_t node = longest_at(a, text, at, &len);
    if (!node) return 0;
    *id = a->nodes[node].id;
    return len;
}

static bool is_space(int32_t cp)
{
    if (cp < 0x80) return cp == ' ' || (cp >= '\t' && cp <= '\r');
    utf8proc_category_t c = utf8proc_category(cp);
    return cp == 0x85 || c == UTF8PROC_CATEGORY_ZS || c == UTF8PROC_CATEGORY_ZL ||
           c == UTF8PROC_CATEGORY_ZP;
}

/* Is it a word character? As \w of Rust's regex crate, which defines single_word. */
static bool is_word(int32_t cp)
{
    /* The two joiners, and enclosed letters. */
    static const int32_t others[][2] = { { 0x200C, 0x200D },
                                         { 0x24B6, 0x24E9 },
                                         { 0x1F130, 0x1F149 },
                                         { 0x1F150, 0x1F169 },
                                         { 0x1F170, 0x1F189 } };
    for (size_t i = 0; i < COUNT_OF(others); i++)
        if (cp >= others[i][0] && cp <= others[i][1]) return true;
    switch (utf8proc_category(cp)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: return false;
    }
}

/* Start of the character that ends at `end` (> 0); *cp is its code point. */
static size_t char_before(struct str text, size_t end, int32_t *cp)
{
    size_t at = end - 1;
    while (at > 0 && end - at < UTF8_CHAR_MAX && ((unsigned char)text.p[at] & 0xC0) == 0x80) at--;
    utf8_next(text, at, cp);
    return at;
}

static bool is_single_word(struct str text, size_t start, size_t stop)
{
    int32_t cp;
    if (start > 0) {
        char_before(text, start, &cp);
        if (is_word(cp)) return false;
    }
    if (stop < text.n) {
        utf8_next(text, stop, &cp);
        if (is_word(cp)) return false;
    }
    return true;
}

/* Extends the hit by the white space that its flags take. The previous token keeps what it took, up
 * to `taken`, so a token of white space may become empty. */
static void apply_strip_flags(struct str text, size_t taken, int flags,
                              struct added_tokens_hit *hit)
{
    int32_t cp;
    if (flags & ADDED_TOKEN_LSTRIP && hit->start < taken) hit->start = taken;
    while (flags & ADDED_TOKEN_LSTRIP && hit->start > taken) {
        size_t before = char_before(text, hit->start, &cp);
        if (!is_space(cp) || before < taken) break;
        hit->start = before;
    }
    while (flags & ADDED_TOKEN_RSTRIP && hit->stop < text.n) {
        size_t n = utf8_next(text, hit->stop, &cp);
        if (!is_space(cp)) break;
        hit->stop += n;
    }
}

bool added_tokens_find(const struct added_tokens *a, struct str text, struct added_tokens_hit *hit)
{
    size_t len = 0;
    for (size_t at = hit->next; at < text.n;) {
        int32_t node = a->first[(unsigned char)text.p[at]] ? longest_at(a, text, at, &len) : 0;
        if (!node) {
            at++;
            continue;
        }
        int flags = a->nodes[node].flags;
        if (flags & ADDED_TOKEN_SINGLE_WORD && !is_single_word(text, at, at + len)) {
            at += len;
            continue;
        }
        struct added_tokens_hit found = { at, at + len, at + len, a->nodes[node].id };
        apply_strip_flags(text, hit->stop, flags, &found);
        at = found.next;
        if (found.start >= found.stop) continue;
        *hit = found;
        return true;
    }
    return false;
}
