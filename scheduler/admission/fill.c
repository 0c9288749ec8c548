/* fill.c - see fill.h. */
#include "scheduler/admission/fill.h"

#include <stdbool.h>

#include "shared/base/mem.h"

void fill_release(struct fill *f)
{
    mem_free(f->nodes);
    *f = (struct fill){ 0 };
}

static struct fill_node *find(struct fill *f, uint64_t node)
{
    for (size_t i = 0; i < f->n; i++)
        if (f->nodes[i].node == node) return &f->nodes[i];
    return NULL;
}

static struct fill_node *add_node(struct fill *f, uint64_t node)
{
    if (f->n == f->cap) {
        f->cap = f->cap ? 2 * f->cap : 8;
        f->nodes = mem_realloc(f->nodes, f->cap, sizeof *f->nodes);
    }
    f->nodes[f->n] = (struct fill_node){ .node = node };
    return &f->nodes[f->n++];
}

static double ms_of(const struct fill_node *at, uint64_t tokens)
{
    return at->per_s ? (double)tokens * 1000 / at->per_s : 0;
}

void fill_add(struct fill *f, const struct fill_prompt *p, uint64_t now_ms)
{
    struct fill_node *at = find(f, p->node);
    if (!at) at = add_node(f, p->node);
    at->n++;
    at->tokens += p->tokens;
    at->per_s = p->per_s;
    at->enough_ms = (double)(FILL_LEAD_MS + p->step_ms) / (p->n_entries ? p->n_entries : 1);
    if (at->free_ms < (double)now_ms) at->free_ms = (double)now_ms;
    at->free_ms += ms_of(at, p->tokens);
}

/* The others are computed from now on. */
void fill_remove(struct fill *f, uint64_t node, uint32_t tokens, uint64_t now_ms)
{
    struct fill_node *at = find(f, node);
    if (!at) return;
    at->tokens -= tokens;
    at->free_ms = (double)now_ms + ms_of(at, at->tokens);
    if (--at->n == 0) *at = f->nodes[--f->n];
}

size_t fill_enough(const struct fill *f, uint64_t now_ms, uint64_t *out, size_t cap)
{
    size_t n = 0;
    for (size_t i = 0; i < f->n && n < cap; i++) {
        const struct fill_node *at = &f->nodes[i];
        bool enough = at->per_s ? at->free_ms - (double)now_ms >= at->enough_ms
                                : at->tokens >= FILL_TOKENS;
        if (enough) out[n++] = at->node;
    }
    return n;
}
