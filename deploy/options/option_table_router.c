/* option_table_router.c - options of the router: the nodes that it lists, and its processes.
 * Thread: any (a constant table). */
#include "deploy/options/option_entry.h"

const struct option ROUTER_OPTIONS[] = {
    {
        .name = "prefiller-hosts",
        .aliases = "prefiller-host",
        .env = "BATON_PREFILLER_HOSTS",
        .type = OPT_LIST,
        IN("Router", "router"),
        .help = "Hosts of prefill nodes that do not register by themselves; they need not know the "
                "router nor each other.",
    },
    {
        .name = "prefiller-hosts-num",
        .env = "BATON_PREFILLER_HOSTS_NUM",
        .type = OPT_LIST,
        IN("Router", "router"),
        .help = "How many nodes each of these hosts has; default: one.",
    },
    {
        .name = "prefiller-ports",
        .aliases = "prefiller-port",
        .env = "BATON_PREFILLER_PORTS",
        .type = OPT_LIST,
        IN("Router", "router"),
        .help = "Their API ports, one for each host; with --prefiller-ports-inc the first ones.",
    },
    {
        .name = "prefiller-ports-inc",
        .env = "BATON_PREFILLER_PORTS_INC",
        .type = OPT_LIST,
        IN("Router", "router"),
        .help = "For how many ports each of these stands, each one above the last; default: one.",
    },
    {
        .name = "decoder-hosts",
        .aliases = "decoder-host",
        .env = "BATON_DECODER_HOSTS",
        .type = OPT_LIST,
        IN("Router", "router"),
        .help = "Hosts of decode nodes that do not register by themselves.",
    },
    {
        .name = "decoder-hosts-num",
        .env = "BATON_DECODER_HOSTS_NUM",
        .type = OPT_LIST,
        IN("Router", "router"),
        .help = "How many nodes each of these hosts has; default: one.",
    },
    {
        .name = "decoder-ports",
        .aliases = "decoder-port",
        .env = "BATON_DECODER_PORTS",
        .type = OPT_LIST,
        IN("Router", "router"),
        .help = "Their API ports, one for each host; with --decoder-ports-inc the first ones.",
    },
    {
        .name = "decoder-ports-inc",
        .env = "BATON_DECODER_PORTS_INC",
        .type = OPT_LIST,
        IN("Router", "router"),
        .help = "For how many ports each of these stands, each one above the last; default: one.",
    },
    {
        .name = "max-concurrency",
        .env = "BATON_MAX_CONCURRENCY",
        .type = OPT_INT,
        RANGE(1, 1048576),
        .def = "10000",
        IN("Router", "router"),
        .help = "Requests the router follows at once, each of its processes; more get 429.",
    },
    {
        .name = "workers",
        .env = "BATON_ROUTER_WORKERS",
        .type = OPT_INT,
        RANGE(1, 64),
        .def = "1",
        IN("Router", "router"),
        .help = "Processes that share the port; one supervises them and holds what they share. One "
                "streams some tens of thousands of tokens per second.",
    },
    {
        .name = "worker-of",
        .type = OPT_STRING,
        IN("Router", "router"),
        .help = "Given by --workers to its processes: where the one is that holds what they share.",
    },
    {
        .name = "worker-port",
        .type = OPT_INT,
        RANGE(0, 65535),
        .def = "0",
        IN("Router", "router"),
        .help = "Given by --workers to its processes: a port of their own on this host.",
    },
    {
        .name = "pass-requests",
        .env = "BATON_PASS_REQUESTS",
        .type = OPT_BOOL,
        IN("Router", "router"),
        .help = "An option of baton serve: pass completions to another node.",
        .effect = EFFECT_ACCEPTED,
        .note = "a router places on every node itself, and passes no request on: a full one "
                "answers 429, and one that loads lets requests wait until it is ready",
    },
    {
        .name = "splitwise",
        .type = OPT_BOOL,
        IN("Router", "router"),
        .help = "FastDeploy's: all nodes are prefill or decode nodes.",
        .effect = EFFECT_ACCEPTED,
        .note = "the nodes say which role they have, and requests are split where there are both",
    },
    { .name = NULL },
};
