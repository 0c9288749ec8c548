/* fill.c - see fill.h. */
#include "scheduler/admission/fill.h"

#include "shared/base/mem.h"

enum {
    SEEN_MS_MIN = 10,   /* of a busy node, before its speed is seen */
    SEEN_MS_MAX = 2000, /* then the next busy time begins */
    MEAN_OF = 8         /* prompts over which the mean goes, about */
};

void fill_release(struct fill *f)
{
    mem_free(f->nodes);
    *f = (struct fill){ 0 };
}

static struct fill_node *find(const struct fill *f, uint64_t node)
{
    for (size_t i = 0; i < f->n; i++)
        if (f->nodes[i].node == node) return &f->nodes[i];
    return NULL;
}

static struct fill_node *add_node(struct fill *f, uint64_t node)
{
    for (size_t i = 0; i < f->n && f->n >= FILL_NODES_KEPT; i++)
        if (f->nodes[i].n == 0) f->nodes[i] = f->nodes[--f->n];
    if (f->n == f->cap) {
        f->cap = f->cap ? 2 * f->cap : 8;
        f->nodes = mem_realloc(f->nodes, f->cap, sizeof *f->nodes);
    }
    f->nodes[f->n] = (struct fill_node){ .node = node };
    return &f->nodes[f->n++];
}

static double ms_of(const struct fill_node *at, uint64_t tokens)
{
    double per_s = at->per_s > 0 ? at->per_s : at->seen_per_s;
    return per_s > 0 ? (double)tokens * 1000 / per_s : 0;
}

void fill_add(struct fill *f, const struct fill_prompt *p, uint64_t now_ms)
{
    struct fill_node *at = find(f, p->node);
    if (!at) at = add_node(f, p->node);
    if (at->tokens < FILL_SEEN) {
        at->t_busy_ms = now_ms;
        at->done_tokens = 0;
        at->lead_ms = at->n ? 0 : FILL_LEAD_MS + p->step_ms;
    }
    at->n++;
    at->n_first += p->goes_first;
    at->tokens += p->tokens;
    at->per_s = p->per_s;
    at->enough_ms = (double)(FILL_LEAD_MS + p->step_ms) / (p->n_entries ? p->n_entries : 1);
    if (at->free_ms < (double)now_ms) at->free_ms = (double)now_ms;
    at->free_ms += ms_of(at, p->tokens);
}

/* The first prompt of a busy time was on its way for lead_ms, the others while it was computed. */
static void see(struct fill_node *at, uint32_t tokens, uint64_t now_ms)
{
    double ms = (double)(now_ms - at->t_busy_ms) - at->lead_ms;
    at->done_tokens += tokens;
    if (ms >= SEEN_MS_MIN) {
        double per_s = at->done_tokens * 1000 / ms;
        at->seen_per_s += (per_s - at->seen_per_s) / (at->seen_per_s > 0 ? MEAN_OF : 1);
    }
    if (ms < SEEN_MS_MAX) return;
    at->t_busy_ms = now_ms;
    at->done_tokens = 0;
    at->lead_ms = 0;
}

/* The others are computed from now on. */
void fill_remove(struct fill *f, const struct fill_prompt *p, bool computed, uint64_t now_ms)
{
    struct fill_node *at = find(f, p->node);
    if (!at || at->n == 0) return;
    if (computed && at->tokens >= FILL_SEEN) see(at, p->tokens, now_ms);
    at->n--;
    at->n_first -= p->goes_first;
    at->tokens -= p->tokens;
    at->free_ms = (double)now_ms + ms_of(at, at->tokens);
}

/* How long the node will be busy beyond what is enough; below 0: it needs more. */
static double spare_ms(const struct fill_node *at, uint64_t now_ms)
{
    bool is_known = at->per_s > 0 || at->seen_per_s > 0;
    if (!is_known) return at->tokens >= FILL_TOKENS ? FILL_LEAD_MS : -1;
    return at->free_ms - (double)now_ms - at->enough_ms;
}

size_t fill_enough(const struct fill *f, uint64_t now_ms, uint64_t *out, size_t cap)
{
    size_t n = 0;
    for (size_t i = 0; i < f->n && n < cap; i++)
        if (f->nodes[i].n && spare_ms(&f->nodes[i], now_ms) >= 0) out[n++] = f->nodes[i].node;
    return n;
}

size_t fill_first(const struct fill *f, uint64_t *out, size_t cap)
{
    size_t n = 0;
    for (size_t i = 0; i < f->n && n < cap; i++)
        if (f->nodes[i].n_first) out[n++] = f->nodes[i].node;
    return n;
}

uint32_t fill_next_ms(const struct fill *f, uint64_t now_ms)
{
    double least = 0;
    for (size_t i = 0; i < f->n; i++) {
        double ms = f->nodes[i].n ? spare_ms(&f->nodes[i], now_ms) : -1;
        if (ms >= 0 && (least == 0 || ms + 1 < least)) least = ms + 1;
    }
    return (uint32_t)least;
}

double fill_seen_per_s(const struct fill *f, uint64_t node)
{
    const struct fill_node *at = find(f, node);
    return at ? at->seen_per_s : 0;
}
