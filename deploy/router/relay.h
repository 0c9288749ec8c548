/* relay.h - hands exchanges of one process of a router on to the one that holds its view: the port
 * that nodes and operators know is shared by all, so any of them may get a call. Thread: loop. */
#ifndef BATON_DEPLOY_ROUTER_RELAY_H
#define BATON_DEPLOY_ROUTER_RELAY_H

#include "shared/net/http/http_server.h"

struct relay;

/* `port`: of the hub, on this host. */
struct relay *relay_create(struct loop *loop, uint16_t port);
/* After the HTTP server: no exchange is left. */
void relay_free(struct relay *r);
/* Is the path one that the hub answers? Those of the view are told by DIRECTORY_PATH. */
bool relay_takes(struct str path);
/* Method, path, body and Authorization go to the hub, its answer to the client; 503 while it
 * does not answer. */
void relay_pass(struct relay *r, struct http_exchange *x);

#endif
