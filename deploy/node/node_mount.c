/* node_mount.c - what the API's port answers under /cluster/v1/: calls of nodes, which prove the
 * cluster secret (scheduler/directory/handler.h), beside those of clients, which have a key.
 *
 *   GET  records                                 this node's record, for routers that list it; of
 *                                                the port before ranks, those of all behind it
 *   GET  text                                    what a router needs of its model (text_bundle.h)
 *   POST role                                    changes its role (role_change.h)
 *   POST publish leave snapshot reserve release  of a router that holds the view: handler.c
 *
 * Thread: loop. */
#include <string.h>

#include "deploy/node/node_internal.h"
#include "deploy/role/role_change.h"
#include "deploy/router/listed.h"
#include "scheduler/directory/local.h"
#include "scheduler/directory/wire.h"
#include "shared/base/clock.h"
#include "shared/base/mem.h"

enum {
    LISTED_MS = 5000, /* a router that lists this node asks for its record more often, ... */
    ALONE_MS = 2000   /* ... and in less than this, if nothing delays it */
};

static bool is_since(uint64_t t_ms, uint32_t ms) { return t_ms && clock_ms() - t_ms < ms; }

bool node_is_listed(const struct node *n) { return is_since(n->t_listed_ms, LISTED_MS); }

bool node_is_listed_with_others(const struct node *n)
{
    return is_since(n->t_others_ms, LISTED_MS) && !is_since(n->t_alone_ms, ALONE_MS);
}

enum trouble_listed node_listed(void *arg)
{
    const struct node *n = arg;
    if (!node_is_listed(n)) return TROUBLE_NOT_LISTED;
    return node_is_listed_with_others(n) ? TROUBLE_LISTED_WITH_OTHERS : TROUBLE_LISTED_ALONE;
}

/* Several routers may list it, and know different nodes. */
static void note_listed(struct node *n, struct str others)
{
    n->t_listed_ms = clock_ms();
    if (str_eq_c(others, "1")) n->t_others_ms = n->t_listed_ms;
    if (str_eq_c(others, "0")) n->t_alone_ms = n->t_listed_ms;
}

/* Those behind this port have published theirs here. */
static void add_records_behind(struct node *n, struct buf *out)
{
    char topics[512];
    size_t n_nodes;
    struct node_record *nodes = directory_local_view(n->directory, n->o.topic, &n_nodes, topics);
    for (size_t i = 0; i < n_nodes; i++) {
        if (i) buf_add_char(out, ',');
        node_record_write(&nodes[i], out);
    }
    mem_free(nodes);
}

static void give_records(struct node *n, struct http_exchange *x)
{
    struct node_record me;
    struct buf body = { 0 };
    buf_add_c(&body, "{\"records\":[");
    if (n->o.no_engine) {
        add_records_behind(n, &body);
    } else {
        note_listed(n, http_header(x, LISTED_OTHERS_HEADER));
        node_describe_record(n, &me);
        node_record_write(&me, &body);
    }
    buf_add_c(&body, "]}");
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
        .reasoning_parser = o->reasoning_parser,
        .tool_parser = o->tool_parser,
        .names = o->names,
        .n_names = o->n_names,
    };
    text_server_answer(&n->text_server, &from, o->secret, x);
}

/* Does who asks have the secret that this node shares with others? */
static enum status check_caller(const struct node *n, const struct http_exchange *x,
                                struct err *err)
{
    const enum status st = directory_check_caller(n->o.secret, x, err);
    if (st == OK || !(n->o.own_secret || launcher_watch_own_secret(n->launcher))) return st;
    return err_set(err, ERR_UNAUTHORIZED,
                   "this node and those started with it have a cluster secret of their own, which "
                   "nobody else has: start all nodes and the router with the same "
                   "BATON_CLUSTER_SECRET");
}

/* ---- who may call, and when ---- */

static const struct mount {
    const char *path, *method;
    void (*answer)(struct node *n, struct http_exchange *x);
    bool of_front;    /* the port before ranks answers, where it holds their view */
    bool while_drain; /* also a node that shuts down does */
} MOUNTS[] = {
    { DIRECTORY_PATH "records", "GET", give_records, true, true },
    { DIRECTORY_PATH "text", "GET", give_text, false, true },
    { ROLE_PATH, "POST", node_role_answer, false, false },
};

static enum status check_state(const struct node *n, const struct mount *m, struct err *err)
{
    if (n->o.is_router || (n->o.no_engine && !(m->of_front && directory_is_local(n->directory))))
        return err_set(err, ERR_NOT_FOUND,
                       n->o.is_router ? "this is a router, no node"
                                      : "this is an entry node without an engine; the nodes behind "
                                        "it are in the view of the cluster that they were given");
    if (n->state == NODE_READY || (n->state == NODE_DRAINING && m->while_drain) || n->o.no_engine)
        return OK;
    return err_set(err, ERR_UNAVAILABLE, "%s",
                   n->state == NODE_LOADING ? "the model is being loaded"
                                            : "the node is shutting down");
}

static void answer(struct node *n, const struct mount *m, struct http_exchange *x)
{
    struct err err = { 0 };
    enum status st = check_caller(n, x, &err);
    if (st == OK && strcmp(http_method(x), m->method) != 0)
        st = err_set(&err, ERR_NOT_FOUND, "only %s is answered here", m->method);
    if (st == OK) st = check_state(n, m, &err);
    if (st != OK) http_reply_error(x, status_http(st), NULL, "error", err.text);
    else m->answer(n, x);
}

bool node_mount_http(struct node *n, struct http_exchange *x)
{
    const struct str path = http_path(x);
    if (!str_starts(path, DIRECTORY_PATH)) return false;
    size_t i = 0;
    while (i < COUNT_OF(MOUNTS) && !str_eq_c(path, MOUNTS[i].path)) i++;
    if (i == COUNT_OF(MOUNTS)) return node_router_view(n, x);
    if (n->state == NODE_STOPPING) return false; /* the directory may be gone */
    answer(n, &MOUNTS[i], x);
    return true;
}
