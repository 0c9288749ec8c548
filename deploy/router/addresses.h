/* addresses.h - which nodes a router's operator lists: vLLM's and vLLM-Ascend's proxy options, and
 * "host:port" of requests. Thread: any (pure functions). */
#ifndef BATON_DEPLOY_ROUTER_ADDRESSES_H
#define BATON_DEPLOY_ROUTER_ADDRESSES_H

#include "deploy/options/config.h"
#include "scheduler/directory/directory.h"
#include "shared/base/address/host_port.h"

/* Where a node's API is, and the role with which it is listed. */
struct node_at {
    enum node_role role;
    char host[HOST_TEXT_MAX];
    uint16_t port;
};

struct addresses {
    struct node_at *nodes; /* [n], mem_free */
    size_t n;
};

/* Reads --prefiller-hosts, --prefiller-hosts-num, --prefiller-ports and --prefiller-ports-inc, and
 * the same of --decoder-. Host i is repeated hosts-num[i] times and port i stands for ports-inc[i]
 * ports, each one above the last (1 where these are not given); the k-th host then has the k-th
 * port. Without any of the options n is 0. ERR_CONFIG names the option and both counts. The caller
 * releases `out` in any case. */
enum status addresses_read(const struct config *c, struct addresses *out,
                           struct err *err) MUST_CHECK;
void addresses_release(struct addresses *a);

/* Parses "host:port"; a wildcard address is this host. */
enum status address_parse(const char *text, enum node_role role, struct node_at *out,
                          struct err *err) MUST_CHECK;

#endif
