/* ranks.c - see ranks.h. */
#include "deploy/launch/ranks.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <string.h>

#include "kernels/ep/ep.h"
#include "shared/cluster/group.h"

enum { MEET_PORT = 29550 /* vLLM's default */ };

static uint32_t number(const struct config *c, const char *name)
{
    return (uint32_t)config_int(c, name);
}

static bool is_on_gpu(const struct config *c)
{
    return strcmp(config_string(c, "device"), "cuda") == 0;
}

/* LIMIT: the ranks of a node are on one host: MP_NUM ranks on MP_NNODE hosts are as many nodes
 * (foreign_value.h). */
static uint32_t tp_size(const struct config *c) { return number(c, "tensor-parallel-size"); }

/* ---- hosts ---- */

static bool has_address(const struct ifaddrs *list, const char *text)
{
    struct in_addr v4;
    struct in6_addr v6;
    const bool is_v4 = inet_pton(AF_INET, text, &v4) == 1,
               is_v6 = !is_v4 && inet_pton(AF_INET6, text, &v6) == 1;
    for (const struct ifaddrs *a = list; a; a = a->ifa_next) {
        if (!a->ifa_addr) continue;
        if (is_v4 && a->ifa_addr->sa_family == AF_INET &&
            memcmp(&((struct sockaddr_in *)a->ifa_addr)->sin_addr, &v4, sizeof v4) == 0)
            return true;
        if (is_v6 && a->ifa_addr->sa_family == AF_INET6 &&
            memcmp(&((struct sockaddr_in6 *)a->ifa_addr)->sin6_addr, &v6, sizeof v6) == 0)
            return true;
    }
    return false;
}

const char *ranks_own_ip(const struct config *c, size_t *index)
{
    struct ifaddrs *list = NULL;
    const char *item, *mine = NULL;
    size_t n;
    *index = 0;
    config_list(c, "ips", 0, &n);
    if (n < 2 || getifaddrs(&list) != 0) return NULL;
    for (size_t i = 0; !mine && (item = config_list(c, "ips", i, NULL)); i++) {
        if (has_address(list, item)) mine = item;
        if (mine) *index = i;
    }
    freeifaddrs(list);
    return mine;
}

/* A host is found in the list by its number, so a name would be found by none. */
static enum status check_ips(const struct config *c, size_t n, struct err *err)
{
    for (size_t i = 0; n > 1 && i < n; i++) {
        const char *ip = config_list(c, "ips", i, NULL);
        if (!host_is_number(ip))
            return err_field(err, ERR_CONFIG, "ips", "%s: '%s' is not an IP address",
                             config_source_text(c, "ips"), ip);
        for (size_t k = 0; k < i; k++)
            if (strcmp(config_list(c, "ips", k, NULL), ip) == 0)
                return err_field(err, ERR_CONFIG, "ips",
                                 "%s lists %s twice; each host has its own ranks",
                                 config_source_text(c, "ips"), ip);
    }
    return OK;
}

enum status ranks_read_hosts(const struct config *c, struct ranks_hosts *out, struct err *err)
{
    const uint32_t n_nodes = number(c, "nnodes");
    size_t n_ips, index;
    config_list(c, "ips", 0, &n_ips);
    TRY(check_ips(c, n_ips, err));
    *out = (struct ranks_hosts){ n_ips > 1 ? (uint32_t)n_ips : n_nodes, number(c, "node-rank") };
    if (n_ips > 1 && config_is_set(c, "nnodes") && n_nodes != n_ips)
        return err_field(err, ERR_CONFIG, "nnodes", "%s %u, but %s lists %zu addresses",
                         config_source_text(c, "nnodes"), n_nodes, config_source_text(c, "ips"),
                         n_ips);
    if (n_ips > 1 && !config_is_set(c, "node-rank")) {
        if (!ranks_own_ip(c, &index))
            return err_field(err, ERR_CONFIG, "ips",
                             "%s: none of its %zu addresses is one of this host; list it, or say "
                             "which this is by --node-rank (of start_server by HOST_IP)",
                             config_source_text(c, "ips"), n_ips);
        out->index = (uint32_t)index;
    }
    if (out->index >= out->n)
        return err_field(err, ERR_CONFIG, "node-rank",
                         "--node-rank %u is not one of %u hosts: they count from 0 to %u",
                         out->index, out->n, out->n - 1);
    return OK;
}

