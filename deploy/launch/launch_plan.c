/* launch_plan.c - see launch_plan.h. A node gets every option of `serve` that its parent was given,
 * plus those that differ from node to node: role, port, rank, share of the CPUs. Environment
 * variables are inherited. */
#include "deploy/launch/launch_plan.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/options/option_table.h"
#include "kernels/device.h"
#include "shared/base/assert.h"
#include "shared/base/hash/hash.h"

/* Ports of ranks begin at a random place, so that two parents which start together rarely choose
 * the same. Both ranges lie below the ephemeral one, so no "any free port" takes one first. */
enum { PORT_FIRST = 8000, PORT_END = 10000, RANK_PORT_FIRST = 20000, RANK_PORT_END = 30000 };

struct arg_list {
    struct launch_plan *plan;
    struct launch_node *node;
    size_t n;
};

static void add_arg(struct arg_list *a, const char *text)
{
    ASSERT(a->n + 1 < LAUNCH_ARGS_MAX); /* far more than the options in the table */
    a->node->argv[a->n++] = arena_strndup(&a->plan->arena, text, strlen(text));
}

static void add_option(struct arg_list *a, const char *name, const char *value)
{
    struct buf b = { 0 };
    buf_printf(&b, "--%s=%s", name, value);
    add_arg(a, b.data);
    buf_release(&b);
}

static bool takes(const struct option *o, const char *command)
{
    return !o->commands || str_find(str_of(o->commands), str_of(command)) != SIZE_MAX;
}

static void value_text(const struct config *c, const struct option *o, struct buf *out)
{
    size_t n = 0;
    switch (o->type) {
    case OPT_BOOL: buf_add_c(out, config_bool(c, o->name) ? "true" : "false"); break;
    case OPT_INT: buf_printf(out, "%lld", (long long)config_int(c, o->name)); break;
    case OPT_FLOAT: buf_printf(out, "%.17g", config_float(c, o->name)); break;
    case OPT_LIST:
        config_list(c, o->name, 0, &n);
        for (size_t i = 0; i < n; i++)
            buf_printf(out, "%s%s", i ? "," : "", config_list(c, o->name, i, NULL));
        break;
    case OPT_STRING:
    case OPT_ENUM:
    case OPT_JSON: buf_add_c(out, config_string(c, o->name)); break;
    }
}

