/* cmd_generate.c - `baton generate`: a node without HTTP answers a file of batch lines, or streams
 * the answer to one prompt. Thread: main. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "deploy/cli/commands.h"
#include "deploy/generate/batch_file.h"
#include "deploy/generate/batch_format.h"
#include "deploy/generate/batch_runner.h"
#include "deploy/node/node.h"
#include "shared/base/json/json.h"
#include "shared/base/log.h"

static const char INTRO[] =
    "usage: baton generate MODEL --input requests.jsonl --output answers.jsonl\n"
    "       baton generate MODEL --input prompts.txt --output answers.jsonl\n"
    "       baton generate MODEL --prompt TEXT\n\n"
    "Answer OpenAI batch lines (custom_id, method, url, body), prompts one per line, or stream the "
    "answer to one prompt.\n";

enum { EXIT_INTERRUPTED = 130 /* the status that a shell reports for SIGINT */ };

struct generate {
    const struct config *c;
    struct node *node;
    struct batch_runner *batch; /* NULL: none running */
    uint64_t completion;        /* of --prompt; 0: none */
    bool raw;                   /* a completion, not a chat */
    bool cut;                   /* the answer to --prompt ended by its length */
};

/* ---- one prompt ---- */

/* False when standard output is closed or fails. No error for a reader that has enough (head). */
static bool flush_output(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout)) return true;
    if (errno != EPIPE) fprintf(stderr, "\nbaton generate: standard output: %s\n", strerror(errno));
    return false;
}

/* Reasoning is for people and goes to standard error. */
static bool print_text(const cJSON *choice, bool raw)
{
    const cJSON *from = raw ? choice : cJSON_GetObjectItemCaseSensitive(choice, "delta");
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(from, raw ? "text" : "content");
    const cJSON *thought = raw ? NULL : cJSON_GetObjectItemCaseSensitive(from, "reasoning_content");
    if (cJSON_IsString(thought)) fputs(thought->valuestring, stderr);
    if (!cJSON_IsString(text)) return true;
    fputs(text->valuestring, stdout);
    return flush_output();
}

static void on_reply(void *arg, int status, const char *headers, struct str body)
{
    struct generate *g = arg;
    (void)headers;
    g->completion = 0;
    fprintf(stderr, "baton generate: %d %.*s\n", status, STR_ARG(body));
    node_stop(g->node, 1);
}

static void on_begin(void *arg, const char *headers)
{
    (void)arg;
    (void)headers;
}

static enum status on_chunk(void *arg, struct str id, struct str json)
{
    struct generate *g = arg;
    (void)id;
    enum status st = OK;
    cJSON *doc = cJSON_ParseWithLength(json.p, json.n);
    const cJSON *error = cJSON_GetObjectItemCaseSensitive(doc, "error"),
                *choices = cJSON_GetObjectItemCaseSensitive(doc, "choices");
    if (error) {
        (void)flush_output();
        fprintf(stderr, "\nbaton generate: %.*s\n", STR_ARG(json));
        node_stop(g->node, 1);
    } else if (cJSON_GetArraySize(choices)) {
        const cJSON *choice = cJSON_GetArrayItem(choices, 0),
                    *finish = json_member(choice, "finish_reason");
        if (cJSON_IsString(finish)) g->cut = strcmp(finish->valuestring, "length") == 0;
        if (!print_text(choice, g->raw)) st = ERR_IO;
    }
    if (st != OK) node_stop(g->node, 1);
    cJSON_Delete(doc);
    return st;
}

static void on_end(void *arg)
{
    struct generate *g = arg;
    g->completion = 0;
    putchar('\n');
    const bool is_written = flush_output(); /* before the notice, which goes another way */
    if (g->cut)
        fprintf(stderr,
                "baton generate: the answer is cut: --max-tokens is %lld, --max-model-len %lld\n",
                (long long)config_int(g->c, "max-tokens"),
                (long long)config_int(g->c, "max-model-len"));
    node_stop(g->node, is_written ? 0 : 1);
}

static void start_prompt(struct generate *g)
{
    struct buf body = { 0 };
    const char *prompt = config_string(g->c, "prompt");
    buf_add_c(&body, g->raw ? "{\"prompt\":" : "{\"messages\":[{\"role\":\"user\",\"content\":");
    json_add_string(&body, str_of(prompt));
    buf_add_c(&body, g->raw ? "" : "}]");
    buf_printf(&body, ",\"stream\":true,\"max_tokens\":%lld,\"temperature\":%g}",
               (long long)config_int(g->c, "max-tokens"), config_float(g->c, "temperature"));
    /* Without a name of its own it gets another one each time, and so another seed. */
    const struct serve_call call = {
        .path = g->raw ? "/v1/completions" : "/v1/chat/completions",
        .body = buf_str(&body),
        .reply = { on_reply, on_begin, on_chunk, on_end, g },
    };
    g->completion = serve_submit(node_serve(g->node), &call);
    buf_release(&body);
}

/* ---- a file ---- */

