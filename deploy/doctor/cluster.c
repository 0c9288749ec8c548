/* cluster.c - checks what a node needs from others: the shared secret and the directory server
 * (directory.c). Thread: main. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/doctor/doctor.h"
#include "deploy/launch/launch_plan.h"
#include "deploy/node/node_options.h"
#include "deploy/options/config_redis.h"
#include "shared/base/address/host_port.h"

static bool is_here(const char *host)
{
    return strcmp(host, "localhost") == 0 || strncmp(host, "127.", 4) == 0 ||
           strcmp(host, "::1") == 0 || strcmp(host, "0.0.0.0") == 0;
}

static bool is_redis_here(const struct config *c)
{
    struct arena arena;
    struct redis_server server;
    struct err err = { 0 }; /* doctor_check_redis says it */
    arena_init(&arena);
    const bool known = config_redis(c, &arena, &server, &err) == OK;
    const char *at = !known               ? "localhost"
                     : server.n_sentinels ? server.sentinels[0].host
                                          : server.host;
    const bool here = is_here(at);
    arena_release(&arena);
    return here;
}

/* Does this node need a secret? Nodes on one host meet on loopback without one; others cannot. */
static bool has_far_peers(const struct config *c)
{
    const char *router = config_string(c, "router");
    struct ranks r;
    struct err err = { 0 }; /* doctor_check_group says it */
    if (ranks_read(c, launch_plan_n_nodes(c), &r, &err) == OK && r.experts && ranks_elsewhere(&r) &&
        !host_is_loopback(r.host))
        return true;
    if (node_options_in_redis(c) && !is_redis_here(c)) return true;
    return router && strncmp(router, "127.", 4) != 0 && strncmp(router, "localhost", 9) != 0 &&
           strncmp(router, "0.0.0.0", 7) != 0;
}

static void check_secret(struct doctor *d)
{
    const char *file = config_string(d->c, "cluster-secret-file"),
               *env = getenv("BATON_CLUSTER_SECRET");
    if (file && access(file, R_OK) != 0) {
        doctor_fix(doctor_add(d, "secret", DOCTOR_FAIL, "--cluster-secret-file %s: %s", file,
                              strerror(errno)),
                   "give a file that this user can read");
    } else if (file || (env && *env)) {
        doctor_add(d, "secret", DOCTOR_OK, "from %s; nodes listen on all addresses",
                   file ? file : "BATON_CLUSTER_SECRET");
    } else if (has_far_peers(d->c)) {
        doctor_fix(doctor_add(d, "secret", DOCTOR_FAIL,
                              "none: node-to-node ports stay on 127.0.0.1, so nodes of other hosts "
                              "cannot reach this one"),
                   "set the same BATON_CLUSTER_SECRET on every host");
    } else {
        doctor_add(d, "secret", DOCTOR_OK,
                   "none: node-to-node ports stay on 127.0.0.1, enough for one host");
    }
}

void doctor_check_cluster(struct doctor *d)
{
    const char *router = config_string(d->c, "router"),
               *innode = config_list(d->c, "innode-prefill-ports", 0, NULL);
    check_secret(d);
    if (innode) doctor_check_directory_server(d, "innode-prefill-ports", "127.0.0.1", innode);
    if (!router) return;
    char host[HOST_TEXT_MAX], number[8];
    uint16_t port;
    if (!host_port_parse(router, host, &port) || !host[0]) {
        doctor_fix(
            doctor_add(d, "cluster view", DOCTOR_FAIL, "--router %s is not host:port", router),
            "give host:port; an IPv6 address stands in brackets");
        return;
    }
    snprintf(number, sizeof number, "%u", port);
    doctor_check_directory_server(d, "router", host_is_wildcard(host) ? host_loopback(host) : host,
                                  number);
}