static bool is_one_of(const char *name, const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

/* Each rank gets these with a value of its own. */
static const char *const OF_RANKS[] = { "data-parallel-size",     "data-parallel-size-local",
                                        "data-parallel-rank",     "data-parallel-start-rank",
                                        "data-parallel-address",  "data-parallel-rpc-port",
                                        "local-data-parallel-id", "tensor-parallel-size" };
/* Of the parent alone; of the lists ranks get their entries. */
static const char *const OF_PARENT[] = { "port",        "metrics-port", "grpc-port",
                                         "health-port", "headless",     "restart" },
                         *const LISTS[] = { "engine-worker-queue-port", "pd-comm-port",
                                            "cache-queue-port", "rdma-comm-ports" };

/* The control port is the parent's own where it holds the view. */
static bool is_handed_on(const struct option *o, const struct config *c,
                         const struct launch_args *w)
{
    if (!takes(o, "serve") || !takes(o, w->behind ? "serve" : "launch") ||
        config_source(c, o->name) != SOURCE_ARGS)
        return false;
    if (w->holds_view && strcmp(o->name, LISTS[0]) == 0) return false;
    if (w->ranks.kind != RANKS_NONE && is_one_of(o->name, OF_RANKS, COUNT_OF(OF_RANKS)))
        return false;
    return !w->behind || !(is_one_of(o->name, OF_PARENT, COUNT_OF(OF_PARENT)) ||
                           is_one_of(o->name, LISTS, COUNT_OF(LISTS)));
}

static void hand_on(struct arg_list *a, const struct config *c, const struct launch_args *w)
{
    struct buf value = { 0 };
    const struct option *o;
    for (size_t i = 0; (o = option_at(OPTIONS, i)); i++) {
        if (!is_handed_on(o, c, w)) continue;
        buf_clear(&value);
        value_text(c, o, &value);
        add_option(a, o->name, value.len ? value.data : "");
    }
    buf_release(&value);
}

static bool is_planned(const struct launch_plan *p, uint16_t port)
{
    for (size_t i = 0; i < p->n; i++)
        if (p->nodes[i].port == port || p->nodes[i].meet_port == port) return true;
    return port == p->ranks.port;
}

/* The lists that name ports which processes bind when they start. */
static const char *const NAMED[] = {
    "ports",           "metrics-ports",           "grpc-ports", "pd-comm-port", "cache-queue-port",
    "rdma-comm-ports", "engine-worker-queue-port"
};

static bool is_named(const struct config *c, uint16_t port)
{
    const char *item;
    for (size_t k = 0; k < COUNT_OF(NAMED); k++)
        for (size_t i = 0; (item = config_list(c, NAMED[k], i, NULL)); i++)
            if (strtol(item, NULL, 10) == port) return true;
    return false;
}

/* Keeps other launchers from choosing the named ports for their ranks. One that did so before is
 * found when the port is bound. */
static void claim_named(const struct config *c, const struct launch_args *w, struct launch_plan *p)
{
    const char *item;
    const int64_t own = config_int(c, "port");
    if (w->behind && own > 0) (void)port_claim(&p->claims, (uint16_t)own);
    for (size_t k = 0; k < COUNT_OF(NAMED); k++)
        for (size_t i = 0; (item = config_list(c, NAMED[k], i, NULL)); i++) {
            const long port = strtol(item, NULL, 10);
            if (port > 0 && port <= UINT16_MAX) (void)port_claim(&p->claims, (uint16_t)port);
        }
}

static bool may_have(const struct config *c, const struct launch_plan *p, uint16_t port)
{
    return !is_planned(p, port) && !is_named(c, port) && port_is_free(port);
}

/* Finds the next free port from `first` on, `end` not included; 0: there is none. Another program
 * may still take it; the node then reports it. */
static uint16_t free_port(const struct config *c, const struct launch_plan *p, uint16_t first,
                          uint16_t end)
{
    for (uint16_t port = first; port < end; port++)
        if (may_have(c, p, port)) return port;
    return 0;
}

/* The same, of those that other launchers have not chosen. */
static uint16_t claim_port(const struct config *c, struct launch_plan *p, uint16_t first,
                           uint16_t end)
{
    for (uint16_t port = first; port < end; port++)
        if (may_have(c, p, port) && port_claim(&p->claims, port)) return port;
    return 0;
}

uint16_t launch_plan_free_port(struct launch_plan *p, const struct config *c)
{
    uint16_t random;
    random_bytes(&random, sizeof random);
    const uint16_t first = RANK_PORT_FIRST + random % (RANK_PORT_END - RANK_PORT_FIRST);
    const uint16_t port = claim_port(c, p, first, RANK_PORT_END);
    return port ? port : claim_port(c, p, RANK_PORT_FIRST, first);
}

enum status launch_listed_port(const struct config *c, const char *name, size_t i, int64_t *out,
                               struct err *err)
{
    const char *item = config_list(c, name, i, NULL);
    *out = -1;
    if (!item || str_eq_c(str_of(item), "-1")) return OK; /* -1 means "choose one" in FastDeploy */
    if (str_to_i64(str_trim(str_of(item)), out) != OK || *out < 1 || *out > 65535)
        return err_field(err, ERR_CONFIG, name, "--%s: '%s' is not a port (1 to 65535)", name,
                         item);
    return OK;
}

static int threads_per_node(const struct config *c, size_t n_nodes)
{
    cpu_set_t set;
    int n = (int)config_int(c, "compute-threads");
    if (n) return n;
    n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) / (int)n_nodes : 1;
    return n > 0 ? n : 1;
}

/* The share of GPU memory of each node when several share a GPU. 0, add no option: every node has a
 * GPU of its own, the user gave a size, or there is no GPU. */
