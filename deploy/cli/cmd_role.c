/* cmd_role.c - `baton role`: changes the role of a running node. Asks the node itself, which checks
 * whether it can (deploy/role/role_change.h). Thread: main. */
#include <stdio.h>
#include <string.h>

#include "deploy/cli/commands.h"
#include "deploy/node/node_options.h"
#include "deploy/role/role_change.h"
#include "shared/net/http/http_client.h"

static const char INTRO[] =
    "usage: baton role NODE prefill|decode|mixed [--url http://host:port]\n\n"
    "Change which work is placed on a node while it runs; what it does already goes on. NODE is "
    "the\n"
    "host:port of its API, or a host that has one node, or a node's id, as a node that --url "
    "names\n"
    "sees them (baton status). It needs the cluster secret of the nodes, if they have one.\n";

enum { ANSWER_MAX = 16 << 20, TIMEOUT_MS = 5000 };

struct role_target {
    char host[HOST_TEXT_MAX];
    uint16_t port;
    struct role_ask ask;
};

/* ---- one call ---- */

struct role_query {
    struct loop *loop;
    struct buf answer;
    enum status st;
    int http_status;
};

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct role_query *q = arg;
    q->st = st;
    q->http_status = http_status;
    if (st == OK) buf_add_str(&q->answer, body);
    loop_stop(q->loop);
}

/* Each call has its own loop, which ends with the answer. */
static enum status wait_for_answer(struct role_query *q, const char *method,
                                   const struct role_target *at, const char *path,
                                   const char *headers, struct str body, struct err *err)
{
    TRY(loop_create(&q->loop, err));
    struct http_client_options o = { .loop = q->loop, .body_max = ANSWER_MAX, .n_idle = 1 };
    struct http_client *client = http_client_create(&o);
    buf_clear(&q->answer);
    q->st = http_client_request(client, method, at->host, at->port, path, headers, body, TIMEOUT_MS,
                                on_answer, q);
    if (q->st == OK) loop_run(q->loop);
    http_client_free(client);
    loop_stop(q->loop);
    loop_run(q->loop); /* one more turn, so that the connection can close */
    loop_free(q->loop);
    return q->st;
}

static enum status call(struct role_query *q, const char *method, const struct role_target *at,
                        const char *path, const char *headers, struct str body, struct err *err)
{
    char text[HOST_PORT_TEXT_MAX];
    const enum status st = wait_for_answer(q, method, at, path, headers, body, err);
    if (st == OK) return OK;
    return err_set(err, st, "nothing answers at %s; is a node running there?",
                   host_port_text(at->host, at->port, text));
}

/* Asks the node that --url names which nodes it sees. */
static enum status ask_cluster(struct role_query *q, const struct config *c,
                               const struct role_target *at, struct err *err)
{
    struct buf headers = { 0 };
    char text[HOST_PORT_TEXT_MAX];
    size_t n_keys = 0;
    const char *key = config_list(c, "api-key", 0, &n_keys);
    if (n_keys)
        buf_printf(&headers, "Authorization: Bearer %.*s\r\n", (int)strcspn(key, "\r\n"), key);
    enum status st = call(q, "GET", at, "/cluster", headers.len ? headers.data : NULL, STR(""),
                          err);
    buf_release(&headers);
    if (st != OK || q->http_status == 200) return st;
    command_explain_refusal(host_port_text(at->host, at->port, text), q->http_status,
                            buf_str(&q->answer), err);
    return err->code;
}

/* ---- the node ---- */

static const char *text_of(const cJSON *o, const char *name)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(o, name);
    return cJSON_IsString(v) ? v->valuestring : "";
}

static bool is_meant(const cJSON *node, const char *name)
{
    return strcmp(text_of(node, "name"), name) == 0 || strcmp(text_of(node, "node"), name) == 0 ||
           strcmp(text_of(node, "host"), name) == 0;
}

/* Looks the name up among the nodes of /cluster. */
static enum status find_node(struct str cluster, const char *name, struct role_target *out,
                             struct err *err)
{
    cJSON *doc = NULL;
    TRY(json_parse(cluster, false, &doc, err));
    const cJSON *nodes = json_member(doc, "nodes"), *one, *found = NULL;
    int n = 0;
    cJSON_ArrayForEach (one, nodes) {
        if (!is_meant(one, name)) continue;
        found = one;
        n++;
    }
    int64_t port = 0;
    enum status st = OK;
    if (n != 1)
        st = err_set(err, ERR_NOT_FOUND,
                     n ? "%d nodes are at %s; name one by its host:port (baton status)"
                       : "%d of the nodes that are seen there are called %s (baton status)",
                     n, name);
    if (st == OK) st = json_get_i64(found, "http_port", 1, UINT16_MAX, &port, err);
    if (st == OK && !port) st = err_set(err, ERR_NOT_FOUND, "the node %s has no API port", name);
    out->port = (uint16_t)port;
    snprintf(out->host, sizeof out->host, "%s", text_of(found, "host"));
    snprintf(out->ask.node, sizeof out->ask.node, "%s", text_of(found, "name"));
    cJSON_Delete(doc);
    return st;
}

