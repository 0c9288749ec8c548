/* node_router.c - a router: an entry node without an engine, with which nodes register or which
 * lists them, and which holds their view unless that is elsewhere.
 *
 *     SEEKING ──a node is there──▶ FETCHING ──its text came──▶ LOADING ──▶ ready
 *        ▲ └──the router has a --model: its own text loads meanwhile──▶────▲
 *        └────the node gives no text, or one that cannot be loaded────┘
 *
 * It is ready once it has a text and has seen a node, since that says how long a context may be;
 * whether requests can be served then is the scheduler's to say (trouble.h). Thread: loop, except
 * node_front_load. */
#include <stdio.h>
#include <string.h>

#include "deploy/node/node_internal.h"
#include "deploy/router/held_requests.h"
#include "deploy/router/instances.h"
#include "deploy/router/relay.h"
#include "deploy/text/text_fetch.h"
#include "scheduler/directory/local.h"
#include "scheduler/directory/wire.h"
#include "scheduler/view.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    SEEK_MS = 200,   /* between two looks for a node */
    RETRY_MS = 2000, /* after a node that gave no text */
    LISTED_MS = 500  /* between two looks for nodes that are missing */
};

enum router_state { ROUTER_SEEKING, ROUTER_FETCHING, ROUTER_LOADING, ROUTER_DONE };

struct node_router {
    struct node *node;
    enum router_state state;
    struct relay *relay;            /* of one of several processes; else NULL */
    struct directory_handler *view; /* NULL: the view is elsewhere */
    struct listed *listed;          /* NULL: the same */
    struct proofs proofs;
    struct loop_timer *seek, *look;
    bool asking;
    /* The operator gave them. */
    bool has_names, has_template, has_reasoning, has_tools;
    uint64_t t_not_before_ms; /* a text is not asked for before */
    size_t n_tried;           /* texts that could not be used: the next node is asked */
    struct text_fetch *fetch;
    struct text_fetched text;   /* its names are the node's, until the end */
    struct held_requests *held; /* that came before it was ready */
    struct node_record seen;    /* the node whose limits it took; node 0: none yet */
    char why[ERR_TEXT_MAX];     /* what is missing while it is not ready */
};

/* ---- the view ---- */

/* The hub cannot tell who called the shared port, so that is looked at here. */
static void relay_call(struct node *n, struct http_exchange *x)
{
    struct err err = { 0 };
    if (directory_check_caller(n->o.secret, x, &err) == OK) relay_pass(n->router->relay, x);
    else http_reply_error(x, status_http(err.code), NULL, "error", err.text);
}

bool node_router_view(struct node *n, struct http_exchange *x)
{
    const struct node_router *r = n->router;
    const bool is_hubs = r && r->relay && n->o.directory_port == n->o.worker.hub;
    if (r && r->view) directory_handler_serve(r->view, x);
    else if (is_hubs) relay_call(n, x);
    return is_hubs || (r && r->view);
}

/* Before the scheduler has a view of its own. */
static void count_in_directory(const struct node *n, uint32_t out[3])
{
    char topics[512];
    size_t n_nodes = 0;
    if (!n->router->view) return;
    struct node_record *nodes = directory_local_view(n->directory, n->o.topic, &n_nodes, topics);
    for (size_t i = 0; i < n_nodes; i++) out[nodes[i].role]++;
    mem_free(nodes);
}

static void count_nodes(void *arg, uint32_t out[3])
{
    const struct node *n = arg;
    if (!n->scheduler) {
        count_in_directory(n, out);
        return;
    }
    const struct view *v = scheduler_view(n->scheduler);
    for (size_t i = 0; i < v->n_nodes; i++) out[v->nodes[i].role]++;
}

/* A router may wait long for its first node. */
static void write_metrics(struct node *n, struct http_exchange *x)
{
    struct buf body = { 0 };
    metrics_write(n->metrics, &body);
    http_reply(x, 200, "text/plain; version=0.0.4; charset=utf-8", NULL, buf_str(&body));
    buf_release(&body);
}

bool node_router_http(struct node *n, struct http_exchange *x)
{
    if (!n->router || n->state == NODE_STOPPING) return false;
    if (n->router->relay && relay_takes(http_path(x))) {
        relay_pass(n->router->relay, x);
        return true;
    }
    const struct instances_options o = {
        .listed = n->router->listed,
        .tenants = &n->o.tenants,
        .count = count_nodes,
        .arg = n,
    };
    if (!n->serve && str_eq_c(http_path(x), "/metrics") && instances_has_key(&o, x)) {
        write_metrics(n, x);
        return true;
    }
    if (instances_serve(&o, x)) return true;
    return n->state == NODE_LOADING && held_take(n->router->held, x);
}

