/* scheduler.c - see scheduler.h: the backend, the dispatch of messages, and the timers that drive
 * requests. */
#include "scheduler/scheduler.h"

#include <stdio.h>
#include <string.h>

#include "scheduler/directory/local.h"
#include "scheduler/pressure/request_pressed.h"
#include "scheduler/request_attach.h"
#include "scheduler/request_messages.h"
#include "scheduler/scheduler_internal.h"
#include "shared/base/assert.h"
#include "shared/base/clock.h"
#include "shared/base/hash/hash.h"
#include "shared/base/log.h"
#include "shared/base/mem.h"

enum {
    TICK_MS = 25, /* for deadlines and pauses; messages drive everything else */
    RENEW_MS = 700,
    TROUBLE_MS = 1000
};

/* ---- timers ---- */

/* First those that have had their turn and were refused by a node, or moved; then those in line. */
static void place_waiting_requests(struct scheduler *s)
{
    const bool freed = s->entry.capacity_freed;
    s->entry.capacity_freed = false;
    request_place_waiting(&s->entry, freed);
    admission_place_line(&s->entry);
}

static void look_for_others(struct scheduler *s)
{
    if (scheduler_sees_others(s, s->entry.view.me.node)) s->t_others_ms = clock_ms();
}

static void on_line(void *arg);

/* A node will need the next of the line before the usual tick. */
static void wake_for_line(struct scheduler *s)
{
    uint32_t ms = admission_next_ms(&s->entry);
    if (!s->line && ms && ms < TICK_MS) s->line = loop_timer_start(s->o.loop, ms, 0, on_line, s);
}

static void on_tick(void *arg)
{
    struct scheduler *s = arg;
    uint32_t n_placing = 0;
    view_tick(&s->entry.view);
    if (s->o.listed) s->entry.listed = s->o.listed(s->o.arg);
    if (!s->draining && clock_ms() - s->entry.t_trouble_ms >= TROUBLE_MS)
        entry_update_trouble(&s->entry);
    admission_tick(&s->entry);
    place_waiting_requests(s);
    LIST_FOREACH (r, &s->entry.live, struct request, link) {
        n_placing += r->state == REQUEST_PLACING && !hedge_is_second(r);
        request_advance(&s->entry, r);
    }
    look_for_others(s);
    gauge_set(s->entry.metrics.live, entry_n_requests(&s->entry));
    gauge_set(s->entry.metrics.placing, n_placing);
    wake_for_line(s);
}

static void on_line(void *arg)
{
    struct scheduler *s = arg;
    loop_timer_free(s->line);
    s->line = NULL;
    if (s->entry.capacity_freed) place_waiting_requests(s);
    else admission_place_line(&s->entry); /* the tick looks for those that have had their turn */
    wake_for_line(s);
}

void scheduler_publish(struct scheduler *s)
{
    if (!s->o.describe || s->draining) return; /* a node that left must not come back */
    struct node_record me = { 0 };
    s->o.describe(s->o.arg, &me);
    view_set_me(&s->entry.view, &me);
    directory_publish(s->o.directory, &me);
}

void scheduler_refresh(struct scheduler *s) { view_refresh(&s->entry.view); }

static void on_wake(void *arg)
{
    struct scheduler *s = arg;
    loop_timer_free(s->wake);
    s->wake = NULL;
    on_tick(s);
}

/* Ticks in the next turn of the loop, since sink functions must run neither inside submit nor
 * inside cancel. */
static void wake(struct scheduler *s)
{
    if (!s->wake) s->wake = loop_timer_start(s->o.loop, 0, 0, on_wake, s);
}

static void tend_leaving_me(struct scheduler *s);

/* Nothing breaks, so it is a line when it begins, or is another one. */
static void look_for_difference(struct scheduler *s)
{
    char text[ERR_TEXT_MAX];
    const bool found = view_find_difference(&s->entry.view, text);
    const uint64_t difference = found ? hash_64(text, strlen(text), 0) : 0;
    if (found && difference != s->difference) log_warn("nodes differ", "why=\"%s\"", text);
    s->difference = difference;
}

static void on_fresh_view(void *arg)
{
    struct scheduler *s = arg;
    if (s->draining) tend_leaving_me(s);
    else look_for_difference(s);
    gauge_set(s->entry.metrics.nodes, (double)s->entry.view.n_nodes);
    admission_on_view(&s->entry.admission, &s->entry.view);
    LIST_FOREACH (r, &s->entry.live, struct request, link)
        if (r->state == REQUEST_PLACING) request_advance(&s->entry, r);
    request_pressed_look_again(&s->entry);
}