/* ---- this host's ranks ---- */

static enum status check_range(const struct config *c, const struct ranks *r, struct err *err)
{
    if (r->n_local > r->size)
        return err_field(err, ERR_CONFIG, "data-parallel-size-local",
                         "%u ranks on this host (%s) are more than the %u of "
                         "--data-parallel-size",
                         r->n_local, config_source_text(c, "data-parallel-size-local"), r->size);
    if (r->first + r->n_local > r->size || r->n_local == 0)
        return err_field(err, ERR_CONFIG, "data-parallel-start-rank",
                         "--data-parallel-start-rank %u with %u ranks on this host: "
                         "--data-parallel-size %u has ranks 0 to %u",
                         r->first, r->n_local, r->size, r->size - 1);
    return OK;
}

/* Hosts without a word about where theirs begin have equally many, one after the other. */
static enum status check_hosts(const struct ranks_hosts *h, const struct ranks *r, struct err *err)
{
    if (h->n < 2 || (uint64_t)h->n * r->n_local == r->size) return OK;
    return err_field(err, ERR_CONFIG, "data-parallel-size-local",
                     "%u hosts with %u ranks each have %llu, and --data-parallel-size is %u; give "
                     "each --data-parallel-start-rank where they have unequally many",
                     h->n, r->n_local, (unsigned long long)h->n * r->n_local, r->size);
}

/* Several hosts without a word about their sizes have equally many. */
static enum status read_range(const struct config *c, size_t n_nodes, const struct ranks_hosts *h,
                              struct ranks *r, struct err *err)
{
    const bool has_local = config_is_set(c, "data-parallel-size-local"),
               has_first = config_is_set(c, "data-parallel-start-rank");
    if (h->n > 1 && r->size % h->n && !has_local && !n_nodes)
        return err_field(err, ERR_CONFIG, "data-parallel-size",
                         "--data-parallel-size %u cannot be divided among %u hosts; give each "
                         "--data-parallel-size-local and --data-parallel-start-rank",
                         r->size, h->n);
    if (has_local && n_nodes && number(c, "data-parallel-size-local") != n_nodes)
        return err_field(err, ERR_CONFIG, "data-parallel-size-local",
                         "--data-parallel-size-local %u with %zu nodes: the nodes of a launch are "
                         "its ranks, so give --data-parallel-size-local %zu",
                         number(c, "data-parallel-size-local"), n_nodes, n_nodes);
    r->first = has_first ? number(c, "data-parallel-start-rank") : 0;
    r->n_local = has_local  ? number(c, "data-parallel-size-local")
                 : n_nodes  ? (uint32_t)n_nodes
                 : h->n > 1 ? r->size / h->n
                            : r->size - (r->first < r->size ? r->first : r->size);
    if (h->n > 1 && !has_first) r->first = h->index * r->n_local;
    TRY(check_range(c, r, err));
    return has_first ? OK : check_hosts(h, r, err);
}

/* The nodes of a launch that says nothing of other hosts are the whole group. */
static enum status check_launch(const struct config *c, size_t n_nodes, const struct ranks_hosts *h,
                                const struct ranks *r, struct err *err)
{
    if (!n_nodes || n_nodes == r->size || h->n > 1 ||
        config_is_set(c, "data-parallel-size-local") ||
        config_is_set(c, "data-parallel-start-rank"))
        return OK;
    return err_field(err, ERR_CONFIG, "data-parallel-size",
                     "--data-parallel-size %u with %zu nodes: the nodes of this launch are the "
                     "ranks, so give --data-parallel-size %zu, or --data-parallel-start-rank "
                     "where the others are on other hosts",
                     r->size, n_nodes, n_nodes);
}

/* ---- one rank ---- */

uint32_t ranks_local_id(const struct config *c)
{
    return config_is_set(c, "local-data-parallel-id") ? number(c, "local-data-parallel-id")
                                                      : number(c, "data-parallel-rank");
}

