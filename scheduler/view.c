/* view.c - see view.h. */
#include "scheduler/view.h"

#include <stdio.h>

#include "shared/base/clock.h"
#include "shared/base/mem.h"

enum {
    SNAPSHOT_MS = 1000,     /* between snapshots while nothing asks for one sooner */
    SNAPSHOT_SOON_MS = 100, /* shortest time between snapshots */
    DIAL_AHEAD_NODES = 32,  /* in a larger topic links are made by need */
    REDIAL_MS = 1000,
    DIALS_A_TICK = 2, /* each looks through all nodes */
    APART_MS = 30 * 1000,
    APART_DOUBLINGS = 5
};

/* ---- the nodes ---- */

const struct node_record *view_find(const struct view *v, uint64_t node)
{
    for (size_t i = 0; i < v->n_nodes; i++)
        if (v->nodes[i].node == node) return &v->nodes[i];
    return NULL;
}

static struct node_record *find_node(struct view *v, uint64_t node)
{
    return (struct node_record *)view_find(v, node);
}

/* Puts this node's own record into the view, with what is placed on it. */
static void put_me(struct view *v)
{
    struct node_record *mine = v->me.node ? find_node(v, v->me.node) : NULL, now = v->me;
    if (!v->me.node) return;
    if (!mine) {
        v->nodes = mem_realloc(v->nodes, v->n_nodes + 1, sizeof *v->nodes);
        v->nodes[v->n_nodes++] = now;
        return;
    }
    now.placed_tokens = mine->placed_tokens;
    now.placed_seqs = mine->placed_seqs;
    now.placed_blocks = mine->placed_blocks;
    *mine = now;
}

void view_set_me(struct view *v, const struct node_record *me)
{
    v->me = *me;
    v->model = me->model;
    put_me(v);
}

static struct view_suspect *find_suspect(struct view *v, uint64_t node)
{
    for (size_t i = 0; i < v->n_suspects; i++)
        if (v->suspects[i].node == node) return &v->suspects[i];
    return NULL;
}

/* Suspects are dialed by tend_suspects. */
static void learn(struct view *v)
{
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *n = &v->nodes[i];
        if (!n->cluster_port) continue;
        cluster_learn(v->cluster, n->node, n->host, n->cluster_port);
        if (v->n_nodes <= DIAL_AHEAD_NODES && !n->draining && !find_suspect(v, n->node))
            cluster_dial(v->cluster, n->node);
    }
}

/* Forgets pairs of which a node is gone. */
static void forget_pairs(struct view *v)
{
    for (size_t i = 0; i < v->n_apart;) {
        const struct place_pair *p = &v->apart[i].pair;
        if (view_find(v, p->prefill) && view_find(v, p->decode)) i++;
        else v->apart[i] = v->apart[--v->n_apart];
    }
}

static void on_snapshot(void *arg, enum status st, const struct directory_snapshot *snap)
{
    struct view *v = arg;
    v->asking = false;
    v->known = true;
    v->t_snapshot_ms = clock_ms();
    if (st != OK) return; /* the last snapshot stands */
    mem_free(v->nodes);
    v->nodes = snap->n ? mem_dup(snap->nodes, snap->n * sizeof *v->nodes) : NULL;
    v->n_nodes = proofs_keep_proven(&v->proofs, v->secret, v->me.host, v->nodes, snap->n,
                                    &v->unproven);
    v->n_snapshots++;
    snprintf(v->topics, sizeof v->topics, "%s", snap->topics);
    put_me(v);
    view_choose_model(v);
    learn(v);
    forget_pairs(v);
    v->events.on_snapshot(v->events.arg);
}

static void ask_snapshot(struct view *v)
{
    v->ask_again = false;
    v->asking = directory_snapshot(v->directory, on_snapshot, v) == OK;
    if (v->asking) return;
    v->known = true;
    v->t_snapshot_ms = clock_ms();
}

void view_start(struct view *v, struct cluster *cluster, struct directory *directory,
                const struct view_events *events)
{
    v->cluster = cluster;
    v->directory = directory;
    v->events = *events;
    ask_snapshot(v);
}

void view_release(struct view *v)
{
    proofs_release(&v->proofs);
    mem_free(v->nodes);
}

void view_refresh(struct view *v) { v->ask_again = true; }

/* ---- suspects ---- */

/* False: the suspect has left the topic. A failure comes back through view_suspect. */
static bool dial_suspect(struct view *v, struct view_suspect *s, uint64_t now)
{
    const struct node_record *n = view_find(v, s->node);
    if (!n) return false;
    s->dial_ms = now + REDIAL_MS;
    cluster_learn(v->cluster, n->node, n->host, n->cluster_port);
    cluster_dial(v->cluster, n->node);
    return true;
}

/* Dials suspects without a link, at once and then each second. One is a suspect no more when its
 * time is over and the link is up, or when it has left the topic. */
static void tend_suspects(struct view *v, uint64_t now)
{
    int n_dialed = 0;
    for (size_t i = 0; i < v->n_suspects;) {
        struct view_suspect *s = &v->suspects[i];
        bool gone = false;
        s->linked = cluster_is_linked(v->cluster, s->node);
        if (!s->linked && s->dial_ms <= now && n_dialed < DIALS_A_TICK) {
            n_dialed++;
            gone = !dial_suspect(v, s, now);
        }
        if (gone || (s->linked && s->until_ms <= now)) *s = v->suspects[--v->n_suspects];
        else i++;
    }
}

