/* held_requests.h - requests that generate and come to a router before it is ready. It computes
 * nothing and can place on every node itself once it has a text and a node, which takes a moment:
 * they wait for that, and then come in by its admission as all others do.
 *
 * A request waits for wait_ms at most. One of a stranger, or that wants its answer by a time, does
 * not wait, nor does one more than HELD_MAX. Owner: the router. Thread: loop. */
#ifndef BATON_DEPLOY_ROUTER_HELD_REQUESTS_H
#define BATON_DEPLOY_ROUTER_HELD_REQUESTS_H

#include "shared/net/http/http_server.h"
#include "shared/net/loop.h"
#include "shared/serve/tenants.h"

enum { HELD_MAX = 1024 };

struct held_requests;

struct held_options {
    struct loop *loop;             /* borrowed until held_free, as are the tenants */
    const struct tenants *tenants; /* whose keys open the API */
    uint32_t wait_ms;
    /* Answers a request that has waited: it is ready, or will not be in time. */
    void (*answer)(void *arg, struct http_exchange *x);
    void *arg;
};

struct held_requests *held_create(const struct held_options *o);
/* Returns whether the request waits now; else it is the caller's. */
bool held_take(struct held_requests *h, struct http_exchange *x);
/* Has all answered that wait, inside the call. */
void held_release(struct held_requests *h);
/* Nothing waits any more. */
void held_free(struct held_requests *h);

#endif
