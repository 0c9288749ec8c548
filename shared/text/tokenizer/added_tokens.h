/* added_tokens.h - finds added tokens, which are cut out of a text before all other steps.
 *
 * The leftmost match counts; of several there, the longest. A token may take the white space next
 * to it (LSTRIP, RSTRIP), or match only where no word character is next to it (SINGLE_WORD).
 * Life cycle: init, put all, then read-only, release.
 * Thread: find on any. */
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
    size_t start, stop; /* with the white space taken; start may be before the last hit's stop */
    size_t next;        /* end of the token itself: the search continues there */
    int32_t id;
};

void added_tokens_init(struct added_tokens *a);
void added_tokens_release(struct added_tokens *a);
/* Adds a token. `content` is not empty, flags are ADDED_TOKEN_*; content put twice gets the later
 * id. */
void added_tokens_put(struct added_tokens *a, struct str content, int32_t id, int flags);
/* Length of the longest token at text.p[at], ignoring flags, with its id in *id; 0: none. */
size_t added_tokens_match(const struct added_tokens *a, struct str text, size_t at, int32_t *id);
/* Finds the next token of `text` after *hit, which is { 0 } at first; false when there is none. */
bool added_tokens_find(const struct added_tokens *a, struct str text, struct added_tokens_hit *hit);

#endif
