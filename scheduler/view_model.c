/* view_model.c - which model the nodes of a router have to have, and whether nodes would compute
 * the tokens of an answer again: see view.h. Thread: loop. */
#include <stdio.h>
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

static bool counts(const struct view *v, const struct node_record *n)
{
    return !n->draining && n->max_model_len && (!v->model || n->model == v->model);
}

/* A node of an earlier version does not say of which type its KV is. */
static bool has_same_kv(const struct node_record *a, const struct node_record *b)
{
    return !a->kv_type[0] || !b->kv_type[0] || strcmp(a->kv_type, b->kv_type) == 0;
}

/* Each is compared with one, the same for all entry nodes: that of the lowest number. */
bool view_find_difference(const struct view *v, char text[ERR_TEXT_MAX])
{
    const struct node_record *first = NULL, *other = NULL;
    for (size_t i = 0; i < v->n_nodes; i++)
        if (counts(v, &v->nodes[i]) && (!first || v->nodes[i].node < first->node))
            first = &v->nodes[i];
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *n = &v->nodes[i];
        if (!counts(v, n) || n->model != first->model || (other && n->node > other->node)) continue;
        if (n->max_model_len != first->max_model_len || !has_same_kv(n, first)) other = n;
    }
    if (!other) return false;
    if (other->max_model_len != first->max_model_len)
        snprintf(text, ERR_TEXT_MAX,
                 "node %.63s has --max-model-len %u and node %.63s %u: longer requests are not "
                 "decoded by the one with less, and an answer that is resumed there ends earlier; "
                 "give all the same",
                 first->name, first->max_model_len, other->name, other->max_model_len);
    else
        snprintf(
            text, ERR_TEXT_MAX,
            "node %.63s has --kv-cache-dtype %s and node %.63s %s: an answer whose tokens would "
            "have to be computed again cannot be resumed (409); give all the same",
            first->name, first->kv_type, other->name, other->kv_type);
    return true;
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
