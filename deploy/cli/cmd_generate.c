/* cmd_generate.c - `baton generate`: a node without HTTP answers a file of batch lines, or streams the answer to one prompt. */
#include <stdio.h>
#include <unistd.h>

#include "deploy/cli/commands.h"
#include "deploy/cli/node.h"
#include "shared/base/json.h"
#include "shared/base/log.h"
#include "shared/offline/offline.h"

static const char INTRO[] =
    "usage: baton generate --model MODEL --input requests.jsonl --output answers.jsonl\n"
    "       baton generate --model MODEL --prompt TEXT\n\n"
    "Answer OpenAI batch lines (custom_id, method, url, body), or stream the answer to one prompt.\n";

struct generate {
    const struct config *c;
    struct node         *node;
    bool                 raw; /* completions, not chat */
};

/* ---- one prompt ---- */

static void print_text(const cJSON *choice, bool raw)
{
    const cJSON *from = raw ? choice : cJSON_GetObjectItemCaseSensitive(choice, "delta");
    const cJSON *text = cJSON_GetObjectItemCaseSensitive(from, raw ? "text" : "content");
    if (!cJSON_IsString(text)) return;
    fputs(text->valuestring, stdout);
    fflush(stdout);
}

static void on_reply(void *arg, int status, const char *headers, struct str body)
{
    struct generate *g = arg;
    (void)headers;
    fprintf(stderr, "baton generate: %d %.*s\n", status, STR_ARG(body));
    node_stop(g->node, 1);
}

static void on_begin(void *arg, const char *headers)
{
    (void)arg;
    (void)headers;
}

static enum status on_chunk(void *arg, struct str json)
{
    struct generate *g = arg;
    cJSON *doc = cJSON_ParseWithLength(json.p, json.n);
    const cJSON *error = cJSON_GetObjectItemCaseSensitive(doc, "error"), *choices = cJSON_GetObjectItemCaseSensitive(doc, "choices");
    if (error) {
        fprintf(stderr, "\nbaton generate: %.*s\n", STR_ARG(json));
        node_stop(g->node, 1);
    } else if (cJSON_GetArraySize(choices)) {
        print_text(cJSON_GetArrayItem(choices, 0), g->raw);
    }
    cJSON_Delete(doc);
    return OK;
}

static void on_end(void *arg)
{
    struct generate *g = arg;
    putchar('\n');
    node_stop(g->node, 0);
}

static void ask(struct generate *g)
{
    struct buf body = { 0 };
    const char *prompt = config_string(g->c, "prompt");
    buf_add_c(&body, g->raw ? "{\"prompt\":" : "{\"messages\":[{\"role\":\"user\",\"content\":");
    json_add_string(&body, str_of(prompt));
    buf_add_c(&body, g->raw ? "" : "}]");
    buf_printf(&body, ",\"stream\":true,\"max_tokens\":%lld,\"temperature\":%g}", (long long)config_int(g->c, "max-tokens"),
               config_float(g->c, "temperature"));
    struct serve_reply reply = { on_reply, on_begin, on_chunk, on_end, g };
    serve_call(node_serve(g->node), g->raw ? "/v1/completions" : "/v1/chat/completions", buf_str(&body), "generate", &reply);
    buf_release(&body);
}

/* ---- a file ---- */

static void on_batch_done(void *arg, enum status st, uint64_t n_ok, uint64_t n_failed, const char *text)
{
    struct generate *g = arg;
    if (st != OK) fprintf(stderr, "baton generate: %s\n", text);
    else fprintf(stderr, "%llu answered, %llu failed\n", (unsigned long long)n_ok, (unsigned long long)n_failed);
    node_stop(g->node, st != OK || n_failed ? 1 : 0);
}

static void on_ready(void *arg)
{
    struct generate *g = arg;
    struct err err = { 0 };
    if (config_is_set(g->c, "prompt")) {
        ask(g);
        return;
    }
    struct offline_options o = {
        .loop = node_loop(g->node), .serve = node_serve(g->node), .input = config_string(g->c, "input"), .output = config_string(g->c, "output"),
        .concurrency = (uint32_t)config_int(g->c, "concurrency"), .progress = true, .done = on_batch_done, .arg = g,
    };
    if (offline_start(&o, &err) == OK) return;
    fprintf(stderr, "baton generate: %s\n", err.text);
    node_stop(g->node, 1);
}

/* ---- start ---- */

/* A node of its own: every option that belongs to a cluster keeps its default. */
static void make_alone(struct node_options *o)
{
    o->http = false;
    o->holds_directory = false;
    o->directory = "local";
    o->max_requests = UINT32_MAX;
    o->shutdown_s = 0;
}

static void say_note(void *arg, const char *sentence)
{
    (void)arg;
    fprintf(stderr, "note: %s\n", sentence);
}

static int generate_with(struct config *c)
{
    struct node_options o;
    struct err err = { 0 };
    struct generate g = { .c = c, .raw = config_bool(c, "raw") };
    int exit_status = 2;
    enum status st = node_options_read(c, &o, &err);
    if (st == OK) {
        config_notes(c, say_note, NULL);
        if (!config_is_set(c, "log-level")) log_set_level(LOG_WARN);
        make_alone(&o);
        exit_status = 1;
        st = node_create(&o, &g.node, &err);
    }
    if (st == OK) {
        node_on_ready(g.node, on_ready, &g);
        exit_status = node_run(g.node);
    } else {
        fprintf(stderr, "baton generate: %s\n", err.text);
    }
    node_free(g.node);
    node_options_release(&o);
    return exit_status;
}

int cmd_generate(int argc, char **argv)
{
    bool done;
    struct config *c = command_config("generate", INTRO, argc, argv, NULL, NULL, &done);
    if (!c) return done ? 0 : 2;
    bool input = config_is_set(c, "input"), prompt = config_is_set(c, "prompt");
    int exit_status = 2;
    if (input == prompt) fprintf(stderr, "baton generate: give either --input FILE or --prompt TEXT\n");
    else exit_status = generate_with(c);
    config_free(c);
    return exit_status;
}
