/* launch_view.c - see launch_view.h. */
#include "deploy/launch/launch_view.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/launch/launch_plan.h"
#include "deploy/node/node_options.h"
#include "shared/base/address/host_port.h"
#include "shared/base/hash/hash.h"

enum { SECRET_BYTES = 24 };

/* The nodes find each other in Redis, or at the directory server that an option names. */
static bool is_named(const struct config *c)
{
    return node_options_in_redis(c) || config_string(c, "router") ||
           config_list(c, "innode-prefill-ports", 0, NULL);
}

bool launch_view_has_secret(const struct config *c)
{
    const char *secret = getenv("BATON_CLUSTER_SECRET");
    return (secret && *secret) || config_is_set(c, "cluster-secret-file");
}

static bool make_secret(const struct config *c, const char *loopback)
{
    uint8_t bytes[SECRET_BYTES];
    char text[2 * SECRET_BYTES + 1];
    if (getenv("BATON_CLUSTER_SECRET") || config_is_set(c, "cluster-secret-file")) return false;
    random_bytes(bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    setenv("BATON_CLUSTER_SECRET", text, 1);
    setenv("BATON_ADVERTISE_HOST", loopback, 0); /* only for these processes: nobody else joins */
    return true;
}

static enum status check_secret(const struct config *c, const struct ranks *r, struct err *err)
{
    if (!ranks_elsewhere(r) || host_is_loopback(r->host) || launch_view_has_secret(c)) return OK;
    return err_field(err, ERR_CONFIG, "cluster-secret-file",
                     "ranks of several hosts meet at %s, and without a cluster secret ports "
                     "between nodes stay on loopback: give all hosts the same "
                     "BATON_CLUSTER_SECRET or --cluster-secret-file",
                     r->host);
}

enum status launch_view_choose(const struct config *c, const struct ranks *r, bool is_joined,
                               struct launch_view *out, struct err *err)
{
    int64_t port;
    const bool several = r->kind != RANKS_NONE && ranks_elsewhere(r);
    *out = (struct launch_view){ .address = host_loopback(config_string(c, "host")) };
    TRY(check_secret(c, r, err));
    if (is_named(c)) return OK;
    if (several && r->rank > 0) {
        host_port_text(r->host, ranks_view_port(r), out->elsewhere);
        return OK;
    }
    TRY(launch_listed_port(c, "engine-worker-queue-port", 0, &port, err));
    out->here = true;
    out->port = port > 0 ? (uint16_t)port : several ? ranks_view_port(r) : 0;
    out->own_secret = !several && !is_joined && make_secret(c, out->address);
    return OK;
}

const char *launch_view_api_host(const struct config *c)
{
    const char *host = config_string(c, "host");
    return host_is_number(host) && !host_is_wildcard(host) ? host : host_loopback(host);
}
