/* fuzz_draft.c - arbitrary text as a configuration of speculative decoding: it is refused with a
 * sentence, or every drafter of it stays within what it was asked for, over the text's bytes as
 * tokens. */
#include <stdint.h>
#include <string.h>

#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/engine/draft/draft_config.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { TOKENS_MAX = 512, UNTOUCHED = -5 };

static void draft(const struct draft_config *c, const int32_t *tokens, uint32_t n_tokens)
{
    int32_t drafts[DRAFT_TOKENS_MAX + 1];
    struct drafter *d;
    ASSERT(c->ops->create(c, NULL, &d, NULL) == OK);
    struct draft_seq *s = c->ops->begin(d, TOKENS_MAX);
    for (uint32_t n = 1; n <= n_tokens; n++) {
        struct draft_request r = {
            .seq = s, .tokens = tokens, .n_tokens = n, .n_max = c->n_tokens, .drafts = drafts
        };
        for (uint32_t i = 0; i <= DRAFT_TOKENS_MAX; i++) drafts[i] = UNTOUCHED;
        c->ops->propose(d, &r, 1);
        ASSERT(r.n <= r.n_max && r.level < DRAFT_LEVELS);
        for (uint32_t i = 0; i < r.n; i++) ASSERT(drafts[i] >= 0 && drafts[i] < 256);
        for (uint32_t i = r.n_max; i <= DRAFT_TOKENS_MAX; i++) ASSERT(drafts[i] == UNTOUCHED);
    }
    c->ops->end(d, s);
    c->ops->free(d);
}

/* An input that is no configuration is drafted by those that need no weights. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct drafter_ops *const OPS[] = { &drafter_ngram_ops, &drafter_suffix_ops };
    struct draft_config c = { 0 };
    struct buf notes = { 0 };
    struct err err = { 0 };
    int32_t tokens[TOKENS_MAX];
    const uint32_t n = size < TOKENS_MAX ? (uint32_t)size : TOKENS_MAX;
    for (uint32_t i = 0; i < n; i++) tokens[i] = data[i];
    if (draft_config_parse((struct str){ (const char *)data, size }, &c, &notes, &err) != OK) {
        ASSERT(err.text[0] != 0);
        c = (struct draft_config){ .n_tokens = n % DRAFT_TOKENS_MAX + 1,
                                   .lookup_min = n % 5 + 1,
                                   .lookup_max = n % 5 + 1 + n % 7 };
    }
    ASSERT(c.n_tokens >= 1 && c.n_tokens <= DRAFT_TOKENS_MAX && c.lookup_min >= 1 &&
           c.lookup_min <= c.lookup_max && c.lookup_max <= DRAFT_LOOKUP_MAX);
    for (size_t i = 0; i < COUNT_OF(OPS); i++) {
        c.ops = OPS[i];
        draft(&c, tokens, n);
    }
    buf_release(&notes);
    return 0;
}
