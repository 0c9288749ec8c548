/* view_load.c - how loaded the nodes of a view are: what the directory counts, corrected by this
 * entry node's own placements, and those alone where the directory is away for too long: see
 * view.h. Thread: loop. */
#include "scheduler/view.h"
#include "shared/base/assert.h"
#include "shared/base/mem.h"

enum { OWN_FIRST = 16 };

static struct node_record *find_node(struct view *v, uint64_t node)
{
    return (struct node_record *)view_find(v, node);
}

/* ---- what is its own ---- */

static struct view_own *find_own(const struct view *v, uint64_t node)
{
    for (size_t i = 0; i < v->n_own; i++)
        if (v->own[i].node == node) return &v->own[i];
    return NULL;
}

/* What it has on the node, made if there is nothing yet. */
static struct view_own *own_of(struct view *v, uint64_t node)
{
    struct view_own *o = find_own(v, node);
    if (o) return o;
    if (v->n_own == v->own_size) {
        v->own_size = v->own_size ? 2 * v->own_size : OWN_FIRST;
        v->own = mem_realloc(v->own, v->own_size, sizeof *v->own);
    }
    o = &v->own[v->n_own++];
    *o = (struct view_own){ .node = node };
    return o;
}

static void drop_if_empty(struct view *v, struct view_own *o)
{
    if (!o->tokens && !o->seqs && !o->blocks) *o = v->own[--v->n_own];
}

static uint64_t computes(const struct placement *p) { return p->prefill ? p->prefill : p->decode; }

static void add_own(struct view *v, const struct placement *p)
{
    if (p->tokens) own_of(v, computes(p))->tokens += p->tokens;
    struct view_own *decode = own_of(v, p->decode);
    decode->seqs++;
    decode->blocks += p->blocks;
}

static void remove_own_tokens(struct view *v, const struct placement *p)
{
    struct view_own *o = p->tokens ? find_own(v, computes(p)) : NULL;
    if (!o) return;
    ASSERT(o->tokens >= p->tokens);
    o->tokens -= p->tokens;
    drop_if_empty(v, o);
}

static void remove_own(struct view *v, const struct placement *p)
{
    remove_own_tokens(v, p);
    struct view_own *decode = find_own(v, p->decode);
    if (!decode) return;
    ASSERT(decode->seqs > 0 && decode->blocks >= p->blocks);
    decode->seqs--;
    decode->blocks -= p->blocks;
    drop_if_empty(v, decode);
}

/* ---- what is counted ---- */

/* What a node reports is older than what is placed on it, and tokens that it has cached are in the
 * one and not in the other. So the two are not compared: what is reported counts where nothing is
 * placed, as after the directory has lost its memory. */
void view_note_unplaced(struct node_record *n)
{
    n->unplaced_tokens = n->placed_tokens ? 0 : n->waiting_tokens;
}

/* What it reported is as old as the snapshot. What it has too much then waits there or is refused,
 * and is placed again. */
static void forget_reports(struct node_record *n)
{
    n->n_running = n->n_waiting = n->n_requests = 0;
    n->waiting_tokens = 0;
    n->n_blocks_free = n->placed_blocks < n->n_blocks ? n->n_blocks - n->placed_blocks : 0;
}

void view_count_own(struct view *v)
{
    v->counts_own = true;
    for (size_t i = 0; i < v->n_nodes; i++) {
        struct node_record *n = &v->nodes[i];
        const struct view_own *own = find_own(v, n->node);
        n->placed_tokens = own ? own->tokens : 0;
        n->placed_seqs = own ? own->seqs : 0;
        n->placed_blocks = own ? own->blocks : 0;
        if (n->node != v->me.node) forget_reports(n); /* of itself it knows */
        view_note_unplaced(n);
    }
    v->events.on_capacity(v->events.arg);
}

void view_add_load(struct view *v, const struct placement *p)
{
    struct node_record *prefill = find_node(v, computes(p)), *decode = find_node(v, p->decode);
    add_own(v, p);
    if (prefill) prefill->placed_tokens += p->tokens;
    if (!decode) return;
    decode->placed_seqs++;
    decode->placed_blocks += p->blocks;
}

/* Never below 0: a snapshot in between may have been taken before this placement was counted. */
static void lower_tokens(struct view *v, const struct placement *p)
{
    struct node_record *n = find_node(v, computes(p));
    if (n) n->placed_tokens -= n->placed_tokens < p->tokens ? n->placed_tokens : p->tokens;
}

void view_remove_tokens(struct view *v, const struct placement *p)
{
    remove_own_tokens(v, p);
    lower_tokens(v, p);
}

static void take_out(struct view *v, const struct placement *p)
{
    struct node_record *decode = find_node(v, p->decode);
    remove_own(v, p);
    lower_tokens(v, p);
    if (!decode) return;
    decode->placed_seqs -= decode->placed_seqs > 0;
    decode->placed_blocks -= decode->placed_blocks < p->blocks ? decode->placed_blocks : p->blocks;
}

void view_disown_load(struct view *v, const struct placement *p)
{
    if (v->counts_own) take_out(v, p);
    else remove_own(v, p);
}

void view_change_load(struct view *v, const struct placement *from, const struct placement *to)
{
    take_out(v, from);
    view_add_load(v, to);
}

void view_remove_load(struct view *v, const struct placement *p)
{
    take_out(v, p);
    v->events.on_capacity(v->events.arg);
}