void node_router_describe(const struct node *n, struct buf *out)
{
    if (!n->router || !n->router->listed) return;
    buf_add_c(out, ",\"listed\":");
    listed_write(n->router->listed, out);
}

/* Nodes that are meant to be in its view and are not: listed ones, or some that are not let in.
 * NULL: it knows of none. */
static const char *why_missing(const struct node_router *r)
{
    const char *down = r->listed ? listed_why_down(r->listed) : NULL;
    return !down && r->view ? directory_handler_stranger(r->view) : down;
}

const char *node_router_why(struct node *n)
{
    struct node_router *r = n->router;
    const char *down = why_missing(r), *directory = directory_why_down(n->directory);
    if (directory) return directory;
    if (r->why[0]) return r->why;
    if (down) return down;
    return r->seen.node ? "the tokenizer is being loaded" : "no node has been seen yet";
}

/* ---- becoming ready ---- */

static void become_ready(struct node_router *r)
{
    struct node *n = r->node;
    if (!r->seen.node || !n->front.loaded || n->state != NODE_LOADING) return;
    if (!n->o.max_model_len_given && r->seen.max_model_len)
        n->o.max_model_len = r->seen.max_model_len;
    n->o.block_tokens = r->seen.block_tokens;
    r->state = ROUTER_DONE;
    r->why[0] = 0;
    loop_timer_free(r->seek);
    r->seek = NULL;
    node_become_ready(n);
    held_release(r->held);
}

void node_router_loaded(struct node *n)
{
    struct node_router *r = n->router;
    n->front.loaded = true;
    if (r->text.folder.len) text_bundle_remove(r->text.folder.data);
    buf_clear(&r->text.folder);
    become_ready(r);
}

/* Another node may have a text that can be used, or this one when it is asked again. */
static void try_again(struct node_router *r, const char *why)
{
    snprintf(r->why, sizeof r->why, "%s", why);
    log_warn("no text yet", "why=\"%s\"", why);
    r->n_tried++;
    r->t_not_before_ms = clock_ms() + RETRY_MS;
    r->state = ROUTER_SEEKING;
}

bool node_router_failed(struct node *n)
{
    struct node_router *r = n->router;
    if (!r || r->state != ROUTER_LOADING || n->o.model) return false;
    try_again(r, n->load_err.text);
    node_model_release(&n->model);
    text_fetched_release(&r->text);
    n->o.model_path = NULL;
    return true;
}

/* What the operator gave stays. */
static void take_text(struct node_router *r)
{
    struct node_options *o = &r->node->o;
    o->model_path = r->text.model_path.data;
    if (!r->has_template)
        o->chat_template = r->text.chat_template.len ? r->text.chat_template.data : NULL;
    o->dummy = r->text.dummy;
    if (!r->has_reasoning) o->reasoning_parser = r->text.reasoning_parser;
    if (!r->has_tools) o->tool_parser = r->text.tool_parser;
    for (size_t i = 0; !r->has_names && i < r->text.n_names; i++) o->names[i] = r->text.names[i];
    if (!r->has_names) o->n_names = r->text.n_names;
    r->state = ROUTER_LOADING;
    node_begin_loading(r->node);
}

static void on_text(void *arg, enum status st, const struct err *err, struct text_fetched *got)
{
    struct node_router *r = arg;
    r->fetch = NULL;
    if (st == OK) {
        r->text = *got;
        take_text(r);
    } else {
        text_fetched_release(got);
        try_again(r, err->text);
    }
}

/* ---- seeking ---- */

/* Nodes that decode come first: their limits are those of requests. */
static const struct node_record *choose(const struct node_record *nodes, size_t n, size_t nth)
{
    size_t n_good = 0, at = 0;
    for (size_t i = 0; i < n; i++) n_good += nodes[i].http_port != 0;
    if (!n_good) return NULL;
    for (int decodes = 1; decodes >= 0; decodes--)
        for (size_t i = 0; i < n; i++)
            if (nodes[i].http_port && (nodes[i].role != ROLE_PREFILL) == decodes &&
                at++ == nth % n_good)
                return &nodes[i];
    return NULL;
}

static void fetch_from(struct node_router *r, const struct node_record *from)
{
    const struct text_fetch_options o = {
        .loop = r->node->loop,
        .host = from->host,
        .port = from->http_port,
        .secret = r->node->o.secret,
        .done = on_text,
        .arg = r,
    };
    r->state = ROUTER_FETCHING;
    log_info("asking a node for its text", "node=%s", from->name);
    r->fetch = text_fetch_start(&o);
}