static double share_per_node(const struct config *c, size_t n_nodes)
{
    static const char *const AMOUNTS[] = { "gpu-memory-utilization", "kv-cache-memory",
                                           "num-gpu-blocks-override" };
    const size_t n_gpus = (size_t)device_count("cuda");
    if (strcmp(config_string(c, "device"), "cuda") != 0 || n_gpus == 0 || n_nodes <= n_gpus)
        return 0;
    for (size_t i = 0; i < COUNT_OF(AMOUNTS); i++)
        if (config_is_set(c, AMOUNTS[i])) return 0;
    return config_float(c, "gpu-memory-utilization") / (double)((n_nodes + n_gpus - 1) / n_gpus);
}

static void add_number(struct arg_list *a, const char *name, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    add_option(a, name, text);
}

/* Lists that are too short for the ranks are filled with "any free port". */
static void add_lists(struct arg_list *a, const struct config *c, const struct launch_args *w)
{
    const struct ranks *r = &a->plan->ranks;
    const size_t n = (r->local + r->n_started) * r->tp.size; /* as many as RDMA ports */
    for (size_t k = 0; k < COUNT_OF(LISTS); k++) {
        struct buf ports = { 0 };
        if (!config_is_set(c, LISTS[k]) || (k == 0 && w->holds_view)) continue;
        for (size_t i = 0; i < n; i++) {
            const char *item = config_list(c, LISTS[k], i, NULL);
            buf_printf(&ports, "%s%s", i ? "," : "", item ? item : "0");
        }
        add_option(a, LISTS[k], ports.data);
        buf_release(&ports);
    }
}

/* Which process of its node it is. */
static void add_process(struct arg_list *a, const struct ranks *r, size_t i)
{
    add_number(a, "tensor-parallel-size", r->tp.size);
    if (r->tp.size < 2) return;
    add_number(a, "tensor-parallel-rank", (int64_t)(i - a->node->first));
    add_number(a, "tensor-parallel-port", a->node->meet_port);
}

/* i: the process of the plan. */
static void add_rank(struct arg_list *a, const struct ranks *r, size_t i)
{
    const int64_t node = (int64_t)(i / r->tp.size);
    add_number(a, "local-data-parallel-id", r->local + node);
    if (r->kind == RANKS_NONE) return;
    add_process(a, r, i);
    if (!r->experts) return;
    add_number(a, "data-parallel-size", r->size);
    add_number(a, "data-parallel-rank", r->rank + node);
    add_number(a, "data-parallel-start-rank", r->first);
    if (r->n_local) add_number(a, "data-parallel-size-local", r->n_local);
    add_option(a, "data-parallel-address", r->host);
    add_number(a, "data-parallel-rpc-port", r->port);
}

/* Ports beside the API's; -1: nothing is said of it. */
struct extra_ports {
    int64_t metrics, grpc;
};

static void write_args(const struct config *c, const struct launch_args *w, size_t i,
                       const struct extra_ports *extra, struct launch_plan *p)
{
    struct launch_node *node = &p->nodes[i];
    struct arg_list a = { p, node, 0 };
    char number[32];
    add_arg(&a, w->program);
    add_arg(&a, "serve");
    hand_on(&a, c, w);
    if (w->behind) add_lists(&a, c, w);
    else add_option(&a, "splitwise-role", node_role_name(node->role));
    add_number(&a, "port", node->port);
    if (extra->metrics >= 0) add_number(&a, "metrics-port", extra->metrics);
    if (extra->grpc >= 0) add_number(&a, "grpc-port", extra->grpc);
    if (w->behind || i > 0) add_number(&a, "health-port", 0); /* one is for all */
    add_rank(&a, &p->ranks, i);
    add_number(&a, "compute-threads", threads_per_node(c, p->n));
    const double share = share_per_node(c, p->n);
    snprintf(number, sizeof number, "%.4f", share);
    if (share > 0) add_option(&a, "gpu-memory-utilization", number);
    if (w->directory) add_option(&a, "router", w->directory);
}

