/* node_placement.h - the placement of experts that the rank that leads a group chooses, as bytes that
 * all members get with the group (shared/cluster/group.h).
 *
 * With all ranks there, experts are divided evenly. Without some, each rank keeps what it has, and
 * those that nobody has any more are shared out, so that little is read while requests wait.
 * Thread: any. */
#ifndef BATON_DEPLOY_NODE_NODE_PLACEMENT_H
#define BATON_DEPLOY_NODE_NODE_PLACEMENT_H

#include "kernels/ep/ep.h"
#include "shared/cluster/group.h"

/* A placement whose arrays are its own. */
struct node_placement {
    struct ep_placement p; /* of the roster's members */
    int32_t *first, *logical;
};

/* Appends to next->placement. size: of the whole group; n_redundant: copies beyond one of each. */
void node_placement_choose(struct group_roster *next, const struct group_roster *before,
                           uint32_t size, int32_t n_experts, int32_t n_redundant);
/* ERR_FORMAT: it is not one for these members and n_experts. */
enum status node_placement_read(const struct group_roster *r, int32_t n_experts,
                                struct node_placement *out, struct err *err) MUST_CHECK;
void node_placement_release(struct node_placement *p);

#endif