static void say_no_node(struct node_router *r, const struct node_record *unproven)
{
    const struct node_options *o = &r->node->o;
    if (r->n_tried) return; /* it has said more */
    if (unproven->node)
        snprintf(r->why, sizeof r->why,
                 "the record of node %s is not proven by this router's cluster secret "
                 "(BATON_CLUSTER_SECRET), or of another host while there is none",
                 unproven->name);
    else if (why_missing(r)) r->why[0] = 0; /* it is said instead */
    else
        snprintf(r->why, sizeof r->why,
                 "no node has registered in topic %.63s yet; start nodes with %.300s", o->topic,
                 r->node->join[0] ? r->node->join : "the same view of the cluster");
}

static void on_snapshot(void *arg, enum status st, const struct directory_snapshot *s)
{
    struct node_router *r = arg;
    struct node_record unproven = { 0 };
    r->asking = false;
    if (r->state == ROUTER_DONE || r->node->state != NODE_LOADING || st != OK) return;
    struct node_record *nodes = s->n ? mem_dup(s->nodes, s->n * sizeof *nodes) : NULL;
    const size_t n = proofs_keep_proven(&r->proofs, r->node->o.secret, "", nodes, s->n, &unproven);
    const struct node_record *from = choose(nodes, n, r->n_tried);
    if (from) {
        r->seen = *from;
        if (!r->n_tried) r->why[0] = 0;
        if (!r->node->o.model && r->state == ROUTER_SEEKING && clock_ms() >= r->t_not_before_ms)
            fetch_from(r, from);
        become_ready(r);
    } else {
        say_no_node(r, &unproven);
    }
    mem_free(nodes);
}

static void on_seek(void *arg)
{
    struct node_router *r = arg;
    if (r->asking || r->node->state != NODE_LOADING) return;
    r->asking = directory_snapshot(r->node->directory, on_snapshot, r) == OK;
}

static void on_look(void *arg)
{
    struct node_router *r = arg;
    if (r->node->scheduler) scheduler_missing(r->node->scheduler, why_missing(r));
}

/* ---- life ---- */

static enum status list_nodes(struct node_router *r, struct err *err)
{
    const struct node_options *o = &r->node->o;
    const struct listed_options l = {
        .loop = r->node->loop,
        .directory = r->node->directory,
        .secret = o->secret,
        .topic = o->topic,
        .metrics = r->node->metrics,
    };
    r->listed = listed_create(&l);
    r->look = loop_timer_start(r->node->loop, LISTED_MS, LISTED_MS, on_look, r);
    for (size_t i = 0; i < o->listed.n; i++) TRY(listed_add(r->listed, &o->listed.nodes[i], err));
    return OK;
}

enum status node_router_start(struct node *n, struct err *err)
{
    if (!n->o.is_router) return OK;
    struct node_router *r = MEM_NEW(struct node_router);
    n->router = r;
    r->node = n;
    r->has_names = n->o.n_names > 0;
    r->has_template = n->o.chat_template != NULL;
    r->has_reasoning = strcmp(n->o.reasoning_parser, "auto") != 0;
    r->has_tools = strcmp(n->o.tool_parser, "auto") != 0;
    const struct held_options h = {
        .loop = n->loop,
        .tenants = &n->o.tenants,
        .wait_ms = n->o.grace_ms,
        .answer = node_serve_or_say_why,
        .arg = n,
    };
    r->held = held_create(&h);
    if (n->o.worker.port) r->relay = relay_create(n->loop, n->o.worker.hub);
    if (!directory_is_local(n->directory)) return OK;
    r->view = directory_handler_create(n->directory, n->o.secret);
    return list_nodes(r, err);
}

void node_router_begin(struct node *n)
{
    struct node_router *r = n->router;
    node_describe_join(n);
    if (n->o.model) {
        r->state = ROUTER_LOADING;
        node_begin_loading(n);
    }
    r->seek = loop_timer_start(n->loop, 0, SEEK_MS, on_seek, r);
}

void node_router_stop(struct node *n)
{
    struct node_router *r = n->router;
    if (!r) return;
    if (r->view) directory_handler_close(r->view);
    held_release(r->held);
    text_fetch_cancel(r->fetch);
    r->fetch = NULL;
    loop_timer_free(r->seek);
    loop_timer_free(r->look);
    r->seek = r->look = NULL;
}

void node_router_end(struct node *n)
{
    struct node_router *r = n->router;
    if (!r) return;
    listed_free(r->listed);
    r->listed = NULL;
    directory_handler_free(r->view);
    r->view = NULL;
    relay_free(r->relay);
    r->relay = NULL;
    held_free(r->held);
    r->held = NULL;
}

void node_router_free(struct node *n)
{
    struct node_router *r = n->router;
    if (!r) return;
    proofs_release(&r->proofs);
    text_fetched_release(&r->text);
    mem_free(r);
    n->router = NULL;
}
