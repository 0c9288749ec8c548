/* prefix_pick.c - see prefix_pick.h. */
#include "scheduler/prefix/prefix_pick.h"

#include <stddef.h>

struct found {
    uint64_t node;
    struct prefix_kept kept;
    struct prefix_node state;
};

struct findings {
    struct found list[PREFIX_FOUND_MAX];
    size_t n;
};

static const struct prefix_offer *offer_of(const struct prefix_offer *offers, uint32_t n,
                                           uint64_t node)
{
    for (uint32_t i = 0; i < n; i++)
        if (offers[i].node == node) return &offers[i];
    return NULL;
}

static bool is_offered(const struct prefix_query *q, uint64_t node)
{
    const struct prefix_offer *c = offer_of(q->compute, q->n_compute, node),
                              *d = offer_of(q->decode, q->n_decode, node);
    return (c && !c->forgets) || (d && !d->forgets);
}

static const struct found *found_of(const struct findings *f, uint64_t node)
{
    for (size_t i = 0; i < f->n; i++)
        if (f->list[i].node == node) return &f->list[i];
    return NULL;
}

static void try_keeper(const struct prefix_lookup *l, const struct prefix_keeper *k,
                       uint32_t tokens, struct findings *f)
{
    const struct prefix_query *q = l->query;
    struct found *next = &f->list[f->n];
    if (!k->node || l->now_s >= (uint64_t)k->at_s + PREFIX_TTL_S || !is_offered(q, k->node)) return;
    l->look(l->arg, k->node, &next->state);
    if (k->at_s <= next->state.dropped_s || found_of(f, k->node)) return;
    next->node = k->node;
    next->kept.tokens = tokens < q->n_tokens ? tokens : q->n_tokens;
    next->kept.at_s = l->now_s >= (uint64_t)k->at_s + PREFIX_YOUNG_S ? k->at_s : 0;
    f->n++;
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

static uint64_t at_most(uint64_t v, uint64_t max) { return v < max ? v : max; }

/* Nanoseconds until it should be through with what the directory has counted on it. */
static uint64_t wait_ns(const struct prefix_offer *o, const struct prefix_node *n)
{
    const uint64_t counted = o->per_load * at_most(n->tokens, PREFIX_LOAD_MAX);
    return at_most(counted, 1000 * at_most(n->wait_us, PREFIX_WAIT_US_MAX));
}

static uint64_t compute_cost(const struct prefix_offer *o, const struct prefix_node *n,
                             uint32_t tokens)
{
    return (uint64_t)o->per_load * o->load + wait_ns(o, n) + (uint64_t)o->per_token * tokens;
}

static uint64_t decode_cost(const struct prefix_offer *o, const struct prefix_node *n,
                            uint32_t tokens)
{
    const uint64_t seqs = n->seqs > o->load ? n->seqs : o->load;
    return o->per_load * at_most(seqs, PREFIX_LOAD_MAX) + (uint64_t)o->per_token * tokens;
}

static bool has_place(const struct prefix_lookup *l, const struct prefix_node *n)
{
    return n->seqs < n->max_seqs && (uint64_t)n->blocks + l->blocks <= n->n_blocks;
}

/* An offer and the node that makes it. */
struct prefix_option {
    const struct prefix_offer *offer; /* NULL: none */
    uint64_t cost;
    struct prefix_kept kept;
    struct prefix_node state;
};

static bool is_taken(const struct prefix_lookup *l, const struct prefix_option *o, bool computes)
{
    return o->state.lives && ((computes && !o->offer->alone) || has_place(l, &o->state));
}

static bool is_too_long(const struct prefix_query *q, const struct prefix_offer *o, uint32_t rest)
{
    return o->alone && o->decodes && !q->compute[0].alone && rest > PREFIX_REST_MAX;
}

static struct prefix_option option_of(const struct prefix_lookup *l, const struct prefix_offer *o,
                                      const struct findings *found, bool computes)
{
    const struct found *f = found_of(found, o->node);
    struct prefix_option out = { .offer = o };
    if (f) {
        out.kept = f->kept;
        out.state = f->state;
    } else {
        l->look(l->arg, o->node, &out.state);
    }
    const uint32_t rest = l->query->n_tokens - out.kept.tokens;
    out.cost = computes ? compute_cost(o, &out.state, rest) : decode_cost(o, &out.state, rest);
    return out;
}

/* .offer NULL: neither the cheapest nor the choice can be taken. */
static struct prefix_option best_of(const struct prefix_lookup *l,
                                    const struct prefix_offer *offers, uint32_t n, bool computes,
                                    const struct findings *found)
{
    const struct prefix_query *q = l->query;
    const struct prefix_option choice = option_of(l, &offers[0], found, computes);
    struct prefix_option best = choice;
    for (size_t i = 0; i < found->n; i++) {
        const struct prefix_offer *o = offer_of(offers, n, found->list[i].node);
        if (!o || o == &offers[0]) continue;
        if (computes && is_too_long(q, o, q->n_tokens - found->list[i].kept.tokens)) continue;
        const struct prefix_option one = option_of(l, o, found, computes);
        if (one.cost < best.cost) best = one;
    }
    if (is_taken(l, &best, computes)) return best;
    return is_taken(l, &choice, computes) ? choice : (struct prefix_option){ 0 };
}

/* Who was found has more than a node that was not. */
static void name_keeper(const struct findings *found, struct prefix_picked *p)
{
    if (found->n == 0 || found_of(found, p->compute->node)) return;
    p->expected.keeper = found->list[0].node;
    p->expected.keeper_tokens = found->list[0].kept.tokens;
}

enum status prefix_pick(const struct prefix_lookup *l, struct prefix_picked *out)
{
    const struct prefix_query *q = l->query;
    struct findings found = { .n = 0 };
    find(l, &found);
    const struct prefix_option c = best_of(l, q->compute, q->n_compute, true, &found);
    if (!c.offer) return ERR_BUSY;
    struct prefix_picked p = { .compute = c.offer,
                               .n_compute = q->n_tokens - c.kept.tokens,
                               .expected = { .known = true, .compute = c.kept } };
    p.busy_us = (wait_ns(c.offer, &c.state) + (uint64_t)c.offer->per_load * p.n_compute) / 1000;
    if (!c.offer->alone) {
        const struct prefix_option d = best_of(l, q->decode, q->n_decode, false, &found);
        if (!d.offer) return ERR_BUSY;
        p.decode = d.offer;
        p.expected.decode = d.kept;
    }
    name_keeper(&found, &p);
    *out = p;
    return OK;
}

void prefix_note_picked(struct prefix_table *t, const struct prefix_query *q,
                        const struct prefix_picked *p, uint32_t now_s)
{
    uint64_t nodes[PREFIX_KINDS] = { 0 };
    if (!p->compute->forgets) nodes[p->compute->decodes] = p->compute->node;
    if (p->decode && !p->decode->forgets) nodes[1] = p->decode->node;
    if (nodes[0] || nodes[1]) prefix_table_note(t, q->rungs, q->n_rungs, nodes, now_s);
}
