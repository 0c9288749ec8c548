/* serve_ranks.c - `baton serve` with several ranks: this process has the port and an entry node
 * (deploy/node/node_front.c), its children are the ranks (deploy/launch/supervisor.h).
 *
 *     first signal ─▶ the entry node takes no more and ends what runs ─▶ the ranks end ─▶ the end
 *
 * A second signal, or one before all are ready, ends the ranks at once. Thread: main. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/cli/commands.h"
#include "deploy/launch/launch_view.h"
#include "deploy/launch/launcher_watch.h"
#include "deploy/launch/supervisor.h"
#include "deploy/node/node.h"
#include "deploy/service/ready_pipe.h"
#include "shared/base/log.h"

struct parent {
    struct config *c;
    struct node_options o;
    struct launch_view view;
    struct launch_args args;
    char directory_address[HOST_PORT_TEXT_MAX];
    struct launch_plan plan;
    struct node *node;
    struct supervisor *supervisor; /* NULL before and after the ranks */
    struct ready_pipe *waits;      /* who started this process */
    bool draining;
    int exit_status;
};

/* ---- stop ---- */

static void on_ranks_ended(void *arg)
{
    struct parent *p = arg;
    p->exit_status = supervisor_exit_status(p->supervisor);
    node_stop(p->node, p->exit_status);
}

static void stop_ranks(struct parent *p, int exit_status)
{
    if (!supervisor_is_stopping(p->supervisor)) supervisor_stop(p->supervisor, exit_status);
}

static void on_drained(void *arg) { stop_ranks(arg, 0); }

static void drain(struct parent *p)
{
    p->draining = true;
    if (supervisor_is_stopping(p->supervisor)) return;
    if (log_level() >= LOG_INFO)
        fprintf(stderr,
                "stopping: requests that run are finished, at most %lld s; Ctrl-C again ends "
                "them\n",
                (long long)config_int(p->c, "drain-timeout"));
    node_drain(p->node, on_drained, p);
}

static void on_signal(void *arg, int signum)
{
    struct parent *p = arg;
    (void)signum;
    if (!p->draining && node_is_ready(p->node)) {
        drain(p);
        return;
    }
    stop_ranks(p, p->draining ? 0 : 130);
    supervisor_stop(p->supervisor, 0); /* the second one ends them at once */
}

static void on_hangup(void *arg) { on_signal(arg, 0); }

/* The entry node could not read the model, and said so. */
static void on_failed(void *arg) { stop_ranks(arg, 1); }

static void on_ranks_ready(void *arg)
{
    struct parent *p = arg;
    node_ranks_ready(p->node, supervisor_model(p->supervisor));
}

static void on_waiting(void *arg, uint16_t port, const char *why)
{
    struct parent *p = arg;
    node_ranks_wait(p->node, port, why);
}

static void on_node_ready(void *arg)
{
    struct parent *p = arg;
    char at[HOST_PORT_TEXT_MAX];
    const uint16_t port = node_http_port(p->node);
    host_port_text(launch_view_api_host(p->c), port ? port : p->o.grpc_port, at);
    if (port) fprintf(stderr, "ready: http://%s/v1, %zu ranks\n", at, p->plan.n);
    else fprintf(stderr, "ready: gRPC at %s, %zu ranks\n", at, p->plan.n);
    ready_pipe_say(p->waits, READY_SERVES);
}

/* ---- start ---- */

