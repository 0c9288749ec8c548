/* token_index.h - where the last tokens of a sequence came up before.
 *
 * Positions that follow the same n tokens form a list, the latest first: a table of heads by a hash
 * of the n tokens, and of each position the one before it. Adding a token takes constant time.
 * Lists may share a head, so whoever walks one compares tokens (token_index_agree). Position p
 * follows the tokens [0, p); there is no position below n, so that 0 stands for none.
 * Thread: its owner's. */
#ifndef BATON_ENGINE_DRAFT_TOKEN_INDEX_H
#define BATON_ENGINE_DRAFT_TOKEN_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "shared/base/status.h"

struct token_index {
    uint32_t n;        /* tokens that a list is found by */
    uint32_t n_known;  /* positions below it are in their lists */
    uint32_t n_heads;  /* a power of two */
    uint32_t *heads;   /* [n_heads] the latest position; 0: none */
    uint32_t *earlier; /* [n_tokens_max] of a position the one before it in its list; 0: none */
};

enum { TOKEN_INDEX_ADD_MAX = 4096 }; /* tokens that one call adds: a long prompt takes several */

/* For a sequence of up to n_tokens_max tokens. ERR_NOMEM. */
enum status token_index_init(struct token_index *x, uint32_t n, uint32_t n_tokens_max) MUST_CHECK;
void token_index_release(struct token_index *x);
/* Adds positions below n_tokens. False: they are more than one call adds; call again. */
bool token_index_add(struct token_index *x, const int32_t *tokens, uint32_t n_tokens);
/* The latest position of the list of the last n of n_tokens tokens; 0: none. */
uint32_t token_index_find(const struct token_index *x, const int32_t *tokens, uint32_t n_tokens);
/* The position before `pos` in its list; 0: none. */
static inline uint32_t token_index_before(const struct token_index *x, uint32_t pos)
{
    return x->earlier[pos];
}
/* How many tokens before `pos` equal those before n_tokens, up to `most`. */
uint32_t token_index_agree(const int32_t *tokens, uint32_t n_tokens, uint32_t pos, uint32_t most);

#endif
