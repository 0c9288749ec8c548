/* node_tiers.h - the KV tiers of a node of several ranks: commands and answers on their way between
 * its processes.
 *
 *   engine of rank 0 ─▶ loop ── KV_TIER ──▶ loop of every other rank ─▶ thread of its tiers
 *                 ▲─── loop ◀── KV_TIER_DONE ── loop ◀──────────────────────┘
 *
 * Made before the engine; messages of anybody but the node's own ranks are refused. A message that
 * cannot be sent ends the node: the ranks' tiers could not be told apart from then on.
 * Thread: loop, except where it is said otherwise. */
#ifndef BATON_DEPLOY_TIERS_NODE_TIERS_H
#define BATON_DEPLOY_TIERS_NODE_TIERS_H

#include "shared/cluster/group.h"
#include "shared/kv/tier/ranks/tier_follow.h"
#include "shared/kv/tier/ranks/tier_ranks.h"

struct node_tiers;

struct node_tiers_options {
    struct loop *loop; /* all borrowed until it is freed */
    struct cluster *cluster;
    const struct group_member *ranks; /* [size] by rank, once they have met */
    uint32_t rank, size;
    void (*on_lost)(void *arg); /* the node has to end. Engine's or tiers' thread; not twice */
    void *arg;
};

struct node_tiers *node_tiers_create(const struct node_tiers_options *o);
/* For kv_store_options, of rank 0; NULL elsewhere. */
struct tier_ranks *node_tiers_ranks(struct node_tiers *t);
/* tier_follow_options.answer, of the other ranks. Thread: the tiers'. */
void node_tiers_answer(void *tiers, const struct tier_answer *a);
/* Takes this rank's tiers. */
void node_tiers_follow(struct node_tiers *t, struct tier_follower *f);
/* Is it of a kind that the tiers of ranks exchange? */
bool node_tiers_on_message(struct node_tiers *t, const struct cluster_message *m);
/* The node ends: before its engine, whose thread then waits for nobody. */
void node_tiers_stop(struct node_tiers *t);
/* Ends this rank's tiers: before the engine's pool is freed. */
void node_tiers_end(struct node_tiers *t);
/* With the next turn of the loop: what was posted comes before. After the engine. */
void node_tiers_free(struct node_tiers *t);

#endif