uint32_t ranks_local_process(const struct config *c)
{
    return ranks_local_id(c) * tp_size(c) + number(c, "tensor-parallel-rank");
}

uint32_t ranks_on_host(const struct config *c)
{
    const bool told = config_bool(c, "enable-expert-parallel") &&
                      config_is_set(c, "data-parallel-size-local");
    return (told ? number(c, "data-parallel-size-local") : 1) * tp_size(c);
}

static bool names_node(const struct config *c)
{
    return config_is_set(c, "data-parallel-rank") || config_is_set(c, "local-data-parallel-id");
}

static bool names_process(const struct config *c)
{
    return config_is_set(c, "tensor-parallel-rank");
}

static enum status check_one(const struct config *c, const struct ranks *r, uint32_t local,
                             struct err *err)
{
    if (r->rank >= r->size)
        return err_field(err, ERR_CONFIG, "data-parallel-rank",
                         "--data-parallel-rank %u is not a rank of --data-parallel-size %u: "
                         "they count from 0 to %u",
                         r->rank, r->size, r->size - 1);
    if (config_is_set(c, "local-data-parallel-id") &&
        config_is_set(c, "data-parallel-size-local") && local >= r->n_local)
        return err_field(err, ERR_CONFIG, "local-data-parallel-id",
                         "%s %u is not one of the %u ranks of this host: they count from 0 to %u",
                         config_source_text(c, "local-data-parallel-id"), local, r->n_local,
                         r->n_local - 1);
    if (config_is_set(c, "data-parallel-rank") && config_is_set(c, "local-data-parallel-id") &&
        config_is_set(c, "data-parallel-start-rank") && r->first + local != r->rank)
        return err_field(err, ERR_CONFIG, "data-parallel-rank",
                         "--data-parallel-rank %u contradicts --data-parallel-start-rank %u and "
                         "--local-data-parallel-id %u, which are rank %u",
                         r->rank, r->first, local, r->first + local);
    if (config_bool(c, "headless"))
        return err_field(err, ERR_CONFIG, "headless",
                         "--headless is for the ranks that serve starts itself; rank %u was named, "
                         "so it has its own port: leave --headless or --data-parallel-rank out",
                         r->rank);
    return OK;
}

static enum status read_one(const struct config *c, struct ranks *r, struct err *err)
{
    const uint32_t local = number(c, "local-data-parallel-id");
    if (!r->experts) return OK;
    if (config_is_set(c, "data-parallel-size-local"))
        r->n_local = number(c, "data-parallel-size-local");
    r->first = number(c, "data-parallel-start-rank");
    r->rank = config_is_set(c, "data-parallel-rank") ? number(c, "data-parallel-rank")
                                                     : r->first + local;
    return check_one(c, r, local, err);
}

/* ---- where they meet ---- */

/* Ranks are of one group by the text of its address, and an IPv6 address has many spellings. */
static bool read_address(const char *text, char out[HOST_TEXT_MAX])
{
    struct in6_addr v6;
    if (!host_copy(text, out) || !host_is_number(out) || host_is_wildcard(out)) return false;
    return inet_pton(AF_INET6, out, &v6) != 1 ||
           inet_ntop(AF_INET6, &v6, out, HOST_TEXT_MAX) != NULL;
}

