/* node_role.c - changes this node's role while it runs: POST /cluster/v1/role (role_change.h).
 *
 *   asked ─ its view of the others is fresh ─▶ checked ─▶ published at once, and answered
 *                                                           │ the role settles: no credit is given
 *                                                           ▼ while a grant of a role before is
 *                                                             there, nor the other way around
 *
 * A node that becomes prefill looks once more before it answers, when the directory has its new
 * role: another one may have done the same, and with the role that it had it goes back if nobody
 * decodes any more. Nodes of several ranks and ranks of groups need not tell the others: a role
 * only says what other nodes place here. Thread: loop. */
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
    struct http_exchange *x; /* NULL: it has ended */
    struct role_ask ask;
    bool published;       /* it looks once more, also when nobody waits for the answer */
    enum node_role was;   /* before that */
    uint64_t n_snapshots; /* the view is fresh when as many have come */
    uint64_t end_ms;
    struct loop_timer *poll; /* NULL: it is answered */
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

static enum status change(struct node *n, const struct role_ask *ask, struct err *err)
{
    if (n->state != NODE_READY)
        return err_set(err, ERR_UNAVAILABLE, "the node %s is shutting down", n->name);
    if (n->role_call)
        return err_set(err, ERR_CONFLICT, "the role of %s is being changed; ask again in a second",
                       n->name);
    const struct role_facts facts = facts_of(n);
    TRY(role_check(&facts, ask, err));
    if (ask->role != n->o.role) set_role(n, ask->role);
    return OK;
}

static void reply(struct node *n, struct http_exchange *x, enum status st, enum node_role was,
                  const struct err *err)
{
    struct buf body = { 0 };
    role_answer_write(n->name, n->o.role, was, &body);
    if (st == OK) http_reply(x, 200, "application/json", NULL, buf_str(&body));
    else http_reply_error(x, status_http(st), NULL, "error", err->text);
    buf_release(&body);
}

static void answer(struct node *n, struct http_exchange *x, const struct role_ask *ask)
{
    const enum node_role was = n->o.role;
    struct err err = { 0 };
    const enum status st = change(n, ask, &err);
    reply(n, x, st, was, &err);
}

/* ---- the call of a node that becomes prefill ---- */

static void on_end(void *arg, bool gone)
{
    struct role_call *c = arg;
    (void)gone;
    c->x = NULL;
    if (c->published && c->poll) return;
    loop_timer_free(c->poll);
    mem_free(c);
}

static void end_call(struct role_call *c, enum status st, const struct err *err)
{
    if (c->node->role_call == c) c->node->role_call = NULL;
    loop_timer_free(c->poll);
    c->poll = NULL;
    if (c->x) reply(c->node, c->x, st, c->was, err); /* on_end follows */
    else mem_free(c);
}

/* Waits for the next snapshot; one on its way may be older. */
static void look(struct role_call *c)
{
    const struct view *v = scheduler_view(c->node->scheduler);
    c->n_snapshots = v->n_snapshots + (v->asking ? 2 : 1);
    c->end_ms = clock_ms() + VIEW_MS;
    scheduler_refresh(c->node->scheduler);
}

static void check_and_publish(struct role_call *c)
{
    struct node *n = c->node;
    struct err err = { 0 };
    c->was = n->o.role;
    const enum status st = change(n, &c->ask, &err);
    if (st != OK || c->was == c->ask.role) {
        end_call(c, st, &err);
        return;
    }
    c->published = true;
    n->role_call = c;
    look(c);
}

/* Of nodes that become prefill at once at least the last in the directory sees all the others. */
static void look_once_more(struct role_call *c)
{
    struct node *n = c->node;
    struct err err = { 0 };
    enum status st = OK;
    if (n->state == NODE_READY && !scheduler_sees_others(n->scheduler, n->id)) {
        set_role(n, c->was);
        const struct role_facts facts = facts_of(n);
        st = role_check(&facts, &c->ask, &err);
    }
    end_call(c, st, &err);
}

static void on_poll(void *arg)
{
    struct role_call *c = arg;
    const struct view *v = scheduler_view(c->node->scheduler);
    const bool is_fresh = v->n_snapshots >= c->n_snapshots &&
                          (!c->published || v->my_role == c->ask.role);
    if (!is_fresh && clock_ms() < c->end_ms && c->node->state == NODE_READY)
        scheduler_refresh(c->node->scheduler);
    else if (c->published) look_once_more(c);
    else check_and_publish(c);
}

/* Of two nodes that change within a second, the second must see what the first has become. */
static void answer_when_fresh(struct node *n, struct http_exchange *x, const struct role_ask *ask)
{
    struct role_call *c = MEM_NEW(struct role_call);
    *c = (struct role_call){ .node = n, .x = x, .ask = *ask };
    look(c);
    http_on_end(x, on_end, c);
    c->poll = loop_timer_start(n->loop, POLL_MS, POLL_MS, on_poll, c);
}

void node_role_stop(struct node *n)
{
    const struct err none = { 0 };
    stop_settling(n);
    if (n->role_call) end_call(n->role_call, OK, &none);
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
