/* listed.c - see listed.h. Thread: loop. */
#include "deploy/router/listed.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/directory/local.h"
#include "scheduler/directory/wire.h"
#include "shared/base/address/host_port.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/list.h"
#include "shared/base/log.h"
#include "shared/base/log/log_repeats.h"
#include "shared/base/mem.h"
#include "shared/net/http/http_client.h"

enum {
    POLL_MS = 700,
    ASK_MS = 2000,
    RECORD_ANSWER_MAX = 2 * RECORD_TEXT_MAX, /* its identity is text inside of text */
    WHY_MAX = ERR_TEXT_MAX
};

#define RECORD_PATH DIRECTORY_PATH "record"

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
    uint64_t node;        /* of its last record; 0: none */
    char why[WHY_MAX];    /* DOWN */
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

/* A node that started again has another number; the record of its past goes at once. */
static enum status take_record(struct listed_node *n, struct str text, struct err *err)
{
    struct listed *l = n->all;
    struct node_record r;
    char *room = mem_calloc(1, text.n + 1);
    enum status st = node_record_read(text, room, &r, err);
    if (st == OK) st = check_record(n, &r, err);
    if (st == OK) {
        if (n->node && n->node != r.node) directory_local_leave(l->o.directory, n->node);
        n->node = r.node;
        st = directory_local_publish(l->o.directory, &r);
        if (st != OK)
            (void)err_set(err, st, "the view is full: it has %d nodes", DIRECTORY_NODES_MAX);
        say_odd(n, &r);
    }
    mem_free(room);
    return st;
}

static enum status refusal(int http_status, struct str body, struct err *err)
{
    cJSON *doc = NULL;
    struct err unread;
    const char *why = NULL;
    enum status st = json_parse(body, false, &doc, &unread);
    if (st == OK && cJSON_IsString(json_member(doc, "error")))
        why = json_member(doc, "error")->valuestring;
    st = err_set(err, ERR_PEER_REFUSED, "%.300s (status %d)",
                 why ? why : "it gives no record: it is no node of this version", http_status);
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

static void on_answer(void *arg, enum status st, int http_status, struct str body)
{
    struct listed_node *n = arg;
    struct err err = { 0 };
    if (n->all->freed) { /* the client is being freed */
        if (n->removed) mem_free(n);
        return;
    }
    if (!n->removed) {
        if (st != OK) (void)err_set(&err, st, "it does not answer: %s", status_text(st));
        else
            st = http_status == 200 ? take_record(n, body, &err) : refusal(http_status, body, &err);
        set_state(n, st == OK ? LISTED_UP : LISTED_DOWN, st == OK ? "" : err.text);
    }
    tell_waiters(n); /* which may remove it */
    n->asking = false;
    if (n->removed) mem_free(n);
}

/* ---- questions ---- */

static void ask(struct listed_node *n)
{
    struct listed *l = n->all;
    char proof[DIRECTORY_PROOF_MAX], headers[DIRECTORY_PROOF_MAX + 32];
    if (n->asking) return;
    directory_prove(l->o.secret, "GET", STR(RECORD_PATH), STR(""), proof);
    snprintf(headers, sizeof headers, "Authorization: %s\r\n", proof);
    n->asking = http_client_request(l->client, "GET", n->at.host, n->at.port, RECORD_PATH,
                                    l->o.secret.n ? headers : NULL, STR(""), ASK_MS, on_answer,
                                    n) == OK;
    if (!n->asking) set_state(n, LISTED_DOWN, "it cannot be asked");
}

static void on_poll(void *arg)
{
    struct listed *l = arg;
    LIST_FOREACH (n, &l->nodes, struct listed_node, link) ask(n);
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
    ask(n);
    return OK;
}

bool listed_remove(struct listed *l, const struct node_at *node)
{
    struct listed_node *n = find(l, node);
    if (!n) return false;
    log_info("listed node removed", "at=%s role=%s", n->text, node_role_name(n->at.role));
    list_remove(&n->link);
    l->n--;
    if (n->node) directory_local_leave(l->o.directory, n->node);
    n->removed = true;
    if (!n->asking) {
        tell_waiters(n);
        mem_free(n);
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
    ask(n);
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
        .body_max = RECORD_ANSWER_MAX,
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
    LIST_FOREACH (n, &l->nodes, struct listed_node, link) mem_free(n);
    mem_free(l);
}