/* Requests that wait for capacity try again in the next turn of the loop. */
static void on_capacity(void *arg)
{
    struct scheduler *s = arg;
    s->entry.capacity_freed = true;
    if (s->tick) wake(s); /* NULL: stopped; late answers of the directory may still come */
}

static const char *name_of(const struct view *v, uint64_t node)
{
    const struct node_record *n = node ? view_find(v, node) : NULL;
    return n ? n->name : node ? "gone" : "none";
}

/* The pauses bound how often that is. */
static void on_breaker(void *arg, const struct breaker_entry *e)
{
    struct scheduler *s = arg;
    enum breaker_scope scope = breaker_scope_of(e->of);
    counter_add(s->entry.metrics.breaker[scope][e->state], 1);
    /* A router that ends has a link here, and nothing is placed on it. */
    if (!view_find(&s->entry.view, e->of.node)) return;
    log_info("breaker", "scope=%s node=%s partner=%s to=%s pauses=%u why=\"%s\"",
             breaker_scope_name(scope), name_of(&s->entry.view, e->of.node),
             name_of(&s->entry.view, e->of.partner), breaker_state_name(e->state), e->n_pauses,
             e->why);
}

static void on_renew(void *arg) { scheduler_publish(arg); }

/* ---- backend ---- */

/* Does a node that shuts down take requests, for others to compute? The others may be out of
 * sight for a moment (a failover of the directory, a cut): requests wait for them as elsewhere. */
static bool is_still_entry(const struct scheduler *s)
{
    return s->enters && s->t_others_ms && clock_ms() - s->t_others_ms <= s->entry.grace_ms;
}

/* What a client comes back for was admitted before, if a node has kept it; else it is asked when
 * that is known (admission_refuses_to_compute). */
static enum status may_come(struct scheduler *s, const struct gen_request *g,
                            struct gen_refusal *why)
{
    bool is_full = entry_n_requests(&s->entry) >= s->o.max_requests;
    *why = (struct gen_refusal){ 0 };
    if (s->draining && !is_still_entry(s))
        return err_set(&why->err, ERR_UNAVAILABLE,
                       "this node is shutting down; send the request to another node");
    if (!g->resume.returns) return admission_ask(&s->entry, g, s->o.max_requests, why);
    if (!is_full) return admission_ask_kept(&s->entry, g, why);
    return err_set(&why->err, ERR_FULL,
                   "this entry node holds as many requests as it may, %u; try again shortly",
                   s->o.max_requests);
}

static enum status backend_submit(void *self, const struct gen_request *g,
                                  const struct gen_sink *sink, uint64_t *id,
                                  struct gen_refusal *why)
{
    struct scheduler *s = self;
    TRY(may_come(s, g, why));
    struct request *r = request_create(&s->entry, request_fresh_id(&s->entry), g, sink);
    uint64_t latest = clock_ms() + (uint64_t)s->o.ttl_s * 1000;
    r->ends_by_client = r->deadline_ms && r->deadline_ms <= latest;
    if (!r->ends_by_client) r->deadline_ms = latest;
    admission_push(&s->entry, r);
    request_enter(&s->entry, r);
    if (g->admission.hedge_ms && r->state == REQUEST_PLACING) hedge_create(&s->entry, r);
    counter_add(s->entry.metrics.requests, 1);
    counter_add(s->entry.metrics.prompt_tokens, r->n_prompt);
    scheduler_metrics_begin(&s->entry.metrics, r);
    *id = r->id;
    wake(s);
    return OK;
}

static void backend_cancel(void *self, uint64_t id)
{
    struct scheduler *s = self;
    struct request *r = map_get(&s->entry.by_id, map_key_u64(&id));
    bool hedged = hedge_cancel(&s->entry, id);
    if (r) r->canceled = true;
    if (r || hedged) wake(s);
}

static void backend_stats(void *self, struct serve_backend_stats *out)
{
    struct scheduler *s = self;
    *out = (struct serve_backend_stats){ 0 };
    LIST_FOREACH (r, &s->entry.live, struct request, link) {
        if (hedge_is_second(r)) continue;
        if (r->state == REQUEST_PLACING || r->state == REQUEST_CREDIT) out->n_waiting++;
        else out->n_running++;
    }
    if (!s->draining) entry_update_trouble(&s->entry);
    bool known = s->entry.view.known;
    out->ready = !s->draining && known && !s->entry.trouble.blocks;
    snprintf(out->why, sizeof out->why, "%s",
             s->draining ? "this node is shutting down"
             : known     ? s->entry.trouble.text
                         : "the directory has not answered yet");
}

