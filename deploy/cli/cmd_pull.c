/* cmd_pull.c - `baton pull`: fetches a model and prints where it is. Thread: main. */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "deploy/cli/commands.h"
#include "deploy/node/node_options.h"
#include "deploy/pull/fetch/progress.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

static const char INTRO[] =
    "usage: baton pull org/name[@REVISION] [--dir DIR] [options]\n"
    "       baton pull org/name:Q4_K_M | org/name/FILE.gguf | https://.../FILE.gguf\n"
    "       baton pull FOLDER --dir DIR\n\n"
    "Fetch a model to this host and print its path: the files that a model needs, checked against "
    "the sums of\ntheir source. A pull that broke off goes on where it was; two at once share one "
    "work.\n";

enum { EXIT_INTERRUPTED = 130 /* the status that a shell reports for SIGINT */ };

/* ---- what was decided ---- */

static void say_hosts(const struct config *c, const struct pull_source *s)
{
    const long long n = config_int(c, "nnodes") > 1 ? (long long)config_int(c, "nnodes")
                                                    : (long long)s->n_hosts;
    if (n < 2 && !config_is_set(c, "mode")) return;
    fprintf(stderr,
            "note: --mode %s of %lld hosts: all files, as on every host; ranks cut matrices while "
            "they load and take over the experts of ranks that are lost\n",
            config_string(c, "mode"), n < 1 ? 1 : n);
}

static void say_rest(const struct config *c, const struct pull_source *s)
{
    if (s->quantization)
        fprintf(stderr,
                "note: the checkpoint is quantised when it is loaded: add --quantization %s "
                "(matrices that it has in F8 stay so)%s%s\n",
                s->quantization, s->note ? "; " : "", s->note ? s->note : "");
    if (s->has_draft || config_is_set(c, "speculate-model-path"))
        fprintf(stderr, "note: layers of the checkpoint that draft tokens are among its own files; "
                        "--speculate-model-path gets nothing\n");
}

static void say_done(const struct pull_result *r)
{
    char all[PROGRESS_SIZE_TEXT], now[PROGRESS_SIZE_TEXT];
    if (log_level() < LOG_INFO) return;
    fprintf(stderr, "%zu file%s, %s, checked; %s of it fetched now\n", r->n_files,
            r->n_files == 1 ? "" : "s", progress_size(r->bytes, all),
            progress_size(r->fetched, now));
}

/* ---- start ---- */

static size_t take_patterns(const struct config *c, const char *name, const char ***out)
{
    size_t n;
    (void)config_list(c, name, 0, &n);
    *out = MEM_ARRAY(const char *, n);
    for (size_t i = 0; i < n; i++) (*out)[i] = config_list(c, name, i, NULL);
    return n;
}

static enum status pull(const struct config *c, const char *what, struct pull_result *r,
                        struct err *err)
{
    const char **include, **exclude;
    struct pull_options o = command_pull_options(c);
    o.what = what;
    o.dir = config_string(c, "dir");
    o.revision = config_string(c, "revision");
    o.n_include = take_patterns(c, "include", &include);
    o.n_exclude = take_patterns(c, "exclude", &exclude);
    o.include = include;
    o.exclude = exclude;
    o.n_connections = (uint32_t)config_int(c, "connections");
    o.n_retries = (uint32_t)config_int(c, "retries");
    o.stall_ms = (uint32_t)(config_float(c, "stall-timeout") * 1000);
    o.chunk_bytes = (uint64_t)config_int(c, "chunk-size");
    o.link = config_bool(c, "link");
    enum status st = pull_run(&o, r, err);
    mem_free(include);
    mem_free(exclude);
    return st;
}

static int pull_with(const struct config *c, const char *what)
{
    struct err err = { 0 };
    struct pull_result r = { 0 };
    enum status st = pull(c, what, &r, &err);
    if (st == OK) {
        if (log_level() >= LOG_INFO) {
            say_hosts(c, &r.source);
            say_rest(c, &r.source);
        }
        say_done(&r);
        printf("%s\n", r.path.data);
    } else {
        fprintf(stderr, "baton pull: %s\n", err.text);
    }
    buf_release(&r.path);
    return st == OK ? 0 : st == ERR_CANCELED ? EXIT_INTERRUPTED : st == ERR_CONFIG ? 2 : 1;
}

int cmd_pull(int argc, char **argv)
{
    bool done;
    const char *words[1];
    int n_words = 1, exit_status = 2;
    struct config *c = command_config("pull", INTRO, argc, argv, words, &n_words, &done);
    if (!c) return done ? 0 : 2;
    const char *named = config_string(c, "model-name");
    struct err err = { 0 };
    signal(SIGXFSZ, SIG_IGN); /* a file that must not grow is an error of writing, not a signal */
    if (node_options_log(c, NULL, &err) != OK) fprintf(stderr, "baton pull: %s\n", err.text);
    else if (n_words == 1 && named)
        fprintf(stderr, "baton pull: the model was given twice, as '%s' and by %s\n", words[0],
                config_source_text(c, "model-name"));
    else if (n_words == 0 && !named) fputs(INTRO, stderr);
    else exit_status = pull_with(c, n_words == 1 ? words[0] : named);
    config_free(c);
    return exit_status;
}
