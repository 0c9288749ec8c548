/* launch_plan.c - see launch_plan.h. A node gets every option of `serve` that `launch` was given,
 * plus those that differ from node to node: role, port, rank, share of the CPUs. Environment
 * variables are inherited. */
#include "deploy/node/launch_plan.h"

#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deploy/options/option_table.h"
#include "kernels/device.h"
#include "shared/base/assert.h"

enum { PORT_FIRST = 8000, PORT_END = 10000 };

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

/* The control port is the launcher's own where it holds the view. */
static void hand_on(struct arg_list *a, const struct config *c, bool holds_view)
{
    struct buf value = { 0 };
    const struct option *o;
    for (size_t i = 0; (o = option_at(OPTIONS, i)); i++) {
        if (!takes(o, "serve") || !takes(o, "launch") || config_source(c, o->name) != SOURCE_ARGS)
            continue;
        if (holds_view && strcmp(o->name, "engine-worker-queue-port") == 0) continue;
        buf_clear(&value);
        value_text(c, o, &value);
        add_option(a, o->name, value.len ? value.data : "");
    }
    buf_release(&value);
}

static bool is_free(uint16_t port)
{
    struct sockaddr_in sa = {
        .sin_family = AF_INET,
        .sin_addr.s_addr = htonl(INADDR_ANY),
        .sin_port = htons(port),
    };
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool ok = fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
              bind(fd, (struct sockaddr *)&sa, sizeof sa) == 0 && listen(fd, 1) == 0;
    if (fd >= 0) close(fd);
    return ok;
}

static bool is_planned(const struct launch_plan *p, uint16_t port)
{
    for (size_t i = 0; i < p->n; i++)
        if (p->nodes[i].port == port) return true;
    return false;
}

/* Finds the next free port from 8000 on. These ports lie below the ephemeral range, so no "any free
 * port" of a node takes one first. Another program still may; the node then reports it. */
static uint16_t free_port(const struct launch_plan *p)
{
    for (uint16_t port = PORT_FIRST; port < PORT_END; port++)
        if (!is_planned(p, port) && is_free(port)) return port;
    return 0;
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

static enum status plan_node(const struct config *c, const char *program,
                             const char *directory_address, size_t i, struct launch_plan *p,
                             struct err *err)
{
    struct launch_node *node = &p->nodes[i];
    struct arg_list a = { p, node, 0 };
    int64_t port, metrics_port;
    char number[32];
    TRY(launch_listed_port(c, "ports", i, &port, err));
    TRY(launch_listed_port(c, "metrics-ports", i, &metrics_port, err));
    node->port = port > 0 ? (uint16_t)port : free_port(p);
    if (node->port == 0)
        return err_set(err, ERR_CONFIG, "no free port could be found for node %zu", i);
    add_arg(&a, program);
    add_arg(&a, "serve");
    hand_on(&a, c, directory_address != NULL);
    add_option(&a, "splitwise-role", node_role_name(node->role));
    snprintf(number, sizeof number, "%u", node->port);
    add_option(&a, "port", number);
    snprintf(number, sizeof number, "%lld", (long long)metrics_port);
    if (metrics_port > 0) add_option(&a, "metrics-port", number);
    snprintf(number, sizeof number, "%zu", i);
    add_option(&a, "local-data-parallel-id", number);
    snprintf(number, sizeof number, "%d", threads_per_node(c, p->n));
    add_option(&a, "compute-threads", number);
    const double share = share_per_node(c, p->n);
    snprintf(number, sizeof number, "%.4f", share);
    if (share > 0) add_option(&a, "gpu-memory-utilization", number);
    if (directory_address) add_option(&a, "router", directory_address);
    return OK;
}

static enum status check_counts(const struct config *c, size_t n, struct err *err)
{
    static const char *const lists[] = { "ports", "metrics-ports" };
    for (size_t i = 0; i < COUNT_OF(lists); i++) {
        size_t given = 0;
        config_list(c, lists[i], 0, &given);
        if (given > n)
            return err_field(err, ERR_CONFIG, lists[i],
                             "--%s names %zu ports for %zu nodes; give one per node or fewer",
                             lists[i], given, n);
        for (size_t k = 1; k < given; k++)
            for (size_t j = 0; j < k; j++)
                if (strcmp(config_list(c, lists[i], k, NULL), config_list(c, lists[i], j, NULL)) ==
                    0)
                    return err_field(err, ERR_CONFIG, lists[i],
                                     "--%s gives %s twice; each node needs its own", lists[i],
                                     config_list(c, lists[i], k, NULL));
    }
    return OK;
}

/* The nodes of a launch that share experts are the whole group. */
static enum status check_group(const struct config *c, size_t n, struct err *err)
{
    const int64_t size = config_int(c, "data-parallel-size");
    if (!config_bool(c, "enable-expert-parallel") || !config_is_set(c, "data-parallel-address") ||
        size == (int64_t)n)
        return OK;
    return err_field(err, ERR_CONFIG, "data-parallel-size",
                     "--data-parallel-size %lld with %zu nodes: with --data-parallel-address the "
                     "nodes of this launch are the ranks, so give --data-parallel-size %zu",
                     (long long)size, n, n);
}

enum status launch_plan_make(const struct config *c, const char *program,
                             const char *directory_address, struct launch_plan *out,
                             struct err *err)
{
    size_t n_prefill = (size_t)config_int(c, "prefill"), n_decode = (size_t)config_int(c, "decode"),
           n_mixed = (size_t)config_int(c, "num-servers");
    *out = (struct launch_plan){ .n = n_prefill + n_decode + n_mixed };
    arena_init(&out->arena);
    if (out->n == 0)
        return err_field(err, ERR_CONFIG, "prefill",
                         "nothing to launch: give --prefill N and --decode M, or --num-servers N "
                         "for mixed nodes");
    if (out->n > LAUNCH_NODES_MAX)
        return err_field(err, ERR_CONFIG, "prefill", "%zu nodes on one host, at most %d", out->n,
                         LAUNCH_NODES_MAX);
    /* In Redis, or at a directory server elsewhere, decode nodes of other hosts can be found. */
    if (n_prefill && !n_decode && !n_mixed && directory_address)
        return err_field(err, ERR_CONFIG, "decode",
                         "--prefill %zu without a node that decodes; add --decode N, or name where "
                         "those of other hosts are found (--scheduler-name splitwise with "
                         "--scheduler-host, or --router)",
                         n_prefill);
    TRY(check_counts(c, out->n, err));
    TRY(check_group(c, out->n, err));
    out->nodes = ARENA_ARRAY(&out->arena, struct launch_node, out->n);
    for (size_t i = 0; i < out->n; i++) {
        out->nodes[i].role = i < n_prefill              ? ROLE_PREFILL
                             : i < n_prefill + n_decode ? ROLE_DECODE
                                                        : ROLE_MIXED;
        TRY(plan_node(c, program, directory_address, i, out, err));
    }
    return OK;
}

void launch_plan_release(struct launch_plan *p) { arena_release(&p->arena); }
