/* listed.c - see listed.h. Thread: loop. */
#include "deploy/router/listed.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/directory/local.h"
#include "scheduler/directory/wire.h"
#include "shared/base/address/host_port.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/json/json_packed.h"
#include "shared/base/list.h"
#include "shared/base/log.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_client.h"

enum {
    POLL_MS = 700,
    ASK_MS = 2000,
    RECORDS_MAX = 256, /* of one address: the port before ranks gives those of all */
    ANSWER_MAX = RECORDS_MAX * RECORD_TEXT_MAX,
    VALUES_MAX = RECORDS_MAX * 64, /* JSON values of an answer */
    WHY_MAX = ERR_TEXT_MAX
};

#define RECORDS_PATH DIRECTORY_PATH "records"

enum listed_state { LISTED_NEW, LISTED_UP, LISTED_DOWN };

static const char *const STATE_NAMES[] = { "new", "up", "down" };

struct listed_node {
    struct list link;
    struct listed *all;
    struct node_at at;
    char text[HOST_PORT_TEXT_MAX]; /* host:port */
    enum listed_state state;
    bool asking, removed; /* removed while it is asked: freed after the answer */
    bool role_told;       /* that it has another role than it is listed with */
    uint64_t *nodes;      /* [n_nodes] of its last answer */
    size_t n_nodes;
    char why[WHY_MAX]; /* DOWN */
};

struct listed_waiter {
    struct list link;
    struct listed_node *node;
    void (*fn)(void *arg, const char *why);
    void *arg;
};

struct listed {
    struct listed_options o;
    struct http_client *client;
    struct loop_timer *poll;
    struct list nodes, waiters;
    size_t n;
    bool freed;
    char why_down[WHY_MAX];
    struct gauge *m_states[3];
    struct log_repeats repeats;
};

static void free_node(struct listed_node *n)
{
    mem_free(n->nodes);
    mem_free(n);
}

static struct listed_node *find(const struct listed *l, const struct node_at *at)
{
    LIST_FOREACH (n, &l->nodes, struct listed_node, link)
        if (n->at.role == at->role && n->at.port == at->port && strcmp(n->at.host, at->host) == 0)
            return n;
    return NULL;
}

static void count_states(struct listed *l)
{
    uint32_t n_of[3] = { 0 };
    LIST_FOREACH (n, &l->nodes, struct listed_node, link) n_of[n->state]++;
    for (size_t i = 0; i < COUNT_OF(n_of); i++) gauge_set(l->m_states[i], n_of[i]);
}

static void set_state(struct listed_node *n, enum listed_state to, const char *why)
{
    struct listed *l = n->all;
    char line[HOST_PORT_TEXT_MAX + WHY_MAX];
    uint32_t n_unlogged;
    const bool changed = n->state != to || strcmp(n->why, why) != 0;
    n->state = to;
    snprintf(n->why, sizeof n->why, "%s", why);
    count_states(l);
    if (!changed) return;
    if (to == LISTED_UP) log_info("listed node answers", "at=%s", n->text);
    snprintf(line, sizeof line, "%s %s", n->text, why);
    if (to == LISTED_DOWN && log_repeats_due(&l->repeats, line, clock_ms(), &n_unlogged))
        log_warn("listed node not used", "at=%s why=\"%s\" repeats=%u", n->text, why, n_unlogged);
}

/* ---- answers ---- */

/* Says what the operator may not have meant; the node is used all the same. */
static void say_odd(struct listed_node *n, const struct node_record *r)
{
    if (n->role_told) return;
    n->role_told = true;
    if (r->role != n->at.role)
        log_warn("listed node has another role",
                 "at=%s listed=%s role=%s why=\"its own role counts\"", n->text,
                 node_role_name(n->at.role), node_role_name(r->role));
    if (host_is_loopback(r->host) && host_is_number(n->at.host) && !host_is_loopback(n->at.host))
        log_warn("listed node names a loopback address",
                 "at=%s address=%s why=\"other nodes are to reach it there, which is right on its "
                 "own host only; elsewhere give it --advertise-host %s\"",
                 n->text, r->host, n->at.host);
}