/* Where NODE is: at its own address, or as the node that --url names knows it. */
static enum status resolve(struct role_query *q, const struct config *c, const char *name,
                           struct role_target *out, struct err *err)
{
    struct role_target seer = { .host = "127.0.0.1", .port = (uint16_t)config_int(c, "port") };
    const char *url = config_string(c, "url");
    int64_t port;
    if (host_port_parse(name, out->host, &out->port) && out->host[0] && out->port)
        return command_parse_url(name, out->host, &out->port)
                   ? OK
                   : err_set(err, ERR_INVALID, "%s is no host:port", name);
    if (str_to_i64(str_of(name), &port) == OK && port > 0 && port <= UINT16_MAX)
        return err_set(err, ERR_INVALID, "%s is not host:port; of this host it is 127.0.0.1:%s",
                       name, name);
    if (url && !command_parse_url(url, seer.host, &seer.port))
        return err_set(err, ERR_INVALID,
                       "--url %s is not http://host:port, which is all that is spoken here", url);
    TRY(ask_cluster(q, c, &seer, err));
    return find_node(buf_str(&q->answer), name, out, err);
}

/* ---- the change ---- */

static enum status ask_node(struct role_query *q, const struct role_target *at, struct str secret,
                            struct err *err)
{
    char proof[DIRECTORY_PROOF_HEADER_MAX], headers[DIRECTORY_PROOF_HEADER_MAX + 48];
    struct buf body = { 0 };
    role_ask_write(&at->ask, &body);
    directory_prove_header(secret, "POST", STR(ROLE_PATH), buf_str(&body), proof);
    snprintf(headers, sizeof headers, "Content-Type: application/json\r\n%s", proof);
    enum status st = call(q, "POST", at, ROLE_PATH, headers, buf_str(&body), err);
    if (st == OK && q->http_status != 200) /* the sentence is the node's */
        st = directory_read_refusal(q->http_status, buf_str(&q->answer), "it does not say why",
                                    err);
    buf_release(&body);
    return st;
}

static enum status print_change(struct str answer, struct err *err)
{
    cJSON *doc = NULL;
    TRY(json_parse(answer, false, &doc, err));
    const char *is = text_of(doc, "role"), *was = text_of(doc, "was");
    if (strcmp(is, was) == 0) printf("%s is %s already\n", text_of(doc, "node"), is);
    else printf("%s is %s now, and was %s\n", text_of(doc, "node"), is, was);
    cJSON_Delete(doc);
    return OK;
}

static enum status change(const struct config *c, const char *name, enum node_role role,
                          struct err *err)
{
    struct role_query q = { 0 };
    struct role_target at = { .ask = { .role = role } };
    struct arena arena;
    struct str secret = { 0 };
    arena_init(&arena);
    enum status st = node_options_secret(c, &arena, &secret, err);
    if (st == OK) st = resolve(&q, c, name, &at, err);
    if (st == OK) st = ask_node(&q, &at, secret, err);
    if (st == OK) st = print_change(buf_str(&q.answer), err);
    buf_release(&q.answer);
    arena_release(&arena);
    return st;
}

int cmd_role(int argc, char **argv)
{
    bool done;
    const char *words[2];
    int n_words = 2;
    enum node_role role;
    struct err err = { 0 };
    struct config *c = command_config("role", INTRO, argc, argv, words, &n_words, &done);
    if (!c) return done ? 0 : 2;
    int exit_status = 2;
    if (n_words != 2) {
        fputs(INTRO, stderr);
    } else if (!node_role_from_name(words[1], &role)) {
        fprintf(stderr, "baton role: '%.40s' is no role; it is prefill, decode or mixed\n",
                words[1]);
    } else {
        exit_status = change(c, words[0], role, &err) != OK;
        if (exit_status) {
            const bool is_named = strstr(err.text, words[0]) != NULL;
            fprintf(stderr, "baton role: %s%s%s\n", is_named ? "" : words[0], is_named ? "" : ": ",
                    err.text);
        }
    }
    config_free(c);
    return exit_status;
}
