/* draft_book.h - a drafter that knows the answers, for tests of the engine: it drafts what a
 * request was answered without drafts, or what it was not.
 *
 * Thread: the test's fills in a book before the engine starts; the engine's reads it. */
#ifndef BATON_TESTS_UNIT_ENGINE_DRAFT_BOOK_H
#define BATON_TESTS_UNIT_ENGINE_DRAFT_BOOK_H

#include "tests/unit/engine/engine_rig.h"

enum draft_book_kind {
    DRAFTS_RIGHT, /* all */
    DRAFTS_WRONG, /* all */
    DRAFTS_MIXED, /* any number, most of them right */
    DRAFT_BOOK_KINDS
};

/* Who drafts, in tests of ranks. */
enum draft_source { NO_DRAFTS, DRAFTS_OF_BOOK, DRAFTS_OF_LAYER };

struct draft_book {
    struct draft_config config; /* for rig_options.draft */
    enum draft_book_kind kind;
    const struct engine_request *reqs; /* [n] */
    const struct answer *answers;      /* [n] of these, whole */
    uint32_t n;
};

/* The answer that the tokens are the beginning of; NULL: none. */
__attribute__((unused)) static const struct answer *draft_book_find(const struct draft_book *b,
                                                                    const int32_t *tokens,
                                                                    uint32_t n_tokens)
{
    for (uint32_t i = 0; i < b->n; i++) {
        const uint32_t n_prompt = b->reqs[i].n_prompt;
        if (n_tokens < n_prompt || n_tokens - n_prompt > b->answers[i].n_out ||
            memcmp(tokens, b->reqs[i].tokens, n_prompt * sizeof *tokens) != 0)
            continue;
        uint32_t k = n_prompt;
        while (k < n_tokens && tokens[k] == b->answers[i].out[k - n_prompt].id) k++;
        if (k == n_tokens) return &b->answers[i];
    }
    return NULL;
}

__attribute__((unused)) static uint32_t draft_book_give(void *arg, const int32_t *tokens,
                                                        uint32_t n_tokens, uint32_t n_max,
                                                        int32_t *drafts)
{
    const struct draft_book *b = arg;
    const struct answer *a = draft_book_find(b, tokens, n_tokens);
    if (!a) return 0;
    const uint32_t n_out = n_tokens - b->reqs[a - b->answers].n_prompt,
                   most = b->kind == DRAFTS_MIXED
                              ? (uint32_t)(rng_uniform(5, a->id, n_tokens) * (n_max + 1))
                              : n_max;
    uint32_t n = 0;
    for (; n < most && n_out + n < a->n_out; n++) {
        const bool right = b->kind == DRAFTS_RIGHT ||
                           (b->kind == DRAFTS_MIXED && rng_uniform(6, a->id, n_tokens + n) < 0.8);
        drafts[n] = right ? a->out[n_out + n].id : (a->out[n_out + n].id + 1) % RIG_VOCAB;
    }
    return n;
}

/* A book of n answers that drafts up to n_tokens tokens, and of which everything is verified. */
__attribute__((unused)) static void draft_book_init(struct draft_book *b, enum draft_book_kind kind,
                                                    uint32_t n_tokens,
                                                    const struct engine_request *reqs,
                                                    const struct answer *answers, uint32_t n)
{
    *b = (struct draft_book){
        .config = { .ops = &drafter_given_ops,
                    .n_tokens = n_tokens,
                    .verify_all = true,
                    .given = draft_book_give,
                    .given_arg = b, },
        .kind = kind,
        .reqs = reqs,
        .answers = answers,
        .n = n,
    };
}

__attribute__((unused)) static void draft_source_set(struct rig_options *o, enum draft_source from,
                                                     const struct draft_book *b)
{
    static const struct draft_config LAYER = { .ops = &drafter_mtp_ops,
                                               .n_tokens = 3,
                                               .verify_all = true };
    o->draft = from == DRAFTS_OF_BOOK ? &b->config : from == DRAFTS_OF_LAYER ? &LAYER : NULL;
    o->draft_layer = from == DRAFTS_OF_LAYER;
}

#endif
