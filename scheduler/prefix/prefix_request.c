/* prefix_request.c - see prefix_request.h. */
#include "scheduler/prefix/prefix_request.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/request.h"
#include "shared/base/mem.h"

void prefix_entry_register(struct prefix_entry *p, struct metrics *m)
{
    p->asked_tokens = metrics_counter(m, "baton_prefix_asked_tokens_total", "",
                                      "Prompt tokens of placements that asked the directory for "
                                      "nodes with the beginning of the prompt.");
    p->expected_tokens = metrics_counter(m, "baton_prefix_expected_tokens_total", "",
                                         "Of those, what the computing node should have cached.");
    p->cached_tokens = metrics_counter(m, "baton_prefix_cached_tokens_total", "",
                                       "Of those, what the computing node had cached.");
    p->by_load = metrics_counter(m, "baton_prefix_placements_total", "by=\"load\"",
                                 "Such placements: on the nodes with the least load, or on others "
                                 "that had more of the prompt.");
    p->by_prefix = metrics_counter(m, "baton_prefix_placements_total", "by=\"prefix\"",
                                   "Such placements: on the nodes with the least load, or on "
                                   "others that had more of the prompt.");
    p->missed = metrics_counter(m, "baton_prefix_missed_total", "",
                                "Nodes that had less of a prompt than they should have had.");
    p->handed_back = metrics_counter(m, "baton_prefix_handed_back_total", "",
                                     "Of those, decode nodes that handed the request back, since "
                                     "they would have had to compute too much of it.");
}

void prefix_request_release(struct prefix_state *s)
{
    mem_free(s->ladder);
    s->ladder = NULL;
}

/* Over the prompt alone: what was generated may have other keys (two_attention_paths of a model),
 * and no other prompt begins with it yet. */
static const struct prefix_ladder *ladder_of(struct request *r, uint64_t model,
                                             uint32_t block_tokens)
{
    struct prefix_ladder *l = r->prefix.ladder;
    if (l && l->block_tokens == block_tokens && l->model == model) return l;
    if (!l) l = r->prefix.ladder = MEM_NEW(struct prefix_ladder);
    prefix_ladder_make(l, model, r->cache_salt, r->tokens, r->n_prompt, block_tokens);
    return l;
}

const struct node_record *prefix_request_keeper(const struct entry *e, const struct request *r,
                                                uint32_t *n_tokens)
{
    const struct prefix_expected *x = &r->prefix.expected;
    const struct node_record *n = x->keeper ? view_find(&e->view, x->keeper) : NULL;
    if (!n || n->is_lost) return NULL;
    *n_tokens = x->keeper_tokens < r->n_tokens ? x->keeper_tokens : r->n_tokens;
    return n;
}

static void trace_expected(const struct entry *e, struct request *r)
{
    struct gen_trace *t = &r->trace;
    uint32_t n_kept = 0;
    const struct node_record *keeper = prefix_request_keeper(e, r, &n_kept);
    t->n_expected = r->prefix.expected.compute.tokens;
    t->n_decode_expected = r->prefix.expected.decode.tokens;
    t->n_kept = n_kept;
    snprintf(t->kept_node, sizeof t->kept_node, "%s", keeper ? keeper->name : "");
}

const struct prefix_query *prefix_request_ask(struct entry *e, struct request *r,
                                              const struct place_result *chosen,
                                              struct prefix_room *room)
{
    struct prefix_entry *p = &e->prefix;
    const struct place_uses *u = &room->uses;
    const struct node_record *computes = chosen->prefill ? chosen->prefill : chosen->decode;
    r->prefix.expected = (struct prefix_expected){ 0 };
    trace_expected(e, r);
    /* Positions that are cached have no logprobs. */
    if (!u->n_uses || r->prompt_logprobs || r->n_tokens > PREFIX_LOAD_MAX) return NULL;
    const struct prefix_ladder *l = ladder_of(r, computes->model, u->block_tokens);
    if (l->n == 0) return NULL;
    room->query = (struct prefix_query){ .n_tokens = r->n_tokens,
                                         .rungs = room->rungs,
                                         .n_rungs = prefix_ladder_ask(l, r->n_tokens, room->rungs),
                                         .compute = computes->node,
                                         .decode = chosen->prefill ? chosen->decode->node : 0,
                                         .uses = u->uses,
                                         .n_uses = u->n_uses,
                                         .avoid = u->avoid,
                                         .n_avoid = u->n_avoid,
                                         .ns = u->ns,
                                         .blocks = u->blocks,
                                         .drops = room->drops,
                                         .n_drops = p->n_drops };
    memcpy(room->drops, p->drops, p->n_drops * sizeof *p->drops);
    p->n_drops = 0; /* one that gets lost is told again by the next that finds it */
    return &room->query;
}

/* A decode node stands in for the two nodes of the choice: the sequences that run there wait for
 * what it computes. */
static uint32_t most_computed(const struct entry *e, const struct request *r,
                              const struct prefix_placed *on)
{
    const struct node_record *n = view_find(&e->view, on->decode);
    const bool stands_in = r->next_prefill.node && !on->prefill && n && n->role == ROLE_DECODE;
    return stands_in ? PREFIX_REST_MAX : 0;
}

void prefix_request_answered(struct entry *e, struct request *r, const struct prefix_placed *on,
                             bool is_choice)
{
    struct prefix_entry *p = &e->prefix;
    r->prefix.expected = on->expected;
    r->prefix.most_computed = most_computed(e, r, on);
    trace_expected(e, r);
    if (!on->expected.known) return;
    counter_add(p->asked_tokens, r->n_tokens);
    counter_add(p->expected_tokens, on->expected.compute.tokens);
    counter_add(is_choice ? p->by_load : p->by_prefix, 1);
}

/* When there is no room, those that are told already are enough for now. */
static void note_drop(struct prefix_entry *p, uint64_t node, uint32_t at_s)
{
    uint32_t i = 0;
    while (i < p->n_drops && p->drops[i].node != node) i++;
    if (i == PREFIX_DROPS_MAX) return;
    if (i == p->n_drops) p->drops[p->n_drops++] = (struct prefix_drop){ .node = node };
    if (p->drops[i].at_s < at_s) p->drops[i].at_s = at_s;
}

static void check(struct entry *e, struct prefix_kept *expected, uint64_t node, uint32_t n_cached)
{
    if (n_cached < expected->tokens) {
        counter_add(e->prefix.missed, 1);
        if (expected->at_s) note_drop(&e->prefix, node, expected->at_s);
    }
    *expected = (struct prefix_kept){ 0 }; /* one answer is enough */
}

void prefix_request_computed(struct entry *e, struct request *r, uint32_t n_cached)
{
    const uint64_t node = r->prefill.node ? r->prefill.node : r->decode.node;
    if (!r->prefix.expected.known) return;
    counter_add(e->prefix.cached_tokens, n_cached);
    check(e, &r->prefix.expected.compute, node, n_cached);
}

void prefix_request_granted(struct entry *e, struct request *r, uint32_t n_cached)
{
    check(e, &r->prefix.expected.decode, r->decode.node, n_cached);
}

/* Whoever was not told of a limit has other reasons. */
void prefix_request_lacked(struct entry *e, struct request *r, uint32_t n_cached)
{
    if (!r->prefix.most_computed) return;
    counter_add(e->prefix.handed_back, 1);
    check(e, &r->prefix.expected.compute, r->decode.node, n_cached);
    r->prefix.was_lacking = true;
}
