/* view.h - an entry node's view of the nodes: the directory's last snapshot, corrected by what the
 * entry node knows itself (its own placements, nodes whose links it lost).
 *
 * Between two snapshots the entry node adds its placements to the load of the nodes, so that two
 * requests do not both take the last free place. The directory has the last word: each snapshot
 * replaces the nodes. While the directory cannot be reached the last snapshot stays in use. This
 * node itself is always in the view, so that it serves alone when it knows no other.
 * In a small topic links are dialed ahead, and nodes that were lost are dialed again: trouble is
 * found before a request pays for it. Thread: loop. */
#ifndef BATON_SCHEDULER_VIEW_H
#define BATON_SCHEDULER_VIEW_H

#include "scheduler/directory/proofs.h"
#include "scheduler/place.h"
#include "shared/cluster/cluster.h"

enum { SUSPECTS_MAX = 64, SUSPECT_MS = 5000, APART_MAX = 64, VIEW_WHY_MAX = 256 };

struct view_events {
    void (*on_snapshot)(void *arg); /* a fresh snapshot is in the view */
    void (*on_capacity)(void *arg); /* a placement was taken out */
    void *arg;
};

/* A node whose link was lost: not chosen for SUSPECT_MS, and then until a link is up again. It is
 * dialed at once, so that a link that broke for a moment is there again when the node is needed. */
struct view_suspect {
    uint64_t node, until_ms;
    uint64_t dial_ms; /* it is dialed again then */
    bool linked;      /* since it was lost: it can be used, and is when there is no other node */
    char why[VIEW_WHY_MAX];
};

/* Two nodes that failed to exchange KV: not paired until until_ms. */
struct view_apart {
    struct place_pair pair;
    uint64_t until_ms;
    uint32_t n; /* failures since KV arrived last, each of which doubles the time */
    char why[VIEW_WHY_MAX];
};

struct view {
    struct cluster *cluster; /* both borrowed; learns the nodes' addresses */
    struct directory *directory;
    struct view_events events;
    struct node_record *nodes; /* [n_nodes] */
    size_t n_nodes;
    struct str secret; /* of the cluster, borrowed; records that it does not prove are left out */
    struct node_record unproven; /* one of those; node 0: none */
    struct proofs proofs;        /* verdicts of the last snapshot's records */
    uint64_t n_snapshots;        /* that arrived */
    char topics[512];            /* topics and roles that the directory has seen, for error texts */
    uint64_t model;              /* this node's own; requests go to nodes with the same. 0: any */
    uint64_t text;               /* of a router: its vocabulary, which chooses `model`. 0: not so */
    struct node_record me;       /* as published last; node 0: nothing, or a router */
    uint64_t t_snapshot_ms;
    bool known;  /* the directory has answered, or failed to: no trouble is looked for before */
    bool asking; /* a snapshot was asked for and has not arrived */
    bool ask_again;
    struct view_suspect suspects[SUSPECTS_MAX];
    size_t n_suspects;
    struct view_apart apart[APART_MAX];
    size_t n_apart;
};

/* Asks for the first snapshot. */
void view_start(struct view *v, struct cluster *cluster, struct directory *directory,
                const struct view_events *events);
void view_release(struct view *v);
/* For view.c, after a snapshot: of a router that has a text, takes the model of the nodes with the
 * same text. The one that was taken stays while some node has it. Where no node has that text no
 * node is used. */
void view_choose_model(struct view *v);
/* Asks for a snapshot when one is due and forgets old suspects. Call it every few milliseconds. */
void view_tick(struct view *v);
/* Makes the next snapshot due soon instead of at its usual time. */
void view_refresh(struct view *v);
/* What this node publishes of itself now. */
void view_set_me(struct view *v, const struct node_record *me);
const struct node_record *view_find(const struct view *v, uint64_t node);
/* A link to the node was lost. */
void view_suspect(struct view *v, uint64_t node, const char *why);
/* The reason why a node has no link, or NULL: it was never lost, or is linked again. */
const char *view_why_unreachable(const struct view *v, uint64_t node);
/* Copies at most `cap` suspects to `out` and returns how many. */
size_t view_suspects(const struct view *v, uint64_t *out, size_t cap);
/* The prefill node could not send its KV to the decode node. Changes nothing while they are
 * apart. */
void view_part(struct view *v, uint64_t prefill, uint64_t decode, const char *why);
/* The prefill node's KV has arrived at the decode node: earlier failures are forgotten. */
void view_join(struct view *v, uint64_t prefill, uint64_t decode);
/* Why two nodes are apart now; NULL: they are not. */
const char *view_why_apart(const struct view *v, uint64_t prefill, uint64_t decode);
/* Copies at most `cap` pairs that are apart to `out` and returns how many. */
size_t view_pairs_apart(const struct view *v, struct place_pair *out, size_t cap);
/* Load accounting of this entry node's own placements. */
void view_add_load(struct view *v, const struct placement *p);
void view_remove_load(struct view *v, const struct placement *p);

#endif
