/* cmd_status.c - `baton status`: the cluster as one node sees it, as a table or JSON; `baton top`:
 * the same, again and again. Thread: main. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deploy/cli/commands.h"
#include "deploy/cli/status_groups.h"
#include "shared/base/address/host_port.h"
#include "shared/base/json/json.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_client.h"

static const char INTRO[] =
    "usage: baton status [--url http://host:port] [--json] [--watch]\n"
    "       baton top [--url http://host:port]     the same as status --watch\n\n"
    "Ask a node which nodes it sees and how loaded they are.\n";

enum { ANSWER_MAX = 16 << 20, TIMEOUT_MS = 5000, WATCH_S = 2 };

struct status_query {
    struct loop *loop;
    struct http_client *client;
    const char *headers;
    bool wants_groups;
    struct buf answer;
    enum status st;
    int http_status;
    struct status_groups *groups; /* NULL: not asked for, or there was nobody to ask */
};

static void on_groups(void *arg)
{
    struct status_query *q = arg;
    loop_stop(q->loop);
}

/* Of its group, and of its pace, each node tells itself. */
static void ask_for_groups(struct status_query *q, struct str body)
{
    cJSON *doc = cJSON_ParseWithLength(body.p, body.n);
    const struct status_groups_options o = {
        .client = q->client,
        .headers = q->headers,
        .nodes = cJSON_GetObjectItemCaseSensitive(doc, "nodes"),
        .done = on_groups,
        .arg = q,
    };
    q->groups = status_groups_start(&o);
    cJSON_Delete(doc);
}

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct status_query *q = arg;
    q->st = st;
    q->http_status = http_status;
    if (st == OK) buf_add_str(&q->answer, body);
    if (st == OK && http_status == 200 && q->wants_groups) ask_for_groups(q, body);
    if (!q->groups) loop_stop(q->loop);
}

static double number(const cJSON *o, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);
    return cJSON_IsNumber(v) ? v->valuedouble : 0;
}

static const char *text(const cJSON *o, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);
    return cJSON_IsString(v) ? v->valuestring : "";
}

/* "3 d 4 h", "12 min 7 s" */
static void print_duration(double s)
{
    static const struct {
        const char *name;
        double seconds;
    } UNITS[] = { { "d", 86400 }, { "h", 3600 }, { "min", 60 }, { "s", 1 } };
    size_t i = 0;
    while (i + 2 < COUNT_OF(UNITS) && s < UNITS[i].seconds) i++;
    double n = floor(s / UNITS[i].seconds);
    if (n > 0) printf("%.0f %s ", n, UNITS[i].name);
    s -= n * UNITS[i].seconds;
    printf("%.0f %s", floor(s / UNITS[i + 1].seconds), UNITS[i + 1].name);
}

/* What the node that was asked says of itself and of the requests that came to it. */
static void print_node(const cJSON *doc)
{
    const double split = number(doc, "split_requests"),
                 placed = split + number(doc, "local_requests"),
                 passed = number(doc, "passed_requests");
    printf("baton %s %s (%s), model %s, up ", text(doc, "version"), text(doc, "name"),
           text(doc, "role"), text(doc, "model"));
    print_duration(number(doc, "uptime_s"));
    if (strcmp(text(doc, "role"), "router") != 0) /* which exchanges none */
        printf("; KV by %s",
               text(doc, "kv_transports")[0] ? text(doc, "kv_transports") : "nothing");
    printf("\nrequests that came here: %.0f", number(doc, "requests") + passed);
    if (passed > 0) printf(", %.0f of them passed to other nodes", passed);
    printf(", %.0f %% of %s split over two nodes; %.1f tokens/s\n\n",
           placed > 0 ? split * 100 / placed : 0, passed > 0 ? "the others" : "them",
           number(doc, "tokens_per_s"));
}

/* A node that loads, or waits for other ranks, knows no others yet. */
static void print_loading(const cJSON *doc)
{
    const cJSON *group = cJSON_GetObjectItemCaseSensitive(doc, "group");
    printf("baton %s %s (%s), model %s, up ", text(doc, "version"), text(doc, "name"),
           text(doc, "role"), text(doc, "model"));
    print_duration(number(doc, "uptime_s"));
    printf("\nNOT READY: %s\n", text(doc, "why"));
    if (group)
        printf("\ngroup at %s: this is rank %.0f of %.0f\n", text(group, "at"),
               number(group, "rank"), number(group, "size"));
}

/* It is in no other node's list any more. */
static void print_draining(const cJSON *doc)
{
    const cJSON *d = cJSON_GetObjectItemCaseSensitive(doc, "draining");
    if (!cJSON_IsObject(d)) return;
    printf("DRAINING for ");
    print_duration(number(d, "since_s"));
    printf(", at most ");
    print_duration(number(d, "left_s"));
    printf(" more: of the requests that came here %.0f are not finished, and %.0f sequences are "
           "computed here\n\n",
           number(d, "requests"), number(d, "computing"));
}

static void print_trouble(const cJSON *doc)
{
    const cJSON *t = cJSON_GetObjectItemCaseSensitive(doc, "trouble");
    if (!cJSON_IsObject(t)) return;
    printf("%s for ",
           cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(t, "blocks")) ? "NOT READY" : "DEGRADED");
    print_duration(number(t, "since_s"));
    printf(" (%s): %s\n\n", text(t, "cause"), text(t, "text"));
}

static void print_failures(const cJSON *doc)
{
    const cJSON *list = cJSON_GetObjectItemCaseSensitive(doc, "failures"), *f;
    if (cJSON_GetArraySize(list) > 0) printf("\nlast failures:\n");
    cJSON_ArrayForEach (f, list) {
        printf("  ");
        print_duration(number(f, "ago_s"));
        printf(" ago: %s\n", text(f, "text"));
    }
}