/* A node that is shutting down and takes no requests passes them on only while it has some of its
 * own to finish, so that clients who keep asking it do not keep it alive. */
static bool backend_is_full(void *self, uint32_t n_more)
{
    const struct scheduler *s = self;
    if (s->draining && !is_still_entry(s)) return s->entry.n_live > 0;
    return (uint64_t)entry_n_requests(&s->entry) + n_more >= s->o.max_requests;
}

static void backend_limits(void *self, uint32_t tenant, struct gen_limits *out)
{
    struct scheduler *s = self;
    admit_limits(s->entry.admission.admit, tenant, clock_ms(), out);
}

static void backend_nodes(void *self, struct buf *out)
{
    const struct scheduler *s = self;
    const struct view *v = &s->entry.view;
    buf_add_c(out, "[");
    for (size_t i = 0; i < v->n_nodes; i++) {
        if (i) buf_add_c(out, ",");
        node_record_show(&v->nodes[i], out);
    }
    buf_add_c(out, "]");
}

void scheduler_describe(struct scheduler *s, struct buf *json_members)
{
    const struct entry *e = &s->entry;
    uint64_t now = clock_ms();
    /* The nodes are listed beside it as they are now. */
    if (!s->draining) entry_update_trouble(&s->entry);
    buf_printf(json_members,
               "\"requests\":%llu,\"split_requests\":%llu,\"local_requests\":%llu,"
               "\"tokens_per_s\":%.1f,\"failures\":",
               (unsigned long long)counter_value(e->metrics.requests),
               (unsigned long long)e->metrics.n_split, (unsigned long long)e->metrics.n_one_node,
               recent_tokens_per_s(&e->recent, now));
    recent_write_failures(&e->recent, now, json_members);
    buf_add_c(json_members, ",\"trouble\":");
    trouble_write(&e->trouble, now, json_members);
    admission_describe(&s->entry, json_members);
}

struct serve_backend scheduler_backend(struct scheduler *s)
{
    return (struct serve_backend){
        .submit = backend_submit,
        .cancel = backend_cancel,
        .stats = backend_stats,
        .is_full = backend_is_full,
        .nodes = backend_nodes,
        .limits = backend_limits,
        .self = s,
    };
}

/* ---- messages ---- */

static void on_tokens(struct scheduler *s, const struct cluster_message *m)
{
    struct str rest = m->body;
    struct token_logprobs t;
    uint64_t id;
    uint32_t attempt, index;
    enum status st;
    while ((st = token_record_next(&rest, &id, &attempt, &index, &t)) == OK) {
        struct request *r = map_get(&s->entry.by_id, map_key_u64(&id));
        if (r) request_on_token(&s->entry, r, m->from, attempt, index, &t);
    }
    if (st != ERR_NOT_FOUND)
        log_warn("malformed tokens", "peer=%s st=%s", m->from_name, status_name(st));
}

bool scheduler_on_message(struct scheduler *s, const struct cluster_message *m)
{
    switch (m->type) {
    case FRAME_TOKENS: on_tokens(s, m); return true;
    case FRAME_CREDIT:
    case FRAME_GRANT:
    case FRAME_PREFILL_REPORT:
    case FRAME_PROMPT_LOGPROBS:
    case FRAME_FINISHED:
    case FRAME_ATTACHED:
    case FRAME_DETACHED:
    case FRAME_PREEMPTED:
    case FRAME_FAILED: {
        struct request *r = map_get(&s->entry.by_id, map_key_u64(&m->request));
        if (r) request_on_message(&s->entry, r, m);
        return true;
    }
    default: return false;
    }
}

void scheduler_on_lost(struct scheduler *s, uint64_t node, const char *why)
{
    view_suspect(&s->entry.view, node, why);
    view_refresh(&s->entry.view);
    LIST_FOREACH (r, &s->entry.live, struct request, link) {
        if (r->state == REQUEST_ATTACH) request_attach_on_lost(&s->entry, r, node);
        else if (r->decode.node == node)
            request_on_loss(&s->entry, r, LOSS_DECODE_NODE, ERR_PEER_LOST, node, why);
        else if (r->prefill.node == node)
            request_on_loss(&s->entry, r, LOSS_PREFILL_NODE, ERR_PEER_LOST, node, why);
    }
}

/* ---- life ---- */

