/* prefix_table.c - see prefix_table.h. */
#include "scheduler/prefix/prefix_table.h"

#include "shared/base/mem.h"

struct prefix_table *prefix_table_create(void)
{
    return mem_try_calloc(1, sizeof(struct prefix_table));
}

void prefix_table_free(struct prefix_table *t) { mem_free(t); }

static bool is_fresh(uint32_t at_s, uint32_t now_s)
{
    return at_s && now_s < (uint64_t)at_s + PREFIX_TTL_S;
}

bool prefix_table_is_used(const struct prefix_table *t, uint32_t now_s)
{
    return is_fresh(t->noted_s, now_s);
}

/* The first of its kind is the newest. */
static bool has_fresh(const struct prefix_slot *s, uint32_t now_s)
{
    for (size_t kind = 0; kind < PREFIX_KINDS; kind++)
        if (is_fresh(s->keepers[kind][0].at_s, now_s)) return true;
    return false;
}

const struct prefix_slot *prefix_table_find(const struct prefix_table *t,
                                            const struct prefix_rung *r, uint32_t now_s)
{
    const struct prefix_slot *s = &t->slots[r->slot];
    return s->tag == r->tag && has_fresh(s, now_s) ? s : NULL;
}

static bool is_noted(const struct prefix_keeper *newest, uint64_t node, uint32_t now_s)
{
    return newest->node == node && now_s < (uint64_t)newest->at_s + PREFIX_FRESH_S;
}

static void note(struct prefix_keeper keepers[PREFIX_KEEPERS], uint64_t node, uint32_t now_s)
{
    size_t at = 0; /* the place of the one that goes: the node's own, or the oldest */
    while (at + 1 < PREFIX_KEEPERS && keepers[at].node != node) at++;
    for (; at > 0; at--) keepers[at] = keepers[at - 1];
    keepers[0] = (struct prefix_keeper){ node, now_s };
}

/* Both kinds together, as in the script of Redis. */
static void note_slot(struct prefix_slot *s, const uint64_t nodes[PREFIX_KINDS], uint32_t now_s)
{
    bool are_noted = true;
    for (size_t kind = 0; kind < PREFIX_KINDS; kind++)
        are_noted &= !nodes[kind] || is_noted(&s->keepers[kind][0], nodes[kind], now_s);
    for (size_t kind = 0; kind < PREFIX_KINDS && !are_noted; kind++)
        if (nodes[kind]) note(s->keepers[kind], nodes[kind], now_s);
}

void prefix_table_note(struct prefix_table *t, const struct prefix_rung *rungs, uint32_t n_rungs,
                       const uint64_t nodes[PREFIX_KINDS], uint32_t now_s)
{
    for (uint32_t i = 0; i < n_rungs; i++) {
        struct prefix_slot *s = &t->slots[rungs[i].slot];
        if (s->tag != rungs[i].tag) *s = (struct prefix_slot){ .tag = rungs[i].tag };
        note_slot(s, nodes, now_s);
    }
    if (n_rungs) t->noted_s = now_s;
}
