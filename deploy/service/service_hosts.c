/* service_hosts.c - see service_hosts.h. */
#include "deploy/service/service_hosts.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/launch/launch_view.h"
#include "deploy/launch/ranks.h"
#include "deploy/launch/ranks_model.h"
#include "deploy/node/node_options.h"
#include "shared/base/mem.h"
#include "shared/model/model.h"

#define INTER_PROC_PORT "56666" /* that service's own default */

struct pods {
    size_t n, own, master; /* places in --ips */
};

bool service_hosts_several(void)
{
    const char *ips = getenv("POD_IPS"), *n = getenv("MP_NNODE");
    return (ips && strchr(ips, ',')) || (n && strtol(n, NULL, 10) > 1);
}

/* ---- which hosts there are, and which this is ---- */

static bool find_ip(const struct config *c, const char *ip, size_t *place)
{
    const char *item;
    for (*place = 0; (item = config_list(c, "ips", *place, NULL)); ++*place)
        if (strcmp(item, ip) == 0) return true;
    return false;
}

static enum status set_number(struct config *c, const char *name, size_t value, const char *from,
                              struct err *err)
{
    char text[32];
    snprintf(text, sizeof text, "%zu", value);
    return config_set_from(c, name, text, from, err);
}

static enum status read_own(struct config *c, struct err *err)
{
    const char *ip = getenv("HOST_IP");
    size_t place;
    if (!ip || !*ip || config_is_set(c, "node-rank")) return OK;
    if (!find_ip(c, ip, &place))
        return err_set(err, ERR_CONFIG, "HOST_IP %.80s is not one of the addresses of POD_IPS", ip);
    return set_number(c, "node-rank", place, "HOST_IP", err);
}

static enum status read_master(const struct config *c, struct pods *p, struct err *err)
{
    const char *ip = config_string(c, "data-parallel-address");
    p->master = 0;
    if (!ip || find_ip(c, ip, &p->master)) return OK;
    return err_set(err, ERR_CONFIG, "%s %.80s is not one of the addresses of %s",
                   config_source_text(c, "data-parallel-address"), ip,
                   config_source_text(c, "ips"));
}

static enum status read_pods(struct config *c, struct pods *p, struct err *err)
{
    struct ranks_hosts h;
    config_list(c, "ips", 0, &p->n);
    if (p->n < 2)
        return err_set(err, ERR_CONFIG,
                       "MP_NNODE is %lld: give the addresses of all hosts in POD_IPS, with commas "
                       "between them, and that of the first in POD_0_IP",
                       (long long)config_int(c, "nnodes"));
    TRY(read_own(c, err));
    TRY(ranks_read_hosts(c, &h, err));
    p->own = h.index;
    TRY(read_master(c, p, err));
    if (launch_view_has_secret(c)) return OK;
    return err_set(err, ERR_CONFIG,
                   "POD_IPS lists %zu hosts, and without a secret in common ports between nodes "
                   "stay on loopback: give all hosts the same BATON_CLUSTER_SECRET or "
                   "--cluster-secret-file",
                   p->n);
}

/* ---- how they find each other ---- */

static bool has_view(const struct config *c)
{
    return node_options_in_redis(c) || config_string(c, "router");
}

static enum status set_view(struct config *c, const struct pods *p, struct err *err)
{
    static const char CONTROL[] = "engine-worker-queue-port";
    const char *port = config_list(c, CONTROL, 0, NULL);
    char at[HOST_PORT_TEXT_MAX];
    uint16_t number = (uint16_t)strtol(port ? port : INTER_PROC_PORT, NULL, 10);
    if (has_view(c)) return OK;
    if (p->own == p->master)
        return port ? OK : config_set_from(c, CONTROL, INTER_PROC_PORT, "POD_IPS", err);
    host_port_text(config_list(c, "ips", p->master, NULL), number, at);
    config_forget(c, CONTROL); /* it is the master's */
    return config_set_from(c, "router", at, "POD_0_IP", err);
}

/* ---- what they share ---- */

static enum status has_experts(const struct config *c, bool *out, struct err *err)
{
    struct model_config *m = MEM_NEW(struct model_config);
    const enum status st = ranks_read_model(c, m, err);
    *out = st == OK && m->moe.n_experts > 0;
    mem_free(m);
    return st;
}

/* Rank 0 is on the first host of the list: that has to be the master. */
static enum status put_master_first(struct config *c, struct pods *p, struct err *err)
{
    struct buf ips = { 0 };
    const char *item;
    if (p->master == 0) return OK;
    buf_add_c(&ips, config_list(c, "ips", p->master, NULL));
    for (size_t i = 0; (item = config_list(c, "ips", i, NULL)); i++)
        if (i != p->master) buf_printf(&ips, ",%s", item);
    p->own = p->own == p->master ? 0 : p->own < p->master ? p->own + 1 : p->own;
    p->master = 0;
    const enum status st = config_set_from(c, "ips", ips.data, "POD_IPS", err);
    buf_release(&ips);
    return st;
}

/* LIMIT: GPUs that share experts are of one host. */
static enum status check_gpus(const struct config *c, const struct pods *p, struct err *err)
{
    if (strcmp(config_string(c, "device"), "cuda") != 0) return OK;
    return err_set(err, ERR_CONFIG,
                   "MP_NNODE %zu: GPUs of several hosts cannot share the experts of a model yet; "
                   "give MP_NNODE 1 and MP_NUM up to the GPUs of one host, or BATON_DEVICE=cpu",
                   p->n);
}

static enum status join_as_group(struct config *c, struct pods *p, struct err *err)
{
    TRY(check_gpus(c, p, err));
    TRY(put_master_first(c, p, err));
    TRY(set_number(c, "node-rank", p->own, "POD_IPS", err));
    TRY(config_set_from(c, "enable-expert-parallel", "true", "MP_NNODE", err));
    return config_is_set(c, "data-parallel-size")
               ? OK
               : set_number(c, "data-parallel-size", p->n, "MP_NNODE", err);
}

/* Each host has a node of its own: what is left of these variables is said by other options. */
static enum status join_as_nodes(struct config *c)
{
    static const char *const OF_GROUPS[] = { "ips", "nnodes", "node-rank",
                                             "data-parallel-address" };
    for (size_t i = 0; i < COUNT_OF(OF_GROUPS); i++) config_forget(c, OF_GROUPS[i]);
    return OK;
}

enum status service_hosts_complete(struct config *c, struct err *err)
{
    struct pods p = { 0 };
    bool experts;
    config_list(c, "ips", 0, &p.n);
    if (p.n < 2 && config_int(c, "nnodes") < 2) return OK;
    TRY(read_pods(c, &p, err));
    TRY(has_experts(c, &experts, err));
    if (!config_is_set(c, "advertise-host"))
        TRY(config_set_from(c, "advertise-host", config_list(c, "ips", p.own, NULL), "POD_IPS",
                            err));
    TRY(set_view(c, &p, err));
    return experts ? join_as_group(c, &p, err) : join_as_nodes(c);
}
