/* cmd_launch.c - `baton launch`: starts the nodes of this host, serves their directory, restarts
 * nodes that die, stops them all (deploy/launch/supervisor.h). `baton serve --headless` does the
 * same with the ranks of its host.
 *
 * When the launcher is killed its nodes go on serving and say so (deploy/launch/launcher_watch.h).
 * Thread: main. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deploy/cli/commands.h"
#include "deploy/launch/launch_view.h"
#include "deploy/launch/launcher_watch.h"
#include "deploy/launch/ranks_model.h"
#include "deploy/launch/supervisor.h"
#include "deploy/node/node_options.h"
#include "deploy/options/config_redis.h"
#include "scheduler/directory/server.h"
#include "shared/base/log.h"
#include "shared/net/open_files.h"

static const char INTRO[] =
    "usage: baton launch --model MODEL --prefill N --decode M [options]\n"
    "       baton launch --model MODEL --num-servers N [options]      (mixed nodes)\n\n"
    "Start and supervise nodes on this host. Options of `baton serve` are handed on to every "
    "node.\n";

struct launcher {
    struct loop *loop;
    const struct config *c;
    struct launch_args args;
    struct launch_view view;
    char directory_address[HOST_PORT_TEXT_MAX]; /* "": in Redis, or as --router says */
    struct metrics *metrics;
    struct directory *directory;
    struct directory_server *directory_server;
    struct launch_plan plan;
    struct supervisor *supervisor;
};

/* ---- stop ---- */

static void finish_rest(void *arg)
{
    struct launcher *l = arg;
    directory_close(l->directory);
    l->directory = NULL;
    loop_stop(l->loop);
}

static void finish(void *arg)
{
    struct launcher *l = arg;
    struct directory_server *directory_server = l->directory_server;
    l->directory_server = NULL;
    if (directory_server) directory_server_stop(directory_server, finish_rest, l);
    else finish_rest(l);
}

/* A stop that waits for requests looks like one that hangs. */
static void on_signal(void *arg, int signum)
{
    struct launcher *l = arg;
    (void)signum;
    if (!supervisor_is_stopping(l->supervisor) && supervisor_n_running(l->supervisor) > 0 &&
        log_level() >= LOG_INFO)
        fprintf(stderr,
                "stopping: nodes finish their requests, at most %lld s; Ctrl-C again ends them\n",
                (long long)config_int(l->c, "drain-timeout"));
    supervisor_stop(l->supervisor, 0);
}

static void on_hangup(void *arg)
{
    const struct launcher *l = arg;
    supervisor_stop(l->supervisor, 0);
}

/* ---- start ---- */

static void announce(void *arg)
{
    const struct launcher *l = arg;
    char at[HOST_PORT_TEXT_MAX];
    for (size_t i = 0; i < l->plan.n && !l->args.behind; i++)
        if (l->plan.nodes[i].port)
            fprintf(stderr, "ready: %-7s http://%s/v1\n", node_role_name(l->plan.nodes[i].role),
                    host_port_text(l->view.address, l->plan.nodes[i].port, at));
    if (l->args.behind) fprintf(stderr, "ready: all %zu ranks of this host\n", l->plan.n);
    else
        fprintf(stderr, "ready: all %zu nodes; send requests to any of them\n",
                l->plan.n / l->plan.ranks.tp.size);
}

/* Other hosts can join where they have the user's secret. */
static enum status serve_directory(struct launcher *l, struct err *err)
{
    struct arena arena;
    struct str secret;
    struct directory_options d = {
        .loop = l->loop,
        .topic = config_string(l->c, "scheduler-topic"),
        .metrics = l->metrics,
    };
    snprintf(l->directory_address, sizeof l->directory_address, "%s", l->view.elsewhere);
    if (!l->view.here) return OK;
    TRY(directory_open("local", &d, &l->directory, err));
    arena_init(&arena);
    /* in the order in which nodes read it: the file before the environment */
    enum status st = node_options_secret(l->c, &arena, &secret, err);
    if (st == OK)
        st = directory_server_start(l->loop, l->directory,
                                    l->view.own_secret ? l->view.address
                                                       : host_wildcard(l->view.address),
                                    l->view.port, secret, &l->directory_server, err);
    arena_release(&arena);
    if (st == OK)
        host_port_text(l->view.address, directory_server_port(l->directory_server),
                       l->directory_address);
    return st;
}

/* The secret is read again, which serve_directory did only if it serves the view. */
static enum status print_secret(const struct launcher *l, struct err *err)
{
    struct buf text = { 0 };
    struct arena arena;
    struct str secret;
    if (log_level() < LOG_INFO) return OK;
    arena_init(&arena);
    enum status st = node_options_secret(l->c, &arena, &secret, err);
    if (st == OK) node_options_print_secret(secret, &text);
    if (text.len) fwrite(text.data, 1, text.len, stderr);
    buf_release(&text);
    arena_release(&arena);
    return st;
}

/* Where the view is if it is in Redis; what cannot be right there is said by the nodes. */
static void in_redis(const struct config *c, char out[REDIS_SERVER_TEXT_MAX])
{
    struct arena arena;
    struct redis_server server;
    struct err err = { 0 };
    arena_init(&arena);
    if (config_redis(c, &arena, &server, &err) == OK) redis_server_text(&server, out);
    arena_release(&arena);
}