/* Ports that are not named follow the last one that is. */
static uint16_t choose_port(const struct config *c, const struct launch_plan *p)
{
    size_t n_named = 0;
    int64_t last = -1;
    uint16_t port = 0;
    struct err err;
    (void)config_list(c, "ports", 0, &n_named);
    while (n_named && last < 0)
        if (launch_listed_port(c, "ports", --n_named, &last, &err) != OK) last = -1;
    if (last > 0) port = free_port(c, p, (uint16_t)last, UINT16_MAX);
    return port ? port : free_port(c, p, PORT_FIRST, PORT_END);
}

/* Ports of the first process of a node; those that follow it have none. */
static enum status choose_ports(const struct config *c, const struct launch_args *w, size_t i,
                                struct launch_plan *p, struct extra_ports *extra, struct err *err)
{
    struct launch_node *node = &p->nodes[i];
    const size_t entry = i / p->ranks.tp.size;
    int64_t port = -1;
    if (node->first != i) return OK;
    if (!w->behind) {
        TRY(launch_listed_port(c, "ports", entry, &port, err));
        TRY(launch_listed_port(c, "metrics-ports", entry, &extra->metrics, err));
        TRY(launch_listed_port(c, "grpc-ports", entry, &extra->grpc, err));
        if (extra->grpc < 0) extra->grpc = 0; /* not one that the environment has for all */
    }
    node->port = port > 0    ? (uint16_t)port
                 : w->behind ? launch_plan_free_port(p, c)
                             : choose_port(c, p);
    if (node->port) return OK;
    return err_set(err, ERR_CONFIG, "no free port could be found for node %zu", entry);
}

/* The first process of a node listens for the others with its cluster port. */
static enum status choose_meet_port(const struct config *c, size_t i, struct launch_plan *p,
                                    struct err *err)
{
    const struct ranks *r = &p->ranks;
    struct launch_node *node = &p->nodes[i];
    const size_t entry = r->local + i / r->tp.size;
    int64_t port;
    node->meet_port = p->nodes[node->first].meet_port;
    if (r->tp.size < 2 || node->first != i) return OK;
    TRY(launch_listed_port(c, "pd-comm-port", entry, &port, err));
    const bool is_rank_0 = r->experts && r->rank + i == 0;
    node->meet_port = is_rank_0 ? r->port : port > 0 ? (uint16_t)port : launch_plan_free_port(p, c);
    if (node->meet_port) return OK;
    return err_set(err, ERR_CONFIG, "no free port could be found for the processes of node %zu",
                   entry);
}

static enum status plan_node(const struct config *c, const struct launch_args *w, size_t i,
                             struct launch_plan *p, struct err *err)
{
    struct extra_ports extra = { 0, 0 }; /* of ranks: none, whatever the environment says */
    p->nodes[i].first = i - i % p->ranks.tp.size;
    TRY(choose_ports(c, w, i, p, &extra, err));
    if (i > 0 && extra.metrics < 0) extra.metrics = 0; /* one of the environment is the first's */
    TRY(choose_meet_port(c, i, p, err));
    write_args(c, w, i, &extra, p);
    return OK;
}

/* Where rank 0 listens, when nothing was said of it: its cluster port, or any free one. */
static enum status choose_meeting_port(const struct config *c, struct launch_plan *p,
                                       struct err *err)
{
    int64_t port;
    if (!p->ranks.experts) return OK;
    TRY(launch_listed_port(c, "pd-comm-port", p->ranks.local, &port, err));
    if (p->ranks.rank > 0 || (port <= 0 && p->ranks.port)) return OK;
    if (p->ranks.port && p->ranks.port != port)
        return err_field(err, ERR_CONFIG, "pd-comm-port",
                         "rank 0 listens for the other ranks with its cluster port: "
                         "--pd-comm-port %lld and --data-parallel-rpc-port %u must be the same",
                         (long long)port, p->ranks.port);
    p->ranks.port = port > 0 ? (uint16_t)port : launch_plan_free_port(p, c);
    if (p->ranks.port) return OK;
    return err_set(err, ERR_CONFIG, "no free port could be found where the ranks meet");
}

