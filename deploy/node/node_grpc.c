/* node_grpc.c - the gRPC port of a node, of a router, and of the port before ranks: KServe's
 * protocol before the same API server as HTTP. Thread: loop. */
#include "deploy/node/node_internal.h"

static struct serve *api_server(void *arg, struct buf *why)
{
    struct node *n = arg;
    if (!n->serve) node_say_why(n, why);
    return n->serve;
}

/* What the options promise of a port for clients is promised of each. */
static struct grpc_limits limits_like(const struct http_limits *http)
{
    struct grpc_limits l = GRPC_LIMITS_DEFAULT;
    l.message_bytes = http->body_bytes;
    l.n_connections = http->n_connections;
    l.n_client_connections = http->n_client_connections;
    l.n_client_requests = http->n_client_requests;
    l.answers_bytes = http->answers_bytes;
    l.large_bodies_bytes = http->large_bodies_bytes;
    return l;
}

enum status node_grpc_start(struct node *n, struct err *err)
{
    const struct kserve_options o = {
        .loop = n->loop,
        .host = n->o.host,
        .port = n->o.grpc_port,
        .option = launcher_watch_has_launcher() ? "--grpc-ports" : "--grpc-port",
        .share_port = n->o.worker.port != 0,
        .limits = limits_like(&n->o.http_limits),
        .tenants = &n->o.tenants,
        .metrics = n->metrics,
        .version = BATON_VERSION,
        .serve = api_server,
        .arg = n,
    };
    return n->o.http && n->o.grpc_port ? kserve_start(&o, &n->grpc, err) : OK;
}

void node_grpc_drain(struct node *n)
{
    if (n->grpc) kserve_drain(n->grpc);
}

static void stopped(void *arg)
{
    struct node *n = arg;
    n->grpc = NULL;
    node_stop_goes_on(n);
}

void node_grpc_stop(struct node *n, uint32_t grace_ms)
{
    if (!n->grpc) return;
    if (kserve_is_stopping(n->grpc)) kserve_hurry(n->grpc, grace_ms);
    else kserve_stop(n->grpc, grace_ms, stopped, n);
}