/* One page for the whole launch: what it starts, and where the nodes find each other. */
static void print_start(const struct launcher *l)
{
    const char *at = l->directory_address;
    char redis[REDIS_SERVER_TEXT_MAX] = "";
    size_t n[3] = { 0 };
    struct buf page = { 0 };
    node_options_warn_alone(l->c, true);
    command_print_notes(l->c);
    if (log_level() < LOG_INFO) return;
    for (size_t i = 0; i < l->plan.n; i++) n[l->plan.nodes[i].role] += l->plan.nodes[i].port != 0;
    buf_printf(&page, "baton %s %s\n  model        %s\n  nodes       ", BATON_VERSION,
               l->args.behind ? "serve --headless" : "launch", config_string(l->c, "model"));
    for (int r = ROLE_MIXED; r <= ROLE_DECODE; r++)
        if (n[r]) buf_printf(&page, " %zu %s", n[r], node_role_name((enum node_role)r));
    buf_printf(&page, ", %s each on port",
               strcmp(config_string(l->c, "device"), "cuda") == 0 ? "a GPU or a share of one"
                                                                  : "a share of the CPU");
    launch_plan_print_ports(&l->plan, &page);
    buf_add_char(&page, '\n');
    ranks_print(&l->plan.ranks, &page);
    in_redis(l->c, redis);
    if (config_string(l->c, "pace"))
        buf_printf(&page, "  paced by     %s: no time that the nodes tell is this machine's\n",
                   config_string(l->c, "pace"));
    buf_printf(&page, "  cluster view %s%s\n",
               l->view.here                    ? "held by this launcher, "
               : at[0]                         ? "held by "
               : config_string(l->c, "router") ? "held by "
                                               : "in Redis at ",
               at[0]                           ? at
               : config_string(l->c, "router") ? config_string(l->c, "router")
                                               : redis);
    fwrite(page.data, 1, page.len, stderr);
    buf_release(&page);
}

static void start_nodes(struct launcher *l)
{
    const struct launcher_terms terms = {
        .holds_view = l->view.here,
        .own_secret = l->view.own_secret,
        .behind = l->args.behind,
    };
    const struct supervisor_options o = {
        .loop = l->loop,
        .c = l->c,
        .plan = &l->plan,
        .address = launch_view_api_host(l->c),
        .on_ready = announce,
        .on_hangup = on_hangup,
        .on_ended = finish,
        .arg = l,
    };
    launcher_watch_announce(&terms);
    if (l->view.here) config_unset_env(l->c, "engine-worker-queue-port"); /* the launcher's */
    l->supervisor = supervisor_start(&o);
}

enum status command_check_ranks(const struct config *c, const struct ranks *r, struct err *err)
{
    struct buf notes = { 0 };
    const enum status st = ranks_check_model(c, r, &notes, err);
    if (st == OK && notes.len && log_level() >= LOG_WARN) fwrite(notes.data, 1, notes.len, stderr);
    buf_release(&notes);
    return st;
}

static enum status start(struct launcher *l, struct err *err)
{
    if (!config_string(l->c, "model"))
        return err_field(err, ERR_CONFIG, "model",
                         "no model was given; use --model FOLDER, FILE.gguf or org/name");
    TRY(command_check_ranks(l->c, &l->args.ranks, err));
    TRY(launch_view_choose(l->c, &l->args.ranks, false, &l->view, err));
    l->metrics = metrics_create();
    (void)open_files_raise(); /* nodes stay connected to the directory server */
    TRY(loop_create(&l->loop, err));
    TRY(serve_directory(l, err));
    l->args.holds_view = l->view.here;
    l->args.directory = l->directory_address[0] ? l->directory_address : NULL;
    TRY(launch_plan_make(l->c, &l->args, &l->plan, err));
    print_start(l);
    TRY(print_secret(l, err));
    start_nodes(l);
    loop_on_signal(l->loop, on_signal, l);
    return OK;
}

int command_launch(struct config *c, const char *command, const struct launch_args *args)
{
    struct err err = { 0 };
    struct launcher l = { .c = c, .args = *args };
    int exit_status = 2;
    if (start(&l, &err) == OK) {
        loop_run(l.loop);
        exit_status = supervisor_exit_status(l.supervisor);
        supervisor_say_culprit(l.supervisor, command);
    } else {
        log_fatal(command, err.text);
        if (l.loop) {
            finish(&l);
            loop_run(l.loop);
        }
    }
    supervisor_free(l.supervisor);
    loop_free(l.loop);
    launch_plan_release(&l.plan);
    metrics_free(l.metrics);
    return exit_status;
}

int cmd_launch(int argc, char **argv)
{
    bool done;
    int exit_status = 2;
    struct err err = { 0 };
    struct config *c = command_config("launch", INTRO, argc, argv, NULL, NULL, &done);
    if (!c) return done ? 0 : 2;
    struct launch_args args = { .program = "baton" };
    log_set_name("launch");
    enum status st = node_options_log(c, "baton-launch.log", &err);
    if (st == OK && (exit_status = command_pull_model(c, "baton launch")) != 0) {
        config_free(c);
        return exit_status;
    }
    exit_status = 2;
    if (st == OK) st = ranks_read(c, launch_plan_n_nodes(c), &args.ranks, &err);
    if (st == OK) exit_status = command_launch(c, "baton launch", &args);
    else log_fatal("baton launch", err.text);
    config_free(c);
    return exit_status;
}
