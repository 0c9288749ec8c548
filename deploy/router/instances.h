/* instances.h - how nodes are added to a router and taken from it over HTTP, as clients of two
 * other routers do it. Adapters: they change the list of listed.h.
 *
 *   POST /instances/add, /instances/remove   vLLM's proxy
 *        { "type": "prefill"|"decode", "instances": "host:port" or ["host:port", ...] } ->
 *        { "message", "current_prefill_instances": [...], "current_decode_instances": [...] }
 *   POST /register                           FastDeploy's router
 *        { "role": "mixed"|"prefill"|"decode", "host_ip", "port": n or "n", ... } ->
 *        { "status": "success" }, or 400 { "detail" } when the node cannot be used
 *   GET /registered_number -> { "mixed": n, "prefill": n, "decode": n }   nodes in the view
 *   GET /healthcheck -> { "status": "ok", "prefill_instances": n, "decode_instances": n }
 *
 * Thread: loop. */
#ifndef BATON_DEPLOY_ROUTER_INSTANCES_H
#define BATON_DEPLOY_ROUTER_INSTANCES_H

#include "deploy/router/listed.h"
#include "shared/net/http/http_server.h"
#include "shared/serve/tenants.h"

enum {
    INSTANCES_MAX = 256, /* in one request */
    INSTANCES_BODY_MAX = 64 << 10
};

struct instances_options {
    struct listed *listed; /* NULL: the view is not this router's, so nothing can be listed */
    const struct tenants *tenants; /* whose keys open these paths; borrowed */
    /* Counts the nodes of the view by role: n[ROLE_MIXED .. ROLE_DECODE]. */
    void (*count)(void *arg, uint32_t n[3]);
    void *arg;
};

/* Answers an exchange of one of the paths above; false: it is of another. */
bool instances_serve(const struct instances_options *o, struct http_exchange *x);

/* Does the exchange have one of the keys, or is none needed? */
bool instances_has_key(const struct instances_options *o, const struct http_exchange *x);

/* ---- the bodies, for tests ---- */

/* They are read on the loop, so what is longer than INSTANCES_BODY_MAX is not (ERR_TOO_LONG), nor
 * what has many more values than a list of INSTANCES_MAX (ERR_INVALID). */

struct instances_change {
    struct node_at nodes[INSTANCES_MAX];
    size_t n;
};

enum status instances_read_change(struct str body, struct instances_change *out,
                                  struct err *err) MUST_CHECK;
enum status instances_read_register(struct str body, struct node_at *out,
                                    struct err *err) MUST_CHECK;

#endif
