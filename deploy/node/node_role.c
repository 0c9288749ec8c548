/* node_role.c - changes this node's role while it runs: POST /cluster/v1/role (role_change.h).
 *
 *   asked ─ its view of the others is fresh ─▶ checked ─▶ published at once, and answered
 *                                                           │ the role settles: no credit is given
 *                                                           ▼ while a grant of a role before is
 *                                                             there, nor the other way around
 *
 * Nodes of several ranks and ranks of groups need not tell the others: a role only says what other
 * nodes place here. Thread: loop. */
#include <stdio.h>

#include "deploy/node/node_internal.h"
#include "deploy/role/role_change.h"
#include "scheduler/request.h"
#include "shared/base/clock.h"
#include "shared/base/log.h"

enum {
    VIEW_MS = 1000, /* how long a fresh view is waited for; then the last one counts */
    POLL_MS = 20
};

struct role_call {
    struct node *node;
    struct http_exchange *x;
    struct role_ask ask;
    uint64_t n_snapshots; /* the view is fresh when as many have come */
    uint64_t end_ms;
    struct loop_timer *poll;
};

/* ---- the role settles ---- */

/* So no cycle of nodes that wait for each other's blocks goes through this one: of what waits by
 * two of its roles either nothing waits for its own blocks, or nothing here waits for those of
 * others (docs/recovery.md). True: it is settled. */
static bool tell_workers(struct node *n)
{
    const uint32_t number = request_role_number(n->o.role);
    prefill_set_role(n->prefill, number, true);
    const uint32_t n_credits = prefill_n_old_credits(n->prefill);
    decode_set_role(n->decode, number, n_credits > 0);
    const uint32_t n_grants = decode_n_old_grants(n->decode);
    prefill_set_role(n->prefill, number, n_grants > 0);
    return n_credits + n_grants == 0;
}

static void stop_settling(struct node *n)
{
    loop_timer_free(n->settle);
    n->settle = NULL;
}

static void on_settle(void *arg)
{
    struct node *n = arg;
    if (tell_workers(n)) stop_settling(n);
}

void node_role_start(struct node *n) { (void)tell_workers(n); }

void node_role_stop(struct node *n) { stop_settling(n); }

static void set_role(struct node *n, enum node_role role)
{
    const char *from = node_role_name(n->o.role), *to = node_role_name(role);
    char labels[32];
    n->o.role = role;
    (void)tell_workers(n);
    log_info("role changed", "from=%s to=%s granted=%u credited=%u", from, to,
             decode_n_old_grants(n->decode), prefill_n_old_credits(n->prefill));
    snprintf(labels, sizeof labels, "to=\"%s\"", to);
    counter_add(metrics_counter(n->metrics, "baton_role_changes_total", labels,
                                "Changes of this node's role while it ran."),
                1);
    if (!n->settle) n->settle = loop_timer_start(n->loop, 0, POLL_MS, on_settle, n);
    scheduler_publish(n->scheduler);
}

/* ---- the call ---- */

static struct role_facts facts_of(const struct node *n)
{
    return (struct role_facts){
        .name = n->name,
        .topic = n->o.topic,
        .role = n->o.role,
        .unsplit = n->o.unsplit,
        .exchanges_kv = n->kv_by[0] || n->kv_host,
        .is_seen = n->can_be_joined || node_is_listed(n),
        .shares_view = n->can_be_joined,
        .others_decode = scheduler_sees_others(n->scheduler, n->id),
    };
}

static enum status change(struct node *n, const struct role_ask *ask, struct buf *out,
                          struct err *err)
{
    const enum node_role was = n->o.role;
    if (n->state != NODE_READY)
        return err_set(err, ERR_UNAVAILABLE, "the node %s is shutting down", n->name);
    const struct role_facts facts = facts_of(n);
    TRY(role_check(&facts, ask, err));
    if (ask->role != was) set_role(n, ask->role);
    role_answer_write(n->name, ask->role, was, out);
    return OK;
}

static void answer(struct node *n, struct http_exchange *x, const struct role_ask *ask)
{
    struct buf body = { 0 };
    struct err err = { 0 };
    const enum status st = change(n, ask, &body, &err);
    if (st == OK) http_reply(x, 200, "application/json", NULL, buf_str(&body));
    else http_reply_error(x, status_http(st), NULL, "error", err.text);
    buf_release(&body);
}

static void on_end(void *arg, bool gone)
{
    struct role_call *c = arg;
    (void)gone;
    loop_timer_free(c->poll);
    mem_free(c);
}

static void on_poll(void *arg)
{
    struct role_call *c = arg;
    const struct role_ask ask = c->ask;
    const bool fresh = scheduler_view(c->node->scheduler)->n_snapshots >= c->n_snapshots;
    if (!fresh && clock_ms() < c->end_ms && c->node->state == NODE_READY) return;
    loop_timer_free(c->poll);
    c->poll = NULL;
    answer(c->node, c->x, &ask);
}

/* Of two nodes that change within a second, the second must see what the first has become. */
static void answer_when_fresh(struct node *n, struct http_exchange *x, const struct role_ask *ask)
{
    const struct view *v = scheduler_view(n->scheduler);
    struct role_call *c = MEM_NEW(struct role_call);
    *c = (struct role_call){
        .node = n,
        .x = x,
        .ask = *ask,
        .n_snapshots = v->n_snapshots + (v->asking ? 2 : 1), /* one on its way may be older */
        .end_ms = clock_ms() + VIEW_MS,
    };
    scheduler_refresh(n->scheduler);
    http_on_end(x, on_end, c);
    c->poll = loop_timer_start(n->loop, POLL_MS, POLL_MS, on_poll, c);
}

void node_role_answer(struct node *n, struct http_exchange *x)
{
    struct role_ask ask = { 0 };
    struct err err = { 0 };
    const enum status st = role_ask_read(http_body(x), &ask, &err);
    if (st != OK) http_reply_error(x, status_http(st), NULL, "error", err.text);
    else if (ask.role == ROLE_PREFILL && n->can_be_joined) answer_when_fresh(n, x, &ask);
    else answer(n, x, &ask);
}
