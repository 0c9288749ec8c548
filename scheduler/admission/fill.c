/* fill.c - see fill.h. */
#include "scheduler/admission/fill.h"

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

void fill_add(struct fill *f, uint64_t node, uint32_t tokens, uint32_t tokens_per_s,
              uint32_t n_entries)
{
    struct fill_node *at = find(f, node);
    uint64_t enough = tokens_per_s ? (uint64_t)tokens_per_s * FILL_MS / 1000 : FILL_TOKENS;
    if (!at) {
        if (f->n == f->cap) {
            f->cap = f->cap ? 2 * f->cap : 8;
            f->nodes = mem_realloc(f->nodes, f->cap, sizeof *f->nodes);
        }
        at = &f->nodes[f->n++];
        *at = (struct fill_node){ .node = node };
    }
    at->n++;
    at->tokens += tokens;
    at->enough_tokens = enough / (n_entries ? n_entries : 1);
}

void fill_remove(struct fill *f, uint64_t node, uint32_t tokens)
{
    struct fill_node *at = find(f, node);
    if (!at) return;
    at->tokens -= tokens;
    if (--at->n == 0) *at = f->nodes[--f->n];
}

size_t fill_enough(const struct fill *f, uint64_t *out, size_t cap)
{
    size_t n = 0;
    for (size_t i = 0; i < f->n && n < cap; i++) {
        const struct fill_node *at = &f->nodes[i];
        if (at->n >= FILL_PROMPTS && at->tokens >= at->enough_tokens) out[n++] = at->node;
    }
    return n;
}
