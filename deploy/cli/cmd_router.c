/* cmd_router.c - `baton router`: an entry node without an engine before the nodes of a cluster,
 * until a signal (deploy/node/node_router.c). Thread: main. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/cli/commands.h"
#include "deploy/node/node.h"
#include "deploy/router/router_options.h"
#include "shared/base/log.h"

static const char INTRO[] =
    "usage: baton router --port PORT [options]\n\n"
    "One address for all nodes. Nodes register with --router HOST:PORT, or are listed with\n"
    "--prefiller-hosts and --decoder-hosts. It computes nothing and needs no model.\n";

static enum status open_log(const struct config *c, struct err *err)
{
    char name[64];
    const long long port = (long long)config_int(c, "port"),
                    worker = (long long)config_int(c, "worker-port");
    if (worker) snprintf(name, sizeof name, "baton-router-%lld-process-%lld.log", port, worker);
    else if (port) snprintf(name, sizeof name, "baton-router-%lld.log", port);
    else snprintf(name, sizeof name, "baton-router-process-%d.log", getpid());
    return node_options_log(c, name, err);
}

static void print_start(const struct node_options *o, const struct config *c)
{
    struct buf page = { 0 };
    command_print_notes(c);
    if (log_level() < LOG_INFO) return;
    router_options_print(o, c, &page);
    fwrite(page.data, 1, page.len, stderr);
    buf_release(&page);
}

static int route(struct config *c)
{
    struct node_options o = { 0 };
    struct err err = { 0 };
    struct node *node = NULL;
    int exit_status = 2;
    enum status st = open_log(c, &err);
    if (st == OK) st = router_options_read(c, &o, &err);
    if (st == OK) {
        if (!o.worker.port) print_start(&o, c); /* one process says it for all */
        exit_status = 1;
        st = node_create(&o, &node, &err);
    }
    if (st == OK) exit_status = node_run(node);
    else log_fatal("baton router", err.text);
    node_free(node);
    node_options_release(&o);
    return exit_status;
}

static int route_with_workers(struct config *c, int argc, char **argv)
{
    struct err err = { 0 };
    if (open_log(c, &err) == OK) return command_router_workers(c, argc, argv);
    log_fatal("baton router", err.text);
    return 2;
}

int cmd_router(int argc, char **argv)
{
    bool done;
    struct config *c = command_config("router", INTRO, argc, argv, NULL, NULL, &done);
    if (!c) return done ? 0 : 2;
    const bool several = config_int(c, "workers") > 1 && !config_string(c, "worker-of");
    const int exit_status = several ? route_with_workers(c, argc, argv) : route(c);
    config_free(c);
    return exit_status;
}
