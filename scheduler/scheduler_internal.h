/* scheduler_internal.h - what scheduler.c and request.c share: the object and the view of nodes.
 * Thread: loop. */
#ifndef BATON_SCHEDULER_SCHEDULER_INTERNAL_H
#define BATON_SCHEDULER_SCHEDULER_INTERNAL_H

#include "scheduler/request.h"
#include "scheduler/scheduler.h"
#include "scheduler/scheduler_metrics.h"
#include "shared/base/map.h"

enum { SUSPECTS_MAX = 64, SUSPECT_MS = 5000 };

struct scheduler {
    struct scheduler_options o;
    struct map by_id;
    struct list live;
    struct list orphans; /* ended requests whose placing answer is still awaited */
    uint32_t n_live;
    bool draining;
    struct node_record *nodes; /* [n_nodes] the last snapshot; kept when the directory is
                                * down */
    size_t n_nodes;
    char topics[512];
    uint64_t model; /* this node's own; requests go to nodes with the same */
    uint64_t t_snapshot_ms;
    bool asking; /* a snapshot was asked for */
    bool ask_again;
    bool capacity_freed; /* a placement ended since the last tick */
    struct {
        uint64_t node, until_ms;
    } suspects[SUSPECTS_MAX]; /* links lost lately: not chosen until the directory had
                               * time to notice */
    size_t n_suspects;
    struct loop_timer *tick, *renew, *wake; /* wake: a tick as soon as possible; NULL when
                                             * none is due */
    struct scheduler_metrics m;
};

/* Collects the nodes that must not be chosen now: suspects and the request's own list. Returns how
 * many. */
size_t scheduler_avoid(const struct scheduler *s, const struct request *r, uint64_t *out,
                       size_t cap);
struct node_record *scheduler_find_node(struct scheduler *s, uint64_t node);
/* Load accounting until the next snapshot: this entry node adds its own placements to the view it
 * has, and takes them out when they end. An end lets requests that wait for capacity try again in
 * the next turn of the loop. */
void scheduler_add_load(struct scheduler *s, const struct placement *p);
void scheduler_remove_load(struct scheduler *s, const struct placement *p);
/* Asks the directory for a new snapshot soon. */
void scheduler_refresh(struct scheduler *s);

#endif
