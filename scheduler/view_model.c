/* view_model.c - which model the nodes of a router have to have: see view.h. Thread: loop. */
#include "scheduler/view.h"

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
