/* prefix_pick.c - see prefix_pick.h. */
#include "scheduler/prefix/prefix_pick.h"

#include <stddef.h>

/* A node that may be taken. */
struct prefix_option {
    uint64_t node;
    unsigned flags; /* prefix_use_flag */
    bool is_keeper; /* of prompts like this one, once it is taken: the query names its kind */
    uint64_t cost;  /* for the stage that is looked at */
    struct prefix_kept kept;
    struct prefix_node state;
};

struct findings {
    struct prefix_option list[PREFIX_FOUND_MAX];
    size_t n;
};

static uint64_t at_most(uint64_t v, uint64_t max) { return v < max ? v : max; }

static bool is_choice(const struct prefix_query *q, uint64_t node)
{
    return node == q->compute || (q->decode && node == q->decode);
}

static bool is_avoided(const struct prefix_query *q, uint64_t node)
{
    for (uint32_t i = 0; i < q->n_avoid; i++)
        if (q->avoid[i] == node) return true;
    return false;
}

static struct prefix_option option_of(const struct prefix_lookup *l, uint64_t node)
{
    const struct prefix_query *q = l->query;
    struct prefix_option o = { .node = node };
    l->look(l->arg, node, &o.state);
    for (uint32_t i = 0; i < q->n_uses && !o.is_keeper; i++) {
        if (q->uses[i].kind != o.state.bid.kind) continue;
        o.is_keeper = true;
        o.flags = q->uses[i].flags;
    }
    return o;
}

/* ---- who has it ---- */

static const struct prefix_option *found_of(const struct findings *f, uint64_t node)
{
    for (size_t i = 0; i < f->n; i++)
        if (f->list[i].node == node) return &f->list[i];
    return NULL;
}

static void try_keeper(const struct prefix_lookup *l, const struct prefix_keeper *k,
                       uint32_t tokens, struct findings *f)
{
    const struct prefix_query *q = l->query;
    if (!k->node || l->now_s >= (uint64_t)k->at_s + PREFIX_TTL_S || found_of(f, k->node)) return;
    struct prefix_option o = option_of(l, k->node);
    const bool is_fit = (o.flags & (PREFIX_COMPUTES | PREFIX_TAKES)) && !is_avoided(q, k->node);
    if (!o.is_keeper || !o.state.lives || !(is_fit || is_choice(q, k->node))) return;
    if (k->at_s <= o.state.dropped_s) return;
    o.kept.tokens = tokens < q->n_tokens ? tokens : q->n_tokens;
    o.kept.at_s = l->now_s >= (uint64_t)k->at_s + PREFIX_YOUNG_S ? k->at_s : 0;
    f->list[f->n++] = o;
}

static void find(const struct prefix_lookup *l, struct findings *f)
{
    const struct prefix_query *q = l->query;
    for (uint32_t i = q->n_rungs; i > 0 && f->n == 0; i--) {
        const struct prefix_rung *r = &q->rungs[i - 1];
        const struct prefix_slot *s = prefix_table_find(l->table, r, l->now_s);
        for (size_t k = 0; s && k < PREFIX_KINDS * PREFIX_KEEPERS; k++)
            try_keeper(l, &s->keepers[k / PREFIX_KEEPERS][k % PREFIX_KEEPERS], r->tokens, f);
    }
}

/* ---- costs ---- */

static uint64_t seqs_of(const struct prefix_option *o)
{
    const uint32_t counted = o->state.seqs, said = o->state.bid.seqs;
    return at_most(counted > said ? counted : said, PREFIX_LOAD_MAX);
}

/* Nanoseconds for each token that waits. */
static uint64_t per_load(const struct prefix_query *q, const struct prefix_option *o)
{
    const uint64_t ns = at_most(o->state.bid.ns ? o->state.bid.ns : q->ns, PREFIX_COST_MAX);
    return at_most(ns * (o->flags & PREFIX_DECODE ? 1 + seqs_of(o) : 1), PREFIX_COST_MAX);
}

/* Nanoseconds until it should be through with what the directory has counted on it. */
static uint64_t wait_ns(const struct prefix_query *q, const struct prefix_option *o)
{
    const uint64_t counted = per_load(q, o) * at_most(o->state.tokens, PREFIX_LOAD_MAX);
    return at_most(counted, 1000 * at_most(o->state.wait_us, PREFIX_WAIT_US_MAX));
}

