/* view.h - an entry node's view of the nodes: the directory's last snapshot, corrected by what the
 * entry node knows itself (its own placements, nodes whose links it lost).
 *
 * Between two snapshots the entry node adds its placements to the load of the nodes, so that two
 * requests do not both take the last free place. The directory has the last word: each snapshot
 * replaces the nodes. While the directory cannot be reached the last snapshot stays in use.
 * Thread: loop. */
#ifndef BATON_SCHEDULER_VIEW_H
#define BATON_SCHEDULER_VIEW_H

#include "scheduler/directory/directory.h"
#include "shared/cluster/cluster.h"

enum { SUSPECTS_MAX = 64, SUSPECT_MS = 5000 };

struct view_events {
    void (*on_snapshot)(void *arg); /* a fresh snapshot is in the view */
    void (*on_capacity)(void *arg); /* a placement was taken out */
    void *arg;
};

struct view {
    struct cluster *cluster; /* both borrowed; learns the nodes' addresses */
    struct directory *directory;
    struct view_events events;
    struct node_record *nodes; /* [n_nodes] */
    size_t n_nodes;
    char topics[512]; /* topics and roles that the directory has seen, for error texts */
    uint64_t model;   /* this node's own; requests go to nodes with the same. 0: any */
    uint64_t t_snapshot_ms;
    bool asking; /* a snapshot was asked for and has not arrived */
    bool ask_again;
    struct {
        uint64_t node, until_ms;
    } suspects[SUSPECTS_MAX]; /* not chosen until the directory had time to notice */
    size_t n_suspects;
    bool kv_differs; /* some nodes cannot exchange KV, which was logged */
};

/* Asks for the first snapshot. */
void view_start(struct view *v, struct cluster *cluster, struct directory *directory,
                const struct view_events *events);
void view_release(struct view *v);
/* Asks for a snapshot when one is due and forgets old suspects. Call it every few milliseconds. */
void view_tick(struct view *v);
/* Makes the next snapshot due soon instead of at its usual time. */
void view_refresh(struct view *v);
/* A link to the node was lost: it is not to be chosen for SUSPECT_MS. */
void view_suspect(struct view *v, uint64_t node);
/* Copies at most `cap` suspects to `out` and returns how many. */
size_t view_suspects(const struct view *v, uint64_t *out, size_t cap);
/* Load accounting of this entry node's own placements. */
void view_add_load(struct view *v, const struct placement *p);
void view_remove_load(struct view *v, const struct placement *p);
/* Nodes of the topic that serve another model than this one. */
size_t view_n_other_model(const struct view *v);

#endif
