/* not_ready.h - what a node answers over HTTP before it has loaded its model, and while it stops.
 * Thread: loop. */
#ifndef BATON_DEPLOY_NODE_NOT_READY_H
#define BATON_DEPLOY_NODE_NOT_READY_H

#include "scheduler/passer.h"

/* 503 with the reason, a sentence; /live is 200. */
void not_ready_reply(struct http_exchange *x, const char *why);

/* Is this GET /cluster, of one who has a key of this node? It is answered with what is known before
 * the node is ready. */
bool not_ready_asks_cluster(const struct http_exchange *x, const struct tenants *tenants);

struct not_ready_pass {
    struct passer *passer;         /* NULL: requests are not passed */
    const struct tenants *tenants; /* read only during the call */
    /* Answers what no other node took. */
    void (*otherwise)(void *arg, struct http_exchange *x);
    void *arg;
};

/* Passes a request that generates to a node that is ready; a stranger's request, without a key that
 * this node knows, costs no other node anything. False: it is not one, or there is no such node. */
bool not_ready_pass(const struct not_ready_pass *o, struct http_exchange *x);

#endif