static enum status check_record(const struct listed_node *n, const struct node_record *r,
                                struct err *err)
{
    const struct listed_options *o = &n->all->o;
    if (!node_record_is_proven(r, o->secret, ""))
        return o->secret.n
                   ? err_set(err, ERR_PEER_REFUSED,
                             "its record is not proven by this router's cluster secret "
                             "(BATON_CLUSTER_SECRET)")
                   : err_set(err, ERR_PEER_REFUSED,
                             "other nodes are to reach it at %s, and without a cluster secret "
                             "(BATON_CLUSTER_SECRET) only nodes of this host are used",
                             r->host);
    if (strcmp(r->topic, o->topic) != 0)
        return err_set(err, ERR_PEER_MISMATCH,
                       "it is in topic %s and this router in topic %s: give both the same "
                       "--scheduler-topic",
                       r->topic, o->topic);
    return OK;
}

static enum status publish(struct listed_node *n, const cJSON *one, uint64_t *id, struct err *err)
{
    struct node_record r;
    TRY(node_record_from_json(one, &r, err));
    TRY(check_record(n, &r, err));
    if (directory_local_publish(n->all->o.directory, &r) != OK)
        return err_set(err, ERR_FULL, "the view is full: it has %d nodes", DIRECTORY_NODES_MAX);
    say_odd(n, &r);
    *id = r.node;
    return OK;
}

static void leave(struct listed_node *n, const uint64_t *but, size_t n_but)
{
    for (size_t i = 0; i < n->n_nodes; i++)
        if (!nodes_have(but, n_but, n->nodes[i]))
            directory_local_leave(n->all->o.directory, n->nodes[i]);
}

/* A node that started again has another number; the record of its past goes at once. */
static enum status take_all(struct listed_node *n, const cJSON *doc, struct err *err)
{
    const cJSON *records = json_member(doc, "records"), *one;
    const int count = cJSON_IsArray(records) ? cJSON_GetArraySize(records) : 0;
    size_t n_ids = 0;
    enum status st = OK;
    if (count < 1 || count > RECORDS_MAX)
        return err_set(err, ERR_FORMAT, "no node behind it has said anything of itself yet");
    uint64_t *ids = MEM_ARRAY(uint64_t, (size_t)count);
    cJSON_ArrayForEach (one, records) {
        st = publish(n, one, &ids[n_ids], err);
        if (st != OK) break;
        n_ids++;
    }
    if (st == OK) leave(n, ids, n_ids);
    if (st == OK) mem_free(n->nodes);
    else mem_free(ids);
    if (st != OK) return st;
    n->nodes = ids;
    n->n_nodes = n_ids;
    return OK;
}

static enum status take_records(struct listed_node *n, struct str text, struct err *err)
{
    cJSON *doc = NULL;
    TRY(json_parse_bounded(text, VALUES_MAX, &doc, err));
    const enum status st = take_all(n, doc, err);
    cJSON_Delete(doc);
    return st;
}

static void tell_waiters(struct listed_node *n)
{
    struct listed *l = n->all;
    struct list due;
    list_init(&due);
    LIST_FOREACH (w, &l->waiters, struct listed_waiter, link) {
        if (w->node != n) continue;
        list_remove(&w->link);
        list_push(&due, &w->link);
    }
    while (!list_empty(&due)) {
        struct listed_waiter *w = LIST_FIRST(&due, struct listed_waiter, link);
        list_remove(&w->link);
        w->fn(w->arg, n->removed              ? "it was removed meanwhile"
                      : n->state == LISTED_UP ? NULL
                                              : n->why);
        mem_free(w);
    }
}

