/* node_placement.h - the placement of experts that the rank that leads a group chooses
 * (kernels/ep/balance.h), as bytes that all members get with the group (shared/cluster/group.h).
 *
 * With all ranks there experts are divided by their load, once that has been counted; before, and
 * when one comes while others are lost, evenly. When ranks were lost, each keeps what it has, and
 * what nobody has any more is shared out, so that little is read while requests wait. Nothing here
 * takes long: what does, a worker has computed before (node_balance.h).
 * Thread: any. */
#ifndef BATON_DEPLOY_NODE_NODE_PLACEMENT_H
#define BATON_DEPLOY_NODE_NODE_PLACEMENT_H

#include "kernels/ep/balance.h"
#include "shared/cluster/group.h"

struct node_placement_want {
    uint32_t size;                  /* ranks of the whole group */
    int32_t n_experts, n_redundant; /* redundant: copies beyond one of each */
    const uint64_t *load;           /* [sparse layers, n_experts] rows of each; NULL: not known */
    const struct balance_out *best; /* balance_eplb's for this load; NULL: not computed */
};

/* Appends to next->placement. */
void node_placement_choose(struct group_roster *next, const struct group_roster *before,
                           const struct node_placement_want *w);
/* Of the roster's members, for balance_release. ERR_FORMAT: it is not one for these members and
 * n_experts. */
enum status node_placement_read(const struct group_roster *r, int32_t n_experts,
                                struct balance_out *out, struct err *err) MUST_CHECK;

#endif