static enum status read_meeting(const struct config *c, const struct ranks_hosts *h,
                                struct ranks *r, struct err *err)
{
    const char *given = config_string(c, "data-parallel-address"),
               *head = config_list(c, "ips", 0, NULL),
               *host = given              ? given
                       : h->n > 1 && head ? head
                                          : "127.0.0.1";
    size_t n_ips;
    bool listed = false;
    config_list(c, "ips", 0, &n_ips);
    for (size_t i = 0; i < n_ips; i++) listed |= strcmp(config_list(c, "ips", i, NULL), host) == 0;
    if (n_ips > 1 && !listed)
        return err_field(
            err, ERR_CONFIG, "data-parallel-address", "%s %s is not one of the addresses of %s",
            config_source_text(c, "data-parallel-address"), host, config_source_text(c, "ips"));
    if (!read_address(host, r->host))
        return err_field(err, ERR_CONFIG, "data-parallel-address",
                         "%s %.80s is not an IP address of a host; give the one where the other "
                         "ranks reach rank 0",
                         config_source_text(c, "data-parallel-address"), host);
    if (r->kind == RANKS_PARENT && ranks_elsewhere(r) && !given && h->n < 2)
        return err_field(err, ERR_CONFIG, "data-parallel-address",
                         "%u of --data-parallel-size %u ranks are here, the others on other "
                         "hosts; give --data-parallel-address, where rank 0 listens",
                         r->n_started, r->size);
    const bool any = r->kind == RANKS_PARENT && !given && h->n < 2 &&
                     !config_is_set(c, "data-parallel-rpc-port");
    r->port = any ? 0 : (uint16_t)config_int(c, "data-parallel-rpc-port");
    return OK;
}

/* ---- the whole ---- */

static enum status check_unused(const struct config *c, size_t n_nodes, struct err *err)
{
    if (config_bool(c, "enable-expert-parallel") && !n_nodes && number(c, "data-parallel-rank") > 0)
        return err_field(err, ERR_CONFIG, "data-parallel-rank",
                         "%s %u with --enable-expert-parallel is not a rank of "
                         "--data-parallel-size 1: say by that how many there are",
                         config_source_text(c, "data-parallel-rank"),
                         number(c, "data-parallel-rank"));
    if (config_bool(c, "headless"))
        return err_field(err, ERR_CONFIG, "headless",
                         "--headless starts ranks without a port of the API: give "
                         "--data-parallel-size above 1 and --enable-expert-parallel as well");
    if (config_source(c, "nnodes") == SOURCE_ARGS && config_int(c, "nnodes") > 1)
        return err_field(err, ERR_CONFIG, "nnodes",
                         "--nnodes %u is for ranks that share experts (--data-parallel-size with "
                         "--enable-expert-parallel); other nodes of several hosts find each other "
                         "by --scheduler-host or --router",
                         number(c, "nnodes"));
    return OK;
}

/* LIMIT: GPUs that share experts or an attention are of one host. */
static enum status check_gpus(const struct config *c, const struct ranks_hosts *h,
                              const struct ranks *r, struct err *err)
{
    const bool elsewhere = h->n > 1 || (r->kind == RANKS_PARENT && ranks_elsewhere(r));
    if (!is_on_gpu(c)) return OK;
    if (r->tp.size > EP_PEERS_MAX)
        return err_field(err, ERR_UNSUPPORTED, "tensor-parallel-size",
                         "--tensor-parallel-size %u with --device cuda: a node has up to %d GPUs; "
                         "give %d or less, or --device cpu",
                         r->tp.size, EP_PEERS_MAX, EP_PEERS_MAX);
    if (!r->experts || (r->size * r->tp.size <= EP_PEERS_MAX && !elsewhere)) return OK;
    return err_field(err, ERR_UNSUPPORTED, "enable-expert-parallel",
                     "--enable-expert-parallel with --device cuda is supported for up to %d ranks "
                     "of one host; give --data-parallel-size %d or less, or --device cpu",
                     EP_PEERS_MAX, (int)(EP_PEERS_MAX / r->tp.size));
}

static enum status read_sizes(const struct config *c, size_t n_nodes, struct ranks *r,
                              struct err *err)
{
    r->tp.size = tp_size(c);
    r->size = r->experts ? number(c, "data-parallel-size") : n_nodes ? (uint32_t)n_nodes : 1;
    if ((uint64_t)r->size * r->tp.size <= GROUP_RANKS_MAX || !r->experts) return OK;
    if (r->tp.size == 1)
        return err_field(err, ERR_CONFIG, "data-parallel-size",
                         "--data-parallel-size %u is more than the %d ranks that a group can have",
                         r->size, GROUP_RANKS_MAX);
    return err_field(err, ERR_CONFIG, "data-parallel-size",
                     "--data-parallel-size %u times --tensor-parallel-size %u is more than the %d "
                     "ranks that a group can have",
                     r->size, r->tp.size, GROUP_RANKS_MAX);
}