static const char NO_RECORD[] = "it gives no record: it is no node of this version";

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct listed_node *n = arg;
    struct err err = { 0 };
    if (n->all->freed) { /* the client is being freed */
        if (n->removed) free_node(n);
        return;
    }
    if (!n->removed) {
        if (st != OK)
            (void)err_set(&err, st, "it does not answer: %s",
                          st == ERR_PEER_LOST ? "nobody listens there, or the connection broke"
                                              : status_text(st));
        else
            st = http_status == 200 ? take_records(n, body, &err)
                                    : directory_read_refusal(http_status, body, NO_RECORD, &err);
        set_state(n, st == OK ? LISTED_UP : LISTED_DOWN, st == OK ? "" : err.text);
    }
    tell_waiters(n); /* which may remove it */
    n->asking = false;
    if (n->removed) free_node(n);
}

/* ---- questions ---- */

/* Does a node that is not behind this address decode for the model of those that are? */
static bool others_decode(const struct listed_node *n, const struct node_record *nodes, size_t n_in)
{
    uint64_t model = 0;
    for (size_t i = 0; i < n_in; i++)
        if (nodes_have(n->nodes, n->n_nodes, nodes[i].node)) model = nodes[i].model;
    for (size_t i = 0; i < n_in; i++) {
        const struct node_record *r = &nodes[i];
        if (r->model == model && r->role != ROLE_PREFILL && !r->draining &&
            !nodes_have(n->nodes, n->n_nodes, r->node))
            return true;
    }
    return false;
}

/* others: a value of LISTED_OTHERS_HEADER, or NULL. */
static void ask(struct listed_node *n, const char *others)
{
    struct listed *l = n->all;
    char proof[DIRECTORY_PROOF_HEADER_MAX], headers[DIRECTORY_PROOF_HEADER_MAX + 32];
    if (n->asking) return;
    directory_prove_header(l->o.secret, "GET", STR(RECORDS_PATH), STR(""), proof);
    int len = snprintf(headers, sizeof headers, "%s", proof);
    if (others)
        snprintf(headers + len, sizeof headers - (size_t)len, LISTED_OTHERS_HEADER ": %s\r\n",
                 others);
    n->asking = http_client_request(l->client, "GET", n->at.host, n->at.port, RECORDS_PATH, headers,
                                    STR(""), ASK_MS, on_answer, n) == OK;
    if (!n->asking) set_state(n, LISTED_DOWN, "it cannot be asked");
}

static void on_poll(void *arg)
{
    struct listed *l = arg;
    char topics[512];
    size_t n_in;
    struct node_record *nodes = directory_local_view(l->o.directory, l->o.topic, &n_in, topics);
    LIST_FOREACH (n, &l->nodes, struct listed_node, link)
        ask(n, others_decode(n, nodes, n_in) ? "1" : "0");
    mem_free(nodes);
}

/* ---- the list ---- */

enum status listed_add(struct listed *l, const struct node_at *node, struct err *err)
{
    struct listed_node *n = find(l, node);
    if (n) return OK;
    if (l->n >= LISTED_MAX)
        return err_set(err, ERR_FULL, "there are %d listed nodes already, the limit", LISTED_MAX);
    n = MEM_NEW(struct listed_node);
    *n = (struct listed_node){ .all = l, .at = *node };
    host_port_text(node->host, node->port, n->text);
    list_push(&l->nodes, &n->link);
    l->n++;
    count_states(l);
    ask(n, NULL);
    return OK;
}

bool listed_remove(struct listed *l, const struct node_at *node)
{
    struct listed_node *n = find(l, node);
    if (!n) return false;
    log_info("listed node removed", "at=%s role=%s", n->text, node_role_name(n->at.role));
    list_remove(&n->link);
    l->n--;
    leave(n, NULL, 0);
    n->removed = true;
    if (!n->asking) {
        tell_waiters(n);
        free_node(n);
    }
    count_states(l);
    return true;
}

bool listed_has(const struct listed *l, const struct node_at *node)
{
    return find(l, node) != NULL;
}

