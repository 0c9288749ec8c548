/* router_workers.c - `baton router --workers N`: this process supervises N others that share the
 * port, and holds what they have in common (deploy/router/hub.h).
 *
 *     first signal ─▶ the processes take no more and end what runs ─▶ the hub ends ─▶ the end
 *
 * A second signal ends them at once. Thread: main. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/cli/commands.h"
#include "deploy/launch/launch_key.h"
#include "deploy/launch/launch_view.h"
#include "deploy/launch/launcher_watch.h"
#include "deploy/launch/supervisor.h"
#include "deploy/router/hub.h"
#include "deploy/router/router_options.h"
#include "shared/base/address/port.h"
#include "shared/base/log.h"
#include "shared/net/open_files.h"

enum { WORKERS_MAX = 64 };

struct workers {
    const struct config *c;
    struct node_options o;
    struct loop *loop;
    struct hub *hub;
    struct launch_plan plan;
    uint16_t ports[WORKERS_MAX];
    struct supervisor *supervisor;
};

/* ---- stop ---- */

static void on_hub_ended(void *arg)
{
    struct workers *w = arg;
    w->hub = NULL;
    loop_stop(w->loop);
}

static void on_ended(void *arg)
{
    struct workers *w = arg;
    hub_stop(w->hub, on_hub_ended, w);
}

static void on_signal(void *arg, int signum)
{
    struct workers *w = arg;
    (void)signum;
    supervisor_stop(w->supervisor, 0);
}

static void on_hangup(void *arg) { on_signal(arg, 0); }

static void on_ready(void *arg)
{
    const struct workers *w = arg;
    char at[HOST_PORT_TEXT_MAX];
    fprintf(stderr, "ready: http://%s/v1, %zu processes\n",
            host_port_text(launch_view_api_host(w->c), w->o.port, at), w->plan.n);
}

/* ---- start ---- */

static char *keep(struct workers *w, const char *text)
{
    return arena_strndup(&w->plan.arena, text, strlen(text));
}

/* Ports that nobody has now; another program may still take one, and the process then says so. */
static enum status choose_ports(struct workers *w, struct err *err)
{
    for (size_t i = 0; i < w->plan.n; i++) {
        w->ports[i] = launch_plan_free_port(&w->plan, w->c);
        if (!w->ports[i])
            return err_set(err, ERR_CONFIG, "no free port could be found for process %zu", i);
        w->plan.nodes[i] = (struct launch_node){ .port = w->ports[i], .first = i };
    }
    return OK;
}

/* Its own words, and where it belongs: a later option of a name replaces an earlier one. */
static enum status write_args(struct workers *w, int argc, char **argv, struct err *err)
{
    char of[64], port[64], shared[64];
    if (argc + 5 >= LAUNCH_ARGS_MAX)
        return err_set(err, ERR_CONFIG, "the command has %d words, more than %d", argc,
                       LAUNCH_ARGS_MAX - 6);
    snprintf(of, sizeof of, "--worker-of=127.0.0.1:%u", hub_port(w->hub));
    snprintf(shared, sizeof shared, "--port=%u", w->o.port);
    for (size_t i = 0; i < w->plan.n; i++) {
        char **out = w->plan.nodes[i].argv;
        size_t n = 0;
        out[n++] = keep(w, "baton");
        for (int k = 0; k < argc; k++) out[n++] = keep(w, argv[k]);
        snprintf(port, sizeof port, "--worker-port=%u", w->ports[i]);
        out[n++] = keep(w, shared);
        out[n++] = keep(w, of);
        out[n++] = keep(w, port);
    }
    return OK;
}

/* Ports that another program has are found out before any process is started. */
static enum status check_ports(struct workers *w, struct err *err)
{
    int fd = -1;
    if (w->o.port == 0)
        return err_field(err, ERR_CONFIG, "port",
                         "--workers %lld needs a --port that its processes can share",
                         (long long)config_int(w->c, "workers"));
    TRY(port_hold(w->o.host, w->o.port, "--port", &fd, err));
    close(fd);
    if (w->o.grpc_port == 0) return OK;
    TRY(port_hold(w->o.host, w->o.grpc_port, "--grpc-port", &fd, err));
    close(fd);
    return OK;
}

static void print_start(const struct workers *w)
{
    struct buf page = { 0 };
    command_print_notes(w->c);
    if (log_level() < LOG_INFO) return;
    router_options_print(&w->o, w->c, &page);
    buf_printf(&page, "  processes    %zu\n", w->plan.n);
    fwrite(page.data, 1, page.len, stderr);
    buf_release(&page);
}

static void start_processes(struct workers *w)
{
    const struct launcher_terms terms = { .behind = true, .port = w->o.port };
    const struct supervisor_options o = {
        .loop = w->loop,
        .c = w->c,
        .plan = &w->plan,
        .address = "127.0.0.1",
        .apart = true,
        .on_ready = on_ready,
        .on_hangup = on_hangup,
        .on_ended = on_ended,
        .arg = w,
    };
    launcher_watch_announce(&terms);
    w->supervisor = supervisor_start(&o);
}

static enum status start(struct workers *w, int argc, char **argv, struct err *err)
{
    TRY(router_options_read(w->c, &w->o, err));
    TRY(check_ports(w, err));
    w->plan.n = (size_t)config_int(w->c, "workers");
    w->plan.ranks.tp.size = 1;
    w->plan.nodes = ARENA_ARRAY(&w->plan.arena, struct launch_node, w->plan.n);
    TRY(choose_ports(w, err));
    (void)open_files_raise();
    TRY(loop_create(&w->loop, err));
    const struct hub_options h = {
        .loop = w->loop,
        .o = &w->o,
        .ports = w->ports,
        .n_workers = w->plan.n,
        .key = launch_key(w->c),
    };
    w->hub = hub_create(&h);
    TRY(hub_start(w->hub, err));
    TRY(write_args(w, argc, argv, err));
    print_start(w);
    start_processes(w);
    loop_on_signal(w->loop, on_signal, w);
    return OK;
}

int command_router_workers(const struct config *c, int argc, char **argv)
{
    struct err err = { 0 };
    struct workers *w = MEM_NEW(struct workers);
    int exit_status = 2;
    w->c = c;
    arena_init(&w->plan.arena);
    log_set_name("router");
    if (start(w, argc, argv, &err) == OK) {
        loop_run(w->loop);
        exit_status = supervisor_exit_status(w->supervisor);
        supervisor_say_culprit(w->supervisor, "baton router");
    } else {
        log_fatal("baton router", err.text);
        if (w->hub) {
            hub_stop(w->hub, on_hub_ended, w);
            loop_run(w->loop);
        }
    }
    supervisor_free(w->supervisor);
    loop_free(w->loop);
    launch_plan_release(&w->plan);
    node_options_release(&w->o);
    mem_free(w);
    return exit_status;
}
