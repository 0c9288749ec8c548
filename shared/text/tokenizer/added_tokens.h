/* added_tokens.h - added tokens: pieces that are found in the text before anything else looks at
 * it.
 *
 * Of several that match, the leftmost counts, and of those the longest. A token may also swallow
 * the white space next to it, or count only between characters that belong to no word. Life cycle:
 * init, put all, then read-only; release. Thread: find on any. */
#ifndef BATON_TEXT_TOKENIZER_ADDED_TOKENS_H
#define BATON_TEXT_TOKENIZER_ADDED_TOKENS_H

#include "shared/base/str.h"

enum { ADDED_TOKEN_LSTRIP = 1, ADDED_TOKEN_RSTRIP = 2, ADDED_TOKEN_SINGLE_WORD = 4 };

struct added_tokens {
    struct added_tokens_node *nodes; /* a trie of bytes */
    size_t n, cap;
    int32_t first[256]; /* node for a first byte, 0: none */
};

struct added_tokens_hit {
    size_t start, stop; /* with swallowed white space; start may lie before the stop of the hit
                         * before it, see next */
    size_t next;        /* where the search goes on: white space that this one swallowed may also
                         * be part of the next token */
    int32_t id;
};

void added_tokens_init(struct added_tokens *a);
void added_tokens_release(struct added_tokens *a);
/* `content` is not empty; flags are ADDED_TOKEN_*. The same content put again gets the later id. */
void added_tokens_put(struct added_tokens *a, struct str content, int32_t id, int flags);
/* Length of the longest token that begins at text.p[at], whatever its flags, with its id; 0 when
 * there is none. */
size_t added_tokens_match(const struct added_tokens *a, struct str text, size_t at, int32_t *id);
/* The next token of `text` after *hit, which is { 0 } at first; false when there is none. */
bool added_tokens_find(const struct added_tokens *a, struct str text, struct added_tokens_hit *hit);

#endif