static enum status check_counts(const struct config *c, size_t n, struct err *err)
{
    static const char *const lists[] = { "ports", "metrics-ports", "grpc-ports" };
    for (size_t i = 0; i < COUNT_OF(lists); i++) {
        size_t given = 0;
        config_list(c, lists[i], 0, &given);
        if (given > n)
            return err_field(err, ERR_CONFIG, lists[i],
                             "--%s names %zu ports for %zu nodes; give one per node or fewer",
                             lists[i], given, n);
        for (size_t k = 1; k < given; k++) {
            const char *port = config_list(c, lists[i], k, NULL);
            if (strcmp(port, "-1") == 0) continue; /* one is chosen for each */
            for (size_t j = 0; j < k; j++)
                if (strcmp(port, config_list(c, lists[i], j, NULL)) == 0)
                    return err_field(err, ERR_CONFIG, lists[i],
                                     "--%s gives %s twice; each node needs its own", lists[i],
                                     port);
        }
    }
    return OK;
}

size_t launch_plan_n_nodes(const struct config *c)
{
    return (size_t)(config_int(c, "prefill") + config_int(c, "decode") +
                    config_int(c, "num-servers"));
}

static enum status check_launch(const struct config *c, const struct launch_args *w, size_t n,
                                struct err *err)
{
    if (n == 0)
        return err_field(err, ERR_CONFIG, "prefill",
                         "nothing to launch: give --prefill N and --decode M, or --num-servers N "
                         "for mixed nodes");
    if (n * w->ranks.tp.size > LAUNCH_NODES_MAX)
        return err_field(err, ERR_CONFIG, "prefill", "%zu processes on one host, at most %d",
                         n * w->ranks.tp.size, LAUNCH_NODES_MAX);
    /* In Redis, or at a directory server elsewhere, decode nodes of other hosts can be found. */
    if (n == (size_t)config_int(c, "prefill") && w->holds_view)
        return err_field(err, ERR_CONFIG, "decode",
                         "--prefill %zu without a node that decodes; add --decode N, or name where "
                         "those of other hosts are found (--scheduler-name splitwise with "
                         "--scheduler-host, or --router)",
                         n);
    return check_counts(c, n, err);
}

static enum node_role role_of(const struct config *c, const struct launch_args *w, size_t i)
{
    const size_t n_prefill = (size_t)config_int(c, "prefill"),
                 n_decode = (size_t)config_int(c, "decode");
    if (w->behind) return w->role;
    return i < n_prefill ? ROLE_PREFILL : i < n_prefill + n_decode ? ROLE_DECODE : ROLE_MIXED;
}

enum status launch_plan_make(const struct config *c, const struct launch_args *w,
                             struct launch_plan *out, struct err *err)
{
    const size_t n_nodes = w->behind ? w->ranks.n_started : launch_plan_n_nodes(c);
    *out = (struct launch_plan){ .n = n_nodes * w->ranks.tp.size, .ranks = w->ranks };
    arena_init(&out->arena);
    if (!w->behind) TRY(check_launch(c, w, n_nodes, err));
    out->nodes = ARENA_ARRAY(&out->arena, struct launch_node, out->n);
    claim_named(c, w, out);
    TRY(choose_meeting_port(c, out, err));
    for (size_t i = 0; i < out->n; i++) {
        out->nodes[i].role = role_of(c, w, i / w->ranks.tp.size);
        TRY(plan_node(c, w, i, out, err));
    }
    return OK;
}

void launch_plan_print_ports(const struct launch_plan *p, struct buf *out)
{
    for (size_t i = 0; i < p->n; i++)
        if (p->nodes[i].port) buf_printf(out, "%s%u", i ? ", " : " ", p->nodes[i].port);
}

void launch_plan_release(struct launch_plan *p)
{
    port_claims_release(&p->claims);
    arena_release(&p->arena);
}
