/* proofs.c - see proofs.h. Thread: the owner's. */
#include "scheduler/directory/proofs.h"

static char proven, forged; /* the verdicts */

/* Without a secret only addresses are compared, which costs less than to look a verdict up. */
static bool is_proven(struct proofs *p, struct map *fresh, struct str secret, const char *own_host,
                      const struct node_record *r)
{
    struct buf bytes = { 0 };
    if (!secret.n) return node_record_is_proven(r, secret, own_host);
    buf_printf(&bytes, "%s\n", r->proof); /* has no line break */
    node_record_add_identity(r, &bytes);
    void *verdict = map_get(&p->verdicts, buf_str(&bytes));
    if (!verdict) {
        verdict = node_record_is_proven(r, secret, own_host) ? &proven : &forged;
        p->n_computed++;
    }
    map_put(fresh, buf_str(&bytes), verdict);
    buf_release(&bytes);
    return verdict == &proven;
}

size_t proofs_keep_proven(struct proofs *p, struct str secret, const char *own_host,
                          struct node_record *nodes, size_t n, struct node_record *unproven)
{
    struct map fresh = { 0 };
    size_t n_proven = 0;
    if (unproven) unproven->node = 0;
    for (size_t i = 0; i < n; i++) {
        bool good = is_proven(p, &fresh, secret, own_host, &nodes[i]);
        nodes[i].identity = (struct str){ 0 };
        if (good) nodes[n_proven++] = nodes[i];
        else if (unproven) *unproven = nodes[i];
    }
    map_release(&p->verdicts);
    p->verdicts = fresh;
    return n_proven;
}

void proofs_release(struct proofs *p) { map_release(&p->verdicts); }
