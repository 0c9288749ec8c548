/* node_traffic.h - what the ranks of a group do, for people and for metrics: rows, bytes, load by
 * expert, and who waits for whom. Looks at the engine's sums once a second.
 * Thread: loop. Owner: the node. */
#ifndef BATON_DEPLOY_NODE_NODE_TRAFFIC_H
#define BATON_DEPLOY_NODE_NODE_TRAFFIC_H

#include "shared/base/buf.h"

struct node;
struct node_traffic;

/* Of a rank whose engine is there. */
struct node_traffic *node_traffic_create(struct node *n);
/* NULL is accepted. */
void node_traffic_free(struct node_traffic *t);
/* Appends members of the group's JSON: rates of the last second in which the group stepped. */
void node_traffic_describe(const struct node_traffic *t, struct buf *out);

#endif
