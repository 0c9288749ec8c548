/* hub.h - what the processes of one router have in common, in the process that supervises them:
 * the view of the nodes, the list of nodes, and the metrics of all. They hand on what their shared
 * port gets of it (relay.h), and ask for the view as nodes do.
 *
 * Its port is on loopback, for them alone: the keys of the API and the cluster secret are asked for
 * all the same. With --metrics-port it serves that, too, unless the API has the same port.
 * Owner: the supervisor. Life cycle: create, start, stop (then `done`). Thread: loop. */
#ifndef BATON_DEPLOY_ROUTER_HUB_H
#define BATON_DEPLOY_ROUTER_HUB_H

#include "deploy/node/node_options.h"
#include "shared/net/loop.h"

struct hub;

struct hub_options {
    struct loop *loop;
    const struct node_options *o; /* of the router; borrowed until the stop is done */
    const uint16_t *ports;        /* [n_workers] their own ports on this host; borrowed */
    size_t n_workers;
    const char *key; /* launch_key, by which it asks them; NULL: none. Borrowed */
};

struct hub *hub_create(const struct hub_options *o);
/* Opens the view and the ports. Whatever it returns, hub_stop follows, since ports that were opened
 * take turns of the loop to close. */
enum status hub_start(struct hub *h, struct err *err) MUST_CHECK;
uint16_t hub_port(const struct hub *h);
/* Frees the hub, then calls `done` once: from inside if no port is open. */
void hub_stop(struct hub *h, void (*done)(void *arg), void *arg);

#endif
