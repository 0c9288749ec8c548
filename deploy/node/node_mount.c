/* node_mount.c - what the API's port answers under /cluster/v1/: calls of nodes, which prove the
 * cluster secret (scheduler/directory/handler.h), beside those of clients, which have a key.
 *
 *   GET  record                                  this node's record, for routers that list it
 *   GET  text                                    what a router needs of its model (text_bundle.h)
 *   POST publish leave snapshot reserve release  of a router that holds the view: handler.c
 *
 * Thread: loop. */
#include <string.h>

#include "deploy/node/node_internal.h"
#include "scheduler/directory/wire.h"
#include "shared/base/json/json.h"

static void reply(struct http_exchange *x, enum status st, const char *why)
{
    struct buf body = { 0 };
    buf_add_c(&body, "{\"error\":");
    json_add_string(&body, str_of(why));
    buf_add_char(&body, '}');
    http_reply(x, status_http(st), "application/json", NULL, buf_str(&body));
    buf_release(&body);
}

static void give_record(struct node *n, struct http_exchange *x)
{
    struct node_record me;
    struct buf body = { 0 };
    node_describe_record(n, &me);
    node_record_write(&me, &body);
    http_reply(x, 200, "application/json", NULL, buf_str(&body));
    buf_release(&body);
}

static void give_text(struct node *n, struct http_exchange *x)
{
    const struct node_options *o = &n->o;
    const struct text_source from = {
        .model_path = o->model_path,
        .chat_template = o->chat_template,
        .model = engine_kv_layout(n->engine)->model_fingerprint,
        .max_model_len = o->max_model_len,
        .dummy = o->dummy,
        .names = o->names,
        .n_names = o->n_names,
    };
    text_server_answer(&n->text_server, &from, o->secret, x);
}

static void answer_get(struct node *n, void (*give)(struct node *n, struct http_exchange *x),
                       struct http_exchange *x)
{
    struct err err = { 0 };
    enum status st = directory_check_caller(n->o.secret, x, &err);
    if (st == OK && strcmp(http_method(x), "GET") != 0)
        st = err_set(&err, ERR_NOT_FOUND, "only GET is answered here");
    if (st == OK && n->o.no_engine)
        st = err_set(&err, ERR_NOT_FOUND,
                     "this is an entry node without an engine; the nodes behind it have ports of "
                     "their own");
    if (st == OK && n->state != NODE_READY && n->state != NODE_DRAINING)
        st = err_set(&err, ERR_UNAVAILABLE, "%s",
                     n->state == NODE_LOADING ? "the model is being loaded"
                                              : "the node is shutting down");
    if (st == OK) give(n, x);
    else reply(x, st, err.text);
}

bool node_mount_http(struct node *n, struct http_exchange *x)
{
    const struct str path = http_path(x);
    if (!str_starts(path, DIRECTORY_PATH)) return false;
    if (str_eq_c(path, DIRECTORY_PATH "record")) answer_get(n, give_record, x);
    else if (str_eq_c(path, DIRECTORY_PATH "text")) answer_get(n, give_text, x);
    else return node_router_view(n, x);
    return true;
}