static void on_batch_done(void *arg, enum status st, uint64_t n_ok, uint64_t n_failed,
                          const char *text)
{
    struct generate *g = arg;
    (void)n_ok; /* the progress line reported it */
    g->batch = NULL;
    if (st != OK) fprintf(stderr, "baton generate: %s\n", text);
    node_stop(g->node, st == ERR_CANCELED ? EXIT_INTERRUPTED : st != OK || n_failed ? 1 : 0);
}

static void on_ready(void *arg)
{
    struct generate *g = arg;
    struct err err = { 0 };
    if (config_is_set(g->c, "prompt")) {
        start_prompt(g);
        return;
    }
    struct batch_runner_options o = {
        .loop = node_loop(g->node),
        .serve = node_serve(g->node),
        .input = config_string(g->c, "input"),
        .output = config_string(g->c, "output"),
        .concurrency = (uint32_t)config_int(g->c, "concurrency"),
        .raw = g->raw,
        .max_tokens = (uint32_t)config_int(g->c, "max-tokens"),
        .temperature = config_float(g->c, "temperature"),
        .ignore_model = config_bool(g->c, "ignore-model"),
        .progress = true,
        .done = on_batch_done,
        .arg = g,
    };
    if (batch_runner_start(&o, &g->batch, &err) == OK) return;
    fprintf(stderr, "baton generate: %s\n", err.text);
    node_stop(g->node, 1);
}

static void on_signal(void *arg)
{
    struct generate *g = arg;
    if (g->completion) serve_cancel(node_serve(g->node), g->completion);
    g->completion = 0;
    if (g->batch) batch_runner_stop(g->batch);
    else node_stop(g->node, EXIT_INTERRUPTED);
}

/* ---- start ---- */

/* The node is alone: every cluster option keeps its default. */
static void make_standalone(struct node_options *o)
{
    o->http = false;
    o->serves_directory = false;
    o->cluster_port = o->kv_port = o->tuning.rdma.port = 0;
    o->directory = "local";
    o->max_requests = UINT32_MAX;
    o->max_queue_ms = UINT32_MAX; /* all that is there is to be done, however long it takes */
    o->shutdown_s = 0;
}

static int generate_with(struct config *c)
{
    struct node_options o = { 0 };
    struct err err = { 0 };
    struct generate g = { .c = c, .raw = config_bool(c, "raw") };
    int exit_status = 2;
    enum status st = node_options_log(c, "baton-generate.log", &err);
    if (st == OK) st = node_options_read(c, &o, &err);
    if (st == OK) node_options_print_notes(&o);
    if (st == OK) {
        config_notes(c, command_print_note, NULL);
        if (!config_is_set(c, "log-level")) log_set_level(LOG_WARN);
        make_standalone(&o);
        exit_status = 1;
        st = node_create(&o, &g.node, &err);
    }
    if (st == OK) {
        node_on_ready(g.node, on_ready, &g);
        node_on_signal(g.node, on_signal, &g);
        exit_status = node_run(g.node);
    } else {
        fprintf(stderr, "baton generate: %s\n", err.text);
    }
    node_free(g.node);
    node_options_release(&o);
    return exit_status;
}

/* Reports it before the model is loaded, which can take minutes. */
static bool files_can_be_used(const char *input, const char *output)
{
    struct err err = { 0 };
    bool standard = strcmp(input, "-") == 0;
    if (!standard && access(input, R_OK) != 0) {
        fprintf(stderr, "baton generate: --input %s: %s\n", input, strerror(errno));
        return false;
    }
    if (!standard && batch_format_check(input, &err) != OK) {
        fprintf(stderr, "baton generate: --input %s\n", err.text);
        return false;
    }
    if (batch_file_check(input, output, &err) == OK) return true;
    fprintf(stderr, "baton generate: %s\n", err.text);
    return false;
}

int cmd_generate(int argc, char **argv)
{
    bool done;
    const char *words[1];
    int n_words = 1;
    struct err err = { 0 };
    struct config *c = command_config("generate", INTRO, argc, argv, words, &n_words, &done);
    if (!c) return done ? 0 : 2;
    bool input = config_is_set(c, "input"), prompt = config_is_set(c, "prompt");
    int exit_status = 2;
    if (n_words == 1 && config_is_set(c, "model"))
        fprintf(stderr,
                "baton generate: the model was given twice, as '%s' and by --model; a prompt is "
                "given with --prompt\n",
                words[0]);
    else if (n_words == 1 && config_set(c, "model", words[0], &err) != OK)
        fprintf(stderr, "baton generate: %s\n", err.text);
    else if (input == prompt)
        fprintf(stderr, "baton generate: give either --input FILE or --prompt TEXT\n");
    else if (prompt && strcmp(config_string(c, "output"), "-") != 0)
        fprintf(
            stderr,
            "baton generate: --output %s is for the answers to --input; the one to --prompt goes "
            "to standard output (> FILE)\n",
            config_string(c, "output"));
    else if ((!input || files_can_be_used(config_string(c, "input"), config_string(c, "output"))) &&
             (exit_status = command_pull_model(c, "baton generate")) == 0)
        exit_status = generate_with(c);
    config_free(c);
    return exit_status;
}