static uint64_t compute_cost(const struct prefix_query *q, const struct prefix_option *o)
{
    const uint64_t ns = per_load(q, o), said = o->state.tokens ? 0 : o->state.bid.waiting,
                   uncounted = at_most(said + PREFIX_SEQ_TOKENS * seqs_of(o), PREFIX_LOAD_MAX),
                   per_token = o->state.bid.grouped ? ns / 4 : ns * 6 / 5;
    return ns * uncounted + wait_ns(q, o) + per_token * (q->n_tokens - o->kept.tokens);
}

static uint64_t decode_cost(const struct prefix_query *q, const struct prefix_option *o)
{
    const uint64_t per_token = o->state.bid.grouped ? 1 : 4;
    return PREFIX_SEQ_KV * seqs_of(o) + per_token * (q->n_tokens - o->kept.tokens);
}

/* ---- the choice or a keeper ---- */

static bool is_alone(const struct prefix_query *q, const struct prefix_option *o)
{
    return !q->decode || (o->node != q->compute && (o->flags & PREFIX_ALONE));
}

static bool is_taken(const struct prefix_lookup *l, const struct prefix_option *o, bool computes)
{
    const struct prefix_node *n = &o->state;
    if (!n->lives || (computes && !is_alone(l->query, o))) return n->lives;
    return n->seqs < n->max_seqs && (uint64_t)n->blocks + l->blocks <= n->n_blocks &&
           (is_choice(l->query, o->node) || l->query->blocks <= n->n_blocks);
}

/* May a keeper stand in for the choice? */
static bool may(const struct prefix_query *q, const struct prefix_option *o, bool computes)
{
    if (!(o->flags & (computes ? PREFIX_COMPUTES : PREFIX_TAKES)) || is_avoided(q, o->node))
        return false;
    if (!computes || !q->decode || !(o->flags & PREFIX_DECODE)) return true;
    return q->n_tokens - o->kept.tokens <= PREFIX_REST_MAX && seqs_of(o) <= PREFIX_ALONE_SEQS;
}

/* False: neither the cheapest nor the choice can be taken. */
static bool best_of(const struct prefix_lookup *l, const struct findings *found, bool computes,
                    struct prefix_option *out)
{
    const struct prefix_query *q = l->query;
    const uint64_t node = computes ? q->compute : q->decode;
    const struct prefix_option *f = found_of(found, node);
    struct prefix_option choice = f ? *f : option_of(l, node);
    choice.cost = computes ? compute_cost(q, &choice) : decode_cost(q, &choice);
    *out = choice;
    for (size_t i = 0; i < found->n; i++) {
        struct prefix_option one = found->list[i];
        if (one.node == node || !may(q, &one, computes)) continue;
        one.cost = computes ? compute_cost(q, &one) : decode_cost(q, &one);
        if (one.cost < out->cost) *out = one;
    }
    if (is_taken(l, out, computes)) return true;
    *out = choice;
    return is_taken(l, out, computes);
}

/* Who was found has more than a node that was not. */
static void name_keeper(const struct findings *found, struct prefix_picked *p)
{
    if (found->n == 0 || found_of(found, p->compute)) return;
    p->expected.keeper = found->list[0].node;
    p->expected.keeper_tokens = found->list[0].kept.tokens;
}

enum status prefix_pick(const struct prefix_lookup *l, struct prefix_picked *out)
{
    const struct prefix_query *q = l->query;
    struct findings found = { .n = 0 };
    struct prefix_option c, d;
    find(l, &found);
    if (!best_of(l, &found, true, &c)) return ERR_BUSY;
    struct prefix_picked p = { .compute = c.node,
                               .n_compute = q->n_tokens - c.kept.tokens,
                               .expected = { .known = true, .compute = c.kept } };
    p.busy_us = (wait_ns(q, &c) + per_load(q, &c) * p.n_compute) / 1000;
    if (c.is_keeper) p.keep[(c.flags & PREFIX_DECODE) != 0] = c.node;
    if (!is_alone(q, &c)) {
        if (!best_of(l, &found, false, &d)) return ERR_BUSY;
        if (d.is_keeper) p.keep[1] = d.node;
        if (d.node != c.node) { /* else it does both */
            p.decode = d.node;
            p.expected.decode = d.kept;
        }
    }
    name_keeper(&found, &p);
    *out = p;
    return OK;
}