static void print_groups(const struct status_groups *g)
{
    struct buf lines = { 0 };
    status_groups_draw(g, &lines);
    if (lines.len) fwrite(lines.data, 1, lines.len, stdout);
    buf_release(&lines);
}

/* What a node has not measured yet is a dash. */
static void print_row(const cJSON *n)
{
    const double per_s = number(n, "prefill_tokens_per_s"), step_us = number(n, "step_us");
    printf("%-24s %-8s %-16s %8.0f %8.0f %7.0f/%-6.0f %14.0f", text(n, "name"), text(n, "role"),
           text(n, "topic"), number(n, "n_running"), number(n, "n_waiting"),
           number(n, "n_blocks_free"), number(n, "n_blocks"), number(n, "waiting_tokens"));
    if (per_s > 0) printf(" %9.0f", per_s);
    else printf(" %9s", "-");
    if (step_us > 0) printf(" %8.1f", step_us / 1e3);
    else printf(" %8s", "-");
    printf("%s\n",
           cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(n, "draining")) ? "  draining" : "");
}

static int print_table(struct str json, const struct status_groups *groups)
{
    cJSON *doc = cJSON_ParseWithLength(json.p, json.n);
    const cJSON *nodes = cJSON_GetObjectItemCaseSensitive(doc, "nodes"), *n;
    if (!cJSON_IsArray(nodes)) {
        fprintf(stderr, "baton status: the node's answer is not understood\n");
        cJSON_Delete(doc);
        return 1;
    }
    if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(doc, "loading"))) {
        print_loading(doc);
        cJSON_Delete(doc);
        return 0;
    }
    print_node(doc);
    print_draining(doc);
    print_trouble(doc);
    printf("%-24s %-8s %-16s %8s %8s %14s %14s %9s %8s\n", "node", "role", "topic", "running",
           "waiting", "free blocks", "waiting tokens", "prefill/s", "step ms");
    cJSON_ArrayForEach (n, nodes) print_row(n);
    print_groups(groups);
    print_failures(doc);
    cJSON_Delete(doc);
    return 0;
}

/* Prints the answer, or why there is none. Returns the program's exit status. */
static int print_answer(const struct config *c, const char *host, uint16_t port,
                        const struct status_query *q)
{
    char at[HOST_PORT_TEXT_MAX];
    struct err err = { 0 };
    host_port_text(host, port, at);
    if (q->st != OK)
        fprintf(stderr,
                "baton status: nothing answers at %s; is a node running there? (--url names "
                "another)\n",
                at);
    else if (q->http_status == 200 && config_bool(c, "json"))
        return printf("%.*s\n", (int)q->answer.len, q->answer.data) < 0;
    else if (q->http_status == 200) return print_table(buf_str(&q->answer), q->groups);
    else {
        command_explain_refusal(at, q->http_status, buf_str(&q->answer), &err);
        fprintf(stderr, "baton status: %s\n", err.text);
    }
    return 1;
}

static int query_status(const struct config *c, const char *host, uint16_t port)
{
    struct status_query q = { .wants_groups = !config_bool(c, "json") };
    struct err err = { 0 };
    struct buf headers = { 0 };
    if (loop_create(&q.loop, &err) != OK) {
        fprintf(stderr, "baton status: %s\n", err.text);
        return 1;
    }
    struct http_client_options o = { .loop = q.loop, .body_max = ANSWER_MAX, .n_idle = 1 };
    q.client = http_client_create(&o);
    size_t n_keys = 0;
    const char *key = config_list(c, "api-key", 0, &n_keys);
    if (n_keys)
        buf_printf(&headers, "Authorization: Bearer %.*s\r\n", (int)strcspn(key, "\r\n"), key);
    q.headers = headers.len ? headers.data : NULL;
    q.st = http_client_request(q.client, "GET", host, port, "/cluster", q.headers,
                               (struct str){ 0 }, TIMEOUT_MS, on_answer, &q);
    if (q.st == OK) loop_run(q.loop);
    int exit_status = print_answer(c, host, port, &q);
    http_client_free(q.client);
    loop_stop(q.loop);
    loop_run(q.loop); /* one more turn, so that the connection can close */
    loop_free(q.loop);
    status_groups_free(q.groups);
    buf_release(&q.answer);
    buf_release(&headers);
    return exit_status;
}

/* Waits, and begins a new page on a terminal. */
static bool next_look(void)
{
    fflush(stdout);
    sleep(WATCH_S);
    printf(isatty(STDOUT_FILENO) ? "\x1b[H\x1b[J" : "\n");
    return true;
}

static int show(int argc, char **argv, bool watch)
{
    bool done;
    struct config *c = command_config("status", INTRO, argc, argv, NULL, NULL, &done);
    if (!c) return done ? 0 : 2;
    char host[HOST_TEXT_MAX] = "127.0.0.1";
    uint16_t port = (uint16_t)config_int(c, "port");
    const char *url = config_string(c, "url");
    int exit_status = 2;
    if (url && !command_parse_url(url, host, &port))
        fprintf(
            stderr,
            "baton status: --url %s is not http://host:port, which is all that is spoken here\n",
            url);
    else do
            exit_status = query_status(c, host, port);
        while ((watch || config_bool(c, "watch")) && next_look());
    config_free(c);
    return exit_status;
}

int cmd_status(int argc, char **argv) { return show(argc, argv, false); }

int cmd_top(int argc, char **argv) { return show(argc, argv, true); }
