/* node_ports.h - the ports of KV transfer, held from the start of a node until its transports
 * listen there, so that a conflict shows before the model is loaded and nobody takes them then.
 * Owner: the node. Thread: any one at a time. */
#ifndef BATON_DEPLOY_NODE_NODE_PORTS_H
#define BATON_DEPLOY_NODE_NODE_PORTS_H

#include "deploy/node/node_options.h"

struct node_ports {
    int kv_fd, rdma_fd; /* listening sockets; -1: none */
};
#define NODE_PORTS_NONE ((struct node_ports){ -1, -1 })

/* ERR_CONFIG: a port is in use; the sentence says by whom. What was held until then stays so. */
enum status node_ports_hold(const struct node_options *o, struct node_ports *p,
                            struct err *err) MUST_CHECK;
/* Call just before the transports listen, or at the end; again: does nothing. */
void node_ports_release(struct node_ports *p);

#endif
