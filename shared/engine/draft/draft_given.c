/* draft_given.c - the plain drafter: it drafts what its caller says. Thread: engine. */
#include "shared/base/assert.h"
#include "shared/base/mem.h"
#include "shared/engine/draft/draft.h"

static enum status create(const struct draft_config *c, struct engine *e, struct drafter **out,
                          struct err *err)
{
    if (!c->given) return err_set(err, ERR_CONFIG, "nobody gives the drafts of drafter given");
    return drafter_create_plain(c, e, out, err);
}

static struct draft_seq *begin(struct drafter *d, uint32_t n_tokens_max)
{
    struct draft_seq *s = mem_try_calloc(1, sizeof *s);
    (void)d;
    if (s) s->n_tokens_max = n_tokens_max;
    return s;
}

static void end(struct drafter *d, struct draft_seq *s)
{
    (void)d;
    mem_free(s);
}

static void propose(struct drafter *d, struct draft_request *requests, uint32_t n)
{
    const struct draft_config *c = &d->config;
    for (uint32_t i = 0; i < n; i++) {
        struct draft_request *r = &requests[i];
        r->level = 0;
        r->n = c->given(c->given_arg, r->tokens, r->n_tokens, r->n_max, r->drafts);
        ASSERT(r->n <= r->n_max);
    }
}

const struct drafter_ops drafter_given_ops = {
    .name = "given",
    .create = create,
    .free = drafter_free_plain,
    .begin = begin,
    .observe = drafter_observe_nothing,
    .submit = drafter_submit_nothing,
    .collect = drafter_observe_nothing,
    .propose = propose,
    .end = end,
};