struct scheduler *scheduler_create(const struct scheduler_options *o)
{
    struct scheduler *s = MEM_NEW(struct scheduler);
    struct view_events events = { on_fresh_view, on_capacity, s };
    s->o = *o;
    s->entry.cluster = o->cluster;
    s->entry.directory = o->directory;
    s->entry.ttl_s = o->ttl_s;
    s->entry.grace_ms = o->grace_ms;
    s->entry.max_queue_ms = o->max_queue_ms;
    s->entry.topic = o->topic;
    s->entry.join = o->join;
    list_init(&s->entry.live);
    list_init(&s->entry.orphans);
    scheduler_metrics_register(&s->entry.metrics, o->metrics);
    prefix_entry_register(&s->entry.prefix, o->metrics);
    s->entry.metrics.log_requests = o->log_requests;
    const struct admission_options admission = { .tenants = o->tenants,
                                                 .max_queue_ms = o->max_queue_ms,
                                                 .directory = o->directory,
                                                 .metrics = o->metrics };
    admission_start(&s->entry.admission, &admission);
    /* One that stops as soon as it has begun may not have seen them yet. */
    if (!directory_is_local(o->directory)) s->t_others_ms = clock_ms();
    s->tick = loop_timer_start(o->loop, TICK_MS, TICK_MS, on_tick, s);
    s->renew = loop_timer_start(o->loop, RENEW_MS, RENEW_MS, on_renew, s);
    s->entry.view.model = o->model;
    s->entry.view.text = o->text;
    snprintf(s->entry.view.me.model_name, sizeof s->entry.view.me.model_name, "%s",
             o->model_name ? o->model_name : "");
    s->entry.view.unsplit = o->unsplit;
    s->entry.view.breaker.on_change = on_breaker;
    s->entry.view.breaker.arg = s;
    scheduler_publish(s);
    s->entry.view.secret = o->secret;
    view_start(&s->entry.view, o->cluster, o->directory, &events);
    return s;
}

void scheduler_launcher_gone(struct scheduler *s, const char *what_it_means, bool held_view)
{
    s->entry.launcher_gone = what_it_means;
    s->entry.launcher_held_view = held_view;
    if (!s->draining) entry_update_trouble(&s->entry);
}

void scheduler_missing(struct scheduler *s, const char *why) { s->entry.missing = why; }

/* What runs here must be finished, so the node serves itself when nobody else is left. The
 * directory has no record of it any more. */
static void tend_leaving_me(struct scheduler *s)
{
    struct node_record me = s->entry.view.me;
    if (!me.node) return;
    me.draining = scheduler_sees_others(s, me.node);
    view_set_me(&s->entry.view, &me);
}

void scheduler_drain(struct scheduler *s, bool enters)
{
    s->draining = true;
    s->enters = enters;
    s->t_drain_ns = clock_ns();
    if (!s->o.describe) return;
    directory_leave(s->o.directory, s->entry.view.me.node);
    loop_timer_free(s->renew); /* a renewal would bring the record back */
    s->renew = NULL;
    tend_leaving_me(s);
}

uint32_t scheduler_n_old(const struct scheduler *s)
{
    uint32_t n = 0;
    LIST_FOREACH (r, &s->entry.live, struct request, link) n += r->t_accept <= s->t_drain_ns;
    return n;
}

uint32_t scheduler_n_live(const struct scheduler *s) { return s->entry.n_live; }

uint32_t scheduler_n_requests(const struct scheduler *s) { return entry_n_requests(&s->entry); }

bool scheduler_sees_others(const struct scheduler *s, uint64_t me)
{
    const struct view *v = &s->entry.view;
    for (size_t i = 0; i < v->n_nodes; i++)
        if (v->nodes[i].node != me && trouble_can_decode(v, &v->nodes[i])) return true;
    return false;
}

const struct view *scheduler_view(const struct scheduler *s) { return &s->entry.view; }

void scheduler_stop(struct scheduler *s)
{
    s->draining = true;
    s->entry.leaves = true;
    LIST_FOREACH (r, &s->entry.live, struct request, link)
        request_end(&s->entry, r, ERR_CANCELED, FINISH_NONE, -1, "the node is shutting down");
    loop_timer_free(s->tick);
    loop_timer_free(s->renew);
    loop_timer_free(s->wake);
    loop_timer_free(s->line);
    s->tick = s->renew = s->wake = s->line = NULL;
}

void scheduler_free(struct scheduler *s)
{
    if (!s) return;
    ASSERT(list_empty(&s->entry.live));
    LIST_FOREACH (r, &s->entry.orphans, struct request, link) request_free(r);
    map_release(&s->entry.by_id);
    map_release(&s->entry.hedges);
    view_release(&s->entry.view);
    admission_stop(&s->entry.admission);
    mem_free(s);
}
