/* draft_suffix.c - what most often followed the last tokens, by counts over the whole sequence.
 *
 * The positions that agree with the end in at least l tokens vote token by token for how it goes
 * on; those that voted otherwise drop out, and a draft is worth the share of the votes that led to
 * it. Of a few lengths l the one with the largest sum of shares is taken: long matches are few and
 * sure, short ones many. Where a text went on in different ways, drafts end early. Published as
 * suffix decoding (Oliaro et al., 2024), there over a tree of all answers; here over the lists of
 * two indexes. Thread: engine. */
#include "shared/base/mem.h"
#include "shared/engine/draft/draft.h"
#include "shared/engine/draft/token_index.h"

enum {
    LONG_MATCH = 8,      /* what the second index finds: matches that the first one's lists hide */
    CANDIDATES_MAX = 16, /* positions of an index */
    VOTERS_MAX = 2 * CANDIDATES_MAX
};
static const float SHARE_MIN = 0.2f, /* of the votes, for a draft */
    UNANIMOUS = 0.7f;                /* mean share of drafts that are as sure as their match */

struct suffix_seq {
    struct draft_seq base;
    struct token_index near, far; /* by lookup_min tokens; by LONG_MATCH */
};

struct voter {
    uint32_t pos, agreed;
};

/* How a text goes on. */
struct guess {
    int32_t tokens[DRAFT_TOKENS_MAX];
    uint32_t n, agreed;
    float worth;
};

/* ---- life ---- */

static struct suffix_seq *seq_of(struct draft_seq *base) { return (struct suffix_seq *)base; }

static void end(struct drafter *d, struct draft_seq *base)
{
    struct suffix_seq *s = seq_of(base);
    (void)d;
    if (!s) return;
    token_index_release(&s->near);
    token_index_release(&s->far);
    mem_free(s);
}

static struct draft_seq *begin(struct drafter *d, uint32_t n_tokens_max)
{
    struct suffix_seq *s = mem_try_calloc(1, sizeof *s);
    if (!s) return NULL;
    s->base.n_tokens_max = n_tokens_max;
    if (token_index_init(&s->near, d->config.lookup_min, n_tokens_max) == OK &&
        token_index_init(&s->far, LONG_MATCH, n_tokens_max) == OK)
        return &s->base;
    end(d, &s->base);
    return NULL;
}

/* ---- votes ---- */

/* Adds the positions of x's list that agree in [least, most) tokens. */
static uint32_t gather(const struct token_index *x, const struct draft_request *r, uint32_t least,
                       uint32_t most, struct voter *to)
{
    uint32_t n = 0, pos = token_index_find(x, r->tokens, r->n_tokens);
    for (int i = 0; i < CANDIDATES_MAX && pos > 0; i++, pos = token_index_before(x, pos)) {
        const uint32_t agreed = token_index_agree(r->tokens, r->n_tokens, pos, DRAFT_LOOKUP_MAX);
        if (agreed >= least && agreed < most) to[n++] = (struct voter){ pos, agreed };
    }
    return n;
}

/* The token at a position at or behind the end of the known ones is a guess before it. */
static int32_t token_at(const struct draft_request *r, const struct guess *g, uint32_t pos)
{
    return pos < r->n_tokens ? r->tokens[pos] : g->tokens[pos - r->n_tokens];
}

/* The token that most of the voters have next; of equal ones that of the first. */
static int32_t elect(const struct draft_request *r, const struct guess *g,
                     const struct voter *voters, uint32_t n, uint32_t *votes)
{
    int32_t best = -1;
    *votes = 0;
    for (uint32_t i = 0; i < n; i++) {
        const int32_t id = token_at(r, g, voters[i].pos + g->n);
        uint32_t same = 0;
        for (uint32_t k = 0; k < n; k++) same += token_at(r, g, voters[k].pos + g->n) == id;
        if (same <= *votes) continue;
        *votes = same;
        best = id;
    }
    return best;
}

/* Guesses by the voters that agree in at least `least` tokens. */
static struct guess guess_by(const struct draft_request *r, const struct voter *all, uint32_t n_all,
                             uint32_t least)
{
    struct voter voters[VOTERS_MAX];
    struct guess g = { .agreed = least };
    uint32_t n = 0, votes;
    for (uint32_t i = 0; i < n_all; i++)
        if (all[i].agreed >= least) voters[n++] = all[i];
    for (const float n_first = (float)n; g.n < r->n_max;) {
        const int32_t id = elect(r, &g, voters, n, &votes);
        if ((float)votes < SHARE_MIN * n_first) break;
        uint32_t kept = 0;
        for (uint32_t i = 0; i < n; i++)
            if (token_at(r, &g, voters[i].pos + g.n) == id) voters[kept++] = voters[i];
        n = kept;
        g.tokens[g.n++] = id;
        g.worth += (float)votes / n_first;
    }
    return g;
}

static uint32_t longest(const struct voter *voters, uint32_t n)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < n; i++)
        if (voters[i].agreed > most) most = voters[i].agreed;
    return most;
}

/* The best guess by the longest match, by half of it, and so on. */
static struct guess guess(const struct draft_config *c, const struct draft_request *r)
{
    struct voter voters[VOTERS_MAX];
    const struct suffix_seq *s = seq_of(r->seq);
    struct guess best = { 0 };
    const uint32_t long_match = c->lookup_min > LONG_MATCH ? c->lookup_min : LONG_MATCH;
    uint32_t n = gather(&s->far, r, long_match, UINT32_MAX, voters);
    n += gather(&s->near, r, c->lookup_min, LONG_MATCH, voters + n);
    for (uint32_t least = longest(voters, n); n > 0;) {
        const struct guess g = guess_by(r, voters, n, least);
        if (g.worth > best.worth) best = g;
        if (least <= c->lookup_min) break;
        least = least / 2 > c->lookup_min ? least / 2 : c->lookup_min;
    }
    return best;
}

static void propose(struct drafter *d, struct draft_request *requests, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        struct draft_request *r = &requests[i];
        struct suffix_seq *s = seq_of(r->seq);
        const bool near = token_index_add(&s->near, r->tokens, r->n_tokens),
                   far = token_index_add(&s->far, r->tokens, r->n_tokens);
        r->n = r->level = 0;
        if (!near || !far) continue;
        const struct guess g = guess(&d->config, r);
        for (; r->n < g.n; r->n++) r->drafts[r->n] = g.tokens[r->n];
        r->level = draft_level_of(g.agreed);
        if (r->level > 0 && g.worth < UNANIMOUS * (float)g.n) r->level--;
    }
}

const struct drafter_ops drafter_suffix_ops = {
    .name = "suffix",
    .create = drafter_create_plain,
    .free = drafter_free_plain,
    .begin = begin,
    .observe = drafter_observe_nothing,
    .submit = drafter_submit_nothing,
    .collect = drafter_observe_nothing,
    .propose = propose,
    .end = end,
};
