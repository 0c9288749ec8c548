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
    SUSPECTS_FIRST = 16
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
    view_note_unplaced(&now);
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

static void mark_lost(struct view *v, uint64_t node, bool is_lost)
{
    struct node_record *n = find_node(v, node);
    if (n) n->is_lost = is_lost;
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

static bool is_listed(void *arg, uint64_t node) { return view_find(arg, node) != NULL; }

static void on_snapshot(void *arg, enum status st, const struct directory_snapshot *snap)
{
    struct view *v = arg;
    v->asking = false;
    v->known = true;
    v->t_snapshot_ms = clock_ms();
    if (st != OK) return; /* the last snapshot stands */
    v->t_known_ms = v->t_snapshot_ms;
    v->counts_own = false;
    mem_free(v->nodes);
    v->nodes = snap->n ? mem_dup(snap->nodes, snap->n * sizeof *v->nodes) : NULL;
    v->n_nodes = proofs_keep_proven(&v->proofs, v->secret, v->me.host, v->nodes, snap->n,
                                    &v->unproven);
    for (size_t i = 0; i < v->n_nodes; i++) view_note_unplaced(&v->nodes[i]);
    v->n_snapshots++;
    snprintf(v->topics, sizeof v->topics, "%s", snap->topics);
    const struct node_record *mine = view_find(v, v->me.node);
    v->my_role = mine ? mine->role : v->me.role;
    put_me(v);
    for (size_t i = 0; i < v->n_suspects; i++) mark_lost(v, v->suspects[i].node, true);
    view_choose_model(v);
    learn(v);
    breaker_forget(&v->breaker, is_listed, v, v->t_snapshot_ms);
    v->events.on_snapshot(v->events.arg);
}

static void ask_snapshot(struct view *v)
{
    v->ask_again = false;
    v->asking = directory_snapshot(v->directory, on_snapshot, v) == OK;
    if (v->asking) return;
    /* Before the first try to reach it has failed, nothing is known. */
    v->known = v->known || directory_why_down(v->directory);
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
    mem_free(v->own);
    mem_free(v->suspects);
}

void view_refresh(struct view *v) { v->ask_again = true; }

/* ---- suspects ---- */

/* False: the suspect has left the topic. A failure comes back through view_suspect. */
static bool dial_suspect(struct view *v, struct view_suspect *s, uint64_t now)
{
    const struct node_record *n = view_find(v, s->node);
    if (breaker_is_gone(&s->gone_ms, n, now)) return false;
    s->dial_ms = now + REDIAL_MS;
    if (!n) return true;
    cluster_learn(v->cluster, n->node, n->host, n->cluster_port);
    cluster_dial(v->cluster, n->node);
    return true;
}

/* Dials suspects, at once and then each second. One is a suspect no more when its link is up, or
 * when it has left the topic. */
static void tend_suspects(struct view *v, uint64_t now)
{
    int n_dialed = 0;
    for (size_t i = 0; i < v->n_suspects;) {
        struct view_suspect *s = &v->suspects[i];
        bool over = cluster_is_linked(v->cluster, s->node);
        if (!over && s->dial_ms <= now && n_dialed < DIALS_A_TICK) {
            n_dialed++;
            over = !dial_suspect(v, s, now);
        }
        if (over) {
            mark_lost(v, s->node, false);
            *s = v->suspects[--v->n_suspects];
        } else {
            i++;
        }
    }
}

/* One more; there are no more of them than nodes that had a link and are listed still. */
static struct view_suspect *add_suspect(struct view *v, uint64_t node)
{
    if (v->n_suspects == v->suspects_size) {
        v->suspects_size = v->suspects_size ? 2 * v->suspects_size : SUSPECTS_FIRST;
        v->suspects = mem_realloc(v->suspects, v->suspects_size, sizeof *v->suspects);
    }
    struct view_suspect *s = &v->suspects[v->n_suspects++];
    *s = (struct view_suspect){ .node = node };
    mark_lost(v, node, true);
    return s;
}

/* A dial that failed is no new loss: the node is probed as soon as it can be reached. */
void view_suspect(struct view *v, uint64_t node, const char *why)
{
    struct view_suspect *s = find_suspect(v, node);
    if (!s) {
        s = add_suspect(v, node);
        breaker_note(&v->breaker, (struct breaker_of){ node, 0 }, BREAKER_BROKEN, 0, clock_ms(),
                     why);
    }
    snprintf(s->why, sizeof s->why, "%s", why);
}

const char *view_why_unreachable(const struct view *v, uint64_t node)
{
    for (size_t i = 0; i < v->n_suspects; i++)
        if (v->suspects[i].node == node) return v->suspects[i].why;
    if (node && node == v->unproven.node)
        return v->secret.n
                   ? "it has another cluster secret (BATON_CLUSTER_SECRET), or its record was "
                     "forged"
                   : "without a cluster secret (BATON_CLUSTER_SECRET) only nodes of this host are "
                     "used, and its record has another address";
    return NULL;
}

/* ---- breakers ---- */

size_t view_excluded_nodes(const struct view *v, uint64_t out[BREAKER_MAX])
{
    uint64_t now = clock_ms();
    size_t n = 0;
    for (size_t i = 0; i < v->breaker.n; i++) {
        const struct breaker_entry *e = &v->breaker.entries[i];
        if (!e->of.partner && !breaker_allows(e, now)) out[n++] = e->of.node;
    }
    return n;
}

size_t view_excluded_pairs(const struct view *v, struct place_pair out[BREAKER_MAX])
{
    uint64_t now = clock_ms();
    size_t n = 0;
    for (size_t i = 0; i < v->breaker.n; i++) {
        const struct breaker_entry *e = &v->breaker.entries[i];
        if (e->of.partner && !breaker_allows(e, now))
            out[n++] = (struct place_pair){ e->of.node, e->of.partner };
    }
    return n;
}

void view_note_failure(struct view *v, const struct view_attempt *a, uint64_t node, enum status st,
                       const char *why)
{
    struct breaker_of of = node ? (struct breaker_of){ node, 0 }
                                : (struct breaker_of){ a->prefill, a->decode };
    breaker_note(&v->breaker, of, breaker_event_of(st), a->request, clock_ms(), why);
}

void view_note(struct view *v, const struct view_attempt *a, enum breaker_event ev)
{
    const struct breaker_of parts[] = { { a->decode, 0 },
                                        { a->prefill, 0 },
                                        { a->prefill, a->decode } };
    uint64_t now = v->breaker.n ? clock_ms() : 0;
    size_t n = a->prefill ? COUNT_OF(parts) : 1;
    for (size_t i = 0; i < n && v->breaker.n; i++)
        breaker_note(&v->breaker, parts[i], ev, a->request, now, NULL);
}

const char *view_why_apart(const struct view *v, uint64_t prefill, uint64_t decode)
{
    const struct breaker_entry *e = breaker_find(&v->breaker,
                                                 (struct breaker_of){ prefill, decode });
    return e && e->state != BREAKER_CLOSED ? e->why : NULL;
}

void view_tick(struct view *v)
{
    uint64_t now = clock_ms(), since = now - v->t_snapshot_ms;
    tend_suspects(v, now);
    if (!v->counts_own && now - v->t_known_ms >= VIEW_KNOWN_MS) view_count_own(v);
    if (!v->asking && (since >= SNAPSHOT_MS || (v->ask_again && since >= SNAPSHOT_SOON_MS)))
        ask_snapshot(v);
}