/* A dial that failed does not extend the time: the node is chosen again as soon as it can be
 * reached. */
void view_suspect(struct view *v, uint64_t node, const char *why)
{
    struct view_suspect *s = find_suspect(v, node);
    bool was_linked = !s || s->linked;
    if (!s) {
        s = &v->suspects[v->n_suspects < SUSPECTS_MAX ? v->n_suspects++ : 0];
        *s = (struct view_suspect){ .node = node };
    }
    if (was_linked) s->until_ms = clock_ms() + SUSPECT_MS;
    s->linked = false;
    snprintf(s->why, sizeof s->why, "%s", why);
}

const char *view_why_unreachable(const struct view *v, uint64_t node)
{
    for (size_t i = 0; i < v->n_suspects; i++)
        if (v->suspects[i].node == node) return v->suspects[i].linked ? NULL : v->suspects[i].why;
    if (node && node == v->unproven.node)
        return v->secret.n
                   ? "it has another cluster secret (BATON_CLUSTER_SECRET), or its record was "
                     "forged"
                   : "without a cluster secret (BATON_CLUSTER_SECRET) only nodes of this host are "
                     "used, and its record has another address";
    return NULL;
}

size_t view_suspects(const struct view *v, uint64_t *out, size_t cap)
{
    size_t n = 0;
    while (n < v->n_suspects && n < cap) {
        out[n] = v->suspects[n].node;
        n++;
    }
    return n;
}

/* ---- pairs that cannot exchange KV ---- */

static bool is_pair(const struct view_apart *a, uint64_t prefill, uint64_t decode)
{
    return a->pair.prefill == prefill && a->pair.decode == decode;
}

static size_t find_pair(const struct view *v, uint64_t prefill, uint64_t decode)
{
    size_t i = 0;
    while (i < v->n_apart && !is_pair(&v->apart[i], prefill, decode)) i++;
    return i;
}

/* One trouble fails all prompts that wait for the connection: those after the first say nothing
 * new. */
void view_part(struct view *v, uint64_t prefill, uint64_t decode, const char *why)
{
    uint64_t now = clock_ms();
    size_t i = find_pair(v, prefill, decode);
    if (i == v->n_apart) {
        if (v->n_apart < APART_MAX) v->n_apart++;
        else i = 0;
        v->apart[i] = (struct view_apart){ .pair = { prefill, decode } };
    }
    struct view_apart *a = &v->apart[i];
    if (a->until_ms > now) return;
    a->until_ms = now + ((uint64_t)APART_MS << a->n);
    a->n += a->n < APART_DOUBLINGS;
    snprintf(a->why, sizeof a->why, "%s", why);
}

void view_join(struct view *v, uint64_t prefill, uint64_t decode)
{
    size_t i = find_pair(v, prefill, decode);
    if (i < v->n_apart) v->apart[i] = v->apart[--v->n_apart];
}

const char *view_why_apart(const struct view *v, uint64_t prefill, uint64_t decode)
{
    size_t i = find_pair(v, prefill, decode);
    return i < v->n_apart && v->apart[i].until_ms > clock_ms() ? v->apart[i].why : NULL;
}

size_t view_pairs_apart(const struct view *v, struct place_pair *out, size_t cap)
{
    uint64_t now = clock_ms();
    size_t n = 0;
    for (size_t i = 0; i < v->n_apart && n < cap; i++)
        if (v->apart[i].until_ms > now) out[n++] = v->apart[i].pair;
    return n;
}

void view_tick(struct view *v)
{
    uint64_t now = clock_ms(), since = now - v->t_snapshot_ms;
    tend_suspects(v, now);
    if (!v->asking && (since >= SNAPSHOT_MS || (v->ask_again && since >= SNAPSHOT_SOON_MS)))
        ask_snapshot(v);
}

/* ---- load ---- */

void view_add_load(struct view *v, const struct placement *p)
{
    struct node_record *prefill = find_node(v, p->prefill ? p->prefill : p->decode),
                       *decode = find_node(v, p->decode);
    if (prefill) prefill->placed_tokens += p->tokens;
    if (!decode) return;
    decode->placed_seqs++;
    decode->placed_blocks += p->blocks;
}

/* Never below 0: a snapshot in between may have been taken before this placement was counted. */
void view_remove_load(struct view *v, const struct placement *p)
{
    struct node_record *prefill = find_node(v, p->prefill ? p->prefill : p->decode),
                       *decode = find_node(v, p->decode);
    if (prefill)
        prefill->placed_tokens -= prefill->placed_tokens < p->tokens ? prefill->placed_tokens
                                                                     : p->tokens;
    if (decode) {
        decode->placed_seqs -= decode->placed_seqs > 0;
        decode->placed_blocks -= decode->placed_blocks < p->blocks ? decode->placed_blocks
                                                                   : p->blocks;
    }
    v->events.on_capacity(v->events.arg);
}
