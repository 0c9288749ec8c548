/* token_index.c - see token_index.h. Thread: its owner's. */
#include "shared/engine/draft/token_index.h"

#include "shared/base/mem.h"

/* Longer sequences have longer lists; a sequence's index stays within 256 KiB and 4 bytes a
 * token. */
enum { HEADS_MIN = 256, HEADS_MAX = 1 << 16 };

enum status token_index_init(struct token_index *x, uint32_t n, uint32_t n_tokens_max)
{
    uint32_t n_heads = HEADS_MIN;
    while (n_heads < HEADS_MAX && n_heads < n_tokens_max) n_heads *= 2;
    *x = (struct token_index){ .n = n, .n_known = n, .n_heads = n_heads };
    x->heads = mem_try_calloc(n_heads, sizeof *x->heads);
    x->earlier = mem_try_calloc(n_tokens_max, sizeof *x->earlier);
    if (x->heads && x->earlier) return OK;
    token_index_release(x);
    return ERR_NOMEM;
}

void token_index_release(struct token_index *x)
{
    mem_free(x->heads);
    mem_free(x->earlier);
    *x = (struct token_index){ 0 };
}

/* The list of the n tokens before `end`. */
static uint32_t *head_of(const struct token_index *x, const int32_t *tokens, uint32_t end)
{
    uint64_t h = 0;
    for (uint32_t i = end - x->n; i < end; i++)
        h = (h + (uint32_t)tokens[i] + 1) * UINT64_C(0x9e3779b97f4a7c15);
    return &x->heads[(h >> 32) & (x->n_heads - 1)];
}

bool token_index_add(struct token_index *x, const int32_t *tokens, uint32_t n_tokens)
{
    const uint32_t most = x->n_known + TOKEN_INDEX_ADD_MAX, end = n_tokens < most ? n_tokens : most;
    for (; x->n_known < end; x->n_known++) {
        uint32_t *head = head_of(x, tokens, x->n_known);
        x->earlier[x->n_known] = *head;
        *head = x->n_known;
    }
    return x->n_known >= n_tokens;
}

uint32_t token_index_find(const struct token_index *x, const int32_t *tokens, uint32_t n_tokens)
{
    return n_tokens < x->n ? 0 : *head_of(x, tokens, n_tokens);
}

uint32_t token_index_agree(const int32_t *tokens, uint32_t n_tokens, uint32_t pos, uint32_t most)
{
    const uint32_t room = pos < most ? pos : most;
    uint32_t n = 0;
    while (n < room && tokens[pos - 1 - n] == tokens[n_tokens - 1 - n]) n++;
    return n;
}