void listed_when_asked(struct listed *l, const struct node_at *node,
                       void (*fn)(void *arg, const char *why), void *arg)
{
    struct listed_waiter *w = MEM_NEW(struct listed_waiter);
    struct listed_node *n = find(l, node);
    ASSERT(n); /* the caller has added it */
    *w = (struct listed_waiter){ .node = n, .fn = fn, .arg = arg };
    list_push(&l->waiters, &w->link);
    ask(n, NULL);
}

void listed_forget(struct listed *l, const void *arg)
{
    LIST_FOREACH (w, &l->waiters, struct listed_waiter, link) {
        if (w->arg != arg) continue;
        list_remove(&w->link);
        mem_free(w);
    }
}

/* ---- for people ---- */

void listed_write_names(const struct listed *l, enum node_role role, struct buf *out)
{
    bool first = true;
    buf_add_char(out, '[');
    LIST_FOREACH (n, &l->nodes, struct listed_node, link) {
        if (n->at.role != role) continue;
        if (!first) buf_add_char(out, ',');
        first = false;
        json_add_string(out, str_of(n->text));
    }
    buf_add_char(out, ']');
}

void listed_write(const struct listed *l, struct buf *out)
{
    buf_add_char(out, '[');
    LIST_FOREACH (n, &l->nodes, struct listed_node, link) {
        if (l->nodes.next != &n->link) buf_add_char(out, ',');
        buf_add_c(out, "{\"at\":");
        json_add_string(out, str_of(n->text));
        buf_printf(out, ",\"role\":\"%s\",\"state\":\"%s\",\"why\":", node_role_name(n->at.role),
                   STATE_NAMES[n->state]);
        json_add_string(out, str_of(n->why));
        buf_add_char(out, '}');
    }
    buf_add_char(out, ']');
}

const char *listed_why_down(struct listed *l)
{
    const struct listed_node *first = NULL;
    size_t n_down = 0;
    LIST_FOREACH (n, &l->nodes, struct listed_node, link) {
        if (n->state != LISTED_DOWN) continue;
        if (!n_down++) first = n;
    }
    if (!first) return NULL;
    snprintf(l->why_down, sizeof l->why_down, "the listed %s node %.80s cannot be used: %.300s",
             node_role_name(first->at.role), first->text, first->why);
    const size_t at = strlen(l->why_down);
    if (n_down > 1)
        snprintf(l->why_down + at, sizeof l->why_down - at, " (and %zu more)", n_down - 1);
    return l->why_down;
}

/* ---- life ---- */

struct listed *listed_create(const struct listed_options *o)
{
    struct listed *l = MEM_NEW(struct listed);
    const struct http_client_options c = {
        .loop = o->loop,
        .body_max = ANSWER_MAX,
        .n_idle = LISTED_MAX,
    };
    const uint32_t poll_ms = o->poll_ms ? o->poll_ms : POLL_MS;
    char labels[32];
    l->o = *o;
    list_init(&l->nodes);
    list_init(&l->waiters);
    l->client = http_client_create(&c);
    for (size_t i = 0; i < COUNT_OF(l->m_states); i++) {
        snprintf(labels, sizeof labels, "state=\"%s\"", STATE_NAMES[i]);
        l->m_states[i] = metrics_gauge(o->metrics, "baton_router_listed_nodes", labels,
                                       "Nodes that the operator lists, by whether they answer.");
    }
    l->poll = loop_timer_start(o->loop, poll_ms, poll_ms, on_poll, l);
    return l;
}

void listed_free(struct listed *l)
{
    if (!l) return;
    l->freed = true;
    loop_timer_free(l->poll);
    http_client_free(l->client);
    LIST_FOREACH (w, &l->waiters, struct listed_waiter, link) mem_free(w);
    LIST_FOREACH (n, &l->nodes, struct listed_node, link) free_node(n);
    mem_free(l);
}
