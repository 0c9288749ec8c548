/* view.c - see view.h. */
#include "scheduler/view.h"

#include <stdio.h>

#include "scheduler/place.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    SNAPSHOT_MS = 1000,    /* between snapshots while nothing asks for one sooner */
    SNAPSHOT_SOON_MS = 100 /* shortest time between snapshots */
};

/* Logs once when there are prefill and decode nodes that are never paired. Compares all with the
 * first of the other role, which shows any difference. */
static void note_kv_types(struct view *v)
{
    const struct node_record *first[2] = { NULL, NULL }, *p = NULL, *d = NULL;
    for (size_t i = 0; i < v->n_nodes; i++) {
        const struct node_record *n = &v->nodes[i];
        if (n->role == ROLE_MIXED || (v->model && n->model != v->model)) continue;
        bool decodes = n->role == ROLE_DECODE;
        if (!first[decodes]) first[decodes] = n;
        if (!first[!decodes]) continue;
        const struct node_record *prefill = decodes ? first[0] : n,
                                 *decode = decodes ? n : first[1];
        if (!place_can_exchange(prefill, decode)) p = prefill, d = decode;
    }
    if (p && !v->kv_differs)
        log_warn(
            "nodes are not paired",
            "prefill=%s decode=%s why=\"KV element types differ: %s at the sender does not fit "
            "into %s at the receiver without loss; give both the same --kv-cache-dtype, or "
            "allow answers to differ with BATON_KV_LOSSY=1 on either node\"",
            p->name, d->name, p->kv_type, d->kv_type);
    v->kv_differs = p != NULL;
}

static void on_snapshot(void *arg, enum status st, const struct directory_snapshot *snap)
{
    struct view *v = arg;
    v->asking = false;
    v->t_snapshot_ms = clock_ms();
    if (st != OK) return; /* the last snapshot stands */
    mem_free(v->nodes);
    v->n_nodes = snap->n;
    v->nodes = snap->n ? mem_dup(snap->nodes, snap->n * sizeof *v->nodes) : NULL;
    snprintf(v->topics, sizeof v->topics, "%s", snap->topics);
    for (size_t i = 0; i < v->n_nodes; i++)
        if (v->nodes[i].cluster_port)
            cluster_learn(v->cluster, v->nodes[i].node, v->nodes[i].host, v->nodes[i].cluster_port);
    note_kv_types(v);
    v->events.on_snapshot(v->events.arg);
}

static void ask_snapshot(struct view *v)
{
    v->ask_again = false;
    v->asking = directory_snapshot(v->directory, on_snapshot, v) == OK;
    if (!v->asking) v->t_snapshot_ms = clock_ms();
}

void view_start(struct view *v, struct cluster *cluster, struct directory *directory,
                const struct view_events *events)
{
    v->cluster = cluster;
    v->directory = directory;
    v->events = *events;
    ask_snapshot(v);
}

void view_release(struct view *v) { mem_free(v->nodes); }

void view_refresh(struct view *v) { v->ask_again = true; }

/* ---- suspects ---- */

static void drop_old_suspects(struct view *v)
{
    uint64_t now = clock_ms();
    for (size_t i = 0; i < v->n_suspects;) {
        if (v->suspects[i].until_ms <= now) v->suspects[i] = v->suspects[--v->n_suspects];
        else i++;
    }
}

void view_tick(struct view *v)
{
    uint64_t since = clock_ms() - v->t_snapshot_ms;
    drop_old_suspects(v);
    if (!v->asking && (since >= SNAPSHOT_MS || (v->ask_again && since >= SNAPSHOT_SOON_MS)))
        ask_snapshot(v);
}

void view_suspect(struct view *v, uint64_t node)
{
    drop_old_suspects(v);
    size_t i = v->n_suspects < SUSPECTS_MAX ? v->n_suspects++ : 0;
    v->suspects[i].node = node;
    v->suspects[i].until_ms = clock_ms() + SUSPECT_MS;
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

/* ---- load ---- */

static struct node_record *find_node(struct view *v, uint64_t node)
{
    for (size_t i = 0; i < v->n_nodes; i++)
        if (v->nodes[i].node == node) return &v->nodes[i];
    return NULL;
}

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

size_t view_n_other_model(const struct view *v)
{
    size_t n = 0;
    for (size_t i = 0; v->model && i < v->n_nodes; i++) n += v->nodes[i].model != v->model;
    return n;
}
