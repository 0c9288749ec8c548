/* view_model.c - which model the nodes of a router have to have, and whether nodes would compute
 * the tokens of an answer again: see view.h. Thread: loop. */
#include <string.h>

#include "scheduler/view.h"
#include "shared/base/hash/hash.h"

static bool has_my_text(const struct view *v, const struct node_record *n)
{
    return n->text == 0 || n->text == v->text;
}

void view_choose_model(struct view *v)
{
    const struct node_record *first = NULL;
    if (v->text == 0 || v->n_nodes == 0) return;
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *n = &v->nodes[i];
        if (!has_my_text(v, n)) continue;
        if (n->model == v->model) return;
        /* the same for all routers: the lowest, of those that decode if there are any */
        const bool decodes = n->role != ROLE_PREFILL;
        if (!first || decodes > (first->role != ROLE_PREFILL) ||
            (decodes == (first->role != ROLE_PREFILL) && n->model < first->model))
            first = n;
    }
    v->model = first ? first->model : v->text; /* a text's number is no model's */
}

uint64_t view_model_bits(const struct node_record *n)
{
    const uint64_t bits = hash_64(n->kv_type, strlen(n->kv_type), n->model);
    return bits ? bits : 1;
}

bool view_shares_text(const struct view *v, const struct node_record *n)
{
    const uint64_t mine = v->text ? v->text : v->me.text;
    return !mine || !n->text || n->text == mine;
}

/* The bits may be a client's word: they lead to no model whose tokens are others. */
uint64_t view_model_of_bits(const struct view *v, uint64_t bits)
{
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *n = &v->nodes[i];
        if (view_shares_text(v, n) && view_model_bits(n) == bits) return n->model;
    }
    return bits ? bits : UINT64_MAX;
}

/* Nodes that only prefill count as well: the KV that they send must be the same. */
enum view_again view_again(const struct view *v, uint64_t bits)
{
    bool some_decode = false, all_equal = true, all_repeat = true;
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *n = &v->nodes[i];
        if (v->model && n->model != v->model) continue;
        some_decode |= v->unsplit || n->role != ROLE_PREFILL;
        all_equal &= view_model_bits(n) == bits;
        all_repeat &= n->deterministic;
    }
    if (!some_decode) return VIEW_AGAIN_UNSEEN;
    if (!all_equal) return VIEW_AGAIN_OTHER;
    return all_repeat ? VIEW_AGAIN_EQUAL : VIEW_AGAIN_DIFFERS;
}