/* Where the ranks of its node meet. */
static enum status read_process(const struct config *c, struct ranks *r, struct err *err)
{
    r->tp.rank = number(c, "tensor-parallel-rank");
    r->tp.port = (uint16_t)config_int(c, "tensor-parallel-port");
    if (r->tp.rank >= r->tp.size)
        return err_field(err, ERR_CONFIG, "tensor-parallel-rank",
                         "--tensor-parallel-rank %u is not a rank of --tensor-parallel-size %u: "
                         "they count from 0 to %u",
                         r->tp.rank, r->tp.size, r->tp.size - 1);
    if (!read_address(config_string(c, "tensor-parallel-address"), r->tp.host))
        return err_field(
            err, ERR_CONFIG, "tensor-parallel-address",
            "--tensor-parallel-address %s is not an IP address of a host; give the one where "
            "the others reach the first rank of their node",
            config_string(c, "tensor-parallel-address"));
    if (r->tp.size < 2 || r->tp.port) return OK;
    return err_field(err, ERR_CONFIG, "tensor-parallel-port",
                     "--tensor-parallel-rank %u: give --tensor-parallel-port, with which the first "
                     "rank of its node listens",
                     r->tp.rank);
}

/* One process, or one node: `serve` starts the processes of that behind its port. */
static enum status read_single(const struct config *c, struct ranks *r, struct err *err)
{
    const bool is_process = names_process(c) || r->tp.size == 1;
    r->kind = is_process ? RANKS_ONE : RANKS_PARENT;
    r->n_started = 1;
    r->local = ranks_local_id(c);
    TRY(read_one(c, r, err));
    return is_process ? read_process(c, r, err) : OK;
}

/* The nodes of this host. */
static enum status read_parent(const struct config *c, size_t n_nodes, const struct ranks_hosts *h,
                               struct ranks *r, struct err *err)
{
    r->kind = RANKS_PARENT;
    r->n_started = r->n_local = r->size;
    if (!r->experts) return OK;
    TRY(check_launch(c, n_nodes, h, r, err));
    TRY(read_range(c, n_nodes, h, r, err));
    r->rank = r->first;
    r->n_started = r->n_local;
    return OK;
}

enum status ranks_read(const struct config *c, size_t n_nodes, struct ranks *out, struct err *err)
{
    struct ranks_hosts h = { .n = 1 };
    const bool experts = config_bool(c, "enable-expert-parallel") &&
                         config_int(c, "data-parallel-size") > 1;
    *out = (struct ranks){ .kind = RANKS_NONE, .tp.size = 1 };
    if (!experts) TRY(check_unused(c, n_nodes, err));
    if (!experts && tp_size(c) < 2) return OK;
    out->experts = experts;
    TRY(read_sizes(c, n_nodes, out, err));
    if (experts) TRY(ranks_read_hosts(c, &h, err));
    out->headless = config_bool(c, "headless");
    const bool is_single = !n_nodes && (names_process(c) || names_node(c));
    TRY(is_single ? read_single(c, out, err) : read_parent(c, n_nodes, &h, out, err));
    TRY(check_gpus(c, &h, out, err));
    return experts ? read_meeting(c, &h, out, err) : OK;
}

void ranks_print(const struct ranks *r, struct buf *out)
{
    char at[HOST_PORT_TEXT_MAX];
    if (r->kind == RANKS_NONE) return;
    if (r->tp.size > 1)
        buf_printf(out,
                   "  processes    %u for each node: they share its attention "
                   "(--tensor-parallel-size)\n",
                   r->tp.size);
    if (!r->experts) return;
    host_port_text(r->host, r->port, at);
    if (ranks_elsewhere(r))
        buf_printf(out, "  ranks        %u to %u of %u share the experts, rank 0 listens at %s\n",
                   r->rank, r->rank + r->n_started - 1, r->size, at);
    else
        buf_printf(out, "  ranks        0 to %u share the experts, rank 0 listens at %s\n",
                   r->size - 1, at);
}
