/* draft_ngram.c - what followed the last tokens where they came up last: of the positions that
 * agree with the end in at least lookup_min tokens, the one that agrees in most, up to lookup_max,
 * and of equal ones the latest. Texts that repeat themselves or their prompt, as edited code does,
 * are drafted well. Where few tokens agree, or none, because the last one was edited, the text that
 * the tokens before it repeat is taken to go on behind the token that it replaces.
 * Thread: engine. */
#include "shared/base/mem.h"
#include "shared/engine/draft/draft.h"
#include "shared/engine/draft/token_index.h"

enum {
    CANDIDATES_MAX = 32, /* positions that are compared */
    EDIT_AGREE_MIN = 4   /* tokens before an edit that agree; as many behind it are surer */
};

struct ngram_seq {
    struct draft_seq base;
    struct token_index index;
};

static struct draft_seq *begin(struct drafter *d, uint32_t n_tokens_max)
{
    struct ngram_seq *s = mem_try_calloc(1, sizeof *s);
    if (s && token_index_init(&s->index, d->config.lookup_min, n_tokens_max) == OK) {
        s->base.n_tokens_max = n_tokens_max;
        return &s->base;
    }
    mem_free(s);
    return NULL;
}

static void end(struct drafter *d, struct draft_seq *base)
{
    struct ngram_seq *s = (struct ngram_seq *)base;
    (void)d;
    if (s) token_index_release(&s->index);
    mem_free(s);
}

static struct token_index *index_of(const struct draft_request *r)
{
    return &((struct ngram_seq *)r->seq)->index;
}

/* The position that agrees best with `end`, or below it; 0: none in lookup_min tokens. */
static uint32_t best_of(const struct draft_config *c, const struct draft_request *r, uint32_t end)
{
    const struct token_index *x = index_of(r);
    uint32_t best = 0, most = c->lookup_min - 1, pos = token_index_find(x, r->tokens, end);
    while (pos > 0 && pos >= end) pos = token_index_before(x, pos);
    for (int i = 0; i < CANDIDATES_MAX && pos > 0 && most < c->lookup_max; i++) {
        const uint32_t n = token_index_agree(r->tokens, end, pos, c->lookup_max);
        if (n > most) {
            best = pos;
            most = n;
        }
        pos = token_index_before(x, pos);
    }
    return best;
}

/* A draft behind the end of the known tokens repeats the drafts before it. */
static void copy(struct draft_request *r, uint32_t pos)
{
    for (r->n = 0; r->n < r->n_max; r->n++, pos++)
        r->drafts[r->n] = pos < r->n_tokens ? r->tokens[pos] : r->drafts[pos - r->n_tokens];
}

/* How many tokens before `pos` agree with those before `end`; of no position, none. */
static uint32_t agreed(const struct draft_request *r, uint32_t end, uint32_t pos)
{
    return pos == 0 ? 0 : token_index_agree(r->tokens, end, pos, DRAFT_LOOKUP_MAX);
}

static void propose_one(const struct draft_config *c, struct draft_request *r)
{
    uint32_t pos = best_of(c, r, r->n_tokens);
    const uint32_t n_agreed = agreed(r, r->n_tokens, pos),
                   before = r->n_tokens > 0 ? r->n_tokens - 1 : 0;
    r->level = draft_level_of(n_agreed);
    if (n_agreed < EDIT_AGREE_MIN) {
        const uint32_t edited = best_of(c, r, before);
        if (agreed(r, before, edited) >= EDIT_AGREE_MIN) {
            pos = edited + 1;
            r->level = DRAFT_LEVEL_EDIT;
        }
    }
    if (pos > 0) copy(r, pos);
}

static void propose(struct drafter *d, struct draft_request *requests, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        struct draft_request *r = &requests[i];
        r->n = r->level = 0;
        if (token_index_add(index_of(r), r->tokens, r->n_tokens)) propose_one(&d->config, r);
    }
}

const struct drafter_ops drafter_ngram_ops = {
    .name = "ngram",
    .create = drafter_create_plain,
    .free = drafter_free_plain,
    .begin = begin,
    .observe = drafter_observe_nothing,
    .submit = drafter_submit_nothing,
    .collect = drafter_observe_nothing,
    .propose = propose,
    .end = end,
};
