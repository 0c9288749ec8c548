/* cmd_serve.c - `baton serve`: one node until a signal. Thread: main. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/cli/commands.h"
#include "deploy/launch/launch_plan.h"
#include "deploy/launch/launcher_watch.h"
#include "deploy/node/node.h"
#include "deploy/service/ready_pipe.h"
#include "shared/base/log.h"

static const char INTRO[] =
    "usage: baton serve MODEL [options]   (or --model MODEL)\n\n"
    "Serve one node. MODEL is a Hugging Face folder, a .gguf file, or org/name in a local cache; "
    "with --pull\nalso org/name or an address elsewhere.\n";

/* A launcher prints one page for all of its nodes. */
static void print_start(const struct node_options *o, const struct config *c)
{
    struct buf page = { 0 };
    node_options_warn_alone(c, o->serves_directory || strcmp(o->directory, "http") == 0);
    command_print_notes(c);
    if (log_level() < LOG_INFO) return;
    node_options_print(o, c, &page);
    fwrite(page.data, 1, page.len, stderr);
    buf_release(&page);
}

/* With --port 0 the port is not known before the first lines. */
static enum status open_log(const struct config *c, struct err *err)
{
    char name[64];
    uint16_t front;
    long long port = (long long)config_int(c, "port"),
              process = (long long)config_int(c, "tensor-parallel-rank"),
              rank = (long long)(config_int(c, "data-parallel-rank") *
                                 config_int(c, "tensor-parallel-size")) +
                     process;
    if (!launcher_watch_is_behind(&front)) front = 0;
    if (front) snprintf(name, sizeof name, "baton-%u-rank-%lld.log", front, rank);
    else if (process)
        snprintf(name, sizeof name, "baton-node-%lld-rank-%lld.log",
                 (long long)config_int(c, "tensor-parallel-port"), process);
    else if (config_bool(c, "headless")) snprintf(name, sizeof name, "baton-headless.log");
    else if (port > 0) snprintf(name, sizeof name, "baton-%lld.log", port);
    else if (port < 0)
        snprintf(name, sizeof name, "baton-%lld.log", (long long)config_int(c, "grpc-port"));
    else snprintf(name, sizeof name, "baton-process-%d.log", getpid());
    return node_options_log(c, name, err);
}

/* What one process of many says for all: a parent has said it, a launcher has not. */
static bool speaks_for_all(const struct config *c)
{
    uint16_t port;
    return !launcher_watch_has_launcher() ||
           (!launcher_watch_is_behind(&port) && ranks_local_process(c) == 0);
}

static void on_ready(void *arg) { ready_pipe_say(arg, READY_SERVES); }

static int serve_one(struct config *c, struct ready_pipe *waits)
{
    struct node_options o = { 0 };
    struct err err = { 0 };
    struct node *node = NULL;
    int exit_status = 2;
    enum status st = node_options_read(c, &o, &err);
    if (st == OK) {
        if (speaks_for_all(c)) node_options_print_notes(&o);
        if (!launcher_watch_has_launcher()) print_start(&o, c);
        exit_status = 1;
        st = node_create(&o, &node, &err);
    }
    if (st == OK) {
        ready_pipe_say(waits, READY_LISTENS);
        node_on_ready(node, on_ready, waits);
        exit_status = node_run(node);
    } else {
        log_fatal("baton serve", err.text);
    }
    node_free(node);
    node_options_release(&o);
    return exit_status;
}

/* The options are checked as a rank will check them, and say which role the ranks have. */
static int serve_headless(struct config *c, const struct ranks *r)
{
    struct node_options o = { 0 };
    struct err err = { 0 };
    int exit_status = 2;
    if (node_options_read(c, &o, &err) == OK) {
        const struct launch_args w = {
            .program = "baton", .behind = true, .role = o.role, .ranks = *r
        };
        log_set_name("headless");
        node_options_print_notes(&o);
        exit_status = command_launch(c, "baton serve", &w);
    } else {
        log_fatal("baton serve", err.text);
    }
    node_options_release(&o);
    return exit_status;
}

static int serve_with(struct config *c)
{
    struct ranks r;
    struct ready_pipe waits = ready_pipe_take();
    struct err err = { 0 };
    enum status st = open_log(c, &err);
    if (st == OK) st = ranks_read(c, 0, &r, &err);
    if (st != OK) {
        log_fatal("baton serve", err.text);
        return 2;
    }
    if (r.kind != RANKS_PARENT) return serve_one(c, &waits);
    return r.headless ? serve_headless(c, &r) : command_serve_ranks(c, &r, &waits);
}

int cmd_serve(int argc, char **argv)
{
    const char *words[1];
    int n_words = 1;
    bool done;
    struct config *c = command_config("serve", INTRO, argc, argv, words, &n_words, &done);
    if (!c) return done ? 0 : 2;
    struct err err = { 0 };
    int exit_status = 2;
    if (n_words == 1 && config_is_set(c, "model"))
        fprintf(stderr, "baton serve: the model was given twice, as '%s' and by --model\n",
                words[0]);
    else if (n_words == 1 && config_set(c, "model", words[0], &err) != OK)
        fprintf(stderr, "baton serve: %s\n", err.text);
    else if ((exit_status = command_pull_model(c, "baton serve")) == 0) exit_status = serve_with(c);
    config_free(c);
    return exit_status;
}