/* What an entry node does differently from a rank with the same options. */
static enum status read_options(struct parent *p, struct err *err)
{
    struct node_options *o = &p->o;
    const int n = (int)ranks_n_processes(&p->args.ranks);
    if (p->view.own_secret && !config_is_set(p->c, "advertise-host"))
        TRY(config_set(p->c, "advertise-host", p->view.address, err));
    if (p->view.elsewhere[0]) TRY(config_set(p->c, "router", p->view.elsewhere, err));
    TRY(node_options_read(p->c, o, err));
    o->no_engine = true;
    if (!config_int(p->c, "compute-threads")) /* as the start page says */
        o->n_threads = (o->n_threads + n - 1) / n;
    o->own_secret = p->view.own_secret;
    o->cluster_port = 0; /* --pd-comm-port is of the ranks */
    o->serves_directory = p->view.here;
    o->control_port = p->view.port;
    if (p->view.own_secret) o->cluster_host = p->view.address;
    p->args.role = o->role;
    return OK;
}

static void print_start(const struct parent *p)
{
    struct buf page = { 0 };
    node_options_print_notes(&p->o);
    node_options_warn_alone(p->c, true);
    command_print_notes(p->c);
    if (log_level() < LOG_INFO) return;
    node_options_print(&p->o, p->c, &page);
    ranks_print(&p->plan.ranks, &page);
    buf_add_c(&page, "  rank ports  ");
    launch_plan_print_ports(&p->plan, &page);
    buf_add_char(&page, '\n');
    fwrite(page.data, 1, page.len, stderr);
    buf_release(&page);
}

static void start_ranks(struct parent *p)
{
    const struct launcher_terms terms = {
        .holds_view = p->view.here,
        .own_secret = p->view.own_secret,
        .behind = true,
        .port = node_http_port(p->node),
    };
    const struct supervisor_options o = {
        .loop = node_loop(p->node),
        .c = p->c,
        .plan = &p->plan,
        .address = launch_view_api_host(p->c),
        .on_ready = on_ranks_ready,
        .on_waiting = on_waiting,
        .on_hangup = on_hangup,
        .on_ended = on_ranks_ended,
        .arg = p,
    };
    launcher_watch_announce(&terms);
    if (p->view.here) config_unset_env(p->c, "engine-worker-queue-port"); /* the parent's */
    p->supervisor = supervisor_start(&o);
}

/* What a rank would refuse is refused before its ports and its hosts are looked at. *is_joined: may
 * other nodes register at the control port, as at that of a node which is alone? */
static enum status check_options(const struct config *c, bool *is_joined, struct err *err)
{
    struct node_options o;
    const enum status st = node_options_read(c, &o, err);
    *is_joined = o.serves_directory;
    node_options_release(&o);
    return st;
}

static enum status start(struct parent *p, struct err *err)
{
    bool is_joined;
    TRY(check_options(p->c, &is_joined, err));
    TRY(command_check_ranks(p->c, &p->args.ranks, err));
    TRY(launch_view_choose(p->c, &p->args.ranks, is_joined, &p->view, err));
    TRY(read_options(p, err));
    TRY(node_create(&p->o, &p->node, err));
    if (p->view.here)
        p->args.directory = host_port_text(p->view.address, node_directory_port(p->node),
                                           p->directory_address);
    p->args.holds_view = p->view.here;
    TRY(launch_plan_make(p->c, &p->args, &p->plan, err));
    print_start(p);
    node_on_ready(p->node, on_node_ready, p);
    start_ranks(p);
    loop_on_signal(node_loop(p->node), on_signal, p);
    node_start(p->node, on_failed, p);
    ready_pipe_say(p->waits, READY_LISTENS);
    return OK;
}

int command_serve_ranks(struct config *c, const struct ranks *r, struct ready_pipe *waits)
{
    struct err err = { 0 };
    struct parent p = {
        .c = c,
        .args = { .program = "baton", .behind = true, .ranks = *r },
        .waits = waits,
        .exit_status = 2,
    };
    if (start(&p, &err) == OK) {
        loop_run(node_loop(p.node));
        supervisor_say_culprit(p.supervisor, "baton serve");
    } else {
        log_fatal("baton serve", err.text);
    }
    supervisor_free(p.supervisor);
    node_free(p.node);
    launch_plan_release(&p.plan);
    node_options_release(&p.o);
    return p.exit_status;
}
